/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: bytes, what depends on tokens, choice of branch and tiles, budgets, errors, dry run, injected faults. */
#include <stdio.h>
#include <string.h>

#include "tests/rdtp/rdtp_rig.h"

typedef struct dry {
  lev_device *device;
  lev_comm *comm;
  lev_stream *stream;
} dry;

static bool dry_open(dry *d, int ranks, int rank) {
  *d = (dry){0};
  lev_device_config dc = {.backend = LEV_BACKEND_DRY};
  return T_EXPECT_OK(lev_device_open(&dc, &d->device)) &&
         T_EXPECT_OK(lev_comm_dry_create(ranks, rank, d->device, &d->comm)) &&
         T_EXPECT_OK(lev_stream_create(d->device, "compute", &d->stream));
}
static void dry_close(dry *d) {
  lev_comm_destroy(d->comm);
  lev_device_close(d->device);
}

static rdtp_config big(int64_t tokens, rdtp_branch branch, lev_dtype dtype) {
  rdtp_config c;
  rdtp_config_init(&c);
  c.max_tokens = tokens, c.hidden = 2048, c.vocab = 50304, c.dtype = dtype, c.branch = branch;
  c.tile_rows = 1024, c.tile_cols = 2048;
  return c;
}

typedef struct tag_sum {
  size_t flat, growing;
} tag_sum;
static void add_region(void *ctx, const lev_region *region) {
  tag_sum *s = ctx;
  bool grows = strcmp(region->tag, "rdtp.state") == 0 || strcmp(region->tag, "rdtp.dx") == 0;
  *(grows ? &s->growing : &s->flat) += region->bytes;
}

static tag_sum sum_tags(const dry *d, const rdtp_config *c, rdtp_phase phase) {
  tag_sum s = {0};
  rdtp_plan *plan;
  if (!T_EXPECT_OK(rdtp_plan_create(d->device, d->comm, c, &plan))) return s;
  rdtp_plan_regions(plan, phase, add_region, &s);
  size_t bytes[LEV_MEM_CLASSES];
  rdtp_plan_bytes(plan, phase, bytes);
  T_EXPECT_EQ_I64(bytes[LEV_MEM_DEVICE], s.flat + s.growing);
  T_EXPECT(bytes[LEV_MEM_PINNED] == 0 && bytes[LEV_MEM_HOST] == 0);
  rdtp_destroy(plan);
  return s;
}

/* README formula, moving weights, bf16: tile + 2 W chunks + 3 dW chunks do not depend on N; 12 N and 4 N H do. */
T_TEST(rdtp_bytes_formula) {
  dry d;
  if (!dry_open(&d, 8, 3)) return;
  rdtp_config c = big(1 << 20, RDTP_MOVE_WEIGHTS, LEV_BF16);
  tag_sum s = sum_tags(&d, &c, RDTP_STEP);
  T_EXPECT_EQ_I64(s.flat, 1024 * 2048 * 4 + 2 * 2048 * 2048 * 2 + 3 * 2048 * 2048 * 4);
  T_EXPECT_EQ_I64(s.growing, ((int64_t)1 << 20) * 12 + ((int64_t)1 << 20) * 2048 * 4);
  c.max_tokens = 1 << 14;
  T_EXPECT_EQ_I64(sum_tags(&d, &c, RDTP_STEP).flat, s.flat);
  T_EXPECT(sum_tags(&d, &c, RDTP_EVAL).flat < s.flat);
  T_EXPECT_EQ_I64(sum_tags(&d, &c, RDTP_PERSISTENT).flat, 0);
  c.dtype = LEV_F32; /* no rdtp.dx: dh itself is the accumulator */
  T_EXPECT_EQ_I64(sum_tags(&d, &c, RDTP_STEP).growing, ((int64_t)1 << 14) * 12);
  dry_close(&d);
}

T_TEST(rdtp_activations_do_not_grow) {
  dry d;
  if (!dry_open(&d, 8, 0)) return;
  for (int one_pass = 0; one_pass < 2; ++one_pass) {
    rdtp_config c = big(1 << 14, RDTP_MOVE_ACTIVATIONS, LEV_BF16);
    c.one_pass = one_pass;
    tag_sum small = sum_tags(&d, &c, RDTP_STEP);
    c.max_tokens = 1 << 24;
    tag_sum large = sum_tags(&d, &c, RDTP_STEP);
    T_EXPECT(small.flat == large.flat && small.growing == large.growing);
  }
  dry_close(&d);
}

static rdtp_info info_of(const dry *d, const rdtp_config *c) {
  rdtp_info info = {0};
  rdtp_plan *plan;
  if (T_EXPECT_OK(rdtp_plan_create(d->device, d->comm, c, &plan))) info = rdtp_plan_info(plan);
  rdtp_destroy(plan);
  return info;
}

T_TEST(rdtp_branch_rule) {
  dry d;
  if (!dry_open(&d, 8, 7)) return;
  rdtp_config c = big(50304 / 8, RDTP_AUTO, LEV_BF16);
  T_EXPECT_EQ_I64(info_of(&d, &c).branch, RDTP_MOVE_ACTIVATIONS);
  ++c.max_tokens;
  T_EXPECT_EQ_I64(info_of(&d, &c).branch, RDTP_MOVE_WEIGHTS);
  T_EXPECT_EQ_I64(info_of(&d, &c).vocab_end, c.vocab);
  dry_close(&d);
  if (!dry_open(&d, 1, 0)) return;
  T_EXPECT_EQ_I64(info_of(&d, &c).branch, RDTP_MOVE_ACTIVATIONS);
  dry_close(&d);
}

static size_t step_bytes(const dry *d, const rdtp_config *c) {
  tag_sum s = sum_tags(d, c, RDTP_STEP);
  return s.flat + s.growing;
}

/* Chosen tiles fit, and neither side can grow by one step of 64. */
T_TEST(rdtp_budget_is_used_up) {
  dry d;
  if (!dry_open(&d, 4, 1)) return;
  const rdtp_branch branches[] = {RDTP_MOVE_WEIGHTS, RDTP_MOVE_ACTIVATIONS};
  for (int b = 0; b < 2; ++b)
    for (size_t budget = (size_t)1 << 28; budget <= (size_t)1 << 30; budget <<= 1) {
      rdtp_config c = big(16384, branches[b], LEV_BF16);
      c.tile_rows = c.tile_cols = 0, c.budget = budget;
      rdtp_info info = info_of(&d, &c);
      rdtp_config given = c;
      given.budget = 0, given.tile_rows = info.tile_rows, given.tile_cols = info.tile_cols;
      T_EXPECT(step_bytes(&d, &given) <= budget);
      T_EXPECT_MSG(info.tile_rows >= 256 && info.tile_cols >= 256, "tile %lld x %lld", (long long)info.tile_rows,
                   (long long)info.tile_cols);
      given.tile_rows += 64;
      if (info.tile_rows < c.max_tokens) T_EXPECT(step_bytes(&d, &given) > budget);
      given.tile_rows = info.tile_rows, given.tile_cols += 64;
      if (info.tile_cols < c.vocab / 4) T_EXPECT(step_bytes(&d, &given) > budget);
    }
  dry_close(&d);
}

T_TEST(rdtp_smallest_budget_is_sharp) {
  dry d;
  if (!dry_open(&d, 4, 0)) return;
  for (int plain = 0; plain < 2; ++plain)
    for (int one_pass = 0; one_pass < 2; ++one_pass) {
      rdtp_config c = big(4096, RDTP_MOVE_WEIGHTS, LEV_F32);
      c.schedule = plain ? RDTP_PLAIN : RDTP_BOUNDED, c.one_pass = one_pass;
      c.tile_rows = 0;
      c.budget = rdtp_smallest_budget(4, &c);
      T_EXPECT(c.budget > 0 && c.budget < SIZE_MAX);
      rdtp_plan *plan = NULL;
      T_EXPECT_OK(rdtp_plan_create(d.device, d.comm, &c, &plan));
      rdtp_destroy(plan);
      char number[32];
      snprintf(number, sizeof number, "%zu", c.budget);
      --c.budget;
      T_EXPECT_STATUS(rdtp_plan_create(d.device, d.comm, &c, &plan), LEV_ERR_BUDGET);
      T_EXPECT_MSG(strstr(lev_detail(), number) != NULL, "the detail does not name %s: %s", number, lev_detail());
    }
  dry_close(&d);
}

/* One-pass where the budget holds a useful block, the ring otherwise. */
T_TEST(rdtp_one_pass_falls_back) {
  dry d;
  if (!dry_open(&d, 4, 0)) return;
  rdtp_config c = big(4096, RDTP_AUTO, LEV_BF16);
  c.tile_rows = c.tile_cols = 0, c.one_pass = true;
  c.budget = (size_t)1 << 30;
  rdtp_info info = info_of(&d, &c);
  T_EXPECT(info.one_pass && info.tile_cols == c.vocab / 4);
  c.budget = (size_t)1 << 24;
  T_EXPECT(!info_of(&d, &c).one_pass);
  dry_close(&d);
}

T_TEST(rdtp_bad_configurations) {
  const rdtp_config good = big(64, RDTP_AUTO, LEV_F32);
  rdtp_config c = good;
  T_EXPECT_OK(rdtp_supports(LEV_BACKEND_CPU, 4, &c));
  T_EXPECT_STATUS(rdtp_supports(LEV_BACKEND_CPU, 0, &c), LEV_ERR_CONFIG);
  c.size = 1;
  T_EXPECT_STATUS(rdtp_supports(LEV_BACKEND_CPU, 4, &c), LEV_ERR_CONFIG);
  c = good, c.max_tokens = 0;
  T_EXPECT_STATUS(rdtp_supports(LEV_BACKEND_CPU, 4, &c), LEV_ERR_CONFIG);
  c = good, c.vocab = (int64_t)1 << 31;
  T_EXPECT_STATUS(rdtp_supports(LEV_BACKEND_CPU, 4, &c), LEV_ERR_CONFIG);
  c = good, c.dtype = LEV_I32;
  T_EXPECT_STATUS(rdtp_supports(LEV_BACKEND_CPU, 4, &c), LEV_ERR_CONFIG);
  c = good, c.tile_rows = -1;
  T_EXPECT_STATUS(rdtp_supports(LEV_BACKEND_CPU, 4, &c), LEV_ERR_CONFIG);
  dry d;
  if (!dry_open(&d, 1, 0)) return;
  c = good, c.max_tokens = INT64_MAX / 2, c.branch = RDTP_MOVE_WEIGHTS; /* bytes past SIZE_MAX */
  rdtp_plan *plan;
  T_EXPECT_STATUS(rdtp_plan_create(d.device, d.comm, &c, &plan), LEV_ERR_BUDGET);
  T_EXPECT(plan == NULL);
  rdtp_destroy(NULL);
  dry_close(&d);
}

T_TEST(rdtp_call_errors) {
  dry d;
  if (!dry_open(&d, 2, 0)) return;
  rdtp_config c = big(8, RDTP_AUTO, LEV_F32);
  rdtp_plan *plan;
  T_REQUIRE_OK(rdtp_plan_create(d.device, d.comm, &c, &plan));
  int64_t rows[2] = {8, 4};
  double dummy[RDTP_SUMS];
  int32_t label = 0;
  rdtp_args a = {.tokens = 8,
                 .rank_tokens = rows,
                 .h = dummy,
                 .labels = &label,
                 .w = dummy,
                 .dh = dummy,
                 .dw = dummy,
                 .sums = dummy};
  T_EXPECT_STATUS(rdtp_step(plan, &a, d.stream), LEV_ERR_MISUSE);
  size_t bytes[LEV_MEM_CLASSES];
  rdtp_plan_bytes(plan, RDTP_EVAL, bytes);
  lev_blocks blocks = {0};
  blocks.bytes[LEV_MEM_DEVICE] = bytes[LEV_MEM_DEVICE];
  T_REQUIRE_OK(lev_device_alloc(d.device, LEV_MEM_DEVICE, bytes[LEV_MEM_DEVICE], &blocks.base[LEV_MEM_DEVICE]));
  T_EXPECT_STATUS(rdtp_plan_bind(plan, RDTP_STEP, &blocks), LEV_ERR_CAPACITY);
  T_EXPECT_OK(rdtp_plan_bind(plan, RDTP_EVAL, &blocks));
  T_EXPECT_STATUS(rdtp_step(plan, &a, d.stream), LEV_ERR_MISUSE);
  T_EXPECT_OK(rdtp_eval(plan, &a, d.stream));
  rows[1] = 9;
  T_EXPECT_STATUS(rdtp_eval(plan, &a, d.stream), LEV_ERR_CAPACITY);
  rows[1] = 4, rows[0] = 7;
  T_EXPECT_STATUS(rdtp_eval(plan, &a, d.stream), LEV_ERR_ARG);
  rows[0] = 8, a.h = NULL;
  T_EXPECT_STATUS(rdtp_eval(plan, &a, d.stream), LEV_ERR_ARG);
  a.h = dummy, a.sums = NULL;
  T_EXPECT_STATUS(rdtp_eval(plan, &a, d.stream), LEV_ERR_ARG);
  a.sums = dummy, a.rank_tokens = NULL;
  int64_t calls = lev_comm_calls(d.comm);
  T_EXPECT_OK(rdtp_eval(plan, &a, d.stream));
  T_EXPECT(lev_comm_calls(d.comm) > calls);
  rdtp_destroy(plan);
  dry_close(&d);
}

static const rig_case cases[] = {
    {.ranks = 3,
     .hidden = 6,
     .vocab = 31,
     .tokens = {9, 0, 4},
     .dtype = LEV_BF16,
     .rows = 4,
     .cols = 5,
     .branch = RDTP_MOVE_WEIGHTS},
    {.ranks = 3,
     .hidden = 6,
     .vocab = 31,
     .tokens = {9, 0, 4},
     .dtype = LEV_BF16,
     .rows = 4,
     .cols = 5,
     .branch = RDTP_MOVE_ACTIVATIONS},
    {.ranks = 3, .hidden = 6, .vocab = 31, .tokens = {9, 0, 4}, .dtype = LEV_BF16, .rows = 4, .one_pass = true},
    {.ranks = 3, .hidden = 6, .vocab = 31, .tokens = {9, 0, 4}, .dtype = LEV_BF16, .schedule = RDTP_PLAIN},
    {.ranks = 1, .hidden = 6, .vocab = 31, .tokens = {9}, .dtype = LEV_F32, .rows = 4, .cols = 5},
};
#define N_CASES ((int)(sizeof cases / sizeof *cases))

T_TEST(rdtp_dry_events_equal_cpu_events) {
  for (int i = 0; i < N_CASES; ++i)
    for (int phase = RDTP_STEP; phase <= RDTP_EVAL; ++phase) {
      rig cpu, dry_rig;
      if (rig_open(&cpu, &cases[i]) && rig_open(&dry_rig, &cases[i])) {
        rig_run(&cpu, (rdtp_phase)phase, t_backend());
        rig_run(&dry_rig, (rdtp_phase)phase, LEV_BACKEND_DRY);
        for (int r = 0; r < cases[i].ranks; ++r) {
          const lev_trace *a = cpu.rank[r].trace, *b = dry_rig.rank[r].trace;
          T_EXPECT_EQ_I64(lev_trace_count(a), lev_trace_count(b));
          T_EXPECT(lev_trace_count(a) > 0);
          for (int64_t e = 0; e < lev_trace_count(a) && !t_failed(); ++e) {
            const lev_trace_event *x = lev_trace_at(a, e), *y = lev_trace_at(b, e);
            T_EXPECT_MSG(x->kind == y->kind && x->cls == y->cls && x->bytes == y->bytes &&
                             strcmp(lev_trace_name(a, x->name), lev_trace_name(b, y->name)) == 0,
                         "case %d rank %d event %lld differs: %s / %s", i, r, (long long)e, lev_trace_name(a, x->name),
                         lev_trace_name(b, y->name));
          }
        }
      }
      rig_close(&cpu);
      rig_close(&dry_rig);
    }
}

/* Every collective of rank 1 fails in turn: that rank reports it, nobody hangs. */
T_TEST(rdtp_failing_collectives) {
  for (int i = 0; i < 4; ++i)
    for (int64_t n = 1, seen = 1; n <= seen && !t_failed(); ++n) {
      rig r;
      if (rig_open(&r, &cases[i])) {
        r.rank[1].fault.fail_at[LEV_FAULT_COLLECTIVE] = n;
        rig_run(&r, RDTP_STEP, t_backend());
        bool hit = r.rank[1].fault.seen[LEV_FAULT_COLLECTIVE] >= n;
        T_EXPECT_MSG(!hit || r.rank[1].status != LEV_OK, "case %d: failing collective %lld went unnoticed", i,
                     (long long)n);
        if (n == 1) T_EXPECT(hit);
        seen = hit ? n + 1 : 0;
      }
      rig_close(&r);
    }
}
