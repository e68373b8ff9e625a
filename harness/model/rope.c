/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/model/rope.h"

#include <math.h>

lev_status lev_rope_check(const lev_rope *r) {
  if (!(r->theta > 1) || !isfinite(r->theta))
    return lev_fail(LEV_ERR_CONFIG, "model.rope_theta = %g, must be above 1", r->theta);
  if (r->scaling == LEV_ROPE_NONE) return LEV_OK;
  if (!(r->factor >= 1) || !isfinite(r->factor))
    return lev_fail(LEV_ERR_CONFIG, "model.rope_factor = %g, must be at least 1", r->factor);
  if (r->scaling == LEV_ROPE_LINEAR) return LEV_OK;
  if (r->original_max_position < 1)
    return lev_fail(LEV_ERR_CONFIG, "model.rope_original_max_position = %lld; yarn needs the context trained before",
                    (long long)r->original_max_position);
  if (!(r->beta_slow > 0) || !(r->beta_fast > r->beta_slow) || !(r->attention_factor >= 0))
    return lev_fail(LEV_ERR_CONFIG,
                    "model.rope_beta_fast = %g must exceed model.rope_beta_slow = %g > 0, and "
                    "model.rope_attention_factor = %g must not be negative",
                    r->beta_fast, r->beta_slow, r->attention_factor);
  return LEV_OK;
}

/* The (fractional) pair that makes `turns` turns over the original context. */
static double pair_of_turns(const lev_rope *r, double dim, double turns) {
  const double pi = 3.14159265358979323846;
  return dim * log((double)r->original_max_position / (turns * 2 * pi)) / (2 * log(r->theta));
}

double lev_rope_frequencies(const lev_rope *r, int64_t head_dim, double *frequency) {
  double dim = (double)head_dim, low = 0, high = 0;
  if (r->scaling == LEV_ROPE_YARN) {
    low = fmax(floor(pair_of_turns(r, dim, r->beta_fast)), 0);
    high = fmin(ceil(pair_of_turns(r, dim, r->beta_slow)), dim - 1);
    if (low == high) high += 0.001;
  }
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    double own = pow(r->theta, -2.0 * (double)i / dim), slowed = own / r->factor;
    double ramp = r->scaling == LEV_ROPE_YARN ? fmin(fmax(((double)i - low) / (high - low), 0), 1) : 1;
    frequency[i] = r->scaling == LEV_ROPE_NONE ? own : slowed * ramp + own * (1 - ramp);
  }
  if (r->scaling != LEV_ROPE_YARN) return 1;
  return r->attention_factor > 0 ? r->attention_factor : 0.1 * log(r->factor) + 1;
}
