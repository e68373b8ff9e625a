/* SPDX-License-Identifier: Apache-2.0 */
/* Area kernels: rows to experts and back, and what experts do between their products. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/rng.h"
#include "harness/bench/kernels.h"
#include "pipelined_llep/llep_ops.h"

enum { H = 2048, K = 8, EXPERTS = 64, INTER = 1024, BLOCKS = 64, RUNS = 8 };

/* Rows in send order of tokens x K routes: each token picks K of EXPERTS, rows are sorted by expert and then by token.
 */
static lev_status make_routes(bench *b, int64_t tokens, int32_t **host, void **routes) {
  void *memory, *picks;
  int64_t at[EXPERTS + 1] = {0};
  LEV_TRY(bench_host(b, (size_t)(tokens * K) * sizeof(int32_t), &memory));
  LEV_TRY(bench_host(b, (size_t)(tokens * K), &picks));
  LEV_TRY(bench_alloc(b, (size_t)(tokens * K) * sizeof(int32_t), routes));
  int32_t *row = memory;
  unsigned char *pick = picks;
  for (int64_t t = 0; t < tokens; ++t) {
    int order[EXPERTS];
    for (int e = 0; e < EXPERTS; ++e) order[e] = e;
    for (int j = 0; j < K; ++j) { /* the first K of a shuffle */
      int with = j + (int)(lev_rng_u64((lev_rng_key){.seed = 1}, (uint64_t)(t * K + j)) % (uint64_t)(EXPERTS - j));
      int e = order[with];
      order[with] = order[j], order[j] = e;
      pick[t * K + j] = (unsigned char)e;
      ++at[e + 1];
    }
  }
  for (int e = 0; e < EXPERTS; ++e) at[e + 1] += at[e];
  for (int64_t q = 0; q < tokens * K; ++q) row[q] = (int32_t)at[pick[q]]++;
  *host = row;
  return bench_put(b, *routes, row, (size_t)(tokens * K) * sizeof(int32_t));
}

/* The rows of the sampled tokens' routes, [KERNEL_SAMPLES, K, cols]. */
static lev_status routed_rows(bench *b, lev_dtype dtype, const void *rows, const int32_t *route, int64_t tokens,
                              int64_t cols, double **out) {
  LEV_TRY(bench_doubles(b, KERNEL_SAMPLES * K * cols, out));
  for (int s = 0; s < KERNEL_SAMPLES; ++s)
    for (int j = 0; j < K; ++j)
      LEV_TRY(bench_read(b, dtype, rows, route[kernel_row(tokens, s) * K + j] * cols, cols, *out + (s * K + j) * cols));
  return LEV_OK;
}

/* Each sampled token's row stands at each of its routes. */
static lev_status compare_sent(bench *b, lev_dtype dtype, const void *from, const void *sent, const int32_t *route,
                               int64_t tokens, int64_t cols, bool per_route) {
  double *in, *got;
  LEV_TRY(kernel_rows(b, dtype, from, tokens, per_route ? K * cols : cols, &in));
  LEV_TRY(routed_rows(b, dtype, sent, route, tokens, cols, &got));
  for (int s = 0; s < KERNEL_SAMPLES; ++s)
    for (int j = 0; j < K; ++j) {
      const double *want = in + (per_route ? (s * K + j) * cols : s * cols);
      LEV_TRY(bench_check(b, memcmp(want, got + (s * K + j) * cols, (size_t)cols * sizeof(double)) == 0,
                          "route %d of token %lld has another row", j, (long long)kernel_row(tokens, s)));
    }
  return LEV_OK;
}

lev_status kernel_gather(bench *b, const void *backward) {
  bool back = *(const bool *)backward;
  int64_t tokens = bench_size(b, 65536, 256);
  llep_gather_args a = {.dtype = LEV_BF16, .tokens = tokens, .top_k = K, .hidden = H, .blocks = BLOCKS, .last = BLOCKS};
  size_t row = H * 2;
  void *x, *routes, *dy = NULL, *probs = NULL;
  int32_t *route;
  LEV_TRY(make_routes(b, tokens, &route, &routes));
  LEV_TRY(kernel_array(b, tokens * H, 1, &x));
  LEV_TRY(bench_alloc(b, (size_t)(tokens * K) * row, &a.send_x));
  if (back) {
    LEV_TRY(kernel_array(b, tokens * H, 1, &dy));
    LEV_TRY(bench_alloc(b, (size_t)(tokens * K) * row, &a.send_dy));
    LEV_TRY(bench_alloc(b, (size_t)(tokens * K) * 4, &probs));
    LEV_TRY(bench_random(b, LEV_F32, probs, tokens * K, 1));
    LEV_TRY(bench_alloc(b, (size_t)(tokens * K) * 4, &a.send_probs));
  }
  a.x = x, a.dy = dy, a.probs = probs, a.routes = routes;
  kernel_job job = KERNEL_JOB(llep_gather_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(compare_sent(b, LEV_BF16, x, a.send_x, route, tokens, H, false));
  if (back) {
    LEV_TRY(compare_sent(b, LEV_BF16, dy, a.send_dy, route, tokens, H, false));
    LEV_TRY(compare_sent(b, LEV_F32, probs, a.send_probs, route, tokens, 1, true));
  }
  double rows = (double)tokens * (1 + K) * (double)row, scalars = (double)tokens * K * 4;
  return kernel_measure(b, &job, back ? 2 * rows + 3 * scalars : rows + scalars);
}

lev_status kernel_combine(bench *b, const void *backward) {
  bool back = *(const bool *)backward;
  int64_t tokens = bench_size(b, 65536, 256);
  llep_combine_args a = {
      .dtype = LEV_BF16, .tokens = tokens, .top_k = K, .hidden = H, .blocks = BLOCKS, .last = BLOCKS};
  size_t row = H * 2, scalars = (size_t)(tokens * K) * 4;
  void *rows, *routes, *weights, *row_scalars;
  int32_t *route;
  double *in, *want, *got, *weight;
  a.accumulate = !back;
  LEV_TRY(make_routes(b, tokens, &route, &routes));
  LEV_TRY(kernel_array(b, tokens * K * H, 1, &rows));
  LEV_TRY(kernel_array(b, tokens * H, 1, &a.out));
  LEV_TRY(bench_alloc(b, scalars, &weights));
  LEV_TRY(bench_random(b, LEV_F32, weights, tokens * K, 0.3));
  LEV_TRY(bench_alloc(b, scalars, &row_scalars));
  LEV_TRY(bench_random(b, LEV_F32, row_scalars, tokens * K, 1));
  a.rows = rows, a.routes = routes;
  if (back) {
    LEV_TRY(bench_alloc(b, scalars, &a.scalars));
    a.row_scalars = row_scalars;
  } else {
    a.probs = weights;
  }
  LEV_TRY(kernel_rows(b, LEV_BF16, a.out, tokens, H, &want));
  kernel_job job = KERNEL_JOB(llep_combine_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(routed_rows(b, LEV_BF16, rows, route, tokens, H, &in));
  LEV_TRY(kernel_rows(b, LEV_F32, weights, tokens, K, &weight));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.out, tokens, H, &got));
  for (int s = 0; s < KERNEL_SAMPLES; ++s)
    for (int i = 0; i < H; ++i) {
      double sum = back ? 0 : want[s * H + i];
      for (int j = 0; j < K; ++j) sum += (back ? 1 : weight[s * K + j]) * in[(s * K + j) * H + i];
      want[s * H + i] = sum;
    }
  LEV_TRY(bench_close(b, "out", got, want, KERNEL_SAMPLES * H, KERNEL_BF16_LIMIT));
  if (back) LEV_TRY(compare_sent(b, LEV_F32, a.scalars, row_scalars, route, tokens, 1, true));
  double bytes = (double)tokens * K * (double)row + (double)tokens * (double)row * (back ? 1 : 2);
  return kernel_measure(b, &job, bytes + (double)scalars * (back ? 3 : 2));
}

lev_status kernel_pack(bench *b, const void *unpack) {
  bool to_runs = *(const bool *)unpack;
  int64_t rows = bench_size(b, 262144, 512), each = rows / RUNS;
  void *runs, *tile;
  double *from, *got;
  LEV_TRY(kernel_array(b, rows * H, 1, &runs));
  LEV_TRY(kernel_array(b, rows * H, 1, &tile));
  llep_pack_args a = {.n_runs = RUNS, .n_parts = 1, .unpack = to_runs, .part = {{runs, tile, H * 2}}};
  /* Runs in another order, of unequal length: neighbours swap 5 rows. */
  for (int r = 0; r < RUNS; ++r) {
    a.count[r] = (int32_t)(each + (r % 2 ? 5 : -5));
    a.start[r] = (int32_t)((RUNS - 1 - r) * each + (r % 2 ? 0 : 5));
  }
  kernel_job job = KERNEL_JOB(llep_pack_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(bench_doubles(b, H, &from));
  LEV_TRY(bench_doubles(b, H, &got));
  int64_t first = 0;
  for (int r = 0; r < RUNS; first += a.count[r++])
    for (int end = 0; end < 2; ++end) { /* first and last row of each run */
      int64_t at = end ? a.count[r] - 1 : 0;
      LEV_TRY(bench_read(b, LEV_BF16, runs, (a.start[r] + at) * H, H, from));
      LEV_TRY(bench_read(b, LEV_BF16, tile, (first + at) * H, H, got));
      /* the same bits */ /* NOLINTNEXTLINE(bugprone-suspicious-memory-comparison) */
      LEV_TRY(bench_check(b, memcmp(from, got, H * sizeof(double)) == 0, "run %d: another row", r));
    }
  return kernel_measure(b, &job, 2.0 * (double)rows * H * 2);
}

/* ---- activation of experts ---- */

static double sigmoid(double x) {
  return 1 / (1 + exp(-x));
}

lev_status kernel_act(bench *b, const void *unused) {
  (void)unused;
  llep_act_args a = {.dtype = LEV_BF16, .rows = bench_size(b, 524288, 512), .inter = INTER};
  double *in, *got;
  LEV_TRY(kernel_array(b, a.rows * 2 * INTER, 1, &a.h));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.h, a.rows, 2 * INTER, &in));
  kernel_job job = KERNEL_JOB(llep_act_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.h, a.rows, 2 * INTER, &got));
  for (int s = 0; s < KERNEL_SAMPLES; ++s)
    for (int i = 0; i < INTER; ++i) {
      double *h = in + s * 2 * INTER + i;
      h[0] = h[0] * sigmoid(h[0]) * h[INTER];
    }
  LEV_TRY(bench_close(b, "h", got, in, KERNEL_SAMPLES * 2 * INTER, KERNEL_BF16_LIMIT));
  return kernel_measure(b, &job, (double)a.rows * INTER * 6);
}

lev_status kernel_act_backward(bench *b, const void *unused) {
  (void)unused;
  llep_act_backward_args a = {.dtype = LEV_BF16, .rows = bench_size(b, 524288, 512), .inter = INTER};
  double *h, *q, *p, *got_h, *got_q, *got_p;
  LEV_TRY(kernel_array(b, a.rows * 2 * INTER, 1, &a.h));
  LEV_TRY(kernel_array(b, a.rows * INTER, 1, &a.q));
  LEV_TRY(bench_alloc(b, (size_t)a.rows * 4, &a.p));
  LEV_TRY(bench_random(b, LEV_F32, a.p, a.rows, 1));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.h, a.rows, 2 * INTER, &h));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.q, a.rows, INTER, &q));
  LEV_TRY(kernel_rows(b, LEV_F32, a.p, a.rows, 1, &p));
  kernel_job job = KERNEL_JOB(llep_act_backward_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.h, a.rows, 2 * INTER, &got_h));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.q, a.rows, INTER, &got_q));
  LEV_TRY(kernel_rows(b, LEV_F32, a.p, a.rows, 1, &got_p));
  for (int r = 0; r < KERNEL_SAMPLES; ++r) {
    double dot = 0, weight = p[r];
    for (int i = 0; i < INTER; ++i) {
      double *gate = h + r * 2 * INTER + i, *up = gate + INTER, *d = q + r * INTER + i, s = sigmoid(*gate);
      double g = *gate, u = *up, silu = g * s, out = *d;
      dot += out * silu * u;
      *gate = weight * out * u * (s + silu * (1 - s)), *up = weight * out * silu, *d = weight * silu * u;
    }
    p[r] = dot;
  }
  LEV_TRY(bench_close(b, "h", got_h, h, KERNEL_SAMPLES * 2 * INTER, KERNEL_BF16_LIMIT));
  LEV_TRY(bench_close(b, "q", got_q, q, KERNEL_SAMPLES * INTER, KERNEL_BF16_LIMIT));
  LEV_TRY(bench_close(b, "p", got_p, p, KERNEL_SAMPLES, 1e-5));
  return kernel_measure(b, &job, (double)a.rows * (INTER * 12 + 8));
}
