/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of attention: shards, oracle, extreme scores, drift, finite differences, determinism. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness/model/attention_ops.h"
#include "tests/model/attention_rig.h"

#define EXACT 1e-11

T_TEST(attention_shards_cover_the_sequence_once) {
  for (int64_t seq = 0; seq < 40; ++seq) {
    for (int ranks = 1; ranks <= 6; ++ranks) {
      int seen[40] = {0};
      int64_t total = 0, most = 0, least = seq;
      for (int r = 0; r < ranks; ++r) {
        int64_t n = attn_shard_tokens(seq, ranks, r), row = 0;
        attn_range range[2];
        attn_shard_ranges(seq, ranks, r, range);
        for (int i = 0; i < 2; ++i)
          for (int64_t pos = range[i].begin; pos < range[i].end; ++pos, ++row) {
            T_EXPECT_EQ_I64(attn_token_position(seq, ranks, r, row), pos);
            ++seen[pos];
          }
        T_EXPECT_EQ_I64(row, n);
        total += n;
        most = n > most ? n : most, least = n < least ? n : least;
      }
      T_EXPECT_EQ_I64(total, seq);
      T_EXPECT_MSG(most - least <= 1, "%d tokens on %d ranks: shares from %d to %d", (int)seq, ranks, (int)least,
                   (int)most);
      for (int64_t pos = 0; pos < seq; ++pos) T_EXPECT_EQ_I64(seen[pos], 1);
    }
  }
  /* zigzag: rank 0 of 2 holds the outer quarters, rank 1 the inner ones */
  T_EXPECT_EQ_I64(attn_token_position(8, 2, 0, 1), 1);
  T_EXPECT_EQ_I64(attn_token_position(8, 2, 0, 2), 6);
  T_EXPECT_EQ_I64(attn_token_position(8, 2, 1, 0), 2);
  T_EXPECT_EQ_I64(attn_token_position(8, 2, 1, 3), 5);
}

/* Rank counts, lengths that do not divide, ratios of heads, fused rows, blocks that do not divide. */
static const attn_case shapes[] = {
    {.ranks = 1, .seq = 37, .heads = 4, .kv_heads = 2, .dim = 8, .dtype = LEV_F64},
    {.ranks = 1, .seq = 64, .heads = 3, .kv_heads = 3, .dim = 5, .dtype = LEV_F64, .block_q = 16, .block_k = 16},
    {.ranks = 1,
     .seq = 61,
     .heads = 6,
     .kv_heads = 2,
     .dim = 7,
     .dtype = LEV_F64,
     .block_q = 7,
     .block_k = 13,
     .fused = true},
    {.ranks = 2, .seq = 41, .heads = 8, .kv_heads = 1, .dim = 8, .dtype = LEV_F64, .block_q = 3, .block_k = 5},
    {.ranks = 2, .seq = 64, .heads = 4, .kv_heads = 4, .dim = 16, .dtype = LEV_F64, .fused = true},
    {.ranks = 3, .seq = 50, .heads = 4, .kv_heads = 2, .dim = 8, .dtype = LEV_F64, .block_q = 4, .block_k = 4},
    {.ranks = 3,
     .seq = 55,
     .heads = 6,
     .kv_heads = 3,
     .dim = 6,
     .dtype = LEV_F64,
     .fused = true,
     .block_q = 5,
     .block_k = 1},
    {.ranks = 4, .seq = 67, .heads = 2, .kv_heads = 1, .dim = 8, .dtype = LEV_F64, .block_q = 1, .block_k = 3},
    {.ranks = 5, .seq = 73, .heads = 5, .kv_heads = 5, .dim = 4, .dtype = LEV_F64, .spare = 9},
};

T_TEST(attention_equals_the_full_matrix) {
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i) attn_case_check(&shapes[i], EXACT, "shape");
}

T_TEST(attention_with_fewer_tokens_than_pieces) {
  for (int ranks = 1; ranks <= 5; ranks += 2) {
    for (int64_t seq = 0; seq <= 2 * ranks + 1; ++seq) {
      attn_case c = {.ranks = ranks, .seq = seq, .heads = 4, .kv_heads = 2, .dim = 4, .dtype = LEV_F64};
      attn_case_check(&c, EXACT, "short");
      c.fused = true, c.spare = 1;
      attn_case_check(&c, EXACT, "short, fused");
    }
  }
}

T_TEST(attention_window_and_documents) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    attn_case c = {
        .ranks = ranks, .seq = 53, .heads = 4, .kv_heads = 2, .dim = 4, .dtype = LEV_F64, .block_q = 6, .block_k = 5};
    for (c.window = 2; c.window < 60; c.window += 11) attn_case_check(&c, EXACT, "window");
    c.window = 0;
    for (c.document = 2; c.document < 60; c.document += 11) attn_case_check(&c, EXACT, "documents");
    c.document = 17, c.window = 9;
    attn_case_check(&c, EXACT, "window in documents");
  }
}

static double largest(const double *x, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; ++i) most = fmax(most, fabs(x[i]));
  return most;
}

static double distance(lev_dtype type, const void *got, const double *want, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    double d = lev_dtype_load(type, got, i) - want[i];
    sum += d * d;
  }
  return sqrt(sum);
}

/* Where a softmax is saturated, the gradients of q and k are small differences of large terms: their error is measured
 * against those terms. */
static void check_saturated(const attn_rig *r, double tolerance) {
  const attn_case *c = &r->c;
  int64_t nq = c->seq * c->heads * c->dim, nk = c->seq * c->kv_heads * c->dim;
  T_EXPECT(num_rel_l2(c->dtype, r->o, r->o64, nq) <= tolerance);
  T_EXPECT(num_rel_l2(lev_dtype_arith(c->dtype), r->lse, r->lse64, c->seq * c->heads) <= tolerance);
  T_EXPECT(num_rel_l2(c->dtype, r->dv, r->dv64, nk) <= tolerance);
  double terms = 0;
  for (int64_t i = 0; i < nq; ++i) terms += r->d_o[i] * r->d_o[i];
  terms = tolerance * sqrt(terms);
  T_EXPECT(distance(c->dtype, r->dq, r->dq64, nq) <= terms * largest(r->k, nk));
  T_EXPECT(distance(c->dtype, r->dk, r->dk64, nk) <= terms * largest(r->q, nq));
}

/* Scores of thousands, and parts of the ring whose log-sum-exp differ by far more than 100, rising and falling. */
T_TEST(attention_extreme_scores_are_finite) {
  const double tilts[] = {0, 5, -5, 20, -20};
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (int i = 0; i < 10; ++i) {
      attn_case c = {.ranks = ranks,
                     .seq = 96,
                     .heads = 4,
                     .kv_heads = 2,
                     .dim = 8,
                     .dtype = i < 5 ? LEV_F64 : LEV_F32,
                     .block_q = 8,
                     .block_k = 8,
                     .tilt = tilts[i % 5],
                     .size = tilts[i % 5] == 0 ? 40 : 1};
      attn_rig r;
      if (attn_rig_open(&r, &c)) {
        attn_rig_run(&r, t_backend());
        check_saturated(&r, c.dtype == LEV_F64 ? EXACT : 1e-3); /* a score of 3000 carries an f32 error of 2e-4 */
      }
      attn_rig_close(&r);
    }
  }
}

/* Rows whose log-sum-exp is far below -88.7, where exp(-lse) would overflow f32. */
T_TEST(attention_very_negative_scores) {
  attn_case c = {
      .ranks = 2, .seq = 192, .heads = 2, .kv_heads = 1, .dim = 8, .dtype = LEV_F32, .tilt = 0.01, .block_k = 64};
  attn_rig r;
  if (attn_rig_open(&r, &c)) {
    for (int64_t i = 0; i < c.seq * c.kv_heads; ++i) r.k[i * c.dim] = (double)(float)(r.k[i * c.dim] - 256);
    attn_rig_oracle(&r);
    for (int64_t i = 0; i < c.seq * c.heads; ++i) T_EXPECT(r.lse64[i] < -200);
    attn_rig_run(&r, t_backend());
    attn_rig_check(&r, 1e-3, "negative");
  }
  attn_rig_close(&r);
}

T_TEST(attention_nan_propagates) {
  attn_case c = {.ranks = 2, .seq = 24, .heads = 2, .kv_heads = 1, .dim = 4, .dtype = LEV_F32};
  attn_rig r;
  if (attn_rig_open(&r, &c)) {
    r.k[10 * c.dim] = NAN;
    attn_rig_run(&r, t_backend());
    const float *o = r.o;
    for (int64_t i = 0; i < c.seq; ++i) /* every query from position 10 on sees the bad key, none before does */
      T_EXPECT_MSG((isnan(o[i * 8]) != 0) == (i >= 10), "row %d is %g", (int)i, (double)o[i * 8]);
  }
  attn_rig_close(&r);
}

T_TEST(attention_f32_and_bf16) {
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i) {
    attn_case c = shapes[i];
    c.dtype = LEV_F32;
    attn_case_check(&c, 2e-6, "f32");
    c.dtype = LEV_BF16;
    attn_case_check(&c, 8e-3, "bf16");
  }
}

/* Head sizes, blocks and rings that the GPU gives to its tensor cores; rows that start on odd addresses beside them. */
T_TEST(attention_bf16_heads_of_64_and_128) {
  static const attn_case cases[] = {
      {.ranks = 1, .seq = 200, .heads = 4, .kv_heads = 2, .dim = 64, .dtype = LEV_BF16},
      {.ranks = 1, .seq = 150, .heads = 2, .kv_heads = 1, .dim = 128, .dtype = LEV_BF16},
      {.ranks = 3, .seq = 331, .heads = 4, .kv_heads = 1, .dim = 64, .dtype = LEV_BF16},
      {.ranks = 2, .seq = 257, .heads = 2, .kv_heads = 2, .dim = 128, .dtype = LEV_BF16},
      {.ranks = 1, .seq = 230, .heads = 2, .kv_heads = 1, .dim = 64, .dtype = LEV_BF16, .window = 70},
      {.ranks = 2, .seq = 230, .heads = 2, .kv_heads = 1, .dim = 64, .dtype = LEV_BF16, .document = 37},
      {.ranks = 1, .seq = 190, .heads = 2, .kv_heads = 1, .dim = 128, .dtype = LEV_BF16, .document = 83, .window = 29},
      {.ranks = 1, .seq = 90, .heads = 2, .kv_heads = 1, .dim = 64, .dtype = LEV_BF16, .fused = true},
      {.ranks = 4, .seq = 5, .heads = 2, .kv_heads = 1, .dim = 64, .dtype = LEV_BF16},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) attn_case_check(&cases[i], 8e-3, "tensor cores");
}

/* Several blocks of every kernel's tiles, in the types without tensor cores. */
T_TEST(attention_wide_heads) {
  static const int64_t dims[] = {64, 80, 128, 192, 256};
  for (size_t i = 0; i < sizeof dims / sizeof *dims; ++i) {
    attn_case c = {.ranks = 2, .seq = 141, .heads = 2, .kv_heads = 1, .dim = dims[i], .dtype = LEV_F64};
    attn_case_check(&c, EXACT, "wide");
    c.dtype = LEV_F32, c.document = 50;
    attn_case_check(&c, 2e-6, "wide f32");
  }
}

/* The error against f64 stays where it is, however many ranks hold the sequence. */
static void drift(lev_dtype dtype, attn_route route) {
  attn_case c = {.ranks = 8,
                 .seq = 320,
                 .heads = 2,
                 .kv_heads = 1,
                 .dim = 16,
                 .dtype = dtype,
                 .block_q = 16,
                 .block_k = 16,
                 .route = route};
  attn_rig r;
  double first = 0;
  bool open = attn_rig_open(&r, &c);
  for (int ranks = 1; open && ranks <= 8; ++ranks) {
    r.c.ranks = ranks;
    attn_rig_run(&r, t_backend());
    double error = attn_rig_error(&r);
    if (ranks == 1) first = error;
    T_EXPECT_MSG(error <= 1.3 * first, "%s: error %.3g on %d ranks, %.3g on one", lev_dtype_name(dtype), error, ranks,
                 first);
  }
  r.c.ranks = c.ranks;
  attn_rig_close(&r);
}
T_TEST(attention_drift_is_flat_in_ring_size) {
  drift(LEV_F32, ATTN_AUTO);
  drift(LEV_BF16, ATTN_AUTO);
  if (t_backend() == LEV_BACKEND_CUDA && attn_rig_cudnn()) drift(LEV_BF16, ATTN_CUDNN);
}

/* Loss = sum of d_o o. Its change along a random direction of one input, against the gradient's. */
static double loss_at(attn_rig *r, double *input, const double *direction, int64_t n, double step) {
  for (int64_t i = 0; i < n; ++i) input[i] += step * direction[i];
  attn_rig_run(r, t_backend());
  for (int64_t i = 0; i < n; ++i) input[i] -= step * direction[i];
  double loss = 0;
  const double *o = r->o;
  for (int64_t i = 0; i < r->c.seq * r->c.heads * r->c.dim; ++i) loss += r->d_o[i] * o[i];
  return loss;
}

T_TEST(attention_gradients_match_differences) {
  attn_case c = {
      .ranks = 3, .seq = 45, .heads = 4, .kv_heads = 2, .dim = 6, .dtype = LEV_F64, .block_q = 5, .block_k = 7};
  attn_rig r;
  if (attn_rig_open(&r, &c)) {
    double *inputs[] = {r.q, r.k, r.v};
    int64_t nq = c.seq * c.heads * c.dim, nk = c.seq * c.kv_heads * c.dim, n[] = {nq, nk, nk};
    for (int i = 0; i < 3; ++i) {
      double *direction = malloc(sizeof(double) * (size_t)n[i]), slope = 0;
      if (!T_EXPECT(direction != NULL)) break;
      num_random(LEV_F64, direction, NULL, n[i], 1, (uint32_t)(10 + i));
      attn_rig_run(&r, t_backend());
      const double *grads[] = {r.dq, r.dk, r.dv};
      for (int64_t x = 0; x < n[i]; ++x) slope += grads[i][x] * direction[x];
      const double h = 1e-4;
      double near = loss_at(&r, inputs[i], direction, n[i], h) - loss_at(&r, inputs[i], direction, n[i], -h);
      double far = loss_at(&r, inputs[i], direction, n[i], 2 * h) - loss_at(&r, inputs[i], direction, n[i], -2 * h);
      double want = (8 * near - far) / (12 * h);
      T_EXPECT_MSG(fabs(slope - want) <= 1e-9 * fabs(want), "input %d: gradient %.12g, differences %.12g", i, slope,
                   want);
      free(direction);
    }
  }
  attn_rig_close(&r);
}

static bool same_bits(const attn_rig *a, const attn_rig *b) {
  const attn_case *c = &a->c;
  size_t t = lev_dtype_bytes(c->dtype), s = lev_dtype_bytes(lev_dtype_arith(c->dtype));
  size_t nq = (size_t)(c->seq * c->heads * c->dim), nk = (size_t)(c->seq * c->kv_heads * c->dim);
  return memcmp(a->o, b->o, nq * t) == 0 && memcmp(a->lse, b->lse, (size_t)(c->seq * c->heads) * s) == 0 &&
         memcmp(a->dq, b->dq, nq * t) == 0 && memcmp(a->dk, b->dk, nk * t) == 0 && memcmp(a->dv, b->dv, nk * t) == 0;
}

T_TEST(attention_is_independent_of_timing) {
  const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16};
  for (int t = 0; t < 3; ++t) {
    attn_case c = {
        .ranks = 4, .seq = 90, .heads = 4, .kv_heads = 2, .dim = 8, .dtype = types[t], .block_q = 8, .block_k = 8};
    attn_rig first, again;
    if (!attn_rig_open(&first, &c) || !attn_rig_open(&again, &c)) return;
    attn_rig_run(&first, t_backend());
    for (uint64_t jitter = 1; jitter <= 3; ++jitter) {
      again.c.jitter = jitter;
      attn_rig_run(&again, t_backend());
      T_EXPECT(same_bits(&first, &again));
    }
    attn_rig_close(&again);
    attn_rig_close(&first);
  }
}

T_TEST(attention_immediate_streams) {
  attn_case c = {.ranks = 1, .seq = 40, .heads = 4, .kv_heads = 2, .dim = 8, .dtype = LEV_F64, .immediate = true};
  attn_case_check(&c, EXACT, "immediate");
  c.ranks = 3;
  attn_case_check(&c, EXACT, "immediate ring");
}

T_TEST(attention_exp_is_within_its_bound) {
  double worst = 0;
  for (uint32_t bits = 0; bits < 0x7f800000u; bits += 997) {
    for (uint32_t sign = 0; sign < 2; ++sign) {
      uint32_t u = bits | sign << 31;
      float x;
      memcpy(&x, &u, sizeof x);
      if (x < -87.33f || x > 88.0f) continue;
      double want = exp((double)x);
      worst = fmax(worst, fabs((double)attn_exp_f32(x) - want) / want);
    }
  }
  T_EXPECT_MSG(worst < 1.2e-7 && worst > 1e-9, "relative error %.3g", worst);
  T_EXPECT(attn_exp_f32(0) == 1);
  T_EXPECT(attn_exp_f32(-INFINITY) == 0 && attn_exp_f32(-88) == 0);
  T_EXPECT(isnan(attn_exp_f32(NAN)));
}
