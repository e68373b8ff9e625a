/* SPDX-License-Identifier: Apache-2.0 */
/* Loss and gradients of ring_dtp against a naive f64 loop, over groups, branches, tiles, labels and dtypes. */
#include <math.h>
#include <string.h>

#include "common/rng.h"
#include "tests/rdtp/rdtp_rig.h"

#define EXACT 1e-11

/* Uneven tokens, an empty rank, nothing that divides. */
static const rig_case base = {.ranks = 3,
                              .hidden = 12,
                              .vocab = 61,
                              .tokens = {17, 0, 11, 5, 19, 1, 8, 3},
                              .dtype = LEV_F64,
                              .rows = 5,
                              .cols = 7};

typedef struct variant {
  const char *name;
  rdtp_schedule schedule;
  rdtp_branch branch;
  bool one_pass;
} variant;
static const variant variants[] = {
    {"weights", RDTP_BOUNDED, RDTP_MOVE_WEIGHTS, false},
    {"activations", RDTP_BOUNDED, RDTP_MOVE_ACTIVATIONS, false},
    {"one-pass", RDTP_BOUNDED, RDTP_AUTO, true},
    {"plain", RDTP_PLAIN, RDTP_AUTO, false},
};
#define N_VARIANTS ((int)(sizeof variants / sizeof *variants))

static rig_case with(const rig_case *from, const variant *v) {
  rig_case c = *from;
  c.schedule = v->schedule, c.branch = v->branch, c.one_pass = v->one_pass;
  return c;
}

static void check_variants(const rig_case *from, double tolerance) {
  for (int v = 0; v < N_VARIANTS; ++v) {
    rig_case c = with(from, &variants[v]);
    rig_case_check(&c, tolerance, variants[v].name);
  }
}

T_TEST(rdtp_groups) {
  for (int ranks = 1; ranks <= 5 && !t_failed(); ++ranks) {
    rig_case c = base;
    c.ranks = ranks;
    check_variants(&c, EXACT);
  }
}

T_TEST(rdtp_eight_ranks) {
  rig_case c = base;
  c.ranks = 8;
  check_variants(&c, EXACT);
}

T_TEST(rdtp_tiles) {
  const int64_t rows[] = {1, 2, 5, 17, 100}, cols[] = {1, 3, 20, 21, 100};
  for (int i = 0; i < 5 && !t_failed(); ++i) {
    rig_case c = base;
    c.tokens[1] = 6;
    c.rows = rows[i], c.cols = cols[(i * 2 + 1) % 5];
    check_variants(&c, EXACT);
    c.ranks = 2;
    c.cols = cols[i];
    check_variants(&c, EXACT);
  }
}

/* Fewer head rows than ranks, a single token, a single hidden unit. */
T_TEST(rdtp_tiny) {
  rig_case c = base;
  c.ranks = 4, c.vocab = 3;
  check_variants(&c, EXACT);
  c = base;
  c.tokens[0] = 1, c.tokens[2] = 0, c.hidden = 1;
  check_variants(&c, EXACT);
  c = base;
  c.vocab = 1;
  for (int v = 0; v < N_VARIANTS; ++v) { /* loss exactly 0: softmax of one class */
    rig_case one = with(&c, &variants[v]);
    rig r;
    if (rig_open(&r, &one)) {
      rig_run(&r, RDTP_STEP, t_backend());
      for (int i = 0; i < one.ranks; ++i) T_EXPECT(r.rank[i].sums[0] == 0);
    }
    rig_close(&r);
  }
}

T_TEST(rdtp_no_tokens_anywhere) {
  rig_case c = base;
  memset(c.tokens, 0, sizeof c.tokens);
  check_variants(&c, EXACT);
}

T_TEST(rdtp_labels) {
  for (int l = RIG_ALL_IGNORED; l <= RIG_BAD; ++l) {
    rig_case c = base;
    c.labels = (rig_labels)l;
    check_variants(&c, EXACT);
    c.ranks = 1;
    check_variants(&c, EXACT);
  }
}

/* Logits of some hundreds: e^x alone would overflow f32 and, squared, f64. */
T_TEST(rdtp_large_logits) {
  rig_case c = base;
  c.scale = 25;
  check_variants(&c, 1e-10);
  c.scale = 1e3;
  c.dtype = LEV_F32;
  for (int v = 0; v < N_VARIANTS; ++v) {
    rig_case one = with(&c, &variants[v]);
    rig_case_check(&one, 0.2, variants[v].name);
  }
}

/* u = 2^-24. A logit carries an error of about sqrt(H) u |h||w|, a sum over V of about sqrt(V) u, the exponential of 2
 * u. */
static double tolerance_f32(const rig_case *c) {
  return 8 * (sqrt((double)c->hidden) + sqrt((double)c->vocab) + 4) * 0x1p-24;
}

T_TEST(rdtp_f32) {
  rig_case c = {
      .ranks = 3, .hidden = 40, .vocab = 301, .tokens = {37, 20, 64}, .dtype = LEV_F32, .rows = 16, .cols = 48};
  check_variants(&c, tolerance_f32(&c));
  c.ranks = 1;
  check_variants(&c, tolerance_f32(&c));
}

/* Inputs are exact in bf16 and logits f32; the residual and dh are each rounded to 8 bits: at most 2^-9 relative per
 * entry, twice. */
T_TEST(rdtp_bf16) {
  rig_case c = {
      .ranks = 3, .hidden = 40, .vocab = 301, .tokens = {37, 0, 64}, .dtype = LEV_BF16, .rows = 16, .cols = 48};
  check_variants(&c, 0x1p-8);
  c.ranks = 1;
  check_variants(&c, 0x1p-8);
  c.ranks = 2, c.rows = c.cols = 13;
  check_variants(&c, 0x1p-8);
}

/* Accumulation over a long vocabulary stays in f32. */
T_TEST(rdtp_bf16_long_vocabulary) {
  rig_case c = {.ranks = 2, .hidden = 4, .vocab = 50001, .tokens = {3, 5}, .dtype = LEV_BF16, .rows = 4, .cols = 4096};
  check_variants(&c, 0x1p-8);
}

T_TEST(rdtp_immediate_and_jitter) {
  rig_case c = base;
  for (uint64_t jitter = 1; jitter <= 3; ++jitter) {
    c.jitter = jitter;
    check_variants(&c, EXACT);
  }
}

static void keep(const rig *r, unsigned char *out, size_t *used, size_t room) {
  for (int i = 0; i < r->c.ranks; ++i) {
    const rig_rank *k = &r->rank[i];
    size_t sizes[] = {(size_t)(k->tokens * r->c.hidden) * lev_dtype_bytes(r->c.dtype),
                      (size_t)(k->vocab_rows * r->c.hidden) * lev_dtype_bytes(lev_dtype_arith(r->c.dtype)),
                      RDTP_SUMS * sizeof *k->sums};
    const void *from[] = {k->dh, k->dw, k->sums};
    for (int j = 0; j < 3; ++j) {
      if (!T_EXPECT(*used + sizes[j] <= room)) return;
      memcpy(out + *used, from[j], sizes[j]);
      *used += sizes[j];
    }
  }
}

/* Same bits whatever the timing. */
T_TEST(rdtp_deterministic) {
  static unsigned char first[65536], again[65536];
  for (int v = 0; v < N_VARIANTS; ++v)
    for (uint64_t jitter = 0; jitter < 3; ++jitter) {
      rig_case c = with(&base, &variants[v]);
      c.dtype = LEV_F32, c.jitter = jitter, c.ranks = 4;
      size_t used = 0, first_used = 0;
      rig r;
      if (!rig_open(&r, &c)) return;
      rig_run(&r, RDTP_STEP, t_backend());
      if (jitter == 0)
        keep(&r, first, &first_used, sizeof first);
      else {
        keep(&r, again, &used, sizeof again);
        T_EXPECT_MSG(memcmp(first, again, used) == 0, "%s: timing changed the result", variants[v].name);
      }
      rig_close(&r);
    }
}

static double eval_loss(rig *r) {
  double sum = 0;
  for (int i = 0; i < r->c.ranks; ++i) memset(r->rank[i].sums, 0, RDTP_SUMS * sizeof(double));
  rig_run(r, RDTP_EVAL, t_backend());
  for (int i = 0; i < r->c.ranks; ++i) sum += r->rank[i].sums[0];
  return sum * r->grad_scale;
}

/* Moves every h and w along a fixed random direction; returns the gradient's component along it. */
static double shift(rig *r, double step) {
  double along = 0;
  for (int i = 0; i < r->c.ranks; ++i) {
    rig_rank *k = &r->rank[i];
    double *h = k->h, *w = k->w;
    lev_rng_key hk = {t_seed(), 2, (uint32_t)i}, wk = {t_seed(), 3, (uint32_t)i};
    for (int64_t j = 0; j < k->tokens * r->c.hidden; ++j) {
      double d = lev_rng_normal(hk, (uint64_t)j);
      h[j] = k->h64[j] + step * d, along += d * ((double *)k->dh)[j];
    }
    for (int64_t j = 0; j < k->vocab_rows * r->c.hidden; ++j) {
      double d = lev_rng_normal(wk, (uint64_t)j);
      w[j] = k->w64[j] + step * d, along += d * (((double *)k->dw)[j] - k->dw0[j]);
    }
  }
  return along;
}

T_TEST(rdtp_central_differences) {
  for (int v = 0; v < N_VARIANTS; ++v) {
    rig_case c = with(&base, &variants[v]);
    rig r;
    if (rig_open(&r, &c)) {
      rig_run(&r, RDTP_STEP, t_backend());
      const double step = 1e-5;
      double along = shift(&r, step), up = eval_loss(&r);
      shift(&r, -step);
      double numeric = (up - eval_loss(&r)) / (2 * step);
      T_EXPECT_MSG(fabs(numeric - along) <= 1e-7 * fabs(along), "%s: %.12g by differences, %.12g by the gradient",
                   variants[v].name, numeric, along);
    }
    rig_close(&r);
  }
}

T_TEST(rdtp_eval_equals_step) {
  for (int v = 0; v < N_VARIANTS; ++v) {
    rig_case c = with(&base, &variants[v]);
    rig r;
    if (rig_open(&r, &c)) {
      rig_run(&r, RDTP_EVAL, t_backend());
      for (int i = 0; i < c.ranks; ++i) {
        T_EXPECT(fabs(r.rank[i].sums[0] - r.rank[i].sums64[0]) <= EXACT * (1 + r.rank[i].sums64[0]));
        T_EXPECT(r.rank[i].sums[1] == r.rank[i].sums64[1]);
        T_EXPECT_EQ_I64(r.rank[i].peak, r.rank[i].planned);
        T_EXPECT_EQ_I64(num_poisoned(c.dtype, r.rank[i].dh, c.tokens[i] * c.hidden), c.tokens[i] * c.hidden);
      }
    }
    rig_close(&r);
  }
}

/* A NaN logit reaches the loss of its token only; a head row of -inf logits is masked, even a whole shard of them. */
T_TEST(rdtp_non_finite_logits) {
  for (int v = 0; v < N_VARIANTS; ++v) {
    rig_case c = with(&base, &variants[v]);
    rig r;
    if (!rig_open(&r, &c)) return;
    double *h = r.rank[0].h;
    for (int64_t n = 0; n < c.tokens[0]; ++n) r.rank[0].labels[n] = 3;
    h[4 * c.hidden] = NAN;
    rig_run(&r, RDTP_EVAL, t_backend());
    T_EXPECT_MSG(isnan(r.rank[0].sums[0]), "%s: NaN lost", variants[v].name);
    T_EXPECT(isfinite(r.rank[2].sums[0]));
    r.rank[0].labels[4] = RDTP_IGNORE;
    r.rank[0].sums[0] = 0;
    rig_run(&r, RDTP_EVAL, t_backend());
    T_EXPECT_MSG(isfinite(r.rank[0].sums[0]), "%s: an ignored token counts", variants[v].name);
    rig_close(&r);

    c.hidden = 2; /* h = (1, x), w = (-inf, 0) on all of shard 0 */
    if (!rig_open(&r, &c)) return;
    for (int i = 0; i < c.ranks; ++i)
      for (int64_t n = 0; n < c.tokens[i]; ++n) {
        ((double *)r.rank[i].h)[n * 2] = 1;
        r.rank[i].labels[n] = (int32_t)(c.vocab - 1);
      }
    for (int64_t j = 0; j < r.rank[0].vocab_rows; ++j) ((double *)r.rank[0].w)[j * 2] = -INFINITY;
    rig_run(&r, RDTP_EVAL, t_backend());
    for (int i = 0; i < c.ranks; ++i)
      T_EXPECT_MSG(isfinite(r.rank[i].sums[0]), "%s: -inf not masked", variants[v].name);
    rig_close(&r);
  }
}
