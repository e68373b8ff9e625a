/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend of comm.h provides. Private to common/: comm.c validates, counts faults and bytes and records the
 * trace. */
#ifndef LEV_COMMON_COMM_IMPL_H
#define LEV_COMMON_COMM_IMPL_H

#include "common/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_coll_kind {
  LEV_COLL_ALL_GATHER,
  LEV_COLL_REDUCE_SCATTER,
  LEV_COLL_ALL_REDUCE,
  LEV_COLL_ALL_TO_ALL,
  LEV_COLL_RING_SHIFT,
  LEV_COLL_EXCHANGE,
  LEV_COLL_BROADCAST,
  LEV_COLL_BARRIER,
  LEV_COLL_KINDS
} lev_coll_kind;

const char *lev_coll_name(lev_coll_kind kind);

/* One collective call. Arrays belong to the caller and are read during the call only. */
typedef struct lev_coll {
  lev_coll_kind kind;
  int64_t number; /* of the call on this communicator, from 1 */
  const void *send;
  void *recv; /* also the buffer of in-place operations */
  lev_dtype send_type, recv_type;
  int64_t count;                 /* all_reduce */
  size_t send_bytes, recv_bytes; /* ring_shift; broadcast: send_bytes */
  int root;                      /* broadcast */
  lev_reduce op;                 /* all_reduce */
  bool accumulate;               /* reduce_scatter */
  const int64_t *send_counts;    /* [size]: counts of gather and scatter, send_rows of all_to_all */
  const int64_t *recv_counts;    /* [size]: recv_rows of all_to_all */
  int n_parts;
  lev_comm_part parts[LEV_COMM_PARTS];
  int n_moves;
  const lev_comm_move *moves; /* [n_moves] */
} lev_coll;

typedef struct lev_comm_ops {
  lev_status (*enqueue)(lev_comm *comm, lev_stream *stream, const lev_coll *coll);
  lev_status (*agree)(lev_comm *comm, lev_status mine);
  lev_status (*host_all_gather)(lev_comm *comm, const void *send, void *recv, size_t bytes);
  void (*abort)(lev_comm *comm);
  lev_status (*split)(lev_comm *comm, int color, int key, lev_comm **out);
  /* World ranks first, first + stride, ..., of which this rank is number `rank`. */
  lev_status (*subset)(lev_comm *comm, int first, int stride, int size, int rank, lev_comm **out);
  void (*destroy)(lev_comm *comm); /* frees the struct too */
} lev_comm_ops;

/* Backends' own structs start with this. */
struct lev_comm {
  const lev_comm_ops *ops;
  lev_device *device;
  int rank, size;
  int world_rank, world_size;
  int first, stride; /* members are the world ranks first, first + stride, ...; stride 0: no such rule (split) */
  uint64_t bytes_sent;
  int64_t calls;
};

#ifdef __cplusplus
}
#endif
#endif
