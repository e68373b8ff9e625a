/* SPDX-License-Identifier: Apache-2.0 */
/* First weights of a run from files: a Hugging Face model, or a checkpoint of another run. */
#ifndef LEV_CHECKPOINT_INITIAL_H
#define LEV_CHECKPOINT_INITIAL_H

#include "harness/checkpoint/pieces.h"

/* Fills those pieces that are masters (LEV_STATE_MASTER) from `path`, the others are left: a folder with
 * model.safetensors.index.json or model.safetensors, one safetensors file, or the step-N of a run. Names are those of
 * Hugging Face, types f64, f32 or bf16. The files must hold the tensors of the whole model and no others. Collective.
 * Errors, the same on every rank: LEV_ERR_IO, LEV_ERR_FORMAT naming the file and the tensor, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_initial_weights(const char *path, lev_comm *world, lev_fault *fault,
                                              const lev_state_piece *pieces, int n);

#endif
