/* SPDX-License-Identifier: Apache-2.0 */
/* What cases call: memory, values, comparisons, timing, ceilings. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "common/dims.h"
#include "common/gemm.h"
#include "common/hostmem.h"
#include "harness/bench/bench_impl.h"

lev_device *bench_device(bench *b) {
  return b->device;
}
lev_stream *bench_stream(bench *b) {
  return b->stream;
}
lev_backend bench_backend(const bench *b) {
  return b->options->backend;
}
int64_t bench_size(const bench *b, int64_t full, int64_t small) {
  return b->options->backend == LEV_BACKEND_CPU ? small : full;
}

/* ---- memory and values ---- */

lev_status bench_alloc_in(bench *b, lev_mem cls, size_t bytes, void **out) {
  if (b->n_slabs == BENCH_SLABS) return lev_fail(LEV_ERR_CAPACITY, "a case takes at most %d slabs", BENCH_SLABS);
  LEV_TRY(lev_device_alloc(b->device, cls, bytes, out));
  b->slabs[b->n_slabs++] = *out;
  return LEV_OK;
}

lev_status bench_alloc(bench *b, size_t bytes, void **out) {
  return bench_alloc_in(b, LEV_MEM_DEVICE, bytes, out);
}

lev_status bench_host(bench *b, size_t bytes, void **out) {
  return bench_alloc_in(b, LEV_MEM_HOST, bytes, out);
}

lev_status bench_doubles(bench *b, int64_t n, double **out) {
  void *memory = NULL;
  lev_status st = bench_host(b, (size_t)n * sizeof(double), &memory);
  *out = memory;
  return st;
}

lev_status bench_blocks(bench *b, const size_t bytes[LEV_MEM_CLASSES], lev_blocks *out) {
  *out = (lev_blocks){0};
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    if (bytes[c] == 0) continue;
    LEV_TRY(bench_alloc_in(b, (lev_mem)c, bytes[c], &out->base[c]));
    out->bytes[c] = bytes[c];
  }
  return LEV_OK;
}

void bench_release(bench *b) {
  while (b->n_slabs > 0) lev_device_free(b->device, b->slabs[--b->n_slabs]);
}

static void random_cpu(const void *args) {
  const bench_random_args *a = args;
  for (int64_t i = 0; i < a->count; ++i) {
    double x = bench_random_value(a->tensor, (uint64_t)i, a->scale);
    if (a->dtype == LEV_F32)
      ((float *)a->to)[i] = (float)x;
    else if (a->dtype == LEV_BF16)
      ((lev_bf16 *)a->to)[i] = lev_bf16_from_f32((float)x);
    else
      ((double *)a->to)[i] = x;
  }
}
const lev_kernel bench_random_kernel = {.name = "bench.random", .cpu = random_cpu, .cuda = LEV_CUDA(bench_random_cuda)};

lev_status bench_random(bench *b, lev_dtype dtype, void *to, int64_t count, double scale) {
  if (dtype != LEV_F64 && dtype != LEV_F32 && dtype != LEV_BF16)
    return lev_fail(LEV_ERR_ARG, "random values of type %s", lev_dtype_name(dtype));
  bench_random_args args = {dtype, to, count, scale, ++b->tensors};
  return count > 0 ? LEV_LAUNCH(b->stream, &bench_random_kernel, args) : LEV_OK;
}

lev_status bench_put(bench *b, void *to, const void *host, size_t bytes) {
  LEV_TRY(lev_copy(b->stream, to, host, bytes, "bench.put"));
  return lev_stream_sync(b->stream);
}

lev_status bench_read_strided(bench *b, lev_dtype dtype, const void *from, int64_t first, int64_t stride, int64_t count,
                              double *out) {
  if (count <= 0) return LEV_OK;
  size_t unit = lev_dtype_bytes(dtype), span = (size_t)((count - 1) * stride + 1) * unit;
  /* All that lies between too: thousands of small copies take longer. */
  char *host = lev_calloc(LEV_HEAP_REPORT, span, 1);
  if (!host) return LEV_ERR_NOMEM;
  lev_status st = lev_copy(b->stream, host, (const char *)from + (size_t)first * unit, span, "bench.read");
  lev_status waited = lev_stream_sync(b->stream); /* also after a failure: the copy may be under way */
  if (st == LEV_OK) st = waited;
  for (int64_t i = 0; i < count && st == LEV_OK; ++i) out[i] = lev_dtype_load(dtype, host, i * stride);
  lev_free(host);
  return st;
}

lev_status bench_read(bench *b, lev_dtype dtype, const void *from, int64_t first, int64_t count, double *out) {
  return bench_read_strided(b, dtype, from, first, 1, count, out);
}

/* ---- comparisons ---- */

lev_status bench_close(bench *b, const char *what, const double *got, const double *want, int64_t n, double limit) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < n; ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  ++b->checks;
  if (n > 0 && sqrt(error) <= limit * sqrt(norm)) return LEV_OK; /* false for NaN */
  return lev_fail(LEV_ERR_WRONG, "%s: %lld values are %.2e from the reference, at most %.2e was expected", what,
                  (long long)n, norm > 0 ? sqrt(error / norm) : sqrt(error), limit);
}

lev_status bench_check(bench *b, bool ok, const char *format, ...) {
  char text[512];
  va_list args;
  ++b->checks;
  if (ok) return LEV_OK;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return lev_fail(LEV_ERR_WRONG, "%s", text);
}

/* ---- timing ---- */

typedef lev_status (*once_fn)(bench *b, void *ctx);

/* Repetitions of one schedule. */
typedef struct timing {
  double seconds[BENCH_REPETITIONS]; /* of one call, by repetition */
  int n, calls;                      /* repetitions, calls in each */
} timing;

/* `calls` in a row, as a step enqueues them: the seconds of one. */
static lev_status time_calls(bench *b, once_fn once, void *ctx, int calls, double *seconds) {
  LEV_TRY(lev_event_record(b->event[0], b->stream));
  for (int i = 0; i < calls; ++i) LEV_TRY(once(b, ctx));
  LEV_TRY(lev_event_record(b->event[1], b->stream));
  LEV_TRY(lev_event_elapsed(b->event[0], b->event[1], seconds));
  *seconds /= calls;
  return LEV_OK;
}

/* At least twice, since the first launch loads kernels, and until BENCH_WARM seconds have passed: a GPU that starts
 * cool and rested runs matrix products up to a tenth faster than the power limit lets it go on. Where the work is so
 * long that all this is nothing beside it, not at all. Gives the least time of a run: one alone may hold a hiccup. */
static lev_status warm_up(bench *b, once_fn once, void *ctx, double *seconds) {
  double sum = 0, last;
  double wanted = b->options->backend == LEV_BACKEND_CPU ? 0 : BENCH_WARM;
  for (int i = 0; i < 2 || (sum < wanted && i < BENCH_WARM_RUNS); ++i) {
    LEV_TRY(time_calls(b, once, ctx, 1, &last));
    sum += last;
    *seconds = i == 0 ? last : fmin(*seconds, last);
    if (last >= BENCH_LONG) break;
  }
  return LEV_OK;
}

/* Calls of `one` seconds that BENCH_SPAN takes. */
static int calls_of(double one) {
  return (int)ceil(BENCH_SPAN / fmax(one, 1e-6));
}

/* Repetitions of one schedule, as many as fit the seconds, back to back. */
static lev_status repeat(bench *b, once_fn once, void *ctx, double seconds, timing *t) {
  double one = 0, in_row;
  LEV_TRY(warm_up(b, once, ctx, &one));
  t->calls = b->options->backend == LEV_BACKEND_CPU ? 1 : calls_of(one);
  if (t->calls > 1) { /* a call alone shows its launch, which those in a row hide */
    LEV_TRY(time_calls(b, once, ctx, t->calls, &in_row));
    t->calls = calls_of(one = fmin(one, in_row));
  }
  double fit = seconds / (t->calls * fmax(one, 1e-6));
  t->n = fit < BENCH_LEAST ? BENCH_LEAST : fit > BENCH_REPETITIONS ? BENCH_REPETITIONS : (int)fit;
  int done = one >= BENCH_LONG; /* one so long counts, instead of warming up */
  if (done) t->seconds[0] = one;
  for (int i = done; i < t->n; ++i) LEV_TRY(time_calls(b, once, ctx, t->calls, &t->seconds[i]));
  return LEV_OK;
}

static lev_status time_both(bench *b, const bench_work *work, timing *once, timing *plain) {
  double seconds = b->options->seconds > 0 ? b->options->seconds : 60;
  if (work->plain) seconds /= 2;
  LEV_TRY(repeat(b, work->once, work->ctx, seconds, once));
  return work->plain ? repeat(b, work->plain, work->ctx, seconds, plain) : LEV_OK;
}

static int ascending(const void *a, const void *b) {
  double x, y;
  memcpy(&x, a, sizeof x), memcpy(&y, b, sizeof y);
  return (x > y) - (x < y);
}

/* The value at `part` (0 .. 1) of the sorted times, halfway between two of them where it falls there. */
static double quantile(const double *sorted, int n, double part) {
  double at = part * (n - 1);
  int low = (int)at, high = low + 1 < n ? low + 1 : low;
  return sorted[low] + (at - low) * (sorted[high] - sorted[low]);
}

/* Sorts them too. */
static double median(timing *t) {
  qsort(t->seconds, (size_t)t->n, sizeof *t->seconds, ascending);
  return quantile(t->seconds, t->n, 0.5);
}

static double value_of(const bench_result *r, bench_value value) {
  switch (value) {
  case BENCH_GBPS:
    return r->work.bytes / r->seconds * 1e-9;
  case BENCH_COPY_FRACTION:
    return r->copy_fraction;
  case BENCH_TFLOPS:
    return r->work.flops / r->seconds * 1e-12;
  default:
    return r->seconds * 1e3;
  }
}

static const char *const units[BENCH_VALUES] = {"ms", "GB/s", "fraction", "TFLOP/s"};

static lev_status checked(const bench *b) {
  if (b->checks > 0) return LEV_OK;
  return lev_fail(LEV_ERR_MISUSE, "%s was not compared with a reference: it is not timed", b->of->name);
}

lev_status bench_measure(bench *b, const bench_work *work, bench_value value) {
  timing once, plain;
  bench_result *r = &b->result;
  LEV_TRY(checked(b));
  if (b->measured) return lev_fail(LEV_ERR_MISUSE, "%s was measured before", b->of->name);
  *r = (bench_result){.of = b->of, .work = *work, .unit = units[value]};
  LEV_TRY(time_both(b, work, &once, &plain));
  r->repetitions = once.n, r->calls = once.calls;
  r->seconds = median(&once);
  r->low = quantile(once.seconds, once.n, 0.1), r->high = quantile(once.seconds, once.n, 0.9);
  if (work->plain) r->plain_seconds = median(&plain);
  r->copy_fraction = work->bytes / r->seconds / b->copy_ceiling;
  r->matmul_fraction = work->flops / r->seconds / b->matmul_ceiling;
  r->value = value_of(r, value);
  b->measured = true;
  return bench_report(b, r);
}

lev_status bench_add(bench *b, const char *suffix, double value, const char *unit) {
  char name[160];
  LEV_TRY(checked(b));
  snprintf(name, sizeof name, "%s%s", b->of->name, suffix);
  return bench_report_figure(b, name, value, unit);
}

/* ---- ceilings ---- */

typedef struct copy_work {
  void *from, *to;
  size_t bytes;
} copy_work;

static lev_status copy_once(bench *b, void *ctx) {
  const copy_work *w = ctx;
  return lev_copy(b->stream, w->to, w->from, w->bytes, "bench.copy");
}

static lev_status gemm_once(bench *b, void *ctx) {
  return lev_gemm(b->stream, ctx);
}

/* Rate of a piece of work that is no case. */
static lev_status ceiling(bench *b, const bench_work *work, double amount, double *out) {
  timing once, plain;
  lev_status st = time_both(b, work, &once, &plain);
  bench_release(b);
  if (st == LEV_OK) *out = amount / median(&once);
  return st;
}

static lev_status copy_ceiling(bench *b) {
  copy_work w = {.bytes = (size_t)bench_size(b, (int64_t)1 << 30, (int64_t)1 << 28)};
  LEV_TRY(bench_alloc(b, w.bytes, &w.from));
  LEV_TRY(bench_alloc(b, w.bytes, &w.to));
  LEV_TRY(bench_random(b, LEV_F32, w.from, (int64_t)(w.bytes / 4), 1));
  bench_work work = {.once = copy_once, .ctx = &w};
  return ceiling(b, &work, 2.0 * (double)w.bytes, &b->copy_ceiling);
}

static lev_status matmul_ceiling(bench *b) {
  int64_t n = bench_size(b, 8192, 1024);
  lev_dtype type = b->options->backend == LEV_BACKEND_CPU ? LEV_F32 : LEV_BF16;
  size_t bytes = (size_t)(n * n) * lev_dtype_bytes(type);
  void *x[3];
  for (int i = 0; i < 3; ++i) LEV_TRY(bench_alloc(b, bytes, &x[i]));
  for (int i = 0; i < 2; ++i) LEV_TRY(bench_random(b, type, x[i], n * n, 1));
  lev_gemm_args g = {.m = n, .n = n, .k = n, .a = x[0], .b = x[1], .c = x[2], .lda = n, .ldb = n, .ldc = n};
  g.ab_type = g.c_type = type, g.alpha = 1, g.trans_b = true;
  bench_work work = {.once = gemm_once, .ctx = &g};
  return ceiling(b, &work, 2.0 * (double)n * (double)n * (double)n, &b->matmul_ceiling);
}

lev_status bench_measure_ceilings(bench *b) {
  lev_status st = copy_ceiling(b);
  if (st == LEV_OK) st = matmul_ceiling(b);
  bench_release(b);
  return st;
}

double bench_copy_ceiling(const bench *b) {
  return b->copy_ceiling;
}
double bench_matmul_ceiling(const bench *b) {
  return b->matmul_ceiling;
}
