/* SPDX-License-Identifier: Apache-2.0 */
/* Validation, choice of tiles, regions, entry points. */
#include "ring_dtp/ring_dtp.h"

#include <math.h>
#include <string.h>

#include "common/hostmem.h"
#include "ring_dtp/ring_dtp_plan.h"

#define TILE_STEP 64 /* chosen tiles are multiples of this, or the whole dimension, or below it */
#define DEFAULT_ROWS 1024
#define DEFAULT_COLS 4096
#define BLOCK_ROWS_MIN 64 /* one-pass blocks below this are not worth it */
#define BLOCK_ROWS_DEFAULT 256
#define PITCH 16 /* logits rows start on a multiple of this many scalars */

void rdtp_config_init(rdtp_config *config) {
  *config = (rdtp_config){.size = sizeof *config, .dtype = LEV_F32, .schedule = RDTP_BOUNDED, .branch = RDTP_AUTO};
}

lev_status rdtp_supports(lev_backend backend, int ranks, const rdtp_config *c) {
  if (!c || c->size != sizeof *c)
    return lev_fail(LEV_ERR_CONFIG, "ring_dtp: configuration of another version (rdtp_config_init not called?)");
  if (backend < 0 || backend >= LEV_BACKENDS) return lev_fail(LEV_ERR_CONFIG, "ring_dtp: unknown backend");
  if (ranks < 1) return lev_fail(LEV_ERR_CONFIG, "ring_dtp: %d ranks in the vocabulary group", ranks);
  if (c->max_tokens < 1 || c->hidden < 1 || c->vocab < 1 || c->vocab > INT32_MAX)
    return lev_fail(LEV_ERR_CONFIG,
                    "ring_dtp: max_tokens %lld, hidden %lld and vocab %lld must be at least 1, vocab at most %d",
                    (long long)c->max_tokens, (long long)c->hidden, (long long)c->vocab, INT32_MAX);
  if (c->dtype != LEV_F64 && c->dtype != LEV_F32 && c->dtype != LEV_BF16)
    return lev_fail(LEV_ERR_CONFIG, "ring_dtp: dtype must be f64, f32 or bf16");
  if (c->schedule != RDTP_BOUNDED && c->schedule != RDTP_PLAIN)
    return lev_fail(LEV_ERR_CONFIG, "ring_dtp: unknown schedule %d", (int)c->schedule);
  if (c->branch != RDTP_AUTO && c->branch != RDTP_MOVE_WEIGHTS && c->branch != RDTP_MOVE_ACTIVATIONS)
    return lev_fail(LEV_ERR_CONFIG, "ring_dtp: unknown branch %d", (int)c->branch);
  if (c->tile_rows < 0 || c->tile_cols < 0)
    return lev_fail(LEV_ERR_CONFIG, "ring_dtp: tile %lld x %lld is negative", (long long)c->tile_rows,
                    (long long)c->tile_cols);
  return LEV_OK;
}

/* ---- regions ---- */

static int64_t plan_slots(const rdtp_plan *p) {
  return p->size < 3 ? p->size - 1 : 2;
}

static void walk_weights(rdtp_plan *p, lev_walker *w, bool grad) {
  int64_t hidden = p->config.hidden;
  p->tile = lev_walk(w, LEV_MEM_DEVICE, "rdtp.tile", p->arith, p->tile_rows, p->tile_ld);
  for (int i = 0; i < plan_slots(p); ++i)
    p->payload[i] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.ring", p->config.dtype, p->tile_cols, hidden);
  p->state = lev_walk(w, LEV_MEM_DEVICE, "rdtp.state", p->arith, p->config.max_tokens, RDTP_STATE);
  for (int i = 0; grad && p->size > 1 && i < 3; ++i)
    p->acc[i] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.grad", p->arith, p->tile_cols, hidden);
  if (grad && p->arith != p->config.dtype)
    p->dx = lev_walk(w, LEV_MEM_DEVICE, "rdtp.dx", p->arith, p->config.max_tokens, hidden);
}

static void walk_activations(rdtp_plan *p, lev_walker *w, bool grad) {
  int64_t hidden = p->config.hidden, rows = p->tile_rows;
  p->tile = lev_walk(w, LEV_MEM_DEVICE, "rdtp.tile", p->arith, rows, p->tile_ld);
  for (int i = 0; i < plan_slots(p); ++i) {
    p->payload[i] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.ring", p->config.dtype, rows, hidden);
    p->meta[i] = grad ? lev_walk(w, LEV_MEM_DEVICE, "rdtp.ring", p->arith, rows, RDTP_STATE)
                      : lev_walk(w, LEV_MEM_DEVICE, "rdtp.ring", LEV_I32, rows, 1);
  }
  for (int i = 0; i < (p->size > 1 ? 3 : 1); ++i)
    p->partial[i] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.state", p->arith, rows, RDTP_STATE);
  if (!grad) return;
  for (int i = 0; i < 2; ++i) p->record[i] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.state", p->arith, rows, RDTP_STATE);
  int accs = p->size > 1 ? 3 : p->arith != p->config.dtype ? 1 : 0;
  for (int i = 0; i < accs; ++i) p->acc[i] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.grad", p->arith, rows, hidden);
}

static void walk_block_pass(rdtp_plan *p, lev_walker *w, bool grad) {
  int64_t hidden = p->config.hidden, rows = p->tile_rows * p->size;
  p->tile = lev_walk(w, LEV_MEM_DEVICE, "rdtp.tile", p->arith, rows, p->tile_ld);
  for (int i = 0; p->size > 1 && i < 2; ++i) {
    p->payload[i] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.ring", p->config.dtype, rows, hidden);
    p->meta[i] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.ring", LEV_I32, rows, 1);
  }
  p->state = lev_walk(w, LEV_MEM_DEVICE, "rdtp.state", p->arith, rows, RDTP_STATE);
  if (p->size == 1) return;
  p->all_state = lev_walk(w, LEV_MEM_DEVICE, "rdtp.state", p->arith, rows, p->size * RDTP_STATE);
  if (grad) p->acc[0] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.grad", p->arith, rows, hidden);
}

static void walk_gather_all(rdtp_plan *p, lev_walker *w, bool grad) {
  p->tile = lev_walk(w, LEV_MEM_DEVICE, "rdtp.tile", p->arith, p->config.max_tokens, p->tile_ld);
  p->state = lev_walk(w, LEV_MEM_DEVICE, "rdtp.state", p->arith, p->config.max_tokens, RDTP_STATE);
  if (p->size == 1) return;
  p->payload[0] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.ring", p->config.dtype, p->config.vocab, p->config.hidden);
  if (grad) p->acc[0] = lev_walk(w, LEV_MEM_DEVICE, "rdtp.grad", p->arith, p->config.vocab, p->config.hidden);
}

/* The one description of the buffers: assigns the pointers of `p` while it counts, lists or binds. */
static void walk_plan(rdtp_plan *p, lev_walker *w, bool grad) {
  switch (p->mode) {
  case RDTP_RING_WEIGHTS:
    walk_weights(p, w, grad);
    break;
  case RDTP_RING_ACTIVATIONS:
    walk_activations(p, w, grad);
    break;
  case RDTP_BLOCK_PASS:
    walk_block_pass(p, w, grad);
    break;
  case RDTP_GATHER_ALL:
    walk_gather_all(p, w, grad);
    break;
  }
}

static void walk_phase(const rdtp_plan *p, rdtp_phase phase, lev_walker *w) {
  if (phase == RDTP_PERSISTENT) return;
  rdtp_plan scratch = *p; /* counting must not disturb bound pointers */
  walk_plan(&scratch, w, phase == RDTP_STEP);
}

void rdtp_walk_persistent(void *plan, lev_walker *walker) {
  walk_phase(plan, RDTP_PERSISTENT, walker);
}
void rdtp_walk_step(void *plan, lev_walker *walker) {
  walk_phase(plan, RDTP_STEP, walker);
}
void rdtp_walk_eval(void *plan, lev_walker *walker) {
  walk_phase(plan, RDTP_EVAL, walker);
}

void rdtp_plan_bytes(const rdtp_plan *plan, rdtp_phase phase, size_t bytes[LEV_MEM_CLASSES]) {
  lev_walker walker = {0};
  walk_phase(plan, phase, &walker);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) bytes[c] = walker.used[c];
}

void rdtp_plan_regions(const rdtp_plan *plan, rdtp_phase phase, lev_region_fn list, void *ctx) {
  lev_walker walker = {.list = list, .list_ctx = ctx};
  walk_phase(plan, phase, &walker);
}

/* ---- choice of tiles ---- */

static int64_t round_up(int64_t n, int64_t step) {
  return lev_ceil_div(n, step) * step;
}

static void set_tile(rdtp_plan *p, int64_t rows, int64_t cols) {
  p->tile_rows = rows;
  p->tile_cols = cols;
  p->tile_ld = round_up(cols, PITCH);
}

static size_t tile_bytes(const rdtp_plan *p, int64_t rows, int64_t cols) {
  rdtp_plan trial = *p;
  set_tile(&trial, rows, cols);
  lev_walker walker = {0};
  walk_plan(&trial, &walker, true);
  return walker.used[LEV_MEM_DEVICE];
}

static bool tile_fits(const rdtp_plan *p, int64_t rows, int64_t cols) {
  size_t bytes = tile_bytes(p, rows, cols);
  return bytes != SIZE_MAX && (p->config.budget == 0 || bytes <= p->config.budget);
}

static int64_t quantise(int64_t n, int64_t cap) {
  return n >= cap ? cap : n >= TILE_STEP ? n / TILE_STEP * TILE_STEP : n;
}

typedef struct tile_range {
  int64_t rows_min, rows_max, cols_min, cols_max;
} tile_range;

/* Sides of the tile whose free sides are `n`. */
static void tile_side(const tile_range *t, int64_t n, int64_t *rows, int64_t *cols) {
  *rows = lev_max_i64(t->rows_min, quantise(n, t->rows_max));
  *cols = lev_max_i64(t->cols_min, quantise(n, t->cols_max));
}

/* The largest square tile that fits, then the longest rows side, then the longest columns side: afterwards neither can
 * grow by a step. The smallest tile must fit. */
static void tile_grow(rdtp_plan *p, const tile_range *t) {
  int64_t rows, cols, low = 1, high = lev_max_i64(t->rows_max, t->cols_max);
  while (low < high) {
    int64_t middle = low + (high - low + 1) / 2;
    tile_side(t, middle, &rows, &cols);
    if (tile_fits(p, rows, cols))
      low = middle;
    else
      high = middle - 1;
  }
  tile_side(t, low, &rows, &cols);
  for (int side = 0; side < 2; ++side) {
    int64_t most = side == 0 ? t->rows_max : t->cols_max, from = side == 0 ? rows : cols, to = most;
    while (from < to) {
      int64_t middle = from + (to - from + 1) / 2;
      if (tile_fits(p, side == 0 ? middle : rows, side == 0 ? cols : middle))
        from = middle;
      else
        to = middle - 1;
    }
    int64_t grown = quantise(from, most);
    if (side == 0)
      rows = lev_max_i64(rows, grown);
    else
      cols = lev_max_i64(cols, grown);
  }
  set_tile(p, rows, cols);
}

/* Ranges the configuration leaves open. Without a budget the defaults cap them. */
static tile_range ring_range(const rdtp_plan *p) {
  const rdtp_config *c = &p->config;
  tile_range t = {.rows_min = 1, .rows_max = c->max_tokens, .cols_min = 1, .cols_max = p->shard_cap};
  if (c->budget == 0) {
    t.rows_max = lev_min_i64(t.rows_max, DEFAULT_ROWS);
    t.cols_max = lev_min_i64(t.cols_max, DEFAULT_COLS);
  }
  if (c->tile_rows) t.rows_min = t.rows_max = lev_min_i64(c->tile_rows, c->max_tokens);
  if (c->tile_cols) t.cols_min = t.cols_max = lev_min_i64(c->tile_cols, p->shard_cap);
  return t;
}

/* Columns are the whole shard; rows as configured or as many as fit. */
static tile_range block_range(const rdtp_plan *p) {
  const rdtp_config *c = &p->config;
  tile_range t = {.rows_min = lev_min_i64(c->max_tokens, BLOCK_ROWS_MIN),
                  .rows_max = c->max_tokens,
                  .cols_min = p->shard_cap,
                  .cols_max = p->shard_cap};
  if (c->budget == 0) t.rows_max = lev_min_i64(t.rows_max, BLOCK_ROWS_DEFAULT);
  if (c->tile_rows) t.rows_min = t.rows_max = lev_min_i64(c->tile_rows, c->max_tokens);
  return t;
}

static rdtp_mode ring_mode(const rdtp_plan *p) {
  const rdtp_config *c = &p->config;
  if (c->branch == RDTP_MOVE_WEIGHTS) return RDTP_RING_WEIGHTS;
  if (c->branch == RDTP_MOVE_ACTIVATIONS || p->size == 1) return RDTP_RING_ACTIVATIONS;
  return c->max_tokens > c->vocab / p->size ? RDTP_RING_WEIGHTS : RDTP_RING_ACTIVATIONS;
}

static void plan_shape(rdtp_plan *p, int ranks, const rdtp_config *config) {
  p->config = *config;
  p->size = ranks;
  p->arith = lev_dtype_arith(config->dtype);
  p->t_bytes = lev_dtype_bytes(config->dtype);
  p->a_bytes = lev_dtype_bytes(p->arith);
  p->shard_cap = lev_ceil_div(config->vocab, ranks);
}

static size_t range_smallest(rdtp_plan *p, rdtp_mode mode) {
  p->mode = mode;
  tile_range t = mode == RDTP_BLOCK_PASS ? block_range(p) : ring_range(p);
  return tile_bytes(p, t.rows_min, t.cols_min);
}

/* Smallest bytes of any mode the configuration admits; leaves the mode that remains when one-pass does not fit. */
static size_t plan_smallest(rdtp_plan *p) {
  if (p->config.schedule == RDTP_PLAIN) {
    p->mode = RDTP_GATHER_ALL;
    return tile_bytes(p, p->config.max_tokens, p->config.vocab);
  }
  size_t block = p->config.one_pass ? range_smallest(p, RDTP_BLOCK_PASS) : SIZE_MAX;
  size_t ring = range_smallest(p, ring_mode(p));
  return block < ring ? block : ring;
}

size_t rdtp_smallest_budget(int ranks, const rdtp_config *config) {
  if (rdtp_supports(LEV_BACKEND_CPU, ranks, config) != LEV_OK) return SIZE_MAX;
  rdtp_plan plan = {0};
  plan_shape(&plan, ranks, config);
  return plan_smallest(&plan);
}

static lev_status plan_choose(rdtp_plan *p) {
  const rdtp_config *c = &p->config;
  if (c->one_pass && c->schedule == RDTP_BOUNDED) {
    p->mode = RDTP_BLOCK_PASS;
    tile_range t = block_range(p);
    if (tile_fits(p, t.rows_min, t.cols_min)) {
      tile_grow(p, &t);
      return LEV_OK;
    }
  }
  size_t smallest = plan_smallest(p);
  if (smallest == SIZE_MAX || (c->budget && c->budget < smallest))
    return lev_fail(LEV_ERR_BUDGET,
                    "ring_dtp: %lld tokens, hidden %lld, vocabulary %lld over %d ranks: the budget is %zu bytes, the "
                    "smallest that would do is %zu bytes",
                    (long long)c->max_tokens, (long long)c->hidden, (long long)c->vocab, p->size, c->budget, smallest);
  if (c->schedule == RDTP_PLAIN) {
    set_tile(p, c->max_tokens, c->vocab);
    return LEV_OK;
  }
  tile_range t = ring_range(p);
  tile_grow(p, &t);
  return LEV_OK;
}

/* ---- life ---- */

static lev_status plan_streams(rdtp_plan *p) {
  LEV_TRY(lev_stream_create(p->device, "rdtp.comm", &p->comm_stream));
  lev_event **events[] = {&p->mark, &p->arrived[0], &p->arrived[1], &p->acc_arrived, &p->done};
  for (size_t i = 0; i < sizeof events / sizeof *events; ++i) LEV_TRY(lev_event_create(p->device, events[i]));
  return LEV_OK;
}

lev_status rdtp_plan_create(lev_device *device, lev_comm *vocab_comm, const rdtp_config *config, rdtp_plan **out) {
  *out = NULL;
  if (!device || !vocab_comm) return lev_fail(LEV_ERR_ARG, "ring_dtp: a device and a communicator are needed");
  int ranks = lev_comm_size(vocab_comm);
  LEV_TRY(rdtp_supports(lev_device_backend(device), ranks, config));
  rdtp_plan *p = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  plan_shape(p, ranks, config);
  p->device = device;
  p->comm = vocab_comm;
  p->rank = lev_comm_rank(vocab_comm);
  lev_status st;
  LEV_TRY_GOTO(st, plan_choose(p), fail);
  p->counts = lev_calloc(LEV_HEAP_PLAN, (size_t)ranks, sizeof *p->counts);
  p->rank_rows = lev_calloc(LEV_HEAP_PLAN, (size_t)ranks, sizeof *p->rank_rows);
  st = LEV_ERR_NOMEM;
  if (!p->counts || !p->rank_rows) goto fail;
  LEV_TRY_GOTO(st, plan_streams(p), fail);
  *out = p;
  return LEV_OK;
fail:
  rdtp_destroy(p);
  return st;
}

void rdtp_destroy(rdtp_plan *plan) {
  if (!plan) return;
  lev_event *events[] = {plan->mark, plan->arrived[0], plan->arrived[1], plan->acc_arrived, plan->done};
  for (size_t i = 0; i < sizeof events / sizeof *events; ++i)
    if (events[i]) lev_event_destroy(events[i]);
  if (plan->comm_stream) lev_stream_destroy(plan->comm_stream);
  lev_free(plan->counts);
  lev_free(plan->rank_rows);
  lev_free(plan);
}

rdtp_info rdtp_plan_info(const rdtp_plan *plan) {
  rdtp_info info = {.schedule = plan->config.schedule,
                    .one_pass = plan->mode == RDTP_BLOCK_PASS,
                    .tile_rows = plan->mode == RDTP_BLOCK_PASS ? plan->tile_rows * plan->size : plan->tile_rows,
                    .tile_cols = plan->tile_cols};
  info.branch = ring_mode(plan) == RDTP_RING_WEIGHTS ? RDTP_MOVE_WEIGHTS : RDTP_MOVE_ACTIVATIONS;
  info.vocab_begin = rdtp_shard_begin(plan, plan->rank);
  info.vocab_end = info.vocab_begin + rdtp_shard_rows(plan, plan->rank);
  return info;
}

lev_status rdtp_plan_bind(rdtp_plan *plan, rdtp_phase phase, const lev_blocks *blocks) {
  static const char *const names[RDTP_PHASES] = {"rdtp.persistent", "rdtp.step", "rdtp.eval"};
  if (!plan || !blocks || phase < 0 || phase >= RDTP_PHASES) return lev_fail(LEV_ERR_ARG, "ring_dtp: bad bind");
  lev_walker need = {0};
  walk_phase(plan, phase, &need);
  LEV_TRY(lev_blocks_check(&need, blocks, names[phase]));
  lev_trace_add(lev_device_trace(plan->device), LEV_EV_BIND, 0, names[phase], need.used[LEV_MEM_DEVICE]);
  if (phase == RDTP_PERSISTENT) return LEV_OK;
  lev_walker walker = {.base = {[LEV_MEM_DEVICE] = blocks->base[LEV_MEM_DEVICE]}};
  walk_plan(plan, &walker, phase == RDTP_STEP);
  plan->bound[RDTP_STEP] = phase == RDTP_STEP;
  plan->bound[RDTP_EVAL] = true;
  return LEV_OK;
}

/* ---- calls ---- */

static lev_status run_check(rdtp_run *run) {
  rdtp_plan *p = run->p;
  const rdtp_args *a = run->args;
  if (!run->stream || !a->sums) return lev_fail(LEV_ERR_ARG, "ring_dtp: a stream and room for the sums are needed");
  if (!p->bound[run->grad ? RDTP_STEP : RDTP_EVAL])
    return lev_fail(LEV_ERR_MISUSE, "ring_dtp: the %s phase is not bound", run->grad ? "step" : "eval");
  for (int r = 0; r < p->size; ++r) {
    int64_t rows = a->rank_tokens ? a->rank_tokens[r] : a->tokens;
    if (rows < 0) return lev_fail(LEV_ERR_ARG, "ring_dtp: %lld tokens on rank %d", (long long)rows, r);
    if (rows > p->config.max_tokens)
      return lev_fail(LEV_ERR_CAPACITY, "ring_dtp: %lld tokens on rank %d, planned for at most %lld", (long long)rows,
                      r, (long long)p->config.max_tokens);
    p->rank_rows[r] = rows;
    run->max_rows = lev_max_i64(run->max_rows, rows);
  }
  if (p->rank_rows[p->rank] != a->tokens)
    return lev_fail(LEV_ERR_ARG, "ring_dtp: tokens is %lld, rank_tokens[%d] is %lld", (long long)a->tokens, p->rank,
                    (long long)p->rank_rows[p->rank]);
  bool shard = rdtp_shard_rows(p, p->rank) > 0;
  if ((a->tokens > 0 && (!a->h || !a->labels || (run->grad && !a->dh))) || (shard && (!a->w || (run->grad && !a->dw))))
    return lev_fail(LEV_ERR_ARG, "ring_dtp: a required array is NULL");
  return LEV_OK;
}

static lev_status run_call(rdtp_run *run) {
  LEV_TRY(run_check(run));
  if (run->max_rows == 0) return LEV_OK;
  switch (run->p->mode) {
  case RDTP_RING_WEIGHTS:
    return rdtp_run_weights(run);
  case RDTP_RING_ACTIVATIONS:
    return rdtp_run_activations(run);
  case RDTP_BLOCK_PASS:
    return rdtp_run_block_pass(run);
  case RDTP_GATHER_ALL:
    return rdtp_run_gather_all(run);
  }
  return lev_fail(LEV_ERR_INTERNAL, "ring_dtp: unknown mode");
}

lev_status rdtp_step(rdtp_plan *plan, const rdtp_args *args, lev_stream *stream) {
  if (!plan || !args) return lev_fail(LEV_ERR_ARG, "ring_dtp: no plan or no arguments");
  rdtp_run run = {.p = plan, .args = args, .stream = stream, .grad = true, .clock = 1, .own_clock = 1};
  return run_call(&run);
}

lev_status rdtp_eval(rdtp_plan *plan, const rdtp_args *args, lev_stream *stream) {
  if (!plan || !args) return lev_fail(LEV_ERR_ARG, "ring_dtp: no plan or no arguments");
  rdtp_run run = {.p = plan, .args = args, .stream = stream, .grad = false, .clock = 1, .own_clock = 1};
  return run_call(&run);
}
