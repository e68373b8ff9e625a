/* SPDX-License-Identifier: Apache-2.0 */
/* Area grouped: the three products of experts (lev_gemm_grouped), bf16, 2048 -> 1536; weights' gradients are written in
 * bf16 (wgrad) or added to f32 (wgrad_add). Beside it, as plain, one product per expert (lev_gemm). On the CPU f32 and
 * small. */
#include <string.h>

#include "common/gemm.h"
#include "harness/bench/bench_impl.h"

enum { GROUPS = 64, SAMPLES = 8 };

typedef enum product { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, ADDED_GRADIENT } product;
typedef enum spread { BALANCED, SKEWED, SMALL } spread;

typedef struct shape {
  product what;
  spread how;
} shape;

typedef struct experts {
  lev_gemm_grouped_args args;
  int64_t first[GROUPS], rows[GROUPS];
  void *each[GROUPS];
} experts;

/* Skewed: expert i has a share of 1 / (i + 1), but the first and the sixth change places. */
static int64_t spread_rows(spread how, int64_t groups, int64_t total, int64_t *rows) {
  double sum = 0;
  int64_t left = total;
  for (int64_t i = 0; i < groups; ++i) sum += 1.0 / (double)(i + 1);
  for (int64_t i = 0; i < groups; ++i) {
    rows[i] = how == SKEWED ? (int64_t)((double)total / sum / (double)(i + 1)) : total / groups;
    if (i == groups - 1) rows[i] = left;
    left -= rows[i];
  }
  if (how == SKEWED) {
    int64_t most = rows[0];
    rows[0] = rows[5], rows[5] = most;
  }
  return total;
}

static lev_status grouped(bench *b, void *ctx) {
  const experts *e = ctx;
  return lev_gemm_grouped(bench_stream(b), &e->args);
}

static lev_gemm_args one_expert(const experts *e, int64_t g) {
  lev_gemm_args one = e->args.gemm;
  size_t ab = lev_dtype_bytes(one.ab_type), c = lev_dtype_bytes(one.c_type);
  one.a = (const char *)one.a + (size_t)(e->first[g] * one.lda) * ab;
  if (e->args.ragged == LEV_RAGGED_ROWS) {
    one.m = e->rows[g], one.b = e->each[g], one.c = (char *)one.c + (size_t)(e->first[g] * one.ldc) * c;
  } else {
    one.k = e->rows[g], one.b = (const char *)one.b + (size_t)(e->first[g] * one.ldb) * ab, one.c = e->each[g];
  }
  return one;
}

static lev_status expert_by_expert(bench *b, void *ctx) {
  const experts *e = ctx;
  for (int64_t g = 0; g < e->args.groups; ++g) {
    lev_gemm_args one = one_expert(e, g);
    LEV_TRY(lev_gemm(bench_stream(b), &one));
  }
  return LEV_OK;
}

/* Sampled elements of every expert's result against sums in f64. */
static lev_status compare(bench *b, const experts *e) {
  for (int64_t g = 0; g < e->args.groups; ++g) {
    lev_gemm_args one = one_expert(e, g);
    double got[SAMPLES], want[SAMPLES], *row, *column;
    LEV_TRY(bench_doubles(b, one.k, &row));
    LEV_TRY(bench_doubles(b, one.k, &column));
    for (int s = 0; s < SAMPLES; ++s) {
      int64_t i = s * (one.m - 1) / (SAMPLES - 1), j = (s * 211 + 5 * g) % one.n;
      LEV_TRY(bench_read_strided(b, one.ab_type, one.a, one.trans_a ? i : i * one.lda, one.trans_a ? one.lda : 1, one.k,
                                 row));
      LEV_TRY(bench_read_strided(b, one.ab_type, one.b, one.trans_b ? j * one.ldb : j, one.trans_b ? 1 : one.ldb, one.k,
                                 column));
      LEV_TRY(bench_read(b, one.c_type, one.c, i * one.ldc + j, 1, &got[s]));
      want[s] = 0;
      for (int64_t p = 0; p < one.k; ++p) want[s] += row[p] * column[p];
    }
    LEV_TRY(bench_close(b, "C", got, want, SAMPLES, one.c_type == LEV_BF16 ? 4e-3 : 5e-5));
    for (int n = 0; n < 2; ++n) lev_device_free(b->device, b->slabs[--b->n_slabs]); /* the two rows */
  }
  return LEV_OK;
}

/* Operands in device memory, and C_g zeroed where products are added to it. `in` and `out` are the sides of a layer's
 * weights [out, in]. */
static lev_status prepare(bench *b, product what, int64_t rows, int64_t out, int64_t in, experts *e) {
  lev_gemm_grouped_args *a = &e->args;
  bool forward = what == FORWARD, added = what == ADDED_GRADIENT, depth = added || what == WEIGHT_GRADIENT;
  lev_dtype type = bench_backend(b) == LEV_BACKEND_CPU ? LEV_F32 : LEV_BF16, wide = added ? LEV_F32 : type;
  size_t unit = lev_dtype_bytes(type), weight = (size_t)(out * in) * lev_dtype_bytes(wide);
  void *x, *y, *w;
  LEV_TRY(bench_alloc(b, (size_t)(rows * in) * unit, &x));
  LEV_TRY(bench_alloc(b, (size_t)(rows * out) * unit, &y));
  LEV_TRY(bench_alloc(b, weight * (size_t)a->groups, &w));
  if (what != INPUT_GRADIENT) LEV_TRY(bench_random(b, type, x, rows * in, 1));
  if (what != FORWARD) LEV_TRY(bench_random(b, type, y, rows * out, 1));
  if (depth)
    LEV_TRY(lev_fill(bench_stream(b), w, 0, weight * (size_t)a->groups, "bench.weights"));
  else
    LEV_TRY(bench_random(b, type, w, out * in * a->groups, 1));
  for (int64_t g = 0, at = 0; g < a->groups; at += e->rows[g++])
    e->first[g] = at, e->each[g] = (char *)w + (size_t)g * weight;
  a->first = e->first, a->rows = e->rows, a->each = e->each;
  a->ragged = depth ? LEV_RAGGED_DEPTH : LEV_RAGGED_ROWS;
  lev_gemm_args *g = &a->gemm;
  g->ab_type = type, g->c_type = wide, g->alpha = 1, g->beta = added;
  g->trans_a = depth, g->trans_b = forward;
  g->m = depth ? out : 0, g->n = forward ? out : in, g->k = forward ? in : depth ? 0 : out;
  g->a = forward ? x : y, g->lda = forward ? in : out;
  g->b = depth ? x : NULL, g->ldb = in;
  g->c = depth ? NULL : forward ? y : x, g->ldc = g->n;
  return LEV_OK;
}

static lev_status run(bench *b, const void *arg) {
  const shape *s = arg;
  experts e = {.args = {.groups = s->how == SMALL ? 64 : 16}};
  int64_t out = bench_size(b, 1536, 40), in = bench_size(b, 2048, 48);
  int64_t total = bench_size(b, s->how == SMALL ? 32768 : 65536, s->how == SMALL ? 256 : 500);
  int64_t rows = spread_rows(s->how, e.args.groups, total, e.rows);
  LEV_TRY(prepare(b, s->what, rows, out, in, &e));
  LEV_TRY(lev_gemm_grouped(bench_stream(b), &e.args));
  LEV_TRY(compare(b, &e));
  double unit = (double)lev_dtype_bytes(e.args.gemm.ab_type), weights = (double)(out * in * e.args.groups);
  double each = s->what == ADDED_GRADIENT ? 8 : unit; /* bytes moved per weight or its gradient */
  bench_work work = {.once = grouped, .plain = expert_by_expert, .ctx = &e};
  work.flops = 2.0 * (double)rows * (double)out * (double)in;
  work.bytes = (double)(rows * (out + in)) * unit + weights * each;
  LEV_TRY(bench_measure(b, &work, BENCH_TFLOPS));
  if (s->what != ADDED_GRADIENT) LEV_TRY(compare(b, &e)); /* once more, after many calls in a row */
  return bench_add(b, ".tflops", b->result.value, "TFLOP/s");
}

#define ROWS "16 experts, 65,536 rows, 2048 -> 1536"
#define CASE(name, about, what, how)                                                                                   \
  { "grouped." name, about, run, &(const shape){what, how}, false }
static const bench_case cases[] = {
    CASE("fwd.balanced", ROWS, FORWARD, BALANCED),
    CASE("fwd.skewed", ROWS, FORWARD, SKEWED),
    CASE("fwd.small", "64 experts, 512 rows each, 2048 -> 1536", FORWARD, SMALL),
    CASE("dgrad.balanced", ROWS, INPUT_GRADIENT, BALANCED),
    CASE("dgrad.skewed", ROWS, INPUT_GRADIENT, SKEWED),
    CASE("wgrad.balanced", ROWS, WEIGHT_GRADIENT, BALANCED),
    CASE("wgrad.skewed", ROWS, WEIGHT_GRADIENT, SKEWED),
    CASE("wgrad_add.balanced", ROWS ", f32 +=", ADDED_GRADIENT, BALANCED),
    CASE("wgrad_add.skewed", ROWS ", f32 +=", ADDED_GRADIENT, SKEWED),
};

const bench_area bench_area_grouped = {.name = "grouped", .cases = cases, .n_cases = sizeof cases / sizeof *cases};
