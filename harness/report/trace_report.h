/* SPDX-License-Identifier: Apache-2.0 */
/* What `levee trace` shows of a timeline: tables for the terminal, one self-contained HTML page, JSON. */
#ifndef LEV_REPORT_TRACE_REPORT_H
#define LEV_REPORT_TRACE_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "harness/report/timeline.h"

/* Timeline of bytes by tag group (the part of a tag before its dot), one row per phase: the moment of its device peak.
 * `each` gives every occurrence of a phase a row of its own, in order; otherwise phases of one name share a row (the
 * largest). Then the live set at the device peak, and per class peak and plan. Errors: LEV_ERR_NOMEM, LEV_ERR_IO. */
LEV_MUST_CHECK lev_status lev_trace_table(const lev_timeline *timeline, bool each, FILE *out);

/* The numbers behind the page: {"rank", "ranks", "device": {"peak_bytes", "planned_bytes", "reported_peak_bytes",
 * "peak_phase", "peak_change", "tags": {tag: {"peak_bytes", "at_peak_bytes", "planned_bytes"}}}, ..., "total": {...},
 * "phases": [...], "samples": {...}}. planned_bytes and reported_peak_bytes (memory.json) are left out where unknown.
 * "samples" are moments of the timeline: every change of a short one; of a long one the highest and the lowest moment
 * of each of `buckets` stretches and class, so the exact peak is always among them. NULL if memory ran out; caller:
 * json_decref. */
json_t *lev_trace_json(const lev_timeline *timeline, int64_t buckets);

/* One page with a section per rank, the first one open: inline SVG (stacked areas by tag over the recorded changes,
 * bound lines, phases), live set at the peaks, phases; {"ranks": [the JSON above, ...]} in <script
 * type="application/json" id="levee-trace">. Needs no network. `title` names the run. Written by a temporary file and a
 * rename. Errors: LEV_ERR_ARG (no rank), LEV_ERR_IO, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_trace_page(const lev_timeline *const *ranks, int n, const char *title, const char *path);

#endif
