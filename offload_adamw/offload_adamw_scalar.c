/* SPDX-License-Identifier: Apache-2.0 */
/* Portable update functions. */
#include <math.h>

#include "offload_adamw/offload_adamw_ops.h"

#define SAME(x) (x)

#define RANGE range_f64_f64
#define A double
#define P double
#define P_STORE SAME
#define G double
#define G_LOAD SAME
#define FMA fma
#define SQRT sqrt
#include "offload_adamw/offload_adamw_scalar.inc"

#define RANGE range_f32_f32
#define A float
#define P float
#define P_STORE SAME
#define G float
#define G_LOAD SAME
#define FMA fmaf
#define SQRT sqrtf
#include "offload_adamw/offload_adamw_scalar.inc"

#define RANGE range_f32_bf16
#define A float
#define P float
#define P_STORE SAME
#define G lev_bf16
#define G_LOAD lev_bf16_to_f32
#define FMA fmaf
#define SQRT sqrtf
#include "offload_adamw/offload_adamw_scalar.inc"

#define RANGE range_bf16_f32
#define A float
#define P lev_bf16
#define P_STORE lev_bf16_from_f32
#define G float
#define G_LOAD SAME
#define FMA fmaf
#define SQRT sqrtf
#include "offload_adamw/offload_adamw_scalar.inc"

#define RANGE range_bf16_bf16
#define A float
#define P lev_bf16
#define P_STORE lev_bf16_from_f32
#define G lev_bf16
#define G_LOAD lev_bf16_to_f32
#define FMA fmaf
#define SQRT sqrtf
#include "offload_adamw/offload_adamw_scalar.inc"

static void all_f64_f64(const oadamw_update_args *u) {
  range_f64_f64(u, 0, u->count);
}
static void all_f32_f32(const oadamw_update_args *u) {
  range_f32_f32(u, 0, u->count);
}
static void all_f32_bf16(const oadamw_update_args *u) {
  range_f32_bf16(u, 0, u->count);
}
static void all_bf16_f32(const oadamw_update_args *u) {
  range_bf16_f32(u, 0, u->count);
}
static void all_bf16_bf16(const oadamw_update_args *u) {
  range_bf16_bf16(u, 0, u->count);
}

const oadamw_update_fn oadamw_scalar_table[OADAMW_PAIRS] = {
    [OADAMW_F64_F64] = all_f64_f64,   [OADAMW_F32_F32] = all_f32_f32,     [OADAMW_F32_BF16] = all_f32_bf16,
    [OADAMW_BF16_F32] = all_bf16_f32, [OADAMW_BF16_BF16] = all_bf16_bf16,
};

void oadamw_scalar_range(oadamw_pair pair, const oadamw_update_args *u, int64_t begin, int64_t end) {
  static void (*const ranges[OADAMW_PAIRS])(const oadamw_update_args *, int64_t, int64_t) = {
      [OADAMW_F64_F64] = range_f64_f64,   [OADAMW_F32_F32] = range_f32_f32,     [OADAMW_F32_BF16] = range_f32_bf16,
      [OADAMW_BF16_F32] = range_bf16_f32, [OADAMW_BF16_BF16] = range_bf16_bf16,
  };
  ranges[pair](u, begin, end);
}

oadamw_pair oadamw_pair_of(lev_dtype param, lev_dtype grad) {
  if (param == LEV_F64 && grad == LEV_F64) return OADAMW_F64_F64;
  if (param == LEV_F32 && grad == LEV_F32) return OADAMW_F32_F32;
  if (param == LEV_F32 && grad == LEV_BF16) return OADAMW_F32_BF16;
  if (param == LEV_BF16 && grad == LEV_F32) return OADAMW_BF16_F32;
  if (param == LEV_BF16 && grad == LEV_BF16) return OADAMW_BF16_BF16;
  return OADAMW_PAIRS;
}
