/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/model/embed.h"

#include "common/dims.h"
#include "common/hostmem.h"
#include "harness/model/embed_ops.h"

#define DEFAULT_TILE 256

struct embed_plan {
  embed_config config;
  lev_device *device;
  lev_comm *comm;
  int rank, size;
  size_t t_bytes;
  int64_t tile;
  int64_t begin, shard_rows; /* this rank's part of the table */
  lev_stream *comm_stream;
  lev_event *mark;       /* compute stream, before a collective */
  lev_event *arrived[2]; /* comm stream: ids (and rows) of the slot are there */
  lev_event *sent[2];    /* comm stream: rows of the slot have been handed out */
  int64_t *counts;       /* host [P] */
  int64_t *rank_rows;    /* host [P] */
  bool bound;
  int32_t *ids[2]; /* [P * tile] */
  void *rows[2];   /* [P * tile, H] T */
};

void embed_config_init(embed_config *config) {
  *config = (embed_config){.size = sizeof *config, .dtype = LEV_F32};
}

static lev_status config_check(const embed_config *c) {
  if (c->size != sizeof *c)
    return lev_fail(LEV_ERR_CONFIG, "embedding: configuration of another version (embed_config_init not called?)");
  if (c->max_tokens < 1 || c->hidden < 1 || c->vocab < 1 || c->vocab > INT32_MAX || c->tile_tokens < 0)
    return lev_fail(LEV_ERR_CONFIG,
                    "embedding: max_tokens %lld, hidden %lld and vocab %lld must be at least 1, vocab at most %d, "
                    "tile_tokens %lld not negative",
                    (long long)c->max_tokens, (long long)c->hidden, (long long)c->vocab, INT32_MAX,
                    (long long)c->tile_tokens);
  if (c->dtype != LEV_F64 && c->dtype != LEV_F32 && c->dtype != LEV_BF16)
    return lev_fail(LEV_ERR_CONFIG, "embedding: dtype must be f64, f32 or bf16");
  return LEV_OK;
}

static lev_status plan_streams(embed_plan *p) {
  LEV_TRY(lev_stream_create(p->device, "embed.comm", &p->comm_stream));
  lev_event **events[] = {&p->mark, &p->arrived[0], &p->arrived[1], &p->sent[0], &p->sent[1]};
  for (size_t i = 0; i < sizeof events / sizeof *events; ++i) LEV_TRY(lev_event_create(p->device, events[i]));
  return LEV_OK;
}

lev_status embed_plan_create(lev_device *device, lev_comm *comm, const embed_config *config, embed_plan **out) {
  *out = NULL;
  if (!device || !comm || !config)
    return lev_fail(LEV_ERR_ARG, "embedding: a device, a communicator and a configuration are needed");
  LEV_TRY(config_check(config));
  embed_plan *p = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  p->config = *config;
  p->device = device, p->comm = comm;
  p->rank = lev_comm_rank(comm), p->size = lev_comm_size(comm);
  p->t_bytes = lev_dtype_bytes(config->dtype);
  p->tile = lev_min_i64(config->tile_tokens ? config->tile_tokens : DEFAULT_TILE, config->max_tokens);
  p->begin = lev_part_begin(config->vocab, p->size, p->rank);
  p->shard_rows = lev_part_size(config->vocab, p->size, p->rank);
  p->counts = lev_calloc(LEV_HEAP_PLAN, (size_t)p->size, sizeof *p->counts);
  p->rank_rows = lev_calloc(LEV_HEAP_PLAN, (size_t)p->size, sizeof *p->rank_rows);
  lev_status st = p->counts && p->rank_rows ? plan_streams(p) : LEV_ERR_NOMEM;
  if (st == LEV_OK)
    *out = p;
  else
    embed_destroy(p);
  return st;
}

void embed_destroy(embed_plan *plan) {
  if (!plan) return;
  lev_event *events[] = {plan->mark, plan->arrived[0], plan->arrived[1], plan->sent[0], plan->sent[1]};
  for (size_t i = 0; i < sizeof events / sizeof *events; ++i)
    if (events[i]) lev_event_destroy(events[i]);
  if (plan->comm_stream) lev_stream_destroy(plan->comm_stream);
  lev_free(plan->counts);
  lev_free(plan->rank_rows);
  lev_free(plan);
}

/* ---- regions ---- */

/* The one description of the buffers: assigns the pointers of `p` while it counts, lists or binds. */
static void walk_step(embed_plan *p, lev_walker *w) {
  if (p->size == 1) return;
  for (int i = 0; i < 2; ++i) {
    p->ids[i] = lev_walk(w, LEV_MEM_DEVICE, "embed.ids", LEV_I32, p->tile * p->size, 1);
    p->rows[i] = lev_walk(w, LEV_MEM_DEVICE, "embed.rows", p->config.dtype, p->tile * p->size, p->config.hidden);
  }
}

static void walk_phase(const embed_plan *p, embed_phase phase, lev_walker *w) {
  embed_plan scratch = *p; /* counting must not disturb bound pointers */
  if (phase == EMBED_STEP) walk_step(&scratch, w);
}

void embed_walk_persistent(void *plan, lev_walker *walker) {
  walk_phase(plan, EMBED_PERSISTENT, walker);
}
void embed_walk_step(void *plan, lev_walker *walker) {
  walk_phase(plan, EMBED_STEP, walker);
}

void embed_plan_bytes(const embed_plan *plan, embed_phase phase, size_t bytes[LEV_MEM_CLASSES]) {
  lev_walker walker = {0};
  walk_phase(plan, phase, &walker);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) bytes[c] = walker.used[c];
}

void embed_plan_regions(const embed_plan *plan, embed_phase phase, lev_region_fn list, void *ctx) {
  lev_walker walker = {.list = list, .list_ctx = ctx};
  walk_phase(plan, phase, &walker);
}

lev_status embed_plan_bind(embed_plan *plan, embed_phase phase, const lev_blocks *blocks) {
  static const char *const names[EMBED_PHASES] = {"embed.persistent", "embed.step"};
  if (!plan || !blocks || phase < 0 || phase >= EMBED_PHASES) return lev_fail(LEV_ERR_ARG, "embedding: bad bind");
  lev_walker need = {0};
  walk_phase(plan, phase, &need);
  LEV_TRY(lev_blocks_check(&need, blocks, names[phase]));
  lev_trace_add(lev_device_trace(plan->device), LEV_EV_BIND, 0, names[phase], need.used[LEV_MEM_DEVICE]);
  if (phase == EMBED_PERSISTENT) return LEV_OK;
  lev_walker walker = {.base = {[LEV_MEM_DEVICE] = blocks->base[LEV_MEM_DEVICE]}};
  walk_step(plan, &walker);
  plan->bound = true;
  return LEV_OK;
}

/* ---- rounds ---- */

/* Checks the sizes of a call; *rounds = rounds of the rank with most tokens. */
static lev_status call_check(embed_plan *p, int64_t tokens, const int64_t *rank_tokens, int64_t *rounds) {
  int64_t most = 0;
  if (!p->bound) return lev_fail(LEV_ERR_MISUSE, "embedding: the step phase is not bound");
  for (int r = 0; r < p->size; ++r) {
    int64_t rows = rank_tokens ? rank_tokens[r] : tokens;
    if (rows < 0) return lev_fail(LEV_ERR_ARG, "embedding: %lld tokens on rank %d", (long long)rows, r);
    if (rows > p->config.max_tokens)
      return lev_fail(LEV_ERR_CAPACITY, "embedding: %lld tokens on rank %d, planned for at most %lld", (long long)rows,
                      r, (long long)p->config.max_tokens);
    p->rank_rows[r] = rows;
    most = lev_max_i64(most, rows);
  }
  if (p->rank_rows[p->rank] != tokens)
    return lev_fail(LEV_ERR_ARG, "embedding: tokens is %lld, rank_tokens[%d] is %lld", (long long)tokens, p->rank,
                    (long long)p->rank_rows[p->rank]);
  *rounds = lev_ceil_div(most, p->tile);
  return LEV_OK;
}

/* counts[r] = tokens of rank r in the round, times `width`; returns the tokens of all ranks. */
static int64_t round_counts(embed_plan *p, int64_t round, int64_t width) {
  int64_t sum = 0;
  for (int r = 0; r < p->size; ++r) {
    int64_t rows = lev_max_i64(0, lev_min_i64(p->tile, p->rank_rows[r] - round * p->tile));
    p->counts[r] = rows * width;
    sum += rows;
  }
  return sum;
}

static int64_t round_begin(const embed_plan *p, int64_t round) {
  return lev_min_i64(round * p->tile, p->rank_rows[p->rank]);
}

static void *at(const void *base, int64_t elems, size_t bytes) {
  return elems == 0 ? (void *)base : (unsigned char *)base + (size_t)elems * bytes;
}

static lev_status mark(embed_plan *p, lev_stream *stream) {
  LEV_TRY(lev_event_record(p->mark, stream));
  return lev_stream_wait(p->comm_stream, p->mark);
}

/* Everybody's ids of the round, and rows too when `rows` is given, into slot round & 1, once `stream` has done with it.
 */
static lev_status gather(embed_plan *p, const int32_t *ids, const void *rows, int64_t round, lev_stream *stream) {
  int64_t token = round_begin(p, round);
  int slot = (int)(round & 1);
  LEV_TRY(mark(p, stream));
  round_counts(p, round, 1);
  LEV_TRY(lev_comm_all_gather(p->comm, p->comm_stream, at(ids, token, sizeof *ids), p->ids[slot], p->counts, LEV_I32));
  if (rows) {
    round_counts(p, round, p->config.hidden);
    LEV_TRY(lev_comm_all_gather(p->comm, p->comm_stream, at(rows, token * p->config.hidden, p->t_bytes), p->rows[slot],
                                p->counts, p->config.dtype));
  }
  return lev_event_record(p->arrived[slot], p->comm_stream);
}

static lev_status take(embed_plan *p, const int32_t *ids, int64_t count, const void *w, void *rows,
                       lev_stream *stream) {
  embed_take_args args = {.dtype = p->config.dtype,
                          .ids = ids,
                          .count = count,
                          .hidden = p->config.hidden,
                          .begin = p->begin,
                          .shard_rows = p->shard_rows,
                          .w = w,
                          .rows = rows};
  return LEV_LAUNCH(stream, &embed_take_kernel, args);
}

static lev_status add(embed_plan *p, const int32_t *ids, int64_t count, const void *rows, void *dw,
                      lev_stream *stream) {
  embed_add_args args = {.dtype = p->config.dtype,
                         .ids = ids,
                         .count = count,
                         .hidden = p->config.hidden,
                         .begin = p->begin,
                         .shard_rows = p->shard_rows,
                         .rows = rows,
                         .dw = dw};
  return LEV_LAUNCH(stream, &embed_add_kernel, args);
}

/* Rows of the round handed out: the sum over ranks of what each put into the slot. */
static lev_status hand_out(embed_plan *p, void *out, int64_t round, lev_stream *stream) {
  int64_t hidden = p->config.hidden;
  int slot = (int)(round & 1);
  round_counts(p, round, hidden);
  LEV_TRY(mark(p, stream));
  LEV_TRY(lev_comm_reduce_scatter(p->comm, p->comm_stream, p->rows[slot], p->config.dtype,
                                  at(out, round_begin(p, round) * hidden, p->t_bytes), p->config.dtype, p->counts,
                                  false));
  return lev_event_record(p->sent[slot], p->comm_stream);
}

lev_status embed_forward(embed_plan *plan, const embed_forward_args *args, lev_stream *stream) {
  int64_t rounds;
  if (!plan || !args || !stream) return lev_fail(LEV_ERR_ARG, "embedding: no plan, arguments or stream");
  LEV_TRY(call_check(plan, args->tokens, args->rank_tokens, &rounds));
  if ((args->tokens > 0 && (!args->ids || !args->out)) || (plan->shard_rows > 0 && !args->w))
    return lev_fail(LEV_ERR_ARG, "embedding: a required array is NULL");
  if (plan->size == 1) return take(plan, args->ids, args->tokens, args->w, args->out, stream);
  if (rounds > 0) LEV_TRY(gather(plan, args->ids, NULL, 0, stream));
  for (int64_t round = 0; round < rounds; ++round) {
    int slot = (int)(round & 1);
    if (round + 1 < rounds) LEV_TRY(gather(plan, args->ids, NULL, round + 1, stream));
    LEV_TRY(lev_stream_wait(stream, plan->arrived[slot]));
    if (round >= 2) LEV_TRY(lev_stream_wait(stream, plan->sent[slot]));
    LEV_TRY(take(plan, plan->ids[slot], round_counts(plan, round, 1), args->w, plan->rows[slot], stream));
    LEV_TRY(hand_out(plan, args->out, round, stream));
  }
  return rounds > 0 ? lev_stream_wait(stream, plan->sent[(rounds - 1) & 1]) : LEV_OK;
}

lev_status embed_backward(embed_plan *plan, const embed_backward_args *args, lev_stream *stream) {
  int64_t rounds;
  if (!plan || !args || !stream) return lev_fail(LEV_ERR_ARG, "embedding: no plan, arguments or stream");
  LEV_TRY(call_check(plan, args->tokens, args->rank_tokens, &rounds));
  if ((args->tokens > 0 && (!args->ids || !args->dout)) || (plan->shard_rows > 0 && !args->dw))
    return lev_fail(LEV_ERR_ARG, "embedding: a required array is NULL");
  if (plan->size == 1) return add(plan, args->ids, args->tokens, args->dout, args->dw, stream);
  /* A rank without tokens still takes part: any non-NULL address will do for its zero rows. */
  const void *dout = args->dout ? args->dout : (const void *)plan->rows[0];
  if (rounds > 0) LEV_TRY(gather(plan, args->ids, dout, 0, stream));
  for (int64_t round = 0; round < rounds; ++round) {
    int slot = (int)(round & 1);
    if (round + 1 < rounds) LEV_TRY(gather(plan, args->ids, dout, round + 1, stream));
    LEV_TRY(lev_stream_wait(stream, plan->arrived[slot]));
    LEV_TRY(add(plan, plan->ids[slot], round_counts(plan, round, 1), plan->rows[slot], args->dw, stream));
  }
  return LEV_OK;
}
