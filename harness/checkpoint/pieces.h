/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of rows of named tensors: what a rank keeps of the state, and how it finds that in safetensors files, each of
 * which may hold other rows of a tensor: shards of another rank layout, or the files of a Hugging Face model. */
#ifndef LEV_CHECKPOINT_PIECES_H
#define LEV_CHECKPOINT_PIECES_H

#include "common/comm.h"
#include "common/dtype.h"
#include "harness/checkpoint/safetensors.h"

/* One block of rows of a state tensor. */
typedef struct lev_state_piece {
  char name[128]; /* "<state>.<Hugging Face name>": LEV_STATE_MASTER "model.norm.weight" */
  lev_dtype dtype;
  int64_t rows, cols;
  int64_t first_row, full_rows; /* of this block in the whole tensor; rows of that */
  bool vector;                  /* shape is [rows] */
  bool optional;                /* keeps its values where no file has the tensor */
  void *data;                   /* [rows, cols], readable and writable by the host */
} lev_state_piece;

#define LEV_STATE_MASTER "master." /* names of weights in optimizer precision begin so */

size_t lev_piece_bytes(const lev_state_piece *piece);

/* Files to read pieces from, one after another. */
typedef struct lev_piece_files {
  const char *where; /* what they are together, for errors */
  void (*path)(const void *ctx, int file, char *out, size_t size);
  const void *ctx;
  int begin, end;   /* files begin .. end - 1 */
  size_t skip;      /* bytes that names of pieces have in front of those in the files */
  lev_fault *fault; /* nullable */
} lev_piece_files;

/* Fills every piece with its rows, wherever they lie in the files, converted where the dtype differs. What the files
 * hold besides is left. Errors: LEV_ERR_FORMAT naming a tensor of another shape, one whose rows are missing or in two
 * files; LEV_ERR_IO, LEV_ERR_NOMEM. Pieces may then be half filled. */
LEV_MUST_CHECK lev_status lev_pieces_read(const lev_piece_files *files, const lev_state_piece *pieces, int n);
/* The same on all ranks with the same files, of which no tensor may be left over whose name begins with `prefix`.
 * Collective. Errors, the same on every rank: also LEV_ERR_FORMAT naming a tensor that no rank took. */
LEV_MUST_CHECK lev_status lev_pieces_read_whole(const lev_piece_files *files, const char *prefix, lev_comm *world,
                                                const lev_state_piece *pieces, int n);

#endif
