/* SPDX-License-Identifier: Apache-2.0 */
/* Validation, regions and the ring schedule of attention. */
#include "harness/model/attention.h"

#include <math.h>

#include "common/dims.h"
#include "common/hostmem.h"
#include "common/log.h"
#include "common/trace.h"
#include "harness/model/attention_ops.h"

#define BLOCK_ROWS 256   /* chosen query block: at most this many rows (tokens x heads per key head) ... */
#define BLOCK_TOKENS 128 /* ... and tokens: longer blocks waste more on the diagonal */
#define BLOCK_KEYS 256
#define CUDA_DIM 640                      /* head sizes whose smallest tiles fit a multiprocessor's shared memory */
#define CUDA_HEADS 65535                  /* a grid's second dimension */
#define CUDA_DIM_F64 320                  /* the same for f64 */
#define GROUPS 2                          /* groups of key heads whose gradients travel separately */
#define LIBRARY_DIM 256                   /* largest head size that cuDNN takes, in steps of 8 */
#define LIBRARY_TOKENS 1024               /* ATTN_AUTO: shares below this are left to our own kernels ... */
#define LIBRARY_PAIRS ((double)(1 << 20)) /* ... and packings with fewer pairs of query and key per call of cuDNN */
#define PACKED_DIM 16                 /* packed documents: heads in steps of this (others gave a wrong dq on an H200) */
#define WORKSPACE ((size_t)256 << 20) /* beyond, larger blocks gain nothing (H200) */

struct attn_plan {
  attn_config config;
  attn_shape shape;
  lev_device *device;
  lev_comm *comm;
  int size, rank;
  int groups;
  bool on_gpu; /* runs there, or is planned for it */
  lev_dtype arith;
  size_t t_bytes, a_bytes;
  lev_stream *comm_stream;
  lev_event *mark;           /* the compute stream may be overtaken up to here */
  lev_event *kv_arrived;     /* keys and values of the next step */
  lev_event *computed;       /* gradients of one group */
  lev_event *landed[GROUPS]; /* gradients of a group, before the next step */
  attn_phase bound;          /* ATTN_PERSISTENT: none */
  void *kv[2], *dkv[2], *acc, *sum, *scratch, *workspace;
  attn_cut cut[ATTN_PHASES]; /* cuDNN's blocks of heads; kv_heads = 0: not used */
  size_t workspace_bytes[ATTN_PHASES];
  attn_cudnn *library; /* NULL: our own kernels */
  int64_t documents;   /* of one call of cuDNN; 0: it takes no packed documents */
  bool last_library;   /* what the last call was given to */
};

/* ---- shards ---- */

void attn_shard_ranges(int64_t seq_len, int ranks, int rank, attn_range ranges[2]) {
  for (int i = 0; i < 2; ++i) {
    int64_t pieces = 2 * (int64_t)ranks, piece = i == 0 ? rank : pieces - 1 - rank;
    ranges[i].begin = lev_part_begin(seq_len, pieces, piece);
    ranges[i].end = lev_part_begin(seq_len, pieces, piece + 1);
  }
}

int64_t attn_shard_tokens(int64_t seq_len, int ranks, int rank) {
  attn_range r[2];
  attn_shard_ranges(seq_len, ranks, rank, r);
  return r[0].end - r[0].begin + r[1].end - r[1].begin;
}

int64_t attn_token_position(int64_t seq_len, int ranks, int rank, int64_t row) {
  attn_range r[2];
  attn_shard_ranges(seq_len, ranks, rank, r);
  int64_t first = r[0].end - r[0].begin;
  return row < first ? r[0].begin + row : r[1].begin + row - first;
}

/* ---- validation ---- */

void attn_config_init(attn_config *config) {
  *config = (attn_config){.size = sizeof *config, .dtype = LEV_F32};
}

/* Packed documents that one call of cuDNN takes under a configuration. */
static int64_t documents_of(int ranks, const attn_config *c) {
  return c->packed && ranks <= 1 && c->head_dim % PACKED_DIM == 0 ? ATTN_DOCUMENTS : 0;
}

/* Whether a configuration goes through cuDNN where that is there; the same on every machine. */
static bool library_fits(lev_backend target, int ranks, const attn_config *c) {
  bool can = target == LEV_BACKEND_CUDA && c->dtype == LEV_BF16 && c->head_dim % 8 == 0 && c->head_dim <= LIBRARY_DIM;
  bool pays = c->max_tokens >= LIBRARY_TOKENS && (!c->packed || documents_of(ranks, c) > 0);
  return can && (c->route == ATTN_CUDNN || (c->route == ATTN_AUTO && pays));
}

lev_status attn_supports(lev_backend backend, int ranks, const attn_config *c) {
  if (!c || c->size != sizeof *c)
    return lev_fail(LEV_ERR_CONFIG, "attention: configuration of another version (attn_config_init not called?)");
  if (backend < 0 || backend >= LEV_BACKENDS) return lev_fail(LEV_ERR_CONFIG, "attention: unknown backend");
  if (ranks < 1) return lev_fail(LEV_ERR_CONFIG, "attention: %d ranks in the context group", ranks);
  if (c->dtype != LEV_F64 && c->dtype != LEV_F32 && c->dtype != LEV_BF16)
    return lev_fail(LEV_ERR_CONFIG, "attention: dtype must be f64, f32 or bf16");
  if (c->max_tokens < 0 || c->heads < 1 || c->kv_heads < 1 || c->head_dim < 1)
    return lev_fail(LEV_ERR_CONFIG,
                    "attention: %lld tokens, %lld query heads, %lld key heads of size %lld: counts must be positive",
                    (long long)c->max_tokens, (long long)c->heads, (long long)c->kv_heads, (long long)c->head_dim);
  if (c->heads % c->kv_heads != 0)
    return lev_fail(LEV_ERR_CONFIG, "attention: %lld query heads are no multiple of %lld key heads",
                    (long long)c->heads, (long long)c->kv_heads);
  int64_t most = c->dtype == LEV_F64 ? CUDA_DIM_F64 : CUDA_DIM;
  if (backend == LEV_BACKEND_CUDA && c->head_dim > most)
    return lev_fail(LEV_ERR_CONFIG, "attention: heads of %lld scalars, the kernels hold at most %lld (%s)",
                    (long long)c->head_dim, (long long)most, lev_dtype_name(c->dtype));
  if (backend == LEV_BACKEND_CUDA && c->heads > CUDA_HEADS)
    return lev_fail(LEV_ERR_CONFIG, "attention: %lld query heads on a GPU, the kernels take at most %d",
                    (long long)c->heads, CUDA_HEADS);
  if ((unsigned)c->route > ATTN_TILED) return lev_fail(LEV_ERR_CONFIG, "attention: unknown route %d", (int)c->route);
  if (c->route == ATTN_CUDNN && !library_fits(backend, ranks, c))
    return lev_fail(LEV_ERR_CONFIG,
                    "attention: cuDNN asked for with heads of %lld scalars, %s, on %s; it takes 8 to %d in steps of 8, "
                    "bf16, on cuda",
                    (long long)c->head_dim, lev_dtype_name(c->dtype), lev_backend_name(backend), LIBRARY_DIM);
  if (c->block_q < 0 || c->block_k < 0 || !isfinite(c->scale))
    return lev_fail(LEV_ERR_CONFIG, "attention: block %lld x %lld, scale %g: must be finite and not negative",
                    (long long)c->block_q, (long long)c->block_k, c->scale);
  return LEV_OK;
}

static attn_shape shape_of(const attn_config *c) {
  attn_shape s = {.dtype = c->dtype,
                  .heads = c->heads,
                  .kv_heads = c->kv_heads,
                  .head_dim = c->head_dim,
                  .block_q = c->block_q,
                  .block_k = c->block_k,
                  .scale = c->scale != 0 ? c->scale : 1 / sqrt((double)c->head_dim)};
  if (s.block_q == 0) s.block_q = lev_min_i64(BLOCK_TOKENS, lev_ceil_div(BLOCK_ROWS, c->heads / c->kv_heads));
  if (s.block_k == 0) s.block_k = BLOCK_KEYS;
  int64_t tokens = lev_max_i64(1, c->max_tokens);
  s.block_q = lev_min_i64(s.block_q, tokens);
  s.block_k = lev_min_i64(s.block_k, tokens);
  return s;
}

/* ---- regions ---- */

static void walk_plan(attn_plan *p, attn_phase phase, lev_walker *w) {
  if (phase == ATTN_PERSISTENT) return;
  const attn_config *c = &p->config;
  const int64_t n = c->max_tokens, chunk = 2 * c->kv_heads * c->head_dim;
  bool ring = p->size > 1, wide = p->arith != c->dtype;
  for (int i = 0; i < 2; ++i) p->kv[i] = ring ? lev_walk(w, LEV_MEM_DEVICE, "attn.kv", c->dtype, n, chunk) : NULL;
  if (phase == ATTN_BACKWARD)
    for (int i = 0; i < (ring ? 2 : wide && !p->on_gpu ? 1 : 0); ++i)
      p->dkv[i] = lev_walk(w, LEV_MEM_DEVICE, "attn.dkv", p->arith, n, chunk);
  if (ring && wide) p->acc = lev_walk(w, LEV_MEM_DEVICE, "attn.acc", p->arith, n, c->heads * c->head_dim);
  if (ring && phase == ATTN_FORWARD) p->sum = lev_walk(w, LEV_MEM_DEVICE, "attn.state", p->arith, n, c->heads);
  p->scratch =
      lev_walk(w, LEV_MEM_DEVICE, "attn.scratch", p->arith, 1, attn_scratch_scalars(&p->shape, phase == ATTN_BACKWARD));
  p->workspace = lev_walk(w, LEV_MEM_DEVICE, "attn.workspace", LEV_U8, 1, (int64_t)p->workspace_bytes[phase]);
}

static void walk_phase(const attn_plan *p, attn_phase phase, lev_walker *w) {
  attn_plan copy = *p; /* counting must not disturb bound pointers */
  walk_plan(&copy, phase, w);
}

void attn_walk_persistent(void *plan, lev_walker *walker) {
  walk_phase(plan, ATTN_PERSISTENT, walker);
}
void attn_walk_forward(void *plan, lev_walker *walker) {
  walk_phase(plan, ATTN_FORWARD, walker);
}
void attn_walk_backward(void *plan, lev_walker *walker) {
  walk_phase(plan, ATTN_BACKWARD, walker);
}

void attn_plan_bytes(const attn_plan *plan, attn_phase phase, size_t bytes[LEV_MEM_CLASSES]) {
  lev_walker walker = {0};
  walk_phase(plan, phase, &walker);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) bytes[c] = walker.used[c];
}

void attn_plan_regions(const attn_plan *plan, attn_phase phase, lev_region_fn list, void *ctx) {
  lev_walker walker = {.list = list, .list_ctx = ctx};
  walk_phase(plan, phase, &walker);
}

lev_status attn_plan_bind(attn_plan *plan, attn_phase phase, const lev_blocks *blocks) {
  static const char *const names[ATTN_PHASES] = {"attn.persistent", "attn.forward", "attn.backward"};
  if (!plan || !blocks || phase < 0 || phase >= ATTN_PHASES) return lev_fail(LEV_ERR_ARG, "attention: bad bind");
  lev_walker need = {0};
  walk_phase(plan, phase, &need);
  LEV_TRY(lev_blocks_check(&need, blocks, names[phase]));
  lev_trace_add(lev_device_trace(plan->device), LEV_EV_BIND, 0, names[phase], need.used[LEV_MEM_DEVICE]);
  if (phase == ATTN_PERSISTENT) return LEV_OK;
  lev_walker walker = {.base = {[LEV_MEM_DEVICE] = blocks->base[LEV_MEM_DEVICE]}};
  walk_plan(plan, phase, &walker);
  plan->bound = phase;
  return LEV_OK;
}

/* ---- life ---- */

static lev_status plan_streams(attn_plan *p) {
  LEV_TRY(lev_stream_create(p->device, "attn.comm", &p->comm_stream));
  lev_event **events[] = {&p->mark, &p->kv_arrived, &p->computed, &p->landed[0], &p->landed[1]};
  for (size_t i = 0; i < sizeof events / sizeof *events; ++i) LEV_TRY(lev_event_create(p->device, events[i]));
  return LEV_OK;
}

/* ---- cuDNN ---- */

static int ring_groups(int ranks, const attn_config *c) {
  return ranks <= 1 ? 1 : (int)lev_min_i64(GROUPS, c->kv_heads);
}

/* The blocks of heads of a phase under a cap, or the least ones; `bytes` is what they take. */
static attn_cut cut_of(int ranks, const attn_config *c, attn_phase phase, size_t cap, size_t *bytes) {
  attn_room_shape s = {.per_key = c->heads / c->kv_heads,
                       .queries = c->max_tokens,
                       .keys = c->max_tokens,
                       .dim = c->head_dim,
                       .documents = documents_of(ranks, c),
                       .backward = phase == ATTN_BACKWARD,
                       .ring = ranks > 1};
  /* In backward a block lies within each group of key heads, and those are halves of G. */
  int64_t groups = phase == ATTN_BACKWARD ? ring_groups(ranks, c) : 1;
  return attn_cut_choose(s, c->kv_heads % groups == 0 ? c->kv_heads / groups : 1, cap, bytes);
}

size_t attn_least_workspace(int ranks, const attn_config *c) {
  size_t forward, backward;
  if (!library_fits(LEV_BACKEND_CUDA, ranks, c) || c->max_tokens == 0) return 0;
  (void)cut_of(ranks, c, ATTN_FORWARD, 0, &forward);
  (void)cut_of(ranks, c, ATTN_BACKWARD, 0, &backward);
  return lev_max_size(forward, backward);
}

static lev_status plan_library(attn_plan *p) {
  const attn_config *c = &p->config;
  if (!library_fits(p->on_gpu ? LEV_BACKEND_CUDA : LEV_BACKEND_CPU, p->size, c) || c->max_tokens == 0) return LEV_OK;
  size_t least = attn_least_workspace(p->size, c);
  if (c->workspace != 0 && c->workspace < least)
    return lev_fail(LEV_ERR_CONFIG, "attention: a workspace of %zu bytes; one block of %lld tokens takes %zu",
                    c->workspace, (long long)c->max_tokens, least);
  size_t cap = c->workspace ? c->workspace : WORKSPACE;
  /* Packed documents go through the library with all heads in forward or not at all: forward may take what backward
   * takes in any case, and where even that holds no more than blocks, nothing is planned for the library. */
  size_t forward_cap = p->documents > 0 ? lev_max_size(cap, least) : cap;
  p->cut[ATTN_FORWARD] = cut_of(p->size, c, ATTN_FORWARD, forward_cap, &p->workspace_bytes[ATTN_FORWARD]);
  if (p->documents > 0 && c->route == ATTN_AUTO && p->cut[ATTN_FORWARD].kv_heads < c->kv_heads) {
    p->cut[ATTN_FORWARD].kv_heads = 0, p->workspace_bytes[ATTN_FORWARD] = 0;
    return LEV_OK;
  }
  p->cut[ATTN_BACKWARD] = cut_of(p->size, c, ATTN_BACKWARD, cap, &p->workspace_bytes[ATTN_BACKWARD]);
  return LEV_OK;
}

#ifdef LEV_HAVE_CUDA
/* The blocks that a sequence as long as the plan allows takes, so that their plans are made, and their demands seen,
 * before anything runs. */
static lev_status prepare_library(const attn_plan *p) {
  const attn_config *c = &p->config;
  if (p->size > 1) return LEV_OK; /* shapes differ by hop: made as they come, of the same formula */
  const int64_t d = c->head_dim, n = c->max_tokens;
  const attn_layout q = {c->heads * d, d}, k = {c->kv_heads * d, d};
  for (attn_phase phase = ATTN_FORWARD; n > 1 && phase < ATTN_PHASES; ++phase) {
    const attn_cut *cut = &p->cut[phase];
    bool passes = phase == ATTN_BACKWARD && cut->per_key < c->heads / c->kv_heads;
    attn_block_shape s = {.heads = cut->kv_heads * cut->per_key,
                          .kv_heads = cut->kv_heads,
                          .queries = n,
                          .keys = n,
                          .dim = d,
                          .documents = p->documents,
                          .causal = 1,
                          .backward = phase == ATTN_BACKWARD,
                          .q = q,
                          .k = k,
                          .v = k,
                          .o = q,
                          .dq = q,
                          .dk = k,
                          .dv = k};
    if (passes) s.q.head = s.o.head = s.dq.head = c->heads / c->kv_heads * d, s.dk = s.dv = (attn_layout){d, n * d};
    if (p->documents > 0) {
      s.lse = (attn_layout){c->heads, s.q.head / d};
      if (phase == ATTN_BACKWARD) s.q = s.dq = (attn_layout){s.heads * d, d};
      if (phase == ATTN_BACKWARD && c->heads > c->kv_heads) s.k = s.v = s.dk = s.dv = (attn_layout){s.kv_heads * d, d};
    }
    if (phase == ATTN_FORWARD) s.dq = s.dk = s.dv = (attn_layout){0, 0};
    LEV_TRY(attn_cudnn_prepare(p->library, &s));
  }
  return LEV_OK;
}

/* Falls back to our own kernels where the library cannot be had and was not asked for. */
static lev_status open_library(attn_plan *p) {
  if (lev_device_backend(p->device) != LEV_BACKEND_CUDA) return LEV_OK;
  if (p->cut[ATTN_FORWARD].kv_heads == 0) {
    lev_log(LEV_LOG_INFO, LEV_SYS_PLAN, "attention: own kernels");
    return LEV_OK;
  }
  lev_status st = attn_cudnn_open(&p->library);
  if (st == LEV_OK) st = prepare_library(p);
  if (st == LEV_ERR_UNSUPPORTED && p->config.route == ATTN_AUTO) {
    attn_cudnn_close(p->library);
    p->library = NULL;
    lev_log(LEV_LOG_INFO, LEV_SYS_PLAN, "attention: own kernels (%s)", lev_detail());
    return LEV_OK;
  }
  LEV_TRY(st);
  const attn_cut *f = &p->cut[ATTN_FORWARD], *b = &p->cut[ATTN_BACKWARD];
  lev_log(LEV_LOG_INFO, LEV_SYS_PLAN,
          "attention: %s, blocks of %lld and %lld query heads forward and backward; dq is not the same to the bit in "
          "two runs",
          attn_cudnn_name(p->library), (long long)(f->kv_heads * f->per_key), (long long)(b->kv_heads * b->per_key));
  return LEV_OK;
}
#endif

bool attn_plan_through_library(const attn_plan *plan) {
  return plan->last_library;
}

const char *attn_plan_kernels(const attn_plan *plan) {
#ifdef LEV_HAVE_CUDA
  if (plan->library) return attn_cudnn_name(plan->library);
#endif
  (void)plan;
  return "own kernels";
}

lev_status attn_plan_create(lev_device *device, lev_comm *context_comm, const attn_config *config, attn_plan **out) {
  if (!out) return lev_fail(LEV_ERR_ARG, "attention: nowhere to put the plan");
  *out = NULL;
  if (!device || !context_comm) return lev_fail(LEV_ERR_ARG, "attention: a device and a communicator are needed");
  LEV_TRY(attn_supports(lev_device_target(device), lev_comm_size(context_comm), config));
  attn_plan *p = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  p->config = *config;
  p->shape = shape_of(config);
  p->device = device;
  p->comm = context_comm;
  p->size = lev_comm_size(context_comm);
  p->rank = lev_comm_rank(context_comm);
  p->groups = ring_groups(p->size, config);
  p->on_gpu = lev_device_target(device) == LEV_BACKEND_CUDA;
  p->arith = lev_dtype_arith(config->dtype);
  p->t_bytes = lev_dtype_bytes(config->dtype);
  p->a_bytes = lev_dtype_bytes(p->arith);
  p->documents = documents_of(p->size, config);
  lev_status st = plan_library(p);
  if (st == LEV_OK) st = plan_streams(p);
#ifdef LEV_HAVE_CUDA
  if (st == LEV_OK) st = open_library(p);
#endif
  if (st != LEV_OK) {
    attn_destroy(p);
    return st;
  }
  *out = p;
  return LEV_OK;
}

void attn_destroy(attn_plan *plan) {
  if (!plan) return;
  lev_event *events[] = {plan->mark, plan->kv_arrived, plan->computed, plan->landed[0], plan->landed[1]};
  for (size_t i = 0; i < sizeof events / sizeof *events; ++i)
    if (events[i]) lev_event_destroy(events[i]);
  if (plan->comm_stream) lev_stream_destroy(plan->comm_stream);
#ifdef LEV_HAVE_CUDA
  attn_cudnn_close(plan->library);
#endif
  lev_free(plan);
}

/* ---- checks ---- */

static lev_status check_call(const attn_plan *p, attn_phase phase, int64_t seq_len, int64_t window,
                             const lev_stream *stream) {
  if (p->bound != phase)
    return lev_fail(LEV_ERR_MISUSE, "attention: the %s phase is not bound",
                    phase == ATTN_FORWARD ? "forward" : "backward");
  if (!stream) return lev_fail(LEV_ERR_ARG, "attention: a stream is needed");
  if (seq_len < 0 || window < 0)
    return lev_fail(LEV_ERR_ARG, "attention: %lld tokens, window %lld", (long long)seq_len, (long long)window);
  for (int r = 0; r < p->size; ++r) {
    int64_t tokens = attn_shard_tokens(seq_len, p->size, r);
    if (tokens > p->config.max_tokens)
      return lev_fail(LEV_ERR_CAPACITY,
                      "attention: a sequence of %lld tokens puts %lld on rank %d of %d, planned for at most %lld",
                      (long long)seq_len, (long long)tokens, r, p->size, (long long)p->config.max_tokens);
  }
  return LEV_OK;
}

/* One row of an array: NULL check and stride (0 = dense). */
static lev_status check_rows(const void *array, int64_t heads, int64_t head_dim, const char *name, int64_t *stride) {
  if (!array) return lev_fail(LEV_ERR_ARG, "attention: %s is NULL", name);
  int64_t width = heads * head_dim;
  if (*stride == 0) *stride = width;
  if (*stride < width)
    return lev_fail(LEV_ERR_ARG, "attention: rows of %s are %lld scalars apart and %lld long", name, (long long)*stride,
                    (long long)width);
  return LEV_OK;
}

static lev_status check_dense(const void *array, const char *name) {
  return array ? LEV_OK : lev_fail(LEV_ERR_ARG, "attention: %s is NULL", name);
}

/* ---- the ring ---- */

/* One call on one rank: the caller's keys and values with their strides resolved, and where the ring stands. */
typedef struct ring_run {
  attn_plan *p;
  lev_stream *stream;
  int64_t seq_len;
  attn_step step; /* all but keys, first, last */
  attn_rows own;  /* the caller's k and v */
  int hop;
} ring_run;

/* Whose tokens this rank holds at a hop. */
static int ring_owner(const ring_run *run, int hop) {
  int size = run->p->size;
  return ((run->p->rank - hop) % size + size) % size;
}
static int64_t ring_tokens(const ring_run *run, int hop) {
  return attn_shard_tokens(run->seq_len, run->p->size, ring_owner(run, hop));
}

/* Scalars of a chunk of n tokens before key head h. */
static int64_t chunk_at(const attn_plan *p, int64_t n, int64_t head) {
  return head * n * 2 * p->config.head_dim;
}

static attn_rows chunk_rows(const attn_plan *p, void *chunk, int64_t n, size_t elem) {
  int64_t d = p->config.head_dim;
  char *v = chunk ? (char *)chunk + (size_t)d * elem : NULL;
  return (attn_rows){.k = chunk, .v = v, .k_row = 2 * d, .v_row = 2 * d, .head = n * 2 * d};
}

/* On dry, pointers are fake but arithmetic on them is harmless: nothing reads them. */
static void *offset(void *base, int64_t scalars, size_t elem) {
  return (char *)base + (size_t)scalars * elem;
}

static bool on_16(const void *address, int64_t stride) {
  return (uintptr_t)address % 16 == 0 && stride % 8 == 0;
}

/* Whether packed documents go through the library: where nothing else was asked for, only if the calls that they take
 * are worth it. */
static lev_status documents_fit(const ring_run *run, bool *fit) {
  const attn_plan *p = run->p;
  attn_packing packing;
  bool all_heads = p->cut[ATTN_FORWARD].kv_heads == p->config.kv_heads; /* forward in blocks: not tried on a GPU */
  *fit = p->documents > 0 && run->step.documents && all_heads;
  if (!*fit) return LEV_OK;
  LEV_TRY(attn_packing_of(run->step.documents, run->seq_len, &packing));
  double calls = (double)lev_ceil_div(packing.documents, p->documents);
  *fit = p->config.route == ATTN_CUDNN || calls <= 1 || packing.pairs >= LIBRARY_PAIRS * calls;
  return LEV_OK;
}

/* Whether the library takes a call; the same for all its hops. Outputs of forward are dense and aligned. */
static lev_status library_takes(const ring_run *run, bool *takes) {
  const attn_plan *p = run->p;
  const attn_step *s = &run->step;
  int64_t least = p->size == 1 ? 2 : 4 * (int64_t)p->size; /* two tokens in each piece of a ring */
  *takes = p->library && run->seq_len >= least && (s->window == 0 || p->size == 1) && on_16(s->q, s->q_stride) &&
           on_16(run->own.k, run->own.k_row) && on_16(run->own.v, run->own.v_row);
  return *takes && s->doc_begin ? documents_fit(run, takes) : LEV_OK;
}

static lev_status ring_start(ring_run *run, bool aligned) {
  attn_plan *p = run->p;
  const attn_config *c = &p->config;
  bool takes;
  LEV_TRY(library_takes(run, &takes));
  run->step.shape = p->shape;
  run->step.scratch = p->scratch;
  run->step.workspace = p->workspace;
  run->step.forward_cut = p->cut[ATTN_FORWARD], run->step.backward_cut = p->cut[ATTN_BACKWARD];
  run->step.longest = c->max_tokens;
  run->step.may_fall_back = c->route == ATTN_AUTO && p->size == 1;
  run->step.library = aligned && takes ? p->library : NULL;
  if (!run->step.library || !run->step.doc_begin) run->step.documents = NULL;
  p->last_library = run->step.library != NULL;
  attn_shard_ranges(run->seq_len, p->size, p->rank, run->step.q_range);
  if (p->size == 1) return LEV_OK;
  attn_chunk_args pack = {.dtype = c->dtype,
                          .tokens = ring_tokens(run, 0),
                          .head_dim = c->head_dim,
                          .head_begin = 0,
                          .head_end = c->kv_heads,
                          .rows = run->own,
                          .chunk = p->kv[0]};
  return LEV_LAUNCH(run->stream, &attn_pack_kernel, pack);
}

/* Points the step at the keys of this hop and sends them on for the next one. In forward, the slot that receives
 * was read by the previous hop's kernel, which the mark covers, and this hop's keys are waited for. In backward, the
 * gradients travel on the same stream behind the keys and in front of the next ones, and their waits do both. */
static lev_status ring_hop(ring_run *run, bool forward) {
  attn_plan *p = run->p;
  int hop = run->hop;
  attn_shard_ranges(run->seq_len, p->size, ring_owner(run, hop), run->step.k_range);
  run->step.first = hop == 0;
  run->step.last = hop == p->size - 1;
  if (p->size == 1) {
    run->step.kv = run->own;
    return LEV_OK;
  }
  run->step.kv = chunk_rows(p, p->kv[hop & 1], ring_tokens(run, hop), p->t_bytes);
  if (forward && hop > 0) LEV_TRY(lev_stream_wait(run->stream, p->kv_arrived));
  if (run->step.last) return LEV_OK;
  if (forward || hop == 0) {
    LEV_TRY(lev_event_record(p->mark, run->stream));
    LEV_TRY(lev_stream_wait(p->comm_stream, p->mark));
  }
  size_t send = (size_t)chunk_at(p, ring_tokens(run, hop), p->config.kv_heads) * p->t_bytes;
  size_t recv = (size_t)chunk_at(p, ring_tokens(run, hop + 1), p->config.kv_heads) * p->t_bytes;
  LEV_TRY(lev_comm_ring_shift(p->comm, p->comm_stream, p->kv[hop & 1], send, p->kv[(hop + 1) & 1], recv));
  return forward ? lev_event_record(p->kv_arrived, p->comm_stream) : LEV_OK;
}

/* ---- forward ---- */

lev_status attn_forward(attn_plan *p, const attn_forward_args *args, lev_stream *stream) {
  if (!p || !args) return lev_fail(LEV_ERR_ARG, "attention: no plan or no arguments");
  LEV_TRY(check_call(p, ATTN_FORWARD, args->seq_len, args->window, stream));
  if (args->seq_len == 0) return LEV_OK;
  attn_forward_args a = *args;
  const attn_config *c = &p->config;
  if (attn_shard_tokens(a.seq_len, p->size, p->rank) > 0) {
    LEV_TRY(check_rows(a.q, c->heads, c->head_dim, "q", &a.q_stride));
    LEV_TRY(check_rows(a.k, c->kv_heads, c->head_dim, "k", &a.k_stride));
    LEV_TRY(check_rows(a.v, c->kv_heads, c->head_dim, "v", &a.v_stride));
    LEV_TRY(check_dense(a.o, "o"));
    LEV_TRY(check_dense(a.lse, "lse"));
  }
  ring_run run = {.p = p, .stream = stream, .seq_len = a.seq_len};
  run.step = (attn_step){.window = a.window, .q = a.q, .q_stride = a.q_stride, .doc_begin = a.doc_begin};
  run.step.documents = a.doc_begin_host;
  run.own = (attn_rows){(void *)(uintptr_t)a.k, (void *)(uintptr_t)a.v, a.k_stride, a.v_stride, c->head_dim};
  LEV_TRY(ring_start(&run, on_16(a.o, 0)));
  for (run.hop = 0; run.hop < p->size; ++run.hop) {
    LEV_TRY(ring_hop(&run, true));
    attn_forward_step f = {.step = run.step, .acc = p->acc ? p->acc : a.o, .sum = p->sum, .o = a.o, .lse = a.lse};
    LEV_TRY(LEV_LAUNCH(stream, &attn_forward_kernel, f));
  }
  return LEV_OK;
}

/* ---- backward ---- */

/* Adds this rank's share to the gradients of one group of heads. They arrived while the other group was computed, and
 * leave as soon as they are complete. */
static lev_status backward_group(ring_run *run, attn_backward_step *b, int group) {
  attn_plan *p = run->p;
  b->head_begin = lev_part_begin(p->config.kv_heads, p->groups, group);
  b->head_end = lev_part_begin(p->config.kv_heads, p->groups, group + 1);
  if (run->hop > 0) LEV_TRY(lev_stream_wait(run->stream, p->landed[group]));
  LEV_TRY(lev_launch(run->stream, &attn_backward_kernel, b, sizeof *b));
  if (p->size == 1) return LEV_OK;
  LEV_TRY(lev_event_record(p->computed, run->stream));
  LEV_TRY(lev_stream_wait(p->comm_stream, p->computed));
  int64_t mine = ring_tokens(run, run->hop), next = ring_tokens(run, run->hop + 1);
  int64_t from = chunk_at(p, mine, b->head_begin), to = chunk_at(p, next, b->head_begin);
  size_t send = (size_t)(chunk_at(p, mine, b->head_end) - from) * p->a_bytes;
  size_t recv = (size_t)(chunk_at(p, next, b->head_end) - to) * p->a_bytes;
  LEV_TRY(lev_comm_ring_shift(p->comm, p->comm_stream, offset(p->dkv[run->hop & 1], from, p->a_bytes), send,
                              offset(p->dkv[(run->hop + 1) & 1], to, p->a_bytes), recv));
  return lev_event_record(p->landed[group], p->comm_stream);
}

/* The gradients of the rank's own keys are home after as many hops as there are ranks: rounds them to dk and dv. */
static lev_status backward_home(ring_run *run, const attn_rows *grads) {
  attn_plan *p = run->p;
  attn_chunk_args out = {.dtype = p->config.dtype,
                         .tokens = ring_tokens(run, 0),
                         .head_dim = p->config.head_dim,
                         .rows = *grads,
                         .chunk = p->dkv[p->size == 1 ? 0 : p->size & 1]};
  for (int group = 0; group < p->groups; ++group) {
    if (p->size > 1) LEV_TRY(lev_stream_wait(run->stream, p->landed[group]));
    out.head_begin = lev_part_begin(p->config.kv_heads, p->groups, group);
    out.head_end = lev_part_begin(p->config.kv_heads, p->groups, group + 1);
    LEV_TRY(LEV_LAUNCH(run->stream, &attn_unpack_kernel, out));
  }
  return LEV_OK;
}

static lev_status backward_check(const attn_plan *p, attn_backward_args *a) {
  const attn_config *c = &p->config;
  if (attn_shard_tokens(a->seq_len, p->size, p->rank) == 0) return LEV_OK;
  LEV_TRY(check_rows(a->q, c->heads, c->head_dim, "q", &a->q_stride));
  LEV_TRY(check_rows(a->k, c->kv_heads, c->head_dim, "k", &a->k_stride));
  LEV_TRY(check_rows(a->v, c->kv_heads, c->head_dim, "v", &a->v_stride));
  LEV_TRY(check_rows(a->dq, c->heads, c->head_dim, "dq", &a->dq_stride));
  LEV_TRY(check_rows(a->dk, c->kv_heads, c->head_dim, "dk", &a->dk_stride));
  LEV_TRY(check_rows(a->dv, c->kv_heads, c->head_dim, "dv", &a->dv_stride));
  LEV_TRY(check_dense(a->o, "o"));
  LEV_TRY(check_dense(a->lse, "lse"));
  return check_dense(a->d_o, "d_o");
}

/* Whether dk and dv lie as the library wants them with documents, or come in parts. */
static bool rows_alike(const attn_plan *p, const attn_backward_args *a) {
  return p->config.heads > p->config.kv_heads || (a->dk_stride == a->k_stride && a->dv_stride == a->v_stride);
}

lev_status attn_backward(attn_plan *p, const attn_backward_args *args, lev_stream *stream) {
  if (!p || !args) return lev_fail(LEV_ERR_ARG, "attention: no plan or no arguments");
  LEV_TRY(check_call(p, ATTN_BACKWARD, args->seq_len, args->window, stream));
  if (args->seq_len == 0) return LEV_OK;
  attn_backward_args a = *args;
  LEV_TRY(backward_check(p, &a));
  const attn_config *c = &p->config;
  attn_rows grads = {a.dk, a.dv, a.dk_stride, a.dv_stride, c->head_dim};
  ring_run run = {.p = p, .stream = stream, .seq_len = a.seq_len};
  run.step = (attn_step){.window = a.window, .q = a.q, .q_stride = a.q_stride, .doc_begin = a.doc_begin};
  run.step.documents = a.doc_begin_host;
  run.own = (attn_rows){(void *)(uintptr_t)a.k, (void *)(uintptr_t)a.v, a.k_stride, a.v_stride, c->head_dim};
  attn_backward_step b = {.o = a.o, .lse = a.lse, .d_o = a.d_o, .dq = a.dq, .dq_stride = a.dq_stride};
  b.acc = p->acc ? p->acc : a.dq;
  b.acc_stride = p->acc ? c->heads * c->head_dim : a.dq_stride;
  b.dkv_rounded = p->size == 1 && !p->dkv[0];
  LEV_TRY(ring_start(&run, on_16(a.o, 0) && on_16(a.d_o, 0) && on_16(a.dq, a.dq_stride) && on_16(a.dk, a.dk_stride) &&
                               on_16(a.dv, a.dv_stride) && (!a.doc_begin || rows_alike(p, &a))));
  for (run.hop = 0; run.hop < p->size; ++run.hop) {
    LEV_TRY(ring_hop(&run, false));
    b.step = run.step;
    void *chunk = p->dkv[run.hop & 1];
    b.dkv = chunk ? chunk_rows(p, chunk, ring_tokens(&run, run.hop), p->a_bytes) : grads;
    for (int group = 0; group < p->groups; ++group) LEV_TRY(backward_group(&run, &b, group));
  }
  return p->dkv[0] ? backward_home(&run, &grads) : LEV_OK;
}
