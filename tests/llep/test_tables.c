/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that build route tables, on the backend under test, against the plain functions of llep_route.h: the same
 * integers everywhere. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/rng.h"
#include "pipelined_llep/llep_ops.h"
#include "tests/backend.h"
#include "tests/t.h"

typedef struct shape {
  int ranks;
  int64_t experts, slots, top_k, blocks, parts, tokens;
  double power; /* of the Pareto weights: 0 = balanced */
  bool bad_ids;
} shape;

/* One rank's tables, plain and by kernels. */
typedef struct tables {
  int32_t *routes, *histogram, *next;
  int64_t *table, *own, *total, *seen;
} tables;

typedef struct scene {
  const shape *s;
  llep_rules rules;
  lev_device *device;
  lev_stream *stream;
  int32_t *ids; /* [ranks, tokens, k] */
  int64_t *counts, *got_counts, *scratch;
  tables want, got;
} scene;

static void *room(int64_t n, size_t size) {
  size_t bytes = (size_t)n * size;
  return memset(t_alloc(bytes), 0xFF, bytes);
}

static void make_tables(const scene *x, tables *t) {
  const shape *s = x->s;
  int64_t columns = llep_columns(&x->rules);
  t->routes = room(s->tokens * s->top_k + 1, sizeof(int32_t));
  t->histogram = room(columns * s->blocks, sizeof(int32_t));
  t->next = room(columns, sizeof(int32_t));
  t->table = room(llep_table_length(&x->rules), sizeof(int64_t));
  t->own = room(s->ranks * s->blocks, sizeof(int64_t));
  t->total = room(s->ranks * s->blocks, sizeof(int64_t));
  t->seen = room(s->parts * s->experts, sizeof(int64_t));
}

static void free_tables(tables *t) {
  void *all[] = {t->routes, t->histogram, t->next, t->table, t->own, t->total, t->seen};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) t_free(all[i]);
}

static void make_ids(scene *x) {
  const shape *s = x->s;
  double *weight = malloc(sizeof *weight * (size_t)s->experts), sum = 0;
  if (!weight) abort();
  lev_rng_key key = {t_seed(), 31, 0}, picks = {t_seed(), 31, 1};
  for (int64_t e = 0; e < s->experts; ++e) sum += weight[e] = pow(1 - lev_rng_uniform(key, (uint64_t)e), s->power);
  for (int64_t q = 0; q < s->ranks * s->tokens * s->top_k; ++q) {
    double u = lev_rng_uniform(picks, (uint64_t)q) * sum;
    int64_t e = 0;
    while (e + 1 < s->experts && (u -= weight[e]) > 0) ++e;
    x->ids[q] = (int32_t)e;
    if (s->bad_ids && q % 7 == 3) x->ids[q] = q % 2 ? -1 - (int32_t)e : (int32_t)(s->experts + e);
  }
  free(weight);
}

static bool scene_open(scene *x, const shape *s) {
  *x = (scene){.s = s, .rules = {s->ranks, s->experts, s->slots, 1.0, 1.0, 2}};
  if (!T_EXPECT_OK(lev_device_open(&(lev_device_config){.backend = t_backend()}, &x->device))) return false;
  if (!T_EXPECT_OK(lev_stream_create(x->device, "tables", &x->stream))) return false;
  x->ids = room(s->ranks * s->tokens * s->top_k + 1, sizeof(int32_t));
  x->counts = room(s->ranks * (s->experts + 1), sizeof(int64_t));
  x->got_counts = room(s->ranks * (s->experts + 1), sizeof(int64_t));
  x->scratch = room(llep_scratch_length(&x->rules), sizeof(int64_t));
  make_tables(x, &x->want), make_tables(x, &x->got);
  make_ids(x);
  return true;
}

static void scene_close(scene *x) {
  lev_device_close(x->device);
  if (!x->ids) return;
  t_free(x->ids), t_free(x->counts), t_free(x->got_counts), t_free(x->scratch);
  free_tables(&x->want), free_tables(&x->got);
}

static void same(const void *want, const void *got, int64_t n, size_t size, const char *what, int rank) {
  T_EXPECT_MSG(memcmp(want, got, (size_t)n * size) == 0, "%s of rank %d differs", what, rank);
}

static int64_t *counts_of(const scene *x, int64_t *counts, int rank) {
  return counts + rank * (x->s->experts + 1);
}
static const int32_t *ids_of(const scene *x, int rank) {
  return x->ids + rank * x->s->tokens * x->s->top_k;
}

static void check_counts(scene *x) {
  const shape *s = x->s;
  for (int r = 0; r < s->ranks; ++r) {
    llep_count(ids_of(x, r), s->tokens * s->top_k, s->experts, counts_of(x, x->counts, r));
    llep_count_args a = {.ids = ids_of(x, r),
                         .routes = s->tokens * s->top_k,
                         .experts = s->experts,
                         .counts = counts_of(x, x->got_counts, r),
                         .parts = s->parts,
                         .seen = x->got.seen};
    T_REQUIRE_OK(LEV_LAUNCH(x->stream, &llep_count_kernel, a));
  }
  T_REQUIRE_OK(lev_stream_sync(x->stream));
  same(x->counts, x->got_counts, s->ranks * (s->experts + 1), sizeof(int64_t), "counts", -1);
}

static void plain_rank(scene *x, int rank) {
  const shape *s = x->s;
  tables *t = &x->want;
  llep_lend(&x->rules, x->counts, rank, t->table, x->scratch);
  llep_table plan = llep_table_at(&x->rules, t->table);
  llep_assign(&x->rules, ids_of(x, rank), s->tokens, s->top_k, s->blocks, &plan, t->seen, t->routes, t->histogram);
  memset(t->own, 0, sizeof *t->own * (size_t)(s->ranks * s->blocks));
  for (int d = 0; d < s->ranks; ++d)
    for (int64_t c = llep_column_begin(&x->rules, d); c < llep_column_begin(&x->rules, d + 1); ++c)
      for (int64_t b = 0; b < s->blocks; ++b) t->own[d * s->blocks + b] += t->histogram[c * s->blocks + b];
}

static lev_status kernel_rank(scene *x, int rank) {
  const shape *s = x->s;
  tables *t = &x->got;
  llep_lend_args lend = {
      .rules = x->rules, .rank = rank, .counts = x->got_counts, .table = t->table, .scratch = x->scratch};
  LEV_TRY(LEV_LAUNCH(x->stream, &llep_lend_kernel, lend));
  llep_assign_args assign = {.rules = x->rules,
                             .ids = ids_of(x, rank),
                             .tokens = s->tokens,
                             .top_k = s->top_k,
                             .blocks = s->blocks,
                             .parts = s->parts,
                             .seen = t->seen,
                             .table = t->table,
                             .routes = t->routes,
                             .histogram = t->histogram,
                             .own = t->own,
                             .total = t->total};
  LEV_TRY(LEV_LAUNCH(x->stream, &llep_assign_kernel, assign));
  return lev_stream_sync(x->stream);
}

/* Up to the moves; what lies behind the segments in use is nobody's. */
static void check_plan(const scene *x, int rank) {
  llep_table want = llep_table_at(&x->rules, x->want.table), got = llep_table_at(&x->rules, x->got.table);
  int64_t experts = x->s->experts;
  T_EXPECT_EQ_I64(*want.moves, *got.moves);
  same(want.seg, got.seg, experts + 1, sizeof(int64_t), "segments", rank);
  if (t_failed()) return;
  same(want.start, got.start, want.seg[experts], sizeof(int64_t), "starts", rank);
  same(want.column, got.column, want.seg[experts], sizeof(int64_t), "columns", rank);
  same(want.base, got.base, experts, sizeof(int64_t), "bases", rank);
}

static void check_numbers(scene *x, int rank) {
  const shape *s = x->s;
  for (int64_t first = 0, last; first < s->blocks; first = last) { /* chunks of uneven length */
    last = lev_min_i64(s->blocks, first + 1 + first * 2);
    llep_number(&x->rules, s->tokens, s->top_k, s->blocks, first, last, x->want.histogram, x->want.next,
                x->want.routes);
    llep_number_args a = {x->rules, s->tokens,        s->top_k,    s->blocks,    first,
                          last,     x->got.histogram, x->got.next, x->got.routes};
    T_REQUIRE_OK(LEV_LAUNCH(x->stream, &llep_number_kernel, a));
  }
  T_REQUIRE_OK(lev_stream_sync(x->stream));
  same(x->want.routes, x->got.routes, s->tokens * s->top_k, sizeof(int32_t), "rows", rank);
}

static void check_shape(const shape *s) {
  scene x;
  if (scene_open(&x, s)) {
    check_counts(&x);
    for (int r = 0; r < s->ranks && !t_failed(); ++r) {
      plain_rank(&x, r);
      T_EXPECT_OK(kernel_rank(&x, r));
      check_plan(&x, r);
      int64_t columns = llep_columns(&x.rules);
      same(x.want.routes, x.got.routes, s->tokens * s->top_k, sizeof(int32_t), "route columns", r);
      same(x.want.histogram, x.got.histogram, columns * s->blocks, sizeof(int32_t), "histogram", r);
      same(x.want.own, x.got.own, s->ranks * s->blocks, sizeof(int64_t), "own rows", r);
      same(x.want.own, x.got.total, s->ranks * s->blocks, sizeof(int64_t), "summed rows", r);
      if (!s->bad_ids && !t_failed()) check_numbers(&x, r);
    }
  }
  if (t_failed())
    t_check(false, __FILE__, __LINE__, "%d ranks, E %lld, F %lld, k %lld, N %lld, B %lld", s->ranks,
            (long long)s->experts, (long long)s->slots, (long long)s->top_k, (long long)s->tokens,
            (long long)s->blocks);
  scene_close(&x);
}

T_TEST(llep_tables_of_kernels_equal_the_plain_functions) {
  static const shape shapes[] = {
      {1, 6, 0, 2, 3, 1, 50, 0, false},       {4, 10, 1, 3, 7, 2, 333, 2, false},     {3, 7, 2, 2, 1, 3, 500, 3, false},
      {5, 3, 3, 1, 4, 1, 41, 4, false},       {2, 1, 0, 1, 2, 1, 9, 0, false},        {4, 10, 1, 2, 5, 4, 700, 1, true},
      {8, 128, 8, 8, 64, 16, 4000, 2, false}, {6, 300, 25, 4, 33, 5, 2500, 3, false}, {3, 9, 3, 2, 6, 2, 0, 0, false},
  };
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes && !t_failed(); ++i) check_shape(&shapes[i]);
}
