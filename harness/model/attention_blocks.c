/* SPDX-License-Identifier: Apache-2.0 */
/* Scratch of attention in blocks of heads, how large a block may be, and packed documents as the host sees them. Knows
 * no backend: `levee plan` counts the same bytes as a run takes. */
#include "common/dims.h"
#include "harness/model/attention_graph.h"

size_t attn_library_bytes(const attn_block_shape *s) {
  size_t bytes = LEV_ALIGN;
  if (s->documents > 0) return 2048 + 512 * (size_t)lev_ceil_div(s->documents, 64) * 64;
  if (s->backward && s->heads > s->kv_heads)
    bytes += 2 * lev_align_up(lev_bytes(s->heads * s->keys, s->dim, sizeof(lev_bf16)));
  return bytes;
}

/* ---- packed documents ---- */

lev_status attn_packing_of(const int64_t *doc_begin, int64_t tokens, attn_packing *out) {
  *out = (attn_packing){0, 0};
  for (int64_t end = tokens, begin; end > 0; end = begin) {
    begin = doc_begin[end - 1];
    if (begin < 0 || begin >= end)
      return lev_fail(LEV_ERR_ARG, "attention: the document of token %lld begins at %lld", (long long)(end - 1),
                      (long long)begin);
    out->documents += 1;
    out->pairs += 0.5 * (double)(end - begin) * (double)(end - begin + 1);
  }
  return LEV_OK;
}

int64_t attn_documents_before(const int64_t *doc_begin, int64_t tokens, int64_t begin[ATTN_DOCUMENTS + 1]) {
  int64_t count = 0, first = tokens;
  for (; count < ATTN_DOCUMENTS && first > 0; ++count) first = doc_begin[first - 1];
  begin[count] = tokens;
  for (int64_t i = count; i > 0; --i) begin[i - 1] = doc_begin[begin[i] - 1];
  return count;
}

void attn_place_rows(const attn_block_shape *s, int64_t rows[ATTN_PLACES]) {
  rows[ATTN_AT_Q] = s->q.row, rows[ATTN_AT_K] = s->k.row, rows[ATTN_AT_V] = s->v.row, rows[ATTN_AT_O] = s->o.row;
  rows[ATTN_AT_LSE] = s->lse.row, rows[ATTN_AT_DK] = s->dk.row, rows[ATTN_AT_DV] = s->dv.row;
  rows[ATTN_AT_DELTA] = s->heads, rows[ATTN_AT_HEADS] = s->heads * s->dim;
}

/* ---- rooms ---- */

/* The next part: its address where there is a base. */
static void *carve(size_t *used, unsigned char *base, bool wanted, int64_t rows, int64_t cols, size_t unit) {
  if (!wanted) return NULL;
  void *at = base ? base + *used : NULL;
  *used += lev_align_up(lev_bytes(rows, cols, unit));
  return at;
}

size_t attn_room_carve(const attn_room_shape *s, void *base, attn_room *out) {
  const int64_t heads = s->cut.kv_heads * s->cut.per_key, rows = heads * s->queries;
  const int64_t key_rows = s->cut.kv_heads * s->keys;
  const size_t f32 = sizeof(float), bf16 = sizeof(lev_bf16);
  const bool passes = s->backward && s->cut.per_key < s->per_key;
  const bool packed = s->documents > 0, apart = packed && s->backward && s->per_key > 1;
  attn_block_shape block = {.heads = heads, .kv_heads = s->cut.kv_heads, .keys = s->keys, .dim = s->dim};
  block.backward = s->backward, block.documents = s->documents;
  size_t used = attn_library_bytes(&block);
  unsigned char *from = base;
  attn_room room = {.library = base};
  for (int i = 0; i < ATTN_PLACES; ++i)
    room.places[i] = carve(&used, from, packed, 1, s->documents + 1, sizeof(int64_t));
  room.lengths = carve(&used, from, packed, 1, s->documents, sizeof(int32_t));
  room.lse = carve(&used, from, true, rows, 1, f32);
  room.delta = carve(&used, from, s->backward, rows, 1, f32);
  room.dq_sum = carve(&used, from, s->backward, rows, s->dim, f32);
  room.o_part = carve(&used, from, s->ring && !s->backward, rows, s->dim, bf16);
  room.q_part = carve(&used, from, packed && s->backward, rows, s->dim, bf16);
  room.dq_part = carve(&used, from, packed && s->backward, rows, s->dim, bf16);
  for (int i = 0; i < 2; ++i) room.k_copy[i] = carve(&used, from, apart, key_rows, s->dim, bf16);
  for (int i = 0; i < 2; ++i) room.heads_part[i] = carve(&used, from, apart && !passes, rows, s->dim, bf16);
  for (int i = 0; i < 2; ++i)
    room.k_part[i] = carve(&used, from, passes || apart || (s->ring && s->backward), key_rows, s->dim, bf16);
  for (int i = 0; i < 2; ++i) room.k_sum[i] = carve(&used, from, passes && !s->ring, key_rows, s->dim, f32);
  if (out) *out = room;
  return used;
}

/* The largest divisor of `unit` that fits, with per_key query heads of each; 1 if none does. */
static attn_cut largest(attn_room_shape *s, int64_t unit, int64_t per_key, size_t cap, size_t *bytes) {
  for (int64_t n = unit; n >= 1; --n) {
    if (unit % n != 0) continue;
    s->cut = (attn_cut){n, per_key};
    *bytes = attn_room_carve(s, NULL, NULL);
    if (*bytes <= cap) break;
  }
  return s->cut;
}

attn_cut attn_cut_choose(attn_room_shape s, int64_t unit, size_t cap, size_t *bytes) {
  attn_cut whole = largest(&s, unit, s.per_key, cap, bytes);
  if (*bytes <= cap || !s.backward || s.per_key == 1) return whole;
  size_t bytes_whole = *bytes;
  attn_cut passes = largest(&s, unit, 1, cap, bytes);
  if (*bytes <= cap || *bytes < bytes_whole) return passes;
  *bytes = bytes_whole;
  return whole;
}
