/* SPDX-License-Identifier: Apache-2.0 */
/* The plan object, shared by the three host files: pipelined_llep.c (plan, regions), llep_tables.c (counts, chunk
 * borders), llep_run.c (schedule). */
#ifndef LEV_PIPELINED_LLEP_PLAN_H
#define LEV_PIPELINED_LLEP_PLAN_H

#include "pipelined_llep/llep_ops.h"
#include "pipelined_llep/pipelined_llep.h"

#define LLEP_BUFFERS 2 /* received chunks alive at once */

/* What follows from configuration and group size alone: identical on every rank. */
typedef struct llep_sizes {
  llep_rules rules;
  int64_t send_rows, recv_rows; /* caps of one chunk */
  int64_t tile_rows;
  int64_t blocks;       /* B */
  int64_t parts;        /* of a rank's routes that a device counts at once */
  int64_t rank_columns; /* most columns of any rank */
  int64_t weights;      /* scalars of one expert, 3 I H */
  int buffers;          /* received chunks alive at once */
} llep_sizes;

/* Tables of the counts exchange, as the host reads them. */
typedef struct llep_counts {
  int64_t *counts; /* [Ep, E + 1] routes of each rank per expert, last column: bad ids */
  int64_t *table;  /* see llep_table */
  int64_t *own;    /* [Ep, B] rows this rank sends to each rank */
  int64_t *total;  /* [Ep, B] rows each rank receives */
  int32_t *recv;   /* [Ep, columns of this rank, B] rows this rank receives */
} llep_counts;

/* Device regions of the phase that is bound. */
typedef struct llep_work {
  unsigned char *send_x, *send_dy, *send_p; /* NULL in a group of one: rows are gathered where they arrive */
  unsigned char *recv_x, *recv_dy, *recv_p; /* [buffers, recv_rows, ..] */
  unsigned char *back_x, *back_p;           /* rows come home here; NULL in a group of one: read where they are */
  unsigned char *tile_x, *tile_dy, *tile_p, *h, *q;
  unsigned char *foreign, *foreign_grad;
  int32_t *routes, *histogram, *next;
  int64_t *seen, *scratch;
  llep_counts counts;
} llep_work;

typedef struct llep_move {
  int64_t expert, slot; /* slot: 0 .. F-1 of the helper */
  int owner, helper;
} llep_move;

/* The experts of a tile. At most one piece of each: [columns of this rank]. */
typedef struct llep_pieces {
  int64_t n;
  int64_t *column, *offset; /* the expert, and the first of its rows in the chunk that is here */
  int64_t *first, *rows;    /* rows in the tile */
  void **each;              /* matrices of the product being enqueued */
} llep_pieces;

/* Routes of one layer, remembered from forward to backward. */
typedef struct llep_layer {
  bool valid;
  int64_t tokens;     /* N of this rank */
  int64_t chunks;     /* K */
  int64_t n_moves;    /* over the group */
  int64_t n_foreign;  /* slots used here */
  int64_t chunk_rows; /* fullest sender or receiver of any chunk */
  int64_t native_max;
  int32_t *border;    /* [B + 1] first block of each chunk */
  int32_t *send;      /* [K, Ep] */
  int32_t *recv;      /* [K, Ep, columns of this rank] */
  int64_t *counts;    /* [E] */
  int64_t *rank_rows; /* [Ep] */
  llep_move *moves;   /* [n_moves] by expert, then position */
} llep_layer;

struct llep_plan {
  lev_device *device;
  lev_comm *out, *back; /* dispatch: the caller's; combine: ours */
  bool dry;
  int rank;
  llep_config cfg;
  llep_sizes z;
  int64_t own_experts, columns; /* of this rank: El, El + F */
  lev_stream *dispatch, *combine;
  lev_event *start, *weights, *end, *dispatched[LLEP_BUFFERS], *computed[LLEP_BUFFERS], *combined[LLEP_BUFFERS];
  llep_phase phase; /* FORWARD or BACKWARD when bound, else PERSISTENT */
  bool persistent_bound;
  llep_work work;
  int64_t *tables;  /* device [layers, table length] */
  llep_counts host; /* pinned; on the dry backend ordinary memory */
  llep_layer *layers;
  /* host working memory of one call */
  int64_t *tokens;                         /* [Ep] */
  int64_t *send_rows, *recv_rows, *cursor; /* [Ep]; cursor: start of a column's run of each source */
  int64_t cursor_column;                   /* that column */
  int64_t *sent, *received;                /* [Ep] rows of the chunk being cut */
  int64_t *unit;                           /* [Ep] gradient pieces returned to each owner */
  lev_comm_move *exchange;                 /* [2 Ep F] */
  llep_pieces pieces;                      /* of the tile being computed */
  /* dry only */
  int64_t *dry_tokens; /* [Ep] for which `host` holds the tables; -1 = none */
  int dry_layer;       /* latest layer measured, with these tokens; -1 = none */
  int64_t *dry_scratch;
  int32_t *dry_histogram;
};

/* ---- llep_tables.c ---- */
/* Checks and agrees on everything before the first collective; fills plan->tokens. */
lev_status llep_check_tokens(llep_plan *plan, int layer, int64_t tokens, const int64_t *rank_tokens);
/* Counts, lending plan and chunk borders of a layer: enqueues on the dispatch stream and waits for it. */
lev_status llep_measure(llep_plan *plan, int layer, const int32_t *ids);
/* Backward: route columns and histogram again, from the remembered lending plan. */
lev_status llep_reassign(llep_plan *plan, int layer, const int32_t *ids);

static inline int64_t *llep_layer_table(const llep_plan *p, int layer) {
  return p->tables + layer * llep_table_length(&p->z.rules);
}

#endif
