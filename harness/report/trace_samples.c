/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/report/trace_samples.h"

#include <stdlib.h>
#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"

enum { SUMS = LEV_MEM_CLASSES + 1 }; /* the classes and their total */

static void add_sums(const lev_timeline *t, const size_t *live, size_t sums[SUMS]) {
  memset(sums, 0, SUMS * sizeof *sums);
  for (int k = 0; k < t->n_tags; ++k) sums[t->tags[k].cls] += live[k], sums[LEV_MEM_CLASSES] += live[k];
}

static int by_value(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return x < y ? -1 : x > y;
}

/* Highest and lowest moment of every sum in [low, high), appended without order. */
static int64_t pick(const lev_timeline *t, int64_t low, int64_t high, size_t *live, int64_t *out) {
  int64_t top[SUMS] = {0}, bottom[SUMS] = {0};
  size_t most[SUMS] = {0}, least[SUMS] = {0}, sums[SUMS];
  for (int64_t i = low; i < high; ++i) {
    lev_timeline_apply(t, i, live);
    add_sums(t, live, sums);
    for (int s = 0; s < SUMS; ++s) {
      if (i == low || sums[s] > most[s]) most[s] = sums[s], top[s] = i;
      if (i == low || sums[s] < least[s]) least[s] = sums[s], bottom[s] = i;
    }
  }
  for (int s = 0; s < SUMS; ++s) out[2 * s] = top[s], out[2 * s + 1] = bottom[s];
  return 2 * SUMS;
}

static void fill_live(const lev_timeline *t, size_t *live, lev_samples *s) {
  int64_t next = 0;
  memset(live, 0, (size_t)t->n_tags * sizeof *live);
  for (int64_t i = 0; i < t->n_changes && next < s->n; ++i) {
    lev_timeline_apply(t, i, live);
    if (s->change[next] != i) continue;
    memcpy(s->live + next * t->n_tags, live, (size_t)t->n_tags * sizeof *live);
    ++next;
  }
}

lev_status lev_samples_take(const lev_timeline *t, int64_t buckets, lev_samples *out) {
  bool all = t->n_changes <= 2 * buckets;
  int64_t room = all ? t->n_changes : buckets * 2 * SUMS, n = 0;
  *out = (lev_samples){0};
  size_t *live = lev_calloc(LEV_HEAP_REPORT, (size_t)t->n_tags, sizeof *live);
  out->change = lev_calloc(LEV_HEAP_REPORT, (size_t)room, sizeof *out->change);
  if (live && out->change) {
    for (int64_t i = 0; all && i < t->n_changes; ++i) out->change[n++] = i;
    for (int64_t b = 0; !all && b < buckets; ++b)
      n += pick(t, lev_part_begin(t->n_changes, buckets, b), lev_part_begin(t->n_changes, buckets, b + 1), live,
                out->change + n);
    qsort(out->change, (size_t)n, sizeof *out->change, by_value);
    for (int64_t i = 0; i < n; ++i)
      if (out->n == 0 || out->change[out->n - 1] != out->change[i]) out->change[out->n++] = out->change[i];
    out->live = lev_calloc(LEV_HEAP_REPORT, (size_t)out->n, (size_t)t->n_tags * sizeof *out->live);
  }
  bool ok = live && out->change && out->live;
  if (ok) fill_live(t, live, out);
  lev_free(live);
  if (ok) return LEV_OK;
  lev_samples_free(out);
  return LEV_ERR_NOMEM;
}

void lev_samples_free(lev_samples *samples) {
  lev_free(samples->change);
  lev_free(samples->live);
  *samples = (lev_samples){0};
}
