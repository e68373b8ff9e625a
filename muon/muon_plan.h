/* SPDX-License-Identifier: Apache-2.0 */
/* Private: the plan as muon.c makes it and muon_step.c runs it. */
#ifndef LEV_MUON_MUON_PLAN_H
#define LEV_MUON_MUON_PLAN_H

#include "muon/muon.h"
#include "muon/muon_ops.h"

/* Consecutive matrices whose state moves together; empty ones between them are skipped over. */
typedef struct muon_bucket {
  int first, last;         /* matrices, inclusive */
  int64_t begin, elements; /* in the concatenated state */
} muon_bucket;

/* What the scratch depends on. */
typedef struct muon_extent {
  int64_t elements;  /* largest rows * cols */
  int64_t gram_side; /* largest min(rows, cols) */
  int largest;       /* index of a matrix with that many elements */
  bool square;       /* some step needs G G */
} muon_extent;

typedef struct muon_layout {
  void *master, *momentum;     /* [count] of A */
  void *slots[MUON_SLOTS_MAX]; /* [2, slot_elements] of A: master, then momentum */
  void *x[2], *gram, *square;  /* of C */
  double *partial;
} muon_layout;

struct muon_plan {
  lev_device *device;
  muon_config config;
  muon_matrix *matrices;
  int64_t *begin; /* first element of each matrix in the concatenated state */
  int64_t count;
  int steps;
  lev_dtype arith;
  muon_extent extent;
  muon_bucket *buckets;
  int n_buckets, n_slots;
  int64_t slot_elements;
  bool bound[MUON_PHASES];
  muon_layout at;
  lev_stream *in, *out;
  lev_event *start, *loaded[MUON_SLOTS_MAX], *updated[MUON_SLOTS_MAX], *stored[MUON_SLOTS_MAX];
};

/* Address of element i; works on fake addresses too. */
static inline void *muon_at(const void *base, int64_t i, lev_dtype type) {
  return (void *)((uintptr_t)base + (uintptr_t)i * lev_dtype_bytes(type));
}

#endif
