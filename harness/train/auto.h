/* SPDX-License-Identifier: Apache-2.0 */
/* Picks every cap of a configuration so that the plan of each rank fits memory.device_memory and memory.host_memory.
 *
 * Attention, dispatch, vocabulary and optimizer take turns on one work stack, so each cap is raised until its own phase
 * fills the device: all phases then end at the same height. Layer inputs (and attention outputs) go to the host as far
 * as its limit allows, which frees the device for the rest. Each cap comes from a search over dry runs; the result is a
 * function of the configuration alone.
 *
 * A cap that memory does not bind (its largest useful value fits) is left to the module's own choice. Of each cap that
 * was chosen, one step more no longer fits. Where nothing that the search tries fits, settings that fit as they were
 * given stay.
 *
 * The vocabulary projection goes in one pass (memory.rdtp_one_pass) where blocks of 4,096 tokens fit and the estimate
 * of a step (estimate.h) is better for it: less time at given rates; without rates, no more of any cost, which leaves
 * out groups of ranks to which one pass sends more. The estimate does not know of memory.llep_tile_rows, which stays.
 */
#ifndef LEV_TRAIN_AUTO_H
#define LEV_TRAIN_AUTO_H

#include "harness/train/estimate.h"

#define LEV_AUTO_WORDS 20
#define LEV_AUTO_WORD 80

typedef struct lev_auto_word {
  char text[LEV_AUTO_WORD]; /* "--memory.llep_chunk_rows=4096": repeats the choice on the command line */
  const char *name;         /* "memory.llep_chunk_rows" */
  int64_t value, step;      /* step: by how much the search raised it; 0 = not a cap that memory binds */
} lev_auto_word;

typedef struct lev_auto_result {
  bool fits;                         /* false: neither as given nor with the least caps, which are then set */
  size_t device_excess, host_excess; /* of those, over the limits */
  bool host_binds;                   /* where nothing fits: with more host memory alone something would */
  lev_auto_word word[LEV_AUTO_WORDS];
  int n_words;
} lev_auto_result;

/* Changes memory.* caps of `config` (whatever it held), and parallel.context where it is 0 and there are several ranks:
 * the smallest group that leaves none without a sequence and fits. The context reserve counts as used. `rates`: what
 * time is reckoned at, NULL = unknown. Errors: LEV_ERR_CONFIG (no limit given; what planning refuses), LEV_ERR_NOMEM.
 */
LEV_MUST_CHECK lev_status lev_auto_plan(lev_config *config, const lev_ceilings *rates, lev_auto_result *out);

#endif
