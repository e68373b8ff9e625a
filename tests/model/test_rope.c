/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary frequencies against a step-by-step transcription of Hugging Face's definitions, and their limits. */
#include <math.h>

#include "harness/model/rope.h"
#include "tests/num.h"
#include "tests/t.h"

enum { DIM = 128, PAIRS = DIM / 2 };

/* _compute_yarn_parameters of transformers.modeling_rope_utils, line by line. */
static double yarn_oracle(double base, double factor, double original, double beta_fast, double beta_slow, int dim,
                          double *inv_freq) {
  double bounds[2], betas[2] = {beta_fast, beta_slow};
  for (int i = 0; i < 2; ++i) {
    double correction = (dim * log(original / (betas[i] * 2 * acos(-1.0)))) / (2 * log(base));
    bounds[i] = i == 0 ? floor(correction) : ceil(correction);
  }
  double low = bounds[0] > 0 ? bounds[0] : 0, high = bounds[1] < dim - 1 ? bounds[1] : dim - 1;
  if (low == high) high += 0.001;
  for (int i = 0; i < dim / 2; ++i) {
    double pos_freq = pow(base, 2.0 * i / dim), extrapolation = 1 / pos_freq, interpolation = 1 / (factor * pos_freq);
    double linear = (i - low) / (high - low), ramp = linear < 0 ? 0 : linear > 1 ? 1 : linear;
    double extrapolation_factor = 1 - ramp;
    inv_freq[i] = interpolation * (1 - extrapolation_factor) + extrapolation * extrapolation_factor;
  }
  return 0.1 * log(factor) + 1;
}

T_TEST(rope_yarn_matches_its_definition) {
  const struct {
    double theta, factor, fast, slow;
    int64_t original;
  } cases[] = {{1e6, 4, 32, 1, 32768}, {1e4, 40, 32, 1, 4096}, {150000, 32, 32, 1, 4096},
               {1e4, 1, 32, 1, 4096},  {100, 8, 4, 1, 16},     {1e7, 2, 64, 0.5, 262144}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    lev_rope r = {.theta = cases[i].theta,
                  .scaling = LEV_ROPE_YARN,
                  .factor = cases[i].factor,
                  .original_max_position = cases[i].original,
                  .beta_fast = cases[i].fast,
                  .beta_slow = cases[i].slow};
    double got[PAIRS], want[PAIRS];
    T_EXPECT_OK(lev_rope_check(&r));
    double factor = lev_rope_frequencies(&r, DIM, got);
    double expected =
        yarn_oracle(r.theta, r.factor, (double)r.original_max_position, r.beta_fast, r.beta_slow, DIM, want);
    T_EXPECT(fabs(factor - expected) < 1e-15);
    NUM_CHECK(LEV_F64, got, want, PAIRS, 1, 1e-14, "yarn");
    r.attention_factor = 1.25;
    T_EXPECT(lev_rope_frequencies(&r, DIM, got) == 1.25);
    if (i > 3) continue;
    T_EXPECT(fabs(got[0] - 1) < 1e-15); /* the fastest pair stays, the slowest is slowed by the whole factor */
    T_EXPECT(fabs(got[PAIRS - 1] * r.factor - pow(r.theta, -2.0 * (PAIRS - 1) / DIM)) < 1e-15);
  }
}

T_TEST(rope_plain_and_linear) {
  double plain[PAIRS], slowed[PAIRS];
  lev_rope r = {.theta = 1e4};
  T_EXPECT(lev_rope_frequencies(&r, DIM, plain) == 1);
  for (int i = 0; i < PAIRS; ++i) T_EXPECT(fabs(plain[i] - pow(1e4, -2.0 * i / DIM)) <= 1e-15 * plain[i]);
  r.scaling = LEV_ROPE_LINEAR, r.factor = 8;
  T_EXPECT(lev_rope_frequencies(&r, DIM, slowed) == 1);
  for (int i = 0; i < PAIRS; ++i) T_EXPECT(slowed[i] == plain[i] / 8);
}

T_TEST(rope_refuses_bad_settings) {
  const lev_rope bad[] = {{.theta = 1},
                          {.theta = 1e4, .scaling = LEV_ROPE_LINEAR, .factor = 0.5},
                          {.theta = 1e4, .scaling = LEV_ROPE_YARN, .factor = 4, .beta_fast = 32, .beta_slow = 1},
                          {.theta = 1e4,
                           .scaling = LEV_ROPE_YARN,
                           .factor = 4,
                           .original_max_position = 4096,
                           .beta_fast = 1,
                           .beta_slow = 1},
                          {.theta = 1e4,
                           .scaling = LEV_ROPE_YARN,
                           .factor = 4,
                           .original_max_position = 4096,
                           .beta_fast = 32,
                           .beta_slow = 0}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) T_EXPECT_STATUS(lev_rope_check(&bad[i]), LEV_ERR_CONFIG);
}
