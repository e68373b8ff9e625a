/* SPDX-License-Identifier: Apache-2.0 */
#include "common/comm.h"

#include "common/comm_impl.h"
#include "common/device_impl.h"
#include "common/dims.h"
#include "common/fault.h"

const char *lev_coll_name(lev_coll_kind kind) {
  static const char *const names[LEV_COLL_KINDS] = {
      [LEV_COLL_ALL_GATHER] = "all_gather", [LEV_COLL_REDUCE_SCATTER] = "reduce_scatter",
      [LEV_COLL_ALL_REDUCE] = "all_reduce", [LEV_COLL_ALL_TO_ALL] = "all_to_all",
      [LEV_COLL_RING_SHIFT] = "ring_shift", [LEV_COLL_EXCHANGE] = "exchange",
      [LEV_COLL_BROADCAST] = "broadcast",   [LEV_COLL_BARRIER] = "barrier"};
  return (unsigned)kind < LEV_COLL_KINDS ? names[kind] : "?";
}

/* ---- groups and control plane ---- */

lev_status lev_comm_split(lev_comm *comm, int color, int key, lev_comm **out) {
  *out = NULL;
  return comm->ops->split(comm, color, key, out);
}

lev_status lev_comm_subset(lev_comm *comm, int first, int stride, int size, lev_comm **out) {
  *out = NULL;
  if (size < 1 || first < 0 || stride < 1 || first + (int64_t)(size - 1) * stride >= comm->size)
    return lev_fail(LEV_ERR_ARG, "subset of %d ranks from rank %d in steps of %d; the communicator has %d ranks", size,
                    first, stride, comm->size);
  if (comm->stride == 0)
    return lev_fail(LEV_ERR_UNSUPPORTED, "subset of a split group whose %d ranks are not evenly spaced", comm->size);
  int offset = comm->rank - first;
  if (offset < 0 || offset % stride != 0 || offset / stride >= size)
    return lev_fail(LEV_ERR_ARG, "rank %d is not in the subset of %d ranks from rank %d in steps of %d", comm->rank,
                    size, first, stride);
  return comm->ops->subset(comm, comm->first + first * comm->stride, stride * comm->stride, size, offset / stride, out);
}

void lev_comm_destroy(lev_comm *comm) {
  if (comm) comm->ops->destroy(comm);
}

int lev_comm_rank(const lev_comm *comm) {
  return comm->rank;
}
int lev_comm_size(const lev_comm *comm) {
  return comm->size;
}
lev_device *lev_comm_device(const lev_comm *comm) {
  return comm->device;
}
uint64_t lev_comm_bytes_sent(const lev_comm *comm) {
  return comm->bytes_sent;
}
int64_t lev_comm_calls(const lev_comm *comm) {
  return comm->calls;
}

lev_status lev_comm_agree(lev_comm *comm, lev_status mine) {
  return comm->ops->agree(comm, mine);
}
lev_status lev_comm_host_all_gather(lev_comm *comm, const void *send, void *recv, size_t bytes) {
  return comm->ops->host_all_gather(comm, send, recv, bytes);
}
void lev_comm_abort(lev_comm *comm) {
  comm->ops->abort(comm);
}

/* ---- validation ---- */

static lev_status check_counts(const char *what, const int64_t *counts, int size, size_t elem, size_t *total_bytes) {
  if (!counts) return lev_fail(LEV_ERR_ARG, "%s: no counts", what);
  size_t total = 0;
  for (int r = 0; r < size; ++r) {
    if (counts[r] < 0) return lev_fail(LEV_ERR_ARG, "%s: count %lld for rank %d", what, (long long)counts[r], r);
    total = lev_sat_add(total, lev_bytes(counts[r], 1, elem));
  }
  if (total > PTRDIFF_MAX) return lev_fail(LEV_ERR_ARG, "%s: the counts add up to more than memory can hold", what);
  *total_bytes = total;
  return LEV_OK;
}

static size_t offset_bytes(const int64_t *counts, int rank, size_t elem) {
  size_t offset = 0;
  for (int r = 0; r < rank; ++r) offset += (size_t)counts[r] * elem;
  return offset;
}

static lev_status check_buffer(const char *what, const char *name, const void *buffer, size_t bytes) {
  if (buffer || bytes == 0) return LEV_OK;
  return lev_fail(LEV_ERR_ARG, "%s: %s of %zu bytes is NULL", what, name, bytes);
}

static lev_status check_apart(const char *what, const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
  uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
  if (a_bytes == 0 || b_bytes == 0 || x >= y + b_bytes || y >= x + a_bytes) return LEV_OK;
  return lev_fail(LEV_ERR_ARG, "%s: send (%zu bytes) and receive (%zu bytes) buffers overlap", what, a_bytes, b_bytes);
}

static bool is_float(lev_dtype t) {
  return t == LEV_F64 || t == LEV_F32 || t == LEV_BF16;
}

/* ---- the common path of all collectives ---- */

static lev_coll begin(lev_comm *comm, lev_coll_kind kind) {
  return (lev_coll){.kind = kind, .number = ++comm->calls};
}

/* `sent`: bytes that leave this rank. */
static lev_status submit(lev_comm *comm, lev_stream *stream, const lev_coll *coll, uint64_t sent) {
  const char *name = lev_coll_name(coll->kind);
  if (lev_stream_device(stream) != comm->device)
    return lev_fail(LEV_ERR_ARG, "%s: stream %s belongs to another device than the communicator", name,
                    lev_stream_name(stream));
  if (lev_fault_hit(lev_device_fault(comm->device), LEV_FAULT_COLLECTIVE))
    return lev_fail(LEV_ERR_COMM, "%s, call %lld, failed (injected)", name, (long long)coll->number);
  int64_t span = lev_span_begin(stream, LEV_SPAN_COLL, name, sent, NULL, NULL);
  lev_status st = comm->ops->enqueue(comm, stream, coll);
  lev_span_end(stream, span);
  LEV_TRY(st);
  comm->bytes_sent += sent;
  lev_trace_add(lev_device_trace(comm->device), LEV_EV_COLL, 0, name, sent);
  return LEV_OK;
}

lev_status lev_comm_all_gather(lev_comm *comm, lev_stream *stream, const void *send, void *recv, const int64_t *counts,
                               lev_dtype dtype) {
  lev_coll c = begin(comm, LEV_COLL_ALL_GATHER);
  size_t elem = lev_dtype_bytes(dtype), total;
  if (elem == 0) return lev_fail(LEV_ERR_ARG, "all_gather: unknown dtype %d", (int)dtype);
  LEV_TRY(check_counts("all_gather", counts, comm->size, elem, &total));
  size_t own = (size_t)counts[comm->rank] * elem;
  LEV_TRY(check_buffer("all_gather", "send", send, own));
  LEV_TRY(check_buffer("all_gather", "recv", recv, total));
  if (total > 0 && send != (char *)recv + offset_bytes(counts, comm->rank, elem))
    LEV_TRY(check_apart("all_gather", send, own, recv, total));
  c.send = send, c.recv = recv, c.send_counts = counts;
  c.send_type = c.recv_type = dtype;
  return submit(comm, stream, &c, (uint64_t)own * (uint64_t)(comm->size - 1));
}

lev_status lev_comm_reduce_scatter(lev_comm *comm, lev_stream *stream, const void *send, lev_dtype send_type,
                                   void *recv, lev_dtype recv_type, const int64_t *counts, bool accumulate) {
  lev_coll c = begin(comm, LEV_COLL_REDUCE_SCATTER);
  if (!is_float(send_type) || !is_float(recv_type))
    return lev_fail(LEV_ERR_ARG, "reduce_scatter of %s into %s; f64, f32 and bf16 are possible",
                    lev_dtype_name(send_type), lev_dtype_name(recv_type));
  size_t elem = lev_dtype_bytes(send_type), total;
  LEV_TRY(check_counts("reduce_scatter", counts, comm->size, elem, &total));
  size_t own = (size_t)counts[comm->rank], recv_bytes = own * lev_dtype_bytes(recv_type);
  LEV_TRY(check_buffer("reduce_scatter", "send", send, total));
  LEV_TRY(check_buffer("reduce_scatter", "recv", recv, recv_bytes));
  LEV_TRY(check_apart("reduce_scatter", send, total, recv, recv_bytes));
  c.send = send, c.recv = recv, c.send_counts = counts;
  c.send_type = send_type, c.recv_type = recv_type, c.accumulate = accumulate;
  return submit(comm, stream, &c, total - own * elem);
}

lev_status lev_comm_all_reduce(lev_comm *comm, lev_stream *stream, void *buffer, int64_t count, lev_dtype dtype,
                               lev_reduce op) {
  lev_coll c = begin(comm, LEV_COLL_ALL_REDUCE);
  if (!is_float(dtype) && dtype != LEV_I32 && dtype != LEV_I64)
    return lev_fail(LEV_ERR_ARG, "all_reduce of %s; f64, f32, bf16, i32 and i64 are possible", lev_dtype_name(dtype));
  if (op != LEV_SUM && op != LEV_MAX) return lev_fail(LEV_ERR_ARG, "all_reduce: unknown operation %d", (int)op);
  size_t elem = lev_dtype_bytes(dtype), total;
  LEV_TRY(check_counts("all_reduce", &count, 1, elem, &total));
  LEV_TRY(check_buffer("all_reduce", "buffer", buffer, total));
  c.recv = buffer, c.count = count, c.op = op;
  c.send_type = c.recv_type = dtype;
  /* A reduce-scatter over even parts, then an all-gather of them. */
  int64_t part = lev_part_size(count, comm->size, comm->rank);
  uint64_t sent = (uint64_t)(count - part) + (uint64_t)part * (uint64_t)(comm->size - 1);
  return submit(comm, stream, &c, sent * elem);
}

lev_status lev_comm_all_to_all(lev_comm *comm, lev_stream *stream, const lev_comm_part *parts, int n_parts,
                               const int64_t *send_rows, const int64_t *recv_rows) {
  lev_coll c = begin(comm, LEV_COLL_ALL_TO_ALL);
  if (n_parts < 1 || n_parts > LEV_COMM_PARTS)
    return lev_fail(LEV_ERR_ARG, "all_to_all of %d parts; 1 to %d are possible", n_parts, LEV_COMM_PARTS);
  uint64_t sent = 0;
  for (int i = 0; i < n_parts; ++i) {
    size_t send_bytes, recv_bytes;
    LEV_TRY(check_counts("all_to_all send", send_rows, comm->size, parts[i].row_bytes, &send_bytes));
    LEV_TRY(check_counts("all_to_all receive", recv_rows, comm->size, parts[i].row_bytes, &recv_bytes));
    LEV_TRY(check_buffer("all_to_all", "send", parts[i].send, send_bytes));
    LEV_TRY(check_buffer("all_to_all", "recv", parts[i].recv, recv_bytes));
    LEV_TRY(check_apart("all_to_all", parts[i].send, send_bytes, parts[i].recv, recv_bytes));
    sent += send_bytes - (size_t)send_rows[comm->rank] * parts[i].row_bytes;
    c.parts[i] = parts[i];
  }
  c.n_parts = n_parts, c.send_counts = send_rows, c.recv_counts = recv_rows;
  return submit(comm, stream, &c, sent);
}

lev_status lev_comm_ring_shift(lev_comm *comm, lev_stream *stream, const void *send, size_t send_bytes, void *recv,
                               size_t recv_bytes) {
  lev_coll c = begin(comm, LEV_COLL_RING_SHIFT);
  LEV_TRY(check_buffer("ring_shift", "send", send, send_bytes));
  LEV_TRY(check_buffer("ring_shift", "recv", recv, recv_bytes));
  LEV_TRY(check_apart("ring_shift", send, send_bytes, recv, recv_bytes));
  c.send = send, c.recv = recv, c.send_bytes = send_bytes, c.recv_bytes = recv_bytes;
  return submit(comm, stream, &c, comm->size > 1 ? send_bytes : 0);
}

lev_status lev_comm_exchange(lev_comm *comm, lev_stream *stream, const lev_comm_move *moves, int n_moves) {
  lev_coll c = begin(comm, LEV_COLL_EXCHANGE);
  if (n_moves < 0 || (n_moves > 0 && !moves)) return lev_fail(LEV_ERR_ARG, "exchange of %d moves", n_moves);
  uint64_t sent = 0;
  for (int i = 0; i < n_moves; ++i) {
    const lev_comm_move *m = &moves[i];
    if (m->peer < 0 || m->peer >= comm->size || m->peer == comm->rank)
      return lev_fail(LEV_ERR_ARG, "exchange: move %d names peer %d; rank %d of %d can name the others", i, m->peer,
                      comm->rank, comm->size);
    LEV_TRY(check_buffer("exchange", "data", m->data, m->bytes));
    if (m->is_send) sent += m->bytes;
  }
  c.moves = moves, c.n_moves = n_moves;
  return submit(comm, stream, &c, sent);
}

lev_status lev_comm_broadcast(lev_comm *comm, lev_stream *stream, void *buffer, size_t bytes, int root) {
  lev_coll c = begin(comm, LEV_COLL_BROADCAST);
  if (root < 0 || root >= comm->size) return lev_fail(LEV_ERR_ARG, "broadcast from rank %d of %d", root, comm->size);
  LEV_TRY(check_buffer("broadcast", "buffer", buffer, bytes));
  c.recv = buffer, c.send_bytes = bytes, c.root = root;
  return submit(comm, stream, &c, root == comm->rank ? (uint64_t)bytes * (uint64_t)(comm->size - 1) : 0);
}

lev_status lev_comm_barrier(lev_comm *comm, lev_stream *stream) {
  lev_coll c = begin(comm, LEV_COLL_BARRIER);
  return submit(comm, stream, &c, 0);
}
