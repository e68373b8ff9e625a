/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives of ranks that are threads of one process and whose devices are GPUs, possibly the same one.
 *
 * The members' host threads meet inside the call: each has marked on its stream that its buffers are ready, sees the
 * peers' buffers and marks, and enqueues waits for those marks and its own share of the copies or sums, which read (in
 * all_reduce also write) peers' buffers. They part when all have done so and marked the end; each stream then waits for
 * the ends of those peers that touch its buffers. Nothing on the GPU ever waits for work that is not yet enqueued, so
 * streams that share a GPU cannot block each other for good.
 *
 * A failed call leaves its error on the stream, as on the cpu backend. */
#include <sched.h>
#include <stdio.h>

#include "common/comm_local_impl.h"
#include "common/comm_reduce_impl.h"
#include "common/cuda_impl.h"
#include "common/dims.h"

lev_status lev_local_cuda_open(lev_local_comm *c) {
  if (c->base.size > LEV_REDUCE_RANKS)
    return lev_fail(LEV_ERR_UNSUPPORTED, "%d local ranks on GPUs; at most %d are possible", c->base.size,
                    LEV_REDUCE_RANKS);
  LEV_TRY(lev_event_create(c->base.device, &c->ready));
  return lev_event_create(c->base.device, &c->done);
}

lev_status lev_local_cuda_connect(lev_local_comm *c) {
  for (int r = 0; r < c->base.size; ++r) {
    const lev_local_comm *peer = c->group->host_lane.slots[r];
    int gpu = peer->base.device->config.index;
    LEV_TRY(lev_cuda_reach(c->base.device, gpu));
    if (gpu != c->base.device->config.index && gpu < 64) c->other_gpus |= (uint64_t)1 << gpu;
  }
  return LEV_OK;
}

/* A peer that has parted may still be enqueueing its wait for this member's events. */
void lev_local_cuda_close(lev_local_comm *c) {
  while (c->n_passed > 0 && atomic_load(&c->group->n_passed) < c->n_passed * c->base.size) sched_yield();
  /* What peers have enqueued may still read this member's memory, which its owner gives back next. On one GPU giving
   * back waits for that; work of another GPU must be waited for here. */
  for (int gpu = 0; gpu < 64 && c->n_passed > 0; ++gpu)
    if (c->other_gpus >> gpu & 1) lev_cuda_drain(c->base.device, gpu);
  lev_event_destroy(c->ready);
  lev_event_destroy(c->done);
}

/* ---- one member's share ---- */

static bool reads_from(const lev_coll *coll, int rank, int size, int peer) {
  if (coll->kind == LEV_COLL_RING_SHIFT) return peer == (rank + size - 1) % size;
  if (coll->kind == LEV_COLL_BROADCAST) return peer == coll->root;
  return true;
}

static lev_status copy_on_stream(void *ctx, void *to, const void *from, size_t bytes) {
  lev_stream *stream = ctx;
  return stream->device->ops->copy(stream, to, from, bytes);
}

static lev_status launch_sum(lev_stream *stream, const lev_reduce_args *args) {
  if (args->count == 0) return LEV_OK;
  return stream->device->ops->launch(stream, &lev_reduce_kernel, args, sizeof *args);
}

static const void *at(const void *array, int64_t element, lev_dtype type) {
  return array ? (const char *)array + (size_t)element * lev_dtype_bytes(type) : NULL;
}

static lev_status sum_all_reduce(lev_local_comm *c, const lev_local_op *const *ops, lev_stream *stream) {
  const lev_coll *coll = &ops[c->base.rank]->coll;
  int size = c->base.size;
  int64_t begin = lev_part_begin(coll->count, size, c->base.rank);
  lev_reduce_args args = {.count = lev_part_size(coll->count, size, c->base.rank),
                          .n_in = size,
                          .n_out = size,
                          .in_type = coll->send_type,
                          .out_type = coll->send_type,
                          .max = coll->op == LEV_MAX};
  for (int r = 0; r < size; ++r) args.in[r] = at(ops[r]->coll.recv, begin, coll->send_type);
  for (int r = 0; r < size; ++r) args.out[r] = (void *)(uintptr_t)args.in[r];
  return launch_sum(stream, &args);
}

static lev_status sum_reduce_scatter(lev_local_comm *c, const lev_local_op *const *ops, lev_stream *stream) {
  const lev_coll *coll = &ops[c->base.rank]->coll;
  int64_t begin = 0;
  for (int r = 0; r < c->base.rank; ++r) begin += coll->send_counts[r];
  lev_reduce_args args = {.count = coll->send_counts[c->base.rank],
                          .n_in = c->base.size,
                          .n_out = 1,
                          .out = {coll->recv},
                          .in_type = coll->send_type,
                          .out_type = coll->recv_type,
                          .accumulate = coll->accumulate};
  for (int r = 0; r < c->base.size; ++r) args.in[r] = at(ops[r]->coll.send, begin, coll->send_type);
  return launch_sum(stream, &args);
}

/* Waits for the peers' buffers, then copies or adds. */
static lev_status share(lev_local_comm *c, const lev_local_op *const *ops, lev_stream *stream) {
  const lev_coll *coll = &ops[c->base.rank]->coll;
  for (int r = 0; r < c->base.size; ++r)
    if (r != c->base.rank && reads_from(coll, c->base.rank, c->base.size, r))
      LEV_TRY(lev_cuda_wait_peer(stream, ops[r]->comm->ready));
  if (coll->kind == LEV_COLL_ALL_REDUCE) return sum_all_reduce(c, ops, stream);
  if (coll->kind == LEV_COLL_REDUCE_SCATTER) return sum_reduce_scatter(c, ops, stream);
  return lev_local_copy_data(c, ops, copy_on_stream, stream);
}

/* Waits for the peers that read this member's buffers, or write them. `peers`: their communicators. */
static lev_status wait_ends(lev_local_comm *c, const lev_coll *coll, lev_local_comm *const *peers, lev_stream *stream) {
  for (int r = 0; r < c->base.size; ++r)
    if (r != c->base.rank && peers[r] && reads_from(coll, r, c->base.size, c->base.rank))
      LEV_TRY(lev_cuda_wait_peer(stream, peers[r]->done));
  return LEV_OK;
}

/* ---- the call ---- */

static lev_status run(lev_local_comm *c, const lev_local_op *op, lev_stream *stream) {
  lev_local_group *group = c->group;
  lev_local_comm *peers[LEV_REDUCE_RANKS] = {0};
  LEV_TRY(lev_event_record(c->ready, stream));
  LEV_TRY(lev_local_meet(group, &group->stream_lane, c->base.rank, op, lev_coll_name(op->coll.kind)));
  const lev_local_op *const *ops = (const lev_local_op *const *)group->stream_lane.slots;
  for (int r = 0; r < c->base.size; ++r) peers[r] = ops[r]->comm;
  lev_status st = lev_local_match(group, ops), marked = LEV_OK;
  if (st == LEV_OK) {
    st = share(c, ops, stream);
    marked = lev_event_record(c->done, stream); /* also after a failure: the peers wait for it */
  }
  lev_local_part(&group->stream_lane, group->size);
  ++c->n_passed;
  if (st == LEV_OK) st = marked;
  if (st == LEV_OK) st = wait_ends(c, &op->coll, peers, stream);
  atomic_fetch_add(&group->n_passed, 1);
  return st;
}

lev_status lev_local_cuda_enqueue(lev_local_comm *c, lev_stream *stream, const lev_coll *coll) {
  char reason[512];
  lev_status st = lev_cuda_stream_status(stream);
  if (st != LEV_OK) { /* the peers would wait for a call that never comes */
    snprintf(reason, sizeof reason, "rank %d skips %s because its stream had failed (%s)", c->base.world_rank,
             lev_coll_name(coll->kind), lev_status_text(st));
    lev_local_abort(c->group->hub, reason);
    return LEV_OK;
  }
  lev_local_op op = {.comm = c, .coll = *coll};
  st = run(c, &op, stream);
  if (st == LEV_OK) return LEV_OK;
  lev_cuda_stream_fail(stream, st);
  if (st != LEV_ERR_ABORTED && st != LEV_ERR_TIMEOUT) lev_local_abort(c->group->hub, lev_detail());
  return LEV_OK;
}
