/* SPDX-License-Identifier: Apache-2.0 */
/* Which cases run, and what becomes of each. */
#include "harness/bench/bench.h"

#include <string.h>

#include "common/dims.h"
#include "common/gemm.h"
#include "common/hostmem.h"
#include "harness/bench/bench_impl.h"

/* ---- selection ---- */

/* `word` names the case, its area, or its name up to a '.'. */
static bool names(const char *word, const char *name) {
  size_t n = strlen(word);
  return n > 0 && strncmp(word, name, n) == 0 && (name[n] == 0 || name[n] == '.');
}

static bool selected(const bench_options *o, const bench_case *of) {
  for (int i = 0; i < o->n_select; ++i)
    if (names(o->select[i], of->name)) return true;
  return o->n_select == 0;
}

static void append(char *text, size_t size, const char *word) {
  size_t at = strlen(text);
  snprintf(text + at, size - at, "%s%s", at ? ", " : "", word);
}

/* Every word must name something; the error lists what there is. */
static lev_status check_selection(const bench_options *o) {
  for (int i = 0; i < o->n_select; ++i) {
    const bench_area *area = NULL;
    bool found = false;
    char known[900] = "";
    for (int a = 0; a < o->n_areas; ++a) {
      size_t n = strlen(o->areas[a]->name);
      if (strncmp(o->select[i], o->areas[a]->name, n) == 0 && o->select[i][n] == '.') area = o->areas[a];
      for (int c = 0; c < o->areas[a]->n_cases; ++c) found |= names(o->select[i], o->areas[a]->cases[c].name);
    }
    if (found) continue;
    for (int a = 0; a < o->n_areas && !area; ++a) append(known, sizeof known, o->areas[a]->name);
    for (int c = 0; area && c < area->n_cases; ++c) append(known, sizeof known, area->cases[c].name);
    return lev_fail(LEV_ERR_ARG, "no case is named \"%.60s\"; %s: %s", o->select[i], area ? "there are" : "areas are",
                    known);
  }
  return LEV_OK;
}

static void list_cases(const bench_options *o) {
  for (int a = 0; a < o->n_areas; ++a)
    for (int c = 0; c < o->areas[a]->n_cases; ++c) {
      const bench_case *of = &o->areas[a]->cases[c];
      if (selected(o, of))
        fprintf(o->out, "%-36s %s%s\n", of->name, of->about ? of->about : "", of->gpu_only ? " (GPU)" : "");
    }
}

/* ---- running ---- */

static lev_status open_bench(bench *b, const bench_options *o) {
  size_t bytes = lev_gemm_workspace_bytes(o->backend, LEV_BF16);
  void *workspace;
  b->options = o;
  LEV_TRY(lev_device_open(&(lev_device_config){.backend = o->backend}, &b->device));
  lev_device_name(b->device, b->device_name, sizeof b->device_name);
  LEV_TRY(lev_stream_create(b->device, "bench", &b->stream));
  for (int i = 0; i < 2; ++i) LEV_TRY(lev_event_create_timed(b->device, &b->event[i]));
  LEV_TRY(lev_device_alloc(b->device, LEV_MEM_DEVICE, bytes, &workspace));
  lev_stream_set_workspace(b->stream, workspace, bytes);
  return bench_measure_ceilings(b);
}

/* One case; counts it. A device error breaks the stream: the set ends there. */
static lev_status run_case(bench *b, const bench_case *of, bench_totals *totals) {
  b->of = of, b->checks = 0, b->measured = false, b->tensors = 0;
  if (of->gpu_only && b->options->backend == LEV_BACKEND_CPU) {
    ++totals->skipped;
    bench_report_not(b, "skipped", "runs on a GPU only");
    return LEV_OK;
  }
  lev_status st = of->run(b, of->arg), waited = lev_stream_sync(b->stream);
  if (st == LEV_OK) st = waited;
  bench_release(b);
  if (st == LEV_OK) {
    ++totals->measured;
    return LEV_OK;
  }
  ++totals->refused;
  bench_report_not(b, st == LEV_ERR_WRONG ? "REFUSED, wrong" : lev_status_text(st), lev_detail());
  return waited != LEV_OK || st == LEV_ERR_IO ? st : LEV_OK;
}

static lev_status run_area(bench *b, const bench_area *area, bench_totals *totals) {
  bench_result *results = lev_calloc(LEV_HEAP_REPORT, (size_t)area->n_cases, sizeof *results);
  lev_status st = results ? LEV_OK : LEV_ERR_NOMEM;
  int n = 0;
  for (int c = 0; c < area->n_cases && st == LEV_OK; ++c) {
    if (!selected(b->options, &area->cases[c])) continue;
    st = run_case(b, &area->cases[c], totals);
    if (st == LEV_OK && b->measured) results[n++] = b->result;
  }
  b->of = NULL;
  if (st == LEV_OK && area->summary && n == area->n_cases) {
    char name[160];
    snprintf(name, sizeof name, "%s.%s", area->name, area->summary);
    st = bench_report_figure(b, name, area->summarize(results, n), area->summary_unit);
  }
  lev_free(results);
  return st;
}

lev_status bench_run(const bench_options *o, bench_totals *totals) {
  bench b = {0};
  *totals = (bench_totals){0};
  LEV_TRY(check_selection(o));
  if (o->list) {
    list_cases(o);
    return LEV_OK;
  }
  LEV_TRY(bench_report_check(o));
  lev_status st = open_bench(&b, o);
  if (st == LEV_OK) bench_report_head(&b);
  for (int a = 0; a < o->n_areas && st == LEV_OK; ++a) st = run_area(&b, o->areas[a], totals);
  lev_device_close(b.device);
  LEV_TRY(st);
  if (totals->refused > 0)
    return lev_fail(LEV_ERR_WRONG, "%d of %d cases were wrong or failed", totals->refused,
                    totals->refused + totals->measured);
  if (totals->measured == 0)
    return lev_fail(LEV_ERR_MISUSE, "no case was measured on %s (%d skipped)", lev_backend_name(o->backend),
                    totals->skipped);
  return LEV_OK;
}
