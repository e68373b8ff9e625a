/* SPDX-License-Identifier: Apache-2.0 */
/* The row-wise operations in every storage type, over shapes that take other paths on a GPU (packs and single elements,
 * one row per warp or block, unaligned arrays, more rows than blocks), against the CPU kernels in f64, which
 * test_ops.c holds against formulas and differences. */
#include <math.h>
#include <string.h>

#include "common/dims.h"
#include "harness/model/ops.h"
#include "tests/model/ops_rig.h"
#include "tests/num.h"
#include "tests/t.h"

static const lev_dtype types[3] = {LEV_F64, LEV_F32, LEV_BF16};
static const double tight[3] = {1e-12, 2e-6, 4e-3}; /* of one rounding of the result */
static const double loose[3] = {1e-11, 2e-5, 8e-3}; /* of gradients; in bf16 the CPU rounds between turn and norm */

/* n random values of type t, `skip` elements past an aligned address; want: the same in f64. */
static void *values(lev_dtype t, int64_t n, int64_t skip, double scale, uint32_t stream, double **want) {
  size_t size = lev_dtype_bytes(t);
  unsigned char *at = (unsigned char *)ops_room((size_t)(n + skip) * size) + (size_t)skip * size;
  double *copy = ops_room((size_t)n * sizeof(double));
  num_random(t, at, copy, n, scale, stream);
  if (want) *want = copy;
  return at;
}
static void *poisoned(lev_dtype t, int64_t n, int64_t skip) {
  size_t size = lev_dtype_bytes(t);
  return (unsigned char *)ops_room((size_t)(n + skip) * size) + (size_t)skip * size;
}
static double *zeros(int64_t n) {
  size_t bytes = (size_t)n * sizeof(double);
  return memset(ops_room(bytes), 0, bytes);
}

/* ---- RMS norm ---- */

typedef struct norm_shape {
  int64_t rows, cols, skip;
} norm_shape;

static const norm_shape norm_shapes[] = {{1, 3, 0},    {2, 8, 0},     {5, 64, 0},   {1200, 64, 0}, {4, 64, 1},
                                         {9, 100, 0},  {700, 256, 0}, {6, 520, 0},  {3, 2048, 0},  {2, 2048, 3},
                                         {5, 4096, 0}, {3, 8192, 0},  {2, 8200, 0}, {3, 1027, 0},  {0, 16, 0}};

static void norm_case(int kind, const norm_shape *s, bool accumulate) {
  lev_dtype t = types[kind], a = lev_dtype_arith(t);
  int64_t n = s->rows * s->cols;
  double *x64, *w64, *dy64, *dx64, *dw64;
  ops_begin();
  void *x = values(t, n, s->skip, 2, 1, &x64), *w = values(t, s->cols, s->skip, 1, 2, &w64);
  void *dy = values(t, n, s->skip, 1, 3, &dy64), *dx = values(t, n, s->skip, 1, 4, &dx64);
  void *dw = values(a, s->cols, 0, 1, 5, &dw64), *y = poisoned(t, n, s->skip);
  double *y64 = zeros(n);
  double eps = s->rows % 2 ? 0 : 1e-5; /* 0: what a kernel computes beyond the rows must not matter */
  lev_rmsnorm_args f = {t, s->rows, s->cols, eps, x, w, y}, f64 = {LEV_F64, s->rows, s->cols, eps, x64, w64, y64};
  OPS_RUN(lev_rmsnorm_kernel, f);
  lev_rmsnorm_kernel.cpu(&f64);
  lev_rmsnorm_backward_args b = {t, s->rows, s->cols, eps, x, w, dy, dx, dw, accumulate, NULL, 0};
  lev_rmsnorm_backward_args b64 = {LEV_F64, s->rows, s->cols, eps, x64, w64, dy64, dx64, dw64, accumulate, NULL, 0};
  b.scratch = ops_scratch(&b.scratch_bytes);
  OPS_RUN(lev_rmsnorm_backward_kernel, b);
  lev_rmsnorm_backward_kernel.cpu(&b64);
  NUM_CHECK(t, y, y64, s->rows, s->cols, tight[kind], "rmsnorm");
  NUM_CHECK(t, dx, dx64, s->rows, s->cols, loose[kind], "rmsnorm dx");
  NUM_CHECK(a, dw, dw64, s->cols, 1, loose[kind], "rmsnorm dw");
}

T_TEST(rmsnorm_shapes_and_types) {
  for (int kind = 0; kind < 3; ++kind)
    for (size_t i = 0; i < sizeof norm_shapes / sizeof *norm_shapes; ++i)
      for (int accumulate = 0; accumulate < 2; ++accumulate) {
        norm_case(kind, &norm_shapes[i], accumulate);
        if (t_failed()) {
          T_EXPECT_MSG(false, "%s, %lld x %lld", lev_dtype_name(types[kind]), (long long)norm_shapes[i].rows,
                       (long long)norm_shapes[i].cols);
          return;
        }
      }
}

/* ---- queries, keys, values ---- */

typedef struct qk_shape {
  int64_t rows, heads, dim, skip;
} qk_shape;

static const qk_shape qk_shapes[] = {{3, 1, 16, 0},   {5, 4, 64, 0},   {9, 16, 128, 0}, {9, 3, 96, 0},
                                     {6, 40, 128, 0}, {4, 2, 20, 0},   {5, 33, 64, 0},  {2, 1, 600, 0},
                                     {3, 4, 64, 1},   {100, 2, 32, 0}, {2, 80, 128, 0}, {9000, 1, 32, 0}};

static void qk_case(int kind, const qk_shape *s, lev_qk_norm norm, double clip, bool turned) {
  lev_dtype t = types[kind], a = lev_dtype_arith(t);
  int64_t cols = s->heads * s->dim, n = s->rows * cols, n_w = norm == LEV_QK_NORM_FULL ? cols : s->dim;
  double *x64, *w64, *dy64, *dw64;
  ops_begin();
  void *x = values(t, n, s->skip, 2, 1, &x64), *w = values(t, n_w, s->skip, 1, 2, &w64);
  void *dy = values(t, n, s->skip, 1, 3, &dy64), *dw = values(a, n_w, 0, 1, 4, &dw64), *y = poisoned(t, n, s->skip);
  OPS_ROOM(int32_t, position, s->rows);
  for (int64_t r = 0; r < s->rows; ++r) position[r] = (int32_t)(r % 3 == 0 ? r : 1000003 + 77 * r);
  lev_qk_args f = {.dtype = t,
                   .rows = s->rows,
                   .heads = s->heads,
                   .head_dim = s->dim,
                   .norm = norm,
                   .eps = s->rows % 2 ? 0 : 1e-6,
                   .clip = clip,
                   .rope = {.theta = 1e6},
                   .position = turned ? position : NULL,
                   .x = x,
                   .w = norm ? w : NULL,
                   .y = y,
                   .dy = dy,
                   .dx = dy, /* in place, as the trainer does */
                   .dw = norm ? dw : NULL};
  lev_qk_args f64 = f;
  f64.dtype = LEV_F64, f64.x = x64, f64.w = norm ? w64 : NULL, f64.y = zeros(n), f64.dy = f64.dx = dy64;
  f64.dw = norm ? dw64 : NULL;
  f.scratch = ops_scratch(&f.scratch_bytes);
  OPS_RUN(lev_qk_kernel, f);
  lev_qk_kernel.cpu(&f64);
  NUM_CHECK(t, y, f64.y, s->rows, cols, tight[kind] * (kind == 2 ? 1.5 : 1), "qk"); /* the CPU rounds before it turns */
  OPS_RUN(lev_qk_backward_kernel, f);
  lev_qk_backward_kernel.cpu(&f64);
  NUM_CHECK(t, dy, dy64, s->rows, cols, loose[kind], "qk dx");
  if (norm) NUM_CHECK(a, dw, dw64, n_w, 1, loose[kind], "qk dw");
}

T_TEST(qk_shapes_and_types) {
  for (int kind = 0; kind < 3; ++kind)
    for (size_t i = 0; i < sizeof qk_shapes / sizeof *qk_shapes; ++i)
      for (int norm = 0; norm < 3; ++norm)
        for (int form = 0; form < 3; ++form) {
          qk_case(kind, &qk_shapes[i], (lev_qk_norm)norm, form == 0 ? 0 : 0.7, form < 2);
          if (t_failed()) {
            T_EXPECT_MSG(false, "%s, shape %d, norm %d, form %d", lev_dtype_name(types[kind]), (int)i, norm, form);
            return;
          }
        }
}

/* ---- SwiGLU ---- */

T_TEST(swiglu_sizes_and_types) {
  static const int64_t counts[] = {0, 1, 7, 8, 1000, 100003};
  for (int kind = 0; kind < 3; ++kind)
    for (size_t i = 0; i < 2 * sizeof counts / sizeof *counts; ++i) {
      lev_dtype t = types[kind];
      int64_t n = counts[i / 2], skip = i % 2;
      double *gate64, *up64, *d64;
      ops_begin();
      void *gate = values(t, n, skip, 4, 1, &gate64), *up = values(t, n, 0, 1, 2, &up64);
      void *d = values(t, n, 0, 1, 3, &d64), *out = poisoned(t, n, 0);
      double *out64 = zeros(n);
      lev_swiglu_args f = {t, n, gate, up, out}, f64 = {LEV_F64, n, gate64, up64, out64};
      OPS_RUN(lev_swiglu_kernel, f);
      lev_swiglu_kernel.cpu(&f64);
      NUM_CHECK(t, out, out64, n, 1, tight[kind], "swiglu");
      lev_swiglu_backward_args b = {t, n, gate, up, d}, b64 = {LEV_F64, n, gate64, up64, d64};
      OPS_RUN(lev_swiglu_backward_kernel, b);
      lev_swiglu_backward_kernel.cpu(&b64);
      NUM_CHECK(t, gate, gate64, n, 1, tight[kind], "d gate");
      NUM_CHECK(t, up, up64, n, 1, tight[kind], "d up");
      NUM_CHECK(t, d, d64, n, 1, tight[kind], "rebuilt");
    }
}

/* ---- router ---- */

typedef struct router_shape {
  int64_t rows, experts, top_k, groups, top_groups;
} router_shape;

static const router_shape router_shapes[] = {
    {1, 1, 1, 1, 1},   {7, 8, 2, 1, 1},    {1300, 64, 8, 1, 1}, {33, 100, 3, 4, 2},  {40, 128, 8, 1, 1},
    {9, 257, 6, 1, 1}, {20, 256, 8, 8, 4}, {2, 4096, 4, 1, 1},  {2, 4096, 4, 64, 9}, {5, 40, 40, 1, 1}};

static void router_case(int kind, const router_shape *s, int score, bool biased) {
  lev_dtype t = types[kind], a = lev_dtype_arith(t);
  int64_t n = s->rows * s->experts, m = s->rows * s->top_k, e = s->experts;
  double *logits64, *bias64, *dw64;
  ops_begin();
  void *logits = values(a, n, 0, 3, 1, &logits64), *bias = values(a, e, 0, 0.3, 2, &bias64);
  void *dw = values(a, m, 0, 1, 3, &dw64), *weights = poisoned(a, m, 0), *dlogits = poisoned(t, n, 0);
  double *weights64 = zeros(m), *dlogits64 = zeros(n), *sums = zeros(1 + 2 * e), *sums64 = zeros(1 + 2 * e);
  int64_t *counts = (int64_t *)zeros(e), *counts64 = (int64_t *)zeros(e);
  OPS_ROOM(int32_t, ids, m);
  OPS_ROOM(int32_t, ids64, m);
  lev_router_args f = {.dtype = t,
                       .rows = s->rows,
                       .experts = e,
                       .top_k = s->top_k,
                       .rule = {(lev_score)score, biased, s->groups, s->top_groups, 1.5},
                       .select = true,
                       .logits = logits,
                       .bias = biased ? bias : NULL,
                       .ids = ids,
                       .weights = weights,
                       .counts = counts,
                       .sums = sums};
  lev_router_args f64 = f;
  f64.dtype = LEV_F64, f64.logits = logits64, f64.bias = biased ? bias64 : NULL, f64.ids = ids64;
  f64.weights = weights64, f64.counts = counts64, f64.sums = sums64;
  f.scratch = ops_scratch(&f.scratch_bytes);
  OPS_RUN(lev_router_kernel, f);
  lev_router_kernel.cpu(&f64);
  T_EXPECT(memcmp(ids, ids64, sizeof *ids * (size_t)m) == 0);
  T_EXPECT(memcmp(counts, counts64, sizeof *counts * (size_t)e) == 0);
  NUM_CHECK(a, weights, weights64, s->rows, s->top_k, kind ? 2e-6 : 1e-12, "weights");
  NUM_CHECK(LEV_F64, sums, sums64, 1 + 2 * e, 1, kind ? 2e-6 : 1e-12, "sums");
  f.select = false, f.counts = NULL, f.sums = NULL; /* rebuilds the weights of given ids */
  f.weights = poisoned(a, m, 0);
  OPS_RUN(lev_router_kernel, f);
  T_EXPECT(memcmp(f.weights, weights, (size_t)m * lev_dtype_bytes(a)) == 0);
  lev_router_backward_args b = {t,   s->rows, e, s->top_k, f.rule, logits, ids, dw, counts, 0.3 / (double)s->rows,
                                0.2, dlogits};
  lev_router_backward_args b64 = b;
  b64.dtype = LEV_F64, b64.logits = logits64, b64.ids = ids64, b64.dweights = dw64, b64.dlogits = dlogits64;
  OPS_RUN(lev_router_backward_kernel, b);
  lev_router_backward_kernel.cpu(&b64);
  NUM_CHECK(t, dlogits, dlogits64, s->rows, e, loose[kind], "d logits");
}

T_TEST(router_shapes_and_types) {
  for (int kind = 0; kind < 3; ++kind)
    for (size_t i = 0; i < sizeof router_shapes / sizeof *router_shapes; ++i)
      for (int form = 0; form < 4; ++form) {
        router_case(kind, &router_shapes[i], form / 2, form % 2);
        if (t_failed()) {
          T_EXPECT_MSG(false, "%s, shape %d, form %d", lev_dtype_name(types[kind]), (int)i, form);
          return;
        }
      }
}

/* Sums over tokens have one order: two runs give the same bits. */
T_TEST(ops_sums_repeat_their_bits) {
  enum { N = 3000, WIDE = 192 };
  double *first = NULL;
  ops_begin();
  void *x = values(LEV_F32, N * WIDE, 0, 2, 1, NULL), *w = values(LEV_F32, WIDE, 0, 1, 2, NULL);
  void *dy = values(LEV_F32, N * WIDE, 0, 1, 3, NULL), *dx = poisoned(LEV_F32, N * WIDE, 0);
  for (int run = 0; run < 3; ++run) {
    double *dw = zeros(WIDE);
    lev_rmsnorm_backward_args b = {LEV_F32, N, WIDE, 1e-5, x, w, dy, dx, dw, false, NULL, 0};
    b.scratch = ops_scratch(&b.scratch_bytes);
    OPS_RUN(lev_rmsnorm_backward_kernel, b);
    if (run == 0) first = dw;
    T_EXPECT(memcmp(dw, first, WIDE * sizeof(float)) == 0);
  }
}

T_TEST(qk_repeats_its_bits) {
  enum { N = 3000, HEADS = 3, DIM = 64, WIDE = HEADS * DIM };
  ops_begin();
  void *x = values(LEV_F32, N * WIDE, 0, 2, 1, NULL), *w = values(LEV_F32, WIDE, 0, 1, 2, NULL);
  void *dy = values(LEV_F32, N * WIDE, 0, 1, 3, NULL);
  OPS_ROOM(int32_t, position, N);
  for (int r = 0; r < N; ++r) position[r] = 1000003 + r;
  for (int norm = LEV_QK_NORM_FULL; norm <= LEV_QK_NORM_HEAD; ++norm) {
    void *first_dx = NULL, *first_dw = NULL;
    for (int run = 0; run < 3; ++run) {
      void *dx = poisoned(LEV_F32, N * WIDE, 0), *dw = zeros(WIDE);
      lev_qk_args b = {.dtype = LEV_F32, .rows = N, .heads = HEADS, .head_dim = DIM, .norm = (lev_qk_norm)norm};
      b.eps = 1e-5, b.rope.theta = 1e4, b.position = position, b.x = x, b.w = w, b.dy = dy, b.dx = dx, b.dw = dw;
      b.scratch = ops_scratch(&b.scratch_bytes);
      OPS_RUN(lev_qk_backward_kernel, b);
      if (run == 0) first_dx = dx, first_dw = dw;
      T_EXPECT(memcmp(dx, first_dx, N * WIDE * sizeof(float)) == 0);
      T_EXPECT(memcmp(dw, first_dw, (norm == LEV_QK_NORM_FULL ? WIDE : DIM) * sizeof(float)) == 0);
    }
  }
}
