/* SPDX-License-Identifier: Apache-2.0 */
/* Planned bytes are real: the dry run lists the same events as the run, one alignment unit less fails, a planted
 * allocation is caught, and neither the heap nor the address space grows once the memory is sealed. */
#include <stdio.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/train/estimate.h"
#include "tests/t.h"
#include "tests/train/rig.h"
#include "tests/train/tokens.h"

enum { EVENTS = 1 << 18 };

typedef struct scene {
  lev_config config;
  lev_comm_hub *hub;
  int short_class; /* slab of this class lacks one unit; -1 = none */
  bool planted;    /* try to allocate after the seal */
  bool many;       /* micro-batches that the dry run leaves out: sums instead of lists */
} scene;

static bool same_events(const lev_trace *dry, const lev_trace *real, int rank) {
  int64_t n = lev_trace_count(dry);
  T_EXPECT_EQ_I64(lev_trace_dropped(dry) + lev_trace_dropped(real), 0);
  for (int64_t i = 0; i < n && i < lev_trace_count(real); ++i) {
    const lev_trace_event *a = lev_trace_at(dry, i), *b = lev_trace_at(real, i);
    const char *x = lev_trace_name(dry, a->name), *y = lev_trace_name(real, b->name);
    bool same = a->kind == b->kind && a->cls == b->cls && a->bytes == b->bytes && strcmp(x, y) == 0;
    if (!T_EXPECT_MSG(same, "rank %d, event %lld: dry %d %s %llu, run %d %s %llu", rank, (long long)i, a->kind, x,
                      (unsigned long long)a->bytes, b->kind, y, (unsigned long long)b->bytes))
      return false;
  }
  return T_EXPECT_EQ_I64(lev_trace_count(real), n);
}

/* Bytes of collectives, and of copies to the host and from it, in the step that a run's events begin with. */
static void sum_events(const lev_trace *trace, double *collectives, double *out, double *in) {
  bool step = false, gradients = false, optimizer = false;
  *collectives = *out = *in = 0;
  for (int64_t i = 0; i < lev_trace_count(trace); ++i) {
    const lev_trace_event *e = lev_trace_at(trace, i);
    const char *name = lev_trace_name(trace, e->name), *dot = strrchr(name, '.');
    bool batch = e->kind == LEV_EV_PHASE && strcmp(name, "batch") == 0;
    if (batch && gradients) return;
    step |= batch;
    gradients |= e->kind == LEV_EV_PHASE && strcmp(name, "grad_norm") == 0;
    optimizer |= e->kind == LEV_EV_PHASE && strncmp(name, "optimizer.", 10) == 0;
    if (step && e->kind == LEV_EV_COLL) *collectives += (double)e->bytes;
    if (step && !optimizer && e->kind == LEV_EV_COPY && dot && strcmp(dot, ".out") == 0) *out += (double)e->bytes;
    if (step && !optimizer && e->kind == LEV_EV_COPY && dot && strcmp(dot, ".in") == 0) *in += (double)e->bytes;
  }
}

/* One micro-batch of the dry run stands for all that are like it: peaks and sums are those of the run. */
static void same_sums(const scene *s, int rank, const lev_ledger *planned, const lev_ledger *measured,
                      const lev_trace *dry, const lev_trace *real) {
  static const lev_ceilings unit = {1, 1, 1, 1, 1, 1, 1};
  lev_estimate e;
  double collectives, out, in;
  T_EXPECT(lev_trace_count(dry) < lev_trace_count(real));
  T_EXPECT_EQ_I64(lev_trace_dropped(real), 0);
  for (int i = 0; i < lev_ledger_count(planned); ++i) {
    lev_ledger_row row = lev_ledger_at(planned, i);
    T_EXPECT_MSG(lev_ledger_tag_peak(measured, row.cls, row.tag) == row.peak, "rank %d: %s", rank, row.tag);
  }
  for (int c = 0; c < LEV_MEM_CLASSES; ++c)
    T_EXPECT_EQ_I64(lev_ledger_peak(measured, (lev_mem)c), lev_ledger_peak(planned, (lev_mem)c));
  sum_events(real, &collectives, &out, &in);
  T_REQUIRE_OK(lev_estimate_step(&s->config, rank, &unit, &e));
  T_EXPECT_MSG(e.cost[LEV_COST_COLLECTIVES].amount == collectives && collectives > 0, "rank %d: %g sent, estimated %g",
               rank, collectives, e.cost[LEV_COST_COLLECTIVES].amount);
  T_EXPECT_MSG(e.cost[LEV_COST_OUT].amount == out && out > 0, "rank %d: %g out, estimated %g", rank, out,
               e.cost[LEV_COST_OUT].amount);
  T_EXPECT_MSG(e.cost[LEV_COST_IN].amount == in && in > 0, "rank %d: %g in, estimated %g", rank, in,
               e.cost[LEV_COST_IN].amount);
}

static size_t heap_calls(void) {
  size_t calls = 0;
  for (int h = 0; h < LEV_HEAP_COUNT; ++h) {
    lev_heap_stats s;
    lev_heap_read((lev_heap)h, &s);
    calls += s.calls;
  }
  return calls;
}

static void plant(lev_rank *rank) {
  void *p;
  T_EXPECT_STATUS(lev_device_alloc(rank->device, LEV_MEM_DEVICE, 64, &p), LEV_ERR_SEALED);
  T_EXPECT_STATUS(lev_arena_persist(rank->arena[LEV_MEM_DEVICE], "planted", 64, &p), LEV_ERR_SEALED);
  T_EXPECT_OK(lev_rank_push(rank));
  size_t left = rank->arena[LEV_MEM_DEVICE] ? lev_rank_slabs(rank).bytes[LEV_MEM_DEVICE] + LEV_ALIGN : 0;
  T_EXPECT_STATUS(lev_arena_alloc(rank->arena[LEV_MEM_DEVICE], "planted", left, &p), LEV_ERR_CAPACITY);
  T_EXPECT_OK(lev_rank_pop(rank));
}

static void rank_main(int index, void *ctx) {
  scene *s = ctx;
  lev_trace *dry, *real;
  lev_rank_plan plan;
  lev_device *device;
  lev_comm *world;
  lev_ledger *ledger;
  lev_rank *rank = NULL;
  T_REQUIRE_OK(lev_trace_create(EVENTS, &dry));
  T_REQUIRE_OK(lev_trace_create(EVENTS, &real));
  T_REQUIRE_OK(lev_plan_rank(&s->config, index, dry, &plan));
  T_REQUIRE_OK(lev_ledger_create(real, &ledger));
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU, .trace = real}, &device));
  T_REQUIRE_OK(lev_comm_local_join(s->hub, index, device, &world));
  lev_slabs slabs = plan.slabs;
  if (s->short_class >= 0) slabs.bytes[s->short_class] -= LEV_ALIGN;
  lev_rank_options options = {
      .config = &s->config, .device = device, .world = world, .ledger = ledger, .slabs = &slabs};
  lev_status st = lev_rank_create(&options, &rank);
  lev_loader *loader = tokens_loader(&s->config);
  if (st == LEV_OK && s->planted) plant(rank);
  if (st == LEV_OK) st = lev_plan_program(rank, loader, loader);
  if (s->short_class >= 0) {
    T_EXPECT_STATUS(st, LEV_ERR_CAPACITY);
    lev_comm_abort(world);
  } else {
    T_EXPECT_OK(st);
  }
  lev_loader_close(loader);
  lev_rank_destroy(rank); /* frees are events too */
  if (s->short_class < 0 && !s->planted && !s->many) same_events(dry, real, index);
  if (s->many) same_sums(s, index, plan.ledger, ledger, dry, real);
  lev_comm_destroy(world);
  lev_device_close(device);
  lev_ledger_destroy(ledger);
  lev_rank_plan_free(&plan);
  lev_trace_destroy(dry);
  lev_trace_destroy(real);
}

static void play(scene *s) {
  int ranks = (int)s->config.parallel.ranks;
  T_REQUIRE_OK(lev_comm_hub_create(ranks, 60, &s->hub));
  t_ranks(ranks, rank_main, s);
  lev_comm_hub_destroy(s->hub);
}

static void demo_like(lev_config *c) {
  rig_config(c);
  c->model.dtype = LEV_F32;
  c->parallel.ranks = 4;
  c->debug.uniform_routing = true; /* what the dry run assumes about routing */
}

T_TEST(memory_dry_run_lists_the_events_of_the_run) {
  for (int kind = 0; kind < 4; ++kind) {
    scene s = {.short_class = -1};
    demo_like(&s.config);
    if (kind == 1) s.config.optimizer.name = LEV_OPTIMIZER_MUON;
    if (kind == 2) s.config.parallel.context = 2, s.config.parallel.experts = 2, s.config.train.global_batch = 3;
    if (kind == 3) s.config.memory.sco_keep_attention = false, s.config.model.dtype = LEV_BF16;
    play(&s);
  }
}

T_TEST(memory_dry_run_lists_the_events_of_every_variant) {
  scene s = {.short_class = -1};
  for (int v = 0; rig_variant(&s.config, v); ++v) {
    s.config.parallel.ranks = 4, s.config.parallel.context = 2, s.config.parallel.experts = 2;
    s.config.train.global_batch = 3;
    s.config.debug.uniform_routing = true;
    play(&s);
  }
}

T_TEST(memory_dry_run_lists_the_events_of_the_demo) {
  scene s = {.short_class = -1};
  lev_config_defaults(&s.config);
  T_REQUIRE_OK(lev_config_read(&s.config, "harness/configs/demo.toml"));
  s.config.run.device = LEV_DEVICE_CPU; /* that of rank_main, also where there is a GPU */
  s.config.debug.uniform_routing = true;
  s.config.train.context = 512; /* the same schedule on fewer tokens */
  play(&s);
}

T_TEST(memory_dry_run_of_many_micro_batches) {
  for (int kind = 0; kind < 3; ++kind) {
    scene s = {.short_class = -1, .many = true};
    demo_like(&s.config);
    s.config.memory.sco_host_budget = 1 << 20, s.config.memory.sco_keep_attention = kind == 2;
    s.config.parallel.context = kind == 1 ? 2 : 4;
    s.config.train.global_batch = kind == 1 ? 15 : 7; /* the last micro-batch has one sequence for two groups */
    if (kind == 2) s.config.optimizer.name = LEV_OPTIMIZER_MUON, s.config.model.balance = LEV_BALANCE_NONE;
    play(&s);
  }
}

T_TEST(memory_one_unit_less_fails) {
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) {
    scene s = {.short_class = cls};
    demo_like(&s.config);
    s.config.parallel.ranks = 2;
    play(&s);
  }
}

T_TEST(memory_planted_allocations_are_caught) {
  scene s = {.short_class = -1, .planted = true};
  demo_like(&s.config);
  s.config.parallel.ranks = 1;
  play(&s);
}

/* Steps allocate nothing: neither through the control-plane heap nor by mapping memory. */
static long mapped_kib(void) {
  char line[256];
  long kib = -1;
  FILE *f = fopen("/proc/self/status", "r");
  while (f && fgets(line, sizeof line, f))
    if (sscanf(line, "VmSize: %ld kB", &kib) == 1) break;
  if (f) fclose(f);
  return kib;
}

T_TEST(memory_steps_allocate_nothing) {
  lev_config c;
  lev_comm_hub *hub;
  lev_rank_plan plan;
  lev_device *device;
  lev_comm *world;
  lev_ledger *ledger;
  lev_rank *rank;
  lev_step_result result;
  demo_like(&c);
  c.parallel.ranks = 1;
  T_REQUIRE_OK(lev_plan_rank(&c, 0, NULL, &plan));
  T_REQUIRE_OK(lev_comm_hub_create(1, 60, &hub));
  T_REQUIRE_OK(lev_ledger_create(NULL, &ledger));
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &device));
  T_REQUIRE_OK(lev_comm_local_join(hub, 0, device, &world));
  lev_rank_options options = {.config = &c, .device = device, .world = world, .ledger = ledger, .slabs = &plan.slabs};
  T_REQUIRE_OK(lev_rank_create(&options, &rank));
  lev_loader *loader = tokens_loader(&c);
  T_REQUIRE_OK(lev_rank_init_weights(rank));
  for (int step = 1; step <= 2; ++step) T_EXPECT_OK(lev_train_step(rank, loader, step, 0, 1e-3, &result));
  size_t calls = heap_calls();
  long kib = mapped_kib();
  for (int step = 3; step <= 8; ++step) T_EXPECT_OK(lev_train_step(rank, loader, step, 0, 1e-3, &result));
  T_EXPECT_EQ_I64(heap_calls(), calls);
#ifndef LEV_PLAIN_MALLOC /* sanitizers map memory of their own */
  T_EXPECT_EQ_I64(mapped_kib(), kib);
#else
  (void)kib;
#endif
  lev_loader_close(loader);
  lev_rank_destroy(rank);
  lev_comm_destroy(world);
  lev_device_close(device);
  lev_ledger_destroy(ledger);
  lev_rank_plan_free(&plan);
  lev_comm_hub_destroy(hub);
}
