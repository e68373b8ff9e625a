/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products against f64 loops: transposes, dtypes, leading dimensions, alpha, beta, empty sizes, threads. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/dims.h"
#include "common/gemm.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

typedef struct rig {
  lev_device *device;
  lev_stream *stream;
} rig;

static bool open_rig(rig *g, lev_backend backend, bool workspace) {
  *g = (rig){0};
  if (!T_EXPECT_OK(lev_device_open(&(lev_device_config){.backend = backend}, &g->device))) return false;
  if (!T_EXPECT_OK(lev_stream_create(g->device, "gemm", &g->stream))) return false;
  size_t bytes = lev_gemm_workspace_bytes(backend, LEV_BF16);
  void *block;
  if (workspace) {
    if (!T_EXPECT_OK(lev_device_alloc(g->device, LEV_MEM_DEVICE, bytes, &block))) return false;
    lev_stream_set_workspace(g->stream, block, bytes);
    if (backend == LEV_BACKEND_CPU) num_poison(block, bytes);
  }
  return true;
}

typedef struct operands {
  void *a, *b, *c, *c_before;
  double *a64, *b64, *c64, *want;
  size_t c_bytes;
} operands;

static void *need(size_t bytes) {
  void *p = t_alloc(bytes);
  num_poison(p, bytes);
  return p;
}

static int64_t stored_rows(const lev_gemm_args *g, bool is_b) {
  return is_b ? (g->trans_b ? g->n : g->k) : g->trans_a ? g->k : g->m;
}

static void make_operands(const lev_gemm_args *g, operands *o) {
  int64_t na = stored_rows(g, false) * g->lda, nb = stored_rows(g, true) * g->ldb, nc = g->m * g->ldc;
  o->a = need((size_t)na * lev_dtype_bytes(g->ab_type)), o->a64 = need((size_t)na * sizeof(double));
  o->b = need((size_t)nb * lev_dtype_bytes(g->ab_type)), o->b64 = need((size_t)nb * sizeof(double));
  o->c_bytes = (size_t)nc * lev_dtype_bytes(g->c_type);
  o->c = need(o->c_bytes), o->c_before = need(o->c_bytes);
  o->c64 = need((size_t)nc * sizeof(double)), o->want = need((size_t)(g->m * g->n) * sizeof(double));
  num_random(g->ab_type, o->a, o->a64, na, 1, 1);
  num_random(g->ab_type, o->b, o->b64, nb, 1, 2);
  if (g->beta != 0) num_random(g->c_type, o->c, o->c64, nc, 1, 3);
  memcpy(o->c_before, o->c, o->c_bytes);
}

static void free_operands(operands *o) {
  t_free(o->a), t_free(o->b), t_free(o->c), t_free(o->c_before);
  t_free(o->a64), t_free(o->b64), t_free(o->c64), t_free(o->want);
}

static void naive(const lev_gemm_args *g, const operands *o) {
  for (int64_t i = 0; i < g->m; ++i)
    for (int64_t j = 0; j < g->n; ++j) {
      double sum = 0;
      for (int64_t x = 0; x < g->k; ++x)
        sum +=
            o->a64[g->trans_a ? x * g->lda + i : i * g->lda + x] * o->b64[g->trans_b ? j * g->ldb + x : x * g->ldb + j];
      o->want[i * g->n + j] = g->alpha * sum + (g->beta != 0 ? g->beta * o->c64[i * g->ldc + j] : 0);
    }
}

/* Runs `g` (sizes, types, scalars given) on fresh operands with rows `pad` longer than needed; compares all of C.
 * apart: what beta multiplies lies elsewhere, and C holds rubbish. */
static void check_one(rig *r, lev_gemm_args g, int64_t pad, bool host, bool apart) {
  operands o;
  void *add = NULL;
  g.lda = (g.trans_a ? g.m : g.k) + pad, g.ldb = (g.trans_b ? g.k : g.n) + pad, g.ldc = g.n + pad;
  make_operands(&g, &o);
  g.a = o.a, g.b = o.b, g.c = o.c;
  if (apart) {
    g.add = add = need(o.c_bytes);
    memcpy(add, o.c, o.c_bytes);
    num_poison(o.c, o.c_bytes), num_poison(o.c_before, o.c_bytes);
  }
  naive(&g, &o);
  if (host) {
    lev_gemm_host(&g);
  } else {
    T_EXPECT_OK(lev_gemm(r->stream, &g));
    T_EXPECT_OK(lev_stream_sync(r->stream));
  }
  size_t elem = lev_dtype_bytes(g.c_type);
  char *packed = need((size_t)(g.m * g.n) * elem);
  for (int64_t i = 0; i < g.m; ++i) {
    memcpy(packed + (size_t)(i * g.n) * elem, (char *)o.c + (size_t)(i * g.ldc) * elem, (size_t)g.n * elem);
    /* What lies between the rows is not C's. */
    T_EXPECT(memcmp((char *)o.c + (size_t)(i * g.ldc + g.n) * elem,
                    (char *)o.c_before + (size_t)(i * g.ldc + g.n) * elem, (size_t)pad * elem) == 0);
  }
  char what[160];
  snprintf(what, sizeof what, "%s%s %lldx%lldx%lld t%d%d pad %lld alpha %g beta %g", lev_dtype_name(g.ab_type),
           lev_dtype_name(g.c_type), (long long)g.m, (long long)g.n, (long long)g.k, g.trans_a, g.trans_b,
           (long long)pad, g.alpha, g.beta);
  double tolerance = g.ab_type == LEV_F64 ? 1e-13 : g.c_type == LEV_BF16 ? 4e-3 : 2e-6;
  /* A bf16 column can hold two rows that differ by less than the tolerance, which the sabotage cases cannot tell apart.
   */
  if (g.n == 1 && g.c_type == LEV_BF16)
    T_EXPECT_MSG(num_rel_l2(g.c_type, packed, o.want, g.m) <= tolerance, "%s", what);
  else if (g.m > 0 && g.n > 0)
    NUM_CHECK(g.c_type, packed, o.want, g.m, g.n, tolerance, what);
  t_free(packed);
  t_free(add);
  free_operands(&o);
}

static void check(rig *r, lev_gemm_args g, int64_t pad, bool host) {
  check_one(r, g, pad, host, false);
  if (!host) check_one(r, g, pad, host, true);
}

static const lev_dtype types[][2] = {{LEV_F64, LEV_F64}, {LEV_F32, LEV_F32}, {LEV_BF16, LEV_BF16}, {LEV_BF16, LEV_F32}};

T_TEST(runtime_gemm_shapes) {
  static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {1, 33, 17}, {33, 1, 17}, {16, 16, 1}, {65, 47, 130}};
  static const double scalars[][2] = {{1, 0}, {1, 1}, {-0.5, 2}, {0.25, 0}};
  rig r;
  if (!open_rig(&r, t_backend(), true)) return;
  for (int t = 0; t < 4; ++t)
    for (int s = 0; s < 6; ++s)
      for (int trans = 0; trans < 4; ++trans)
        for (int a = 0; a < 4; ++a)
          for (int64_t pad = 0; pad < 4; pad += 3) {
            lev_gemm_args g = {.m = shapes[s][0],
                               .n = shapes[s][1],
                               .k = shapes[s][2],
                               .trans_a = trans & 1,
                               .trans_b = trans & 2,
                               .ab_type = types[t][0],
                               .c_type = types[t][1],
                               .alpha = scalars[a][0],
                               .beta = scalars[a][1]};
            check(&r, g, pad, false);
            if (g.ab_type != LEV_BF16 && t_backend() == LEV_BACKEND_CPU) check(&r, g, pad, true);
            if (t_failed()) goto done;
          }
done:
  lev_device_close(r.device);
}

/* Several blocks in each direction of the bf16 path. */
T_TEST(runtime_gemm_bf16_blocks) {
  rig r;
  if (!open_rig(&r, t_backend(), true)) return;
  for (int trans = 0; trans < 4; ++trans) {
    lev_gemm_args g = {.m = 514,
                       .n = 30,
                       .k = 40,
                       .trans_a = trans & 1,
                       .trans_b = trans & 2,
                       .ab_type = LEV_BF16,
                       .c_type = LEV_F32,
                       .alpha = 1,
                       .beta = 1};
    check(&r, g, 1, false);
    g.m = 20, g.n = 513, g.beta = 0;
    check(&r, g, 0, false);
    g.n = 17, g.k = 1030, g.c_type = LEV_BF16;
    check(&r, g, 2, false);
  }
  lev_device_close(r.device);
}

/* Sums stay f32 across the blocks of k and are rounded once: 1 + 2000 * 2^-9 would never leave 1 in bf16 steps. */
T_TEST(runtime_gemm_bf16_rounds_once) {
  enum { K = 2001 };
  rig r;
  if (!open_rig(&r, t_backend(), true)) return;
  lev_bf16 *a = need(K * sizeof *a), *b = need(K * sizeof *b), *c = need(sizeof *c);
  for (int i = 0; i < K; ++i) a[i] = lev_bf16_from_f32(i ? 0x1p-9f : 1), b[i] = lev_bf16_from_f32(1);
  lev_gemm_args g = {.m = 1,
                     .n = 1,
                     .k = K,
                     .a = a,
                     .b = b,
                     .c = c,
                     .lda = K,
                     .ldb = 1,
                     .ldc = 1,
                     .ab_type = LEV_BF16,
                     .c_type = LEV_BF16,
                     .alpha = 1};
  T_EXPECT_OK(lev_gemm(r.stream, &g));
  T_EXPECT_OK(lev_stream_sync(r.stream));
  T_EXPECT_EQ_I64(*c, lev_bf16_from_f32(1 + 2000 * 0x1p-9f));
  t_free(a), t_free(b), t_free(c);
  lev_device_close(r.device);
}

/* Empty sizes, alpha = 0, NaN in an overwritten C. */
T_TEST(runtime_gemm_edges) {
  rig r;
  if (!open_rig(&r, t_backend(), true)) return;
  for (int t = 0; t < 4; ++t) {
    char *a = need(64), *c = need(64);
    memset(a, 0, 64);
    lev_dtype ct = types[t][1];
    lev_gemm_args g = {.m = 2,
                       .n = 2,
                       .a = a,
                       .b = a,
                       .c = c,
                       .lda = 2,
                       .ldb = 2,
                       .ldc = 2,
                       .ab_type = types[t][0],
                       .c_type = ct,
                       .alpha = 1};
    for (int pass = 0; pass < 2; ++pass) { /* k = 0, then alpha = 0 */
      g.k = pass * 2, g.alpha = pass ? 0 : 1;
      num_poison(c, 64);
      g.beta = 0;
      T_EXPECT_OK(lev_gemm(r.stream, &g));
      T_EXPECT_OK(lev_stream_sync(r.stream));
      for (int i = 0; i < 4; ++i) T_EXPECT(lev_dtype_load(ct, c, i) == 0);
      for (int i = 0; i < 4; ++i) lev_dtype_store(ct, c, i, i + 1);
      g.beta = 0.5;
      T_EXPECT_OK(lev_gemm(r.stream, &g));
      T_EXPECT_OK(lev_stream_sync(r.stream));
      for (int i = 0; i < 4; ++i) T_EXPECT(lev_dtype_load(ct, c, i) == 0.5 * (i + 1));
    }
    g.m = 0, g.a = g.b = NULL, g.c = NULL;
    T_EXPECT_OK(lev_gemm(r.stream, &g));
    g.m = 2, g.n = 0;
    T_EXPECT_OK(lev_gemm(r.stream, &g));
    T_EXPECT_OK(lev_stream_sync(r.stream));
    t_free(a), t_free(c);
  }
  lev_device_close(r.device);
}

T_TEST(runtime_gemm_errors) {
  rig r, dry;
  if (!open_rig(&r, LEV_BACKEND_CPU, false) || !open_rig(&dry, LEV_BACKEND_DRY, true)) return;
  char x[64] = {0};
  lev_gemm_args good = {.m = 2,
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
  lev_gemm_args g;
#define BAD(change) (g = good, change, lev_gemm(r.stream, &g))
  T_EXPECT_STATUS(BAD(g.lda = 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.ldb = 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.ldc = 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.m = -1), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.k = (int64_t)INT_MAX + 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.add = g.c), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.ldc = (int64_t)INT_MAX + 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.a = NULL), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.c = NULL), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.c_type = LEV_F64), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.ab_type = LEV_I32), LEV_ERR_ARG);
  T_EXPECT_STATUS(BAD(g.ab_type = LEV_BF16), LEV_ERR_CAPACITY); /* cuda can do without */
  T_EXPECT(strstr(lev_detail(), "workspace") != NULL);
#undef BAD
  size_t bytes = lev_gemm_workspace_bytes(LEV_BACKEND_CPU, LEV_BF16);
  T_EXPECT_EQ_I64(lev_gemm_workspace_bytes(LEV_BACKEND_DRY, LEV_BF16), bytes);
  T_EXPECT_EQ_I64(lev_gemm_workspace_bytes(LEV_BACKEND_CPU, LEV_F64), 0);
  /* Nothing is touched on dry; the workspace rule is the same. */
  g = good, g.ab_type = LEV_BF16, g.c = (void *)(uintptr_t)4096;
  T_EXPECT_OK(lev_gemm(dry.stream, &g));
  lev_stream_set_workspace(dry.stream, (void *)(uintptr_t)4096, bytes - 1);
  T_EXPECT_STATUS(lev_gemm(dry.stream, &g), LEV_ERR_CAPACITY);
  lev_device_close(r.device);
  lev_device_close(dry.device);
}

/* ---- threads ---- */

#define THREADS 4
#define REPEATS 20
typedef struct shared {
  const void *a, *b;
  char *c[THREADS][REPEATS];
  lev_gemm_args args;
} shared;

static void thread_main(int rank, void *p) {
  shared *s = p;
  rig r;
  if (!open_rig(&r, t_backend(), true)) return;
  for (int i = 0; i < REPEATS; ++i) {
    lev_gemm_args g = s->args;
    g.c = s->c[rank][i];
    T_EXPECT_OK(lev_gemm(r.stream, &g));
  }
  T_EXPECT_OK(lev_stream_sync(r.stream));
  lev_device_close(r.device);
}

T_TEST(runtime_gemm_threads_agree_bit_for_bit) {
  for (int t = 0; t < 4; ++t) {
    enum { M = 61, N = 83, K = 97 };
    size_t elem = lev_dtype_bytes(types[t][0]), c_bytes = M * N * lev_dtype_bytes(types[t][1]);
    void *a = need(M * K * elem), *b = need(K * N * elem);
    num_random(types[t][0], a, NULL, M * K, 1, 1);
    num_random(types[t][0], b, NULL, K * N, 1, 2);
    shared s = {.args = {.m = M,
                         .n = N,
                         .k = K,
                         .a = a,
                         .b = b,
                         .lda = K,
                         .ldb = N,
                         .ldc = N,
                         .ab_type = types[t][0],
                         .c_type = types[t][1],
                         .alpha = 1}};
    for (int i = 0; i < THREADS; ++i)
      for (int j = 0; j < REPEATS; ++j) s.c[i][j] = need(c_bytes);
    t_ranks(THREADS, thread_main, &s);
    for (int i = 0; i < THREADS; ++i)
      for (int j = 0; j < REPEATS; ++j) {
        T_EXPECT(memcmp(s.c[0][0], s.c[i][j], c_bytes) == 0);
        if (i || j) t_free(s.c[i][j]);
      }
    t_free(s.c[0][0]), t_free(a), t_free(b);
  }
}

/* As many streams as a large node has ranks: the library's buffer pool must serve them, silently. */
static void many_main(int rank, void *p) {
  (void)rank;
  float a[64 * 64], c[64 * 64];
  for (int i = 0; i < 64 * 64; ++i) a[i] = (float)(i % 7);
  (void)p;
  for (int i = 0; i < 50; ++i)
    lev_gemm_host(&(lev_gemm_args){.m = 64,
                                   .n = 64,
                                   .k = 64,
                                   .a = a,
                                   .b = a,
                                   .c = c,
                                   .lda = 64,
                                   .ldb = 64,
                                   .ldc = 64,
                                   .ab_type = LEV_F32,
                                   .c_type = LEV_F32,
                                   .alpha = 1});
  float want = 0;
  for (int i = 0; i < 64; ++i) want += a[i] * a[i * 64];
  T_EXPECT(c[0] == want);
}
T_TEST(runtime_gemm_64_threads) {
  t_ranks(64, many_main, NULL);
}
