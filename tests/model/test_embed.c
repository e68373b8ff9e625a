/* SPDX-License-Identifier: Apache-2.0 */
/* The vocabulary-sharded embedding against a lookup in the whole table. */
#include "harness/model/embed.h"

#include <stdlib.h>
#include <string.h>

#include "common/rng.h"
#include "harness/model/embed_ops.h"
#include "tests/backend.h"
#include "tests/model/ops_rig.h"
#include "tests/num.h"
#include "tests/t.h"

#define RANKS 5
#define MAX_TOKENS 40
#define MAX_VOCAB 64
#define MAX_HIDDEN 9

typedef struct embed_case {
  int ranks;
  int64_t hidden, vocab, tile, tokens[RANKS];
  lev_dtype dtype;
  uint64_t jitter;
} embed_case;

typedef struct embed_rank {
  int32_t ids[MAX_TOKENS];
  double w64[MAX_VOCAB * MAX_HIDDEN], dout64[MAX_TOKENS * MAX_HIDDEN], want[MAX_TOKENS * MAX_HIDDEN];
  double dw64[MAX_VOCAB * MAX_HIDDEN];
  /* storage of any dtype */
  double w[MAX_VOCAB * MAX_HIDDEN], out[MAX_TOKENS * MAX_HIDDEN], dout[MAX_TOKENS * MAX_HIDDEN];
  double dw[MAX_VOCAB * MAX_HIDDEN];
  lev_trace *trace;
} embed_rank;

typedef struct embed_rig {
  embed_case c;
  embed_rank *rank;
  lev_comm_hub *hub;
  lev_backend backend;
} embed_rig;

static int64_t part(const embed_case *c, int r) {
  return lev_part_size(c->vocab, c->ranks, r);
}

static int32_t pick_id(const embed_case *c, int rank, int64_t token) {
  lev_rng_key key = {t_seed(), 4, (uint32_t)rank};
  uint64_t bits = lev_rng_u64(key, (uint64_t)token);
  if (bits >> 60 == 0) return bits & 1 ? -1 : (int32_t)c->vocab; /* nobody's */
  if (bits >> 62 == 3) return 2;                                 /* one id again and again */
  return (int32_t)(bits % (uint64_t)c->vocab);
}

static bool rig_open(embed_rig *r, const embed_case *c) {
  *r = (embed_rig){.c = *c, .rank = t_alloc(RANKS * sizeof(embed_rank))};
  memset(r->rank, 0, RANKS * sizeof(embed_rank));
  lev_dtype arith = lev_dtype_arith(c->dtype);
  for (int i = 0; i < c->ranks; ++i) {
    embed_rank *k = &r->rank[i];
    num_random(c->dtype, k->w, k->w64, part(c, i) * c->hidden, 1, (uint32_t)(1 + i));
    num_random(c->dtype, k->dout, k->dout64, c->tokens[i] * c->hidden, 1, (uint32_t)(20 + i));
    num_random(arith, k->dw, k->dw64, part(c, i) * c->hidden, 1, (uint32_t)(40 + i));
    num_poison(k->out, sizeof k->out);
    for (int64_t n = 0; n < c->tokens[i]; ++n) k->ids[n] = pick_id(c, i, n);
    if (!T_EXPECT_OK(lev_trace_create(4096, &k->trace))) return false;
  }
  for (int i = 0; i < c->ranks; ++i)
    for (int64_t n = 0; n < c->tokens[i]; ++n) {
      int64_t id = r->rank[i].ids[n];
      if (id < 0 || id >= c->vocab) continue;
      int owner = (int)lev_part_of(c->vocab, c->ranks, id);
      int64_t row = (id - lev_part_begin(c->vocab, c->ranks, owner)) * c->hidden;
      for (int64_t j = 0; j < c->hidden; ++j) {
        r->rank[i].want[n * c->hidden + j] = r->rank[owner].w64[row + j];
        r->rank[owner].dw64[row + j] += r->rank[i].dout64[n * c->hidden + j];
      }
    }
  return true;
}

static void rig_close(embed_rig *r) {
  for (int i = 0; r->rank && i < r->c.ranks; ++i) lev_trace_destroy(r->rank[i].trace);
  t_free(r->rank);
}

typedef struct world {
  lev_device *device;
  lev_comm *comm;
  lev_stream *stream;
  lev_ledger *ledger;
  lev_arena *arena[LEV_MEM_CLASSES];
  embed_plan *plan;
} world;

static embed_config config_of(const embed_case *c) {
  embed_config config;
  embed_config_init(&config);
  config.max_tokens = MAX_TOKENS, config.hidden = c->hidden, config.vocab = c->vocab;
  config.dtype = c->dtype, config.tile_tokens = c->tile;
  return config;
}

static lev_status world_run(embed_rig *r, int rank, world *w) {
  embed_rank *k = &r->rank[rank];
  LEV_TRY(lev_ledger_create(k->trace, &w->ledger));
  lev_device_config dc = {.backend = r->backend, .index = t_gpu(rank), .trace = k->trace, .jitter_seed = r->c.jitter};
  LEV_TRY(lev_device_open(&dc, &w->device));
  if (r->hub)
    LEV_TRY(lev_comm_local_join(r->hub, rank, w->device, &w->comm));
  else
    LEV_TRY(lev_comm_dry_create(r->c.ranks, rank, w->device, &w->comm));
  LEV_TRY(lev_stream_create(w->device, "compute", &w->stream));
  embed_config config = config_of(&r->c);
  LEV_TRY(embed_plan_create(w->device, w->comm, &config, &w->plan));
  size_t bytes[LEV_MEM_CLASSES];
  embed_plan_bytes(w->plan, EMBED_STEP, bytes);
  void *slab;
  LEV_TRY(lev_device_alloc(w->device, LEV_MEM_DEVICE, bytes[LEV_MEM_DEVICE], &slab));
  LEV_TRY(
      lev_arena_create(w->device, w->ledger, LEV_MEM_DEVICE, slab, bytes[LEV_MEM_DEVICE], &w->arena[LEV_MEM_DEVICE]));
  lev_arena_seal(w->arena[LEV_MEM_DEVICE]);
  lev_device_seal(w->device);
  LEV_TRY(lev_fill(w->stream, slab, 0xFF, bytes[LEV_MEM_DEVICE], "test.poison"));
  LEV_TRY(lev_arena_push(w->arena[LEV_MEM_DEVICE], &w->stream, 1));
  lev_blocks blocks;
  LEV_TRY(lev_blocks_take(w->arena, true, embed_walk_step, w->plan, &blocks));
  if (r->c.ranks > 1) {
    lev_blocks less = blocks;
    less.bytes[LEV_MEM_DEVICE] -= LEV_ALIGN;
    T_EXPECT_STATUS(embed_plan_bind(w->plan, EMBED_STEP, &less), LEV_ERR_CAPACITY);
  }
  LEV_TRY(embed_plan_bind(w->plan, EMBED_STEP, &blocks));
  embed_forward_args forward = {r->c.tokens[rank], r->c.tokens, k->ids, k->w, k->out};
  LEV_TRY(embed_forward(w->plan, &forward, w->stream));
  embed_backward_args backward = {r->c.tokens[rank], r->c.tokens, k->ids, k->dout, k->dw};
  LEV_TRY(embed_backward(w->plan, &backward, w->stream));
  LEV_TRY(lev_stream_sync(w->stream));
  LEV_TRY(lev_arena_pop(w->arena[LEV_MEM_DEVICE]));
  T_EXPECT_EQ_I64(lev_ledger_peak(w->ledger, LEV_MEM_DEVICE), bytes[LEV_MEM_DEVICE]);
  return LEV_OK;
}

static void rank_main(int rank, void *ctx) {
  embed_rig *r = ctx;
  world w = {0};
  lev_status st = world_run(r, rank, &w);
  if (!T_EXPECT_OK(st) && w.comm) lev_comm_abort(w.comm);
  embed_destroy(w.plan);
  if (w.stream) lev_stream_destroy(w.stream);
  lev_comm_destroy(w.comm);
  lev_arena_destroy(w.arena[LEV_MEM_DEVICE]);
  lev_device_close(w.device);
  lev_ledger_destroy(w.ledger);
}

static void rig_run(embed_rig *r, lev_backend backend) {
  r->backend = backend;
  if (backend == LEV_BACKEND_DRY) {
    for (int i = 0; i < r->c.ranks; ++i) rank_main(i, r);
    return;
  }
  if (!T_EXPECT_OK(lev_comm_hub_create(r->c.ranks, 60, &r->hub))) return;
  t_ranks(r->c.ranks, rank_main, r);
  lev_comm_hub_destroy(r->hub);
}

static void check(const embed_case *c, double tolerance) {
  embed_rig r;
  if (rig_open(&r, c)) {
    rig_run(&r, t_backend());
    for (int i = 0; i < c->ranks; ++i) {
      NUM_CHECK(c->dtype, r.rank[i].out, r.rank[i].want, c->tokens[i], c->hidden, 0, "rows");
      NUM_CHECK(lev_dtype_arith(c->dtype), r.rank[i].dw, r.rank[i].dw64, part(c, i), c->hidden, tolerance, "dw");
    }
  }
  rig_close(&r);
}

static const embed_case base = {
    .ranks = 3, .hidden = 7, .vocab = 23, .tile = 4, .tokens = {13, 0, 21, 5, 1}, .dtype = LEV_F64};

T_TEST(embed_groups) {
  for (int ranks = 1; ranks <= RANKS; ++ranks) {
    embed_case c = base;
    c.ranks = ranks;
    check(&c, 1e-14);
  }
}

T_TEST(embed_tiles_and_small_tables) {
  const int64_t tiles[] = {0, 1, 3, 21, 1000};
  for (int i = 0; i < 5; ++i) {
    embed_case c = base;
    c.tile = tiles[i];
    check(&c, 1e-14);
    c.ranks = 5, c.vocab = 3, c.jitter = (uint64_t)i;
    check(&c, 1e-14);
  }
}

/* Rows are copied, hence exact; sums of at most MAX_TOKENS * RANKS f32 terms. */
T_TEST(embed_dtypes) {
  for (int64_t hidden = 7; hidden <= 8; ++hidden) { /* 8: rows of whole packs */
    embed_case c = base;
    c.hidden = hidden;
    check(&c, 1e-14);
    c.dtype = LEV_F32;
    check(&c, 200 * 0x1p-24);
    c.dtype = LEV_BF16;
    check(&c, 200 * 0x1p-24);
    c.ranks = 1, c.tokens[0] = MAX_TOKENS;
    check(&c, 200 * 0x1p-24);
  }
}

/* More tokens than one pass over them takes, rows in succession, rows again after others, ids of other shards: the
 * gradients have the bits of the loop over the tokens. */
static void add_case(lev_dtype dtype, int64_t hidden) {
  enum { TOKENS = 9000, ROWS = 700, BEGIN = 50 };
  ops_begin();
  lev_dtype arith = lev_dtype_arith(dtype);
  OPS_ROOM(int32_t, ids, TOKENS);
  OPS_ROOM(double, rows, TOKENS *hidden); /* storage of any dtype */
  OPS_ROOM(double, rows64, TOKENS *hidden);
  OPS_ROOM(double, dw, ROWS *hidden);
  OPS_ROOM(double, want, ROWS *hidden);
  OPS_ROOM(double, dw64, ROWS *hidden);
  for (int64_t i = 0; i < TOKENS; ++i) {
    uint64_t bits = lev_rng_u64((lev_rng_key){t_seed(), 9, 0}, (uint64_t)i);
    ids[i] = bits >> 62 == 0 ? BEGIN + 3 : bits >> 62 == 1 && i > 0 ? ids[i - 1] : (int32_t)(bits % (ROWS + 2 * BEGIN));
  }
  num_random(dtype, rows, rows64, TOKENS * hidden, 1, 50);
  num_random(arith, dw, dw64, ROWS * hidden, 1, 51);
  memcpy(want, dw, (size_t)(ROWS * hidden) * lev_dtype_bytes(arith));
  embed_add_args f = {dtype, ids, TOKENS, hidden, BEGIN, ROWS, rows, dw}, loop = f;
  loop.dw = want;
  OPS_RUN(embed_add_kernel, f);
  embed_add_kernel.cpu(&loop);
  T_EXPECT(memcmp(dw, want, (size_t)(ROWS * hidden) * lev_dtype_bytes(arith)) == 0);
}

T_TEST(embed_adds_in_the_order_of_the_tokens) {
  static const int64_t hidden[] = {9, 40, 136};
  static const lev_dtype dtypes[] = {LEV_F64, LEV_F32, LEV_BF16};
  for (size_t i = 0; i < 3; ++i)
    for (size_t d = 0; d < 3; ++d) add_case(dtypes[d], hidden[i]);
}

T_TEST(embed_dry_events_equal_real_events) {
  embed_rig cpu, dry;
  if (rig_open(&cpu, &base) && rig_open(&dry, &base)) {
    rig_run(&cpu, t_backend());
    rig_run(&dry, LEV_BACKEND_DRY);
    for (int r = 0; r < base.ranks; ++r) {
      const lev_trace *a = cpu.rank[r].trace, *b = dry.rank[r].trace;
      T_EXPECT(lev_trace_count(a) > 0);
      T_EXPECT_EQ_I64(lev_trace_count(a), lev_trace_count(b));
      for (int64_t e = 0; e < lev_trace_count(a) && !t_failed(); ++e) {
        const lev_trace_event *x = lev_trace_at(a, e), *y = lev_trace_at(b, e);
        T_EXPECT(x->kind == y->kind && x->cls == y->cls && x->bytes == y->bytes &&
                 strcmp(lev_trace_name(a, x->name), lev_trace_name(b, y->name)) == 0);
      }
    }
  }
  rig_close(&cpu);
  rig_close(&dry);
}

T_TEST(embed_errors) {
  world w = {0};
  lev_device_config dc = {.backend = LEV_BACKEND_DRY};
  T_REQUIRE_OK(lev_device_open(&dc, &w.device));
  T_REQUIRE_OK(lev_comm_dry_create(2, 0, w.device, &w.comm));
  T_REQUIRE_OK(lev_stream_create(w.device, "compute", &w.stream));
  embed_config config = config_of(&base);
  config.size = 0;
  T_EXPECT_STATUS(embed_plan_create(w.device, w.comm, &config, &w.plan), LEV_ERR_CONFIG);
  config = config_of(&base);
  config.hidden = 0;
  T_EXPECT_STATUS(embed_plan_create(w.device, w.comm, &config, &w.plan), LEV_ERR_CONFIG);
  config = config_of(&base);
  T_REQUIRE_OK(embed_plan_create(w.device, w.comm, &config, &w.plan));
  double buffer[4];
  int32_t id = 0;
  int64_t rows[2] = {1, MAX_TOKENS + 1};
  embed_forward_args f = {1, rows, &id, buffer, buffer};
  T_EXPECT_STATUS(embed_forward(w.plan, &f, w.stream), LEV_ERR_MISUSE);
  size_t bytes[LEV_MEM_CLASSES];
  embed_plan_bytes(w.plan, EMBED_STEP, bytes);
  lev_blocks blocks = {0};
  blocks.bytes[LEV_MEM_DEVICE] = bytes[LEV_MEM_DEVICE];
  T_REQUIRE_OK(lev_device_alloc(w.device, LEV_MEM_DEVICE, bytes[LEV_MEM_DEVICE], &blocks.base[LEV_MEM_DEVICE]));
  T_REQUIRE_OK(embed_plan_bind(w.plan, EMBED_STEP, &blocks));
  T_EXPECT_STATUS(embed_forward(w.plan, &f, w.stream), LEV_ERR_CAPACITY);
  rows[1] = 2, rows[0] = 2;
  T_EXPECT_STATUS(embed_forward(w.plan, &f, w.stream), LEV_ERR_ARG);
  rows[0] = 1, f.w = NULL;
  T_EXPECT_STATUS(embed_forward(w.plan, &f, w.stream), LEV_ERR_ARG);
  f.w = buffer;
  T_EXPECT_OK(embed_forward(w.plan, &f, w.stream));
  embed_destroy(w.plan);
  embed_destroy(NULL);
  lev_comm_destroy(w.comm);
  lev_device_close(w.device);
}
