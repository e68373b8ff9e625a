/* SPDX-License-Identifier: Apache-2.0 */
/* debug.poison: a run whose planned memory starts as NaN bytes ends with the bits of a run that starts on fresh pages,
 * so nothing is read before it is written. */
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/train/run.h"
#include "tests/t.h"
#include "tests/train/rig.h"
#include "tests/train/tokens.h"

enum { STEPS = 3 };

typedef struct record {
  int steps, validations;
  lev_step_result step[STEPS];
  double val_loss;
} record;

static void on_step(void *ctx, const lev_step_record *r, const lev_run_memory *memory) {
  record *out = ctx;
  (void)memory;
  if (out->steps < STEPS) out->step[out->steps] = r->result;
  ++out->steps;
}

static void on_validation(void *ctx, const lev_validation_record *r) {
  record *out = ctx;
  out->val_loss = r->val_loss;
  ++out->validations;
}

static void settings(lev_config *c, int kind, const char *folder) {
  rig_config(c);
  c->model.dtype = kind == 2 ? LEV_BF16 : LEV_F32;
  c->parallel.ranks = 4, c->parallel.context = 2, c->parallel.experts = 2, c->parallel.vocab = 4;
  c->train.steps = STEPS, c->train.global_batch = 3;
  c->optimizer.name = kind == 1 ? LEV_OPTIMIZER_MUON : LEV_OPTIMIZER_ADAMW;
  c->memory.oadamw_placement = kind; /* gpu, cpu, split */
  if (kind == 1) c->model.balance = LEV_BALANCE_AUX_FREE, c->data.packed = true;
  snprintf(c->data.train, sizeof c->data.train, "%s/t", folder);
  snprintf(c->data.valid, sizeof c->data.valid, "%s/t", folder);
  c->run.trace_steps = 0;
}

static void run(lev_config *c, const char *folder, bool poison, record *out) {
  c->debug.poison = poison;
  snprintf(c->run.folder, sizeof c->run.folder, "%s/%s", folder, poison ? "poisoned" : "fresh");
  memset(out, 0, sizeof *out);
  lev_run_observer o = {.ctx = out, .step = on_step, .validation = on_validation};
  T_EXPECT_OK(lev_run(c, &o, NULL));
  T_EXPECT_EQ_I64(out->steps, STEPS);
  T_EXPECT_EQ_I64(out->validations, 1);
}

static bool same_file(const char *a, const char *b) {
  char command[1400];
  snprintf(command, sizeof command, "cmp -s '%s' '%s'", a, b);
  return system(command) == 0;
}

/* Every file of the checkpoints: weights and the optimizers' whole state. */
static void expect_same_checkpoints(const char *folder) {
  char pattern[256];
  glob_t found;
  snprintf(pattern, sizeof pattern, "%s/fresh/checkpoints/*/*.safetensors", folder);
  T_REQUIRE(glob(pattern, 0, NULL, &found) == 0);
  T_EXPECT(found.gl_pathc >= 4);
  for (size_t i = 0; i < found.gl_pathc; ++i) {
    const char *tail = strstr(found.gl_pathv[i], "/fresh/");
    char other[512];
    snprintf(other, sizeof other, "%s/poisoned/%s", folder, tail + strlen("/fresh/"));
    T_EXPECT_MSG(same_file(found.gl_pathv[i], other), "%s differs", tail);
  }
  globfree(&found);
}

T_TEST(poison_changes_no_bit_of_a_run) {
  for (int kind = 0; kind < 3; ++kind) {
    char folder[] = "/tmp/levee-poison-XXXXXX", prefix[64], command[96];
    lev_config c;
    record fresh, poisoned;
    T_REQUIRE(mkdtemp(folder) != NULL);
    settings(&c, kind, folder);
    snprintf(prefix, sizeof prefix, "%s/t", folder);
    tokens_write(&c, prefix);
    run(&c, folder, false, &fresh);
    run(&c, folder, true, &poisoned);
    for (int i = 0; i < STEPS; ++i)
      T_EXPECT_MSG(
          fresh.step[i].loss == poisoned.step[i].loss && fresh.step[i].grad_norm == poisoned.step[i].grad_norm &&
              fresh.step[i].max_vio == poisoned.step[i].max_vio && !poisoned.step[i].skipped,
          "kind %d, step %d: loss %.17g, with poison %.17g", kind, i + 1, fresh.step[i].loss, poisoned.step[i].loss);
    T_EXPECT_MSG(fresh.val_loss == poisoned.val_loss && fresh.val_loss > 0, "validation %.17g, with poison %.17g",
                 fresh.val_loss, poisoned.val_loss);
    expect_same_checkpoints(folder);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    T_EXPECT(system(command) == 0);
  }
}

/* The setting is really read: before first values are written, persistent memory of all classes holds the poison. */
T_TEST(poison_fills_memory_before_its_use) {
  lev_config c;
  lev_comm_hub *hub;
  lev_rank_plan plan;
  lev_device *device;
  lev_comm *world;
  lev_ledger *ledger;
  lev_rank *rank;
  rig_config(&c);
  c.debug.poison = true;
  T_REQUIRE_OK(lev_plan_rank(&c, 0, NULL, &plan));
  T_REQUIRE_OK(lev_comm_hub_create(1, 60, &hub));
  T_REQUIRE_OK(lev_ledger_create(NULL, &ledger));
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &device));
  T_REQUIRE_OK(lev_comm_local_join(hub, 0, device, &world));
  lev_rank_options options = {.config = &c, .device = device, .world = world, .ledger = ledger, .slabs = &plan.slabs};
  T_REQUIRE_OK(lev_rank_create(&options, &rank));
  const unsigned char *list[] = {rank->hidden, (unsigned char *)rank->batch_pinned, rank->staging,
                                 lev_weights_shard(rank->weights), (unsigned char *)rank->sums};
  for (size_t i = 0; i < sizeof list / sizeof *list; ++i) T_EXPECT(list[i][0] == 0xFF && list[i][3] == 0xFF);
  lev_rank_destroy(rank);
  lev_comm_destroy(world);
  lev_device_close(device);
  lev_ledger_destroy(ledger);
  lev_rank_plan_free(&plan);
  lev_comm_hub_destroy(hub);
}
