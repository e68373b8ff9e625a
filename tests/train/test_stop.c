/* SPDX-License-Identifier: Apache-2.0 */
/* A run that is told to stop in the middle of a validation leaves after the batch at hand, saves, and makes up for the
 * whole validation when it goes on. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "harness/train/run.h"
#include "tests/t.h"
#include "tests/train/rig.h"
#include "tests/train/tokens.h"

enum { STEPS = 2 };

typedef struct record {
  atomic_int *stop; /* set a while after the first step; NULL = never */
  pthread_t setter;
  bool set;
  int steps, validations, saves;
  double val_loss[STEPS + 1]; /* by step; 0 = none */
} record;

/* By then the validation runs: it begins at once and takes much longer. */
static void *set_later(void *stop) {
  nanosleep(&(struct timespec){.tv_nsec = 60 * 1000000}, NULL);
  atomic_store((atomic_int *)stop, 1);
  return NULL;
}

static void on_step(void *ctx, const lev_step_record *r, const lev_run_memory *memory) {
  record *out = ctx;
  (void)r, (void)memory;
  ++out->steps;
  if (!out->stop || out->set) return;
  out->set = T_EXPECT(pthread_create(&out->setter, NULL, set_later, out->stop) == 0);
}

static void on_validation(void *ctx, const lev_validation_record *r) {
  record *out = ctx;
  ++out->validations;
  if (r->step <= STEPS) out->val_loss[r->step] = r->val_loss;
}

static void on_checkpoint(void *ctx, int64_t step, lev_status status, const char *detail) {
  (void)step;
  if (T_EXPECT_MSG(status == LEV_OK, "%s", detail)) ++((record *)ctx)->saves;
}

static bool validated(void *ctx, int64_t step) {
  return ((const record *)ctx)->val_loss[step] != 0;
}

static void settings(lev_config *c, const char *folder, const char *name) {
  rig_config(c);
  c->parallel.ranks = 2, c->parallel.context = 1;
  c->train.context = 4, c->train.steps = STEPS, c->train.eval_interval = 1; /* 1,000 samples, two at a time */
  c->run.trace_steps = 0, c->run.compute_immediate = true;
  snprintf(c->data.train, sizeof c->data.train, "%s/t", folder);
  snprintf(c->data.valid, sizeof c->data.valid, "%s/t", folder);
  snprintf(c->run.folder, sizeof c->run.folder, "%s/%s", folder, name);
}

static void run(const lev_config *c, record *out) {
  lev_run_observer o = {
      .ctx = out, .step = on_step, .validation = on_validation, .checkpoint = on_checkpoint, .validated = validated};
  T_EXPECT_OK(lev_run(c, &o, out->stop));
  if (out->set) pthread_join(out->setter, NULL);
  out->set = false;
}

T_TEST(stop_leaves_a_validation_and_makes_up_for_it) {
  char folder[] = "/tmp/levee-stop-XXXXXX", prefix[64], command[96];
  lev_config c;
  atomic_int stop = 0;
  record whole = {0}, parts = {.stop = &stop};
  T_REQUIRE(mkdtemp(folder) != NULL);
  settings(&c, folder, "whole");
  snprintf(prefix, sizeof prefix, "%s/t", folder);
  tokens_write(&c, prefix);
  run(&c, &whole);
  T_EXPECT_EQ_I64(whole.validations, STEPS);
  settings(&c, folder, "parts");
  run(&c, &parts);
  T_EXPECT_EQ_I64(parts.steps, 1);
  T_EXPECT_EQ_I64(parts.validations, 0);
  T_EXPECT_EQ_I64(parts.saves, 1);
  parts.stop = NULL;
  run(&c, &parts);
  T_EXPECT_EQ_I64(parts.steps, STEPS);
  for (int s = 1; s <= STEPS; ++s)
    T_EXPECT_MSG(parts.val_loss[s] == whole.val_loss[s] && whole.val_loss[s] > 0,
                 "validation after step %d: %.17g, uninterrupted %.17g", s, parts.val_loss[s], whole.val_loss[s]);
  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  T_EXPECT(system(command) == 0);
}
