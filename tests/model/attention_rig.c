/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/model/attention_rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/arena.h"
#include "common/dims.h"
#include "harness/model/attention_graph.h"

/* ---- oracle ---- */

static void *room(int64_t n, size_t size) {
  void *p = malloc(size * (size_t)(n > 0 ? n : 1));
  if (p) num_poison(p, size * (size_t)(n > 0 ? n : 1));
  return p;
}

static int64_t q_cols(const attn_case *c) {
  return c->heads * c->dim;
}
static int64_t kv_cols(const attn_case *c) {
  return c->kv_heads * c->dim;
}
/* Unused scalars between fused rows. */
static int64_t pad_of(const attn_case *c) {
  return c->pad > 0 ? c->pad : 3;
}

/* The same, reached by kernels too. */
static void *shared(int64_t n, size_t size) {
  size_t bytes = size * (size_t)(n > 0 ? n : 1);
  void *p = t_alloc(bytes);
  num_poison(p, bytes);
  return p;
}

static bool is_packed(const attn_case *c) {
  return c->document > 0 || c->documents;
}

/* Where the document of position i begins. */
static int64_t document_begin(const attn_case *c, int64_t i) {
  if (c->document > 0) return i / c->document * c->document;
  int64_t begin = 0;
  for (const int64_t *length = c->documents; length; length = length[1] > 0 ? length + 1 : c->documents) {
    if (i < begin + *length) break;
    begin += *length;
  }
  return begin;
}

/* The first key that a query sees. */
static int64_t first_key(const attn_case *c, int64_t i) {
  return lev_max_i64(document_begin(c, i), c->window > 0 ? i - c->window + 1 : 0);
}

/* Row i of head h: probabilities in p[first_key..i], o, lse. */
static void oracle_row(attn_rig *r, int64_t i, int64_t h, double *p) {
  const attn_case *c = &r->c;
  int64_t d = c->dim, g = h / (c->heads / c->kv_heads), first = first_key(c, i);
  const double *q = r->q + i * q_cols(c) + h * d;
  double most = -INFINITY, sum = 0;
  for (int64_t j = first; j <= i; ++j) {
    double s = 0;
    for (int64_t x = 0; x < d; ++x) s += q[x] * r->k[j * kv_cols(c) + g * d + x];
    p[j] = s / sqrt((double)d);
    most = fmax(most, p[j]);
  }
  for (int64_t j = first; j <= i; ++j) sum += p[j] = exp(p[j] - most);
  double *o = r->o64 + i * q_cols(c) + h * d;
  for (int64_t x = 0; x < d; ++x) o[x] = 0;
  for (int64_t j = first; j <= i; ++j) {
    p[j] /= sum;
    for (int64_t x = 0; x < d; ++x) o[x] += p[j] * r->v[j * kv_cols(c) + g * d + x];
  }
  r->lse64[i * c->heads + h] = most + log(sum);
}

static void oracle_row_grad(attn_rig *r, int64_t i, int64_t h, const double *p) {
  const attn_case *c = &r->c;
  int64_t d = c->dim, g = h / (c->heads / c->kv_heads), at = i * q_cols(c) + h * d;
  const double *q = r->q + at, *d_o = r->d_o + at;
  double delta = 0, scale = 1 / sqrt((double)d);
  for (int64_t x = 0; x < d; ++x) delta += d_o[x] * r->o64[at + x];
  for (int64_t j = first_key(c, i); j <= i; ++j) {
    int64_t key = j * kv_cols(c) + g * d;
    double dp = 0;
    for (int64_t x = 0; x < d; ++x) dp += d_o[x] * r->v[key + x];
    double ds = p[j] * (dp - delta) * scale;
    for (int64_t x = 0; x < d; ++x) {
      r->dq64[at + x] += ds * r->k[key + x];
      r->dk64[key + x] += ds * q[x];
      r->dv64[key + x] += p[j] * d_o[x];
    }
  }
}

void attn_rig_oracle(attn_rig *r) {
  const attn_case *c = &r->c;
  memset(r->dq64, 0, sizeof(double) * (size_t)(c->seq * q_cols(c)));
  memset(r->dk64, 0, sizeof(double) * (size_t)(c->seq * kv_cols(c)));
  memset(r->dv64, 0, sizeof(double) * (size_t)(c->seq * kv_cols(c)));
  double *p = room(c->seq, sizeof *p);
  if (!T_EXPECT(p != NULL)) return;
  for (int64_t i = 0; i < c->seq; ++i) {
    for (int64_t h = 0; h < c->heads; ++h) {
      oracle_row(r, i, h, p);
      oracle_row_grad(r, i, h, p);
    }
  }
  free(p);
}

/* ---- open, close ---- */

/* Random values, the first component of each head shifted by `shift` + `rise` per position, rounded to dtype. */
static void fill(const attn_case *c, double *out, int64_t cols, double size, double shift, double rise,
                 uint32_t stream) {
  num_random(LEV_F64, out, NULL, c->seq * cols, size, stream);
  for (int64_t i = 0; i < c->seq * cols; ++i) {
    if (i % c->dim == 0) out[i] += shift + rise * (double)(i / cols);
    double stored;
    lev_dtype_store(c->dtype, &stored, 0, out[i]);
    out[i] = lev_dtype_load(c->dtype, &stored, 0);
  }
}

bool attn_rig_open(attn_rig *r, const attn_case *c) {
  *r = (attn_rig){.c = *c};
  int64_t nq = c->seq * q_cols(c), nk = c->seq * kv_cols(c);
  double **wide[] = {&r->q, &r->k, &r->v, &r->d_o, &r->o64, &r->lse64, &r->dq64, &r->dk64, &r->dv64};
  int64_t counts[] = {nq, nk, nk, nq, nq, c->seq * c->heads, nq, nk, nk};
  bool ok = c->ranks <= ATTN_RANKS;
  for (int i = 0; i < 9; ++i) ok &= (*wide[i] = room(counts[i], sizeof(double))) != NULL;
  void **got[] = {&r->o, &r->lse, &r->dq, &r->dk, &r->dv};
  int64_t got_counts[] = {nq, c->seq * c->heads, nq, nk, nk};
  for (int i = 0; i < 5; ++i) ok &= (*got[i] = room(got_counts[i], sizeof(double))) != NULL;
  for (int i = 0; i < c->ranks; ++i) ok &= T_EXPECT_OK(lev_trace_create(4096, &r->rank[i].trace));
  if (!T_EXPECT(ok)) return false;
  double size = c->size != 0 ? c->size : 1, lift = c->tilt != 0 ? 4 : 0;
  fill(c, r->q, q_cols(c), size, lift, 0, 1);
  fill(c, r->k, kv_cols(c), size, 0, lift != 0 ? c->tilt * sqrt((double)c->dim) / lift : 0, 2);
  fill(c, r->v, kv_cols(c), 1, 0, 0, 3);
  fill(c, r->d_o, q_cols(c), 1, 0, 0, 4);
  attn_rig_oracle(r);
  return true;
}

void attn_rig_close(attn_rig *r) {
  void *all[] = {r->q,    r->k,    r->v, r->d_o, r->o64, r->lse64, r->dq64,
                 r->dk64, r->dv64, r->o, r->lse, r->dq,  r->dk,    r->dv};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) free(all[i]);
  for (int i = 0; i < r->c.ranks; ++i) lev_trace_destroy(r->rank[i].trace);
}

attn_config attn_rig_config(const attn_case *c) {
  attn_config config;
  attn_config_init(&config);
  for (int i = 0; i < c->ranks; ++i)
    config.max_tokens = lev_max_i64(config.max_tokens, attn_shard_tokens(c->seq, c->ranks, i));
  config.max_tokens += c->spare;
  config.heads = c->heads, config.kv_heads = c->kv_heads, config.head_dim = c->dim, config.dtype = c->dtype;
  config.block_q = c->block_q, config.block_k = c->block_k;
  config.route = c->route, config.workspace = c->workspace, config.packed = is_packed(c);
  return config;
}

/* ---- one rank ---- */

/* This rank's rows of one array; `at` and `stride` in scalars of `type`. */
typedef struct shard {
  lev_dtype type;
  unsigned char *base;
  int64_t at, stride, cols;
} shard;

typedef struct world {
  lev_device *device;
  lev_comm *comm;
  lev_stream *stream;
  lev_ledger *ledger;
  lev_arena *arena[LEV_MEM_CLASSES];
  attn_plan *plan;
  int64_t n;
  unsigned char *in, *grad; /* q|k|v and their gradients */
  unsigned char *o, *d_o, *lse;
  int64_t *doc_begin;
  shard q, k, v, dq, dk, dv, out, dout, state;
} world;

static void *shard_row(const shard *s, int64_t row) {
  return s->base + (size_t)(s->at + row * s->stride) * lev_dtype_bytes(s->type);
}

static bool world_arrays(const attn_rig *r, int rank, world *w) {
  const attn_case *c = &r->c;
  int64_t n = w->n = attn_shard_tokens(c->seq, c->ranks, rank), a = q_cols(c), g = kv_cols(c);
  int64_t row = a + 2 * g + pad_of(c);
  w->in = shared(n * row, sizeof(double)), w->grad = shared(n * row, sizeof(double));
  w->o = shared(n * a, sizeof(double)), w->d_o = shared(n * a, sizeof(double));
  w->lse = shared(n * c->heads, sizeof(double)), w->doc_begin = shared(n, sizeof(int64_t));
  if (!w->in || !w->grad || !w->o || !w->d_o || !w->lse || !w->doc_begin) return false;
  for (int i = 0; i < 2; ++i) {
    unsigned char *base = i == 0 ? w->in : w->grad;
    shard *to[] = {i == 0 ? &w->q : &w->dq, i == 0 ? &w->k : &w->dk, i == 0 ? &w->v : &w->dv};
    int64_t at[] = {0, a, a + g}, cols[] = {a, g, g};
    for (int j = 0; j < 3; ++j)
      *to[j] = c->fused ? (shard){c->dtype, base, at[j], row, cols[j]}
                        : (shard){c->dtype, base, n * at[j], cols[j], cols[j]};
  }
  w->out = (shard){c->dtype, w->o, 0, a, a}, w->dout = (shard){c->dtype, w->d_o, 0, a, a};
  w->state = (shard){lev_dtype_arith(c->dtype), w->lse, 0, c->heads, c->heads};
  const shard *in[] = {&w->q, &w->k, &w->v, &w->dout};
  const double *from[] = {r->q, r->k, r->v, r->d_o};
  for (int64_t i = 0; i < n; ++i) {
    int64_t pos = attn_token_position(c->seq, c->ranks, rank, i);
    w->doc_begin[i] = document_begin(c, pos);
    for (int j = 0; j < 4; ++j)
      for (int64_t x = 0; x < in[j]->cols; ++x)
        lev_dtype_store(c->dtype, shard_row(in[j], i), x, from[j][pos * in[j]->cols + x]);
  }
  return true;
}

/* Arrays have room for doubles: what narrower scalars leave must still be poison. */
static void check_beyond(lev_dtype type, const unsigned char *base, int64_t used) {
  int64_t n = lev_dtype_bytes(type) < sizeof(double) ? lev_min_i64(used, 4096) : 0;
  T_EXPECT_EQ_I64(num_poisoned(type, base + (size_t)used * lev_dtype_bytes(type), n), n);
}

/* Results to sequence order; gaps between fused rows must still be poison. */
static void world_collect(attn_rig *r, int rank, const world *w) {
  const attn_case *c = &r->c;
  const shard *out[] = {&w->out, &w->state, &w->dq, &w->dk, &w->dv};
  int64_t row = q_cols(c) + 2 * kv_cols(c);
  check_beyond(c->dtype, w->o, w->n * q_cols(c));
  check_beyond(lev_dtype_arith(c->dtype), w->lse, w->n * c->heads);
  check_beyond(c->dtype, w->grad, w->n * (c->fused ? row + pad_of(c) : row));
  unsigned char *to[] = {r->o, r->lse, r->dq, r->dk, r->dv};
  for (int64_t i = 0; i < w->n; ++i) {
    int64_t pos = attn_token_position(c->seq, c->ranks, rank, i);
    for (int j = 0; j < 5; ++j) {
      size_t bytes = (size_t)out[j]->cols * lev_dtype_bytes(out[j]->type);
      memcpy(to[j] + (size_t)pos * bytes, shard_row(out[j], i), bytes);
    }
    if (!c->fused) continue;
    int64_t end = w->dv.at + w->dv.cols;
    const unsigned char *gap = w->grad + (size_t)(i * w->dv.stride + end) * lev_dtype_bytes(c->dtype);
    T_EXPECT_EQ_I64(num_poisoned(c->dtype, gap, pad_of(c)), pad_of(c));
  }
}

static lev_status world_phase(world *w, attn_phase phase, lev_blocks *blocks) {
  lev_walk_fn walk = phase == ATTN_FORWARD ? attn_walk_forward : attn_walk_backward;
  LEV_TRY(lev_arena_push(w->arena[LEV_MEM_DEVICE], &w->stream, 1));
  LEV_TRY(lev_blocks_take(w->arena, true, walk, w->plan, blocks));
  lev_blocks less = *blocks;
  if (less.bytes[LEV_MEM_DEVICE] >= LEV_ALIGN) {
    less.bytes[LEV_MEM_DEVICE] -= LEV_ALIGN;
    T_EXPECT_STATUS(attn_plan_bind(w->plan, phase, &less), LEV_ERR_CAPACITY);
  }
  return attn_plan_bind(w->plan, phase, blocks);
}

static int64_t stride_of(const attn_case *c, const shard *s) {
  return c->fused ? s->stride : 0;
}

static void check_kernels(const attn_rig *r, const attn_plan *plan, attn_phase phase) {
  bool library = attn_plan_through_library(plan), gpu = r->backend == LEV_BACKEND_CUDA;
  T_EXPECT(gpu || !library);
  if (gpu && r->c.through != 0)
    T_EXPECT(library == (r->c.through == 1 || (r->c.through == 2 && phase == ATTN_FORWARD)));
}

static lev_status world_calls(attn_rig *r, world *w) {
  const attn_case *c = &r->c;
  const int64_t *doc = is_packed(c) ? w->doc_begin : NULL, *host = c->no_host ? NULL : doc;
  lev_blocks blocks;
  LEV_TRY(world_phase(w, ATTN_FORWARD, &blocks));
  attn_forward_args f = {c->seq,
                         shard_row(&w->q, 0),
                         shard_row(&w->k, 0),
                         shard_row(&w->v, 0),
                         stride_of(c, &w->q),
                         stride_of(c, &w->k),
                         stride_of(c, &w->v),
                         c->window,
                         doc,
                         host,
                         w->o,
                         w->lse};
  LEV_TRY(attn_forward(w->plan, &f, w->stream));
  check_kernels(r, w->plan, ATTN_FORWARD);
  LEV_TRY(lev_arena_pop(w->arena[LEV_MEM_DEVICE]));
  LEV_TRY(world_phase(w, ATTN_BACKWARD, &blocks));
  attn_backward_args b = {.seq_len = c->seq,
                          .q = f.q,
                          .k = f.k,
                          .v = f.v,
                          .q_stride = f.q_stride,
                          .k_stride = f.k_stride,
                          .v_stride = f.v_stride,
                          .window = c->window,
                          .doc_begin = doc,
                          .doc_begin_host = host,
                          .o = w->o,
                          .lse = w->lse,
                          .d_o = w->d_o,
                          .dq = shard_row(&w->dq, 0),
                          .dk = shard_row(&w->dk, 0),
                          .dv = shard_row(&w->dv, 0),
                          .dq_stride = f.q_stride,
                          .dk_stride = f.k_stride,
                          .dv_stride = f.v_stride};
  LEV_TRY(attn_backward(w->plan, &b, w->stream));
  check_kernels(r, w->plan, ATTN_BACKWARD);
  LEV_TRY(lev_arena_pop(w->arena[LEV_MEM_DEVICE]));
  return lev_stream_sync(w->stream);
}

static lev_status world_run(attn_rig *r, int rank, world *w) {
  attn_rig_rank *k = &r->rank[rank];
  k->planned = 0;
  bool delayed = r->c.jitter != 0 && (r->c.jitter_rank == 0 || r->c.jitter_rank == rank);
  lev_device_config dc = {.backend = r->backend,
                          .index = t_gpu(rank),
                          .dry_for = t_backend(),
                          .trace = k->trace,
                          .fault = &k->fault,
                          .jitter_seed = delayed ? r->c.jitter * 100 + (uint64_t)rank : 0,
                          .immediate = r->c.immediate};
  LEV_TRY(lev_ledger_create(k->trace, &w->ledger));
  LEV_TRY(lev_device_open(&dc, &w->device));
  if (r->backend != LEV_BACKEND_DRY)
    LEV_TRY(lev_comm_local_join(r->hub, rank, w->device, &w->comm));
  else
    LEV_TRY(lev_comm_dry_create(r->c.ranks, rank, w->device, &w->comm));
  LEV_TRY(lev_stream_create(w->device, "compute", &w->stream));
  attn_config config = attn_rig_config(&r->c);
  LEV_TRY(attn_plan_create(w->device, w->comm, &config, &w->plan));
  bool library = r->backend == LEV_BACKEND_CUDA && config.route == ATTN_CUDNN;
  if (config.route != ATTN_AUTO || r->c.through == 0)
    T_EXPECT(strncmp(attn_plan_kernels(w->plan), library ? "cuDNN 9." : "own kernels", 8) == 0);
  for (attn_phase phase = ATTN_FORWARD; phase < ATTN_PHASES; ++phase) {
    size_t bytes[LEV_MEM_CLASSES];
    attn_plan_bytes(w->plan, phase, bytes);
    k->planned = lev_max_size(k->planned, bytes[LEV_MEM_DEVICE]);
    T_EXPECT_EQ_I64(bytes[LEV_MEM_PINNED] + bytes[LEV_MEM_HOST], 0);
  }
  void *slab;
  LEV_TRY(lev_device_alloc(w->device, LEV_MEM_DEVICE, k->planned, &slab));
  LEV_TRY(lev_arena_create(w->device, w->ledger, LEV_MEM_DEVICE, slab, k->planned, &w->arena[LEV_MEM_DEVICE]));
  lev_arena_seal(w->arena[LEV_MEM_DEVICE]);
  lev_device_seal(w->device);
  LEV_TRY(lev_fill(w->stream, slab, 0xFF, k->planned, "test.poison"));
  LEV_TRY(world_calls(r, w));
  k->peak = lev_ledger_peak(w->ledger, LEV_MEM_DEVICE);
  T_EXPECT_EQ_I64(k->peak, k->planned);
  return LEV_OK;
}

static void rank_main(int rank, void *ctx) {
  attn_rig *r = ctx;
  world w = {0};
  lev_status st = world_arrays(r, rank, &w) ? world_run(r, rank, &w) : LEV_ERR_NOMEM;
  if (st != LEV_OK && w.comm) lev_comm_abort(w.comm);
  if (st != LEV_OK && r->rank[rank].fault.seen[LEV_FAULT_COLLECTIVE] == 0) T_EXPECT_OK(st);
  if (st == LEV_OK && r->backend != LEV_BACKEND_DRY) world_collect(r, rank, &w);
  r->rank[rank].status = st;
  if (w.stream) lev_stream_destroy(w.stream);
  attn_destroy(w.plan);
  lev_comm_destroy(w.comm);
  lev_arena_destroy(w.arena[LEV_MEM_DEVICE]);
  lev_device_close(w.device);
  lev_ledger_destroy(w.ledger);
  void *all[] = {w.in, w.grad, w.o, w.d_o, w.lse, w.doc_begin};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i)
    if (all[i]) t_free(all[i]);
}

void attn_rig_run(attn_rig *r, lev_backend backend) {
  const attn_case *c = &r->c;
  r->backend = backend;
  num_poison(r->o, sizeof(double) * (size_t)(c->seq * q_cols(c)));
  num_poison(r->lse, sizeof(double) * (size_t)(c->seq * c->heads));
  num_poison(r->dq, sizeof(double) * (size_t)(c->seq * q_cols(c)));
  num_poison(r->dk, sizeof(double) * (size_t)(c->seq * kv_cols(c)));
  num_poison(r->dv, sizeof(double) * (size_t)(c->seq * kv_cols(c)));
  if (backend == LEV_BACKEND_DRY) {
    for (int i = 0; i < c->ranks; ++i) rank_main(i, r);
    return;
  }
  if (!T_EXPECT_OK(lev_comm_hub_create(c->ranks, 60, &r->hub))) return;
  t_ranks(c->ranks, rank_main, r);
  lev_comm_hub_destroy(r->hub);
}

/* ---- comparison ---- */

double attn_rig_error(const attn_rig *r) {
  const attn_case *c = &r->c;
  int64_t nq = c->seq * q_cols(c), nk = c->seq * kv_cols(c);
  double worst = num_rel_l2(lev_dtype_arith(c->dtype), r->lse, r->lse64, c->seq * c->heads);
  worst = fmax(worst, num_rel_l2(c->dtype, r->o, r->o64, nq));
  worst = fmax(worst, num_rel_l2(c->dtype, r->dq, r->dq64, nq));
  worst = fmax(worst, num_rel_l2(c->dtype, r->dk, r->dk64, nk));
  return fmax(worst, num_rel_l2(c->dtype, r->dv, r->dv64, nk));
}

void attn_rig_check(const attn_rig *r, double tolerance, const char *what) {
  const attn_case *c = &r->c;
  bool ok = NUM_CHECK(c->dtype, r->o, r->o64, c->seq, q_cols(c), tolerance, "o");
  ok &= NUM_CHECK(lev_dtype_arith(c->dtype), r->lse, r->lse64, c->seq, c->heads, tolerance, "lse");
  if (c->seq == 1 || c->document == 1) { /* a softmax over one key has no gradient: what is left is rounding */
    for (int64_t i = 0; i < c->seq * q_cols(c); ++i)
      ok &= T_EXPECT(fabs(lev_dtype_load(c->dtype, r->dq, i)) < tolerance);
    for (int64_t i = 0; i < c->seq * kv_cols(c); ++i)
      ok &= T_EXPECT(fabs(lev_dtype_load(c->dtype, r->dk, i)) < tolerance);
  } else {
    ok &= NUM_CHECK(c->dtype, r->dq, r->dq64, c->seq, q_cols(c), tolerance, "dq");
    ok &= NUM_CHECK(c->dtype, r->dk, r->dk64, c->seq, kv_cols(c), tolerance, "dk");
  }
  ok &= NUM_CHECK(c->dtype, r->dv, r->dv64, c->seq, kv_cols(c), tolerance, "dv");
  T_EXPECT_MSG(ok, "%s: %lld tokens on %d ranks, %lld/%lld heads of %lld", what, (long long)c->seq, c->ranks,
               (long long)c->heads, (long long)c->kv_heads, (long long)c->dim);
}

bool attn_rig_cudnn(void) {
#ifdef LEV_HAVE_CUDA
  attn_cudnn *library = NULL;
  lev_status st = attn_cudnn_open(&library);
  attn_cudnn_close(library);
  return st == LEV_OK;
#else
  (void)lev_fail(LEV_ERR_UNSUPPORTED, "this build has no cuda side");
  return false;
#endif
}

void attn_case_check(const attn_case *c, double tolerance, const char *what) {
  attn_rig r;
  attn_config config = attn_rig_config(c);
  config.route = ATTN_CUDNN;
  bool both = t_backend() == LEV_BACKEND_CUDA && attn_supports(LEV_BACKEND_CUDA, c->ranks, &config) == LEV_OK &&
              attn_rig_cudnn();
  if (attn_rig_open(&r, c)) {
    attn_rig_run(&r, t_backend());
    attn_rig_check(&r, tolerance, what);
    r.c.route = ATTN_CUDNN;
    if (both && c->route != ATTN_CUDNN) attn_rig_run(&r, t_backend()), attn_rig_check(&r, tolerance, what);
  }
  attn_rig_close(&r);
}
