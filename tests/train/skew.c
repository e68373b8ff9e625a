/* SPDX-License-Identifier: Apache-2.0 */
/* A router without bias can tell tokens apart by the direction of their hidden vectors alone, so the embedding gets
 * directions that survive the layers (large against what layers add), and the router's rows look for them. */
#include "tests/train/skew.h"

enum { EXPERTS = 10, PICKS = 3 };

const char *skew_name(skew how) {
  static const char *const names[SKEWS] = {"random", "balanced", "one expert", "same experts"};
  return (unsigned)how < SKEWS ? names[how] : "?";
}

/* Token v has a large component in dimensions v, v + 1, v + 2 mod E; expert e looks at dimension e. */
static double balanced(const lev_tensor *t, int64_t element, double value) {
  int64_t row = element / t->cols, col = element % t->cols;
  int64_t pick = (col - row % EXPERTS + EXPERTS) % EXPERTS;
  if (t->kind == LEV_PARAM_EMBED && col < EXPERTS && pick < PICKS) return value + 14 - 2 * (double)pick;
  if (t->kind == LEV_PARAM_ROUTER) return 0.1 * value + (row == col ? 2 : 0);
  return value;
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
  static const rig_alter fn[SKEWS] = {[SKEW_BALANCED] = balanced, [SKEW_ONE] = one, [SKEW_SAME] = same};
  return (unsigned)how < SKEWS ? fn[how] : NULL;
}
