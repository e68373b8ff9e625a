/* SPDX-License-Identifier: Apache-2.0 */
/* Moments of a timeline that a page can carry. */
#ifndef LEV_REPORT_TRACE_SAMPLES_H
#define LEV_REPORT_TRACE_SAMPLES_H

#include "harness/report/timeline.h"

typedef struct lev_samples {
  int64_t n;
  int64_t *change; /* [n] ascending: the state after this change */
  size_t *live;    /* [n, n_tags] */
} lev_samples;

/* Every change of a timeline of at most 2 x buckets; else, per stretch of changes, the moments at which each class and
 * their sum were highest (the first such moment) and lowest. So every peak of the timeline is among them, to the byte.
 * Errors: LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_samples_take(const lev_timeline *timeline, int64_t buckets, lev_samples *out);
void lev_samples_free(lev_samples *samples);

#endif
