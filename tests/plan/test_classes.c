/* SPDX-License-Identifier: Apache-2.0 */
/* Rank classes: a rank's plan equals, tag by tag, that of its class's representative. */
#include <stdio.h>
#include <string.h>

#include "harness/train/plan.h"
#include "tests/plan/plans.h"
#include "tests/t.h"

static lev_config config;

static bool same_rows(const lev_ledger *a, const lev_ledger *b) {
  bool same = lev_ledger_count(a) == lev_ledger_count(b);
  for (int i = 0; i < lev_ledger_count(a) && same; ++i) {
    lev_ledger_row x = lev_ledger_at(a, i), y = lev_ledger_at(b, i);
    same = x.cls == y.cls && strcmp(x.tag, y.tag) == 0 && x.peak == y.peak && x.at_peak == y.at_peak;
  }
  for (int cls = 0; cls < LEV_MEM_CLASSES && same; ++cls)
    same = lev_ledger_peak(a, (lev_mem)cls) == lev_ledger_peak(b, (lev_mem)cls);
  return same;
}

/* Plans every rank of `config`; returns the number of classes, and of different plans in *different. */
static int compare_all(const char *name, int *different) {
  lev_world_plan world;
  lev_status st = lev_plan_world(&config, &world);
  T_EXPECT_MSG(st == LEV_OK, "%s: %s", name, lev_detail());
  if (st != LEV_OK) return 0;
  lev_ledger *seen[64];
  int n = world.classes.n, ranks = world.classes.ranks;
  *different = 0;
  for (int r = 0; r < ranks && !t_failed(); ++r) {
    lev_rank_plan plan;
    int c = world.classes.of[r], i = 0;
    T_EXPECT(world.classes.first[c] <= r);
    if (!T_EXPECT_OK(lev_plan_rank(&config, r, NULL, &plan))) break;
    T_EXPECT_MSG(same_rows(plan.ledger, world.plan[c].ledger), "%s: rank %d differs from its class %d", name, r, c);
    T_EXPECT(lev_ledger_peak(plan.ledger, LEV_MEM_DEVICE) <=
             lev_ledger_peak(world.plan[world.largest].ledger, LEV_MEM_DEVICE));
    while (i < *different && !same_rows(seen[i], plan.ledger)) ++i;
    if (i == *different && i < 64)
      seen[(*different)++] = plan.ledger;
    else
      lev_rank_plan_free(&plan);
  }
  for (int i = 0; i < *different; ++i) lev_ledger_destroy(seen[i]);
  lev_world_plan_free(&world);
  return n;
}

T_TEST(classes_equal_planning_every_rank) {
  static const struct {
    int ranks, context, experts, vocab, batch;
    int64_t tokens, model_experts; /* 0: as the model has them */
  } worlds[] = {{1, 1, 1, 1, 1, 64, 0},   {4, 4, 4, 4, 1, 64, 0}, {8, 4, 2, 4, 2, 61, 0},  {6, 3, 2, 6, 3, 50, 0},
                {8, 2, 4, 8, 5, 37, 0},   {5, 5, 5, 5, 1, 23, 0}, {12, 1, 3, 4, 7, 17, 0}, {16, 8, 4, 2, 3, 129, 0},
                {7, 7, 1, 7, 1, 5000, 0}, {8, 8, 8, 8, 1, 40, 5}, {6, 2, 6, 3, 2, 9, 4}}; /* ranks without experts */
  int merged = 0;
  for (size_t w = 0; w < sizeof worlds / sizeof *worlds; ++w)
    for (int variant = 0; variant < PLAN_VARIANTS; ++variant)
      for (int muon = 0; muon < 2; ++muon) {
        char name[96];
        int different = 0;
        plan_small(&config, variant);
        config.parallel.ranks = worlds[w].ranks, config.parallel.context = worlds[w].context;
        config.parallel.experts = worlds[w].experts, config.parallel.vocab = worlds[w].vocab;
        config.train.context = worlds[w].tokens, config.train.global_batch = worlds[w].batch;
        if (worlds[w].model_experts > 0) config.model.num_experts = worlds[w].model_experts;
        config.optimizer.name = muon ? LEV_OPTIMIZER_MUON : LEV_OPTIMIZER_ADAMW;
        snprintf(name, sizeof name, "world %d of %d, variant %d, %s", (int)w, worlds[w].ranks, variant,
                 muon ? "muon" : "adamw");
        int n = compare_all(name, &different);
        T_EXPECT_MSG(n >= different, "%s: %d classes for %d different plans", name, n, different);
        merged += worlds[w].ranks - n;
      }
  T_EXPECT_MSG(merged > 0, "no two ranks ever shared a class");
}

T_TEST(classes_refuse_what_planning_refuses) {
  lev_rank_classes classes;
  plan_small(&config, 0);
  config.parallel.ranks = 4, config.parallel.context = 3;
  T_EXPECT_STATUS(lev_rank_classes_create(&config, &classes), LEV_ERR_CONFIG);
  T_EXPECT(strstr(lev_detail(), "parallel.context"));
}
