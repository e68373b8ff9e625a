/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA side of the row operations in llep_ops.h; the tables are in llep_route_cuda.cu. */
#include "common/kernel.cuh"
#include "pipelined_llep/llep_ops.h"

namespace {

constexpr int kThreads = 128;

/* Token number n of those of blocks [first, last), or -1 past the end: blocks within a stretch of B tokens first. */
__device__ __forceinline__ int64_t chunk_token(int64_t n, int64_t tokens, int64_t blocks, int64_t first, int64_t last) {
  int64_t width = last - first, token = n / width * blocks + first + n % width;
  return token < tokens ? token : -1;
}

int64_t chunk_length(int64_t tokens, int64_t blocks, int64_t first, int64_t last) {
  return lev_ceil_div(tokens, blocks) * (last - first);
}

/* ---- gather ---- */

/* Writes a token's row k times, read once. U is what moves at a time, `units` of it a row. */
template <class U>
__device__ void copy_row(const void *src, void *send, const int32_t *route, int64_t top_k, int64_t token,
                         int64_t units) {
  const U *from = static_cast<const U *>(src) + token * units;
  for (int64_t i = threadIdx.x; i < units; i += kThreads) {
    U value = from[i];
    for (int64_t j = 0; j < top_k; ++j) static_cast<U *>(send)[route[j] * units + i] = value;
  }
}

/* One block per token. */
template <class U, class A> __global__ void __launch_bounds__(kThreads) gather_rows(llep_gather_args a, int64_t units) {
  int64_t token = chunk_token(blockIdx.x, a.tokens, a.blocks, a.first, a.last);
  if (token < 0) return;
  const int32_t *route = a.routes + token * a.top_k;
  copy_row<U>(a.x, a.send_x, route, a.top_k, token, units);
  if (a.dy) copy_row<U>(a.dy, a.send_dy, route, a.top_k, token, units);
  if (!a.probs) return;
  for (int64_t j = threadIdx.x; j < a.top_k; j += kThreads)
    static_cast<A *>(a.send_probs)[route[j]] = static_cast<const A *>(a.probs)[token * a.top_k + j];
}

template <class T> lev_status gather(const llep_gather_args *a, cudaStream_t stream) {
  int64_t length = chunk_length(a->tokens, a->blocks, a->first, a->last);
  size_t row = (size_t)a->hidden * sizeof(T);
  if (length > INT32_MAX) return lev_fail(LEV_ERR_UNSUPPORTED, "llep.gather: more than 2^31 - 1 tokens in a chunk");
  if (length > 0 && lev_divides(16, a->x, a->dy, a->send_x, a->send_dy, row))
    gather_rows<uint4, lev_arith<T>><<<(unsigned)length, kThreads, 0, stream>>>(*a, (int64_t)(row / 16));
  else if (length > 0)
    gather_rows<T, lev_arith<T>><<<(unsigned)length, kThreads, 0, stream>>>(*a, a->hidden);
  return lev_cuda_launched("llep.gather");
}

/* ---- pack ---- */

/* One warp per row. */
template <class U> __global__ void __launch_bounds__(kThreads) pack_rows(llep_pack_args a, int part, int64_t units) {
  int64_t row = (int64_t)blockIdx.x * (kThreads / 32) + threadIdx.x / 32, at = row;
  int r = 0;
  while (r < a.n_runs && at >= a.count[r]) at -= a.count[r++];
  if (r == a.n_runs) return;
  U *run = static_cast<U *>(a.part[part].rows) + (a.start[r] + at) * units;
  U *tile = static_cast<U *>(a.part[part].tile) + row * units;
  U *to = a.unpack ? run : tile;
  const U *from = a.unpack ? tile : run;
  for (int64_t i = threadIdx.x % 32; i < units; i += 32) to[i] = from[i];
}

template <class U> void pack_part(const llep_pack_args *a, int part, int64_t rows, cudaStream_t stream) {
  pack_rows<U><<<lev_grid(rows, kThreads / 32, INT32_MAX), kThreads, 0, stream>>>(
      *a, part, (int64_t)(a->part[part].row_bytes / sizeof(U)));
}

lev_status pack(const llep_pack_args *a, cudaStream_t stream) {
  int64_t rows = 0;
  for (int r = 0; r < a->n_runs; ++r) rows += a->count[r];
  for (int i = 0; i < a->n_parts && rows > 0; ++i) {
    const void *at = a->part[i].rows, *tile = a->part[i].tile;
    size_t bytes = a->part[i].row_bytes;
    if (lev_divides(16, at, tile, bytes))
      pack_part<uint4>(a, i, rows, stream);
    else if (lev_divides(4, at, tile, bytes))
      pack_part<uint32_t>(a, i, rows, stream);
    else
      pack_part<uint16_t>(a, i, rows, stream);
  }
  return lev_cuda_launched("llep.pack");
}

/* ---- activation ---- */

__device__ __forceinline__ float sigmoid(float x) {
  return 1 / (1 + expf(-x));
}
__device__ __forceinline__ double sigmoid(double x) {
  return 1 / (1 + exp(-x));
}

/* One block per row. */
template <class T, int per> __global__ void __launch_bounds__(kThreads) act_rows(llep_act_args a) {
  using A = lev_arith<T>;
  using vec = lev_vec<T, per>;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    T *gate = static_cast<T *>(a.h) + r * 2 * a.inter;
    for (int64_t i = (int64_t)threadIdx.x * per; i < a.inter; i += kThreads * per) {
      vec g = *reinterpret_cast<vec *>(gate + i), u = *reinterpret_cast<vec *>(gate + a.inter + i);
      for (int k = 0; k < per; ++k) {
        A x = lev_load(g.at[k]);
        g.at[k] = lev_store<T>(x * sigmoid(x) * lev_load(u.at[k]));
      }
      *reinterpret_cast<vec *>(gate + i) = g;
    }
  }
}

template <class T> lev_status act(const llep_act_args *a, cudaStream_t stream) {
  unsigned grid = lev_grid(a->rows, 1);
  if (a->rows > 0 && lev_divides(16, a->h, (size_t)a->inter * sizeof(T)))
    act_rows<T, lev_per_16<T>><<<grid, kThreads, 0, stream>>>(*a);
  else if (a->rows > 0)
    act_rows<T, 1><<<grid, kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("llep.act");
}

/* One block per row: the gradient of the route weight is a sum over it. */
template <class T, int per> __global__ void __launch_bounds__(kThreads) act_backward_rows(llep_act_backward_args a) {
  using A = lev_arith<T>;
  using vec = lev_vec<T, per>;
  __shared__ A memory[kThreads / 32];
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    T *gate = static_cast<T *>(a.h) + r * 2 * a.inter, *up = gate + a.inter, *q = static_cast<T *>(a.q) + r * a.inter;
    A p = static_cast<const A *>(a.p)[r], dot = 0;
    for (int64_t i = (int64_t)threadIdx.x * per; i < a.inter; i += kThreads * per) {
      vec gs = *reinterpret_cast<vec *>(gate + i), us = *reinterpret_cast<vec *>(up + i);
      vec ds = *reinterpret_cast<vec *>(q + i);
      for (int k = 0; k < per; ++k) {
        A g = lev_load(gs.at[k]), u = lev_load(us.at[k]), d = lev_load(ds.at[k]);
        A s = sigmoid(g), silu = g * s;
        dot += d * (silu * u);
        ds.at[k] = lev_store<T>(p * (silu * u));
        gs.at[k] = lev_store<T>(p * (d * u * (s + silu * (1 - s))));
        us.at[k] = lev_store<T>(p * (d * silu));
      }
      *reinterpret_cast<vec *>(gate + i) = gs, *reinterpret_cast<vec *>(up + i) = us;
      *reinterpret_cast<vec *>(q + i) = ds;
    }
    dot = lev_block_sum<kThreads>(dot, memory); /* its barrier also ends the reading of p */
    if (threadIdx.x == 0) static_cast<A *>(a.p)[r] = dot;
    __syncthreads();
  }
}

template <class T> lev_status act_backward(const llep_act_backward_args *a, cudaStream_t stream) {
  unsigned grid = lev_grid(a->rows, 1);
  if (a->rows > 0 && lev_divides(16, a->h, a->q, (size_t)a->inter * sizeof(T)))
    act_backward_rows<T, lev_per_16<T>><<<grid, kThreads, 0, stream>>>(*a);
  else if (a->rows > 0)
    act_backward_rows<T, 1><<<grid, kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("llep.act_backward");
}

/* ---- combine ---- */

/* One block per token; the k rows are added in the order of the token's picks. */
template <class T, int per> __global__ void __launch_bounds__(kThreads) combine_tokens(llep_combine_args a) {
  using A = lev_arith<T>;
  using vec = lev_vec<T, per>;
  int64_t token = chunk_token(blockIdx.x, a.tokens, a.blocks, a.first, a.last);
  if (token < 0) return;
  const int32_t *route = a.routes + token * a.top_k;
  const A *probs = a.probs ? static_cast<const A *>(a.probs) + token * a.top_k : nullptr;
  const T *rows = static_cast<const T *>(a.rows);
  T *out = static_cast<T *>(a.out) + token * a.hidden;
  for (int64_t c = (int64_t)threadIdx.x * per; c < a.hidden; c += kThreads * per) {
    A sum[per] = {};
#pragma unroll 4
    for (int64_t j = 0; j < a.top_k; ++j) {
      vec row = *reinterpret_cast<const vec *>(rows + route[j] * a.hidden + c);
      A p = probs ? probs[j] : A(1);
      for (int k = 0; k < per; ++k) sum[k] += p * lev_load(row.at[k]);
    }
    vec to;
    if (a.accumulate) {
      to = *reinterpret_cast<const vec *>(out + c);
      for (int k = 0; k < per; ++k) sum[k] = lev_load(to.at[k]) + sum[k];
    }
    for (int k = 0; k < per; ++k) to.at[k] = lev_store<T>(sum[k]);
    *reinterpret_cast<vec *>(out + c) = to;
  }
  if (!a.scalars) return;
  for (int64_t j = threadIdx.x; j < a.top_k; j += kThreads)
    static_cast<A *>(a.scalars)[token * a.top_k + j] = static_cast<const A *>(a.row_scalars)[route[j]];
}

template <class T> lev_status combine(const llep_combine_args *a, cudaStream_t stream) {
  int64_t length = chunk_length(a->tokens, a->blocks, a->first, a->last);
  if (length > INT32_MAX) return lev_fail(LEV_ERR_UNSUPPORTED, "llep.combine: more than 2^31 - 1 tokens in a chunk");
  if (length > 0 && lev_divides(16, a->rows, a->out, (size_t)a->hidden * sizeof(T)))
    combine_tokens<T, lev_per_16<T>><<<(unsigned)length, kThreads, 0, stream>>>(*a);
  else if (length > 0)
    combine_tokens<T, 1><<<(unsigned)length, kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("llep.combine");
}

/* ---- add ---- */

template <class A, int per> __global__ void __launch_bounds__(kThreads) add_scalars(A *dst, const A *src, int64_t n) {
  using vec = lev_vec<A, per>;
  int64_t step = (int64_t)gridDim.x * kThreads;
  for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < n / per; i += step) {
    vec to = reinterpret_cast<vec *>(dst)[i], from = reinterpret_cast<const vec *>(src)[i];
    for (int k = 0; k < per; ++k) to.at[k] += from.at[k];
    reinterpret_cast<vec *>(dst)[i] = to;
  }
}

template <class A> lev_status add(const llep_add_args *a, cudaStream_t stream) {
  constexpr int per = lev_per_16<A>;
  A *dst = static_cast<A *>(a->dst);
  const A *src = static_cast<const A *>(a->src);
  if (a->n > 0 && lev_divides(16, a->dst, a->src, (size_t)a->n * sizeof(A)))
    add_scalars<A, per><<<lev_grid(a->n / per, kThreads), kThreads, 0, stream>>>(dst, src, a->n);
  else if (a->n > 0)
    add_scalars<A, 1><<<lev_grid(a->n, kThreads), kThreads, 0, stream>>>(dst, src, a->n);
  return lev_cuda_launched("llep.add");
}

} // namespace

lev_status llep_gather_cuda(const void *args, void *stream) {
  const llep_gather_args *a = static_cast<const llep_gather_args *>(args);
  return LEV_CUDA_PICK(a->dtype, gather)(a, static_cast<cudaStream_t>(stream));
}
lev_status llep_pack_cuda(const void *args, void *stream) {
  return pack(static_cast<const llep_pack_args *>(args), static_cast<cudaStream_t>(stream));
}
lev_status llep_act_cuda(const void *args, void *stream) {
  const llep_act_args *a = static_cast<const llep_act_args *>(args);
  return LEV_CUDA_PICK(a->dtype, act)(a, static_cast<cudaStream_t>(stream));
}
lev_status llep_act_backward_cuda(const void *args, void *stream) {
  const llep_act_backward_args *a = static_cast<const llep_act_backward_args *>(args);
  return LEV_CUDA_PICK(a->dtype, act_backward)(a, static_cast<cudaStream_t>(stream));
}
lev_status llep_combine_cuda(const void *args, void *stream) {
  const llep_combine_args *a = static_cast<const llep_combine_args *>(args);
  return LEV_CUDA_PICK(a->dtype, combine)(a, static_cast<cudaStream_t>(stream));
}
lev_status llep_add_cuda(const void *args, void *stream) {
  const llep_add_args *a = static_cast<const llep_add_args *>(args);
  return (a->arith == LEV_F64 ? add<double> : add<float>)(a, static_cast<cudaStream_t>(stream));
}
