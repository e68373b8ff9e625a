/* SPDX-License-Identifier: Apache-2.0 */
/* Norm, clamping and rotary embedding of queries, keys and values on the GPU, in one pass over memory.
 *
 * A thread works on pairs of packs of 16 bytes: one of the first half of a head and its partner of the second half.
 * `lanes` consecutive threads (a power of two) take one head, so that each keeps its cosines and sines for all heads of
 * the row. Heads whose halves are no whole packs, or that are too large or not aligned, go element by element. */
#include "harness/model/ops.h"
#include "harness/model/rows.cuh"

namespace {

using namespace lev_rows;

constexpr int kMostParts = kMultiprocessors * 4, kHalfMax = LEV_HEAD_DIM_MAX / 2;

struct qk_job {
  lev_qk_args a;
  int lanes;                  /* threads per head */
  double factor;              /* on cosine and sine */
  double frequency[kHalfMax]; /* radians per position in f64, turns otherwise */
};

/* Cosine and sine of position * frequency. In f32 the angle is reduced in turns, in f64, so that no position is too
 * far. */
__device__ __forceinline__ void turn(double position, double frequency, double factor, double *c, double *s) {
  sincos(position * frequency, s, c);
  *c *= factor, *s *= factor;
}
__device__ __forceinline__ void turn(double position, double frequency, double factor, float *c, float *s) {
  double turns = position * frequency;
  sincospif(2 * (float)(turns - rint(turns)), s, c);
  *c *= (float)factor, *s *= (float)factor;
}

template <class A> __device__ __forceinline__ A inverse_rms(A sum_of_squares, int64_t cols, double eps) {
  return 1 / sqrt(sum_of_squares / (A)cols + (A)eps);
}
template <class A> __device__ __forceinline__ A clamp(A x, A clip) {
  return clip > 0 ? (x > clip ? clip : x < -clip ? -clip : x) : x;
}
template <class A> __device__ __forceinline__ A head_sum(A x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/* ---- packs ---- */

/* Where a thread's packs lie. */
struct place {
  int pair, first_head, heads_at_once, width, half, dim;
  bool used; /* heads of no power of two leave threads over */
  __device__ int64_t low(int head) const { return (int64_t)head * dim + pair * width; }
};

template <class T, int team> __device__ __forceinline__ place place_of(const qk_job &j) {
  int lane = threadIdx.x % team;
  place p;
  p.width = lev_per_16<T>, p.dim = (int)j.a.head_dim, p.half = p.dim / 2;
  p.pair = lane % j.lanes, p.first_head = lane / j.lanes, p.heads_at_once = team / j.lanes;
  p.used = p.pair < p.half / p.width;
  return p;
}

template <class T>
__device__ __forceinline__ void turns_of(const qk_job &j, const double *frequency, const place &p, int64_t row,
                                         lev_arith<T> *c, lev_arith<T> *s) {
  double position = j.a.position[row];
#pragma unroll
  for (int i = 0; i < lev_per_16<T>; ++i) turn(position, frequency[p.pair * p.width + i], j.factor, &c[i], &s[i]);
}

template <class T, int most> struct head_packs { pack<T> at[most][2]; };

template <class T, int most>
__device__ __forceinline__ void load_heads(const T *row, const place &p, int head, int heads, bool inside,
                                           head_packs<T, most> &out) {
#pragma unroll
  for (int k = 0; k < most; ++k) {
    int h = head + k * p.heads_at_once;
    if (!inside || !p.used || h >= heads) {
      out.at[k][0] = out.at[k][1] = pack<T>{};
      continue;
    }
    out.at[k][0] = load16(row + p.low(h));
    out.at[k][1] = load16(row + p.low(h) + p.half);
  }
}

/* 1 / rms for each of the heads held. */
template <class T, int team, int most>
__device__ __forceinline__ void scales(const qk_job &j, const head_packs<T, most> &x, lev_arith<T> *memory,
                                       lev_arith<T> (&scale)[most]) {
  using A = lev_arith<T>;
  A all[1] = {0};
#pragma unroll
  for (int k = 0; k < most; ++k) {
    A sum = 0;
    scale[k] = 1;
    if (j.a.norm == LEV_QK_NORM_NONE) continue;
#pragma unroll
    for (int part = 0; part < 2; ++part)
      for (int i = 0; i < lev_per_16<T>; ++i) sum += lev_load(x.at[k][part].at[i]) * lev_load(x.at[k][part].at[i]);
    if (j.a.norm == LEV_QK_NORM_HEAD)
      scale[k] = inverse_rms(head_sum(sum, j.lanes), j.a.head_dim, j.a.eps);
    else
      all[0] += sum;
  }
  if (j.a.norm != LEV_QK_NORM_FULL) return;
  team_sums<team>(all, memory);
  for (int k = 0; k < most; ++k) scale[k] = inverse_rms(all[0], j.a.heads * j.a.head_dim, j.a.eps);
}

template <class T> __device__ __forceinline__ pack<T> weights(const qk_job &j, const place &p, int head, int part) {
  int64_t at = j.a.norm == LEV_QK_NORM_FULL ? p.low(head) : p.pair * p.width;
  return load16((const T *)j.a.w + at + part * p.half);
}

template <class T, int team, int most>
__global__ void __launch_bounds__(threads_of<team>) forward_packed(const __grid_constant__ qk_job j) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>, rows_at_once = threads_of<team> / team;
  __shared__ double frequency[kHalfMax];
  __shared__ A memory[threads_of<team> / 32];
  const place p = place_of<T, team>(j);
  const int heads = (int)j.a.heads;
  const int64_t cols = j.a.heads * j.a.head_dim;
  const A clip = (A)j.a.clip;
  for (int i = threadIdx.x; i < p.half; i += threads_of<team>) frequency[i] = j.frequency[i];
  __syncthreads();
  for (int64_t first = (int64_t)blockIdx.x * rows_at_once; first < j.a.rows;
       first += (int64_t)gridDim.x * rows_at_once) {
    int64_t row = first + threadIdx.x / team;
    bool inside = row < j.a.rows;
    A c[width], s[width], scale[most];
    if (inside && p.used && j.a.position) turns_of<T>(j, frequency, p, row, c, s);
    for (int base = 0; base < heads; base += most * p.heads_at_once) {
      head_packs<T, most> x;
      load_heads<T, most>((const T *)j.a.x + row * cols, p, base + p.first_head, heads, inside, x);
      scales<T, team, most>(j, x, memory, scale);
#pragma unroll
      for (int k = 0; k < most; ++k) {
        int head = base + p.first_head + k * p.heads_at_once;
        if (!inside || !p.used || head >= heads) continue;
        A value[2][width];
        pack<T> out[2];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          pack<T> w = {};
          if (j.a.norm != LEV_QK_NORM_NONE) w = weights<T>(j, p, head, part);
#pragma unroll
          for (int i = 0; i < width; ++i) {
            A v = lev_load(x.at[k][part].at[i]);
            value[part][i] = clamp(j.a.norm != LEV_QK_NORM_NONE ? v * scale[k] * lev_load(w.at[i]) : v, clip);
          }
        }
#pragma unroll
        for (int i = 0; i < width; ++i) {
          A u = value[0][i], v = value[1][i];
          out[0].at[i] = lev_store<T>(j.a.position ? u * c[i] - v * s[i] : u);
          out[1].at[i] = lev_store<T>(j.a.position ? v * c[i] + u * s[i] : v);
        }
        T *y = (T *)j.a.y + row * cols + p.low(head);
        store16(y, out[0]);
        store16(y + p.half, out[1]);
      }
    }
  }
}

/* Sum of g w x for each of the heads held. */
template <class T, int team, int most>
__device__ __forceinline__ void pulls(const qk_job &j, const place &p, int head, bool inside,
                                      const head_packs<T, most> &x, const lev_arith<T> (&g)[most][2][lev_per_16<T>],
                                      lev_arith<T> *memory, const lev_arith<T> (&scale)[most],
                                      lev_arith<T> (&pull)[most]) {
  using A = lev_arith<T>;
  const bool full = j.a.norm == LEV_QK_NORM_FULL;
  const A n = (A)(full ? j.a.heads * j.a.head_dim : j.a.head_dim);
  A all[1] = {0};
#pragma unroll
  for (int k = 0; k < most; ++k) {
    A sum = 0;
    int h = head + k * p.heads_at_once;
    if (inside && p.used && h < j.a.heads) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        pack<T> w = weights<T>(j, p, h, part);
        for (int i = 0; i < lev_per_16<T>; ++i)
          sum += g[k][part][i] * lev_load(w.at[i]) * lev_load(x.at[k][part].at[i]);
      }
    }
    if (full)
      all[0] += sum;
    else
      pull[k] = head_sum(sum, j.lanes) * scale[k] * scale[k] * scale[k] / n;
  }
  if (!full) return;
  team_sums<team>(all, memory);
  for (int k = 0; k < most; ++k) pull[k] = all[0] * scale[k] * scale[k] * scale[k] / n;
}

/* g = dy turned back, 0 where the forward pass clamped. */
template <class T, int most>
__device__ __forceinline__ void turn_back(const qk_job &j, const place &p, int head, const head_packs<T, most> &x,
                                          const head_packs<T, most> &dy, const lev_arith<T> (&scale)[most],
                                          const lev_arith<T> *c, const lev_arith<T> *s,
                                          lev_arith<T> (&g)[most][2][lev_per_16<T>]) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>;
  const A clip = (A)j.a.clip;
#pragma unroll
  for (int k = 0; k < most; ++k) {
    int h = head + k * p.heads_at_once;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      A u = lev_load(dy.at[k][0].at[i]), v = lev_load(dy.at[k][1].at[i]);
      g[k][0][i] = j.a.position ? u * c[i] + v * s[i] : u;
      g[k][1][i] = j.a.position ? v * c[i] - u * s[i] : v;
    }
    if (!(clip > 0) || !p.used || h >= j.a.heads) continue;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      pack<T> w = {};
      if (j.a.norm != LEV_QK_NORM_NONE) w = weights<T>(j, p, h, part);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        A v = lev_load(x.at[k][part].at[i]);
        if (j.a.norm != LEV_QK_NORM_NONE) v = v * scale[k] * lev_load(w.at[i]);
        if (v > clip || v < -clip) g[k][part][i] = 0;
      }
    }
  }
}

/* Leaves partial[block] = the block's share of dw, [head_dim] with norms per head (full = false), else [cols]. */
template <class T, int team, int most, bool full>
__global__ void __launch_bounds__(threads_of<team>)
    backward_packed(const __grid_constant__ qk_job j, lev_arith<T> *partial) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>, threads = threads_of<team>, rows_at_once = threads / team;
  __shared__ double frequency[kHalfMax];
  __shared__ A memory[threads / 32], stage[full ? 1 : threads * 2 * width];
  const place p = place_of<T, team>(j);
  const int heads = (int)j.a.heads;
  const int64_t cols = j.a.heads * j.a.head_dim;
  const bool normed = j.a.norm != LEV_QK_NORM_NONE;
  A dw[full ? most : 1][2][width] = {};
  for (int i = threadIdx.x; i < p.half; i += threads) frequency[i] = j.frequency[i];
  __syncthreads();
  for (int64_t first = (int64_t)blockIdx.x * rows_at_once; first < j.a.rows;
       first += (int64_t)gridDim.x * rows_at_once) {
    int64_t row = first + threadIdx.x / team;
    bool inside = row < j.a.rows;
    A c[width], s[width];
    if (inside && p.used && j.a.position) turns_of<T>(j, frequency, p, row, c, s);
    for (int base = 0; base < heads; base += most * p.heads_at_once) {
      int head = base + p.first_head;
      head_packs<T, most> x, dy;
      A scale[most], pull[most], g[most][2][width];
      load_heads<T, most>((const T *)j.a.dy + row * cols, p, head, heads, inside, dy);
      load_heads<T, most>((const T *)j.a.x + row * cols, p, head, heads, inside && (normed || j.a.clip > 0), x);
      scales<T, team, most>(j, x, memory, scale);
      if (inside) turn_back<T, most>(j, p, head, x, dy, scale, c, s, g);
      if (normed) pulls<T, team, most>(j, p, head, inside, x, g, memory, scale, pull);
#pragma unroll
      for (int k = 0; k < most; ++k) {
        int h = head + k * p.heads_at_once;
        if (!inside || !p.used || h >= heads) continue;
        T *dx = (T *)j.a.dx + row * cols + p.low(h);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          pack<T> w = {}, out;
          if (normed) w = weights<T>(j, p, h, part);
#pragma unroll
          for (int i = 0; i < width; ++i) {
            A v = lev_load(x.at[k][part].at[i]), d = g[k][part][i];
            out.at[i] = lev_store<T>(normed ? scale[k] * d * lev_load(w.at[i]) - v * pull[k] : d);
            if (normed) dw[full ? k : 0][part][i] += d * v * scale[k];
          }
          store16(dx + part * p.half, out);
        }
      }
    }
  }
  if (!normed) return;
  if constexpr (full) {
    partial += (int64_t)blockIdx.x * cols;
#pragma unroll
    for (int k = 0; k < most; ++k) {
      int h = p.first_head + k * p.heads_at_once;
      if (!p.used || h >= heads) continue;
      for (int part = 0; part < 2; ++part)
        for (int i = 0; i < width; ++i) partial[p.low(h) + part * p.half + i] = dw[k][part][i];
    }
  } else {
    for (int part = 0; part < 2; ++part)
      for (int i = 0; i < width; ++i) stage[(threadIdx.x * 2 + part) * width + i] = dw[0][part][i];
    __syncthreads();
    for (int col = threadIdx.x; col < p.dim; col += threads) {
      int part = col >= p.half, at = col - part * p.half;
      A sum = 0;
      for (int t = at / width; t < threads; t += j.lanes) sum += stage[(t * 2 + part) * width + at % width];
      partial[(int64_t)blockIdx.x * p.dim + col] = sum;
    }
  }
}

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
  return inverse_rms(sum[0], n, j.a.eps);
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

template <class T> lev_status forward(const lev_qk_args *a, cudaStream_t stream) {
  qk_job j;
  prepare<T>(a, &j);
  j.lanes = lanes_of<T>(a, a->y, nullptr);
  int64_t threads = a->heads * j.lanes; /* of a row with one pair each */
  bool full = a->norm == LEV_QK_NORM_FULL;
  if (j.lanes == 0 || (full && threads > 1024))
    forward_any<T><<<blocks_for(a->rows, 1, kMultiprocessors * 8), 256, 0, stream>>>(j);
  else if (full && threads > 128)
    forward_packed<T, 256, 4><<<blocks_for(a->rows, 1, kMultiprocessors * 8), 256, 0, stream>>>(j);
  else
    forward_packed<T, 32, 4><<<blocks_for(a->rows, 8, kMultiprocessors * 8), 256, 0, stream>>>(j);
  return lev_cuda_launched("model.qk");
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
  int64_t parts = normed ? parts_in(a->scratch_bytes, sum, sizeof(A), kMostParts) : kMultiprocessors * 8;
  if (parts < 1)
    return lev_fail(LEV_ERR_CAPACITY, "model.qk_backward needs a scratch of %zu bytes at least, it has %zu",
                    (size_t)sum * sizeof(A), a->scratch_bytes);
  A *partial = (A *)a->scratch;
  unsigned blocks = blocks_for(a->rows, any || full ? 1 : 8, parts);
  if (any)
    backward_any<T><<<blocks, 256, 0, stream>>>(j, partial);
  else if (!full)
    backward_packed<T, 32, 2, false><<<blocks, 256, 0, stream>>>(j, partial);
  else if (threads <= 128)
    backward_packed<T, 128, 1, true><<<blocks, 128, 0, stream>>>(j, partial);
  else if (threads <= 256)
    backward_packed<T, 256, 1, true><<<blocks, 256, 0, stream>>>(j, partial);
  else
    backward_packed<T, 256, 2, true><<<blocks, 256, 0, stream>>>(j, partial);
  LEV_TRY(lev_cuda_launched("model.qk_backward"));
  if (!normed) return LEV_OK;
  int64_t width = full ? cols : a->head_dim;
  return fold((const A *)partial, blocks * (sum / width), width, width, (A *)a->dw, stream);
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
