/* SPDX-License-Identifier: Apache-2.0 */
/* Every model variant: the same loss and gradients on every layout and schedule, right by central differences, and
 * exactly as many bytes as planned. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "harness/model/attention.h"
#include "tests/num.h"
#include "tests/t.h"
#include "tests/train/rig.h"

static void layout(lev_config *c, int w, int d, int ep, int p) {
  c->parallel.ranks = w, c->parallel.context = d, c->parallel.experts = ep, c->parallel.vocab = p;
}

static void expect_same(const lev_config *c, const rig_result *want, const char *what) {
  rig_result got;
  const char *worst;
  rig_run(&(rig_options){.config = c, .poison = true}, &got);
  T_EXPECT_MSG(fabs(got.step.loss - want->step.loss) <= 1e-11 * fabs(want->step.loss), "%s: loss %.17g, expected %.17g",
               what, got.step.loss, want->step.loss);
  double distance = rig_gradient_distance(&got, want, &worst);
  T_EXPECT_MSG(distance <= 1e-11, "%s: gradient of %s differs by %.3g", what, worst, distance);
  T_EXPECT_MSG(fabs(got.step.grad_norm - want->step.grad_norm) <= 1e-11 * want->step.grad_norm, "%s: norm", what);
  rig_free(&got);
}

T_TEST(variants_equal_on_layouts_and_schedules) {
  lev_config c;
  const char *name;
  for (int v = 0; (name = rig_variant(&c, v)) != NULL && !t_failed(); ++v) {
    rig_result one;
    layout(&c, 1, 1, 1, 1);
    c.schedule.pipelined_llep = c.schedule.ring_dtp = c.schedule.sco = LEV_SCHEDULE_PLAIN;
    rig_run(&(rig_options){.config = &c}, &one);
    T_EXPECT_MSG(one.step.grad_norm > 0 && isfinite(one.step.grad_norm), "%s: gradient norm %g", name,
                 one.step.grad_norm);
    rig_variant(&c, v);
    layout(&c, 2, 2, 2, 2);
    expect_same(&c, &one, name);
    layout(&c, 4, 2, 2, 4);
    c.memory.sco_keep_attention = false;
    expect_same(&c, &one, name);
    rig_free(&one);
  }
}

/* Everything the gradient is of. */
static double objective(const lev_config *c, double shift, int direction) {
  rig_result r;
  rig_run(&(rig_options){.config = c, .shift = shift, .direction = direction}, &r);
  double total = r.step.loss + c->model.router_z_loss_coef * r.step.z_loss;
  if (c->model.balance == LEV_BALANCE_SWITCH) total += c->model.router_aux_loss_coef * r.step.balance;
  rig_free(&r);
  return total;
}

T_TEST(variants_gradient_by_central_differences) {
  lev_config c;
  const char *name;
  for (int v = 0; (name = rig_variant(&c, v)) != NULL && !t_failed(); ++v) {
    rig_result r;
    layout(&c, 2, 2, 2, 2);
    c.model.balance = LEV_BALANCE_SWITCH;
    c.model.router_aux_loss_coef = 0.5, c.model.router_z_loss_coef = 0.1;
    c.train.global_batch = 1; /* one micro-batch, whose statistics are those of the batch */
    rig_run(&(rig_options){.config = &c}, &r);
    double slope = 0, h = 1e-6;
    for (int t = 0; t < RIG_TENSORS; ++t)
      for (int64_t e = 0; e < r.elements[t]; ++e) slope += r.gradient[t][e] * rig_direction(t, e);
    double measured = (objective(&c, h, 1) - objective(&c, h, -1)) / (2 * h);
    T_EXPECT_MSG(fabs(slope - measured) <= 1e-7 * (1 + fabs(slope)), "%s: gradient says %.12g, differences %.12g", name,
                 slope, measured);
    rig_free(&r);
  }
}

T_TEST(variants_planned_bytes_are_measured_bytes) {
  lev_config c;
  const char *name;
  for (int v = 0; (name = rig_variant(&c, v)) != NULL && !t_failed(); ++v) {
    rig_result r;
    layout(&c, 4, 4, 2, 4);
    c.optimizer.name = v % 2 ? LEV_OPTIMIZER_MUON : LEV_OPTIMIZER_ADAMW;
    rig_run(&(rig_options){.config = &c, .update = true, .evaluate = true, .steps = 2}, &r);
    T_EXPECT_MSG(r.plan_exact, "%s: planned bytes differ", name);
    T_EXPECT_MSG(isfinite(r.nll), "%s: loss of the evaluation %g", name, r.nll);
    rig_free(&r);
  }
}

static int64_t bias_count(const lev_config *c) {
  return (c->model.num_hidden_layers - c->model.first_k_dense_replace) * c->model.num_experts;
}

static void expect_same_weights(const rig_result *got, const rig_result *want, const lev_config *c, double tolerance,
                                const char *what) {
  for (int t = 0; t < RIG_TENSORS; ++t)
    if (want->weight[t])
      T_EXPECT_MSG(num_rel_l2_f64(got->weight[t], want->weight[t], want->elements[t]) <= tolerance, "%s: %s", what,
                   want->name[t]);
  T_EXPECT((got->route_bias != NULL) == (want->route_bias != NULL));
  if (want->route_bias)
    T_EXPECT_MSG(num_rel_l2_f64(got->route_bias, want->route_bias, bias_count(c)) <= tolerance, "%s: selection bias",
                 what);
}

/* Every layer's biases moved, and their sum did not. */
static void check_bias(const lev_config *c, const double *bias) {
  int64_t n = c->model.num_experts, layers = c->model.num_hidden_layers - c->model.first_k_dense_replace;
  for (int64_t l = 0; l < layers; ++l) {
    double sum = 0, size = 0;
    for (int64_t e = 0; e < n; ++e) sum += bias[l * n + e], size += fabs(bias[l * n + e]);
    T_EXPECT_MSG(size > 0 && fabs(sum) < 1e-13, "layer %lld: biases of size %g, sum %g", (long long)l, size, sum);
  }
}

T_TEST(variants_updates_agree_across_layouts) {
  lev_config c;
  const char *name;
  for (int v = 0; (name = rig_variant(&c, v)) != NULL && !t_failed(); ++v) {
    rig_result one, four;
    c.optimizer.eps = 1e-3; /* AdamW's first updates are signs of the gradient: keep rounding from deciding them */
    layout(&c, 1, 1, 1, 1);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 3}, &one);
    layout(&c, 4, 2, 2, 4);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 3}, &four);
    expect_same_weights(&four, &one, &c, 1e-11, name);
    T_EXPECT((one.route_bias != NULL) == (c.model.balance == LEV_BALANCE_AUX_FREE));
    if (one.route_bias) check_bias(&c, one.route_bias);
    rig_free(&one);
    rig_free(&four);
  }
}

static void remove_folder(const char *folder) {
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  T_EXPECT(system(command) == 0);
}

/* Two steps, a checkpoint and one step more = three steps, bit for bit; the storage types in turn, bf16 through our own
 * attention (cuDNN's gives other last bits each time). */
T_TEST(variants_resume_is_exact) {
  lev_config c;
  const char *name;
  int resumed = 0;
  for (int v = 0; (name = rig_variant(&c, v)) != NULL && !t_failed(); ++v) {
    char folder[] = "/tmp/levee-variants-XXXXXX";
    rig_result whole, half, rest;
    bool other_state = c.model.tie_word_embeddings || c.model.balance == LEV_BALANCE_AUX_FREE ||
                       c.model.n_shared_experts > 0 || c.model.first_k_dense_replace > 0;
    if (!other_state) continue;
    T_REQUIRE(mkdtemp(folder) != NULL);
    layout(&c, 2, 2, 2, 2);
    c.optimizer.name = v % 2 ? LEV_OPTIMIZER_ADAMW : LEV_OPTIMIZER_MUON;
    c.model.dtype = LEV_F64 + resumed++ % 3, c.run.attention = ATTN_TILED;
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 3}, &whole);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 2, .folder = folder}, &half);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 3, .folder = folder, .resume = true}, &rest);
    expect_same_weights(&rest, &whole, &c, 0, name);
    remove_folder(folder);
    rig_free(&whole);
    rig_free(&half);
    rig_free(&rest);
  }
}

/* Two steps on two ranks, a checkpoint, and one step more on another layout = three steps on one rank. */
T_TEST(variants_resume_on_another_layout) {
  static const int others[][4] = {{1, 1, 1, 1}, {4, 2, 2, 4}, {3, 3, 3, 3}};
  lev_config c;
  const char *name;
  for (int v = 0; (name = rig_variant(&c, v)) != NULL && !t_failed(); ++v) {
    char folder[] = "/tmp/levee-variants-XXXXXX";
    const int *o = others[v % 3];
    rig_result whole, half, rest;
    T_REQUIRE(mkdtemp(folder) != NULL);
    c.optimizer.eps = 1e-3;
    c.optimizer.name = v % 2 ? LEV_OPTIMIZER_ADAMW : LEV_OPTIMIZER_MUON;
    layout(&c, 1, 1, 1, 1);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 3}, &whole);
    layout(&c, 2, 2, 2, 2);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 2, .folder = folder}, &half);
    layout(&c, o[0], o[1], o[2], o[3]);
    rig_run(&(rig_options){.config = &c, .update = true, .steps = 3, .folder = folder, .resume = true}, &rest);
    expect_same_weights(&rest, &whole, &c, 1e-11, name);
    remove_folder(folder);
    rig_free(&whole);
    rig_free(&half);
    rig_free(&rest);
  }
}

/* Other storage types: near the f64 loss (a rounding may send a token to another expert), finite gradients. */
T_TEST(variants_in_f32_and_bf16) {
  const lev_dtype types[] = {LEV_F32, LEV_BF16};
  const double tolerance[] = {1e-3, 5e-2};
  lev_config c;
  const char *name;
  for (int v = 0; (name = rig_variant(&c, v)) != NULL && !t_failed(); ++v) {
    rig_result want;
    layout(&c, 2, 2, 2, 2);
    rig_run(&(rig_options){.config = &c}, &want);
    for (int i = 0; i < 2; ++i) {
      rig_result got;
      c.model.dtype = (int)types[i];
      rig_run(&(rig_options){.config = &c, .poison = true}, &got);
      T_EXPECT_MSG(fabs(got.step.loss - want.step.loss) <= tolerance[i] * want.step.loss, "%s, %s: loss %g, in f64 %g",
                   name, lev_dtype_name(types[i]), got.step.loss, want.step.loss);
      T_EXPECT_MSG(!got.step.skipped && got.step.grad_norm > 0, "%s, %s: gradient norm %g", name,
                   lev_dtype_name(types[i]), got.step.grad_norm);
      rig_free(&got);
    }
    rig_free(&want);
  }
}
