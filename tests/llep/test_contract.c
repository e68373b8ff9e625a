/* SPDX-License-Identifier: Apache-2.0 */
/* The module contract: planned bytes, dry run, budgets, caps, errors. */
#include <string.h>

#include "tests/llep/layer.h"

/* Runs and expects the same status from every rank, and `words` (nullable) in the detail. */
static void expect_failure(const l_case *c, lev_status want, const char *words) {
  l_data d;
  l_make(c, &d);
  l_run(&d);
  for (int r = 0; r < c->ranks; ++r) {
    T_EXPECT_MSG(d.status[r] == want, "rank %d: \"%s\", expected \"%s\"", r, lev_status_text(d.status[r]),
                 lev_status_text(want));
    if (words) T_EXPECT_MSG(strstr(d.detail[r], words), "rank %d: \"%s\" lacks \"%s\"", r, d.detail[r], words);
  }
  l_free(&d);
}

static void expect_status(const l_case *c, lev_status want) {
  expect_failure(c, want, NULL);
}

static void same_events(const lev_trace *a, const lev_trace *b) {
  int64_t n = lev_trace_count(a);
  T_EXPECT(n > 20 && lev_trace_dropped(a) == 0);
  T_EXPECT_EQ_I64(n, lev_trace_count(b));
  for (int64_t i = 0; i < n && i < lev_trace_count(b) && !t_failed(); ++i) {
    const lev_trace_event *x = lev_trace_at(a, i), *y = lev_trace_at(b, i);
    const char *xn = lev_trace_name(a, x->name), *yn = lev_trace_name(b, y->name);
    T_EXPECT_MSG(x->kind == y->kind && x->cls == y->cls && x->bytes == y->bytes && strcmp(xn, yn) == 0,
                 "event %lld: %d %s %llu, dry %d %s %llu", (long long)i, x->kind, xn, (unsigned long long)x->bytes,
                 y->kind, yn, (unsigned long long)y->bytes);
  }
}

static void dry_equals_cpu(const l_case *c) {
  l_data d;
  l_make(c, &d);
  l_run(&d);
  for (int r = 0; r < c->ranks; ++r) {
    T_EXPECT_OK(d.status[r]);
    lev_trace *dry = l_dry(c, r);
    if (!t_failed()) same_events(d.trace[r], dry);
    lev_trace_destroy(dry);
  }
  l_free(&d);
}

T_TEST(llep_dry_run_lists_the_same_events) {
  l_case c = l_small(4, 10, 3, 13);
  dry_equals_cpu(&c);
  c.cfg.schedule = LLEP_PLAIN;
  dry_equals_cpu(&c);
  c = l_small(3, 5, 2, 12); /* uneven tokens, few experts: something is lent */
  c.cfg.experts = 4, c.cfg.min_rows = 0, c.tokens[1] = 3, c.tokens[2] = 0, c.passes = 2;
  dry_equals_cpu(&c);
}

T_TEST(llep_one_unit_less_fails) {
  l_case c = l_small(2, 4, 2, 6);
  c.less = LEV_ALIGN;
  expect_status(&c, LEV_ERR_CAPACITY);
}

/* Planned bytes do not depend on the routing or on the rank, and are met to the byte (l_case_check) whatever the
 * routing. */
T_TEST(llep_adversarial_routing_stays_under_the_cap) {
  for (int routing = 0; routing < L_ROUTINGS; ++routing)
    for (int64_t slots = -1; slots <= 1; ++slots) {
      l_case c = l_small(4, 8, 2, 40);
      c.cfg.chunk_rows = 24, c.cfg.foreign_slots = slots, c.routing = (l_routing)routing;
      if (!t_failed()) l_case_check(&c, 1e-11);
    }
}

T_TEST(llep_lending_levels_the_load) {
  l_case c = l_small(4, 8, 1, 40);
  c.routing = L_SAME, c.cfg.foreign_slots = 1;
  l_data d;
  l_make(&c, &d);
  l_run(&d);
  for (int r = 0; r < c.ranks; ++r) {
    T_EXPECT_OK(d.status[r]);
    T_EXPECT(d.stats[r].native_max == 160 && d.stats[r].rows_mean == 40);
    T_EXPECT_MSG(d.stats[r].rows_max <= 42, "rows_max %g", d.stats[r].rows_max);
    T_EXPECT_EQ_I64(d.stats[r].moves, 3);
  }
  l_free(&d);
}

T_TEST(llep_plain_rows_too_few) {
  l_case c = l_small(3, 6, 2, 8);
  c.cfg.schedule = LLEP_PLAIN, c.routing = L_SAME;
  c.cfg.plain_rows = 47; /* 48 arrive at the owner */
  expect_failure(&c, LEV_ERR_CAPACITY, "receives 48 rows, plain_rows (memory.llep_plain_rows) holds 47");
  c.cfg.plain_rows = 48;
  expect_status(&c, LEV_OK);
}

T_TEST(llep_tokens_above_the_cap) {
  l_case c = l_small(3, 6, 2, 8);
  c.cfg.max_tokens = 7;
  expect_status(&c, LEV_ERR_CAPACITY);
}

/* Every collective and copy of forward and backward fails in turn on one rank: all ranks end with an error, none hangs.
 */
static void fail_each(int kind) {
  l_case c = l_small(3, 6, 1, 12);
  c.cfg.foreign_slots = 1, c.cfg.min_rows = 0, c.routing = L_ONE_EXPERT;
  c.fail_kind = kind;
  bool reached = true;
  for (c.fail_at = 1; reached && !t_failed(); ++c.fail_at) {
    l_data d;
    l_make(&c, &d);
    l_run(&d);
    reached = d.status[1] != LEV_OK;
    for (int r = 0; r < c.ranks; ++r)
      T_EXPECT_MSG((d.status[r] != LEV_OK) == reached || kind == LEV_FAULT_COPY, "event %lld: rank %d ends with \"%s\"",
                   (long long)c.fail_at, r, lev_status_text(d.status[r]));
    l_free(&d);
  }
  T_EXPECT_MSG(c.fail_at > 12, "only %lld events", (long long)c.fail_at);
}

T_TEST(llep_every_collective_fails_in_turn) {
  fail_each(LEV_FAULT_COLLECTIVE);
}
T_TEST(llep_every_copy_fails_in_turn) {
  fail_each(LEV_FAULT_COPY);
}

T_TEST(llep_bad_ids_are_refused_by_all_ranks) {
  for (int bad = 0; bad < 2; ++bad) {
    l_case c = l_small(3, 6, 2, 8);
    l_data d;
    l_make(&c, &d);
    d.ids[9] = bad ? -1 : 6;
    l_run(&d);
    for (int r = 0; r < c.ranks; ++r) T_EXPECT_STATUS(d.status[r], LEV_ERR_ARG);
    l_free(&d);
  }
}

/* ---- configuration ---- */

T_TEST(llep_configuration_errors) {
  l_case c = l_small(4, 8, 2, 16);
  llep_config ok = c.cfg, bad;
  T_EXPECT_OK(llep_supports(LEV_BACKEND_CPU, 4, &ok));
#define BAD(change)                                                                                                    \
  bad = ok, bad.change;                                                                                                \
  T_EXPECT_STATUS(llep_supports(LEV_BACKEND_CPU, 4, &bad), LEV_ERR_CONFIG);
  BAD(size = 1)
  BAD(max_tokens = 0)
  BAD(hidden = -1)
  BAD(hidden = (int64_t)1 << 40)
  BAD(top_k = 9)
  BAD(top_k = 0)
  BAD(dtype = LEV_I32)
  BAD(layers = 0)
  BAD(alpha = 0.5)
  BAD(alpha = 1e16) /* times rows it leaves int64 */
  BAD(gate = -1)
  BAD(min_rows = -1)
  BAD(min_rows = INT64_MAX)
  BAD(experts = (int64_t)1 << 62)
  BAD(foreign_slots = -2)
  BAD(foreign_slots = 9)
  T_EXPECT_MSG(strstr(lev_detail(), "foreign_slots 9: at most all 8 experts"), "%s", lev_detail());
  BAD(plain_rows = -1)
  BAD(chunk_rows = 7) /* < Ep k */
  T_EXPECT_MSG(strstr(lev_detail(), "chunk_rows 7 is outside 8 .. 2147483647"), "%s", lev_detail());
  BAD(chunk_rows = (int64_t)1 << 40)
  T_EXPECT_MSG(strstr(lev_detail(), "is outside 8 .. 2147483647"), "%s", lev_detail());
  BAD(schedule = (llep_schedule)5)
  BAD(max_tokens = (int64_t)1 << 40)
#undef BAD
  bad = ok, bad.experts = bad.foreign_slots = (int64_t)1 << 30; /* 2^32 columns */
  T_EXPECT_STATUS(llep_supports(LEV_BACKEND_CPU, 4, &bad), LEV_ERR_CONFIG);
  bad = ok, bad.experts = 25600 - 4, bad.foreign_slots = 1;
  T_EXPECT_OK(llep_supports(LEV_BACKEND_CUDA, 4, &bad));
  bad.foreign_slots = 2;
  T_EXPECT_OK(llep_supports(LEV_BACKEND_CPU, 4, &bad));
  T_EXPECT_STATUS(llep_supports(LEV_BACKEND_CUDA, 4, &bad), LEV_ERR_CONFIG);
  T_EXPECT_MSG(strstr(lev_detail(), "4 x 2 slots"), "%s", lev_detail());
  bad = ok, bad.chunk_rows = 8;
  T_EXPECT_OK(llep_supports(LEV_BACKEND_CPU, 4, &bad));
}

/* A dry plan of rank 0 for a backend (or the failure). */
static lev_status dry_plan(lev_backend target, int ranks, const llep_config *cfg, llep_info *info, size_t *bytes) {
  lev_device *device = NULL;
  lev_comm *comm = NULL;
  llep_plan *plan = NULL;
  lev_device_config dc = {.backend = LEV_BACKEND_DRY, .dry_for = target};
  size_t forward[LEV_MEM_CLASSES], backward[LEV_MEM_CLASSES];
  *info = (llep_info){0}, *bytes = 0;
  lev_status st = lev_device_open(&dc, &device);
  if (st == LEV_OK) st = lev_comm_dry_create(ranks, 0, device, &comm);
  if (st == LEV_OK) st = llep_plan_create(device, comm, cfg, &plan);
  if (st == LEV_OK) {
    *info = llep_plan_info(plan);
    llep_plan_bytes(plan, LLEP_FORWARD, forward);
    llep_plan_bytes(plan, LLEP_BACKWARD, backward);
    *bytes = lev_max_size(forward[LEV_MEM_DEVICE], backward[LEV_MEM_DEVICE]);
  }
  llep_destroy(plan);
  lev_comm_destroy(comm);
  lev_device_close(device);
  return st;
}

/* The largest cap that fits is chosen; one row more does not fit; the smallest budget works and one byte less does not.
 */
static void budget_chooses_the_cap(lev_backend target) {
  llep_config c, fixed;
  llep_info info, other;
  size_t bytes, more;
  llep_config_init(&c);
  c.max_tokens = 4096, c.hidden = 256, c.inter = 128, c.experts = 16, c.top_k = 4;
  size_t smallest = llep_smallest_budget(target, 4, &c);
  T_REQUIRE(smallest < (size_t)64 << 20);
  for (int i = 0; i < 6; ++i) {
    c.budget = smallest + (size_t)i * smallest / 3;
    T_REQUIRE_OK(dry_plan(target, 4, &c, &info, &bytes));
    T_EXPECT(bytes <= c.budget && info.chunk_rows >= 16);
    fixed = c, fixed.budget = 0, fixed.chunk_rows = info.chunk_rows + 1;
    T_REQUIRE_OK(dry_plan(target, 4, &fixed, &other, &more));
    T_EXPECT_MSG(more > c.budget, "%lld rows fit %zu too", (long long)fixed.chunk_rows, c.budget);
  }
  c.budget = smallest - 1;
  T_EXPECT_STATUS(dry_plan(target, 4, &c, &info, &bytes), LEV_ERR_BUDGET);
  c.budget = 0, c.chunk_rows = 64;
  T_REQUIRE_OK(dry_plan(target, 4, &c, &info, &bytes));
  T_EXPECT(bytes == llep_smallest_budget(target, 4, &c));
  c.budget = bytes - 1;
  T_EXPECT_STATUS(dry_plan(target, 4, &c, &info, &bytes), LEV_ERR_BUDGET);
}
T_TEST(llep_budget_chooses_the_cap) {
  budget_chooses_the_cap(LEV_BACKEND_CPU);
  budget_chooses_the_cap(LEV_BACKEND_CUDA);
}

/* Where all rows of a batch pass 2^31 - 1 no cap makes one chunk, so no cap may do with one received chunk. */
T_TEST(llep_the_largest_cap_has_two_buffers) {
  llep_config c;
  llep_config_init(&c);
  c.max_tokens = 1 << 28, c.hidden = 256, c.inter = 128, c.experts = 16, c.top_k = 4;
  c.chunk_rows = INT32_MAX;
  size_t most = llep_smallest_budget(LEV_BACKEND_CPU, 4, &c);
  c.chunk_rows = INT32_MAX - 1;
  T_EXPECT_MSG(most >= llep_smallest_budget(LEV_BACKEND_CPU, 4, &c), "%zu bytes", most);
}

/* Only llep.tables may grow with the tokens of a rank. */
static void sum_rows(void *ctx, const lev_region *region) {
  size_t *sums = ctx; /* [0] llep.tables, [1] the rest */
  sums[strcmp(region->tag, "llep.tables") != 0] += region->bytes;
}

static lev_status region_sums(const llep_config *cfg, size_t sums[2]) {
  lev_device *device = NULL;
  lev_comm *comm = NULL;
  llep_plan *plan = NULL;
  lev_device_config dc = {.backend = LEV_BACKEND_DRY};
  sums[0] = sums[1] = 0;
  lev_status st = lev_device_open(&dc, &device);
  if (st == LEV_OK) st = lev_comm_dry_create(8, 3, device, &comm);
  if (st == LEV_OK) st = llep_plan_create(device, comm, cfg, &plan);
  if (st == LEV_OK) llep_plan_regions(plan, LLEP_BACKWARD, sum_rows, sums);
  llep_destroy(plan);
  lev_comm_destroy(comm);
  lev_device_close(device);
  return st;
}

T_TEST(llep_rows_do_not_grow_with_tokens) {
  llep_config c;
  size_t few[2], many[2];
  llep_config_init(&c);
  c.hidden = 2048, c.inter = 1024, c.experts = 64, c.top_k = 8, c.chunk_rows = 8192;
  c.max_tokens = 8192;
  T_REQUIRE_OK(region_sums(&c, few));
  c.max_tokens = 1 << 20;
  T_REQUIRE_OK(region_sums(&c, many));
  T_EXPECT(many[1] == few[1]);
  T_EXPECT(many[0] > few[0] && many[0] < (size_t)256 << 20);
}

T_TEST(llep_calls_out_of_order) {
  lev_device *device = NULL;
  lev_comm *comm = NULL;
  lev_stream *stream = NULL;
  llep_plan *plan = NULL;
  lev_device_config dc = {.backend = LEV_BACKEND_DRY};
  l_case c = l_small(2, 4, 2, 6);
  lev_blocks fake;
  for (int m = 0; m < LEV_MEM_CLASSES; ++m) fake.base[m] = (void *)(uintptr_t)4096, fake.bytes[m] = SIZE_MAX;
  T_REQUIRE_OK(lev_device_open(&dc, &device));
  T_REQUIRE_OK(lev_comm_dry_create(2, 0, device, &comm));
  T_REQUIRE_OK(lev_stream_create(device, "compute", &stream));
  T_REQUIRE_OK(llep_plan_create(device, comm, &c.cfg, &plan));
  void *any = fake.base[0];
  llep_forward_args f = {.tokens = 6, .x = any, .ids = any, .probs = any, .w = any, .y = any};
  llep_backward_args b = {
      .tokens = 6, .x = any, .ids = any, .probs = any, .w = any, .dy = any, .dx = any, .dprobs = any, .dw = any};
  T_EXPECT_STATUS(llep_forward(plan, &f, stream), LEV_ERR_MISUSE);
  T_REQUIRE_OK(llep_plan_bind(plan, LLEP_FORWARD, &fake));
  T_EXPECT_STATUS(llep_forward(plan, &f, stream), LEV_ERR_MISUSE); /* persistent regions */
  T_REQUIRE_OK(llep_plan_bind(plan, LLEP_PERSISTENT, &fake));
  T_EXPECT_STATUS(llep_plan_bind(plan, LLEP_PERSISTENT, &fake), LEV_ERR_MISUSE); /* bound once */
  T_EXPECT_STATUS(llep_backward(plan, &b, stream), LEV_ERR_MISUSE);
  T_REQUIRE_OK(llep_plan_bind(plan, LLEP_BACKWARD, &fake));
  T_EXPECT_STATUS(llep_backward(plan, &b, stream), LEV_ERR_MISUSE); /* no forward yet */
  T_REQUIRE_OK(llep_plan_bind(plan, LLEP_FORWARD, &fake));
  f.layer = 1;
  T_EXPECT_STATUS(llep_forward(plan, &f, stream), LEV_ERR_ARG);
  f.layer = 0, f.y = NULL;
  T_EXPECT_STATUS(llep_forward(plan, &f, stream), LEV_ERR_ARG);
  int64_t tokens[2] = {5, 6};
  f.y = any, f.rank_tokens = tokens;
  T_EXPECT_STATUS(llep_forward(plan, &f, stream), LEV_ERR_ARG);
  f.rank_tokens = NULL;
  T_EXPECT_OK(llep_forward(plan, &f, stream));
  T_REQUIRE_OK(llep_plan_bind(plan, LLEP_BACKWARD, &fake));
  b.tokens = 5;
  T_EXPECT_STATUS(llep_backward(plan, &b, stream), LEV_ERR_MISUSE);
  b.tokens = 6;
  T_EXPECT_OK(llep_backward(plan, &b, stream));
  llep_destroy(plan);
  lev_comm_destroy(comm);
  lev_device_close(device);
}
