/* SPDX-License-Identifier: Apache-2.0 */
/* RMS norm on the GPU. Rows of at most 1024 packs of 16 bytes, aligned, stay in registers between the sum and the
 * result; others are read twice. */
#include "harness/model/ops.h"
#include "harness/model/rows.cuh"

namespace {

using namespace lev_rows;

constexpr int kMostParts = kMultiprocessors * 8;

/* ---- forward ---- */

template <class T, int team, int most>
__global__ void __launch_bounds__(threads_of<team>) forward_packed(const lev_rmsnorm_args a) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>, rows_at_once = threads_of<team> / team;
  __shared__ A memory[threads_of<team> / 32];
  const int lane = threadIdx.x % team;
  const int64_t packs = a.cols / width;
  for (int64_t first = (int64_t)blockIdx.x * rows_at_once; first < a.rows; first += (int64_t)gridDim.x * rows_at_once) {
    int64_t row = first + threadIdx.x / team;
    bool inside = row < a.rows;
    const T *x = (const T *)a.x + row * a.cols;
    pack<T> kept[most];
    A sum[1] = {0};
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (inside && lane + k * team < packs) kept[k] = load16(x + (lane + k * team) * width);
#pragma unroll
    for (int k = 0; k < most; ++k)
      if (inside && lane + k * team < packs)
        for (int i = 0; i < width; ++i) sum[0] += lev_load(kept[k].at[i]) * lev_load(kept[k].at[i]);
    team_sums<team>(sum, memory);
    A scale = inverse_rms(sum[0], (A)(1.0 / (double)a.cols), (A)a.eps);
#pragma unroll
    for (int k = 0; k < most; ++k) {
      int64_t at = (lane + k * team) * width;
      if (!inside || at >= a.cols) continue;
      pack<T> w = load16((const T *)a.w + at), y;
      for (int i = 0; i < width; ++i) y.at[i] = lev_store<T>(lev_load(kept[k].at[i]) * scale * lev_load(w.at[i]));
      store16((T *)a.y + row * a.cols + at, y);
    }
  }
}

template <class T> __global__ void __launch_bounds__(256) forward_any(const lev_rmsnorm_args a) {
  using A = lev_arith<T>;
  __shared__ A memory[8];
  const T *w = (const T *)a.w;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T *x = (const T *)a.x + row * a.cols;
    T *y = (T *)a.y + row * a.cols;
    A sum[1] = {0};
    for (int64_t i = threadIdx.x; i < a.cols; i += 256) sum[0] += lev_load(x[i]) * lev_load(x[i]);
    team_sums<256>(sum, memory);
    A scale = inverse_rms(sum[0], (A)(1.0 / (double)a.cols), (A)a.eps);
    for (int64_t i = threadIdx.x; i < a.cols; i += 256) y[i] = lev_store<T>(lev_load(x[i]) * scale * lev_load(w[i]));
  }
}

template <class T, int team, int most> void launch_forward(const lev_rmsnorm_args *a, cudaStream_t stream) {
  constexpr int threads = threads_of<team>;
  unsigned blocks = blocks_for(a->rows, threads / team, kMultiprocessors * 16);
  forward_packed<T, team, most><<<blocks, threads, 0, stream>>>(*a);
}

template <class T> lev_status forward(const lev_rmsnorm_args *a, cudaStream_t stream) {
  int64_t packs = a->cols / lev_per_16<T>;
  bool aligned = lev_divides(16, a->x, a->w, a->y, (size_t)a->cols * sizeof(T));
  if (!aligned || packs > 1024)
    forward_any<T><<<blocks_for(a->rows, 1, kMultiprocessors * 8), 256, 0, stream>>>(*a);
  else if (packs <= 8)
    launch_forward<T, 8, 1>(a, stream);
  else if (packs <= 16)
    launch_forward<T, 16, 1>(a, stream);
  else if (packs <= 64)
    launch_forward<T, 32, 2>(a, stream);
  else if (packs <= 256)
    launch_forward<T, 32, 8>(a, stream);
  else
    launch_forward<T, 256, 4>(a, stream);
  return lev_cuda_launched("model.rmsnorm");
}

/* ---- backward ---- */

/* A thread's packs of a row. */
template <class T, int most, bool accumulate> struct row_packs {
  pack<T> x[most], dy[most], dx[accumulate ? most : 1];
};

template <class T, int team, int most, bool accumulate>
__device__ __forceinline__ void load_row(const lev_rmsnorm_backward_args &a, int64_t row, int lane,
                                         row_packs<T, most, accumulate> &out) {
  constexpr int width = lev_per_16<T>;
#pragma unroll
  for (int k = 0; k < most; ++k) {
    int64_t at = (lane + k * team) * width;
    bool inside = row < a.rows && at < a.cols;
    at += row * a.cols;
    out.x[k] = inside ? load16((const T *)a.x + at) : pack<T>{};
    out.dy[k] = inside ? load16((const T *)a.dy + at) : pack<T>{};
    if constexpr (accumulate) out.dx[k] = inside ? load16((const T *)a.dx + at) : pack<T>{};
  }
}

/* A team per row; the next row is fetched before this one's sums meet, and w stays in registers. Each block leaves its
 * rows' share of dw in partial[block]. The grid is as many blocks as are resident. */
template <class T, int team, int most, int resident, bool accumulate>
__global__ void __launch_bounds__(threads_of<team>, resident)
    backward_packed(const lev_rmsnorm_backward_args a, lev_arith<T> *partial) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>, threads = threads_of<team>, slots = threads / team;
  __shared__ A memory[2][threads / 32 * 2], stage[slots > 1 ? threads * most * width : 1];
  const int lane = threadIdx.x % team, slot = threadIdx.x / team;
  const int64_t stride = (int64_t)gridDim.x * slots;
  const A inverse_n = (A)(1.0 / (double)a.cols), eps = (A)a.eps;
  A dw[most][width] = {}, w[most][width];
  row_packs<T, most, accumulate> now, next;
#pragma unroll
  for (int k = 0; k < most; ++k)
    for (int i = 0; i < width; ++i) {
      int64_t at = (lane + k * team) * width + i;
      w[k][i] = at < a.cols ? lev_load(((const T *)a.w)[at]) : A(0);
    }
  load_row<T, team, most>(a, (int64_t)blockIdx.x * slots + slot, lane, next);
  int buffer = 0;
  for (int64_t first = (int64_t)blockIdx.x * slots; first < a.rows; first += stride, buffer ^= 1) {
    int64_t row = first + slot;
    A sums[2] = {0, 0};
    now = next;
    load_row<T, team, most>(a, row + stride, lane, next);
#pragma unroll
    for (int k = 0; k < most; ++k)
#pragma unroll
      for (int i = 0; i < width; ++i) {
        A x = lev_load(now.x[k].at[i]);
        sums[0] += x * x;
        sums[1] += lev_load(now.dy[k].at[i]) * w[k][i] * x;
      }
    if constexpr (team > 32)
      team_sums_once<team>(sums, memory[buffer]);
    else
      team_sums<team>(sums, memory[0]);
    A scale = inverse_rms(sums[0], inverse_n, eps), pull = sums[1] * scale * scale * scale * inverse_n;
#pragma unroll
    for (int k = 0; k < most; ++k) {
      int64_t at = (lane + k * team) * width;
      pack<T> out;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        A x = lev_load(now.x[k].at[i]), g = lev_load(now.dy[k].at[i]) * scale, value = g * w[k][i] - x * pull;
        if (row < a.rows) dw[k][i] += g * x; /* rows past the end are zeros, whose norm may be infinite */
        if constexpr (accumulate) value += lev_load(now.dx[k].at[i]);
        out.at[i] = lev_store<T>(value);
      }
      if (row < a.rows && at < a.cols) store16((T *)a.dx + row * a.cols + at, out);
    }
  }
  partial += (int64_t)blockIdx.x * a.cols;
#pragma unroll
  for (int k = 0; k < most; ++k)
    for (int i = 0; i < width; ++i) {
      int64_t at = (lane + k * team) * width + i;
      if (slots > 1)
        stage[(threadIdx.x * most + k) * width + i] = dw[k][i];
      else if (at < a.cols)
        partial[at] = dw[k][i];
    }
  if (slots == 1) return;
  __syncthreads();
  for (int at = threadIdx.x; at < a.cols; at += threads) {
    int owner = at / width % team, k = at / width / team;
    A sum = 0;
    for (int s = 0; s < slots; ++s) sum += stage[((s * team + owner) * most + k) * width + at % width];
    partial[at] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(256) backward_any(const lev_rmsnorm_backward_args a, lev_arith<T> *partial) {
  using A = lev_arith<T>;
  __shared__ A memory[16];
  const T *w = (const T *)a.w;
  partial += (int64_t)blockIdx.x * a.cols;
  for (int64_t i = threadIdx.x; i < a.cols; i += 256) partial[i] = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T *x = (const T *)a.x + row * a.cols, *dy = (const T *)a.dy + row * a.cols;
    T *dx = (T *)a.dx + row * a.cols;
    A sums[2] = {0, 0};
    for (int64_t i = threadIdx.x; i < a.cols; i += 256) {
      A xi = lev_load(x[i]);
      sums[0] += xi * xi;
      sums[1] += lev_load(dy[i]) * lev_load(w[i]) * xi;
    }
    team_sums<256>(sums, memory);
    A scale = inverse_rms(sums[0], (A)(1.0 / (double)a.cols), (A)a.eps);
    A pull = sums[1] * scale * scale * scale / (A)a.cols;
    for (int64_t i = threadIdx.x; i < a.cols; i += 256) {
      A xi = lev_load(x[i]), g = lev_load(dy[i]), value = scale * g * lev_load(w[i]) - xi * pull;
      partial[i] += g * xi * scale;
      dx[i] = lev_store<T>(a.accumulate ? lev_load(dx[i]) + value : value);
    }
  }
}

template <class T, int team, int most, int resident>
unsigned launch_backward(const lev_rmsnorm_backward_args *a, int64_t parts, cudaStream_t stream) {
  constexpr int threads = threads_of<team>;
  unsigned blocks = blocks_for(a->rows, threads / team, lev_min_i64(parts, kMultiprocessors * resident));
  lev_arith<T> *partial = (lev_arith<T> *)a->scratch;
  if (a->accumulate)
    backward_packed<T, team, most, resident, true><<<blocks, threads, 0, stream>>>(*a, partial);
  else
    backward_packed<T, team, most, resident, false><<<blocks, threads, 0, stream>>>(*a, partial);
  return blocks;
}

template <class T> lev_status backward(const lev_rmsnorm_backward_args *a, cudaStream_t stream) {
  using A = lev_arith<T>;
  int64_t packs = a->cols / lev_per_16<T>, parts = parts_in(a->scratch_bytes, a->cols, sizeof(A), kMostParts);
  if (parts < 1)
    return lev_fail(LEV_ERR_CAPACITY, "model.rmsnorm_backward needs a scratch of %zu bytes at least, it has %zu",
                    (size_t)a->cols * sizeof(A), a->scratch_bytes);
  bool aligned = lev_divides(16, a->x, a->w, a->dy, a->dx, (size_t)a->cols * sizeof(T));
  unsigned blocks;
  if (!aligned || packs > 1024) {
    blocks = blocks_for(a->rows, 1, parts);
    backward_any<T><<<blocks, 256, 0, stream>>>(*a, (A *)a->scratch);
  } else if (packs <= 8) {
    blocks = launch_backward<T, 8, 1, 4>(a, parts, stream);
  } else if (packs <= 32) {
    blocks = launch_backward<T, 32, 1, 4>(a, parts, stream);
  } else if (packs <= 128) {
    blocks = launch_backward<T, 128, 1, 8>(a, parts, stream);
  } else if (packs <= 256) {
    blocks = launch_backward<T, 256, 1, 4>(a, parts, stream);
  } else if (packs <= 512) {
    blocks = launch_backward<T, 256, 2, 2>(a, parts, stream);
  } else {
    blocks = launch_backward<T, 256, 4, 1>(a, parts, stream);
  }
  LEV_TRY(lev_cuda_launched("model.rmsnorm_backward"));
  return fold((const A *)a->scratch, blocks, a->cols, a->cols, (A *)a->dw, stream);
}

} // namespace

lev_status lev_rmsnorm_cuda(const void *args, void *stream) {
  const lev_rmsnorm_args *a = (const lev_rmsnorm_args *)args;
  if (a->rows == 0 || a->cols == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, forward)(a, (cudaStream_t)stream);
}

lev_status lev_rmsnorm_backward_cuda(const void *args, void *stream) {
  const lev_rmsnorm_backward_args *a = (const lev_rmsnorm_backward_args *)args;
  if (a->rows == 0 || a->cols == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, backward)(a, (cudaStream_t)stream);
}
