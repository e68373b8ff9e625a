/* SPDX-License-Identifier: Apache-2.0 */
/* For the kernels of harness/model: work in rows by teams of threads, sums over rows in two stages.
 *
 * A team of `team` threads (a power of two) takes one row. Up to 32 it is part of a warp, else it is the whole block.
 * Every sum has an order that depends on the launch shape alone. */
#ifndef LEV_MODEL_ROWS_CUH
#define LEV_MODEL_ROWS_CUH

#include "common/kernel.cuh"

namespace lev_rows {

constexpr int kMultiprocessors = 132;

template <int team> constexpr int threads_of = team > 32 ? team : 256;

/* 16 bytes of T as a register value. */
template <class T> using pack = lev_vec<T, lev_per_16<T>>;

template <class T> __device__ __forceinline__ pack<T> load16(const T *at) {
  return lev_read<T, lev_per_16<T>>(at);
}
template <class T> __device__ __forceinline__ void store16(T *at, const pack<T> &x) {
  lev_write<T, lev_per_16<T>>(at, x);
}

/* The values of a pack. In bf16 they are halves of words: an instruction each, where reading scalars takes two. */
template <class T> __device__ __forceinline__ void widen16(const pack<T> &x, lev_arith<T> (&out)[lev_per_16<T>]) {
  if constexpr (sizeof(T) == 2) {
    unsigned word[4];
    memcpy(word, &x, 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(word[i] << 16);
      out[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
  } else {
    memcpy(out, &x, 16);
  }
}

/* Copies of 16 bytes to shared memory that go on while the thread does; zeros where `inside` is false. What a thread
 * started up to end_copies is a group; wait_copies<n> waits for all of its groups but the n newest. Others see what it
 * copied behind a barrier only. */
__device__ __forceinline__ void start_copy16(void *shared, const void *global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
               "l"(global), "r"(inside ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int newest> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(newest) : "memory");
}

/* 1 / sqrt(mean of squares + eps), to the last bit or two: every thread of a team computes it for every row, so
 * division and root in full precision would cost more than the row itself. */
__device__ __forceinline__ float inverse_rms(float sum_of_squares, float inverse_n, float eps) {
  float x = fmaf(sum_of_squares, inverse_n, eps), r = rsqrtf(x);
  return fmaf(0.5f * r, fmaf(-x * r, r, 1.0f), r);
}
__device__ __forceinline__ double inverse_rms(double sum_of_squares, double inverse_n, double eps) {
  return 1 / sqrt(fma(sum_of_squares, inverse_n, eps));
}

/* What the threads of a team wrote to shared memory is seen by all of them. */
template <int team> __device__ __forceinline__ void team_barrier() {
  if constexpr (team > 32)
    __syncthreads();
  else
    __syncwarp();
}

/* Sums over the lanes of a team, the same on each of them. `memory`: shared, n values per warp of the block. */
template <int team, int n, class A> __device__ __forceinline__ void team_sums(A (&x)[n], A *memory) {
#pragma unroll
  for (int step = (team < 32 ? team : 32) / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], step);
  if (team <= 32) return;
  __syncthreads(); /* the block is through with the sums before */
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i < n; ++i) memory[threadIdx.x / 32 * n + i] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; ++i) {
    x[i] = 0;
    for (int warp = 0; warp < team / 32; ++warp) x[i] += memory[warp * n + i];
  }
}

/* The same with one barrier, for teams of a whole block whose calls alternate between two memories: before a memory is
 * written again, everyone has passed the barrier of the call between. */
template <int team, int n, class A> __device__ __forceinline__ void team_sums_once(A (&x)[n], A *memory) {
  static_assert(team > 32);
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], step);
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i < n; ++i) memory[threadIdx.x / 32 * n + i] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; ++i) {
    x[i] = 0;
#pragma unroll
    for (int warp = 0; warp < team / 32; ++warp) x[i] += memory[warp * n + i];
  }
}

/* As many blocks as fill the chip, at most `most`, `rows_per_block` rows each. */
static inline unsigned blocks_for(int64_t rows, int64_t rows_per_block, int64_t most) {
  return (unsigned)lev_max_i64(1, lev_min_i64(lev_ceil_div(rows, rows_per_block), most));
}

/* How many partial rows of `cols` values the scratch holds, at most `most`; 0 = not even one. */
static inline int64_t parts_in(size_t scratch_bytes, int64_t cols, size_t elem, int64_t most) {
  if (cols == 0) return most;
  return lev_min_i64(most, (int64_t)(scratch_bytes / ((size_t)cols * elem)));
}

/* out[c] += partial[0][c] + partial[1][c] + ...: eight strided sums per column, added in order. */
template <class A>
__global__ void __launch_bounds__(256)
    fold_kernel(const A *partial, int64_t parts, int64_t cols, int64_t stride, A *out) {
  __shared__ A sums[8][32];
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  int64_t col = (int64_t)blockIdx.x * 32 + lane;
  A sum = 0;
  if (col < cols) {
#pragma unroll 8
    for (int64_t part = group; part < parts; part += 8) sum += partial[part * stride + col];
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group > 0 || col >= cols) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][lane];
  out[col] += sum;
}

/* Second stage: `parts` rows of `cols` values, `stride` values apart. */
template <class A>
static lev_status fold(const A *partial, int64_t parts, int64_t cols, int64_t stride, A *out, cudaStream_t stream) {
  fold_kernel<A><<<(unsigned)lev_ceil_div(cols, 32), 256, 0, stream>>>(partial, parts, cols, stride, out);
  return lev_cuda_launched("adding partial sums");
}

} // namespace lev_rows
#endif
