/* SPDX-License-Identifier: Apache-2.0 */
/* The memory plan: one rank's set-up, step and evaluation run on the dry backend, through the code of the real run. */
#ifndef LEV_TRAIN_PLAN_H
#define LEV_TRAIN_PLAN_H

#include "harness/train/classes.h"

typedef struct lev_rank_plan {
  lev_ledger *ledger;                    /* planned bytes of a tag = its peak here; owned by the plan */
  lev_slabs slabs;                       /* size of each class's slab */
  int64_t total, active;                 /* parameters of the model; those one token touches */
  int64_t max_tokens;                    /* N cap of any rank */
  int64_t micro_batches;                 /* per step */
  int64_t adamw_elements, muon_elements; /* of this rank's optimizer state */
  double muon_flops;                     /* of one update */
  lev_dtype grad_dtype;                  /* of stored gradients */
} lev_rank_plan;

/* Plans rank `rank` of parallel.ranks, for a validation with a sequence for every context group. `trace` (nullable)
 * receives the events. Errors: LEV_ERR_CONFIG, LEV_ERR_BUDGET of a module, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_plan_rank(const lev_config *config, int rank, lev_trace *trace, lev_rank_plan *out);
/* The same for a run on the held-out text `valid` (NULL: none was named). Where that has fewer sequences than there are
 * context groups, the other groups have nothing to validate; a rank that has no sequence in a step either then takes
 * less than lev_plan_rank says, which knows no data. */
LEV_MUST_CHECK lev_status lev_plan_run(const lev_config *config, int rank, lev_loader *valid, lev_rank_plan *out);
void lev_rank_plan_free(lev_rank_plan *plan);
/* Whether rank `rank` fits slabs of these sizes (SIZE_MAX = no limit). Planning ends at the first bytes that do not, so
 * that a hopeless configuration costs little. Errors: as lev_plan_rank, but for LEV_ERR_BUDGET and LEV_ERR_CAPACITY,
 * which are a no. */
LEV_MUST_CHECK lev_status lev_plan_fits(const lev_config *config, int rank, const lev_slabs *slabs, bool *fits);

/* The plan of a whole world: one rank of each class is planned. */
typedef struct lev_world_plan {
  lev_rank_classes classes;
  lev_rank_plan *plan; /* [classes.n] */
  int largest;         /* class whose rank takes most device bytes (then most bytes in all) */
} lev_world_plan;
/* Errors: as lev_plan_rank. */
LEV_MUST_CHECK lev_status lev_plan_world(const lev_config *config, lev_world_plan *out);
void lev_world_plan_free(lev_world_plan *plan);
/* Bytes of pinned and named host memory, which share a limit. */
size_t lev_rank_plan_host(const lev_rank_plan *plan);

/* Whether a tag's bytes may grow with the tokens of a rank (rdtp.*: where memory.rdtp_branch does not follow from the
 * number of tokens). All other tags are flat once a rank has as many tokens as the caps allow for. */
bool lev_tag_grows(const lev_config *config, const char *tag);

/* What the plan and the event list of a run go through after set-up, on any backend: first values, one step, and where
 * the configuration has one an evaluation of the first sequences of `valid` (NULL: as many as context groups). */
LEV_MUST_CHECK lev_status lev_plan_program(lev_rank *rank, lev_loader *train, lev_loader *valid);

#endif
