/* SPDX-License-Identifier: Apache-2.0 */
/* offload_adamw alone: three clipped steps on 10,000 f32 parameters. Master weights and both moments, 120,000 bytes,
 * stay in host memory; the card holds two buckets of them within 32 KiB. */
#include "offload_adamw/offload_adamw.h"

#include <math.h>
#include <stdio.h>

#include "common/rng.h"
#include "example.h"

enum { N = 10000, MATRICES = 9000, STEPS = 3 }; /* matrices decay, the norms behind them do not */
#define BUDGET ((size_t)32 << 10)
#define LR 0.01
#define MAX_NORM 1.0

static const oadamw_segment segments[] = {
    {.offset = 0, .count = MATRICES, .weight_decay = 0.1, .lr_scale = 1},
    {.offset = MATRICES, .count = N - MATRICES, .weight_decay = 0, .lr_scale = 1},
};

typedef struct problem {
  float start[N], grads[STEPS][N];
  float params[N]; /* results */
  double scale[STEPS], norm[STEPS];
} problem;

/* Global norm over a fixed tree of blocks, then the factor that clips it. Waits: the factor is a host value. */
static lev_status clip(ex_rank *r, const float *grads, double *scratch, double *sums, double *norm, double *scale) {
  double two[2]; /* sum of squares, values that are not finite */
  LEV_TRY(lev_fill(r->stream, sums, 0, sizeof two, "example.zero"));
  LEV_TRY(oadamw_norm_launch(r->stream, LEV_F32, grads, N, scratch, sums));
  LEV_TRY(lev_copy(r->stream, two, sums, sizeof two, "example.out"));
  LEV_TRY(lev_stream_sync(r->stream));
  *norm = sqrt(two[0]), *scale = oadamw_clip_scale(two[0], MAX_NORM);
  return two[1] == 0 ? LEV_OK : lev_fail(LEV_ERR_NUMERIC, "%.0f gradients are not finite", two[1]);
}

static lev_status take_memory(ex_rank *r, oadamw_plan *plan, size_t planned[LEV_MEM_CLASSES]) {
  size_t keep[LEV_MEM_CLASSES], step[LEV_MEM_CLASSES];
  oadamw_plan_bytes(plan, OADAMW_PERSISTENT, keep);
  oadamw_plan_bytes(plan, OADAMW_STEP, step);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) planned[c] = keep[c] + step[c];
  printf("planned for a budget of %zu bytes: %lld buckets of at most %lld elements\n", BUDGET,
         (long long)oadamw_buckets(plan), (long long)oadamw_bucket_size(plan));
  oadamw_plan_regions(plan, OADAMW_PERSISTENT, ex_print_region, NULL);
  oadamw_plan_regions(plan, OADAMW_STEP, ex_print_region, NULL);
  lev_blocks blocks;
  LEV_TRY(ex_arenas(r, planned));
  LEV_TRY(lev_blocks_take(r->arena, false, oadamw_walk_persistent, plan, &blocks));
  for (int c = 0; c < LEV_MEM_CLASSES; ++c)
    if (r->arena[c]) lev_arena_seal(r->arena[c]);
  return oadamw_plan_bind(plan, OADAMW_PERSISTENT, &blocks);
}

static lev_status train(ex_rank *r, problem *p, oadamw_plan *plan) {
  size_t planned[LEV_MEM_CLASSES];
  void *params, *grads, *scratch, *sums;
  LEV_TRY(take_memory(r, plan, planned));
  LEV_TRY(ex_array(r, p->start, sizeof p->start, &params));
  LEV_TRY(ex_array(r, NULL, sizeof p->grads[0], &grads));
  LEV_TRY(ex_array(r, NULL, oadamw_norm_scratch_bytes(N), &scratch));
  LEV_TRY(ex_array(r, NULL, 2 * sizeof(double), &sums));
  lev_device_seal(r->device);                    /* from now on, an allocation is an error */
  LEV_TRY(oadamw_init(plan, params, r->stream)); /* master = params, moments = 0 */
  for (int s = 0; s < STEPS; ++s) {
    LEV_TRY(lev_copy(r->stream, grads, p->grads[s], sizeof p->grads[s], "example.in"));
    LEV_TRY(clip(r, grads, scratch, sums, &p->norm[s], &p->scale[s]));
    /* The slots are ours during the step only. */
    lev_blocks blocks;
    LEV_TRY(lev_arena_push(r->arena[LEV_MEM_DEVICE], &r->stream, 1));
    LEV_TRY(lev_blocks_take(r->arena, true, oadamw_walk_step, plan, &blocks));
    LEV_TRY(oadamw_plan_bind(plan, OADAMW_STEP, &blocks));
    oadamw_step_args args = {.params = params, .grads = grads, .lr = LR, .step = s + 1, .grad_scale = p->scale[s]};
    LEV_TRY(oadamw_step(plan, &args, r->stream));
    LEV_TRY(lev_arena_pop(r->arena[LEV_MEM_DEVICE]));
  }
  LEV_TRY(lev_copy(r->stream, p->params, params, sizeof p->params, "example.out"));
  LEV_TRY(lev_stream_sync(r->stream));
  return ex_as_planned(r, planned);
}

static lev_status body(ex_rank *r, void *ctx) {
  oadamw_config config = oadamw_config_default();
  config.segments = segments, config.n_segments = 2;

  oadamw_plan *plan;
  config.bucket = 4096, config.budget = BUDGET; /* too small for that bucket: the error names both that would fit */
  LEV_TRY(ex_refused(r, config.budget, oadamw_plan_create(r->device, &config, &plan)));

  config.bucket = 0; /* the largest that fits */
  LEV_TRY(oadamw_plan_create(r->device, &config, &plan));
  lev_status status = train(r, ctx, plan);
  oadamw_destroy(plan);
  return status;
}

int main(void) {
  static problem p;
  lev_rng_key key = {.seed = 1};
  for (uint64_t i = 0; i < N; ++i) p.start[i] = (float)lev_rng_normal(key, i);
  for (uint64_t i = 0; i < STEPS * N; ++i) p.grads[i / N][i % N] = 0.03f * (float)lev_rng_normal(key, N + i);
  if (!ex_run(1, body, &p)) return 1;

  int wrong = 0; /* the update by its definition, which fixes every rounding: the same bits are expected */
  for (int i = 0; i < N; ++i) {
    float w = p.start[i], m = 0, v = 0, decay = i < MATRICES ? (float)-(LR * 0.1) : 0;
    for (int s = 0; s < STEPS; ++s) {
      float g = (float)p.scale[s] * p.grads[s][i];
      m = fmaf(0.9f, m, (float)(1 - 0.9) * g), v = fmaf(0.95f, v, (float)(1 - 0.95) * g * g);
      float d = fmaf(sqrtf(v), (float)(1 / sqrt(1 - pow(0.95, s + 1))), 1e-8f);
      w = fmaf(decay, w, w), w = fmaf((float)-(LR / (1 - pow(0.9, s + 1))), m / d, w);
    }
    wrong += w != p.params[i];
  }
  printf("params: %d of %d differ from the definition\n", wrong, N);
  double want[STEPS] = {0};
  for (int s = 0; s < STEPS; ++s) {
    for (int i = 0; i < N; ++i) want[s] += (double)p.grads[s][i] * p.grads[s][i];
    want[s] = sqrt(want[s]);
  }
  return ex_close("norm", p.norm, want, STEPS, 1e-13) && wrong == 0 ? 0 : 1;
}
