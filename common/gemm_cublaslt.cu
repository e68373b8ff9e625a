/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products through cuBLASLt. The library is column-major: a row-major C = A B is the column-major C' = B' A', so
 * the operands change places and nothing is transposed in memory.
 *
 * One handle per GPU, made at the first product there, shared by all ranks. The library's choice of algorithm for a
 * shape is kept in a table of fixed size, so that every later product of that shape runs the same algorithm (the same
 * bits) and costs the host a few microseconds. Beyond the handle nothing is allocated: descriptors live on the stack,
 * the workspace is the stream's own. */
#include <cstdint>
#include <cstring>
#include <cublasLt.h>
#include <pthread.h>

#include "common/cuda.cuh"
#include "common/gemm_ops.h"

namespace {

constexpr int kDevices = 64;
constexpr uint64_t kChoices = 1024; /* shapes remembered per process */
constexpr uint64_t kWays = 8;       /* places a shape may take; if all are taken it displaces the first */

/* What the choice of an algorithm depends on. Compared as bytes: no padding. */
struct shape_key {
  int64_t m, n, k, lda, ldb, ldc, workspace;
  int32_t device, trans, ab_type, c_type, align_a, align_b, align_c, accumulate;
};
static_assert(sizeof(shape_key) == 7 * 8 + 8 * 4, "padding");

struct choice {
  bool taken;
  shape_key key;
  cublasLtMatmulAlgo_t algo;
};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
cublasLtHandle_t handles[kDevices];
choice choices[kChoices];

lev_status library_fail(cublasStatus_t status, const char *what) {
  return lev_fail(LEV_ERR_DEVICE, "%s: %s", what, cublasLtGetStatusString(status));
}

#define LT_TRY(call)                                                                                                   \
  do {                                                                                                                 \
    cublasStatus_t status_ = (call);                                                                                   \
    if (status_ != CUBLAS_STATUS_SUCCESS) return library_fail(status_, #call);                                         \
  } while (0)

cudaDataType_t data_type(lev_dtype t) {
  return t == LEV_F64 ? CUDA_R_64F : t == LEV_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

/* Largest power of two up to 256 that divides the address: what the library's vector loads may rely on. */
int32_t alignment(const void *p) {
  uintptr_t bits = (uintptr_t)p | 256;
  return (int32_t)(bits & (~bits + 1));
}

struct matmul {
  cublasLtMatmulDescOpaque_t op;
  cublasLtMatrixLayoutOpaque_t first, second, out; /* the library's A, B and C */
};

/* A matrix stored row-major [rows, cols] is column-major [cols, rows]. */
lev_status layout(cublasLtMatrixLayoutOpaque_t *to, lev_dtype type, int64_t rows, int64_t cols, int64_t ld) {
  LT_TRY(cublasLtMatrixLayoutInit(to, data_type(type), (uint64_t)cols, (uint64_t)rows, ld));
  return LEV_OK;
}

/* f32 products are f32 throughout: TF32 is another compute type. */
lev_status describe(const lev_gemm_args *g, matmul *d) {
  bool f64 = g->ab_type == LEV_F64;
  cublasOperation_t first = g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  LT_TRY(cublasLtMatmulDescInit(&d->op, f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, f64 ? CUDA_R_64F : CUDA_R_32F));
  LT_TRY(cublasLtMatmulDescSetAttribute(&d->op, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
  LT_TRY(cublasLtMatmulDescSetAttribute(&d->op, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
  LEV_TRY(layout(&d->first, g->ab_type, g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n, g->ldb));
  LEV_TRY(layout(&d->second, g->ab_type, g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k, g->lda));
  return layout(&d->out, g->c_type, g->m, g->n, g->ldc);
}

lev_status handle_of(int device, cublasLtHandle_t *out) {
  if (device >= kDevices) return lev_fail(LEV_ERR_UNSUPPORTED, "gemm on GPU %d; 0 to %d exist", device, kDevices - 1);
  if (!handles[device]) LT_TRY(cublasLtCreate(&handles[device]));
  *out = handles[device];
  return LEV_OK;
}

shape_key key_of(const lev_gemm_launch *launch, int device) {
  const lev_gemm_args *g = &launch->gemm;
  shape_key key;
  key.m = g->m, key.n = g->n, key.k = g->k;
  key.lda = g->lda, key.ldb = g->ldb, key.ldc = g->ldc;
  key.workspace = (int64_t)launch->workspace_bytes;
  key.device = device, key.trans = g->trans_a + 2 * g->trans_b;
  key.ab_type = g->ab_type, key.c_type = g->c_type;
  key.align_a = alignment(g->a), key.align_b = alignment(g->b);
  key.align_c = alignment(g->c);
  if (g->add && alignment(g->add) < key.align_c) key.align_c = alignment(g->add);
  key.accumulate = g->beta == 0 ? 0 : g->add ? 2 : 1;
  return key;
}

lev_status ask_library(cublasLtHandle_t handle, matmul *d, const shape_key *key, cublasLtMatmulAlgo_t *out) {
  cublasLtMatmulPreferenceOpaque_t wish;
  uint64_t workspace = (uint64_t)key->workspace;
  uint32_t first = (uint32_t)key->align_b, second = (uint32_t)key->align_a, result = (uint32_t)key->align_c;
  LT_TRY(cublasLtMatmulPreferenceInit(&wish));
#define WISH(name, value) LT_TRY(cublasLtMatmulPreferenceSetAttribute(&wish, name, &(value), sizeof(value)))
  WISH(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  WISH(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, first);
  WISH(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, second);
  WISH(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, result);
  WISH(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, result);
#undef WISH
  cublasLtMatmulHeuristicResult_t best;
  int found = 0;
  cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, &d->op, &d->first, &d->second, &d->out, &d->out, &wish, 1, &best, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0)
    return lev_fail(LEV_ERR_UNSUPPORTED, "no algorithm for a gemm of m, n, k = %lld, %lld, %lld: %s", (long long)key->m,
                    (long long)key->n, (long long)key->k, cublasLtGetStatusString(status));
  *out = best.algo;
  return LEV_OK;
}

uint64_t hash_of(const shape_key *key) { /* FNV-1a over its words */
  uint64_t words[sizeof *key / 8], hash = 14695981039346656037u;
  std::memcpy(words, key, sizeof words);
  for (uint64_t word : words) hash = (hash ^ word) * 1099511628211u, hash ^= hash >> 29;
  return hash;
}

/* Where the choice for `key` lies or goes. */
choice *place_of(const shape_key *key) {
  uint64_t at = hash_of(key);
  for (uint64_t way = 0; way < kWays; ++way) {
    choice *c = &choices[(at + way) % kChoices];
    if (!c->taken || std::memcmp(&c->key, key, sizeof *key) == 0) return c;
  }
  choice *first = &choices[at % kChoices];
  first->taken = false;
  return first;
}

/* The library's handle and its algorithm for this product; with the lock held. */
lev_status choose(const lev_gemm_launch *launch, matmul *d, cublasLtHandle_t *handle, cublasLtMatmulAlgo_t *algo) {
  int device;
  LEV_CUDA_TRY(cudaGetDevice(&device));
  shape_key key = key_of(launch, device);
  LEV_TRY(handle_of(device, handle));
  choice *c = place_of(&key);
  if (!c->taken) {
    LEV_TRY(ask_library(*handle, d, &key, &c->algo));
    c->key = key, c->taken = true;
  }
  *algo = c->algo;
  return LEV_OK;
}

/* ---- k = 0 or alpha = 0: A and B are not read ---- */

__device__ double load(const double *p) {
  return *p;
}
__device__ float load(const float *p) {
  return *p;
}
__device__ float load(const lev_bf16 *p) {
  return __uint_as_float((uint32_t)*p << 16);
}
__device__ void store(double *p, double x) {
  *p = x;
}
__device__ void store(float *p, float x) {
  *p = x;
}
__device__ void store(lev_bf16 *p, float x) {
  uint32_t u = __float_as_uint(x), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  *p = (lev_bf16)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

/* `add` and C may be the same. */
template <typename T, typename A>
__global__ void scale_kernel(T *c, const T *add, int64_t m, int64_t n, int64_t ldc, A beta) {
  int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < m * n; i += step) {
    int64_t at = i / n * ldc + i % n;
    store(c + at, beta == 0 ? (A)0 : beta * load(add + at));
  }
}

lev_status scale(const lev_gemm_args *g, cudaStream_t stream) {
  int64_t blocks = (g->m * g->n + 255) / 256;
  unsigned grid = (unsigned)(blocks < 4096 ? blocks : 4096);
  const void *add = g->add ? g->add : g->c;
  if (g->c_type == LEV_F64)
    scale_kernel<<<grid, 256, 0, stream>>>((double *)g->c, (const double *)add, g->m, g->n, g->ldc, g->beta);
  else if (g->c_type == LEV_F32)
    scale_kernel<<<grid, 256, 0, stream>>>((float *)g->c, (const float *)add, g->m, g->n, g->ldc, (float)g->beta);
  else
    scale_kernel<<<grid, 256, 0, stream>>>((lev_bf16 *)g->c, (const lev_bf16 *)add, g->m, g->n, g->ldc, (float)g->beta);
  return lev_cuda_launched("gemm: scaling C");
}

} // namespace

lev_status lev_gemm_cuda(const void *args, void *cuda_stream) {
  const lev_gemm_launch *launch = static_cast<const lev_gemm_launch *>(args);
  const lev_gemm_args *g = &launch->gemm;
  cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
  if (g->m == 0 || g->n == 0) return LEV_OK;
  if (g->k == 0 || g->alpha == 0) return scale(g, stream);
  matmul d;
  cublasLtHandle_t handle;
  cublasLtMatmulAlgo_t algo;
  LEV_TRY(describe(g, &d));
  pthread_mutex_lock(&lock);
  lev_status st = choose(launch, &d, &handle, &algo);
  pthread_mutex_unlock(&lock);
  LEV_TRY(st);
  float alpha = (float)g->alpha, beta = (float)g->beta;
  bool f64 = g->ab_type == LEV_F64;
  const void *alpha_at = f64 ? (const void *)&g->alpha : &alpha, *beta_at = f64 ? (const void *)&g->beta : &beta;
  LT_TRY(cublasLtMatmul(handle, &d.op, alpha_at, g->b, &d.first, g->a, &d.second, beta_at, g->add ? g->add : g->c,
                        &d.out, g->c, &d.out, &algo, launch->workspace, launch->workspace_bytes, stream));
  return LEV_OK;
}
