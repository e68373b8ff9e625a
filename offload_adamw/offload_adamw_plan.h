/* SPDX-License-Identifier: Apache-2.0 */
/* The plan's inside, shared by offload_adamw.c (plan) and offload_adamw_step.c (schedule). */
#ifndef LEV_OFFLOAD_ADAMW_OFFLOAD_ADAMW_PLAN_H
#define LEV_OFFLOAD_ADAMW_OFFLOAD_ADAMW_PLAN_H

#include "offload_adamw/offload_adamw_team.h"

#define OADAMW_UNIT 64 /* elements: bucket borders fall on its multiples where buckets are that long */

typedef struct oadamw_cut {
  int64_t n, unit, units, buckets, size; /* size: of the largest bucket */
} oadamw_cut;

/* Consecutive elements of one segment inside one bucket. */
typedef struct oadamw_piece {
  int segment;
  int64_t offset; /* in the flat shard */
  int64_t state;  /* in the state arrays */
  int64_t count;
} oadamw_piece;

typedef struct oadamw_bucket {
  int64_t begin, size; /* in the state arrays */
  int64_t first_piece, pieces;
} oadamw_bucket;

/* Three stages over `slots` buckets; bucket number j of the pipe uses slot j mod slots. */
typedef struct oadamw_pipe {
  lev_stream *in, *out;
  lev_event *arrived[OADAMW_SLOTS_MAX], *updated[OADAMW_SLOTS_MAX], *left[OADAMW_SLOTS_MAX];
  lev_event *end;
  int64_t used; /* buckets of this step so far */
} oadamw_pipe;

typedef struct oadamw_state_set {
  unsigned char *master, *exp_avg, *exp_avg_sq;
} oadamw_state_set;

typedef struct oadamw_layout {
  oadamw_state_set state;
  oadamw_state_set slot[OADAMW_SLOTS_MAX];                           /* device */
  unsigned char *grads[OADAMW_SLOTS_MAX], *params[OADAMW_SLOTS_MAX]; /* pinned staging */
} oadamw_layout;

struct oadamw_plan {
  lev_device *device;
  oadamw_config config; /* its `segments` is NULL: see below */
  oadamw_cut cut;
  lev_dtype arith;
  oadamw_simd simd;
  bool bound[OADAMW_PHASES];
  oadamw_layout at;
  oadamw_segment *segments; /* joined, no empty ones */
  oadamw_rates *rates;      /* of this step, per segment */
  int n_segments;
  oadamw_bucket *bucket;
  oadamw_piece *piece;
  int64_t n_pieces;
  oadamw_host_slot *host_slots; /* two steps' worth, where a GPU's streams run updates on the host; else NULL */
  int64_t host_updates;         /* launched so far */
  oadamw_team *team;            /* with host_slots: `workers` threads behind one stream; else NULL */
  int streams;                  /* of workers */
  lev_event *begin;
  oadamw_pipe gpu, cpu;
  lev_stream *worker[OADAMW_WORKERS_MAX];
};

#endif
