/* SPDX-License-Identifier: Apache-2.0 */
/* Row-major matrix products on a stream: OpenBLAS on cpu (bf16 operands are widened panel by panel into the stream's
 * workspace), cuBLASLt and a kernel of our own for groups on cuda, nothing on dry. Accumulation is f64 for f64
 * operands, else f32. */
#ifndef LEV_COMMON_GEMM_H
#define LEV_COMMON_GEMM_H

#include <stdbool.h>

#include "common/device.h"
#include "common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Workspace that makes every product possible on a stream of this backend (tag "library"). */
size_t lev_gemm_workspace_bytes(lev_backend backend, lev_dtype dtype);

/* C[M,N] = alpha * op(A)[M,K] * op(B)[K,N] + beta * C. Row-major; ld* in elements, >= the stored row length. */
typedef struct lev_gemm_args {
  int64_t m, n, k;
  bool trans_a, trans_b; /* A stored [K,M] / B stored [N,K] when set */
  const void *a, *b;
  void *c;
  int64_t lda, ldb, ldc;
  lev_dtype ab_type;  /* of A and B */
  lev_dtype c_type;   /* ab_type or its arithmetic type */
  double alpha, beta; /* beta = 0 never reads C (NaN there is harmless) */
  const void *add;    /* what beta multiplies, laid out as C; NULL = C itself. No overlap with C */
} lev_gemm_args;

/* Enqueues the product. m, n may be 0 (no-op); k = 0 scales C by beta. Deterministic for one machine and one shape.
 * Errors: LEV_ERR_ARG (types, leading dimensions, sizes past the library's int), LEV_ERR_CAPACITY (no workspace). */
LEV_MUST_CHECK lev_status lev_gemm(lev_stream *stream, const lev_gemm_args *args);

/* Products of many groups at once, each with a range of rows of common arrays and a matrix of its own: experts.
 * Group g has the `rows[g]` rows from `first[g]` on. With RAGGED_ROWS (y = x w, forward and gradient of the input) they
 * are rows of A and of C, and each[g] is its B:       C[rows, n] = alpha * A[rows, k] * op(B_g)[k, n] + beta * C.
 * With RAGGED_DEPTH (gradient of w) they are rows of A, stored [rows, m], and of B, and each[g] is its C:
 *                                             C_g[m, n] = alpha * A[rows, m]^T * B[rows, n] + beta * C_g. */
typedef enum lev_ragged { LEV_RAGGED_ROWS, LEV_RAGGED_DEPTH } lev_ragged;

typedef struct lev_gemm_grouped_args {
  lev_gemm_args gemm; /* of every group; m (by rows) or k (by depth) and b or c are ignored */
  lev_ragged ragged;
  int64_t groups;
  const int64_t *first, *rows; /* host [groups]: any number of rows, 0 too; by rows, no two ranges overlap */
  void *const *each;           /* host [groups]: B_g, not written, or C_g, no two the same */
} lev_gemm_grouped_args;

/* Enqueues all of them; the host arrays are read during the call. A group without rows leaves C alone by rows, and
 * scales C_g by beta by depth (zeros it with beta = 0). Rows outside all groups are not written, and what they hold,
 * NaN too, reaches no result. The same bits as one lev_gemm per group on cpu; on cuda deterministic too, whatever the
 * other groups hold.
 *
 * On cuda one launch per 64 groups with rows computes bf16 operands into bf16 (beta = 0) or f32 (beta = 0 or 1) if
 * alpha = 1, n and k (m by depth) are multiples of 8 and every matrix starts on 16 bytes and has rows of whole 16
 * bytes. Else every group is a product of its own. Errors: as lev_gemm; LEV_ERR_ARG (NULL arrays, negative rows,
 * trans_a by rows, no trans_a or trans_b by depth, `add`). */
LEV_MUST_CHECK lev_status lev_gemm_grouped(lev_stream *stream, const lev_gemm_grouped_args *args);

/* The same product, run at once on the calling thread: for use inside cpu kernels (blocked attention and the like).
 * f64 and f32 only. */
void lev_gemm_host(const lev_gemm_args *args);

#ifdef __cplusplus
}
#endif
#endif
