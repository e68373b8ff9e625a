/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/train/plan.h"

#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"

/* Whether a run of these settings ever validates. A rank without a sequence in any step works in validation alone. */
static bool evaluates(const lev_config *c) {
  bool during = c->train.eval_interval > 0 && c->train.eval_interval <= c->train.steps;
  return c->data.valid[0] != '\0' && (during || c->train.eval_at_end);
}

lev_status lev_plan_program(lev_rank *rank, lev_loader *train, lev_loader *valid) {
  lev_step_result result;
  double nll;
  int64_t tokens;
  int64_t sequences = rank->params->layout.ranks / rank->params->layout.context;
  if (valid) sequences = lev_min_i64(sequences, lev_loader_samples(valid));
  LEV_TRY(lev_rank_init_weights(rank));
  LEV_TRY(lev_train_step(rank, train, 1, 0, rank->config->optimizer.lr, &result));
  return evaluates(rank->config) ? lev_evaluate(rank, valid, 0, sequences, &nll, &tokens) : LEV_OK;
}

/* `slabs` NULL: as large as it takes. */
static lev_status plan_rank(const lev_config *config, int rank, lev_loader *valid, const lev_slabs *slabs,
                            lev_trace *trace, lev_rank_plan *out) {
  lev_device_config dc = {.backend = LEV_BACKEND_DRY, .dry_for = lev_run_backend(config), .trace = trace};
  lev_device *device = NULL;
  lev_comm *world = NULL;
  lev_rank *r = NULL;
  lev_status st;
  memset(out, 0, sizeof *out);
  LEV_TRY_GOTO(st, lev_ledger_create(trace, &out->ledger), end);
  LEV_TRY_GOTO(st, lev_device_open(&dc, &device), end);
  LEV_TRY_GOTO(st, lev_comm_dry_create((int)config->parallel.ranks, rank, device, &world), end);
  lev_rank_options options = {
      .config = config, .device = device, .world = world, .ledger = out->ledger, .slabs = slabs};
  LEV_TRY_GOTO(st, lev_rank_create(&options, &r), end);
  LEV_TRY_GOTO(st, lev_plan_program(r, NULL, valid), end);
  out->slabs = lev_rank_slabs(r);
  out->total = r->params->total, out->active = r->params->active;
  out->max_tokens = r->max_tokens, out->micro_batches = r->micro_batches;
  out->grad_dtype = r->grad_dtype;
  out->adamw_elements = oadamw_count(r->adamw);
  out->muon_elements = r->muon ? muon_count(r->muon) : 0, out->muon_flops = r->muon ? muon_flops(r->muon) : 0;
end:
  lev_rank_destroy(r);
  lev_comm_destroy(world);
  lev_device_close(device);
  if (st != LEV_OK) lev_rank_plan_free(out);
  return st;
}

lev_status lev_plan_rank(const lev_config *config, int rank, lev_trace *trace, lev_rank_plan *out) {
  return plan_rank(config, rank, NULL, NULL, trace, out);
}

lev_status lev_plan_run(const lev_config *config, int rank, lev_loader *valid, lev_rank_plan *out) {
  return plan_rank(config, rank, valid, NULL, NULL, out);
}

lev_status lev_plan_fits(const lev_config *config, int rank, const lev_slabs *slabs, bool *fits) {
  lev_rank_plan plan;
  lev_status st = plan_rank(config, rank, NULL, slabs, NULL, &plan);
  *fits = st == LEV_OK;
  if (st == LEV_OK) lev_rank_plan_free(&plan);
  return st == LEV_ERR_CAPACITY || st == LEV_ERR_BUDGET ? LEV_OK : st;
}

void lev_rank_plan_free(lev_rank_plan *plan) {
  lev_ledger_destroy(plan->ledger);
  plan->ledger = NULL;
}

size_t lev_rank_plan_host(const lev_rank_plan *plan) {
  return lev_sat_add(lev_ledger_peak(plan->ledger, LEV_MEM_PINNED), lev_ledger_peak(plan->ledger, LEV_MEM_HOST));
}

static bool is_larger(const lev_rank_plan *a, const lev_rank_plan *b) {
  size_t x = lev_ledger_peak(a->ledger, LEV_MEM_DEVICE), y = lev_ledger_peak(b->ledger, LEV_MEM_DEVICE);
  return x != y ? x > y : lev_rank_plan_host(a) > lev_rank_plan_host(b);
}

lev_status lev_plan_world(const lev_config *config, lev_world_plan *out) {
  *out = (lev_world_plan){0};
  LEV_TRY(lev_rank_classes_create(config, &out->classes));
  out->plan = lev_calloc(LEV_HEAP_PLAN, (size_t)out->classes.n, sizeof *out->plan);
  lev_status st = out->plan ? LEV_OK : LEV_ERR_NOMEM;
  for (int i = 0; i < out->classes.n && st == LEV_OK; ++i) {
    st = lev_plan_rank(config, out->classes.first[i], NULL, &out->plan[i]);
    if (st == LEV_OK && is_larger(&out->plan[i], &out->plan[out->largest])) out->largest = i;
  }
  if (st != LEV_OK) lev_world_plan_free(out);
  return st;
}

void lev_world_plan_free(lev_world_plan *plan) {
  for (int i = 0; plan->plan && i < plan->classes.n; ++i) lev_rank_plan_free(&plan->plan[i]);
  lev_free(plan->plan);
  lev_rank_classes_free(&plan->classes);
  *plan = (lev_world_plan){0};
}

bool lev_tag_grows(const lev_config *config, const char *tag) {
  static const char *const growing[] = {
      "hidden.",       "batch.",      "sco.",          "attn.kv",        "attn.dkv",
      "attn.acc",      "attn.state",  "attn.qkv",      "attn.workspace", "attn.out",
      "attn.out_grad", "router.ids",  "router.logits", "router.weights", "router.logits_grad",
      "llep.tables",   "llep.counts", "rdtp.state",    "rdtp.dx"};
  if (config->schedule.pipelined_llep == LEV_SCHEDULE_PLAIN && strncmp(tag, "llep.", 5) == 0) return true;
  if (config->schedule.ring_dtp == LEV_SCHEDULE_PLAIN && strncmp(tag, "rdtp.", 5) == 0) return true;
  for (size_t i = 0; i < sizeof growing / sizeof *growing; ++i) {
    size_t n = strlen(growing[i]);
    bool family = growing[i][n - 1] == '.';
    if (family ? strncmp(tag, growing[i], n) == 0 : strcmp(tag, growing[i]) == 0) return true;
  }
  return false;
}
