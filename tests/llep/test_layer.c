/* SPDX-License-Identifier: Apache-2.0 */
/* The layer against a naive f64 loop: y, dx, dprobs, dw. */
#include <string.h>

#include "tests/llep/layer.h"

#define TOL 1e-11

static void both_schedules(l_case c) {
  for (int s = 0; s < 2; ++s) {
    c.cfg.schedule = s == 0 ? LLEP_BOUNDED : LLEP_PLAIN;
    bool repeats = c.routing == L_SAME || (c.routing == L_EVEN_ONLY && c.cfg.top_k > (c.cfg.experts + 1) / 2);
    c.cfg.plain_rows =
        repeats ? c.cfg.max_tokens * c.ranks * c.cfg.top_k : 0; /* the default counts on distinct picks */
    if (!t_failed()) l_case_check(&c, TOL);
  }
}

/* Group sizes x routings x picks; E does not divide over 3, 4 and 5 ranks; rank token counts differ. */
static void sweep(int ranks, int64_t experts) {
  for (int64_t k = 1; k <= 4 && k <= experts; ++k)
    for (int routing = 0; routing < L_ROUTINGS; ++routing) {
      l_case c = l_small(ranks, experts, k, 11);
      c.routing = (l_routing)routing;
      for (int r = 0; r < ranks; ++r) c.tokens[r] = 11 - 3 * (r % 4);
      if (k == 4 && experts < 7) continue;
      both_schedules(c);
    }
}

T_TEST(llep_layer_1_rank) {
  sweep(1, 6);
}
T_TEST(llep_layer_2_ranks) {
  sweep(2, 7);
}
T_TEST(llep_layer_3_ranks) {
  sweep(3, 7);
}
T_TEST(llep_layer_4_ranks) {
  sweep(4, 10);
}
T_TEST(llep_layer_5_ranks) {
  sweep(5, 7);
}

/* Fewer experts than ranks: some ranks own nothing, but can help. */
T_TEST(llep_layer_ranks_without_experts) {
  for (int routing = 0; routing < L_ROUTINGS; ++routing) {
    l_case c = l_small(4, 3, 2, 9);
    c.routing = (l_routing)routing, c.cfg.min_rows = 1;
    both_schedules(c);
  }
}

T_TEST(llep_layer_chunk_caps) {
  static const int64_t caps[] = {6, 7, 13, 40, 1000};
  for (size_t i = 0; i < sizeof caps / sizeof *caps; ++i)
    for (int routing = L_ZIPF; routing <= L_SAME; ++routing) {
      l_case c = l_small(3, 5, 2, 17);
      c.cfg.chunk_rows = caps[i], c.routing = (l_routing)routing;
      if (!t_failed()) l_case_check(&c, TOL);
    }
}

T_TEST(llep_layer_tile_rows) {
  for (int64_t tile = 1; tile <= 9; tile += 2) {
    l_case c = l_small(4, 6, 2, 13);
    c.cfg.tile_rows = tile, c.cfg.chunk_rows = 40, c.routing = L_ZIPF;
    if (!t_failed()) l_case_check(&c, TOL);
  }
}

T_TEST(llep_layer_without_lending_and_with_many_slots) {
  static const int64_t slots[] = {-1, 1, 2, 9};
  for (size_t i = 0; i < sizeof slots / sizeof *slots; ++i) {
    l_case c = l_small(4, 9, 3, 14);
    c.cfg.foreign_slots = slots[i], c.cfg.min_rows = 0, c.routing = L_ONE_EXPERT;
    if (!t_failed()) l_case_check(&c, TOL);
  }
}

/* A weight gradient larger than the buffers it returns through goes home in pieces. */
T_TEST(llep_layer_gradient_in_pieces) {
  l_case c = l_small(4, 4, 1, 8);
  c.cfg.inter = 61, c.cfg.chunk_rows = 4, c.cfg.min_rows = 1, c.routing = L_SAME;
  c.cfg.foreign_slots = 2;
  l_case_check(&c, TOL);
}

T_TEST(llep_layer_few_tokens) {
  for (int only = -1; only < 3; ++only) { /* none, then one token in all, on each rank */
    l_case c = l_small(3, 4, 2, 5);
    for (int r = 0; r < 3; ++r) c.tokens[r] = r == only;
    both_schedules(c);
  }
  l_case c = l_small(3, 4, 2, 5); /* ranks without tokens */
  c.tokens[0] = c.tokens[2] = 0;
  both_schedules(c);
}

T_TEST(llep_layer_accumulates) {
  l_case c = l_small(3, 5, 2, 10);
  c.accumulate = true, c.passes = 2, c.routing = L_ZIPF, c.cfg.layers = 3;
  both_schedules(c);
}

T_TEST(llep_layer_8_ranks) {
  l_case c = l_small(8, 16, 2, 12);
  c.routing = L_ZIPF, c.cfg.chunk_rows = 64, c.cfg.tile_rows = 24;
  l_case_check(&c, TOL);
}

/* Tiles of several experts: the 48 runs of a rank's 6 experts, more than one pack launch takes, in tiles that hold all
 * of them, that end inside an expert, and that end inside a run. */
T_TEST(llep_layer_tiles_of_many_runs) {
  static const int64_t tiles[] = {96, 50, 7};
  for (int i = 0; i < 3; ++i) {
    l_case c = l_small(8, 48, 4, 24);
    c.routing = L_BALANCED, c.cfg.chunk_rows = 1000, c.cfg.tile_rows = tiles[i];
    if (!t_failed()) l_case_check(&c, TOL);
  }
}

T_TEST(llep_layer_immediate) {
  l_case c = l_small(2, 5, 2, 12);
  c.immediate = true, c.routing = L_ZIPF;
  l_case_check(&c, TOL);
}

T_TEST(llep_layer_jitter) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    l_case c = l_small(3, 5, 2, 16);
    c.jitter = seed, c.routing = L_ONE_EXPERT, c.passes = 2;
    if (!t_failed()) l_case_check(&c, TOL);
  }
}

/* Timing changes nothing, not even a bit. */
T_TEST(llep_layer_is_deterministic) {
  l_case c = l_small(4, 7, 3, 19);
  c.cfg.dtype = LEV_F32, c.routing = L_ZIPF, c.passes = 2;
  l_case late = c;
  late.jitter = 5;
  l_data a, b;
  l_make(&c, &a), l_make(&late, &b);
  l_run(&a), l_run(&b);
  for (int r = 0; r < c.ranks; ++r) {
    T_EXPECT_OK(a.status[r]);
    T_EXPECT_OK(b.status[r]);
    T_EXPECT_EQ_I64(a.sent[r], b.sent[r]);
  }
  size_t row = (size_t)c.cfg.hidden * sizeof(float), n = (size_t)a.n;
  T_EXPECT(memcmp(a.y, b.y, n * row) == 0);
  T_EXPECT(memcmp(a.dx, b.dx, n * row) == 0);
  T_EXPECT(memcmp(a.dprobs, b.dprobs, n * (size_t)c.cfg.top_k * sizeof(float)) == 0);
  T_EXPECT(memcmp(a.dw, b.dw, (size_t)(c.cfg.experts * 3 * c.cfg.inter) * row) == 0);
  l_free(&a), l_free(&b);
}

T_TEST(llep_layer_f32_and_bf16) {
  l_case c = l_small(4, 10, 2, 40);
  c.cfg.hidden = 32, c.cfg.inter = 24, c.routing = L_ZIPF;
  c.cfg.dtype = LEV_F32;
  l_case_check(&c, 1e-5);
  c.cfg.dtype = LEV_BF16;
  l_case_check(&c, 2e-2);
}

/* Larger rows than one column block of the kernels. */
T_TEST(llep_layer_wide_rows) {
  l_case c = l_small(2, 3, 2, 6);
  c.cfg.hidden = 600, c.cfg.inter = 33, c.routing = L_ZIPF;
  l_case_check(&c, TOL);
}

/* Where one rank computes all rows of an expert at once, its gradient may be written instead of added, in T: whatever
 * was there before, experts without rows zero, and not where several products make it up. */
T_TEST(llep_layer_overwrites_gradients) {
  static const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16};
  static const double tolerance[] = {TOL, 1e-5, 2e-2};
  for (int i = 0; i < 3; ++i)
    for (int routing = 0; routing < L_ROUTINGS; ++routing)
      for (int plain = 0; plain < 2; ++plain) {
        l_case c = l_small(1, 6, 2, 21);
        c.cfg.dtype = types[i], c.cfg.hidden = 24, c.routing = (l_routing)routing, c.overwrite = true, c.passes = 2;
        c.cfg.chunk_rows = c.cfg.tile_rows = 42;
        if (plain) c.cfg.schedule = LLEP_PLAIN, c.cfg.plain_rows = 42;
        if (!t_failed()) l_case_check(&c, tolerance[i]);
      }
  l_case none = l_small(1, 4, 2, 5);
  none.overwrite = true, none.cfg.chunk_rows = none.cfg.tile_rows = 10, none.tokens[0] = 0;
  l_case_check(&none, TOL);
  for (int kind = 0; kind < 3 && !t_failed(); ++kind) {
    l_case c = l_small(kind == 0 ? 2 : 1, 6, 2, 21);
    c.overwrite = true, c.cfg.chunk_rows = kind == 1 ? 41 : 84, c.cfg.tile_rows = kind == 2 ? 41 : 84;
    l_data d;
    l_make(&c, &d);
    l_run(&d);
    T_EXPECT_STATUS(d.status[0], LEV_ERR_MISUSE);
    l_free(&d);
  }
}
