/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/bpe.h"

#include <string.h>
#include <xxhash.h>

#include "common/hostmem.h"

typedef struct token {
  uint64_t offset; /* into the pool */
  uint32_t size;   /* 0 = free id */
  bool findable;
} token;

typedef struct pair_slot {
  uint64_t key;   /* left << 32 | right */
  int32_t rank;   /* -1 = empty */
  int32_t merged; /* id */
} pair_slot;

struct lev_bpe {
  token *tokens; /* [ids] */
  size_t ids, ids_capacity;
  lev_bytes_buffer pool;
  int32_t *by_bytes; /* open addressing over findable tokens, -1 = empty */
  size_t by_bytes_mask, n_findable;
  pair_slot *pairs; /* open addressing */
  size_t pairs_mask, n_pairs;
  uint64_t *merges; /* keys in rank order */
  size_t n_merges, merges_capacity;
  int32_t byte_ids[256];
  bool ignore_merges;
};

static size_t pair_hash(uint64_t key) {
  key *= 0x9E3779B97F4A7C15u;
  return (size_t)(key ^ key >> 32);
}

static uint64_t pair_key(int32_t left, int32_t right) {
  return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

lev_status lev_bpe_create(lev_bpe **out) {
  *out = NULL;
  lev_bpe *b = lev_calloc(LEV_HEAP_DATA, 1, sizeof *b);
  if (!b) return LEV_ERR_NOMEM;
  for (int i = 0; i < 256; ++i) b->byte_ids[i] = -1;
  *out = b;
  return LEV_OK;
}

void lev_bpe_destroy(lev_bpe *b) {
  if (!b) return;
  lev_free(b->tokens);
  lev_bytes_free(&b->pool);
  lev_free(b->by_bytes);
  lev_free(b->pairs);
  lev_free(b->merges);
  lev_free(b);
}

/* ---- tokens by bytes ---- */

/* Slot of these bytes, or the empty one where they belong. */
static size_t bytes_slot(const lev_bpe *b, const uint8_t *bytes, size_t size) {
  size_t i = XXH3_64bits(bytes, size) & b->by_bytes_mask;
  for (; b->by_bytes[i] >= 0; i = (i + 1) & b->by_bytes_mask) {
    const token *t = &b->tokens[b->by_bytes[i]];
    if (t->size == size && memcmp(b->pool.data + t->offset, bytes, size) == 0) break;
  }
  return i;
}

static lev_status grow_by_bytes(lev_bpe *b) {
  size_t slots = b->by_bytes ? 2 * (b->by_bytes_mask + 1) : 1024;
  int32_t *grown = lev_calloc(LEV_HEAP_DATA, slots, sizeof *grown);
  if (!grown) return LEV_ERR_NOMEM;
  memset(grown, 0xFF, slots * sizeof *grown);
  lev_free(b->by_bytes);
  b->by_bytes = grown, b->by_bytes_mask = slots - 1;
  for (size_t id = 0; id < b->ids; ++id) {
    const token *t = &b->tokens[id];
    if (t->size > 0 && t->findable) grown[bytes_slot(b, b->pool.data + t->offset, t->size)] = (int32_t)id;
  }
  return LEV_OK;
}

int32_t lev_bpe_find(const lev_bpe *b, const uint8_t *bytes, size_t size) {
  if (!b->by_bytes || size == 0) return -1;
  return b->by_bytes[bytes_slot(b, bytes, size)];
}

static lev_status grow_ids(lev_bpe *b, size_t need) {
  void *tokens = b->tokens;
  LEV_TRY(lev_grow(&tokens, &b->ids_capacity, need, sizeof *b->tokens));
  b->tokens = tokens;
  if (need > b->ids) {
    memset(b->tokens + b->ids, 0, (need - b->ids) * sizeof *b->tokens);
    b->ids = need;
  }
  return LEV_OK;
}

lev_status lev_bpe_set_token(lev_bpe *b, int64_t id, const uint8_t *bytes, size_t size, bool findable) {
  if (id < 0 || id >= LEV_VOCAB_MAX)
    return lev_fail(LEV_ERR_FORMAT, "token id %lld is outside 0 .. %lld", (long long)id, (long long)LEV_VOCAB_MAX - 1);
  if (size == 0 || size > UINT32_MAX) return lev_fail(LEV_ERR_FORMAT, "token %lld has %zu bytes", (long long)id, size);
  if ((size_t)id < b->ids && b->tokens[id].size > 0)
    return lev_fail(LEV_ERR_FORMAT, "two tokens have id %lld", (long long)id);
  if (findable && 2 * (b->n_findable + 1) > b->by_bytes_mask) LEV_TRY(grow_by_bytes(b));
  LEV_TRY(grow_ids(b, (size_t)id + 1));
  if (findable) {
    size_t slot = bytes_slot(b, bytes, size);
    if (b->by_bytes[slot] >= 0)
      return lev_fail(LEV_ERR_FORMAT, "tokens %d and %lld have the same bytes", b->by_bytes[slot], (long long)id);
    b->by_bytes[slot] = (int32_t)id;
    b->n_findable++;
    if (size == 1) b->byte_ids[bytes[0]] = (int32_t)id;
  }
  b->tokens[id] = (token){.offset = b->pool.size, .size = (uint32_t)size, .findable = findable};
  return lev_bytes_append(&b->pool, bytes, size);
}

const uint8_t *lev_bpe_token(const lev_bpe *b, int64_t id, size_t *size) {
  *size = 0;
  if (id < 0 || (size_t)id >= b->ids || b->tokens[id].size == 0) return NULL;
  *size = b->tokens[id].size;
  return b->pool.data + b->tokens[id].offset;
}

bool lev_bpe_findable(const lev_bpe *b, int64_t id) {
  return id >= 0 && (size_t)id < b->ids && b->tokens[id].size > 0 && b->tokens[id].findable;
}

int64_t lev_bpe_ids(const lev_bpe *b) {
  return (int64_t)b->ids;
}

/* ---- merges ---- */

static pair_slot *pair_find(const lev_bpe *b, uint64_t key) {
  size_t i = pair_hash(key) & b->pairs_mask;
  while (b->pairs[i].rank >= 0 && b->pairs[i].key != key) i = (i + 1) & b->pairs_mask;
  return &b->pairs[i];
}

static lev_status grow_pairs(lev_bpe *b) {
  size_t slots = b->pairs ? 2 * (b->pairs_mask + 1) : 1024, old = b->pairs ? b->pairs_mask + 1 : 0;
  pair_slot *from = b->pairs, *grown = lev_calloc(LEV_HEAP_DATA, slots, sizeof *grown);
  if (!grown) return LEV_ERR_NOMEM;
  for (size_t i = 0; i < slots; ++i) grown[i].rank = -1;
  b->pairs = grown, b->pairs_mask = slots - 1;
  for (size_t i = 0; i < old; ++i)
    if (from[i].rank >= 0) *pair_find(b, from[i].key) = from[i];
  lev_free(from);
  return LEV_OK;
}

/* Id of the bytes of left followed by right, -1 if there is none. */
static lev_status find_joined(lev_bpe *b, const token *l, const token *r, int32_t *out) {
  size_t start = b->pool.size;
  LEV_TRY(lev_bytes_reserve(&b->pool, (size_t)l->size + r->size)); /* scratch behind the pool */
  memcpy(b->pool.data + start, b->pool.data + l->offset, l->size);
  memcpy(b->pool.data + start + l->size, b->pool.data + r->offset, r->size);
  *out = lev_bpe_find(b, b->pool.data + start, (size_t)l->size + r->size);
  return LEV_OK;
}

lev_status lev_bpe_add_merge(lev_bpe *b, int32_t left, int32_t right) {
  if (!lev_bpe_findable(b, left) || !lev_bpe_findable(b, right))
    return lev_fail(LEV_ERR_FORMAT, "merge %zu joins tokens %d and %d, of which one does not exist", b->n_merges, left,
                    right);
  if (b->n_merges >= (size_t)INT32_MAX) return lev_fail(LEV_ERR_FORMAT, "more than %d merges", INT32_MAX);
  int32_t merged;
  LEV_TRY(find_joined(b, &b->tokens[left], &b->tokens[right], &merged));
  if (merged < 0)
    return lev_fail(LEV_ERR_FORMAT, "merge %zu joins tokens %d and %d into one that is not in the vocabulary",
                    b->n_merges, left, right);
  void *merges = b->merges;
  LEV_TRY(lev_grow(&merges, &b->merges_capacity, b->n_merges + 1, sizeof *b->merges));
  b->merges = merges;
  if (2 * (b->n_pairs + 1) > b->pairs_mask) LEV_TRY(grow_pairs(b));
  uint64_t key = pair_key(left, right);
  pair_slot *slot = pair_find(b, key);
  if (slot->rank < 0) b->n_pairs++;
  *slot = (pair_slot){.key = key, .rank = (int32_t)b->n_merges, .merged = merged};
  b->merges[b->n_merges++] = key;
  return LEV_OK;
}

int64_t lev_bpe_merges(const lev_bpe *b) {
  return (int64_t)b->n_merges;
}

void lev_bpe_merge(const lev_bpe *b, int64_t rank, int32_t *left, int32_t *right) {
  *left = (int32_t)(b->merges[rank] >> 32), *right = (int32_t)(uint32_t)b->merges[rank];
}

void lev_bpe_set_ignore_merges(lev_bpe *b, bool ignore) {
  b->ignore_merges = ignore;
}

bool lev_bpe_ignore_merges(const lev_bpe *b) {
  return b->ignore_merges;
}

/* ---- encoding ---- */

#define CACHE_WORD_MAX 128           /* longer words are not kept */
#define CACHE_ENTRIES_MAX (1u << 18) /* then the cache starts over: its memory is bounded */

typedef struct symbol {
  int32_t id; /* -1 = joined into its left neighbour */
  int32_t prev, next;
} symbol;

typedef struct candidate {
  int32_t rank, position, merged;
} candidate;

typedef struct cached_word {
  uint64_t hash;
  uint32_t bytes, ids; /* offsets */
  uint16_t size, n_ids;
} cached_word;

struct lev_bpe_coder {
  const lev_bpe *bpe;
  symbol *symbols;
  size_t symbols_capacity;
  candidate *heap;
  size_t heap_size, heap_capacity;
  cached_word *cache; /* open addressing; n_ids = 0 = empty */
  size_t cache_mask, cache_entries;
  lev_bytes_buffer cache_bytes;
  lev_ids cache_ids;
};

lev_status lev_bpe_coder_create(const lev_bpe *bpe, lev_bpe_coder **out) {
  *out = NULL;
  lev_bpe_coder *c = lev_calloc(LEV_HEAP_DATA, 1, sizeof *c);
  if (!c) return LEV_ERR_NOMEM;
  c->bpe = bpe;
  c->cache_mask = 2 * CACHE_ENTRIES_MAX - 1;
  c->cache = lev_calloc(LEV_HEAP_DATA, c->cache_mask + 1, sizeof *c->cache);
  if (!c->cache) {
    lev_bpe_coder_destroy(c);
    return LEV_ERR_NOMEM;
  }
  *out = c;
  return LEV_OK;
}

void lev_bpe_coder_destroy(lev_bpe_coder *c) {
  if (!c) return;
  lev_free(c->symbols);
  lev_free(c->heap);
  lev_free(c->cache);
  lev_bytes_free(&c->cache_bytes);
  lev_ids_free(&c->cache_ids);
  lev_free(c);
}

static bool before(const candidate *a, const candidate *b) {
  return a->rank != b->rank ? a->rank < b->rank : a->position < b->position;
}

/* Room was reserved: a word of n bytes never has more than 3n candidates. */
static void heap_push(lev_bpe_coder *c, candidate x) {
  size_t i = c->heap_size++;
  while (i > 0 && before(&x, &c->heap[(i - 1) / 2])) {
    c->heap[i] = c->heap[(i - 1) / 2];
    i = (i - 1) / 2;
  }
  c->heap[i] = x;
}

static candidate heap_pop(lev_bpe_coder *c) {
  candidate top = c->heap[0], last = c->heap[--c->heap_size];
  size_t i = 0, n = c->heap_size;
  for (;;) {
    size_t child = 2 * i + 1;
    if (child >= n) break;
    if (child + 1 < n && before(&c->heap[child + 1], &c->heap[child])) ++child;
    if (!before(&c->heap[child], &last)) break;
    c->heap[i] = c->heap[child];
    i = child;
  }
  c->heap[i] = last;
  return top;
}

static const pair_slot *known_pair(const lev_bpe *b, int32_t left, int32_t right) {
  if (!b->pairs) return NULL;
  const pair_slot *slot = pair_find(b, pair_key(left, right));
  return slot->rank >= 0 ? slot : NULL;
}

static void propose(lev_bpe_coder *c, int32_t position) {
  int32_t next = position < 0 ? -1 : c->symbols[position].next;
  if (next < 0) return;
  const pair_slot *pair = known_pair(c->bpe, c->symbols[position].id, c->symbols[next].id);
  if (pair) heap_push(c, (candidate){.rank = pair->rank, .position = position, .merged = pair->merged});
}

static lev_status start_word(lev_bpe_coder *c, const uint8_t *word, size_t size) {
  if (size > INT32_MAX / 2) return lev_fail(LEV_ERR_CAPACITY, "a word of %zu bytes cannot be encoded", size);
  void *symbols = c->symbols, *heap = c->heap;
  LEV_TRY(lev_grow(&symbols, &c->symbols_capacity, size, sizeof *c->symbols));
  c->symbols = symbols;
  LEV_TRY(lev_grow(&heap, &c->heap_capacity, 3 * size, sizeof *c->heap));
  c->heap = heap, c->heap_size = 0;
  for (size_t i = 0; i < size; ++i) {
    int32_t id = c->bpe->byte_ids[word[i]];
    if (id < 0) return lev_fail(LEV_ERR_FORMAT, "the tokenizer has no token for byte 0x%02X", word[i]);
    c->symbols[i] = (symbol){.id = id, .prev = (int32_t)i - 1, .next = i + 1 < size ? (int32_t)i + 1 : -1};
  }
  return LEV_OK;
}

static void merge_word(lev_bpe_coder *c, size_t size) {
  for (size_t i = 0; i + 1 < size; ++i) propose(c, (int32_t)i);
  while (c->heap_size > 0) {
    candidate top = heap_pop(c);
    symbol *left = &c->symbols[top.position];
    if (left->id < 0 || left->next < 0) continue;
    symbol *right = &c->symbols[left->next];
    const pair_slot *pair = known_pair(c->bpe, left->id, right->id);
    if (!pair || pair->merged != top.merged) continue; /* the neighbours have changed since */
    left->id = top.merged, left->next = right->next, right->id = -1;
    if (left->next >= 0) c->symbols[left->next].prev = top.position;
    propose(c, left->prev);
    propose(c, top.position);
  }
}

static lev_status encode_word(lev_bpe_coder *c, const uint8_t *word, size_t size, lev_ids *out) {
  int32_t whole = c->bpe->ignore_merges ? lev_bpe_find(c->bpe, word, size) : -1;
  if (whole >= 0) return lev_ids_append(out, whole);
  LEV_TRY(start_word(c, word, size));
  merge_word(c, size);
  for (int32_t i = 0; i >= 0; i = c->symbols[i].next) LEV_TRY(lev_ids_append(out, c->symbols[i].id));
  return LEV_OK;
}

static cached_word *cache_slot(lev_bpe_coder *c, uint64_t hash, const uint8_t *word, size_t size) {
  size_t i = hash & c->cache_mask;
  for (; c->cache[i].n_ids > 0; i = (i + 1) & c->cache_mask) {
    const cached_word *w = &c->cache[i];
    if (w->hash == hash && w->size == size && memcmp(c->cache_bytes.data + w->bytes, word, size) == 0) break;
  }
  return &c->cache[i];
}

static lev_status cache_word(lev_bpe_coder *c, cached_word *slot, uint64_t hash, const uint8_t *word, size_t size,
                             const int32_t *ids, size_t n_ids) {
  if (c->cache_entries >= CACHE_ENTRIES_MAX) {
    memset(c->cache, 0, (c->cache_mask + 1) * sizeof *c->cache);
    c->cache_entries = 0, c->cache_bytes.size = 0, c->cache_ids.size = 0;
    slot = cache_slot(c, hash, word, size);
  }
  cached_word w = {.hash = hash,
                   .bytes = (uint32_t)c->cache_bytes.size,
                   .ids = (uint32_t)c->cache_ids.size,
                   .size = (uint16_t)size,
                   .n_ids = (uint16_t)n_ids};
  LEV_TRY(lev_bytes_append(&c->cache_bytes, word, size));
  LEV_TRY(lev_ids_reserve(&c->cache_ids, n_ids));
  memcpy(c->cache_ids.data + c->cache_ids.size, ids, n_ids * sizeof *ids);
  c->cache_ids.size += n_ids;
  *slot = w;
  c->cache_entries++;
  return LEV_OK;
}

lev_status lev_bpe_encode(lev_bpe_coder *c, const uint8_t *word, size_t size, lev_ids *out) {
  if (size == 0) return LEV_OK;
  if (size > CACHE_WORD_MAX) return encode_word(c, word, size, out);
  uint64_t hash = XXH3_64bits(word, size);
  cached_word *slot = cache_slot(c, hash, word, size);
  if (slot->n_ids > 0) {
    LEV_TRY(lev_ids_reserve(out, slot->n_ids));
    memcpy(out->data + out->size, c->cache_ids.data + slot->ids, slot->n_ids * sizeof *out->data);
    out->size += slot->n_ids;
    return LEV_OK;
  }
  size_t start = out->size;
  LEV_TRY(encode_word(c, word, size, out));
  return cache_word(c, slot, hash, word, size, out->data + start, out->size - start);
}
