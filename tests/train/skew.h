/* SPDX-License-Identifier: Apache-2.0 */
/* First weights of tests/train/rig.h's model that route tokens in a wanted way. */
#ifndef LEV_TESTS_TRAIN_SKEW_H
#define LEV_TESTS_TRAIN_SKEW_H

#include "tests/train/rig.h"

typedef enum skew {
  SKEW_RANDOM,   /* as initialised */
  SKEW_BALANCED, /* token id v picks experts v, v + 1, ... mod E */
  SKEW_ZIPF,     /* token ids draw their experts with weights 1 / (e + 1) */
  SKEW_PARETO,   /* ... with weights from a Pareto distribution of shape 1.16, the one of 80 % for 20 % */
  SKEW_ONE,      /* every token picks expert 0, its other picks are as initialised */
  SKEW_SAME,     /* every token picks experts 0, 1, ..., k-1: all rows of the batch go to their owners */
  SKEWS
} skew;

const char *skew_name(skew how);
/* For rig_options.alter; made for E = 10 and k = 3. */
rig_alter skew_alter(skew how);

#endif
