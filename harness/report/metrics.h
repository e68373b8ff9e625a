/* SPDX-License-Identifier: Apache-2.0 */
/* metrics.jsonl: one object per line, flushed; the record of a run. A resumed run appends, and the last line for a step
 * counts; one that starts over keeps what an earlier one wrote under another name. */
#ifndef LEV_REPORT_METRICS_H
#define LEV_REPORT_METRICS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/status.h"

typedef struct lev_metrics {
  FILE *file;
  char path[1024];
  char aside[1040]; /* where the lines of an earlier run went; "" if there were none */
} lev_metrics;

/* `append` false starts an empty file: one that has lines is renamed to the first path.N (1, 2, ...) that is not there.
 * True keeps the lines, without an unfinished last one. Errors: LEV_ERR_IO. */
LEV_MUST_CHECK lev_status lev_metrics_open(lev_metrics *metrics, const char *path, int append);
/* Whether the file at `path` has a whole line that begins with the fields "step": step, then `name`. */
bool lev_metrics_has(const char *path, int64_t step, const char *name);
void lev_metrics_close(lev_metrics *metrics);

/* One line from `n` fields in order. Reals are written with 17 significant digits, non-finite ones as null. */
typedef struct lev_metric {
  const char *name;
  enum { LEV_METRIC_INT, LEV_METRIC_REAL, LEV_METRIC_TEXT } type;
  int64_t integer;
  double real;
  const char *text;
} lev_metric;
LEV_MUST_CHECK lev_status lev_metrics_line(lev_metrics *metrics, const lev_metric *fields, int n);

#define LEV_INT(key, value) ((lev_metric){.name = (key), .type = LEV_METRIC_INT, .integer = (value)})
#define LEV_REAL(key, value) ((lev_metric){.name = (key), .type = LEV_METRIC_REAL, .real = (value)})
#define LEV_TEXT(key, value) ((lev_metric){.name = (key), .type = LEV_METRIC_TEXT, .text = (value)})

#endif
