/* SPDX-License-Identifier: Apache-2.0 */
/* What one step computes: against the formula, and bit for bit over every way to run it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/optim/oadamw_rig.h"

static const lev_dtype pairs[][2] = {
    {LEV_F64, LEV_F64}, {LEV_F32, LEV_F32}, {LEV_F32, LEV_BF16}, {LEV_BF16, LEV_F32}, {LEV_BF16, LEV_BF16}};
enum { N_PAIRS = sizeof pairs / sizeof *pairs };

static void against_oracle(const oadamw_config *c, double param_tolerance, double state_tolerance) {
  oadamw_rig r = {0};
  oadamw_oracle o = {0};
  if (oadamw_rig_open(&r, t_backend(), c, OADAMW_RIG_SHARD, 0) && oadamw_oracle_open(&o, &r)) {
    T_EXPECT_OK(oadamw_rig_run(&r, 1, 6));
    for (int step = 1; step <= 6; ++step) oadamw_oracle_step(&o, &r, step, 0.01 / step, 0.7);
    oadamw_oracle_check(&o, &r, param_tolerance, state_tolerance);
  }
  oadamw_oracle_close(&o);
  oadamw_rig_close(&r);
}

T_TEST(oadamw_matches_the_formula) {
  for (int p = 0; p < N_PAIRS; ++p) {
    for (int placement = OADAMW_GPU; placement <= OADAMW_SPLIT; ++placement) {
      oadamw_config c = oadamw_rig_config(pairs[p][0], pairs[p][1]);
      c.placement = (oadamw_placement)placement;
      c.bucket = 100;
      double state = c.param_dtype == LEV_F64 ? 1e-11 : 1e-6;
      against_oracle(&c, c.param_dtype == LEV_BF16 ? 3e-3 : state, state);
    }
  }
}

T_TEST(oadamw_plain_matches_the_formula) {
  for (int p = 0; p < N_PAIRS; ++p) {
    oadamw_config c = oadamw_rig_config(pairs[p][0], pairs[p][1]);
    c.schedule = OADAMW_PLAIN;
    double state = c.param_dtype == LEV_F64 ? 1e-11 : 1e-6;
    against_oracle(&c, c.param_dtype == LEV_BF16 ? 3e-3 : state, state);
  }
}

/* Other constants than the defaults, so that none can be hard-wired. */
T_TEST(oadamw_uses_its_constants) {
  oadamw_config c = oadamw_rig_config(LEV_F64, LEV_F64);
  c.beta1 = 0.8, c.beta2 = 0.999, c.eps = 1e-3, c.bucket = 77, c.slots = 3;
  against_oracle(&c, 1e-11, 1e-11);
  c.beta1 = 0, c.beta2 = 0, c.eps = 0.5;
  against_oracle(&c, 1e-11, 1e-11);
}

/* ---- bit equality ---- */

static uint64_t digest_on(lev_backend backend, const oadamw_config *c, uint64_t jitter) {
  oadamw_rig r = {0};
  uint64_t digest = 0;
  if (oadamw_rig_open(&r, backend, c, OADAMW_RIG_SHARD, jitter) && T_EXPECT_OK(oadamw_rig_run(&r, 1, 3)))
    digest = oadamw_rig_digest(&r);
  oadamw_rig_close(&r);
  return digest;
}

static uint64_t digest_of(const oadamw_config *c, uint64_t jitter) {
  return digest_on(t_backend(), c, jitter);
}

static void same_bits(const oadamw_config *c, uint64_t want) {
  T_EXPECT_MSG(digest_of(c, 0) == want,
               "%s/%s: other bits with placement %d, schedule %d, bucket %lld, slots %d, workers %d, %s",
               lev_dtype_name(c->param_dtype), lev_dtype_name(c->grad_dtype), (int)c->placement, (int)c->schedule,
               (long long)c->bucket, c->slots, c->workers, oadamw_simd_name(c->simd));
}

T_TEST(oadamw_same_bits_however_it_runs) {
  static const int64_t buckets[] = {37, 64, 200, 0};
  printf("  simd paths:");
  for (int s = OADAMW_SIMD_SCALAR; s < OADAMW_SIMDS; ++s)
    if (oadamw_simd_supported((oadamw_simd)s)) printf(" %s", oadamw_simd_name((oadamw_simd)s));
  printf("\n");
  for (int p = 0; p < N_PAIRS; ++p) {
    oadamw_config c = oadamw_rig_config(pairs[p][0], pairs[p][1]);
    c.schedule = OADAMW_PLAIN, c.simd = OADAMW_SIMD_SCALAR;
    uint64_t want = digest_of(&c, 0);
    T_EXPECT(want != 0);
    for (int s = OADAMW_SIMD_SCALAR; s < OADAMW_SIMDS; ++s) {
      if (!oadamw_simd_supported((oadamw_simd)s)) continue;
      c.simd = (oadamw_simd)s;
      c.schedule = OADAMW_PLAIN;
      same_bits(&c, want);
      c.schedule = OADAMW_BOUNDED;
      for (int k = 0; k < 12; ++k) {
        c.placement = (oadamw_placement)(k % 3);
        c.bucket = buckets[k / 3];
        c.slots = 1 + (k + s) % 3, c.workers = 1 + (k + p) % 3;
        c.cpu_share = 0.25 + 0.25 * (k % 4);
        same_bits(&c, want);
      }
    }
  }
}

/* Rounding is part of the definition: a GPU gives what the CPU gives. */
T_TEST(oadamw_same_bits_on_both_backends) {
  if (t_backend() == LEV_BACKEND_CPU) {
    t_skip("needs a GPU beside the CPU");
    return;
  }
  for (int p = 0; p < N_PAIRS; ++p) {
    oadamw_config c = oadamw_rig_config(pairs[p][0], pairs[p][1]);
    c.bucket = 200;
    uint64_t want = digest_on(LEV_BACKEND_CPU, &c, 0);
    for (int placement = OADAMW_GPU; placement <= OADAMW_SPLIT; ++placement) {
      c.placement = (oadamw_placement)placement;
      same_bits(&c, want);
    }
    c.schedule = OADAMW_PLAIN;
    same_bits(&c, want);
  }
}

/* The comparison above sees a single flipped bit of any input. */
T_TEST(oadamw_digest_has_teeth) {
  oadamw_config c = oadamw_rig_config(LEV_F32, LEV_F32);
  c.bucket = 100;
  uint64_t want = digest_of(&c, 0);
  c.eps = 1e-7;
  T_EXPECT(digest_of(&c, 0) != want);
  oadamw_segment other[OADAMW_RIG_SEGMENTS];
  memcpy(other, oadamw_rig_segments, sizeof other);
  other[5].weight_decay = 0.51;
  c = oadamw_rig_config(LEV_F32, LEV_F32);
  c.segments = other;
  T_EXPECT(digest_of(&c, 0) != want);
}

T_TEST(oadamw_same_bits_under_jitter) {
  for (int placement = OADAMW_GPU; placement <= OADAMW_SPLIT; ++placement) {
    oadamw_config c = oadamw_rig_config(LEV_F32, LEV_BF16);
    c.placement = (oadamw_placement)placement;
    c.bucket = 70, c.slots = 2, c.workers = 2;
    uint64_t want = digest_of(&c, 0);
    for (uint64_t seed = 1; seed <= 4; ++seed) T_EXPECT(digest_of(&c, seed) == want);
  }
}

/* ---- large pieces, odd values ---- */

/* Long enough for streaming stores of the parameters, aligned and not. (Builds with ThreadSanitizer
 * have no streaming stores.) */
T_TEST(oadamw_streaming_stores_same_bits) {
  static const int64_t offsets[] = {5, 0};
  for (int p = 0; p < N_PAIRS; ++p) {
    for (int a = 0; a < (OADAMW_TSAN ? 1 : 2); ++a) {
      int64_t n = ((int64_t)(OADAMW_TSAN ? 1 : 1024) << 12) / (int64_t)lev_dtype_bytes(pairs[p][0]) + 77;
      oadamw_segment seg = {.offset = offsets[a], .count = n, .weight_decay = 0.1, .lr_scale = 1};
      uint64_t want = 0;
      for (int s = OADAMW_SIMD_SCALAR; s < OADAMW_SIMDS; ++s) {
        if (!oadamw_simd_supported((oadamw_simd)s)) continue;
        oadamw_config c = oadamw_rig_config(pairs[p][0], pairs[p][1]);
        c.segments = &seg, c.n_segments = 1, c.simd = (oadamw_simd)s;
        oadamw_rig r = {0};
        uint64_t got = 0;
        if (oadamw_rig_open(&r, t_backend(), &c, n + 64, 0) && T_EXPECT_OK(oadamw_rig_run(&r, 1, 1)))
          got = oadamw_rig_digest(&r);
        oadamw_rig_close(&r);
        if (s == OADAMW_SIMD_SCALAR) want = got;
        T_EXPECT_MSG(got == want && got != 0, "%s, pair %d, offset %lld: other bits", oadamw_simd_name(c.simd), p,
                     (long long)offsets[a]);
      }
    }
  }
}

/* With lr = 0 the parameter is the rounded master: every SIMD path rounds as lev_bf16_from_f32, also ties, denormals,
 * infinities, NaN. */
T_TEST(oadamw_rounds_to_bf16_in_integers) {
  enum { N = 4096 };
  oadamw_segment seg = {.offset = 0, .count = N, .weight_decay = 0, .lr_scale = 1};
  for (int s = OADAMW_SIMD_SCALAR; s < OADAMW_SIMDS; ++s) {
    if (!oadamw_simd_supported((oadamw_simd)s)) continue;
    oadamw_config c = oadamw_rig_config(LEV_BF16, LEV_BF16);
    c.segments = &seg, c.n_segments = 1, c.simd = (oadamw_simd)s, c.placement = OADAMW_CPU, c.bucket = 1000;
    oadamw_rig r = {0};
    oadamw_state_view view;
    if (oadamw_rig_open(&r, t_backend(), &c, N, 0) && T_EXPECT_OK(oadamw_state(r.plan, r.compute, &view))) {
      uint32_t *bits = view.master;
      float want[N];
      for (uint32_t i = 0; i < N; ++i) { /* all exponents; fractions around the rounding border */
        static const uint32_t low[8] = {0, 1, 0x7fff, 0x8000, 0x8001, 0x17fff, 0x18000, 0x7fffff};
        bits[i] = (i & 0x800) << 20 | (i >> 3 & 0xff) << 23 | low[i & 7];
      }
      memcpy(want, bits, sizeof want);
      T_EXPECT_OK(oadamw_rig_step(&r, 1, 0, 0.7));
      T_EXPECT_OK(lev_stream_sync(r.compute));
      const lev_bf16 *got = r.params;
      for (int i = 0; i < N; ++i) {
        if (isinf(want[i]) || want[i] == 0) continue; /* p + 0 * p turns inf into NaN and -0 into 0 */
        lev_bf16 expected = lev_bf16_from_f32(want[i]);
        bool nan = isnan(want[i]) && isnan(lev_bf16_to_f32(got[i]));
        T_EXPECT_MSG(nan || got[i] == expected, "%s: %a gives %04x, expected %04x", oadamw_simd_name(c.simd),
                     (double)want[i], got[i], expected);
      }
    }
    oadamw_rig_close(&r);
  }
}

/* An update below bf16 resolution moves the master weight, and in the end the parameter. */
T_TEST(oadamw_keeps_small_updates) {
  oadamw_segment seg = {.offset = 0, .count = 9, .weight_decay = 1e-3, .lr_scale = 1};
  oadamw_config c = oadamw_rig_config(LEV_BF16, LEV_BF16);
  c.segments = &seg, c.n_segments = 1;
  oadamw_rig r = {0};
  oadamw_state_view view;
  if (oadamw_rig_open(&r, t_backend(), &c, 9, 0) && T_EXPECT_OK(oadamw_state(r.plan, r.compute, &view))) {
    lev_bf16 before[9];
    float master[9];
    memcpy(before, r.params, sizeof before);
    memcpy(master, view.master, sizeof master);
    T_EXPECT_OK(oadamw_rig_step(&r, 1, 1e-7, 1));
    T_EXPECT_OK(lev_stream_sync(r.compute));
    T_EXPECT(memcmp(before, r.params, sizeof before) == 0);
    for (int i = 0; i < 9; ++i) T_EXPECT(((float *)view.master)[i] != master[i]);
    for (int step = 2; step < 200; ++step) T_EXPECT_OK(oadamw_rig_step(&r, step, 1e-2, 1));
    T_EXPECT_OK(lev_stream_sync(r.compute));
    T_EXPECT(memcmp(before, r.params, sizeof before) != 0);
  }
  oadamw_rig_close(&r);
}

/* ---- resume ---- */

/* Steps 1..5 in one go = 1..2, state saved, restored into a new plan of another placement, 3..5. */
T_TEST(oadamw_resume_is_exact) {
  for (int p = 0; p < N_PAIRS; ++p) {
    oadamw_config c = oadamw_rig_config(pairs[p][0], pairs[p][1]);
    c.bucket = 130;
    oadamw_rig whole = {0}, first = {0}, second = {0};
    c.placement = OADAMW_GPU;
    bool ok = oadamw_rig_open(&whole, t_backend(), &c, OADAMW_RIG_SHARD, 0) &&
              oadamw_rig_open(&first, t_backend(), &c, OADAMW_RIG_SHARD, 0);
    c.placement = OADAMW_CPU, c.bucket = 64;
    ok = ok && oadamw_rig_open(&second, t_backend(), &c, OADAMW_RIG_SHARD, 0);
    oadamw_state_view from, to;
    if (ok && T_EXPECT_OK(oadamw_rig_run(&whole, 1, 5)) && T_EXPECT_OK(oadamw_rig_run(&first, 1, 2)) &&
        T_EXPECT_OK(oadamw_state(first.plan, first.compute, &from)) &&
        T_EXPECT_OK(oadamw_state(second.plan, second.compute, &to))) {
      size_t bytes = (size_t)from.count * lev_dtype_bytes(from.dtype);
      memcpy(to.master, from.master, bytes);
      memcpy(to.exp_avg, from.exp_avg, bytes);
      memcpy(to.exp_avg_sq, from.exp_avg_sq, bytes);
      T_EXPECT_OK(oadamw_publish(second.plan, second.params, second.compute));
      T_EXPECT_OK(lev_stream_sync(second.compute));
      T_EXPECT(memcmp(first.params, second.params, OADAMW_RIG_SHARD * lev_dtype_bytes(c.param_dtype)) == 0);
      T_EXPECT_OK(oadamw_rig_run(&second, 3, 5));
      T_EXPECT(oadamw_rig_digest(&second) == oadamw_rig_digest(&whole));
      T_EXPECT(oadamw_rig_digest(&first) != oadamw_rig_digest(&whole));
    }
    oadamw_rig_close(&whole);
    oadamw_rig_close(&first);
    oadamw_rig_close(&second);
  }
}
