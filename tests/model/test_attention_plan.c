/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes, events and errors of attention, and the mutation test of its waits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/dims.h"
#include "harness/model/attention_ops.h"
#include "tests/model/attention_rig.h"

/* ---- a plan on the dry backend ---- */

typedef struct dry_world {
  lev_device *device;
  lev_comm *comm;
  lev_stream *stream;
  attn_plan *plan;
} dry_world;

static bool dry_open(dry_world *w, int ranks, const attn_config *config) {
  *w = (dry_world){0};
  lev_device_config dc = {.backend = LEV_BACKEND_DRY};
  return T_EXPECT_OK(lev_device_open(&dc, &w->device)) &&
         T_EXPECT_OK(lev_comm_dry_create(ranks, 0, w->device, &w->comm)) &&
         T_EXPECT_OK(lev_stream_create(w->device, "compute", &w->stream)) &&
         T_EXPECT_OK(attn_plan_create(w->device, w->comm, config, &w->plan));
}

static void dry_close(dry_world *w) {
  attn_destroy(w->plan);
  lev_comm_destroy(w->comm);
  lev_device_close(w->device);
}

static attn_config config_of(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, lev_dtype dtype) {
  attn_config c;
  attn_config_init(&c);
  c.max_tokens = tokens, c.heads = heads, c.kv_heads = kv_heads, c.head_dim = dim, c.dtype = dtype;
  return c;
}

/* ---- bytes ---- */

typedef struct tag_sum {
  const char *tag;
  size_t bytes;
} tag_sum;

static void add_tag(void *ctx, const lev_region *region) {
  tag_sum *sum = ctx;
  if (strcmp(sum->tag, region->tag) == 0) sum->bytes += region->bytes;
  T_EXPECT_EQ_I64(region->bytes, lev_align_up(lev_bytes(region->rows, region->cols, lev_dtype_bytes(region->dtype))));
}

static size_t tag_bytes(const attn_plan *plan, attn_phase phase, const char *tag) {
  tag_sum sum = {tag, 0};
  attn_plan_regions(plan, phase, add_tag, &sum);
  return sum.bytes;
}

T_TEST(attention_bytes_follow_the_formula) {
  const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16};
  for (int ranks = 1; ranks <= 3; ++ranks) {
    for (int t = 0; t < 3; ++t) {
      const int64_t n = 1024, heads = 8, kv_heads = 2, d = 32;
      attn_config c = config_of(n, heads, kv_heads, d, types[t]);
      size_t b = lev_dtype_bytes(types[t]), a = lev_dtype_bytes(lev_dtype_arith(types[t]));
      size_t chunk = 2 * (size_t)(n * kv_heads * d);
      bool ring = ranks > 1, wide = types[t] == LEV_BF16;
      dry_world w;
      if (dry_open(&w, ranks, &c)) {
        for (attn_phase p = ATTN_FORWARD; p < ATTN_PHASES; ++p) {
          T_EXPECT_EQ_I64(tag_bytes(w.plan, p, "attn.kv"), ring ? 2 * chunk * b : 0);
          T_EXPECT_EQ_I64(tag_bytes(w.plan, p, "attn.acc"), ring && wide ? (size_t)(n * heads * d) * a : 0);
        }
        T_EXPECT_EQ_I64(tag_bytes(w.plan, ATTN_FORWARD, "attn.dkv"), 0);
        T_EXPECT_EQ_I64(tag_bytes(w.plan, ATTN_BACKWARD, "attn.dkv"), (ring ? 2 : wide ? 1 : 0) * chunk * a);
        T_EXPECT_EQ_I64(tag_bytes(w.plan, ATTN_FORWARD, "attn.state"), ring ? (size_t)(n * heads) * a : 0);
        size_t bytes[LEV_MEM_CLASSES];
        attn_plan_bytes(w.plan, ATTN_PERSISTENT, bytes);
        T_EXPECT_EQ_I64(bytes[LEV_MEM_DEVICE], 0);
      }
      dry_close(&w);
    }
  }
}

/* Where there is one rank and no bf16, nothing grows with the sequence. */
T_TEST(attention_scratch_is_flat) {
  size_t bytes[2][LEV_MEM_CLASSES];
  for (int i = 0; i < 2; ++i) {
    attn_config c = config_of(i == 0 ? 4096 : 1 << 20, 16, 4, 64, LEV_F32);
    dry_world w;
    if (dry_open(&w, 1, &c)) attn_plan_bytes(w.plan, ATTN_BACKWARD, bytes[i]);
    dry_close(&w);
  }
  T_EXPECT_EQ_I64(bytes[0][LEV_MEM_DEVICE], bytes[1][LEV_MEM_DEVICE]);
  T_EXPECT(bytes[0][LEV_MEM_DEVICE] > 0 && bytes[0][LEV_MEM_DEVICE] < 4 << 20);
}

/* ---- events ---- */

T_TEST(attention_dry_run_lists_the_same_events) {
  const lev_dtype types[] = {LEV_F64, LEV_BF16};
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (int t = 0; t < 2; ++t) {
      attn_case c = {.ranks = ranks, .seq = 43, .heads = 4, .kv_heads = 2, .dim = 4, .dtype = types[t]};
      attn_rig cpu, dry;
      if (!attn_rig_open(&cpu, &c) || !attn_rig_open(&dry, &c)) return;
      attn_rig_run(&cpu, t_backend());
      attn_rig_run(&dry, LEV_BACKEND_DRY);
      for (int r = 0; r < ranks; ++r) {
        const lev_trace *a = cpu.rank[r].trace, *b = dry.rank[r].trace;
        int64_t hops = 0;
        T_EXPECT_EQ_I64(lev_trace_count(a), lev_trace_count(b));
        T_EXPECT_EQ_I64(cpu.rank[r].planned, dry.rank[r].planned);
        for (int64_t e = 0; e < lev_trace_count(a) && !t_failed(); ++e) {
          const lev_trace_event *x = lev_trace_at(a, e), *y = lev_trace_at(b, e);
          hops += x->kind == LEV_EV_COLL;
          T_EXPECT(x->kind == y->kind && x->bytes == y->bytes && x->cls == y->cls &&
                   strcmp(lev_trace_name(a, x->name), lev_trace_name(b, y->name)) == 0);
        }
        T_EXPECT_EQ_I64(hops, ranks == 1 ? 0 : 2 * (ranks - 1) + 2 * ranks);
      }
      attn_rig_close(&cpu);
      attn_rig_close(&dry);
    }
  }
}

/* ---- errors ---- */

T_TEST(attention_refuses_bad_configurations) {
  attn_config good = config_of(16, 4, 2, 8, LEV_F32), c;
  T_EXPECT_OK(attn_supports(LEV_BACKEND_CPU, 2, &good));
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 0, &good), LEV_ERR_CONFIG);
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 2, NULL), LEV_ERR_CONFIG);
  c = good, c.size = 0;
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 2, &c), LEV_ERR_CONFIG);
  c = good, c.heads = 5;
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 2, &c), LEV_ERR_CONFIG);
  T_EXPECT(strstr(lev_detail(), "5 query heads") != NULL);
  c = good, c.heads = 65536;
  T_EXPECT_OK(attn_supports(LEV_BACKEND_CPU, 2, &c));
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CUDA, 2, &c), LEV_ERR_CONFIG);
  c = good, c.kv_heads = 0;
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 2, &c), LEV_ERR_CONFIG);
  c = good, c.dtype = LEV_I32;
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 2, &c), LEV_ERR_CONFIG);
  c = good, c.block_k = -1;
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 2, &c), LEV_ERR_CONFIG);
  c = good, c.max_tokens = -1;
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 2, &c), LEV_ERR_CONFIG);
  attn_plan *plan = (attn_plan *)&c;
  T_EXPECT_STATUS(attn_plan_create(NULL, NULL, &good, &plan), LEV_ERR_ARG);
  T_EXPECT(plan == NULL);
}

static void check_forward_errors(dry_world *w, const attn_forward_args *good) {
  attn_forward_args a = *good;
  T_EXPECT_OK(attn_forward(w->plan, good, w->stream));
  int64_t calls = lev_comm_calls(w->comm);
  T_EXPECT_STATUS(attn_forward(w->plan, good, NULL), LEV_ERR_ARG);
  a.seq_len = 33;
  T_EXPECT_STATUS(attn_forward(w->plan, &a, w->stream), LEV_ERR_CAPACITY);
  T_EXPECT(strstr(lev_detail(), "at most 16") != NULL);
  a.seq_len = -1;
  T_EXPECT_STATUS(attn_forward(w->plan, &a, w->stream), LEV_ERR_ARG);
  a = *good, a.k = NULL;
  T_EXPECT_STATUS(attn_forward(w->plan, &a, w->stream), LEV_ERR_ARG);
  a = *good, a.lse = NULL;
  T_EXPECT_STATUS(attn_forward(w->plan, &a, w->stream), LEV_ERR_ARG);
  a = *good, a.v_stride = 15;
  T_EXPECT_STATUS(attn_forward(w->plan, &a, w->stream), LEV_ERR_ARG);
  T_EXPECT(strstr(lev_detail(), "rows of v") != NULL);
  a = *good, a.seq_len = 0;
  T_EXPECT_OK(attn_forward(w->plan, &a, w->stream));
  attn_backward_args b = {.seq_len = 32};
  T_EXPECT_STATUS(attn_backward(w->plan, &b, w->stream), LEV_ERR_MISUSE);
  T_EXPECT_EQ_I64(lev_comm_calls(w->comm), calls);
}

T_TEST(attention_refuses_bad_calls_before_any_collective) {
  attn_config c = config_of(16, 4, 2, 8, LEV_F32);
  dry_world w;
  if (!dry_open(&w, 2, &c)) return;
  static float data[16 * 32];
  attn_forward_args good = {.seq_len = 32, .q = data, .k = data, .v = data, .o = data, .lse = data};
  T_EXPECT_STATUS(attn_forward(w.plan, &good, w.stream), LEV_ERR_MISUSE);
  size_t bytes[LEV_MEM_CLASSES];
  attn_plan_bytes(w.plan, ATTN_FORWARD, bytes);
  lev_blocks blocks = {.bytes = {[LEV_MEM_DEVICE] = bytes[LEV_MEM_DEVICE]}};
  T_EXPECT_STATUS(attn_plan_bind(w.plan, ATTN_FORWARD, &blocks), LEV_ERR_CAPACITY);
  T_EXPECT_OK(lev_device_alloc(w.device, LEV_MEM_DEVICE, bytes[LEV_MEM_DEVICE], &blocks.base[LEV_MEM_DEVICE]));
  T_EXPECT_OK(attn_plan_bind(w.plan, ATTN_FORWARD, &blocks));
  check_forward_errors(&w, &good);
  dry_close(&w);
}

/* The n-th collective of one rank fails: it reports that, and no rank hangs. */
T_TEST(attention_failing_collective_stops_every_rank) {
  attn_case c = {.ranks = 3, .seq = 30, .heads = 2, .kv_heads = 2, .dim = 4, .dtype = LEV_F64};
  for (int64_t at = 1; at <= 10; ++at) {
    attn_rig r;
    if (attn_rig_open(&r, &c)) {
      r.rank[1].fault.fail_at[LEV_FAULT_COLLECTIVE] = at;
      attn_rig_run(&r, t_backend());
      T_EXPECT_STATUS(r.rank[1].status, LEV_ERR_COMM);
      T_EXPECT(r.rank[0].status != LEV_OK && r.rank[2].status != LEV_OK);
    }
    attn_rig_close(&r);
  }
}

/* ---- waits: each one dropped in turn on one rank must show ---- */

/* Small blocks make the kernels slow beside the transfers. */
static const attn_case wait_case = {
    .ranks = 4, .seq = 120, .heads = 4, .kv_heads = 2, .dim = 16, .dtype = LEV_F64, .block_q = 2, .block_k = 2};

/* True when the outputs are right with wait number `drop` of rank 1 left out (0 = none); gives the waits seen. */
static bool play(int64_t drop, uint64_t jitter, int64_t *waits) {
  attn_case c = wait_case;
  c.jitter = jitter, c.jitter_rank = jitter % 2 == 1 ? 1 : 0;
  attn_rig r;
  bool right = true;
  if (attn_rig_open(&r, &c)) {
    r.rank[1].fault.fail_at[LEV_FAULT_DROP_WAIT] = drop;
    attn_rig_run(&r, LEV_BACKEND_CPU); /* whose streams are late at random */
    *waits = r.rank[1].fault.seen[LEV_FAULT_DROP_WAIT];
    right = attn_rig_error(&r) < 1e-11;
  }
  attn_rig_close(&r);
  return right;
}

#if !ATTN_TSAN
T_TEST(attention_dropped_wait_gives_wrong_numbers) {
  enum { TRIES = 400 }; /* most waits need one or two; a slow build may need many */
  int64_t waits = 0, ignored;
  T_EXPECT(play(0, 1, &waits));
  T_EXPECT(waits > 0);
  for (int64_t drop = 1; drop <= waits; ++drop) {
    bool caught = false;
    for (uint64_t jitter = 1; jitter <= TRIES && !caught; ++jitter) caught = !play(drop, jitter, &ignored);
    T_EXPECT_MSG(caught, "dropping wait %d of %d went unnoticed", (int)drop, (int)waits);
  }
}
#endif

/* Child of the test below. */
T_CHILD(attention_wait_mutation, value) {
  int drop;
  T_REQUIRE(sscanf(value, "%d", &drop) == 1);
  int64_t ignored;
  for (uint64_t jitter = 0; jitter < 4; ++jitter) (void)play(drop, jitter, &ignored);
}

#if ATTN_TSAN
static int run_child(int64_t drop) {
  char value[32];
  snprintf(value, sizeof value, "%d", (int)drop);
  return t_child("attention_wait_mutation", value);
}

T_TEST(attention_dropped_wait_is_a_reported_race) {
  int64_t waits = 0;
  (void)play(0, 0, &waits);
  T_EXPECT_MSG(run_child(0) == 0, "races with all waits in place");
  for (int64_t drop = 1; drop <= waits; ++drop)
    T_EXPECT_MSG(run_child(drop) != 0, "dropping wait %d of %d is not reported", (int)drop, (int)waits);
}
#endif
