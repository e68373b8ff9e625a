/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/report/memory_report.h"
#include "harness/report/trace_report.h"

enum { COLUMNS = 7, MOST_GROUPS = 256, LIVE_SET_ROWS = 16, TEXT = LEV_TIMELINE_NAME + 24 };

/* Tags of one prefix. */
typedef struct group {
  char name[LEV_TIMELINE_NAME];
  size_t peak; /* highest device bytes in any row */
  int index;
} group;

typedef struct row {
  char label[TEXT];
  int64_t times;
  int64_t change; /* of the device peak */
  int order;
  size_t peak[LEV_MEM_CLASSES];
  size_t *groups; /* device bytes by group at that moment */
} row;

typedef struct table {
  const lev_timeline *t;
  row *rows;
  int n_rows;
  group groups[MOST_GROUPS];
  int n_groups;
  int *group_of; /* [n_tags], -1 off the device */
  size_t *cells; /* rows x groups */
} table;

/* ---- rows ---- */

static row *row_named(table *x, const char *label) {
  for (int i = 0; i < x->n_rows; ++i)
    if (strcmp(x->rows[i].label, label) == 0) return &x->rows[i];
  return NULL;
}

static void add_phase(table *x, const lev_timeline_phase *p, bool each) {
  char label[TEXT];
  if (each)
    lev_timeline_phase_text(p, label);
  else
    snprintf(label, sizeof label, "%s", p->name);
  row *r = each ? NULL : row_named(x, label);
  if (!r) {
    r = &x->rows[x->n_rows];
    *r = (row){.change = p->peak_change[LEV_MEM_DEVICE], .order = x->n_rows++};
    memcpy(r->label, label, sizeof label);
  } else if (p->peak[LEV_MEM_DEVICE] > r->peak[LEV_MEM_DEVICE]) {
    r->change = p->peak_change[LEV_MEM_DEVICE];
  }
  r->times++;
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) r->peak[c] = p->peak[c] > r->peak[c] ? p->peak[c] : r->peak[c];
}

static void find_groups(table *x) {
  for (int k = 0; k < x->t->n_tags; ++k) {
    const char *name = x->t->tags[k].name;
    int length = (int)strcspn(name, "."), g = 0;
    x->group_of[k] = -1;
    if (x->t->tags[k].cls != LEV_MEM_DEVICE) continue;
    while (g < x->n_groups &&
           !(strncmp(x->groups[g].name, name, (size_t)length) == 0 && x->groups[g].name[length] == '\0'))
      ++g;
    if (g == MOST_GROUPS) continue; /* counted in no column, but in the sums */
    if (g == x->n_groups) {
      snprintf(x->groups[g].name, sizeof x->groups[g].name, "%.*s", length, name);
      x->groups[g].index = g;
      ++x->n_groups;
    }
    x->group_of[k] = g;
  }
}

static int by_change(const void *a, const void *b) {
  const row *x = a, *y = b;
  return x->change < y->change ? -1 : x->change > y->change;
}
static int by_order(const void *a, const void *b) {
  return ((const row *)a)->order - ((const row *)b)->order;
}
static int by_group_peak(const void *a, const void *b) {
  const group *x = a, *y = b;
  return x->peak < y->peak ? 1 : x->peak > y->peak ? -1 : x->index - y->index;
}

/* Replays the timeline once and keeps the groups' bytes at each row's moment. */
static void fill_cells(table *x, size_t *live) {
  qsort(x->rows, (size_t)x->n_rows, sizeof *x->rows, by_change);
  int next = 0;
  while (next < x->n_rows && x->rows[next].change < 0) ++next;
  for (int64_t i = 0; i < x->t->n_changes && next < x->n_rows; ++i) {
    lev_timeline_apply(x->t, i, live);
    for (; next < x->n_rows && x->rows[next].change == i; ++next)
      for (int k = 0; k < x->t->n_tags; ++k)
        if (x->group_of[k] >= 0) x->rows[next].groups[x->group_of[k]] += live[k];
  }
  qsort(x->rows, (size_t)x->n_rows, sizeof *x->rows, by_order);
  for (int g = 0; g < x->n_groups; ++g)
    for (int r = 0; r < x->n_rows; ++r)
      if (x->rows[r].groups[g] > x->groups[g].peak) x->groups[g].peak = x->rows[r].groups[g];
  qsort(x->groups, (size_t)x->n_groups, sizeof *x->groups, by_group_peak);
}

/* ---- printing ---- */

static void print_rows(const table *x, FILE *out) {
  char text[24];
  size_t planned = x->t->classes[LEV_MEM_DEVICE].planned;
  int shown = x->n_groups < COLUMNS ? x->n_groups : COLUMNS;
  bool others = x->n_groups > shown;
  fprintf(out, "%-22s %5s %11s %8s |", "phase", "times", "device", x->t->has_plan ? "of plan" : "of peak");
  for (int g = 0; g < shown; ++g) fprintf(out, " %10.10s", x->groups[g].name);
  fprintf(out, "%s | %10s %10s\n", others ? "      other" : "", "pinned", "host");
  for (int r = 0; r < x->n_rows; ++r) {
    const row *w = &x->rows[r];
    size_t whole = x->t->has_plan ? planned : x->t->classes[LEV_MEM_DEVICE].peak, rest = w->peak[LEV_MEM_DEVICE];
    fprintf(out, "%-22.22s %5lld %11s", w->label, (long long)w->times, lev_bytes_text(w->peak[LEV_MEM_DEVICE], text));
    fprintf(out, " %6.1f %% |", whole > 0 ? 100.0 * (double)w->peak[LEV_MEM_DEVICE] / (double)whole : 0.0);
    for (int g = 0; g < shown; ++g) {
      size_t bytes = w->groups[x->groups[g].index];
      fprintf(out, " %10s", bytes > 0 ? lev_bytes_text(bytes, text) : "-");
      rest -= bytes < rest ? bytes : rest;
    }
    if (others) fprintf(out, " %10s", rest > 0 ? lev_bytes_text(rest, text) : "-");
    fprintf(out, " | %10s", lev_bytes_text(w->peak[LEV_MEM_PINNED], text));
    fprintf(out, " %10s\n", lev_bytes_text(w->peak[LEV_MEM_HOST], text));
  }
}

static int by_bytes_at_peak(const void *a, const void *b) {
  const lev_timeline_tag *x = *(const lev_timeline_tag *const *)a, *y = *(const lev_timeline_tag *const *)b;
  return x->at_peak < y->at_peak ? 1 : x->at_peak > y->at_peak ? -1 : strcmp(x->name, y->name);
}

/* What was live when the device class peaked, largest first. */
static lev_status print_live_set(const lev_timeline *t, FILE *out) {
  const lev_timeline_tag **order = lev_calloc(LEV_HEAP_REPORT, (size_t)t->n_tags, sizeof *order);
  char text[24], phase[TEXT];
  if (!order) return LEV_ERR_NOMEM;
  int n = 0;
  for (int k = 0; k < t->n_tags; ++k)
    if (t->tags[k].cls == LEV_MEM_DEVICE && t->tags[k].at_peak > 0) order[n++] = &t->tags[k];
  qsort(order, (size_t)n, sizeof *order, by_bytes_at_peak);
  fprintf(out, "\nlive on the device at its peak (%s):\n",
          lev_timeline_phase_text(lev_timeline_peak_phase(t, LEV_MEM_DEVICE), phase));
  size_t rest = 0;
  for (int i = 0; i < n; ++i) {
    if (i >= LIVE_SET_ROWS) {
      rest += order[i]->at_peak;
      continue;
    }
    fprintf(out, "  %-22s %11s %16zu %6.1f %%\n", order[i]->name, lev_bytes_text(order[i]->at_peak, text),
            order[i]->at_peak, 100.0 * (double)order[i]->at_peak / (double)t->classes[LEV_MEM_DEVICE].peak);
  }
  if (rest > 0)
    fprintf(out, "  %-22s %11s %16zu %6.1f %%\n", "smaller ones", lev_bytes_text(rest, text), rest,
            100.0 * (double)rest / (double)t->classes[LEV_MEM_DEVICE].peak);
  lev_free(order);
  return LEV_OK;
}

static void print_classes(const lev_timeline *t, FILE *out) {
  char text[24], phase[TEXT];
  fputc('\n', out);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    const lev_timeline_class *k = &t->classes[c];
    if (k->peak == 0 && k->planned == 0) continue;
    fprintf(out, "%-7s peak %11s %16zu bytes in %s", lev_mem_name((lev_mem)c), lev_bytes_text(k->peak, text), k->peak,
            lev_timeline_phase_text(lev_timeline_peak_phase(t, (lev_mem)c), phase));
    if (t->has_plan) fprintf(out, "; planned %zu%s", k->planned, k->planned == k->peak ? ", equal" : ", NOT EQUAL");
    if (t->has_reported && k->reported != k->peak) fprintf(out, "; peak of the whole run %zu", k->reported);
    fputc('\n', out);
  }
  if (t->unmatched > 0) fprintf(out, "%lld frees of bytes whose beginning was not recorded\n", (long long)t->unmatched);
}

lev_status lev_trace_table(const lev_timeline *t, bool each, FILE *out) {
  table x = {.t = t};
  lev_status st = LEV_ERR_NOMEM;
  size_t *live = lev_calloc(LEV_HEAP_REPORT, (size_t)t->n_tags, sizeof *live);
  x.rows = lev_calloc(LEV_HEAP_REPORT, (size_t)t->n_phases, sizeof *x.rows);
  x.group_of = lev_calloc(LEV_HEAP_REPORT, (size_t)t->n_tags, sizeof *x.group_of);
  if (live && x.rows && x.group_of) {
    for (int64_t i = 0; i < t->n_phases; ++i) add_phase(&x, &t->phases[i], each);
    find_groups(&x);
    x.cells = lev_calloc(LEV_HEAP_REPORT, (size_t)x.n_rows, (size_t)x.n_groups * sizeof *x.cells);
  }
  if (x.cells) {
    for (int r = 0; r < x.n_rows; ++r) x.rows[r].groups = x.cells + (size_t)r * (size_t)x.n_groups;
    fill_cells(&x, live);
    if (t->ranks > 0)
      fprintf(out, "rank %d of %d: %lld changes in %lld phases\n", t->rank, t->ranks, (long long)t->n_changes,
              (long long)t->n_phases);
    else
      fprintf(out, "rank %d (no memory.json): %lld changes in %lld phases\n", t->rank, (long long)t->n_changes,
              (long long)t->n_phases);
    print_rows(&x, out);
    st = print_live_set(t, out);
    print_classes(t, out);
    if (st == LEV_OK && ferror(out)) st = lev_fail(LEV_ERR_IO, "cannot write the table");
  }
  lev_free(live);
  lev_free(x.rows);
  lev_free(x.group_of);
  lev_free(x.cells);
  return st;
}
