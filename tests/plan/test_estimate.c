/* SPDX-License-Identifier: Apache-2.0 */
/* The estimate of a step: operations against counts by hand, copies against those that the plan lists, times against
 * those of attention as measured on a card. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/train/estimate.h"
#include "tests/plan/plans.h"
#include "tests/t.h"

static lev_config config;
static lev_estimate estimate;

static const lev_ceilings unit = {1, 1, 1, 1, 1, 1, 1};

static double amount(lev_cost_id id) {
  return estimate.cost[id].amount;
}

#define NEAR(got, want)                                                                                                \
  T_EXPECT_MSG(fabs((got) - (want)) <= 1e-12 * fabs(want), "%s = %.17g, want %.17g", #got, (double)(got),              \
               (double)(want))

/* A step of the model worked out by hand: L 2, H 8, A 4, G 2, d 4, E 6, k 2, I 10, V 30, S 7, one rank. */
static void by_hand(void) {
  lev_config_defaults(&config);
  T_EXPECT_OK(lev_config_parse(&config,
                               "[model]\ndtype = 'f32'\nvocab_size = 30\nhidden_size = 8\nnum_hidden_layers = 2\n"
                               "num_attention_heads = 4\nnum_key_value_heads = 2\nhead_dim = 4\nnum_experts = 6\n"
                               "num_experts_per_tok = 2\nmoe_intermediate_size = 10\n[train]\ncontext = 7\n",
                               "by hand"));
}

T_TEST(estimate_operations_by_hand) {
  by_hand();
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  NEAR(amount(LEV_COST_ATTENTION), 2 * 28.0 * 16 * (4 * 2 + 10)); /* 28 pairs, A d = 16, forward twice, backward */
  double qkv = 8 * 32.0, o = 8 * 16.0, router = 6 * 8.0;
  NEAR(amount(LEV_COST_PROJECTIONS), 2 * 7 * (2 * (2 * qkv + o + router) + 6 * (qkv + o + router)));
  NEAR(amount(LEV_COST_EXPERTS), 2 * 14.0 * 8 * 10 * 22);
  NEAR(amount(LEV_COST_VOCABULARY), 4 * 2 * 7.0 * 8 * 30);
  NEAR(amount(LEV_COST_DENSE), 0.0);
  config.memory.sco_keep_attention = true, config.schedule.ring_dtp = LEV_SCHEDULE_PLAIN;
  config.model.sliding_window = 3;
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  NEAR(amount(LEV_COST_ATTENTION), 2 * 18.0 * 16 * (4 + 10)); /* 1 + 2 + 5 x 3 pairs */
  NEAR(amount(LEV_COST_PROJECTIONS), 2 * 7 * (2 * (qkv + o + router) + 6 * (qkv + o + router)));
  NEAR(amount(LEV_COST_VOCABULARY), 3 * 2 * 7.0 * 8 * 30);
}

T_TEST(estimate_of_dense_parts_and_micro_batches) {
  by_hand();
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  double one = amount(LEV_COST_EXPERTS), attention = amount(LEV_COST_ATTENTION);
  config.train.global_batch = 3; /* three micro-batches, and a forward pass that counts routes */
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  NEAR(amount(LEV_COST_EXPERTS), 3 * one * 28 / 22);
  NEAR(amount(LEV_COST_ATTENTION), 3 * attention * 22 / 18);
  config.train.global_batch = 1;
  T_EXPECT_OK(lev_config_parse(
      &config, "[model]\nn_shared_experts = 3\nfirst_k_dense_replace = 1\nintermediate_size = 50\n", "dense"));
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  NEAR(amount(LEV_COST_EXPERTS), one / 2);
  NEAR(amount(LEV_COST_DENSE), 7.0 * 8 * (50 + 30) * 22);
}

T_TEST(estimate_work_does_not_depend_on_the_layout) {
  plan_small(&config, 2);
  config.train.context = 96, config.train.global_batch = 2, config.model.vocab_size = 120;
  config.model.num_experts = 24;
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  const lev_estimate alone = estimate;
  config.parallel.ranks = 8, config.parallel.context = 4, config.parallel.experts = 4, config.parallel.vocab = 2;
  double sum[LEV_COSTS] = {0};
  for (int r = 0; r < 8; ++r) {
    T_EXPECT_OK(lev_estimate_step(&config, r, &unit, &estimate));
    for (int i = 0; i < LEV_COSTS; ++i) sum[i] += amount((lev_cost_id)i);
    T_EXPECT(amount(LEV_COST_COLLECTIVES) > 0);
  }
  /* two groups have no second micro-batch, so no pass that counts routes: F = 1 against 2 */
  NEAR(sum[LEV_COST_EXPERTS], alone.cost[LEV_COST_EXPERTS].amount * 22 / 28);
  NEAR(sum[LEV_COST_DENSE], alone.cost[LEV_COST_DENSE].amount * 22 / 28);
  NEAR(sum[LEV_COST_VOCABULARY], alone.cost[LEV_COST_VOCABULARY].amount);
  NEAR(sum[LEV_COST_ATTENTION], alone.cost[LEV_COST_ATTENTION].amount * 18 / 22);
  T_EXPECT(alone.cost[LEV_COST_COLLECTIVES].amount == 0);
}

T_TEST(estimate_copies_are_those_of_the_plan) {
  plan_small(&config, 0);
  config.model.dtype = LEV_F32, config.train.context = 64;
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  double item = 64.0 * 40 * 4;
  NEAR(amount(LEV_COST_OUT), 2 * item); /* 4 layers, the last two stay in the slots */
  NEAR(amount(LEV_COST_IN), 2 * item);
  lev_rank_plan plan;
  T_EXPECT_OK(lev_plan_rank(&config, 0, NULL, &plan));
  NEAR(amount(LEV_COST_UPDATE_IN), 12.0 * (double)plan.adamw_elements);
  NEAR(amount(LEV_COST_UPDATE_OUT), 12.0 * (double)plan.adamw_elements);
  NEAR(amount(LEV_COST_UPDATE), 36.0 * (double)plan.adamw_elements); /* norm 4; state 24, gradient and weight 8 */
  T_EXPECT(amount(LEV_COST_HOST_UPDATE) == 0 && amount(LEV_COST_MUON) == 0);
  config.memory.oadamw_placement = OADAMW_CPU;
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  NEAR(amount(LEV_COST_HOST_UPDATE), (double)plan.adamw_elements);
  NEAR(amount(LEV_COST_UPDATE_OUT), 4.0 * (double)plan.adamw_elements);
  lev_rank_plan_free(&plan);
  config.optimizer.name = LEV_OPTIMIZER_MUON;
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  T_EXPECT(amount(LEV_COST_MUON) > 0);
  config.optimizer.name = LEV_OPTIMIZER_NONE; /* and nothing of the evaluation that follows the gradients */
  T_EXPECT_OK(lev_estimate_step(&config, 0, &unit, &estimate));
  NEAR(amount(LEV_COST_OUT), 2 * item);
  NEAR(amount(LEV_COST_IN), 2 * item);
  T_EXPECT(amount(LEV_COST_UPDATE_IN) == 0 && amount(LEV_COST_UPDATE_OUT) == 0 && amount(LEV_COST_HOST_UPDATE) == 0);
}

T_TEST(estimate_says_what_bounds_the_step) {
  static const lev_cost_id want[] = {LEV_COST_EXPERTS, LEV_COST_ATTENTION, LEV_COST_ROWS,
                                     LEV_COST_IN,      LEV_COST_OUT,       LEV_COST_COLLECTIVES};
  plan_small(&config, 0);
  config.parallel.ranks = 2, config.train.context = 512;
  for (int slow = 0; slow < 6; ++slow) { /* one ceiling far below the others */
    lev_ceilings c = {1e12, 1e12, 1e12, 1e12, 1e12, 1e12, 1e12};
    double *const fields[] = {&c.matmul, &c.attention, &c.copy, &c.h2d, &c.d2h, &c.link};
    *fields[slow] = 1;
    T_EXPECT_OK(lev_estimate_step(&config, 0, &c, &estimate));
    bool link = want[slow] == LEV_COST_IN || want[slow] == LEV_COST_OUT;
    /* the optimizer's copies over the same link may take longer still */
    lev_cost_id update = want[slow] == LEV_COST_IN ? LEV_COST_UPDATE_IN : LEV_COST_UPDATE_OUT;
    T_EXPECT_MSG(estimate.bound == want[slow] || (link && estimate.bound == update), "ceiling %d: bound by %s", slow,
                 estimate.cost[estimate.bound].name);
    T_EXPECT(estimate.step >= estimate.cost[estimate.bound].seconds && estimate.tokens_per_second > 0);
  }
}

/* Worked out apart from this code, from one layer's attention as measured on that card (4.5 s forward, 10.5 s backward
 * for 8 of 16 heads): about 620 s with attention run again, 480 s where it is kept. */
T_TEST(estimate_of_a_million_tokens_on_one_h200) {
  lev_ceilings c;
  T_EXPECT_OK(lev_ceilings_read("harness/configs/ceilings-h200.toml", &c));
  plan_read(&config, "olmoe-1b-7b");
  plan_set(&config, "train.context", "1M");
  T_EXPECT_OK(lev_estimate_step(&config, 0, &c, &estimate));
  T_EXPECT_MSG(fabs(estimate.step - 620) < 31, "%.1f s", estimate.step);
  T_EXPECT_EQ_I64(estimate.bound, LEV_COST_ATTENTION);
  config.memory.sco_keep_attention = true;
  T_EXPECT_OK(lev_estimate_step(&config, 0, &c, &estimate));
  T_EXPECT_MSG(fabs(estimate.step - 480) < 24, "%.1f s", estimate.step);
}

/* What a user's ceilings are probably not of is said; of the run that the measured ones are of, nothing. */
T_TEST(estimate_notes_what_ceilings_are_not_of) {
  static const struct {
    const char *settings, *notes[3];
  } cases[] = {
      {"", {NULL}},
      {"[parallel]\nranks = 8\n", {NULL}},
      {"[parallel]\nranks = 16\n", {"16 ranks are more than a host of 8"}},
      {"[run]\ndevice = 'cpu'\n[parallel]\nranks = 16\n", {"planned for the CPU"}},
      {"[model]\ndtype = 'f32'\n", {"computes in f32"}},
      {"[model]\ndtype = 'f64'\n[run]\ndevice = 'cpu'\n", {"planned for the CPU", "computes in f64"}},
      {"[run]\nattention = 'tiled'\n", {"own kernels (run.attention = tiled)"}},
      {"[run]\nattention = 'cudnn'\n", {NULL}},
      {"[model]\nhead_dim = 20\n", {"own kernels (its length or head size)"}},
      {"[train]\ncontext = 512\n", {"own kernels (its length or head size)"}},
      {"[data]\npacked = true\n", {"counted over whole sequences"}},
      {"[data]\npacked = true\n[parallel]\nranks = 2\n",
       {"own kernels (packed documents on a ring)", "counted over whole sequences"}},
      {"[data]\npacked = true\n[parallel]\nranks = 2\ncontext = 1\n", {"counted over whole sequences"}},
      {"[model]\nsliding_window = 300\n", {NULL}},
      {"[model]\nsliding_window = 300\n[parallel]\nranks = 2\n", {"own kernels (a sliding window on a ring)"}},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    int n = 0;
    plan_small(&config, 0);
    config.model.head_dim = 16, config.train.context = 65536, config.run.device = LEV_DEVICE_CUDA;
    T_EXPECT_OK(lev_config_parse(&config, cases[i].settings, "case"));
    T_REQUIRE_OK(lev_estimate_step(&config, 0, &unit, &estimate));
    for (; cases[i].notes[n]; ++n)
      T_EXPECT_MSG(n < estimate.n_notes && strstr(estimate.note[n], cases[i].notes[n]), "case %d, note %d: %s", (int)i,
                   n, n < estimate.n_notes ? estimate.note[n] : "none");
    T_EXPECT_MSG(estimate.n_notes == n, "case %d: %d notes, the last %s", (int)i, estimate.n_notes,
                 estimate.n_notes > 0 ? estimate.note[estimate.n_notes - 1] : "");
    for (int k = 0; k < estimate.n_notes; ++k) T_EXPECT(strlen(estimate.note[k]) < LEV_ESTIMATE_NOTE - 1);
  }
}

static lev_status read_text(const char *text) {
  char path[] = "/tmp/ceilings-XXXXXX";
  lev_ceilings c;
  int fd = mkstemp(path);
  FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
  if (!file) return LEV_ERR_IO;
  fputs(text, file);
  fclose(file);
  lev_status st = lev_ceilings_read(path, &c);
  unlink(path);
  return st;
}

T_TEST(ceilings_files_that_are_refused) {
  static const char all[] = "[ceilings]\nmatmul_tflops = 1\nattention_tflops = 2\ncopy_tb = 3\nh2d_gb = 4\nd2h_gb = 5\n"
                            "link_gb = 6\nadamw_cpu_gparams = 7.5e-1\n";
  char text[512];
  lev_ceilings c;
  T_EXPECT_OK(read_text(all));
  snprintf(text, sizeof text, "%snvme_gb = 1\n", all);
  T_EXPECT_STATUS(read_text(text), LEV_ERR_CONFIG);
  T_EXPECT(strstr(lev_detail(), "nvme_gb"));
  T_EXPECT_STATUS(read_text("[ceilings]\nmatmul_tflops = 1\n"), LEV_ERR_CONFIG);
  T_EXPECT(strstr(lev_detail(), "missing"));
  T_EXPECT_STATUS(read_text("[ceilings]\nmatmul_tflops = 0\n"), LEV_ERR_CONFIG);
  T_EXPECT_STATUS(read_text("[ceilings]\nmatmul_tflops = 'fast'\n"), LEV_ERR_CONFIG);
  T_EXPECT_STATUS(lev_ceilings_read("/nowhere/ceilings.toml", &c), LEV_ERR_IO);
}
