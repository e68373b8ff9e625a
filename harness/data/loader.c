/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/loader.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "common/hostmem.h"
#include "common/rng.h"
#include "harness/data/io.h"
#include "harness/data/megatron_index.h"

#define ORDER_STREAM 0xDA7A0001u /* random number stream of the sample order */
#define ROUNDS 6
#define NO_LABEL (-100)

struct lev_loader {
  lev_megatron file;
  int64_t context, vocab, samples, bytes;
  uint64_t seed;
  char tokenizer[40]; /* hash from the sidecar, "bytes", or "" where none is named */
  int half;           /* bits of one half of the permuted domain, 2^(2 half) >= samples */
  bool validation;
};

static lev_status read_sidecar(lev_loader *l, const char *prefix) {
  char path[1024];
  json_error_t error;
  lev_map map;
  LEV_TRY(lev_path_join(path, sizeof path, prefix, ".json"));
  if (access(path, F_OK) != 0 && errno == ENOENT) return LEV_OK;
  LEV_TRY(lev_map_open(path, &map));
  json_t *root = json_loadb((const char *)map.data, map.bytes, JSON_REJECT_DUPLICATES, &error);
  lev_map_close(&map);
  lev_status st = LEV_OK;
  const json_t *bytes = json_object_get(root, "text_bytes"), *tokens = json_object_get(root, "tokens"),
               *vocab = json_object_get(root, "vocab_size"), *first = json_object_get(root, "first_token_bytes"),
               *hash = json_object_get(root, "tokenizer_xxh3_128");
  if (!root)
    st = lev_fail(LEV_ERR_FORMAT, "%s:%d: %s", path, error.line, error.text);
  else if (!json_is_integer(bytes) || json_integer_value(bytes) < 0)
    st = lev_fail(LEV_ERR_FORMAT, "%s has no \"text_bytes\" count", path);
  else if (json_is_integer(tokens) && json_integer_value(tokens) != l->file.tokens)
    st = lev_fail(LEV_ERR_FORMAT, "%s speaks of %lld tokens, %s has %lld: they are not of one run", path,
                  (long long)json_integer_value(tokens), l->file.bin_path, (long long)l->file.tokens);
  else if (json_is_integer(vocab) && json_integer_value(vocab) > l->vocab)
    st = lev_fail(LEV_ERR_CONFIG, "%s was made with a vocabulary of %lld, the model has %lld", l->file.bin_path,
                  (long long)json_integer_value(vocab), (long long)l->vocab);
  else
    l->bytes = json_integer_value(bytes) - (json_is_integer(first) ? json_integer_value(first) : 0);
  if (hash) snprintf(l->tokenizer, sizeof l->tokenizer, "%s", json_is_string(hash) ? json_string_value(hash) : "bytes");
  json_decref(root);
  return st;
}

static lev_status count_samples(lev_loader *l) {
  int64_t t = l->file.tokens, s = l->context, need = l->validation ? 2 : s + 1;
  if (t < need)
    return lev_fail(LEV_ERR_CONFIG, "%s has %lld tokens, %s context %lld takes at least %lld", l->file.bin_path,
                    (long long)t, l->validation ? "validation at" : "training at", (long long)s, (long long)need);
  l->samples = (t - 1) / s + (l->validation && (t - 1) % s != 0);
  for (l->half = 1; l->half < 31 && ((int64_t)1 << (2 * l->half)) < l->samples;) ++l->half;
  return LEV_OK;
}

lev_status lev_loader_open(const lev_loader_options *o, lev_loader **out) {
  *out = NULL;
  if (!o->prefix || o->context < 1 || o->context > INT32_MAX || o->vocab < 1 || o->vocab > INT32_MAX)
    return lev_fail(LEV_ERR_ARG, "loader of %s: context %lld, vocabulary %lld", o->prefix ? o->prefix : "no file",
                    (long long)o->context, (long long)o->vocab);
  lev_loader *l = lev_calloc(LEV_HEAP_DATA, 1, sizeof *l);
  if (!l) return LEV_ERR_NOMEM;
  l->context = o->context, l->vocab = o->vocab, l->seed = o->seed, l->validation = o->validation;
  lev_status st = lev_megatron_open(o->prefix, &l->file);
  if (st == LEV_OK) st = read_sidecar(l, o->prefix);
  if (st == LEV_OK) st = count_samples(l);
  if (st == LEV_OK)
    *out = l;
  else
    lev_loader_close(l);
  return st;
}

void lev_loader_close(lev_loader *l) {
  if (!l) return;
  lev_megatron_close(&l->file);
  lev_free(l);
}

lev_status lev_loader_same_tokens(const lev_loader *a, const lev_loader *b) {
  if (!a->tokenizer[0] || !b->tokenizer[0] || strcmp(a->tokenizer, b->tokenizer) == 0) return LEV_OK;
  return lev_fail(LEV_ERR_CONFIG,
                  "%s and %s were not made with the same tokenizer (%s and %s); levee tokenize --holdout makes both in "
                  "one call",
                  a->file.bin_path, b->file.bin_path, a->tokenizer, b->tokenizer);
}

int64_t lev_loader_samples(const lev_loader *l) {
  return l->samples;
}

int64_t lev_loader_bytes(const lev_loader *l) {
  return l->bytes;
}

/* A balanced Feistel network is a permutation of [0, 2^(2 half)); following its cycle until it comes back under
 * `samples` (fewer than four steps on average) makes it one of [0, samples). */
static int64_t permute(const lev_loader *l, int64_t epoch, int64_t i) {
  lev_rng_key key = {l->seed, (uint32_t)epoch, ORDER_STREAM};
  uint64_t mask = ((uint64_t)1 << l->half) - 1, x = (uint64_t)i;
  do {
    uint64_t left = x >> l->half, right = x & mask;
    for (uint64_t round = 0; round < ROUNDS; ++round) {
      uint64_t next = left ^ (lev_rng_u64(key, round << 32 | right) & mask);
      left = right, right = next;
    }
    x = left << l->half | right;
  } while (x >= (uint64_t)l->samples);
  return (int64_t)x;
}

/* Number of the window of the stream that a sample shows. */
static lev_status window_of(const lev_loader *l, int64_t sample, int64_t *window) {
  if (sample < 0 || (l->validation && sample >= l->samples))
    return lev_fail(LEV_ERR_ARG, "sample %lld of %lld", (long long)sample, (long long)l->samples);
  *window = l->validation ? sample : permute(l, sample / l->samples, sample % l->samples);
  return LEV_OK;
}

lev_status lev_loader_fetch(lev_loader *l, int64_t sample, int32_t *tokens, int32_t *labels) {
  int64_t s = l->context, window;
  LEV_TRY(window_of(l, sample, &window));
  int64_t left = l->file.tokens - 1 - window * s, n = left < s ? left : s;
  LEV_TRY(lev_megatron_read(&l->file, window * s, n, l->vocab, tokens));
  LEV_TRY(lev_megatron_read(&l->file, window * s + n, 1, l->vocab, &labels[n - 1]));
  memcpy(labels, tokens + 1, (size_t)(n - 1) * sizeof *labels);
  for (int64_t i = n; i < s; ++i) tokens[i] = 0, labels[i] = NO_LABEL;
  return LEV_OK;
}

lev_status lev_loader_documents(lev_loader *l, int64_t sample, int32_t *begin) {
  const lev_megatron *m = &l->file;
  int64_t s = l->context, window, first, low = 0, high = m->documents - 1;
  LEV_TRY(window_of(l, sample, &window));
  first = window * s;
  while (low <
         high) { /* the first entry that begins after the sample's first token; the last one is the stream's end */
    int64_t middle = low + (high - low) / 2;
    if (lev_megatron_document_begin(m, middle) > first)
      high = middle;
    else
      low = middle + 1;
  }
  int32_t current = 0;
  int64_t next = lev_megatron_document_begin(m, low) - first;
  for (int64_t p = 0; p <= s; ++p) {
    while (p == next && first + next < m->tokens) {
      current = (int32_t)p;
      next = lev_megatron_document_begin(m, ++low) - first;
    }
    begin[p] = current;
  }
  return LEV_OK;
}
