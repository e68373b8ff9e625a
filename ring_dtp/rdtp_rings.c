/* SPDX-License-Identifier: Apache-2.0 */
/* The two bounded schedules: which chunks go round and what is done at each stop. */
#include "ring_dtp/ring_dtp_plan.h"

/* ---- weights move: a chunk is `tile_cols` rows of one shard ---- */

static int64_t weight_rows(const rdtp_run *run, int owner, int64_t round) {
  return rdtp_chunk_rows(rdtp_shard_rows(run->p, owner), run->p->tile_cols, round);
}

/* Offset of own chunk `round` in the shard, scalars; a round past the end has zero rows and starts at the end. */
static int64_t weight_offset(const rdtp_run *run, int64_t round) {
  const rdtp_plan *p = run->p;
  return lev_min_i64(round * p->tile_cols, rdtp_shard_rows(p, p->rank)) * p->config.hidden;
}

static const void *weight_own(const rdtp_run *run, int64_t round, int part) {
  (void)part;
  return rdtp_at(run->args->w, weight_offset(run, round), run->p->t_bytes);
}

static rdtp_piece weight_piece(const rdtp_run *run, const rdtp_visit *visit, int64_t token) {
  const rdtp_plan *p = run->p;
  return (rdtp_piece){.h = rdtp_at(run->args->h, token * p->config.hidden, p->t_bytes),
                      .w = visit->data[0],
                      .rows = lev_min_i64(p->tile_rows, run->args->tokens - token),
                      .cols = visit->rows,
                      .begin = rdtp_shard_begin(p, visit->owner) + visit->round * p->tile_cols};
}

static lev_status weight_forward(const rdtp_run *run, const rdtp_visit *visit) {
  const rdtp_plan *p = run->p;
  bool first = visit->round == 0 && visit->hop == 0;
  for (int64_t token = 0; token < run->args->tokens; token += p->tile_rows) {
    rdtp_piece piece = weight_piece(run, visit, token);
    LEV_TRY(rdtp_logits(run, &piece));
    LEV_TRY(rdtp_fold(run, &piece, rdtp_at(run->args->labels, token, sizeof(int32_t)),
                      rdtp_at(p->state, token * RDTP_STATE, p->a_bytes), first));
  }
  return LEV_OK;
}

/* dh accumulates here, in dx where T is narrower than A; dW of the chunk goes on with it, straight into the caller's
 * where P = 1. At least one product runs even without tokens, because it is what zeroes a fresh accumulator. */
static lev_status weight_backward(const rdtp_run *run, const rdtp_visit *visit) {
  const rdtp_plan *p = run->p;
  bool first = visit->round == 0 && visit->hop == 0;
  void *dw = visit->acc ? visit->acc : rdtp_at(run->args->dw, weight_offset(run, visit->round), p->a_bytes);
  bool add = !visit->acc;
  int64_t token = 0;
  do {
    rdtp_piece piece = weight_piece(run, visit, token);
    LEV_TRY(rdtp_logits(run, &piece));
    LEV_TRY(rdtp_residual(run, &piece, rdtp_at(p->state, token * RDTP_STATE, p->a_bytes)));
    void *dh = rdtp_at(p->dx ? p->dx : run->args->dh, token * p->config.hidden, p->a_bytes);
    LEV_TRY(rdtp_grad_h(run, &piece, dh, p->arith, !first));
    LEV_TRY(rdtp_grad_w(run, &piece, dw, add));
    add = true;
    token += p->tile_rows;
  } while (token < run->args->tokens);
  return LEV_OK;
}

static lev_status weight_merge(const rdtp_run *run, void *acc, const void *incoming, int64_t rows) {
  return rdtp_add(run, acc, incoming, rows * run->p->config.hidden);
}

static lev_status weight_home(const rdtp_run *run, const void *acc, int64_t round) {
  const rdtp_plan *p = run->p;
  return rdtp_add(run, rdtp_at(run->args->dw, weight_offset(run, round), p->a_bytes), acc,
                  weight_rows(run, p->rank, round) * p->config.hidden);
}

static rdtp_ring weight_ring(rdtp_run *run, bool backward) {
  rdtp_plan *p = run->p;
  rdtp_ring ring = {.run = run, .n_parts = 1, .own = weight_own, .rows = weight_rows};
  ring.part_bytes[0] = (size_t)p->config.hidden * p->t_bytes;
  for (int i = 0; i < 2; ++i) ring.slot[0][i] = p->payload[i];
  ring.compute = backward ? weight_backward : weight_forward;
  if (!backward || p->size == 1) return ring;
  ring.acc_bytes = (size_t)p->config.hidden * p->a_bytes;
  for (int i = 0; i < 3; ++i) ring.acc[i] = p->acc[i];
  ring.merge = weight_merge;
  ring.home = weight_home;
  return ring;
}

lev_status rdtp_run_weights(rdtp_run *run) {
  rdtp_plan *p = run->p;
  int64_t rounds = lev_ceil_div(p->shard_cap, p->tile_cols), tokens = run->args->tokens;
  rdtp_ring forward = weight_ring(run, false);
  for (int64_t round = 0; round < rounds; ++round) LEV_TRY(rdtp_ring_round(&forward, round));
  LEV_TRY(rdtp_finish(run, run->args->labels, p->state, run->grad ? p->state : NULL, tokens, 0, tokens));
  if (!run->grad) return LEV_OK;
  rdtp_ring backward = weight_ring(run, true);
  for (int64_t round = 0; round < rounds; ++round) LEV_TRY(rdtp_ring_round(&backward, round));
  LEV_TRY(rdtp_ring_flush(&backward));
  return p->dx ? rdtp_store(run, run->args->dh, p->dx, tokens * p->config.hidden) : LEV_OK;
}

/* ---- activations move: a chunk is `tile_rows` tokens of one rank ---- */

static int64_t token_rows(const rdtp_run *run, int owner, int64_t round) {
  return rdtp_chunk_rows(run->p->rank_rows[owner], run->p->tile_rows, round);
}

static int64_t token_offset(const rdtp_run *run, int64_t round) {
  return lev_min_i64(round * run->p->tile_rows, run->args->tokens);
}

static const void *token_own(const rdtp_run *run, int64_t round, int part) {
  int64_t token = token_offset(run, round);
  if (part == 1) return rdtp_at(run->args->labels, token, sizeof(int32_t));
  return rdtp_at(run->args->h, token * run->p->config.hidden, run->p->t_bytes);
}

static const void *token_own_record(const rdtp_run *run, int64_t round, int part) {
  return part == 1 ? run->p->record[round & 1] : token_own(run, round, part);
}

static rdtp_piece token_piece(const rdtp_run *run, const rdtp_visit *visit, int64_t column) {
  const rdtp_plan *p = run->p;
  return (rdtp_piece){.h = visit->data[0],
                      .w = rdtp_at(run->args->w, column * p->config.hidden, p->t_bytes),
                      .rows = visit->rows,
                      .cols = lev_min_i64(p->tile_cols, rdtp_shard_rows(p, p->rank) - column),
                      .begin = rdtp_shard_begin(p, p->rank) + column};
}

/* The loops over columns run at least once: an empty shard still contributes the neutral state and a zero gradient. */
static lev_status token_forward(const rdtp_run *run, const rdtp_visit *visit) {
  const rdtp_plan *p = run->p;
  int64_t column = 0;
  do {
    rdtp_piece piece = token_piece(run, visit, column);
    LEV_TRY(rdtp_logits(run, &piece));
    LEV_TRY(rdtp_fold(run, &piece, visit->data[1], visit->acc, column == 0));
    column += p->tile_cols;
  } while (column < rdtp_shard_rows(p, p->rank));
  return LEV_OK;
}

static lev_status token_merge(const rdtp_run *run, void *acc, const void *incoming, int64_t rows) {
  rdtp_merge_args args = {.dtype = run->p->config.dtype, .state = acc, .incoming = incoming, .rows = rows};
  return LEV_LAUNCH(run->stream, &rdtp_merge_kernel, args);
}

static lev_status token_home(const rdtp_run *run, const void *acc, int64_t round) {
  int64_t rows = token_rows(run, run->p->rank, round);
  return rdtp_finish(run, rdtp_at(run->args->labels, token_offset(run, round), sizeof(int32_t)), acc,
                     run->grad ? run->p->record[round & 1] : NULL, rows, 0, rows);
}

/* Where dh of own tokens goes without a detour: one rank, T = A. */
static void *token_direct(const rdtp_run *run, int64_t round) {
  return rdtp_at(run->args->dh, token_offset(run, round) * run->p->config.hidden, run->p->t_bytes);
}

static lev_status token_backward(const rdtp_run *run, const rdtp_visit *visit) {
  const rdtp_plan *p = run->p;
  void *dh = visit->acc ? visit->acc : token_direct(run, visit->round);
  int64_t column = 0;
  do {
    rdtp_piece piece = token_piece(run, visit, column);
    LEV_TRY(rdtp_logits(run, &piece));
    LEV_TRY(rdtp_residual(run, &piece, visit->data[1]));
    LEV_TRY(rdtp_grad_h(run, &piece, dh, p->arith, column > 0));
    LEV_TRY(rdtp_grad_w(run, &piece, rdtp_at(run->args->dw, column * p->config.hidden, p->a_bytes), true));
    column += p->tile_cols;
  } while (column < rdtp_shard_rows(p, p->rank));
  return LEV_OK;
}

static lev_status token_grad_merge(const rdtp_run *run, void *acc, const void *incoming, int64_t rows) {
  return rdtp_add(run, acc, incoming, rows * run->p->config.hidden);
}

static lev_status token_grad_home(const rdtp_run *run, const void *acc, int64_t round) {
  return rdtp_store(run, token_direct(run, round), acc, token_rows(run, run->p->rank, round) * run->p->config.hidden);
}

static rdtp_ring token_ring(rdtp_run *run, bool backward) {
  rdtp_plan *p = run->p;
  rdtp_ring ring = {.run = run, .n_parts = 2, .rows = token_rows};
  ring.part_bytes[0] = (size_t)p->config.hidden * p->t_bytes;
  ring.part_bytes[1] = backward ? RDTP_STATE * p->a_bytes : sizeof(int32_t);
  for (int i = 0; i < 2; ++i) ring.slot[0][i] = p->payload[i], ring.slot[1][i] = p->meta[i];
  ring.own = backward ? token_own_record : token_own;
  ring.compute = backward ? token_backward : token_forward;
  ring.merge = backward ? token_grad_merge : token_merge;
  ring.home = backward ? token_grad_home : token_home;
  ring.acc_bytes = backward ? (size_t)p->config.hidden * p->a_bytes : RDTP_STATE * p->a_bytes;
  for (int i = 0; i < 3; ++i) ring.acc[i] = backward ? p->acc[i] : p->partial[i];
  if (backward && !p->acc[0]) ring.acc_bytes = 0, ring.home = NULL;
  return ring;
}

/* Gradients of a round run one round behind its loss, so that the hop that brings the state home is hidden too. */
lev_status rdtp_run_activations(rdtp_run *run) {
  int64_t rounds = lev_ceil_div(run->max_rows, run->p->tile_rows);
  rdtp_ring forward = token_ring(run, false), backward = token_ring(run, true);
  for (int64_t round = 0; round < rounds; ++round) {
    LEV_TRY(rdtp_ring_round(&forward, round));
    if (run->grad && round > 0) LEV_TRY(rdtp_ring_round(&backward, round - 1));
  }
  LEV_TRY(rdtp_ring_flush(&forward));
  if (!run->grad) return LEV_OK;
  LEV_TRY(rdtp_ring_round(&backward, rounds - 1));
  return rdtp_ring_flush(&backward);
}
