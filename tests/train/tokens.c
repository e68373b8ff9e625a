/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/train/tokens.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/rng.h"
#include "harness/data/megatron_index.h"
#include "tests/t.h"

enum { TOKENS = 4001 };

/* Writes PREFIX.idx and PREFIX.bin: TOKENS reproducible ids. */
static void write_tokens(const char *prefix, int64_t vocab) {
  lev_megatron_writer *w;
  int32_t ids[TOKENS];
  for (int i = 0; i < TOKENS; ++i)
    ids[i] = (int32_t)(lev_rng_u64((lev_rng_key){3, 0, 0}, (uint64_t)i) % (uint64_t)vocab);
  T_REQUIRE_OK(lev_megatron_create(prefix, vocab, &w));
  T_EXPECT_OK(lev_megatron_append(w, ids, TOKENS));
  T_EXPECT_OK(lev_megatron_end_document(w));
  T_EXPECT_OK(lev_megatron_commit(w));
  lev_megatron_writer_close(w);
}

lev_loader *tokens_loader(const lev_config *config) {
  char folder[] = "/tmp/levee-tokens-XXXXXX", prefix[64], path[80];
  lev_loader *loader = NULL;
  if (!T_EXPECT(mkdtemp(folder) != NULL)) return NULL;
  snprintf(prefix, sizeof prefix, "%s/t", folder);
  write_tokens(prefix, config->model.vocab_size);
  lev_loader_options o = {.prefix = prefix, .context = config->train.context, .vocab = config->model.vocab_size,
                          .seed = (uint64_t)config->debug.seed};
  T_EXPECT_OK(lev_loader_open(&o, &loader)); /* mapped: the names may go */
  const char *const suffix[] = {".idx", ".bin"};
  for (int i = 0; i < 2; ++i) {
    snprintf(path, sizeof path, "%s%s", prefix, suffix[i]);
    unlink(path);
  }
  rmdir(folder);
  return loader;
}
