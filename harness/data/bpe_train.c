/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/bpe_train.h"

#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common/hostmem.h"
#include "harness/data/text.h"

typedef struct word {
  uint64_t hash;
  size_t at;     /* in text, later in symbols */
  int64_t count; /* how often it occurs */
  uint32_t n;    /* bytes, later symbols left */
} word;

typedef struct pair {
  uint64_t key; /* left << 32 | right */
  int64_t count;
  int32_t *where; /* words that (may) hold it */
  int32_t n, room;
  bool touched;
} pair;

/* A pair as it was when it was pushed: the count may have fallen since. */
typedef struct entry {
  int64_t count;
  uint64_t key;
  int32_t pair;
} entry;

/* Growable array. */
typedef struct list {
  void *data;
  size_t n, room;
} list;

struct lev_bpe_trainer {
  list words;     /* word */
  list text;      /* unsigned char */
  int32_t *index; /* hash table of words, later of pairs; -1 empty */
  size_t slots;
  list pairs;       /* pair */
  list heap;        /* entry */
  list touched;     /* int32_t: pairs whose count the current merge raised */
  int32_t *symbols; /* of all words */
};

static lev_status reserve(list *l, size_t more, size_t size) {
  return lev_grow(&l->data, &l->room, l->n + more, size);
}

static lev_status new_index(lev_bpe_trainer *t, size_t slots) {
  int32_t *index = lev_calloc(LEV_HEAP_DATA, slots, sizeof *index);
  if (!index) return LEV_ERR_NOMEM;
  memset(index, 0xFF, slots * sizeof *index);
  lev_free(t->index);
  t->index = index, t->slots = slots;
  return LEV_OK;
}

lev_status lev_bpe_trainer_create(lev_bpe_trainer **out) {
  *out = lev_calloc(LEV_HEAP_DATA, 1, sizeof **out);
  if (!*out) return LEV_ERR_NOMEM;
  lev_status st = new_index(*out, 4096);
  if (st == LEV_OK) return LEV_OK;
  lev_bpe_trainer_close(*out);
  *out = NULL;
  return st;
}

void lev_bpe_trainer_close(lev_bpe_trainer *t) {
  if (!t) return;
  pair *p = t->pairs.data;
  for (size_t i = 0; i < t->pairs.n; ++i) lev_free(p[i].where);
  void *const parts[] = {t->words.data, t->text.data,    t->index,  t->pairs.data,
                         t->heap.data,  t->touched.data, t->symbols};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; ++i) lev_free(parts[i]);
  lev_free(t);
}

/* ---- counting words ---- */

static lev_status grow_word_index(lev_bpe_trainer *t) {
  const word *w = t->words.data;
  LEV_TRY(new_index(t, 2 * t->slots));
  for (size_t i = 0; i < t->words.n; ++i) {
    size_t slot = w[i].hash & (t->slots - 1);
    while (t->index[slot] >= 0) slot = (slot + 1) & (t->slots - 1);
    t->index[slot] = (int32_t)i;
  }
  return LEV_OK;
}

lev_status lev_bpe_trainer_add(lev_bpe_trainer *t, const unsigned char *piece, size_t bytes) {
  if (bytes == 0) return LEV_OK;
  if (bytes > INT32_MAX || t->words.n >= INT32_MAX - 1)
    return lev_fail(LEV_ERR_UNSUPPORTED, "a piece of %zu bytes after %zu different ones", bytes, t->words.n);
  uint64_t hash = XXH3_64bits(piece, bytes);
  word *w = t->words.data;
  size_t slot = hash & (t->slots - 1);
  for (; t->index[slot] >= 0; slot = (slot + 1) & (t->slots - 1)) {
    word *at = &w[t->index[slot]];
    if (at->hash != hash || at->n != bytes || memcmp((unsigned char *)t->text.data + at->at, piece, bytes) != 0)
      continue;
    ++at->count;
    return LEV_OK;
  }
  LEV_TRY(reserve(&t->words, 1, sizeof *w));
  LEV_TRY(reserve(&t->text, bytes, 1));
  w = t->words.data;
  w[t->words.n] = (word){.hash = hash, .at = t->text.n, .count = 1, .n = (uint32_t)bytes};
  memcpy((unsigned char *)t->text.data + t->text.n, piece, bytes);
  t->text.n += bytes;
  t->index[slot] = (int32_t)t->words.n++;
  return t->words.n * 2 > t->slots ? grow_word_index(t) : LEV_OK;
}

/* ---- pairs and their heap ---- */

static size_t pair_slot(const lev_bpe_trainer *t, uint64_t key) {
  const pair *p = t->pairs.data;
  size_t slot = (size_t)(key * 0x9E3779B97F4A7C15u >> 20) & (t->slots - 1);
  while (t->index[slot] >= 0 && p[t->index[slot]].key != key) slot = (slot + 1) & (t->slots - 1);
  return slot;
}

/* The pair's number, made at need. */
static lev_status find_pair(lev_bpe_trainer *t, int32_t left, int32_t right, int32_t *out) {
  uint64_t key = (uint64_t)left << 32 | (uint32_t)right;
  size_t slot = pair_slot(t, key);
  *out = t->index[slot];
  if (*out >= 0) return LEV_OK;
  if (t->pairs.n >= INT32_MAX - 1) return lev_fail(LEV_ERR_UNSUPPORTED, "more than 2^31 different pairs");
  LEV_TRY(reserve(&t->pairs, 1, sizeof(pair)));
  pair *p = t->pairs.data;
  p[t->pairs.n] = (pair){.key = key};
  *out = t->index[slot] = (int32_t)t->pairs.n++;
  if (t->pairs.n * 2 <= t->slots) return LEV_OK;
  LEV_TRY(new_index(t, 2 * t->slots));
  for (size_t i = 0; i < t->pairs.n; ++i) t->index[pair_slot(t, p[i].key)] = (int32_t)i;
  return LEV_OK;
}

/* Adds `delta` occurrences of a pair in `word_number`. */
static lev_status change(lev_bpe_trainer *t, int32_t left, int32_t right, int64_t delta, int32_t word_number) {
  int32_t number;
  LEV_TRY(find_pair(t, left, right, &number));
  pair *p = (pair *)t->pairs.data + number;
  p->count += delta;
  if (delta < 0) return LEV_OK;
  if (p->n == 0 || p->where[p->n - 1] != word_number) {
    if (p->n == p->room) {
      int32_t room = p->room < 1 << 29 ? 2 * p->room + 4 : INT32_MAX;
      int32_t *where = lev_realloc(LEV_HEAP_DATA, p->where, (size_t)room * sizeof *where);
      if (!where) return LEV_ERR_NOMEM;
      p->where = where, p->room = room;
    }
    p->where[p->n++] = word_number;
  }
  if (p->touched) return LEV_OK;
  LEV_TRY(reserve(&t->touched, 1, sizeof number));
  ((int32_t *)t->touched.data)[t->touched.n++] = number;
  p->touched = true;
  return LEV_OK;
}

static bool before(entry a, entry b) {
  return a.count != b.count ? a.count > b.count : a.key < b.key;
}

static lev_status push(lev_bpe_trainer *t, entry e) {
  LEV_TRY(reserve(&t->heap, 1, sizeof e));
  entry *h = t->heap.data;
  size_t i = t->heap.n++;
  for (; i > 0 && before(e, h[(i - 1) / 2]); i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
  h[i] = e;
  return LEV_OK;
}

static entry pop(lev_bpe_trainer *t) {
  entry *h = t->heap.data, top = h[0], last = h[--t->heap.n];
  size_t i = 0, child;
  while ((child = 2 * i + 1) < t->heap.n) {
    if (child + 1 < t->heap.n && before(h[child + 1], h[child])) ++child;
    if (!before(h[child], last)) break;
    h[i] = h[child];
    i = child;
  }
  h[i] = last;
  return top;
}

/* The raised pairs go to the heap with their new counts. */
static lev_status push_touched(lev_bpe_trainer *t) {
  const int32_t *touched = t->touched.data;
  for (size_t i = 0; i < t->touched.n; ++i) {
    pair *p = (pair *)t->pairs.data + touched[i];
    p->touched = false;
    if (p->count > 0) LEV_TRY(push(t, (entry){p->count, p->key, touched[i]}));
  }
  t->touched.n = 0;
  return LEV_OK;
}

/* ---- merging ---- */

/* Words become runs of symbols; every adjacent pair is counted. */
static lev_status begin(lev_bpe_trainer *t, const int32_t *byte_id) {
  word *w = t->words.data;
  const unsigned char *text = t->text.data;
  t->symbols = lev_calloc(LEV_HEAP_DATA, t->text.n, sizeof *t->symbols);
  if (!t->symbols) return LEV_ERR_NOMEM;
  for (size_t i = 0; i < t->text.n; ++i) t->symbols[i] = byte_id[text[i]];
  LEV_TRY(new_index(t, 1 << 16));
  for (size_t i = 0; i < t->words.n; ++i) {
    const int32_t *s = t->symbols + w[i].at;
    for (uint32_t k = 0; k + 1 < w[i].n; ++k) LEV_TRY(change(t, s[k], s[k + 1], w[i].count, (int32_t)i));
  }
  return push_touched(t);
}

/* Replaces (left, right) by `id` throughout one word, from the left. */
static lev_status merge_word(lev_bpe_trainer *t, int32_t number, int32_t left, int32_t right, int32_t id) {
  word *w = (word *)t->words.data + number;
  int32_t *s = t->symbols + w->at;
  uint32_t n = w->n, to = 0;
  for (uint32_t from = 0; from < n; ++to) {
    if (from + 1 >= n || s[from] != left || s[from + 1] != right) {
      s[to] = s[from++];
      continue;
    }
    LEV_TRY(change(t, left, right, -w->count, number));
    if (to > 0) {
      LEV_TRY(change(t, s[to - 1], left, -w->count, number));
      LEV_TRY(change(t, s[to - 1], id, w->count, number));
    }
    if (from + 2 < n) {
      LEV_TRY(change(t, right, s[from + 2], -w->count, number));
      LEV_TRY(change(t, id, s[from + 2], w->count, number));
    }
    s[to] = id;
    from += 2;
  }
  w->n = to;
  return LEV_OK;
}

/* Id of the joined string, the next free one unless it exists. */
static lev_status join(lev_bpe *b, int32_t left, int32_t right, int32_t *id) {
  size_t nl, nr;
  const uint8_t *l = lev_bpe_token(b, left, &nl), *r = lev_bpe_token(b, right, &nr);
  unsigned char *joined = lev_calloc(LEV_HEAP_DATA, nl + nr, 1);
  if (!joined) return LEV_ERR_NOMEM;
  memcpy(joined, l, nl);
  memcpy(joined + nl, r, nr);
  *id = lev_bpe_find(b, joined, nl + nr);
  lev_status st = LEV_OK;
  if (*id < 0) {
    *id = (int32_t)lev_bpe_ids(b);
    st = lev_bpe_set_token(b, *id, joined, nl + nr, true);
  }
  lev_free(joined);
  return st == LEV_OK ? lev_bpe_add_merge(b, left, right) : st;
}

static lev_status merge_all(lev_bpe_trainer *t, lev_bpe *b, int64_t limit) {
  while (lev_bpe_ids(b) < limit && t->heap.n > 0) {
    entry e = pop(t);
    pair *p = (pair *)t->pairs.data + e.pair;
    if (p->count != e.count) {
      if (p->count > 0) LEV_TRY(push(t, (entry){p->count, e.key, e.pair}));
      continue;
    }
    int32_t left = (int32_t)(e.key >> 32), right = (int32_t)(e.key & INT32_MAX), id, *where = p->where, n = p->n;
    p->where = NULL, p->n = p->room = 0;
    lev_status st = join(b, left, right, &id);
    for (int32_t i = 0; st == LEV_OK && i < n; ++i) st = merge_word(t, where[i], left, right, id);
    lev_free(where);
    if (st != LEV_OK) return st;
    LEV_TRY(push_touched(t));
  }
  return LEV_OK;
}

lev_status lev_bpe_trainer_run(lev_bpe_trainer *t, int64_t limit, lev_bpe **out) {
  int32_t byte_id[256], next = 0;
  lev_bpe *b;
  *out = NULL;
  if (limit < 256 || limit > LEV_VOCAB_MAX)
    return lev_fail(LEV_ERR_CONFIG, "a byte-level vocabulary has 256 to %lld entries, %lld were asked for",
                    (long long)LEV_VOCAB_MAX, (long long)limit);
  LEV_TRY(lev_bpe_create(&b));
  lev_status st = LEV_OK;
  for (uint32_t c = 0; st == LEV_OK && c < 324; ++c) {
    int byte = lev_char_byte(c);
    if (byte < 0) continue;
    byte_id[byte] = next;
    st = lev_bpe_set_token(b, next++, &(uint8_t){(uint8_t)byte}, 1, true);
  }
  if (st == LEV_OK) st = begin(t, byte_id);
  if (st == LEV_OK) st = merge_all(t, b, limit);
  if (st == LEV_OK)
    *out = b;
  else
    lev_bpe_destroy(b);
  return st;
}
