/* SPDX-License-Identifier: Apache-2.0 */
/* Benchmarks: what an area's cases are written with (bench_<area>.c), and how a set of them is run.
 *
 * A case is one function. It takes memory and fills it, runs the work once, compares what came out with a reference
 * (`bench_close` or `bench_check`; a wrong result ends the case), and hands the work to `bench_measure`, which refuses
 * work that was never checked. Memory taken with bench_alloc goes back when the case ends, whether well or not.
 *
 *     static lev_status add(bench *b, const void *arg) {
 *       struct add x = ...;
 *       LEV_TRY(bench_alloc(b, bytes, &x.a)); ...
 *       LEV_TRY(bench_random(b, LEV_BF16, x.a, n, 1.0));
 *       LEV_TRY(add_once(b, &x));
 *       LEV_TRY(bench_read(b, LEV_BF16, x.out, at, 64, got)); ...
 *       LEV_TRY(bench_close(b, "out", got, want, 64, 4e-3));
 *       return bench_measure(b, &(bench_work){.once = add_once, .ctx = &x, .bytes = 3.0 * bytes}, BENCH_GBPS);
 *     }
 *     static const bench_case cases[] = {{.name = "example.add", .run = add}};
 *     const bench_area bench_area_example = {.name = "example", .cases = cases, .n_cases = 1};
 *
 * and `&bench_area_example` in the list of areas.c. */
#ifndef LEV_HARNESS_BENCH_BENCH_H
#define LEV_HARNESS_BENCH_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/device.h"
#include "common/dtype.h"
#include "common/ledger.h"
#include "common/status.h"
#include "common/walker.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- for cases ---- */

typedef struct bench bench;

/* What `value` of a case is, and its unit in the record. Rates are of the median time. */
typedef enum bench_value {
  BENCH_MS,            /* "ms": median time */
  BENCH_GBPS,          /* "GB/s": least bytes over time */
  BENCH_COPY_FRACTION, /* "fraction": of the copy ceiling of this run, by least bytes */
  BENCH_TFLOPS,        /* "TFLOP/s" */
  BENCH_VALUES
} bench_value;

typedef struct bench_work {
  /* Enqueues the work once on bench_stream(b). What it leaves on that stream is what is timed, so work of other streams
   * is joined back first. Repetitions find the memory as the one before left it. */
  lev_status (*once)(bench *b, void *ctx);
  /* The same work by the plain schedule, timed after `once` by the same rule; NULL = there is none. */
  lev_status (*plain)(bench *b, void *ctx);
  void *ctx;
  double bytes; /* least bytes that the work must read and write: each input and output once; 0 = not counted */
  double flops; /* 0 = not counted */
  size_t held_bytes, plain_bytes; /* device bytes that either schedule plans for itself; 0 = none or not said */
  const char *kernels;            /* what was given the work, where that is found out as it runs; nullable */
} bench_work;

lev_device *bench_device(bench *b);
lev_stream *bench_stream(bench *b); /* with a workspace for bf16 products */
lev_backend bench_backend(const bench *b);
/* `full` on a GPU, `small` on the CPU: sizes. */
int64_t bench_size(const bench *b, int64_t full, int64_t small);

/* A slab in device memory (or `cls`), until the case ends. */
LEV_MUST_CHECK lev_status bench_alloc(bench *b, size_t bytes, void **out);
LEV_MUST_CHECK lev_status bench_alloc_in(bench *b, lev_mem cls, size_t bytes, void **out);
/* Zeroed host memory, until the case ends. */
LEV_MUST_CHECK lev_status bench_host(bench *b, size_t bytes, void **out);
LEV_MUST_CHECK lev_status bench_doubles(bench *b, int64_t n, double **out);
/* A slab per memory class of a module's phase, for <m>_plan_bind. */
LEV_MUST_CHECK lev_status bench_blocks(bench *b, const size_t bytes[LEV_MEM_CLASSES], lev_blocks *out);
/* Enqueues bell-shaped values of mean 0 and standard deviation `scale` (at most 3.5 of them away) of type f64, f32 or
 * bf16; each call of a case gives others, each run the same. */
LEV_MUST_CHECK lev_status bench_random(bench *b, lev_dtype dtype, void *to, int64_t count, double scale);
/* Host memory to or from device memory; both wait. bench_read widens elements [first, first + count). */
LEV_MUST_CHECK lev_status bench_put(bench *b, void *to, const void *host, size_t bytes);
LEV_MUST_CHECK lev_status bench_read(bench *b, lev_dtype dtype, const void *from, int64_t first, int64_t count,
                                     double *out);

/* Elements first, first + stride, ...: a copy each, so for few of them. */
LEV_MUST_CHECK lev_status bench_read_strided(bench *b, lev_dtype dtype, const void *from, int64_t first, int64_t stride,
                                             int64_t count, double *out);

/* ||got - want|| <= limit * ||want||, no NaN; where want is all zero, got must be. Errors: LEV_ERR_WRONG. */
LEV_MUST_CHECK lev_status bench_close(bench *b, const char *what, const double *got, const double *want, int64_t n,
                                      double limit);
/* A comparison of the case's own. Errors: LEV_ERR_WRONG with the text where `ok` is false. */
LEV_MUST_CHECK lev_status bench_check(bench *b, bool ok, const char *format, ...) LEV_PRINTF(3, 4);

/* Warms up and times the work: the median of 20 repetitions or as many as fit the time (at least 3), between timed
 * events on the stream; then records it under the case's name. Once per case. Errors: LEV_ERR_MISUSE (nothing was
 * checked, or measured before), those of the work. */
LEV_MUST_CHECK lev_status bench_measure(bench *b, const bench_work *work, bench_value value);
/* A further figure, under the case's name with `suffix` (".peak"); also the way of cases that time themselves. Errors:
 * LEV_ERR_MISUSE (nothing was checked). */
LEV_MUST_CHECK lev_status bench_add(bench *b, const char *suffix, double value, const char *unit);

/* Ceilings of this run: device copy, read and write counted, in bytes/s; matrix product of 8192^3 (CPU: 1024^3) in
 * FLOP/s (bf16; CPU: f32). */
double bench_copy_ceiling(const bench *b);
double bench_matmul_ceiling(const bench *b);

/* ---- areas ---- */

typedef struct bench_case {
  const char *name;  /* "area.what[.more]" */
  const char *about; /* the shape on a GPU, in words; nullable */
  lev_status (*run)(bench *b, const void *arg);
  const void *arg;
  bool gpu_only;
} bench_case;

/* What one measured case left. */
typedef struct bench_result {
  const bench_case *of;
  const char *unit;                      /* of value */
  double value, seconds, low, high;      /* median, 10th and 90th per cent */
  double plain_seconds;                  /* 0 = no plain schedule */
  double copy_fraction, matmul_fraction; /* of the ceilings; 0 = bytes or flops were not given */
  int repetitions, calls;                /* calls in a row of each repetition */
  bench_work work;
} bench_result;

typedef struct bench_area {
  const char *name;
  const bench_case *cases;
  int n_cases;
  /* A figure over all cases, e.g. their smallest fraction, added as "<area>.<summary>". Called when every case of the
   * area was measured; nullable. */
  const char *summary, *summary_unit;
  double (*summarize)(const bench_result *results, int n);
} bench_area;

/* ---- running ---- */

typedef struct bench_options {
  lev_backend backend;
  const char *const *select; /* areas, cases, or beginnings of case names up to a '.'; NULL or none = all */
  int n_select;
  double seconds;      /* per case; 0 = 60 */
  bool json;           /* `out` gets the records instead of the table */
  const char *results; /* file that the records are appended to; nullable */
  const char *command; /* as it stands in the records */
  bool list;           /* names only */
  const bench_area *const *areas;
  int n_areas;
  FILE *out;
} bench_options;

typedef struct bench_totals {
  int measured, refused, skipped; /* cases: timed; wrong or failed; not for this backend */
} bench_totals;

/* Runs the selected cases one after another. A case that is wrong or fails is named in `out` and the next one runs.
 * Errors: LEV_ERR_ARG (an unknown name; says the known ones), LEV_ERR_WRONG (a case was refused), LEV_ERR_MISUSE
 * (none was measured), LEV_ERR_IO, those of opening the device. */
LEV_MUST_CHECK lev_status bench_run(const bench_options *options, bench_totals *totals);

/* All areas of the command. */
extern const bench_area *const bench_areas[];
extern const int bench_n_areas;

/* Revision of the sources that this was built from; "-dirty" where they differed from it, "unknown" outside git. */
const char *bench_revision(void);

#ifdef __cplusplus
}
#endif
#endif
