/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the composed step on rank threads and collects whole tensors, so that layouts and schedules can be compared. */
#ifndef LEV_TESTS_TRAIN_RIG_H
#define LEV_TESTS_TRAIN_RIG_H

#include "harness/train/plan.h"
#include "harness/train/rank.h"

enum { RIG_TENSORS = 256 };

/* Tiny f64 model and one step's settings; tests change what they vary. */
void rig_config(lev_config *config);

/* The same with one of the models beyond the plain form (tied embeddings, ...): variant 0, 1, ...; returns its name, or
 * NULL past the last one. */
const char *rig_variant(lev_config *config, int variant);

enum { RIG_RANKS = 16, RIG_STEPS = 128 };

/* What a run left behind; zero-initialised by rig_run. */
typedef struct rig_result {
  double *gradient[RIG_TENSORS]; /* by tensor id, f64 [elements] */
  double *weight[RIG_TENSORS];   /* after the step, where one was taken */
  int64_t elements[RIG_TENSORS];
  char name[RIG_TENSORS][96];
  double *route_bias;        /* [layers * experts] selection biases, where the model has them */
  lev_step_result step;      /* of the last step */
  double max_vio[RIG_STEPS]; /* of each step, the first ones of the run */
  double loss[RIG_STEPS];
  double nll; /* of the evaluation */
  int64_t valid;
  bool plan_exact; /* planned = measured on every rank, tag by tag */
  uint64_t bytes_sent;
  char *peaks[RIG_RANKS]; /* by rank: a line "class tag bytes" per row of the ledger, then the classes' peaks */
  int64_t chunk_rows, chunk_cap,
      chunks;             /* of any rank and layer: most rows sent or received in a chunk, planned, most chunks */
  int64_t route_rows_max; /* most routes to one expert in any layer and expert group */
} rig_result;

/* First value of an element of a tensor, in place of `value`. */
typedef double (*rig_alter)(const lev_tensor *tensor, int64_t element, double value);

typedef struct rig_options {
  const lev_config *config;
  rig_alter alter; /* NULL: as initialised */
  bool update;     /* take the optimizer step too */
  bool evaluate;
  int direction; /* +1 / -1: weights moved along a fixed random direction first, by `shift` */
  double shift;
  int64_t first_sample;
  bool poison; /* all work bytes poisoned before the run */
  int steps;   /* with update: the last one (0 = 1) */
  const int64_t
      *documents; /* lengths of n_documents documents from token first_token on, the whole text; NULL = tokens_loader */
  int n_documents;
  int64_t first_token;
  bool text;          /* tokens_loader_text */
  const char *folder; /* of a checkpoint: saved after the last step ... */
  bool resume;        /* ... or read before the first one, which is then the next */
} rig_options;

/* Runs it; failures are recorded in the running test. */
void rig_run(const rig_options *options, rig_result *result);
void rig_free(rig_result *result);
/* Element of the fixed random direction (unit variance) that rig_options.shift multiplies. */
double rig_direction(int tensor, int64_t element);
/* Largest relative L2 difference over all gradient tensors; names the worst. */
double rig_gradient_distance(const rig_result *got, const rig_result *want, const char **worst);

#endif
