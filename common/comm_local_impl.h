/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are threads of one process. Private to comm_local*.c.
 *
 * A group has two lanes, one for the stream workers and one for the host threads. On a lane all members meet (each
 * leaves a pointer), look at or copy each other's data, and part again. Meeting is all or nothing: it can be aborted or
 * time out, but once it succeeded for one member it succeeds for all, and parting then waits for plain copies only. So
 * nobody returns while a peer may still read its buffers, also when the world is aborted. */
#ifndef LEV_COMMON_COMM_LOCAL_IMPL_H
#define LEV_COMMON_COMM_LOCAL_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "common/comm_impl.h"

typedef struct lev_local_lane {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool dead;        /* aborted, or a member's deadline passed */
  char missed[512]; /* which deadline, if one passed here */
  int n_met, n_parted;
  _Atomic uint64_t meetings, partings;
  const void **slots; /* [size] what each member left at the latest meeting */
  bool *met;          /* [size] members that have arrived at the meeting in progress */
} lev_local_lane;

typedef struct lev_local_group {
  struct lev_local_group *next;
  lev_comm_hub *hub;
  int size;
  int refs;          /* members that have not left; freed at 0 */
  int first, stride; /* identity of a subset; stride 0 for other groups */
  bool *joined;      /* [size] members of a subset that have come */
  int *world_ranks;  /* [size] */
  lev_local_lane stream_lane, host_lane;
  _Atomic int64_t n_passed; /* cuda: calls of all members that touch no peer's events any more */
} lev_local_group;

/* A collective in flight: the call, with its arrays copied. */
typedef struct lev_local_op {
  struct lev_local_comm *comm;
  lev_coll coll;
  int64_t *counts;     /* [2 * size] */
  int64_t moves_begin; /* position in the ring of moves, counted without wrapping */
} lev_local_op;

#define LEV_LOCAL_OPS 64     /* collectives of one communicator in flight */
#define LEV_LOCAL_MOVES 4096 /* moves of all exchanges in flight */

typedef struct lev_local_comm {
  lev_comm base;
  lev_local_group *group;
  lev_local_op ops[LEV_LOCAL_OPS];
  lev_comm_move *moves; /* [LEV_LOCAL_MOVES] */
  int *cursor;          /* [size], used by the worker */
  int64_t n_enqueued, moves_end;
  _Atomic int64_t n_finished;
  pthread_mutex_t lock; /* for waiting until n_finished moves on */
  pthread_cond_t finished;
  /* cuda only */
  lev_event *ready, *done; /* this member's stream has come to the call; has made its copies */
  int64_t n_passed;        /* calls that got through */
  uint64_t other_gpus;     /* those of the peers, a bit each */
} lev_local_comm;

/* Arrives with `mine` and waits for all members. `what` names the call in messages. Errors: LEV_ERR_ABORTED,
 * LEV_ERR_TIMEOUT. */
lev_status lev_local_meet(lev_local_group *group, lev_local_lane *lane, int rank, const void *mine, const char *what);
/* Waits until all members have come this far; after a successful meeting only. */
void lev_local_part(lev_local_lane *lane, int size);
void lev_local_abort(lev_comm_hub *hub, const char *reason);

/* Runs the collective on the stream's worker. ops: the members' calls, in rank order, all checked to fit together. */
lev_status lev_local_move_data(lev_local_comm *comm, const lev_local_op *const *ops);
/* Calls fn for every copy that this member has to make; none for reductions and barriers. */
typedef lev_status (*lev_local_copy_fn)(void *ctx, void *to, const void *from, size_t bytes);
lev_status lev_local_copy_data(lev_local_comm *comm, const lev_local_op *const *ops, lev_local_copy_fn fn, void *ctx);
/* Do the members' calls fit together? Every member comes to the same verdict. Errors: LEV_ERR_COMM, naming two ranks.
 */
lev_status lev_local_match(const lev_local_group *group, const lev_local_op *const *ops);

#ifdef LEV_HAVE_CUDA
/* The cuda side (comm_local_cuda.c): set-up of a member, the call, and what must have ended before a member's events
 * may go. */
lev_status lev_local_cuda_open(lev_local_comm *comm);
lev_status lev_local_cuda_connect(lev_local_comm *comm); /* while the members meet, each with its communicator */
lev_status lev_local_cuda_enqueue(lev_local_comm *comm, lev_stream *stream, const lev_coll *coll);
void lev_local_cuda_close(lev_local_comm *comm);
#endif

#endif
