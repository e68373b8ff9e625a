/* SPDX-License-Identifier: Apache-2.0 */
/* The composed step: the same loss and gradients on every layout and schedule, and right by central differences. */
#include <math.h>
#include <string.h>

#include "harness/model/attention.h"
#include "tests/num.h"
#include "tests/t.h"
#include "tests/train/rig.h"

static void layout(lev_config *c, int w, int d, int ep, int p) {
  c->parallel.ranks = w, c->parallel.context = d, c->parallel.experts = ep, c->parallel.vocab = p;
}

static void all_plain(lev_config *c) {
  c->schedule.pipelined_llep = c->schedule.ring_dtp = c->schedule.sco = LEV_SCHEDULE_PLAIN;
  c->schedule.offload_adamw = c->schedule.muon = LEV_SCHEDULE_PLAIN;
}

/* Runs `c` and compares loss and all gradients with `want`. */
static void expect_same(const lev_config *c, const rig_result *want, const char *what) {
  rig_result got;
  const char *worst;
  rig_run(&(rig_options){.config = c, .poison = true}, &got);
  T_EXPECT_MSG(fabs(got.step.loss - want->step.loss) <= 1e-11 * fabs(want->step.loss), "%s: loss %.17g, expected %.17g",
               what, got.step.loss, want->step.loss);
  T_EXPECT_MSG(fabs(got.step.balance - want->step.balance) <= 1e-11, "%s: balance loss %.17g, expected %.17g", what,
               got.step.balance, want->step.balance);
  double distance = rig_gradient_distance(&got, want, &worst);
  T_EXPECT_MSG(distance <= 1e-11, "%s: gradient of %s differs by %.3g", what, worst, distance);
  T_EXPECT_MSG(fabs(got.step.grad_norm - want->step.grad_norm) <= 1e-11 * want->step.grad_norm, "%s: norm", what);
  rig_free(&got);
}

T_TEST(step_equal_on_1_2_4_ranks_and_schedules) {
  lev_config c;
  rig_result one;
  rig_config(&c);
  layout(&c, 1, 1, 1, 1);
  all_plain(&c);
  rig_run(&(rig_options){.config = &c}, &one);
  T_REQUIRE(!t_failed());
  T_EXPECT(one.step.loss > 1 && one.step.loss < 10 && one.step.grad_norm > 0);
  const int layouts[][4] = {{1, 1, 1, 1}, {2, 2, 2, 2}, {4, 4, 4, 4}};
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts && !t_failed(); ++i) {
    rig_config(&c);
    layout(&c, layouts[i][0], layouts[i][1], layouts[i][2], layouts[i][3]);
    expect_same(&c, &one, "bounded");
    all_plain(&c);
    expect_same(&c, &one, "plain");
    rig_config(&c);
    layout(&c, layouts[i][0], layouts[i][1], layouts[i][2], layouts[i][3]);
    c.memory.sco_keep_attention = false;
    expect_same(&c, &one, "attention recomputed");
  }
  rig_free(&one);
}

T_TEST(step_equal_on_mixed_groups) {
  lev_config c;
  rig_result one;
  rig_config(&c);
  c.train.global_batch = 5; /* does not divide by the number of context groups */
  layout(&c, 1, 1, 1, 1);
  rig_run(&(rig_options){.config = &c}, &one);
  T_REQUIRE(!t_failed());
  const int layouts[][4] = {{4, 2, 2, 4}, {8, 4, 2, 4}, {6, 3, 2, 6}, {8, 2, 4, 8}, {5, 5, 5, 5}, {4, 1, 1, 2}};
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts && !t_failed(); ++i) {
    layout(&c, layouts[i][0], layouts[i][1], layouts[i][2], layouts[i][3]);
    expect_same(&c, &one, "mixed groups");
    c.optimizer.name = i % 2 ? LEV_OPTIMIZER_MUON : LEV_OPTIMIZER_ADAMW;
  }
  rig_free(&one);
}

/* Everything the gradient is of: cross-entropy plus both router losses. */
static double objective(const lev_config *c, double shift, int direction) {
  rig_result r;
  rig_run(&(rig_options){.config = c, .shift = shift, .direction = direction}, &r);
  double total =
      r.step.loss + c->model.router_aux_loss_coef * r.step.balance + c->model.router_z_loss_coef * r.step.z_loss;
  rig_free(&r);
  return total;
}

T_TEST(step_gradient_by_central_differences) {
  for (int kind = 0; kind < 3; ++kind) {
    lev_config c;
    rig_result r;
    rig_config(&c);
    layout(&c, 2, 2, 2, 2);
    c.model.qk_norm = (int)(kind == 0 ? LEV_QK_NORM_NONE : kind == 1 ? LEV_QK_NORM_FULL : LEV_QK_NORM_HEAD);
    c.model.norm_topk_prob = kind == 2;
    c.model.router_aux_loss_coef = 0.5, c.model.router_z_loss_coef = 0.1;
    c.train.global_batch = kind == 0 ? 1 : 2; /* one micro-batch, or routes counted in a pass of their own */
    rig_run(&(rig_options){.config = &c}, &r);
    T_REQUIRE(!t_failed());
    double slope = 0, h = 1e-6;
    for (int t = 0; t < RIG_TENSORS; ++t)
      for (int64_t e = 0; e < r.elements[t]; ++e) slope += r.gradient[t][e] * rig_direction(t, e);
    double measured = (objective(&c, h, 1) - objective(&c, h, -1)) / (2 * h);
    T_EXPECT_MSG(fabs(slope - measured) <= 1e-7 * (1 + fabs(slope)), "kind %d: gradient says %.12g, differences %.12g",
                 kind, slope, measured);
    rig_free(&r);
  }
}

T_TEST(step_planned_bytes_are_measured_bytes) {
  for (int muon = 0; muon < 2; ++muon)
    for (int plain = 0; plain < 2; ++plain) {
      lev_config c;
      rig_result r;
      rig_config(&c);
      layout(&c, 4, 4, 4, 4);
      if (plain) all_plain(&c);
      c.optimizer.name = muon ? LEV_OPTIMIZER_MUON : LEV_OPTIMIZER_ADAMW;
      rig_run(&(rig_options){.config = &c, .update = true, .evaluate = true, .steps = 2}, &r);
      T_EXPECT(r.plan_exact);
      T_EXPECT(isfinite(r.nll) && r.valid == 3 * c.train.context);
      rig_free(&r);
    }
}

T_TEST(step_updates_agree_across_layouts_and_placements) {
  for (int muon = 0; muon < 2; ++muon) {
    lev_config c;
    rig_result one, four;
    rig_config(&c);
    c.optimizer.name = muon ? LEV_OPTIMIZER_MUON : LEV_OPTIMIZER_ADAMW;
    c.optimizer.eps = 1e-3; /* AdamW's first updates are signs of the gradient: keep rounding from deciding them */
    layout(&c, 1, 1, 1, 1);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 2}, &one);
    layout(&c, 4, 4, 4, 4);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 2}, &four);
    for (int t = 0; t < RIG_TENSORS; ++t)
      if (one.weight[t])
        T_EXPECT_MSG(num_rel_l2_f64(four.weight[t], one.weight[t], one.elements[t]) <= 1e-11, "%s after 2 steps",
                     one.name[t]);
    rig_free(&one);
    rig_free(&four);
  }
}

/* One rank whose chunk and tile hold every row: the experts' gradients are written where they are stored. */
T_TEST(step_with_gradients_written_at_once) {
  for (int dtype = LEV_F64; dtype <= LEV_BF16; ++dtype) {
    lev_config c;
    rig_result added, written;
    const char *worst;
    rig_config(&c);
    layout(&c, 1, 1, 1, 1);
    c.model.dtype = dtype, c.train.global_batch = 1;
    c.memory.llep_chunk_rows = c.memory.llep_tile_rows = c.train.context * c.model.num_experts_per_tok;
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 2, .poison = true}, &written);
    c.memory.llep_tile_rows -= 1; /* an expert could need two products */
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 2, .poison = true}, &added);
    double distance = rig_gradient_distance(&written, &added, &worst);
    T_EXPECT_MSG(distance <= (dtype == LEV_F64 ? 1e-11 : dtype == LEV_F32 ? 1e-5 : 2e-2), "%s: %g", worst, distance);
    T_EXPECT(written.plan_exact && added.plan_exact);
    if (dtype == LEV_BF16) T_EXPECT(strcmp(written.peaks[0], added.peaks[0]) != 0); /* no live sums of experts */
    rig_free(&added);
    rig_free(&written);
  }
}

/* Loss and gradients alone: those of a run with an optimizer, in a plan that holds nothing for one. */
T_TEST(step_without_optimizer) {
  for (int ranks = 1; ranks <= 4; ranks += 3) {
    lev_config c;
    rig_result with, without;
    rig_config(&c);
    layout(&c, ranks, ranks, ranks, ranks);
    rig_run(&(rig_options){.config = &c}, &with);
    c.optimizer.name = LEV_OPTIMIZER_NONE;
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 1, .evaluate = true}, &without);
    T_EXPECT(without.plan_exact && with.step.loss == without.step.loss &&
             with.step.grad_norm == without.step.grad_norm);
    for (int t = 0; t < RIG_TENSORS; ++t)
      for (int64_t e = 0; e < with.elements[t]; ++e)
        if (!T_EXPECT(with.gradient[t][e] == without.gradient[t][e] && with.weight[t][e] == without.weight[t][e]))
          return;
    for (int r = 0; r < ranks; ++r) {
      T_EXPECT(strstr(with.peaks[r], "oadamw.") != NULL);
      T_EXPECT(strstr(without.peaks[r], "oadamw.") == NULL && strstr(without.peaks[r], "muon.") == NULL);
    }
    rig_free(&with);
    rig_free(&without);
  }
}

static bool same_bits(const double *a, const double *b, int64_t n) {
  return memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

/* Two runs, one of them disturbed, in every storage type; bf16 through our own attention, since cuDNN's adds up with
 * atomics. Gradients too: AdamW's first update is hardly more than their signs. */
T_TEST(step_same_bits_under_jitter) {
  for (int dtype = LEV_F64; dtype <= LEV_BF16; ++dtype) {
    lev_config c;
    rig_result calm, jittered;
    rig_config(&c);
    layout(&c, 2, 2, 2, 2);
    c.model.dtype = dtype, c.run.attention = ATTN_TILED;
    rig_run(&(rig_options){.config = &c, .update = true}, &calm);
    c.debug.jitter_seed = 5;
    rig_run(&(rig_options){.config = &c, .update = true, .poison = true}, &jittered);
    const char *type = lev_dtype_name((lev_dtype)dtype);
    T_EXPECT(isfinite(calm.step.loss) && calm.step.grad_norm > 0 && !calm.step.skipped);
    T_EXPECT_MSG(calm.step.loss == jittered.step.loss && calm.step.grad_norm == jittered.step.grad_norm,
                 "%s: loss %.17g and %.17g, norm %.17g and %.17g", type, calm.step.loss, jittered.step.loss,
                 calm.step.grad_norm, jittered.step.grad_norm);
    for (int t = 0; t < RIG_TENSORS && !t_failed(); ++t) {
      int64_t n = calm.elements[t];
      if (n == 0) continue;
      T_EXPECT_MSG(same_bits(calm.gradient[t], jittered.gradient[t], n), "%s: gradient of %s", type, calm.name[t]);
      T_EXPECT_MSG(same_bits(calm.weight[t], jittered.weight[t], n), "%s: %s", type, calm.name[t]);
    }
    rig_free(&calm);
    rig_free(&jittered);
  }
}
