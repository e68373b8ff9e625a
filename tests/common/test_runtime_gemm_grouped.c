/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped products against f64 loops: ragged groups by rows and by depth, gaps that hold NaN, empty groups, the shapes
 * the GPU's kernel takes and those it leaves to single products. */
#include <stdio.h>
#include <string.h>

#include "common/dims.h"
#include "common/gemm.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

#define MOST 160

typedef struct rig {
  lev_device *device;
  lev_stream *stream;
} rig;

static bool open_rig(rig *r, lev_backend backend) {
  *r = (rig){0};
  if (!T_EXPECT_OK(lev_device_open(&(lev_device_config){.backend = backend}, &r->device))) return false;
  if (!T_EXPECT_OK(lev_stream_create(r->device, "grouped", &r->stream))) return false;
  size_t bytes = lev_gemm_workspace_bytes(backend, LEV_BF16);
  void *block;
  if (!T_EXPECT_OK(lev_device_alloc(r->device, LEV_MEM_DEVICE, bytes, &block))) return false;
  lev_stream_set_workspace(r->stream, block, bytes);
  return true;
}

static void *need(size_t bytes) {
  void *p = t_alloc(bytes + 16);
  num_poison(p, bytes + 16);
  return p;
}

/* Groups in an array of `all` rows, some of which belong to none. */
typedef struct groups {
  int64_t n, all;
  int64_t first[MOST], rows[MOST];
} groups;

/* `gap` rows between groups; every other pair of neighbours changes places, so that first[] does not only grow. */
static groups lay_out(const int64_t *rows, int64_t n, int64_t gap) {
  groups g = {.n = n};
  for (int64_t i = 0; i < n; ++i) g.rows[i] = rows[i];
  for (int64_t i = 0; i < n; ++i) {
    int64_t at = i / 2 * 2 + (i + 1) % 2;
    if (at >= n) at = i;
    g.first[at] = g.all, g.all += g.rows[at] + gap;
  }
  return g;
}

/* One case: the operands of all groups, their copies in f64 and what is to come out. */
typedef struct problem {
  lev_gemm_grouped_args args;
  groups g;
  void *a, *common, *mine; /* rows: A, C, weights; depth: A, B, results */
  double *a64, *common64, *mine64;
  size_t common_bytes, mine_bytes;
  int64_t each_rows, each_ld; /* of a matrix of `mine` */
  void *each[MOST];
} problem;

/* Random rows where groups are, NaN elsewhere; padding of rows stays NaN too. */
static void fill_rows(const groups *g, lev_dtype t, void *data, double *data64, int64_t cols, int64_t ld,
                      uint32_t key) {
  size_t elem = lev_dtype_bytes(t);
  for (int64_t i = 0; i < g->n; ++i)
    for (int64_t r = g->first[i]; r < g->first[i] + g->rows[i]; ++r)
      num_random(t, (char *)data + (size_t)(r * ld) * elem, data64 + r * cols, cols, 1, key + (uint32_t)r);
}

static void make(problem *p, lev_gemm_args like, lev_ragged ragged, const groups *g, int64_t pad) {
  bool depth = ragged == LEV_RAGGED_DEPTH;
  *p = (problem){.args = {.gemm = like, .ragged = ragged, .groups = g->n}, .g = *g};
  lev_gemm_args *m = &p->args.gemm;
  size_t ab = lev_dtype_bytes(m->ab_type), ct = lev_dtype_bytes(m->c_type);
  int64_t a_cols = depth ? m->m : m->k;
  m->trans_a = depth, m->lda = a_cols + pad, m->ldc = m->n + pad;
  m->ldb = depth || !m->trans_b ? m->n + pad : m->k + pad;
  p->a = need((size_t)(g->all * m->lda) * ab), p->a64 = need((size_t)(g->all * a_cols) * 8);
  fill_rows(g, m->ab_type, p->a, p->a64, a_cols, m->lda, 1000);
  int64_t common_ld = depth ? m->ldb : m->ldc;
  p->common_bytes = (size_t)(g->all * common_ld) * (depth ? ab : ct);
  p->common = need(p->common_bytes), p->common64 = need((size_t)(g->all * m->n) * 8);
  if (depth || m->beta != 0)
    fill_rows(g, depth ? m->ab_type : m->c_type, p->common, p->common64, m->n, common_ld, 500000);
  p->each_rows = depth ? m->m : m->trans_b ? m->n : m->k, p->each_ld = depth ? m->ldc : m->ldb;
  int64_t cols = p->each_ld - pad;
  int64_t scalars = p->each_rows * p->each_ld, elem = (int64_t)(depth ? ct : ab);
  int64_t bytes = lev_ceil_div(scalars * elem, 16) * 16;
  p->mine_bytes = (size_t)(bytes * g->n), p->mine = need(p->mine_bytes), p->mine64 = need((size_t)(scalars * g->n) * 8);
  for (int64_t i = 0; i < g->n; ++i) {
    p->each[i] = (char *)p->mine + (g->n - 1 - i) * bytes;                 /* not in order */
    for (int64_t r = 0; (!depth || m->beta != 0) && r < p->each_rows; ++r) /* NaN behind the rows here too */
      num_random(depth ? m->c_type : m->ab_type, (char *)p->each[i] + r * p->each_ld * elem,
                 p->mine64 + i * scalars + r * p->each_ld, cols, 1, 1000000 + (uint32_t)(i * p->each_rows + r));
  }
  m->a = p->a;
  if (depth)
    m->b = p->common;
  else
    m->c = p->common;
  p->args.first = p->g.first, p->args.rows = p->g.rows, p->args.each = p->each;
}

static void drop(problem *p) {
  t_free(p->a), t_free(p->common), t_free(p->mine), t_free(p->a64), t_free(p->common64), t_free(p->mine64);
}

/* The oracle's results of group i, [rows or m, n]. */
static void naive(const problem *p, int64_t i, double *want) {
  const lev_gemm_args *m = &p->args.gemm;
  bool depth = p->args.ragged == LEV_RAGGED_DEPTH;
  int64_t first = p->g.first[i], rows = depth ? m->m : p->g.rows[i], k = depth ? p->g.rows[i] : m->k;
  const double *mine = p->mine64 + i * p->each_rows * p->each_ld;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < m->n; ++c) {
      double sum = 0, old = depth ? mine[r * m->ldc + c] : p->common64[(first + r) * m->n + c];
      for (int64_t x = 0; x < k; ++x)
        sum += depth ? p->a64[(first + x) * m->m + r] * p->common64[(first + x) * m->n + c]
                     : p->a64[(first + r) * m->k + x] * mine[m->trans_b ? c * m->ldb + x : x * m->ldb + c];
      want[r * m->n + c] = m->alpha * sum + (m->beta != 0 ? m->beta * old : 0);
    }
}

/* Group i's results without the padding of their rows. */
static void pack(const problem *p, int64_t i, char *to) {
  const lev_gemm_args *m = &p->args.gemm;
  bool depth = p->args.ragged == LEV_RAGGED_DEPTH;
  size_t elem = lev_dtype_bytes(m->c_type), ld = (size_t)m->ldc * elem, row = (size_t)m->n * elem;
  const char *from = depth ? p->each[i] : (char *)p->common + (size_t)p->g.first[i] * ld;
  for (int64_t r = 0; r < (depth ? m->m : p->g.rows[i]); ++r) memcpy(to + (size_t)r * row, from + (size_t)r * ld, row);
}

static void check_results(const problem *p, const char *what) {
  const lev_gemm_args *m = &p->args.gemm;
  bool depth = p->args.ragged == LEV_RAGGED_DEPTH;
  size_t elem = lev_dtype_bytes(m->c_type);
  double tolerance = m->ab_type == LEV_F64 ? 1e-13 : m->c_type == LEV_BF16 ? 4e-3 : 3e-6;
  for (int64_t i = 0; i < p->g.n && !t_failed(); ++i) {
    int64_t rows = depth ? m->m : p->g.rows[i], count = rows * m->n;
    char name[200], *packed = need((size_t)count * elem);
    double *want = need((size_t)count * 8);
    snprintf(name, sizeof name, "%s, group %lld of %lld rows", what, (long long)i, (long long)p->g.rows[i]);
    naive(p, i, want);
    pack(p, i, packed);
    /* Short rows of bf16 can be so alike that the check's own sabotage goes unseen. */
    if (rows > 0 && (depth ? p->g.rows[i] > 0 || m->beta != 0 : m->n > 1) && m->n >= 8)
      NUM_CHECK(m->c_type, packed, want, rows, m->n, tolerance, name);
    else
      T_EXPECT_MSG(num_rel_l2(m->c_type, packed, want, count) <= tolerance, "%s", name);
    t_free(packed), t_free(want);
  }
}

/* Whatever belongs to no group still holds its poison: gaps and the padding of rows. */
static void check_untouched(const problem *p, const char *what) {
  const lev_gemm_args *m = &p->args.gemm;
  if (p->args.ragged == LEV_RAGGED_DEPTH) return;
  size_t elem = lev_dtype_bytes(m->c_type);
  int64_t inside = 0, poison = num_poisoned(m->c_type, p->common, (int64_t)(p->common_bytes / elem));
  for (int64_t i = 0; i < p->g.n; ++i) inside += p->g.rows[i];
  T_EXPECT_MSG(poison == p->g.all * m->ldc - inside * m->n, "%s: %lld scalars untouched, %lld of %lld are no group's",
               what, (long long)poison, (long long)(p->g.all * m->ldc - inside * m->n), (long long)(p->g.all * m->ldc));
}

/* On cpu the bits are those of one product per group. */
static void check_bits(rig *r, problem *p, const void *before, const char *what) {
  bool depth = p->args.ragged == LEV_RAGGED_DEPTH;
  void *out = depth ? p->mine : p->common;
  size_t bytes = depth ? p->mine_bytes : p->common_bytes;
  void *got = need(bytes);
  memcpy(got, out, bytes);
  memcpy(out, before, bytes);
  if (t_backend() == LEV_BACKEND_CPU) {
    for (int64_t i = 0; i < p->g.n; ++i) {
      lev_gemm_args one = p->args.gemm;
      one.a = (char *)p->a + (size_t)(p->g.first[i] * one.lda) * lev_dtype_bytes(one.ab_type);
      char *common = (char *)p->common + (size_t)p->g.first[i] * p->common_bytes / (size_t)lev_max_i64(1, p->g.all);
      if (depth)
        one.k = p->g.rows[i], one.b = common, one.c = p->each[i];
      else
        one.m = p->g.rows[i], one.b = p->each[i], one.c = common;
      T_EXPECT_OK(lev_gemm(r->stream, &one));
    }
  } else {
    T_EXPECT_OK(lev_gemm_grouped(r->stream, &p->args));
  }
  T_EXPECT_OK(lev_stream_sync(r->stream));
  T_EXPECT_MSG(memcmp(got, out, bytes) == 0, "%s: other bits the second time", what);
  t_free(got);
}

static void check(rig *r, lev_gemm_args like, lev_ragged ragged, const groups *g, int64_t pad) {
  problem p;
  make(&p, like, ragged, g, pad);
  bool depth = ragged == LEV_RAGGED_DEPTH;
  size_t bytes = depth ? p.mine_bytes : p.common_bytes;
  void *before = need(bytes);
  memcpy(before, depth ? p.mine : p.common, bytes);
  char what[160];
  const lev_gemm_args *m = &p.args.gemm;
  snprintf(what, sizeof what, "%s %s%s %lldx%lldx%lld trans_b %d pad %lld alpha %g beta %g", depth ? "depth" : "rows",
           lev_dtype_name(m->ab_type), lev_dtype_name(m->c_type), (long long)m->m, (long long)m->n, (long long)m->k,
           m->trans_b, (long long)pad, m->alpha, m->beta);
  if (T_EXPECT_OK(lev_gemm_grouped(r->stream, &p.args)) && T_EXPECT_OK(lev_stream_sync(r->stream))) {
    check_results(&p, what);
    check_untouched(&p, what);
    check_bits(r, &p, before, what);
  }
  t_free(before);
  drop(&p);
}

static const lev_dtype types[][2] = {{LEV_F64, LEV_F64}, {LEV_F32, LEV_F32}, {LEV_BF16, LEV_BF16}, {LEV_BF16, LEV_F32}};

/* All three products of all types; gaps on and off, rows padded or not. */
static void check_all(rig *r, const groups *g, int64_t n, int64_t k, int64_t pad, int first_type, double beta) {
  for (int t = first_type; t < 4 && !t_failed(); ++t) {
    lev_gemm_args m = {.m = k, .n = n, .k = k, .ab_type = types[t][0], .c_type = types[t][1], .alpha = 1, .beta = beta};
    check(r, m, LEV_RAGGED_DEPTH, g, pad);
    check(r, m, LEV_RAGGED_ROWS, g, pad);
    m.trans_b = true;
    check(r, m, LEV_RAGGED_ROWS, g, pad);
  }
}

T_TEST(runtime_gemm_grouped_shapes) {
  static const int64_t rows[] = {5, 0, 1, 33, 64, 0, 17}, shapes[][2] = {{8, 8}, {24, 40}, {7, 5}, {72, 136}};
  rig r;
  if (!open_rig(&r, t_backend())) return;
  for (int s = 0; s < 4; ++s)
    for (int i = 0; i < 6 && !t_failed(); ++i) {
      static const int64_t pads[] = {0, 1, 16};
      groups g = lay_out(rows, 7, i < 3 ? 0 : 3);
      check_all(&r, &g, shapes[s][0], shapes[s][1], pads[i % 3], 0, i % 2);
    }
  lev_device_close(r.device);
}

/* More tiles than one in every direction, and ends inside them. By rows two blocks of the GPU's kernel share 256 x 256
 * (along M) or 128 x 512 (along N) of C, whichever needs fewer such tiles (pair_along_m of gemm_grouped.cu). */
T_TEST(runtime_gemm_grouped_tiles) {
  static const int64_t rows[] = {130, 0, 1, 257, 63}, halves[] = {203, 0, 100}, few[] = {70, 0, 1};
  rig r;
  if (!open_rig(&r, t_backend())) return;
  groups g = lay_out(rows, 5, 2);
  check_all(&r, &g, 264, 136, 8, 2, 0); /* 10 tiles along M, 7 along N */
  check_all(&r, &g, 136, 328, 0, 3, 1); /* 5 along M, 7 along N */
  /* Along M, 2 tiles (N: 3): 203 rows end in the second block's second half, 100 in the first block's. bf16 is stored
   * 64 columns at a time: the third time only 8 of them, or the fourth time 56. */
  g = lay_out(halves, 3, 2);
  check_all(&r, &g, 136, 264, 0, 2, 0); /* deeper than the ring of stages */
  check_all(&r, &g, 248, 40, 8, 2, 0);
  g = lay_out(few, 3, 2);
  check_all(&r, &g, 600, 40, 0, 2, 0); /* along N, 4 tiles (M: 6): every second block of the second columns is past n */
  lev_device_close(r.device);
}

/* More groups than one launch takes, most of them small, some empty. */
T_TEST(runtime_gemm_grouped_many_groups) {
  rig r;
  int64_t rows[MOST];
  for (int64_t i = 0; i < MOST; ++i) rows[i] = i * 7 % 11 * (i % 3);
  if (!open_rig(&r, t_backend())) return;
  groups g = lay_out(rows, MOST, 0);
  check_all(&r, &g, 40, 24, 0, 2, 0);
  lev_device_close(r.device);
}

/* alpha and beta that only single products know; groups that are all empty. */
T_TEST(runtime_gemm_grouped_scalars) {
  static const int64_t some[] = {9, 0, 3}, none[] = {0, 0};
  rig r;
  if (!open_rig(&r, t_backend())) return;
  groups g = lay_out(some, 3, 1), empty = lay_out(none, 2, 1);
  for (int t = 0; t < 4; ++t) {
    lev_gemm_args m = {
        .m = 16, .n = 8, .k = 16, .ab_type = types[t][0], .c_type = types[t][1], .alpha = -0.5, .beta = 2};
    check(&r, m, LEV_RAGGED_ROWS, &g, 0);
    check(&r, m, LEV_RAGGED_DEPTH, &g, 0);
    m.alpha = 1, m.beta = 0;
    check(&r, m, LEV_RAGGED_ROWS, &empty, 0);
    check(&r, m, LEV_RAGGED_DEPTH, &empty, 0);
  }
  lev_gemm_grouped_args no = {.gemm = {.n = 8, .k = 8, .ab_type = LEV_BF16, .c_type = LEV_BF16, .alpha = 1}};
  T_EXPECT_OK(lev_gemm_grouped(r.stream, &no));
  lev_device_close(r.device);
}

T_TEST(runtime_gemm_grouped_errors) {
  rig r;
  if (!open_rig(&r, LEV_BACKEND_CPU)) return;
  static float x[64];
  int64_t first[2] = {0, 4}, rows[2] = {4, 4};
  void *each[2] = {x, x + 4};
  lev_gemm_args m = {.m = 2,
                     .n = 2,
                     .k = 2,
                     .a = x,
                     .b = x,
                     .c = x,
                     .lda = 2,
                     .ldb = 2,
                     .ldc = 2,
                     .ab_type = LEV_F32,
                     .c_type = LEV_F32,
                     .alpha = 1};
  lev_gemm_grouped_args good = {m, LEV_RAGGED_ROWS, 2, first, rows, each}, a;
#define BAD(change) (a = good, change, lev_gemm_grouped(r.stream, &a))
  T_EXPECT_STATUS(BAD(a.groups = -1), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.first = NULL), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.rows = NULL), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.each = NULL), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.gemm.trans_a = true), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.ragged = LEV_RAGGED_DEPTH), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD((a.ragged = LEV_RAGGED_DEPTH, a.gemm.trans_a = a.gemm.trans_b = true)), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.gemm.lda = 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.gemm.a = NULL), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.gemm.c = NULL), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.gemm.c_type = LEV_F64), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(a.gemm.add = x), LEV_ERR_ARG);
#undef BAD
  each[1] = NULL;
  T_EXPECT_STATUS(lev_gemm_grouped(r.stream, &good), LEV_ERR_ARG);
  each[1] = x + 4, rows[1] = -1;
  T_EXPECT_STATUS(lev_gemm_grouped(r.stream, &good), LEV_ERR_ARG);
  T_EXPECT_OK(lev_stream_sync(r.stream));
  lev_device_close(r.device);
}
