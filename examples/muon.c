/* SPDX-License-Identifier: Apache-2.0 */
/* muon alone: two steps on six matrices. Master weights and momentum, 84,480 bytes, stay in host memory; slots and
 * scratch on the card keep within 56 KiB. */
#include "muon/muon.h"

#include <math.h>
#include <stdio.h>

#include "common/gemm.h"
#include "example.h"

enum { STEPS = 2, MATRICES = 6, SHARD = 5280, LARGEST = 24 * 40 };
#define BUDGET ((size_t)56 << 10)
#define LR 0.02

static const muon_matrix matrices[MATRICES] = {
    {.offset = 0, .rows = 24, .cols = 40},    {.offset = 960, .rows = 48, .cols = 16},
    {.offset = 1728, .rows = 24, .cols = 36}, {.offset = 2592, .rows = 40, .cols = 24},
    {.offset = 3552, .rows = 24, .cols = 40}, {.offset = 4512, .rows = 16, .cols = 48},
};

typedef struct problem {
  double start[SHARD], grads[STEPS][SHARD];
  double params[SHARD]; /* results */
} problem;

static lev_status take_memory(ex_rank *r, muon_plan *plan, size_t planned[LEV_MEM_CLASSES]) {
  size_t keep[LEV_MEM_CLASSES], step[LEV_MEM_CLASSES];
  muon_plan_bytes(plan, MUON_PERSISTENT, keep);
  muon_plan_bytes(plan, MUON_STEP, step);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) planned[c] = keep[c] + step[c];
  printf("planned for a budget of %zu bytes: %d buckets of whole matrices\n", BUDGET, muon_buckets(plan));
  muon_plan_regions(plan, MUON_PERSISTENT, ex_print_region, NULL);
  muon_plan_regions(plan, MUON_STEP, ex_print_region, NULL);
  lev_blocks blocks;
  LEV_TRY(ex_arenas(r, planned));
  LEV_TRY(lev_blocks_take(r->arena, false, muon_walk_persistent, plan, &blocks));
  for (int c = 0; c < LEV_MEM_CLASSES; ++c)
    if (r->arena[c]) lev_arena_seal(r->arena[c]);
  return muon_plan_bind(plan, MUON_PERSISTENT, &blocks);
}

static lev_status train(ex_rank *r, problem *p, muon_plan *plan) {
  size_t planned[LEV_MEM_CLASSES], scratch = lev_gemm_workspace_bytes(LEV_BACKEND_CPU, LEV_F64);
  void *params, *grads, *workspace;
  LEV_TRY(take_memory(r, plan, planned));
  LEV_TRY(ex_array(r, p->start, sizeof p->start, &params));
  LEV_TRY(ex_array(r, NULL, sizeof p->grads[0], &grads));
  LEV_TRY(ex_array(r, NULL, scratch, &workspace));
  lev_stream_set_workspace(r->stream, workspace, scratch); /* for the matrix products */
  lev_device_seal(r->device);                              /* from now on, an allocation is an error */
  LEV_TRY(muon_init(plan, params, r->stream));             /* master = params, momentum = 0 */
  for (int s = 0; s < STEPS; ++s) {
    LEV_TRY(lev_copy(r->stream, grads, p->grads[s], sizeof p->grads[s], "example.in"));
    /* Slots and scratch are ours during the step only. */
    lev_blocks blocks;
    LEV_TRY(lev_arena_push(r->arena[LEV_MEM_DEVICE], &r->stream, 1));
    LEV_TRY(lev_blocks_take(r->arena, true, muon_walk_step, plan, &blocks));
    LEV_TRY(muon_plan_bind(plan, MUON_STEP, &blocks));
    muon_step_args args = {.params = params, .grads = grads, .lr = LR, .grad_scale = 1, .step = s + 1};
    LEV_TRY(muon_step(plan, &args, r->stream));
    LEV_TRY(lev_arena_pop(r->arena[LEV_MEM_DEVICE]));
  }
  LEV_TRY(lev_copy(r->stream, p->params, params, sizeof p->params, "example.out"));
  LEV_TRY(lev_stream_sync(r->stream));
  return ex_as_planned(r, planned);
}

static lev_status body(ex_rank *r, void *ctx) {
  muon_config config = muon_config_default();
  config.matrices = matrices, config.n_matrices = MATRICES;
  config.param_dtype = config.grad_dtype = config.compute_dtype = LEV_F64;

  muon_plan *plan;
  config.bucket_bytes = 20000; /* too small: the error names the smallest that fits */
  LEV_TRY(ex_refused(r, config.bucket_bytes, muon_plan_create(r->device, &config, &plan)));

  config.bucket_bytes = BUDGET;
  LEV_TRY(muon_plan_create(r->device, &config, &plan));
  lev_status status = train(r, ctx, plan);
  muon_destroy(plan);
  return status;
}

/* out[m,n] = a[m,k] b, with b stored [k,n], or [n,k] where it is transposed. */
static void multiply(double *out, const double *a, const double *b, int64_t m, int64_t n, int64_t k, bool transposed) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      out[i * n + j] = 0;
      for (int64_t q = 0; q < k; ++q) out[i * n + j] += a[i * k + q] * (transposed ? b[j * k + q] : b[q * n + j]);
    }
}

/* One update by the definition, on the rows' side whatever the shape. */
static void update(double *w, double *m, const double *g, int64_t rows, int64_t cols) {
  double x[LARGEST] = {0}, y[LARGEST], gram[48 * 48] = {0}, square[48 * 48] = {0}, norm = 0;
  int64_t n = rows * cols;
  for (int64_t i = 0; i < n; ++i) m[i] = 0.95 * m[i] + g[i], x[i] = g[i] + 0.95 * m[i], norm += x[i] * x[i];
  for (int64_t i = 0; i < n; ++i) x[i] /= sqrt(norm) + 1e-7;
  for (int s = 0; s < 5; ++s) {
    multiply(gram, x, x, rows, rows, cols, true);
    multiply(square, gram, gram, rows, rows, rows, false);
    for (int64_t i = 0; i < rows * rows; ++i) square[i] = -4.7750 * gram[i] + 2.0315 * square[i];
    multiply(y, square, x, rows, cols, rows, false);
    for (int64_t i = 0; i < n; ++i) x[i] = 3.4445 * x[i] + y[i];
  }
  double rate = LR * 0.2 * sqrt((double)(rows > cols ? rows : cols));
  for (int64_t i = 0; i < n; ++i) w[i] = w[i] * (1 - LR * 0.1) - rate * x[i];
}

int main(void) {
  static problem p;
  static double w[SHARD], m[SHARD];
  ex_random(p.start, SHARD, 1, 1), ex_random(p.grads[0], STEPS * SHARD, 1, 2);
  if (!ex_run(1, body, &p)) return 1;
  for (int i = 0; i < SHARD; ++i) w[i] = p.start[i];
  for (int s = 0; s < STEPS; ++s)
    for (int i = 0; i < MATRICES; ++i) {
      int64_t at = matrices[i].offset;
      update(w + at, m + at, p.grads[s] + at, matrices[i].rows, matrices[i].cols);
    }
  for (int i = 0; i < SHARD; ++i) w[i] -= p.start[i], p.params[i] -= p.start[i]; /* what two steps changed */
  return ex_close("change of params", p.params, w, SHARD, 1e-11) ? 0 : 1;
}
