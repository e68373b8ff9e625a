/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the sharded embedding (private to embed.c). */
#ifndef LEV_HARNESS_MODEL_EMBED_OPS_H
#define LEV_HARNESS_MODEL_EMBED_OPS_H

#include "common/device.h"
#include "common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rows[i] = w[ids[i] - begin] where this shard holds the id, else 0. */
typedef struct embed_take_args {
  lev_dtype dtype;
  const int32_t *ids; /* [count] */
  int64_t count, hidden;
  int64_t begin, shard_rows; /* vocabulary index of w's first row, rows of w */
  const void *w;             /* [shard_rows,H] T */
  void *rows;                /* [count,H] T */
} embed_take_args;
extern const lev_kernel embed_take_kernel;

/* dw[ids[i] - begin] += rows[i] for i = 0, 1, ... in this order, where this shard holds the id. */
typedef struct embed_add_args {
  lev_dtype dtype;
  const int32_t *ids;
  int64_t count, hidden;
  int64_t begin, shard_rows;
  const void *rows; /* [count,H] T */
  void *dw;         /* [shard_rows,H] A */
} embed_add_args;
extern const lev_kernel embed_add_kernel;

#ifdef LEV_HAVE_CUDA
lev_status embed_take_cuda(const void *args, void *stream);
lev_status embed_add_cuda(const void *args, void *stream);
#endif

#ifdef __cplusplus
}
#endif

#endif
