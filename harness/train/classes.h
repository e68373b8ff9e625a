/* SPDX-License-Identifier: Apache-2.0 */
/* Which ranks have the same memory plan. Sizes depend on a rank only through how many tokens it gets in how many
 * micro-batches, how large its parts of the experts and the vocabulary are, how many weights it stores, and what Muon
 * makes of its matrices; ranks that agree in these form a class, and planning one of them plans all. */
#ifndef LEV_TRAIN_CLASSES_H
#define LEV_TRAIN_CLASSES_H

#include "harness/train/rank.h"

typedef struct lev_rank_classes {
  int ranks, n;
  int *of;    /* [ranks] class of each rank, 0 .. n-1, numbered by first appearance */
  int *first; /* [n] lowest rank of each class */
} lev_rank_classes;

/* Host work only. Errors: those of lev_params_create and muon_plan_create (the same that planning such a rank gives),
 * LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_rank_classes_create(const lev_config *config, lev_rank_classes *out);
void lev_rank_classes_free(lev_rank_classes *classes);

#endif
