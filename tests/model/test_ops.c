/* SPDX-License-Identifier: Apache-2.0 */
/* Row-wise operations against naive f64 formulas, and their backward passes against central differences. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness/model/ops.h"
#include "tests/num.h"
#include "tests/t.h"

enum { ROWS = 5, HEADS = 3, DIM = 6, COLS = HEADS * DIM, EXPERTS = 7, TOP_K = 3 };

static const int32_t position[ROWS] = {0, 1, 17, 4095, 1000003};

/* ---- RMS norm ---- */

static void rmsnorm_oracle(const double *x, const double *w, double *y, int64_t rows, int64_t cols, double eps) {
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < cols; ++i) sum += x[r * cols + i] * x[r * cols + i];
    for (int64_t i = 0; i < cols; ++i)
      y[r * cols + i] = x[r * cols + i] * w[i] / sqrt(sum / (double)cols + eps);
  }
}

T_TEST(rmsnorm_matches_oracle) {
  const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16};
  const double tolerance[] = {1e-14, 1e-6, 4e-3}; /* bf16: half an ulp is 2^-9 */
  for (int i = 0; i < 3; ++i) {
    double x64[ROWS * COLS], w64[COLS], want[ROWS * COLS], x[ROWS * COLS], w[COLS], y[ROWS * COLS];
    num_random(types[i], x, x64, ROWS * COLS, 3, 1);
    num_random(types[i], w, w64, COLS, 1, 2);
    num_poison(y, sizeof y);
    rmsnorm_oracle(x64, w64, want, ROWS, COLS, 1e-5);
    lev_rmsnorm_args args = {types[i], ROWS, COLS, 1e-5, x, w, y};
    lev_rmsnorm_kernel.cpu(&args);
    NUM_CHECK(types[i], y, want, ROWS, COLS, tolerance[i], "rmsnorm");
  }
}

/* ---- central differences of <c, f(input)> ---- */

typedef void (*forward_fn)(const double *input, double *output, void *ctx);

/* Directional check: d/dt <c, f(x + t u)> against <grad, u>. */
static void check_gradient(forward_fn f, void *ctx, const double *input, int n_in, int n_out, const double *c,
                           const double *grad, const char *what) {
  double *u = malloc(sizeof(double) * (size_t)n_in), *moved = malloc(sizeof(double) * (size_t)n_in);
  double *out = malloc(sizeof(double) * (size_t)n_out);
  for (uint32_t trial = 0; trial < 4; ++trial) {
    double t = 1e-5, want[2] = {0, 0}, got = 0;
    num_random(LEV_F64, u, NULL, n_in, 1, 100 + trial);
    for (int side = 0; side < 2; ++side) {
      for (int i = 0; i < n_in; ++i) moved[i] = input[i] + (side ? -t : t) * u[i];
      f(moved, out, ctx);
      for (int i = 0; i < n_out; ++i) want[side] += c[i] * out[i];
    }
    for (int i = 0; i < n_in; ++i) got += grad[i] * u[i];
    double slope = (want[0] - want[1]) / (2 * t);
    T_EXPECT_MSG(fabs(slope - got) <= 1e-7 * (1 + fabs(slope)), "%s: slope %.12g, gradient says %.12g", what, slope, got);
  }
  free(u), free(moved), free(out);
}

static void rmsnorm_of_input(const double *input, double *output, void *ctx) {
  (void)ctx; /* input = x, then w */
  lev_rmsnorm_args args = {LEV_F64, ROWS, COLS, 1e-5, input, input + ROWS * COLS, output};
  lev_rmsnorm_kernel.cpu(&args);
}

T_TEST(rmsnorm_backward_by_differences) {
  double input[ROWS * COLS + COLS], c[ROWS * COLS], grad[ROWS * COLS + COLS] = {0};
  num_random(LEV_F64, input, NULL, ROWS * COLS + COLS, 2, 3);
  num_random(LEV_F64, c, NULL, ROWS * COLS, 1, 4);
  lev_rmsnorm_backward_args args = {.dtype = LEV_F64, .rows = ROWS, .cols = COLS, .eps = 1e-5, .x = input,
                                    .w = input + ROWS * COLS, .dy = c, .dx = grad, .dw = grad + ROWS * COLS};
  lev_rmsnorm_backward_kernel.cpu(&args);
  check_gradient(rmsnorm_of_input, NULL, input, ROWS * COLS + COLS, ROWS * COLS, c, grad, "rmsnorm");
  /* in place on x, and accumulated */
  double x[ROWS * COLS], twice[ROWS * COLS], dw[COLS] = {0};
  memcpy(x, input, sizeof x);
  args.x = x, args.dx = x, args.dw = dw;
  lev_rmsnorm_backward_kernel.cpu(&args);
  T_EXPECT(memcmp(x, grad, sizeof x) == 0);
  memcpy(twice, grad, sizeof twice);
  args.x = input, args.dx = twice, args.accumulate = true;
  lev_rmsnorm_backward_kernel.cpu(&args);
  for (int i = 0; i < ROWS * COLS; ++i) x[i] = 2 * grad[i];
  NUM_CHECK(LEV_F64, twice, x, ROWS, COLS, 1e-14, "accumulated dx");
}

/* ---- queries, keys and values ---- */

typedef struct qk_case {
  lev_qk_norm norm;
  double clip;
  lev_rope rope;
  const int32_t *position;
} qk_case;

static const qk_case qk_cases[] = {
    {LEV_QK_NORM_NONE, 0, {.theta = 1e4}, position},
    {LEV_QK_NORM_FULL, 0, {.theta = 1e4}, position},
    {LEV_QK_NORM_HEAD, 0, {.theta = 1e4}, position},
    {LEV_QK_NORM_NONE, 0.9, {.theta = 1e4}, NULL},
    {LEV_QK_NORM_FULL, 0.6, {.theta = 1e4, .scaling = LEV_ROPE_LINEAR, .factor = 3}, position},
    {LEV_QK_NORM_HEAD, 0.6,
     {.theta = 50, .scaling = LEV_ROPE_YARN, .factor = 4, .original_max_position = 40, .beta_fast = 3, .beta_slow = 1},
     position}};

static lev_qk_args qk_args(const qk_case *c, const double *input) {
  return (lev_qk_args){.dtype = LEV_F64, .rows = ROWS, .heads = HEADS, .head_dim = DIM, .norm = c->norm, .eps = 1e-5,
                       .clip = c->clip, .rope = c->rope, .position = c->position, .x = input, .w = input + ROWS * COLS};
}

static void qk_of_input(const double *input, double *output, void *ctx) {
  lev_qk_args args = qk_args(ctx, input);
  args.y = output;
  lev_qk_kernel.cpu(&args);
}

static void qk_oracle(const qk_case *c, const double *input, double *want) {
  const double *w = input + ROWS * COLS;
  double frequency[DIM / 2], factor = lev_rope_frequencies(&c->rope, DIM, frequency);
  memcpy(want, input, sizeof(double) * ROWS * COLS);
  if (c->norm == LEV_QK_NORM_FULL) rmsnorm_oracle(input, w, want, ROWS, COLS, 1e-5);
  if (c->norm == LEV_QK_NORM_HEAD) rmsnorm_oracle(input, w, want, ROWS * HEADS, DIM, 1e-5);
  for (int i = 0; i < ROWS * COLS && c->clip > 0; ++i) want[i] = fmin(fmax(want[i], -c->clip), c->clip);
  for (int r = 0; r < ROWS && c->position; ++r)
    for (int h = 0; h < HEADS; ++h)
      for (int i = 0; i < DIM / 2; ++i) {
        double *u = &want[r * COLS + h * DIM + i], *v = u + DIM / 2, a = c->position[r] * frequency[i], u0 = *u;
        *u = factor * (u0 * cos(a) - *v * sin(a));
        *v = factor * (*v * cos(a) + u0 * sin(a));
      }
}

T_TEST(qk_matches_oracle_and_differences) {
  for (size_t kind = 0; kind < sizeof qk_cases / sizeof *qk_cases; ++kind) {
    qk_case c = qk_cases[kind];
    int n_w = c.norm == LEV_QK_NORM_FULL ? COLS : c.norm == LEV_QK_NORM_HEAD ? DIM : 0, n_in = ROWS * COLS + n_w;
    double input[ROWS * COLS + COLS], y[ROWS * COLS], want[ROWS * COLS], up[ROWS * COLS], grad[ROWS * COLS + COLS] = {0};
    num_random(LEV_F64, input, NULL, n_in, 2, 5);
    num_random(LEV_F64, up, NULL, ROWS * COLS, 1, 6);
    qk_of_input(input, y, &c);
    qk_oracle(&c, input, want);
    NUM_CHECK(LEV_F64, y, want, ROWS, COLS, 1e-11, "qk");
    lev_qk_args args = qk_args(&c, input);
    args.dy = up, args.dx = grad, args.dw = grad + ROWS * COLS;
    lev_qk_backward_kernel.cpu(&args);
    check_gradient(qk_of_input, &c, input, n_in, ROWS * COLS, up, grad, "qk");
  }
}

/* ---- router ---- */

typedef struct router_case {
  bool norm_topk;
  int32_t ids[ROWS * TOP_K];
} router_case;

static void router_of_logits(const double *input, double *output, void *ctx) {
  router_case *c = ctx;
  lev_router_args args = {.dtype = LEV_F64, .rows = ROWS, .experts = EXPERTS, .top_k = TOP_K, .norm_topk = c->norm_topk,
                          .logits = input, .ids = c->ids, .weights = output};
  lev_router_kernel.cpu(&args);
}

T_TEST(router_picks_the_largest_with_ties_to_the_lower_id) {
  double logits[2 * EXPERTS] = {1, 5, 5, 2, 5, 0, 1, -1, -1, -1, -1, -1, -1, -1}, weights[2 * TOP_K], sums[1 + 2 * EXPERTS] = {0};
  int32_t ids[2 * TOP_K], want[2 * TOP_K] = {1, 2, 4, 0, 1, 2};
  int64_t counts[EXPERTS] = {0};
  lev_router_args args = {.dtype = LEV_F64, .rows = 2, .experts = EXPERTS, .top_k = TOP_K, .select = true,
                          .logits = logits, .ids = ids, .weights = weights, .counts = counts, .sums = sums};
  lev_router_kernel.cpu(&args);
  T_EXPECT(memcmp(ids, want, sizeof ids) == 0);
  T_EXPECT_EQ_I64(counts[1], 2);
  T_EXPECT_EQ_I64(counts[3], 0);
  double p = 0;
  for (int e = 0; e < EXPERTS; ++e) p += sums[1 + e];
  T_EXPECT(fabs(p - 2) < 1e-12);
  T_EXPECT(sums[1 + EXPERTS + 4] == 1);
  T_EXPECT(fabs(weights[3] - 1.0 / EXPERTS) < 1e-15);
  args.norm_topk = true;
  lev_router_kernel.cpu(&args);
  T_EXPECT(fabs(weights[3] - 1.0 / TOP_K) < 1e-15);
  args.uniform = true;
  lev_router_kernel.cpu(&args);
  T_EXPECT(ids[0] == 0 && ids[TOP_K] == 3 && ids[TOP_K + 2] == 5);
}

T_TEST(router_backward_by_differences) {
  for (int norm = 0; norm < 2; ++norm) {
    double logits[ROWS * EXPERTS], weights[ROWS * TOP_K], c[ROWS * TOP_K], grad[ROWS * EXPERTS];
    router_case rc = {.norm_topk = norm};
    num_random(LEV_F64, logits, NULL, ROWS * EXPERTS, 2, 7);
    num_random(LEV_F64, c, NULL, ROWS * TOP_K, 1, 8);
    lev_router_args args = {.dtype = LEV_F64, .rows = ROWS, .experts = EXPERTS, .top_k = TOP_K, .norm_topk = norm,
                            .select = true, .logits = logits, .ids = rc.ids, .weights = weights};
    lev_router_kernel.cpu(&args);
    lev_router_backward_args back = {.dtype = LEV_F64, .rows = ROWS, .experts = EXPERTS, .top_k = TOP_K,
                                     .norm_topk = norm, .logits = logits, .ids = rc.ids, .dweights = c, .dlogits = grad};
    lev_router_backward_kernel.cpu(&back);
    check_gradient(router_of_logits, &rc, logits, ROWS * EXPERTS, ROWS * TOP_K, c, grad, "router weights");
  }
}

/* 0.3 * sum_e n_e sum_t p[t,e] + 0.7 * sum_t lse^2 */
static void router_losses(const double *logits, double *output, void *ctx) {
  const int64_t *counts = ctx;
  *output = 0;
  for (int t = 0; t < ROWS; ++t) {
    double sum = 0;
    for (int e = 0; e < EXPERTS; ++e) sum += exp(logits[t * EXPERTS + e]);
    for (int e = 0; e < EXPERTS; ++e) *output += 0.3 * (double)counts[e] * exp(logits[t * EXPERTS + e]) / sum;
    *output += 0.7 * log(sum) * log(sum);
  }
}

T_TEST(router_balance_and_z_by_differences) {
  double logits[ROWS * EXPERTS], dweights[ROWS * TOP_K] = {0}, grad[ROWS * EXPERTS], one = 1;
  int32_t ids[ROWS * TOP_K];
  int64_t counts[EXPERTS] = {4, 0, 1, 5, 2, 2, 1};
  for (int i = 0; i < ROWS * TOP_K; ++i) ids[i] = i % TOP_K;
  num_random(LEV_F64, logits, NULL, ROWS * EXPERTS, 2, 9);
  lev_router_backward_args back = {.dtype = LEV_F64, .rows = ROWS, .experts = EXPERTS, .top_k = TOP_K, .logits = logits,
                                   .ids = ids, .dweights = dweights, .counts = counts, .balance_scale = 0.3,
                                   .z_scale = 0.7, .dlogits = grad};
  lev_router_backward_kernel.cpu(&back);
  check_gradient(router_losses, counts, logits, ROWS * EXPERTS, 1, &one, grad, "balance and z-loss");
}
