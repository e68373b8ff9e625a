/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/backend.h"
#include "tests/num.h"
#include "tests/optim/muon_rig.h"
#include "tests/t.h"

#define CPU ((muon_rig_options){.backend = t_backend()})
#define SIZE_MAX_TEST 4096

static muon_config f64_config(const muon_matrix *matrices, int n) {
  muon_config c = muon_config_default();
  c.matrices = matrices, c.n_matrices = n;
  c.param_dtype = c.grad_dtype = c.compute_dtype = LEV_F64;
  return c;
}

/* Three steps of one matrix against the oracle; compares weights, master and momentum. */
static void against_oracle(muon_config c, int64_t rows, int64_t cols, double tolerance, double momentum_tolerance) {
  static double w[SIZE_MAX_TEST], m[SIZE_MAX_TEST], g[SIZE_MAX_TEST], start[SIZE_MAX_TEST], moved[SIZE_MAX_TEST];
  const int64_t offset = 3, n = rows * cols;
  muon_matrix matrix = {offset, rows, cols};
  c.matrices = &matrix, c.n_matrices = 1;
  muon_rig r;
  if (muon_rig_open(&r, &c, offset + n + 2, CPU)) {
    for (int64_t i = 0; i < n; ++i) w[i] = start[i] = lev_dtype_load(c.param_dtype, r.params, offset + i);
    memset(m, 0, sizeof m);
    double before = lev_dtype_load(c.param_dtype, r.params, 0),
           after = lev_dtype_load(c.param_dtype, r.params, r.shard - 1);
    for (int step = 1; step <= 3; ++step) {
      T_EXPECT_OK(muon_rig_step(&r, step, 0.05, 0.5));
      for (int64_t i = 0; i < n; ++i) g[i] = lev_dtype_load(c.grad_dtype, r.grads, offset + i);
      muon_oracle(&c, rows, cols, w, m, g, 0.05, 0.5);
    }
    void *master, *momentum;
    T_EXPECT_OK(muon_state(r.plan, 0, &master, &momentum));
    lev_dtype arith = lev_dtype_arith(c.param_dtype);
    NUM_CHECK(arith, momentum, m, rows, cols, momentum_tolerance, "momentum");
    /* the distance travelled, so that the weights' own size hides nothing */
    for (int64_t i = 0; i < n; ++i) moved[i] = lev_dtype_load(arith, master, i) - start[i], w[i] -= start[i];
    NUM_CHECK(LEV_F64, moved, w, rows, cols, tolerance, "update");
    for (int64_t i = 0; i < n; ++i) {
      double expected = lev_dtype_load(arith, master, i);
      unsigned char rounded[8];
      lev_dtype_store(c.param_dtype, rounded, 0, expected);
      T_EXPECT(lev_dtype_load(c.param_dtype, r.params, offset + i) == lev_dtype_load(c.param_dtype, rounded, 0));
    }
    T_EXPECT(lev_dtype_load(c.param_dtype, r.params, 0) == before);
    T_EXPECT(lev_dtype_load(c.param_dtype, r.params, r.shard - 1) == after);
  }
  muon_rig_close(&r);
}

static const int64_t shapes[][2] = {{1, 1}, {1, 13}, {13, 1}, {16, 16}, {8, 24}, {24, 8}, {7, 11}, {31, 5}, {48, 40}};
#define N_SHAPES ((int)(sizeof shapes / sizeof *shapes))

T_TEST(muon_f64_equals_oracle) {
  for (int set = 0; set < MUON_SETS; ++set)
    for (int s = 0; s < N_SHAPES && !t_failed(); ++s) {
      muon_config c = f64_config(NULL, 0);
      c.set = (muon_set)set;
      c.scale = (muon_scale)((set + s) % MUON_SCALES);
      c.nesterov = s % 2 == 0;
      c.schedule = (set + s) % 2 ? MUON_PLAIN : MUON_BOUNDED;
      against_oracle(c, shapes[s][0], shapes[s][1], 1e-11, 1e-14);
    }
}

/* f32 and bf16: the same code within the rounding of the type. Jordan's coefficients spread singular values by design,
 * so a rounding in X shows up magnified in the directions that start small. */
T_TEST(muon_low_precision_near_oracle) {
  const lev_dtype types[][3] = {{LEV_F32, LEV_F32, LEV_F32},
                                {LEV_BF16, LEV_F32, LEV_F32},
                                {LEV_BF16, LEV_BF16, LEV_BF16},
                                {LEV_F32, LEV_BF16, LEV_BF16}};
  for (int t = 0; t < 4; ++t)
    for (int s = 0; s < N_SHAPES; ++s) {
      muon_config c = f64_config(NULL, 0);
      c.param_dtype = types[t][0], c.grad_dtype = types[t][1], c.compute_dtype = types[t][2];
      against_oracle(c, shapes[s][0], shapes[s][1], c.compute_dtype == LEV_F32 ? 2e-4 : 0.1, 1e-6);
    }
}

T_TEST(muon_more_steps_repeat_the_last_row) {
  muon_config c = f64_config(NULL, 0);
  c.set = MUON_POLAR_EXPRESS_8, c.steps = 11;
  against_oracle(c, 12, 20, 1e-11, 1e-14);
  c.steps = 2;
  against_oracle(c, 20, 12, 1e-11, 1e-14);
}

/* Singular values of a [rows, cols] through cyclic Jacobi on its smaller Gram matrix. */
static void singular_range(const double *a, int64_t rows, int64_t cols, double *lo, double *hi) {
  static double g[64 * 64];
  int64_t n = rows < cols ? rows : cols;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      if (rows <= cols)
        for (int64_t k = 0; k < cols; ++k) sum += a[i * cols + k] * a[j * cols + k];
      else
        for (int64_t k = 0; k < rows; ++k) sum += a[k * cols + i] * a[k * cols + j];
      g[i * n + j] = sum;
    }
  for (int sweep = 0; sweep < 30; ++sweep)
    for (int64_t p = 0; p < n; ++p)
      for (int64_t q = p + 1; q < n; ++q) {
        double angle = 0.5 * atan2(2 * g[p * n + q], g[q * n + q] - g[p * n + p]), c = cos(angle), s = sin(angle);
        for (int64_t k = 0; k < n; ++k) {
          double x = g[k * n + p], y = g[k * n + q];
          g[k * n + p] = c * x - s * y, g[k * n + q] = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          double x = g[p * n + k], y = g[q * n + k];
          g[p * n + k] = c * x - s * y, g[q * n + k] = s * x + c * y;
        }
      }
  *lo = INFINITY, *hi = 0;
  for (int64_t i = 0; i < n; ++i) {
    double value = sqrt(fmax(g[i * n + i], 0));
    *lo = fmin(*lo, value), *hi = fmax(*hi, value);
  }
}

/* One step from W = 0 with lr = 1 and no scale leaves W = -O: its singular values are near 1 (the gradient's are not).
 */
T_TEST(muon_update_is_orthogonal) {
  static const struct {
    muon_set set;
    double lo, hi;
  } bounds[] = {{MUON_SIMPLE, 0.6, 1.3},        {MUON_QUINTIC, 0.6, 1.3},
                {MUON_POLAR_EXPRESS, 0.8, 1.2}, {MUON_POLAR_EXPRESS_8, 0.99, 1.01},
                {MUON_DEEPSEEK_V4, 0.95, 1.05}, {MUON_CUBIC, 0.5, 1.3}};
  T_EXPECT_EQ_I64(sizeof bounds / sizeof *bounds, MUON_SETS);
  for (int b = 0; b < MUON_SETS; ++b)
    for (int tall = 0; tall < 2; ++tall) {
      int64_t rows = tall ? 40 : 24, cols = tall ? 24 : 40;
      muon_matrix matrix = {0, rows, cols};
      muon_config c = f64_config(&matrix, 1);
      c.set = bounds[b].set, c.scale = MUON_SCALE_NONE, c.weight_decay = 0;
      muon_rig r;
      if (muon_rig_open(&r, &c, rows * cols, CPU)) {
        T_EXPECT_OK(lev_stream_sync(r.stream));
        memset(r.params, 0, sizeof(double) * (size_t)(rows * cols));
        T_EXPECT_OK(muon_init(r.plan, r.params, r.stream));
        T_EXPECT_OK(muon_rig_step(&r, 1, 1, 1));
        double lo, hi, gradient_lo, gradient_hi;
        singular_range(r.params, rows, cols, &lo, &hi);
        singular_range(r.grads, rows, cols, &gradient_lo, &gradient_hi);
        T_EXPECT_MSG(lo > bounds[b].lo && hi < bounds[b].hi, "%s: singular values in %g .. %g", muon_set_name(c.set),
                     lo, hi);
        T_EXPECT(gradient_hi / gradient_lo > 3 * hi / lo);
      }
      muon_rig_close(&r);
    }
}

static void values(muon_rig *r, double *out) {
  for (int64_t i = 0; i < r->shard; ++i) out[i] = lev_dtype_load(r->param_dtype, r->params, i);
}

static double cosine(const double *a, const double *b, int64_t n) {
  double ab = 0, aa = 0, bb = 0;
  for (int64_t i = 0; i < n; ++i) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
  return ab / sqrt(aa * bb);
}

/* A flattened parameter or a skipped Newton-Schulz still trains, so nobody notices: the update must not be the
 * gradient, and must know the shape. */
T_TEST(muon_is_not_sgd_and_keeps_the_shape) {
  static double by_shape[3][192];
  const int64_t rows[3] = {8, 12, 1};
  for (int s = 0; s < 3; ++s) {
    muon_matrix matrix = {0, rows[s], 192 / rows[s]};
    muon_config c = f64_config(&matrix, 1);
    c.weight_decay = 0, c.scale = MUON_SCALE_NONE;
    muon_rig r;
    if (muon_rig_open(&r, &c, 192, CPU)) {
      static double start[192];
      T_EXPECT_OK(lev_stream_sync(r.stream));
      values(&r, start);
      T_EXPECT_OK(muon_rig_step(&r, 1, 1, 1));
      values(&r, by_shape[s]);
      for (int i = 0; i < 192; ++i) by_shape[s][i] -= start[i];
      double along = -cosine(by_shape[s], r.grads, 192);
      T_EXPECT(along > 0.5);                               /* downhill */
      T_EXPECT(s == 2 ? along > 1 - 1e-12 : along < 0.99); /* and only a vector keeps its direction */
    }
    muon_rig_close(&r);
  }
  T_EXPECT(cosine(by_shape[0], by_shape[1], 192) < 0.99);
}

T_TEST(muon_zero_gradient_only_decays) {
  muon_matrix matrices[2] = {{0, 6, 10}, {60, 10, 6}};
  muon_config c = f64_config(matrices, 2);
  muon_rig r;
  if (muon_rig_open(&r, &c, 120, CPU)) {
    static double start[120], end[120];
    T_EXPECT_OK(lev_stream_sync(r.stream));
    values(&r, start);
    T_EXPECT_OK(muon_rig_step(&r, 1, 0.25, 0)); /* grad_scale 0: every gradient is zero */
    values(&r, end);
    for (int i = 0; i < 120; ++i) T_EXPECT(end[i] == fma(-(0.25 * 0.1), start[i], start[i]));
  }
  muon_rig_close(&r);
}

/* A gradient of rank one: one singular value goes to about 1, the others stay at zero. */
T_TEST(muon_rank_one_gradient) {
  muon_matrix matrix = {0, 9, 14};
  muon_config c = f64_config(&matrix, 1);
  c.weight_decay = 0, c.set = MUON_POLAR_EXPRESS_8, c.scale = MUON_SCALE_NONE;
  muon_rig r;
  lev_blocks blocks;
  if (muon_rig_open(&r, &c, 126, CPU)) {
    static double start[126], w[126], m[126], dir[126];
    double *g = r.grads, norm = 0;
    T_EXPECT_OK(lev_stream_sync(r.stream));
    values(&r, start);
    memcpy(w, start, sizeof w);
    for (int i = 0; i < 9; ++i)
      for (int j = 0; j < 14; ++j) g[i * 14 + j] = (1 + i) * cos(1.0 + j), norm += g[i * 14 + j] * g[i * 14 + j];
    muon_step_args args = {r.params, r.grads, 1, 1, 1};
    T_EXPECT_OK(lev_arena_push(r.arenas[LEV_MEM_DEVICE], &r.stream, 1));
    T_EXPECT_OK(lev_blocks_take(r.arenas, true, muon_walk_step, r.plan, &blocks));
    T_EXPECT_OK(muon_plan_bind(r.plan, MUON_STEP, &blocks));
    T_EXPECT_OK(muon_step(r.plan, &args, r.stream));
    T_EXPECT_OK(lev_arena_pop(r.arenas[LEV_MEM_DEVICE]));
    T_EXPECT_OK(lev_stream_sync(r.stream));
    muon_oracle(&c, 9, 14, w, m, g, 1, 1);
    NUM_CHECK(LEV_F64, r.params, w, 9, 14, 1e-11, "rank one");
    for (int i = 0; i < 126; ++i) dir[i] = (start[i] - ((double *)r.params)[i]) * sqrt(norm) - g[i];
    T_EXPECT(num_rel_l2_f64(dir, m, 126) >= 0);
    double off = 0;
    for (int i = 0; i < 126; ++i) off += dir[i] * dir[i];
    T_EXPECT(sqrt(off / norm) < 0.01);
  }
  muon_rig_close(&r);
}

T_TEST(muon_tables) {
  for (int s = 0; s < MUON_SETS; ++s) {
    T_EXPECT_EQ_I64(muon_set_find(muon_set_name((muon_set)s)), s);
    T_EXPECT(muon_set_steps((muon_set)s) >= 5 && muon_set_norm_factor((muon_set)s) >= 1);
    double abc[3];
    for (int i = 0; i < muon_set_steps((muon_set)s); ++i) {
      muon_set_row((muon_set)s, i, abc);
      T_EXPECT(abc[0] > 1 && abc[1] < 0 && abc[2] >= 0);
    }
  }
  for (int s = 0; s < MUON_SCALES; ++s) T_EXPECT_EQ_I64(muon_scale_find(muon_scale_name((muon_scale)s)), s);
  T_EXPECT_EQ_I64(muon_set_find("sgd"), MUON_SETS);
  T_EXPECT_EQ_I64(muon_scale_find(NULL), MUON_SCALES);
  T_EXPECT(muon_scale_factor(MUON_SCALE_MOONLIGHT, 4, 100) == 2);
  T_EXPECT(muon_scale_factor(MUON_SCALE_ORIGINAL, 4, 100) == 1 && muon_scale_factor(MUON_SCALE_ORIGINAL, 100, 4) == 5);
  T_EXPECT(muon_scale_factor(MUON_SCALE_SPECTRAL, 4, 100) == 0.2 && muon_scale_factor(MUON_SCALE_NONE, 4, 9) == 1);
}
