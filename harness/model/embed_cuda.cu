/* SPDX-License-Identifier: Apache-2.0 */
/* The sharded embedding on the GPU.
 *
 * Gradient rows are added without atomics and in the order of the tokens: block b owns the table rows r with
 * r mod blocks = b, lists the tokens that hit them, chunk by chunk, and adds them one after another, each thread its
 * own columns. So the result has the bits of the CPU's loop. */
#include "harness/model/embed_ops.h"
#include "harness/model/rows.cuh"

namespace {

using namespace lev_rows;

constexpr int kThreads = 256, kWarps = kThreads / 32, kAhead = 4;

/* ---- rows out ---- */

/* V: what is moved at once; `units` of it in a row. A warp per row. */
template <class V> __global__ void __launch_bounds__(kThreads) take_kernel(const embed_take_args a, int64_t units) {
  const int lane = threadIdx.x % 32;
  for (int64_t i = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32; i < a.count; i += (int64_t)gridDim.x * kWarps) {
    int64_t at = a.ids[i] - a.begin;
    bool here = at >= 0 && at < a.shard_rows;
    const V *in = (const V *)a.w + at * units;
    V *out = (V *)a.rows + i * units;
#pragma unroll 4
    for (int64_t j = lane; j < units; j += 32) out[j] = here ? in[j] : V{};
  }
}

template <class V> void take(const embed_take_args *a, size_t row_bytes, cudaStream_t stream) {
  unsigned blocks = blocks_for(a->count, kWarps, kMultiprocessors * 16);
  take_kernel<V><<<blocks, kThreads, 0, stream>>>(*a, (int64_t)(row_bytes / sizeof(V)));
}

/* ---- gradients in ---- */

/* Adds the listed tokens to this thread's columns [col, col + width). Tokens of one row in succession stay in
 * registers. */
template <class T, int width>
__device__ __forceinline__ void add_listed(const embed_add_args &a, const int *listed, int n, int64_t chunk,
                                           const int64_t *rows, int64_t col) {
  using A = lev_arith<T>;
  const T *in = (const T *)a.rows + col;
  A *dw = (A *)a.dw + col;
  lev_vec<A, width> sum;
  int64_t current = -1;
  for (int base = 0; base < n; base += kAhead) {
    lev_vec<T, width> next[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (base + k < n) next[k] = lev_read<T, width>(in + (chunk + listed[base + k]) * a.hidden);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (base + k >= n) continue;
      int64_t row = rows[base + k];
      if (row != current) {
        if (current >= 0) lev_write<A, width>(dw + current * a.hidden, sum);
        sum = lev_read<A, width>(dw + row * a.hidden);
        current = row;
      }
      for (int i = 0; i < width; ++i) sum.at[i] += lev_load(next[k].at[i]);
    }
  }
  if (current >= 0) lev_write<A, width>(dw + current * a.hidden, sum);
}

/* One chunk of kThreads tokens at a time: those of this block, in order, then their rows. */
template <class T, int width> __global__ void __launch_bounds__(kThreads) add_kernel(const embed_add_args a) {
  __shared__ int listed[kThreads], warp_count[kWarps];
  __shared__ int64_t rows[kThreads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t chunk = 0; chunk < a.count; chunk += kThreads) {
    int64_t i = chunk + threadIdx.x, row = i < a.count ? a.ids[i] - a.begin : -1;
    bool mine = row >= 0 && row < a.shard_rows && row % gridDim.x == blockIdx.x;
    unsigned votes = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) warp_count[warp] = __popc(votes);
    /* Whether any token is listed; also the barrier after the previous list was read. */
    if (!__syncthreads_or(mine)) continue;
    int before = __popc(votes & ((1u << lane) - 1)), n = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_count[w];
      n += warp_count[w];
    }
    if (mine) listed[before] = threadIdx.x, rows[before] = row;
    __syncthreads();
    for (int64_t col = (int64_t)threadIdx.x * width; col < a.hidden; col += kThreads * width)
      add_listed<T, width>(a, listed, n, chunk, rows, col);
    __syncthreads();
  }
}

template <class T> lev_status add(const embed_add_args *a, cudaStream_t stream) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>;
  unsigned blocks = (unsigned)lev_max_i64(1, lev_min_i64(a->shard_rows, kMultiprocessors * 8));
  bool packed = lev_divides(16, a->rows, a->dw, (size_t)a->hidden * sizeof(T), (size_t)a->hidden * sizeof(A));
  if (packed)
    add_kernel<T, width><<<blocks, kThreads, 0, stream>>>(*a);
  else
    add_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("embed.add");
}

} // namespace

lev_status embed_take_cuda(const void *args, void *stream) {
  const embed_take_args *a = (const embed_take_args *)args;
  size_t row_bytes = (size_t)a->hidden * lev_dtype_bytes(a->dtype);
  if (a->count == 0) return LEV_OK;
  if (lev_divides(16, a->w, a->rows, row_bytes))
    take<uint4>(a, row_bytes, (cudaStream_t)stream);
  else if (a->dtype == LEV_F64)
    take<double>(a, row_bytes, (cudaStream_t)stream);
  else if (a->dtype == LEV_F32)
    take<float>(a, row_bytes, (cudaStream_t)stream);
  else
    take<lev_bf16>(a, row_bytes, (cudaStream_t)stream);
  return lev_cuda_launched("embed.take");
}

lev_status embed_add_cuda(const void *args, void *stream) {
  const embed_add_args *a = (const embed_add_args *)args;
  if (a->count == 0 || a->shard_rows == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, add)(a, (cudaStream_t)stream);
}
