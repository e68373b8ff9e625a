/* SPDX-License-Identifier: Apache-2.0 */
/* Area gemm: lev_gemm at the shapes of a model, bf16 (on the CPU f32 and an eighth of each size). */
#include "common/gemm.h"
#include "common/hostmem.h"
#include "harness/bench/bench.h"

typedef struct shape {
  int64_t m, n, k;
  bool trans_a, trans_b, wide; /* wide: C in f32 */
} shape;

static lev_status once(bench *b, void *ctx) {
  return lev_gemm(bench_stream(b), ctx);
}

enum { SAMPLES = 8 };

/* Sampled elements of C against sums in f64. */
static lev_status compare(bench *b, const lev_gemm_args *g, double *row) {
  double got[SAMPLES], want[SAMPLES], *column = row + g->k;
  for (int s = 0; s < SAMPLES; ++s) {
    int64_t i = s * (g->m - 1) / (SAMPLES - 1), j = s * 37 % g->n;
    LEV_TRY(bench_read_strided(b, g->ab_type, g->a, g->trans_a ? i : i * g->lda, g->trans_a ? g->lda : 1, g->k, row));
    LEV_TRY(
        bench_read_strided(b, g->ab_type, g->b, g->trans_b ? j * g->ldb : j, g->trans_b ? 1 : g->ldb, g->k, column));
    LEV_TRY(bench_read(b, g->c_type, g->c, i * g->ldc + j, 1, &got[s]));
    want[s] = 0;
    for (int64_t p = 0; p < g->k; ++p) want[s] += row[p] * column[p];
  }
  return bench_close(b, "C", got, want, SAMPLES, g->c_type == LEV_BF16 ? 4e-3 : 1e-4);
}

static lev_status run(bench *b, const void *arg) {
  const shape *s = arg;
  bool cpu = bench_backend(b) == LEV_BACKEND_CPU;
  int64_t part = cpu ? 8 : 1, m = s->m / part, n = s->n / part, k = s->k / part;
  lev_dtype type = cpu ? LEV_F32 : LEV_BF16, out = s->wide ? LEV_F32 : type;
  size_t unit = lev_dtype_bytes(type), c_bytes = (size_t)(m * n) * lev_dtype_bytes(out);
  void *a, *w, *c;
  LEV_TRY(bench_alloc(b, (size_t)(m * k) * unit, &a));
  LEV_TRY(bench_alloc(b, (size_t)(n * k) * unit, &w));
  LEV_TRY(bench_alloc(b, c_bytes, &c));
  LEV_TRY(bench_random(b, type, a, m * k, 1));
  LEV_TRY(bench_random(b, type, w, n * k, 1));
  lev_gemm_args g = {.m = m, .n = n, .k = k, .trans_a = s->trans_a, .trans_b = s->trans_b, .a = a, .b = w, .c = c};
  g.lda = s->trans_a ? m : k, g.ldb = s->trans_b ? k : n, g.ldc = n;
  g.ab_type = type, g.c_type = out, g.alpha = 1;
  LEV_TRY(once(b, &g));
  double *values = lev_calloc(LEV_HEAP_REPORT, (size_t)(2 * k), sizeof *values);
  lev_status st = values ? compare(b, &g, values) : LEV_ERR_NOMEM;
  lev_free(values);
  LEV_TRY(st);
  bench_work work = {.once = once, .ctx = &g, .flops = 2.0 * (double)m * (double)n * (double)k};
  work.bytes = (double)(m * k + n * k) * (double)unit + (double)c_bytes;
  return bench_measure(b, &work, BENCH_TFLOPS);
}

static const shape square = {8192, 8192, 8192, .trans_b = true};
static const shape forward = {32768, 2048, 2048, .trans_b = true};
static const shape input_gradient = {32768, 2048, 2048, .trans_b = false};
static const shape weight_gradient = {2048, 2048, 32768, .trans_a = true, .wide = true};
static const shape logits = {8192, 16384, 2048, .trans_b = true, .wide = true};

static const bench_case cases[] = {
    {"gemm.square", "8192 x 8192 x 8192", run, &square, false},
    {"gemm.forward", "32,768 x 2048 -> 2048", run, &forward, false},
    {"gemm.input_gradient", "32,768 x 2048 -> 2048", run, &input_gradient, false},
    {"gemm.weight_gradient", "2048 x 2048 over 32,768 rows, f32 out", run, &weight_gradient, false},
    {"gemm.logits", "8192 x 16,384 over 2048, f32 out", run, &logits, false},
};

const bench_area bench_area_gemm = {.name = "gemm", .cases = cases, .n_cases = sizeof cases / sizeof *cases};
