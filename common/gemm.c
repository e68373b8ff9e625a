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

/* ---- groups ---- */

const lev_kernel lev_gemm_grouped_kernel = {.name = "gemm_grouped", .cuda = LEV_CUDA(lev_gemm_grouped_cuda)};

static lev_gemm_args group_args(const lev_gemm_grouped_args *a, int64_t g) {
  lev_gemm_args one = a->gemm;
  size_t ab = lev_dtype_bytes(one.ab_type), c = lev_dtype_bytes(one.c_type);
  if (one.a) one.a = (const char *)one.a + (size_t)(a->first[g] * one.lda) * ab;
  if (a->ragged == LEV_RAGGED_ROWS) {
    one.m = a->rows[g], one.b = a->each[g];
    if (one.c) one.c = (char *)one.c + (size_t)(a->first[g] * one.ldc) * c;
  } else {
    one.k = a->rows[g], one.c = a->each[g];
    if (one.b) one.b = (const char *)one.b + (size_t)(a->first[g] * one.ldb) * ab;
  }
  return one;
}

static lev_status check_groups(const lev_gemm_grouped_args *a) {
  bool depth = a->ragged == LEV_RAGGED_DEPTH;
  if (a->groups < 0 || (a->groups > 0 && (!a->first || !a->rows || !a->each)))
    return lev_fail(LEV_ERR_ARG, "grouped gemm: %lld groups, or NULL arrays of them", (long long)a->groups);
  if (a->gemm.trans_a != depth || (depth && a->gemm.trans_b))
    return lev_fail(LEV_ERR_ARG, "grouped gemm by %s: trans_a must be %s%s", depth ? "depth" : "rows",
                    depth ? "set" : "unset", depth ? " and trans_b unset" : "");
  if (a->gemm.add) return lev_fail(LEV_ERR_ARG, "grouped gemm: `add` is for single products");
  for (int64_t g = 0; g < a->groups; ++g) {
    if (a->first[g] < 0 || a->rows[g] < 0)
      return lev_fail(LEV_ERR_ARG, "grouped gemm: group %lld has %lld rows from row %lld on", (long long)g,
                      (long long)a->rows[g], (long long)a->first[g]);
    lev_gemm_args one = group_args(a, g);
    LEV_TRY(check(&one));
  }
  return LEV_OK;
}

static bool whole_16(const void *data, int64_t ld, lev_dtype type) {
  return (uintptr_t)data % 16 == 0 && (size_t)ld * lev_dtype_bytes(type) % 16 == 0;
}

/* Whether the cuda kernel for groups can compute them: see lev_gemm_grouped. */
static bool one_launch(const lev_gemm_grouped_args *a) {
  const lev_gemm_args *g = &a->gemm;
  bool depth = a->ragged == LEV_RAGGED_DEPTH, any = false;
  int64_t inner = depth ? g->m : g->k;
  if (g->ab_type != LEV_BF16 || g->alpha != 1 || g->n <= 0 || inner <= 0 || g->n % 8 != 0 || inner % 8 != 0)
    return false;
  if (g->c_type == LEV_BF16 ? g->beta != 0 : g->beta != 0 && g->beta != 1) return false;
  if (!whole_16(g->a, g->lda, LEV_BF16)) return false;
  if (!whole_16(depth ? g->b : NULL, g->ldb, LEV_BF16) || !whole_16(depth ? NULL : g->c, g->ldc, g->c_type))
    return false;
  for (int64_t i = 0; i < a->groups; ++i) {
    if ((uintptr_t)a->each[i] % 16 != 0 || a->first[i] + a->rows[i] > INT_MAX - 4096) return false;
    any = any || a->rows[i] > 0;
  }
  return any;
}

lev_status lev_gemm_grouped(lev_stream *stream, const lev_gemm_grouped_args *args) {
  LEV_TRY(check_groups(args));
  if (lev_device_backend(lev_stream_device(stream)) == LEV_BACKEND_CUDA && one_launch(args)) {
    lev_gemm_grouped_launch launch = {args};
    return LEV_LAUNCH(stream, &lev_gemm_grouped_kernel, launch);
  }
  for (int64_t g = 0; g < args->groups; ++g) {
    lev_gemm_args one = group_args(args, g);
    LEV_TRY(lev_gemm(stream, &one));
  }
  return LEV_OK;
}
