/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "common/hostmem.h"
#include "tests/backend.h"
#include "tests/sco/sco_rig.h"

static sco_config config_of(int layers, size_t boundary, size_t attention) {
  sco_config c = sco_config_default();
  c.layers = layers;
  c.item_bytes[SCO_BOUNDARY] = boundary;
  c.item_bytes[SCO_ATTENTION] = attention;
  return c;
}

/* The rule of the header, written down once more without the plan's code: hosted items per kind. */
static void expected_hosted(const sco_config *c, int out[SCO_KINDS]) {
  size_t left = c->host_budget;
  for (int k = 0; k < SCO_KINDS; ++k) {
    out[k] = 0;
    size_t stride = (c->item_bytes[k] + 255) / 256 * 256;
    while (stride > 0 && c->schedule == SCO_BOUNDED && out[k] < c->layers - 2 &&
           out[k] + 1 <= c->fraction * c->layers + 1e-9 && stride <= left) {
      ++out[k];
      left -= stride;
    }
  }
}

typedef struct matrix_case {
  int layers;
  size_t boundary, attention, budget;
  double fraction;
  sco_schedule schedule;
} matrix_case;

static const matrix_case cases[] = {
    {7, 1000, 700, SIZE_MAX, 1, SCO_BOUNDED}, {7, 1000, 700, 0, 1, SCO_BOUNDED},
    {7, 1000, 700, 3 * 1024, 1, SCO_BOUNDED}, {7, 1000, 700, 3 * 1024 + 255, 1, SCO_BOUNDED},
    {7, 1000, 700, 7 * 1024, 1, SCO_BOUNDED}, {7, 1000, 700, 5 * 1024 + 2 * 768, 1, SCO_BOUNDED},
    {7, 1000, 0, SIZE_MAX, 0.5, SCO_BOUNDED}, {8, 512, 4000, SIZE_MAX, 0.25, SCO_BOUNDED},
    {9, 256, 256, SIZE_MAX, 0, SCO_BOUNDED},  {1, 300, 300, SIZE_MAX, 1, SCO_BOUNDED},
    {2, 300, 300, SIZE_MAX, 1, SCO_BOUNDED},  {3, 300, 0, SIZE_MAX, 1, SCO_BOUNDED},
    {4, 0, 300, SIZE_MAX, 1, SCO_BOUNDED},    {10, 999, 1, 2048, 0.7, SCO_BOUNDED},
    {7, 1000, 700, SIZE_MAX, 1, SCO_PLAIN},   {5, 64 * 1024, 0, 2 * 64 * 1024, 1, SCO_BOUNDED},
};
enum { N_CASES = sizeof cases / sizeof *cases };

static sco_config config_of_case(int i) {
  sco_config c = config_of(cases[i].layers, cases[i].boundary, cases[i].attention);
  c.host_budget = cases[i].budget, c.fraction = cases[i].fraction, c.schedule = cases[i].schedule;
  return c;
}

static void expect_counters(const rig *r, int n, const int hosted[SCO_KINDS]) {
  sco_counters got = sco_count(r->plan), want = {0};
  for (int k = 0; k < SCO_KINDS; ++k) {
    for (int mb = 0; mb < n; ++mb)
      for (int l = 0; l < hosted[k]; ++l) want.bytes_out += rig_item_bytes(r, mb, l, k);
    want.items_out += (int64_t)n * hosted[k];
    want.kept += hosted[k] > 0 ? 2 * n : 0;
  }
  T_EXPECT_EQ_I64(got.items_out, want.items_out);
  T_EXPECT_EQ_I64(got.items_in, want.items_out);
  T_EXPECT_EQ_I64(got.bytes_out, want.bytes_out);
  T_EXPECT_EQ_I64(got.bytes_in, want.bytes_out);
  T_EXPECT_EQ_I64(got.kept, want.kept);
}

T_TEST(sco_restores_every_byte) {
  for (int i = 0; i < N_CASES; ++i) {
    for (int prefetch = 0; prefetch < 2; ++prefetch) {
      sco_config c = config_of_case(i);
      rig r = {0};
      int hosted[SCO_KINDS];
      expected_hosted(&c, hosted);
      if (rig_open(&r, t_backend(), &c, 0)) {
        for (int k = 0; k < SCO_KINDS; ++k) T_EXPECT_EQ_I64(sco_hosted(r.plan, (sco_kind)k), hosted[k]);
        T_EXPECT_OK(rig_run(&r, 3, prefetch == 1));
        T_EXPECT_MSG(r.wrong == 0, "case %d: %lld bytes came back different", i, (long long)r.wrong);
        T_EXPECT_MSG(r.digest != 0, "case %d checked nothing", i);
        expect_counters(&r, 3, hosted);
      }
      rig_close(&r);
    }
  }
}

/* Bounded and plain give the same bytes in the same order: equal digests, from different addresses. */
T_TEST(sco_bounded_equals_plain) {
  uint64_t digest[2] = {0};
  for (int plain = 0; plain < 2; ++plain) {
    sco_config c = config_of(6, 777, 1300);
    c.host_budget = plain ? 0 : 5000;
    c.schedule = plain ? SCO_PLAIN : SCO_BOUNDED;
    rig r = {0};
    if (rig_open(&r, t_backend(), &c, 3)) T_EXPECT_OK(rig_run(&r, 2, true));
    digest[plain] = r.digest;
    rig_close(&r);
  }
  T_EXPECT(digest[0] == digest[1] && digest[0] != 0);
}

T_TEST(sco_under_jitter) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    sco_config c = config_of(7, 600, 500);
    c.host_budget = seed % 3 == 0 ? 4 * 768 : SIZE_MAX;
    rig r = {0};
    if (rig_open(&r, t_backend(), &c, seed)) T_EXPECT_OK(rig_run(&r, 2, seed % 2 == 0));
    T_EXPECT_MSG(r.wrong == 0, "jitter seed %d: %lld wrong bytes", (int)seed, (long long)r.wrong);
    rig_close(&r);
  }
}

/* ---- bytes ---- */

static void add_up(void *ctx, const lev_region *region) {
  size_t *sum = ctx;
  T_EXPECT(region->offset == sum[region->cls]);
  sum[region->cls] += region->bytes;
}

T_TEST(sco_planned_bytes_are_ledger_bytes) {
  for (int i = 0; i < N_CASES; ++i) {
    sco_config c = config_of_case(i);
    rig r = {0};
    int hosted[SCO_KINDS];
    expected_hosted(&c, hosted);
    if (rig_open(&r, t_backend(), &c, 0)) {
      size_t want[LEV_MEM_CLASSES] = {0}, got[LEV_MEM_CLASSES], listed[LEV_MEM_CLASSES] = {0};
      for (int k = 0; k < SCO_KINDS; ++k) {
        size_t stride = (c.item_bytes[k] + 255) / 256 * 256;
        want[LEV_MEM_DEVICE] += stride * (size_t)(c.layers - hosted[k]);
        want[LEV_MEM_PINNED] += stride * (size_t)hosted[k];
      }
      sco_plan_bytes(r.plan, SCO_PERSISTENT, got);
      sco_plan_regions(r.plan, SCO_PERSISTENT, add_up, listed);
      for (int m = 0; m < LEV_MEM_CLASSES; ++m) {
        T_EXPECT_EQ_I64(got[m], want[m]);
        T_EXPECT_EQ_I64(listed[m], want[m]);
        T_EXPECT_EQ_I64(lev_ledger_peak(r.ledger, (lev_mem)m), want[m]);
      }
      size_t slots = lev_ledger_tag_peak(r.ledger, LEV_MEM_DEVICE, "sco.slots");
      size_t own = lev_ledger_tag_peak(r.ledger, LEV_MEM_DEVICE, "sco.boundary") +
                   lev_ledger_tag_peak(r.ledger, LEV_MEM_DEVICE, "sco.attention");
      T_EXPECT_EQ_I64(slots + own, want[LEV_MEM_DEVICE]);
    }
    rig_close(&r);
  }
}

/* With every item hosted, the card holds two items whatever the depth. */
T_TEST(sco_device_bytes_do_not_grow_with_depth) {
  for (int layers = 3; layers < 200; layers += 49) {
    sco_config c = config_of(layers, 5000, 0);
    rig r = {0};
    size_t bytes[LEV_MEM_CLASSES];
    if (rig_open(&r, LEV_BACKEND_DRY, &c, 0)) {
      sco_plan_bytes(r.plan, SCO_PERSISTENT, bytes);
      T_EXPECT_EQ_I64(bytes[LEV_MEM_DEVICE], 2 * 5120);
      T_EXPECT_EQ_I64(bytes[LEV_MEM_PINNED], (layers - 2) * 5120);
    }
    rig_close(&r);
  }
}

T_TEST(sco_bind_refuses_one_unit_less) {
  sco_config c = config_of(6, 1000, 500);
  c.host_budget = 6000;
  lev_device *device = NULL;
  sco_plan *plan = NULL;
  void *slab[LEV_MEM_CLASSES] = {NULL};
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &device));
  size_t bytes[LEV_MEM_CLASSES];
  lev_blocks blocks = {{NULL}, {0}};
  if (T_EXPECT_OK(sco_plan_create(device, &c, &plan))) {
    sco_plan_bytes(plan, SCO_PERSISTENT, bytes);
    for (int m = 0; m < LEV_MEM_CLASSES; ++m) {
      T_EXPECT_OK(lev_device_alloc(device, (lev_mem)m, bytes[m], &slab[m]));
      blocks.base[m] = slab[m], blocks.bytes[m] = bytes[m];
    }
    for (int m = 0; m <= LEV_MEM_PINNED; ++m) {
      blocks.bytes[m] -= LEV_ALIGN;
      T_EXPECT_STATUS(sco_plan_bind(plan, SCO_PERSISTENT, &blocks), LEV_ERR_CAPACITY);
      blocks.bytes[m] += LEV_ALIGN;
    }
    void *ptr;
    lev_stream *s = NULL;
    T_EXPECT_OK(lev_stream_create(device, "compute", &s));
    T_EXPECT_STATUS(sco_write_begin(plan, 0, SCO_BOUNDARY, s, &ptr), LEV_ERR_MISUSE);
    T_EXPECT_OK(sco_plan_bind(plan, SCO_PERSISTENT, &blocks));
    T_EXPECT_STATUS(sco_plan_bind(plan, SCO_PERSISTENT, &blocks), LEV_ERR_MISUSE);
  }
  sco_plan_destroy(plan);
  lev_device_close(device);
}

/* ---- events ---- */

T_TEST(sco_dry_run_lists_the_same_events) {
  for (int i = 0; i < N_CASES; ++i) {
    rig r[2];
    memset(r, 0, sizeof r);
    sco_config c = config_of_case(i);
    bool ok = rig_open(&r[0], LEV_BACKEND_CPU, &c, 0) && rig_open(&r[1], LEV_BACKEND_DRY, &c, 0);
    for (int b = 0; b < 2 && ok; ++b) ok = T_EXPECT_OK(rig_run(&r[b], 2, true));
    if (ok) {
      T_EXPECT_EQ_I64(lev_trace_count(r[1].trace), lev_trace_count(r[0].trace));
      for (int64_t e = 0; e < lev_trace_count(r[0].trace) && !t_failed(); ++e) {
        const lev_trace_event *x = lev_trace_at(r[0].trace, e), *y = lev_trace_at(r[1].trace, e);
        T_EXPECT(x->kind == y->kind && x->cls == y->cls && x->bytes == y->bytes);
        T_EXPECT(strcmp(lev_trace_name(r[0].trace, x->name), lev_trace_name(r[1].trace, y->name)) == 0);
      }
      for (int m = 0; m < LEV_MEM_CLASSES; ++m)
        T_EXPECT(lev_ledger_peak(r[0].ledger, (lev_mem)m) == lev_ledger_peak(r[1].ledger, (lev_mem)m));
    }
    rig_close(&r[0]);
    rig_close(&r[1]);
  }
}

/* Copies leave in forward order and come back in backward order, each before its layer is read. */
T_TEST(sco_copy_order) {
  sco_config c = config_of(6, 900, 0);
  rig r = {0};
  if (rig_open(&r, t_backend(), &c, 0)) {
    T_EXPECT_OK(rig_forward(&r, 0, 6));
    void *at;
    T_EXPECT_OK(sco_read(r.plan, 5, SCO_BOUNDARY, r.compute, &at));
    T_EXPECT_OK(sco_prefetch(r.plan, 4, SCO_BOUNDARY, r.compute)); /* still in its slot: no copy */
    T_EXPECT_EQ_I64(sco_count(r.plan).items_in, 0);
    T_EXPECT_OK(sco_release(r.plan, 5, SCO_BOUNDARY, r.compute));
    T_EXPECT_OK(sco_prefetch(r.plan, 3, SCO_BOUNDARY, r.compute));
    T_EXPECT_OK(sco_prefetch(r.plan, 3, SCO_BOUNDARY, r.compute)); /* again: no second copy */
    T_EXPECT_EQ_I64(sco_count(r.plan).items_in, 1);
    T_EXPECT_OK(rig_backward(&r, 0, 5, 0, true));
    T_EXPECT_EQ_I64(sco_count(r.plan).items_in, 4);
    T_EXPECT_OK(rig_sync(&r));
    T_EXPECT_EQ_I64(r.wrong, 0);
    int order = 0;
    for (int64_t e = 0; e < lev_trace_count(r.trace); ++e) {
      const lev_trace_event *x = lev_trace_at(r.trace, e);
      if (x->kind != LEV_EV_COPY || strncmp(lev_trace_name(r.trace, x->name), "sco.", 4) != 0) continue;
      int layer = order < 4 ? order : 7 - order;
      T_EXPECT(strcmp(lev_trace_name(r.trace, x->name), order < 4 ? "sco.boundary.out" : "sco.boundary.in") == 0);
      T_EXPECT_EQ_I64(x->bytes, rig_item_bytes(&r, 0, layer, SCO_BOUNDARY));
      ++order;
    }
    T_EXPECT_EQ_I64(order, 8);
  }
  rig_close(&r);
}

T_TEST(sco_steps_allocate_nothing) {
  sco_config c = config_of(5, 700, 300);
  rig r = {0};
  if (rig_open(&r, t_backend(), &c, 0)) {
    lev_heap_stats before, after;
    T_EXPECT_OK(rig_run(&r, 2, true));
    lev_heap_read(LEV_HEAP_PLAN, &before);
    T_EXPECT_OK(rig_run(&r, 50, true));
    lev_heap_read(LEV_HEAP_PLAN, &after);
    T_EXPECT_EQ_I64(after.calls, before.calls);
    T_EXPECT_EQ_I64(after.allocated, before.allocated);
    T_EXPECT_EQ_I64(r.wrong, 0);
  }
  rig_close(&r);
}

/* ---- errors ---- */

T_TEST(sco_rejects_bad_configs) {
  sco_config c = config_of(4, 100, 0);
  T_EXPECT_OK(sco_supports(&c));
  c.size = 8;
  T_EXPECT_STATUS(sco_supports(&c), LEV_ERR_ARG);
  c = config_of(0, 100, 0);
  T_EXPECT_STATUS(sco_supports(&c), LEV_ERR_ARG);
  c = config_of(4, 100, 0);
  c.fraction = 1.5;
  T_EXPECT_STATUS(sco_supports(&c), LEV_ERR_ARG);
  c.fraction = NAN;
  T_EXPECT_STATUS(sco_supports(&c), LEV_ERR_ARG);
  c = config_of(4, SIZE_MAX / 2, 0);
  T_EXPECT_STATUS(sco_supports(&c), LEV_ERR_ARG);
  c = config_of(10, 256, 0);
  c.host_budget = 0;
  c.device_budget = 10 * 256 - 1;
  T_EXPECT_STATUS(sco_supports(&c), LEV_ERR_BUDGET);
  T_EXPECT_MSG(strstr(lev_detail(), "2560") && strstr(lev_detail(), "512"), "detail: %s", lev_detail());
  c.host_budget = 8 * 256;
  c.device_budget = 512;
  T_EXPECT_OK(sco_supports(&c));
}

T_TEST(sco_misuse_is_refused) {
  sco_config c = config_of(6, 400, 0);
  rig r = {0};
  if (rig_open(&r, t_backend(), &c, 0)) {
    sco_plan *p = r.plan;
    lev_stream *s = r.compute, *other = NULL;
    void *at;
    T_EXPECT_OK(lev_stream_create(r.device, "other", &other));
    T_EXPECT_STATUS(sco_write_begin(p, 6, SCO_BOUNDARY, s, &at), LEV_ERR_ARG);
    T_EXPECT_STATUS(sco_write_begin(p, -1, SCO_BOUNDARY, s, &at), LEV_ERR_ARG);
    T_EXPECT_STATUS(sco_write_begin(p, 0, SCO_KINDS, s, &at), LEV_ERR_ARG);
    T_EXPECT_STATUS(sco_write_begin(p, 0, SCO_BOUNDARY, s, NULL), LEV_ERR_ARG);
    T_EXPECT_STATUS(sco_write_begin(p, 0, SCO_ATTENTION, s, &at), LEV_ERR_MISUSE); /* not kept */
    T_EXPECT_STATUS(sco_write_end(p, 0, SCO_BOUNDARY, 1, s), LEV_ERR_MISUSE);
    T_EXPECT_STATUS(sco_read(p, 0, SCO_BOUNDARY, s, &at), LEV_ERR_MISUSE);
    T_EXPECT_OK(sco_write_begin(p, 0, SCO_BOUNDARY, s, &at));
    T_EXPECT_STATUS(sco_write_begin(p, 0, SCO_BOUNDARY, s, &at), LEV_ERR_MISUSE);
    T_EXPECT_STATUS(sco_write_begin(p, 2, SCO_BOUNDARY, s, &at), LEV_ERR_MISUSE); /* slot is being written */
    T_EXPECT_STATUS(sco_write_end(p, 0, SCO_BOUNDARY, 401, s), LEV_ERR_CAPACITY);
    T_EXPECT_STATUS(sco_write_end(p, 0, SCO_BOUNDARY, 400, other), LEV_ERR_MISUSE);
    T_EXPECT_OK(sco_write_end(p, 0, SCO_BOUNDARY, 400, s));
    T_EXPECT_OK(sco_reset(p));

    T_EXPECT_OK(rig_forward(&r, 0, 6));
    T_EXPECT_STATUS(sco_prefetch(p, 3, SCO_BOUNDARY, s), LEV_ERR_MISUSE); /* layer 5 not read yet */
    T_EXPECT_MSG(strstr(lev_detail(), "layer 5") != NULL, "detail: %s", lev_detail());
    T_EXPECT_STATUS(sco_release(p, 5, SCO_BOUNDARY, s), LEV_ERR_MISUSE);
    T_EXPECT_OK(sco_read(p, 5, SCO_BOUNDARY, s, &at));
    void *again = NULL;
    T_EXPECT_OK(sco_read(p, 5, SCO_BOUNDARY, s, &again));
    T_EXPECT(again == at);
    T_EXPECT_STATUS(sco_read(p, 3, SCO_BOUNDARY, s, &again), LEV_ERR_MISUSE); /* layer 5 not released */
    T_EXPECT_OK(sco_release(p, 5, SCO_BOUNDARY, s));
    T_EXPECT_STATUS(sco_release(p, 5, SCO_BOUNDARY, s), LEV_ERR_MISUSE);
    T_EXPECT_STATUS(sco_read(p, 5, SCO_BOUNDARY, s, &at), LEV_ERR_MISUSE);
    T_EXPECT_STATUS(sco_write_begin(p, 1, SCO_BOUNDARY, s, &at), LEV_ERR_MISUSE);
    T_EXPECT_OK(rig_backward(&r, 0, 5, 0, false));
    T_EXPECT_OK(sco_reset(p));
    T_EXPECT_OK(
        sco_write_begin(p, 5, SCO_BOUNDARY, s, &at)); /* last layer before layer 3: nothing on the host to evict */
    T_EXPECT_OK(sco_write_end(p, 5, SCO_BOUNDARY, 8, s));
    T_EXPECT_STATUS(sco_write_begin(p, 3, SCO_BOUNDARY, s, &at), LEV_ERR_MISUSE);
    T_EXPECT_OK(rig_sync(&r));
    T_EXPECT_EQ_I64(r.wrong, 0);
  }
  rig_close(&r);
}

/* The n-th copy fails, for every n: an error comes back, nothing hangs, nothing leaks. */
T_TEST(sco_failed_copies_surface) {
  for (int n = 1; n <= 9; ++n) {
    sco_config c = config_of(6, 400, 0);
    rig r = {0};
    if (rig_open(&r, LEV_BACKEND_CPU, &c, 0)) {
      r.fault.fail_at[LEV_FAULT_COPY] = n;
      lev_status st = rig_run(&r, 1, true);
      T_EXPECT_MSG((st != LEV_OK) == (n <= 8), "copy %d failed, run says %s", n, lev_status_text(st));
    }
    rig_close(&r);
  }
}
