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
/* Half a head that goes by packs: one pair for each lane of a warp at most. */
template <class T> constexpr int kPackedHalf = 32 * lev_per_16<T>;

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

/* Cosines and sines of a row are computed once for all of its heads: a team writes them to its table [half] and, behind
 * a barrier, each thread reads those of its pair. A gap after each pair's keeps the threads of a head on different
 * banks.
 */
template <class T> struct alignas(2 * sizeof(lev_arith<T>)) turns { lev_arith<T> c, s; };

template <class T> constexpr int kTable = kPackedHalf<T> + kPackedHalf<T> / lev_per_16<T>;
template <class T> __device__ __forceinline__ int place_of_turn(int i) {
  return i + i / lev_per_16<T>;
}

template <class T, int team>
__device__ __forceinline__ void write_turns(const qk_job &j, const double *frequency, const place &p, int64_t row,
                                            turns<T> *table) {
  if (!j.a.position || row >= j.a.rows) return;
  double position = j.a.position[row];
  for (int i = threadIdx.x % team; i < p.half; i += team)
    turn(position, frequency[i], j.factor, &table[place_of_turn<T>(i)].c, &table[place_of_turn<T>(i)].s);
}
/* Of `row` and of the block's row after it, so that a large block has work for all of its threads. */
template <class T, int team>
__device__ __forceinline__ void write_two_turns(const qk_job &j, const double *frequency, const place &p, int64_t row,
                                                turns<T> *first, turns<T> *second) {
  if (!j.a.position) return;
  for (int i = threadIdx.x; i < 2 * p.half; i += team) {
    bool after = i >= p.half;
    int pair = i - after * p.half;
    int64_t of = row + after * (int64_t)gridDim.x;
    turns<T> *to = (after ? second : first) + place_of_turn<T>(pair);
    if (of < j.a.rows) turn((double)j.a.position[of], frequency[pair], j.factor, &to->c, &to->s);
  }
}
template <class T>
__device__ __forceinline__ void read_turns(const qk_job &j, const turns<T> *table, const place &p,
                                           turns<T> (&own)[lev_per_16<T>]) {
#pragma unroll
  for (int i = 0; i < lev_per_16<T>; ++i) {
    if (j.a.position)
      own[i] = table[p.used ? p.pair * (p.width + 1) + i : 0];
    else
      own[i] = {1, 0};
  }
}

template <class T> struct pair_packs { pack<T> at[2]; }; /* of the first and of the second half of a head */

template <class T> __device__ __forceinline__ pair_packs<T> load_pair(const T *low, int half, bool inside) {
  pair_packs<T> out = {};
  if (inside) out.at[0] = load16(low), out.at[1] = load16(low + half);
  return out;
}
template <class T, int most>
__device__ __forceinline__ void load_heads(const T *row, const place &p, int head, int heads, bool inside,
                                           pair_packs<T> (&out)[most]) {
#pragma unroll
  for (int k = 0; k < most; ++k) {
    int h = head + k * p.heads_at_once;
    out[k] = load_pair(row + p.low(h), p.half, inside && p.used && h < heads);
  }
}

template <class T> __device__ __forceinline__ lev_arith<T> squares(const pair_packs<T> &x) {
  lev_arith<T> sum = 0;
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int i = 0; i < lev_per_16<T>; ++i) sum += lev_load(x.at[part].at[i]) * lev_load(x.at[part].at[i]);
  return sum;
}

/* The norm's weights for a pair; per head they are the same for all heads. */
template <class T, lev_qk_norm norm>
__device__ __forceinline__ pair_packs<T> weights(const qk_job &j, const place &p, int head) {
  int64_t at = norm == LEV_QK_NORM_FULL ? p.low(head) : p.pair * p.width;
  return load_pair((const T *)j.a.w + at, p.half, norm != LEV_QK_NORM_NONE && p.used);
}

template <class T, int team, int most, int resident, lev_qk_norm norm>
__global__ void __launch_bounds__(threads_of<team>, resident) forward_packed(const __grid_constant__ qk_job j) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>, rows_at_once = threads_of<team> / team;
  constexpr bool normed = norm != LEV_QK_NORM_NONE;
  __shared__ double frequency[kPackedHalf<T>];
  __shared__ turns<T> table[rows_at_once][kTable<T>];
  __shared__ A memory[threads_of<team> / 32];
  const place p = place_of<T, team>(j);
  const int heads = (int)j.a.heads;
  const int64_t cols = j.a.heads * j.a.head_dim;
  const A clip = (A)j.a.clip, eps = (A)j.a.eps;
  const A inverse_n = (A)(1.0 / (double)(norm == LEV_QK_NORM_FULL ? cols : j.a.head_dim));
  pair_packs<T> w = weights<T, norm>(j, p, 0);
  for (int i = threadIdx.x; i < p.half; i += threads_of<team>) frequency[i] = j.frequency[i];
  __syncthreads();
  for (int64_t first = (int64_t)blockIdx.x * rows_at_once; first < j.a.rows;
       first += (int64_t)gridDim.x * rows_at_once) {
    int64_t row = first + threadIdx.x / team;
    bool inside = row < j.a.rows;
    turns<T> own[width];
    for (int base = 0; base < heads; base += most * p.heads_at_once) {
      pair_packs<T> x[most];
      A scale[most], all[1] = {0};
      load_heads<T, most>((const T *)j.a.x + row * cols, p, base + p.first_head, heads, inside, x);
      if (base == 0) { /* while the loads are under way */
        team_barrier<team>();
        write_turns<T, team>(j, frequency, p, row, table[threadIdx.x / team]);
        team_barrier<team>();
        read_turns<T>(j, table[threadIdx.x / team], p, own);
      }
#pragma unroll
      for (int k = 0; k < most; ++k) {
        scale[k] = 1;
        if (norm == LEV_QK_NORM_HEAD) scale[k] = inverse_rms(head_sum(squares(x[k]), j.lanes), inverse_n, eps);
        if (norm == LEV_QK_NORM_FULL) all[0] += squares(x[k]);
      }
      if (norm == LEV_QK_NORM_FULL) {
        team_sums<team>(all, memory);
        all[0] = inverse_rms(all[0], inverse_n, eps);
      }
#pragma unroll
      for (int k = 0; k < most; ++k) {
        int head = base + p.first_head + k * p.heads_at_once;
        if (!inside || !p.used || head >= heads) continue;
        pair_packs<T> out;
        if (norm == LEV_QK_NORM_FULL) w = weights<T, norm>(j, p, head);
        A by = norm == LEV_QK_NORM_FULL ? all[0] : scale[k];
#pragma unroll
        for (int i = 0; i < width; ++i) {
          A u = lev_load(x[k].at[0].at[i]), v = lev_load(x[k].at[1].at[i]);
          if (normed) u = u * by * lev_load(w.at[0].at[i]), v = v * by * lev_load(w.at[1].at[i]);
          u = clamp(u, clip), v = clamp(v, clip);
          out.at[0].at[i] = lev_store<T>(u * own[i].c - v * own[i].s);
          out.at[1].at[i] = lev_store<T>(v * own[i].c + u * own[i].s);
        }
        T *y = (T *)j.a.y + row * cols + p.low(head);
        store16(y, out.at[0]);
        store16(y + p.half, out.at[1]);
      }
    }
  }
}

/* g = dy turned back, 0 where the forward pass clamped. */
template <class T, lev_qk_norm norm>
__device__ __forceinline__ void turn_back(const pair_packs<T> &x, const pair_packs<T> &w, const pair_packs<T> &dy,
                                          lev_arith<T> scale, lev_arith<T> clip, const turns<T> (&own)[lev_per_16<T>],
                                          lev_arith<T> (&g)[2][lev_per_16<T>]) {
  using A = lev_arith<T>;
#pragma unroll
  for (int i = 0; i < lev_per_16<T>; ++i) {
    A u = lev_load(dy.at[0].at[i]), v = lev_load(dy.at[1].at[i]);
    g[0][i] = u * own[i].c + v * own[i].s;
    g[1][i] = v * own[i].c - u * own[i].s;
  }
  if (!(clip > 0)) return;
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int i = 0; i < lev_per_16<T>; ++i) {
      A v = lev_load(x.at[part].at[i]);
      if (norm != LEV_QK_NORM_NONE) v = v * scale * lev_load(w.at[part].at[i]);
      if (v > clip || v < -clip) g[part][i] = 0;
    }
}

/* Sum of g w x. */
template <class T>
__device__ __forceinline__ lev_arith<T> products(const pair_packs<T> &x, const pair_packs<T> &w,
                                                 const lev_arith<T> (&g)[2][lev_per_16<T>]) {
  lev_arith<T> sum = 0;
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int i = 0; i < lev_per_16<T>; ++i) sum += g[part][i] * lev_load(w.at[part].at[i]) * lev_load(x.at[part].at[i]);
  return sum;
}

/* Writes a pair of dx; dw +=. */
template <class T, bool normed>
__device__ __forceinline__ void finish_pair(T *dx, int half, const pair_packs<T> &x, const pair_packs<T> &w,
                                            const lev_arith<T> (&g)[2][lev_per_16<T>], lev_arith<T> scale,
                                            lev_arith<T> pull, lev_arith<T> (&dw)[2][lev_per_16<T>]) {
  using A = lev_arith<T>;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    pack<T> out;
#pragma unroll
    for (int i = 0; i < lev_per_16<T>; ++i) {
      A v = lev_load(x.at[part].at[i]), d = g[part][i] * scale;
      out.at[i] = lev_store<T>(normed ? d * lev_load(w.at[part].at[i]) - v * pull : g[part][i]);
      if (normed) dw[part][i] += d * v;
    }
    store16(dx + part * half, out);
  }
}

/* A warp per row, `most` pairs of each thread at a time; norm none or per head; clipped: values may have been clamped.
 * Leaves partial[block] = the block's share of dw
 * [head_dim]. */
template <class T, int most, lev_qk_norm norm, bool clipped>
__global__ void __launch_bounds__(256, 2) backward_heads(const __grid_constant__ qk_job j, lev_arith<T> *partial) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>, team = 32;
  constexpr bool normed = norm != LEV_QK_NORM_NONE;
  __shared__ double frequency[kPackedHalf<T>];
  __shared__ turns<T> table[8][kTable<T>];
  __shared__ A stage[normed ? 256 * 2 * width : 1];
  const place p = place_of<T, team>(j);
  const int heads = (int)j.a.heads;
  const int64_t cols = j.a.heads * j.a.head_dim;
  const A clip = clipped ? (A)j.a.clip : A(0), eps = (A)j.a.eps, inverse_n = (A)(1.0 / (double)j.a.head_dim);
  const pair_packs<T> w = weights<T, norm>(j, p, 0);
  A dw[2][width] = {};
  for (int i = threadIdx.x; i < p.half; i += 256) frequency[i] = j.frequency[i];
  __syncthreads();
  for (int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32; row < j.a.rows; row += (int64_t)gridDim.x * 8) {
    turns<T> own[width];
    for (int base = 0; base < heads; base += most * p.heads_at_once) {
      pair_packs<T> x[most], dy[most];
      load_heads<T, most>((const T *)j.a.dy + row * cols, p, base + p.first_head, heads, true, dy);
      load_heads<T, most>((const T *)j.a.x + row * cols, p, base + p.first_head, heads, normed || clipped, x);
      if (base == 0) { /* while the loads are under way */
        __syncwarp();
        write_turns<T, team>(j, frequency, p, row, table[threadIdx.x / 32]);
        __syncwarp();
        read_turns<T>(j, table[threadIdx.x / 32], p, own);
      }
#pragma unroll
      for (int k = 0; k < most; ++k) {
        int head = base + p.first_head + k * p.heads_at_once;
        bool here = p.used && head < heads;
        A g[2][width], scale = 1, pull = 0;
        if (normed) scale = inverse_rms(head_sum(squares(x[k]), j.lanes), inverse_n, eps);
        turn_back<T, norm>(x[k], w, dy[k], scale, clip, own, g);
        if (normed) pull = head_sum(here ? products(x[k], w, g) : A(0), j.lanes) * scale * scale * scale * inverse_n;
        if (here) finish_pair<T, normed>((T *)j.a.dx + row * cols + p.low(head), p.half, x[k], w, g, scale, pull, dw);
      }
    }
  }
  if constexpr (normed) {
    for (int part = 0; part < 2; ++part)
      for (int i = 0; i < width; ++i) stage[(threadIdx.x * 2 + part) * width + i] = dw[part][i];
    __syncthreads();
    for (int col = threadIdx.x; col < p.dim; col += 256) {
      int part = col >= p.half, at = col - part * p.half;
      A sum = 0;
      for (int t = at / width; t < 256; t += j.lanes) sum += stage[(t * 2 + part) * width + at % width];
      partial[(int64_t)blockIdx.x * p.dim + col] = sum;
    }
  }
}

/* Blocks of it that a multiprocessor holds. */
template <int team, int most> constexpr int kFullResident = most > 1 ? 1 : team > 128 ? 2 : 4;

/* A block per row, norm over the whole row, `most` pairs of each thread. The next row's packs and turns are fetched
 * before this one's sums meet, so that one barrier per row is enough (two where values are clamped: then g depends on
 * the norm). Leaves partial[block] = the block's share of dw [cols]. */
template <class T, int team, int most>
__global__ void __launch_bounds__(team, kFullResident<team, most>)
    backward_full(const __grid_constant__ qk_job j, lev_arith<T> *partial) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>;
  constexpr lev_qk_norm norm = LEV_QK_NORM_FULL;
  __shared__ double frequency[kPackedHalf<T>];
  __shared__ turns<T> table[4][kTable<T>];
  __shared__ A memory[2][team / 32 * 2], clamped[team / 32];
  const place p = place_of<T, team>(j);
  const int heads = (int)j.a.heads;
  const int64_t cols = j.a.heads * j.a.head_dim;
  const A clip = (A)j.a.clip, eps = (A)j.a.eps, inverse_n = (A)(1.0 / (double)cols);
  A dw[most][2][width] = {};
  pair_packs<T> x[most], dy[most], next_x[most], next_dy[most], w[most];
#pragma unroll
  for (int k = 0; k < most; ++k) {
    int head = p.first_head + k * p.heads_at_once;
    w[k] = weights<T, norm>(j, p, p.used && head < heads ? head : 0);
  }
  for (int i = threadIdx.x; i < p.half; i += team) frequency[i] = j.frequency[i];
  __syncthreads();
  int64_t row = blockIdx.x;
  load_heads<T, most>((const T *)j.a.x + row * cols, p, p.first_head, heads, row < j.a.rows, next_x);
  load_heads<T, most>((const T *)j.a.dy + row * cols, p, p.first_head, heads, row < j.a.rows, next_dy);
  write_two_turns<T, team>(j, frequency, p, row, table[0], table[1]);
  __syncthreads();
  for (int at = 0; row < j.a.rows; row += gridDim.x, ++at) {
    int64_t next = row + gridDim.x;
    turns<T> own[width];
    A g[most][2][width], sums[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < most; ++k) x[k] = next_x[k], dy[k] = next_dy[k];
    load_heads<T, most>((const T *)j.a.x + next * cols, p, p.first_head, heads, next < j.a.rows, next_x);
    load_heads<T, most>((const T *)j.a.dy + next * cols, p, p.first_head, heads, next < j.a.rows, next_dy);
    read_turns<T>(j, table[at % 4], p, own);
    if (at % 2 == 0)
      write_two_turns<T, team>(j, frequency, p, next + gridDim.x, table[(at + 2) % 4], table[(at + 3) % 4]);
#pragma unroll
    for (int k = 0; k < most; ++k) sums[0] += squares(x[k]);
    A scale = 0;
    if (clip > 0) {
      A all[1] = {sums[0]};
      team_sums<team>(all, clamped);
      scale = inverse_rms(all[0], inverse_n, eps);
    }
#pragma unroll
    for (int k = 0; k < most; ++k) {
      turn_back<T, norm>(x[k], w[k], dy[k], scale, clip, own, g[k]);
      sums[1] += products(x[k], w[k], g[k]); /* x is 0 where there is no head */
    }
    team_sums_once<team>(sums, memory[at % 2]);
    scale = inverse_rms(sums[0], inverse_n, eps);
    A pull = sums[1] * scale * scale * scale * inverse_n;
#pragma unroll
    for (int k = 0; k < most; ++k) {
      int head = p.first_head + k * p.heads_at_once;
      if (p.used && head < heads)
        finish_pair<T, true>((T *)j.a.dx + row * cols + p.low(head), p.half, x[k], w[k], g[k], scale, pull, dw[k]);
    }
  }
  partial += (int64_t)blockIdx.x * cols;
#pragma unroll
  for (int k = 0; k < most; ++k) {
    int head = p.first_head + k * p.heads_at_once;
    if (!p.used || head >= heads) continue;
    for (int part = 0; part < 2; ++part)
      for (int i = 0; i < width; ++i) partial[p.low(head) + part * p.half + i] = dw[k][part][i];
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

template <class T> lev_status forward(const lev_qk_args *a, cudaStream_t stream) {
  qk_job j;
  prepare<T>(a, &j);
  j.lanes = lanes_of<T>(a, a->y, nullptr);
  int64_t threads = a->heads * j.lanes; /* of a row with one pair each */
  bool full = a->norm == LEV_QK_NORM_FULL;
  /* As many blocks as are resident: each goes through its rows. */
  unsigned rows = blocks_for(a->rows, 1, kMultiprocessors * 2), warps = blocks_for(a->rows, 8, kMultiprocessors * 2);
  if (j.lanes == 0 || (full && threads > 1024))
    forward_any<T><<<blocks_for(a->rows, 1, kMultiprocessors * 8), 256, 0, stream>>>(j);
  else if (full && threads > 128)
    forward_packed<T, 256, 4, 2, LEV_QK_NORM_FULL><<<rows, 256, 0, stream>>>(j);
  else if (full)
    forward_packed<T, 32, 4, 2, LEV_QK_NORM_FULL><<<warps, 256, 0, stream>>>(j);
  else if (a->norm == LEV_QK_NORM_HEAD)
    forward_packed<T, 32, 2, 3, LEV_QK_NORM_HEAD><<<blocks_for(a->rows, 8, kMultiprocessors * 3), 256, 0, stream>>>(j);
  else
    forward_packed<T, 32, 4, 2, LEV_QK_NORM_NONE><<<warps, 256, 0, stream>>>(j);
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
  /* As many blocks as are resident: each goes through its rows. */
  int64_t resident = any || (full && threads <= 128) ? 4 : full && threads > 256 ? 1 : 2;
  unsigned blocks = blocks_for(a->rows, any || full ? 1 : 8, lev_min_i64(parts, kMultiprocessors * resident));
  if (any)
    backward_any<T><<<blocks, 256, 0, stream>>>(j, partial);
  else if (!full && a->clip > 0 && normed)
    backward_heads<T, 2, LEV_QK_NORM_HEAD, true><<<blocks, 256, 0, stream>>>(j, partial);
  else if (!full && normed)
    backward_heads<T, 2, LEV_QK_NORM_HEAD, false><<<blocks, 256, 0, stream>>>(j, partial);
  else if (!full && a->clip > 0)
    backward_heads<T, 2, LEV_QK_NORM_NONE, true><<<blocks, 256, 0, stream>>>(j, partial);
  else if (!full)
    backward_heads<T, 4, LEV_QK_NORM_NONE, false><<<blocks, 256, 0, stream>>>(j, partial);
  else if (threads <= 128)
    backward_full<T, 128, 1><<<blocks, 128, 0, stream>>>(j, partial);
  else if (threads <= 256)
    backward_full<T, 256, 1><<<blocks, 256, 0, stream>>>(j, partial);
  else
    backward_full<T, 256, 2><<<blocks, 256, 0, stream>>>(j, partial);
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
