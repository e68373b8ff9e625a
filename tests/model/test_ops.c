/* SPDX-License-Identifier: Apache-2.0 */
/* Row-wise operations against naive f64 formulas, and their backward passes against central differences. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness/model/ops.h"
#include "tests/model/ops_rig.h"
#include "tests/num.h"
#include "tests/t.h"

enum { ROWS = 5, HEADS = 3, DIM = 6, COLS = HEADS * DIM, EXPERTS = 9, TOP_K = 3 };

static const int32_t position[ROWS] = {0, 1, 17, 4095, 1000003};

/* ---- RMS norm ---- */

static void rmsnorm_oracle(const double *x, const double *w, double *y, int64_t rows, int64_t cols, double eps) {
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < cols; ++i) sum += x[r * cols + i] * x[r * cols + i];
    for (int64_t i = 0; i < cols; ++i) y[r * cols + i] = x[r * cols + i] * w[i] / sqrt(sum / (double)cols + eps);
  }
}

T_TEST(rmsnorm_matches_oracle) {
  ops_begin();
  const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16};
  const double tolerance[] = {1e-14, 1e-6, 4e-3}; /* bf16: half an ulp is 2^-9 */
  for (int i = 0; i < 3; ++i) {
    double x64[ROWS * COLS], w64[COLS], want[ROWS * COLS];
    OPS_ROOM(double, x, ROWS *COLS);
    OPS_ROOM(double, w, COLS);
    OPS_ROOM(double, y, ROWS *COLS);
    num_random(types[i], x, x64, ROWS * COLS, 3, 1);
    num_random(types[i], w, w64, COLS, 1, 2);
    rmsnorm_oracle(x64, w64, want, ROWS, COLS, 1e-5);
    lev_rmsnorm_args args = {types[i], ROWS, COLS, 1e-5, x, w, y};
    OPS_RUN(lev_rmsnorm_kernel, args);
    NUM_CHECK(types[i], y, want, ROWS, COLS, tolerance[i], "rmsnorm");
  }
}

/* ---- central differences of <c, f(input)> ---- */

typedef void (*forward_fn)(const double *input, double *output, void *ctx);

/* Directional check: d/dt <c, f(x + t u)> against <grad, u>. */
static void check_gradient(forward_fn f, void *ctx, const double *input, int n_in, int n_out, const double *c,
                           const double *grad, const char *what) {
  OPS_ROOM(double, u, n_in);
  OPS_ROOM(double, moved, n_in);
  OPS_ROOM(double, out, n_out);
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
    T_EXPECT_MSG(fabs(slope - got) <= 1e-7 * (1 + fabs(slope)), "%s: slope %.12g, gradient says %.12g", what, slope,
                 got);
  }
}

static void rmsnorm_of_input(const double *input, double *output, void *ctx) {
  (void)ctx; /* input = x, then w */
  lev_rmsnorm_args args = {LEV_F64, ROWS, COLS, 1e-5, input, input + ROWS * COLS, output};
  OPS_RUN(lev_rmsnorm_kernel, args);
}

T_TEST(rmsnorm_backward_by_differences) {
  ops_begin();
  OPS_ROOM(double, input, ROWS *COLS + COLS);
  OPS_ROOM(double, c, ROWS *COLS);
  OPS_ROOM(double, grad, ROWS *COLS + COLS);
  memset(grad, 0, sizeof(double) * (ROWS * COLS + COLS));
  num_random(LEV_F64, input, NULL, ROWS * COLS + COLS, 2, 3);
  num_random(LEV_F64, c, NULL, ROWS * COLS, 1, 4);
  lev_rmsnorm_backward_args args = {.dtype = LEV_F64,
                                    .rows = ROWS,
                                    .cols = COLS,
                                    .eps = 1e-5,
                                    .x = input,
                                    .w = input + ROWS * COLS,
                                    .dy = c,
                                    .dx = grad,
                                    .dw = grad + ROWS * COLS};
  args.scratch = ops_scratch(&args.scratch_bytes);
  OPS_RUN(lev_rmsnorm_backward_kernel, args);
  check_gradient(rmsnorm_of_input, NULL, input, ROWS * COLS + COLS, ROWS * COLS, c, grad, "rmsnorm");
  /* in place on x, and accumulated */
  const size_t bytes = sizeof(double) * ROWS * COLS;
  OPS_ROOM(double, x, ROWS *COLS);
  OPS_ROOM(double, twice, ROWS *COLS);
  OPS_ROOM(double, dw, COLS);
  memset(dw, 0, sizeof(double) * COLS);
  memcpy(x, input, bytes);
  args.x = x, args.dx = x, args.dw = dw;
  OPS_RUN(lev_rmsnorm_backward_kernel, args);
  T_EXPECT(memcmp(x, grad, bytes) == 0);
  memcpy(twice, grad, bytes);
  args.x = input, args.dx = twice, args.accumulate = true;
  OPS_RUN(lev_rmsnorm_backward_kernel, args);
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
    {LEV_QK_NORM_HEAD,
     0.6,
     {.theta = 50, .scaling = LEV_ROPE_YARN, .factor = 4, .original_max_position = 40, .beta_fast = 3, .beta_slow = 1},
     position}};

static lev_qk_args qk_args(const qk_case *c, const double *input) {
  size_t scratch_bytes;
  void *scratch = ops_scratch(&scratch_bytes);
  int32_t *at = NULL;
  if (c->position) at = memcpy(ops_room(sizeof position), position, sizeof position);
  return (lev_qk_args){.dtype = LEV_F64,
                       .rows = ROWS,
                       .heads = HEADS,
                       .head_dim = DIM,
                       .norm = c->norm,
                       .eps = 1e-5,
                       .clip = c->clip,
                       .rope = c->rope,
                       .position = at,
                       .x = input,
                       .w = input + ROWS * COLS,
                       .scratch = scratch,
                       .scratch_bytes = scratch_bytes};
}

static void qk_of_input(const double *input, double *output, void *ctx) {
  lev_qk_args args = qk_args(ctx, input);
  args.y = output;
  OPS_RUN(lev_qk_kernel, args);
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
  ops_begin();
  for (size_t kind = 0; kind < sizeof qk_cases / sizeof *qk_cases; ++kind) {
    qk_case c = qk_cases[kind];
    int n_w = c.norm == LEV_QK_NORM_FULL ? COLS : c.norm == LEV_QK_NORM_HEAD ? DIM : 0, n_in = ROWS * COLS + n_w;
    double want[ROWS * COLS];
    OPS_ROOM(double, input, ROWS *COLS + COLS);
    OPS_ROOM(double, y, ROWS *COLS);
    OPS_ROOM(double, up, ROWS *COLS);
    OPS_ROOM(double, grad, ROWS *COLS + COLS);
    memset(grad, 0, sizeof(double) * (ROWS * COLS + COLS));
    num_random(LEV_F64, input, NULL, n_in, 2, 5);
    num_random(LEV_F64, up, NULL, ROWS * COLS, 1, 6);
    qk_of_input(input, y, &c);
    qk_oracle(&c, input, want);
    NUM_CHECK(LEV_F64, y, want, ROWS, COLS, 1e-11, "qk");
    lev_qk_args args = qk_args(&c, input);
    args.dy = up, args.dx = grad, args.dw = grad + ROWS * COLS;
    OPS_RUN(lev_qk_backward_kernel, args);
    check_gradient(qk_of_input, &c, input, n_in, ROWS * COLS, up, grad, "qk");
  }
}

/* ---- SwiGLU ---- */

static void swiglu_of_input(const double *input, double *output, void *ctx) {
  (void)ctx; /* input = gate, then up */
  lev_swiglu_args args = {LEV_F64, ROWS * COLS, input, input + ROWS * COLS, output};
  OPS_RUN(lev_swiglu_kernel, args);
}

T_TEST(swiglu_matches_oracle_and_differences) {
  ops_begin();
  double want[ROWS * COLS];
  OPS_ROOM(double, input, 2 * ROWS * COLS);
  OPS_ROOM(double, grad, 2 * ROWS * COLS);
  OPS_ROOM(double, y, ROWS *COLS);
  OPS_ROOM(double, c, ROWS *COLS);
  OPS_ROOM(double, d, ROWS *COLS);
  num_random(LEV_F64, input, NULL, 2 * ROWS * COLS, 3, 40);
  num_random(LEV_F64, c, NULL, ROWS * COLS, 1, 41);
  for (int i = 0; i < ROWS * COLS; ++i) want[i] = input[i] / (1 + exp(-input[i])) * input[ROWS * COLS + i];
  swiglu_of_input(input, y, NULL);
  NUM_CHECK(LEV_F64, y, want, ROWS, COLS, 1e-14, "swiglu");
  memcpy(grad, input, sizeof(double) * 2 * ROWS * COLS);
  memcpy(d, c, sizeof(double) * ROWS * COLS);
  lev_swiglu_backward_args args = {LEV_F64, ROWS * COLS, grad, grad + ROWS * COLS, d};
  OPS_RUN(lev_swiglu_backward_kernel, args);
  NUM_CHECK(LEV_F64, d, want, ROWS, COLS, 1e-14, "swiglu rebuilt");
  check_gradient(swiglu_of_input, NULL, input, 2 * ROWS * COLS, ROWS * COLS, c, grad, "swiglu");
}

/* ---- router ---- */

typedef struct router_case {
  lev_route_rule rule;
  const double *bias;
  int32_t *ids; /* [ROWS * TOP_K] */
} router_case;

enum { RULES = 5 };
static lev_route_rule rule_of(int i) {
  const lev_route_rule rules[RULES] = {{LEV_SCORE_SOFTMAX, false, 1, 1, 1},
                                       {LEV_SCORE_SOFTMAX, true, 1, 1, 1},
                                       {LEV_SCORE_SIGMOID, false, 1, 1, 2.5},
                                       {LEV_SCORE_SIGMOID, true, 3, 2, 2.5},
                                       {LEV_SCORE_SOFTMAX, true, 3, 1, 0.7}};
  return rules[i];
}

static lev_router_args router_args(const lev_route_rule *rule, const double *logits, int32_t *ids, double *weights) {
  size_t scratch_bytes;
  void *scratch = ops_scratch(&scratch_bytes);
  return (lev_router_args){.dtype = LEV_F64,
                           .rows = ROWS,
                           .experts = EXPERTS,
                           .top_k = TOP_K,
                           .rule = *rule,
                           .logits = logits,
                           .ids = ids,
                           .weights = weights,
                           .scratch = scratch,
                           .scratch_bytes = scratch_bytes};
}

static void router_of_logits(const double *input, double *output, void *ctx) {
  router_case *c = ctx;
  lev_router_args args = router_args(&c->rule, input, c->ids, output);
  OPS_RUN(lev_router_kernel, args);
}

/* Scores and, normalised over E, probabilities of a row. */
static void scores_oracle(const lev_route_rule *rule, const double *logits, double *score, double *p) {
  double sum = 0, all = 0;
  for (int e = 0; e < EXPERTS; ++e) sum += exp(logits[e]);
  for (int e = 0; e < EXPERTS; ++e)
    all += score[e] = rule->score == LEV_SCORE_SIGMOID ? 1 / (1 + exp(-logits[e])) : exp(logits[e]) / sum;
  for (int e = 0; e < EXPERTS; ++e) p[e] = score[e] / all;
}

/* Sorts by a naive pass over everything that is not yet taken. */
static int best_of(const double *x, int n, const bool *taken) {
  int best = -1;
  for (int i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
  return best;
}

static void choice_oracle(const lev_route_rule *rule, const double *choice, int32_t *ids) {
  enum { MOST = EXPERTS };
  int groups = (int)rule->groups, size = EXPERTS / groups;
  bool group_taken[MOST] = {false}, taken[MOST];
  double group[MOST];
  for (int g = 0; g < groups; ++g) { /* sum of the best two */
    bool used[MOST] = {false};
    group[g] = 0;
    for (int i = 0; i < 2; ++i) {
      int best = best_of(choice + g * size, size, used);
      used[best] = true;
      group[g] += choice[g * size + best];
    }
  }
  for (int i = 0; i < rule->top_groups; ++i) group_taken[best_of(group, groups, group_taken)] = true;
  for (int e = 0; e < EXPERTS; ++e) taken[e] = !group_taken[e / size];
  for (int j = 0; j < TOP_K; ++j) {
    ids[j] = best_of(choice, EXPERTS, taken);
    taken[ids[j]] = true;
  }
}

T_TEST(router_matches_oracle) {
  ops_begin();
  OPS_ROOM(double, logits, ROWS *EXPERTS);
  OPS_ROOM(double, bias, EXPERTS);
  num_random(LEV_F64, logits, NULL, ROWS * EXPERTS, 2, 20);
  num_random(LEV_F64, bias, NULL, EXPERTS, 0.5, 21);
  for (int i = 0; i < RULES; ++i)
    for (int biased = 0; biased < 2; ++biased) {
      lev_route_rule rule = rule_of(i);
      double want[ROWS * TOP_K], mass[EXPERTS] = {0};
      int32_t chosen[ROWS * TOP_K];
      OPS_ROOM(double, weights, ROWS *TOP_K);
      OPS_ROOM(double, sums, 1 + 2 * EXPERTS);
      OPS_ROOM(int32_t, ids, ROWS * TOP_K);
      OPS_ROOM(int64_t, counts, EXPERTS);
      memset(sums, 0, sizeof(double) * (1 + 2 * EXPERTS));
      memset(counts, 0, sizeof(int64_t) * EXPERTS);
      lev_router_args args = router_args(&rule, logits, ids, weights);
      args.select = true, args.bias = biased ? bias : NULL, args.counts = counts, args.sums = sums;
      OPS_RUN(lev_router_kernel, args);
      for (int t = 0; t < ROWS; ++t) {
        double score[EXPERTS], p[EXPERTS], choice[EXPERTS], sum = 0;
        scores_oracle(&rule, logits + t * EXPERTS, score, p);
        for (int e = 0; e < EXPERTS; ++e) choice[e] = score[e] + (biased ? bias[e] : 0), mass[e] += p[e];
        choice_oracle(&rule, choice, chosen + t * TOP_K);
        for (int j = 0; j < TOP_K; ++j) sum += score[chosen[t * TOP_K + j]];
        for (int j = 0; j < TOP_K; ++j)
          want[t * TOP_K + j] = rule.scale * score[chosen[t * TOP_K + j]] / (rule.norm_topk ? sum : 1);
      }
      T_EXPECT_MSG(memcmp(ids, chosen, sizeof chosen) == 0, "rule %d, bias %d: other experts", i, biased);
      NUM_CHECK(LEV_F64, weights, want, ROWS, TOP_K, 1e-13, "router weights");
      NUM_CHECK(LEV_F64, sums + 1, mass, EXPERTS, 1, 1e-13, "probability sums");
      int64_t assigned = 0;
      for (int e = 0; e < EXPERTS; ++e) {
        assigned += counts[e];
        T_EXPECT((double)counts[e] == sums[1 + EXPERTS + e]);
      }
      T_EXPECT_EQ_I64(assigned, ROWS * TOP_K);
    }
}

T_TEST(router_picks_the_largest_with_ties_to_the_lower_id) {
  ops_begin();
  static const double tied[2 * EXPERTS] = {1, 5, 5, 2, 5, 0, 1, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  static const int32_t want[2 * TOP_K] = {1, 2, 4, 0, 1, 2};
  double *logits = memcpy(ops_room(sizeof tied), tied, sizeof tied);
  OPS_ROOM(double, weights, 2 * TOP_K);
  OPS_ROOM(int32_t, ids, 2 * TOP_K);
  lev_route_rule rule = rule_of(0);
  lev_router_args args = router_args(&rule, logits, ids, weights);
  args.rows = 2, args.select = true;
  OPS_RUN(lev_router_kernel, args);
  T_EXPECT(memcmp(ids, want, sizeof want) == 0);
  T_EXPECT(fabs(weights[3] - 1.0 / EXPERTS) < 1e-15);
  args.rule.norm_topk = true;
  OPS_RUN(lev_router_kernel, args);
  T_EXPECT(fabs(weights[3] - 1.0 / TOP_K) < 1e-15);
  args.uniform = true;
  OPS_RUN(lev_router_kernel, args);
  T_EXPECT(ids[0] == 0 && ids[TOP_K] == 3 && ids[TOP_K + 2] == 5);
}

/* NaN ranks below everything, also below minus infinity, and equals NaN; a group that begins with NaN is one. */
T_TEST(router_ranks_nan_last) {
  ops_begin();
  static const double bad[5 * EXPERTS] = {NAN, NAN,       NAN, NAN, NAN, NAN, NAN, NAN, NAN, /* all */
                                          NAN, 1,         NAN, 2,   NAN, NAN, NAN, NAN, NAN, /* few others */
                                          NAN, -INFINITY, NAN, NAN, NAN, NAN, NAN, NAN, NAN,
                                          NAN, 9,         9,   1,   1,   1,   2,   2,   2,  /* a group's first ... */
                                          9,   NAN,       9,   1,   1,   1,   2,   NAN, 2}; /* ... or a later one */
  static const int32_t want[5 * TOP_K] = {0, 1, 2, 3, 1, 0, 1, 0, 2, 6, 7, 8, 0, 2, 6};
  double *logits = memcpy(ops_room(sizeof bad), bad, sizeof bad);
  OPS_ROOM(double, weights, 5 * TOP_K);
  OPS_ROOM(int32_t, ids, 5 * TOP_K);
  for (int grouped = 0; grouped < 2; ++grouped) {
    lev_route_rule rule = rule_of(grouped ? 3 : 0);
    lev_router_args args = router_args(&rule, logits + (grouped ? 3 * EXPERTS : 0), ids, weights);
    const int32_t *expected = want + (grouped ? 3 * TOP_K : 0);
    args.rows = grouped ? 2 : 3, args.select = true;
    OPS_RUN(lev_router_kernel, args);
    for (int i = 0; i < args.rows * TOP_K; ++i)
      T_EXPECT_MSG(ids[i] == expected[i], "rule %d, pick %d: expert %d, expected %d", grouped, i, ids[i], expected[i]);
  }
}

T_TEST(router_backward_by_differences) {
  ops_begin();
  for (int i = 0; i < RULES; ++i) {
    OPS_ROOM(double, logits, ROWS *EXPERTS);
    OPS_ROOM(double, weights, ROWS *TOP_K);
    OPS_ROOM(double, c, ROWS *TOP_K);
    OPS_ROOM(double, grad, ROWS *EXPERTS);
    router_case rc = {.rule = rule_of(i), .ids = ops_room(sizeof(int32_t) * ROWS * TOP_K)};
    num_random(LEV_F64, logits, NULL, ROWS * EXPERTS, 2, 7);
    num_random(LEV_F64, c, NULL, ROWS * TOP_K, 1, 8);
    lev_router_args args = router_args(&rc.rule, logits, rc.ids, weights);
    args.select = true;
    OPS_RUN(lev_router_kernel, args);
    lev_router_backward_args back = {.dtype = LEV_F64,
                                     .rows = ROWS,
                                     .experts = EXPERTS,
                                     .top_k = TOP_K,
                                     .rule = rc.rule,
                                     .logits = logits,
                                     .ids = rc.ids,
                                     .dweights = c,
                                     .dlogits = grad};
    OPS_RUN(lev_router_backward_kernel, back);
    check_gradient(router_of_logits, &rc, logits, ROWS * EXPERTS, ROWS * TOP_K, c, grad, "router weights");
  }
}

typedef struct loss_case {
  lev_route_rule rule;
  const int64_t *counts;
} loss_case;

/* 0.3 * sum_e n_e sum_t p[t,e] + 0.7 * sum_t lse^2 */
static void router_losses(const double *logits, double *output, void *ctx) {
  const loss_case *c = ctx;
  *output = 0;
  for (int t = 0; t < ROWS; ++t) {
    double score[EXPERTS], p[EXPERTS], sum = 0;
    scores_oracle(&c->rule, logits + t * EXPERTS, score, p);
    for (int e = 0; e < EXPERTS; ++e) sum += exp(logits[t * EXPERTS + e]);
    for (int e = 0; e < EXPERTS; ++e) *output += 0.3 * (double)c->counts[e] * p[e];
    *output += 0.7 * log(sum) * log(sum);
  }
}

T_TEST(router_balance_and_z_by_differences) {
  ops_begin();
  for (int i = 0; i < RULES; ++i) {
    static const int64_t loads[EXPERTS] = {4, 0, 1, 5, 2, 2, 1, 0, 3};
    double one = 1;
    OPS_ROOM(double, logits, ROWS *EXPERTS);
    OPS_ROOM(double, dweights, ROWS *TOP_K);
    OPS_ROOM(double, grad, ROWS *EXPERTS);
    OPS_ROOM(int32_t, ids, ROWS * TOP_K);
    int64_t *counts = memcpy(ops_room(sizeof loads), loads, sizeof loads);
    memset(dweights, 0, sizeof(double) * ROWS * TOP_K);
    loss_case c = {rule_of(i), counts};
    for (int j = 0; j < ROWS * TOP_K; ++j) ids[j] = j % TOP_K;
    num_random(LEV_F64, logits, NULL, ROWS * EXPERTS, 2, 9);
    lev_router_backward_args back = {.dtype = LEV_F64,
                                     .rows = ROWS,
                                     .experts = EXPERTS,
                                     .top_k = TOP_K,
                                     .rule = c.rule,
                                     .logits = logits,
                                     .ids = ids,
                                     .dweights = dweights,
                                     .counts = counts,
                                     .balance_scale = 0.3,
                                     .z_scale = 0.7,
                                     .dlogits = grad};
    OPS_RUN(lev_router_backward_kernel, back);
    check_gradient(router_losses, &c, logits, ROWS * EXPERTS, 1, &one, grad, "balance and z-loss");
  }
}

T_TEST(router_bias_update_pushes_towards_the_mean) {
  ops_begin();
  static const double loads[EXPERTS] = {9, 0, 3, 3, 3, 1, 4, 2, 2}; /* mean 3 */
  static const double start[EXPERTS] = {0.5, 0, 0, -0.25, 0, 0, 0, 0, 0};
  double *counts = memcpy(ops_room(sizeof loads), loads, sizeof loads);
  double *bias = memcpy(ops_room(sizeof start), start, sizeof start), want[EXPERTS], sum = 0;
  const double sign[EXPERTS] = {-1, 1, 0, 0, 0, 1, -1, 1, 1};
  for (int e = 0; e < EXPERTS; ++e) want[e] = bias[e] + 0.01 * (sign[e] - 2.0 / EXPERTS);
  lev_route_bias_args args = {.dtype = LEV_F64, .experts = EXPERTS, .rate = 0.01, .counts = counts, .bias = bias};
  OPS_RUN(lev_route_bias_kernel, args);
  NUM_CHECK(LEV_F64, bias, want, EXPERTS, 1, 1e-14, "selection bias");
  for (int e = 0; e < EXPERTS; ++e) sum += bias[e];
  T_EXPECT(fabs(sum - 0.25) < 1e-15); /* the update has mean zero */
}

/* Tokens that favour some experts: the bias evens the loads out, whatever the score. */
T_TEST(router_bias_evens_the_load) {
  ops_begin();
  enum { TOKENS = 400, STEPS = 150 };
  OPS_ROOM(double, logits, TOKENS *EXPERTS);
  OPS_ROOM(double, weights, TOKENS *TOP_K);
  OPS_ROOM(int32_t, ids, TOKENS * TOP_K);
  OPS_ROOM(double, bias, EXPERTS);
  OPS_ROOM(double, sums, 1 + 2 * EXPERTS);
  num_random(LEV_F64, logits, NULL, TOKENS * EXPERTS, 2, 31);
  for (int i = 0; i < TOKENS * EXPERTS; ++i) logits[i] += 0.3 * (i % EXPERTS);
  for (int score = 0; score < 2; ++score) {
    double first = 0, last = 0, mean = (double)TOKENS * TOP_K / EXPERTS;
    lev_route_rule rule = {.score = (lev_score)score, .groups = 1, .top_groups = 1, .scale = 1};
    memset(bias, 0, sizeof(double) * EXPERTS);
    for (int step = 0; step < STEPS; ++step) {
      double most = 0;
      memset(sums, 0, sizeof(double) * (1 + 2 * EXPERTS));
      lev_router_args args = router_args(&rule, logits, ids, weights);
      args.rows = TOKENS, args.select = true, args.bias = bias, args.sums = sums;
      OPS_RUN(lev_router_kernel, args);
      for (int e = 0; e < EXPERTS; ++e) most = fmax(most, sums[1 + EXPERTS + e]);
      if (step == 0) first = most / mean - 1;
      last = most / mean - 1;
      lev_route_bias_args update = {
          .dtype = LEV_F64, .experts = EXPERTS, .rate = 0.003, .counts = sums + 1 + EXPERTS, .bias = bias};
      OPS_RUN(lev_route_bias_kernel, update);
    }
    T_EXPECT_MSG(first > 0.5 && last < 0.1, "score %d: largest load above the mean %g, then %g", score, first, last);
  }
}
