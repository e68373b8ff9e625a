/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary embedding: frequencies and their scaling to longer contexts, in the definitions of Hugging Face transformers.
 *
 * Pair i of a head of size d turns by position * f_i, f_i = theta^(-2i/d) without scaling.
 *   linear   f_i / s with the factor s.
 *   yarn     f_i where the pair makes more than beta_fast turns over the original context, f_i / s where it makes fewer
 *            than beta_slow, a linear ramp between (its ends rounded outwards to whole pairs); cosine and sine are
 *            multiplied by attention_factor, by default 0.1 ln(s) + 1.
 * Sources: Su et al., "RoFormer", arXiv 2104.09864; Peng et al., "YaRN", arXiv 2309.00071. */
#ifndef LEV_MODEL_ROPE_H
#define LEV_MODEL_ROPE_H

#include <stdint.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_rope_scaling { LEV_ROPE_NONE, LEV_ROPE_LINEAR, LEV_ROPE_YARN } lev_rope_scaling;

typedef struct lev_rope {
  double theta; /* base, > 1 */
  lev_rope_scaling scaling;
  double factor;                 /* s >= 1; linear and yarn */
  int64_t original_max_position; /* context before the extension; yarn */
  double beta_fast, beta_slow;   /* turns; yarn, beta_fast > beta_slow > 0 */
  double attention_factor;       /* yarn; 0 = 0.1 ln(s) + 1 */
} lev_rope;

/* Errors: LEV_ERR_CONFIG naming the setting that does not fit. */
LEV_MUST_CHECK lev_status lev_rope_check(const lev_rope *rope);
/* frequency: [head_dim / 2] out, radians per position; returns the factor on cosine and sine. */
double lev_rope_frequencies(const lev_rope *rope, int64_t head_dim, double *frequency);

#ifdef __cplusplus
}
#endif
#endif
