/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of a checkpoint as a Hugging Face model: safetensors files of whole tensors. */
#ifndef LEV_CHECKPOINT_EXPORT_H
#define LEV_CHECKPOINT_EXPORT_H

#include "common/dtype.h"
#include "common/fault.h"

#define LEV_EXPORT_FILE_BYTES ((size_t)5000000000) /* most bytes of a file, if a single tensor is not larger */

/* What was written. */
typedef struct lev_exported {
  int64_t tensors, parameters;
  int files;
} lev_exported;

/* Writes the masters of the checkpoint `from` (step-N, or the newest in a folder of such) into the new `folder`:
 * model.safetensors, or model-00001-of-0000n.safetensors of at most `file_bytes` each and their index, rounded once to
 * `dtype` (f64, f32, bf16; selection biases stay as they are). `folder` appears when it is whole; config.json and the
 * tokenizer are not written. Errors: LEV_ERR_ARG (`folder` exists), those of lev_checkpoint_find, LEV_ERR_FORMAT (rows
 * of a tensor are missing), LEV_ERR_IO, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_checkpoint_export(const char *from, const char *folder, lev_dtype dtype,
                                                size_t file_bytes, lev_fault *fault, lev_exported *out);

#endif
