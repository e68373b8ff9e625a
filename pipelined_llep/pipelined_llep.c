/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration, sizes and regions of the expert dispatch. */
#include "pipelined_llep/pipelined_llep.h"

#include <math.h>
#include <string.h>

#include "common/hostmem.h"
#include "pipelined_llep/llep_plan.h"

#define LLEP_DIM_MAX (1 << 30)
#define LLEP_ALPHA_MAX 1e6 /* alpha x rows, in int64, cannot overflow */
#define LLEP_TILE_ROWS 1024
#define LLEP_TILE_ROWS_GPU 8192 /* fewer leave most of an H200 idle at the end of each product */
#define LLEP_CHUNK_TOKENS 4096
#define LLEP_PART_ROUTES 2048 /* routes counted by one block of a device's threads ... */
#define LLEP_PARTS 256        /* ... unless that makes more parts than this */
#define LLEP_FINER 4          /* blocks a chunk holds at least ... */
#define LLEP_FINER_ALONE 64   /* ... in a group of one: small tables, routes numbered side by side on a GPU */
#define LLEP_BLOCKS 1024      /* blocks beyond which finer borders are not worth their tables */

void llep_config_init(llep_config *config) {
  *config = (llep_config){.size = sizeof *config,
                          .layers = 1,
                          .dtype = LEV_F32,
                          .schedule = LLEP_BOUNDED,
                          .alpha = 1.0,
                          .min_rows = 1024,
                          .gate = 1.3};
}

/* a * b * c, or -1 when it passes 2^31 - 1 (row numbers are int32). */
static int64_t rows_product(int64_t a, int64_t b, int64_t c) {
  int64_t ab, abc;
  if (__builtin_mul_overflow(a, b, &ab) || __builtin_mul_overflow(ab, c, &abc) || abc > INT32_MAX) return -1;
  return abc;
}

static lev_status check_shape(int ranks, const llep_config *c) {
  if (!c || c->size != sizeof *c)
    return lev_fail(LEV_ERR_CONFIG, "llep_config has size %zu, this library expects %zu", c ? c->size : 0, sizeof *c);
  if (ranks < 1) return lev_fail(LEV_ERR_CONFIG, "expert group of %d ranks, at least 1 is needed", ranks);
  if (c->max_tokens < 1 || c->hidden < 1 || c->inter < 1 || c->experts < 1 || c->layers < 1)
    return lev_fail(
        LEV_ERR_CONFIG, "max_tokens %lld, hidden %lld, inter %lld, experts %lld, layers %d: all must be >= 1",
        (long long)c->max_tokens, (long long)c->hidden, (long long)c->inter, (long long)c->experts, c->layers);
  if (c->top_k < 1 || c->top_k > c->experts)
    return lev_fail(LEV_ERR_CONFIG, "top_k %lld outside 1 .. %lld experts", (long long)c->top_k, (long long)c->experts);
  if (c->dtype != LEV_F64 && c->dtype != LEV_F32 && c->dtype != LEV_BF16)
    return lev_fail(LEV_ERR_CONFIG, "dtype %s, f64, f32 or bf16 is needed", lev_dtype_name(c->dtype));
  if (c->hidden > LLEP_DIM_MAX || c->inter > LLEP_DIM_MAX || c->experts > LLEP_DIM_MAX)
    return lev_fail(LEV_ERR_CONFIG, "hidden %lld, inter %lld, experts %lld: at most %d each", (long long)c->hidden,
                    (long long)c->inter, (long long)c->experts, LLEP_DIM_MAX);
  if (rows_product(c->max_tokens, c->top_k, 1) < 0 || rows_product(ranks, c->top_k, 1) < 0)
    return lev_fail(LEV_ERR_CONFIG, "%lld tokens x %lld picks pass 2^31 - 1 routes", (long long)c->max_tokens,
                    (long long)c->top_k);
  return LEV_OK;
}

/* Slots for lent experts on each rank. */
static int64_t slots_of(int ranks, const llep_config *c) {
  if (c->schedule == LLEP_PLAIN || ranks == 1 || c->foreign_slots < 0) return 0;
  return c->foreign_slots > 0 ? c->foreign_slots : lev_max_i64(1, lev_ceil_div(c->experts, ranks) / 2);
}

static lev_status check_lending(int ranks, const llep_config *c) {
  if (!(c->alpha >= 1 && c->alpha <= LLEP_ALPHA_MAX) || !(c->gate >= 0) || c->min_rows < 0 || c->min_rows > INT32_MAX)
    return lev_fail(LEV_ERR_CONFIG, "alpha %g (1 .. %g), gate %g (>= 0), min_rows %lld (0 .. 2^31 - 1)", c->alpha,
                    LLEP_ALPHA_MAX, c->gate, (long long)c->min_rows);
  if (c->foreign_slots < -1 || c->foreign_slots > c->experts)
    return lev_fail(LEV_ERR_CONFIG,
                    "foreign_slots %lld: at most all %lld experts can be lent at once; 0 is half of a rank's own, -1 "
                    "lends none",
                    (long long)c->foreign_slots, (long long)c->experts);
  if (c->experts + ranks * slots_of(ranks, c) > INT32_MAX)
    return lev_fail(LEV_ERR_CONFIG, "%lld experts and %d x %lld slots for lent ones pass 2^31 - 1",
                    (long long)c->experts, ranks, (long long)slots_of(ranks, c));
  return LEV_OK;
}

static lev_status check_schedule(int ranks, const llep_config *c) {
  if (c->schedule != LLEP_BOUNDED && c->schedule != LLEP_PLAIN)
    return lev_fail(LEV_ERR_CONFIG, "unknown schedule %d", (int)c->schedule);
  if (c->tile_rows < 0 || c->plain_rows < 0)
    return lev_fail(LEV_ERR_CONFIG, "tile_rows %lld, plain_rows %lld: at least 0 each (0 = chosen by the module)",
                    (long long)c->tile_rows, (long long)c->plain_rows);
  int64_t least = ranks * c->top_k;
  if (c->schedule == LLEP_BOUNDED && c->chunk_rows != 0 && (c->chunk_rows < least || c->chunk_rows > INT32_MAX))
    return lev_fail(LEV_ERR_CONFIG,
                    "chunk_rows %lld is outside %lld .. %d: one token of each rank can send %d x %lld rows to one rank",
                    (long long)c->chunk_rows, (long long)least, INT32_MAX, ranks, (long long)c->top_k);
  if (c->schedule == LLEP_PLAIN &&
      (c->plain_rows > INT32_MAX || (c->plain_rows == 0 && rows_product(c->max_tokens, ranks, c->top_k) < 0)))
    return lev_fail(LEV_ERR_CONFIG,
                    "plain schedule: %lld tokens x %d ranks x %lld picks pass 2^31 - 1 rows, set plain_rows",
                    (long long)c->max_tokens, ranks, (long long)c->top_k);
  return LEV_OK;
}

static lev_status check_gpu(int ranks, const llep_config *c) {
  int64_t slots = slots_of(ranks, c), columns = c->experts + ranks * slots;
  if (columns <= LLEP_GPU_COLUMNS) return LEV_OK;
  return lev_fail(
      LEV_ERR_CONFIG,
      "%lld experts and %d x %lld slots for lent ones: kernels on a GPU hold the counts of %d together; fewer "
      "foreign_slots (-1: none) would do, or fewer experts",
      (long long)c->experts, ranks, (long long)slots, LLEP_GPU_COLUMNS);
}

lev_status llep_supports(lev_backend backend, int ranks, const llep_config *config) {
  if (backend != LEV_BACKEND_CPU && backend != LEV_BACKEND_CUDA && backend != LEV_BACKEND_DRY)
    return lev_fail(LEV_ERR_CONFIG, "unknown backend %d", (int)backend);
  LEV_TRY(check_shape(ranks, config));
  LEV_TRY(check_schedule(ranks, config));
  LEV_TRY(check_lending(ranks, config));
  return backend == LEV_BACKEND_CUDA ? check_gpu(ranks, config) : LEV_OK;
}

/* ---- sizes ---- */

/* The configuration with its default tile, which is a matter of the device. */
static llep_config with_tile(const llep_config *c, lev_backend backend) {
  llep_config out = *c;
  if (out.tile_rows == 0 && out.schedule == LLEP_BOUNDED)
    out.tile_rows = backend == LEV_BACKEND_CUDA ? LLEP_TILE_ROWS_GPU : LLEP_TILE_ROWS;
  return out;
}

static int64_t worst_rows(int ranks, const llep_config *c) {
  int64_t rows = rows_product(c->max_tokens, ranks, c->top_k);
  return rows < 0 ? INT32_MAX : rows;
}

/* B such that one block of every rank fits a chunk whatever its routes; finer where tables stay small. */
static int64_t block_count(int ranks, const llep_config *c, int64_t chunk_rows) {
  for (int64_t finer = ranks == 1 ? LLEP_FINER_ALONE : LLEP_FINER;; finer /= 2) {
    int64_t tokens = lev_max_i64(1, chunk_rows / (ranks * c->top_k * finer));
    int64_t blocks = lev_ceil_div(c->max_tokens, tokens);
    if (blocks <= LLEP_BLOCKS || finer == 1) return blocks;
  }
}

static void fill_sizes(int ranks, const llep_config *c, int64_t chunk_rows, llep_sizes *z) {
  bool plain = c->schedule == LLEP_PLAIN;
  int64_t own = lev_ceil_div(c->experts, ranks), slots = slots_of(ranks, c);
  *z = (llep_sizes){.rules = {ranks, c->experts, slots, c->alpha, c->gate, c->min_rows}};
  z->send_rows = plain ? c->max_tokens * c->top_k : lev_min_i64(chunk_rows, c->max_tokens * c->top_k);
  z->recv_rows = chunk_rows;
  /* a cap that holds any routing of all tokens makes one chunk; -1, which no cap is, where none can */
  z->buffers = plain || chunk_rows == rows_product(c->max_tokens, ranks, c->top_k) ? 1 : LLEP_BUFFERS;
  z->blocks = plain ? 1 : block_count(ranks, c, chunk_rows);
  z->parts = lev_min_i64(LLEP_PARTS, lev_ceil_div(c->max_tokens * c->top_k, LLEP_PART_ROUTES));
  z->tile_rows = lev_min_i64(chunk_rows, c->tile_rows > 0 ? c->tile_rows : chunk_rows);
  z->rank_columns = own + slots;
  z->weights = 3 * c->inter * c->hidden;
}

/* Rows of one array of size `rows` x `cols` scalars. */
static void *take(lev_walker *w, const char *tag, lev_dtype dtype, int64_t rows, int64_t cols) {
  return lev_walk(w, LEV_MEM_DEVICE, tag, dtype, rows, cols);
}

static void walk_counts(const llep_sizes *z, lev_mem cls, const char *tag, lev_walker *w, llep_counts *c) {
  int64_t ranks = z->rules.ranks;
  c->counts = lev_walk(w, cls, tag, LEV_I64, ranks, z->rules.experts + 1);
  c->own = lev_walk(w, cls, tag, LEV_I64, ranks, z->blocks);
  c->total = lev_walk(w, cls, tag, LEV_I64, ranks, z->blocks);
  c->recv = lev_walk(w, cls, tag, LEV_I32, ranks * z->rank_columns, z->blocks);
}

static void walk_routes(const llep_plan *p, lev_walker *w, llep_work *k) {
  k->routes = take(w, "llep.tables", LEV_I32, p->cfg.max_tokens, p->cfg.top_k);
  k->histogram = take(w, "llep.tables", LEV_I32, llep_columns(&p->z.rules), p->z.blocks);
  k->next = take(w, "llep.tables", LEV_I32, 1, llep_columns(&p->z.rules));
  k->seen = take(w, "llep.tables", LEV_I64, p->z.parts, p->cfg.experts);
}

static void walk_persistent(llep_plan *p, lev_walker *w) {
  p->tables = take(w, "llep.tables", LEV_I64, p->cfg.layers, llep_table_length(&p->z.rules));
  llep_counts c = {.table = lev_walk(w, LEV_MEM_PINNED, "llep.counts", LEV_I64, 1, llep_table_length(&p->z.rules))};
  walk_counts(&p->z, LEV_MEM_PINNED, "llep.counts", w, &c);
  if (!p->dry) p->host = c;
}

static void walk_forward(llep_plan *p, lev_walker *w) {
  const llep_sizes *z = &p->z;
  int64_t hidden = p->cfg.hidden;
  lev_dtype t = p->cfg.dtype;
  llep_work *k = &p->work;
  *k = (llep_work){0};
  k->recv_x = take(w, "llep.recv", t, z->buffers * z->recv_rows, hidden);
  if (z->rules.ranks > 1) {
    k->send_x = take(w, "llep.send", t, z->send_rows, hidden);
    k->back_x = z->buffers == 1 ? k->send_x : take(w, "llep.return", t, z->send_rows, hidden);
  }
  k->tile_x = z->rules.ranks == 1 ? NULL : take(w, "llep.act", t, z->tile_rows, hidden);
  k->h = take(w, "llep.act", t, z->tile_rows, 2 * p->cfg.inter);
  if (z->rules.slots > 0) k->foreign = take(w, "llep.foreign", t, z->rules.slots, z->weights);
  walk_routes(p, w, k);
  walk_counts(z, LEV_MEM_DEVICE, "llep.tables", w, &k->counts);
  k->scratch = take(w, "llep.tables", LEV_I64, 1, llep_scratch_length(&z->rules));
}

static void walk_backward(llep_plan *p, lev_walker *w) {
  const llep_sizes *z = &p->z;
  int64_t hidden = p->cfg.hidden, received = z->buffers * z->recv_rows;
  lev_dtype t = p->cfg.dtype, a = lev_dtype_arith(t);
  llep_work *k = &p->work;
  *k = (llep_work){0};
  k->recv_x = take(w, "llep.recv", t, received, hidden);
  k->recv_dy = take(w, "llep.recv", t, received, hidden);
  k->recv_p = take(w, "llep.recv", a, received, 1);
  if (z->rules.ranks > 1) {
    k->send_x = take(w, "llep.send", t, z->send_rows, hidden);
    k->send_dy = take(w, "llep.send", t, z->send_rows, hidden);
    k->send_p = take(w, "llep.send", a, z->send_rows, 1);
    k->back_x = z->buffers == 1 ? k->send_x : take(w, "llep.return", t, z->send_rows, hidden);
    k->back_p = z->buffers == 1 ? k->send_p : take(w, "llep.return", a, z->send_rows, 1);
    k->tile_x = take(w, "llep.act", t, z->tile_rows, hidden);
    k->tile_dy = take(w, "llep.act", t, z->tile_rows, hidden);
    k->tile_p = take(w, "llep.act", a, z->tile_rows, 1);
  }
  k->h = take(w, "llep.act", t, z->tile_rows, 2 * p->cfg.inter);
  k->q = take(w, "llep.act", t, z->tile_rows, p->cfg.inter);
  if (z->rules.slots > 0) {
    k->foreign = take(w, "llep.foreign", t, z->rules.slots, z->weights);
    k->foreign_grad = take(w, "llep.foreign_grad", a, z->rules.slots, z->weights);
  }
  walk_routes(p, w, k);
}

static void (*const walks[LLEP_PHASES])(llep_plan *, lev_walker *) = {walk_persistent, walk_forward, walk_backward};

/* Listing and counting work on a copy, so that the pointers of a bound phase stay. */
static void describe(const llep_plan *plan, llep_phase phase, lev_walker *w) {
  llep_plan copy = *plan;
  walks[phase](&copy, w);
}

void llep_walk_persistent(void *plan, lev_walker *walker) {
  describe(plan, LLEP_PERSISTENT, walker);
}
void llep_walk_forward(void *plan, lev_walker *walker) {
  describe(plan, LLEP_FORWARD, walker);
}
void llep_walk_backward(void *plan, lev_walker *walker) {
  describe(plan, LLEP_BACKWARD, walker);
}

static lev_walker walked(const llep_plan *plan, llep_phase phase, lev_region_fn list, void *ctx) {
  lev_walker w = {.list = list, .list_ctx = ctx};
  describe(plan, phase, &w);
  return w;
}

/* Device work bytes of the larger phase with a given chunk cap. */
static size_t work_bytes(int ranks, const llep_config *c, int64_t chunk_rows) {
  llep_plan probe = {.cfg = *c};
  fill_sizes(ranks, c, chunk_rows, &probe.z);
  return lev_max_size(walked(&probe, LLEP_FORWARD, NULL, NULL).used[LEV_MEM_DEVICE],
                      walked(&probe, LLEP_BACKWARD, NULL, NULL).used[LEV_MEM_DEVICE]);
}

/* The cap that the configuration fixes by itself, or 0 when it follows from the budget. */
static int64_t fixed_chunk(int ranks, const llep_config *c) {
  int64_t worst = worst_rows(ranks, c), own = lev_ceil_div(c->experts, ranks);
  if (c->schedule == LLEP_PLAIN)
    return c->plain_rows > 0 ? c->plain_rows : c->max_tokens * ranks * lev_min_i64(c->top_k, own);
  if (c->chunk_rows > 0) return lev_min_i64(c->chunk_rows, worst);
  if (c->budget > 0) return 0;
  int64_t usual = lev_max_i64(ranks, LLEP_CHUNK_TOKENS) * c->top_k;
  return lev_min_i64(usual, worst);
}

/* Largest chunk cap within `budget` (0 if none fits), and the fewest bytes of any cap tried. Bytes fall with the cap
 * until the block tables outweigh the rows, so the caps are tried from above. */
static int64_t search_chunk(int ranks, const llep_config *c, size_t budget, size_t *smallest) {
  int64_t least = ranks * c->top_k, cap = worst_rows(ranks, c), above = -1;
  *smallest = SIZE_MAX;
  for (;;) {
    size_t bytes = work_bytes(ranks, c, cap);
    if (bytes < *smallest) *smallest = bytes;
    if (bytes <= budget) break;
    if (cap <= least) return 0;
    above = cap;
    cap = lev_max_i64(least, cap - cap / 8 - 1);
  }
  while (above > cap + 1) {
    int64_t middle = cap + (above - cap) / 2;
    if (work_bytes(ranks, c, middle) <= budget)
      cap = middle;
    else
      above = middle;
  }
  return cap;
}

size_t llep_smallest_budget(lev_backend backend, int ranks, const llep_config *config) {
  size_t smallest;
  if (llep_supports(backend, ranks, config) != LEV_OK) return SIZE_MAX;
  llep_config c = with_tile(config, backend);
  c.budget = 1;
  int64_t chunk = fixed_chunk(ranks, &c);
  if (chunk > 0) return work_bytes(ranks, &c, chunk);
  (void)search_chunk(ranks, &c, 0, &smallest);
  return smallest;
}

static lev_status choose(int ranks, const llep_config *c, llep_sizes *z) {
  int64_t chunk = fixed_chunk(ranks, c);
  size_t smallest = SIZE_MAX;
  if (chunk > 0) {
    smallest = work_bytes(ranks, c, chunk);
    if (smallest == SIZE_MAX) return lev_fail(LEV_ERR_CONFIG, "expert dispatch: sizes pass the address space");
    if (c->budget > 0 && smallest > c->budget)
      return lev_fail(LEV_ERR_BUDGET, "expert dispatch of %lld rows needs %zu bytes of work memory, the budget is %zu",
                      (long long)chunk, smallest, c->budget);
  } else {
    chunk = search_chunk(ranks, c, c->budget, &smallest);
    if (chunk == 0)
      return lev_fail(LEV_ERR_BUDGET, "no chunk cap fits a budget of %zu bytes; the smallest that would do is %zu",
                      c->budget, smallest);
  }
  fill_sizes(ranks, c, chunk, z);
  return LEV_OK;
}

/* ---- the plan object ---- */

static void *table(size_t n, size_t size) {
  return lev_calloc(LEV_HEAP_PLAN, n, size);
}

static bool make_layer(const llep_plan *p, llep_layer *l) {
  size_t blocks = (size_t)p->z.blocks, ranks = (size_t)p->z.rules.ranks;
  return (l->border = table(blocks + 1, sizeof *l->border)) && (l->send = table(blocks * ranks, sizeof *l->send)) &&
         (l->recv = table(blocks * ranks, (size_t)p->columns * sizeof *l->recv)) &&
         (l->counts = table((size_t)p->cfg.experts, sizeof *l->counts)) &&
         (l->rank_rows = table(ranks, sizeof *l->rank_rows)) &&
         (l->moves = table(ranks * (size_t)p->z.rules.slots, sizeof *l->moves));
}

/* The dry backend has no counts to read: its tables are computed on the host. */
static bool make_dry(llep_plan *p) {
  const llep_sizes *z = &p->z;
  size_t ranks = (size_t)z->rules.ranks, blocks = (size_t)z->blocks, columns = (size_t)llep_columns(&z->rules);
  if (!(p->host.counts = table(ranks * (size_t)(p->cfg.experts + 1), 8)) ||
      !(p->host.table = table((size_t)llep_table_length(&z->rules), 8)) || !(p->host.own = table(ranks * blocks, 8)) ||
      !(p->host.total = table(ranks * blocks, 8)) || !(p->host.recv = table(ranks * (size_t)p->columns * blocks, 4)) ||
      !(p->dry_tokens = table(ranks, 8)) ||
      !(p->dry_scratch = table((size_t)(llep_scratch_length(&z->rules) + p->cfg.experts), 8)) ||
      !(p->dry_histogram = table(columns * blocks, 4)))
    return false;
  p->dry_tokens[0] = -1;
  return true;
}

static lev_status make_tables(llep_plan *p) {
  size_t ranks = (size_t)p->z.rules.ranks;
  if (!(p->layers = table((size_t)p->cfg.layers, sizeof *p->layers)) || !(p->tokens = table(7 * ranks, 8)) ||
      !(p->exchange = table(2 * ranks * (size_t)p->z.rules.slots, sizeof *p->exchange)))
    return LEV_ERR_NOMEM;
  llep_pieces *t = &p->pieces;
  size_t columns = (size_t)lev_max_i64(1, p->columns);
  if (!(t->column = table(4 * columns, 8)) || !(t->each = table(columns, sizeof *t->each))) return LEV_ERR_NOMEM;
  t->offset = t->column + columns, t->first = t->offset + columns, t->rows = t->first + columns;
  p->send_rows = p->tokens + ranks, p->recv_rows = p->send_rows + ranks, p->cursor = p->recv_rows + ranks;
  p->sent = p->cursor + ranks, p->received = p->sent + ranks, p->unit = p->received + ranks;
  for (int l = 0; l < p->cfg.layers; ++l)
    if (!make_layer(p, &p->layers[l])) return LEV_ERR_NOMEM;
  return p->dry && !make_dry(p) ? LEV_ERR_NOMEM : LEV_OK;
}

static lev_status make_streams(llep_plan *p) {
  LEV_TRY(lev_stream_create(p->device, "llep.dispatch", &p->dispatch));
  LEV_TRY(lev_stream_create(p->device, "llep.combine", &p->combine));
  LEV_TRY(lev_event_create(p->device, &p->start));
  LEV_TRY(lev_event_create(p->device, &p->weights));
  LEV_TRY(lev_event_create(p->device, &p->end));
  for (int i = 0; i < LLEP_BUFFERS; ++i) {
    LEV_TRY(lev_event_create(p->device, &p->dispatched[i]));
    LEV_TRY(lev_event_create(p->device, &p->computed[i]));
    LEV_TRY(lev_event_create(p->device, &p->combined[i]));
  }
  return LEV_OK;
}

static lev_status make(llep_plan *p, const llep_config *config) {
  LEV_TRY(llep_supports(lev_device_target(p->device), lev_comm_size(p->out), config));
  p->cfg = with_tile(config, lev_device_target(p->device));
  LEV_TRY(choose(lev_comm_size(p->out), &p->cfg, &p->z));
  p->own_experts = lev_part_size(config->experts, p->z.rules.ranks, p->rank);
  p->columns = llep_rank_columns(&p->z.rules, p->rank);
  LEV_TRY(make_tables(p));
  return make_streams(p);
}

lev_status llep_plan_create(lev_device *device, lev_comm *ep_comm, const llep_config *config, llep_plan **out) {
  if (!device || !ep_comm || !config || !out) return lev_fail(LEV_ERR_ARG, "llep_plan_create: NULL argument");
  *out = NULL;
  llep_plan *p = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *p);
  lev_status st = p ? LEV_OK : LEV_ERR_NOMEM;
  if (p) {
    p->device = device, p->out = ep_comm, p->rank = lev_comm_rank(ep_comm);
    p->dry = lev_device_backend(device) == LEV_BACKEND_DRY;
    p->phase = LLEP_PERSISTENT, p->dry_layer = -1;
    st = make(p, config);
  }
  st = lev_comm_agree(ep_comm, st);
  if (st == LEV_OK) st = lev_comm_subset(ep_comm, 0, 1, lev_comm_size(ep_comm), &p->back);
  if (st != LEV_OK) {
    llep_destroy(p);
    return st;
  }
  *out = p;
  return LEV_OK;
}

static void free_layers(llep_plan *p) {
  for (int l = 0; p->layers && l < p->cfg.layers; ++l) {
    llep_layer *y = &p->layers[l];
    lev_free(y->border), lev_free(y->send), lev_free(y->recv), lev_free(y->counts), lev_free(y->rank_rows);
    lev_free(y->moves);
  }
  lev_free(p->layers);
}

void llep_destroy(llep_plan *p) {
  if (!p) return;
  if (p->dispatch) lev_stream_destroy(p->dispatch);
  if (p->combine) lev_stream_destroy(p->combine);
  lev_event *events[] = {p->start, p->weights, p->end};
  for (int i = 0; i < 3; ++i)
    if (events[i]) lev_event_destroy(events[i]);
  for (int i = 0; i < LLEP_BUFFERS; ++i) {
    if (p->dispatched[i]) lev_event_destroy(p->dispatched[i]);
    if (p->computed[i]) lev_event_destroy(p->computed[i]);
    if (p->combined[i]) lev_event_destroy(p->combined[i]);
  }
  lev_comm_destroy(p->back);
  free_layers(p);
  if (p->dry) {
    lev_free(p->host.counts), lev_free(p->host.table), lev_free(p->host.own), lev_free(p->host.total);
    lev_free(p->host.recv), lev_free(p->dry_tokens), lev_free(p->dry_scratch), lev_free(p->dry_histogram);
  }
  lev_free(p->tokens), lev_free(p->exchange), lev_free(p->pieces.column), lev_free(p->pieces.each);
  lev_free(p);
}

llep_info llep_plan_info(const llep_plan *p) {
  const llep_sizes *z = &p->z;
  return (llep_info){.chunk_rows = z->recv_rows,
                     .send_rows = z->send_rows,
                     .tile_rows = z->tile_rows,
                     .blocks = z->blocks,
                     .foreign_slots = z->rules.slots,
                     .expert_begin = lev_part_begin(p->cfg.experts, z->rules.ranks, p->rank),
                     .expert_end = lev_part_begin(p->cfg.experts, z->rules.ranks, p->rank + 1),
                     .single_products = z->rules.ranks == 1 && z->buffers == 1 && z->tile_rows >= z->recv_rows};
}

void llep_plan_bytes(const llep_plan *plan, llep_phase phase, size_t bytes[LEV_MEM_CLASSES]) {
  lev_walker w = walked(plan, phase, NULL, NULL);
  memcpy(bytes, w.used, sizeof w.used);
}

void llep_plan_regions(const llep_plan *plan, llep_phase phase, lev_region_fn list, void *ctx) {
  (void)walked(plan, phase, list, ctx);
}

lev_status llep_plan_bind(llep_plan *plan, llep_phase phase, const lev_blocks *blocks) {
  static const char *const names[LLEP_PHASES] = {"llep.persistent", "llep.forward", "llep.backward"};
  if (!plan || !blocks || phase < 0 || phase >= LLEP_PHASES)
    return lev_fail(LEV_ERR_ARG, "llep_plan_bind: bad argument");
  if (phase == LLEP_PERSISTENT && plan->persistent_bound)
    return lev_fail(LEV_ERR_MISUSE, "the persistent phase of this llep plan is bound already");
  lev_walker counted = walked(plan, phase, NULL, NULL), w = {.list = NULL};
  LEV_TRY(lev_blocks_check(&counted, blocks, names[phase]));
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) w.base[c] = blocks->base[c];
  walks[phase](plan, &w);
  lev_trace_add(lev_device_trace(plan->device), LEV_EV_BIND, 0, names[phase], w.used[LEV_MEM_DEVICE]);
  if (phase == LLEP_PERSISTENT)
    plan->persistent_bound = true;
  else
    plan->phase = phase;
  return LEV_OK;
}

void llep_get_stats(const llep_plan *plan, int layer, llep_stats *out) {
  *out = (llep_stats){0};
  if (!plan || layer < 0 || layer >= plan->cfg.layers) return;
  const llep_layer *l = &plan->layers[layer];
  out->expert_counts = l->counts, out->rank_rows = l->rank_rows;
  out->chunks = l->chunks, out->moves = l->n_moves, out->chunk_rows = l->chunk_rows;
  out->native_max = (double)l->native_max;
  for (int r = 0; r < plan->z.rules.ranks; ++r) {
    out->rows_max = fmax(out->rows_max, (double)l->rank_rows[r]);
    out->rows_mean += (double)l->rank_rows[r] / plan->z.rules.ranks;
  }
}
