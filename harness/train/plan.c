/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/train/plan.h"

#include <string.h>

lev_status lev_plan_program(lev_rank *rank, lev_loader *train, lev_loader *valid) {
  lev_step_result result;
  double nll;
  int64_t tokens;
  int groups = rank->params->layout.ranks / rank->params->layout.context;
  LEV_TRY(lev_rank_init_weights(rank));
  LEV_TRY(lev_train_step(rank, train, 1, 0, rank->config->optimizer.lr, &result));
  return lev_evaluate(rank, valid, 0, groups, &nll, &tokens);
}

lev_status lev_plan_rank(const lev_config *config, int rank, lev_trace *trace, lev_rank_plan *out) {
  lev_device_config dc = {.backend = LEV_BACKEND_DRY, .trace = trace};
  lev_device *device = NULL;
  lev_comm *world = NULL;
  lev_rank *r = NULL;
  lev_status st;
  memset(out, 0, sizeof *out);
  LEV_TRY_GOTO(st, lev_ledger_create(trace, &out->ledger), end);
  LEV_TRY_GOTO(st, lev_device_open(&dc, &device), end);
  LEV_TRY_GOTO(st, lev_comm_dry_create((int)config->parallel.ranks, rank, device, &world), end);
  lev_rank_options options = {.config = config, .device = device, .world = world, .ledger = out->ledger};
  LEV_TRY_GOTO(st, lev_rank_create(&options, &r), end);
  LEV_TRY_GOTO(st, lev_plan_program(r, NULL, NULL), end);
  out->slabs = lev_rank_slabs(r);
  out->total = r->params->total, out->active = r->params->active;
  out->max_tokens = r->max_tokens;
end:
  lev_rank_destroy(r);
  lev_comm_destroy(world);
  lev_device_close(device);
  if (st != LEV_OK) lev_rank_plan_free(out);
  return st;
}

void lev_rank_plan_free(lev_rank_plan *plan) {
  lev_ledger_destroy(plan->ledger);
  plan->ledger = NULL;
}
