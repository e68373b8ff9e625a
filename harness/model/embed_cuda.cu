/* SPDX-License-Identifier: Apache-2.0 */
/* The sharded embedding on the GPU.
 *
 * Gradient rows are added without atomics and in the order of the tokens: each table row belongs to one block, which
 * looks at all tokens, lists those of its rows and adds them in this order, each thread its own columns. So the result
 * has the bits of the CPU's loop. */
#include "harness/model/embed_ops.h"
#include "harness/model/rows.cuh"

namespace {

using namespace lev_rows;

constexpr int kThreads = 256, kWarps = kThreads / 32;

/* Gradients: threads of a block; tokens looked at per thread and together; listed tokens worth adding; added at once.
 */
constexpr int kAdders = 512, kEach = 4, kChunk = kAdders * kEach, kEnough = 32, kAhead = 4;

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

/* Tokens of this block's rows, in order, that are not added yet. */
struct token_list {
  int n;
  int64_t token[kEnough + kChunk];
  int row[kEnough + kChunk];
};

/* A thread's columns of the row that it added last, kept for the next token of the same row. */
template <class A, int width> struct kept_row {
  int row;
  lev_vec<A, width> sum;
  __device__ void put_back(const embed_add_args &a, int64_t col) {
    if (row >= 0) lev_write<A, width>((A *)a.dw + row * a.hidden + col, sum);
    row = -1;
  }
};

template <class T, int width>
__device__ __forceinline__ void add_to(lev_vec<lev_arith<T>, width> &sum, const lev_vec<T, width> &x) {
#pragma unroll
  for (int i = 0; i < width; ++i) sum.at[i] += lev_load(x.at[i]);
}

/* Adds kAhead tokens from `first` on to columns [col, col + width). Where their rows differ all of them are on their
 * way at once; else one after another. */
template <class T, int width>
__device__ __forceinline__ void add_some(const embed_add_args &a, const token_list &list, int first, int64_t col,
                                         kept_row<lev_arith<T>, width> &kept) {
  using A = lev_arith<T>;
  lev_vec<T, width> x[kAhead];
  int row[kAhead];
  bool here[kAhead], differ = true;
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    here[k] = first + k < list.n;
    row[k] = here[k] ? list.row[first + k] : -1;
    if (here[k]) x[k] = lev_read<T, width>((const T *)a.rows + list.token[first + k] * a.hidden + col);
#pragma unroll
    for (int i = 0; i < k; ++i) differ &= row[i] != row[k] || !here[k];
  }
  if (differ && row[0] != kept.row) {
    lev_vec<A, width> sum[kAhead];
    kept.put_back(a, col);
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (here[k]) sum[k] = lev_read<A, width>((const A *)a.dw + row[k] * a.hidden + col);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (!here[k]) continue;
      add_to<T, width>(sum[k], x[k]);
      lev_write<A, width>((A *)a.dw + row[k] * a.hidden + col, sum[k]);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    if (!here[k]) continue;
    if (row[k] != kept.row) {
      kept.put_back(a, col);
      kept.sum = lev_read<A, width>((const A *)a.dw + row[k] * a.hidden + col);
      kept.row = row[k];
    }
    add_to<T, width>(kept.sum, x[k]);
  }
}

template <class T, int width> __device__ __forceinline__ void add_listed(const embed_add_args &a, token_list &list) {
  __syncthreads();
  for (int64_t col = (int64_t)threadIdx.x * width; col < a.hidden; col += kAdders * width) {
    kept_row<lev_arith<T>, width> kept;
    kept.row = -1;
    for (int first = 0; first < list.n; first += kAhead) add_some<T, width>(a, list, first, col, kept);
    kept.put_back(a, col);
  }
  __syncthreads();
}

/* This thread's rows in a chunk: its warp has 32 * kEach tokens in succession; -1 where they are another block's. */
__device__ __forceinline__ void load_rows(const embed_add_args &a, int64_t chunk, int (&row)[kEach]) {
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    int64_t token = chunk + (threadIdx.x / 32 * kEach + k) * 32 + threadIdx.x % 32;
    int64_t at = token < a.count ? a.ids[token] - a.begin : -1;
    /* Rows go to blocks by the golden ratio: as even as by remainder, without a division. */
    bool mine = at >= 0 && at < a.shard_rows && __umulhi((unsigned)at * 0x9E3779B1u, gridDim.x) == blockIdx.x;
    row[k] = mine ? (int)at : -1;
  }
}

template <class T, int width> __global__ void __launch_bounds__(kAdders, 2) add_kernel(const embed_add_args a) {
  __shared__ token_list list;
  __shared__ int warp_count[2][kAdders / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int next[kEach], row[kEach], listed = 0, odd = 0;
  load_rows(a, 0, next);
  for (int64_t chunk = 0; chunk < a.count; chunk += kChunk, odd ^= 1) {
    unsigned votes[kEach];
    int hits = 0, all = 0, before = listed;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      row[k] = next[k];
      votes[k] = __ballot_sync(0xffffffffu, row[k] >= 0);
      hits += __popc(votes[k]);
    }
    load_rows(a, chunk + kChunk, next);
    if (lane == 0) warp_count[odd][warp] = hits;
    __syncthreads();
    for (int w = 0; w < kAdders / 32; ++w) {
      if (w < warp) before += warp_count[odd][w];
      all += warp_count[odd][w];
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      int at = before + __popc(votes[k] & ((1u << lane) - 1));
      if (row[k] >= 0) list.token[at] = chunk + (warp * kEach + k) * 32 + lane, list.row[at] = row[k];
      before += __popc(votes[k]);
    }
    listed += all;
    if (listed < kEnough && chunk + kChunk < a.count) continue;
    if (threadIdx.x == 0) list.n = listed;
    add_listed<T, width>(a, list);
    listed = 0;
  }
}

template <class T> lev_status add(const embed_add_args *a, cudaStream_t stream) {
  using A = lev_arith<T>;
  unsigned blocks = (unsigned)lev_max_i64(1, lev_min_i64(a->shard_rows, kMultiprocessors * 2));
  bool packed = lev_divides(16, a->rows, a->dw, (size_t)a->hidden * sizeof(T), (size_t)a->hidden * sizeof(A));
  if (packed)
    add_kernel<T, lev_per_16<A>><<<blocks, kAdders, 0, stream>>>(*a);
  else
    add_kernel<T, 1><<<blocks, kAdders, 0, stream>>>(*a);
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
