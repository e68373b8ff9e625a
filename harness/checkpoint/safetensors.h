/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors files: u64 header length, JSON header, packed data. The header is padded with spaces to a multiple of 64
 * bytes, so the data starts aligned; readers do not rely on it. */
#ifndef LEV_CHECKPOINT_SAFETENSORS_H
#define LEV_CHECKPOINT_SAFETENSORS_H

#include <stdint.h>

#include "common/dtype.h"
#include "common/fault.h"
#include "harness/checkpoint/file.h"

typedef struct lev_safetensor {
  char name[128];
  lev_dtype dtype;
  int n_dims; /* 0 .. 2 */
  int64_t dims[2];
  int64_t offset[2];   /* of this block in a sharded tensor; written when `sharded`, read where it is there, else 0 */
  uint64_t begin, end; /* bytes from the start of the data (set by the reader and by lev_safetensors_begin) */
} lev_safetensor;

/* Writes the header for `n` tensors whose data will follow in this order, packed. `sharded` adds the block offsets as
 * metadata. */
LEV_MUST_CHECK lev_status lev_safetensors_begin(lev_file *file, lev_safetensor *tensors, int n, bool sharded);

/* A file being read; mapped read-only. */
typedef struct lev_safetensors {
  unsigned char *map;
  uint64_t bytes;
  const unsigned char *data;
  lev_safetensor *tensors; /* sorted by name */
  int n_tensors;
} lev_safetensors;

/* Opens and checks: header within the file, known dtypes, sizes = product of dims, data tiled without holes or
 * overlaps, no name twice. Errors: LEV_ERR_FORMAT naming the tensor, LEV_ERR_IO, LEV_ERR_NOMEM. Tensors of more than 2
 * dims are LEV_ERR_UNSUPPORTED. */
LEV_MUST_CHECK lev_status lev_safetensors_open(const char *path, lev_fault *fault, lev_safetensors *out);
void lev_safetensors_close(lev_safetensors *file);
/* NULL if absent. */
const lev_safetensor *lev_safetensors_find(const lev_safetensors *file, const char *name);

#endif
