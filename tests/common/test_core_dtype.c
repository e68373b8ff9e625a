/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "common/dims.h"
#include "common/dtype.h"
#include "common/rng.h"
#include "tests/t.h"

static float from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}
static uint32_t to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

T_TEST(core_dtype_table) {
  T_EXPECT_EQ_I64(lev_dtype_bytes(LEV_F64), 8);
  T_EXPECT_EQ_I64(lev_dtype_bytes(LEV_BF16), 2);
  T_EXPECT_EQ_I64(lev_dtype_bytes(LEV_DTYPE_COUNT), 0);
  T_EXPECT_EQ_I64(lev_dtype_arith(LEV_BF16), LEV_F32);
  T_EXPECT_EQ_I64(lev_dtype_arith(LEV_F64), LEV_F64);
  for (int t = 0; t < LEV_DTYPE_COUNT; ++t) T_EXPECT_EQ_I64(lev_dtype_find(lev_dtype_name((lev_dtype)t)), t);
  T_EXPECT_EQ_I64(lev_dtype_find("BF16"), LEV_BF16);
  T_EXPECT_EQ_I64(lev_dtype_find("fp8"), LEV_DTYPE_COUNT);
  T_EXPECT_EQ_I64(lev_dtype_find(NULL), LEV_DTYPE_COUNT);
}

/* Every bf16 value, denormals, infinities and NaN payloads included, survives widening and rounding. */
T_TEST(core_bf16_round_trip_all) {
  for (uint32_t h = 0; h < 65536; ++h) {
    float wide = lev_bf16_to_f32((lev_bf16)h);
    T_EXPECT(to_bits(wide) == h << 16);
    lev_bf16 back = lev_bf16_from_f32(wide), through = 0;
    lev_dtype_store(LEV_BF16, &through, 0, lev_dtype_load(LEV_BF16, &(lev_bf16){(lev_bf16)h}, 0));
    if (isnan(wide)) {
      T_EXPECT(isnan(lev_bf16_to_f32(back)) && back == (h | 0x40u));
      T_EXPECT(isnan(lev_bf16_to_f32(through)));
    } else {
      T_EXPECT(back == h && through == h);
    }
    if (t_failed()) return;
  }
}

/* Around every finite bf16 value: just below, at and just above the tie to the next one. */
T_TEST(core_bf16_ties) {
  for (uint32_t h = 0; h < 65536; ++h) {
    if ((h & 0x7f80u) == 0x7f80u) continue;
    lev_bf16 up = (lev_bf16)(h + 1), even = (lev_bf16)(h & 1u ? h + 1 : h);
    T_EXPECT(lev_bf16_from_f32(from_bits(h << 16 | 0x7fffu)) == h);
    T_EXPECT(lev_bf16_from_f32(from_bits(h << 16 | 0x8000u)) == even);
    T_EXPECT(lev_bf16_from_f32(from_bits(h << 16 | 0x8001u)) == up);
    /* a double next to the tie, closer than any float: one rounding only */
    double tie = (double)from_bits(h << 16 | 0x8000u), lo, hi;
    lo = nextafter(tie, 0), hi = nextafter(tie, copysign(INFINITY, tie));
    lev_bf16 got[3];
    lev_dtype_store(LEV_BF16, got, 0, lo);
    lev_dtype_store(LEV_BF16, got, 1, tie);
    lev_dtype_store(LEV_BF16, got, 2, hi);
    T_EXPECT(got[0] == h && got[1] == even && got[2] == up);
    if (t_failed()) return;
  }
}

/* Every pair of floating types, aligned or not, gives what single elements give. */
T_TEST(core_dtype_convert) {
  const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16};
  const double values[] = {0, -0.0, 1, -1.00390625, 1.0 / 3, 1e-40, 3e38, 1e300, INFINITY, NAN, 65504.5};
  enum { N = sizeof values / sizeof *values };
  for (int a = 0; a < 3; ++a)
    for (int b = 0; b < 3; ++b)
      for (size_t shift = 0; shift < 2; ++shift) {
        double from[N], want[N] = {0};
        unsigned char in[8 * N + 1], out[8 * N + 1];
        for (int i = 0; i < N; ++i) lev_dtype_store(types[a], from, i, values[i]);
        for (int i = 0; i < N; ++i) lev_dtype_store(types[b], want, i, lev_dtype_load(types[a], from, i));
        memcpy(in + shift, from, N * lev_dtype_bytes(types[a]));
        lev_dtype_convert(types[b], out + shift, types[a], in + shift, N);
        T_EXPECT(memcmp(out + shift, want, N * lev_dtype_bytes(types[b])) == 0);
      }
}

T_TEST(core_dtype_extremes) {
  lev_bf16 b;
  lev_dtype_store(LEV_BF16, &b, 0, 1e300);
  T_EXPECT(b == 0x7f80u);
  lev_dtype_store(LEV_BF16, &b, 0, -1e300);
  T_EXPECT(b == 0xff80u);
  lev_dtype_store(LEV_BF16, &b, 0, 1e-300);
  T_EXPECT(b == 0);
  lev_dtype_store(LEV_BF16, &b, 0, -1e-300);
  T_EXPECT(b == 0x8000u);
  lev_dtype_store(LEV_BF16, &b, 0, NAN);
  T_EXPECT(isnan(lev_bf16_to_f32(b)));
  int32_t i32[2] = {0, -7};
  lev_dtype_store(LEV_I32, i32, 0, 12);
  T_EXPECT(i32[0] == 12 && lev_dtype_load(LEV_I32, i32, 1) == -7);
  T_EXPECT(isnan(lev_dtype_load(LEV_DTYPE_COUNT, i32, 0)));
}

/* Philox4x32-10 known answers (Random123, kat_vectors). */
T_TEST(core_rng_known_answers) {
  static const uint32_t vectors[3][10] = {
      {0, 0, 0, 0, 0, 0, 0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u},
      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu},
      {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0xa4093822u, 0x299f31d0u, 0xd16cfe09u, 0x94fdccebu,
       0x5001e420u, 0x24126ea1u}};
  for (int v = 0; v < 3; ++v) {
    const uint32_t *c = vectors[v];
    uint32_t out[4];
    lev_rng_key key = {(uint64_t)c[5] << 32 | c[4], c[2], c[3]};
    lev_rng_block(key, (uint64_t)c[1] << 32 | c[0], out);
    for (int i = 0; i < 4; ++i) T_EXPECT_EQ_I64(out[i], c[6 + i]);
  }
}

T_TEST(core_rng_moments) {
  lev_rng_key key = {7, 1, 2};
  double mean = 0, square = 0, u_mean = 0;
  int n = 200000;
  for (int i = 0; i < n; ++i) {
    double z = lev_rng_normal(key, (uint64_t)i), u = lev_rng_uniform(key, (uint64_t)i);
    T_EXPECT(isfinite(z) && u >= 0 && u < 1);
    mean += z / n, square += z * z / n, u_mean += u / n;
  }
  T_EXPECT(fabs(mean) < 0.01 && fabs(square - 1) < 0.02 && fabs(u_mean - 0.5) < 0.005);
}

T_TEST(core_dims_arithmetic) {
  T_EXPECT(lev_bytes(-1, 4, 4) == SIZE_MAX && lev_bytes(INT64_MAX, 4, 4) == SIZE_MAX);
  T_EXPECT(lev_bytes(3, 5, 2) == 30 && lev_bytes(0, 5, 2) == 0);
  T_EXPECT(lev_align_up(0) == 0 && lev_align_up(1) == LEV_ALIGN && lev_align_up(LEV_ALIGN) == LEV_ALIGN);
  T_EXPECT(lev_align_up(SIZE_MAX) == SIZE_MAX && lev_sat_add(SIZE_MAX, 1) == SIZE_MAX);
  for (int64_t n = 0; n < 40; ++n)
    for (int64_t parts = 1; parts < 9; ++parts) {
      int64_t total = 0;
      for (int64_t i = 0; i < parts; ++i) {
        int64_t begin = lev_part_begin(n, parts, i), size = lev_part_size(n, parts, i);
        T_EXPECT(begin == total && size >= n / parts && size <= n / parts + 1);
        for (int64_t j = begin; j < begin + size; ++j) T_EXPECT_EQ_I64(lev_part_of(n, parts, j), i);
        total += size;
      }
      T_EXPECT_EQ_I64(total, n);
    }
}
