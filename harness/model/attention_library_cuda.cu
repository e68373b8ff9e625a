/* SPDX-License-Identifier: Apache-2.0 */
/* One ring step of attention through cuDNN, in blocks of heads.
 *
 * Without a ring the library writes the results themselves. On a ring, the zigzag shards leave three kinds of steps:
 * with its own keys a rank's queries are causal over its rows; of a rank before it, all queries see all keys of the
 * first piece; of a rank behind it, the queries of the second piece see all keys. A step's results come out in bf16;
 * here they are merged by log-sum-exp (o) or added (gradients), in f32. Between steps, o is
 * normalised in acc and the log-sum-exp lies in lse.
 *
 * Packed documents (no ring) are a batch whose entries lie anywhere in the caller's arrays. */
#include "harness/model/attention_graph.h"
#include "harness/model/attention_walk.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kThreads >= ATTN_DOCUMENTS);

/* ---- kernels ---- */

/* Rows [heads, tokens, d] of T. */
template <class T> struct rows_at {
  T *base;
  int64_t row, head;
  __device__ T *at(int64_t h, int64_t t) const { return base + h * head + t * row; }
};

constexpr int kPack = 8; /* scalars that a thread moves at once: d is a multiple of it, as all strides are */

/* to = from, or to += from. A row of all heads at a time, a thread has the same place in each head. */
template <class T, class S, bool add>
__global__ void __launch_bounds__(kThreads)
    move_rows(rows_at<T> to, rows_at<const S> from, int64_t heads, int64_t tokens, int d) {
  const int per_head = d / kPack, rows = kThreads / per_head, x = threadIdx.x % per_head * kPack;
  const int row = threadIdx.x / per_head;
  if (row >= rows) return;
  for (int64_t t = (int64_t)blockIdx.x * rows + row; t < tokens; t += (int64_t)gridDim.x * rows) {
#pragma unroll 4
    for (int64_t h = 0; h < heads; ++h) {
      lev_vec<S, kPack> value = lev_read<S, kPack>(from.at(h, t) + x);
      T *at = to.at(h, t) + x;
      lev_vec<T, kPack> out;
      if constexpr (add) out = lev_read<T, kPack>(at);
#pragma unroll
      for (int j = 0; j < kPack; ++j)
        out.at[j] = lev_store<T>(lev_load(value.at[j]) + (add ? lev_load(out.at[j]) : 0.0f));
      lev_write<T, kPack>(at, out);
    }
  }
}

/* Heads of a block among all: block head h is head first + h * step; its log-sum-exp lies at all[t * heads + head]. */
struct head_map {
  int64_t first, step, heads;
};

/* Log-sum-exp of a block, between [tokens, heads] and [block heads, tokens]. */
template <bool gather>
__global__ void __launch_bounds__(kThreads)
    turn_lse(float *all, float *block, head_map map, int64_t count, int64_t tokens) {
  int64_t n = count * tokens;
  for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < n; i += (int64_t)gridDim.x * kThreads) {
    int64_t h = i / tokens, t = i % tokens;
    float *at = all + t * map.heads + map.first + h * map.step;
    if (gather)
      block[i] = *at;
    else
      *at = block[i];
  }
}

/* Merges a step's o and log-sum-exp into what earlier steps left. One warp per row. The weight of the new part is
 * 1 / (1 + e^(old - new)), which neither overflows nor cancels. */
__global__ void __launch_bounds__(kThreads)
    merge_rows(rows_at<float> acc, float *all, rows_at<const lev_bf16> part, const float *part_lse, head_map map,
               int64_t count, int64_t tokens, int64_t d) {
  int64_t i = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32;
  if (i >= count * tokens) return;
  int64_t h = i / tokens, t = i % tokens, lane = threadIdx.x % 32;
  float *lse = all + t * map.heads + map.first + h * map.step;
  float before = *lse, now = part_lse[i];
  float high = before > now ? before : now, low = before > now ? now : before; /* a NaN stays in one of them */
  float weight = now == before ? 0.5f : 1 / (1 + expf(before - now));
  float *to = acc.at(h, t);
  const lev_bf16 *from = part.at(h, t);
  for (int64_t x = lane * 4; x < d; x += 128) {
    lev_vec<float, 4> a = lev_read<float, 4>(to + x);
    lev_vec<lev_bf16, 4> b = lev_read<lev_bf16, 4>(from + x);
#pragma unroll
    for (int j = 0; j < 4; ++j) a.at[j] += weight * (lev_load(b.at[j]) - a.at[j]);
    lev_write<float, 4>(to + x, a);
  }
  __syncwarp(); /* all lanes have read the old one */
  if (lane == 0) *lse = high + log1pf(expf(low - high));
}

/* The documents of one call of the library, and its tables of them. */
struct document_group {
  int64_t begin[ATTN_DOCUMENTS + 1], count; /* first tokens, and the end of the last */
  int64_t rows[ATTN_PLACES];
  int64_t *places[ATTN_PLACES];
  int32_t *lengths;
};

/* Those that are not there lie behind the last, without tokens. */
__global__ void __launch_bounds__(kThreads) place_documents(document_group g) {
  for (int64_t i = threadIdx.x; i <= ATTN_DOCUMENTS; i += kThreads) {
    int64_t at = g.begin[lev_min_i64(i, g.count)];
    for (int p = 0; p < ATTN_PLACES; ++p) g.places[p][i] = at * g.rows[p];
    if (i < ATTN_DOCUMENTS) g.lengths[i] = i < g.count ? (int32_t)(g.begin[i + 1] - at) : 0;
  }
}

/* ---- launches ---- */

template <bool add, class T, class S>
lev_status move(rows_at<T> to, rows_at<const S> from, int64_t heads, int64_t tokens, int64_t d, cudaStream_t stream) {
  if (heads * tokens * d == 0) return LEV_OK;
  unsigned grid = lev_grid(tokens * (d / kPack), kThreads, 1 << 16);
  move_rows<T, S, add><<<grid, kThreads, 0, stream>>>(to, from, heads, tokens, (int)d);
  return lev_cuda_launched("attention: move_rows");
}
template <bool gather>
lev_status turn(float *all, float *block, head_map map, int64_t count, int64_t tokens, cudaStream_t stream) {
  turn_lse<gather>
      <<<lev_grid(count * tokens, kThreads, 1 << 16), kThreads, 0, stream>>>(all, block, map, count, tokens);
  return lev_cuda_launched("attention: turn_lse");
}

/* Queries and keys that meet in a step, as rows of their arrays. */
struct meeting {
  int64_t q_row, queries, k_row, keys;
  bool causal;
};

meeting meet(const attn_step &s) {
  int64_t n = attn_length(s.q_range[0]) + attn_length(s.q_range[1]), first = attn_length(s.q_range[0]);
  int64_t keys = attn_length(s.k_range[0]) + attn_length(s.k_range[1]);
  if (s.first) return {0, n, 0, keys, true};
  bool before = s.k_range[0].begin < s.q_range[0].begin; /* keys of a rank before this one */
  if (before) return {0, n, 0, attn_length(s.k_range[0]), false};
  return {first, n - first, 0, keys, false};
}

/* One block: key heads [key, key + cut.kv_heads), and of each query heads [pass, pass + cut.per_key). */
struct block_of_heads {
  int64_t key, pass, heads;
  head_map map;
  attn_layout q_heads(int64_t row, int64_t d) const { return {row, map.step * d}; }
};

block_of_heads block_at(const attn_step &s, attn_cut cut, int64_t key, int64_t pass) {
  int64_t group = s.shape.heads / s.shape.kv_heads;
  block_of_heads b = {key, pass, cut.kv_heads * cut.per_key, {}};
  b.map = {key * group + pass, cut.per_key == group ? 1 : group, s.shape.heads};
  return b;
}

attn_room room_of(const attn_step &s, const meeting &m, attn_cut cut, bool backward) {
  attn_room_shape shape = {cut,
                           s.shape.heads / s.shape.kv_heads,
                           m.queries,
                           m.keys,
                           s.shape.head_dim,
                           s.documents ? ATTN_DOCUMENTS : 0,
                           backward,
                           !(s.first && s.last)};
  attn_room room;
  (void)attn_room_carve(&shape, s.workspace, &room);
  return room;
}

const lev_bf16 *scalars(const void *base, int64_t at) {
  return static_cast<const lev_bf16 *>(base) + at;
}
lev_bf16 *scalars(void *base, int64_t at) {
  return static_cast<lev_bf16 *>(base) + at;
}

/* What both directions read, and log-sum-exp. */
void set_inputs(const attn_step &s, const meeting &m, attn_cut cut, const block_of_heads &b, const attn_room &room,
                void *lse, attn_block_shape *shape, attn_block_data *data) {
  int64_t d = s.shape.head_dim;
  *shape = {};
  shape->heads = b.heads, shape->kv_heads = cut.kv_heads, shape->queries = m.queries, shape->keys = m.keys;
  shape->dim = d, shape->causal = m.causal;
  if (s.documents) shape->documents = ATTN_DOCUMENTS, shape->queries = shape->keys = s.longest;
  shape->window = m.causal && s.window < shape->keys ? s.window : 0;
  shape->q = b.q_heads(s.q_stride, d);
  shape->k = {s.kv.k_row, s.kv.head}, shape->v = {s.kv.v_row, s.kv.head};
  *data = {};
  data->q = scalars(s.q, m.q_row * s.q_stride + b.map.first * d);
  data->k = scalars((const void *)s.kv.k, b.key * s.kv.head + m.k_row * s.kv.k_row);
  data->v = scalars((const void *)s.kv.v, b.key * s.kv.head + m.k_row * s.kv.v_row);
  data->scale = (float)s.shape.scale;
  data->lse = room.lse, data->library = room.library;
  if (!s.documents) return;
  shape->lse = {s.shape.heads, b.map.step};
  data->lse = static_cast<float *>(lse) + b.map.first;
  for (int i = 0; i < ATTN_PLACES; ++i) data->places[i] = room.places[i];
  data->lengths = room.lengths;
}

/* One call of the library; of packed documents one for every so many of them, the last ones first. */
lev_status run_block(const attn_step &s, const meeting &m, const attn_room &room, const attn_block_shape &shape,
                     const attn_block_data &data, cudaStream_t stream) {
  if (!s.documents) return attn_cudnn_run(s.library, &shape, &data, stream);
  document_group g;
  attn_place_rows(&shape, g.rows);
  for (int i = 0; i < ATTN_PLACES; ++i) g.places[i] = room.places[i];
  g.lengths = room.lengths;
  for (int64_t end = m.queries; end > 0; end = g.begin[0]) {
    g.count = attn_documents_before(s.documents, end, g.begin);
    place_documents<<<1, kThreads, 0, stream>>>(g);
    LEV_TRY(lev_cuda_launched("attention: place_documents"));
    LEV_TRY(attn_cudnn_run(s.library, &shape, &data, stream));
  }
  return LEV_OK;
}

/* ---- forward ---- */

void forward_block(const attn_forward_step &a, const meeting &m, const block_of_heads &b, const attn_room &room,
                   attn_block_shape *shape, attn_block_data *data) {
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim;
  bool ring = !(s.first && s.last);
  set_inputs(s, m, s.forward_cut, b, room, a.lse, shape, data);
  shape->o = ring ? attn_layout{d, m.queries * d} : b.q_heads(s.shape.heads * d, d);
  data->o = ring ? room.o_part : scalars(a.o, b.map.first * d);
}

lev_status forward_merge(const attn_forward_step &a, const meeting &m, const block_of_heads &b, const attn_room &room,
                         cudaStream_t stream) {
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, n = b.heads * m.queries;
  float *lse = static_cast<float *>(a.lse) + m.q_row * s.shape.heads;
  if (s.documents) return LEV_OK;
  if (s.first) LEV_TRY(turn<false>(lse, room.lse, b.map, b.heads, m.queries, stream));
  if (s.first && s.last) return LEV_OK;
  rows_at<float> acc = {static_cast<float *>(a.acc) + (m.q_row * s.shape.heads + b.map.first) * d, s.shape.heads * d,
                        b.map.step * d};
  rows_at<const lev_bf16> part = {room.o_part, d, m.queries * d};
  if (s.first) return move<false>(acc, part, b.heads, m.queries, d, stream);
  merge_rows<<<(unsigned)lev_ceil_div(n, kWarps), kThreads, 0, stream>>>(acc, lse, part, room.lse, b.map, b.heads,
                                                                         m.queries, d);
  return lev_cuda_launched("attention: merge_rows");
}

/* acc, complete, to the caller's rows. */
lev_status round_out(const attn_step &s, void *acc, int64_t acc_row, void *out, int64_t out_row, int64_t head_begin,
                     int64_t head_end, cudaStream_t stream) {
  int64_t d = s.shape.head_dim, n = attn_length(s.q_range[0]) + attn_length(s.q_range[1]);
  rows_at<const float> from = {static_cast<const float *>(acc) + head_begin * d, acc_row, d};
  return move<false>(rows_at<lev_bf16>{scalars(out, head_begin * d), out_row, d}, from, head_end - head_begin, n, d,
                     stream);
}

/* ---- backward ---- */

/* Why dk and dv do not go straight to where they belong. */
struct backward_modes {
  bool ring, passes;
  bool apart; /* documents, several query heads per key head: k, v and their gradients in rows of the block's heads */
  bool parts() const { return ring || passes || apart; }
};

/* Rows of dk and dv where they come in parts. */
attn_layout part_layout(const attn_step &s, const meeting &m) {
  int64_t d = s.shape.head_dim;
  return s.documents ? attn_layout{s.backward_cut.kv_heads * d, d} : attn_layout{d, m.keys * d};
}

void backward_block(const attn_backward_step &a, const meeting &m, const block_of_heads &b, const attn_room &room,
                    backward_modes mode, attn_block_shape *shape, attn_block_data *data) {
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, dense = s.shape.heads * d;
  bool parts = mode.parts();
  set_inputs(s, m, s.backward_cut, b, room, const_cast<void *>(a.lse), shape, data);
  shape->backward = 1;
  shape->o = b.q_heads(dense, d), shape->dq = b.q_heads(a.dq_stride, d);
  shape->dk = parts ? part_layout(s, m) : attn_layout{a.dkv.k_row, a.dkv.head};
  shape->dv = parts ? part_layout(s, m) : attn_layout{a.dkv.v_row, a.dkv.head};
  int64_t row = m.q_row * dense + b.map.first * d;
  data->o = const_cast<lev_bf16 *>(scalars(a.o, row)), data->d_o = scalars(a.d_o, row);
  /* On a ring, the caller's dq holds one step's part until the last one. */
  data->dq = scalars(a.dq, m.q_row * a.dq_stride + b.map.first * d);
  data->dk = parts ? room.k_part[0] : scalars(a.dkv.k, b.key * a.dkv.head);
  data->dv = parts ? room.k_part[1] : scalars(a.dkv.v, b.key * a.dkv.head);
  data->delta = room.delta, data->dq_sum = room.dq_sum;
  if (!s.documents) return;
  shape->q = shape->dq = {b.heads * d, d};
  data->q = room.q_part, data->dq = room.dq_part;
  if (mode.apart) {
    shape->k = shape->v = part_layout(s, m);
    data->k = room.k_copy[0], data->v = room.k_copy[1];
  }
  data->dk_heads = room.heads_part[0], data->dv_heads = room.heads_part[1];
}

/* Packed documents: q, and where they lie apart k and v, in rows of the block's heads. */
lev_status copy_documents(const attn_step &s, const meeting &m, const block_of_heads &b, const attn_room &room,
                          backward_modes mode, cudaStream_t stream) {
  int64_t d = s.shape.head_dim, kv_heads = s.backward_cut.kv_heads;
  rows_at<const lev_bf16> q = {scalars(s.q, b.map.first * d), s.q_stride, b.map.step * d};
  LEV_TRY(move<false>(rows_at<lev_bf16>{room.q_part, b.heads * d, d}, q, b.heads, m.queries, d, stream));
  if (!mode.apart || b.pass > 0) return LEV_OK;
  attn_layout to = part_layout(s, m);
  for (int i = 0; i < 2; ++i) {
    rows_at<const lev_bf16> from = {scalars((const void *)(i == 0 ? s.kv.k : s.kv.v), b.key * s.kv.head),
                                    i == 0 ? s.kv.k_row : s.kv.v_row, s.kv.head};
    LEV_TRY(move<false>(rows_at<lev_bf16>{room.k_copy[i], to.row, to.head}, from, kv_heads, m.keys, d, stream));
  }
  return LEV_OK;
}

/* Adds what a pass gave to dq and to the gradients of keys. */
lev_status backward_merge(const attn_backward_step &a, const meeting &m, const block_of_heads &b, const attn_room &room,
                          backward_modes mode, cudaStream_t stream) {
  const attn_step &s = a.step;
  int64_t d = s.shape.head_dim, kv_heads = s.backward_cut.kv_heads;
  if (mode.ring) {
    rows_at<float> dq = {static_cast<float *>(a.acc) + m.q_row * a.acc_stride + b.map.first * d, a.acc_stride,
                         b.map.step * d};
    rows_at<const lev_bf16> part = {scalars((const void *)a.dq, m.q_row * a.dq_stride + b.map.first * d), a.dq_stride,
                                    b.map.step * d};
    LEV_TRY(s.first ? move<false>(dq, part, b.heads, m.queries, d, stream)
                    : move<true>(dq, part, b.heads, m.queries, d, stream));
  }
  if (s.documents) {
    rows_at<lev_bf16> dq = {scalars(a.dq, b.map.first * d), a.dq_stride, b.map.step * d};
    LEV_TRY(move<false>(dq, rows_at<const lev_bf16>{room.dq_part, b.heads * d, d}, b.heads, m.queries, d, stream));
  }
  if (!mode.ring && !mode.passes) return LEV_OK;
  bool overwrite = s.first && b.pass == 0;
  for (int i = 0; i < 2; ++i) {
    float *chunk = static_cast<float *>(i == 0 ? a.dkv.k : a.dkv.v) + b.key * a.dkv.head;
    rows_at<float> ring = {chunk + m.k_row * a.dkv.k_row, i == 0 ? a.dkv.k_row : a.dkv.v_row, a.dkv.head};
    rows_at<float> sum = mode.ring ? ring : rows_at<float>{room.k_sum[i], d, m.keys * d};
    attn_layout at = part_layout(s, m);
    rows_at<const lev_bf16> part = {room.k_part[i], at.row, at.head};
    LEV_TRY(overwrite ? move<false>(sum, part, kv_heads, m.keys, d, stream)
                      : move<true>(sum, part, kv_heads, m.keys, d, stream));
  }
  return LEV_OK;
}

/* Parts of dk and dv, or their sums over passes, to the caller's. */
lev_status keys_out(const attn_backward_step &a, const meeting &m, int64_t key, const attn_room &room,
                    backward_modes mode, cudaStream_t stream) {
  int64_t d = a.step.shape.head_dim, kv_heads = a.step.backward_cut.kv_heads;
  attn_layout at = part_layout(a.step, m);
  for (int i = 0; i < 2; ++i) {
    rows_at<lev_bf16> to = {scalars(i == 0 ? a.dkv.k : a.dkv.v, key * a.dkv.head), i == 0 ? a.dkv.k_row : a.dkv.v_row,
                            a.dkv.head};
    rows_at<const float> sum = {room.k_sum[i], d, m.keys * d};
    rows_at<const lev_bf16> part = {room.k_part[i], at.row, at.head};
    LEV_TRY(mode.passes ? move<false>(to, sum, kv_heads, m.keys, d, stream)
                        : move<false>(to, part, kv_heads, m.keys, d, stream));
  }
  return LEV_OK;
}

} // namespace

lev_status attn_library_forward(const attn_forward_step *a, cudaStream_t stream) {
  const attn_step &s = a->step;
  const meeting m = meet(s);
  const attn_room room = room_of(s, m, s.forward_cut, false);
  attn_block_shape shape;
  attn_block_data data;
  for (int64_t key = 0; key < s.shape.kv_heads; key += s.forward_cut.kv_heads) {
    block_of_heads b = block_at(s, s.forward_cut, key, 0);
    forward_block(*a, m, b, room, &shape, &data);
    LEV_TRY(run_block(s, m, room, shape, data, stream));
    LEV_TRY(forward_merge(*a, m, b, room, stream));
  }
  if (!s.last || s.first) return LEV_OK;
  return round_out(s, a->acc, s.shape.heads * s.shape.head_dim, a->o, s.shape.heads * s.shape.head_dim, 0,
                   s.shape.heads, stream);
}

lev_status attn_library_backward(const attn_backward_step *a, cudaStream_t stream) {
  const attn_step &s = a->step;
  const int64_t group = s.shape.heads / s.shape.kv_heads;
  const attn_cut cut = s.backward_cut;
  const backward_modes mode = {!(s.first && s.last), cut.per_key < group, s.documents && group > 1};
  const meeting m = meet(s);
  const attn_room room = room_of(s, m, cut, true);
  float *lse = const_cast<float *>(static_cast<const float *>(a->lse)) + m.q_row * s.shape.heads;
  attn_block_shape shape;
  attn_block_data data;
  for (int64_t key = a->head_begin; key < a->head_end; key += cut.kv_heads) {
    for (int64_t pass = 0; pass < group; pass += cut.per_key) {
      block_of_heads b = block_at(s, cut, key, pass);
      backward_block(*a, m, b, room, mode, &shape, &data);
      LEV_TRY(s.documents ? copy_documents(s, m, b, room, mode, stream)
                          : turn<true>(lse, room.lse, b.map, b.heads, m.queries, stream));
      LEV_TRY(run_block(s, m, room, shape, data, stream));
      LEV_TRY(backward_merge(*a, m, b, room, mode, stream));
    }
    if (mode.parts() && !mode.ring) LEV_TRY(keys_out(*a, m, key, room, mode, stream));
  }
  if (!mode.ring || !s.last) return LEV_OK;
  return round_out(s, a->acc, a->acc_stride, a->dq, a->dq_stride, a->head_begin * group, a->head_end * group, stream);
}
