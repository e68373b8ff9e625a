/* SPDX-License-Identifier: Apache-2.0 */
/* The data side of local collectives: do the members' calls fit together, and who copies or adds what. A member reads
 * its peers' buffers and writes its own, except in all_reduce, where it writes its part of everybody's. */
#include <stdio.h>
#include <string.h>

#include "common/comm_local_impl.h"
#include "common/dims.h"

#define LEV_KERNELS "common/comm_reduce.inc"
#include "common/for_each_dtype.h"

#define BLOCK 1024 /* elements summed at a time, on the worker's stack */

/* ---- do the calls fit together? ---- */

static void describe(const lev_coll *c, char *text, size_t bytes) {
  const char *name = lev_coll_name(c->kind);
  long long number = (long long)c->number;
  switch (c->kind) {
  case LEV_COLL_ALL_REDUCE:
    snprintf(text, bytes, "%s (call %lld) of %lld %s, %s", name, number, (long long)c->count,
             lev_dtype_name(c->send_type), c->op == LEV_SUM ? "sum" : "max");
    break;
  case LEV_COLL_ALL_GATHER:
  case LEV_COLL_REDUCE_SCATTER:
    snprintf(text, bytes, "%s (call %lld) of %s", name, number, lev_dtype_name(c->send_type));
    break;
  case LEV_COLL_BROADCAST:
    snprintf(text, bytes, "%s (call %lld) of %zu bytes from rank %d", name, number, c->send_bytes, c->root);
    break;
  case LEV_COLL_ALL_TO_ALL:
    snprintf(text, bytes, "%s (call %lld) of %d parts", name, number, c->n_parts);
    break;
  case LEV_COLL_RING_SHIFT:
  case LEV_COLL_EXCHANGE:
  case LEV_COLL_BARRIER:
  case LEV_COLL_KINDS:
    snprintf(text, bytes, "%s (call %lld)", name, number);
    break;
  }
}

static lev_status differ(const lev_local_group *group, const lev_local_op *const *ops, int a, int b) {
  char left[128], right[128];
  describe(&ops[a]->coll, left, sizeof left);
  describe(&ops[b]->coll, right, sizeof right);
  return lev_fail(LEV_ERR_COMM, "ranks disagree: rank %d calls %s, rank %d calls %s", group->world_ranks[a], left,
                  group->world_ranks[b], right);
}

static lev_status counts_differ(const lev_local_group *group, lev_coll_kind kind, int a, int b, const char *what,
                                int64_t x, int64_t y) {
  return lev_fail(LEV_ERR_COMM, "%s: %s: %lld on rank %d, %lld on rank %d", lev_coll_name(kind), what, (long long)x,
                  group->world_ranks[a], (long long)y, group->world_ranks[b]);
}

static lev_status match_same(const lev_local_group *group, const lev_local_op *const *ops) {
  const lev_coll *zero = &ops[0]->coll;
  bool counted = zero->kind == LEV_COLL_ALL_GATHER || zero->kind == LEV_COLL_REDUCE_SCATTER;
  for (int r = 1; r < group->size; ++r) {
    const lev_coll *c = &ops[r]->coll;
    if (c->kind != zero->kind || c->number != zero->number || c->send_type != zero->send_type ||
        c->count != zero->count || c->op != zero->op || c->root != zero->root || c->n_parts != zero->n_parts ||
        (c->kind == LEV_COLL_BROADCAST && c->send_bytes != zero->send_bytes))
      return differ(group, ops, 0, r);
    for (int i = 0; counted && i < group->size; ++i)
      if (c->send_counts[i] != zero->send_counts[i])
        return counts_differ(group, c->kind, 0, r, "a rank's count", zero->send_counts[i], c->send_counts[i]);
    for (int i = 0; i < c->n_parts; ++i)
      if (c->parts[i].row_bytes != zero->parts[i].row_bytes)
        return counts_differ(group, c->kind, 0, r, "bytes of a row", (int64_t)zero->parts[i].row_bytes,
                             (int64_t)c->parts[i].row_bytes);
  }
  return LEV_OK;
}

/* Next move from index `at` on that goes in the given direction to or from `peer`; n_moves if none. */
static int next_move(const lev_coll *c, int at, bool is_send, int peer) {
  while (at < c->n_moves && !(c->moves[at].is_send == is_send && c->moves[at].peer == peer)) ++at;
  return at;
}

static lev_status match_exchange(const lev_local_group *group, const lev_local_op *const *ops, int from, int to) {
  const lev_coll *s = &ops[from]->coll, *d = &ops[to]->coll;
  int i = next_move(s, 0, true, to), j = next_move(d, 0, false, from);
  while (i < s->n_moves && j < d->n_moves) {
    if (s->moves[i].bytes != d->moves[j].bytes)
      return counts_differ(group, LEV_COLL_EXCHANGE, from, to, "bytes of a transfer from the first to the second",
                           (int64_t)s->moves[i].bytes, (int64_t)d->moves[j].bytes);
    i = next_move(s, i + 1, true, to), j = next_move(d, j + 1, false, from);
  }
  if (i == s->n_moves && j == d->n_moves) return LEV_OK;
  return lev_fail(LEV_ERR_COMM, "exchange: rank %d sends %s transfers to rank %d than that one receives",
                  group->world_ranks[from], i < s->n_moves ? "more" : "fewer", group->world_ranks[to]);
}

static lev_status match_pair(const lev_local_group *group, const lev_local_op *const *ops, int from, int to) {
  const lev_coll *s = &ops[from]->coll, *d = &ops[to]->coll;
  if (s->kind == LEV_COLL_EXCHANGE) return match_exchange(group, ops, from, to);
  if (s->send_counts[to] == d->recv_counts[from]) return LEV_OK;
  return counts_differ(group, s->kind, from, to, "rows from the first to the second", s->send_counts[to],
                       d->recv_counts[from]);
}

lev_status lev_local_match(const lev_local_group *group, const lev_local_op *const *ops) {
  LEV_TRY(match_same(group, ops));
  lev_coll_kind kind = ops[0]->coll.kind;
  int n = group->size;
  if (kind == LEV_COLL_RING_SHIFT)
    for (int r = 0; r < n; ++r) {
      size_t sent = ops[r]->coll.send_bytes, received = ops[(r + 1) % n]->coll.recv_bytes;
      if (sent != received)
        return counts_differ(group, kind, r, (r + 1) % n, "bytes from the first to the second", (int64_t)sent,
                             (int64_t)received);
    }
  if (kind == LEV_COLL_ALL_TO_ALL || kind == LEV_COLL_EXCHANGE)
    for (int s = 0; s < n; ++s)
      for (int d = 0; d < n; ++d) LEV_TRY(match_pair(group, ops, s, d));
  return LEV_OK;
}

/* ---- sums ---- */

typedef union sums_block {
  double d[BLOCK];
  float f[BLOCK];
  int64_t i[BLOCK];
} sums_block;

/* Buffer of rank r: what all_reduce and reduce_scatter read. */
static const void *input(const lev_local_op *const *ops, int r) {
  const lev_coll *c = &ops[r]->coll;
  return c->kind == LEV_COLL_ALL_REDUCE ? c->recv : c->send;
}

static int64_t load_int(lev_dtype t, const void *array, int64_t i) {
  return t == LEV_I32 ? ((const int32_t *)array)[i] : ((const int64_t *)array)[i];
}

static void reduce_int(sums_block *sums, const lev_local_op *const *ops, int size, int64_t at, int64_t n) {
  const lev_coll *c = &ops[0]->coll;
  for (int64_t i = 0; i < n; ++i) {
    int64_t all = load_int(c->send_type, input(ops, 0), at + i);
    for (int r = 1; r < size; ++r) {
      int64_t value = load_int(c->send_type, input(ops, r), at + i);
      if (c->op == LEV_MAX)
        all = lev_max_i64(all, value);
      else /* wraps like the hardware does */
        all = (int64_t)((uint64_t)all + (uint64_t)value);
    }
    sums->i[i] = all;
  }
}

/* Elements [at, at + n) of all ranks' inputs, in rank order, in the arithmetic type of the storage. */
static void reduce_block(sums_block *sums, const lev_local_op *const *ops, int size, int64_t at, int64_t n) {
  const lev_coll *c = &ops[0]->coll;
  bool max = c->kind == LEV_COLL_ALL_REDUCE && c->op == LEV_MAX;
  if (c->send_type == LEV_F64) {
    first_f64(sums->d, input(ops, 0), at, n);
    for (int r = 1; r < size; ++r) (max ? max_f64 : add_f64)(sums->d, input(ops, r), at, n);
  } else if (c->send_type == LEV_F32) {
    first_f32(sums->f, input(ops, 0), at, n);
    for (int r = 1; r < size; ++r) (max ? max_f32 : add_f32)(sums->f, input(ops, r), at, n);
  } else {
    first_bf16(sums->f, input(ops, 0), at, n);
    for (int r = 1; r < size; ++r) (max ? max_bf16 : add_bf16)(sums->f, input(ops, r), at, n);
  }
}

static void store_block(const sums_block *sums, lev_dtype send_type, void *to, lev_dtype type, int64_t at, int64_t n,
                        bool accumulate) {
  if (lev_dtype_arith(send_type) != lev_dtype_arith(type)) {
    for (int64_t i = 0; i < n; ++i) {
      double value = send_type == LEV_F64 ? sums->d[i] : (double)sums->f[i];
      lev_dtype_store(type, to, at + i, accumulate ? value + lev_dtype_load(type, to, at + i) : value);
    }
  } else if (type == LEV_F64) {
    (accumulate ? store_add_f64 : store_f64)(sums->d, to, at, n);
  } else if (type == LEV_F32) {
    (accumulate ? store_add_f32 : store_f32)(sums->f, to, at, n);
  } else {
    (accumulate ? store_add_bf16 : store_bf16)(sums->f, to, at, n);
  }
}

static void store_int(const sums_block *sums, lev_dtype type, void *to, int64_t at, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (type == LEV_I32)
      ((int32_t *)to)[at + i] = (int32_t)(uint32_t)(uint64_t)sums->i[i];
    else
      ((int64_t *)to)[at + i] = sums->i[i];
  }
}

static void run_all_reduce(const lev_local_comm *comm, const lev_local_op *const *ops) {
  const lev_coll *c = &ops[0]->coll;
  int size = comm->base.size;
  int64_t begin = lev_part_begin(c->count, size, comm->base.rank);
  int64_t end = begin + lev_part_size(c->count, size, comm->base.rank);
  bool is_int = c->send_type == LEV_I32 || c->send_type == LEV_I64;
  sums_block sums;
  for (int64_t at = begin; at < end; at += BLOCK) {
    int64_t n = lev_min_i64(BLOCK, end - at);
    (is_int ? reduce_int : reduce_block)(&sums, ops, size, at, n);
    for (int r = 0; r < size; ++r) {
      if (is_int)
        store_int(&sums, c->send_type, ops[r]->coll.recv, at, n);
      else
        store_block(&sums, c->send_type, ops[r]->coll.recv, c->send_type, at, n, false);
    }
  }
}

static int64_t sum_counts(const int64_t *counts, int n) {
  int64_t sum = 0;
  for (int i = 0; i < n; ++i) sum += counts[i];
  return sum;
}

static void run_reduce_scatter(const lev_local_comm *comm, const lev_local_op *const *ops) {
  int rank = comm->base.rank;
  const lev_coll *c = &ops[rank]->coll;
  int64_t begin = sum_counts(c->send_counts, rank), count = c->send_counts[rank];
  sums_block sums;
  for (int64_t at = 0; at < count; at += BLOCK) {
    int64_t n = lev_min_i64(BLOCK, count - at);
    reduce_block(&sums, ops, comm->base.size, begin + at, n);
    store_block(&sums, c->send_type, c->recv, c->recv_type, at, n, c->accumulate);
  }
}

/* ---- copies ---- */

typedef struct mover {
  lev_local_copy_fn fn;
  void *ctx;
} mover;

static lev_status copy(mover m, void *to, const void *from, size_t bytes) {
  return bytes > 0 && to != from ? m.fn(m.ctx, to, from, bytes) : LEV_OK;
}

static lev_status run_all_gather(const lev_local_comm *comm, const lev_local_op *const *ops, mover m) {
  const lev_coll *c = &ops[comm->base.rank]->coll;
  size_t elem = lev_dtype_bytes(c->send_type);
  char *to = c->recv;
  for (int r = 0; r < comm->base.size; ++r) {
    size_t bytes = (size_t)c->send_counts[r] * elem;
    LEV_TRY(copy(m, to, ops[r]->coll.send, bytes));
    if (bytes > 0) to += bytes;
  }
  return LEV_OK;
}

static lev_status run_all_to_all(const lev_local_comm *comm, const lev_local_op *const *ops, mover m) {
  int rank = comm->base.rank;
  const lev_coll *c = &ops[rank]->coll;
  for (int p = 0; p < c->n_parts; ++p) {
    size_t row_bytes = c->parts[p].row_bytes, at = 0;
    for (int r = 0; r < comm->base.size; ++r) {
      const lev_coll *peer = &ops[r]->coll;
      size_t bytes = (size_t)c->recv_counts[r] * row_bytes;
      if (bytes == 0) continue;
      const char *from = (const char *)peer->parts[p].send + (size_t)sum_counts(peer->send_counts, rank) * row_bytes;
      LEV_TRY(copy(m, (char *)c->parts[p].recv + at, from, bytes));
      at += bytes;
    }
  }
  return LEV_OK;
}

static lev_status run_ring_shift(const lev_local_comm *comm, const lev_local_op *const *ops, mover m) {
  int rank = comm->base.rank, size = comm->base.size;
  const lev_coll *c = &ops[rank]->coll;
  return copy(m, c->recv, ops[(rank + size - 1) % size]->coll.send, c->recv_bytes);
}

static lev_status run_exchange(lev_local_comm *comm, const lev_local_op *const *ops, mover m) {
  int rank = comm->base.rank;
  const lev_coll *c = &ops[rank]->coll;
  memset(comm->cursor, 0, (size_t)comm->base.size * sizeof *comm->cursor);
  for (int i = 0; i < c->n_moves; ++i) {
    const lev_comm_move *move = &c->moves[i];
    if (move->is_send) continue;
    const lev_coll *peer = &ops[move->peer]->coll;
    int at = next_move(peer, comm->cursor[move->peer], true, rank);
    comm->cursor[move->peer] = at + 1;
    LEV_TRY(copy(m, move->data, peer->moves[at].data, move->bytes));
  }
  return LEV_OK;
}

lev_status lev_local_copy_data(lev_local_comm *comm, const lev_local_op *const *ops, lev_local_copy_fn fn, void *ctx) {
  const lev_coll *c = &ops[comm->base.rank]->coll;
  mover m = {fn, ctx};
  switch (c->kind) {
  case LEV_COLL_ALL_GATHER:
    return run_all_gather(comm, ops, m);
  case LEV_COLL_ALL_TO_ALL:
    return run_all_to_all(comm, ops, m);
  case LEV_COLL_RING_SHIFT:
    return run_ring_shift(comm, ops, m);
  case LEV_COLL_EXCHANGE:
    return run_exchange(comm, ops, m);
  case LEV_COLL_BROADCAST:
    return copy(m, c->recv, ops[c->root]->coll.recv, c->send_bytes);
  case LEV_COLL_REDUCE_SCATTER:
  case LEV_COLL_ALL_REDUCE:
  case LEV_COLL_BARRIER:
  case LEV_COLL_KINDS:
    break;
  }
  return LEV_OK;
}

static lev_status copy_now(void *ctx, void *to, const void *from, size_t bytes) {
  (void)ctx;
  memcpy(to, from, bytes);
  return LEV_OK;
}

lev_status lev_local_move_data(lev_local_comm *comm, const lev_local_op *const *ops) {
  lev_coll_kind kind = ops[comm->base.rank]->coll.kind;
  if (kind == LEV_COLL_ALL_REDUCE)
    run_all_reduce(comm, ops);
  else if (kind == LEV_COLL_REDUCE_SCATTER)
    run_reduce_scatter(comm, ops);
  else
    return lev_local_copy_data(comm, ops, copy_now, NULL);
  return LEV_OK;
}
