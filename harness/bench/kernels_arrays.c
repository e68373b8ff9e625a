/* SPDX-License-Identifier: Apache-2.0 */
/* Area kernels: sums, casts, the optimizer's update and norm, embedding, cross entropy. */
#include <math.h>
#include <string.h>

#include "harness/bench/kernels.h"
#include "harness/model/embed_ops.h"
#include "offload_adamw/offload_adamw_ops.h"
#include "ring_dtp/ring_dtp_ops.h"

enum { H = 2048, PIECE = 4096 }; /* PIECE: elements compared at each sampled place */

/* Flat arrays are sampled as rows of PIECE. */
static lev_status pieces(bench *b, lev_dtype dtype, const void *x, int64_t count, double **out) {
  return kernel_rows(b, dtype, x, count / PIECE, PIECE, out);
}

static lev_status floats(bench *b, int64_t count, double scale, void **out) {
  LEV_TRY(bench_alloc(b, (size_t)count * 4, out));
  return bench_random(b, LEV_F32, *out, count, scale);
}

lev_status kernel_add(bench *b, const void *unused) {
  (void)unused;
  rdtp_add_args a = {.dtype = LEV_BF16, .count = bench_size(b, (int64_t)1 << 29, 1 << 18)};
  void *src;
  double *want, *in, *got;
  LEV_TRY(floats(b, a.count, 1, &src));
  LEV_TRY(floats(b, a.count, 1, &a.dst));
  a.src = src;
  LEV_TRY(pieces(b, LEV_F32, a.dst, a.count, &want));
  kernel_job job = KERNEL_JOB(rdtp_add_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(pieces(b, LEV_F32, src, a.count, &in));
  LEV_TRY(pieces(b, LEV_F32, a.dst, a.count, &got));
  for (int i = 0; i < KERNEL_SAMPLES * PIECE; ++i) want[i] += in[i];
  LEV_TRY(bench_close(b, "dst", got, want, KERNEL_SAMPLES * PIECE, 1e-6));
  return kernel_measure(b, &job, 12.0 * (double)a.count);
}

lev_status kernel_cast(bench *b, const void *unused) {
  (void)unused;
  rdtp_store_args a = {.dtype = LEV_BF16, .count = bench_size(b, (int64_t)1 << 29, 1 << 18)};
  void *src;
  double *want, *got;
  LEV_TRY(floats(b, a.count, 1, &src));
  LEV_TRY(bench_alloc(b, (size_t)a.count * 2, &a.dst));
  a.src = src;
  kernel_job job = KERNEL_JOB(rdtp_store_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(pieces(b, LEV_F32, src, a.count, &want));
  LEV_TRY(pieces(b, LEV_BF16, a.dst, a.count, &got));
  for (int i = 0; i < KERNEL_SAMPLES * PIECE; ++i) want[i] = lev_bf16_to_f32(lev_bf16_from_f32((float)want[i]));
  LEV_TRY(bench_close(b, "dst", got, want, KERNEL_SAMPLES * PIECE, 0));
  return kernel_measure(b, &job, 6.0 * (double)a.count);
}

/* ---- optimizer ---- */

lev_status kernel_adamw(bench *b, const void *unused) {
  (void)unused;
  oadamw_update_args a = {.count = bench_size(b, (int64_t)1 << 28, 1 << 18), .param_dtype = LEV_BF16};
  a.grad_dtype = LEV_BF16, a.simd = OADAMW_SIMD_SCALAR;
  a.rates = (oadamw_rates){.grad_scale = 0.5, .beta1 = 0.9, .one_beta1 = 0.1, .beta2 = 0.95, .one_beta2 = 0.05};
  a.rates.inv_sqrt_bc2 = 1 / sqrt(1 - 0.95 * 0.95), a.rates.eps = 1e-8, a.rates.decay = 1e-4, a.rates.rate = 1e-2;
  const oadamw_rates *r = &a.rates;
  void *grads;
  double *g, *w, *m, *v, *got_w, *got_m, *got_v, *got_p;
  LEV_TRY(kernel_array(b, a.count, 1, &grads));
  LEV_TRY(bench_alloc(b, (size_t)a.count * 2, &a.params));
  LEV_TRY(floats(b, a.count, 1, &a.master));
  LEV_TRY(kernel_zeros(b, (size_t)a.count * 4, &a.exp_avg));
  LEV_TRY(kernel_zeros(b, (size_t)a.count * 4, &a.exp_avg_sq));
  a.grads = grads;
  kernel_job job = KERNEL_JOB(oadamw_kernel_update, a);
  LEV_TRY(kernel_launch(b, &job)); /* so that the moments are not zero */
  LEV_TRY(pieces(b, LEV_BF16, grads, a.count, &g));
  LEV_TRY(pieces(b, LEV_F32, a.master, a.count, &w));
  LEV_TRY(pieces(b, LEV_F32, a.exp_avg, a.count, &m));
  LEV_TRY(pieces(b, LEV_F32, a.exp_avg_sq, a.count, &v));
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(pieces(b, LEV_F32, a.master, a.count, &got_w));
  LEV_TRY(pieces(b, LEV_F32, a.exp_avg, a.count, &got_m));
  LEV_TRY(pieces(b, LEV_F32, a.exp_avg_sq, a.count, &got_v));
  LEV_TRY(pieces(b, LEV_BF16, a.params, a.count, &got_p));
  for (int i = 0; i < KERNEL_SAMPLES * PIECE; ++i) {
    double x = r->grad_scale * g[i];
    m[i] = r->beta1 * m[i] + r->one_beta1 * x;
    v[i] = r->beta2 * v[i] + r->one_beta2 * x * x;
    w[i] = w[i] - r->decay * w[i] - r->rate * m[i] / (sqrt(v[i]) * r->inv_sqrt_bc2 + r->eps);
  }
  LEV_TRY(bench_close(b, "first moment", got_m, m, KERNEL_SAMPLES * PIECE, 1e-6));
  LEV_TRY(bench_close(b, "second moment", got_v, v, KERNEL_SAMPLES * PIECE, 1e-6));
  LEV_TRY(bench_close(b, "master weights", got_w, w, KERNEL_SAMPLES * PIECE, 1e-6));
  LEV_TRY(bench_close(b, "weights", got_p, w, KERNEL_SAMPLES * PIECE, KERNEL_BF16_LIMIT));
  return kernel_measure(b, &job, 28.0 * (double)a.count);
}

typedef struct norm_job {
  oadamw_norm_args a;
} norm_job;

static lev_status norm_once(bench *b, void *ctx) {
  const norm_job *j = ctx;
  LEV_TRY(lev_fill(bench_stream(b), j->a.out2, 0, 2 * sizeof(double), "bench.zero"));
  return oadamw_norm_launch(bench_stream(b), j->a.dtype, j->a.grads, j->a.count, j->a.scratch, j->a.out2);
}

/* Random values with known ones in the blocks that are compared cannot give the sum of all: a short array is compared
 * in whole, then the long one must be near its expectation. */
lev_status kernel_norm(bench *b, const void *unused) {
  (void)unused;
  norm_job j = {.a = {.count = bench_size(b, (int64_t)1 << 30, 1 << 19), .dtype = LEV_BF16}};
  enum { SHORT = 3 * OADAMW_NORM_BLOCK + 77 };
  void *grads, *scratch, *out2;
  double *x, got[2], want = 0;
  LEV_TRY(kernel_array(b, j.a.count, 1, &grads));
  LEV_TRY(bench_alloc(b, oadamw_norm_scratch_bytes(j.a.count), &scratch));
  LEV_TRY(bench_alloc(b, 2 * sizeof(double), &out2));
  LEV_TRY(bench_doubles(b, SHORT, &x));
  j.a.grads = grads, j.a.scratch = scratch, j.a.out2 = out2;
  norm_job part = j;
  part.a.count = SHORT;
  LEV_TRY(norm_once(b, &part));
  LEV_TRY(bench_read(b, LEV_F64, out2, 0, 2, got));
  LEV_TRY(bench_read(b, LEV_BF16, grads, 0, SHORT, x));
  for (int i = 0; i < SHORT; ++i) want += x[i] * x[i];
  LEV_TRY(bench_close(b, "sum of squares", got, &want, 1, 1e-12));
  LEV_TRY(norm_once(b, &j));
  LEV_TRY(bench_read(b, LEV_F64, out2, 0, 2, got));
  want = (double)j.a.count;
  LEV_TRY(bench_close(b, "sum of all squares", got, &want, 1, 10 / sqrt(want)));
  LEV_TRY(bench_check(b, got[1] == 0, "%g values are not finite", got[1]));
  bench_work work = {.once = norm_once, .ctx = &j, .bytes = 2.0 * (double)j.a.count};
  return bench_measure(b, &work, BENCH_COPY_FRACTION);
}

/* ---- embedding: every row of the table once, in another order ---- */

static lev_status shuffled_ids(bench *b, int64_t n, int32_t **host, void **ids) {
  void *memory;
  LEV_TRY(bench_host(b, (size_t)n * 4, &memory));
  LEV_TRY(bench_alloc(b, (size_t)n * 4, ids));
  *host = memory;
  /* n is a power of two and the factor odd: a permutation */
  for (int64_t i = 0; i < n; ++i) (*host)[i] = (int32_t)((uint64_t)i * 0x9E3779B1u % (uint64_t)n);
  return bench_put(b, *ids, *host, (size_t)n * 4);
}

lev_status kernel_embed(bench *b, const void *unused) {
  (void)unused;
  int64_t n = bench_size(b, 262144, 512);
  embed_take_args a = {.dtype = LEV_BF16, .count = n, .hidden = H, .shard_rows = n};
  void *ids, *w;
  int32_t *host;
  double *got, *want;
  LEV_TRY(shuffled_ids(b, n, &host, &ids));
  LEV_TRY(kernel_array(b, n * H, 1, &w));
  LEV_TRY(bench_alloc(b, (size_t)(n * H) * 2, &a.rows));
  a.ids = ids, a.w = w;
  kernel_job job = KERNEL_JOB(embed_take_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(bench_doubles(b, H, &want));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.rows, n, H, &got));
  for (int s = 0; s < KERNEL_SAMPLES; ++s) {
    LEV_TRY(bench_read(b, LEV_BF16, w, host[kernel_row(n, s)] * (int64_t)H, H, want));
    /* the same bits */ /* NOLINTNEXTLINE(bugprone-suspicious-memory-comparison) */
    LEV_TRY(bench_check(b, memcmp(want, got + s * H, H * sizeof(double)) == 0, "row %d is another one", s));
  }
  return kernel_measure(b, &job, (double)n * (H * 4 + 4));
}

lev_status kernel_embed_backward(bench *b, const void *unused) {
  (void)unused;
  int64_t n = bench_size(b, 262144, 512);
  embed_add_args a = {.dtype = LEV_BF16, .count = n, .hidden = H, .shard_rows = n};
  void *ids, *rows;
  int32_t *host;
  double *got, *want, *in;
  LEV_TRY(shuffled_ids(b, n, &host, &ids));
  LEV_TRY(kernel_array(b, n * H, 1, &rows));
  LEV_TRY(floats(b, n * H, 1, &a.dw));
  a.ids = ids, a.rows = rows;
  LEV_TRY(bench_doubles(b, KERNEL_SAMPLES * H, &want));
  LEV_TRY(bench_doubles(b, KERNEL_SAMPLES * H, &got));
  for (int s = 0; s < KERNEL_SAMPLES; ++s)
    LEV_TRY(bench_read(b, LEV_F32, a.dw, host[kernel_row(n, s)] * (int64_t)H, H, want + s * H));
  kernel_job job = KERNEL_JOB(embed_add_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(kernel_rows(b, LEV_BF16, rows, n, H, &in));
  for (int s = 0; s < KERNEL_SAMPLES; ++s)
    LEV_TRY(bench_read(b, LEV_F32, a.dw, host[kernel_row(n, s)] * (int64_t)H, H, got + s * H));
  for (int i = 0; i < KERNEL_SAMPLES * H; ++i) want[i] += in[i];
  LEV_TRY(bench_close(b, "dw", got, want, KERNEL_SAMPLES * H, 1e-6));
  return kernel_measure(b, &job, (double)n * (H * 10 + 4));
}

/* ---- cross entropy over a logits tile ---- */

static lev_status logits(bench *b, int64_t rows, int64_t cols, void **tile, void **labels) {
  void *numbers;
  LEV_TRY(floats(b, rows * cols, 3, tile));
  LEV_TRY(bench_alloc(b, (size_t)rows * 4, labels));
  LEV_TRY(bench_host(b, (size_t)rows * 4, &numbers));
  for (int64_t r = 0; r < rows; ++r) ((int32_t *)numbers)[r] = (int32_t)(r * 7919 % cols);
  return bench_put(b, *labels, numbers, (size_t)rows * 4);
}

lev_status kernel_fold(bench *b, const void *unused) {
  (void)unused;
  int64_t rows = bench_size(b, 8192, 64), cols = bench_size(b, 131072, 4096);
  rdtp_fold_args a = {.dtype = LEV_BF16, .ld = cols, .rows = rows, .cols = cols, .first = true};
  void *tile, *labels;
  double *x, *state, want[KERNEL_SAMPLES], got[KERNEL_SAMPLES];
  LEV_TRY(logits(b, rows, cols, &tile, &labels));
  LEV_TRY(bench_alloc(b, (size_t)rows * RDTP_STATE * 4, &a.state));
  a.tile = tile, a.labels = labels;
  kernel_job job = KERNEL_JOB(rdtp_fold_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(kernel_rows(b, LEV_F32, tile, rows, cols, &x));
  LEV_TRY(kernel_rows(b, LEV_F32, a.state, rows, RDTP_STATE, &state));
  for (int s = 0; s < KERNEL_SAMPLES; ++s) { /* negative log-likelihoods */
    double sum = 0, own = x[s * cols + kernel_row(rows, s) * 7919 % cols];
    for (int64_t i = 0; i < cols; ++i) sum += exp(x[s * cols + i]);
    want[s] = log(sum) - own;
    got[s] = state[s * RDTP_STATE] + log(state[s * RDTP_STATE + 1]) - state[s * RDTP_STATE + 2];
  }
  LEV_TRY(bench_close(b, "loss", got, want, KERNEL_SAMPLES, 1e-5));
  return kernel_measure(b, &job, 4.0 * (double)rows * (double)cols);
}

lev_status kernel_residual(bench *b, const void *unused) {
  (void)unused;
  int64_t rows = bench_size(b, 8192, 64), cols = bench_size(b, 131072, 4096);
  rdtp_residual_args a = {.dtype = LEV_BF16, .ld = cols, .rows = rows, .cols = cols, .scale = 0.25};
  void *labels, *records, *host;
  double *x, *got, m = 4, z = 0.25 / 3e4; /* of a row: probability = e^(x - m) z */
  LEV_TRY(logits(b, rows, cols, &a.tile, &labels));
  LEV_TRY(bench_alloc(b, (size_t)rows * RDTP_STATE * 4, &records));
  LEV_TRY(bench_host(b, (size_t)rows * RDTP_STATE * 4, &host));
  for (int64_t r = 0; r < rows; ++r) {
    float record[2] = {(float)m, (float)z};
    int32_t label = (int32_t)(r * 7919 % cols);
    memcpy((float *)host + r * RDTP_STATE, record, sizeof record);
    memcpy((float *)host + r * RDTP_STATE + 2, &label, sizeof label);
  }
  LEV_TRY(bench_put(b, records, host, (size_t)rows * RDTP_STATE * 4));
  a.record = records;
  LEV_TRY(kernel_rows(b, LEV_F32, a.tile, rows, cols, &x));
  kernel_job job = KERNEL_JOB(rdtp_residual_kernel, a);
  LEV_TRY(kernel_launch(b, &job));
  LEV_TRY(kernel_rows(b, LEV_BF16, a.tile, rows, 2 * cols, &got)); /* results from the start of each row */
  for (int s = 0; s < KERNEL_SAMPLES; ++s) {
    for (int64_t i = 0; i < cols; ++i) x[s * cols + i] = exp(x[s * cols + i] - m) * (float)z;
    x[s * cols + kernel_row(rows, s) * 7919 % cols] -= a.scale;
    LEV_TRY(bench_close(b, "residual", got + s * 2 * cols, x + s * cols, cols, KERNEL_BF16_LIMIT));
  }
  return kernel_measure(b, &job, 6.0 * (double)rows * (double)cols);
}
