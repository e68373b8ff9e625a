/* SPDX-License-Identifier: Apache-2.0 */
/* A router without bias can tell tokens apart by the direction of their hidden vectors alone, so the embedding gets
 * directions that survive the layers (large against what layers add), and the router's rows look for them. */
#include "tests/train/skew.h"

#include <math.h>

#include "common/rng.h"

enum { EXPERTS = 10, PICKS = 3 };

const char *skew_name(skew how) {
  static const char *const names[SKEWS] = {"random", "balanced", "Zipf", "Pareto", "one expert", "same experts"};
  return (unsigned)how < SKEWS ? names[how] : "?";
}

/* Token v has large components in the dimensions picks[0 ... k-1], falling; expert e looks at dimension e. */
static double towards_picks(const lev_tensor *t, int64_t element, double value,
                            void (*choose)(int64_t token, int64_t picks[PICKS])) {
  int64_t row = element / t->cols, col = element % t->cols, picks[PICKS];
  if (t->kind == LEV_PARAM_ROUTER) return 0.1 * value + (row == col ? 2 : 0);
  if (t->kind != LEV_PARAM_EMBED || col >= EXPERTS) return value;
  choose(row, picks);
  for (int i = 0; i < PICKS; ++i)
    if (picks[i] == col) return value + 14 - 2 * (double)i;
  return value;
}

static void pick_in_turn(int64_t token, int64_t picks[PICKS]) {
  for (int i = 0; i < PICKS; ++i) picks[i] = (token + i) % EXPERTS;
}

/* Without replacement, by weight. */
static void draw_picks(int64_t token, const double weight[EXPERTS], int64_t picks[PICKS]) {
  double left[EXPERTS], sum = 0;
  for (int e = 0; e < EXPERTS; ++e) sum += left[e] = weight[e];
  for (int i = 0; i < PICKS; ++i) {
    double u = sum * lev_rng_uniform((lev_rng_key){19, (uint32_t)token, 0}, (uint64_t)i);
    int e = 0;
    while (e < EXPERTS - 1 && (u >= left[e] || left[e] == 0)) u -= left[e++];
    while (left[e] == 0) --e; /* rounding carried it past the last one */
    picks[i] = e, sum -= left[e], left[e] = 0;
  }
}

static void pick_zipf(int64_t token, int64_t picks[PICKS]) {
  double weight[EXPERTS];
  for (int e = 0; e < EXPERTS; ++e) weight[e] = 1.0 / (e + 1);
  draw_picks(token, weight, picks);
}

static void pick_pareto(int64_t token, int64_t picks[PICKS]) {
  double weight[EXPERTS];
  for (int e = 0; e < EXPERTS; ++e)
    weight[e] = pow(1 - lev_rng_uniform((lev_rng_key){23, 0, 0}, (uint64_t)e), -1 / 1.16);
  draw_picks(token, weight, picks);
}

static double balanced(const lev_tensor *t, int64_t element, double value) {
  return towards_picks(t, element, value, pick_in_turn);
}
static double zipf(const lev_tensor *t, int64_t element, double value) {
  return towards_picks(t, element, value, pick_zipf);
}
static double pareto(const lev_tensor *t, int64_t element, double value) {
  return towards_picks(t, element, value, pick_pareto);
}

/* All tokens share a large component in dimension 0; the first n experts look at it. */
static double towards(const lev_tensor *t, int64_t element, double value, int64_t n) {
  int64_t row = element / t->cols, col = element % t->cols;
  if (t->kind == LEV_PARAM_EMBED && col == 0) return value + 12;
  if (t->kind == LEV_PARAM_ROUTER && col == 0) return row < n ? 2.5 - 0.5 * (double)row : -0.5;
  return value;
}

static double one(const lev_tensor *t, int64_t element, double value) {
  return towards(t, element, value, 1);
}
static double same(const lev_tensor *t, int64_t element, double value) {
  return towards(t, element, value, PICKS);
}

rig_alter skew_alter(skew how) {
  static const rig_alter fn[SKEWS] = {
      [SKEW_BALANCED] = balanced, [SKEW_ZIPF] = zipf, [SKEW_PARETO] = pareto, [SKEW_ONE] = one, [SKEW_SAME] = same};
  return (unsigned)how < SKEWS ? fn[how] : NULL;
}
