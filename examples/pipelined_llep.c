/* SPDX-License-Identifier: Apache-2.0 */
/* pipelined_llep alone: one expert layer, forward and backward, on four ranks. The router sends every token to the two
 * experts of rank 0, and still no rank receives more rows at once than the chunk cap that fits the budget. */
#include "pipelined_llep/pipelined_llep.h"

#include <math.h>
#include <stdio.h>

#include "example.h"

enum { RANKS = 4, TOKENS = 64, ALL = RANKS * TOKENS, H = 16, I = 8, EXPERTS = 8, K = 2, OWN = EXPERTS / RANKS };
enum { WEIGHTS = 3 * I * H }; /* of one expert: gate [I, H], up [I, H], down [H, I] */
#define BUDGET ((size_t)96 << 10)

typedef struct layer { /* the caller's arrays of all ranks */
  double x[ALL * H], probs[ALL * K], w[EXPERTS * WEIGHTS], dy[ALL * H];
  int32_t ids[ALL * K];
  double y[ALL * H], dx[ALL * H], dprobs[ALL * K], dw[EXPERTS * WEIGHTS]; /* results */
} layer;

/* Takes the regions of a phase for the time of one call, from the same bytes for either phase. */
static lev_status enter(ex_rank *r, llep_plan *plan, llep_phase phase) {
  lev_blocks blocks;
  LEV_TRY(lev_arena_push(r->arena[LEV_MEM_DEVICE], &r->stream, 1));
  LEV_TRY(
      lev_blocks_take(r->arena, true, phase == LLEP_FORWARD ? llep_walk_forward : llep_walk_backward, plan, &blocks));
  return llep_plan_bind(plan, phase, &blocks);
}

static lev_status take_memory(ex_rank *r, llep_plan *plan, size_t planned[LEV_MEM_CLASSES]) {
  size_t keep[LEV_MEM_CLASSES], forward[LEV_MEM_CLASSES], backward[LEV_MEM_CLASSES];
  llep_plan_bytes(plan, LLEP_PERSISTENT, keep);
  llep_plan_bytes(plan, LLEP_FORWARD, forward);
  llep_plan_bytes(plan, LLEP_BACKWARD, backward);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) planned[c] = keep[c] + lev_max_size(forward[c], backward[c]);
  if (r->rank == 0) {
    printf("planned for a budget of %zu bytes: at most %lld rows received at once\nkept:\n", BUDGET,
           (long long)llep_plan_info(plan).chunk_rows);
    llep_plan_regions(plan, LLEP_PERSISTENT, ex_print_region, NULL);
    printf("during backward:\n");
    llep_plan_regions(plan, LLEP_BACKWARD, ex_print_region, NULL);
  }
  lev_blocks blocks;
  LEV_TRY(ex_arenas(r, planned));
  LEV_TRY(lev_blocks_take(r->arena, false, llep_walk_persistent, plan, &blocks));
  for (int c = 0; c < LEV_MEM_CLASSES; ++c)
    if (r->arena[c]) lev_arena_seal(r->arena[c]);
  return llep_plan_bind(plan, LLEP_PERSISTENT, &blocks);
}

static lev_status train(ex_rank *r, layer *a, llep_plan *plan) {
  size_t planned[LEV_MEM_CLASSES], t = (size_t)r->rank * TOKENS, e = (size_t)r->rank * OWN, d = sizeof(double);
  void *x, *ids, *probs, *w, *dy, *y, *dx, *dprobs, *dw;
  LEV_TRY(take_memory(r, plan, planned));
  LEV_TRY(ex_array(r, a->x + t * H, TOKENS * H * d, &x));
  LEV_TRY(ex_array(r, a->ids + t * K, TOKENS * K * sizeof(int32_t), &ids));
  LEV_TRY(ex_array(r, a->probs + t * K, TOKENS * K * d, &probs));
  LEV_TRY(ex_array(r, a->w + e * WEIGHTS, OWN * WEIGHTS * d, &w));
  LEV_TRY(ex_array(r, a->dy + t * H, TOKENS * H * d, &dy));
  LEV_TRY(ex_array(r, NULL, TOKENS * H * d, &y));
  LEV_TRY(ex_array(r, NULL, TOKENS * H * d, &dx));
  LEV_TRY(ex_array(r, NULL, TOKENS * K * d, &dprobs));
  LEV_TRY(ex_array(r, NULL, OWN * WEIGHTS * d, &dw));
  lev_device_seal(r->device); /* from now on, an allocation is an error */

  llep_forward_args f = {.tokens = TOKENS, .x = x, .ids = ids, .probs = probs, .w = w, .y = y};
  LEV_TRY(enter(r, plan, LLEP_FORWARD));
  LEV_TRY(llep_forward(plan, &f, r->stream));
  LEV_TRY(lev_arena_pop(r->arena[LEV_MEM_DEVICE]));

  llep_backward_args b = {.tokens = TOKENS, .x = x, .ids = ids, .probs = probs, .w = w, .dy = dy};
  b.dx = dx, b.dprobs = dprobs, b.dw = dw;
  LEV_TRY(enter(r, plan, LLEP_BACKWARD));
  LEV_TRY(llep_backward(plan, &b, r->stream));
  LEV_TRY(lev_arena_pop(r->arena[LEV_MEM_DEVICE]));

  LEV_TRY(lev_copy(r->stream, a->y + t * H, y, TOKENS * H * d, "example.out"));
  LEV_TRY(lev_copy(r->stream, a->dx + t * H, dx, TOKENS * H * d, "example.out"));
  LEV_TRY(lev_copy(r->stream, a->dprobs + t * K, dprobs, TOKENS * K * d, "example.out"));
  LEV_TRY(lev_copy(r->stream, a->dw + e * WEIGHTS, dw, OWN * WEIGHTS * d, "example.out"));
  LEV_TRY(lev_stream_sync(r->stream));
  llep_stats s;
  llep_get_stats(plan, 0, &s);
  if (r->rank == 0)
    printf("fullest rank: %.0f rows if nothing were lent, %.0f after %lld moves; %lld chunks of at most %lld rows\n",
           s.native_max, s.rows_max, (long long)s.moves, (long long)s.chunks, (long long)s.chunk_rows);
  return ex_as_planned(r, planned);
}

static lev_status body(ex_rank *r, void *ctx) {
  llep_config config;
  llep_config_init(&config);
  config.max_tokens = TOKENS, config.hidden = H, config.inter = I, config.experts = EXPERTS, config.top_k = K;
  config.dtype = LEV_F64, config.min_rows = 8;

  llep_plan *plan;
  config.budget = 1000; /* too small: the error names what would do, on every rank */
  LEV_TRY(ex_refused(r, config.budget, llep_plan_create(r->device, r->comm, &config, &plan)));

  config.budget = BUDGET;
  LEV_TRY(llep_plan_create(r->device, r->comm, &config, &plan));
  lev_status status = train(r, ctx, plan);
  if (status != LEV_OK) lev_comm_abort(r->comm); /* nobody waits for a rank that gave up */
  llep_destroy(plan);
  return status;
}

/* One route by the definition: y += p * down (silu(gate x) * (up x)), and its gradients. */
static void route(const double *x, double p, const double *w, const double *dy, double *y, double *dx, double *dp,
                  double *dw) {
  for (int i = 0; i < I; ++i) {
    const double *gate = w + i * H, *up = gate + I * H, *down = w + 2 * I * H + i;
    double g = 0, u = 0, da = 0, *dgate = dw + i * H, *dup = dgate + I * H, *ddown = dw + 2 * I * H + i;
    for (int h = 0; h < H; ++h) g += gate[h] * x[h], u += up[h] * x[h], da += dy[h] * down[h * I];
    double s = 1 / (1 + exp(-g)), a = g * s * u, dg = p * da * u * s * (1 + g * (1 - s)), du = p * da * g * s;
    *dp += da * a;
    for (int h = 0; h < H; ++h) {
      y[h] += p * down[h * I] * a, dx[h] += dg * gate[h] + du * up[h];
      dgate[h] += dg * x[h], dup[h] += du * x[h], ddown[h * I] += p * dy[h] * a;
    }
  }
}

int main(void) {
  static layer a, want;
  ex_random(a.x, ALL * H, 1, 1), ex_random(a.w, EXPERTS * WEIGHTS, 0.3, 2);
  ex_random(a.dy, ALL * H, 1, 3), ex_random(a.probs, ALL * K, 1, 4);
  for (int q = 0; q < ALL * K; ++q) a.ids[q] = q % K; /* experts 0 and 1, both of rank 0 */
  if (!ex_run(RANKS, body, &a)) return 1;
  for (int q = 0; q < ALL * K; ++q) {
    int t = q / K, e = a.ids[q];
    route(a.x + t * H, a.probs[q], a.w + e * WEIGHTS, a.dy + t * H, want.y + t * H, want.dx + t * H, &want.dprobs[q],
          want.dw + e * WEIGHTS);
  }
  bool ok = ex_close("y", a.y, want.y, ALL * H, 1e-11);
  ok &= ex_close("dx", a.dx, want.dx, ALL * H, 1e-11);
  ok &= ex_close("dprobs", a.dprobs, want.dprobs, ALL * K, 1e-11);
  return ex_close("dw", a.dw, want.dw, EXPERTS * WEIGHTS, 1e-11) && ok ? 0 : 1;
}
