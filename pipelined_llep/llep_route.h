/* SPDX-License-Identifier: Apache-2.0 */
/* Who computes which route: the lending plan of a layer and what follows from it for one rank. Plain integer functions
 * without allocation, shared by the cpu kernels, the dry run and the tests, and written so that a device can run them.
 *
 * Destinations are numbered by column: rank d has its own experts first, then F slots for lent ones, so column
 * lev_part_begin(E, Ep, d) + d F + slot. The layout does not depend on the plan. */
#ifndef LEV_PIPELINED_LLEP_ROUTE_H
#define LEV_PIPELINED_LLEP_ROUTE_H

#include <stdbool.h>

#include "common/dims.h"

typedef struct llep_rules {
  int ranks;          /* Ep */
  int64_t experts;    /* E */
  int64_t slots;      /* F, lent experts a rank can hold; 0 = owners only */
  double alpha, gate; /* see llep_config */
  int64_t min_rows;   /* m */
} llep_rules;

LEV_HD static inline int64_t llep_columns(const llep_rules *r) {
  return r->experts + r->ranks * r->slots;
}
LEV_HD static inline int64_t llep_column_begin(const llep_rules *r, int64_t d) {
  return lev_part_begin(r->experts, r->ranks, d) + d * r->slots;
}
/* Own experts and slots of a rank. */
LEV_HD static inline int64_t llep_rank_columns(const llep_rules *r, int64_t d) {
  return lev_part_size(r->experts, r->ranks, d) + r->slots;
}

/* The lending plan of one layer: segment s of expert e (seg[e] <= s < seg[e + 1]) holds the positions from start[s] to
 * the next segment's start of e's routes, counted over ranks in order and tokens in order, and computes them in
 * column[s]. An expert's first segment is its owner's, possibly empty; each further one is a move. */
typedef struct llep_table {
  int64_t *moves;  /* [1] number of moves */
  int64_t *seg;    /* [E + 1] */
  int64_t *start;  /* [columns] */
  int64_t *column; /* [columns] */
  int64_t *base;   /* [E] first position of the rank that runs this */
} llep_table;

LEV_HD static inline int64_t llep_table_length(const llep_rules *r) {
  return 1 + r->experts + 1 + 2 * llep_columns(r) + r->experts;
}
LEV_HD static inline llep_table llep_table_at(const llep_rules *r, int64_t *memory) {
  llep_table t;
  t.moves = memory;
  t.seg = t.moves + 1;
  t.start = t.seg + r->experts + 1;
  t.column = t.start + llep_columns(r);
  t.base = t.column + llep_columns(r);
  return t;
}

/* counts[id] += 1 over `routes` ids, counts[E] for ids outside 0 .. E-1; ids = NULL means id q of route q = q mod E. */
LEV_HD static inline void llep_count(const int32_t *ids, int64_t routes, int64_t experts, int64_t *counts) {
  for (int64_t e = 0; e <= experts; ++e) counts[e] = 0;
  int64_t turn = 0;
  for (int64_t q = 0; q < routes; ++q) {
    int64_t e = ids ? ids[q] : turn;
    if (++turn == experts) turn = 0;
    ++counts[e < 0 || e >= experts ? experts : e];
  }
}

/* table->base for `rank`; counts [Ep, E + 1]. */
LEV_HD static inline void llep_base(const llep_rules *r, const int64_t *counts, int rank, int64_t *base) {
  for (int64_t e = 0; e < r->experts; ++e) {
    base[e] = 0;
    for (int s = 0; s < rank; ++s) base[e] += counts[s * (r->experts + 1) + e];
  }
}

/* Working memory of llep_lend. */
typedef struct llep_scratch {
  int64_t *load;   /* [Ep] rows planned */
  int64_t *used;   /* [Ep] slots taken */
  int64_t *rows;   /* [E] routes */
  int64_t *kept;   /* [E] routes the owner keeps; -1 = not looked at */
  int64_t *expert; /* [Ep F] moves in the order they were made: expert, column, rows */
  int64_t *column;
  int64_t *amount;
} llep_scratch;

LEV_HD static inline int64_t llep_scratch_length(const llep_rules *r) {
  return 2 * r->ranks + 2 * r->experts + 3 * r->ranks * r->slots;
}
LEV_HD static inline llep_scratch llep_scratch_at(const llep_rules *r, int64_t *memory) {
  int64_t moves = r->ranks * r->slots;
  llep_scratch s;
  s.load = memory;
  s.used = s.load + r->ranks;
  s.rows = s.used + r->ranks;
  s.kept = s.rows + r->experts;
  s.expert = s.kept + r->experts;
  s.column = s.expert + moves;
  s.amount = s.column + moves;
  return s;
}

/* Gives `left` routes of expert e to the least loaded ranks with a free slot; returns what stays with owner o. A rank
 * takes enough to reach the cap, at least m rows and, if no more than m above the cap result, all: so no (expert, rank)
 * pair occurs twice, loads end at cap + m or less, and crumbs stay where they are. */
LEV_HD static inline int64_t llep_spill(const llep_rules *r, llep_scratch *s, int64_t *moves, int64_t e, int64_t o,
                                        int64_t left, int64_t cap) {
  while (left > 0 && s->load[o] + left > cap + r->min_rows) {
    int64_t g = -1;
    for (int64_t d = 0; d < r->ranks; ++d)
      if (d != o && s->used[d] < r->slots && (g < 0 || s->load[d] < s->load[g])) g = d;
    if (g < 0 || s->load[g] >= cap) break;
    int64_t room = cap - s->load[g];
    int64_t take = left <= room + r->min_rows ? left : lev_max_i64(room, r->min_rows);
    s->expert[*moves] = e;
    s->column[*moves] = llep_column_begin(r, g + 1) - r->slots + s->used[g]++;
    s->amount[(*moves)++] = take;
    s->load[g] += take, left -= take;
  }
  return left;
}

/* Native loads, and whether some rank is above both the gate and the cap. */
LEV_HD static inline bool llep_overloaded(const llep_rules *r, const int64_t *counts, llep_scratch *s, int64_t *cap) {
  int64_t total = 0, most = 0;
  for (int64_t d = 0; d < r->ranks; ++d) s->load[d] = s->used[d] = 0;
  for (int64_t e = 0; e < r->experts; ++e) {
    s->rows[e] = 0;
    for (int64_t d = 0; d < r->ranks; ++d) s->rows[e] += counts[d * (r->experts + 1) + e];
    s->kept[e] = -1;
    s->load[lev_part_of(r->experts, r->ranks, e)] += s->rows[e];
    total += s->rows[e];
  }
  for (int64_t d = 0; d < r->ranks; ++d) most = lev_max_i64(most, s->load[d]);
  double mean = (double)total / r->ranks, limit = r->alpha * mean;
  *cap = (int64_t)limit;
  if ((double)*cap < limit) ++*cap;
  return r->slots > 0 && most > *cap + r->min_rows && (double)most >= r->gate * mean;
}

/* Least loaded assignment: while a rank is above cap + m (cap = alpha x mean), its largest expert keeps what fits under
 * the cap and lends the rest. counts [Ep, E + 1]; deterministic, ties go to the lower expert and rank. */
LEV_HD static inline void llep_lend(const llep_rules *r, const int64_t *counts, int rank, int64_t *table_memory,
                                    int64_t *scratch_memory) {
  llep_table t = llep_table_at(r, table_memory);
  llep_scratch s = llep_scratch_at(r, scratch_memory);
  int64_t cap, moves = 0;
  bool lend = llep_overloaded(r, counts, &s, &cap);
  while (lend) {
    int64_t e = -1;
    for (int64_t i = 0; i < r->experts; ++i)
      if (s.kept[i] < 0 && s.load[lev_part_of(r->experts, r->ranks, i)] > cap + r->min_rows && s.rows[i] > 0 &&
          (e < 0 || s.rows[i] > s.rows[e]))
        e = i;
    if (e < 0) break;
    int64_t o = lev_part_of(r->experts, r->ranks, e), away = lev_min_i64(s.rows[e], s.load[o] - cap);
    s.load[o] -= away;
    int64_t back = llep_spill(r, &s, &moves, e, o, away, cap);
    s.load[o] += back;
    s.kept[e] = s.rows[e] - away + back;
  }
  int64_t n = 0;
  for (int64_t e = 0; e < r->experts; ++e) {
    int64_t position = s.kept[e] < 0 ? s.rows[e] : s.kept[e];
    t.seg[e] = n;
    t.start[n] = 0;
    t.column[n++] = e + lev_part_of(r->experts, r->ranks, e) * r->slots;
    for (int64_t i = 0; i < moves; ++i) {
      if (s.expert[i] != e) continue;
      t.start[n] = position;
      t.column[n++] = s.column[i];
      position += s.amount[i];
    }
  }
  t.seg[r->experts] = n;
  *t.moves = moves;
  llep_base(r, counts, rank, t.base);
}

/* Column of each route of one rank, and how many there are per column and token block (token t is in block t mod B):
 * route_column [N, k] (nullable; -1 for a bad id), histogram [columns, B]; seen [E] is scratch. */
LEV_HD static inline void llep_assign(const llep_rules *r, const int32_t *ids, int64_t tokens, int64_t top_k,
                                      int64_t blocks, const llep_table *t, int64_t *seen, int32_t *route_column,
                                      int32_t *histogram) {
  for (int64_t e = 0; e < r->experts; ++e) seen[e] = t->base[e];
  for (int64_t i = 0; i < llep_columns(r) * blocks; ++i) histogram[i] = 0;
  int64_t turn = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    int64_t block = token % blocks;
    for (int64_t q = token * top_k; q < (token + 1) * top_k; ++q) {
      int64_t e = ids ? ids[q] : turn;
      if (++turn == r->experts) turn = 0;
      int64_t column = -1;
      if (e >= 0 && e < r->experts) {
        int64_t s = t->seg[e], position = seen[e]++;
        while (s + 1 < t->seg[e + 1] && t->start[s + 1] <= position) ++s;
        column = t->column[s];
        ++histogram[column * blocks + block];
      }
      if (route_column) route_column[q] = (int32_t)column;
    }
  }
}

/* What llep_count and llep_assign make of ids = NULL, the latter where nothing is lent, without going through the
 * tokens: the experts at which the tokens of a block begin repeat after at most E of them. */
LEV_HD static inline void llep_count_in_turn(int64_t routes, int64_t experts, int64_t *counts) {
  for (int64_t e = 0; e < experts; ++e) counts[e] = routes / experts + (e < routes % experts);
  counts[experts] = 0;
}

LEV_HD static inline void llep_histogram_in_turn(const llep_rules *r, int64_t tokens, int64_t top_k, int64_t blocks,
                                                 const llep_table *t, int32_t *histogram) {
  int64_t step = blocks * top_k % r->experts, period = 1;
  for (int64_t at = step; at != 0; at = (at + step) % r->experts) ++period;
  for (int64_t i = 0; i < llep_columns(r) * blocks; ++i) histogram[i] = 0;
  for (int64_t b = 0; b < blocks && b < tokens; ++b) {
    int64_t n = (tokens - b + blocks - 1) / blocks, begin = b * top_k % r->experts;
    for (int64_t i = 0; i < period && i < n; ++i) {
      int64_t e = begin, times = n / period + (i < n % period);
      for (int64_t j = 0; j < top_k; ++j) {
        histogram[t->column[t->seg[e]] * blocks + b] += (int32_t)times;
        if (++e == r->experts) e = 0;
      }
      begin = (begin + step) % r->experts;
    }
  }
}

/* Replaces the columns of a chunk's routes by their rows in send order: by column, then block, then token. Blocks
 * [first, last); next [columns] is scratch. */
LEV_HD static inline void llep_number(const llep_rules *r, int64_t tokens, int64_t top_k, int64_t blocks, int64_t first,
                                      int64_t last, const int32_t *histogram, int32_t *next, int32_t *routes) {
  int32_t row = 0;
  for (int64_t c = 0; c < llep_columns(r); ++c) {
    next[c] = row;
    for (int64_t b = first; b < last; ++b) row += histogram[c * blocks + b];
  }
  for (int64_t b = first; b < last; ++b)
    for (int64_t token = b; token < tokens; token += blocks)
      for (int64_t q = token * top_k; q < (token + 1) * top_k; ++q) routes[q] = next[routes[q]]++;
}

#endif
