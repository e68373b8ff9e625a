/* SPDX-License-Identifier: Apache-2.0 */
/* Properties of the lending plan and of what follows from it, over random draws. */
#include <math.h>
#include <string.h>

#include "common/rng.h"
#include "pipelined_llep/llep_route.h"
#include "tests/t.h"

#define RANKS 6
#define EXPERTS 40
#define TOKENS 48
#define PICKS 4
#define BLOCKS 8

typedef struct draw {
  llep_rules rules;
  int64_t tokens[RANKS], top_k, blocks;
  int32_t ids[RANKS][TOKENS * PICKS];
  int64_t counts[RANKS * (EXPERTS + 1)];
  int64_t table[4096], scratch[4096];
} draw;

static uint64_t next_u64(uint64_t *at) {
  return lev_rng_u64((lev_rng_key){t_seed(), 11, 2}, (*at)++);
}
static int64_t below(uint64_t *at, int64_t n) {
  return (int64_t)(next_u64(at) % (uint64_t)n);
}
static double uniform(uint64_t *at) {
  return (double)(next_u64(at) >> 11) * 0x1p-53;
}

/* Shapes from tiny to full; routing from balanced to all on one expert (Pareto weights of a random exponent). */
static void make_draw(draw *d, uint64_t *at) {
  llep_rules *r = &d->rules;
  r->ranks = (int)(1 + below(at, RANKS));
  r->experts = 1 + below(at, EXPERTS);
  r->slots = r->ranks == 1 ? 0 : below(at, 4) == 0 ? r->experts : below(at, 5);
  r->alpha = 1 + (below(at, 2) ? uniform(at) : 0);
  r->gate = below(at, 2) ? 1 + uniform(at) : 0;
  r->min_rows = below(at, 3) ? below(at, 20) : 0;
  d->top_k = 1 + below(at, lev_min_i64(PICKS, r->experts));
  d->blocks = 1 + below(at, BLOCKS);
  double weight[EXPERTS] = {0}, sum = 0, power = 4 * uniform(at);
  for (int64_t e = 0; e < r->experts; ++e) sum += weight[e] = pow(1 - uniform(at), power);
  for (int s = 0; s < r->ranks; ++s) {
    d->tokens[s] = below(at, 5) ? below(at, TOKENS + 1) : 0;
    for (int64_t q = 0; q < d->tokens[s] * d->top_k; ++q) {
      double u = uniform(at) * sum;
      int64_t e = 0;
      while (e + 1 < r->experts && (u -= weight[e]) > 0) ++e;
      d->ids[s][q] = (int32_t)e;
    }
    llep_count(d->ids[s], d->tokens[s] * d->top_k, r->experts, d->counts + s * (r->experts + 1));
  }
}

static int column_rank(const llep_rules *r, int64_t column) {
  int d = 0;
  while (llep_column_begin(r, d + 1) <= column) ++d;
  return d;
}

/* No pair twice, slots within their cap and dense, segments cover each expert exactly. */
static void check_segments(const draw *d, const llep_table *t) {
  const llep_rules *r = &d->rules;
  int64_t used[RANKS] = {0}, moves = 0;
  bool taken[EXPERTS + RANKS * EXPERTS] = {false};
  for (int64_t e = 0; e < r->experts; ++e) {
    bool seen[RANKS] = {false};
    int64_t rows = 0;
    for (int s = 0; s < r->ranks; ++s) rows += d->counts[s * (r->experts + 1) + e];
    T_EXPECT(t->seg[e] < t->seg[e + 1]);
    for (int64_t s = t->seg[e]; s < t->seg[e + 1]; ++s) {
      int rank = column_rank(r, t->column[s]);
      T_EXPECT_MSG(!seen[rank], "expert %lld twice on rank %d", (long long)e, rank);
      T_EXPECT(!taken[t->column[s]]);
      seen[rank] = taken[t->column[s]] = true;
      if (s == t->seg[e]) {
        T_EXPECT_EQ_I64(t->start[s], 0);
        T_EXPECT_EQ_I64(rank, lev_part_of(r->experts, r->ranks, e));
        T_EXPECT_EQ_I64(t->column[s], llep_column_begin(r, rank) + e - lev_part_begin(r->experts, r->ranks, rank));
        continue;
      }
      int64_t slot = t->column[s] - llep_column_begin(r, rank) - lev_part_size(r->experts, r->ranks, rank);
      int64_t end = s + 1 < t->seg[e + 1] ? t->start[s + 1] : rows;
      T_EXPECT(slot >= 0 && slot < r->slots);
      T_EXPECT_MSG(t->start[s] < end, "an empty move");
      ++used[rank], ++moves;
    }
  }
  for (int s = 0; s < r->ranks; ++s) T_EXPECT(used[s] <= r->slots);
  T_EXPECT_EQ_I64(moves, *t->moves);
}

/* Loads: within cap + m where slots do not bind, never above the fullest native load; nothing lent below the gate. */
static void check_loads(const draw *d, const llep_table *t, const int64_t *loads) {
  const llep_rules *r = &d->rules;
  int64_t native[RANKS] = {0}, total = 0, most = 0, native_most = 0;
  bool bound = r->slots < r->experts;
  for (int64_t e = 0; e < r->experts; ++e)
    for (int s = 0; s < r->ranks; ++s)
      native[lev_part_of(r->experts, r->ranks, e)] += d->counts[s * (r->experts + 1) + e];
  for (int s = 0; s < r->ranks; ++s) {
    total += native[s];
    most = lev_max_i64(most, loads[s]), native_most = lev_max_i64(native_most, native[s]);
  }
  double mean = (double)total / r->ranks;
  T_EXPECT_MSG(most <= native_most, "load %lld above the native %lld", (long long)most, (long long)native_most);
  if ((double)native_most < r->gate * mean) {
    T_EXPECT_EQ_I64(*t->moves, 0);
  } else if (!bound) {
    T_EXPECT_MSG((double)most <= ceil(r->alpha * mean) + (double)r->min_rows, "load %lld, mean %g, alpha %g, m %lld",
                 (long long)most, mean, r->alpha, (long long)r->min_rows);
  }
}

/* Every route has one column; per rank its rows in send order are a permutation; histograms agree; the positions of an
 * expert are filled in order of rank and token. */
static void check_routes(draw *d, int64_t *loads) {
  const llep_rules *r = &d->rules;
  llep_table t = llep_table_at(r, d->table);
  int64_t seen[EXPERTS], columns = llep_columns(r);
  int32_t route[TOKENS * PICKS], column[TOKENS * PICKS], next[EXPERTS * (RANKS + 1)];
  static int32_t histogram[EXPERTS * (RANKS + 1) * BLOCKS];
  int64_t position[EXPERTS] = {0};
  memset(loads, 0, sizeof *loads * RANKS);
  for (int s = 0; s < r->ranks; ++s) {
    int64_t n = d->tokens[s] * d->top_k, sum = 0;
    llep_base(r, d->counts, s, t.base);
    llep_assign(r, d->ids[s], d->tokens[s], d->top_k, d->blocks, &t, seen, route, histogram);
    memcpy(column, route, sizeof column);
    for (int64_t q = 0; q < n; ++q) {
      int64_t e = d->ids[s][q], p = position[e]++, g = t.seg[e];
      while (g + 1 < t.seg[e + 1] && t.start[g + 1] <= p) ++g;
      T_EXPECT_EQ_I64(column[q], t.column[g]);
      ++loads[column_rank(r, column[q])];
    }
    for (int64_t i = 0; i < columns * d->blocks; ++i) sum += histogram[i];
    T_EXPECT_EQ_I64(sum, n);
    int64_t border = d->blocks / 2, rows[2] = {0, 0};
    llep_number(r, d->tokens[s], d->top_k, d->blocks, 0, border, histogram, next, route);
    llep_number(r, d->tokens[s], d->top_k, d->blocks, border, d->blocks, histogram, next, route);
    bool used[2][TOKENS * PICKS] = {{false}};
    int32_t at[2][TOKENS * PICKS]; /* column by row */
    for (int64_t q = 0; q < n; ++q) {
      int chunk = q / d->top_k % d->blocks >= border;
      T_EXPECT(route[q] >= 0 && route[q] < n && !used[chunk][route[q]]);
      if (t_failed()) return;
      used[chunk][route[q]] = true, at[chunk][route[q]] = column[q], ++rows[chunk];
    }
    for (int chunk = 0; chunk < 2; ++chunk)
      for (int64_t i = 0; i < rows[chunk]; ++i) {
        T_EXPECT(used[chunk][i]);
        T_EXPECT(i == 0 || at[chunk][i - 1] <= at[chunk][i]);
      }
  }
}

T_TEST(llep_plan_properties_random) {
  static draw d;
  uint64_t at = 0;
  int64_t with_moves = 0;
  for (int i = 0; i < 10000 && !t_failed(); ++i) {
    int64_t loads[RANKS];
    make_draw(&d, &at);
    T_REQUIRE(llep_table_length(&d.rules) <= 4096 && llep_scratch_length(&d.rules) <= 4096);
    memset(d.table, 0xFF, sizeof d.table);
    llep_lend(&d.rules, d.counts, 0, d.table, d.scratch);
    llep_table t = llep_table_at(&d.rules, d.table);
    with_moves += *t.moves > 0;
    check_segments(&d, &t);
    check_routes(&d, loads);
    check_loads(&d, &t, loads);
    if (t_failed()) t_check(false, __FILE__, __LINE__, "draw %d", i);
  }
  T_EXPECT_MSG(with_moves > 1250, "only %lld draws lent anything", (long long)with_moves);
}

/* The dry run's short cuts, against going through all tokens. */
T_TEST(llep_plan_of_routes_in_turn) {
  static draw d;
  static int32_t want[EXPERTS * (RANKS + 1) * BLOCKS], got[EXPERTS * (RANKS + 1) * BLOCKS];
  uint64_t at = 0;
  for (int i = 0; i < 3000 && !t_failed(); ++i) {
    int64_t counts[EXPERTS + 1], seen[EXPERTS];
    make_draw(&d, &at);
    const llep_rules *r = &d.rules;
    d.rules.gate = 1e30; /* nothing is lent */
    llep_lend(r, d.counts, 0, d.table, d.scratch);
    llep_table t = llep_table_at(r, d.table);
    llep_base(r, d.counts, 0, t.base);
    for (int s = 0; s < r->ranks && T_EXPECT_EQ_I64(*t.moves, 0); ++s) {
      int64_t tokens = d.tokens[s], expected[EXPERTS + 1];
      llep_count(NULL, tokens * d.top_k, r->experts, expected);
      llep_count_in_turn(tokens * d.top_k, r->experts, counts);
      T_EXPECT(memcmp(expected, counts, sizeof *counts * (size_t)(r->experts + 1)) == 0);
      llep_assign(r, NULL, tokens, d.top_k, d.blocks, &t, seen, NULL, want);
      memset(got, 0xFF, sizeof got);
      llep_histogram_in_turn(r, tokens, d.top_k, d.blocks, &t, got);
      T_EXPECT_MSG(memcmp(want, got, sizeof *got * (size_t)(llep_columns(r) * d.blocks)) == 0,
                   "draw %d: %d tokens, %d picks of %d, %d blocks", i, (int)tokens, (int)d.top_k, (int)r->experts,
                   (int)d.blocks);
    }
  }
}

/* The profiles of the source paper, section B.2: exact balance within m, and few moves. */
T_TEST(llep_plan_paper_profiles) {
  enum { P = 8, E = 128, N = 4096, K = 4 };
  static int64_t counts[P * (E + 1)];
  static const int profiles[][2] = {{30, 16}, {50, 16}, {80, 16}, {95, 16}, {30, 4}, {50, 4}};
  static int32_t ids[N * K];
  static int64_t memory[8192];
  for (size_t f = 0; f < sizeof profiles / sizeof *profiles; ++f) {
    int64_t hot = profiles[f][1];
    for (int64_t i = 0; i < N; ++i)
      for (int64_t j = 0; j < K; ++j)
        ids[i * K + j] = (int32_t)(i < N * profiles[f][0] / 100 ? j % hot : hot + (i + j) % (E - hot));
    for (int s = 0; s < P; ++s) llep_count(ids, N * K, E, counts + s * (E + 1));
    llep_rules r = {.ranks = P, .experts = E, .slots = 8, .alpha = 1.0, .gate = 1.3, .min_rows = 128};
    llep_lend(&r, counts, 0, memory, memory + 4096);
    llep_table t = llep_table_at(&r, memory);
    int64_t loads[P] = {0};
    for (int64_t e = 0; e < E; ++e) {
      int64_t rows = 0;
      for (int s = 0; s < P; ++s) rows += counts[s * (E + 1) + e];
      for (int64_t s = t.seg[e]; s < t.seg[e + 1]; ++s)
        loads[column_rank(&r, t.column[s])] += (s + 1 < t.seg[e + 1] ? t.start[s + 1] : rows) - t.start[s];
    }
    for (int d = 0; d < P; ++d) T_EXPECT(loads[d] <= N * K + 128);
    T_EXPECT_MSG(*t.moves >= 1 && *t.moves <= 13, "%lld moves", (long long)*t.moves);
  }
}
