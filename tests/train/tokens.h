/* SPDX-License-Identifier: Apache-2.0 */
/* A small fixed token stream for the composed tests. */
#ifndef LEV_TESTS_TRAIN_TOKENS_H
#define LEV_TESTS_TRAIN_TOKENS_H

#include "harness/train/rank.h"

/* Token i of the stream, below vocab. */
int32_t tokens_id(int64_t i, int64_t vocab);
/* A loader over reproducible random tokens below model.vocab_size, in documents of many lengths, at
 * config->train.context. The caller closes it. */
lev_loader *tokens_loader(const lev_config *config);
/* A loader over tokens as text has them: frequencies fall as 1 / rank, and a token often depends on the one before. */
lev_loader *tokens_loader_text(const lev_config *config);
/* Writes the tokens of tokens_loader to PREFIX.idx and PREFIX.bin. */
void tokens_write(const lev_config *config, const char *prefix);
/* The loader again, over n documents of the lengths given, which begin at token `first`, and a last one of a single
 * token. */
enum { TOKENS_DOCUMENTS = 16 };
lev_loader *tokens_loader_of(const lev_config *config, int64_t first, const int64_t *length, int n);

#endif
