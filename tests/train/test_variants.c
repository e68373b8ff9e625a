/* SPDX-License-Identifier: Apache-2.0 */
/* Every model variant: the same loss and gradients on every layout and schedule, right by central differences, and
 * exactly as many bytes as planned. */
#include <math.h>

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
    T_EXPECT_MSG(one.step.grad_norm > 0 && isfinite(one.step.grad_norm), "%s: gradient norm %g", name, one.step.grad_norm);
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
