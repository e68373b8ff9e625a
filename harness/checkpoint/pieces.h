/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of rows of named tensors: what a rank keeps of the state, and how it finds that in safetensors files, each of
 * which may hold other rows of a tensor: shards of another rank layout, or the files of a Hugging Face model. */
#ifndef LEV_CHECKPOINT_PIECES_H
#define LEV_CHECKPOINT_PIECES_H

#include "common/dtype.h"
#include "harness/checkpoint/safetensors.h"

/* One block of rows of a state tensor. */
typedef struct lev_state_piece {
  char name[128]; /* "<state>.<Hugging Face name>": LEV_STATE_MASTER "model.norm.weight" */
  lev_dtype dtype;
  int64_t rows, cols;
  int64_t first_row, full_rows; /* of this block in the whole tensor; rows of that */
  bool vector;                  /* shape is [rows] */
  void *data;                   /* [rows, cols], readable and writable by the host */
} lev_state_piece;

#define LEV_STATE_MASTER "master." /* names of weights in optimizer precision begin so */

size_t lev_piece_bytes(const lev_state_piece *piece);

/* Copies the rows of `pieces` that `file` (opened from `path`) holds, converted where the dtype differs, and adds their
 * number to filled[i]. `skip`: bytes that the names of pieces have in front of those in the file. used (nullable,
 * [file->n_tensors]): 1 where a tensor gave rows. Errors: LEV_ERR_FORMAT naming a tensor of another shape, of more rows
 * than full_rows, or one whose rows were already given. */
LEV_MUST_CHECK lev_status lev_pieces_fill(const lev_safetensors *file, const char *path, size_t skip,
                                          const lev_state_piece *pieces, int n, int64_t *filled, unsigned char *used);
/* LEV_OK where every piece has all its rows, else LEV_ERR_FORMAT naming the first that has not; `where` is what was
 * read. */
LEV_MUST_CHECK lev_status lev_pieces_complete(const char *where, const lev_state_piece *pieces, int n,
                                              const int64_t *filled);

#endif
