/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "common/hostmem.h"

#define BATCH 4096 /* ids handed to the sink at once */

lev_status lev_tokenizer_create(lev_tokenizer **out) {
  *out = lev_calloc(LEV_HEAP_DATA, 1, sizeof **out);
  if (!*out) return LEV_ERR_NOMEM;
  lev_status st = lev_bpe_create(&(*out)->bpe);
  if (st == LEV_OK) return LEV_OK;
  lev_tokenizer_close(*out);
  *out = NULL;
  return st;
}

void lev_tokenizer_close(lev_tokenizer *t) {
  if (!t) return;
  for (int i = 0; i < t->n_steps; ++i) {
    lev_free(t->steps[i].pattern);
    lev_split_close(t->steps[i].split);
  }
  for (int64_t i = 0; i < t->n_added; ++i) lev_free(t->added[i].text);
  lev_free(t->added);
  lev_bpe_coder_destroy(t->coder);
  lev_bpe_destroy(t->bpe);
  lev_ids_free(&t->before);
  lev_ids_free(&t->after);
  lev_ids_free(&t->found);
  lev_bytes_free(&t->normal);
  lev_bytes_free(&t->spaced);
  lev_free(t->points);
  lev_free(t);
}

lev_status lev_tokenizer_add_step(lev_tokenizer *t, lev_pre_step step) {
  if (t->n_steps == LEV_PRE_STEPS_MAX)
    return lev_fail(LEV_ERR_UNSUPPORTED, "a pre-tokenizer of more than %d steps", LEV_PRE_STEPS_MAX);
  if (t->n_steps > 0 && t->steps[t->n_steps - 1].kind == LEV_PRE_BYTE_LEVEL)
    return lev_fail(LEV_ERR_UNSUPPORTED, "a pre-tokenizer step after ByteLevel");
  const char *pattern = step.pattern;
  if (step.kind == LEV_PRE_DIGITS) pattern = step.individual ? "\\p{N}" : "\\p{N}+";
  if (step.kind == LEV_PRE_BYTE_LEVEL) pattern = step.use_regex ? lev_split_gpt2 : NULL;
  if (step.kind == LEV_PRE_SPLIT) {
    step.pattern = lev_strdup(LEV_HEAP_DATA, pattern);
    if (!step.pattern) return LEV_ERR_NOMEM;
  } else {
    step.pattern = NULL;
  }
  step.split = NULL;
  lev_status st = pattern ? lev_split_create(pattern, &step.split) : LEV_OK;
  if (st == LEV_OK)
    t->steps[t->n_steps++] = step;
  else
    lev_free(step.pattern);
  return st;
}

/* Gives the id of an added token its name, or checks the one it has. */
static lev_status name_added(lev_tokenizer *t, const lev_added_token *a) {
  size_t size;
  const uint8_t *named = lev_bpe_token(t->bpe, a->id, &size);
  lev_bytes_buffer bytes = {0};
  bool spelled, same;
  if (!named) return lev_bpe_set_token(t->bpe, a->id, (const uint8_t *)a->text, a->size, false);
  same = size == a->size && memcmp(named, a->text, size) == 0;
  if (!same && lev_bpe_findable(t->bpe, a->id)) { /* the vocabulary spells it in the byte alphabet */
    LEV_TRY(lev_bytes_unspell(a->text, a->size, &bytes, &spelled));
    same = spelled && bytes.size == size && memcmp(named, bytes.data, size) == 0;
    lev_bytes_free(&bytes);
  }
  if (same) return LEV_OK;
  return lev_fail(LEV_ERR_FORMAT, "added token \"%.100s\" has id %d, which is another token's", a->text, (int)a->id);
}

lev_status lev_tokenizer_add_token(lev_tokenizer *t, lev_added_token a) {
  if (a.size == 0) return lev_fail(LEV_ERR_FORMAT, "added token %d is empty", (int)a.id);
  lev_added_token *grown = lev_realloc(LEV_HEAP_DATA, t->added, ((size_t)t->n_added + 1) * sizeof *grown);
  if (!grown) return LEV_ERR_NOMEM;
  t->added = grown;
  char *text = lev_calloc(LEV_HEAP_DATA, a.size + 1, 1);
  if (!text) return LEV_ERR_NOMEM;
  memcpy(text, a.text, a.size);
  a.text = text;
  t->added[t->n_added++] = a;
  return name_added(t, &a);
}

int32_t lev_tokenizer_added_id(const lev_tokenizer *t, const char *text) {
  for (int64_t i = 0; i < t->n_added; ++i)
    if (strcmp(t->added[i].text, text) == 0) return t->added[i].id;
  return -1;
}

int64_t lev_tokenizer_vocab(const lev_tokenizer *t) {
  return lev_bpe_ids(t->bpe);
}

/* ---- normalisation ---- */

/* Below U+0300 every text is in NFC; lead bytes from 0xCC on belong to characters at or above it. */
static bool is_plain(const uint8_t *text, size_t size) {
  for (size_t i = 0; i < size; ++i)
    if (text[i] >= 0xCC) return false;
  return true;
}

/* NFC of valid UTF-8 into t->normal (replacing what is there). */
static lev_status normalise(lev_tokenizer *t, const uint8_t *text, size_t size) {
  const utf8proc_option_t options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
  if (size > PTRDIFF_MAX / 32) return lev_fail(LEV_ERR_UNSUPPORTED, "normalising %zu bytes", size);
  utf8proc_ssize_t n, need = (utf8proc_ssize_t)size;
  do {
    LEV_TRY(lev_grow(&t->points, &t->points_capacity, (size_t)need + 1, sizeof(utf8proc_int32_t)));
    n = (utf8proc_ssize_t)t->points_capacity - 1;
    need = utf8proc_decompose(text, (utf8proc_ssize_t)size, t->points, n, options);
    if (need < 0) return lev_fail(LEV_ERR_FORMAT, "normalising: %s", utf8proc_errmsg(need));
  } while (need > n);
  n = utf8proc_reencode(t->points, need, options);
  if (n < 0) return lev_fail(LEV_ERR_FORMAT, "normalising: %s", utf8proc_errmsg(n));
  t->normal.size = 0;
  return lev_bytes_append(&t->normal, t->points, (size_t)n);
}

static int by_size(const void *a, const void *b) {
  size_t x = ((const lev_added_token *)a)->size, y = ((const lev_added_token *)b)->size;
  return x < y ? 1 : x > y ? -1 : 0;
}

lev_status lev_tokenizer_prepare(lev_tokenizer *t) {
  if (t->n_steps == 0 || t->steps[t->n_steps - 1].kind != LEV_PRE_BYTE_LEVEL)
    return lev_fail(LEV_ERR_UNSUPPORTED, "a pre-tokenizer that does not end in ByteLevel");
  for (int i = 0; i < 256; ++i)
    if (lev_bpe_find(t->bpe, &(uint8_t){(uint8_t)i}, 1) < 0)
      return lev_fail(LEV_ERR_UNSUPPORTED, "no token for byte 0x%02X: a byte-level vocabulary has all 256", i);
  for (int64_t i = 0; t->nfc && i < t->n_added; ++i) {
    lev_added_token *a = &t->added[i];
    if (!a->normalized || is_plain((const uint8_t *)a->text, a->size)) continue;
    LEV_TRY(normalise(t, (const uint8_t *)a->text, a->size));
    if (t->normal.size != a->size || memcmp(t->normal.data, a->text, a->size) != 0)
      return lev_fail(LEV_ERR_UNSUPPORTED, "added token \"%.100s\" is not in NFC", a->text);
  }
  if (t->n_added > 1) qsort(t->added, (size_t)t->n_added, sizeof *t->added, by_size);
  for (int64_t i = 0; i < t->n_added; ++i) t->starts[t->added[i].normalized][(uint8_t)t->added[i].text[0]] = true;
  return lev_bpe_coder_create(t->bpe, &t->coder);
}

/* ---- splitting ---- */

/* One pass over a text: where its pieces and added tokens go. */
typedef struct pass {
  lev_tokenizer *t;
  lev_piece_fn piece;
  lev_status (*token)(struct pass *pass, int32_t id); /* NULL: added tokens are dropped */
  void *ctx;
  int step;
} pass;

/* ctx is the pass; text goes through its current step and what comes out through the next ones. */
static lev_status run_step(void *ctx, const unsigned char *text, size_t size) {
  pass *p = ctx;
  lev_tokenizer *t = p->t;
  if (p->step == t->n_steps) return p->piece(p->ctx, text, size);
  const lev_pre_step *step = &t->steps[p->step];
  if (step->add_prefix_space && text[0] != ' ') { /* the last step: the buffer is not in use further in */
    t->spaced.size = 0;
    LEV_TRY(lev_bytes_append(&t->spaced, " ", 1));
    LEV_TRY(lev_bytes_append(&t->spaced, text, size));
    text = t->spaced.data, size = t->spaced.size;
  }
  ++p->step;
  lev_status st = step->split ? lev_split_each(step->split, text, size, run_step, p) : run_step(p, text, size);
  --p->step;
  return st;
}

/* The longest added token of one group that begins at text, NULL if none does. */
static const lev_added_token *added_at(const lev_tokenizer *t, bool normalized, const uint8_t *text, size_t size) {
  if (!t->starts[normalized][text[0]]) return NULL;
  for (int64_t i = 0; i < t->n_added; ++i) {
    const lev_added_token *a = &t->added[i];
    if (a->normalized == normalized && a->size <= size && memcmp(a->text, text, a->size) == 0) return a;
  }
  return NULL;
}

typedef lev_status (*text_fn)(pass *p, const uint8_t *text, size_t size);

/* Cuts out the added tokens of one group; the text between them goes to `between`. Where an rstrip token took white
 * space along that holds another added token, that one counts too and the text goes on behind it, as there. */
static lev_status cut_added(pass *p, bool normalized, const uint8_t *text, size_t size, text_fn between) {
  size_t done = 0, length;
  for (size_t i = 0; i < size;) {
    const lev_added_token *a = added_at(p->t, normalized, text + i, size - i);
    if (!a) {
      ++i;
      continue;
    }
    size_t begin = i, end = i + a->size;
    i = end;
    while (a->lstrip && begin > 0 && lev_space_at_end(text, begin, &length)) begin -= length;
    if (a->lstrip && begin < done) begin = done;
    while (a->rstrip && lev_space_at_start(text + end, size - end, &length)) end += length;
    if (begin > done) LEV_TRY(between(p, text + done, begin - done));
    if (p->token) LEV_TRY(p->token(p, a->id));
    done = end > begin ? end : begin;
  }
  return size > done ? between(p, text + done, size - done) : LEV_OK;
}

static lev_status split_text(pass *p, const uint8_t *text, size_t size) {
  p->step = 0;
  return run_step(p, text, size);
}

static lev_status normalise_text(pass *p, const uint8_t *text, size_t size) {
  if (p->t->nfc && !is_plain(text, size)) {
    LEV_TRY(normalise(p->t, text, size));
    text = p->t->normal.data, size = p->t->normal.size;
  }
  return cut_added(p, true, text, size, split_text);
}

static lev_status run_pass(pass *p, const uint8_t *text, size_t size) {
  for (size_t i = 0; i < size;) {
    bool valid;
    size_t n = lev_utf8_run(text + i, size - i, &valid);
    LEV_TRY(valid ? cut_added(p, false, text + i, n, normalise_text) : p->piece(p->ctx, text + i, n));
    i += n;
  }
  return LEV_OK;
}

lev_status lev_tokenizer_pieces(lev_tokenizer *t, const void *text, size_t size, lev_piece_fn fn, void *ctx) {
  pass p = {.t = t, .piece = fn, .ctx = ctx};
  return run_pass(&p, text, size);
}

/* ---- encoding, decoding ---- */

typedef struct encoding {
  lev_tokenizer *t;
  lev_id_sink sink;
  void *ctx;
} encoding;

static lev_status flush(encoding *e, size_t at_least) {
  if (e->t->found.size < at_least) return LEV_OK;
  lev_status st = e->sink(e->ctx, e->t->found.data, e->t->found.size);
  e->t->found.size = 0;
  return st;
}

static lev_status encode_piece(void *ctx, const unsigned char *piece, size_t size) {
  encoding *e = ctx;
  LEV_TRY(lev_bpe_encode(e->t->coder, piece, size, &e->t->found));
  return flush(e, BATCH);
}

static lev_status encode_added(pass *p, int32_t id) {
  return lev_ids_append(&p->t->found, id);
}

static lev_status append_all(lev_ids *to, const lev_ids *ids) {
  for (size_t i = 0; i < ids->size; ++i) LEV_TRY(lev_ids_append(to, ids->data[i]));
  return LEV_OK;
}

lev_status lev_tokenizer_encode(lev_tokenizer *t, const void *text, size_t size, bool special, lev_id_sink sink,
                                void *ctx) {
  encoding e = {t, sink, ctx};
  pass p = {.t = t, .piece = encode_piece, .token = encode_added, .ctx = &e};
  if (!t->coder) return lev_fail(LEV_ERR_MISUSE, "the tokenizer has not been prepared");
  t->found.size = 0;
  if (special) LEV_TRY(append_all(&t->found, &t->before));
  LEV_TRY(run_pass(&p, text, size));
  if (special) LEV_TRY(append_all(&t->found, &t->after));
  return flush(&e, 1);
}

static bool is_special(const lev_tokenizer *t, int32_t id) {
  for (int64_t i = 0; i < t->n_added; ++i)
    if (t->added[i].id == id) return t->added[i].special;
  return false;
}

lev_status lev_tokenizer_decode(const lev_tokenizer *t, const int32_t *ids, size_t n, bool skip_special,
                                lev_bytes_buffer *out) {
  for (size_t i = 0; i < n; ++i) {
    size_t size;
    const uint8_t *bytes = lev_bpe_token(t->bpe, ids[i], &size);
    if (!bytes) return lev_fail(LEV_ERR_ARG, "id %d at position %zu names no token", (int)ids[i], i);
    if (skip_special && is_special(t, ids[i])) continue;
    LEV_TRY(lev_bytes_append(out, bytes, size));
  }
  return LEV_OK;
}
