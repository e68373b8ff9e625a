/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer state of a rank as a list of named blocks, for checkpoints. */
#ifndef LEV_TRAIN_STATE_H
#define LEV_TRAIN_STATE_H

#include "harness/checkpoint/checkpoint.h"
#include "harness/train/rank.h"

/* Lists the blocks (lev_free the array); waits for the compute stream. Errors: LEV_ERR_NOMEM, LEV_ERR_UNSUPPORTED
 * (state in device memory that the host cannot read: plain optimizer schedules off the cpu backend). */
LEV_MUST_CHECK lev_status lev_state_pieces(lev_rank *rank, lev_state_piece **out, int *n);
/* Weights from the masters, after a checkpoint was read into the blocks. */
LEV_MUST_CHECK lev_status lev_state_publish(lev_rank *rank);
/* Digest (33 bytes) of what must agree for a resume to continue the same run: model, kind of optimizer, seed, context,
 * batch and packing. Neither the rank layout nor what a run may change on its way: rates, other coefficients, data. */
void lev_state_digest(const lev_rank *rank, char *hex);
/* The rank layout in words, of at most `size` bytes. */
void lev_state_layout(const lev_rank *rank, char *text, size_t size);

#endif
