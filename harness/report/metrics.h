/* SPDX-License-Identifier: Apache-2.0 */
/* The record of a run, RUN/metrics.jsonl: one JSON object per line, written with one write() each and never buffered,
 * so a killed run loses no finished step and leaves no half line behind another. Floats carry 17 digits; a value that
 * is not finite is null. Also the console line made from the same numbers.
 *
 *   {"step":3,"loss":...,"grad_norm":...,"lr":...,"tokens_per_second":...,"step_seconds":...,...}
 *   {"step":20,"val_loss":...,...}          validation; has no "loss"
 *   {"resumed_at_step":11}                  the run was started again; the last line for a step counts */
#ifndef LEV_REPORT_METRICS_H
#define LEV_REPORT_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/status.h"

typedef struct lev_metrics lev_metrics;

/* Highest device bytes of one module so far and what the plan allows, over all ranks. */
typedef struct lev_metrics_module {
  const char *name; /* "llep", "rdtp", "sco", "oadamw", "muon" */
  size_t peak_bytes, planned_bytes;
} lev_metrics_module;

/* One finished optimizer step. Values that were not computed are NaN (reals) or negative (integers): they are left out.
 */
typedef struct lev_metrics_step {
  int64_t step, steps; /* this one and how many there will be; `steps` is for the console */
  double loss;         /* mean NLL per valid token, nats */
  double grad_norm;    /* before clipping */
  double lr;
  double tokens_per_second; /* all ranks */
  double step_seconds;
  double tflops;                      /* model TFLOP/s per rank */
  double mfu;                         /* percent of the device's peak; NaN = unknown */
  double balance_loss, z_loss;        /* router */
  double max_vio;                     /* largest expert load / mean - 1, over layers */
  double rows_max_mean;               /* largest rows received by a rank / mean, over layers */
  int64_t chunks;                     /* most chunks K of any layer */
  int64_t tokens;                     /* valid tokens of the step */
  bool skipped;                       /* non-finite gradients: nothing was changed */
  size_t device_peak, device_planned; /* bytes of the largest rank */
  size_t host_peak;                   /* pinned + named host bytes of the largest rank */
  const lev_metrics_module *modules;
  int n_modules;
  double eta_seconds; /* NaN = unknown; console only */
} lev_metrics_step;

typedef struct lev_metrics_validation {
  int64_t step;
  double val_loss;      /* nats per byte where the data tells bytes, else per token */
  double nll_per_token; /* nats */
  bool per_byte;
  int64_t tokens;
  double seconds;
} lev_metrics_validation;

/* Opens FOLDER/metrics.jsonl, creating FOLDER (with parents). `resume` keeps what is there, cuts off an unfinished last
 * line, and appends; otherwise the file starts empty. Errors: LEV_ERR_IO (path and reason), LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_metrics_open(const char *folder, bool resume, lev_metrics **out);
void lev_metrics_close(lev_metrics *metrics); /* NULL is fine */
/* Append one line. Errors: LEV_ERR_IO; what was written before stays whole. */
LEV_MUST_CHECK lev_status lev_metrics_write_step(lev_metrics *metrics, const lev_metrics_step *step);
LEV_MUST_CHECK lev_status lev_metrics_write_validation(lev_metrics *metrics, const lev_metrics_validation *validation);
LEV_MUST_CHECK lev_status lev_metrics_write_resumed(lev_metrics *metrics, int64_t first_step);

/* Creates a folder and its parents. Errors: LEV_ERR_IO. */
LEV_MUST_CHECK lev_status lev_folder_create(const char *path);

/* ---- console ---- */

/* True for a terminal when NO_COLOR is not set. */
bool lev_console_colour(FILE *out);
/* One line without newline into `out` (at most `room` bytes): step, loss, grad_norm, memory GiB (%), tps, tflops, mfu,
 * then peak/planned per module and the time left. Memory percent is of the planned bytes. Returns `out`. */
char *lev_console_step(char *out, size_t room, const lev_metrics_step *step, bool colour);
char *lev_console_validation(char *out, size_t room, const lev_metrics_validation *validation, bool colour);
/* "1h02m", "3m05s", "42s" into at least 24 bytes; "?" where not finite. Returns `text`. */
char *lev_duration_text(double seconds, char *text);

#endif
