/* SPDX-License-Identifier: Apache-2.0 */
/* A small fixed token stream for the composed tests. */
#ifndef LEV_TESTS_TRAIN_TOKENS_H
#define LEV_TESTS_TRAIN_TOKENS_H

#include "harness/train/rank.h"

/* A loader over reproducible random tokens below model.vocab_size, at config->train.context. The caller closes it. */
lev_loader *tokens_loader(const lev_config *config);

#endif
