/* SPDX-License-Identifier: Apache-2.0 */
#include <cstdint>
#include <type_traits>

#include "common/comm_reduce_impl.h"
#include "common/cuda.cuh"

namespace {

struct bf16 {
  uint16_t bits;
};

/* Arithmetic type of a storage type. */
template <typename T> struct arith {
  using type =
      std::conditional_t<std::is_same_v<T, double>, double, std::conditional_t<std::is_integral_v<T>, int64_t, float>>;
};
template <typename T> using arith_t = typename arith<T>::type;

template <typename T> __device__ arith_t<T> load(T x) {
  if constexpr (std::is_same_v<T, bf16>)
    return __uint_as_float((uint32_t)x.bits << 16);
  else
    return (arith_t<T>)x;
}

/* To odd, so that rounding once more to bf16 is rounding once. */
__device__ float narrow(double x) {
  float f = __double2float_rz(x);
  return (double)f == x || x != x ? f : __uint_as_float(__float_as_uint(f) | 1u);
}
__device__ float narrow(float x) {
  return x;
}

/* bf16: nearest, ties to even, in integers as on the CPU. */
template <typename T, typename W> __device__ T store(W x) {
  if constexpr (std::is_same_v<T, bf16>) {
    uint32_t u = __float_as_uint(narrow(x)), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return bf16{(uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded)};
  } else {
    return (T)x;
  }
}

/* `n` neighbours, moved in one access of up to 16 bytes. */
template <typename T, int n> struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) pack { T x[n]; };

/* Sums in the input's arithmetic type; stores in the wider of both. */
template <typename In, typename Out, int n> __global__ void reduce_kernel(const __grid_constant__ lev_reduce_args a) {
  using A = arith_t<In>;
  using W = std::conditional_t<std::is_same_v<arith_t<Out>, double>, double, A>;
  int64_t packs = a.count / n, step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += step) {
    A sum[n];
    for (int r = 0; r < a.n_in; ++r) {
      pack<In, n> in = ((const pack<In, n> *)a.in[r])[i];
#pragma unroll
      for (int e = 0; e < n; ++e) {
        A value = load(in.x[e]);
        if (r == 0)
          sum[e] = value;
        else if (!a.max)
          sum[e] += value;
        else if (value > sum[e] || value != value)
          sum[e] = value;
      }
    }
    pack<Out, n> out;
    if (a.accumulate) out = ((const pack<Out, n> *)a.out[0])[i];
#pragma unroll
    for (int e = 0; e < n; ++e) {
      W value = (W)sum[e];
      if (a.accumulate) value += (W)load(out.x[e]);
      out.x[e] = store<Out>(value);
    }
    for (int o = 0; o < a.n_out; ++o) ((pack<Out, n> *)a.out[o])[i] = out;
  }
}

template <typename In, typename Out, int n> lev_status launch(const lev_reduce_args &a, cudaStream_t stream) {
  int64_t blocks = (a.count / n + 255) / 256;
  if (blocks == 0) return LEV_OK;
  reduce_kernel<In, Out, n><<<(unsigned)(blocks < 1056 ? blocks : 1056), 256, 0, stream>>>(a);
  return lev_cuda_launched("comm.reduce");
}

/* Wide accesses where all arrays allow them, one element at a time for the rest. */
template <typename In, typename Out> lev_status reduce(const lev_reduce_args &a, cudaStream_t stream) {
  constexpr int n = 16 / (int)sizeof(In);
  uintptr_t in = 0, out = 0;
  for (int r = 0; r < a.n_in; ++r) in |= (uintptr_t)a.in[r];
  for (int o = 0; o < a.n_out; ++o) out |= (uintptr_t)a.out[o];
  if (in % alignof(pack<In, n>) != 0 || out % alignof(pack<Out, n>) != 0) return launch<In, Out, 1>(a, stream);
  LEV_TRY((launch<In, Out, n>(a, stream)));
  lev_reduce_args rest = a;
  int64_t done = a.count / n * n;
  rest.count -= done;
  for (int r = 0; r < a.n_in; ++r) rest.in[r] = (const In *)a.in[r] + done;
  for (int o = 0; o < a.n_out; ++o) rest.out[o] = (Out *)a.out[o] + done;
  return launch<In, Out, 1>(rest, stream);
}

template <typename In> lev_status reduce_to(const lev_reduce_args &a, cudaStream_t stream) {
  if (a.out_type == LEV_F64) return reduce<In, double>(a, stream);
  if (a.out_type == LEV_F32) return reduce<In, float>(a, stream);
  return reduce<In, bf16>(a, stream);
}

} // namespace

lev_status lev_reduce_cuda(const void *args, void *cuda_stream) {
  const lev_reduce_args &a = *static_cast<const lev_reduce_args *>(args);
  cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
  if (a.in_type == LEV_F64) return reduce_to<double>(a, stream);
  if (a.in_type == LEV_F32) return reduce_to<float>(a, stream);
  if (a.in_type == LEV_BF16) return reduce_to<bf16>(a, stream);
  if (a.in_type == LEV_I32) return reduce<int32_t, int32_t>(a, stream);
  return reduce<int64_t, int64_t>(a, stream);
}

extern "C" const lev_kernel lev_reduce_kernel = {.name = "comm.reduce", .cpu = nullptr, .cuda = lev_reduce_cuda};
