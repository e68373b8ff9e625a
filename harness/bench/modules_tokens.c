/* SPDX-License-Identifier: Apache-2.0 */
/* Area modules: what works on tokens (pipelined_llep, ring_dtp). */
#include <math.h>
#include <string.h>

#include "common/comm.h"
#include "common/dims.h"
#include "harness/bench/modules.h"
#include "pipelined_llep/pipelined_llep.h"
#include "ring_dtp/ring_dtp.h"

/* ---- experts ---- */

enum { K = 8, EXPERTS = 64, LLEP_TOKENS = 4 }; /* LLEP_TOKENS: compared with the definition */

typedef struct llep_job {
  int64_t tokens, hidden, inter;
  module_world world[2];
  llep_plan *plan[2]; /* bounded, plain */
  lev_blocks work[2]; /* of the larger phase */
  void *x, *ids, *probs, *w, *dy;
  void *y[2], *dx[2], *dprobs[2], *dw[2];
} llep_job;

static lev_status llep_once(bench *b, llep_job *j, int s) {
  llep_forward_args f = {.tokens = j->tokens, .x = j->x, .ids = j->ids, .probs = j->probs, .w = j->w, .y = j->y[s]};
  llep_backward_args g = {.tokens = j->tokens, .x = j->x, .ids = j->ids, .probs = j->probs, .w = j->w, .dy = j->dy};
  g.dx = j->dx[s], g.dprobs = j->dprobs[s], g.dw = j->dw[s];
  LEV_TRY(llep_plan_bind(j->plan[s], LLEP_FORWARD, &j->work[s]));
  LEV_TRY(llep_forward(j->plan[s], &f, bench_stream(b)));
  LEV_TRY(llep_plan_bind(j->plan[s], LLEP_BACKWARD, &j->work[s]));
  return llep_backward(j->plan[s], &g, bench_stream(b));
}
static lev_status llep_bounded(bench *b, void *ctx) {
  return llep_once(b, ctx, 0);
}
static lev_status llep_plain(bench *b, void *ctx) {
  return llep_once(b, ctx, 1);
}

static lev_status llep_inputs(bench *b, llep_job *j) {
  int64_t n = j->tokens, h = j->hidden, weights = EXPERTS * 3 * j->inter * h;
  void *numbers;
  LEV_TRY(bench_host(b, (size_t)(n * K) * 4, &numbers));
  /* Picks of a token are distinct; the load leans on the first experts by half its mean. */
  for (int64_t t = 0; t < n; ++t)
    for (int64_t k = 0; k < K; ++k)
      ((int32_t *)numbers)[t * K + k] =
          (int32_t)(t % 3 == 0 ? (t / 3 * 5 + k) % (EXPERTS / 2) : (t * 29 + 8 * k) % EXPERTS);
  struct {
    void **at;
    int64_t count;
    lev_dtype dtype;
    double scale;
  } arrays[] = {{&j->x, n * h, LEV_BF16, 1},
                {&j->probs, n * K, LEV_F32, 0.2},
                {&j->w, weights, LEV_BF16, 0.03},
                {&j->dy, n * h, LEV_BF16, 1}};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) {
    LEV_TRY(bench_alloc(b, (size_t)arrays[i].count * lev_dtype_bytes(arrays[i].dtype), arrays[i].at));
    LEV_TRY(bench_random(b, arrays[i].dtype, *arrays[i].at, arrays[i].count, arrays[i].scale));
  }
  LEV_TRY(bench_alloc(b, (size_t)(n * K) * 4, &j->ids));
  LEV_TRY(bench_put(b, j->ids, numbers, (size_t)(n * K) * 4));
  for (int s = 0; s < 2; ++s) {
    LEV_TRY(bench_alloc(b, (size_t)(n * h) * 2, &j->y[s]));
    LEV_TRY(bench_alloc(b, (size_t)(n * h) * 2, &j->dx[s]));
    LEV_TRY(bench_alloc(b, (size_t)(n * K) * 4, &j->dprobs[s]));
    LEV_TRY(bench_alloc(b, (size_t)weights * 4, &j->dw[s]));
    LEV_TRY(lev_fill(bench_stream(b), j->dw[s], 0, (size_t)weights * 4, "bench.zero"));
  }
  return LEV_OK;
}

static lev_status llep_prepare(bench *b, llep_job *j, int s, size_t *held) {
  size_t keep[LEV_MEM_CLASSES], forward[LEV_MEM_CLASSES], backward[LEV_MEM_CLASSES];
  lev_blocks blocks;
  llep_config c;
  llep_config_init(&c);
  c.max_tokens = j->tokens, c.hidden = j->hidden, c.inter = j->inter, c.experts = EXPERTS, c.top_k = K;
  c.dtype = LEV_BF16, c.schedule = s ? LLEP_PLAIN : LLEP_BOUNDED;
  LEV_TRY(module_join(b, &j->world[s]));
  LEV_TRY(llep_plan_create(bench_device(b), j->world[s].comm, &c, &j->plan[s]));
  llep_plan_bytes(j->plan[s], LLEP_PERSISTENT, keep);
  llep_plan_bytes(j->plan[s], LLEP_FORWARD, forward);
  llep_plan_bytes(j->plan[s], LLEP_BACKWARD, backward);
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) forward[cls] = lev_max_size(forward[cls], backward[cls]);
  LEV_TRY(bench_blocks(b, keep, &blocks));
  LEV_TRY(llep_plan_bind(j->plan[s], LLEP_PERSISTENT, &blocks));
  *held = keep[LEV_MEM_DEVICE] + forward[LEV_MEM_DEVICE];
  return bench_blocks(b, forward, &j->work[s]);
}

/* y of one token by the definition; `w` holds an expert's weights. */
static lev_status llep_token(bench *b, const llep_job *j, int64_t token, double *x, double *w, double *act, double *y) {
  int64_t h = j->hidden, inter = j->inter;
  double ids[K], probs[K];
  LEV_TRY(bench_read(b, LEV_BF16, j->x, token * h, h, x));
  LEV_TRY(bench_read(b, LEV_I32, j->ids, token * K, K, ids));
  LEV_TRY(bench_read(b, LEV_F32, j->probs, token * K, K, probs));
  for (int64_t c = 0; c < h; ++c) y[c] = 0;
  for (int k = 0; k < K; ++k) {
    LEV_TRY(bench_read(b, LEV_BF16, j->w, (int64_t)ids[k] * 3 * inter * h, 3 * inter * h, w));
    for (int64_t i = 0; i < inter; ++i) {
      double gate = 0, up = 0;
      for (int64_t c = 0; c < h; ++c) gate += w[i * h + c] * x[c], up += w[(inter + i) * h + c] * x[c];
      act[i] = gate / (1 + exp(-gate)) * up;
    }
    for (int64_t c = 0; c < h; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < inter; ++i) sum += w[2 * inter * h + c * inter + i] * act[i];
      y[c] += probs[k] * sum;
    }
  }
  return LEV_OK;
}

static lev_status llep_compare(bench *b, const llep_job *j) {
  int64_t h = j->hidden, one = 3 * j->inter * h;
  double *x, *w, *act, *want, *got;
  LEV_TRY(bench_doubles(b, h, &x));
  LEV_TRY(bench_doubles(b, one, &w));
  LEV_TRY(bench_doubles(b, j->inter, &act));
  LEV_TRY(bench_doubles(b, h, &want));
  LEV_TRY(bench_doubles(b, h, &got));
  for (int s = 0; s < LLEP_TOKENS; ++s) {
    int64_t token = s * (j->tokens - 1) / (LLEP_TOKENS - 1);
    LEV_TRY(llep_token(b, j, token, x, w, act, want));
    LEV_TRY(bench_read(b, LEV_BF16, j->y[0], token * h, h, got));
    LEV_TRY(bench_close(b, "y", got, want, h, 1e-2)); /* gate, up, their product and each pick's row are bf16 */
  }
  LEV_TRY(module_same(b, "y, bounded and plain", LEV_BF16, j->y[0], j->y[1], j->tokens, h, 4e-3));
  LEV_TRY(module_same(b, "dx, bounded and plain", LEV_BF16, j->dx[0], j->dx[1], j->tokens, h, 4e-3));
  LEV_TRY(module_same(b, "dprobs, bounded and plain", LEV_F32, j->dprobs[0], j->dprobs[1], j->tokens, K, 4e-3));
  return module_same(b, "dw, bounded and plain", LEV_F32, j->dw[0], j->dw[1], EXPERTS * 3 * j->inter, h, 4e-3);
}

static lev_status llep_case(bench *b, llep_job *j) {
  bench_work work = {.once = llep_bounded, .plain = llep_plain, .ctx = j};
  j->tokens = bench_size(b, 32768, 256), j->hidden = bench_size(b, 2048, 64), j->inter = bench_size(b, 1024, 32);
  LEV_TRY(llep_inputs(b, j));
  LEV_TRY(llep_prepare(b, j, 0, &work.held_bytes));
  LEV_TRY(llep_prepare(b, j, 1, &work.plain_bytes));
  LEV_TRY(llep_bounded(b, j));
  LEV_TRY(llep_plain(b, j));
  LEV_TRY(llep_compare(b, j));
  /* forward 3 products, backward 6 and the 2 that are recomputed */
  work.flops = 2.0 * 11 * (double)(j->tokens * K) * (double)(j->hidden * j->inter);
  return bench_measure(b, &work, BENCH_MS);
}

lev_status module_llep(bench *b, const void *unused) {
  (void)unused;
  llep_job j = {0};
  lev_status st = llep_case(b, &j), waited = lev_stream_sync(bench_stream(b));
  for (int s = 0; s < 2; ++s) {
    llep_destroy(j.plan[s]);
    module_leave(&j.world[s]);
  }
  return st != LEV_OK ? st : waited;
}

/* ---- vocabulary ---- */

enum { RDTP_TOKENS = 3, RDTP_PIECE = 2048 };

typedef struct rdtp_job {
  int64_t tokens, hidden, vocab;
  module_world world;
  rdtp_plan *plan[2];
  void *h, *labels, *w, *dh[2], *dw[2], *sums[2];
} rdtp_job;

static int32_t label_of(const rdtp_job *j, int64_t token) {
  return (int32_t)(token * 7919 % j->vocab);
}

static lev_status rdtp_once(bench *b, rdtp_job *j, int s) {
  rdtp_args a = {.tokens = j->tokens, .h = j->h, .labels = j->labels, .w = j->w, .dh = j->dh[s], .dw = j->dw[s]};
  a.sums = j->sums[s], a.grad_scale = 1;
  return rdtp_step(j->plan[s], &a, bench_stream(b));
}
static lev_status rdtp_bounded(bench *b, void *ctx) {
  return rdtp_once(b, ctx, 0);
}
static lev_status rdtp_plain(bench *b, void *ctx) {
  return rdtp_once(b, ctx, 1);
}

/* dh of sampled tokens by the definition: two passes over the head, piece by piece. */
static lev_status rdtp_reference(bench *b, const rdtp_job *j, double *dh) {
  int64_t h = j->hidden;
  double *x, *w, *p, z[RDTP_TOKENS] = {0};
  LEV_TRY(bench_doubles(b, RDTP_TOKENS * h, &x));
  LEV_TRY(bench_doubles(b, RDTP_PIECE * h, &w));
  LEV_TRY(bench_doubles(b, RDTP_TOKENS * j->vocab, &p));
  for (int s = 0; s < RDTP_TOKENS; ++s)
    LEV_TRY(bench_read(b, LEV_BF16, j->h, s * (j->tokens - 1) / (RDTP_TOKENS - 1) * h, h, x + s * h));
  for (int pass = 0; pass < 2; ++pass)
    for (int64_t first = 0; first < j->vocab; first += RDTP_PIECE) {
      int64_t n = lev_min_i64(RDTP_PIECE, j->vocab - first);
      LEV_TRY(bench_read(b, LEV_BF16, j->w, first * h, n * h, w));
      for (int64_t v = 0; v < n; ++v)
        for (int s = 0; s < RDTP_TOKENS; ++s) {
          double *own = &p[s * j->vocab + first + v], sum = 0;
          if (pass == 0) {
            for (int64_t i = 0; i < h; ++i) sum += w[v * h + i] * x[s * h + i];
            z[s] += *own = exp(sum);
          } else {
            int64_t token = s * (j->tokens - 1) / (RDTP_TOKENS - 1);
            double g = *own / z[s] - (first + v == label_of(j, token));
            for (int64_t i = 0; i < h; ++i) dh[s * h + i] += g * w[v * h + i];
          }
        }
    }
  return LEV_OK;
}

static lev_status rdtp_compare(bench *b, const rdtp_job *j) {
  double *got, *want, loss[2];
  int64_t h = j->hidden;
  LEV_TRY(bench_doubles(b, RDTP_TOKENS * h, &got));
  LEV_TRY(bench_doubles(b, RDTP_TOKENS * h, &want));
  LEV_TRY(rdtp_reference(b, j, want));
  for (int s = 0; s < RDTP_TOKENS; ++s)
    LEV_TRY(bench_read(b, LEV_BF16, j->dh[0], s * (j->tokens - 1) / (RDTP_TOKENS - 1) * h, h, got + s * h));
  LEV_TRY(bench_close(b, "dh", got, want, RDTP_TOKENS * h, 6e-3));
  for (int s = 0; s < 2; ++s) LEV_TRY(bench_read(b, LEV_F64, j->sums[s], 0, 1, &loss[s]));
  LEV_TRY(bench_close(b, "loss, bounded and plain", &loss[0], &loss[1], 1, 1e-6));
  LEV_TRY(module_same(b, "dh, bounded and plain", LEV_BF16, j->dh[0], j->dh[1], j->tokens, h, 4e-3));
  return module_same(b, "dw, bounded and plain", LEV_F32, j->dw[0], j->dw[1], j->vocab, h, 4e-3);
}

static lev_status rdtp_prepare(bench *b, rdtp_job *j, int s, bool one_pass, size_t *held) {
  size_t bytes[LEV_MEM_CLASSES];
  lev_blocks blocks;
  rdtp_config c;
  rdtp_config_init(&c);
  c.max_tokens = j->tokens, c.hidden = j->hidden, c.vocab = j->vocab, c.dtype = LEV_BF16;
  c.schedule = s ? RDTP_PLAIN : RDTP_BOUNDED, c.one_pass = one_pass && s == 0;
  if (s == 0) c.tile_rows = bench_size(b, 4096, 64);
  if (s == 0 && !one_pass) c.tile_cols = bench_size(b, 16384, 64);
  LEV_TRY(rdtp_plan_create(bench_device(b), j->world.comm, &c, &j->plan[s]));
  LEV_TRY(bench_check(b, rdtp_plan_info(j->plan[s]).one_pass == c.one_pass, "the plan fell back to two passes"));
  rdtp_plan_bytes(j->plan[s], RDTP_STEP, bytes);
  *held = bytes[LEV_MEM_DEVICE];
  LEV_TRY(bench_blocks(b, bytes, &blocks));
  return rdtp_plan_bind(j->plan[s], RDTP_STEP, &blocks);
}

static lev_status rdtp_case(bench *b, rdtp_job *j, bool one_pass) {
  bench_work work = {.once = rdtp_bounded, .plain = rdtp_plain, .ctx = j};
  j->tokens = bench_size(b, 32768, 256), j->hidden = bench_size(b, 2048, 64), j->vocab = bench_size(b, 151936, 1003);
  int64_t n = j->tokens, h = j->hidden, v = j->vocab;
  void *numbers;
  LEV_TRY(bench_host(b, (size_t)n * 4, &numbers));
  for (int64_t t = 0; t < n; ++t) ((int32_t *)numbers)[t] = label_of(j, t);
  LEV_TRY(module_join(b, &j->world));
  LEV_TRY(bench_alloc(b, (size_t)(n * h) * 2, &j->h));
  LEV_TRY(bench_alloc(b, (size_t)n * 4, &j->labels));
  LEV_TRY(bench_alloc(b, (size_t)(v * h) * 2, &j->w));
  LEV_TRY(bench_random(b, LEV_BF16, j->h, n * h, 1));
  LEV_TRY(bench_random(b, LEV_BF16, j->w, v * h, 0.02));
  LEV_TRY(bench_put(b, j->labels, numbers, (size_t)n * 4));
  for (int s = 0; s < 2; ++s) {
    LEV_TRY(bench_alloc(b, (size_t)(n * h) * 2, &j->dh[s]));
    LEV_TRY(bench_alloc(b, (size_t)(v * h) * 4, &j->dw[s]));
    LEV_TRY(lev_fill(bench_stream(b), j->dw[s], 0, (size_t)(v * h) * 4, "bench.zero"));
    LEV_TRY(bench_alloc(b, RDTP_SUMS * sizeof(double), &j->sums[s]));
    LEV_TRY(lev_fill(bench_stream(b), j->sums[s], 0, RDTP_SUMS * sizeof(double), "bench.zero"));
    LEV_TRY(rdtp_prepare(b, j, s, one_pass, s ? &work.plain_bytes : &work.held_bytes));
    LEV_TRY(rdtp_once(b, j, s));
  }
  LEV_TRY(rdtp_compare(b, j));
  work.flops = 2.0 * 3 * (double)n * (double)h * (double)v; /* the least: two passes take 4 products */
  return bench_measure(b, &work, BENCH_MS);
}

lev_status module_rdtp(bench *b, const void *one_pass) {
  rdtp_job j = {0};
  lev_status st = rdtp_case(b, &j, *(const bool *)one_pass), waited = lev_stream_sync(bench_stream(b));
  for (int s = 0; s < 2; ++s) rdtp_destroy(j.plan[s]);
  module_leave(&j.world);
  return st != LEV_OK ? st : waited;
}
