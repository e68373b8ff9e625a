/* SPDX-License-Identifier: Apache-2.0 */
/* Schedules that gather instead of going round: the one-pass mode (blocks of every rank's tokens meet all shards at
 * once, logits kept until their gradient is taken) and the plain reference (the whole head and all logits on every
 * rank). */
#include "ring_dtp/ring_dtp_plan.h"

/* Fills counts[r] with the rows of block `round` on rank r times `width`; returns the rows of all ranks. */
static int64_t block_counts(const rdtp_run *run, int64_t round, int64_t width, int64_t *own_begin) {
  rdtp_plan *p = run->p;
  int64_t rows = 0;
  for (int r = 0; r < p->size; ++r) {
    int64_t mine = rdtp_chunk_rows(p->rank_rows[r], p->tile_rows, round);
    if (r == p->rank && own_begin) *own_begin = rows;
    p->counts[r] = mine * width;
    rows += mine;
  }
  return rows;
}

static int64_t block_offset(const rdtp_run *run, int64_t round) {
  return lev_min_i64(round * run->p->tile_rows, run->args->tokens);
}

/* Tokens and labels of block `round` from all ranks into slot round & 1, which products of block round - 2 have left.
 */
static lev_status block_gather(const rdtp_run *run, int64_t round) {
  rdtp_plan *p = run->p;
  int64_t hidden = p->config.hidden, token = block_offset(run, round);
  int slot = (int)(round & 1);
  block_counts(run, round, hidden, NULL);
  LEV_TRY(lev_comm_all_gather(p->comm, p->comm_stream, rdtp_at(run->args->h, token * hidden, p->t_bytes),
                              p->payload[slot], p->counts, p->config.dtype));
  block_counts(run, round, 1, NULL);
  LEV_TRY(lev_comm_all_gather(p->comm, p->comm_stream, rdtp_at(run->args->labels, token, sizeof(int32_t)),
                              p->meta[slot], p->counts, LEV_I32));
  return lev_event_record(p->arrived[slot], p->comm_stream);
}

/* Every rank learns the strip states of all shards and combines them in rank order; the next block's gather follows
 * behind. */
static lev_status block_state(const rdtp_run *run, int64_t rows, int64_t round, bool more) {
  rdtp_plan *p = run->p;
  for (int r = 0; r < p->size; ++r) p->counts[r] = rows * RDTP_STATE;
  LEV_TRY(rdtp_mark(run));
  LEV_TRY(lev_comm_all_gather(p->comm, p->comm_stream, rdtp_at(p->all_state, p->rank * rows * RDTP_STATE, p->a_bytes),
                              p->all_state, p->counts, p->arith));
  LEV_TRY(lev_event_record(p->acc_arrived, p->comm_stream));
  if (more) LEV_TRY(block_gather(run, round + 1));
  LEV_TRY(lev_stream_wait(run->stream, p->acc_arrived));
  rdtp_combine_args args = {
      .dtype = p->config.dtype, .state = p->state, .parts = p->all_state, .n_parts = p->size, .rows = rows};
  return LEV_LAUNCH(run->stream, &rdtp_combine_kernel, args);
}

/* The reduction of block `round` overlaps the logits of the next one; the state exchange of that one, queued behind it
 * on the comm stream and awaited by the compute stream, frees the accumulator. */
static lev_status block_backward(const rdtp_run *run, const rdtp_piece *piece, int64_t round) {
  rdtp_plan *p = run->p;
  int64_t hidden = p->config.hidden;
  void *dh = rdtp_at(run->args->dh, block_offset(run, round) * hidden, p->t_bytes);
  LEV_TRY(rdtp_residual(run, piece, p->state));
  if (p->size == 1) LEV_TRY(rdtp_grad_h(run, piece, dh, p->config.dtype, false));
  if (p->size > 1) {
    LEV_TRY(rdtp_grad_h(run, piece, p->acc[0], p->arith, false));
    block_counts(run, round, hidden, NULL);
    LEV_TRY(rdtp_mark(run));
    LEV_TRY(
        lev_comm_reduce_scatter(p->comm, p->comm_stream, p->acc[0], p->arith, dh, p->config.dtype, p->counts, false));
    LEV_TRY(lev_event_record(p->done, p->comm_stream));
  }
  return rdtp_grad_w(run, piece, run->args->dw, true);
}

static lev_status block_round(const rdtp_run *run, int64_t round, bool more) {
  rdtp_plan *p = run->p;
  int64_t token = block_offset(run, round), own = 0, rows = block_counts(run, round, 1, &own);
  int64_t mine = p->counts[p->rank];
  int slot = (int)(round & 1);
  bool one = p->size == 1;
  rdtp_piece piece = {.h = one ? rdtp_at(run->args->h, token * p->config.hidden, p->t_bytes) : p->payload[slot],
                      .w = run->args->w,
                      .rows = rows,
                      .cols = rdtp_shard_rows(p, p->rank),
                      .begin = rdtp_shard_begin(p, p->rank)};
  const int32_t *labels = one ? rdtp_at(run->args->labels, token, sizeof(int32_t)) : p->meta[slot];
  if (!one) LEV_TRY(lev_stream_wait(run->stream, p->arrived[slot]));
  LEV_TRY(rdtp_logits(run, &piece));
  void *partial = one ? p->state : rdtp_at(p->all_state, p->rank * rows * RDTP_STATE, p->a_bytes);
  LEV_TRY(rdtp_fold(run, &piece, labels, partial, true));
  if (!one) LEV_TRY(block_state(run, rows, round, more));
  LEV_TRY(rdtp_finish(run, labels, p->state, run->grad ? p->state : NULL, rows, own, own + mine));
  return run->grad ? block_backward(run, &piece, round) : LEV_OK;
}

lev_status rdtp_run_block_pass(rdtp_run *run) {
  rdtp_plan *p = run->p;
  int64_t rounds = lev_ceil_div(run->max_rows, p->tile_rows);
  if (p->size > 1) {
    LEV_TRY(rdtp_mark(run));
    LEV_TRY(block_gather(run, 0));
  }
  for (int64_t round = 0; round < rounds; ++round) LEV_TRY(block_round(run, round, round + 1 < rounds));
  return p->size > 1 && run->grad ? lev_stream_wait(run->stream, p->done) : LEV_OK;
}

/* counts[r] = scalars of shard r. */
static void shard_counts(rdtp_plan *p) {
  for (int r = 0; r < p->size; ++r) p->counts[r] = rdtp_shard_rows(p, r) * p->config.hidden;
}

lev_status rdtp_run_gather_all(rdtp_run *run) {
  rdtp_plan *p = run->p;
  const rdtp_args *a = run->args;
  bool one = p->size == 1;
  shard_counts(p);
  if (!one) {
    LEV_TRY(rdtp_mark(run));
    LEV_TRY(lev_comm_all_gather(p->comm, p->comm_stream, a->w, p->payload[0], p->counts, p->config.dtype));
    LEV_TRY(lev_event_record(p->arrived[0], p->comm_stream));
    LEV_TRY(lev_stream_wait(run->stream, p->arrived[0]));
  }
  rdtp_piece piece = {.h = a->h, .w = one ? a->w : p->payload[0], .rows = a->tokens, .cols = p->config.vocab};
  LEV_TRY(rdtp_logits(run, &piece));
  LEV_TRY(rdtp_fold(run, &piece, a->labels, p->state, true));
  LEV_TRY(rdtp_finish(run, a->labels, p->state, run->grad ? p->state : NULL, a->tokens, 0, a->tokens));
  if (!run->grad) return LEV_OK;
  LEV_TRY(rdtp_residual(run, &piece, p->state));
  LEV_TRY(rdtp_grad_h(run, &piece, a->dh, p->config.dtype, false));
  if (one) return rdtp_grad_w(run, &piece, a->dw, true);
  LEV_TRY(rdtp_grad_w(run, &piece, p->acc[0], false));
  LEV_TRY(rdtp_mark(run));
  LEV_TRY(lev_comm_reduce_scatter(p->comm, p->comm_stream, p->acc[0], p->arith, a->dw, p->arith, p->counts, true));
  LEV_TRY(lev_event_record(p->done, p->comm_stream));
  return lev_stream_wait(run->stream, p->done);
}
