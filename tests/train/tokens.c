/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/train/tokens.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/rng.h"
#include "harness/data/megatron_index.h"
#include "tests/t.h"

enum { TOKENS = 4001 };

/* Lengths of the documents, over and over: a single token, shorter and longer than the tests' contexts. */
static const int64_t lengths[] = {13, 40, 1, 7, 129, 2, 29};

int32_t tokens_id(int64_t i, int64_t vocab) {
  return (int32_t)(lev_rng_u64((lev_rng_key){3, 0, 0}, (uint64_t)i) % (uint64_t)vocab);
}

typedef int32_t (*id_fn)(int64_t i, int64_t vocab);

/* Token i of a text: half of the time a fixed successor of the token before, else drawn with weight 1 / (id + 1). */
static int32_t text_id(int64_t i, int64_t vocab) {
  const lev_rng_key key = {5, 0, 0};
  double u = lev_rng_uniform(key, 2 * (uint64_t)i);
  if (i % 16 != 0 && lev_rng_uniform(key, 2 * (uint64_t)i + 1) < 0.5)
    return (int32_t)((7 * text_id(i - 1, vocab) + 3) % vocab);
  return (int32_t)fmin((double)(vocab - 1), exp(u * log((double)vocab + 1)) - 1);
}

/* Writes PREFIX.idx and PREFIX.bin: ids first, first + 1, ... in documents of the lengths given, repeated until there
 * are `tokens`. */
static void write_tokens(const char *prefix, id_fn id_of, int64_t vocab, int64_t first, const int64_t *length,
                         int n_lengths, int64_t tokens) {
  lev_megatron_writer *w;
  T_REQUIRE_OK(lev_megatron_create(prefix, vocab, &w));
  int64_t i = 0;
  for (int d = 0; i < tokens; d = (d + 1) % n_lengths) {
    for (int64_t end = i + length[d]; i < end && i < tokens; ++i) {
      int32_t id = id_of(first + i, vocab);
      T_EXPECT_OK(lev_megatron_append(w, &id, 1));
    }
    T_EXPECT_OK(lev_megatron_end_document(w));
  }
  T_EXPECT_OK(lev_megatron_commit(w));
  lev_megatron_writer_close(w);
}

/* ---- files that all loaders of the process share, written once ---- */

typedef struct token_file {
  id_fn id_of;
  int64_t vocab;
  char folder[32], prefix[40];
} token_file;

static token_file files[32];
static int n_files;
static pthread_mutex_t files_lock = PTHREAD_MUTEX_INITIALIZER;

static void remove_file(const token_file *f) {
  const char *const suffix[] = {".idx", ".bin"};
  char path[80];
  for (int i = 0; i < 2; ++i) {
    snprintf(path, sizeof path, "%s%s", f->prefix, suffix[i]);
    unlink(path);
  }
  rmdir(f->folder);
}

static void remove_files(void) {
  while (n_files > 0) remove_file(&files[--n_files]);
}

static bool make_file(token_file *f, id_fn id_of, int64_t vocab, int64_t first, const int64_t *length, int n_lengths,
                      int64_t tokens) {
  char folder[32] = "/tmp/levee-tokens-XXXXXX";
  if (!T_EXPECT(mkdtemp(folder) != NULL)) return false;
  *f = (token_file){.id_of = id_of, .vocab = vocab};
  snprintf(f->folder, sizeof f->folder, "%s", folder);
  snprintf(f->prefix, sizeof f->prefix, "%s/t", folder);
  write_tokens(f->prefix, id_of, vocab, first, length, n_lengths, tokens);
  return true;
}

static lev_loader *open_file(const lev_config *config, const token_file *f) {
  lev_loader *loader = NULL;
  lev_loader_options o = {.prefix = f->prefix,
                          .context = config->train.context,
                          .vocab = config->model.vocab_size,
                          .seed = (uint64_t)config->debug.seed};
  T_EXPECT_OK(lev_loader_open(&o, &loader));
  return loader;
}

/* A loader over the whole stream of id_of. */
static lev_loader *open_stream(const lev_config *config, id_fn id_of) {
  int64_t vocab = config->model.vocab_size;
  pthread_mutex_lock(&files_lock);
  int i = 0;
  while (i < n_files && (files[i].id_of != id_of || files[i].vocab != vocab)) ++i;
  bool made = i < n_files;
  if (!made && T_EXPECT(n_files < (int)(sizeof files / sizeof *files))) {
    if (n_files == 0) atexit(remove_files);
    made = make_file(&files[i], id_of, vocab, 0, lengths, sizeof lengths / sizeof *lengths, TOKENS);
    n_files += made;
  }
  pthread_mutex_unlock(&files_lock);
  return made ? open_file(config, &files[i]) : NULL;
}

void tokens_write(const lev_config *config, const char *prefix) {
  write_tokens(prefix, tokens_id, config->model.vocab_size, 0, lengths, sizeof lengths / sizeof *lengths, TOKENS);
}

lev_loader *tokens_loader(const lev_config *config) {
  return open_stream(config, tokens_id);
}

lev_loader *tokens_loader_text(const lev_config *config) {
  return open_stream(config, text_id);
}

lev_loader *tokens_loader_of(const lev_config *config, int64_t first, const int64_t *length, int n) {
  int64_t with_next[TOKENS_DOCUMENTS + 1], tokens = 1;
  if (!T_EXPECT(n <= TOKENS_DOCUMENTS)) return NULL;
  for (int d = 0; d < n; ++d) tokens += with_next[d] = length[d];
  with_next[n] = 1;
  token_file own;
  if (!make_file(&own, tokens_id, config->model.vocab_size, first, with_next, n + 1, tokens)) return NULL;
  lev_loader *loader = open_file(config, &own);
  remove_file(&own); /* mapped: the names may go */
  return loader;
}
