/* SPDX-License-Identifier: Apache-2.0 */
/* ring_dtp alone: loss and gradients of a vocabulary projection whose head is sharded over four ranks, inside 24 KiB of
 * work memory per rank. All logits of one rank would take 48 x 1003 x 8 = 385,152 bytes. */
#include "ring_dtp/ring_dtp.h"

#include <math.h>
#include <stdio.h>

#include "example.h"

enum { RANKS = 4, TOKENS = 48, HIDDEN = 32, VOCAB = 1003 }; /* tokens are those of one rank; 4 does not divide 1003 */
#define BUDGET ((size_t)24 << 10)
#define ALL_TOKENS (RANKS * TOKENS)

typedef struct problem {
  double h[ALL_TOKENS * HIDDEN], w[VOCAB * HIDDEN];
  int32_t labels[ALL_TOKENS];
  double dh[ALL_TOKENS * HIDDEN], dw[VOCAB * HIDDEN], sums[RANKS][RDTP_SUMS]; /* results */
} problem;

/* One call on one rank, with memory exactly as planned. */
static lev_status step(ex_rank *r, problem *p, rdtp_plan *plan) {
  size_t planned[LEV_MEM_CLASSES];
  rdtp_info info = rdtp_plan_info(plan);
  rdtp_plan_bytes(plan, RDTP_STEP, planned);
  if (r->rank == 0) {
    printf("planned for a budget of %zu bytes: logits tiles of %lld x %lld\n", BUDGET, (long long)info.tile_rows,
           (long long)info.tile_cols);
    rdtp_plan_regions(plan, RDTP_STEP, ex_print_region, NULL);
  }
  LEV_TRY(ex_arenas(r, planned));

  /* The caller's arrays: this rank's tokens and its rows of the head. */
  size_t tokens = TOKENS * HIDDEN * sizeof(double);
  size_t shard = (size_t)(info.vocab_end - info.vocab_begin) * HIDDEN * sizeof(double);
  int64_t first = r->rank * TOKENS, row = info.vocab_begin * HIDDEN;
  void *h, *w, *labels, *dh, *dw, *sums;
  LEV_TRY(ex_array(r, p->h + first * HIDDEN, tokens, &h));
  LEV_TRY(ex_array(r, p->w + row, shard, &w));
  LEV_TRY(ex_array(r, p->labels + first, TOKENS * sizeof(int32_t), &labels));
  LEV_TRY(ex_array(r, NULL, tokens, &dh));
  LEV_TRY(ex_array(r, NULL, shard, &dw));
  LEV_TRY(ex_array(r, NULL, sizeof p->sums[0], &sums));
  lev_arena_seal(r->arena[LEV_MEM_DEVICE]); /* nothing persistent here: all of it is work memory */
  lev_device_seal(r->device);               /* from now on, an allocation is an error */

  /* The work memory is ours during this call only; other phases may use it afterwards. */
  lev_blocks blocks;
  LEV_TRY(lev_arena_push(r->arena[LEV_MEM_DEVICE], &r->stream, 1));
  LEV_TRY(lev_blocks_take(r->arena, true, rdtp_walk_step, plan, &blocks));
  LEV_TRY(rdtp_plan_bind(plan, RDTP_STEP, &blocks));
  rdtp_args args = {.tokens = TOKENS, .h = h, .labels = labels, .w = w, .dh = dh, .dw = dw, .sums = sums};
  args.grad_scale = 1.0 / ALL_TOKENS;
  LEV_TRY(rdtp_step(plan, &args, r->stream));
  LEV_TRY(lev_arena_pop(r->arena[LEV_MEM_DEVICE]));

  LEV_TRY(lev_copy(r->stream, p->dh + first * HIDDEN, dh, tokens, "example.out"));
  LEV_TRY(lev_copy(r->stream, p->dw + row, dw, shard, "example.out"));
  LEV_TRY(lev_copy(r->stream, p->sums[r->rank], sums, sizeof p->sums[0], "example.out"));
  LEV_TRY(lev_stream_sync(r->stream)); /* the first wait on the host */
  return ex_as_planned(r, planned);
}

static lev_status body(ex_rank *r, void *ctx) {
  rdtp_config config;
  rdtp_config_init(&config);
  config.max_tokens = TOKENS, config.hidden = HIDDEN, config.vocab = VOCAB, config.dtype = LEV_F64;

  rdtp_plan *plan;
  config.budget = 1000; /* too small: the error names what would do */
  LEV_TRY(ex_refused(r, config.budget, rdtp_plan_create(r->device, r->comm, &config, &plan)));

  config.budget = BUDGET;
  LEV_TRY(rdtp_plan_create(r->device, r->comm, &config, &plan));
  lev_status status = step(r, ctx, plan);
  if (status != LEV_OK) lev_comm_abort(r->comm); /* nobody waits for a rank that gave up */
  rdtp_destroy(plan);
  return status;
}

/* The same by definition: softmax over all of V, token by token. */
static bool check(const problem *p) {
  static double dh[ALL_TOKENS * HIDDEN], dw[VOCAB * HIDDEN], prob[VOCAB];
  double loss = 0, got = 0;
  for (int n = 0; n < ALL_TOKENS; ++n) {
    const double *h = p->h + n * HIDDEN;
    double z = 0;
    for (int v = 0; v < VOCAB; ++v) {
      prob[v] = 0;
      for (int j = 0; j < HIDDEN; ++j) prob[v] += h[j] * p->w[v * HIDDEN + j];
      z += prob[v] = exp(prob[v]);
    }
    loss -= log(prob[p->labels[n]] / z);
    for (int v = 0; v < VOCAB; ++v) {
      double g = (prob[v] / z - (v == p->labels[n])) / ALL_TOKENS;
      for (int j = 0; j < HIDDEN; ++j) dh[n * HIDDEN + j] += g * p->w[v * HIDDEN + j], dw[v * HIDDEN + j] += g * h[j];
    }
  }
  for (int r = 0; r < RANKS; ++r) got += p->sums[r][0];
  bool ok = ex_close("loss", &got, &loss, 1, 1e-11);
  ok &= ex_close("dh", p->dh, dh, ALL_TOKENS * HIDDEN, 1e-11);
  return ex_close("dw", p->dw, dw, VOCAB * HIDDEN, 1e-11) && ok;
}

int main(void) {
  static problem p;
  ex_random(p.h, ALL_TOKENS * HIDDEN, 1, 1);
  ex_random(p.w, VOCAB * HIDDEN, 0.2, 2);
  for (int n = 0; n < ALL_TOKENS; ++n) p.labels[n] = n * 37 % VOCAB;
  return ex_run(RANKS, body, &p) && check(&p) ? 0 : 1;
}
