/* SPDX-License-Identifier: Apache-2.0 */
/* Area modules: what keeps state in host memory (sco, offload_adamw, muon). */
#include <string.h>
#include <unistd.h>

#include "common/dims.h"
#include "common/gemm.h"
#include "harness/bench/modules.h"
#include "muon/muon.h"
#include "offload_adamw/offload_adamw.h"
#include "sco/sco.h"

/* ---- sco: layers that write and read their inputs around matrix products ---- */

enum { LAYERS = 16, H = 2048, PRODUCTS = 8 };

typedef struct sco_job {
  sco_plan *plan[2]; /* bounded, plain */
  lev_gemm_args product;
  void *from; /* a layer input */
  size_t item;
  bool marked; /* each layer's item is filled with its number, and compared when it is read */
} sco_job;

static lev_status products(bench *b, const lev_gemm_args *g, const void *x) {
  lev_gemm_args args = *g;
  args.a = x;
  for (int i = 0; i < PRODUCTS; ++i) LEV_TRY(lev_gemm(bench_stream(b), &args));
  return LEV_OK;
}

static lev_status compare_mark(bench *b, const sco_job *j, const void *item, int layer) {
  double got[2];
  unsigned char bytes[2] = {(unsigned char)(layer + 1), (unsigned char)(layer + 1)};
  LEV_TRY(bench_read(b, LEV_U8, item, 0, 1, &got[0]));
  LEV_TRY(bench_read(b, LEV_U8, item, (int64_t)j->item - 1, 1, &got[1]));
  return bench_check(b, got[0] == bytes[0] && got[1] == bytes[1], "layer %d reads another layer's input", layer);
}

static lev_status micro_batch(bench *b, sco_job *j, sco_plan *plan) {
  lev_stream *stream = bench_stream(b);
  void *h;
  for (int l = 0; l < LAYERS; ++l) {
    LEV_TRY(sco_write_begin(plan, l, SCO_BOUNDARY, stream, &h));
    LEV_TRY(j->marked ? lev_fill(stream, h, l + 1, j->item, "bench.mark")
                      : lev_copy(stream, h, j->from, j->item, "bench.layer"));
    LEV_TRY(sco_write_end(plan, l, SCO_BOUNDARY, j->item, stream));
    LEV_TRY(products(b, &j->product, h));
  }
  for (int l = LAYERS - 1; l >= 0; --l) {
    LEV_TRY(sco_read(plan, l, SCO_BOUNDARY, stream, &h));
    if (l > 0) LEV_TRY(sco_prefetch(plan, l - 1, SCO_BOUNDARY, stream));
    if (j->marked) LEV_TRY(compare_mark(b, j, h, l));
    LEV_TRY(products(b, &j->product, h));
    LEV_TRY(sco_release(plan, l, SCO_BOUNDARY, stream));
  }
  return sco_reset(plan);
}

static lev_status sco_bounded(bench *b, void *ctx) {
  sco_job *j = ctx;
  return micro_batch(b, j, j->plan[0]);
}
static lev_status sco_plain(bench *b, void *ctx) {
  sco_job *j = ctx;
  return micro_batch(b, j, j->plan[1]);
}

static lev_status sco_case(bench *b, sco_job *j) {
  int64_t tokens = bench_size(b, 65536, 64), h = bench_size(b, H, 64);
  size_t bytes[2][LEV_MEM_CLASSES];
  lev_blocks blocks;
  void *w, *out;
  j->item = (size_t)(tokens * h) * 2;
  for (int s = 0; s < 2; ++s) {
    sco_config c = sco_config_default();
    c.layers = LAYERS, c.item_bytes[SCO_BOUNDARY] = j->item, c.schedule = s ? SCO_PLAIN : SCO_BOUNDED;
    LEV_TRY(sco_plan_create(bench_device(b), &c, &j->plan[s]));
    sco_plan_bytes(j->plan[s], SCO_PERSISTENT, bytes[s]);
    LEV_TRY(bench_blocks(b, bytes[s], &blocks));
    LEV_TRY(sco_plan_bind(j->plan[s], SCO_PERSISTENT, &blocks));
  }
  LEV_TRY(bench_alloc(b, j->item, &j->from));
  LEV_TRY(bench_alloc(b, j->item, &out));
  LEV_TRY(bench_alloc(b, (size_t)(h * h) * 2, &w));
  LEV_TRY(bench_random(b, LEV_BF16, j->from, tokens * h, 1));
  LEV_TRY(bench_random(b, LEV_BF16, w, h * h, 0.02));
  j->product = (lev_gemm_args){.m = tokens, .n = h, .k = h, .trans_b = true, .b = w, .c = out, .lda = h, .ldb = h};
  j->product.ldc = h, j->product.ab_type = j->product.c_type = LEV_BF16, j->product.alpha = 1;
  j->marked = true;
  LEV_TRY(sco_bounded(b, j));
  j->marked = false;
  bench_work work = {.once = sco_bounded, .plain = sco_plain, .ctx = j};
  work.held_bytes = bytes[0][LEV_MEM_DEVICE], work.plain_bytes = bytes[1][LEV_MEM_DEVICE];
  work.flops = 4.0 * LAYERS * PRODUCTS * (double)tokens * (double)h * (double)h;
  return bench_measure(b, &work, BENCH_MS);
}

lev_status module_sco(bench *b, const void *unused) {
  (void)unused;
  sco_job j = {0};
  lev_status st = sco_case(b, &j), waited = lev_stream_sync(bench_stream(b));
  for (int s = 0; s < 2; ++s) sco_plan_destroy(j.plan[s]);
  return st != LEV_OK ? st : waited;
}

/* ---- optimizers: parameters after a bounded step are those after a plain one, bit for bit ---- */

typedef struct step_job {
  void *plan[2], *params[2], *grads; /* bounded, plain */
  int64_t step[2];
} step_job;

/* Memory of both schedules, filled; the bytes that each holds on the device. */
static lev_status step_arrays(bench *b, step_job *j, int64_t count) {
  size_t bytes = (size_t)count * 2;
  for (int s = 0; s < 2; ++s) LEV_TRY(bench_alloc(b, bytes, &j->params[s]));
  LEV_TRY(bench_alloc(b, bytes, &j->grads));
  LEV_TRY(bench_random(b, LEV_BF16, j->params[0], count, 0.02));
  LEV_TRY(bench_random(b, LEV_BF16, j->grads, count, 1));
  return lev_copy(bench_stream(b), j->params[1], j->params[0], bytes, "bench.copy");
}

/* Steps of both schedules, then the comparison and the measurement. */
static lev_status measure_step(bench *b, step_job *j, bench_work *work, int64_t count) {
  LEV_TRY(work->once(b, j));
  LEV_TRY(work->plain(b, j));
  LEV_TRY(module_same(b, "parameters", LEV_BF16, j->params[0], j->params[1], count / 4096, 4096, 0));
  work->ctx = j;
  return bench_measure(b, work, BENCH_MS);
}

static lev_status oadamw_once(bench *b, step_job *j, int s) {
  oadamw_step_args args = {
      .params = j->params[s], .grads = j->grads, .lr = 1e-3, .step = ++j->step[s], .grad_scale = 1};
  return oadamw_step(j->plan[s], &args, bench_stream(b));
}
static lev_status oadamw_bounded(bench *b, void *ctx) {
  return oadamw_once(b, ctx, 0);
}
static lev_status oadamw_plain(bench *b, void *ctx) {
  return oadamw_once(b, ctx, 1);
}

static int workers(void) {
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n < 1 ? 1 : n > OADAMW_WORKERS_MAX ? OADAMW_WORKERS_MAX : (int)n;
}

static lev_status oadamw_case(bench *b, step_job *j, oadamw_placement placement) {
  int64_t count = bench_size(b, (int64_t)1 << 28, 1 << 18);
  oadamw_segment segment = {.count = count, .weight_decay = 0.1, .lr_scale = 1};
  bench_work work = {.once = oadamw_bounded, .plain = oadamw_plain};
  LEV_TRY(step_arrays(b, j, count));
  for (int s = 0; s < 2; ++s) {
    oadamw_config c = oadamw_config_default();
    oadamw_plan *plan;
    c.segments = &segment, c.n_segments = 1, c.param_dtype = c.grad_dtype = LEV_BF16;
    bool host = placement != OADAMW_GPU; /* a bucket in flight is a host thread at work */
    c.placement = placement, c.slots = host ? OADAMW_SLOTS_MAX : 3, c.workers = workers();
    c.bucket = bench_size(b, (int64_t)1 << (host ? 21 : 23), 1 << 14);
    c.schedule = s ? OADAMW_PLAIN : OADAMW_BOUNDED;
    LEV_TRY(oadamw_plan_create(bench_device(b), &c, &plan));
    j->plan[s] = plan;
    for (int phase = 0; phase < OADAMW_PHASES; ++phase) {
      size_t bytes[LEV_MEM_CLASSES];
      lev_blocks blocks;
      oadamw_plan_bytes(plan, (oadamw_phase)phase, bytes);
      LEV_TRY(bench_blocks(b, bytes, &blocks));
      LEV_TRY(oadamw_plan_bind(plan, (oadamw_phase)phase, &blocks));
      *(s ? &work.plain_bytes : &work.held_bytes) += bytes[LEV_MEM_DEVICE];
    }
    LEV_TRY(oadamw_init(plan, j->params[s], bench_stream(b)));
  }
  return measure_step(b, j, &work, count);
}

lev_status module_oadamw(bench *b, const void *placement) {
  step_job j = {0};
  lev_status st = oadamw_case(b, &j, *(const oadamw_placement *)placement), waited = lev_stream_sync(bench_stream(b));
  for (int s = 0; s < 2; ++s) oadamw_destroy(j.plan[s]);
  return st != LEV_OK ? st : waited;
}

static lev_status muon_once(bench *b, step_job *j, int s) {
  muon_step_args args = {.params = j->params[s], .grads = j->grads, .lr = 1e-3, .step = ++j->step[s], .grad_scale = 1};
  return muon_step(j->plan[s], &args, bench_stream(b));
}
static lev_status muon_bounded(bench *b, void *ctx) {
  return muon_once(b, ctx, 0);
}
static lev_status muon_plain(bench *b, void *ctx) {
  return muon_once(b, ctx, 1);
}

enum { MATRICES = 192 };

static lev_status muon_case(bench *b, step_job *j) {
  int64_t rows = bench_size(b, 2048, 64), cols = bench_size(b, 1024, 32), count = MATRICES * rows * cols;
  muon_matrix matrices[MATRICES];
  bench_work work = {.once = muon_bounded, .plain = muon_plain};
  for (int i = 0; i < MATRICES; ++i)
    matrices[i] = (muon_matrix){i * rows * cols, i % 3 ? cols : rows, i % 3 ? rows : cols};
  LEV_TRY(step_arrays(b, j, count));
  for (int s = 0; s < 2; ++s) {
    muon_config c = muon_config_default();
    muon_plan *plan;
    c.matrices = matrices, c.n_matrices = MATRICES, c.param_dtype = c.grad_dtype = c.compute_dtype = LEV_BF16;
    c.slots = 3, c.schedule = s ? MUON_PLAIN : MUON_BOUNDED;
    c.bucket_bytes = s ? 0 : 2 * muon_bucket_bytes_min(&c);
    LEV_TRY(muon_plan_create(bench_device(b), &c, &plan));
    j->plan[s] = plan;
    work.flops = muon_flops(plan);
    for (int phase = 0; phase < MUON_PHASES; ++phase) {
      size_t bytes[LEV_MEM_CLASSES];
      lev_blocks blocks;
      muon_plan_bytes(plan, (muon_phase)phase, bytes);
      LEV_TRY(bench_blocks(b, bytes, &blocks));
      LEV_TRY(muon_plan_bind(plan, (muon_phase)phase, &blocks));
      *(s ? &work.plain_bytes : &work.held_bytes) += bytes[LEV_MEM_DEVICE];
    }
    LEV_TRY(muon_init(plan, j->params[s], bench_stream(b)));
  }
  return measure_step(b, j, &work, count);
}

lev_status module_muon(bench *b, const void *unused) {
  (void)unused;
  step_job j = {0};
  lev_status st = muon_case(b, &j), waited = lev_stream_sync(bench_stream(b));
  for (int s = 0; s < 2; ++s) muon_destroy(j.plan[s]);
  return st != LEV_OK ? st : waited;
}
