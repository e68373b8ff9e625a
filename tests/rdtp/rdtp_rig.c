/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rdtp/rdtp_rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/gemm.h"
#include "common/rng.h"

static void *zalloc(int64_t n, size_t size) {
  void *p = calloc((size_t)(n > 0 ? n : 1), size);
  if (!p) abort();
  return p;
}

/* The same, reached by kernels too. */
static void *shared(int64_t n, size_t size) {
  size_t bytes = (size_t)(n > 0 ? n : 1) * size;
  return memset(t_alloc(bytes), 0, bytes);
}

rdtp_config rig_config(const rig_case *c) {
  rdtp_config config;
  rdtp_config_init(&config);
  config.max_tokens = 1;
  for (int r = 0; r < c->ranks; ++r) config.max_tokens = lev_max_i64(config.max_tokens, c->tokens[r]);
  config.hidden = c->hidden, config.vocab = c->vocab, config.dtype = c->dtype;
  config.schedule = c->schedule, config.branch = c->branch;
  config.tile_rows = c->rows, config.tile_cols = c->cols;
  config.one_pass = c->one_pass, config.budget = c->budget;
  return config;
}

static int32_t pick_label(const rig_case *c, int rank, int64_t token) {
  lev_rng_key key = {t_seed(), 1, (uint32_t)rank};
  uint64_t bits = lev_rng_u64(key, (uint64_t)token);
  int64_t border = lev_part_begin(c->vocab, c->ranks, (int64_t)(bits % (uint64_t)c->ranks));
  switch (c->labels) {
  case RIG_ALL_IGNORED:
    return RDTP_IGNORE;
  case RIG_BORDERS:
    return (int32_t)(bits >> 32 & 1 ? border : border > 0 ? border - 1 : c->vocab - 1);
  case RIG_BAD:
    if (bits >> 40 & 1) return token % 3 == 0 ? (int32_t)c->vocab : token % 3 == 1 ? -1 : INT32_MAX - (int32_t)token;
    break;
  case RIG_MIXED:
    break;
  }
  return (bits >> 33) % 5 == 0 ? RDTP_IGNORE : (int32_t)(bits % (uint64_t)c->vocab);
}

bool rig_open(rig *r, const rig_case *c) {
  *r = (rig){.c = *c};
  double scale = c->scale > 0 ? c->scale : 1;
  lev_dtype arith = lev_dtype_arith(c->dtype);
  size_t t = lev_dtype_bytes(c->dtype), a = lev_dtype_bytes(arith);
  for (int i = 0; i < c->ranks; ++i) {
    rig_rank *k = &r->rank[i];
    k->tokens = c->tokens[i];
    k->vocab_begin = lev_part_begin(c->vocab, c->ranks, i);
    k->vocab_rows = lev_part_size(c->vocab, c->ranks, i);
    int64_t nh = k->tokens * c->hidden, nw = k->vocab_rows * c->hidden;
    k->h = shared(nh, t), k->dh = shared(nh, t), k->w = shared(nw, t), k->dw = shared(nw, a);
    k->h64 = zalloc(nh, 8), k->dh64 = zalloc(nh, 8), k->w64 = zalloc(nw, 8), k->dw64 = zalloc(nw, 8);
    k->dw0 = zalloc(nw, 8);
    k->labels = shared(k->tokens, sizeof(int32_t)), k->sums = shared(RDTP_SUMS, sizeof(double));
    num_random(c->dtype, k->h, k->h64, nh, scale, (uint32_t)(10 + i));
    num_random(c->dtype, k->w, k->w64, nw, scale, (uint32_t)(30 + i));
    num_random(arith, k->dw, k->dw0, nw, 0.01, (uint32_t)(50 + i));
    for (int64_t n = 0; n < k->tokens; ++n) k->labels[n] = pick_label(c, i, n);
    if (!T_EXPECT_OK(lev_trace_create(20000, &k->trace))) return false;
  }
  rig_oracle(r);
  return true;
}

void rig_close(rig *r) {
  for (int i = 0; i < r->c.ranks; ++i) {
    rig_rank *k = &r->rank[i];
    void *plain[] = {k->h64, k->dh64, k->w64, k->dw64, k->dw0},
         *both[] = {k->h, k->dh, k->w, k->dw, k->labels, k->kept, k->sums};
    for (size_t b = 0; b < sizeof plain / sizeof *plain; ++b) free(plain[b]);
    for (size_t b = 0; b < sizeof both / sizeof *both; ++b)
      if (both[b]) t_free(both[b]);
    lev_trace_destroy(k->trace);
  }
}

static double logit(const rig *r, const double *h, int64_t v, double **row_out, double **grad_out) {
  rig *m = (rig *)r;
  int owner = (int)lev_part_of(r->c.vocab, r->c.ranks, v);
  int64_t at = (v - r->rank[owner].vocab_begin) * r->c.hidden;
  double dot = 0;
  for (int64_t j = 0; j < r->c.hidden; ++j) dot += h[j] * r->rank[owner].w64[at + j];
  *row_out = m->rank[owner].w64 + at;
  *grad_out = m->rank[owner].dw64 + at;
  return dot;
}

static void oracle_token(rig *r, rig_rank *k, int64_t n) {
  int32_t label = k->labels[n];
  if (label < 0 || label >= r->c.vocab) {
    k->sums64[2] += label != RDTP_IGNORE;
    return;
  }
  double *y = zalloc(r->c.vocab, 8), *w, *dw, top = -INFINITY, z = 0;
  const double *h = k->h64 + n * r->c.hidden;
  for (int64_t v = 0; v < r->c.vocab; ++v) y[v] = logit(r, h, v, &w, &dw), top = fmax(top, y[v]);
  for (int64_t v = 0; v < r->c.vocab; ++v) z += exp(y[v] - top);
  k->sums64[0] += top + log(z) - y[label];
  k->sums64[1] += 1;
  for (int64_t v = 0; v < r->c.vocab; ++v) {
    double g = (exp(y[v] - top) / z - (v == label)) * r->grad_scale;
    logit(r, h, v, &w, &dw);
    for (int64_t j = 0; j < r->c.hidden; ++j) k->dh64[n * r->c.hidden + j] += g * w[j], dw[j] += g * h[j];
  }
  free(y);
}

void rig_oracle(rig *r) {
  lev_dtype arith = lev_dtype_arith(r->c.dtype);
  int64_t valid = 0;
  for (int i = 0; i < r->c.ranks; ++i) {
    rig_rank *k = &r->rank[i];
    for (int64_t n = 0; n < k->tokens; ++n) valid += k->labels[n] >= 0 && k->labels[n] < r->c.vocab;
    int64_t nh = k->tokens * r->c.hidden, nw = k->vocab_rows * r->c.hidden;
    num_poison(k->dh, (size_t)nh * lev_dtype_bytes(r->c.dtype));
    for (int64_t j = 0; j < nw; ++j) lev_dtype_store(arith, k->dw, j, k->dw0[j]), k->dw64[j] = k->dw0[j];
    for (int64_t j = 0; j < nh; ++j) k->dh64[j] = 0;
    for (int s = 0; s < RDTP_SUMS; ++s) k->sums[s] = k->sums64[s] = 0.5 * s;
  }
  r->grad_scale = 1.0 / (double)valid; /* infinite when nothing counts: it must not reach any output */
  for (int i = 0; i < r->c.ranks; ++i)
    for (int64_t n = 0; n < r->rank[i].tokens; ++n) oracle_token(r, &r->rank[i], n);
}

/* What a rank thread holds. */
typedef struct rig_world {
  lev_device *device;
  lev_ledger *ledger;
  lev_comm *comm;
  lev_stream *stream;
  lev_arena *arena[LEV_MEM_CLASSES];
  rdtp_plan *plan;
  void *slab, *workspace;
} rig_world;

static lev_status world_open(rig *r, int rank, rig_world *w) {
  rig_rank *k = &r->rank[rank];
  bool dry = r->backend == LEV_BACKEND_DRY;
  LEV_TRY(lev_ledger_create(k->trace, &w->ledger));
  lev_device_config dc = {.backend = r->backend,
                          .index = t_gpu(rank),
                          .immediate = r->c.immediate,
                          .jitter_seed = r->c.jitter,
                          .trace = k->trace,
                          .fault = &k->fault};
  if (dc.jitter_seed) dc.jitter_seed += (uint64_t)rank;
  LEV_TRY(lev_device_open(&dc, &w->device));
  if (!dry)
    LEV_TRY(lev_comm_local_join(r->hub, rank, w->device, &w->comm));
  else
    LEV_TRY(lev_comm_dry_create(r->c.ranks, rank, w->device, &w->comm));
  LEV_TRY(lev_stream_create(w->device, "compute", &w->stream));
  size_t scratch = lev_gemm_workspace_bytes(dry ? t_backend() : r->backend, r->c.dtype);
  LEV_TRY(lev_device_alloc(w->device, LEV_MEM_DEVICE, scratch, &w->workspace));
  lev_stream_set_workspace(w->stream, w->workspace, scratch);
  rdtp_config config = rig_config(&r->c);
  LEV_TRY(rdtp_plan_create(w->device, w->comm, &config, &w->plan));
  size_t bytes[LEV_MEM_CLASSES];
  rdtp_plan_bytes(w->plan, r->phase, bytes);
  k->planned = bytes[LEV_MEM_DEVICE];
  LEV_TRY(lev_device_alloc(w->device, LEV_MEM_DEVICE, k->planned, &w->slab));
  LEV_TRY(lev_arena_create(w->device, w->ledger, LEV_MEM_DEVICE, w->slab, k->planned, &w->arena[LEV_MEM_DEVICE]));
  lev_arena_seal(w->arena[LEV_MEM_DEVICE]);
  LEV_TRY(lev_fill(w->stream, w->slab, 0xFF, k->planned, "test.poison"));
  LEV_TRY(lev_fill(w->stream, w->workspace, 0xFF, scratch, "test.poison"));
  LEV_TRY(lev_stream_sync(w->stream));
  lev_device_seal(w->device);
  return LEV_OK;
}

/* Inputs appear on the stream just before the call; right after it they and the bound regions are gone, and outputs are
 * read, as in a training step: a collective that does not wait for `stream`, or is not waited for, meets rubbish. */
typedef struct scene_args {
  rig_rank *rank;
  size_t bytes[3]; /* of h, w, labels */
  size_t dh_bytes, dw_bytes, slab_bytes;
  void *slab;
} scene_args;

static scene_args scene_of(const rig *r, rig_rank *k, void *slab) {
  size_t t = lev_dtype_bytes(r->c.dtype), a = lev_dtype_bytes(lev_dtype_arith(r->c.dtype));
  size_t nh = (size_t)(k->tokens * r->c.hidden), nw = (size_t)(k->vocab_rows * r->c.hidden);
  return (scene_args){k, {nh * t, nw * t, (size_t)k->tokens * sizeof(int32_t)}, nh * t, nw * a, k->planned, slab};
}

/* Where the copies of inputs and outputs begin: h, w, labels, dh, dw. */
static unsigned char *scene_kept(const scene_args *a, int part) {
  const size_t bytes[] = {a->bytes[0], a->bytes[1], a->bytes[2], a->dh_bytes, a->dw_bytes};
  unsigned char *at = a->rank->kept;
  for (int i = 0; i < part; ++i) at += lev_align_up(bytes[i]);
  return at;
}

static lev_status scene_begin(const scene_args *a, lev_stream *stream) {
  void *at[] = {a->rank->h, a->rank->w, a->rank->labels};
  for (int i = 0; i < 3; ++i) LEV_TRY(lev_copy(stream, at[i], scene_kept(a, i), a->bytes[i], "test.in"));
  return LEV_OK;
}

static lev_status scene_end(const scene_args *a, lev_stream *stream) {
  void *at[] = {a->rank->h, a->rank->w, a->rank->labels};
  LEV_TRY(lev_copy(stream, scene_kept(a, 3), a->rank->dh, a->dh_bytes, "test.out"));
  LEV_TRY(lev_copy(stream, scene_kept(a, 4), a->rank->dw, a->dw_bytes, "test.out"));
  for (int i = 0; i < 3; ++i) LEV_TRY(lev_fill(stream, at[i], 0xFF, a->bytes[i], "test.gone"));
  return lev_fill(stream, a->slab, 0xFF, a->slab_bytes, "test.gone");
}

/* Once the stream is idle: outputs as they were right after the call, inputs back in their place. */
static void scene_restore(const scene_args *a, bool outputs) {
  void *at[] = {a->rank->h, a->rank->w, a->rank->labels};
  for (int i = 0; i < 3; ++i) memcpy(at[i], scene_kept(a, i), a->bytes[i]);
  if (!outputs) return;
  memcpy(a->rank->dh, scene_kept(a, 3), a->dh_bytes);
  memcpy(a->rank->dw, scene_kept(a, 4), a->dw_bytes);
}

static void scene_keep(const scene_args *a) {
  rig_rank *k = a->rank;
  void *at[] = {k->h, k->w, k->labels};
  if (!k->kept) k->kept = t_alloc((size_t)(scene_kept(a, 5) - k->kept) + LEV_ALIGN);
  for (int i = 0; i < 3; ++i) {
    memcpy(scene_kept(a, i), at[i], a->bytes[i]);
    num_poison(at[i], a->bytes[i]);
  }
}

static lev_status world_call(rig *r, int rank, rig_world *w) {
  rig_rank *k = &r->rank[rank];
  int64_t rows[RIG_RANKS];
  for (int i = 0; i < r->c.ranks; ++i) rows[i] = r->c.tokens[i];
  rdtp_args args = {.tokens = k->tokens,
                    .rank_tokens = rows,
                    .h = k->h,
                    .labels = k->labels,
                    .w = k->w,
                    .dh = k->dh,
                    .dw = k->dw,
                    .sums = k->sums,
                    .grad_scale = r->grad_scale};
  scene_args scene = scene_of(r, k, w->slab);
  scene_keep(&scene);
  LEV_TRY(scene_begin(&scene, w->stream));
  lev_status st = r->phase == RDTP_STEP ? rdtp_step(w->plan, &args, w->stream) : rdtp_eval(w->plan, &args, w->stream);
  if (st != LEV_OK) lev_comm_abort(w->comm);
  if (st == LEV_OK) st = scene_end(&scene, w->stream);
  lev_status synced = lev_stream_sync(w->stream);
  return st == LEV_OK ? synced : st;
}

static lev_status world_step(rig *r, int rank, rig_world *w) {
  rig_rank *k = &r->rank[rank];
  LEV_TRY(lev_arena_push(w->arena[LEV_MEM_DEVICE], &w->stream, 1));
  lev_blocks blocks;
  LEV_TRY(lev_blocks_take(w->arena, true, r->phase == RDTP_STEP ? rdtp_walk_step : rdtp_walk_eval, w->plan, &blocks));
  lev_blocks less = blocks;
  less.bytes[LEV_MEM_DEVICE] -= LEV_ALIGN;
  T_EXPECT_STATUS(rdtp_plan_bind(w->plan, r->phase, &less), LEV_ERR_CAPACITY);
  LEV_TRY(rdtp_plan_bind(w->plan, r->phase, &blocks));
  LEV_TRY(world_call(r, rank, w));
  LEV_TRY(lev_arena_pop(w->arena[LEV_MEM_DEVICE]));
  k->peak = lev_ledger_peak(w->ledger, LEV_MEM_DEVICE);
  T_EXPECT_EQ_I64(lev_ledger_module_peak(w->ledger, LEV_MEM_DEVICE, "rdtp."), k->planned);
  return LEV_OK;
}

static void rig_rank_main(int rank, void *ctx) {
  rig *r = ctx;
  rig_world w = {0};
  lev_status st = world_open(r, rank, &w);
  if (st == LEV_OK) st = world_step(r, rank, &w);
  r->rank[rank].status = st;
  if (st != LEV_OK && w.comm) lev_comm_abort(w.comm);
  bool injected = false;
  for (int i = 0; i < r->c.ranks; ++i)
    for (int kind = 0; kind < LEV_FAULT_KINDS; ++kind) injected |= r->rank[i].fault.fail_at[kind] > 0;
  if (!injected) T_EXPECT_OK(st);
  rdtp_destroy(w.plan);
  if (w.stream) lev_stream_destroy(w.stream);
  lev_comm_destroy(w.comm);
  lev_arena_destroy(w.arena[LEV_MEM_DEVICE]);
  lev_device_close(w.device);
  lev_ledger_destroy(w.ledger);
  scene_args scene = scene_of(r, &r->rank[rank], NULL);
  if (scene.rank->kept)
    scene_restore(&scene,
                  r->backend != LEV_BACKEND_DRY && st == LEV_OK); /* no stream is left that could still read them */
}

void rig_run(rig *r, rdtp_phase phase, lev_backend backend) {
  r->phase = phase, r->backend = backend;
  if (backend == LEV_BACKEND_DRY) {
    for (int i = 0; i < r->c.ranks; ++i) rig_rank_main(i, r);
    return;
  }
  if (!T_EXPECT_OK(lev_comm_hub_create(r->c.ranks, 60, &r->hub))) return;
  t_ranks(r->c.ranks, rig_rank_main, r);
  lev_comm_hub_destroy(r->hub);
}

void rig_check(const rig *r, double tolerance, const char *what) {
  lev_dtype arith = lev_dtype_arith(r->c.dtype);
  for (int i = 0; i < r->c.ranks; ++i) {
    const rig_rank *k = &r->rank[i];
    NUM_CHECK(r->c.dtype, k->dh, k->dh64, k->tokens, r->c.hidden, tolerance, what);
    NUM_CHECK(arith, k->dw, k->dw64, k->vocab_rows, r->c.hidden, tolerance, what);
    double error = fabs(k->sums[0] - k->sums64[0]) / fmax(1, fabs(k->sums64[0]));
    T_EXPECT_MSG(error <= tolerance, "%s: rank %d loss %.17g, expected %.17g", what, i, k->sums[0], k->sums64[0]);
    T_EXPECT_MSG(k->sums[1] == k->sums64[1] && k->sums[2] == k->sums64[2], "%s: rank %d counts %g %g, expected %g %g",
                 what, i, k->sums[1], k->sums[2], k->sums64[1], k->sums64[2]);
  }
}

void rig_case_check(const rig_case *c, double tolerance, const char *what) {
  rig r;
  if (rig_open(&r, c)) {
    rig_run(&r, RDTP_STEP, t_backend());
    rig_check(&r, tolerance, what);
    for (int i = 0; i < c->ranks; ++i) T_EXPECT_EQ_I64(r.rank[i].peak, r.rank[i].planned);
  }
  rig_close(&r);
}
