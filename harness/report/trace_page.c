/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/report/memory_report.h"
#include "harness/report/trace_assets.h"
#include "harness/report/trace_report.h"
#include "harness/report/trace_svg.h"

enum { TEXT = LEV_TIMELINE_NAME + 24, PAGE_BUCKETS = 480 };

#define GIB 1073741824.0

/* ---- parts ---- */

/* 1,234,567 */
static void write_grouped(size_t value, FILE *out) {
  char digits[24];
  int n = snprintf(digits, sizeof digits, "%zu", value);
  for (int i = 0; i < n; ++i) fprintf(out, i > 0 && (n - i) % 3 == 0 ? ",%c" : "%c", digits[i]);
}

static void write_cell(size_t value, FILE *out) {
  fputs("<td>", out);
  write_grouped(value, out);
  fputs("</td>", out);
}

/* How a peak relates to its plan, in words. */
static void write_verdict(const lev_timeline *t, size_t peak, size_t planned, bool exact, FILE *out) {
  char text[24];
  if (!t->has_plan)
    fputs("<span class=\"name\">no plan: memory.json is missing</span>", out);
  else if (peak == planned)
    fputs("<span class=\"ok\">equal to the plan, to the byte</span>", out);
  else if (peak > planned)
    fprintf(out, "<span class=\"bad\">%s (%zu bytes) over the plan</span>", lev_bytes_text(peak - planned, text),
            peak - planned);
  else
    fprintf(out, "<span class=\"%s\">%s (%zu bytes) under the %s</span>", exact ? "bad" : "name",
            lev_bytes_text(planned - peak, text), planned - peak, exact ? "plan" : "sum of the plans");
}

static void write_card(const lev_timeline *t, const char *name, size_t peak, size_t planned, const char *phase,
                       FILE *out) {
  char text[24];
  fprintf(out, "<div class=\"card\"><span class=\"name\">%s peak</span>", name);
  fprintf(out, "<b data-peak=\"%s\" data-bytes=\"%zu\">%s</b>", name, peak, lev_bytes_text(peak, text));
  write_grouped(peak, out);
  fputs(" bytes<br>", out);
  if (phase) {
    fputs("in ", out);
    lev_html_text(out, phase);
    fputs("<br>", out);
  }
  write_verdict(t, peak, planned, phase != NULL, out);
  fputs("</div>\n", out);
}

static void write_cards(const lev_timeline *t, FILE *out) {
  size_t planned = 0;
  fputs("<div class=\"cards\">\n", out);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    char phase[TEXT];
    planned += t->classes[c].planned;
    lev_timeline_phase_text(lev_timeline_peak_phase(t, (lev_mem)c), phase);
    write_card(t, lev_mem_name((lev_mem)c), t->classes[c].peak, t->classes[c].planned, phase, out);
  }
  write_card(t, "total", t->total_peak, planned, NULL, out);
  fputs("</div>\n", out);
  for (int c = 0; c < LEV_MEM_CLASSES && t->has_reported; ++c)
    if (t->classes[c].reported != t->classes[c].peak)
      fprintf(out, "<p>The whole run peaked at %zu %s bytes; the recorded part shows %zu.</p>\n",
              t->classes[c].reported, lev_mem_name((lev_mem)c), t->classes[c].peak);
  if (lev_timeline_whole(t) != LEV_OK) {
    const char *text = strstr(lev_detail(), ": ");
    fputs("<p><b>Incomplete:</b> ", out);
    lev_html_text(out, text ? text + 2 : lev_detail());
    fputs("</p>\n", out);
  }
  if (t->unmatched > 0)
    fprintf(out, "<p>%lld frees of bytes whose beginning was not recorded.</p>\n", (long long)t->unmatched);
}

static int by_bytes_at_peak(const void *a, const void *b) {
  const lev_timeline_tag *x = *(const lev_timeline_tag *const *)a, *y = *(const lev_timeline_tag *const *)b;
  if (x->at_peak != y->at_peak) return x->at_peak < y->at_peak ? 1 : -1;
  if (x->peak != y->peak) return x->peak < y->peak ? 1 : -1;
  return strcmp(x->name, y->name);
}

/* Tags of a class, the largest at its peak first; their number. */
static int sort_tags(const lev_timeline *t, lev_mem cls, const lev_timeline_tag **order) {
  int n = 0;
  for (int k = 0; k < t->n_tags; ++k)
    if (t->tags[k].cls == cls && t->tags[k].peak > 0) order[n++] = &t->tags[k];
  qsort(order, (size_t)n, sizeof *order, by_bytes_at_peak);
  return n;
}

static void write_chip(const lev_timeline *t, const lev_timeline_tag *tag, FILE *out) {
  char colour[LEV_SVG_TEXT];
  fprintf(out, "<i class=\"chip\" style=\"background:%s\"></i>", lev_tag_colour(t, (int)(tag - t->tags), colour));
  lev_html_text(out, tag->name);
}

static void write_legend(const lev_timeline *t, int cls, const lev_timeline_tag **order, FILE *out) {
  char colour[LEV_SVG_TEXT];
  int n = cls < LEV_MEM_CLASSES ? sort_tags(t, (lev_mem)cls, order) : 0;
  fputs("<div class=\"legend\">", out);
  for (int i = 0; i < n; ++i) {
    fputs("<span>", out);
    write_chip(t, order[i], out);
    fputs("</span>", out);
  }
  for (int c = 0; c < LEV_MEM_CLASSES && cls == LEV_MEM_CLASSES; ++c)
    if (t->classes[c].peak > 0)
      fprintf(out, "<span><i class=\"chip\" style=\"background:%s\"></i>%s</span>",
              lev_class_colour((lev_mem)c, colour), lev_mem_name((lev_mem)c));
  fputs("</div>\n", out);
}

/* Where what is always there hides the rest, the rest gets a chart of its own. */
static bool needs_work_chart(const lev_timeline *t) {
  size_t steady = 0, moving = 0;
  for (int k = 0; k < t->n_tags; ++k) {
    if (t->tags[k].cls != LEV_MEM_DEVICE) continue;
    *(lev_tag_steady(&t->tags[k]) ? &steady : &moving) += t->tags[k].at_peak;
  }
  return moving > 0 && steady > moving;
}

static lev_status write_charts(const lev_timeline *t, const lev_samples *samples, const lev_timeline_tag **order,
                               FILE *out) {
  static const double heights[LEV_MEM_CLASSES + 1] = {340, 170, 120, 150};
  for (int c = 0; c <= LEV_MEM_CLASSES; ++c) {
    size_t peak = c < LEV_MEM_CLASSES ? t->classes[c].peak : t->total_peak;
    if (peak == 0) continue;
    if (c < LEV_MEM_CLASSES)
      fprintf(out, "<h2>%s bytes by tag</h2>\n", lev_mem_name((lev_mem)c));
    else
      fputs("<h2>all bytes by class</h2>\n", out);
    lev_chart chart = {.timeline = t, .samples = samples, .cls = c, .height = heights[c]};
    LEV_TRY(lev_chart_write(&chart, out));
    write_legend(t, c, order, out);
    if (c != LEV_MEM_DEVICE || !needs_work_chart(t)) continue;
    fputs("<h2>device bytes that come and go</h2>\n", out);
    chart.work = true, chart.height = 260;
    LEV_TRY(lev_chart_write(&chart, out));
    fputs("<p>Without what is live nearly all the time; the line is what the plan leaves for the rest.</p>\n", out);
  }
  return LEV_OK;
}

static void write_live_set(const lev_timeline *t, lev_mem cls, const lev_timeline_tag **order, FILE *out) {
  int n = sort_tags(t, cls, order);
  size_t peak = t->classes[cls].peak;
  if (n == 0) return;
  fprintf(out, "<table data-live=\"%s\"><caption>%s</caption><tr><th>tag</th><th>bytes at the peak</th><th>GiB</th>",
          lev_mem_name(cls), lev_mem_name(cls));
  fprintf(out, "<th>share</th><th>own peak</th>%s</tr>\n", t->has_plan ? "<th>planned</th>" : "");
  for (int i = 0; i < n; ++i) {
    fputs("<tr><td>", out);
    write_chip(t, order[i], out);
    fputs("</td>", out);
    write_cell(order[i]->at_peak, out);
    fprintf(out, "<td>%.6f</td><td>%.1f %%</td>", (double)order[i]->at_peak / GIB,
            100.0 * (double)order[i]->at_peak / (double)peak);
    write_cell(order[i]->peak, out);
    if (t->has_plan) write_cell(order[i]->planned, out);
    fputs("</tr>\n", out);
  }
  fputs("<tr class=\"sum\"><td>together</td>", out);
  write_cell(peak, out);
  fprintf(out, "<td>%.6f</td><td>100 %%</td><td></td>", (double)peak / GIB);
  if (t->has_plan) write_cell(t->classes[cls].planned, out);
  fputs("</tr></table>\n", out);
}

/* Sums over the phases of one name, in order of their first. */
static void write_phase_rows(const lev_timeline *t, FILE *out) {
  char text[24];
  for (int64_t i = 0; i < t->n_phases; ++i) {
    lev_timeline_phase sum = {.index = 0};
    bool seen = false;
    for (int64_t k = 0; k < i && !seen; ++k) seen = strcmp(t->phases[k].name, t->phases[i].name) == 0;
    if (seen) continue;
    for (int64_t k = i; k < t->n_phases; ++k) {
      const lev_timeline_phase *p = &t->phases[k];
      if (strcmp(p->name, t->phases[i].name) != 0) continue;
      sum.index++;
      sum.copied += p->copied, sum.sent += p->sent;
      sum.copies += p->copies, sum.collectives += p->collectives;
      for (int c = 0; c < LEV_MEM_CLASSES; ++c)
        if (p->peak[c] > sum.peak[c]) sum.peak[c] = p->peak[c];
    }
    fputs("<tr><td>", out);
    lev_html_text(out, t->phases[i].name);
    fprintf(out, "</td><td>%lld</td>", (long long)sum.index);
    for (int c = 0; c < LEV_MEM_CLASSES; ++c) fprintf(out, "<td>%s</td>", lev_bytes_text(sum.peak[c], text));
    fprintf(out, "<td>%.1f %%</td>",
            100.0 * (double)sum.peak[LEV_MEM_DEVICE] / (double)(t->classes[LEV_MEM_DEVICE].peak + !t->classes[0].peak));
    fprintf(out, "<td>%lld</td><td>%s</td>", (long long)sum.copies, lev_bytes_text(sum.copied, text));
    fprintf(out, "<td>%lld</td><td>%s</td></tr>\n", (long long)sum.collectives, lev_bytes_text(sum.sent, text));
  }
}

/* The JSON text; "</" and "<!" would end or upset a script element. */
static lev_status write_json(const lev_timeline *const *ranks, int n, FILE *out) {
  fputs("<script type=\"application/json\" id=\"levee-trace\">{\"ranks\":[", out);
  for (int i = 0; i < n; ++i) {
    json_t *root = lev_trace_json(ranks[i], PAGE_BUCKETS);
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (!text) return lev_fail(LEV_ERR_NOMEM, "no memory for the numbers of the trace page");
    if (i > 0) fputc(',', out);
    for (const char *c = text; *c; ++c) *c == '<' ? fputs("\\u003c", out) : fputc(*c, out);
    free(text);
  }
  fputs("]}</script>\n", out);
  return LEV_OK;
}

/* Steps that the record holds to their end, from the step numbers of optimizer phases; `open`: it ends inside one. */
static int64_t count_steps(const lev_timeline *t, bool *open) {
  int64_t steps = 0, last = -1;
  *open = false;
  for (int64_t i = 0; i < t->n_phases; ++i) {
    const lev_timeline_phase *p = &t->phases[i];
    bool optimizer = strncmp(p->name, "optimizer", 9) == 0;
    if (optimizer && p->index != last) ++steps, last = p->index;
    if (optimizer || strncmp(p->name, "evaluation", 10) == 0)
      *open = false;
    else if (strncmp(p->name, "forward", 7) == 0 || strncmp(p->name, "backward", 8) == 0)
      *open = true;
  }
  return steps;
}

static void write_recorded(const lev_timeline *t, FILE *out) {
  bool open;
  int64_t steps = count_steps(t, &open), events = t->n_changes + t->n_phases - 1;
  for (int64_t i = 0; i < t->n_phases; ++i) events += t->phases[i].copies + t->phases[i].collectives;
  fprintf(out,
          "<p>%lld optimizer step%s recorded: %lld events, of them %lld allocations and frees, in %lld phases, %.3f s",
          (long long)steps, steps == 1 ? "" : "s", (long long)events, (long long)t->n_changes, (long long)t->n_phases,
          (double)(t->changes[t->n_changes - 1].time_ns - t->changes[0].time_ns) / 1e9);
  fputs(open ? ". Recording stopped inside a step.</p>\n" : "</p>\n", out);
}

static lev_status write_rank(const lev_timeline *t, bool open, const lev_samples *samples,
                             const lev_timeline_tag **order, FILE *out) {
  char text[24];
  fprintf(out, "<details class=\"rank\" data-rank=\"%d\"%s><summary>rank %d", t->rank, open ? " open" : "", t->rank);
  if (t->ranks > 0) fprintf(out, " of %d", t->ranks);
  fprintf(out, ": %s on the device at its peak</summary>\n", lev_bytes_text(t->classes[LEV_MEM_DEVICE].peak, text));
  write_recorded(t, out);
  write_cards(t, out);
  LEV_TRY(write_charts(t, samples, order, out));
  fputs(
      "<p>Each recorded allocation or free is one step to the right; the strips on top name the phase and its layer or "
      "step; the dashed line is the plan made before the run.</p>\n<h2>Live set at the peak of each class</h2>\n<div "
      "class=\"tables\">\n",
      out);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) write_live_set(t, (lev_mem)c, order, out);
  fputs("</div>\n<h2>Phases</h2>\n<table class=\"phases\"><tr><th>phase</th><th>times</th><th>device peak</th>"
        "<th>pinned peak</th><th>host peak</th><th>of the device peak</th><th>copies</th><th>copied</th>"
        "<th>collectives</th><th>sent</th></tr>\n",
        out);
  write_phase_rows(t, out);
  fputs("</table>\n</details>\n", out);
  return LEV_OK;
}

static lev_status sample_and_write_rank(const lev_timeline *t, bool open, FILE *out) {
  lev_samples samples;
  const lev_timeline_tag **order = lev_calloc(LEV_HEAP_REPORT, (size_t)t->n_tags, sizeof *order);
  if (!order) return LEV_ERR_NOMEM;
  lev_status st = lev_samples_take(t, PAGE_BUCKETS, &samples);
  if (st == LEV_OK) st = write_rank(t, open, &samples, order, out);
  lev_samples_free(&samples);
  lev_free(order);
  return st;
}

static lev_status write_page(const lev_timeline *const *ranks, int n, const char *title, FILE *out) {
  fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
        "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>Memory of ",
        out);
  lev_html_text(out, title);
  fprintf(out, "</title><style>\n%s</style></head><body>\n<h1>Memory of ", lev_trace_style);
  lev_html_text(out, title);
  fputs("</h1>\n", out);
  for (int i = 0; i < n; ++i) LEV_TRY(sample_and_write_rank(ranks[i], i == 0, out));
  fputs("<div id=\"tip\"></div>\n", out);
  LEV_TRY(write_json(ranks, n, out));
  fprintf(out, "<script>\n%s</script>\n</body></html>\n", lev_trace_script);
  return LEV_OK;
}

lev_status lev_trace_page(const lev_timeline *const *ranks, int n, const char *title, const char *path) {
  char temporary[1024];
  if (n < 1) return lev_fail(LEV_ERR_ARG, "a trace page of %d ranks", n);
  snprintf(temporary, sizeof temporary, "%.1000s.tmp", path);
  FILE *file = fopen(temporary, "w");
  if (!file) return lev_fail(LEV_ERR_IO, "cannot write %s: %s", temporary, strerror(errno));
  lev_status st = write_page(ranks, n, title, file);
  bool failed = ferror(file) != 0;
  if (fclose(file) != 0) failed = true;
  if (st == LEV_OK && (failed || rename(temporary, path) != 0))
    st = lev_fail(LEV_ERR_IO, "cannot write %s: %s", path, strerror(errno));
  if (st != LEV_OK) remove(temporary);
  return st;
}
