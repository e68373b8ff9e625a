/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on tensor cores: bf16, head size D = 64 or 128, products by mma.sync m16n8k16 with f32 accumulators. Blocks
 * of 64 queries or keys, 16 for each of four warps; operands come from shared memory by ldmatrix, and probabilities go
 * from accumulators to the next product's operand within registers. Exponents are powers of two of scores scaled by
 * log2(e). As in attention_cuda.cu, backward takes one kernel per side and every sum has a fixed order.
 *
 * In an m16n8 accumulator, lane 4 g + t holds (row g, columns 2 t, 2 t + 1) in c[0..1] and row g + 8 in c[2..3]. */
#include "harness/model/attention_walk.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 64;    /* of a block, and keys per step */
constexpr int kQueries = 32; /* queries per step of the keys' kernel */
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

template <int D> constexpr int pitch = D + 8; /* 16 bytes more per row: 8 rows of 16 bytes fall on different banks */

__device__ __forceinline__ int warp_of() {
  return threadIdx.x / 32;
}
__device__ __forceinline__ int lane_of() {
  return threadIdx.x % 32;
}
__device__ __forceinline__ int quad_of() {
  return lane_of() / 4;
} /* g */
__device__ __forceinline__ int within_quad() {
  return lane_of() % 4;
} /* t */

/* ---- instructions ---- */

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void copy_16(lev_bf16 *to, const lev_bf16 *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int left> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const lev_bf16 *at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(at))
               : "memory");
}
__device__ __forceinline__ void load_matrices_across(uint32_t (&r)[4], const lev_bf16 *at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(at))
               : "memory");
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t two_bf16(float low, float high) {
  return (uint32_t)lev_store<lev_bf16>(high) << 16 | lev_store<lev_bf16>(low);
}

/* ---- products of a warp ---- */

/* 16 x 16 block of A at (row, column), stored by rows. */
template <int D> __device__ __forceinline__ void load_a(uint32_t (&a)[4], const lev_bf16 *rows, int row, int column) {
  load_matrices(a, rows + (row + lane_of() % 16) * pitch<D> + column + lane_of() / 16 * 8);
}

/* c[n] (16 x 8 each) += A[16, D] B^T, where A starts at row a_row and column n of the product is row n of B. */
template <int D, int N>
__device__ __forceinline__ void dot_tiles(float (&c)[N][4], const lev_bf16 *a_rows, int a_row, const lev_bf16 *b_rows) {
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    uint32_t a[4], b[4];
    load_a<D>(a, a_rows, a_row, k);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      int row = n * 8 + lane_of() / 16 * 8 + lane_of() % 8, column = k + lane_of() / 8 % 2 * 8;
      load_matrices(b, b_rows + row * pitch<D> + column);
      multiply_add(c[n], a, b[0], b[1]);
      multiply_add(c[n + 1], a, b[2], b[3]);
    }
  }
}

/* c[16, D] += W[16, 8 N] B[8 N, D], with W in accumulator layout, rounded to bf16. */
template <int D, int N>
__device__ __forceinline__ void mix_tiles(float (&c)[D / 8][4], const float (&w)[N][4], const lev_bf16 *b_rows) {
#pragma unroll
  for (int k = 0; k < N; k += 2) {
    uint32_t b[4];
    const uint32_t a[4] = {two_bf16(w[k][0], w[k][1]), two_bf16(w[k][2], w[k][3]), two_bf16(w[k + 1][0], w[k + 1][1]),
                           two_bf16(w[k + 1][2], w[k + 1][3])};
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      int row = k * 8 + lane_of() % 16, column = n * 8 + lane_of() / 16 * 8;
      load_matrices_across(b, b_rows + row * pitch<D> + column);
      multiply_add(c[n], a, b[0], b[1]);
      multiply_add(c[n + 1], a, b[2], b[3]);
    }
  }
}

template <int N> __device__ __forceinline__ void zero(float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
}

/* Sum over the four lanes that share rows. */
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* ---- rows from global memory ---- */

/* Starts the copy of `rows` rows of D scalars; those past `count` become zero. */
template <int D, int rows>
__device__ __forceinline__ void fetch(lev_bf16 *to, const lev_bf16 *from, int64_t stride, int count) {
  constexpr int per_row = D / 8, rows_at_once = kThreads / per_row;
  int r0 = threadIdx.x / per_row, column = threadIdx.x % per_row * 8;
#pragma unroll
  for (int r = r0; r < rows; r += rows_at_once)
    copy_16(to + r * pitch<D> + column, from + (r < count ? r * stride : 0) + column, r < count);
}

__device__ __forceinline__ const lev_bf16 *bf16_at(const void *base, int64_t scalars) {
  return static_cast<const lev_bf16 *>(base) + scalars;
}
template <int D> __device__ __forceinline__ const lev_bf16 *queries_at(const attn_step &s, int64_t row, int64_t head) {
  return bf16_at(s.q, row * s.q_stride + head * D);
}

/* The keys of a step, from one of two pairs of buffers. */
template <int D>
__device__ __forceinline__ void fetch_keys(lev_bf16 *k_to, lev_bf16 *v_to, const attn_step &s, const attn_span &k,
                                           int64_t kv_head) {
  fetch<D, kRows>(k_to, bf16_at(s.kv.k, kv_head * s.kv.head + k.row * s.kv.k_row), s.kv.k_row, k.count);
  fetch<D, kRows>(v_to, bf16_at(s.kv.v, kv_head * s.kv.head + k.row * s.kv.v_row), s.kv.v_row, k.count);
}

/* ---- what a lane's two rows are ---- */

/* Rows g and g + 8 of a warp's 16 queries. */
struct lane_rows {
  int row[2];
  bool valid[2];
  int64_t first[2], pos[2];
  __device__ __forceinline__ lane_rows(const attn_step &s, const attn_span &q) {
    for (int i = 0; i < 2; ++i) {
      row[i] = warp_of() * 16 + quad_of() + 8 * i;
      valid[i] = row[i] < q.count;
      pos[i] = q.pos + row[i];
      first[i] = valid[i] ? attn_first_key(s, q.row + row[i], pos[i]) : 0;
    }
  }
  __device__ __forceinline__ attn_columns seen(int i, const attn_span &k) const {
    return valid[i] ? attn_seen(k, pos[i], first[i]) : attn_columns{0, 0};
  }
};

/* Column of c[n][i] in its product. */
__device__ __forceinline__ int column_at(int n, int i) {
  return n * 8 + within_quad() * 2 + i % 2;
}

/* ---- forward ---- */

template <int D> struct forward_state { float o[D / 8][4], most[2], sum[2]; /* sum: this lane's share */ };

template <int D>
__device__ void forward_in(const attn_forward_step &a, const attn_span &q, const lane_rows &rows, int64_t head,
                           forward_state<D> &x) {
  zero(x.o);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x.most[i] = -INFINITY, x.sum[i] = 0;
    if (a.step.first || !rows.valid[i]) continue;
    int64_t at = (q.row + rows.row[i]) * a.step.shape.heads + head;
    const float *acc = static_cast<const float *>(a.acc) + at * D + within_quad() * 2;
    x.most[i] = static_cast<const float *>(a.lse)[at] * kLog2e;
    if (within_quad() == 0) x.sum[i] = static_cast<const float *>(a.sum)[at];
#pragma unroll
    for (int n = 0; n < D / 8; ++n) x.o[n][2 * i] = acc[n * 8], x.o[n][2 * i + 1] = acc[n * 8 + 1];
  }
}

template <int D>
__device__ void forward_out(const attn_forward_step &a, const attn_span &q, const lane_rows &rows, int64_t head,
                            forward_state<D> &x) {
  bool last = a.step.last;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = quad_sum(x.sum[i]);
    if (!rows.valid[i]) continue;
    int64_t at = (q.row + rows.row[i]) * a.step.shape.heads + head, to = at * D + within_quad() * 2;
    float factor = last ? 1 / sum : 1.0f;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      float low = x.o[n][2 * i] * factor, high = x.o[n][2 * i + 1] * factor;
      if (last)
        *reinterpret_cast<uint32_t *>(static_cast<lev_bf16 *>(a.o) + to + n * 8) = two_bf16(low, high);
      else
        *reinterpret_cast<float2 *>(static_cast<float *>(a.acc) + to + n * 8) = make_float2(low, high);
    }
    if (within_quad() > 0) continue;
    static_cast<float *>(a.lse)[at] = last ? x.most[i] * kLn2 + logf(sum) : x.most[i] * kLn2;
    if (!last) static_cast<float *>(a.sum)[at] = sum;
  }
}

/* Scores to unnormalised probabilities; the state moves to the new maxima. */
template <int D>
__device__ __forceinline__ void soften(float (&s)[kRows / 8][4], float scale, const lane_rows &rows, const attn_span &k,
                                       forward_state<D> &x) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    attn_columns c = rows.seen(i, k);
    float most = x.most[i];
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float &score = s[n][2 * i + j];
        int column = column_at(n, j);
        score = column >= c.begin && column < c.end ? score * scale : -INFINITY;
        most = fmaxf(most, score);
      }
    most = quad_max(most);
    float base = most == -INFINITY ? 0.0f : most, shrink = exp2f(x.most[i] - base), sum = 0;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) sum += s[n][2 * i + j] = exp2f(s[n][2 * i + j] - base);
    x.most[i] = most, x.sum[i] = x.sum[i] * shrink + sum;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) x.o[n][2 * i] *= shrink, x.o[n][2 * i + 1] *= shrink;
  }
}

template <int D> __global__ void __launch_bounds__(kThreads) forward_tiles(attn_forward_step a) {
  extern __shared__ __align__(16) lev_bf16 memory[];
  constexpr int block = kRows * pitch<D>;
  lev_bf16 *queries = memory, *pairs = memory + block; /* of keys and values, two */
  const attn_step &s = a.step;
  int64_t head = blockIdx.y, kv_head = head / (s.shape.heads / s.shape.kv_heads);
  attn_span q = attn_block_at(s.q_range, kRows, gridDim.x - 1 - blockIdx.x), k, after;
  lane_rows rows(s, q);
  forward_state<D> x;
  forward_in(a, q, rows, head, x);
  fetch<D, kRows>(queries, queries_at<D>(s, q.row, head), s.q_stride, q.count);
  attn_walk walk(attn_first_key(s, q.row, q.pos), q.pos + q.count);
  bool more = walk.next(s.k_range, kRows, &k);
  if (more) fetch_keys<D>(pairs, pairs + block, s, k, kv_head);
  copies_commit();
  for (int slot = 0; more; slot ^= 1, k = after) {
    const lev_bf16 *keys = pairs + slot * 2 * block;
    more = walk.next(s.k_range, kRows, &after);
    if (more) fetch_keys<D>(pairs + (slot ^ 1) * 2 * block, pairs + (slot ^ 1) * 2 * block + block, s, after, kv_head);
    copies_commit();
    copies_wait<1>();
    __syncthreads();
    float score[kRows / 8][4];
    zero(score);
    dot_tiles<D>(score, queries, warp_of() * 16, keys);
    soften<D>(score, (float)s.shape.scale * kLog2e, rows, k, x);
    mix_tiles<D>(x.o, score, keys + block);
    __syncthreads();
  }
  copies_wait<0>();
  forward_out(a, q, rows, head, x);
}

/* ---- backward ---- */

/* log-sum-exp times log2(e), and delta = rowsum(d_o o), of `rows` queries, into shared memory. One warp per row. */
template <int D, int rows>
__device__ void fetch_statistics(const attn_backward_step &a, const attn_span &q, int64_t head, float *lse,
                                 float *delta) {
#pragma unroll 2
  for (int r = warp_of(); r < rows; r += kWarps) {
    int64_t at = (q.row + r) * a.step.shape.heads + head;
    float sum = 0, own = 0;
    if (r < q.count) {
      using part = lev_vec<lev_bf16, D / 32>;
      part g = *reinterpret_cast<const part *>(bf16_at(a.d_o, at * D + lane_of() * (D / 32)));
      part o = *reinterpret_cast<const part *>(bf16_at(a.o, at * D + lane_of() * (D / 32)));
      for (int i = 0; i < D / 32; ++i) sum += lev_load(g.at[i]) * lev_load(o.at[i]);
      own = static_cast<const float *>(a.lse)[at];
    }
    sum = lev_warp_sum(sum);
    if (lane_of() == 0) lse[r] = own * kLog2e, delta[r] = sum;
  }
}

template <int D>
__device__ void query_gradient_out(const attn_backward_step &a, const attn_span &q, const lane_rows &rows, int64_t head,
                                   const float (&sum)[D / 8][4]) {
  float scale = (float)a.step.shape.scale;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!rows.valid[i]) continue;
    int64_t row = q.row + rows.row[i], column = head * D + within_quad() * 2;
    float *acc = static_cast<float *>(a.acc) + row * a.acc_stride + column;
    lev_bf16 *dq = static_cast<lev_bf16 *>(a.dq) + row * a.dq_stride + column;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      float low = sum[n][2 * i] * scale, high = sum[n][2 * i + 1] * scale;
      if (!a.step.first) low += acc[n * 8], high += acc[n * 8 + 1];
      if (a.step.last)
        *reinterpret_cast<uint32_t *>(dq + n * 8) = two_bf16(low, high);
      else
        acc[n * 8] = low, acc[n * 8 + 1] = high;
    }
  }
}

/* dq. One block per block of queries and head. */
template <int D> __global__ void __launch_bounds__(kThreads) backward_queries(attn_backward_step a) {
  extern __shared__ __align__(16) lev_bf16 memory[];
  constexpr int block = kRows * pitch<D>;
  lev_bf16 *queries = memory, *d_o = memory + block, *keys = memory + 2 * block, *values = memory + 3 * block;
  float *lse = reinterpret_cast<float *>(memory + 4 * block), *delta = lse + kRows;
  const attn_step &s = a.step;
  int64_t group = s.shape.heads / s.shape.kv_heads, head = a.head_begin * group + blockIdx.y, kv_head = head / group;
  attn_span q = attn_block_at(s.q_range, kRows, gridDim.x - 1 - blockIdx.x), k;
  lane_rows rows(s, q);
  float sum[D / 8][4], scale = (float)s.shape.scale * kLog2e;
  zero(sum);
  fetch<D, kRows>(queries, queries_at<D>(s, q.row, head), s.q_stride, q.count);
  fetch<D, kRows>(d_o, bf16_at(a.d_o, (q.row * s.shape.heads + head) * D), s.shape.heads * D, q.count);
  fetch_statistics<D, kRows>(a, q, head, lse, delta);
  attn_walk walk(attn_first_key(s, q.row, q.pos), q.pos + q.count);
  while (walk.next(s.k_range, kRows, &k)) {
    fetch_keys<D>(keys, values, s, k, kv_head);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    float p[kRows / 8][4], dp[kRows / 8][4];
    zero(p), zero(dp);
    dot_tiles<D>(p, queries, warp_of() * 16, keys);
    dot_tiles<D>(dp, d_o, warp_of() * 16, values);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      attn_columns c = rows.seen(i, k);
      float own = lse[rows.row[i]], mean = delta[rows.row[i]];
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          int column = column_at(n, j);
          float &ds = dp[n][2 * i + j];
          ds = column >= c.begin && column < c.end ? exp2f(p[n][2 * i + j] * scale - own) * (ds - mean) : 0.0f;
        }
    }
    mix_tiles<D>(sum, dp, keys);
    __syncthreads();
  }
  copies_wait<0>();
  query_gradient_out<D>(a, q, rows, head, sum);
}

/* Probabilities and dS of 16 keys (rows) and a step of queries (columns), in place of scores and dP. */
__device__ __forceinline__ void key_scores(float (&p)[kQueries / 8][4], float (&dp)[kQueries / 8][4], float scale,
                                           const attn_span &q, const attn_span &k, const float *lse, const float *delta,
                                           const int64_t *first) {
#pragma unroll
  for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int column = column_at(n, j);
      int64_t from = first[column], pos = q.pos + column;
      float own = lse[column], mean = delta[column];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int row = warp_of() * 16 + quad_of() + 8 * i;
        int64_t key = k.pos + row;
        bool seen = column < q.count && row < k.count && key >= from && key <= pos;
        float &x = p[n][2 * i + j], &ds = dp[n][2 * i + j];
        x = seen ? exp2f(x * scale - own) : 0.0f;
        ds = seen ? x * (ds - mean) : 0.0f;
      }
    }
}

/* dk or dv of a block of keys, `at` scalars behind `base` and on. */
template <int D>
__device__ void key_gradient_out(const attn_backward_step &a, void *base, int64_t at, int64_t stride,
                                 const attn_span &k, float factor, const float (&sum)[D / 8][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row = warp_of() * 16 + quad_of() + 8 * i;
    if (row >= k.count) continue;
    int64_t from = at + row * stride + within_quad() * 2;
    float *wide = static_cast<float *>(base) + from;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      float low = sum[n][2 * i] * factor, high = sum[n][2 * i + 1] * factor;
      if (a.dkv_rounded) {
        *reinterpret_cast<uint32_t *>(static_cast<lev_bf16 *>(base) + from + n * 8) = two_bf16(low, high);
        continue;
      }
      if (!a.step.first) low += wide[n * 8], high += wide[n * 8 + 1];
      wide[n * 8] = low, wide[n * 8 + 1] = high;
    }
  }
}

/* dk and dv. One block per block of keys and key head: all queries of all heads of the group, in order. */
template <int D> __global__ void __launch_bounds__(kThreads) backward_keys(attn_backward_step a) {
  extern __shared__ __align__(16) lev_bf16 memory[];
  constexpr int block = kRows * pitch<D>, step = kQueries * pitch<D>;
  lev_bf16 *keys = memory, *values = memory + block, *queries = memory + 2 * block, *d_o = queries + step;
  float *lse = reinterpret_cast<float *>(d_o + step), *delta = lse + kQueries;
  int64_t *first = reinterpret_cast<int64_t *>(delta + kQueries);
  const attn_step &s = a.step;
  int64_t group = s.shape.heads / s.shape.kv_heads, kv_head = a.head_begin + blockIdx.y;
  attn_span k = attn_block_at(s.k_range, kRows, blockIdx.x), q;
  float dk[D / 8][4], dv[D / 8][4], scale = (float)s.shape.scale * kLog2e;
  zero(dk), zero(dv);
  fetch_keys<D>(keys, values, s, k, kv_head);
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    attn_walk walk(k.pos, INT64_MAX);
    while (walk.next(s.q_range, kQueries, &q)) {
      if (attn_first_key(s, q.row, q.pos) >= k.pos + k.count) break; /* nor do later queries see these keys */
      fetch<D, kQueries>(queries, queries_at<D>(s, q.row, head), s.q_stride, q.count);
      fetch<D, kQueries>(d_o, bf16_at(a.d_o, (q.row * s.shape.heads + head) * D), s.shape.heads * D, q.count);
      copies_commit();
      fetch_statistics<D, kQueries>(a, q, head, lse, delta);
      if (threadIdx.x < kQueries)
        first[threadIdx.x] =
            (int)threadIdx.x < q.count ? attn_first_key(s, q.row + threadIdx.x, q.pos + threadIdx.x) : INT64_MAX;
      copies_wait<0>();
      __syncthreads();
      float p[kQueries / 8][4], dp[kQueries / 8][4];
      zero(p), zero(dp);
      dot_tiles<D>(p, keys, warp_of() * 16, queries);
      dot_tiles<D>(dp, values, warp_of() * 16, d_o);
      key_scores(p, dp, scale, q, k, lse, delta, first);
      mix_tiles<D>(dv, p, d_o);
      mix_tiles<D>(dk, dp, queries);
      __syncthreads();
    }
  }
  copies_wait<0>();
  int64_t at = kv_head * a.dkv.head;
  key_gradient_out<D>(a, a.dkv.k, at + k.row * a.dkv.k_row, a.dkv.k_row, k, (float)s.shape.scale, dk);
  key_gradient_out<D>(a, a.dkv.v, at + k.row * a.dkv.v_row, a.dkv.v_row, k, 1.0f, dv);
}

/* ---- launches ---- */

template <class Kernel, class Args>
lev_status start(Kernel *kernel, const Args &args, int64_t blocks, int64_t heads, size_t bytes, cudaStream_t stream) {
  if (blocks == 0 || heads == 0) return LEV_OK;
  LEV_TRY(lev_allow_shared(kernel));
  kernel<<<dim3((unsigned)blocks, (unsigned)heads), kThreads, bytes, stream>>>(args);
  return lev_cuda_launched("attention");
}

/* Rows of queries and keys must start on 16 bytes. */
bool fits(const attn_step *s) {
  size_t strides[] = {(size_t)s->q_stride * 2, (size_t)s->kv.k_row * 2, (size_t)s->kv.v_row * 2,
                      (size_t)s->kv.head * 2};
  return s->shape.dtype == LEV_BF16 && (s->shape.head_dim == 64 || s->shape.head_dim == 128) &&
         lev_divides(16, s->q, (const void *)s->kv.k, (const void *)s->kv.v, strides[0], strides[1], strides[2],
                     strides[3]);
}

template <int D> lev_status forward(const attn_forward_step *a, cudaStream_t stream) {
  size_t bytes = sizeof(lev_bf16) * 5 * kRows * pitch<D>;
  return start(forward_tiles<D>, *a, attn_blocks(a->step.q_range, kRows), a->step.shape.heads, bytes, stream);
}

template <int D> lev_status backward(const attn_backward_step *a, cudaStream_t stream) {
  const attn_step &s = a->step;
  int64_t heads = a->head_end - a->head_begin, group = s.shape.heads / s.shape.kv_heads;
  size_t queries = sizeof(lev_bf16) * 4 * kRows * pitch<D> + sizeof(float) * 2 * kRows;
  size_t keys = sizeof(lev_bf16) * 2 * (kRows + kQueries) * pitch<D> + (8 + sizeof(int64_t)) * kQueries;
  LEV_TRY(start(backward_queries<D>, *a, attn_blocks(s.q_range, kRows), heads * group, queries, stream));
  return start(backward_keys<D>, *a, attn_blocks(s.k_range, kRows), heads, keys, stream);
}

} // namespace

lev_status attn_mma_forward(const attn_forward_step *a, cudaStream_t stream, bool *taken) {
  *taken = fits(&a->step) && lev_divides(16, (const void *)a->o, (const void *)a->acc);
  if (!*taken) return LEV_OK;
  return a->step.shape.head_dim == 64 ? forward<64>(a, stream) : forward<128>(a, stream);
}

lev_status attn_mma_backward(const attn_backward_step *a, cudaStream_t stream, bool *taken) {
  size_t pairs[] = {(size_t)a->dkv.k_row * 2, (size_t)a->dkv.v_row * 2, (size_t)a->dkv.head * 2};
  *taken = fits(&a->step) && lev_divides(16, a->o, a->d_o, (const void *)a->dq, (size_t)a->dq_stride * 2) &&
           lev_divides(4, (const void *)a->dkv.k, (const void *)a->dkv.v, pairs[0], pairs[1], pairs[2]);
  if (!*taken) return LEV_OK;
  return a->step.shape.head_dim == 64 ? backward<64>(a, stream) : backward<128>(a, stream);
}
