/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/tokenize.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/hostmem.h"
#include "harness/data/bpe_train.h"
#include "harness/data/io.h"
#include "harness/data/megatron_index.h"
#include "harness/data/tokenizer_json.h"

#define EOD "<|endoftext|>"
#define BYTE_EOD 256
#define SLAB 8192

typedef struct job {
  const lev_tokenize_options *options;
  bool jsonl;
  lev_map text;
  size_t cut;               /* training part [0, cut), held out [cut, bytes) */
  lev_tokenizer *tokenizer; /* NULL: bytes */
  const char *tokenizer_name;
  char learned_path[1024];
  int64_t vocab;
  int32_t eod; /* -1: none */
} job;

/* One part on its way into a token file. */
typedef struct part {
  const job *job;
  lev_megatron_writer *writer;
  int64_t documents, text_bytes;
  int32_t first, last; /* ids written first and last, -1 = none yet */
} part;

typedef lev_status (*document_fn)(void *ctx, const unsigned char *text, size_t size);

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- documents ---- */

static bool is_blank(const unsigned char *line, size_t size) {
  for (size_t i = 0; i < size; ++i)
    if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r' && line[i] != '\n') return false;
  return true;
}

static lev_status json_line(const job *j, const unsigned char *line, size_t size, int64_t number, document_fn fn,
                            void *ctx) {
  json_error_t error;
  if (is_blank(line, size)) return LEV_OK;
  json_t *root = json_loadb((const char *)line, size, JSON_ALLOW_NUL, &error);
  if (!root)
    return lev_fail(LEV_ERR_FORMAT, "%s:%lld: %s (column %d)", j->options->input, (long long)number, error.text,
                    error.column);
  const json_t *text = json_object_get(root, "text");
  lev_status st = LEV_OK;
  if (json_is_string(text))
    st = fn(ctx, (const unsigned char *)json_string_value(text), json_string_length(text));
  else
    st = lev_fail(LEV_ERR_FORMAT, "%s:%lld: no \"text\" string in this object", j->options->input, (long long)number);
  json_decref(root);
  return st;
}

/* Every document of [begin, end), which starts and ends at line borders. */
static lev_status each_document(const job *j, size_t begin, size_t end, document_fn fn, void *ctx) {
  const unsigned char *text = j->text.data;
  if (!j->jsonl) return end > begin ? fn(ctx, text + begin, end - begin) : LEV_OK;
  int64_t number = 1;
  for (size_t i = 0; begin > 0 && i < begin; ++i) number += text[i] == '\n';
  for (size_t at = begin; at < end; ++number) {
    const unsigned char *stop = memchr(text + at, '\n', end - at);
    size_t next = stop ? (size_t)(stop - text) + 1 : end;
    LEV_TRY(json_line(j, text + at, next - at, number, fn, ctx));
    at = next;
  }
  return LEV_OK;
}

static lev_status find_cut(job *j) {
  const unsigned char *text = j->text.data;
  size_t n = j->text.bytes, at = n;
  j->cut = n;
  if (j->options->holdout == 0) return LEV_OK;
  size_t want = (size_t)((1 - j->options->holdout) * (double)n);
  if (want == 0) want = 1;
  if (want < n) {
    const unsigned char *stop = memchr(text + want - 1, '\n', n - want + 1);
    at = stop ? (size_t)(stop - text) + 1 : n;
  }
  if (at == n) /* the last line begins earlier */
    for (at = n > 0 ? n - 1 : 0; at > 0 && text[at - 1] != '\n';) --at;
  if (at == 0 || at >= n)
    return lev_fail(LEV_ERR_CONFIG, "%s (%zu bytes) has no line border that leaves text on both sides of a held-out %g",
                    j->options->input, n, j->options->holdout);
  j->cut = at;
  return LEV_OK;
}

/* ---- the tokenizer ---- */

typedef struct learning {
  lev_tokenizer *splitter;
  lev_bpe_trainer *trainer;
} learning;

static lev_status count_piece(void *ctx, const unsigned char *piece, size_t size) {
  return lev_bpe_trainer_add(((learning *)ctx)->trainer, piece, size);
}

static lev_status count_document(void *ctx, const unsigned char *text, size_t size) {
  learning *l = ctx;
  return lev_tokenizer_pieces(l->splitter, text, size, count_piece, l);
}

static lev_status learn(job *j) {
  learning l = {0};
  lev_bpe *bpe = NULL;
  const lev_pre_step byte_level = {.kind = LEV_PRE_BYTE_LEVEL, .use_regex = true};
  lev_status st = lev_tokenizer_create(&l.splitter);
  if (st == LEV_OK) st = lev_tokenizer_add_step(l.splitter, byte_level);
  if (st == LEV_OK) st = lev_bpe_trainer_create(&l.trainer);
  if (st == LEV_OK) st = each_document(j, 0, j->cut, count_document, &l);
  if (st == LEV_OK) st = lev_bpe_trainer_run(l.trainer, j->options->train_bpe - 1, &bpe);
  lev_bpe_trainer_close(l.trainer);
  if (st == LEV_OK) {
    lev_bpe_destroy(l.splitter->bpe);
    l.splitter->bpe = bpe;
    st = lev_tokenizer_add_token(l.splitter, (lev_added_token){.text = (char[]){EOD},
                                                               .size = sizeof EOD - 1,
                                                               .id = (int32_t)lev_bpe_ids(bpe),
                                                               .special = true});
  }
  if (st == LEV_OK) st = lev_tokenizer_prepare(l.splitter);
  if (st == LEV_OK) st = lev_tokenizer_write(l.splitter, j->learned_path);
  j->tokenizer = l.splitter;
  return st;
}

static lev_status find_eod(job *j) {
  static const char *const names[] = {EOD, "<|end_of_text|>", "</s>", "<eos>", "<|eod|>", "[EOS]"};
  const char *asked = j->options->eod_token;
  j->eod = -1;
  if (!j->options->append_eod) return LEV_OK;
  if (!j->tokenizer) {
    j->eod = BYTE_EOD;
    return LEV_OK;
  }
  if (asked) j->eod = lev_tokenizer_added_id(j->tokenizer, asked);
  for (size_t i = 0; !asked && j->eod < 0 && i < sizeof names / sizeof *names; ++i)
    j->eod = lev_tokenizer_added_id(j->tokenizer, names[i]);
  if (j->eod >= 0) return LEV_OK;
  return lev_fail(LEV_ERR_CONFIG, "%s has no added token %s to end documents with", j->tokenizer_name,
                  asked ? asked : "of a known name (<|endoftext|>, </s>, ...)");
}

static lev_status get_tokenizer(job *j) {
  const lev_tokenize_options *o = j->options;
  j->vocab = 256 + o->append_eod;
  if (o->train_bpe) {
    LEV_TRY(lev_path_join(j->learned_path, sizeof j->learned_path, o->output, ".tokenizer.json"));
    j->tokenizer_name = j->learned_path;
    LEV_TRY(learn(j));
  } else if (o->tokenizer) {
    j->tokenizer_name = o->tokenizer;
    LEV_TRY(lev_tokenizer_read(o->tokenizer, &j->tokenizer));
  }
  if (j->tokenizer) j->vocab = lev_tokenizer_vocab(j->tokenizer);
  return find_eod(j);
}

/* ---- token files ---- */

static lev_status write_ids(void *ctx, const int32_t *ids, size_t n) {
  part *p = ctx;
  if (n > 0) p->last = ids[n - 1];
  if (n > 0 && p->first < 0) p->first = ids[0];
  return lev_megatron_append(p->writer, ids, (int64_t)n);
}

static lev_status write_bytes(part *p, const unsigned char *text, size_t size) {
  int32_t ids[SLAB];
  for (size_t at = 0; at < size;) {
    size_t n = size - at < SLAB ? size - at : SLAB;
    for (size_t i = 0; i < n; ++i) ids[i] = text[at + i];
    LEV_TRY(write_ids(p, ids, n));
    at += n;
  }
  return LEV_OK;
}

static lev_status write_document(void *ctx, const unsigned char *text, size_t size) {
  part *p = ctx;
  const job *j = p->job;
  int64_t before = lev_megatron_written(p->writer);
  p->last = -1;
  if (j->tokenizer)
    LEV_TRY(lev_tokenizer_encode(j->tokenizer, text, size, true, write_ids, p));
  else
    LEV_TRY(write_bytes(p, text, size));
  if (j->eod >= 0 && p->last != j->eod) LEV_TRY(write_ids(p, &j->eod, 1)); /* the template may have added it already */
  p->documents += lev_megatron_written(p->writer) > before;
  p->text_bytes += (int64_t)size;
  return lev_megatron_end_document(p->writer);
}

/* Bytes of text behind the first token: no label covers them, so a loss per byte must leave them out. */
static lev_status first_token_bytes(const part *p, int64_t *bytes) {
  lev_bytes_buffer text = {0};
  *bytes = p->first >= 0 && p->first < 256; /* byte tokens; the end of document stands for none */
  if (!p->job->tokenizer || p->first < 0) return LEV_OK;
  lev_status st = lev_tokenizer_decode(p->job->tokenizer, &p->first, 1, true, &text);
  *bytes = (int64_t)text.size;
  lev_free(text.data);
  return st;
}

static lev_status write_sidecar(const part *p, const char *prefix) {
  const job *j = p->job;
  int64_t first;
  char path[1024];
  const char *name = j->tokenizer_name ? strrchr(j->tokenizer_name, '/') : NULL;
  name = name ? name + 1 : j->tokenizer_name;
  LEV_TRY(lev_path_join(path, sizeof path, prefix, ".json"));
  LEV_TRY(first_token_bytes(p, &first));
  json_t *root = json_pack("{s:I, s:I, s:I, s:I, s:I, s:o, s:s?, s:s?}", "vocab_size", (json_int_t)j->vocab, "tokens",
                           (json_int_t)lev_megatron_written(p->writer), "documents", (json_int_t)p->documents,
                           "text_bytes", (json_int_t)p->text_bytes, "first_token_bytes", (json_int_t)first, "eod_id",
                           j->eod >= 0 ? json_integer(j->eod) : json_null(), "tokenizer", name, "tokenizer_xxh3_128",
                           j->tokenizer ? j->tokenizer->hash : NULL);
  char *text = root ? json_dumps(root, JSON_INDENT(1)) : NULL;
  json_decref(root);
  if (!text) return lev_fail(LEV_ERR_FORMAT, "cannot write %s: the tokenizer's name is not UTF-8", path);
  lev_out out;
  lev_status st = lev_out_open(&out, path);
  if (st == LEV_OK) {
    st = lev_out_write(&out, text, strlen(text));
    if (st == LEV_OK) st = lev_out_commit(&out);
    lev_out_discard(&out);
  }
  free(text);
  return st;
}

/* Tokenizes [begin, end) into OUTPUT<suffix>. */
static lev_status write_part(const job *j, const char *suffix, size_t begin, size_t end, int64_t *tokens,
                             int64_t *bytes) {
  char prefix[1024];
  part p = {.job = j, .first = -1};
  LEV_TRY(lev_path_join(prefix, sizeof prefix, j->options->output, suffix));
  LEV_TRY(lev_megatron_create(prefix, j->vocab, &p.writer));
  lev_status st = each_document(j, begin, end, write_document, &p);
  if (st == LEV_OK && lev_megatron_written(p.writer) == 0)
    st = lev_fail(LEV_ERR_CONFIG, "%s: no token for %s", j->options->input, prefix);
  if (st == LEV_OK) st = lev_megatron_commit(p.writer);
  if (st == LEV_OK) st = write_sidecar(&p, prefix);
  *tokens = lev_megatron_written(p.writer);
  *bytes = p.text_bytes;
  lev_megatron_writer_close(p.writer);
  return st;
}

/* Removes what an earlier call held out under this prefix: this one trains on all of its text. */
static lev_status drop_held_out(const char *output) {
  static const char *const suffixes[] = {".valid.idx", ".valid.bin", ".valid.json"};
  char path[1024];
  for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; ++i) {
    LEV_TRY(lev_path_join(path, sizeof path, output, suffixes[i]));
    if (unlink(path) != 0 && errno != ENOENT)
      return lev_fail(LEV_ERR_IO, "cannot remove %s: %s", path, strerror(errno));
  }
  return LEV_OK;
}

static lev_status check(const lev_tokenize_options *o) {
  if (!o->input || !o->output) return lev_fail(LEV_ERR_CONFIG, "tokenize takes an input and an output prefix");
  if (o->tokenizer && o->train_bpe)
    return lev_fail(LEV_ERR_CONFIG, "a tokenizer is either read (%s) or learned (%lld entries)", o->tokenizer,
                    (long long)o->train_bpe);
  if (o->train_bpe != 0 && (o->train_bpe < 257 || o->train_bpe > LEV_VOCAB_MAX))
    return lev_fail(LEV_ERR_CONFIG, "a BPE of %lld entries: from 257 (bytes and end of document) to %lld are possible",
                    (long long)o->train_bpe, (long long)LEV_VOCAB_MAX);
  if (!(o->holdout >= 0 && o->holdout < 1))
    return lev_fail(LEV_ERR_CONFIG, "a held-out share of %g is not in [0, 1)", o->holdout);
  if (o->eod_token && !o->tokenizer)
    return lev_fail(LEV_ERR_CONFIG, "the end-of-document token %s takes a tokenizer", o->eod_token);
  return LEV_OK;
}

lev_status lev_tokenize(const lev_tokenize_options *o, lev_tokenize_report *report) {
  double start = now();
  job j = {.options = o};
  *report = (lev_tokenize_report){0};
  LEV_TRY(check(o));
  size_t n = strlen(o->input);
  j.jsonl = o->jsonl || (n >= 6 && strcmp(o->input + n - 6, ".jsonl") == 0);
  lev_status st = lev_map_open(o->input, &j.text);
  if (st == LEV_OK) st = find_cut(&j);
  if (st == LEV_OK) st = get_tokenizer(&j);
  if (st == LEV_OK) st = write_part(&j, ".train", 0, j.cut, &report->train_tokens, &report->train_bytes);
  if (st == LEV_OK)
    st = j.cut == j.text.bytes
             ? drop_held_out(o->output)
             : write_part(&j, ".valid", j.cut, j.text.bytes, &report->valid_tokens, &report->valid_bytes);
  report->vocab = j.vocab;
  report->seconds = now() - start;
  lev_tokenizer_close(j.tokenizer);
  lev_map_close(&j.text);
  return st;
}
