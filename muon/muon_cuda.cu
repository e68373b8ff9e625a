/* SPDX-License-Identifier: Apache-2.0 */
/* Muon's elementwise kernels on the GPU. Four elements at a time where all arrays allow it, else one. */
#include "common/kernel.cuh"
#include "muon/muon_ops.h"

namespace {

constexpr int kThreads = 256, kMostBlocks = 132 * 32;

__device__ __forceinline__ float fused(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double fused(double a, double b, double c) {
  return __fma_rn(a, b, c);
}
__device__ __forceinline__ float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ __forceinline__ double multiply(double a, double b) {
  return __dmul_rn(a, b);
}

/* Whether groups of four lie in whole accesses. */
bool in_fours(const void *array, lev_dtype type) {
  size_t bytes = 4 * lev_dtype_bytes(type);
  return lev_divides(bytes < 16 ? bytes : 16, array);
}

unsigned blocks_for(int64_t count, int n) {
  return lev_grid(lev_ceil_div(count, n), kThreads, kMostBlocks);
}

/* The instance of launcher<T, U> for two storage types of one arithmetic type. */
#define PICK_PAIR(t, u, launcher)                                                                                      \
  ((t) == LEV_F64   ? launcher<double, double>                                                                         \
   : (t) == LEV_F32 ? ((u) == LEV_F32 ? launcher<float, float> : launcher<float, lev_bf16>)                            \
                    : ((u) == LEV_F32 ? launcher<lev_bf16, float> : launcher<lev_bf16, lev_bf16>))

/* ---- momentum and its norm ---- */

/* u: what the update is made of. */
template <class A> __device__ __forceinline__ A direction(A momentum, A g, A mu, bool nesterov) {
  return nesterov ? fused(mu, momentum, g) : momentum;
}

/* n elements from i on, in accesses of `width` elements. */
template <class T, int n, int width>
__device__ __forceinline__ void momentum_at(const muon_momentum_args &a, int64_t i, double &sum) {
  using A = lev_arith<T>;
  const A scale = (A)a.grad_scale, mu = (A)a.mu;
#pragma unroll
  for (int64_t at = i; at < i + n; at += width) {
    lev_vec<T, width> x = lev_read<T, width>((const T *)a.grad + at);
    lev_vec<A, width> m = lev_read<A, width>((A *)a.momentum + at);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      A g = multiply(scale, lev_load(x.at[k]));
      m.at[k] = fused(mu, m.at[k], g);
      double u = (double)direction(m.at[k], g, mu, a.nesterov);
      sum = __fma_rn(u, u, sum);
    }
    lev_write<A, width>((A *)a.momentum + at, m);
  }
}

/* A thread block per block of the norm. A thread takes the same elements in the same order whatever the width of its
 * accesses: the sum must not depend on where a bucket has put the matrix. */
template <class T, int width> __global__ void __launch_bounds__(kThreads) momentum_kernel(const muon_momentum_args a) {
  __shared__ double memory[kThreads / 32];
  const int64_t begin = (int64_t)blockIdx.x * MUON_NORM_BLOCK;
  const int size = (int)lev_min_i64(MUON_NORM_BLOCK, a.count - begin), groups = size / 4;
  double sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < groups; i += kThreads) momentum_at<T, 4, width>(a, begin + (int64_t)i * 4, sum);
  for (int i = groups * 4 + threadIdx.x; i < size; i += kThreads) momentum_at<T, 1, 1>(a, begin + i, sum);
  sum = lev_block_sum<kThreads>(sum, memory);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
}

template <class T> lev_status momentum(const muon_momentum_args *a, cudaStream_t stream) {
  unsigned blocks = (unsigned)lev_ceil_div(a->count, MUON_NORM_BLOCK);
  if (in_fours(a->grad, a->grad_dtype) && in_fours(a->momentum, lev_dtype_arith(a->grad_dtype)))
    momentum_kernel<T, 4><<<blocks, kThreads, 0, stream>>>(*a);
  else
    momentum_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("muon.momentum");
}

/* ---- normalisation ---- */

template <class T, class X, int n>
__device__ __forceinline__ void normalize_at(const muon_normalize_args &a, int64_t i, lev_arith<T> inverse) {
  using A = lev_arith<T>;
  const A scale = (A)a.grad_scale, mu = (A)a.mu;
  lev_vec<A, n> m = lev_read<A, n>((const A *)a.momentum + i);
  lev_vec<T, n> grad = {};
  lev_vec<X, n> x;
  if (a.nesterov) grad = lev_read<T, n>((const T *)a.grad + i);
#pragma unroll
  for (int k = 0; k < n; ++k) {
    A g = multiply(scale, lev_load(grad.at[k]));
    x.at[k] = lev_store<X>(multiply(direction(m.at[k], g, mu, a.nesterov), inverse));
  }
  lev_write<X, n>((X *)a.x + i, x);
}

/* Every thread block adds up the partial sums, all in the same order. */
template <class T, class X, int n>
__global__ void __launch_bounds__(kThreads) normalize_kernel(const muon_normalize_args a) {
  using A = lev_arith<T>;
  __shared__ double memory[kThreads / 32], total;
  const int64_t stride = (int64_t)gridDim.x * kThreads, id = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  const int64_t groups = a.count / n, parts = lev_ceil_div(a.count, MUON_NORM_BLOCK);
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < parts; i += kThreads) sum += a.partial[i];
  sum = lev_block_sum<kThreads>(sum, memory);
  if (threadIdx.x == 0) total = sum;
  __syncthreads();
  const A inverse = (A)(1 / (a.norm_factor * sqrt(total) + a.eps));
  for (int64_t i = id; i < groups; i += stride) normalize_at<T, X, n>(a, i * n, inverse);
  for (int64_t i = groups * n + id; i < a.count; i += stride) normalize_at<T, X, 1>(a, i, inverse);
}

template <class T, class X> lev_status normalize(const muon_normalize_args *a, cudaStream_t stream) {
  bool fours = in_fours(a->grad, a->grad_dtype) && in_fours(a->momentum, lev_dtype_arith(a->grad_dtype)) &&
               in_fours(a->x, a->x_dtype);
  unsigned most = 132 * 8; /* few, for each reads all partial sums */
  if (fours)
    normalize_kernel<T, X, 4><<<lev_grid(lev_ceil_div(a->count, 4), kThreads, most), kThreads, 0, stream>>>(*a);
  else
    normalize_kernel<T, X, 1><<<lev_grid(a->count, kThreads, most), kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("muon.normalize");
}

/* ---- update ---- */

template <class P, class X, int n>
__device__ __forceinline__ void update_at(const muon_update_args &a, int64_t i, lev_arith<P> decay, lev_arith<P> rate) {
  using A = lev_arith<P>;
  lev_vec<X, n> x = lev_read<X, n>((const X *)a.x + i);
  lev_vec<A, n> w = lev_read<A, n>((A *)a.master + i);
  lev_vec<P, n> out;
#pragma unroll
  for (int k = 0; k < n; ++k) {
    w.at[k] = fused(rate, lev_load(x.at[k]), fused(decay, w.at[k], w.at[k]));
    out.at[k] = lev_store<P>(w.at[k]);
  }
  lev_write<A, n>((A *)a.master + i, w);
  lev_write<P, n>((P *)a.param + i, out);
}

template <class P, class X, int n> __global__ void __launch_bounds__(kThreads) update_kernel(const muon_update_args a) {
  using A = lev_arith<P>;
  const int64_t stride = (int64_t)gridDim.x * kThreads, id = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  const int64_t groups = a.count / n;
  const A decay = (A)-a.decay, rate = (A)-a.rate;
  for (int64_t i = id; i < groups; i += stride) update_at<P, X, n>(a, i * n, decay, rate);
  for (int64_t i = groups * n + id; i < a.count; i += stride) update_at<P, X, 1>(a, i, decay, rate);
}

template <class P, class X> lev_status update(const muon_update_args *a, cudaStream_t stream) {
  bool fours = in_fours(a->x, a->x_dtype) && in_fours(a->master, lev_dtype_arith(a->param_dtype)) &&
               in_fours(a->param, a->param_dtype);
  if (fours)
    update_kernel<P, X, 4><<<blocks_for(a->count, 4), kThreads, 0, stream>>>(*a);
  else
    update_kernel<P, X, 1><<<blocks_for(a->count, 1), kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("muon.update");
}

/* ---- between parameters and state ---- */

template <class T, int n>
__device__ __forceinline__ void convert_at(const muon_convert_args &a, int64_t i,
                                           const lev_vec<lev_arith<T>, n> &zero) {
  using A = lev_arith<T>;
  if (a.to_master) {
    lev_vec<T, n> x = lev_read<T, n>((const T *)a.param + i);
    lev_vec<A, n> w;
    for (int k = 0; k < n; ++k) w.at[k] = lev_load(x.at[k]);
    lev_write<A, n>((A *)a.master + i, w);
    lev_write<A, n>((A *)a.momentum + i, zero);
  } else {
    lev_vec<A, n> w = lev_read<A, n>((const A *)a.master + i);
    lev_vec<T, n> x;
    for (int k = 0; k < n; ++k) x.at[k] = lev_store<T>(w.at[k]);
    lev_write<T, n>((T *)a.param + i, x);
  }
}

template <class T, int n> __global__ void __launch_bounds__(kThreads) convert_kernel(const muon_convert_args a) {
  const int64_t stride = (int64_t)gridDim.x * kThreads, id = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  const int64_t groups = a.count / n;
  for (int64_t i = id; i < groups; i += stride) convert_at<T, n>(a, i * n, {});
  for (int64_t i = groups * n + id; i < a.count; i += stride) convert_at<T, 1>(a, i, {});
}

template <class T> lev_status convert(const muon_convert_args *a, cudaStream_t stream) {
  lev_dtype arith = lev_dtype_arith(a->param_dtype);
  bool fours = in_fours(a->param, a->param_dtype) && in_fours(a->master, arith) && in_fours(a->momentum, arith);
  if (fours)
    convert_kernel<T, 4><<<blocks_for(a->count, 4), kThreads, 0, stream>>>(*a);
  else
    convert_kernel<T, 1><<<blocks_for(a->count, 1), kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("muon.convert");
}

} // namespace

lev_status muon_momentum_cuda(const void *args, void *stream) {
  const muon_momentum_args *a = (const muon_momentum_args *)args;
  if (a->count == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->grad_dtype, momentum)(a, (cudaStream_t)stream);
}

lev_status muon_normalize_cuda(const void *args, void *stream) {
  const muon_normalize_args *a = (const muon_normalize_args *)args;
  if (a->count == 0) return LEV_OK;
  return PICK_PAIR(a->grad_dtype, a->x_dtype, normalize)(a, (cudaStream_t)stream);
}

lev_status muon_duplicate_cuda(const void *args, void *stream) {
  const muon_duplicate_args *a = (const muon_duplicate_args *)args;
  LEV_CUDA_TRY(cudaMemcpyAsync(a->dst, a->src, a->bytes, cudaMemcpyDefault, (cudaStream_t)stream));
  return LEV_OK;
}

lev_status muon_update_cuda(const void *args, void *stream) {
  const muon_update_args *a = (const muon_update_args *)args;
  if (a->count == 0) return LEV_OK;
  return PICK_PAIR(a->param_dtype, a->x_dtype, update)(a, (cudaStream_t)stream);
}

lev_status muon_convert_cuda(const void *args, void *stream) {
  const muon_convert_args *a = (const muon_convert_args *)args;
  if (a->count == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->param_dtype, convert)(a, (cudaStream_t)stream);
}
