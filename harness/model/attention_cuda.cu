/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on the GPU for every storage type and head size: tiles of 16 R queries x 16 R keys in shared memory, online
 * softmax, plain fused multiply-adds. 256 threads stand in a square of 16 x 16, and thread (y, x) computes rows
 * y + 16 i and columns x + 16 j of each product. Backward takes two kernels, one per side, so that every sum has one
 * owner and a fixed order. */
#include "harness/model/attention_walk.cuh"

namespace {

constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kWarps = kThreads / 32;
constexpr size_t kSharedMost = 220 << 10;

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}
__device__ __forceinline__ float logarithm(float x) {
  return logf(x);
}
__device__ __forceinline__ double logarithm(double x) {
  return log(x);
}

__device__ __forceinline__ int row_of() {
  return threadIdx.x / kSide;
}
__device__ __forceinline__ int column_of() {
  return threadIdx.x % kSide;
}
__device__ __forceinline__ int warp_of() {
  return threadIdx.x / 32;
}
__device__ __forceinline__ int lane_of() {
  return threadIdx.x % 32;
}

/* Rows in shared memory are an odd number of scalars apart: rows side by side fall on different banks. */
__host__ __device__ __forceinline__ int pitch_of(int64_t d) {
  return (int)d | 1;
}

/* ---- shared memory of a block ---- */

template <class A, int R> struct tiles {
  static constexpr int size = kSide * R, score_pitch = size + 1;
  int pitch;
  A *rows[5];   /* [size, pitch] each, as many as the kernel asks for */
  A *score[2];  /* [size, score_pitch] */
  A *vector[3]; /* [size] */

  static __host__ __device__ size_t bytes(int64_t d, int n_rows, int n_scores) {
    return sizeof(A) * ((size_t)n_rows * size * (size_t)pitch_of(d) + (size_t)n_scores * size * score_pitch + 3 * size);
  }
  __device__ tiles(void *memory, int64_t d, int n_rows, int n_scores) : pitch(pitch_of(d)) {
    A *at = static_cast<A *>(memory);
    for (int i = 0; i < n_rows; ++i, at += size * pitch) rows[i] = at;
    for (int i = 0; i < n_scores; ++i, at += size * score_pitch) score[i] = at;
    for (int i = 0; i < 3; ++i, at += size) vector[i] = at;
  }
};

/* Rows past `count` become zero. */
template <class T, int R>
__device__ void load_rows(const tiles<lev_arith<T>, R> &m, lev_arith<T> *to, const T *from, int64_t stride, int count,
                          int64_t d, lev_arith<T> scale) {
  for (int r = warp_of(); r < m.size; r += kWarps)
    for (int64_t x = lane_of(); x < d; x += 32)
      to[r * m.pitch + x] = r < count ? scale * lev_load(from[r * stride + x]) : lev_arith<T>(0);
}

template <class A, int R> __device__ void clear_rows(const tiles<A, R> &m, A *to) {
  for (int i = threadIdx.x; i < m.size * m.pitch; i += kThreads) to[i] = 0;
}

/* to[r, c] = sum over d of a[r] b[c]. */
template <class A, int R> __device__ void dot_rows(const tiles<A, R> &m, A *to, const A *a, const A *b, int64_t d) {
  A sum[R][R] = {};
  for (int x = 0; x < d; ++x) {
    A left[R], right[R];
    for (int i = 0; i < R; ++i) left[i] = a[(row_of() + kSide * i) * m.pitch + x];
    for (int j = 0; j < R; ++j) right[j] = b[(column_of() + kSide * j) * m.pitch + x];
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < R; ++j) sum[i][j] += left[i] * right[j];
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < R; ++j) to[(row_of() + kSide * i) * m.score_pitch + column_of() + kSide * j] = sum[i][j];
}

/* to[r] = shrink[r] to[r] + sum over k < n of w[r, k] b[k], or with `across` of w[k, r] b[k]. shrink = nullptr: 1. */
template <bool across, class A, int R>
__device__ void mix_rows(const tiles<A, R> &m, A *to, const A *shrink, const A *w, const A *b, int n, int64_t d) {
  for (int64_t x0 = column_of(); x0 < d; x0 += kSide * R) {
    A sum[R][R] = {};
    for (int k = 0; k < n; ++k) {
      A weight[R], value[R];
      for (int i = 0; i < R; ++i) {
        int r = row_of() + kSide * i;
        weight[i] = across ? w[k * m.score_pitch + r] : w[r * m.score_pitch + k];
      }
      for (int j = 0; j < R; ++j) value[j] = x0 + kSide * j < d ? b[k * m.pitch + x0 + kSide * j] : A(0);
      for (int i = 0; i < R; ++i)
        for (int j = 0; j < R; ++j) sum[i][j] += weight[i] * value[j];
    }
    for (int i = 0; i < R; ++i) {
      int r = row_of() + kSide * i;
      A factor = shrink ? shrink[r] : A(1);
      for (int j = 0; j < R; ++j)
        if (x0 + kSide * j < d) {
          A *at = to + r * m.pitch + x0 + kSide * j;
          *at = factor * *at + sum[i][j];
        }
    }
  }
}

/* Arrays of one query head at the block's first row. */
__device__ __forceinline__ int64_t dense_at(const attn_step &s, const attn_span &q, int64_t head) {
  return q.row * s.shape.heads + head;
}
template <class T>
__device__ __forceinline__ const T *queries_at(const attn_step &s, const attn_span &q, int64_t head) {
  return static_cast<const T *>(s.q) + q.row * s.q_stride + head * s.shape.head_dim;
}
template <class T>
__device__ __forceinline__ const T *keys_at(const void *base, const attn_rows &rows, int64_t stride, const attn_span &k,
                                            int64_t kv_head) {
  return static_cast<const T *>(base) + kv_head * rows.head + k.row * stride;
}

/* ---- forward ---- */

template <class T, int R>
__device__ void state_in(const attn_forward_step &a, const tiles<lev_arith<T>, R> &m, const attn_span &q,
                         int64_t head) {
  using A = lev_arith<T>;
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, heads = s.shape.heads, at = dense_at(s, q, head);
  load_rows<T, R>(m, m.rows[0], queries_at<T>(s, q, head), s.q_stride, q.count, d, A(s.shape.scale));
  if (s.first)
    clear_rows(m, m.rows[2]);
  else
    load_rows<A, R>(m, m.rows[2], static_cast<const A *>(a.acc) + at * d, heads * d, q.count, d, A(1));
  for (int r = threadIdx.x; r < m.size; r += kThreads) {
    bool old = !s.first && r < q.count;
    m.vector[0][r] = old ? static_cast<const A *>(a.lse)[at + r * heads] : -A(INFINITY);
    m.vector[1][r] = old ? static_cast<const A *>(a.sum)[at + r * heads] : A(0);
  }
}

template <class T, int R>
__device__ void state_out(const attn_forward_step &a, const tiles<lev_arith<T>, R> &m, const attn_span &q,
                          int64_t head) {
  using A = lev_arith<T>;
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, heads = s.shape.heads, at = dense_at(s, q, head);
  for (int r = warp_of(); r < q.count; r += kWarps) {
    int64_t to = at + r * heads;
    A most = m.vector[0][r], sum = m.vector[1][r];
    const A *acc = m.rows[2] + r * m.pitch;
    if (s.last) {
      A inverse = 1 / sum;
      for (int64_t x = lane_of(); x < d; x += 32) static_cast<T *>(a.o)[to * d + x] = lev_store<T>(acc[x] * inverse);
    } else {
      for (int64_t x = lane_of(); x < d; x += 32) static_cast<A *>(a.acc)[to * d + x] = acc[x];
    }
    if (lane_of() > 0) continue;
    static_cast<A *>(a.lse)[to] = s.last ? most + logarithm(sum) : most;
    if (!s.last) static_cast<A *>(a.sum)[to] = sum;
  }
}

/* Scores to unnormalised probabilities; vectors: maximum, sum, factor on what was summed before. One warp per row. */
template <class A, int R>
__device__ void soften(const attn_step &s, const tiles<A, R> &m, const attn_span &q, const attn_span &k) {
  for (int r = warp_of(); r < m.size; r += kWarps) {
    attn_columns c = {0, 0};
    if (r < q.count) c = attn_seen(k, q.pos + r, attn_first_key(s, q.row + r, q.pos + r));
    A *row = m.score[0] + r * m.score_pitch, old = m.vector[0][r], most = old, sum = 0;
    for (int j = lane_of(); j < m.size; j += 32)
      if (j >= c.begin && j < c.end && row[j] > most) most = row[j];
    for (int step = 16; step > 0; step /= 2) {
      A other = __shfl_xor_sync(0xffffffffu, most, step);
      most = other > most ? other : most;
    }
    for (int j = lane_of(); j < m.size; j += 32) {
      A p = j >= c.begin && j < c.end ? exponential(row[j] - most) : A(0);
      row[j] = p;
      sum += p;
    }
    sum = lev_warp_sum(sum);
    __syncwarp(); /* all lanes have read the old maximum */
    if (lane_of() > 0) continue;
    A shrink = most > old ? exponential(old - most) : A(1);
    m.vector[0][r] = most, m.vector[2][r] = shrink;
    m.vector[1][r] = shrink * m.vector[1][r] + sum;
  }
}

/* One block per block of queries and head; the longest rows of blocks start first. */
template <class T, int R> __global__ void __launch_bounds__(kThreads) forward_tiles(attn_forward_step a) {
  using A = lev_arith<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, head = blockIdx.y, kv_head = head / (s.shape.heads / s.shape.kv_heads);
  tiles<A, R> m(memory, d, 3, 1);
  attn_span q = attn_block_at(s.q_range, m.size, gridDim.x - 1 - blockIdx.x), k;
  state_in<T, R>(a, m, q, head);
  attn_walk walk(attn_first_key(s, q.row, q.pos), q.pos + q.count);
  while (walk.next(s.k_range, m.size, &k)) {
    load_rows<T, R>(m, m.rows[1], keys_at<T>(s.kv.k, s.kv, s.kv.k_row, k, kv_head), s.kv.k_row, k.count, d, A(1));
    __syncthreads();
    dot_rows(m, m.score[0], m.rows[0], m.rows[1], d);
    __syncthreads();
    soften(s, m, q, k);
    load_rows<T, R>(m, m.rows[1], keys_at<T>(s.kv.v, s.kv, s.kv.v_row, k, kv_head), s.kv.v_row, k.count, d, A(1));
    __syncthreads();
    mix_rows<false>(m, m.rows[2], m.vector[2], m.score[0], m.rows[1], k.count, d);
    __syncthreads();
  }
  __syncthreads();
  state_out<T, R>(a, m, q, head);
}

/* ---- backward ---- */

/* d_o of a block's rows, and vectors 0 and 1: log-sum-exp and delta = rowsum(d_o o). */
template <class T, int R>
__device__ void load_gradient(const attn_backward_step &a, const tiles<lev_arith<T>, R> &m, lev_arith<T> *to,
                              const attn_span &q, int64_t head) {
  using A = lev_arith<T>;
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, heads = s.shape.heads, at = dense_at(s, q, head);
  for (int r = warp_of(); r < m.size; r += kWarps) {
    int64_t row = at + r * heads;
    A delta = 0;
    for (int64_t x = lane_of(); x < d; x += 32) {
      A g = r < q.count ? lev_load(static_cast<const T *>(a.d_o)[row * d + x]) : A(0);
      if (r < q.count) delta += g * lev_load(static_cast<const T *>(a.o)[row * d + x]);
      to[r * m.pitch + x] = g;
    }
    delta = lev_warp_sum(delta);
    if (lane_of() == 0) {
      m.vector[0][r] = r < q.count ? static_cast<const A *>(a.lse)[row] : A(0);
      m.vector[1][r] = delta;
    }
  }
}

/* score[0] = P from scores, score[1] = dS = P (dP - delta) from dP; both zero where nothing is seen. */
template <class A, int R>
__device__ void score_gradient(const attn_step &s, const tiles<A, R> &m, const attn_span &q, const attn_span &k) {
  for (int r = warp_of(); r < m.size; r += kWarps) {
    attn_columns c = {0, 0};
    if (r < q.count) c = attn_seen(k, q.pos + r, attn_first_key(s, q.row + r, q.pos + r));
    A *p = m.score[0] + r * m.score_pitch, *ds = m.score[1] + r * m.score_pitch;
    A lse = m.vector[0][r], delta = m.vector[1][r];
    for (int j = lane_of(); j < m.size; j += 32) {
      bool seen = j >= c.begin && j < c.end;
      A probability = seen ? exponential(p[j] - lse) : A(0);
      p[j] = probability;
      ds[j] = seen ? probability * (ds[j] - delta) : A(0);
    }
  }
}

template <class T, int R>
__device__ void query_gradient_out(const attn_backward_step &a, const tiles<lev_arith<T>, R> &m, const attn_span &q,
                                   int64_t head) {
  using A = lev_arith<T>;
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim;
  A scale = A(s.shape.scale);
  for (int r = warp_of(); r < q.count; r += kWarps) {
    A *acc = static_cast<A *>(a.acc) + (q.row + r) * a.acc_stride + head * d;
    T *dq = static_cast<T *>(a.dq) + (q.row + r) * a.dq_stride + head * d;
    for (int64_t x = lane_of(); x < d; x += 32) {
      A sum = scale * m.rows[3][r * m.pitch + x];
      if (!s.first) sum += acc[x];
      if (s.last)
        dq[x] = lev_store<T>(sum);
      else
        acc[x] = sum;
    }
  }
}

/* dq. One block per block of queries and head. */
template <class T, int R> __global__ void __launch_bounds__(kThreads) backward_queries(attn_backward_step a) {
  using A = lev_arith<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, group = s.shape.heads / s.shape.kv_heads;
  int64_t head = a.head_begin * group + blockIdx.y, kv_head = head / group;
  tiles<A, R> m(memory, d, 4, 2);
  attn_span q = attn_block_at(s.q_range, m.size, gridDim.x - 1 - blockIdx.x), k;
  load_rows<T, R>(m, m.rows[0], queries_at<T>(s, q, head), s.q_stride, q.count, d, A(s.shape.scale));
  load_gradient<T, R>(a, m, m.rows[1], q, head);
  clear_rows(m, m.rows[3]);
  attn_walk walk(attn_first_key(s, q.row, q.pos), q.pos + q.count);
  while (walk.next(s.k_range, m.size, &k)) {
    load_rows<T, R>(m, m.rows[2], keys_at<T>(s.kv.v, s.kv, s.kv.v_row, k, kv_head), s.kv.v_row, k.count, d, A(1));
    __syncthreads();
    dot_rows(m, m.score[1], m.rows[1], m.rows[2], d);
    __syncthreads();
    load_rows<T, R>(m, m.rows[2], keys_at<T>(s.kv.k, s.kv, s.kv.k_row, k, kv_head), s.kv.k_row, k.count, d, A(1));
    __syncthreads();
    dot_rows(m, m.score[0], m.rows[0], m.rows[2], d);
    __syncthreads();
    score_gradient(s, m, q, k);
    __syncthreads();
    mix_rows<false>(m, m.rows[3], static_cast<const A *>(nullptr), m.score[1], m.rows[2], k.count, d);
    __syncthreads();
  }
  __syncthreads();
  query_gradient_out<T, R>(a, m, q, head);
}

/* Share of one block of queries in dK and dV (rows 2 and 3) of a block of keys (rows 0 and 1). */
template <class T, int R>
__device__ void key_share(const attn_backward_step &a, const tiles<lev_arith<T>, R> &m, const attn_span &q,
                          const attn_span &k, int64_t head) {
  using A = lev_arith<T>;
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim;
  load_rows<T, R>(m, m.rows[4], queries_at<T>(s, q, head), s.q_stride, q.count, d, A(s.shape.scale));
  __syncthreads();
  dot_rows(m, m.score[0], m.rows[4], m.rows[0], d);
  __syncthreads();
  load_gradient<T, R>(a, m, m.rows[4], q, head);
  __syncthreads();
  dot_rows(m, m.score[1], m.rows[4], m.rows[1], d);
  __syncthreads();
  score_gradient(s, m, q, k);
  __syncthreads();
  mix_rows<true>(m, m.rows[3], static_cast<const A *>(nullptr), m.score[0], m.rows[4], q.count, d);
  __syncthreads();
  load_rows<T, R>(m, m.rows[4], queries_at<T>(s, q, head), s.q_stride, q.count, d, A(s.shape.scale));
  __syncthreads();
  mix_rows<true>(m, m.rows[2], static_cast<const A *>(nullptr), m.score[1], m.rows[4], q.count, d);
  __syncthreads();
}

/* One row of dk or dv, `at` scalars behind `base`. */
template <class T>
__device__ void key_row_out(const attn_backward_step &a, void *base, int64_t at, const lev_arith<T> *sum) {
  using A = lev_arith<T>;
  int64_t d = a.step.shape.head_dim;
  if (a.dkv_rounded) {
    T *to = static_cast<T *>(base) + at;
    for (int64_t x = lane_of(); x < d; x += 32) to[x] = lev_store<T>(sum[x]);
    return;
  }
  A *to = static_cast<A *>(base) + at;
  for (int64_t x = lane_of(); x < d; x += 32) to[x] = a.step.first ? sum[x] : to[x] + sum[x];
}

template <class T, int R>
__device__ void key_gradient_out(const attn_backward_step &a, const tiles<lev_arith<T>, R> &m, const attn_span &k,
                                 int64_t kv_head) {
  for (int r = warp_of(); r < k.count; r += kWarps) {
    int64_t row = k.row + r, head = kv_head * a.dkv.head;
    key_row_out<T>(a, a.dkv.k, head + row * a.dkv.k_row, m.rows[2] + r * m.pitch);
    key_row_out<T>(a, a.dkv.v, head + row * a.dkv.v_row, m.rows[3] + r * m.pitch);
  }
}

/* dk and dv. One block per block of keys and key head: all queries of all heads of the group, in order. */
template <class T, int R> __global__ void __launch_bounds__(kThreads) backward_keys(attn_backward_step a) {
  using A = lev_arith<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, group = s.shape.heads / s.shape.kv_heads, kv_head = a.head_begin + blockIdx.y;
  tiles<A, R> m(memory, d, 5, 2);
  attn_span k = attn_block_at(s.k_range, m.size, blockIdx.x), q;
  load_rows<T, R>(m, m.rows[0], keys_at<T>(s.kv.k, s.kv, s.kv.k_row, k, kv_head), s.kv.k_row, k.count, d, A(1));
  load_rows<T, R>(m, m.rows[1], keys_at<T>(s.kv.v, s.kv, s.kv.v_row, k, kv_head), s.kv.v_row, k.count, d, A(1));
  clear_rows(m, m.rows[2]);
  clear_rows(m, m.rows[3]);
  __syncthreads();
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    attn_walk walk(k.pos, INT64_MAX);
    while (walk.next(s.q_range, m.size, &q)) {
      if (attn_first_key(s, q.row, q.pos) >= k.pos + k.count) break; /* nor do later queries see these keys */
      key_share<T, R>(a, m, q, k, head);
    }
  }
  key_gradient_out<T, R>(a, m, k, kv_head);
}

/* ---- launches ---- */

lev_status too_large(int64_t d) {
  return lev_fail(LEV_ERR_UNSUPPORTED, "attention: heads of %lld scalars pass a multiprocessor's shared memory",
                  (long long)d);
}

template <class Kernel, class Args>
lev_status start(Kernel *kernel, const Args &args, int64_t blocks, int64_t heads, size_t bytes, cudaStream_t stream) {
  if (blocks == 0 || heads == 0) return LEV_OK;
  LEV_TRY(lev_allow_shared(kernel));
  kernel<<<dim3((unsigned)blocks, (unsigned)heads), kThreads, bytes, stream>>>(args);
  return lev_cuda_launched("attention");
}

template <class T, int R> lev_status try_forward(const attn_forward_step *a, cudaStream_t stream, bool *taken) {
  using tile = tiles<lev_arith<T>, R>;
  const attn_step &s = a->step;
  size_t bytes = tile::bytes(s.shape.head_dim, 3, 1);
  *taken = bytes <= kSharedMost;
  if (!*taken) return LEV_OK;
  return start(forward_tiles<T, R>, *a, attn_blocks(s.q_range, tile::size), s.shape.heads, bytes, stream);
}

template <class T> lev_status forward(const attn_forward_step *a, cudaStream_t stream) {
  bool taken = false;
  if (a->step.library) {
    lev_status st = attn_library_forward(a, stream);
    if (st != LEV_ERR_UNSUPPORTED || !a->step.may_fall_back) return st;
  }
  if constexpr (sizeof(T) == sizeof(lev_bf16)) LEV_TRY(attn_mma_forward(a, stream, &taken));
  if constexpr (sizeof(T) < sizeof(double))
    if (!taken) LEV_TRY((try_forward<T, 4>(a, stream, &taken)));
  if (!taken) LEV_TRY((try_forward<T, 2>(a, stream, &taken)));
  if (!taken) LEV_TRY((try_forward<T, 1>(a, stream, &taken)));
  return taken ? LEV_OK : too_large(a->step.shape.head_dim);
}

template <class T, int R> lev_status try_backward(const attn_backward_step *a, cudaStream_t stream, bool *taken) {
  using tile = tiles<lev_arith<T>, R>;
  const attn_step &s = a->step;
  size_t queries = tile::bytes(s.shape.head_dim, 4, 2), keys = tile::bytes(s.shape.head_dim, 5, 2);
  int64_t heads = a->head_end - a->head_begin, group = s.shape.heads / s.shape.kv_heads;
  *taken = keys <= kSharedMost;
  if (!*taken) return LEV_OK;
  LEV_TRY(start(backward_queries<T, R>, *a, attn_blocks(s.q_range, tile::size), heads * group, queries, stream));
  return start(backward_keys<T, R>, *a, attn_blocks(s.k_range, tile::size), heads, keys, stream);
}

template <class T> lev_status backward(const attn_backward_step *a, cudaStream_t stream) {
  bool taken = false;
  if (a->step.library) {
    lev_status st = attn_library_backward(a, stream);
    if (st != LEV_ERR_UNSUPPORTED || !a->step.may_fall_back) return st;
  }
  if constexpr (sizeof(T) == sizeof(lev_bf16)) LEV_TRY(attn_mma_backward(a, stream, &taken));
  if constexpr (sizeof(T) < sizeof(double))
    if (!taken) LEV_TRY((try_backward<T, 4>(a, stream, &taken)));
  if (!taken) LEV_TRY((try_backward<T, 2>(a, stream, &taken)));
  if (!taken) LEV_TRY((try_backward<T, 1>(a, stream, &taken)));
  return taken ? LEV_OK : too_large(a->step.shape.head_dim);
}

/* ---- chunks ---- */

/* One warp per token and key head. */
template <class T> __global__ void __launch_bounds__(kThreads) pack_chunk(attn_chunk_args a) {
  int64_t t = (int64_t)blockIdx.x * kWarps + warp_of(), g = a.head_begin + blockIdx.y, d = a.head_dim;
  if (t >= a.tokens) return;
  T *to = static_cast<T *>(a.chunk) + (g * a.tokens + t) * 2 * d;
  const T *k = static_cast<const T *>(a.rows.k) + g * a.rows.head + t * a.rows.k_row;
  const T *v = static_cast<const T *>(a.rows.v) + g * a.rows.head + t * a.rows.v_row;
  for (int64_t x = lane_of(); x < d; x += 32) to[x] = k[x], to[d + x] = v[x];
}

template <class T> __global__ void __launch_bounds__(kThreads) unpack_chunk(attn_chunk_args a) {
  int64_t t = (int64_t)blockIdx.x * kWarps + warp_of(), g = a.head_begin + blockIdx.y, d = a.head_dim;
  if (t >= a.tokens) return;
  const lev_arith<T> *from = static_cast<const lev_arith<T> *>(a.chunk) + (g * a.tokens + t) * 2 * d;
  T *k = static_cast<T *>(a.rows.k) + g * a.rows.head + t * a.rows.k_row;
  T *v = static_cast<T *>(a.rows.v) + g * a.rows.head + t * a.rows.v_row;
  for (int64_t x = lane_of(); x < d; x += 32) k[x] = lev_store<T>(from[x]), v[x] = lev_store<T>(from[d + x]);
}

dim3 chunk_grid(const attn_chunk_args *a) {
  return dim3((unsigned)lev_ceil_div(a->tokens, kWarps), (unsigned)(a->head_end - a->head_begin));
}
template <class T> lev_status pack(const attn_chunk_args *a, cudaStream_t stream) {
  if (a->tokens > 0 && a->head_end > a->head_begin) pack_chunk<T><<<chunk_grid(a), kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("attn.pack");
}
template <class T> lev_status unpack(const attn_chunk_args *a, cudaStream_t stream) {
  if (a->tokens > 0 && a->head_end > a->head_begin) unpack_chunk<T><<<chunk_grid(a), kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("attn.unpack");
}

} // namespace

lev_status attn_forward_cuda(const void *args, void *stream) {
  const attn_forward_step *a = static_cast<const attn_forward_step *>(args);
  return LEV_CUDA_PICK(a->step.shape.dtype, forward)(a, static_cast<cudaStream_t>(stream));
}
lev_status attn_backward_cuda(const void *args, void *stream) {
  const attn_backward_step *a = static_cast<const attn_backward_step *>(args);
  return LEV_CUDA_PICK(a->step.shape.dtype, backward)(a, static_cast<cudaStream_t>(stream));
}
lev_status attn_pack_cuda(const void *args, void *stream) {
  const attn_chunk_args *a = static_cast<const attn_chunk_args *>(args);
  return LEV_CUDA_PICK(a->dtype, pack)(a, static_cast<cudaStream_t>(stream));
}
lev_status attn_unpack_cuda(const void *args, void *stream) {
  const attn_chunk_args *a = static_cast<const attn_chunk_args *>(args);
  return LEV_CUDA_PICK(a->dtype, unpack)(a, static_cast<cudaStream_t>(stream));
}
