/* SPDX-License-Identifier: Apache-2.0 */
/* Scratch of attention in blocks of heads, and how large a block may be. Knows no backend: `levee plan` counts the same
 * bytes as a run takes. */
#include "common/dims.h"
#include "harness/model/attention_graph.h"

size_t attn_library_bytes(const attn_block_shape *s) {
  size_t bytes = LEV_ALIGN;
  if (s->backward && s->heads > s->kv_heads)
    bytes += 2 * lev_align_up(lev_bytes(s->heads * s->keys, s->dim, sizeof(lev_bf16)));
  return bytes;
}

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
  attn_block_shape block = {.heads = heads, .kv_heads = s->cut.kv_heads, .keys = s->keys, .dim = s->dim};
  block.backward = s->backward;
  size_t used = attn_library_bytes(&block);
  unsigned char *from = base;
  attn_room room = {.library = base};
  room.lse = carve(&used, from, true, rows, 1, f32);
  room.delta = carve(&used, from, s->backward, rows, 1, f32);
  room.dq_sum = carve(&used, from, s->backward, rows, s->dim, f32);
  room.o_part = carve(&used, from, s->ring && !s->backward, rows, s->dim, bf16);
  for (int i = 0; i < 2; ++i)
    room.k_part[i] = carve(&used, from, passes || (s->ring && s->backward), key_rows, s->dim, bf16);
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
