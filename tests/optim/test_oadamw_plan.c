/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes, buckets, events, budgets and errors of the AdamW plan. */
#include <math.h>
#include <string.h>

#include "common/hostmem.h"
#include "tests/optim/oadamw_rig.h"

static oadamw_config numbered_config(int i) {
  oadamw_config c = oadamw_rig_config(i % 2 ? LEV_BF16 : LEV_F32, i % 3 ? LEV_F32 : LEV_BF16);
  c.placement = (oadamw_placement)(i % 3);
  c.bucket = 50 + 31 * i;
  c.slots = 1 + i % 4, c.workers = 1 + i % 2;
  c.schedule = i == 7 ? OADAMW_PLAIN : OADAMW_BOUNDED;
  return c;
}
enum { N_CONFIGS = 9 };

static size_t up(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

T_TEST(oadamw_planned_bytes_are_ledger_bytes) {
  for (int i = 0; i < N_CONFIGS; ++i) {
    oadamw_config c = numbered_config(i);
    oadamw_rig r = {0};
    if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, OADAMW_RIG_SHARD, 0) && T_EXPECT_OK(oadamw_rig_run(&r, 1, 2))) {
      size_t n = 650, size = (size_t)oadamw_bucket_size(r.plan), slots = (size_t)c.slots;
      bool plain = c.schedule == OADAMW_PLAIN, gpu = !plain && c.placement != OADAMW_CPU,
           cpu = !plain && c.placement != OADAMW_GPU;
      size_t stage = up(size * lev_dtype_bytes(c.param_dtype)) + up(size * lev_dtype_bytes(c.grad_dtype));
      size_t device = (plain ? 3 * up(n * 4) : 0) + (gpu ? 3 * slots * up(size * 4) : 0);
      size_t pinned = (plain ? 0 : 3 * up(n * 4)) + (cpu ? slots * stage : 0);
      T_EXPECT_EQ_I64(oadamw_count(r.plan), n);
      T_EXPECT_EQ_I64(lev_ledger_peak(r.ledger, LEV_MEM_DEVICE), device);
      T_EXPECT_EQ_I64(lev_ledger_peak(r.ledger, LEV_MEM_PINNED), pinned);
      T_EXPECT_EQ_I64(lev_ledger_peak(r.ledger, LEV_MEM_HOST), 0);
      T_EXPECT_EQ_I64(lev_ledger_tag_peak(r.ledger, LEV_MEM_DEVICE, "oadamw.slots"), gpu ? device : 0);
      T_EXPECT_EQ_I64(lev_ledger_tag_peak(r.ledger, LEV_MEM_PINNED, "oadamw.staging"), cpu ? slots * stage : 0);
      T_EXPECT_EQ_I64(lev_ledger_tag_peak(r.ledger, plain ? LEV_MEM_DEVICE : LEV_MEM_PINNED, "oadamw.exp_avg_sq"),
                      up(n * 4));
    }
    oadamw_rig_close(&r);
  }
}

/* Device bytes do not follow the parameter count. */
T_TEST(oadamw_device_bytes_are_flat) {
  lev_device *device = NULL;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_DRY}, &device));
  for (int64_t n = 1 << 20; n <= (int64_t)1 << 36; n <<= 4) {
    oadamw_segment seg = {.offset = 0, .count = n, .weight_decay = 0, .lr_scale = 1};
    oadamw_config c = oadamw_rig_config(LEV_BF16, LEV_BF16);
    c.segments = &seg, c.n_segments = 1, c.bucket = 1 << 18;
    oadamw_plan *plan = NULL;
    size_t bytes[LEV_MEM_CLASSES];
    if (T_EXPECT_OK(oadamw_plan_create(device, &c, &plan))) {
      oadamw_plan_bytes(plan, OADAMW_STEP, bytes);
      T_EXPECT_EQ_I64(bytes[LEV_MEM_DEVICE], (size_t)2 * 3 * 4 << 18);
      oadamw_plan_bytes(plan, OADAMW_PERSISTENT, bytes);
      T_EXPECT_EQ_I64(bytes[LEV_MEM_PINNED], 12 * n);
    }
    oadamw_destroy(plan);
  }
  lev_device_close(device);
}

T_TEST(oadamw_buckets_are_even) {
  lev_device *device = NULL;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_DRY}, &device));
  for (int64_t bucket = 1; bucket <= 700; bucket += bucket < 10 ? 1 : 23) {
    oadamw_config c = oadamw_rig_config(LEV_F32, LEV_F32);
    c.bucket = bucket;
    oadamw_plan *plan = NULL;
    if (T_EXPECT_OK(oadamw_plan_create(device, &c, &plan))) {
      int64_t unit = bucket >= 64 ? 64 : 1, cap = bucket / unit * unit, units = (650 + unit - 1) / unit;
      int64_t want = bucket >= 650 ? 1 : (units * unit + cap - 1) / cap;
      T_EXPECT_EQ_I64(oadamw_buckets(plan), want);
      T_EXPECT(oadamw_bucket_size(plan) <= bucket);
      T_EXPECT(oadamw_bucket_size(plan) * want < 650 + unit * want); /* no bucket is longer than its share */
    }
    oadamw_destroy(plan);
  }
  lev_device_close(device);
}

T_TEST(oadamw_bind_refuses_one_unit_less) {
  oadamw_config c = oadamw_rig_config(LEV_F32, LEV_BF16);
  c.placement = OADAMW_SPLIT, c.bucket = 100;
  lev_device *device = NULL;
  oadamw_plan *plan = NULL;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &device));
  if (T_EXPECT_OK(oadamw_plan_create(device, &c, &plan))) {
    for (int phase = 0; phase < OADAMW_PHASES; ++phase) {
      size_t bytes[LEV_MEM_CLASSES];
      lev_blocks blocks = {{NULL}, {0}};
      int cls = phase == OADAMW_STEP ? LEV_MEM_DEVICE : LEV_MEM_PINNED;
      oadamw_plan_bytes(plan, (oadamw_phase)phase, bytes);
      T_EXPECT(bytes[cls] > 0);
      T_EXPECT_OK(lev_device_alloc(device, (lev_mem)cls, bytes[cls], &blocks.base[cls]));
      blocks.bytes[cls] = bytes[cls] - LEV_ALIGN;
      T_EXPECT_STATUS(oadamw_plan_bind(plan, (oadamw_phase)phase, &blocks), LEV_ERR_CAPACITY);
      blocks.bytes[cls] = bytes[cls];
      T_EXPECT_OK(oadamw_plan_bind(plan, (oadamw_phase)phase, &blocks));
      T_EXPECT_STATUS(oadamw_plan_bind(plan, (oadamw_phase)phase, &blocks),
                      phase == OADAMW_STEP ? LEV_OK : LEV_ERR_MISUSE);
    }
  }
  oadamw_destroy(plan);
  lev_device_close(device);
}

T_TEST(oadamw_dry_run_lists_the_same_events) {
  for (int i = 0; i < N_CONFIGS; ++i) {
    oadamw_config c = numbered_config(i);
    oadamw_rig r[2];
    memset(r, 0, sizeof r);
    bool ok = oadamw_rig_open(&r[0], LEV_BACKEND_CPU, &c, OADAMW_RIG_SHARD, 0) &&
              oadamw_rig_open(&r[1], LEV_BACKEND_DRY, &c, OADAMW_RIG_SHARD, 0);
    for (int b = 0; b < 2 && ok; ++b) ok = T_EXPECT_OK(oadamw_rig_run(&r[b], 1, 2));
    if (ok) {
      T_EXPECT_EQ_I64(lev_trace_count(r[1].trace), lev_trace_count(r[0].trace));
      T_EXPECT(lev_trace_count(r[0].trace) > 5);
      for (int64_t e = 0; e < lev_trace_count(r[0].trace) && !t_failed(); ++e) {
        const lev_trace_event *x = lev_trace_at(r[0].trace, e), *y = lev_trace_at(r[1].trace, e);
        T_EXPECT(x->kind == y->kind && x->cls == y->cls && x->bytes == y->bytes);
        T_EXPECT(strcmp(lev_trace_name(r[0].trace, x->name), lev_trace_name(r[1].trace, y->name)) == 0);
      }
      for (int m = 0; m < LEV_MEM_CLASSES; ++m)
        T_EXPECT(lev_ledger_peak(r[0].ledger, (lev_mem)m) == lev_ledger_peak(r[1].ledger, (lev_mem)m));
    }
    oadamw_rig_close(&r[0]);
    oadamw_rig_close(&r[1]);
  }
}

/* Traffic per step: 3a in and 3a out per element (gpu), one gradient out and one parameter in (cpu). */
T_TEST(oadamw_moves_the_stated_bytes) {
  for (int placement = OADAMW_GPU; placement <= OADAMW_CPU; ++placement) {
    oadamw_config c = oadamw_rig_config(LEV_BF16, LEV_F32);
    c.placement = (oadamw_placement)placement, c.bucket = 90;
    oadamw_rig r = {0};
    if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, OADAMW_RIG_SHARD, 0)) {
      T_EXPECT_OK(oadamw_rig_run(&r, 1, 1));
      uint64_t moved = 0;
      for (int64_t e = 0; e < lev_trace_count(r.trace); ++e) {
        const lev_trace_event *x = lev_trace_at(r.trace, e);
        if (x->kind == LEV_EV_COPY && strncmp(lev_trace_name(r.trace, x->name), "oadamw.", 7) == 0) moved += x->bytes;
      }
      T_EXPECT_EQ_I64(moved, placement == OADAMW_GPU ? 650 * 24 : 650 * 6);
    }
    oadamw_rig_close(&r);
  }
}

T_TEST(oadamw_split_takes_its_share) {
  static const double shares[] = {0, 0.25, 0.5, 0.7, 1};
  for (size_t k = 0; k < sizeof shares / sizeof *shares; ++k) {
    oadamw_config c = oadamw_rig_config(LEV_F32, LEV_F32);
    c.placement = OADAMW_SPLIT, c.bucket = 65, c.cpu_share = shares[k]; /* 11 buckets */
    oadamw_rig r = {0};
    if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, OADAMW_RIG_SHARD, 0)) {
      T_EXPECT_OK(oadamw_rig_run(&r, 1, 1));
      int gpu = 0;
      for (int64_t e = 0; e < lev_trace_count(r.trace); ++e) {
        const lev_trace_event *x = lev_trace_at(r.trace, e);
        gpu += x->kind == LEV_EV_COPY && strcmp(lev_trace_name(r.trace, x->name), "oadamw.master.in") == 0;
      }
      T_EXPECT_EQ_I64(oadamw_buckets(r.plan), 11);
      T_EXPECT_EQ_I64(gpu, 11 - (int)floor(11 * shares[k] + 1e-9));
    }
    oadamw_rig_close(&r);
  }
}

T_TEST(oadamw_steps_allocate_nothing) {
  oadamw_config c = numbered_config(2);
  oadamw_rig r = {0};
  if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, OADAMW_RIG_SHARD, 0)) {
    lev_heap_stats before, after;
    T_EXPECT_OK(oadamw_rig_run(&r, 1, 2));
    lev_heap_read(LEV_HEAP_PLAN, &before);
    T_EXPECT_OK(oadamw_rig_run(&r, 3, 40));
    lev_heap_read(LEV_HEAP_PLAN, &after);
    T_EXPECT_EQ_I64(after.calls, before.calls);
  }
  oadamw_rig_close(&r);
}

/* ---- budget ---- */

T_TEST(oadamw_bucket_follows_the_budget) {
  lev_device *device = NULL;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_DRY}, &device));
  for (size_t budget = 0; budget <= 20000; budget += 500) {
    oadamw_config c = oadamw_rig_config(LEV_F32, LEV_F32);
    c.budget = budget, c.slots = 2;
    oadamw_plan *plan = NULL;
    if (budget < 2 * 3 * 256) {
      T_EXPECT_STATUS(oadamw_plan_create(device, &c, &plan), LEV_ERR_BUDGET);
      T_EXPECT_MSG(strstr(lev_detail(), "1536") != NULL, "detail: %s", lev_detail());
      continue;
    }
    if (T_EXPECT_OK(oadamw_plan_create(device, &c, &plan))) {
      size_t bytes[LEV_MEM_CLASSES];
      oadamw_plan_bytes(plan, OADAMW_STEP, bytes);
      T_EXPECT(bytes[LEV_MEM_DEVICE] > 0 && bytes[LEV_MEM_DEVICE] <= budget);
      /* No larger bucket would have needed fewer buckets within the budget. */
      int64_t more = oadamw_buckets(plan) - 1;
      if (more > 0) T_EXPECT((size_t)(2 * 3 * 4 * 64 * lev_ceil_div(lev_ceil_div(650, 64), more)) > budget);
    }
    oadamw_destroy(plan);
  }
  oadamw_config c = oadamw_rig_config(LEV_F32, LEV_F32);
  c.bucket = 650, c.budget = 2 * 3 * 2816 - 1;
  T_EXPECT_STATUS(oadamw_supports(&c), LEV_ERR_BUDGET);
  T_EXPECT_MSG(strstr(lev_detail(), "is 640") && strstr(lev_detail(), "16896"), "detail: %s", lev_detail());
  ++c.budget;
  T_EXPECT_OK(oadamw_supports(&c));
  c.budget = 0;
  c.placement = OADAMW_CPU; /* uses no device bytes */
  T_EXPECT_OK(oadamw_supports(&c));
  c.schedule = OADAMW_PLAIN;
  T_EXPECT_STATUS(oadamw_supports(&c), LEV_ERR_BUDGET);
  c.budget = 3 * 2816;
  T_EXPECT_OK(oadamw_supports(&c));
  lev_device_close(device);
}

/* ---- errors and edges ---- */

T_TEST(oadamw_rejects_bad_configs) {
  oadamw_config good = oadamw_rig_config(LEV_F32, LEV_F32), c;
  T_EXPECT_OK(oadamw_supports(&good));
#define REJECT(change, status)                                                                                         \
  do {                                                                                                                 \
    c = good;                                                                                                          \
    change;                                                                                                            \
    T_EXPECT_STATUS(oadamw_supports(&c), status);                                                                      \
  } while (0)
  REJECT(c.size = 1, LEV_ERR_ARG);
  REJECT(c.n_segments = -1, LEV_ERR_ARG);
  REJECT(c.segments = NULL, LEV_ERR_ARG);
  REJECT(c.bucket = -1, LEV_ERR_ARG);
  REJECT(c.slots = 0, LEV_ERR_ARG);
  REJECT(c.slots = OADAMW_SLOTS_MAX + 1, LEV_ERR_ARG);
  REJECT(c.workers = 0, LEV_ERR_ARG);
  REJECT(c.cpu_share = NAN, LEV_ERR_ARG);
  REJECT(c.beta1 = 1, LEV_ERR_ARG);
  REJECT(c.beta2 = -0.1, LEV_ERR_ARG);
  REJECT(c.eps = NAN, LEV_ERR_ARG);
  REJECT(c.grad_dtype = LEV_F64, LEV_ERR_UNSUPPORTED);
  REJECT(c.param_dtype = LEV_I32, LEV_ERR_UNSUPPORTED);
  REJECT(c.simd = OADAMW_SIMDS, LEV_ERR_UNSUPPORTED);
  oadamw_segment two[2] = {{0, 10, 0, 1}, {9, 5, 0, 1}};
  REJECT((c.segments = two, c.n_segments = 2), LEV_ERR_ARG);
  two[1].offset = 10;
  c.segments = two, c.n_segments = 2;
  T_EXPECT_OK(oadamw_supports(&c));
  two[1].count = -1;
  T_EXPECT_STATUS(oadamw_supports(&c), LEV_ERR_ARG);
  two[1].count = INT64_MAX - 5;
  T_EXPECT_STATUS(oadamw_supports(&c), LEV_ERR_ARG);
  two[1].count = 1, two[1].weight_decay = INFINITY;
  T_EXPECT_STATUS(oadamw_supports(&c), LEV_ERR_ARG);
}

T_TEST(oadamw_misuse_is_refused) {
  oadamw_config c = oadamw_rig_config(LEV_F32, LEV_F32);
  oadamw_rig r = {0};
  lev_device *device = NULL;
  oadamw_plan *plan = NULL;
  lev_stream *s = NULL;
  oadamw_state_view view;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &device));
  float x[OADAMW_RIG_SHARD] = {0};
  oadamw_step_args args = {.params = x, .grads = x, .lr = 1, .step = 1, .grad_scale = 1};
  if (T_EXPECT_OK(oadamw_plan_create(device, &c, &plan)) && T_EXPECT_OK(lev_stream_create(device, "s", &s))) {
    T_EXPECT_STATUS(oadamw_init(plan, x, s), LEV_ERR_MISUSE);
    T_EXPECT_STATUS(oadamw_step(plan, &args, s), LEV_ERR_MISUSE);
    T_EXPECT_STATUS(oadamw_state(plan, s, &view), LEV_ERR_MISUSE);
  }
  oadamw_destroy(plan);
  lev_device_close(device);
  if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, OADAMW_RIG_SHARD, 0)) {
    args.params = r.params, args.grads = r.grads;
    T_EXPECT_STATUS(oadamw_step(r.plan, &args, r.compute), LEV_ERR_MISUSE); /* step phase not bound */
    T_EXPECT_OK(oadamw_rig_run(&r, 1, 1));
    args.step = 0;
    T_EXPECT_STATUS(oadamw_step(r.plan, &args, r.compute), LEV_ERR_ARG);
    args.step = 2, args.grads = NULL;
    T_EXPECT_STATUS(oadamw_step(r.plan, &args, r.compute), LEV_ERR_ARG);
  }
  oadamw_rig_close(&r);
}

/* A rank whose shard is empty does every call and moves nothing. */
T_TEST(oadamw_empty_shard) {
  static const oadamw_segment none[2] = {{5, 0, 0.1, 1}, {5, 0, 0.1, 1}};
  for (int k = 0; k < 8; ++k) {
    oadamw_config c = oadamw_rig_config(LEV_BF16, LEV_F32);
    c.segments = k % 2 ? none : NULL, c.n_segments = k % 2 ? 2 : 0;
    c.placement = (oadamw_placement)(k / 2 % 3);
    c.schedule = k >= 6 ? OADAMW_PLAIN : OADAMW_BOUNDED;
    oadamw_rig r = {0};
    if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, 0, 0)) {
      T_EXPECT_OK(oadamw_rig_run(&r, 1, 2));
      oadamw_state_view view;
      T_EXPECT_OK(oadamw_state(r.plan, r.compute, &view));
      T_EXPECT_EQ_I64(view.count, 0);
      T_EXPECT_EQ_I64(oadamw_buckets(r.plan), 0);
      T_EXPECT_EQ_I64(lev_ledger_peak(r.ledger, LEV_MEM_DEVICE) + lev_ledger_peak(r.ledger, LEV_MEM_PINNED), 0);
      oadamw_step_args args = {.lr = 1, .step = 1, .grad_scale = 1};
      T_EXPECT_OK(oadamw_step(r.plan, &args, r.compute));
    }
    oadamw_rig_close(&r);
  }
}

/* The n-th copy fails, for every n: an error comes back, nothing hangs, nothing leaks. */
T_TEST(oadamw_failed_copies_surface) {
  for (int placement = OADAMW_GPU; placement <= OADAMW_SPLIT; ++placement) {
    oadamw_config c = oadamw_rig_config(LEV_F32, LEV_F32);
    c.placement = (oadamw_placement)placement, c.bucket = 300;
    int64_t copies = 1;
    for (int64_t n = 0; n <= copies; ++n) {
      oadamw_rig r = {0};
      if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, OADAMW_RIG_SHARD, 0)) {
        r.fault.seen[LEV_FAULT_COPY] = 0;
        r.fault.fail_at[LEV_FAULT_COPY] = n;
        T_EXPECT_MSG((oadamw_rig_run(&r, 1, 1) != LEV_OK) == (n > 0), "copy %d of %d", (int)n, (int)copies);
        if (n == 0) copies = r.fault.seen[LEV_FAULT_COPY];
      }
      oadamw_rig_close(&r);
    }
    T_EXPECT(copies > 8);
  }
}
