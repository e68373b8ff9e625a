/* SPDX-License-Identifier: Apache-2.0 */
/* Row-major matrix products on a stream: OpenBLAS on cpu (bf16 operands are widened panel by panel into the stream's
 * workspace), cuBLASLt on cuda, nothing on dry. Accumulation is f64 for f64 operands, else f32. */
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
  lev_dtype ab_type; /* of A and B */
  lev_dtype c_type;  /* ab_type or its arithmetic type */
  double alpha, beta;/* beta = 0 never reads C (NaN there is harmless) */
  const void *add;   /* what beta multiplies, laid out as C; NULL = C itself. No overlap with C */
} lev_gemm_args;

/* Enqueues the product. m, n may be 0 (no-op); k = 0 scales C by beta. Deterministic for one machine and one shape.
 * Errors: LEV_ERR_ARG (types, leading dimensions, sizes past the library's int), LEV_ERR_CAPACITY (no workspace). */
LEV_MUST_CHECK lev_status lev_gemm(lev_stream *stream, const lev_gemm_args *args);

/* The same product, run at once on the calling thread: for use inside cpu kernels (blocked attention and the like).
 * f64 and f32 only. */
void lev_gemm_host(const lev_gemm_args *args);

#ifdef __cplusplus
}
#endif
#endif
