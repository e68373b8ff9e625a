/* SPDX-License-Identifier: Apache-2.0 */
/* Norm, clamping and rotary embedding of queries, keys and values by packs of 16 bytes (private to qk_cuda.cu).
 *
 * A thread works on pairs of packs: one of the first half of a head and its partner of the second half. `lanes`
 * consecutive threads (a power of two) take one head, so that each keeps its cosines and sines for all heads of the
 * row. A team, a warp or a whole block, takes a row in steps of `most` pairs per thread. Packs come through a queue in
 * shared memory, `depth` - 1 steps ahead of their use: that many bytes must be under way to keep the memory busy, and
 * registers for them there are not. */
#ifndef LEV_MODEL_QK_PACKED_CUH
#define LEV_MODEL_QK_PACKED_CUH

#include "harness/model/ops.h"
#include "harness/model/rows.cuh"

namespace {

using namespace lev_rows;

constexpr int kHalfMax = LEV_HEAD_DIM_MAX / 2;

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

/* ---- steps and the queue ---- */

/* `most` pairs of each thread of a team: of row `row`, heads from `base` on; `at` is where the thread's first one lies
 * in an array. Teams go through the rows in strides. */
struct step {
  int64_t row, at, stride, stride_at;
  int base, heads, span, span_at;

  __device__ step(const qk_job &j, const place &p, int most, int64_t first, int64_t teams)
      : row(first), stride(teams), base(0), heads((int)j.a.heads), span(most * p.heads_at_once) {
    at = row * heads * p.dim + p.low(p.first_head);
    span_at = span * p.dim;
    stride_at = stride * heads * p.dim - (int64_t)lev_ceil_div(heads, span) * span_at;
  }
  __device__ void advance() {
    base += span, at += span_at;
    if (base >= heads) base = 0, row += stride, at += stride_at;
  }
  /* Whether the thread's pair k is there. */
  __device__ bool has(const place &p, int k) const {
    return p.used && base + p.first_head + k * p.heads_at_once < heads;
  }
};

/* Of the first and of the second half of a head: as stored, and to compute with. */
template <class T> struct pair_packs { pack<T> at[2]; };
template <class T> struct pair_values { lev_arith<T> at[2][lev_per_16<T>]; };

template <class T> __device__ __forceinline__ pair_values<T> widen(const pair_packs<T> &x) {
  pair_values<T> out;
  widen16<T>(x.at[0], out.at[0]);
  widen16<T>(x.at[1], out.at[1]);
  return out;
}

template <class T> __device__ __forceinline__ pair_packs<T> load_pair(const T *low, int half, bool inside) {
  pair_packs<T> out = {};
  if (inside) out.at[0] = load16(low), out.at[1] = load16(low + half);
  return out;
}

/* A step of one array in the queue. Each thread reads only what it copied itself, so no barrier is needed. */
template <class T, int threads, int most> struct slot { uint4 at[most][2][threads]; };

template <class T, int threads, int most>
__device__ __forceinline__ void start_copies(slot<T, threads, most> &to, const qk_job &j, const place &p, const step &s,
                                             const void *from) {
#pragma unroll
  for (int k = 0; k < most; ++k) {
    const T *low = (const T *)from + s.at + k * p.heads_at_once * p.dim;
    bool inside = s.row < j.a.rows && s.has(p, k);
    start_copy16(&to.at[k][0][threadIdx.x], low, inside);
    start_copy16(&to.at[k][1][threadIdx.x], low + p.half, inside);
  }
}
template <class T, int threads, int most>
__device__ __forceinline__ pair_packs<T> take_pair(const slot<T, threads, most> &from, int k) {
  pair_packs<T> out;
  for (int part = 0; part < 2; ++part) memcpy(&out.at[part], &from.at[k][part][threadIdx.x], 16);
  return out;
}
template <class T, int threads, int most>
__device__ __forceinline__ void take(const slot<T, threads, most> &from, pair_packs<T> (&out)[most]) {
#pragma unroll
  for (int k = 0; k < most; ++k) out[k] = take_pair<T>(from, k);
}

/* ---- turns ---- */

/* Cosines and sines of a row are computed once for all of its heads, a row ahead of their use: a team writes them to
 * one of its two tables and, behind a barrier, each thread reads those of its pair. A gap of 16 bytes after each pair's
 * keeps the threads of a head on different banks. */
template <class T> struct turns { lev_arith<T> c, s; };
template <class T> constexpr int kGap = 16 / (int)sizeof(turns<T>);

template <class T> __host__ __device__ __forceinline__ int place_of_turn(int i) {
  return i + i / lev_per_16<T> * kGap<T>;
}

template <class T, int team>
__device__ __forceinline__ void write_turns(const qk_job &j, const double *frequency, int half, int32_t position,
                                            turns<T> *table) {
#pragma unroll 1
  for (int i = threadIdx.x % team; i < half; i += team) {
    turns<T> t;
    turn((double)position, frequency[i], j.factor, &t.c, &t.s);
    table[place_of_turn<T>(i)] = t;
  }
}
template <class T>
__device__ __forceinline__ void read_turns(const turns<T> *table, const place &p, turns<T> (&own)[lev_per_16<T>]) {
  constexpr int per_pack = lev_per_16<lev_arith<T>>;
  const turns<T> *at = table + (p.used ? place_of_turn<T>(p.pair * p.width) : 0);
#pragma unroll
  for (int i = 0; i < 2 * lev_per_16<T>; i += per_pack) {
    pack<lev_arith<T>> raw = load16((const lev_arith<T> *)at + i);
    memcpy((lev_arith<T> *)own + i, &raw, 16);
  }
}
__device__ __forceinline__ int32_t position_of(const qk_job &j, int64_t row) {
  return j.a.position && row < j.a.rows ? j.a.position[row] : 0;
}

/* Shared memory of a block: slots, the norm's weights where they are kept there, frequencies, two tables per team. */
template <class T, int team, int threads, int most, int depth, int arrays, bool weighted = false> struct shared_memory {
  using slots = slot<T, threads, most>;
  static constexpr int teams = threads / team;
  slots *queue; /* [depth][arrays] */
  T *w;
  double *frequency;
  turns<T> *tables;

  static __host__ __device__ int table_size(int half) { return place_of_turn<T>(half); } /* a multiple of 16 bytes */
  static size_t bytes(const lev_qk_args &a) {
    int half = (int)a.head_dim / 2;
    return sizeof(slots) * depth * arrays + (weighted ? sizeof(T) * a.heads * a.head_dim : 0) +
           sizeof(turns<T>) * teams * 2 * table_size(half) + sizeof(double) * half;
  }
  __device__ shared_memory(unsigned char *base, const qk_job &j, int half) {
    const int cols = weighted ? (int)(j.a.heads * j.a.head_dim) : 0;
    queue = (slots *)base;
    w = (T *)(queue + depth * arrays);
    frequency = (double *)(w + cols);
    tables = (turns<T> *)(frequency + half);
    for (int i = threadIdx.x; i < half; i += threads) frequency[i] = j.frequency[i];
    for (int i = threadIdx.x; i < cols; i += threads) w[i] = ((const T *)j.a.w)[i];
    __syncthreads();
  }
  __device__ slots &at(int slot, int array) const { return queue[slot * arrays + array]; }
  __device__ turns<T> *table(int half, int which) const {
    return tables + (threadIdx.x / team * 2 + which) * table_size(half);
  }
};

/* The turns of a team's rows: of this one in registers, of the next one in a table, the position of the one after on
 * its way. */
template <class T, int team> struct turner {
  int32_t position;
  int which;
  turns<T> own[lev_per_16<T>];

  template <class M> __device__ void begin(const qk_job &j, const M &m, const place &p, const step &s) {
    which = 0;
    write_turns<T, team>(j, m.frequency, p.half, position_of(j, s.row), m.table(p.half, 0));
    /* Not rotated: position 0 all the time. */
    if (!j.a.position) write_turns<T, team>(j, m.frequency, p.half, 0, m.table(p.half, 1));
    position = position_of(j, s.row + s.stride);
    if (team > 32) __syncthreads();
  }
  /* A team of more than a warp must pass a barrier between two calls. */
  template <class M> __device__ void advance(const qk_job &j, const M &m, const place &p, const step &s) {
    if (team <= 32) __syncwarp();
    read_turns<T>(m.table(p.half, which), p, own);
    which ^= 1;
    if (!j.a.position) return;
    write_turns<T, team>(j, m.frequency, p.half, position, m.table(p.half, which));
    position = position_of(j, s.row + 2 * s.stride);
  }
};

/* ---- forward ---- */

template <class T> __device__ __forceinline__ lev_arith<T> squares(const pair_values<T> &x) {
  lev_arith<T> sum[2] = {0, 0};
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int i = 0; i < lev_per_16<T>; ++i) sum[part] += x.at[part][i] * x.at[part][i];
  return sum[0] + sum[1];
}

/* The norm's weights for a pair; per head they are the same for all heads. */
template <class T, lev_qk_norm norm>
__device__ __forceinline__ pair_packs<T> weights(const qk_job &j, const place &p, int head) {
  int64_t at = norm == LEV_QK_NORM_FULL ? p.low(head) : p.pair * p.width;
  bool inside = norm != LEV_QK_NORM_NONE && p.used && (norm != LEV_QK_NORM_FULL || head < (int)j.a.heads);
  return load_pair((const T *)j.a.w + at, p.half, inside);
}

/* Writes a pair of y. */
template <class T, bool normed>
__device__ __forceinline__ void turn_pair(T *y, int half, pair_values<T> x, const pair_packs<T> &weight,
                                          lev_arith<T> scale, lev_arith<T> clip, const turns<T> (&own)[lev_per_16<T>]) {
  constexpr int width = lev_per_16<T>;
  pack<T> out[2];
  if (normed) {
    pair_values<T> w = widen(weight);
#pragma unroll
    for (int i = 0; i < width; ++i) x.at[0][i] *= scale * w.at[0][i], x.at[1][i] *= scale * w.at[1][i];
  }
  if (clip > 0)
#pragma unroll
    for (int i = 0; i < width; ++i) x.at[0][i] = clamp(x.at[0][i], clip), x.at[1][i] = clamp(x.at[1][i], clip);
#pragma unroll
  for (int i = 0; i < width; ++i) {
    out[0].at[i] = lev_store<T>(x.at[0][i] * own[i].c - x.at[1][i] * own[i].s);
    out[1].at[i] = lev_store<T>(x.at[1][i] * own[i].c + x.at[0][i] * own[i].s);
  }
  store16(y, out[0]);
  store16(y + half, out[1]);
}

/* Norm over the whole row: a step is a row, and a block as team meets once per row. Else warps, each on its own. */
template <class T, int team, int threads, int most, int depth, int resident, lev_qk_norm norm>
__global__ void __launch_bounds__(threads, resident) forward_packed(const __grid_constant__ qk_job j) {
  using A = lev_arith<T>;
  using memory = shared_memory<T, team, threads, most, depth, 1>;
  constexpr bool full = norm == LEV_QK_NORM_FULL;
  static_assert(team <= 32 || (full && team == threads));
  extern __shared__ __align__(16) unsigned char raw[];
  __shared__ A meeting[2][threads / 32];
  const place p = place_of<T, team>(j);
  const memory m(raw, j, p.half);
  const A clip = (A)j.a.clip, eps = (A)j.a.eps;
  const A inverse_n = (A)(1.0 / (double)(full ? j.a.heads * j.a.head_dim : j.a.head_dim));
  pair_packs<T> w = weights<T, norm>(j, p, p.first_head);
  turner<T, team> turned;
  step now(j, p, most, (int64_t)blockIdx.x * memory::teams + threadIdx.x / team, (int64_t)gridDim.x * memory::teams);
  step ahead = now;
  auto fetch = [&](int slot) {
    start_copies<T>(m.at(slot, 0), j, p, ahead, j.a.x);
    end_copies();
    ahead.advance();
  };
  for (int d = 0; d < depth - 1; ++d) fetch(d);
  turned.begin(j, m, p, now);
  for (int at = 0, free = depth - 1; now.row < j.a.rows; now.advance()) {
    pair_packs<T> packs[most];
    pair_values<T> x[most];
    A scale[most], all[1] = {0};
    fetch(free);
    if (now.base == 0) turned.advance(j, m, p, now);
    wait_copies<depth - 1>();
    take<T>(m.at(at, 0), packs);
    free = at, at = at + 1 < depth ? at + 1 : 0;
#pragma unroll
    for (int k = 0; k < most; ++k) {
      scale[k] = 1;
      x[k] = widen(packs[k]);
      if (norm == LEV_QK_NORM_HEAD) scale[k] = inverse_rms(head_sum(squares(x[k]), j.lanes), inverse_n, eps);
      if (full) all[0] += squares(x[k]);
    }
    if constexpr (full) {
      if constexpr (team > 32)
        team_sums_once<team>(all, meeting[turned.which]);
      else
        team_sums<team>(all, meeting[0]);
      all[0] = inverse_rms(all[0], inverse_n, eps);
    }
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (!now.has(p, k)) continue;
      if (full && most > 1) w = weights<T, norm>(j, p, p.first_head + k * p.heads_at_once);
      turn_pair<T, norm != LEV_QK_NORM_NONE>((T *)j.a.y + now.at + k * p.heads_at_once * p.dim, p.half, x[k], w,
                                             full ? all[0] : scale[k], clip, turned.own);
    }
  }
  wait_copies<0>();
}

/* ---- backward ---- */

/* g = dy turned back, 0 where the forward pass clamped. */
template <class T, lev_qk_norm norm>
__device__ __forceinline__ pair_values<T> turn_back(const pair_values<T> &x, const pair_values<T> &w,
                                                    const pair_values<T> &dy, lev_arith<T> scale, lev_arith<T> clip,
                                                    const turns<T> (&own)[lev_per_16<T>]) {
  pair_values<T> g;
#pragma unroll
  for (int i = 0; i < lev_per_16<T>; ++i) {
    g.at[0][i] = dy.at[0][i] * own[i].c + dy.at[1][i] * own[i].s;
    g.at[1][i] = dy.at[1][i] * own[i].c - dy.at[0][i] * own[i].s;
  }
  if (!(clip > 0)) return g;
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int i = 0; i < lev_per_16<T>; ++i) {
      lev_arith<T> v = x.at[part][i];
      if (norm != LEV_QK_NORM_NONE) v = v * (scale * w.at[part][i]);
      if (v > clip || v < -clip) g.at[part][i] = 0;
    }
  return g;
}

/* Sum of g w x. */
template <class T>
__device__ __forceinline__ lev_arith<T> products(const pair_values<T> &x, const pair_values<T> &w,
                                                 const pair_values<T> &g) {
  lev_arith<T> sum[2] = {0, 0};
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int i = 0; i < lev_per_16<T>; ++i) sum[part] += g.at[part][i] * w.at[part][i] * x.at[part][i];
  return sum[0] + sum[1];
}

/* Writes a pair of dx; dw +=. */
template <class T, bool normed>
__device__ __forceinline__ void finish_pair(T *dx, int half, const pair_values<T> &x, const pair_values<T> &w,
                                            const pair_values<T> &g, lev_arith<T> scale, lev_arith<T> pull,
                                            pair_values<T> &dw) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    pack<T> out;
#pragma unroll
    for (int i = 0; i < lev_per_16<T>; ++i) {
      lev_arith<T> v = x.at[part][i], d = g.at[part][i] * scale;
      out.at[i] = lev_store<T>(normed ? d * w.at[part][i] - v * pull : g.at[part][i]);
      if (normed) dw.at[part][i] += d * v;
    }
    store16(dx + part * half, out);
  }
}

/* A warp per row; norm none or per head; clipped: values may have been clamped. Leaves partial[block] = the block's
 * share of dw [head_dim]. */
template <class T, int threads, int most, int depth, int resident, lev_qk_norm norm, bool clipped>
__global__ void __launch_bounds__(threads, resident)
    backward_heads(const __grid_constant__ qk_job j, lev_arith<T> *partial) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>, team = 32;
  constexpr bool normed = norm != LEV_QK_NORM_NONE, reads_x = normed || clipped;
  using memory = shared_memory<T, team, threads, most, depth, reads_x ? 2 : 1>;
  extern __shared__ __align__(16) unsigned char raw[];
  const place p = place_of<T, team>(j);
  const memory m(raw, j, p.half);
  const A clip = clipped ? (A)j.a.clip : A(0), eps = (A)j.a.eps, inverse_n = (A)(1.0 / (double)j.a.head_dim);
  const pair_values<T> w = widen(weights<T, norm>(j, p, 0));
  pair_values<T> dw = {};
  turner<T, team> turned;
  step now(j, p, most, (int64_t)blockIdx.x * memory::teams + threadIdx.x / team, (int64_t)gridDim.x * memory::teams);
  step ahead = now;
  auto fetch = [&](int slot) {
    start_copies<T>(m.at(slot, 0), j, p, ahead, j.a.dy);
    if constexpr (reads_x) start_copies<T>(m.at(slot, 1), j, p, ahead, j.a.x);
    end_copies();
    ahead.advance();
  };
  for (int d = 0; d < depth - 1; ++d) fetch(d);
  turned.begin(j, m, p, now);
  for (int at = 0, free = depth - 1; now.row < j.a.rows; now.advance()) {
    pair_packs<T> x_packs[most] = {}, dy_packs[most];
    fetch(free);
    if (now.base == 0) turned.advance(j, m, p, now);
    wait_copies<depth - 1>();
    take<T>(m.at(at, 0), dy_packs);
    if constexpr (reads_x) take<T>(m.at(at, 1), x_packs);
    free = at, at = at + 1 < depth ? at + 1 : 0;
#pragma unroll
    for (int k = 0; k < most; ++k) {
      pair_values<T> x = widen(x_packs[k]);
      A scale = 1, pull = 0;
      if (normed) scale = inverse_rms(head_sum(squares(x), j.lanes), inverse_n, eps);
      pair_values<T> g = turn_back<T, norm>(x, w, widen(dy_packs[k]), scale, clip, turned.own);
      if (normed) pull = head_sum(products(x, w, g), j.lanes) * scale * scale * scale * inverse_n;
      if (now.has(p, k))
        finish_pair<T, normed>((T *)j.a.dx + now.at + k * p.heads_at_once * p.dim, p.half, x, w, g, scale, pull, dw);
    }
  }
  wait_copies<0>();
  if constexpr (normed) {
    __syncthreads(); /* the queue is empty: dw in its place */
    A *stage = (A *)raw;
    for (int part = 0; part < 2; ++part)
      for (int i = 0; i < width; ++i) stage[(threadIdx.x * 2 + part) * width + i] = dw.at[part][i];
    __syncthreads();
    for (int col = threadIdx.x; col < p.dim; col += threads) {
      int part = col >= p.half, in_half = col - part * p.half;
      A sum = 0;
      for (int t = in_half / width; t < threads; t += j.lanes) sum += stage[(t * 2 + part) * width + in_half % width];
      partial[(int64_t)blockIdx.x * p.dim + col] = sum;
    }
  }
}

/* The block's share of dw: its teams' shares, added in order where there are several. All copies have arrived. */
template <class T, int team, int threads, int most>
__device__ __forceinline__ void leave_full(unsigned char *raw, const place &p, int heads,
                                           const pair_values<T> (&dw)[most], lev_arith<T> *share) {
  using A = lev_arith<T>;
  constexpr int width = lev_per_16<T>, teams = threads / team;
  static_assert(sizeof dw * threads <= sizeof(slot<T, threads, most>) * 4);
  A *stage = (A *)raw;
  for (int turn = 0; turn < teams; ++turn) {
    __syncthreads();
    if (threadIdx.x / team != turn) continue;
#pragma unroll
    for (int k = 0; k < most; ++k) {
      int head = p.first_head + k * p.heads_at_once;
      if (!p.used || head >= heads) continue;
      for (int part = 0; part < 2; ++part)
        for (int i = 0; i < width; ++i) {
          int64_t col = p.low(head) + part * p.half + i;
          A sum = turn > 0 ? stage[col] + dw[k].at[part][i] : dw[k].at[part][i];
          if (turn < teams - 1)
            stage[col] = sum;
          else
            share[col] = sum;
        }
    }
  }
}

/* Sums of a row over its team: of squares, of g w x, or both. */
template <class T, int most, bool of_squares, bool of_products, class M>
__device__ __forceinline__ void row_sums(const M &m, const place &p, const step &s, int at, lev_arith<T> scale,
                                         lev_arith<T> clip, const turns<T> (&own)[lev_per_16<T>],
                                         lev_arith<T> (&sums)[2]) {
#pragma unroll 1
  for (int k = 0; k < most; ++k) {
    pair_values<T> x = widen(take_pair<T>(m.at(at, 1), k));
    if (of_squares) sums[0] += squares(x);
    if (!of_products) continue;
    pair_values<T> w = widen(load_pair(m.w + p.low(p.first_head + k * p.heads_at_once), p.half, s.has(p, k)));
    pair_values<T> dy = widen(take_pair<T>(m.at(at, 0), k));
    pair_values<T> g = turn_back<T, LEV_QK_NORM_FULL>(x, w, dy, scale, clip, own);
    sums[1] += products(x, w, g); /* x is 0 where there is no head */
  }
}

/* A team per row, norm over the whole row; clipped: values may have been clamped. Packs are read from the queue twice,
 * before and after the row's sums: registers are for dw. Leaves partial[block] = the block's share of dw [cols]. */
template <class T, int team, int threads, int most, int depth, int resident, bool clipped>
__global__ void __launch_bounds__(threads, resident)
    backward_full(const __grid_constant__ qk_job j, lev_arith<T> *partial) {
  using A = lev_arith<T>;
  using memory = shared_memory<T, team, threads, most, depth, 2, true>;
  constexpr lev_qk_norm norm = LEV_QK_NORM_FULL;
  static_assert(team <= 32 || team == threads);
  extern __shared__ __align__(16) unsigned char raw[];
  __shared__ A meeting[2][threads / 32 * 2], squared[threads / 32];
  const place p = place_of<T, team>(j);
  const memory m(raw, j, p.half);
  const int64_t cols = j.a.heads * j.a.head_dim;
  const A clip = clipped ? (A)j.a.clip : A(0), eps = (A)j.a.eps, inverse_n = (A)(1.0 / (double)cols);
  pair_values<T> dw[most] = {};
  turner<T, team> turned;
  step now(j, p, most, (int64_t)blockIdx.x * memory::teams + threadIdx.x / team, (int64_t)gridDim.x * memory::teams);
  step ahead = now;
  auto fetch = [&](int slot) {
    start_copies<T>(m.at(slot, 0), j, p, ahead, j.a.dy);
    start_copies<T>(m.at(slot, 1), j, p, ahead, j.a.x);
    end_copies();
    ahead.advance();
  };
  for (int d = 0; d < depth - 1; ++d) fetch(d);
  turned.begin(j, m, p, now);
  for (int at = 0, free = depth - 1; now.row < j.a.rows; now.advance()) {
    A sums[2] = {0, 0}, scale = 0;
    fetch(free);
    turned.advance(j, m, p, now);
    wait_copies<depth - 1>();
    if (clipped) {
      row_sums<T, most, true, false>(m, p, now, at, scale, clip, turned.own, sums);
      A all[1] = {sums[0]};
      team_sums<team>(all, squared);
      scale = inverse_rms(all[0], inverse_n, eps);
    }
    row_sums<T, most, !clipped, true>(m, p, now, at, scale, clip, turned.own, sums);
    if constexpr (team > 32)
      team_sums_once<team>(sums, meeting[turned.which]);
    else
      team_sums<team>(sums, meeting[0]);
    scale = inverse_rms(sums[0], inverse_n, eps);
    A pull = sums[1] * scale * scale * scale * inverse_n;
    asm volatile("" ::: "memory"); /* reads the queue again: there are no registers to keep a row in */
#pragma unroll
    for (int k = 0; k < most; ++k) {
      if (!now.has(p, k)) continue;
      pair_values<T> x = widen(take_pair<T>(m.at(at, 1), k));
      pair_values<T> w = widen(load_pair(m.w + p.low(p.first_head + k * p.heads_at_once), p.half, true));
      pair_values<T> dy = widen(take_pair<T>(m.at(at, 0), k));
      pair_values<T> g = turn_back<T, norm>(x, w, dy, scale, clip, turned.own);
      finish_pair<T, true>((T *)j.a.dx + now.at + k * p.heads_at_once * p.dim, p.half, x, w, g, scale, pull, dw[k]);
    }
    free = at, at = at + 1 < depth ? at + 1 : 0;
  }
  wait_copies<0>();
  leave_full<T, team, threads, most>(raw, p, (int)j.a.heads, dw, partial + (int64_t)blockIdx.x * cols);
}

} // namespace
#endif
