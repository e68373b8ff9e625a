/* SPDX-License-Identifier: Apache-2.0 */
/* The plan and the parts of its schedules (private). */
#ifndef LEV_RING_DTP_RING_DTP_PLAN_H
#define LEV_RING_DTP_RING_DTP_PLAN_H

#include "common/dims.h"
#include "common/gemm.h"
#include "ring_dtp/ring_dtp.h"
#include "ring_dtp/ring_dtp_ops.h"

typedef enum rdtp_mode { RDTP_RING_WEIGHTS, RDTP_RING_ACTIVATIONS, RDTP_BLOCK_PASS, RDTP_GATHER_ALL } rdtp_mode;

struct rdtp_plan {
  rdtp_config config;
  lev_device *device;
  lev_comm *comm;
  lev_stream *comm_stream;
  lev_event *mark;        /* compute stream, before a collective */
  lev_event *arrived[2];  /* comm stream: payload slot filled */
  lev_event *acc_arrived; /* comm stream: accumulator (or gathered state) filled */
  lev_event *done;        /* comm stream: last reduction of a call */
  int64_t *counts;        /* host [P]: element counts of the v-collectives */
  int64_t *rank_rows;     /* host [P]: tokens of every rank in this call */

  rdtp_mode mode;
  int rank, size; /* in the vocabulary group */
  lev_dtype arith;
  size_t t_bytes, a_bytes;
  int64_t shard_cap;            /* head rows of the largest shard */
  int64_t tile_rows, tile_cols; /* of a chunk; one-pass: tile_rows of every rank */
  int64_t tile_ld;              /* row pitch of the logits buffer, scalars of A */

  bool bound[RDTP_PHASES];
  void *tile;       /* logits [rows, tile_ld] A */
  void *payload[2]; /* moving chunk: W [tile_cols,H] T, or h [tile_rows,H] T; gathered h; gathered head */
  void *meta[2];    /* what moves with h: labels i32, or records [tile_rows,3] A */
  void *acc[3];     /* moving gradient: dW or dh of the chunk, A */
  void *partial[3]; /* moving state [tile_rows,3] A */
  void *record[2];  /* finished state of own chunks [tile_rows,3] A */
  void *state;      /* [tokens,3] A */
  void *all_state;  /* [P, rows, 3] A */
  void *dx;         /* [N,H] A */
};

/* One call in flight: the plan, the caller's arguments and streams. */
typedef struct rdtp_run {
  rdtp_plan *p;
  const rdtp_args *args;
  lev_stream *stream;
  bool grad;
  int64_t max_rows; /* largest rank's tokens */
  /* Rings only. `clock` numbers the points of the compute stream between two stops, `marked` is the latest one that the
   * comm stream has been told to wait for, and the others say when something was last touched that a hop reads or
   * overwrites. */
  int64_t clock, marked, slot_clock[2], own_clock;
} rdtp_run;

/* What a rank sees of one chunk on its way round. */
typedef struct rdtp_visit {
  int64_t round;
  int hop;             /* hops the chunk has made: 0 = its owner's own */
  int owner;           /* rank it belongs to */
  int64_t rows;        /* rows of the chunk, 0 included */
  const void *data[2]; /* payload parts */
  void *acc;           /* where this rank's contribution goes (NULL without one) */
} rdtp_visit;

/* A ring over chunks: in every round each rank's own chunk makes P - 1 hops, while the accumulator of a chunk follows
 * one step behind and makes P, the last one home. During step j three accumulators are in use: j computes, j - 1 is on
 * its way out, and what the neighbour computed in step j - 1 comes in; it is added to j afterwards. Hops of step j
 * overlap the products of step j. */
typedef struct rdtp_ring {
  rdtp_run *run;
  int n_parts;
  size_t part_bytes[2]; /* per row */
  void *slot[2][2];     /* [part][slot] */
  size_t acc_bytes;     /* per row; 0 = nothing travels back */
  void *acc[3];
  const void *(*own)(const rdtp_run *run, int64_t round, int part);
  int64_t (*rows)(const rdtp_run *run, int owner, int64_t round);
  lev_status (*compute)(const rdtp_run *run, const rdtp_visit *visit);
  lev_status (*merge)(const rdtp_run *run, void *acc, const void *incoming, int64_t rows);
  lev_status (*home)(const rdtp_run *run, const void *acc, int64_t round);
  int64_t step;          /* steps with an accumulator so far */
  int64_t pending_clock; /* point at which it was complete */
  bool pending;          /* accumulator step - 1 has not left yet */
  int pending_hop;
  int64_t pending_round;
} rdtp_ring;

/* All steps of one round; `home` of its chunk comes during the next round or the flush. */
LEV_MUST_CHECK lev_status rdtp_ring_round(rdtp_ring *ring, int64_t round);
LEV_MUST_CHECK lev_status rdtp_ring_flush(rdtp_ring *ring);

/* The comm stream waits for everything enqueued on the compute stream so far. */
LEV_MUST_CHECK lev_status rdtp_mark(const rdtp_run *run);

LEV_MUST_CHECK lev_status rdtp_run_weights(rdtp_run *run);
LEV_MUST_CHECK lev_status rdtp_run_activations(rdtp_run *run);
LEV_MUST_CHECK lev_status rdtp_run_block_pass(rdtp_run *run);
LEV_MUST_CHECK lev_status rdtp_run_gather_all(rdtp_run *run);

/* ---- steps shared by the schedules ---- */

/* base + elems * bytes, also for NULL bases of empty arrays. */
static inline void *rdtp_at(const void *base, int64_t elems, size_t bytes) {
  return elems == 0 ? (void *)base : (unsigned char *)base + (size_t)elems * bytes;
}
static inline int64_t rdtp_shard_begin(const rdtp_plan *p, int owner) {
  return lev_part_begin(p->config.vocab, p->size, owner);
}
static inline int64_t rdtp_shard_rows(const rdtp_plan *p, int owner) {
  return lev_part_size(p->config.vocab, p->size, owner);
}
/* Rows of chunk `round` when `total` rows are cut into chunks of `chunk`. */
static inline int64_t rdtp_chunk_rows(int64_t total, int64_t chunk, int64_t round) {
  return lev_max_i64(0, lev_min_i64(chunk, total - round * chunk));
}

/* A piece of the logits: `rows` tokens against `cols` head rows, the first of which is vocabulary index `begin`. */
typedef struct rdtp_piece {
  const void *h; /* [rows,H] T */
  const void *w; /* [cols,H] T */
  int64_t rows, cols, begin;
} rdtp_piece;

/* tile = h w^T */
LEV_MUST_CHECK lev_status rdtp_logits(const rdtp_run *run, const rdtp_piece *piece);
LEV_MUST_CHECK lev_status rdtp_fold(const rdtp_run *run, const rdtp_piece *piece, const int32_t *labels, void *state,
                                    bool first);
/* tile = residual; then dh (+)= tile w and dw (+)= tile^T h. */
LEV_MUST_CHECK lev_status rdtp_residual(const rdtp_run *run, const rdtp_piece *piece, const void *record);
LEV_MUST_CHECK lev_status rdtp_grad_h(const rdtp_run *run, const rdtp_piece *piece, void *dh, lev_dtype type, bool add);
LEV_MUST_CHECK lev_status rdtp_grad_w(const rdtp_run *run, const rdtp_piece *piece, void *dw, bool add);
/* Loss of rows [begin, end) of `state`; records unless NULL. */
LEV_MUST_CHECK lev_status rdtp_finish(const rdtp_run *run, const int32_t *labels, const void *state, void *record,
                                      int64_t rows, int64_t begin, int64_t end);
LEV_MUST_CHECK lev_status rdtp_add(const rdtp_run *run, void *dst, const void *src, int64_t count);
LEV_MUST_CHECK lev_status rdtp_store(const rdtp_run *run, void *dst, const void *src, int64_t count);

#endif
