/* SPDX-License-Identifier: Apache-2.0 */
/* Documents packed into one sequence give the loss and gradients of the documents alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/num.h"
#include "tests/t.h"
#include "tests/train/rig.h"
#include "tests/train/tokens.h"

enum { DOCUMENTS = 6 };
static const int64_t lengths[DOCUMENTS] = {11, 1, 23, 2, 40, 17};

static void base(lev_config *c, int64_t context) {
  rig_config(c);
  c->train.context = context, c->train.global_batch = 1;
  c->model.balance = LEV_BALANCE_NONE, c->model.router_z_loss_coef = 0; /* means over the tokens of a sequence */
  c->data.mask_eod = true;
}

/* Sum over documents of loss and gradients, each weighted with its valid labels. */
static void alone(rig_result *sum, void (*model)(lev_config *)) {
  int64_t first = 0;
  for (int d = 0; d < DOCUMENTS && !t_failed(); first += lengths[d++]) {
    lev_config c;
    rig_result r;
    base(&c, lengths[d]);
    model(&c);
    rig_run(&(rig_options){.config = &c, .documents = &lengths[d], .n_documents = 1, .first_token = first}, &r);
    T_EXPECT_EQ_I64(r.step.valid, lengths[d] - 1);
    double weight = (double)r.step.valid;
    sum->step.loss += weight * r.step.loss, sum->step.valid += r.step.valid;
    for (int t = 0; t < RIG_TENSORS; ++t) {
      if (!r.gradient[t]) continue;
      if (!sum->gradient[t]) {
        sum->elements[t] = r.elements[t];
        sum->gradient[t] = calloc((size_t)r.elements[t], sizeof(double));
        memcpy(sum->name[t], r.name[t], sizeof sum->name[t]);
      }
      for (int64_t e = 0; e < r.elements[t]; ++e) sum->gradient[t][e] += weight * r.gradient[t][e];
    }
    rig_free(&r);
  }
  sum->step.loss /= (double)sum->step.valid;
  for (int t = 0; t < RIG_TENSORS; ++t)
    for (int64_t e = 0; e < sum->elements[t]; ++e) sum->gradient[t][e] /= (double)sum->step.valid;
}

static void plain_model(lev_config *c) {
  (void)c;
}
static void windowed_model(lev_config *c) {
  c->model.sliding_window = 9, c->model.sliding_window_pattern = 2;
  c->model.rope_scaling = LEV_ROPE_LINEAR, c->model.rope_factor = 2;
}

static void check_model(void (*model)(lev_config *)) {
  const int layouts[][4] = {{1, 1, 1, 1}, {2, 2, 2, 2}, {4, 4, 2, 4}};
  int64_t context = 0;
  rig_result want = {0};
  for (int d = 0; d < DOCUMENTS; ++d) context += lengths[d];
  alone(&want, model);
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts && !t_failed(); ++i) {
    lev_config c;
    rig_result got;
    const char *worst;
    base(&c, context);
    model(&c);
    c.data.packed = true;
    c.parallel.ranks = layouts[i][0], c.parallel.context = layouts[i][1], c.parallel.experts = layouts[i][2];
    c.parallel.vocab = layouts[i][3];
    rig_options o = {.config = &c, .documents = lengths, .n_documents = DOCUMENTS, .poison = true};
    rig_run(&o, &got);
    T_EXPECT_EQ_I64(got.step.valid, context - DOCUMENTS);
    T_EXPECT_MSG(fabs(got.step.loss - want.step.loss) <= 1e-11 * want.step.loss, "loss %.17g, alone %.17g",
                 got.step.loss, want.step.loss);
    double distance = rig_gradient_distance(&got, &want, &worst);
    T_EXPECT_MSG(distance <= 1e-11, "gradient of %s differs by %.3g", worst, distance);
    rig_free(&got);
    c.data.packed = false; /* the borders matter */
    rig_run(&o, &got);
    T_EXPECT(fabs(got.step.loss - want.step.loss) > 1e-6);
    rig_free(&got);
  }
  rig_free(&want);
}

T_TEST(packed_documents_equal_documents_alone) {
  check_model(plain_model);
}

T_TEST(packed_documents_equal_documents_alone_with_windows) {
  check_model(windowed_model);
}

/* Masking alone: exactly the labels that begin a document leave the loss. */
T_TEST(packed_masking_counts_borders) {
  int64_t valid[2];
  for (int mask = 0; mask < 2; ++mask) {
    lev_config c;
    rig_result r;
    base(&c, 94);
    c.data.mask_eod = mask;
    rig_run(&(rig_options){.config = &c, .documents = lengths, .n_documents = DOCUMENTS}, &r);
    valid[mask] = r.step.valid;
    rig_free(&r);
  }
  T_EXPECT_EQ_I64(valid[0], 94);
  T_EXPECT_EQ_I64(valid[1], 94 - DOCUMENTS);
}
