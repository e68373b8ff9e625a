/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/optim/oadamw_rig.h"

typedef struct norm_rig {
  lev_device *device;
  lev_stream *stream;
  void *grads;
  double *scratch, *out2;
  int64_t n;
} norm_rig;

static bool norm_open(norm_rig *r, lev_dtype dtype, int64_t n) {
  r->n = n;
  void *scratch = NULL, *out2 = NULL;
  size_t bytes = oadamw_norm_scratch_bytes(n);
  bool ok =
      T_EXPECT_OK(lev_device_open(&(lev_device_config){.backend = t_backend()}, &r->device)) &&
      T_EXPECT_OK(lev_stream_create(r->device, "norm", &r->stream)) &&
      T_EXPECT_OK(lev_device_alloc(r->device, t_mem(LEV_MEM_DEVICE), (size_t)n * lev_dtype_bytes(dtype), &r->grads)) &&
      T_EXPECT_OK(lev_device_alloc(r->device, t_mem(LEV_MEM_DEVICE), bytes, &scratch)) &&
      T_EXPECT_OK(lev_device_alloc(r->device, t_mem(LEV_MEM_DEVICE), 16, &out2));
  if (!ok) return false;
  memset(scratch, 0xFF, bytes);
  r->scratch = scratch, r->out2 = out2;
  r->out2[0] = r->out2[1] = 0;
  return true;
}

static bool norm_run(norm_rig *r, lev_dtype dtype) {
  return T_EXPECT_OK(oadamw_norm_launch(r->stream, dtype, r->grads, r->n, r->scratch, r->out2)) &&
         T_EXPECT_OK(lev_stream_sync(r->stream));
}

T_TEST(oadamw_norm_is_the_sum_of_squares) {
  static const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16};
  static const int64_t counts[] = {0,
                                   1,
                                   15,
                                   16,
                                   17,
                                   1000,
                                   OADAMW_NORM_BLOCK - 1,
                                   OADAMW_NORM_BLOCK,
                                   OADAMW_NORM_BLOCK + 1,
                                   5 * OADAMW_NORM_BLOCK + 333};
  for (size_t t = 0; t < 3; ++t) {
    for (size_t k = 0; k < sizeof counts / sizeof *counts; ++k) {
      norm_rig r = {0};
      int64_t n = counts[k];
      double *x = calloc((size_t)n + 1, sizeof *x), want = 0;
      if (norm_open(&r, types[t], n) && T_EXPECT(x)) {
        num_random(types[t], r.grads, x, n, 3, 9);
        for (int64_t i = 0; i < n; ++i) want += x[i] * x[i];
        norm_run(&r, types[t]);
        double first = r.out2[0];
        T_EXPECT_MSG(fabs(first - want) <= 1e-12 * want, "%s x %lld: %.17g, expected %.17g", lev_dtype_name(types[t]),
                     (long long)n, first, want);
        T_EXPECT(r.out2[1] == 0);
        norm_run(&r, types[t]); /* adds */
        T_EXPECT(r.out2[0] == 2 * first);
        if (n > 0) { /* one missing element is seen */
          T_EXPECT(fabs(first - x[n - 1] * x[n - 1] - want) > 1e-12 * want);
          lev_dtype_store(types[t], r.grads, n - 1, NAN);
          r.out2[0] = r.out2[1] = 0;
          norm_run(&r, types[t]);
          T_EXPECT(r.out2[1] == 1);
          T_EXPECT(fabs(r.out2[0] - (want - x[n - 1] * x[n - 1])) <= 1e-12 * want);
          lev_dtype_store(types[t], r.grads, n / 2, -INFINITY);
          r.out2[0] = r.out2[1] = 0;
          norm_run(&r, types[t]);
          T_EXPECT(r.out2[1] == (n > 1 ? 2 : 1) && isfinite(r.out2[0]));
        }
      }
      free(x);
      lev_device_close(r.device);
    }
  }
}

/* The tree written down again: 16 partial sums per block, halves added, then pairs of blocks. Equal to the bit. */
static double tree(const double *x, int64_t n) {
  int64_t blocks = (n + OADAMW_NORM_BLOCK - 1) / OADAMW_NORM_BLOCK;
  if (blocks > 1) {
    int64_t half = 1;
    while (half * 2 < blocks) half *= 2;
    int64_t at = half * OADAMW_NORM_BLOCK;
    return tree(x, at) + tree(x + at, n - at);
  }
  double sum[16] = {0};
  for (int64_t i = 0; i < n; ++i) sum[i % 16] += x[i] * x[i];
  for (int w = 8; w > 0; w /= 2)
    for (int j = 0; j < w; ++j) sum[j] += sum[j + w];
  return sum[0];
}

T_TEST(oadamw_norm_has_one_fixed_tree) {
  static const int64_t counts[] = {100, 3 * OADAMW_NORM_BLOCK, 6 * OADAMW_NORM_BLOCK + 5, 8 * OADAMW_NORM_BLOCK};
  for (size_t k = 0; k < sizeof counts / sizeof *counts; ++k) {
    norm_rig r = {0};
    double *x = calloc((size_t)counts[k], sizeof *x);
    if (norm_open(&r, LEV_F64, counts[k]) && T_EXPECT(x)) {
      num_random(LEV_F64, r.grads, x, counts[k], 3, 10);
      norm_run(&r, LEV_F64);
      T_EXPECT_MSG(r.out2[0] == tree(x, counts[k]), "%lld elements: %.17g, the tree gives %.17g", (long long)counts[k],
                   r.out2[0], tree(x, counts[k]));
    }
    free(x);
    lev_device_close(r.device);
  }
}

T_TEST(oadamw_norm_rejects_bad_arguments) {
  norm_rig r = {0};
  if (norm_open(&r, LEV_F32, 8)) {
    T_EXPECT_STATUS(oadamw_norm_launch(r.stream, LEV_I32, r.grads, 8, r.scratch, r.out2), LEV_ERR_ARG);
    T_EXPECT_STATUS(oadamw_norm_launch(r.stream, LEV_F32, NULL, 8, r.scratch, r.out2), LEV_ERR_ARG);
    T_EXPECT_STATUS(oadamw_norm_launch(r.stream, LEV_F32, r.grads, -1, r.scratch, r.out2), LEV_ERR_ARG);
    T_EXPECT_STATUS(oadamw_norm_launch(r.stream, LEV_F32, r.grads, 8, r.scratch, NULL), LEV_ERR_ARG);
  }
  lev_device_close(r.device);
}

T_TEST(oadamw_clip_scale_follows_torch) {
  T_EXPECT(oadamw_clip_scale(4.0, 1.0) == 1.0 / (2.0 + 1e-6));
  T_EXPECT(oadamw_clip_scale(0.25, 1.0) == 1.0);
  T_EXPECT(oadamw_clip_scale(0, 1.0) == 1.0);
  T_EXPECT(oadamw_clip_scale(100, 0) == 1.0);
  T_EXPECT(isnan(oadamw_clip_scale(INFINITY, 1.0)));
  T_EXPECT(isnan(oadamw_clip_scale(NAN, 1.0)));
}

/* Norm, clip, step: equal to a reference that clips by its own norm; a non-finite gradient stops it before anything
 * changed. */
T_TEST(oadamw_clipped_step) {
  oadamw_config c = oadamw_rig_config(LEV_F64, LEV_F64);
  c.bucket = 128;
  oadamw_rig r = {0};
  oadamw_oracle o = {0};
  norm_rig n = {0};
  if (oadamw_rig_open(&r, t_backend(), &c, OADAMW_RIG_SHARD, 0) && oadamw_oracle_open(&o, &r) &&
      norm_open(&n, LEV_F64, OADAMW_RIG_SHARD)) {
    double *x = n.grads, sum = 0; /* the gradient that step 1 will have */
    for (int64_t i = 0; i < OADAMW_RIG_SHARD; ++i) x[i] = oadamw_rig_grad(1, i), sum += x[i] * x[i];
    norm_run(&n, LEV_F64);
    double scale = oadamw_clip_scale(n.out2[0], 0.5);
    T_EXPECT(fabs(scale - 0.5 / (sqrt(sum) + 1e-6)) < 1e-12 * scale && scale < 0.1);
    T_EXPECT_OK(oadamw_rig_step(&r, 1, 0.1, scale));
    oadamw_oracle_step(&o, &r, 1, 0.1, 0.5 / (sqrt(sum) + 1e-6));
    oadamw_oracle_check(&o, &r, 1e-11, 1e-11);

    uint64_t before = oadamw_rig_digest(&r);
    x[OADAMW_RIG_SHARD - 1] = INFINITY; /* last bucket */
    n.out2[0] = n.out2[1] = 0;
    norm_run(&n, LEV_F64);
    T_EXPECT(n.out2[1] == 1);
    oadamw_step_args args = {.params = r.params, .grads = x, .lr = 0.1, .step = 2, .grad_scale = NAN};
    T_EXPECT_STATUS(oadamw_step(r.plan, &args, r.compute), LEV_ERR_NUMERIC);
    args.grad_scale = 1, args.lr = INFINITY;
    T_EXPECT_STATUS(oadamw_step(r.plan, &args, r.compute), LEV_ERR_NUMERIC);
    T_EXPECT(oadamw_rig_digest(&r) == before);
  }
  oadamw_oracle_close(&o);
  lev_device_close(n.device);
  oadamw_rig_close(&r);
}
