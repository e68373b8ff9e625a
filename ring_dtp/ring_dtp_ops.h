/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of ring_dtp and their arguments (private). T is the storage type `dtype`, A its arithmetic type.
 *
 * A token's softmax state takes three scalars of type A in memory (rdtp_row in ring_dtp_cpu.inc): while strips are
 * folded (m, z, y); after `finish` (m, grad_scale / z, label), which is what the residual needs. */
#ifndef LEV_RING_DTP_RING_DTP_OPS_H
#define LEV_RING_DTP_RING_DTP_OPS_H

#include "common/device.h"
#include "common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RDTP_STATE 3 /* scalars of type A per token */

/* Folds a logits tile into the state of its rows: m' = max(m, max Y), z' = e^(m-m') z + sum e^(Y-m'), y = Y[label]. */
typedef struct rdtp_fold_args {
  lev_dtype dtype;
  const void *tile; /* [rows, ld] A, first `cols` used */
  int64_t ld, rows, cols;
  int64_t begin;         /* vocabulary index of column 0 */
  const int32_t *labels; /* [rows] */
  void *state;           /* [rows,3] A */
  bool first;            /* the state is overwritten, not read */
} rdtp_fold_args;
extern const lev_kernel rdtp_fold_kernel;

/* state = incoming (+) state, for partial states over disjoint columns. */
typedef struct rdtp_merge_args {
  lev_dtype dtype;
  void *state;          /* [rows,3] A */
  const void *incoming; /* [rows,3] A */
  int64_t rows;
} rdtp_merge_args;
extern const lev_kernel rdtp_merge_kernel;

/* state = parts[0] (+) parts[1] (+) ... in this order. */
typedef struct rdtp_combine_args {
  lev_dtype dtype;
  void *state;       /* [rows,3] A */
  const void *parts; /* [n_parts, rows, 3] A */
  int64_t n_parts, rows;
} rdtp_combine_args;
extern const lev_kernel rdtp_combine_kernel;

/* Adds NLL, valid and bad labels of rows [loss_begin, loss_end) to sums and turns every state into the form the
 * residual needs (record NULL: loss only; record may be `state`). */
typedef struct rdtp_finish_args {
  lev_dtype dtype;
  const int32_t *labels; /* [rows] */
  const void *state;     /* [rows,3] A */
  void *record;          /* [rows,3] A, nullable */
  int64_t rows, vocab, loss_begin, loss_end;
  double scale;
  double *sums; /* [RDTP_SUMS] */
} rdtp_finish_args;
extern const lev_kernel rdtp_finish_kernel;

/* In place: tile = (softmax - onehot) * scale, stored as T from the start of each row (row pitch stays ld scalars of
 * A). Rows without a valid label become zero. */
typedef struct rdtp_residual_args {
  lev_dtype dtype;
  void *tile;
  int64_t ld, rows, cols;
  int64_t begin;
  const void *record; /* [rows,3] A */
  double scale;
} rdtp_residual_args;
extern const lev_kernel rdtp_residual_kernel;

/* dst += src, both A. */
typedef struct rdtp_add_args {
  lev_dtype dtype;
  void *dst;
  const void *src;
  int64_t count;
} rdtp_add_args;
extern const lev_kernel rdtp_add_kernel;

/* dst (T) = src (A), rounded once. */
typedef struct rdtp_store_args {
  lev_dtype dtype;
  void *dst;
  const void *src;
  int64_t count;
} rdtp_store_args;
extern const lev_kernel rdtp_store_kernel;

/* CUDA launchers of the kernels above. */
lev_status rdtp_fold_cuda(const void *args, void *cuda_stream);
lev_status rdtp_merge_cuda(const void *args, void *cuda_stream);
lev_status rdtp_combine_cuda(const void *args, void *cuda_stream);
lev_status rdtp_finish_cuda(const void *args, void *cuda_stream);
lev_status rdtp_residual_cuda(const void *args, void *cuda_stream);
lev_status rdtp_add_cuda(const void *args, void *cuda_stream);
lev_status rdtp_store_cuda(const void *args, void *cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
