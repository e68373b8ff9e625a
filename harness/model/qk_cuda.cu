/* SPDX-License-Identifier: Apache-2.0 */
/* Norm, clamping and rotary embedding of queries, keys and values on the GPU, in one pass over memory.
 *
 * By packs of 16 bytes where it can (qk_packed.cuh); heads whose halves are no whole packs, or that are too large or
 * not aligned, go element by element. */
#include "harness/model/qk_packed.cuh"

namespace {

constexpr int kMostParts = kMultiprocessors * 8;

/* ---- any shape: a block per row, a warp per head, element by element ---- */

template <class T>
__device__ __forceinline__ lev_arith<T> value_of(const qk_job &j, const T *x, int64_t i, int64_t w_at,
                                                 lev_arith<T> scale) {
  return j.a.norm == LEV_QK_NORM_NONE ? lev_load(x[i]) : lev_load(x[i]) * scale * lev_load(((const T *)j.a.w)[w_at]);
}

/* 1 / rms of the row or head, to every thread that needs it. */
template <class T>
__device__ __forceinline__ lev_arith<T> scale_of(const qk_job &j, const T *x, int64_t n, bool whole_block,
                                                 lev_arith<T> *memory) {
  lev_arith<T> sum[1] = {0};
  for (int64_t i = whole_block ? threadIdx.x : threadIdx.x % 32; i < n; i += whole_block ? 256 : 32)
    sum[0] += lev_load(x[i]) * lev_load(x[i]);
  if (whole_block)
    team_sums<256>(sum, memory);
  else
    team_sums<32>(sum, memory);
  return inverse_rms(sum[0], (lev_arith<T>)(1.0 / (double)n), (lev_arith<T>)j.a.eps);
}

template <class T> __global__ void __launch_bounds__(256) forward_any(const __grid_constant__ qk_job j) {
  using A = lev_arith<T>;
  __shared__ A memory[8];
  const int64_t dim = j.a.head_dim, half = dim / 2, cols = j.a.heads * dim;
  const A clip = (A)j.a.clip;
  for (int64_t row = blockIdx.x; row < j.a.rows; row += gridDim.x) {
    const T *x = (const T *)j.a.x + row * cols;
    T *y = (T *)j.a.y + row * cols;
    A scale = 1;
    if (j.a.norm == LEV_QK_NORM_FULL) scale = scale_of<T>(j, x, cols, true, memory);
    for (int64_t h = threadIdx.x / 32; h < j.a.heads; h += 8) {
      int64_t base = h * dim, w_base = j.a.norm == LEV_QK_NORM_FULL ? base : 0;
      if (j.a.norm == LEV_QK_NORM_HEAD) scale = scale_of<T>(j, x + base, dim, false, memory);
      for (int64_t i = threadIdx.x % 32; i < dim - half; i += 32) {
        A u = clamp(value_of<T>(j, x, base + i, w_base + i, scale), clip), v = 0, c, s;
        if (i < half) v = clamp(value_of<T>(j, x, base + half + i, w_base + half + i, scale), clip);
        if (j.a.position && i < half) {
          turn((double)j.a.position[row], j.frequency[i], j.factor, &c, &s);
          A u0 = u;
          u = u0 * c - v * s, v = v * c + u0 * s;
        }
        y[base + i] = lev_store<T>(u);
        if (i < half) y[base + half + i] = lev_store<T>(v);
      }
    }
  }
}

/* The pair (i, half + i) of a head: gradients turned back and masked. */
template <class T>
__device__ __forceinline__ void pair_gradient(const qk_job &j, const T *x, const T *dy, int64_t row, int64_t base,
                                              int64_t w_base, int64_t i, lev_arith<T> scale, lev_arith<T> (&g)[2]) {
  using A = lev_arith<T>;
  const int64_t half = j.a.head_dim / 2;
  const A clip = (A)j.a.clip;
  A c, s;
  g[0] = lev_load(dy[base + i]), g[1] = i < half ? lev_load(dy[base + half + i]) : A(0);
  if (j.a.position && i < half) {
    turn((double)j.a.position[row], j.frequency[i], j.factor, &c, &s);
    A u = g[0];
    g[0] = u * c + g[1] * s, g[1] = g[1] * c - u * s;
  }
  if (!(clip > 0)) return;
  for (int part = 0; part < (i < half ? 2 : 1); ++part) {
    A v = value_of<T>(j, x, base + part * half + i, w_base + part * half + i, scale);
    if (v > clip || v < -clip) g[part] = 0;
  }
}

/* A warp's row of `partial`: [cols] per block, or [head_dim] per warp. */
template <class T>
__global__ void __launch_bounds__(256) backward_any(const __grid_constant__ qk_job j, lev_arith<T> *partial) {
  using A = lev_arith<T>;
  __shared__ A memory[8];
  const int64_t dim = j.a.head_dim, half = dim / 2, cols = j.a.heads * dim;
  const bool full = j.a.norm == LEV_QK_NORM_FULL, normed = j.a.norm != LEV_QK_NORM_NONE;
  const int64_t n = full ? cols : dim;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  partial += full ? blockIdx.x * cols : (blockIdx.x * 8 + warp) * dim;
  if (full)
    for (int64_t h = warp; h < j.a.heads; h += 8)
      for (int64_t i = lane; i < dim - half; i += 32) {
        partial[h * dim + i] = 0;
        if (i < half) partial[h * dim + half + i] = 0;
      }
  else if (normed)
    for (int64_t i = lane; i < dim - half; i += 32) {
      partial[i] = 0;
      if (i < half) partial[half + i] = 0;
    }
  for (int64_t row = blockIdx.x; row < j.a.rows; row += gridDim.x) {
    const T *x = (const T *)j.a.x + row * cols, *dy = (const T *)j.a.dy + row * cols;
    T *dx = (T *)j.a.dx + row * cols;
    A scale = 1, dot[1] = {0}, g[2];
    if (full) {
      scale = scale_of<T>(j, x, cols, true, memory);
      for (int64_t h = warp; h < j.a.heads; h += 8)
        for (int64_t i = lane; i < dim - half; i += 32) {
          pair_gradient<T>(j, x, dy, row, h * dim, h * dim, i, scale, g);
          for (int part = 0; part < (i < half ? 2 : 1); ++part) {
            int64_t at = h * dim + part * half + i;
            dot[0] += g[part] * lev_load(((const T *)j.a.w)[at]) * lev_load(x[at]);
          }
        }
      team_sums<256>(dot, memory);
    }
    for (int64_t h = warp; h < j.a.heads; h += 8) {
      int64_t base = h * dim, w_base = full ? base : 0;
      if (j.a.norm == LEV_QK_NORM_HEAD) {
        scale = scale_of<T>(j, x + base, dim, false, memory);
        dot[0] = 0;
        for (int64_t i = lane; i < dim - half; i += 32) {
          pair_gradient<T>(j, x, dy, row, base, 0, i, scale, g);
          for (int part = 0; part < (i < half ? 2 : 1); ++part)
            dot[0] += g[part] * lev_load(((const T *)j.a.w)[part * half + i]) * lev_load(x[base + part * half + i]);
        }
        team_sums<32>(dot, memory);
      }
      A pull = dot[0] * scale * scale * scale / (A)n;
      for (int64_t i = lane; i < dim - half; i += 32) {
        pair_gradient<T>(j, x, dy, row, base, w_base, i, scale, g);
        for (int part = 0; part < (i < half ? 2 : 1); ++part) {
          int64_t at = part * half + i;
          if (!normed) {
            dx[base + at] = lev_store<T>(g[part]);
            continue;
          }
          A v = lev_load(x[base + at]);
          dx[base + at] = lev_store<T>(scale * g[part] * lev_load(((const T *)j.a.w)[w_base + at]) - v * pull);
          partial[w_base + at] += g[part] * v * scale;
        }
      }
    }
  }
}

/* ---- launches ---- */

template <class T> void prepare(const lev_qk_args *a, qk_job *j) {
  j->a = *a;
  j->factor = 1;
  if (a->position) j->factor = lev_rope_frequencies(&a->rope, a->head_dim, j->frequency);
  for (int64_t i = 0; i < a->head_dim / 2 && a->position && sizeof(T) != 8; ++i)
    j->frequency[i] /= 6.283185307179586476925;
}

/* Threads per head for packs; 0 where packs do not fit. */
template <class T> int lanes_of(const lev_qk_args *a, const void *p, const void *q) {
  int64_t half = a->head_dim / 2, pairs = half / lev_per_16<T>;
  bool whole = a->head_dim % 2 == 0 && half % lev_per_16<T> == 0;
  if (!whole || pairs > 32 || pairs < 1 || !lev_divides(16, a->x, a->w, p, q)) return 0;
  int lanes = 1;
  while (lanes < pairs) lanes *= 2;
  return lanes;
}

/* Grids are as many blocks as are resident: each goes through its rows. So many must find room. */
template <class K> lev_status use_memory(K kernel) {
  LEV_TRY(lev_allow_shared(kernel));
  LEV_CUDA_TRY(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  return LEV_OK;
}

template <class T, lev_qk_norm norm, int team, int threads, int most, int depth, int resident>
lev_status launch_forward(const qk_job &j, cudaStream_t stream) {
  using memory = shared_memory<T, team, threads, most, depth, 1>;
  auto kernel = forward_packed<T, team, threads, most, depth, resident, norm>;
  size_t bytes = memory::bytes(j.a);
  LEV_TRY(use_memory(kernel));
  kernel<<<blocks_for(j.a.rows, memory::teams, kMultiprocessors * resident), threads, bytes, stream>>>(j);
  return lev_cuda_launched("model.qk");
}

template <class T> lev_status forward(const lev_qk_args *a, cudaStream_t stream) {
  qk_job j;
  prepare<T>(a, &j);
  j.lanes = lanes_of<T>(a, a->y, nullptr);
  int64_t threads = a->heads * j.lanes; /* of a row with one pair each */
  bool full = a->norm == LEV_QK_NORM_FULL;
  if (j.lanes == 0 || (full && threads > 1024)) {
    forward_any<T><<<blocks_for(a->rows, 1, kMultiprocessors * 8), 256, 0, stream>>>(j);
    return lev_cuda_launched("model.qk");
  }
  if (a->norm == LEV_QK_NORM_NONE) return launch_forward<T, LEV_QK_NORM_NONE, 32, 128, 2, 3, 5>(j, stream);
  if (a->norm == LEV_QK_NORM_HEAD) return launch_forward<T, LEV_QK_NORM_HEAD, 32, 256, 2, 4, 2>(j, stream);
  if (threads <= 64) return launch_forward<T, LEV_QK_NORM_FULL, 32, 128, 2, 3, 4>(j, stream);
  if (threads <= 128) return launch_forward<T, LEV_QK_NORM_FULL, 128, 128, 1, 4, 5>(j, stream);
  if (threads <= 256) return launch_forward<T, LEV_QK_NORM_FULL, 256, 256, 1, 4, 2>(j, stream);
  return launch_forward<T, LEV_QK_NORM_FULL, 256, 256, 4, 2, 2>(j, stream);
}

template <class T, lev_qk_norm norm, int most, int depth, int resident, bool clipped>
lev_status launch_heads(const qk_job &j, int64_t parts, unsigned *blocks, cudaStream_t stream) {
  constexpr int threads = 128;
  using memory = shared_memory<T, 32, threads, most, depth, norm != LEV_QK_NORM_NONE || clipped ? 2 : 1>;
  auto kernel = backward_heads<T, threads, most, depth, resident, norm, clipped>;
  size_t bytes = memory::bytes(j.a);
  LEV_TRY(use_memory(kernel));
  *blocks = blocks_for(j.a.rows, memory::teams, lev_min_i64(parts, kMultiprocessors * resident));
  kernel<<<*blocks, threads, bytes, stream>>>(j, (lev_arith<T> *)j.a.scratch);
  return lev_cuda_launched("model.qk_backward");
}

template <class T, int team, int most, int depth, int resident>
lev_status launch_full(const qk_job &j, int64_t parts, unsigned *blocks, cudaStream_t stream) {
  constexpr int threads = team > 128 ? team : 128;
  using memory = shared_memory<T, team, threads, most, depth, 2, true>;
  auto kernel = j.a.clip > 0 ? backward_full<T, team, threads, most, depth, resident, true>
                             : backward_full<T, team, threads, most, depth, resident, false>;
  size_t bytes = memory::bytes(j.a);
  LEV_TRY(use_memory(kernel));
  *blocks = blocks_for(j.a.rows, memory::teams, lev_min_i64(parts, kMultiprocessors * resident));
  kernel<<<*blocks, threads, bytes, stream>>>(j, (lev_arith<T> *)j.a.scratch);
  return lev_cuda_launched("model.qk_backward");
}

/* By packs; *blocks: how many left their share of dw. */
template <class T> lev_status backward_packed(const qk_job &j, int64_t parts, unsigned *blocks, cudaStream_t stream) {
  int64_t threads = j.a.heads * j.lanes;
  bool clipped = j.a.clip > 0;
  if (j.a.norm == LEV_QK_NORM_FULL) {
    if (threads <= 64) return launch_full<T, 32, 2, 2, 4>(j, parts, blocks, stream);
    if (threads <= 128) return launch_full<T, 128, 1, 3, 4>(j, parts, blocks, stream);
    if (threads <= 256) return launch_full<T, 256, 1, 3, 2>(j, parts, blocks, stream);
    return launch_full<T, 256, 2, 2, 1>(j, parts, blocks, stream);
  }
  if (j.a.norm == LEV_QK_NORM_HEAD)
    return clipped ? launch_heads<T, LEV_QK_NORM_HEAD, 2, 3, 4, true>(j, parts, blocks, stream)
                   : launch_heads<T, LEV_QK_NORM_HEAD, 2, 3, 4, false>(j, parts, blocks, stream);
  return clipped ? launch_heads<T, LEV_QK_NORM_NONE, 2, 3, 4, true>(j, parts, blocks, stream)
                 : launch_heads<T, LEV_QK_NORM_NONE, 2, 3, 4, false>(j, parts, blocks, stream);
}

template <class T> lev_status backward(const lev_qk_args *a, cudaStream_t stream) {
  using A = lev_arith<T>;
  qk_job j;
  prepare<T>(a, &j);
  j.lanes = lanes_of<T>(a, a->dy, a->dx);
  int64_t threads = a->heads * j.lanes, cols = a->heads * a->head_dim;
  bool full = a->norm == LEV_QK_NORM_FULL, normed = a->norm != LEV_QK_NORM_NONE;
  bool any = j.lanes == 0 || (full && threads > 512);
  int64_t sum = full ? cols : any ? 8 * a->head_dim : a->head_dim; /* values that a block leaves */
  int64_t parts = normed ? parts_in(a->scratch_bytes, sum, sizeof(A), kMostParts) : kMostParts;
  if (parts < 1)
    return lev_fail(LEV_ERR_CAPACITY, "model.qk_backward needs a scratch of %zu bytes at least, it has %zu",
                    (size_t)sum * sizeof(A), a->scratch_bytes);
  unsigned blocks = blocks_for(a->rows, 1, lev_min_i64(parts, kMultiprocessors * 4));
  if (any)
    backward_any<T><<<blocks, 256, 0, stream>>>(j, (A *)a->scratch);
  else
    LEV_TRY(backward_packed<T>(j, parts, &blocks, stream));
  LEV_TRY(lev_cuda_launched("model.qk_backward"));
  if (!normed) return LEV_OK;
  int64_t width = full ? cols : a->head_dim;
  return fold((const A *)a->scratch, blocks * (sum / width), width, width, (A *)a->dw, stream);
}

} // namespace

lev_status lev_qk_cuda(const void *args, void *stream) {
  const lev_qk_args *a = (const lev_qk_args *)args;
  if (a->rows == 0 || a->heads * a->head_dim == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, forward)(a, (cudaStream_t)stream);
}

lev_status lev_qk_backward_cuda(const void *args, void *stream) {
  const lev_qk_args *a = (const lev_qk_args *)args;
  if (a->rows == 0 || a->heads * a->head_dim == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, backward)(a, (cudaStream_t)stream);
}
