/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/llep/layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/arena.h"
#include "common/gemm.h"
#include "common/rng.h"

l_case l_small(int ranks, int64_t experts, int64_t top_k, int64_t tokens) {
  l_case c = {.ranks = ranks};
  llep_config_init(&c.cfg);
  c.cfg.dtype = LEV_F64;
  c.cfg.max_tokens = tokens > 0 ? tokens : 1;
  c.cfg.hidden = 7, c.cfg.inter = 5, c.cfg.experts = experts, c.cfg.top_k = top_k;
  c.cfg.chunk_rows = ranks * top_k * 3, c.cfg.tile_rows = 4, c.cfg.min_rows = 2, c.cfg.gate = 1;
  for (int r = 0; r < ranks; ++r) c.tokens[r] = tokens;
  return c;
}

/* ---- inputs ---- */

static void zipf_picks(int64_t experts, int64_t top_k, int64_t token, int32_t *ids) {
  lev_rng_key key = {t_seed(), 7, 1};
  for (int64_t j = 0; j < top_k; ++j) {
    double sum = 0, at;
    for (int64_t e = 0; e < experts; ++e) {
      bool taken = false;
      for (int64_t i = 0; i < j; ++i) taken |= ids[i] == e;
      if (!taken) sum += pow((double)(e + 1), -1.2);
    }
    at = lev_rng_uniform(key, (uint64_t)(token * top_k + j)) * sum;
    ids[j] = -1;
    for (int64_t e = 0; e < experts && ids[j] < 0; ++e) {
      bool taken = false;
      for (int64_t i = 0; i < j; ++i) taken |= ids[i] == e;
      if (!taken && (at -= pow((double)(e + 1), -1.2)) <= 0) ids[j] = (int32_t)e;
    }
    if (ids[j] < 0)
      for (int64_t e = 0; e < experts && ids[j] < 0; ++e) {
        bool taken = false;
        for (int64_t i = 0; i < j; ++i) taken |= ids[i] == e;
        if (!taken) ids[j] = (int32_t)e;
      }
  }
}

static void make_ids(const l_case *c, l_data *d) {
  int64_t experts = c->cfg.experts, k = c->cfg.top_k;
  for (int r = 0; r < c->ranks; ++r)
    for (int64_t t = 0; t < c->tokens[r]; ++t) {
      int32_t *ids = d->ids + (d->row0[r] + t) * k;
      if (c->routing == L_ZIPF) zipf_picks(experts, k, d->row0[r] + t, ids);
      for (int64_t j = 0; j < k && c->routing != L_ZIPF; ++j)
        ids[j] = (int32_t)(c->routing == L_BALANCED     ? (t * k + j) % experts
                           : c->routing == L_ONE_EXPERT ? j
                           : c->routing == L_SAME       ? experts - 1
                                                        : (t + j) % ((experts + 1) / 2) * 2);
    }
}

/* ---- oracle ---- */

typedef struct l_dims {
  int64_t hidden, inter;
} l_dims;

static double dot(const double *a, const double *b, int64_t n) {
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += a[i] * b[i];
  return s;
}

/* One route, forward and backward, by the definition. */
static void oracle_route(l_dims z, const double *x, double p, const double *w, const double *dy, double *y, double *dx,
                         double *dp, double *dw) {
  int64_t hidden = z.hidden, inter = z.inter;
  const double *gate = w, *up = w + inter * hidden, *down = up + inter * hidden;
  double *dgate = dw, *dup = dw + inter * hidden, *ddown = dup + inter * hidden;
  double *a = calloc((size_t)inter, sizeof *a), *da = calloc((size_t)inter, sizeof *da);
  for (int64_t i = 0; i < inter; ++i) {
    double g = dot(gate + i * hidden, x, hidden), u = dot(up + i * hidden, x, hidden);
    a[i] = g / (1 + exp(-g)) * u;
  }
  *dp = 0;
  for (int64_t h = 0; h < hidden; ++h) {
    double o = dot(down + h * inter, a, inter);
    y[h] += p * o;
    *dp += dy[h] * o;
    for (int64_t i = 0; i < inter; ++i) {
      ddown[h * inter + i] += p * dy[h] * a[i];
      da[i] += p * dy[h] * down[h * inter + i];
    }
  }
  for (int64_t i = 0; i < inter; ++i) {
    double g = dot(gate + i * hidden, x, hidden), u = dot(up + i * hidden, x, hidden), s = 1 / (1 + exp(-g));
    double dg = da[i] * u * (s + g * s * (1 - s)), du = da[i] * g * s;
    for (int64_t h = 0; h < hidden; ++h) {
      dgate[i * hidden + h] += dg * x[h], dup[i * hidden + h] += du * x[h];
      dx[h] += dg * gate[i * hidden + h] + du * up[i * hidden + h];
    }
  }
  free(a), free(da);
}

static void oracle(const l_case *c, l_data *d) {
  l_dims z = {c->cfg.hidden, c->cfg.inter};
  int64_t k = c->cfg.top_k, weights = 3 * z.hidden * z.inter;
  int passes = c->passes > 0 ? c->passes : 1;
  for (int64_t t = 0; t < d->n; ++t)
    for (int64_t j = 0; j < k; ++j) {
      int64_t q = t * k + j, e = d->ids[q];
      oracle_route(z, d->x64 + t * z.hidden, d->probs64[q], d->w64 + e * weights, d->dy64 + t * z.hidden,
                   d->y64 + t * z.hidden, d->dx64 + t * z.hidden, d->dprobs64 + q, d->dw64 + e * weights);
    }
  if (c->overwrite) passes = 1;
  for (int64_t i = 0; i < c->cfg.experts * weights; ++i) d->dw64[i] *= passes;
}

/* ---- set-up ---- */

/* Type of dw. */
static lev_dtype gradient_type(const l_case *c) {
  return c->overwrite ? c->cfg.dtype : lev_dtype_arith(c->cfg.dtype);
}

static void *zeros(int64_t n, size_t size) {
  return calloc((size_t)(n > 0 ? n : 1), size);
}

void l_make(const l_case *c, l_data *d) {
  *d = (l_data){.c = c};
  for (int r = 0; r < c->ranks; ++r) d->row0[r + 1] = d->row0[r] + c->tokens[r];
  d->n = d->row0[c->ranks];
  lev_dtype t = c->cfg.dtype, a = lev_dtype_arith(t);
  size_t tb = lev_dtype_bytes(t), ab = lev_dtype_bytes(a);
  int64_t nh = d->n * c->cfg.hidden, nk = d->n * c->cfg.top_k, nw = c->cfg.experts * 3 * c->cfg.hidden * c->cfg.inter;
  d->x = zeros(nh, tb), d->dy = zeros(nh, tb), d->y = zeros(nh, tb), d->y0 = zeros(nh, tb), d->dx = zeros(nh, tb);
  d->probs = zeros(nk, ab), d->dprobs = zeros(nk, ab), d->ids = zeros(nk, sizeof *d->ids);
  d->w = zeros(nw, tb), d->dw = zeros(nw, ab);
  d->x64 = zeros(nh, 8), d->dy64 = zeros(nh, 8), d->y64 = zeros(nh, 8), d->dx64 = zeros(nh, 8);
  d->probs64 = zeros(nk, 8), d->dprobs64 = zeros(nk, 8), d->w64 = zeros(nw, 8), d->dw64 = zeros(nw, 8);
  num_random(t, d->x, d->x64, nh, 1, 1);
  num_random(t, d->dy, d->dy64, nh, 1, 2);
  num_random(t, d->w, d->w64, nw, 1, 3);
  num_random(a, d->probs, d->probs64, nk, 1, 4);
  num_random(t, d->y0, c->accumulate ? d->y64 : NULL, nh, 1, 5);
  make_ids(c, d);
  oracle(c, d);
  if (c->overwrite) num_poison(d->dw, (size_t)nw * tb);
  num_poison(d->y, (size_t)nh * tb), num_poison(d->dx, (size_t)nh * tb), num_poison(d->dprobs, (size_t)nk * ab);
}

void l_free(l_data *d) {
  void *all[] = {d->x,  d->dy,  d->y,    d->y0,  d->dx,   d->probs,   d->dprobs,   d->ids, d->w,
                 d->dw, d->x64, d->dy64, d->y64, d->dx64, d->probs64, d->dprobs64, d->w64, d->dw64};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) free(all[i]);
  for (int r = 0; r < L_RANKS; ++r) lev_trace_destroy(d->trace[r]);
  if (d->hub) lev_comm_hub_destroy(d->hub);
}

/* ---- one rank ---- */

typedef struct l_rank {
  const l_case *c;
  l_data *d; /* NULL on the dry backend */
  int rank;
  lev_device *device;
  lev_trace *trace;
  lev_ledger *ledger;
  lev_comm *comm;
  lev_stream *stream;
  llep_plan *plan;
  lev_arena *arena[LEV_MEM_CLASSES];
  void *workspace;
  lev_fault fault;
  unsigned char *memory; /* device arrays of this rank */
} l_rank;

/* Arrays of one rank: what the calls see, and the test's side of each. Inputs appear on the stream just before a call
 * and are gone right after it, outputs are fetched right after it, as in a training step: work that is not ordered with
 * the stream meets rubbish. */
typedef enum l_array { X, IDS, PROBS, W, DY, Y, DX, DPROBS, DW, ARRAYS } l_array;
typedef struct l_arrays {
  unsigned char *device[ARRAYS], *test[ARRAYS];
  size_t bytes[ARRAYS];
} l_arrays;

static unsigned char *at(void *base, size_t offset) {
  return base ? (unsigned char *)base + offset : (unsigned char *)(uintptr_t)4096;
}

static l_arrays arrays(const l_rank *k) {
  const l_case *c = k->c;
  l_data none = {0}, *d = k->d ? k->d : &none;
  size_t tb = lev_dtype_bytes(c->cfg.dtype), ab = lev_dtype_bytes(lev_dtype_arith(c->cfg.dtype));
  int64_t experts = c->cfg.experts, weights = 3 * c->cfg.hidden * c->cfg.inter;
  size_t row0 = k->d ? (size_t)d->row0[k->rank] : 0, n = (size_t)c->tokens[k->rank];
  size_t e0 = (size_t)lev_part_begin(experts, c->ranks, k->rank),
         el = (size_t)lev_part_size(experts, c->ranks, k->rank);
  size_t h = (size_t)c->cfg.hidden, top_k = (size_t)c->cfg.top_k;
  const size_t unit[ARRAYS] = {h * tb,
                               top_k * 4,
                               top_k * ab,
                               (size_t)weights * tb,
                               h * tb,
                               h * tb,
                               h * tb,
                               top_k * ab,
                               (size_t)weights * lev_dtype_bytes(gradient_type(c))};
  void *const base[ARRAYS] = {d->x, d->ids, d->probs, d->w, d->dy, d->y, d->dx, d->dprobs, d->dw};
  l_arrays a;
  size_t used = 0;
  for (int i = 0; i < ARRAYS; ++i) {
    bool expert = i == W || i == DW;
    a.bytes[i] = unit[i] * (expert ? el : n);
    a.device[i] = at(k->memory, used);
    a.test[i] = at(base[i], unit[i] * (expert ? e0 : row0));
    used += lev_align_up(a.bytes[i]);
  }
  return a;
}

static lev_status appear(const l_rank *k, const l_arrays *a, int first, int last) {
  for (int i = first; i <= last; ++i) LEV_TRY(lev_copy(k->stream, a->device[i], a->test[i], a->bytes[i], "test.in"));
  return LEV_OK;
}

static lev_status fetch(const l_rank *k, const l_arrays *a, int first, int last) {
  for (int i = first; i <= last; ++i) LEV_TRY(lev_copy(k->stream, a->test[i], a->device[i], a->bytes[i], "test.out"));
  for (int i = X; i <= DY; ++i) LEV_TRY(lev_fill(k->stream, a->device[i], 0xFF, a->bytes[i], "test.gone"));
  return LEV_OK;
}

/* Numbers waits within a call as a borrowing rank has them; where there are some, ranks that borrow no expert have no
 * wait for its weights, the second of forward and the third of backward. */
static void arm(l_rank *k, int call, bool borrows) {
  const l_case *c = k->c;
  int skipped = call + 1, wait = c->drop_wait;
  if (c->drop_call != call) return;
  if (!borrows && wait == skipped) return;
  if (!borrows && wait > skipped) --wait;
  k->fault.fail_at[LEV_FAULT_DROP_WAIT] = k->fault.seen[LEV_FAULT_DROP_WAIT] + wait;
}

static lev_status make_arenas(l_rank *k) {
  size_t persistent[LEV_MEM_CLASSES], forward[LEV_MEM_CLASSES], backward[LEV_MEM_CLASSES];
  llep_plan_bytes(k->plan, LLEP_PERSISTENT, persistent);
  llep_plan_bytes(k->plan, LLEP_FORWARD, forward);
  llep_plan_bytes(k->plan, LLEP_BACKWARD, backward);
  for (int m = 0; m <= LEV_MEM_PINNED; ++m) {
    size_t bytes = persistent[m] + lev_max_size(forward[m], backward[m]);
    if (k->d) k->d->planned[k->rank][m] = bytes;
    void *slab;
    LEV_TRY(lev_device_alloc(k->device, (lev_mem)m, bytes, &slab));
    LEV_TRY(lev_fill(k->stream, slab, 0xFF, bytes, "test.poison"));
    LEV_TRY(lev_arena_create(k->device, k->ledger, (lev_mem)m, slab, bytes, &k->arena[m]));
  }
  return lev_stream_sync(k->stream);
}

static lev_status bind(l_rank *k, llep_phase phase, lev_walk_fn walk) {
  lev_blocks blocks;
  LEV_TRY(lev_blocks_take(k->arena, phase != LLEP_PERSISTENT, walk, k->plan, &blocks));
  if (phase != LLEP_PERSISTENT) {
    size_t bytes = blocks.bytes[LEV_MEM_DEVICE];
    LEV_TRY(lev_fill(k->stream, blocks.base[LEV_MEM_DEVICE], 0xFF, bytes, "test.poison"));
    blocks.bytes[LEV_MEM_DEVICE] -= k->c->less;
  }
  return llep_plan_bind(k->plan, phase, &blocks);
}

static lev_status forward(l_rank *k) {
  const l_case *c = k->c;
  l_arrays v = arrays(k);
  LEV_TRY(lev_arena_push(k->arena[LEV_MEM_DEVICE], &k->stream, 1));
  LEV_TRY(bind(k, LLEP_FORWARD, llep_walk_forward));
  LEV_TRY(appear(k, &v, X, W));
  if (c->accumulate) {
    void *y0 = k->d ? at(k->d->y0, (size_t)(v.test[Y] - (unsigned char *)k->d->y)) : v.test[Y];
    LEV_TRY(lev_copy(k->stream, v.device[Y], y0, v.bytes[Y], "test.y0"));
  }
  llep_forward_args a = {.layer = c->cfg.layers - 1,
                         .tokens = c->tokens[k->rank],
                         .rank_tokens = c->tokens,
                         .x = v.device[X],
                         .ids = (int32_t *)(void *)v.device[IDS],
                         .probs = v.device[PROBS],
                         .w = v.device[W],
                         .y = v.device[Y],
                         .accumulate = c->accumulate};
  arm(k, 1, k->rank != 0 || c->cfg.foreign_slots < 0);
  int64_t before = k->fault.seen[LEV_FAULT_DROP_WAIT];
  LEV_TRY(llep_forward(k->plan, &a, k->stream));
  if (k->d) k->d->waits[k->rank][0] = k->fault.seen[LEV_FAULT_DROP_WAIT] - before;
  LEV_TRY(fetch(k, &v, Y, Y));
  return lev_arena_pop(k->arena[LEV_MEM_DEVICE]);
}

static lev_status backward(l_rank *k) {
  const l_case *c = k->c;
  l_arrays v = arrays(k);
  LEV_TRY(lev_arena_push(k->arena[LEV_MEM_DEVICE], &k->stream, 1));
  LEV_TRY(bind(k, LLEP_BACKWARD, llep_walk_backward));
  LEV_TRY(appear(k, &v, X, DY));
  LEV_TRY(appear(k, &v, DW, DW));
  llep_backward_args a = {.layer = c->cfg.layers - 1,
                          .tokens = c->tokens[k->rank],
                          .rank_tokens = c->tokens,
                          .x = v.device[X],
                          .ids = (int32_t *)(void *)v.device[IDS],
                          .probs = v.device[PROBS],
                          .w = v.device[W],
                          .dy = v.device[DY],
                          .dx = v.device[DX],
                          .dprobs = v.device[DPROBS],
                          .dw = v.device[DW],
                          .overwrite_dw = c->overwrite};
  arm(k, 2, k->rank != 0 || c->cfg.foreign_slots < 0);
  int64_t before = k->fault.seen[LEV_FAULT_DROP_WAIT];
  LEV_TRY(llep_backward(k->plan, &a, k->stream));
  if (k->d) k->d->waits[k->rank][1] = k->fault.seen[LEV_FAULT_DROP_WAIT] - before;
  LEV_TRY(fetch(k, &v, DX, DW));
  return lev_arena_pop(k->arena[LEV_MEM_DEVICE]);
}

static lev_status steps(l_rank *k) {
  LEV_TRY(llep_plan_create(k->device, k->comm, &k->c->cfg, &k->plan));
  LEV_TRY(make_arenas(k));
  LEV_TRY(bind(k, LLEP_PERSISTENT, llep_walk_persistent));
  for (int m = 0; m <= LEV_MEM_PINNED; ++m) lev_arena_seal(k->arena[m]);
  lev_device_seal(k->device);
  if (k->rank == 1 && k->c->fail_at > 0)
    k->fault.fail_at[k->c->fail_kind] = k->fault.seen[k->c->fail_kind] + k->c->fail_at;
  for (int i = 0; i < (k->c->passes > 0 ? k->c->passes : 1); ++i) {
    LEV_TRY(forward(k));
    LEV_TRY(backward(k));
  }
  return lev_stream_sync(k->stream);
}

static lev_status set_up(l_rank *k, lev_backend backend) {
  LEV_TRY(lev_trace_create(1 << 16, &k->trace));
  lev_device_config dc = {.backend = backend,
                          .index = t_gpu(k->rank),
                          .immediate = k->c->immediate,
                          .jitter_seed = k->c->jitter,
                          .trace = k->trace,
                          .fault = &k->fault};
  LEV_TRY(lev_device_open(&dc, &k->device));
  LEV_TRY(lev_ledger_create(k->trace, &k->ledger));
  if (backend == LEV_BACKEND_DRY)
    LEV_TRY(lev_comm_dry_create(k->c->ranks, k->rank, k->device, &k->comm));
  else
    LEV_TRY(lev_comm_local_join(k->d->hub, k->rank, k->device, &k->comm));
  LEV_TRY(lev_stream_create(k->device, "compute", &k->stream));
  l_arrays a = arrays(k);
  size_t all = LEV_ALIGN;
  for (int i = 0; i < ARRAYS; ++i) all += lev_align_up(a.bytes[i]);
  void *memory;
  LEV_TRY(lev_device_alloc(k->device, LEV_MEM_DEVICE, all, &memory));
  LEV_TRY(lev_fill(k->stream, memory, 0xFF, all, "test.poison"));
  k->memory = memory;
  size_t bytes = lev_gemm_workspace_bytes(backend == LEV_BACKEND_DRY ? LEV_BACKEND_CPU : backend, k->c->cfg.dtype);
  LEV_TRY(lev_device_alloc(k->device, LEV_MEM_DEVICE, bytes, &k->workspace));
  lev_stream_set_workspace(k->stream, k->workspace, bytes);
  return LEV_OK;
}

static void tear_down(l_rank *k) {
  llep_destroy(k->plan);
  lev_comm_destroy(k->comm);
  for (int m = 0; m < LEV_MEM_CLASSES; ++m)
    if (k->arena[m]) lev_arena_destroy(k->arena[m]);
  lev_ledger_destroy(k->ledger);
  lev_device_close(k->device);
}

static void rank_main(int rank, void *ctx) {
  l_data *d = ctx;
  l_rank k = {.c = d->c, .d = d, .rank = rank};
  lev_status st = set_up(&k, d->backend);
  if (st == LEV_OK) st = steps(&k);
  if (st != LEV_OK && k.comm) lev_comm_abort(k.comm);
  d->status[rank] = st;
  snprintf(d->detail[rank], sizeof d->detail[rank], "%s", st == LEV_OK ? "" : lev_detail());
  if (k.plan) {
    llep_get_stats(k.plan, d->c->cfg.layers - 1, &d->stats[rank]);
    d->stats[rank].expert_counts = d->stats[rank].rank_rows = NULL;
    d->info[rank] = llep_plan_info(k.plan);
    if (k.ledger)
      for (int m = 0; m <= LEV_MEM_PINNED; ++m) d->peak[rank][m] = lev_ledger_peak(k.ledger, (lev_mem)m);
  }
  if (k.comm) d->sent[rank] = lev_comm_bytes_sent(k.comm);
  tear_down(&k);
  d->trace[rank] = k.trace;
}

void l_run(l_data *d) {
  d->backend = t_backend();
  T_REQUIRE_OK(lev_comm_hub_create(d->c->ranks, 60, &d->hub));
  t_ranks(d->c->ranks, rank_main, d);
}

lev_trace *l_dry(const l_case *c, int rank) {
  l_rank k = {.c = c, .rank = rank};
  lev_status st = set_up(&k, LEV_BACKEND_DRY);
  if (st == LEV_OK) st = steps(&k);
  T_EXPECT_OK(st);
  tear_down(&k);
  return k.trace;
}

/* ---- comparison ---- */

void l_check(const l_data *d, double tolerance) {
  const l_case *c = d->c;
  lev_dtype t = c->cfg.dtype, a = lev_dtype_arith(t);
  int64_t h = c->cfg.hidden, weights = 3 * h * c->cfg.inter;
  if (d->n > 0) {
    NUM_CHECK(t, d->y, d->y64, d->n, h, tolerance, "y");
    NUM_CHECK(t, d->dx, d->dx64, d->n, h, tolerance, "dx");
    NUM_CHECK(a, d->dprobs, d->dprobs64, d->n, c->cfg.top_k, tolerance, "dprobs");
    NUM_CHECK(gradient_type(c), d->dw, d->dw64, c->cfg.experts, weights, tolerance, "dw");
  }
  for (int64_t e = 0; e < c->cfg.experts; ++e) { /* an expert without routes has gradient exactly zero */
    bool used = false;
    for (int64_t q = 0; q < d->n * c->cfg.top_k; ++q) used |= d->ids[q] == e;
    for (int64_t i = 0; i < weights && !used; ++i)
      T_EXPECT(lev_dtype_load(gradient_type(c), d->dw, e * weights + i) == 0.0);
  }
}

void l_case_check(const l_case *c, double tolerance) {
  l_data d;
  l_make(c, &d);
  l_run(&d);
  bool ok = true;
  for (int r = 0; r < c->ranks; ++r) ok &= T_EXPECT_OK(d.status[r]);
  if (ok) l_check(&d, tolerance);
  for (int r = 0; r < c->ranks && ok; ++r) {
    for (int m = 0; m < 2; ++m)
      T_EXPECT_MSG(d.peak[r][m] == d.planned[r][m], "rank %d class %d: planned %zu, peak %zu", r, m, d.planned[r][m],
                   d.peak[r][m]);
    T_EXPECT(d.stats[r].chunk_rows <= lev_max_i64(d.info[r].chunk_rows, d.info[r].send_rows));
    T_EXPECT_EQ_I64(d.stats[r].chunks, d.stats[0].chunks);
    T_EXPECT(d.stats[r].rows_max <= d.stats[r].native_max);
  }
  if (t_failed())
    t_check(false, __FILE__, __LINE__, "case: %d ranks, E %lld k %lld N %lld, chunk %lld, routing %d, schedule %d",
            c->ranks, (long long)c->cfg.experts, (long long)c->cfg.top_k, (long long)c->cfg.max_tokens,
            (long long)c->cfg.chunk_rows, (int)c->routing, (int)c->cfg.schedule);
  l_free(&d);
}
