/* SPDX-License-Identifier: Apache-2.0 */
/* Caps picked to fit: everything fits, the words repeat the plan, and one step more of any cap does not fit. */
#include <stdio.h>
#include <string.h>

#include "harness/train/auto.h"
#include "tests/plan/plans.h"
#include "tests/t.h"

#ifdef LEV_PLAIN_MALLOC
enum { SLOW = 1 }; /* sanitizers are an order slower: the large models are left to other builds */
#else
enum { SLOW = 0 };
#endif

static lev_config config, picked, raised;
static lev_auto_result result, again;
static const lev_ceilings *rates; /* nothing is known of times, unless a test says so */

/* Most bytes over a limit of any rank of a configuration; INT64_MAX if it cannot be planned. */
static int64_t over_limits(const lev_config *c) {
  lev_world_plan world;
  int64_t most = INT64_MIN;
  lev_status st = lev_plan_world(c, &world);
  if (st != LEV_OK) return INT64_MAX;
  for (int i = 0; i < world.classes.n; ++i) {
    const lev_rank_plan *p = &world.plan[i];
    int64_t device = (int64_t)lev_ledger_peak(p->ledger, LEV_MEM_DEVICE), host = (int64_t)lev_rank_plan_host(p);
    device -= (int64_t)lev_device_limit(c);
    host -= (int64_t)c->memory.host_memory;
    if (c->memory.device_memory > 0) most = device > most ? device : most;
    if (c->memory.host_memory > 0) most = host > most ? host : most;
  }
  lev_world_plan_free(&world);
  return most;
}

static void expect_words_repeat(const char *name) {
  raised = config;
  for (int i = 0; i < result.n_words; ++i) {
    char word[LEV_AUTO_WORD], *argv[1] = {word};
    int argc = 1;
    snprintf(word, sizeof word, "%s", result.word[i].text);
    T_EXPECT_OK(lev_config_arguments(&raised, &argc, argv));
    T_EXPECT_EQ_I64(argc, 0);
  }
  T_EXPECT_MSG(memcmp(&raised.memory, &picked.memory, sizeof raised.memory) == 0, "%s: words miss a setting", name);
  T_EXPECT_MSG(memcmp(&raised.parallel, &picked.parallel, sizeof raised.parallel) == 0, "%s: words miss a group", name);
}

/* One step more of each chosen cap, and attention kept where it is not. */
static int expect_caps_are_largest(const char *name) {
  int bound = 0;
  for (int i = 0; i < result.n_words; ++i) {
    const lev_auto_word *w = &result.word[i];
    char value[32];
    if (w->step == 0) continue;
    ++bound;
    raised = picked;
    snprintf(value, sizeof value, "%lld", (long long)(w->value + w->step));
    plan_set(&raised, w->name, value);
    int64_t over = over_limits(&raised);
    T_EXPECT_MSG(over > 0, "%s: %s + %lld still fits (%lld bytes left)", name, w->text, (long long)w->step,
                 (long long)-over);
  }
  if (!picked.memory.sco_keep_attention) {
    raised = picked;
    raised.memory.sco_keep_attention = true;
    T_EXPECT_MSG(over_limits(&raised) > 0, "%s: attention outputs could be kept", name);
  }
  if (!picked.memory.rdtp_one_pass && picked.parallel.ranks == 1 && picked.schedule.ring_dtp == LEV_SCHEDULE_BOUNDED) {
    raised = picked; /* on one rank there is nothing that it sends more */
    raised.memory.rdtp_one_pass = true, raised.memory.rdtp_tile_cols = 0;
    raised.memory.rdtp_tile_rows = raised.train.context < 4096 ? raised.train.context : 4096;
    T_EXPECT_MSG(over_limits(&raised) > 0, "%s: one pass over the vocabulary fits and is faster", name);
  }
  return bound;
}

/* Picks for `config` under limits; returns the number of caps that memory bound. */
static int pick(const char *name, const char *device, const char *host) {
  plan_set(&config, "memory.device_memory", device);
  plan_set(&config, "memory.host_memory", host);
  picked = config;
  lev_status st = lev_auto_plan(&picked, rates, &result);
  if (!T_EXPECT_MSG(st == LEV_OK, "%s: %s", name, lev_detail())) return 0;
  if (!T_EXPECT_MSG(result.fits, "%s, %s and %s: nothing fits, %zu and %zu over", name, device, host,
                    result.device_excess, result.host_excess))
    return 0;
  int64_t over = over_limits(&picked);
  T_EXPECT_MSG(over <= 0, "%s, %s and %s: %lld bytes over", name, device, host, (long long)over);
  expect_words_repeat(name);
  return expect_caps_are_largest(name);
}

/* Limits as shares of what the configuration takes with everything bounded at the modules' own choices. */
static int pick_shares(const char *name, double device, double host) {
  lev_world_plan world;
  char d[32], h[32];
  if (!T_EXPECT_OK(lev_plan_world(&config, &world))) return 0;
  const lev_rank_plan *p = &world.plan[world.largest];
  snprintf(d, sizeof d, "%.0f", device * (double)lev_ledger_peak(p->ledger, LEV_MEM_DEVICE));
  snprintf(h, sizeof h, "%.0f", host * (double)lev_rank_plan_host(p));
  lev_world_plan_free(&world);
  return pick(name, d, h);
}

T_TEST(auto_fills_the_limits_of_small_models) {
  static const double shares[][2] = {{1.05, 1.01}, {1.1, 1.2}, {1.3, 0.995}, {1.6, 1.1}, {4, 2}};
  int bound = 0;
  for (int variant = 0; variant < 4; ++variant)
    for (int muon = 0; muon < 2; ++muon)
      for (size_t i = 0; i < sizeof shares / sizeof *shares; ++i) {
        char name[80];
        plan_small(&config, variant);
        config.optimizer.name = muon ? LEV_OPTIMIZER_MUON : LEV_OPTIMIZER_ADAMW;
        config.parallel.ranks = 4, config.parallel.experts = 2, config.parallel.context = 4;
        config.train.context = 6000, config.train.global_batch = 2;
        config.memory.sco_keep_attention = false, config.memory.sco_host_budget = SIZE_MAX;
        snprintf(name, sizeof name, "small, variant %d, %s, limits %d", variant, muon ? "muon" : "adamw", (int)i);
        bound += pick_shares(name, shares[i][0], shares[i][1]);
      }
  T_EXPECT_MSG(bound > 25, "memory bound only %d caps", bound);
}

/* Limits one after the other, from some that the least caps just pass to some that bind none: between them caps come
 * loose one by one, and what a module chooses for itself may take more than the largest useful value of its cap. */
T_TEST(auto_fits_whatever_the_limit) {
  for (int vocab = 101; vocab <= 1024; vocab += 923)
    for (int kib = 10500; kib <= 20 << 10; kib += 256) {
      char device[24];
      plan_small(&config, 0);
      config.train.context = vocab == 101 ? 5000 : 1024, config.model.vocab_size = vocab;
      snprintf(device, sizeof device, "%dKiB", kib);
      pick(device, device, "0");
    }
}

T_TEST(auto_fills_the_limits_of_the_demo) {
  int bound = 0;
  plan_read(&config, "demo");
  bound += pick("demo", "15MiB", "16MiB");
  bound += pick("demo", "16MiB", "11MiB");
  bound += pick("demo", "24MiB", "32MiB");
  T_EXPECT_MSG(bound > 5, "memory bound only %d caps", bound);
}

T_TEST(auto_trains_olmoe_at_a_million_tokens_on_one_card) {
  if (SLOW) {
    t_skip("sanitizers are too slow for it");
    return;
  }
  plan_read(&config, "olmoe-1b-7b");
  plan_set(&config, "train.context", "1048576");
  int bound = pick("olmoe-1b-7b", "139GiB", "120GiB");
  T_EXPECT_MSG(bound >= 4, "memory bound only %d caps", bound);
  T_EXPECT(picked.memory.sco_host_budget >= (size_t)40 << 30);
}

T_TEST(auto_plans_the_large_models) {
  if (SLOW) {
    t_skip("sanitizers are too slow for it");
    return;
  }
  plan_read(&config, "paper-120b");
  pick("paper-120b", "80GiB", "110GiB");
  T_EXPECT_EQ_I64(picked.parallel.context, 16);
  plan_read(&config, "qwen3-30b-a3b");
  config.parallel.context = 0, config.train.global_batch = 4;
  pick("qwen3-30b-a3b", "60GiB", "70GiB");
  T_EXPECT_MSG(picked.parallel.context > 0 && picked.parallel.ranks / picked.parallel.context <= 4,
               "context group %lld leaves groups idle", (long long)picked.parallel.context);
}

T_TEST(auto_takes_the_smallest_context_group_that_fits) {
  plan_small(&config, 0);
  config.parallel.ranks = 8, config.parallel.experts = 4, config.train.context = 2000;
  config.train.global_batch = 8;
  plan_set(&config, "memory.device_memory", "7MiB");
  picked = config;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT(result.fits);
  int64_t group = picked.parallel.context;
  T_EXPECT_MSG(group > 1 && group < 8, "group %lld", (long long)group);
  config.parallel.context = group / 2; /* given, so it is kept */
  config.memory.llep_chunk_rows = config.memory.rdtp_tile_rows = config.memory.rdtp_tile_cols = 0;
  config.memory.oadamw_bucket = config.memory.embed_tile_tokens = 0;
  T_EXPECT_MSG(over_limits(&config) > 0, "a group of %lld fits too", (long long)group / 2);
  picked = config;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT_EQ_I64(picked.parallel.context, group / 2);
}

T_TEST(auto_is_a_function_of_the_configuration) {
  plan_small(&config, 3);
  config.parallel.ranks = 4, config.train.context = 600;
  plan_set(&config, "memory.device_memory", "6MiB");
  picked = raised = config;
  raised.memory.llep_chunk_rows = 17, raised.memory.rdtp_tile_rows = 3, raised.memory.oadamw_slots = 5;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT_OK(lev_auto_plan(&raised, rates, &again)); /* the caps it held do not matter */
  T_EXPECT(memcmp(&picked.memory, &raised.memory, sizeof picked.memory) == 0);
}

/* One pass over the vocabulary is a product of four less, at whatever rates; but several ranks send more for it. */
T_TEST(auto_takes_one_pass_where_the_estimate_is_better) {
  static const lev_ceilings slow_link = {1e12, 1e12, 1e12, 1e12, 1e12, 1e3, 1e12},
                            fast_link = {1e12, 1e12, 1e12, 1e12, 1e12, 1e18, 1e12};
  static const struct {
    int ranks, context;
    const char *memory; /* of which a block of 4,096 tokens takes 4.6 MiB */
    const lev_ceilings *rates;
    bool want;
  } cases[] = {{1, 5000, "40MiB", NULL, true},
               {1, 5000, "11MiB", NULL, false},
               {4, 5000, "40MiB", NULL, false},
               {4, 5000, "40MiB", &slow_link, false},
               {4, 5000, "40MiB", &fast_link, true}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    lev_estimate one, two;
    plan_small(&config, 0);
    config.model.vocab_size = 300;
    config.parallel.ranks = cases[i].ranks, config.parallel.context = cases[i].ranks;
    config.train.context = cases[i].context;
    rates = cases[i].rates;
    pick("one pass", cases[i].memory, "0");
    T_EXPECT_MSG(picked.memory.rdtp_one_pass == cases[i].want, "case %d: one pass %d", (int)i,
                 picked.memory.rdtp_one_pass);
    if (!rates) continue;
    raised = picked;
    raised.memory.rdtp_one_pass = !cases[i].want;
    T_EXPECT_OK(lev_estimate_step(&picked, 0, rates, &one));
    T_EXPECT_OK(lev_estimate_step(&raised, 0, rates, &two));
    T_EXPECT_MSG(one.step <= two.step, "case %d: %g s, the other way %g s", (int)i, one.step, two.step);
  }
  rates = NULL;
}

T_TEST(auto_reports_what_is_missing) {
  plan_small(&config, 0);
  picked = config;
  T_EXPECT_STATUS(lev_auto_plan(&picked, rates, &result), LEV_ERR_CONFIG);
  plan_set(&config, "memory.device_memory", "100KiB");
  picked = config;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT(!result.fits && result.device_excess > 0 && result.host_excess == 0 && !result.host_binds);
  T_EXPECT_EQ_I64(over_limits(&picked), result.device_excess);
  plan_set(&config, "memory.device_memory", "100MiB");
  plan_set(&config, "memory.host_memory", "1MiB");
  picked = config;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT(!result.fits && result.device_excess == 0 && result.host_excess > 0 && result.host_binds);
}

/* Caps far below those that the search begins with: what fits as given is not refused. */
T_TEST(auto_keeps_what_fits_as_given) {
  lev_world_plan world;
  plan_small(&config, 1);
  config.optimizer.name = LEV_OPTIMIZER_ADAMW;
  plan_set(&config, "memory.oadamw_bucket", "100");
  plan_set(&config, "memory.attention_block_q", "1");
  plan_set(&config, "memory.attention_block_k", "1");
  T_REQUIRE_OK(lev_plan_world(&config, &world));
  size_t device = lev_ledger_peak(world.plan[world.largest].ledger, LEV_MEM_DEVICE);
  lev_world_plan_free(&world);
  config.memory.device_memory = device;
  picked = config;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT(result.fits && result.device_excess == 0 && result.n_words == 0 && !result.host_binds);
  T_EXPECT(memcmp(&picked, &config, sizeof config) == 0);
  config.memory.device_memory = device - 1;
  picked = config;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT(!result.fits && result.device_excess > 0 && result.n_words > 0);
  T_EXPECT_EQ_I64(over_limits(&picked), result.device_excess); /* of the least caps, which it holds */
}

/* The limit that binds is not always the one that is passed: layer inputs that the host has no room for stay on the
 * device. */
T_TEST(auto_says_which_limit_binds) {
  plan_small(&config, 0);
  config.train.context = 20000, config.model.num_hidden_layers = 12;
  plan_set(&config, "memory.device_memory", "40MiB");
  plan_set(&config, "memory.host_memory", "16MiB");
  picked = config;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT(!result.fits && result.device_excess > 0 && result.host_excess == 0 && result.host_binds);
  plan_set(&config, "memory.host_memory", "1GiB");
  picked = config;
  T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
  T_EXPECT(result.fits && !result.host_binds);
}

/* Blocks of attention are of the CPU's kernels: no cap for a GPU. */
T_TEST(auto_lists_no_cap_that_the_device_lacks) {
  for (int gpu = 0; gpu < 2; ++gpu) {
    int blocks = 0;
    plan_small(&config, 0);
    config.train.context = 5000, config.run.device = gpu ? LEV_DEVICE_CUDA : LEV_DEVICE_CPU;
    plan_set(&config, "memory.device_memory", "100KiB");
    picked = config;
    T_EXPECT_OK(lev_auto_plan(&picked, rates, &result));
    for (int i = 0; i < result.n_words; ++i) blocks += strstr(result.word[i].name, "attention_block") != NULL;
    T_EXPECT(!result.fits && result.n_words > 4);
    T_EXPECT_EQ_I64(blocks, gpu ? 0 : 2);
  }
}

T_TEST(auto_counts_the_reserve) {
  plan_small(&config, 0);
  plan_set(&config, "memory.context_reserve", "100KiB");
  T_EXPECT(pick_shares("small with a reserve", 1.3, 1.2) > 0);
}
