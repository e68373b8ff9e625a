/* SPDX-License-Identifier: Apache-2.0 */
/* Area kernels: norms, rotary embedding, SwiGLU. */
#include <math.h>

#include "harness/bench/kernels.h"
#include "harness/model/ops.h"

#define EPS 1e-5
enum { H = 2048, HEADS = 16, DIM = 128, PART_ROWS = 300 }; /* PART_ROWS: where sums over rows are compared */

static int64_t rows_of(const bench *b) {
  return bench_size(b, 262144, 512);
}

static lev_status scratch_of(bench *b, void **scratch, size_t *bytes) {
  *bytes = lev_ops_scratch_bytes(bench_backend(b));
  return bench_alloc(b, *bytes, scratch);
}

static double inverse_rms(const double *x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return 1 / sqrt(sum / (double)n + EPS);
}

/* ---- RMS norm ---- */

lev_status kernel_rmsnorm(bench *b, const void *unused) {
  (void)unused;
  lev_rmsnorm_args a = {.dtype = LEV_BF16, .rows = rows_of(b), .cols = H, .eps = EPS};
  size_t bytes = (size_t)a.rows * H * 2;
  void *x, *w;
  double *in, *got, *want, *weight;
  LEV_TRY(kernel_array(b, a.rows * H, 1, &x));
  LEV_TRY(kernel_array(b, H, 1, &w));
  LEV_TRY(bench_alloc(b, bytes, &a.y));
  a.x = x, a.w = w;
  kernel_job job = KERNEL_JOB(lev_rmsnorm_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(bench_doubles(b, H, &weight));
  LEV_TRY(bench_doubles(b, KERNEL_SAMPLES * H, &want));
  LEV_TRY(bench_read(b, LEV_BF16, w, 0, H, weight));
  LEV_TRY(kernel_rows(b, LEV_BF16, x, a.rows, H, &in));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.y, a.rows, H, &got));
  for (int s = 0; s < KERNEL_SAMPLES; ++s) {
    double scale = inverse_rms(in + s * H, H);
    for (int i = 0; i < H; ++i) want[s * H + i] = in[s * H + i] * scale * weight[i];
  }
  LEV_TRY(bench_close(b, "y", got, want, KERNEL_SAMPLES * H, KERNEL_BF16_LIMIT));
  return kernel_measure(b, &job, 2.0 * (double)bytes);
}

/* dx of one row, and its share of dw. */
static void norm_gradient(const double *x, const double *w, const double *dy, int64_t n, double *dx, double *dw) {
  double scale = inverse_rms(x, n), pull = 0;
  for (int64_t i = 0; i < n; ++i) pull += dy[i] * w[i] * x[i];
  pull *= scale * scale * scale / (double)n;
  for (int64_t i = 0; i < n; ++i) {
    dx[i] += scale * dy[i] * w[i] - x[i] * pull;
    dw[i] += dy[i] * x[i] * scale;
  }
}

/* The first PART_ROWS rows alone: dw. */
static lev_status compare_norm_dw(bench *b, lev_rmsnorm_backward_args a, const double *weight) {
  double *x, *dy, *dx, *got, *want;
  a.rows = PART_ROWS;
  LEV_TRY(bench_doubles(b, PART_ROWS * H, &x));
  LEV_TRY(bench_doubles(b, PART_ROWS * H, &dy));
  LEV_TRY(bench_doubles(b, H, &dx));
  LEV_TRY(bench_doubles(b, H, &got));
  LEV_TRY(bench_doubles(b, H, &want));
  LEV_TRY(lev_fill(bench_stream(b), a.dw, 0, H * sizeof(float), "bench.zero"));
  LEV_TRY(LEV_LAUNCH(bench_stream(b), &lev_rmsnorm_backward_kernel, a));
  LEV_TRY(bench_read(b, LEV_BF16, a.x, 0, PART_ROWS * H, x));
  LEV_TRY(bench_read(b, LEV_BF16, a.dy, 0, PART_ROWS * H, dy));
  LEV_TRY(bench_read(b, LEV_F32, a.dw, 0, H, got));
  for (int64_t r = 0; r < PART_ROWS; ++r) norm_gradient(x + r * H, weight, dy + r * H, H, dx, want);
  return bench_close(b, "dw", got, want, H, 1e-5);
}

lev_status kernel_rmsnorm_backward(bench *b, const void *accumulate) {
  lev_rmsnorm_backward_args a = {.dtype = LEV_BF16, .rows = rows_of(b), .cols = H, .eps = EPS};
  a.accumulate = *(const bool *)accumulate;
  size_t bytes = (size_t)a.rows * H * 2;
  void *x, *w, *dy;
  double *in, *back, *got, *want, *weight, *dw;
  LEV_TRY(kernel_array(b, a.rows * H, 1, &x));
  LEV_TRY(kernel_array(b, H, 1, &w));
  LEV_TRY(kernel_array(b, a.rows * H, 1, &dy));
  LEV_TRY(kernel_array(b, a.rows * H, 1, &a.dx));
  LEV_TRY(kernel_zeros(b, H * sizeof(float), &a.dw));
  LEV_TRY(scratch_of(b, &a.scratch, &a.scratch_bytes));
  a.x = x, a.w = w, a.dy = dy;
  LEV_TRY(bench_doubles(b, H, &weight));
  LEV_TRY(bench_doubles(b, H, &dw));
  LEV_TRY(bench_read(b, LEV_BF16, w, 0, H, weight));
  LEV_TRY(compare_norm_dw(b, a, weight));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.dx, a.rows, H, &want)); /* as it was before */
  kernel_job job = KERNEL_JOB(lev_rmsnorm_backward_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(kernel_rows(b, LEV_BF16, x, a.rows, H, &in));
  LEV_TRY(kernel_rows(b, LEV_BF16, dy, a.rows, H, &back));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.dx, a.rows, H, &got));
  for (int64_t i = 0; i < KERNEL_SAMPLES * H && !a.accumulate; ++i) want[i] = 0;
  for (int s = 0; s < KERNEL_SAMPLES; ++s) norm_gradient(in + s * H, weight, back + s * H, H, want + s * H, dw);
  LEV_TRY(bench_close(b, "dx", got, want, KERNEL_SAMPLES * H, KERNEL_BF16_LIMIT));
  return kernel_measure(b, &job, (a.accumulate ? 4.0 : 3.0) * (double)bytes);
}

/* ---- queries and keys ---- */

static const lev_rope rope = {.theta = 1e4};

/* Turns the pairs of one row by position times frequency; backward: the other way. */
static void rotate(double *row, int64_t position, double way) {
  for (int h = 0; h < HEADS; ++h)
    for (int i = 0; i < DIM / 2; ++i) {
      double angle = way * (double)position * pow(rope.theta, -2.0 * i / DIM), c = cos(angle), s = sin(angle);
      double u = row[h * DIM + i], v = row[h * DIM + DIM / 2 + i];
      row[h * DIM + i] = u * c - v * s;
      row[h * DIM + DIM / 2 + i] = v * c + u * s;
    }
}

/* Elements that share a norm, 0 = none; weights of one row follow with period `span`. */
static int64_t span_of(lev_qk_norm norm) {
  return norm == LEV_QK_NORM_NONE ? 0 : norm == LEV_QK_NORM_FULL ? H : DIM;
}

/* Arguments, with random x and w and the positions of packed documents of 131,072 tokens. */
static lev_status qk_inputs(bench *b, lev_qk_norm norm, lev_qk_args *a, double **weight) {
  void *x, *w = NULL, *position, *numbers;
  *a = (lev_qk_args){.dtype = LEV_BF16, .rows = rows_of(b), .heads = HEADS, .head_dim = DIM, .norm = norm, .eps = EPS};
  a->rope = rope;
  LEV_TRY(kernel_array(b, a->rows * H, 1, &x));
  LEV_TRY(bench_alloc(b, (size_t)a->rows * 4, &position));
  LEV_TRY(bench_host(b, (size_t)a->rows * 4, &numbers));
  for (int64_t r = 0; r < a->rows; ++r) ((int32_t *)numbers)[r] = (int32_t)(r % 131072);
  LEV_TRY(bench_put(b, position, numbers, (size_t)a->rows * 4));
  LEV_TRY(bench_doubles(b, H, weight));
  if (span_of(norm) > 0) {
    LEV_TRY(kernel_array(b, span_of(norm), 1, &w));
    LEV_TRY(bench_read(b, LEV_BF16, w, 0, span_of(norm), *weight));
  }
  a->x = x, a->w = w, a->position = position;
  return LEV_OK;
}

lev_status kernel_qk(bench *b, const void *norm) {
  lev_qk_args a;
  double *weight, *want, *got;
  LEV_TRY(qk_inputs(b, *(const lev_qk_norm *)norm, &a, &weight));
  int64_t span = span_of(a.norm);
  size_t bytes = (size_t)a.rows * H * 2;
  LEV_TRY(bench_alloc(b, bytes, &a.y));
  kernel_job job = KERNEL_JOB(lev_qk_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.x, a.rows, H, &want));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.y, a.rows, H, &got));
  for (int s = 0; s < KERNEL_SAMPLES; ++s) {
    for (int64_t at = 0; at < H && span > 0; at += span) {
      double *x = want + s * H + at, scale = inverse_rms(x, span);
      for (int64_t i = 0; i < span; ++i) x[i] *= scale * weight[i];
    }
    rotate(want + s * H, kernel_row(a.rows, s) % 131072, 1);
  }
  LEV_TRY(bench_close(b, "y", got, want, KERNEL_SAMPLES * H, KERNEL_BF16_LIMIT));
  return kernel_measure(b, &job, 2.0 * (double)bytes);
}

/* Gradient of one row; dy becomes dx, dw +=. */
static void qk_gradient(const double *x, const double *w, double *dy, int64_t position, int64_t span, double *dw) {
  double dx[H] = {0};
  rotate(dy, position, -1);
  if (span == 0) return;
  for (int64_t at = 0; at < H; at += span) norm_gradient(x + at, w, dy + at, span, dx + at, dw);
  for (int i = 0; i < H; ++i) dy[i] = dx[i];
}

static lev_status compare_qk_dw(bench *b, lev_qk_args a, const double *weight) {
  double *x, *dy, *got, *want;
  int64_t span = span_of(a.norm);
  a.rows = PART_ROWS;
  LEV_TRY(bench_doubles(b, PART_ROWS * H, &x));
  LEV_TRY(bench_doubles(b, PART_ROWS * H, &dy));
  LEV_TRY(bench_doubles(b, span, &got));
  LEV_TRY(bench_doubles(b, span, &want));
  LEV_TRY(LEV_LAUNCH(bench_stream(b), &lev_qk_backward_kernel, a));
  LEV_TRY(bench_read(b, LEV_BF16, a.x, 0, PART_ROWS * H, x));
  LEV_TRY(bench_read(b, LEV_BF16, a.dy, 0, PART_ROWS * H, dy));
  LEV_TRY(bench_read(b, LEV_F32, a.dw, 0, span, got));
  for (int64_t r = 0; r < PART_ROWS; ++r) qk_gradient(x + r * H, weight, dy + r * H, r, span, want);
  return bench_close(b, "dw", got, want, span, KERNEL_BF16_LIMIT); /* the CPU turns gradients back in bf16 */
}

lev_status kernel_qk_backward(bench *b, const void *norm) {
  lev_qk_args a;
  double *weight, *x, *want, *got, *dw;
  void *dy;
  LEV_TRY(qk_inputs(b, *(const lev_qk_norm *)norm, &a, &weight));
  int64_t span = span_of(a.norm);
  size_t bytes = (size_t)a.rows * H * 2;
  LEV_TRY(kernel_array(b, a.rows * H, 1, &dy));
  LEV_TRY(bench_alloc(b, bytes, &a.dx));
  LEV_TRY(kernel_zeros(b, H * sizeof(float), &a.dw));
  LEV_TRY(scratch_of(b, &a.scratch, &a.scratch_bytes));
  a.dy = dy;
  if (span > 0) LEV_TRY(compare_qk_dw(b, a, weight));
  kernel_job job = KERNEL_JOB(lev_qk_backward_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(bench_doubles(b, H, &dw));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.x, a.rows, H, &x));
  LEV_TRY(kernel_rows(b, LEV_BF16, dy, a.rows, H, &want));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.dx, a.rows, H, &got));
  for (int s = 0; s < KERNEL_SAMPLES; ++s)
    qk_gradient(x + s * H, weight, want + s * H, kernel_row(a.rows, s) % 131072, span, dw);
  LEV_TRY(bench_close(b, "dx", got, want, KERNEL_SAMPLES * H, KERNEL_BF16_LIMIT));
  return kernel_measure(b, &job, (span > 0 ? 3.0 : 2.0) * (double)bytes);
}

/* ---- SwiGLU ---- */

static double sigmoid(double x) {
  return 1 / (1 + exp(-x));
}

lev_status kernel_swiglu(bench *b, const void *unused) {
  (void)unused;
  int64_t rows = rows_of(b);
  lev_swiglu_args a = {.dtype = LEV_BF16, .count = rows * H};
  void *gate, *up;
  double *g, *u, *got;
  LEV_TRY(kernel_array(b, a.count, 1, &gate));
  LEV_TRY(kernel_array(b, a.count, 1, &up));
  LEV_TRY(bench_alloc(b, (size_t)a.count * 2, &a.out));
  a.gate = gate, a.up = up;
  kernel_job job = KERNEL_JOB(lev_swiglu_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(kernel_rows(b, LEV_BF16, gate, rows, H, &g));
  LEV_TRY(kernel_rows(b, LEV_BF16, up, rows, H, &u));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.out, rows, H, &got));
  for (int i = 0; i < KERNEL_SAMPLES * H; ++i) u[i] *= g[i] * sigmoid(g[i]);
  LEV_TRY(bench_close(b, "out", got, u, KERNEL_SAMPLES * H, KERNEL_BF16_LIMIT));
  return kernel_measure(b, &job, 6.0 * (double)a.count);
}

lev_status kernel_swiglu_backward(bench *b, const void *unused) {
  (void)unused;
  int64_t rows = rows_of(b);
  lev_swiglu_backward_args a = {.dtype = LEV_BF16, .count = rows * H};
  void *all[3];
  double *in[3], *got[3];
  for (int i = 0; i < 3; ++i) {
    LEV_TRY(kernel_array(b, a.count, 1, &all[i]));
    LEV_TRY(kernel_rows(b, LEV_BF16, all[i], rows, H, &in[i]));
  }
  a.gate = all[0], a.up = all[1], a.d = all[2];
  kernel_job job = KERNEL_JOB(lev_swiglu_backward_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  for (int i = 0; i < 3; ++i) LEV_TRY(kernel_rows(b, LEV_BF16, all[i], rows, H, &got[i]));
  for (int i = 0; i < KERNEL_SAMPLES * H; ++i) {
    double g = in[0][i], u = in[1][i], d = in[2][i], s = sigmoid(g);
    in[0][i] = d * u * (s + g * s * (1 - s)), in[1][i] = d * g * s, in[2][i] = g * s * u;
  }
  static const char *const what[3] = {"gradient of gate", "gradient of up", "silu(gate) * up"};
  for (int i = 0; i < 3; ++i) LEV_TRY(bench_close(b, what[i], got[i], in[i], KERNEL_SAMPLES * H, KERNEL_BF16_LIMIT));
  return kernel_measure(b, &job, 12.0 * (double)a.count);
}
