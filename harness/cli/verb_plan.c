/* SPDX-License-Identifier: Apache-2.0 */
/* levee plan: every byte of a run, by rank, class and tag, from the dry backend. Exit code 0, or 3 when a given limit
 * is passed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/cli/settings.h"
#include "harness/cli/verbs.h"
#include "harness/report/memory_report.h"
#include "harness/train/plan.h"

typedef struct plan_options {
  bool json, all_ranks;
} plan_options;

static lev_status parse(int argc, char **argv, plan_options *out) {
  for (int i = 0; i < argc; ++i)
    if (strcmp(argv[i], "--json") == 0)
      out->json = true;
    else if (strcmp(argv[i], "--all-ranks") == 0)
      out->all_ranks = true;
    else
      return lev_fail(LEV_ERR_ARG, "unexpected argument \"%s\"", argv[i]);
  return LEV_OK;
}

/* Sum of the class peaks: what ranks are compared by. */
static size_t weight(const lev_rank_plan *plan) {
  size_t sum = 0;
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) sum += lev_ledger_peak(plan->ledger, (lev_mem)cls);
  return sum;
}

/* Plans every rank; keeps all of them or the largest in `kept`. */
static lev_status plan_ranks(const lev_config *config, bool all, lev_rank_plan *kept, int *rank_of, int *n) {
  *n = 0;
  for (int r = 0; r < (int)config->parallel.ranks; ++r) {
    lev_rank_plan plan;
    LEV_TRY(lev_plan_rank(config, r, NULL, &plan));
    if (all || *n == 0) {
      rank_of[*n] = r;
      kept[(*n)++] = plan;
    } else if (lev_ledger_peak(plan.ledger, LEV_MEM_DEVICE) > lev_ledger_peak(kept[0].ledger, LEV_MEM_DEVICE) ||
               (lev_ledger_peak(plan.ledger, LEV_MEM_DEVICE) == lev_ledger_peak(kept[0].ledger, LEV_MEM_DEVICE) &&
                weight(&plan) > weight(&kept[0]))) {
      lev_rank_plan_free(&kept[0]);
      kept[0] = plan, rank_of[0] = r;
    } else {
      lev_rank_plan_free(&plan);
    }
  }
  return LEV_OK;
}

static void print_text(const lev_config *config, const lev_rank_plan *plan, const lev_memory_report *report,
                       size_t device, size_t host) {
  char a[24], b[24];
  printf("model %s: %.3f B parameters, %.3f B active; context %lld, %d ranks, %lld tokens each at most\n",
         config->model.name[0] ? config->model.name : "without name", (double)plan->total / 1e9,
         (double)plan->active / 1e9, (long long)config->train.context, report->ranks, (long long)plan->max_tokens);
  lev_memory_table(report, stdout);
  if (device)
    printf("does not fit: %s over memory.device_memory = %s\n", lev_bytes_text(device, a),
           lev_bytes_text(report->device_limit, b));
  if (host)
    printf("does not fit: %s over memory.host_memory = %s\n", lev_bytes_text(host, a),
           lev_bytes_text(report->host_limit, b));
  if ((report->device_limit || report->host_limit) && !device && !host) puts("fits the limits");
}

static lev_status show(const lev_config *config, const plan_options *o, int *exit_code) {
  size_t ranks = (size_t)config->parallel.ranks, device, host;
  lev_rank_plan *plans = lev_calloc(LEV_HEAP_REPORT, ranks, sizeof *plans);
  lev_memory_rank *rows = lev_calloc(LEV_HEAP_REPORT, ranks, sizeof *rows);
  int *rank_of = lev_calloc(LEV_HEAP_REPORT, ranks, sizeof *rank_of), n = 0;
  lev_status st = plans && rows && rank_of ? plan_ranks(config, o->all_ranks, plans, rank_of, &n) : LEV_ERR_NOMEM;
  if (st == LEV_OK) {
    for (int i = 0; i < n; ++i) rows[i] = (lev_memory_rank){rank_of[i], plans[i].ledger, NULL};
    size_t limit = config->memory.device_memory;
    if (limit > config->memory.context_reserve) limit -= config->memory.context_reserve;
    lev_memory_report report = {.ranks = (int)ranks,
                                .rank = rows,
                                .n = n,
                                .device_limit = limit,
                                .host_limit = config->memory.host_memory,
                                .heap_cap = config->memory.heap_cap};
    *exit_code = lev_memory_excess(&report, &device, &host) ? lev_status_exit_code(LEV_ERR_BUDGET) : 0;
    char *text = o->json ? lev_memory_json(&report) : NULL;
    if (o->json && !text) st = lev_fail(LEV_ERR_NOMEM, "no memory for the JSON text");
    if (text) puts(text);
    if (!o->json) print_text(config, &plans[0], &report, device, host);
    free(text);
  }
  for (int i = 0; i < n; ++i) lev_rank_plan_free(&plans[i]);
  lev_free(plans);
  lev_free(rows);
  lev_free(rank_of);
  return st;
}

int lev_verb_plan(int argc, char **argv) {
  static lev_config config;
  plan_options options = {0};
  int exit_code = 0;
  lev_status st = lev_settings(&config, &argc, argv);
  if (st == LEV_OK) st = parse(argc, argv, &options);
  if (st == LEV_OK) st = show(&config, &options, &exit_code);
  return st == LEV_OK ? exit_code : lev_verb_failed("plan", st);
}
