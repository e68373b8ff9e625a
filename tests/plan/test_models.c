/* SPDX-License-Identifier: Apache-2.0 */
/* The configurations of known models: their size, what their plans hold, and what grows with tokens. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness/train/plan.h"
#include "harness/train/routing.h"
#include "tests/plan/plans.h"
#include "tests/t.h"

#define GIB ((double)(1 << 30))

static lev_config config, other;

/* Plans the world of `c`; false (and a failure) if that does not work. */
static bool plan(const lev_config *c, lev_world_plan *world) {
  lev_status st = lev_plan_world(c, world);
  return T_EXPECT_MSG(st == LEV_OK, "%s: %s", c->model.name, lev_detail());
}

static const lev_ledger *largest(const lev_world_plan *world) {
  return world->plan[world->largest].ledger;
}

static double device_gib(const lev_world_plan *world) {
  return (double)lev_ledger_peak(largest(world), LEV_MEM_DEVICE) / GIB;
}

T_TEST(models_have_the_parameters_of_their_names) {
  static const struct {
    const char *name;
    double billions, active;
    int ranks;
  } models[] = {{"olmoe-1b-7b", 6.9, 1.2, 1}, {"qwen3-30b-a3b", 30.5, 3.1, 8}, {"paper-120b", 120, 0, 16},
                {"paper-241b", 241, 0, 32},   {"paper-667b", 667, 0, 64},      {"europa-952b", 952, 0, 384}};
  for (size_t i = 0; i < sizeof models / sizeof *models; ++i) {
    lev_rank_plan one;
    plan_read(&config, models[i].name);
    T_EXPECT(strcmp(config.model.name, models[i].name) == 0);
    T_EXPECT_EQ_I64(config.parallel.ranks, models[i].ranks);
    if (!T_EXPECT_OK(lev_plan_rank(&config, models[i].ranks / 2, NULL, &one))) continue;
    double total = (double)one.total / 1e9, active = (double)one.active / 1e9;
    T_EXPECT_MSG(fabs(total / models[i].billions - 1) <= 0.02, "%s has %.3f B parameters", models[i].name, total);
    T_EXPECT_MSG(models[i].active == 0 || fabs(active / models[i].active - 1) < 0.03, "%s: %.3f B active",
                 models[i].name, active);
    lev_rank_plan_free(&one);
  }
}

T_TEST(europa_keeps_55_gib_of_layer_inputs) {
  static const char *const budgets[] = {"0", "20GiB", "unlimited"};
  for (int i = 0; i < 3; ++i) {
    lev_rank_plan one;
    double sum = 0;
    plan_read(&config, "europa-952b");
    plan_set(&config, "memory.sco_host_budget", budgets[i]);
    if (!T_EXPECT_OK(lev_plan_rank(&config, 100, NULL, &one))) return;
    for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls)
      sum += (double)lev_ledger_tag_peak(one.ledger, (lev_mem)cls, "sco.boundary");
    T_EXPECT_MSG(sum == 74.0 * 65536 * 6144 * 2, "host budget %s: %.3f GiB", budgets[i], sum / GIB);
    T_EXPECT_MSG(fabs(sum / GIB - 55.5) < 0.01, "host budget %s: %.3f GiB", budgets[i], sum / GIB);
    lev_rank_plan_free(&one);
  }
}

/* Tags of a plan at 64K and at 1M tokens: those not declared to grow are equal. */
static void compare_tags(const lev_world_plan *few, const lev_world_plan *many) {
  const lev_ledger *a = largest(few), *b = largest(many);
  int grown = 0;
  for (int i = 0; i < lev_ledger_count(b); ++i) {
    lev_ledger_row row = lev_ledger_at(b, i);
    size_t before = lev_ledger_tag_peak(a, row.cls, row.tag);
    if (lev_tag_grows(&config, row.tag))
      grown += row.peak > before;
    else
      T_EXPECT_MSG(row.peak == before, "%s: %s takes %zu bytes at 64K tokens and %zu at 1M", config.model.name, row.tag,
                   before, row.peak);
  }
  T_EXPECT_MSG(grown > 8, "%s: only %d tags grew", config.model.name, grown);
}

T_TEST(tags_not_listed_are_flat_from_64k_to_1m_tokens) {
  static const char *const names[] = {"olmoe-1b-7b", "qwen3-30b-a3b", "paper-120b", "paper-667b"};
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
    for (int keep = 0; keep < 2; ++keep) {
      lev_world_plan few, many;
      plan_read(&config, names[i]);
      config.memory.sco_keep_attention = keep;
      plan_set(&config, "train.context", "64K");
      if (!plan(&config, &few)) return;
      plan_set(&config, "train.context", "1M");
      if (plan(&config, &many)) {
        compare_tags(&few, &many);
        lev_world_plan_free(&many);
      }
      lev_world_plan_free(&few);
    }
}

T_TEST(a_small_model_with_dense_parts_is_flat_too) {
  lev_world_plan few, many;
  for (int variant = 0; variant < 4; ++variant) {
    plan_small(&config, variant);
    config.train.context = 2048;
    if (!plan(&config, &few)) return;
    config.train.context = 8192;
    if (plan(&config, &many)) {
      const lev_ledger *a = largest(&few), *b = largest(&many);
      for (int i = 0; i < lev_ledger_count(b); ++i) {
        lev_ledger_row row = lev_ledger_at(b, i);
        if (!lev_tag_grows(&config, row.tag))
          T_EXPECT_MSG(row.peak == lev_ledger_tag_peak(a, row.cls, row.tag), "variant %d: %s", variant, row.tag);
      }
      lev_world_plan_free(&many);
    }
    lev_world_plan_free(&few);
  }
}

T_TEST(the_667b_model_fits_bounded_and_each_plain_module_shows) {
  static const struct {
    const char *module, *tag; /* whose bytes must show */
    double gib;               /* at least */
  } plain[] = {{"pipelined_llep", "llep.recv", 14},
               {"ring_dtp", "rdtp.tile", 48},
               {"sco", "sco.boundary", 32},
               {"offload_adamw", "oadamw.master", 38}};
  lev_world_plan bounded, world;
  plan_read(&config, "paper-667b");
  T_EXPECT_EQ_I64(config.train.context, 1 << 20);
  if (!plan(&config, &bounded)) return;
  T_EXPECT_MSG(device_gib(&bounded) < 139, "bounded: %.1f GiB", device_gib(&bounded));
  for (size_t i = 0; i < sizeof plain / sizeof *plain; ++i) {
    other = config;
    T_EXPECT_OK(lev_make_plain(&other, plain[i].module, &lev_routings[LEV_ROUTING_BALANCED]));
    if (!plan(&other, &world)) continue;
    double own = (double)lev_ledger_tag_peak(largest(&world), LEV_MEM_DEVICE, plain[i].tag) / GIB;
    T_EXPECT_MSG(own >= plain[i].gib, "%s plain: %s is %.1f GiB", plain[i].module, plain[i].tag, own);
    T_EXPECT_MSG(device_gib(&world) > device_gib(&bounded), "%s plain: %.1f GiB, bounded %.1f", plain[i].module,
                 device_gib(&world), device_gib(&bounded));
    lev_world_plan_free(&world);
  }
  other = config;
  T_EXPECT_OK(lev_make_plain(&other, NULL, &lev_routings[LEV_ROUTING_SKEWED]));
  if (plan(&other, &world)) {
    T_EXPECT_MSG(device_gib(&world) > 1024, "all plain under skewed routing: %.1f GiB", device_gib(&world));
    lev_world_plan_free(&world);
  }
  lev_world_plan_free(&bounded);
}

/* ---- rows of the plain dispatch ---- */

/* By following every token of every rank. */
static int64_t naive_rows(const lev_config *c, const lev_routing *routing) {
  int64_t e = c->model.num_experts, k = c->model.num_experts_per_tok, most = 0;
  int ranks = (int)c->parallel.ranks, ep = (int)c->parallel.experts, d = (int)c->parallel.context;
  for (int first = 0; first < ranks; first += ep) {
    int64_t *rows = calloc((size_t)ep, sizeof *rows), *dry = calloc((size_t)ep, sizeof *dry);
    for (int r = first; r < first + ep; ++r) {
      int64_t n = attn_shard_tokens(c->train.context, d, r % d), hot = 0;
      int64_t h = routing->hot < e - 1 ? routing->hot : e - 1;
      if (h > 0) hot = (int64_t)(routing->share * (double)n);
      for (int64_t t = 0; t < n; ++t)
        for (int64_t j = 0; j < k; ++j) {
          int64_t skip = hot > 0 ? h : 0;
          int64_t pick = t < hot ? j % h : skip + (t + j) % (e - skip);
          ++rows[lev_part_of(e, ep, pick)];
          ++dry[lev_part_of(e, ep, (t * k + j) % e)];
        }
    }
    for (int i = 0; i < ep; ++i) {
      most = rows[i] > most ? rows[i] : most;
      most = dry[i] > most ? dry[i] : most;
    }
    free(rows);
    free(dry);
  }
  return most;
}

T_TEST(rows_of_an_assumed_routing) {
  static const struct {
    int ranks, context, experts;
    int64_t tokens, e, k;
  } cases[] = {{1, 1, 1, 100, 8, 2}, {4, 4, 4, 1000, 16, 3}, {8, 2, 4, 333, 26, 8}, {6, 3, 2, 50, 7, 7},
               {4, 1, 4, 1, 9, 1},   {8, 8, 8, 999, 64, 8},  {2, 2, 2, 77, 3, 2},   {2, 1, 1, 40, 2, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i)
    for (int r = 0; r < LEV_ROUTINGS; ++r) {
      int64_t rows;
      plan_small(&config, 0);
      config.parallel.ranks = cases[i].ranks, config.parallel.context = cases[i].context;
      config.parallel.experts = cases[i].experts, config.train.context = cases[i].tokens;
      config.model.num_experts = cases[i].e, config.model.num_experts_per_tok = cases[i].k;
      T_EXPECT_OK(lev_routing_rows(&config, &lev_routings[r], &rows));
      T_EXPECT_MSG(rows == naive_rows(&config, &lev_routings[r]), "case %d, %s: %lld rows, naive %lld", (int)i,
                   lev_routings[r].name, (long long)rows, (long long)naive_rows(&config, &lev_routings[r]));
    }
}

T_TEST(plain_schedules_by_name) {
  plan_small(&config, 0);
  T_EXPECT_STATUS(lev_make_plain(&config, "sco2", &lev_routings[0]), LEV_ERR_ARG);
  T_EXPECT(strstr(lev_detail(), "ring_dtp"));
  T_EXPECT_OK(lev_make_plain(&config, "sco", &lev_routings[0]));
  T_EXPECT_EQ_I64(config.schedule.sco, LEV_SCHEDULE_PLAIN);
  T_EXPECT_EQ_I64(config.schedule.pipelined_llep, LEV_SCHEDULE_BOUNDED);
  T_EXPECT_EQ_I64(config.memory.llep_plain_rows, 0);
}
