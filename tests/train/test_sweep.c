/* SPDX-License-Identifier: Apache-2.0 */
/* The composed step over layouts, caps, lengths, batches and routings that divide nothing: loss and every gradient
 * tensor in f64 against one unsplit run of plain schedules, and that run's loss against a naive model.
 *
 * Routings: as initialised, balanced, Zipf, Pareto, all tokens on one expert, all on the same k (the other experts get
 * none). Contexts of 1, 2 and 5 tokens leave ranks without any; 1 with a batch of 1 is one token in all.
 *
 * A comparison of two routings is only as good as the distance to the nearest tie, so the naive model reports the
 * smallest gap at the border between chosen and not chosen. */
#include <math.h>
#include <stdio.h>

#include "common/rng.h"
#include "tests/num.h"
#include "tests/t.h"
#include "tests/train/oracle.h"
#include "tests/train/skew.h"

#ifdef LEV_PLAIN_MALLOC
enum { EVERY = 6 }; /* sanitizers are an order slower: one case of six */
#else
enum { EVERY = 1 };
#endif

#define TOLERANCE 1e-11
#define GAP 1e-9

static const int layouts[][4] = {{1, 1, 1, 1}, {2, 2, 2, 2}, {4, 4, 4, 4}, {8, 4, 2, 4}, {6, 3, 2, 6},
                                 {8, 2, 4, 8}, {5, 5, 5, 5}, {7, 7, 7, 7}, {4, 1, 1, 4}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

/* 1, 2 and 5 are shorter than two pieces per rank. */
static const int64_t contexts[] = {1, 2, 5, 53, 64}, batches[] = {1, 3, 5};
enum { CONTEXTS = sizeof contexts / sizeof *contexts, BATCHES = sizeof batches / sizeof *batches };

static void layout(lev_config *c, int which) {
  const int *l = layouts[which];
  c->parallel.ranks = l[0], c->parallel.context = l[1], c->parallel.experts = l[2], c->parallel.vocab = l[3];
}

static void unsplit(lev_config *c) {
  layout(c, 0);
  c->schedule.pipelined_llep = c->schedule.ring_dtp = c->schedule.sco = LEV_SCHEDULE_PLAIN;
  c->schedule.offload_adamw = c->schedule.muon = LEV_SCHEDULE_PLAIN;
}

/* ---- caps, drawn per case ---- */

typedef struct draw {
  uint32_t number;
  uint64_t n;
} draw;

static int64_t one_of(draw *d, const int64_t *list, int n) {
  return list[lev_rng_u64((lev_rng_key){41, d->number, 0}, d->n++) % (uint64_t)n];
}
#define ONE_OF(d, ...)                                                                                                 \
  one_of((d), (const int64_t[]){__VA_ARGS__}, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

static void draw_caps(lev_config *c, uint32_t number) {
  draw d = {.number = number};
  int64_t least = c->parallel.experts * c->model.num_experts_per_tok;
  c->memory.llep_chunk_rows = lev_max_i64(least, ONE_OF(&d, 0, 17, 40, 1000));
  c->memory.llep_foreign_slots = ONE_OF(&d, -1, 0, 1, 3);
  c->memory.llep_min_rows = ONE_OF(&d, 0, 2, 11);
  c->memory.llep_gate = ONE_OF(&d, 0, 1) ? 1.0 : 1.3;
  c->memory.llep_alpha = ONE_OF(&d, 0, 1) ? 1.0 : 1.25;
  c->memory.rdtp_tile_rows = ONE_OF(&d, 1, 7, 64);
  c->memory.rdtp_tile_cols = ONE_OF(&d, 3, 9, 64);
  c->memory.rdtp_branch = (int)ONE_OF(&d, 0, 1, 2);
  c->memory.sco_keep_attention = ONE_OF(&d, 0, 1);
  c->memory.sco_host_budget = ONE_OF(&d, 0, 1) ? SIZE_MAX : 5000;
  c->memory.sco_fraction = (double)ONE_OF(&d, 0, 37, 100, 100) / 100;
  c->memory.attention_block_q = ONE_OF(&d, 1, 8, 64);
  c->memory.attention_block_k = ONE_OF(&d, 1, 8, 64);
  c->memory.embed_tile_tokens = ONE_OF(&d, 1, 5, 0);
  c->memory.oadamw_bucket = ONE_OF(&d, 61, 257, 0);
  c->memory.oadamw_slots = ONE_OF(&d, 1, 2, 3);
  c->memory.oadamw_placement = (int)ONE_OF(&d, 0, 1, 2);
  c->memory.oadamw_cpu_share = (double)ONE_OF(&d, 10, 37, 80) / 100;
  c->memory.muon_slots = ONE_OF(&d, 1, 2, 3);
}

/* ---- comparisons ---- */

typedef struct scene {
  lev_config config; /* of the unsplit run */
  skew routing;
  rig_result want;
  char name[160];
} scene;

static void name_case(const scene *s, const lev_config *c, uint32_t number, char *text, size_t bytes) {
  snprintf(text, bytes, "case %u: (%d, %d, %d, %d), %s routing, context %d, batch %d", number, (int)c->parallel.ranks,
           (int)c->parallel.context, (int)c->parallel.experts, (int)c->parallel.vocab, skew_name(s->routing),
           (int)c->train.context, (int)c->train.global_batch);
}

static bool close_to(double got, double want) {
  return fabs(got - want) <= TOLERANCE * fmax(fabs(want), 1e-3);
}

static double norm(const double *x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sqrt(sum);
}

/* Where the gradient is zero by mathematics, as that of q and k with one key, both sides hold rounding errors. */
static void expect_gradient(const rig_result *got, const rig_result *want, int t, const char *name) {
  int64_t n = want->elements[t];
  double zero = 1e-14 * want->step.grad_norm;
  if (!T_EXPECT_MSG(got->gradient[t], "%s: no gradient of %s", name, want->name[t])) return;
  if (norm(want->gradient[t], n) < zero && norm(got->gradient[t], n) < zero) return;
  double d = num_rel_l2_f64(got->gradient[t], want->gradient[t], n);
  T_EXPECT_MSG(d <= TOLERANCE, "%s: gradient of %s differs by %.3g", name, want->name[t], d);
}

static void expect_step(const rig_result *got, const rig_result *want, const char *name) {
  T_EXPECT_MSG(close_to(got->step.loss, want->step.loss), "%s: loss %.17g, expected %.17g", name, got->step.loss,
               want->step.loss);
  T_EXPECT_MSG(close_to(got->step.balance, want->step.balance), "%s: balance loss %.17g, expected %.17g", name,
               got->step.balance, want->step.balance);
  T_EXPECT_MSG(close_to(got->step.z_loss, want->step.z_loss), "%s: z loss", name);
  T_EXPECT_MSG(close_to(got->step.grad_norm, want->step.grad_norm), "%s: gradient norm", name);
  T_EXPECT_MSG(got->step.max_vio == want->step.max_vio && got->step.valid == want->step.valid, "%s: counts", name);
  for (int t = 0; t < RIG_TENSORS; ++t)
    if (want->gradient[t]) expect_gradient(got, want, t, name);
  T_EXPECT_MSG(got->chunk_rows <= got->chunk_cap, "%s: %d rows in a chunk, planned %d", name, (int)got->chunk_rows,
               (int)got->chunk_cap);
}

/* The naive model agrees with the unsplit run, no pick hangs on a tie, and the routing is what its name says. */
static void expect_oracle(const scene *s, const rig_result *run, const char *name) {
  oracle_result o;
  const lev_config *c = &s->config;
  oracle_run(c, run, 0, &o);
  T_EXPECT_MSG(o.gap > GAP, "%s: the closest pick is decided by %.3g", name, o.gap);
  T_EXPECT_MSG(close_to(run->step.loss, o.loss), "%s: loss %.17g, naive model %.17g", name, run->step.loss, o.loss);
  T_EXPECT_MSG(close_to(run->step.z_loss, o.z_loss), "%s: z loss, naive model", name);
  T_EXPECT_MSG(close_to(run->step.balance, o.balance), "%s: balance, naive model", name);
  T_EXPECT_MSG(fabs(run->step.max_vio - o.max_vio) < 1e-12, "%s: max_vio %g, naive model %g", name, run->step.max_vio,
               o.max_vio);
  int64_t tokens = c->train.context * c->train.global_batch;
  double worst = (double)c->model.num_experts / (double)c->model.num_experts_per_tok - 1;
  for (int l = 0; l < (int)c->model.num_hidden_layers; ++l) {
    if (s->routing == SKEW_ONE) T_EXPECT_MSG(o.load[l][0] * 10 >= tokens * 9, "%s: not skewed", name);
    if (s->routing == SKEW_SAME)
      for (int e = 0; e < 3; ++e) T_EXPECT_MSG(o.load[l][e] == tokens, "%s: not skewed", name);
  }
  if (s->routing == SKEW_SAME) T_EXPECT(fabs(o.max_vio - worst) < 1e-12);
  if ((s->routing == SKEW_ZIPF || s->routing == SKEW_PARETO) && tokens > 100)
    T_EXPECT_MSG(o.max_vio > 0.8 && o.max_vio < worst - 0.1, "%s: max_vio %g", name, o.max_vio);
  if (s->routing == SKEW_BALANCED && tokens > 100) T_EXPECT_MSG(o.max_vio < 0.6, "%s: max_vio %g", name, o.max_vio);
}

static void open_scene(scene *s, int64_t context, int64_t batch, skew routing) {
  rig_config(&s->config);
  s->routing = routing;
  s->config.train.context = context, s->config.train.global_batch = batch;
  s->config.run.compute_immediate = true;
  unsplit(&s->config);
  name_case(s, &s->config, 0, s->name, sizeof s->name);
}

static void run_case(const scene *s, int which, uint32_t number) {
  char name[160];
  rig_result got;
  lev_config c = s->config;
  layout(&c, which);
  draw_caps(&c, number);
  c.debug.poison = true;
  c.run.compute_immediate = number % 3 != 0; /* most cases without worker threads, which cost more than the work */
  c.schedule.pipelined_llep = c.schedule.ring_dtp = c.schedule.sco = LEV_SCHEDULE_BOUNDED;
  name_case(s, &c, number, name, sizeof name);
  rig_run(&(rig_options){.config = &c, .alter = skew_alter(s->routing), .poison = true}, &got);
  expect_step(&got, &s->want, name);
  rig_free(&got);
}

/* Every (context, batch, routing) on two layouts that walk through the list, so that each layout meets each of them. */
T_TEST(sweep_gradients_equal_the_unsplit_run) {
  uint32_t number = 0;
  int which = 0;
  for (int context = 0; context < CONTEXTS; ++context)
    for (int batch = 0; batch < BATCHES; ++batch)
      for (int routing = 0; routing < SKEWS && !t_failed(); ++routing) {
        scene s;
        if ((context + batch + routing) % EVERY != 0) continue;
        open_scene(&s, contexts[context], batches[batch], (skew)routing);
        rig_run(&(rig_options){.config = &s.config, .alter = skew_alter(s.routing)}, &s.want);
        expect_oracle(&s, &s.want, s.name);
        for (int i = 0; i < 2; ++i, which = (which + 1) % LAYOUTS) run_case(&s, which, ++number);
        rig_free(&s.want);
      }
}

/* ---- two steps of each optimizer ---- */

/* Weights after the updates, and the gradients of the second step. */
static void run_updates(const scene *s, int which, uint32_t number) {
  char name[160];
  rig_result got;
  lev_config c = s->config;
  layout(&c, which);
  draw_caps(&c, number);
  c.debug.poison = true;
  c.run.compute_immediate = number % 3 != 0;
  c.schedule = (__typeof__(c.schedule)){LEV_SCHEDULE_BOUNDED, LEV_SCHEDULE_BOUNDED, LEV_SCHEDULE_BOUNDED,
                                        LEV_SCHEDULE_BOUNDED, LEV_SCHEDULE_BOUNDED};
  name_case(s, &c, number, name, sizeof name);
  rig_run(
      &(rig_options){
          .config = &c, .alter = skew_alter(s->routing), .update = true, .steps = 2, .evaluate = true, .poison = true},
      &got);
  expect_step(&got, &s->want, name);
  T_EXPECT_MSG(got.plan_exact, "%s: measured bytes are not the planned ones", name);
  for (int t = 0; t < RIG_TENSORS; ++t) {
    if (!s->want.weight[t]) continue;
    double d = num_rel_l2_f64(got.weight[t], s->want.weight[t], s->want.elements[t]);
    T_EXPECT_MSG(d <= TOLERANCE, "%s: %s differs by %.3g after 2 steps", name, s->want.name[t], d);
  }
  rig_free(&got);
}

/* The second step's picks must not hang on a tie either: the naive model runs on the weights after the first step. */
static void expect_gap_after_one_step(const scene *s) {
  rig_result one;
  oracle_result o;
  rig_run(&(rig_options){.config = &s->config, .alter = skew_alter(s->routing), .update = true}, &one);
  oracle_run(&s->config, &one, s->config.train.global_batch, &o);
  T_EXPECT_MSG(o.gap > GAP, "%s: in step 2 the closest pick is decided by %.3g", s->name, o.gap);
  T_EXPECT_MSG(close_to(s->want.step.loss, o.loss), "%s: loss of step 2 %.17g, naive model %.17g", s->name,
               s->want.step.loss, o.loss);
  rig_free(&one);
}

static void updates(int optimizer) {
  uint32_t number = 1000 * (uint32_t)(optimizer + 1);
  static const int64_t lengths[SKEWS] = {53, 64, 41, 37, 29, 5};
  int which = 1;
  for (int routing = 0; routing < SKEWS && !t_failed(); ++routing) {
    scene s;
    open_scene(&s, lengths[routing], batches[routing % BATCHES], (skew)routing);
    s.config.optimizer.name = optimizer;
    s.config.optimizer.eps =
        1e-3; /* AdamW's first updates are signs of the gradient: keep rounding from deciding them */
    rig_run(&(rig_options){.config = &s.config, .alter = skew_alter(s.routing), .update = true, .steps = 2}, &s.want);
    expect_gap_after_one_step(&s);
    for (int i = 0; i < (EVERY > 1 ? 1 : 4); ++i, which = which % (LAYOUTS - 1) + 1) run_updates(&s, which, ++number);
    rig_free(&s.want);
  }
}

T_TEST(sweep_adamw_equals_the_unsplit_run) {
  updates(LEV_OPTIMIZER_ADAMW);
}
T_TEST(sweep_muon_equals_the_unsplit_run) {
  updates(LEV_OPTIMIZER_MUON);
}
