/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/backend.h"
#include "tests/num.h"
#include "tests/optim/muon_rig.h"
#include "tests/t.h"

#define SHARD 2048

/* Out of order in the shard, with gaps, an empty one, tall and wide ones and vectors. */
static const muon_matrix mixed[] = {{700, 12, 20},  {5, 20, 12},  {300, 0, 7},  {301, 1, 33},  {340, 33, 1},
                                    {1000, 16, 16}, {1300, 3, 9}, {1400, 9, 3}, {1500, 10, 31}};
#define N_MIXED ((int)(sizeof mixed / sizeof *mixed))

static muon_config mixed_config(lev_dtype type) {
  muon_config c = muon_config_default();
  c.matrices = mixed, c.n_matrices = N_MIXED;
  c.param_dtype = c.grad_dtype = c.compute_dtype = type;
  return c;
}

static size_t step_bytes(const muon_plan *p) {
  size_t bytes[LEV_MEM_CLASSES];
  muon_plan_bytes(p, MUON_STEP, bytes);
  return bytes[LEV_MEM_DEVICE];
}

/* Three steps; leaves the shard's bytes, then master and momentum of every matrix, in `out`. Returns the bytes written.
 */
static size_t run(const muon_config *c, muon_rig_options options, unsigned char *out) {
  muon_rig r;
  size_t at = 0;
  if (muon_rig_open(&r, c, SHARD, options)) {
    for (int step = 1; step <= 3; ++step) T_EXPECT_OK(muon_rig_step(&r, step, 0.02, 0.7));
    at = SHARD * lev_dtype_bytes(c->param_dtype);
    memcpy(out, r.params, at);
    for (int i = 0; i < c->n_matrices; ++i) {
      void *state[2];
      T_EXPECT_OK(muon_state(r.plan, i, &state[0], &state[1]));
      size_t bytes =
          lev_bytes(c->matrices[i].rows, c->matrices[i].cols, lev_dtype_bytes(lev_dtype_arith(c->param_dtype)));
      for (int s = 0; s < 2 && bytes > 0; ++s) memcpy(out + at, state[s], bytes), at += bytes;
    }
  }
  muon_rig_close(&r);
  return at;
}

static unsigned char want[SHARD * 24], got[SHARD * 24];

T_TEST(muon_bounded_equals_plain_bit_for_bit) {
  static const lev_dtype types[][3] = {{LEV_F64, LEV_F64, LEV_F64},
                                       {LEV_F32, LEV_F32, LEV_F32},
                                       {LEV_BF16, LEV_BF16, LEV_BF16},
                                       {LEV_BF16, LEV_F32, LEV_F32}};
  for (int t = 0; t < 4; ++t) {
    muon_config c = mixed_config(LEV_F32);
    c.param_dtype = types[t][0], c.grad_dtype = types[t][1], c.compute_dtype = types[t][2];
    c.schedule = MUON_PLAIN;
    size_t bytes = run(&c, (muon_rig_options){.backend = t_backend()}, want);
    T_EXPECT(bytes > 0);
    c.schedule = MUON_BOUNDED;
    for (int slots = 1; slots <= 4; ++slots) {
      c.slots = slots;
      c.bucket_bytes = 0;
      size_t least = muon_bucket_bytes_min(&c);
      const size_t choices[] = {0, least, least + 3000, 2 * least, SIZE_MAX};
      for (int b = 0; b < 5 && !t_failed(); ++b) {
        c.bucket_bytes = choices[b];
        memset(got, 0, sizeof got);
        muon_rig_options options = {.backend = t_backend(),
                                    .jitter_seed = t == 1 && b < 2 ? t_seed() + (uint64_t)slots : 0};
        T_EXPECT_EQ_I64(bytes, run(&c, options, got));
        T_EXPECT_MSG(memcmp(want, got, bytes) == 0, "types %d, %d slots, bucket_bytes %zu differ from plain", t, slots,
                     c.bucket_bytes);
      }
    }
  }
}

T_TEST(muon_bucket_bytes_bound_the_step) {
  muon_config c = mixed_config(LEV_F32);
  lev_device *device;
  lev_device_config dry = {.backend = LEV_BACKEND_DRY};
  T_REQUIRE_OK(lev_device_open(&dry, &device));
  for (c.slots = 1; c.slots <= 5; ++c.slots) {
    c.bucket_bytes = 0;
    size_t least = muon_bucket_bytes_min(&c);
    muon_plan *p;
    int before = N_MIXED;
    for (size_t bytes = least; bytes < least + 20000; bytes += 128) {
      c.bucket_bytes = bytes;
      T_REQUIRE_OK(muon_plan_create(device, &c, &p));
      T_EXPECT(step_bytes(p) <= bytes);
      if (bytes == least) T_EXPECT_EQ_I64(step_bytes(p), least);
      T_EXPECT(muon_buckets(p) <= before); /* more bytes, fewer buckets */
      before = muon_buckets(p);
      muon_destroy(p);
    }
    T_EXPECT(before < 4);
    c.bucket_bytes = 0;
    T_REQUIRE_OK(muon_plan_create(device, &c, &p));
    T_EXPECT_EQ_I64(step_bytes(p), least);
    T_EXPECT_EQ_I64(muon_buckets(p), 4);
    muon_destroy(p);
    c.bucket_bytes = least - 1;
    char number[32];
    snprintf(number, sizeof number, "fits is %zu", least);
    T_EXPECT_STATUS(muon_plan_create(device, &c, &p), LEV_ERR_BUDGET);
    T_EXPECT_MSG(strstr(lev_detail(), number) && strstr(lev_detail(), "10 x 31"), "%s", lev_detail());
    T_EXPECT(p == NULL);
    T_EXPECT_STATUS(muon_supports(&c), LEV_ERR_BUDGET);
  }
  lev_device_close(device);
}

/* Planned bytes = ledger peaks, the arenas hold nothing more, and 256 bytes less is not enough. */
T_TEST(muon_planned_bytes_are_exact) {
  for (int schedule = MUON_BOUNDED; schedule <= MUON_PLAIN; ++schedule) {
    muon_config c = mixed_config(LEV_BF16);
    c.schedule = (muon_schedule)schedule;
    muon_rig r;
    if (muon_rig_open(&r, &c, SHARD, (muon_rig_options){.backend = t_backend()})) {
      T_EXPECT_OK(muon_rig_step(&r, 1, 0.01, 1));
      size_t keep[LEV_MEM_CLASSES], step[LEV_MEM_CLASSES];
      muon_plan_bytes(r.plan, MUON_PERSISTENT, keep);
      muon_plan_bytes(r.plan, MUON_STEP, step);
      for (int m = 0; m < LEV_MEM_CLASSES; ++m)
        T_EXPECT_EQ_I64(lev_ledger_module_peak(r.ledger, (lev_mem)m, "muon."), keep[m] + step[m]);
      T_EXPECT_EQ_I64(lev_arena_work_peak(r.arenas[LEV_MEM_DEVICE]), step[LEV_MEM_DEVICE]);
      lev_mem home = schedule == MUON_BOUNDED ? LEV_MEM_PINNED : LEV_MEM_DEVICE;
      T_EXPECT(keep[home] >= (size_t)(2 * 4 * muon_count(r.plan)) && step[LEV_MEM_PINNED] == 0);
      T_EXPECT((lev_ledger_tag_peak(r.ledger, LEV_MEM_DEVICE, "muon.slots") > 0) == (schedule == MUON_BOUNDED));
      /* persistent twice, one unit less, misaligned */
      static _Alignas(256) unsigned char memory[1 << 16];
      lev_blocks blocks = {{memory, memory, NULL}, {sizeof memory, sizeof memory, 0}};
      T_EXPECT_STATUS(muon_plan_bind(r.plan, MUON_PERSISTENT, &blocks), LEV_ERR_MISUSE);
      blocks.bytes[LEV_MEM_DEVICE] = step[LEV_MEM_DEVICE] - 1;
      T_EXPECT_STATUS(muon_plan_bind(r.plan, MUON_STEP, &blocks), LEV_ERR_CAPACITY);
      blocks = (lev_blocks){{memory + 16, memory, NULL}, {step[LEV_MEM_DEVICE], 0, 0}};
      T_EXPECT_STATUS(muon_plan_bind(r.plan, MUON_STEP, &blocks), LEV_ERR_ARG);
    }
    muon_rig_close(&r);
    if (muon_rig_open(&r, &c, SHARD, (muon_rig_options){LEV_BACKEND_CPU, 0, LEV_ALIGN}))
      T_EXPECT_STATUS(muon_rig_step(&r, 1, 0.01, 1), LEV_ERR_CAPACITY);
    muon_rig_close(&r);
  }
}

/* Every planned byte is written: in equal matrices only the rounding up of regions keeps its poison. */
T_TEST(muon_planned_bytes_are_used) {
  muon_matrix equal[4];
  for (int i = 0; i < 4; ++i) equal[i] = (muon_matrix){i * 16 * 24, 16, 24};
  muon_config c = mixed_config(LEV_F32);
  c.matrices = equal, c.n_matrices = 4;
  muon_rig r;
  if (muon_rig_open(&r, &c, 4 * 16 * 24, (muon_rig_options){.backend = LEV_BACKEND_CPU})) {
    size_t bytes = step_bytes(r.plan);
    unsigned char *memory = aligned_alloc(256, bytes);
    T_REQUIRE(memory != NULL);
    num_poison(memory, bytes);
    lev_blocks blocks = {{memory, NULL, NULL}, {bytes, 0, 0}};
    T_EXPECT_OK(muon_plan_bind(r.plan, MUON_STEP, &blocks));
    muon_rig_grads(&r, 1);
    muon_step_args args = {r.params, r.grads, 0.1, 1, 1};
    T_EXPECT_OK(muon_step(r.plan, &args, r.stream));
    T_EXPECT_OK(lev_stream_sync(r.stream));
    int64_t left = num_poisoned(LEV_F32, memory, (int64_t)(bytes / 4));
    /* slots 2 x 2 x 384 and x 2 x 384 fill 256-byte units; so do gram and square 2 x 256; partial is one f64 */
    T_EXPECT_EQ_I64(left, 64 - 2);
    free(memory);
  }
  muon_rig_close(&r);
}

T_TEST(muon_dry_run_lists_the_same_events) {
  for (int schedule = MUON_BOUNDED; schedule <= MUON_PLAIN; ++schedule) {
    muon_config c = mixed_config(LEV_F32);
    c.schedule = (muon_schedule)schedule;
    muon_rig rigs[2];
    const lev_backend backends[2] = {LEV_BACKEND_CPU, LEV_BACKEND_DRY};
    for (int i = 0; i < 2; ++i)
      if (muon_rig_open(&rigs[i], &c, SHARD, (muon_rig_options){.backend = backends[i]}))
        for (int step = 1; step <= 2; ++step) T_EXPECT_OK(muon_rig_step(&rigs[i], step, 0.02, 1));
    T_EXPECT(lev_trace_count(rigs[0].trace) > 20);
    T_EXPECT_EQ_I64(lev_trace_count(rigs[0].trace), lev_trace_count(rigs[1].trace));
    for (int64_t e = 0; e < lev_trace_count(rigs[0].trace) && !t_failed(); ++e) {
      const lev_trace_event *a = lev_trace_at(rigs[0].trace, e), *b = lev_trace_at(rigs[1].trace, e);
      const char *name = lev_trace_name(rigs[0].trace, a->name);
      if (strcmp(name, "library") == 0) continue; /* workspaces differ between backends */
      T_EXPECT(b && a->kind == b->kind && a->bytes == b->bytes && a->cls == b->cls);
      T_EXPECT(b && strcmp(name, lev_trace_name(rigs[1].trace, b->name)) == 0);
    }
    for (int i = 0; i < 2; ++i) muon_rig_close(&rigs[i]);
  }
}

static void count_slots(void *ctx, const lev_region *region) {
  size_t *sums = ctx;
  sums[0] += region->bytes;
  sums[1] += strcmp(region->tag, "muon.slots") == 0;
}

T_TEST(muon_regions_add_up) {
  muon_config c = mixed_config(LEV_F32);
  c.slots = 3;
  lev_device *device;
  lev_device_config dry = {.backend = LEV_BACKEND_DRY};
  muon_plan *p = NULL;
  T_REQUIRE_OK(lev_device_open(&dry, &device));
  if (T_EXPECT_OK(muon_plan_create(device, &c, &p))) {
    size_t sums[2] = {0};
    muon_plan_regions(p, MUON_STEP, count_slots, sums);
    T_EXPECT_EQ_I64(sums[0], step_bytes(p));
    T_EXPECT_EQ_I64(sums[1], 3);
    T_EXPECT(muon_flops(p) > 5 * 4 * 16 * 16 * 16);
    muon_destroy(p);
    c.set = MUON_CUBIC; /* needs no square of the Gram matrix */
    T_EXPECT_OK(muon_plan_create(device, &c, &p));
    T_EXPECT_EQ_I64(step_bytes(p), sums[0] - 16 * 16 * 4);
  }
  muon_destroy(p);
  lev_device_close(device);
}

T_TEST(muon_without_matrices) {
  const muon_matrix empty[2] = {{0, 0, 5}, {9, 4, 0}};
  for (int n = 0; n <= 2; n += 2) {
    muon_config c = mixed_config(LEV_F32);
    c.matrices = n ? empty : NULL, c.n_matrices = n, c.bucket_bytes = 1;
    T_EXPECT_EQ_I64(muon_bucket_bytes_min(&c), 0);
    muon_rig r;
    if (muon_rig_open(&r, &c, 64, (muon_rig_options){.backend = LEV_BACKEND_CPU})) {
      T_EXPECT_EQ_I64(muon_count(r.plan), 0);
      T_EXPECT_EQ_I64(step_bytes(r.plan), 0);
      muon_step_args args = {NULL, NULL, 0.1, 1, 1};
      T_EXPECT_OK(muon_step(r.plan, &args, r.stream));
      void *master, *momentum;
      T_EXPECT_STATUS(muon_state(r.plan, n, &master, &momentum), LEV_ERR_ARG);
      if (n) T_EXPECT_OK(muon_state(r.plan, 1, &master, &momentum));
    }
    muon_rig_close(&r);
  }
}

/* Stop after two of four steps, carry the state over by hand, go on: the same bits. */
T_TEST(muon_resume_is_bit_equal) {
  muon_config c = mixed_config(LEV_BF16);
  muon_rig whole, first, second;
  const muon_rig_options cpu = {.backend = t_backend()};
  if (muon_rig_open(&whole, &c, SHARD, cpu) && muon_rig_open(&first, &c, SHARD, cpu)) {
    for (int step = 1; step <= 4; ++step) T_EXPECT_OK(muon_rig_step(&whole, step, 0.02, 1));
    for (int step = 1; step <= 2; ++step) T_EXPECT_OK(muon_rig_step(&first, step, 0.02, 1));
    c.bucket_bytes = SIZE_MAX; /* the state does not depend on buckets or schedule */
    c.schedule = MUON_PLAIN;
    if (muon_rig_open(&second, &c, SHARD, cpu)) {
      T_EXPECT_OK(lev_stream_sync(second.stream));
      for (int i = 0; i < N_MIXED; ++i) {
        void *from[2], *to[2];
        T_EXPECT_OK(muon_state(first.plan, i, &from[0], &from[1]));
        T_EXPECT_OK(muon_state(second.plan, i, &to[0], &to[1]));
        size_t bytes = lev_bytes(mixed[i].rows, mixed[i].cols, sizeof(float));
        for (int s = 0; s < 2 && bytes > 0; ++s) memcpy(to[s], from[s], bytes);
        for (int64_t e = 0; e < mixed[i].rows * mixed[i].cols; ++e)
          ((lev_bf16 *)second.params)[mixed[i].offset + e] = 0;
      }
      T_EXPECT_OK(muon_publish(second.plan, second.params, second.stream));
      T_EXPECT_OK(lev_stream_sync(second.stream));
      T_EXPECT(memcmp(first.params, second.params, SHARD * sizeof(lev_bf16)) == 0);
      for (int step = 3; step <= 4; ++step) T_EXPECT_OK(muon_rig_step(&second, step, 0.02, 1));
      T_EXPECT(memcmp(whole.params, second.params, SHARD * sizeof(lev_bf16)) == 0);
    }
    muon_rig_close(&second);
  }
  muon_rig_close(&whole);
  muon_rig_close(&first);
}

T_TEST(muon_refuses_bad_calls) {
  muon_config c = mixed_config(LEV_F32);
  muon_rig r;
  if (muon_rig_open(&r, &c, SHARD, (muon_rig_options){.backend = LEV_BACKEND_CPU})) {
    T_EXPECT_OK(lev_stream_sync(r.stream));
    muon_step_args args = {r.params, r.grads, 0.1, 1, 1};
    T_EXPECT_STATUS(muon_step(r.plan, &args, r.stream), LEV_ERR_MISUSE); /* step phase not bound */
    float *before = malloc(SHARD * sizeof *before);
    T_REQUIRE(before != NULL);
    memcpy(before, r.params, SHARD * sizeof *before);
    T_EXPECT_STATUS(muon_rig_step(&r, 1, NAN, 1), LEV_ERR_NUMERIC);
    T_EXPECT_STATUS(muon_rig_step(&r, 1, 0.1, INFINITY), LEV_ERR_NUMERIC);
    T_EXPECT_STATUS(muon_rig_step(&r, 0, 0.1, 1), LEV_ERR_ARG);
    T_EXPECT(memcmp(before, r.params, SHARD * sizeof *before) == 0);
    free(before);
    args.grads = NULL;
    T_EXPECT_STATUS(muon_step(r.plan, &args, r.stream), LEV_ERR_ARG);
    T_EXPECT_STATUS(muon_step(NULL, &args, r.stream), LEV_ERR_ARG);
    void *a, *b;
    T_EXPECT_STATUS(muon_state(r.plan, N_MIXED, &a, &b), LEV_ERR_ARG);
    T_EXPECT_STATUS(muon_init(r.plan, NULL, r.stream), LEV_ERR_ARG);
    muon_plan *fresh;
    T_REQUIRE_OK(muon_plan_create(r.device, &c, &fresh));
    T_EXPECT_STATUS(muon_init(fresh, r.params, r.stream), LEV_ERR_MISUSE);
    T_EXPECT_STATUS(muon_state(fresh, 0, &a, &b), LEV_ERR_MISUSE);
    muon_destroy(fresh);
    muon_destroy(NULL);
  }
  muon_rig_close(&r);
}

#define REFUSED(field, value, status)                                                                                  \
  do {                                                                                                                 \
    muon_config bad = mixed_config(LEV_F32);                                                                           \
    bad.field = value;                                                                                                 \
    T_EXPECT_STATUS(muon_supports(&bad), status);                                                                      \
  } while (0)

T_TEST(muon_refuses_bad_configs) {
  muon_config good = mixed_config(LEV_F32);
  T_EXPECT_OK(muon_supports(&good));
  T_EXPECT_STATUS(muon_supports(NULL), LEV_ERR_ARG);
  REFUSED(size, 8, LEV_ERR_ARG);
  REFUSED(matrices, NULL, LEV_ERR_ARG);
  REFUSED(n_matrices, -1, LEV_ERR_ARG);
  REFUSED(mu, 1, LEV_ERR_ARG);
  REFUSED(mu, NAN, LEV_ERR_ARG);
  REFUSED(weight_decay, -1, LEV_ERR_ARG);
  REFUSED(eps, 0, LEV_ERR_ARG);
  REFUSED(set, MUON_SETS, LEV_ERR_ARG);
  REFUSED(scale, MUON_SCALES, LEV_ERR_ARG);
  REFUSED(steps, MUON_STEPS_MAX + 1, LEV_ERR_ARG);
  REFUSED(slots, 0, LEV_ERR_ARG);
  REFUSED(slots, MUON_SLOTS_MAX + 1, LEV_ERR_ARG);
  REFUSED(param_dtype, LEV_F64, LEV_ERR_UNSUPPORTED);
  REFUSED(grad_dtype, LEV_F64, LEV_ERR_UNSUPPORTED);
  REFUSED(compute_dtype, LEV_I32, LEV_ERR_UNSUPPORTED);
  const muon_matrix overlapping[3] = {{0, 4, 4}, {100, 4, 4}, {15, 2, 2}}, negative[1] = {{-1, 4, 4}},
                    huge[1] = {{0, 2000000000, 2000000000}}, touching[3] = {{0, 4, 4}, {100, 4, 4}, {16, 2, 2}};
  muon_config c = mixed_config(LEV_F32);
  c.n_matrices = 3;
  c.matrices = touching;
  T_EXPECT_OK(muon_supports(&c));
  c.matrices = overlapping;
  T_EXPECT_STATUS(muon_supports(&c), LEV_ERR_ARG);
  T_EXPECT_EQ_I64(muon_bucket_bytes_min(&c), SIZE_MAX);
  c.n_matrices = 1, c.matrices = negative;
  T_EXPECT_STATUS(muon_supports(&c), LEV_ERR_ARG);
  c.matrices = huge; /* 4e18 elements: their bytes overflow */
  T_EXPECT_STATUS(muon_supports(&c), LEV_ERR_ARG);
}

/* The n-th copy fails: the step says so, and everything can still be taken down. */
T_TEST(muon_nth_copy_fails) {
  muon_config c = mixed_config(LEV_F32);
  int64_t copies = 0;
  for (int64_t n = 0; n == 0 || n <= copies; ++n) {
    muon_rig r;
    if (muon_rig_open(&r, &c, SHARD, (muon_rig_options){.backend = LEV_BACKEND_CPU})) {
      int64_t before = r.fault.seen[LEV_FAULT_COPY];
      r.fault.fail_at[LEV_FAULT_COPY] = n ? before + n : 0;
      T_EXPECT_STATUS(muon_rig_step(&r, 1, 0.1, 1), n ? LEV_ERR_DEVICE : LEV_OK);
      if (n == 0) copies = r.fault.seen[LEV_FAULT_COPY] - before;
    }
    muon_rig_close(&r);
  }
  T_EXPECT(copies > 16);
}

typedef struct owned {
  int owner[N_MIXED];
  float params[3][SHARD];
} owned;

/* Rank r updates the matrices it owns inside the same shard layout. */
static void owner_rank(int rank, void *ctx) {
  owned *o = ctx;
  muon_matrix mine[N_MIXED];
  muon_config c = mixed_config(LEV_F32);
  c.matrices = mine, c.n_matrices = 0;
  for (int i = 0; i < N_MIXED; ++i)
    if (o->owner[i] == rank) mine[c.n_matrices++] = mixed[i];
  muon_rig r;
  if (muon_rig_open(&r, &c, SHARD, (muon_rig_options){.backend = t_backend()})) {
    for (int step = 1; step <= 2; ++step) T_EXPECT_OK(muon_rig_step(&r, step, 0.02, 1));
    memcpy(o->params[rank], r.params, sizeof o->params[rank]);
  }
  muon_rig_close(&r);
}

T_TEST(muon_owners_together_equal_one_rank) {
  static owned o;
  T_REQUIRE_OK(muon_owners(mixed, N_MIXED, 3, o.owner));
  t_ranks(3, owner_rank, &o);
  muon_config c = mixed_config(LEV_F32);
  muon_rig r;
  if (muon_rig_open(&r, &c, SHARD, (muon_rig_options){.backend = t_backend()})) {
    for (int step = 1; step <= 2; ++step) T_EXPECT_OK(muon_rig_step(&r, step, 0.02, 1));
    for (int i = 0; i < N_MIXED; ++i) {
      size_t bytes = lev_bytes(mixed[i].rows, mixed[i].cols, sizeof(float));
      T_EXPECT(memcmp((float *)r.params + mixed[i].offset, o.params[o.owner[i]] + mixed[i].offset, bytes) == 0);
    }
  }
  muon_rig_close(&r);
}

T_TEST(muon_owners_are_balanced) {
  enum { N = 50 };
  muon_matrix m[N];
  int owner[N], again[N];
  double load[7] = {0}, top = 0;
  for (int i = 0; i < N; ++i) m[i] = (muon_matrix){0, 10 + (i * 37) % 41, 10 + (i * 11) % 23};
  T_EXPECT_OK(muon_owners(m, N, 7, owner));
  T_EXPECT_OK(muon_owners(m, N, 7, again));
  T_EXPECT(memcmp(owner, again, sizeof owner) == 0);
  for (int i = 0; i < N; ++i) {
    double n = (double)lev_min_i64(m[i].rows, m[i].cols), big = (double)lev_max_i64(m[i].rows, m[i].cols);
    T_REQUIRE(owner[i] >= 0 && owner[i] < 7);
    load[owner[i]] += 4 * big * n * n + 2 * n * n * n;
    top = fmax(top, 4 * big * n * n + 2 * n * n * n);
  }
  double lo = INFINITY, hi = 0;
  for (int r = 0; r < 7; ++r) lo = fmin(lo, load[r]), hi = fmax(hi, load[r]);
  T_EXPECT(hi - lo <= top);
  T_EXPECT_OK(muon_owners(NULL, 0, 3, NULL));
  T_EXPECT_STATUS(muon_owners(m, N, 0, owner), LEV_ERR_ARG);
}
