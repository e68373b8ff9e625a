/* SPDX-License-Identifier: Apache-2.0 */
#include "common/dtype.h"

#include <math.h>

typedef struct dtype_row {
  size_t bytes;
  lev_dtype arith;
  const char *name, *word;
} dtype_row;

static const dtype_row rows[LEV_DTYPE_COUNT] = {
#define DTYPE_ROW(name, bytes, arith, word) [LEV_##name] = {bytes, LEV_##arith, NULL, word},
    LEV_DTYPE_TABLE(DTYPE_ROW)
#undef DTYPE_ROW
};

static const char *const lower[LEV_DTYPE_COUNT] = {
    [LEV_F64] = "f64", [LEV_F32] = "f32", [LEV_BF16] = "bf16", [LEV_I32] = "i32", [LEV_I64] = "i64", [LEV_U8] = "u8"};

static int known(lev_dtype t) {
  return (unsigned)t < LEV_DTYPE_COUNT;
}

size_t lev_dtype_bytes(lev_dtype t) {
  return known(t) ? rows[t].bytes : 0;
}
lev_dtype lev_dtype_arith(lev_dtype t) {
  return known(t) ? rows[t].arith : LEV_DTYPE_COUNT;
}
const char *lev_dtype_name(lev_dtype t) {
  return known(t) ? lower[t] : "?";
}

lev_dtype lev_dtype_find(const char *name) {
  if (!name) return LEV_DTYPE_COUNT;
  for (int t = 0; t < LEV_DTYPE_COUNT; ++t)
    if (strcmp(name, lower[t]) == 0 || strcmp(name, rows[t].word) == 0) return (lev_dtype)t;
  return LEV_DTYPE_COUNT;
}

/* double -> bf16 with one rounding: the step through f32 rounds to odd, which keeps ties apart from near-ties. */
static lev_bf16 bf16_from_f64(double value) {
  float near = (float)value;
  if (isnan(value) || (double)near == value) return lev_bf16_from_f32(near);
  uint32_t bits;
  memcpy(&bits, &near, sizeof bits);
  if (fabs((double)near) > fabs(value)) --bits; /* toward zero; the magnitude is not 0 here */
  bits |= 1u;
  memcpy(&near, &bits, sizeof near);
  return lev_bf16_from_f32(near);
}

double lev_dtype_load(lev_dtype t, const void *array, int64_t i) {
  switch (t) {
  case LEV_F64:
    return ((const double *)array)[i];
  case LEV_F32:
    return (double)((const float *)array)[i];
  case LEV_BF16:
    return (double)lev_bf16_to_f32(((const lev_bf16 *)array)[i]);
  case LEV_I32:
    return (double)((const int32_t *)array)[i];
  case LEV_I64:
    return (double)((const int64_t *)array)[i];
  case LEV_U8:
    return (double)((const uint8_t *)array)[i];
  case LEV_DTYPE_COUNT:
    break;
  }
  return NAN;
}

void lev_dtype_store(lev_dtype t, void *array, int64_t i, double value) {
  switch (t) {
  case LEV_F64:
    ((double *)array)[i] = value;
    break;
  case LEV_F32:
    ((float *)array)[i] = (float)value;
    break;
  case LEV_BF16:
    ((lev_bf16 *)array)[i] = bf16_from_f64(value);
    break;
  case LEV_I32:
    ((int32_t *)array)[i] = (int32_t)value;
    break;
  case LEV_I64:
    ((int64_t *)array)[i] = (int64_t)value;
    break;
  case LEV_U8:
    ((uint8_t *)array)[i] = (uint8_t)value;
    break;
  case LEV_DTYPE_COUNT:
    break;
  }
}

static void widen(unsigned char *out, const unsigned char *in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    lev_bf16 x;
    memcpy(&x, in + i * (int64_t)sizeof x, sizeof x);
    float f = lev_bf16_to_f32(x);
    memcpy(out + i * (int64_t)sizeof f, &f, sizeof f);
  }
}

static void narrow(unsigned char *out, const unsigned char *in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float f;
    memcpy(&f, in + i * (int64_t)sizeof f, sizeof f);
    lev_bf16 x = lev_bf16_from_f32(f);
    memcpy(out + i * (int64_t)sizeof x, &x, sizeof x);
  }
}

void lev_dtype_convert(lev_dtype to, void *out, lev_dtype from, const void *in, int64_t n) {
  size_t a = lev_dtype_bytes(from), b = lev_dtype_bytes(to);
  if (from == to) {
    memcpy(out, in, (size_t)n * a);
  } else if (from == LEV_BF16 && to == LEV_F32) {
    widen(out, in, n);
  } else if (from == LEV_F32 && to == LEV_BF16) {
    narrow(out, in, n);
  } else {
    double x = 0, y = 0; /* aligned */
    for (int64_t i = 0; i < n; ++i) {
      memcpy(&x, (const unsigned char *)in + (size_t)i * a, a);
      lev_dtype_store(to, &y, 0, lev_dtype_load(from, &x, 0));
      memcpy((unsigned char *)out + (size_t)i * b, &y, b);
    }
  }
}
