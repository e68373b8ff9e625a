/* SPDX-License-Identifier: Apache-2.0 */
/* The whole model as naive f64 loops over one sequence at a time, from the equations alone: nothing here comes from the
 * product but the settings. It covers the plain form of tests/train/rig.h (softmax router, no groups, no bias, no
 * shared experts, no windows, plain rotary embedding). */
#ifndef LEV_TESTS_TRAIN_ORACLE_H
#define LEV_TESTS_TRAIN_ORACLE_H

#include "tests/train/rig.h"

enum { ORACLE_LAYERS = 8, ORACLE_EXPERTS = 64 };

typedef struct oracle_result {
  double loss, z_loss;
  double balance; /* over the whole batch */
  double gap;     /* smallest difference between the last logit chosen and the first one not */
  int64_t load[ORACLE_LAYERS][ORACLE_EXPERTS]; /* tokens that chose the expert */
  double max_vio;                              /* largest load / mean - 1, over layers */
} oracle_result;

/* Sequences [first_sample, first_sample + global_batch) of tokens_loader(config) through a model with the weights that
 * a run left behind. */
void oracle_run(const lev_config *config, const rig_result *weights, int64_t first_sample, oracle_result *out);

#endif
