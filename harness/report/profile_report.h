/* SPDX-License-Identifier: Apache-2.0 */
/* What a profiled step spent its time on: a timeline for Perfetto (Chrome trace JSON), totals by phase and operation,
 * and how much of the copies to and from the host ran while the device computed. */
#ifndef LEV_REPORT_PROFILE_REPORT_H
#define LEV_REPORT_PROFILE_REPORT_H

#include <stdio.h>

#include "common/profile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Times in seconds. Busy is the time in which at least one span of a kind is open: kernels, copies over the host link.
 * Not computing: collectives, whose spans hold the wait for other ranks, and work of host threads
 * (oadamw.host_update). */
typedef struct lev_overlap {
  double length;  /* from the first span's begin to the last one's end */
  double compute; /* kernels busy */
  double copy;    /* host copies busy */
  double inside;  /* both */
  double share;   /* inside / copy; 1 without copies */
  uint64_t host_bytes;
} lev_overlap;

/* `spans` in any order, times filled in. Errors: LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_overlap_of(const lev_span *spans, int64_t n, lev_overlap *out);

/* One row of the totals: operations of one name in phases of one name. */
typedef struct lev_profile_row {
  const char *phase, *name;
  lev_span_kind kind;
  int64_t count;
  double seconds; /* sum over spans; those of several streams may run at once */
  uint64_t bytes;
} lev_profile_row;

/* Rows by falling time; the caller frees *out with lev_free. Errors: LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_profile_rows(const lev_profile *profile, lev_profile_row **out, int *n);

/* Chrome trace: one row per stream and one for the phases of the compute stream (the stream named "compute"); the
 * overlap and the totals stand under "levee". `rank` is the process number. Errors: LEV_ERR_IO, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_profile_write(const lev_profile *profile, int rank, const char *path);

/* The overlap, the time of each phase, and the first `rows` rows of the totals. Errors: LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_profile_print(const lev_profile *profile, int rows, FILE *out);

#ifdef __cplusplus
}
#endif
#endif
