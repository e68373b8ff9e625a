/* SPDX-License-Identifier: Apache-2.0 */
/* For files with kernels: storage types, accesses of 16 bytes, reductions in a fixed order, launch shapes.
 *
 * T is a storage type (double, float, lev_bf16), lev_arith<T> its arithmetic type. */
#ifndef LEV_COMMON_KERNEL_CUH
#define LEV_COMMON_KERNEL_CUH

#include <cuda_bf16.h>

#include "common/cuda.cuh"
#include "common/dims.h"
#include "common/dtype.h"

template <class T> struct lev_arith_of { using type = T; };
template <> struct lev_arith_of<lev_bf16> { using type = float; };
template <class T> using lev_arith = typename lev_arith_of<T>::type;

__device__ __forceinline__ double lev_load(double x) {
  return x;
}
__device__ __forceinline__ float lev_load(float x) {
  return x;
}
__device__ __forceinline__ float lev_load(lev_bf16 x) {
  return __uint_as_float((unsigned)x << 16);
}

/* Rounds to nearest, ties to even. */
template <class T> __device__ __forceinline__ T lev_store(lev_arith<T> x) {
  return x;
}
template <> __device__ __forceinline__ lev_bf16 lev_store<lev_bf16>(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

/* N scalars moved at once, 16 bytes at a time where there are that many. */
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) lev_vec { T at[N]; };
template <class T> constexpr int lev_per_16 = 16 / (int)sizeof(T);

/* Reads and writes N scalars, whose address is a multiple of alignof(lev_vec<T, N>), in as few accesses as that takes.
 */
template <class T, int N> __device__ __forceinline__ lev_vec<T, N> lev_read(const T *at) {
  constexpr int bytes = sizeof(T) * N;
  lev_vec<T, N> out;
  if constexpr (bytes % 16 == 0) {
#pragma unroll
    for (int v = 0; v < bytes; v += 16) {
      uint4 raw = reinterpret_cast<const uint4 *>(at)[v / 16];
      memcpy((unsigned char *)&out + v, &raw, 16);
    }
  } else if constexpr (bytes == 8) {
    uint2 raw = *reinterpret_cast<const uint2 *>(at);
    memcpy(&out, &raw, 8);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.at[i] = at[i];
  }
  return out;
}
template <class T, int N> __device__ __forceinline__ void lev_write(T *at, const lev_vec<T, N> &x) {
  constexpr int bytes = sizeof(T) * N;
  if constexpr (bytes % 16 == 0) {
#pragma unroll
    for (int v = 0; v < bytes; v += 16) {
      uint4 raw;
      memcpy(&raw, (const unsigned char *)&x + v, 16);
      reinterpret_cast<uint4 *>(at)[v / 16] = raw;
    }
  } else if constexpr (bytes == 8) {
    uint2 raw;
    memcpy(&raw, &x, 8);
    *reinterpret_cast<uint2 *>(at) = raw;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) at[i] = x.at[i];
  }
}

/* Whether every pointer and byte count given is a multiple of `unit`. */
static inline uintptr_t lev_as_number(const void *x) {
  return (uintptr_t)x;
}
static inline uintptr_t lev_as_number(size_t x) {
  return x;
}
template <class... All> static inline bool lev_divides(size_t unit, All... all) {
  uintptr_t bits = 0;
  for (uintptr_t x : {lev_as_number(all)...}) bits |= x % unit;
  return bits == 0;
}

/* Sum over a block of `threads` (a power of two, 32 at least) in a fixed order; thread 0 has the result. `memory` holds
 * threads / 32 values; a barrier must separate two uses of it. */
template <class A> __device__ __forceinline__ A lev_warp_sum(A x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step);
  return x;
}
template <int threads, class A> __device__ __forceinline__ A lev_block_sum(A x, A *memory) {
  x = lev_warp_sum(x);
  if (threads == 32) return x;
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x < 32) x = lev_warp_sum(threadIdx.x < threads / 32 ? memory[threadIdx.x] : A(0));
  return x;
}

/* Blocks for n items, `per` each, at most `most`: kernels stride over the rest. */
static inline unsigned lev_grid(int64_t n, int64_t per, int64_t most = 1 << 20) {
  return (unsigned)lev_min_i64(lev_ceil_div(n, per), most);
}

/* The instance of a launcher template for a storage type. */
#define LEV_CUDA_PICK(dtype, name)                                                                                     \
  ((dtype) == LEV_F64 ? name<double> : (dtype) == LEV_F32 ? name<float> : name<lev_bf16>)

#endif
