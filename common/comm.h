/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives over a group of ranks, enqueued on a stream.
 *
 *   local  ranks are threads of one process (cpu: the stream workers meet and copy; cuda: the host threads meet in the
 *          call, then events and device copies; so on cuda ranks that share several communicators also keep one order
 *          over all of them, and an error shows at the latest when the stream is waited for)
 *   dry    a world of any size, one rank executed: calls only record their bytes
 *
 * Rules: every rank of the group makes the same calls on a communicator in the same order; a communicator is driven
 * from one host thread and, at any time, from one stream. Buffers must stay untouched until the stream has passed the
 * call. Zero counts take part like any other. Sums run in rank order 0..n-1, in the arithmetic type of the dtype, so
 * results do not depend on timing. Counts given to the v-forms must agree between sender and receiver (agree on them
 * first). A failing rank calls lev_comm_abort: it wakes every waiter of the whole world, whose streams then carry
 * LEV_ERR_ABORTED. */
#ifndef LEV_COMMON_COMM_H
#define LEV_COMMON_COMM_H

#include <stdint.h>

#include "common/device.h"
#include "common/dtype.h"
#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lev_comm lev_comm;

/* ---- making communicators ---- */

/* Meeting point of `size` rank threads; create before the threads, destroy after all of them left. `timeout_seconds`
 * bounds every wait (0 = 600); a rank that waits longer fails with LEV_ERR_TIMEOUT naming the missing ranks, and aborts
 * the world. */
typedef struct lev_comm_hub lev_comm_hub;
LEV_MUST_CHECK lev_status lev_comm_hub_create(int size, double timeout_seconds, lev_comm_hub **out);
void lev_comm_hub_destroy(lev_comm_hub *hub);
/* As lev_comm_abort, also for ranks that have not joined yet: their join returns LEV_ERR_ABORTED. */
void lev_comm_hub_abort(lev_comm_hub *hub);
/* Called by each rank's thread with its own device; waits for all. */
LEV_MUST_CHECK lev_status lev_comm_local_join(lev_comm_hub *hub, int rank, lev_device *device, lev_comm **out);
/* A world of `size` ranks of which only `rank` runs, on a dry device. */
LEV_MUST_CHECK lev_status lev_comm_dry_create(int size, int rank, lev_device *device, lev_comm **out);
/* Collective: ranks with the same color (>= 0) form a group, ordered by (key, rank). Waits. color < 0: *out = NULL. */
LEV_MUST_CHECK lev_status lev_comm_split(lev_comm *comm, int color, int key, lev_comm **out);
/* On dry, a split cannot ask the others: the caller says what the group would be. Usable on every backend: the group is
 * the `size` ranks first, first + stride, ... of `comm`; all members call it with the same values, in the same order.
 * So (0, 1, size) makes a second communicator of the same ranks. Errors: LEV_ERR_ARG; LEV_ERR_UNSUPPORTED where `comm`
 * came from a split whose ranks are not evenly spaced. */
LEV_MUST_CHECK lev_status lev_comm_subset(lev_comm *comm, int first, int stride, int size, lev_comm **out);
void lev_comm_destroy(lev_comm *comm); /* its streams must be idle; NULL is fine */
int lev_comm_rank(const lev_comm *comm);
int lev_comm_size(const lev_comm *comm);
lev_device *lev_comm_device(const lev_comm *comm);

/* ---- control plane: the host thread waits; small messages; not recorded in the trace ---- */

/* All ranks report `mine`; returns LEV_OK only if all did, else the first failing rank's status with a detail naming
 * it. On dry: mine. */
LEV_MUST_CHECK lev_status lev_comm_agree(lev_comm *comm, lev_status mine);
/* `recv` receives size x bytes, in rank order. On dry every slot holds this rank's own bytes. */
LEV_MUST_CHECK lev_status lev_comm_host_all_gather(lev_comm *comm, const void *send, void *recv, size_t bytes);
/* Sticky, idempotent, callable from any thread of any rank. */
void lev_comm_abort(lev_comm *comm);

/* ---- collectives on a stream ---- */

typedef enum lev_reduce { LEV_SUM, LEV_MAX } lev_reduce;

/* recv = concatenation of every rank's counts[r] elements at offset sum(counts[0..r-1]); send may alias its own place
 * in recv (in-place) but no other part. counts: host array of size ranks, read during the call. */
LEV_MUST_CHECK lev_status lev_comm_all_gather(lev_comm *comm, lev_stream *stream, const void *send, void *recv,
                                              const int64_t *counts, lev_dtype dtype);
/* Rank r receives counts[r] elements: the sum over ranks of `send` at offset sum(counts[0..r-1]). recv must not alias
 * send. recv may have another dtype (rounded once, after the sum). accumulate: added to what recv holds instead of
 * overwriting. */
LEV_MUST_CHECK lev_status lev_comm_reduce_scatter(lev_comm *comm, lev_stream *stream, const void *send,
                                                  lev_dtype send_type, void *recv, lev_dtype recv_type,
                                                  const int64_t *counts, bool accumulate);
/* In place, same bits on every rank. LEV_MAX propagates NaN. dtype: f64, f32, bf16, i32, i64. */
LEV_MUST_CHECK lev_status lev_comm_all_reduce(lev_comm *comm, lev_stream *stream, void *buffer, int64_t count,
                                              lev_dtype dtype, lev_reduce op);
/* One exchange of several arrays that share row counts: rank r gets send_rows[r] rows from each part, taken in rank
 * order from `send`, and recv is filled in rank order. Arrays of counts are host arrays of `size`, read during the
 * call. */
typedef struct lev_comm_part {
  const void *send; /* [sum send_rows, row_bytes] */
  void *recv;       /* [sum recv_rows, row_bytes] */
  size_t row_bytes;
} lev_comm_part;
#define LEV_COMM_PARTS 4
LEV_MUST_CHECK lev_status lev_comm_all_to_all(lev_comm *comm, lev_stream *stream, const lev_comm_part *parts,
                                              int n_parts, const int64_t *send_rows, const int64_t *recv_rows);
/* Sends to rank + 1, receives from rank - 1 (cyclic); byte counts may differ per hop and be 0. send and recv must not
 * overlap. */
LEV_MUST_CHECK lev_status lev_comm_ring_shift(lev_comm *comm, lev_stream *stream, const void *send, size_t send_bytes,
                                              void *recv, size_t recv_bytes);
/* Point to point exchanges as one group (weight moves): entry i sends or receives. Both sides list the same transfers
 * in the same order. */
typedef struct lev_comm_move {
  int peer; /* rank in this communicator, never self */
  bool is_send;
  void *data;
  size_t bytes;
} lev_comm_move;
LEV_MUST_CHECK lev_status lev_comm_exchange(lev_comm *comm, lev_stream *stream, const lev_comm_move *moves,
                                            int n_moves);
LEV_MUST_CHECK lev_status lev_comm_broadcast(lev_comm *comm, lev_stream *stream, void *buffer, size_t bytes, int root);
LEV_MUST_CHECK lev_status lev_comm_barrier(lev_comm *comm, lev_stream *stream);

/* Bytes this rank has sent so far, and how many collectives (for dry = real checks and reports). */
uint64_t lev_comm_bytes_sent(const lev_comm *comm);
int64_t lev_comm_calls(const lev_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
