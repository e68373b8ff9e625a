/* SPDX-License-Identifier: Apache-2.0 */
/* Schedule of one layer. Three streams: dispatch (routes and rows out), the caller's (experts), combine (lent weights,
 * rows home, lent gradients). Chunk i uses buffer i mod 2:
 *
 *     dispatch   gather, exchange i+1 ...        after combine i-1 left the buffer
 *     compute    experts i                       after exchange i
 *     combine    exchange, sum i-1 ...           after experts i-1
 *
 * A group of one exchanges nothing: rows are gathered into the received chunk's buffer and summed from there, so the
 * gather, too, waits for the sums of chunk i-2. */
#include <string.h>

#include "common/gemm.h"
#include "pipelined_llep/llep_plan.h"

/* One call. */
typedef struct llep_pass {
  llep_plan *p;
  llep_layer *l;
  lev_stream *compute;
  bool backward, accumulate;
  bool overwrite; /* dw is T and not added to: every gradient is one product */
  lev_dtype type, arith;
  size_t row, weight, scalar; /* bytes of a row [H], of an expert's weights, of a scalar of A */
  const void *x, *probs, *dy;
  const unsigned char *w;
  unsigned char *dw;
  void *out, *dprobs; /* y or dx [N, H] */
} llep_pass;

static llep_pass begin(llep_plan *p, int layer, lev_stream *compute) {
  lev_dtype type = p->cfg.dtype, arith = lev_dtype_arith(type);
  size_t b = lev_dtype_bytes(type);
  return (llep_pass){.p = p,
                     .l = &p->layers[layer],
                     .compute = compute,
                     .type = type,
                     .arith = arith,
                     .row = (size_t)p->cfg.hidden * b,
                     .weight = (size_t)p->z.weights * b,
                     .scalar = lev_dtype_bytes(arith)};
}

/* ---- rows out and home ---- */

/* Row counts of chunk i, into plan->send_rows and plan->recv_rows. */
static void chunk_counts(const llep_pass *s, int64_t i) {
  llep_plan *p = s->p;
  int64_t ranks = p->z.rules.ranks;
  const int32_t *recv = s->l->recv + i * ranks * p->columns;
  for (int64_t r = 0; r < ranks; ++r) {
    p->send_rows[r] = s->l->send[i * ranks + r];
    p->recv_rows[r] = 0;
    for (int64_t c = 0; c < p->columns; ++c) p->recv_rows[r] += recv[r * p->columns + c];
  }
}

/* Received rows of chunk i. */
static unsigned char *received(const llep_pass *s, unsigned char *rows, int64_t i, size_t row_bytes) {
  return rows ? rows + (size_t)(i % s->p->z.buffers * s->p->z.recv_rows) * row_bytes : NULL;
}

static lev_status dispatch(const llep_pass *s, int64_t i) {
  llep_plan *p = s->p;
  const llep_work *k = &p->work;
  int64_t first = s->l->border[i], last = s->l->border[i + 1];
  bool alone = p->z.rules.ranks == 1;
  unsigned char *to_x = alone ? received(s, k->recv_x, i, s->row) : k->send_x;
  unsigned char *to_dy = alone ? received(s, k->recv_dy, i, s->row) : k->send_dy;
  unsigned char *to_p = alone ? received(s, k->recv_p, i, s->scalar) : k->send_p;
  if (alone && i >= LLEP_BUFFERS) LEV_TRY(lev_stream_wait(p->dispatch, p->combined[i % LLEP_BUFFERS]));
  llep_number_args number = {p->z.rules, s->l->tokens, p->cfg.top_k, p->z.blocks, first,
                             last,       k->histogram, k->next,      k->routes};
  LEV_TRY(LEV_LAUNCH(p->dispatch, &llep_number_kernel, number));
  llep_gather_args gather = {.dtype = s->type,
                             .tokens = s->l->tokens,
                             .top_k = p->cfg.top_k,
                             .hidden = p->cfg.hidden,
                             .blocks = p->z.blocks,
                             .first = first,
                             .last = last,
                             .routes = k->routes,
                             .x = s->x,
                             .send_x = to_x};
  if (s->backward) {
    gather.dy = s->dy, gather.send_dy = to_dy;
    gather.probs = s->probs, gather.send_probs = to_p;
  }
  LEV_TRY(LEV_LAUNCH(p->dispatch, &llep_gather_kernel, gather));
  if (alone) return lev_event_record(p->dispatched[i % LLEP_BUFFERS], p->dispatch);
  if (i >= LLEP_BUFFERS) LEV_TRY(lev_stream_wait(p->dispatch, p->combined[i % LLEP_BUFFERS]));
  chunk_counts(s, i);
  lev_comm_part parts[3] = {{k->send_x, received(s, k->recv_x, i, s->row), s->row},
                            {k->send_dy, received(s, k->recv_dy, i, s->row), s->row},
                            {k->send_p, received(s, k->recv_p, i, s->scalar), s->scalar}};
  LEV_TRY(lev_comm_all_to_all(p->out, p->dispatch, parts, s->backward ? 3 : 1, p->send_rows, p->recv_rows));
  return lev_event_record(p->dispatched[i % LLEP_BUFFERS], p->dispatch);
}

/* Rows of chunk i come home. */
static lev_status send_home(const llep_pass *s, int64_t i) {
  llep_plan *p = s->p;
  const llep_work *k = &p->work;
  chunk_counts(s, i);
  lev_comm_part parts[2] = {{received(s, k->recv_x, i, s->row), k->back_x, s->row},
                            {received(s, k->recv_p, i, s->scalar), k->back_p, s->scalar}};
  LEV_TRY(lev_comm_all_to_all(p->back, p->combine, parts, s->backward ? 2 : 1, p->recv_rows, p->send_rows));
  return lev_event_record(p->combined[i % LLEP_BUFFERS], p->combine);
}

static lev_status combine(const llep_pass *s, int64_t i) {
  llep_plan *p = s->p;
  const llep_work *k = &p->work;
  bool alone = p->z.rules.ranks == 1;
  LEV_TRY(lev_stream_wait(p->combine, p->computed[i % LLEP_BUFFERS]));
  if (!alone) LEV_TRY(send_home(s, i));
  llep_combine_args a = {.dtype = s->type,
                         .tokens = s->l->tokens,
                         .top_k = p->cfg.top_k,
                         .hidden = p->cfg.hidden,
                         .blocks = p->z.blocks,
                         .first = s->l->border[i],
                         .last = s->l->border[i + 1],
                         .routes = k->routes,
                         .probs = s->backward ? NULL : s->probs,
                         .rows = alone ? received(s, k->recv_x, i, s->row) : k->back_x,
                         .row_scalars = alone ? received(s, k->recv_p, i, s->scalar) : k->back_p,
                         .out = s->out,
                         .scalars = s->dprobs,
                         .accumulate = s->accumulate};
  LEV_TRY(LEV_LAUNCH(p->combine, &llep_combine_kernel, a));
  return alone ? lev_event_record(p->combined[i % LLEP_BUFFERS], p->combine) : LEV_OK;
}

/* ---- experts ---- */

/* Up to tile_rows rows of one or more experts, plan->pieces of them: where they are while they are computed. */
typedef struct llep_tile {
  int64_t rows;
  unsigned char *x, *dy, *probs;
} llep_tile;

/* Bytes of a scalar of dw. */
static size_t gradient_scalar(const llep_pass *s) {
  return s->overwrite ? lev_dtype_bytes(s->type) : s->scalar;
}

static unsigned char *expert_gradient(const llep_pass *s, int64_t column) {
  size_t bytes = (size_t)s->p->z.weights * gradient_scalar(s);
  int64_t own = s->p->own_experts;
  return column < own ? s->dw + (size_t)column * bytes : s->p->work.foreign_grad + (size_t)(column - own) * bytes;
}

/* The matrices of a product: of each piece's weights or of its gradients, from scalar `offset` on. */
static void *const *list_weights(const llep_pass *s, int64_t offset) {
  llep_plan *p = s->p;
  size_t scalar = s->row / (size_t)p->cfg.hidden;
  for (int64_t i = 0; i < p->pieces.n; ++i) {
    int64_t column = p->pieces.column[i], own = p->own_experts;
    const unsigned char *w =
        column < own ? s->w + (size_t)column * s->weight : p->work.foreign + (size_t)(column - own) * s->weight;
    p->pieces.each[i] = (unsigned char *)(uintptr_t)w + (size_t)offset * scalar;
  }
  return p->pieces.each;
}
static void *const *list_gradients(const llep_pass *s, int64_t offset) {
  llep_plan *p = s->p;
  for (int64_t i = 0; i < p->pieces.n; ++i)
    p->pieces.each[i] = expert_gradient(s, p->pieces.column[i]) + (size_t)offset * gradient_scalar(s);
  return p->pieces.each;
}

/* C[rows, n] = A[rows, k] op(W) for the tile's rows, W each expert's own from scalar `offset` on. */
static lev_status times_weights(const llep_pass *s, int64_t offset, bool trans_b, int64_t n, int64_t k, const void *a,
                                int64_t lda, void *c) {
  const llep_pieces *t = &s->p->pieces;
  lev_gemm_args like = {.n = n,
                        .k = k,
                        .trans_b = trans_b,
                        .a = a,
                        .c = c,
                        .lda = lda,
                        .ldb = trans_b ? k : n,
                        .ldc = n,
                        .ab_type = s->type,
                        .c_type = s->type,
                        .alpha = 1};
  return lev_gemm_grouped(
      s->compute, &(lev_gemm_grouped_args){like, LEV_RAGGED_ROWS, t->n, t->first, t->rows, list_weights(s, offset)});
}

/* dW[m, n] += A[rows, m]^T B[rows, n] for each expert (= where they are overwritten). */
static lev_status add_gradients(const llep_pass *s, int64_t offset, int64_t m, int64_t n, const void *a,
                                const void *b) {
  const llep_pieces *t = &s->p->pieces;
  lev_gemm_args like = {.m = m,
                        .n = n,
                        .trans_a = true,
                        .a = a,
                        .b = b,
                        .lda = m,
                        .ldb = n,
                        .ldc = n,
                        .ab_type = s->type,
                        .c_type = s->overwrite ? s->type : s->arith,
                        .alpha = 1,
                        .beta = s->overwrite ? 0 : 1};
  return lev_gemm_grouped(
      s->compute, &(lev_gemm_grouped_args){like, LEV_RAGGED_DEPTH, t->n, t->first, t->rows, list_gradients(s, offset)});
}

/* The tile's rows are replaced by the experts' outputs. */
static lev_status tile_forward(const llep_pass *s, const llep_tile *t) {
  const llep_plan *p = s->p;
  int64_t hidden = p->cfg.hidden, inter = p->cfg.inter, down = 2 * inter * hidden;
  LEV_TRY(times_weights(s, 0, true, 2 * inter, hidden, t->x, hidden, p->work.h));
  llep_act_args act = {s->type, t->rows, inter, p->work.h};
  LEV_TRY(LEV_LAUNCH(s->compute, &llep_act_kernel, act));
  return times_weights(s, down, true, hidden, inter, p->work.h, 2 * inter, t->x);
}

/* The experts again, then their gradients; the tile's rows are replaced by dX, its weights by their gradients. */
static lev_status tile_backward(const llep_pass *s, const llep_tile *t) {
  const llep_plan *p = s->p;
  int64_t hidden = p->cfg.hidden, inter = p->cfg.inter, down = 2 * inter * hidden;
  void *h = p->work.h, *q = p->work.q;
  LEV_TRY(times_weights(s, 0, true, 2 * inter, hidden, t->x, hidden, h));
  LEV_TRY(times_weights(s, down, false, inter, hidden, t->dy, hidden, q));
  llep_act_backward_args act = {s->type, t->rows, inter, h, q, t->probs};
  LEV_TRY(LEV_LAUNCH(s->compute, &llep_act_backward_kernel, act));
  LEV_TRY(add_gradients(s, down, hidden, inter, t->dy, q));
  LEV_TRY(add_gradients(s, 0, 2 * inter, hidden, h, t->x));
  return times_weights(s, 0, false, hidden, 2 * inter, h, 2 * inter, t->x);
}

/* Copies runs of the received chunk to the tile (x, and in backward dY and weights) or results back to the runs. */
static lev_status pack(const llep_pass *s, int64_t chunk, llep_pack_args *a, const llep_tile *t, bool unpack) {
  const llep_work *k = &s->p->work;
  a->unpack = unpack, a->n_parts = 0;
  a->part[a->n_parts].rows = received(s, k->recv_x, chunk, s->row);
  a->part[a->n_parts].tile = t->x, a->part[a->n_parts++].row_bytes = s->row;
  if (s->backward) {
    a->part[a->n_parts].rows = received(s, k->recv_p, chunk, s->scalar);
    a->part[a->n_parts].tile = t->probs, a->part[a->n_parts++].row_bytes = s->scalar;
  }
  if (s->backward && !unpack) {
    a->part[a->n_parts].rows = received(s, k->recv_dy, chunk, s->row);
    a->part[a->n_parts].tile = t->dy, a->part[a->n_parts++].row_bytes = s->row;
  }
  return LEV_LAUNCH(s->compute, &llep_pack_kernel, *a);
}

/* A place in the tile's rows: so many rows of a piece are behind it, it stands before row `skip` of the run of source
 * r. */
typedef struct llep_at {
  int64_t piece, done, skip;
  int r;
} llep_at;

/* Rows of `column` that source r sent in the chunk whose counts are `recv`. */
static int64_t run_rows(const llep_plan *p, const int32_t *recv, int r, int64_t column) {
  return recv[r * p->columns + column];
}

/* Moves the cursor to the runs of `column`. */
static void seek(llep_plan *p, const int32_t *recv, int64_t column) {
  for (; p->cursor_column < column; ++p->cursor_column)
    for (int r = 0; r < p->z.rules.ranks; ++r) p->cursor[r] += run_rows(p, recv, r, p->cursor_column);
  while (p->cursor_column > column) {
    --p->cursor_column;
    for (int r = 0; r < p->z.rules.ranks; ++r) p->cursor[r] -= run_rows(p, recv, r, p->cursor_column);
  }
}

/* The next rows of the tile as runs, until the argument list is full or the tile ends; says how many. */
static int64_t list_runs(const llep_pass *s, const int32_t *recv, llep_at *at, llep_pack_args *a) {
  llep_plan *p = s->p;
  const llep_pieces *t = &p->pieces;
  int64_t listed = 0;
  a->n_runs = 0;
  while (at->piece < t->n && a->n_runs < LEV_LLEP_RUNS) {
    int64_t column = t->column[at->piece];
    if (at->done == 0 && at->r == 0) /* the piece begins here */
      for (at->skip = t->offset[at->piece]; at->skip >= run_rows(p, recv, at->r, column); ++at->r)
        at->skip -= run_rows(p, recv, at->r, column);
    seek(p, recv, column);
    int64_t n = lev_min_i64(run_rows(p, recv, at->r, column) - at->skip, t->rows[at->piece] - at->done);
    if (n > 0) {
      a->start[a->n_runs] = (int32_t)(p->cursor[at->r] + at->skip);
      a->count[a->n_runs++] = (int32_t)n;
      listed += n, at->done += n;
    }
    ++at->r, at->skip = 0;
    if (at->done == t->rows[at->piece]) *at = (llep_at){.piece = at->piece + 1};
  }
  return listed;
}

static llep_tile at_row(const llep_pass *s, const llep_tile *t, int64_t row, int64_t rows) {
  return (llep_tile){rows, t->x + (size_t)row * s->row, t->dy ? t->dy + (size_t)row * s->row : NULL,
                     t->probs ? t->probs + (size_t)row * s->scalar : NULL};
}

/* Moves the tile's rows in or out, in as many launches as the run lists need. */
static lev_status move_tile(const llep_pass *s, int64_t chunk, const int32_t *recv, const llep_tile *t, bool unpack) {
  llep_pack_args a = {0};
  llep_at at = {0};
  for (int64_t done = 0; done < t->rows;) {
    int64_t n = list_runs(s, recv, &at, &a);
    llep_tile part = at_row(s, t, done, n);
    LEV_TRY(pack(s, chunk, &a, &part, unpack));
    done += n;
  }
  return LEV_OK;
}

/* Computes plan->pieces. Where they lie in the received chunk as they would in the tile, they are computed there: all
 * of them in a group of one rank, a single run in others. */
static lev_status run_tile(const llep_pass *s, int64_t chunk, const int32_t *recv, int64_t rows) {
  llep_plan *p = s->p;
  const llep_work *k = &p->work;
  llep_pack_args first = {0};
  llep_at at = {0};
  int64_t listed = list_runs(s, recv, &at, &first);
  bool here = p->z.rules.ranks == 1 || (listed == rows && first.n_runs == 1);
  llep_tile t = {rows, k->tile_x, k->tile_dy, k->tile_p};
  if (here) {
    llep_tile all = {0, received(s, k->recv_x, chunk, s->row), received(s, k->recv_dy, chunk, s->row),
                     received(s, k->recv_p, chunk, s->scalar)};
    t = at_row(s, &all, first.start[0], rows);
  } else {
    LEV_TRY(move_tile(s, chunk, recv, &t, false));
  }
  LEV_TRY(s->backward ? tile_backward(s, &t) : tile_forward(s, &t));
  return here ? LEV_OK : move_tile(s, chunk, recv, &t, true);
}

/* dw of experts [first, end) where they got no row. */
static lev_status zero_gradients(const llep_pass *s, int64_t first, int64_t end) {
  size_t bytes = (size_t)((end - first) * s->p->z.weights) * gradient_scalar(s);
  return lev_fill(s->compute, expert_gradient(s, first), 0, bytes, "llep.no_rows");
}

/* All experts of received chunk i, in tiles: an expert with more than tile_rows rows is cut into pieces of that many,
 * and pieces that follow each other share a tile while they fit. */
static lev_status experts(const llep_pass *s, int64_t i) {
  llep_plan *p = s->p;
  llep_pieces *t = &p->pieces;
  int ranks = p->z.rules.ranks;
  const int32_t *recv = s->l->recv + i * ranks * p->columns;
  LEV_TRY(lev_stream_wait(s->compute, p->dispatched[i % LLEP_BUFFERS]));
  chunk_counts(s, i);
  p->cursor[0] = 0, p->cursor_column = 0;
  for (int r = 1; r < ranks; ++r) p->cursor[r] = p->cursor[r - 1] + p->recv_rows[r - 1];
  int64_t in_tile = 0;
  t->n = 0;
  for (int64_t c = 0; c < p->columns; ++c) {
    int64_t total = 0;
    for (int r = 0; r < ranks; ++r) total += run_rows(p, recv, r, c);
    if (total == 0 && s->overwrite) LEV_TRY(zero_gradients(s, c, c + 1));
    for (int64_t done = 0, rows; done < total; done += rows) {
      rows = lev_min_i64(p->z.tile_rows, total - done);
      if (in_tile + rows > p->z.tile_rows) {
        LEV_TRY(run_tile(s, i, recv, in_tile));
        in_tile = 0, t->n = 0;
      }
      t->column[t->n] = c, t->offset[t->n] = done, t->first[t->n] = in_tile, t->rows[t->n++] = rows;
      in_tile += rows;
    }
  }
  if (t->n > 0) LEV_TRY(run_tile(s, i, recv, in_tile));
  return lev_event_record(p->computed[i % LLEP_BUFFERS], s->compute);
}

/* ---- lent experts ---- */

static lev_status lend_weights(const llep_pass *s) {
  llep_plan *p = s->p;
  int n = 0;
  int64_t begin_expert = lev_part_begin(p->cfg.experts, p->z.rules.ranks, p->rank);
  for (int64_t i = 0; i < s->l->n_moves; ++i) {
    const llep_move *m = &s->l->moves[i];
    if (m->owner == p->rank)
      p->exchange[n++] =
          (lev_comm_move){m->helper, true,
                          (unsigned char *)(uintptr_t)s->w + (size_t)(m->expert - begin_expert) * s->weight, s->weight};
    else if (m->helper == p->rank)
      p->exchange[n++] = (lev_comm_move){m->owner, false, p->work.foreign + (size_t)m->slot * s->weight, s->weight};
  }
  LEV_TRY(lev_comm_exchange(p->back, p->combine, p->exchange, n));
  return lev_event_record(p->weights, p->combine);
}

/* Lent gradients go home in pieces, so many per round and owner that they fit the received rows' buffers, which are
 * idle by then. */
typedef struct llep_return {
  int64_t piece;     /* scalars of a piece */
  int64_t pieces;    /* of one expert */
  int64_t per_round; /* pieces an owner can take at once */
} llep_return;

static llep_return return_plan(const llep_pass *s) {
  size_t staging = (size_t)(s->p->z.buffers * s->p->z.recv_rows) * s->row;
  int64_t room = (int64_t)(staging / s->scalar), all = s->p->z.weights;
  llep_return r = {.piece = lev_min_i64(all, room)};
  r.pieces = lev_ceil_div(all, r.piece);
  r.per_round = room / r.piece;
  return r;
}

/* Piece `u` of move m, if it belongs to `round`: sent by the helper, received and added by the owner. */
static void return_piece(const llep_pass *s, const llep_return *r, const llep_move *m, int64_t piece, int64_t place,
                         int *n) {
  llep_plan *p = s->p;
  size_t offset = (size_t)(piece * r->piece) * s->scalar;
  size_t bytes = (size_t)lev_min_i64(r->piece, p->z.weights - piece * r->piece) * s->scalar;
  if (m->helper == p->rank)
    p->exchange[(*n)++] = (lev_comm_move){
        m->owner, true, p->work.foreign_grad + (size_t)(m->slot * p->z.weights) * s->scalar + offset, bytes};
  else if (m->owner == p->rank)
    p->exchange[(*n)++] =
        (lev_comm_move){m->helper, false, p->work.recv_x + (size_t)(place * r->piece) * s->scalar, bytes};
}

/* One round: exchange, then the owner adds what came, in the order of moves. plan->unit counts each owner's pieces. */
static lev_status return_round(const llep_pass *s, const llep_return *r, int64_t round, bool *more) {
  llep_plan *p = s->p;
  int64_t begin_expert = lev_part_begin(p->cfg.experts, p->z.rules.ranks, p->rank);
  int n = 0;
  *more = false;
  for (int add = 0; add < 2; ++add) {
    memset(p->unit, 0, sizeof *p->unit * (size_t)p->z.rules.ranks);
    for (int64_t i = 0; i < s->l->n_moves; ++i) {
      const llep_move *m = &s->l->moves[i];
      for (int64_t piece = 0; piece < r->pieces; ++piece) {
        int64_t u = p->unit[m->owner]++, place = u - round * r->per_round;
        if (place >= r->per_round) *more = true;
        if (place < 0 || place >= r->per_round) continue;
        if (!add) {
          return_piece(s, r, m, piece, place, &n);
        } else if (m->owner == p->rank) {
          llep_add_args a = {s->arith, lev_min_i64(r->piece, p->z.weights - piece * r->piece),
                             p->work.recv_x + (size_t)(place * r->piece) * s->scalar,
                             s->dw +
                                 (size_t)((m->expert - begin_expert) * p->z.weights + piece * r->piece) * s->scalar};
          LEV_TRY(LEV_LAUNCH(p->combine, &llep_add_kernel, a));
        }
      }
    }
    if (!add) LEV_TRY(lev_comm_exchange(p->back, p->combine, p->exchange, n));
  }
  return LEV_OK;
}

static lev_status return_gradients(const llep_pass *s) {
  llep_return r = return_plan(s);
  bool more = true;
  for (int64_t round = 0; more; ++round) LEV_TRY(return_round(s, &r, round, &more));
  return LEV_OK;
}

/* ---- the layer ---- */

static lev_status run_chunks(const llep_pass *s) {
  LEV_TRY(dispatch(s, 0));
  for (int64_t i = 0; i < s->l->chunks; ++i) {
    if (i + 1 < s->l->chunks) LEV_TRY(dispatch(s, i + 1));
    if (i == 0 && s->l->n_foreign > 0) LEV_TRY(lev_stream_wait(s->compute, s->p->weights));
    LEV_TRY(experts(s, i));
    LEV_TRY(combine(s, i));
  }
  return LEV_OK;
}

static lev_status finish(const llep_pass *s) {
  LEV_TRY(lev_event_record(s->p->end, s->p->combine));
  return lev_stream_wait(s->compute, s->p->end);
}

/* Pointers may be NULL only where they hold nothing (never checked on the dry backend's fake memory). */
static lev_status check_pointers(bool ok) {
  return ok ? LEV_OK : lev_fail(LEV_ERR_ARG, "llep: NULL array or stream");
}

lev_status llep_forward(llep_plan *p, const llep_forward_args *a, lev_stream *stream) {
  if (!p || !a || !stream) return lev_fail(LEV_ERR_ARG, "llep_forward: NULL argument");
  if (p->phase != LLEP_FORWARD) return lev_fail(LEV_ERR_MISUSE, "llep_forward: the forward regions are not bound");
  LEV_TRY(llep_check_tokens(p, a->layer, a->tokens, a->rank_tokens));
  LEV_TRY(check_pointers((a->tokens == 0 || (a->x && a->ids && a->probs && a->y)) && (p->own_experts == 0 || a->w)));
  llep_pass s = begin(p, a->layer, stream);
  s.accumulate = a->accumulate, s.x = a->x, s.probs = a->probs, s.w = a->w, s.out = a->y;
  LEV_TRY(lev_event_record(p->start, stream));
  LEV_TRY(lev_stream_wait(p->dispatch, p->start));
  LEV_TRY(llep_measure(p, a->layer, a->ids)); /* the host waited: `stream` has reached `start` */
  if (s.l->chunks == 0) return LEV_OK;
  if (s.l->n_moves > 0) LEV_TRY(lend_weights(&s));
  LEV_TRY(run_chunks(&s));
  return finish(&s);
}

lev_status llep_backward(llep_plan *p, const llep_backward_args *a, lev_stream *stream) {
  if (!p || !a || !stream) return lev_fail(LEV_ERR_ARG, "llep_backward: NULL argument");
  if (p->phase != LLEP_BACKWARD) return lev_fail(LEV_ERR_MISUSE, "llep_backward: the backward regions are not bound");
  LEV_TRY(llep_check_tokens(p, a->layer, a->tokens, a->rank_tokens));
  LEV_TRY(check_pointers((a->tokens == 0 || (a->x && a->ids && a->probs && a->dy && a->dx && a->dprobs)) &&
                         (p->own_experts == 0 || (a->w && a->dw))));
  llep_pass s = begin(p, a->layer, stream);
  if (!s.l->valid || s.l->tokens != a->tokens)
    return lev_fail(LEV_ERR_MISUSE, "llep_backward: layer %d was not run forward with %lld tokens", a->layer,
                    (long long)a->tokens);
  s.backward = true, s.x = a->x, s.probs = a->probs, s.dy = a->dy, s.w = a->w, s.dw = a->dw;
  s.out = a->dx, s.dprobs = a->dprobs, s.overwrite = a->overwrite_dw;
  if (a->overwrite_dw && !llep_plan_info(p).single_products)
    return lev_fail(LEV_ERR_MISUSE,
                    "llep_backward: dw of this plan is summed over tiles or ranks and cannot be overwritten");
  if (s.l->chunks == 0) return s.overwrite ? zero_gradients(&s, 0, p->own_experts) : LEV_OK;
  LEV_TRY(lev_event_record(p->start, stream));
  LEV_TRY(lev_stream_wait(p->dispatch, p->start));
  LEV_TRY(llep_reassign(p, a->layer, a->ids));
  if (s.l->n_moves > 0) {
    LEV_TRY(lev_stream_wait(p->combine, p->start));
    LEV_TRY(lend_weights(&s));
    size_t bytes = (size_t)(s.l->n_foreign * p->z.weights) * s.scalar;
    LEV_TRY(lev_fill(stream, p->work.foreign_grad, 0, bytes, "llep.foreign_grad"));
  }
  LEV_TRY(run_chunks(&s));
  if (s.l->n_moves > 0) LEV_TRY(return_gradients(&s)); /* combine has waited for the last chunk's experts */
  return finish(&s);
}
