/* SPDX-License-Identifier: Apache-2.0 */
/* The n-th allocation, copy and collective of one rank fails, anywhere from set-up to the evaluation: every rank comes
 * back with an error of its own or of being told to stop, nobody hangs, nothing is left behind (what a sanitizer build
 * of this test checks). A set-up after the failure works. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tests/t.h"
#include "tests/train/rig.h"
#include "tests/train/tokens.h"

#ifdef LEV_PLAIN_MALLOC
enum { SAMPLES = 8 };
#else
enum { SAMPLES = 30 };
#endif
enum { RANKS = 2, VICTIM = 1, TIMEOUT = 20 };

typedef struct scene {
  lev_config config;
  lev_comm_hub *hub;
  lev_fault fault; /* of the victim */
  lev_status status[RANKS];
  char detail[RANKS][512];
} scene;

static lev_status work(scene *s, int index, const lev_rank_plan *plan, lev_device *device, lev_ledger *ledger,
                       lev_comm **world, lev_rank **rank, lev_loader *loader) {
  LEV_TRY(lev_comm_local_join(s->hub, index, device, world));
  lev_rank_options options = {
      .config = &s->config, .device = device, .world = *world, .ledger = ledger, .slabs = &plan->slabs};
  LEV_TRY(lev_rank_create(&options, rank));
  return lev_plan_program(*rank, loader, loader);
}

static void rank_main(int index, void *ctx) {
  scene *s = ctx;
  lev_rank_plan plan;
  lev_device *device;
  lev_ledger *ledger;
  lev_comm *world = NULL;
  lev_rank *rank = NULL;
  lev_device_config dc = {.backend = LEV_BACKEND_CPU, .jitter_seed = 7, .fault = index == VICTIM ? &s->fault : NULL};
  T_REQUIRE_OK(lev_plan_rank(&s->config, index, NULL, &plan));
  T_REQUIRE_OK(lev_ledger_create(NULL, &ledger));
  T_REQUIRE_OK(lev_device_open(&dc, &device));
  lev_loader *loader = tokens_loader(&s->config);
  s->status[index] = work(s, index, &plan, device, ledger, &world, &rank, loader);
  if (s->status[index] != LEV_OK) {
    snprintf(s->detail[index], sizeof s->detail[index], "%s", lev_detail());
    lev_comm_hub_abort(s->hub);
  }
  lev_rank_destroy(rank);
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) T_EXPECT_EQ_I64(lev_ledger_live(ledger, (lev_mem)cls), 0);
  lev_comm_destroy(world);
  lev_device_close(device);
  lev_loader_close(loader);
  lev_ledger_destroy(ledger);
  lev_rank_plan_free(&plan);
}

static void play(scene *s) {
  T_REQUIRE_OK(lev_comm_hub_create(RANKS, TIMEOUT, &s->hub));
  t_ranks(RANKS, rank_main, s);
  lev_comm_hub_destroy(s->hub);
}

static void settings(lev_config *c, int kind) {
  rig_config(c);
  c->parallel.ranks = RANKS;
  c->train.context = 19;
  c->model.num_hidden_layers = 2;
  c->memory.attention_block_q = c->memory.attention_block_k = 64;
  c->optimizer.name = kind % 2 ? LEV_OPTIMIZER_MUON : LEV_OPTIMIZER_ADAMW;
}

/* Every SAMPLES-th part of the events of a kind in turn, the first and the last one among them. */
static void walk(lev_fault_kind kind, const char *what, lev_status own) {
  scene s = {0};
  settings(&s.config, (int)kind);
  play(&s);
  int64_t n = s.fault.seen[kind], at = 1;
  for (int r = 0; r < RANKS; ++r) T_EXPECT_MSG(s.status[r] == LEV_OK, "without a failure: %s", s.detail[r]);
  T_EXPECT_MSG(n > SAMPLES, "%lld %s in all", (long long)n, what);
  for (int i = 0; i < SAMPLES && !t_failed(); ++i) {
    scene f = {.config = s.config};
    at = 1 + (n - 1) * i / (SAMPLES - 1);
    f.fault.fail_at[kind] = at;
    play(&f);
    T_EXPECT_MSG(f.fault.seen[kind] >= at, "%s %lld of %lld was never reached", what, (long long)at, (long long)n);
    T_EXPECT_MSG(f.status[VICTIM] == own, "%s %lld of %lld failed: \"%s\" (%s)", what, (long long)at, (long long)n,
                 lev_status_text(f.status[VICTIM]), f.detail[VICTIM]);
    T_EXPECT_MSG(strstr(f.detail[VICTIM], "injected"), "%s %lld of %lld: %s", what, (long long)at, (long long)n,
                 f.detail[VICTIM]);
    lev_status other = f.status[1 - VICTIM];
    T_EXPECT_MSG(other == LEV_ERR_ABORTED || other == own, "%s %lld of %lld failed; the other rank: \"%s\" (%s)", what,
                 (long long)at, (long long)n, lev_status_text(other), f.detail[1 - VICTIM]);
  }
}

T_TEST(failures_nth_allocation) {
  walk(LEV_FAULT_ALLOC, "allocation", LEV_ERR_NOMEM);
}
T_TEST(failures_nth_copy) {
  walk(LEV_FAULT_COPY, "copy", LEV_ERR_DEVICE);
}
T_TEST(failures_nth_collective) {
  walk(LEV_FAULT_COLLECTIVE, "collective", LEV_ERR_COMM);
}

/* ---- a rank is destroyed while its streams still run ---- */

typedef struct late_args {
  unsigned char *at;
  size_t bytes;
} late_args;

static void late_write(const void *p) {
  const late_args *a = p;
  nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
  memset(a->at, 1, a->bytes);
}

T_TEST(failures_destroy_waits_for_running_work) {
  static const lev_kernel late = {"test.late", late_write, NULL};
  scene s = {0};
  lev_rank_plan plan;
  lev_device *device;
  lev_ledger *ledger;
  lev_comm *world = NULL;
  lev_rank *rank = NULL;
  settings(&s.config, 0);
  s.config.parallel.ranks = 1;
  T_REQUIRE_OK(lev_plan_rank(&s.config, 0, NULL, &plan));
  T_REQUIRE_OK(lev_comm_hub_create(1, TIMEOUT, &s.hub));
  T_REQUIRE_OK(lev_ledger_create(NULL, &ledger));
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &device));
  lev_loader *loader = tokens_loader(&s.config);
  T_EXPECT_OK(work(&s, 0, &plan, device, ledger, &world, &rank, loader));
  if (rank) {
    late_args args = {rank->hidden, 64};
    T_EXPECT_OK(LEV_LAUNCH(rank->compute, &late, args));
  }
  lev_rank_destroy(rank);
  lev_comm_destroy(world);
  lev_device_close(device);
  lev_loader_close(loader);
  lev_ledger_destroy(ledger);
  lev_rank_plan_free(&plan);
  lev_comm_hub_destroy(s.hub);
}
