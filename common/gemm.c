/* SPDX-License-Identifier: Apache-2.0 */
#include "common/gemm.h"

#include <limits.h>

#include "common/dims.h"
#include "common/gemm_ops.h"

/* cuBLASLt picks faster kernels when it may use this much (NVIDIA's recommendation for Hopper). */
#define CUDA_WORKSPACE ((size_t)32 << 20)

/* The dry backend stands for a cpu run unless the planner asks for another backend by name. */
size_t lev_gemm_workspace_bytes(lev_backend backend, lev_dtype dtype) {
  return backend == LEV_BACKEND_CUDA ? CUDA_WORKSPACE : lev_gemm_cpu_workspace(dtype);
}

static lev_status check_matrix(const char *name, const void *data, int64_t rows, int64_t cols, int64_t ld) {
  if (ld < cols || ld > INT_MAX)
    return lev_fail(LEV_ERR_ARG, "gemm: leading dimension %lld of %s stored [%lld, %lld]; %lld to %d are possible",
                    (long long)ld, name, (long long)rows, (long long)cols, (long long)cols, INT_MAX);
  if (!data && rows > 0 && cols > 0)
    return lev_fail(LEV_ERR_ARG, "gemm: %s [%lld, %lld] is NULL", name, (long long)rows, (long long)cols);
  return LEV_OK;
}

static lev_status check(const lev_gemm_args *g) {
  if (g->m < 0 || g->n < 0 || g->k < 0 || g->m > INT_MAX || g->n > INT_MAX || g->k > INT_MAX)
    return lev_fail(LEV_ERR_ARG, "gemm of m, n, k = %lld, %lld, %lld; each must be 0 to %d", (long long)g->m,
                    (long long)g->n, (long long)g->k, INT_MAX);
  if (g->ab_type != LEV_F64 && g->ab_type != LEV_F32 && g->ab_type != LEV_BF16)
    return lev_fail(LEV_ERR_ARG, "gemm of %s operands; f64, f32 and bf16 exist", lev_dtype_name(g->ab_type));
  if (g->c_type != g->ab_type && g->c_type != lev_dtype_arith(g->ab_type))
    return lev_fail(LEV_ERR_ARG, "gemm of %s operands into %s; %s or %s is possible", lev_dtype_name(g->ab_type),
                    lev_dtype_name(g->c_type), lev_dtype_name(g->ab_type), lev_dtype_name(lev_dtype_arith(g->ab_type)));
  if (g->m == 0 || g->n == 0) return LEV_OK;
  if (g->k > 0) {
    LEV_TRY(check_matrix("A", g->a, g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k, g->lda));
    LEV_TRY(check_matrix("B", g->b, g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n, g->ldb));
  }
  LEV_TRY(check_matrix("C", g->c, g->m, g->n, g->ldc));
  uintptr_t to = (uintptr_t)g->c, from = (uintptr_t)g->add;
  size_t bytes = lev_bytes(g->m, g->ldc, lev_dtype_bytes(g->c_type));
  if (g->add && from < to + bytes && to < from + bytes)
    return lev_fail(LEV_ERR_ARG, "gemm: the matrix that is added overlaps C [%lld, %lld]", (long long)g->m,
                    (long long)g->n);
  return LEV_OK;
}

lev_status lev_gemm(lev_stream *stream, const lev_gemm_args *args) {
  LEV_TRY(check(args));
  lev_gemm_launch launch = {.gemm = *args};
  launch.workspace = lev_stream_workspace(stream, &launch.workspace_bytes);
  lev_backend backend = lev_device_backend(lev_stream_device(stream));
  size_t needed = lev_gemm_workspace_bytes(backend, args->ab_type);
  /* cuBLASLt can do without; the cpu side cannot. */
  if (backend != LEV_BACKEND_CUDA && launch.workspace_bytes < needed)
    return lev_fail(LEV_ERR_CAPACITY, "gemm of %s on stream %s needs a workspace of %zu bytes, it has %zu",
                    lev_dtype_name(args->ab_type), lev_stream_name(stream), needed, launch.workspace_bytes);
  if (args->m == 0 || args->n == 0) return LEV_OK;
  return LEV_LAUNCH(stream, &lev_gemm_kernel, launch);
}
