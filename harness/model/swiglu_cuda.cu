/* SPDX-License-Identifier: Apache-2.0 */
/* SwiGLU on the GPU: packs of 16 bytes where all arrays are aligned, else single elements. */
#include "harness/model/ops.h"
#include "harness/model/rows.cuh"

namespace {

using namespace lev_rows;

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}

template <class T> __device__ __forceinline__ T forward_one(T gate, T up) {
  using A = lev_arith<T>;
  A g = lev_load(gate);
  return lev_store<T>(g / (1 + exponential(-g)) * lev_load(up));
}

template <class T> __device__ __forceinline__ void backward_one(T &gate, T &up, T &d) {
  using A = lev_arith<T>;
  A g = lev_load(gate), u = lev_load(up), di = lev_load(d), s = 1 / (1 + exponential(-g)), silu = g * s;
  d = lev_store<T>(silu * u);
  gate = lev_store<T>(di * u * (s + silu * (1 - s)));
  up = lev_store<T>(di * silu);
}

template <class T, bool packed>
__global__ void __launch_bounds__(256) forward_kernel(const T *gate, const T *up, T *out, int64_t count) {
  constexpr int width = packed ? lev_per_16<T> : 1;
  const int64_t stride = (int64_t)gridDim.x * 256, id = (int64_t)blockIdx.x * 256 + threadIdx.x, packs = count / width;
  for (int64_t i = id; i < packs; i += stride) {
    if constexpr (packed) {
      pack<T> g = load16(gate + i * width), u = load16(up + i * width);
#pragma unroll
      for (int k = 0; k < width; ++k) g.at[k] = forward_one(g.at[k], u.at[k]);
      store16(out + i * width, g);
    } else {
      out[i] = forward_one(gate[i], up[i]);
    }
  }
  for (int64_t i = packs * width + id; i < count; i += stride) out[i] = forward_one(gate[i], up[i]);
}

template <class T, bool packed>
__global__ void __launch_bounds__(256) backward_kernel(T *gate, T *up, T *d, int64_t count) {
  constexpr int width = packed ? lev_per_16<T> : 1;
  const int64_t stride = (int64_t)gridDim.x * 256, id = (int64_t)blockIdx.x * 256 + threadIdx.x, packs = count / width;
  for (int64_t i = id; i < packs; i += stride) {
    if constexpr (packed) {
      pack<T> g = load16(gate + i * width), u = load16(up + i * width), di = load16(d + i * width);
#pragma unroll
      for (int k = 0; k < width; ++k) backward_one(g.at[k], u.at[k], di.at[k]);
      store16(gate + i * width, g);
      store16(up + i * width, u);
      store16(d + i * width, di);
    } else {
      backward_one(gate[i], up[i], d[i]);
    }
  }
  for (int64_t i = packs * width + id; i < count; i += stride) backward_one(gate[i], up[i], d[i]);
}

template <class T> lev_status forward(const lev_swiglu_args *a, cudaStream_t stream) {
  const T *gate = (const T *)a->gate, *up = (const T *)a->up;
  T *out = (T *)a->out;
  unsigned blocks = blocks_for(a->count, 256 * lev_per_16<T>, kMultiprocessors * 32);
  if (lev_divides(16, gate, up, out))
    forward_kernel<T, true><<<blocks, 256, 0, stream>>>(gate, up, out, a->count);
  else
    forward_kernel<T, false><<<blocks, 256, 0, stream>>>(gate, up, out, a->count);
  return lev_cuda_launched("model.swiglu");
}

template <class T> lev_status backward(const lev_swiglu_backward_args *a, cudaStream_t stream) {
  T *gate = (T *)a->gate, *up = (T *)a->up, *d = (T *)a->d;
  unsigned blocks = blocks_for(a->count, 256 * lev_per_16<T>, kMultiprocessors * 32);
  if (lev_divides(16, gate, up, d))
    backward_kernel<T, true><<<blocks, 256, 0, stream>>>(gate, up, d, a->count);
  else
    backward_kernel<T, false><<<blocks, 256, 0, stream>>>(gate, up, d, a->count);
  return lev_cuda_launched("model.swiglu_backward");
}

} // namespace

lev_status lev_swiglu_cuda(const void *args, void *stream) {
  const lev_swiglu_args *a = (const lev_swiglu_args *)args;
  if (a->count == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, forward)(a, (cudaStream_t)stream);
}

lev_status lev_swiglu_backward_cuda(const void *args, void *stream) {
  const lev_swiglu_backward_args *a = (const lev_swiglu_backward_args *)args;
  if (a->count == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, backward)(a, (cudaStream_t)stream);
}
