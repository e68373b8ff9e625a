/* SPDX-License-Identifier: Apache-2.0 */
/* Counts of a layer: from ids to lending plan, chunk borders and row counts. The device side (kernels and three small
 * collectives) ends in pinned memory; the dry backend computes the same tables on the host for ids[t, j] = (t k + j)
 * mod E. Everything after that is one path. */
#include <string.h>

#include "pipelined_llep/llep_plan.h"

lev_status llep_check_tokens(llep_plan *p, int layer, int64_t tokens, const int64_t *rank_tokens) {
  if (!p->persistent_bound) return lev_fail(LEV_ERR_MISUSE, "llep: the persistent regions are not bound");
  if (layer < 0 || layer >= p->cfg.layers)
    return lev_fail(LEV_ERR_ARG, "llep: layer %d, the plan has %d", layer, p->cfg.layers);
  for (int r = 0; r < p->z.rules.ranks; ++r) {
    p->tokens[r] = rank_tokens ? rank_tokens[r] : tokens;
    if (p->tokens[r] < 0) return lev_fail(LEV_ERR_ARG, "llep: rank %d has %lld tokens", r, (long long)p->tokens[r]);
    if (p->tokens[r] > p->cfg.max_tokens)
      return lev_fail(LEV_ERR_CAPACITY, "llep: rank %d has %lld tokens, the plan was made for %lld (max_tokens)", r,
                      (long long)p->tokens[r], (long long)p->cfg.max_tokens);
  }
  if (p->tokens[p->rank] != tokens)
    return lev_fail(LEV_ERR_ARG, "llep: rank_tokens[%d] is %lld, tokens is %lld", p->rank,
                    (long long)p->tokens[p->rank], (long long)tokens);
  return LEV_OK;
}

/* ---- device side ---- */

static lev_status assign(llep_plan *p, int layer, const int32_t *ids, int64_t tokens, bool rows) {
  const llep_work *k = &p->work;
  llep_assign_args a = {.rules = p->z.rules,
                        .ids = ids,
                        .tokens = tokens,
                        .top_k = p->cfg.top_k,
                        .blocks = p->z.blocks,
                        .table = llep_layer_table(p, layer),
                        .parts = p->z.parts,
                        .seen = k->seen,
                        .routes = k->routes,
                        .histogram = k->histogram,
                        .own = rows ? k->counts.own : NULL,
                        .total = rows ? k->counts.total : NULL};
  return LEV_LAUNCH(p->dispatch, &llep_assign_kernel, a);
}

lev_status llep_reassign(llep_plan *p, int layer, const int32_t *ids) {
  return assign(p, layer, ids, p->layers[layer].tokens, false);
}

/* Counts of all ranks, then the lending plan, the same on each. */
static lev_status enqueue_lending(llep_plan *p, int layer, const int32_t *ids) {
  const llep_work *k = &p->work;
  const llep_rules *r = &p->z.rules;
  int64_t width = p->cfg.experts + 1;
  llep_count_args count = {.ids = ids,
                           .routes = p->tokens[p->rank] * p->cfg.top_k,
                           .experts = p->cfg.experts,
                           .counts = k->counts.counts + p->rank * width,
                           .parts = p->z.parts,
                           .seen = k->seen};
  LEV_TRY(LEV_LAUNCH(p->dispatch, &llep_count_kernel, count));
  for (int d = 0; d < r->ranks; ++d) p->send_rows[d] = width;
  LEV_TRY(lev_comm_all_gather(p->out, p->dispatch, count.counts, k->counts.counts, p->send_rows, LEV_I64));
  llep_lend_args lend = {.rules = *r,
                         .rank = p->rank,
                         .counts = k->counts.counts,
                         .table = llep_layer_table(p, layer),
                         .scratch = k->scratch};
  return LEV_LAUNCH(p->dispatch, &llep_lend_kernel, lend);
}

/* Tells every rank what it will receive from this one, by column and block, and everyone the sums. */
static lev_status enqueue_exchange(llep_plan *p) {
  const llep_work *k = &p->work;
  const llep_rules *r = &p->z.rules;
  for (int d = 0; d < r->ranks; ++d) {
    p->send_rows[d] = llep_rank_columns(r, d);
    p->recv_rows[d] = p->columns;
  }
  lev_comm_part part = {k->histogram, k->counts.recv, sizeof(int32_t) * (size_t)p->z.blocks};
  LEV_TRY(lev_comm_all_to_all(p->out, p->dispatch, &part, 1, p->send_rows, p->recv_rows));
  return lev_comm_all_reduce(p->out, p->dispatch, k->counts.total, r->ranks * p->z.blocks, LEV_I64, LEV_SUM);
}

static lev_status bring_to_host(llep_plan *p, int layer) {
  const llep_counts *d = &p->work.counts, *h = &p->host;
  size_t ranks = (size_t)p->z.rules.ranks, sums = sizeof(int64_t) * ranks * (size_t)p->z.blocks;
  LEV_TRY(lev_copy(p->dispatch, h->counts, d->counts, sizeof(int64_t) * ranks * (size_t)(p->cfg.experts + 1),
                   "llep.counts"));
  LEV_TRY(lev_copy(p->dispatch, h->table, llep_layer_table(p, layer),
                   sizeof(int64_t) * (size_t)llep_table_length(&p->z.rules), "llep.counts"));
  LEV_TRY(lev_copy(p->dispatch, h->own, d->own, sums, "llep.counts"));
  LEV_TRY(lev_copy(p->dispatch, h->total, d->total, sums, "llep.counts"));
  LEV_TRY(lev_copy(p->dispatch, h->recv, d->recv, sizeof(int32_t) * ranks * (size_t)p->columns * (size_t)p->z.blocks,
                   "llep.counts"));
  return lev_stream_sync(p->dispatch);
}

/* ---- dry side ---- */

/* Adds the rows of one source; `again`: it routes as the source before, whose histogram and sums are still there. */
static void dry_rank_rows(llep_plan *p, int source, bool again, const llep_table *t, int64_t *seen) {
  const llep_rules *r = &p->z.rules;
  int64_t blocks = p->z.blocks, *own = p->host.own;
  llep_base(r, p->host.counts, source, t->base);
  if (!again) {
    if (*t->moves == 0)
      llep_histogram_in_turn(r, p->tokens[source], p->cfg.top_k, blocks, t, p->dry_histogram);
    else
      llep_assign(r, NULL, p->tokens[source], p->cfg.top_k, blocks, t, seen, NULL, p->dry_histogram);
    memset(own, 0, sizeof *own * (size_t)(r->ranks * blocks));
    for (int64_t d = 0; d < r->ranks; ++d)
      for (int64_t c = llep_column_begin(r, d); c < llep_column_begin(r, d + 1); ++c)
        for (int64_t b = 0; b < blocks; ++b) own[d * blocks + b] += p->dry_histogram[c * blocks + b];
  }
  memcpy(p->host.recv + source * p->columns * blocks, p->dry_histogram + llep_column_begin(r, p->rank) * blocks,
         sizeof(int32_t) * (size_t)(p->columns * blocks));
  for (int64_t i = 0; i < r->ranks * blocks; ++i) p->host.total[i] += own[i];
}

/* All layers look alike: nothing to do while the token counts stay the same. Without lending, ranks with as many tokens
 * look alike too. */
static void dry_counts(llep_plan *p) {
  const llep_rules *r = &p->z.rules;
  size_t ranks = (size_t)r->ranks, width = (size_t)p->cfg.experts + 1;
  if (memcmp(p->dry_tokens, p->tokens, sizeof(int64_t) * ranks) == 0) return;
  memcpy(p->dry_tokens, p->tokens, sizeof(int64_t) * ranks);
  for (size_t s = 0; s < ranks; ++s) {
    int64_t *counts = p->host.counts + s * width;
    if (s > 0 && p->tokens[s] == p->tokens[s - 1])
      memcpy(counts, counts - width, sizeof *counts * width);
    else
      llep_count_in_turn(p->tokens[s] * p->cfg.top_k, p->cfg.experts, counts);
  }
  llep_lend(r, p->host.counts, p->rank, p->host.table, p->dry_scratch);
  llep_table t = llep_table_at(r, p->host.table);
  memset(p->host.total, 0, sizeof(int64_t) * ranks * (size_t)p->z.blocks);
  for (int i = 0, before = -1; i < r->ranks; ++i) { /* this rank last, so that its sums stay in host.own */
    int s = (p->rank + 1 + i) % r->ranks;
    bool again = before >= 0 && *t.moves == 0 && p->tokens[s] == p->tokens[before];
    dry_rank_rows(p, s, again, &t, p->dry_scratch + llep_scratch_length(r));
    before = s;
  }
}

/* ---- both ---- */

/* Ids outside the experts, seen alike by all ranks. */
static lev_status check_counts(const llep_plan *p) {
  int64_t width = p->cfg.experts + 1;
  for (int r = 0; r < p->z.rules.ranks; ++r) {
    const int64_t *counts = p->host.counts + r * width;
    int64_t sum = 0;
    for (int64_t e = 0; e < width; ++e) sum += counts[e];
    if (sum != p->tokens[r] * p->cfg.top_k)
      return lev_fail(LEV_ERR_ARG, "llep: rank %d counted %lld routes, its token count here says %lld", r,
                      (long long)sum, (long long)(p->tokens[r] * p->cfg.top_k));
    if (counts[p->cfg.experts] > 0)
      return lev_fail(LEV_ERR_ARG, "llep: rank %d has %lld expert ids outside 0 .. %lld", r,
                      (long long)counts[p->cfg.experts], (long long)p->cfg.experts - 1);
  }
  return LEV_OK;
}

static void read_counts(llep_plan *p, llep_layer *l) {
  const llep_rules *r = &p->z.rules;
  memset(p->sent, 0, sizeof *p->sent * (size_t)r->ranks); /* native loads */
  memset(l->counts, 0, sizeof *l->counts * (size_t)r->experts);
  for (int s = 0; s < r->ranks; ++s)
    for (int64_t e = 0; e < r->experts; ++e) {
      int64_t n = p->host.counts[s * (r->experts + 1) + e];
      l->counts[e] += n;
      p->sent[lev_part_of(r->experts, r->ranks, e)] += n;
    }
  l->native_max = 0;
  for (int d = 0; d < r->ranks; ++d) {
    l->native_max = lev_max_i64(l->native_max, p->sent[d]);
    l->rank_rows[d] = 0;
    for (int64_t b = 0; b < p->z.blocks; ++b) l->rank_rows[d] += p->host.total[d * p->z.blocks + b];
  }
}

static void read_moves(const llep_plan *p, llep_layer *l) {
  const llep_rules *r = &p->z.rules;
  llep_table t = llep_table_at(r, p->host.table);
  l->n_moves = l->n_foreign = 0;
  for (int64_t e = 0; e < r->experts; ++e)
    for (int64_t s = t.seg[e] + 1; s < t.seg[e + 1]; ++s) {
      llep_move *m = &l->moves[l->n_moves++];
      m->expert = e, m->owner = (int)lev_part_of(r->experts, r->ranks, e), m->helper = 0;
      while (llep_column_begin(r, m->helper + 1) <= t.column[s]) ++m->helper;
      m->slot = t.column[s] - llep_column_begin(r, m->helper + 1) + r->slots;
      if (m->helper == p->rank) ++l->n_foreign;
    }
}

/* Adds block b to the chunk being cut. */
static void add_block(llep_plan *p, int64_t b) {
  for (int d = 0; d < p->z.rules.ranks; ++d) {
    p->received[d] += p->host.total[d * p->z.blocks + b];
    if (p->tokens[d] > b) p->sent[d] += lev_ceil_div(p->tokens[d] - b, p->z.blocks) * p->cfg.top_k;
  }
}

static int64_t fullest(const llep_plan *p, bool received) {
  const int64_t *rows = received ? p->received : p->sent;
  int64_t most = 0;
  for (int d = 0; d < p->z.rules.ranks; ++d) most = lev_max_i64(most, rows[d]);
  return most;
}

/* One block of the bounded schedule always fits; the plain schedule has a single one, which holds all rows. */
static lev_status too_many_rows(const llep_plan *p) {
  long long received = (long long)fullest(p, true), sent = (long long)fullest(p, false);
  if (p->cfg.schedule == LLEP_PLAIN)
    return lev_fail(LEV_ERR_CAPACITY,
                    "llep: with this routing a rank of the plain schedule receives %lld rows, plain_rows "
                    "(memory.llep_plain_rows) holds %lld; at least %lld are needed, 0 holds any routing, and the "
                    "bounded schedule does with chunk_rows",
                    received, (long long)p->z.recv_rows, received);
  return lev_fail(LEV_ERR_CAPACITY,
                  "llep: a rank would receive %lld and send %lld rows at once, the plan holds %lld "
                  "and %lld",
                  received, sent, (long long)p->z.recv_rows, (long long)p->z.send_rows);
}

/* A chunk ends before the block with which the fullest receiver or sender would pass its cap. */
static lev_status cut_chunks(llep_plan *p, llep_layer *l) {
  int64_t tokens = 0, first = 0;
  size_t bytes = sizeof *p->sent * (size_t)p->z.rules.ranks;
  for (int d = 0; d < p->z.rules.ranks; ++d) tokens = lev_max_i64(tokens, p->tokens[d]);
  int64_t blocks = lev_min_i64(p->z.blocks, tokens);
  l->chunks = l->chunk_rows = 0;
  while (first < blocks) {
    int64_t next = first, most = 0;
    memset(p->sent, 0, bytes), memset(p->received, 0, bytes);
    for (; next < blocks; ++next) {
      add_block(p, next);
      int64_t received = fullest(p, true), sent = fullest(p, false);
      if (received > p->z.recv_rows || sent > p->z.send_rows) break;
      most = lev_max_i64(received, sent);
    }
    if (next == first) return too_many_rows(p);
    l->chunk_rows = lev_max_i64(l->chunk_rows, most);
    l->border[l->chunks++] = (int32_t)first;
    first = next;
  }
  l->border[l->chunks] = (int32_t)blocks;
  return LEV_OK;
}

/* Rows of each chunk to and from every rank; what arrives must agree with what the sums announced. */
static lev_status read_chunks(const llep_plan *p, llep_layer *l) {
  int64_t ranks = p->z.rules.ranks, blocks = p->z.blocks, columns = p->columns;
  for (int64_t i = 0; i < l->chunks; ++i) {
    int64_t first = l->border[i], last = l->border[i + 1], announced = 0, arriving = 0;
    for (int64_t d = 0; d < ranks; ++d) {
      int64_t rows = 0;
      for (int64_t b = first; b < last; ++b) rows += p->host.own[d * blocks + b];
      l->send[i * ranks + d] = (int32_t)rows;
    }
    for (int64_t c = 0; c < ranks * columns; ++c) {
      int64_t rows = 0;
      for (int64_t b = first; b < last; ++b) rows += p->host.recv[c * blocks + b];
      l->recv[i * ranks * columns + c] = (int32_t)rows;
      arriving += rows;
    }
    for (int64_t b = first; b < last; ++b) announced += p->host.total[p->rank * blocks + b];
    if (announced != arriving)
      return lev_fail(LEV_ERR_INTERNAL, "llep: chunk %lld brings %lld rows, %lld were announced", (long long)i,
                      (long long)arriving, (long long)announced);
  }
  return LEV_OK;
}

/* Dry: what a layer with as many tokens on every rank came to. False when there is none. */
static bool copy_layer(const llep_plan *p, llep_layer *to) {
  const llep_layer *from = p->dry_layer >= 0 ? &p->layers[p->dry_layer] : NULL;
  size_t ranks = (size_t)p->z.rules.ranks, sends;
  if (!p->dry || !from || memcmp(p->dry_tokens, p->tokens, sizeof(int64_t) * ranks) != 0) return false;
  if (from == to) return true;
  llep_layer tables = *to;
  *to = *from;
  to->border = tables.border, to->send = tables.send, to->recv = tables.recv, to->counts = tables.counts;
  to->rank_rows = tables.rank_rows, to->moves = tables.moves;
  sends = (size_t)from->chunks * ranks;
  memcpy(to->border, from->border, sizeof *to->border * (size_t)(from->chunks + 1));
  memcpy(to->send, from->send, sizeof *to->send * sends);
  memcpy(to->recv, from->recv, sizeof *to->recv * sends * (size_t)p->columns);
  memcpy(to->counts, from->counts, sizeof *to->counts * (size_t)p->cfg.experts);
  memcpy(to->rank_rows, from->rank_rows, sizeof *to->rank_rows * ranks);
  memcpy(to->moves, from->moves, sizeof *to->moves * (size_t)from->n_moves);
  return true;
}

lev_status llep_measure(llep_plan *p, int layer, const int32_t *ids) {
  llep_layer *l = &p->layers[layer];
  l->valid = false;
  l->tokens = p->tokens[p->rank];
  LEV_TRY(enqueue_lending(p, layer, ids));
  LEV_TRY(assign(p, layer, ids, l->tokens, true));
  LEV_TRY(enqueue_exchange(p));
  LEV_TRY(bring_to_host(p, layer));
  if (!copy_layer(p, l)) {
    p->dry_layer = -1;
    if (p->dry) dry_counts(p);
    LEV_TRY(check_counts(p));
    read_counts(p, l);
    read_moves(p, l);
    LEV_TRY(cut_chunks(p, l));
    LEV_TRY(read_chunks(p, l));
    p->dry_layer = layer;
  }
  l->valid = true;
  return LEV_OK;
}
