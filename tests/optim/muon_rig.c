/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/optim/muon_rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/gemm.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

static lev_status open_arenas(muon_rig *r, size_t extra, size_t shortage, bool dry) {
  size_t keep[LEV_MEM_CLASSES], step[LEV_MEM_CLASSES];
  muon_plan_bytes(r->plan, MUON_PERSISTENT, keep);
  muon_plan_bytes(r->plan, MUON_STEP, step);
  for (int c = 0; c <= LEV_MEM_PINNED; ++c) {
    size_t bytes = keep[c] + step[c] + (c == LEV_MEM_DEVICE ? extra - shortage : 0);
    void *slab;
    LEV_TRY(lev_device_alloc(r->device, t_mem((lev_mem)c), bytes, &slab));
    if (!dry) memset(slab, 0xFF, bytes);
    LEV_TRY(lev_arena_create(r->device, r->ledger, (lev_mem)c, slab, dry ? SIZE_MAX : bytes, &r->arenas[c]));
  }
  return LEV_OK;
}

static lev_status open_all(muon_rig *r, const muon_config *config, muon_rig_options o) {
  bool dry = o.backend == LEV_BACKEND_DRY;
  LEV_TRY(lev_trace_create(4096, &r->trace));
  LEV_TRY(lev_ledger_create(r->trace, &r->ledger));
  lev_device_config device = {
      .backend = o.backend, .trace = r->trace, .fault = &r->fault, .jitter_seed = o.jitter_seed};
  LEV_TRY(lev_device_open(&device, &r->device));
  LEV_TRY(lev_stream_create(r->device, "compute", &r->stream));
  LEV_TRY(muon_plan_create(r->device, config, &r->plan));
  size_t params = lev_bytes(r->shard, 1, lev_dtype_bytes(config->param_dtype));
  size_t grads = lev_bytes(r->shard, 1, lev_dtype_bytes(config->grad_dtype));
  size_t workspace = lev_gemm_workspace_bytes(o.backend, config->compute_dtype);
  size_t extra = lev_align_up(params) + lev_align_up(grads) + lev_align_up(workspace);
  LEV_TRY(open_arenas(r, extra, o.device_shortage, dry));
  lev_arena *device_arena = r->arenas[LEV_MEM_DEVICE];
  void *scratch;
  LEV_TRY(lev_arena_persist(device_arena, "weights", params, &r->params));
  LEV_TRY(lev_arena_persist(device_arena, "grads", grads, &r->grads));
  LEV_TRY(lev_arena_persist(device_arena, "library", workspace, &scratch));
  lev_stream_set_workspace(r->stream, scratch, workspace);
  lev_blocks blocks;
  LEV_TRY(lev_blocks_take(r->arenas, false, muon_walk_persistent, r->plan, &blocks));
  LEV_TRY(muon_plan_bind(r->plan, MUON_PERSISTENT, &blocks));
  lev_arena_seal(device_arena);
  lev_arena_seal(r->arenas[LEV_MEM_PINNED]);
  lev_device_seal(r->device);
  if (!dry) {
    num_random(config->param_dtype, r->params, NULL, r->shard, 1, 1);
    memset(r->grads, 0, grads);
  }
  LEV_TRY(muon_init(r->plan, r->params, r->stream));
  return LEV_OK;
}

bool muon_rig_open(muon_rig *r, const muon_config *config, int64_t shard, muon_rig_options options) {
  *r = (muon_rig){.shard = shard, .param_dtype = config->param_dtype, .grad_dtype = config->grad_dtype};
  return T_EXPECT_OK(open_all(r, config, options));
}

void muon_rig_close(muon_rig *r) {
  muon_destroy(r->plan);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) lev_arena_destroy(r->arenas[c]);
  lev_device_close(r->device);
  lev_ledger_destroy(r->ledger);
  lev_trace_destroy(r->trace);
}

void muon_rig_grads(muon_rig *r, int n) {
  if (lev_device_backend(r->device) == LEV_BACKEND_DRY) return;
  num_random(r->grad_dtype, r->grads, NULL, r->shard, 1, 100 + (uint32_t)n);
}

static lev_status step_in_scope(muon_rig *r, int n, double lr, double grad_scale) {
  lev_blocks blocks;
  LEV_TRY(lev_blocks_take(r->arenas, true, muon_walk_step, r->plan, &blocks));
  LEV_TRY(muon_plan_bind(r->plan, MUON_STEP, &blocks));
  muon_step_args args = {r->params, r->grads, lr, grad_scale, n};
  LEV_TRY(muon_step(r->plan, &args, r->stream));
  /* Whoever has the bytes next writes them on this stream: with a missing join this is a race. */
  if (blocks.bytes[LEV_MEM_DEVICE] > 0)
    LEV_TRY(lev_fill(r->stream, blocks.base[LEV_MEM_DEVICE], 0xFF, blocks.bytes[LEV_MEM_DEVICE], "next"));
  return LEV_OK;
}

lev_status muon_rig_step(muon_rig *r, int n, double lr, double grad_scale) {
  LEV_TRY(lev_stream_sync(r->stream));
  muon_rig_grads(r, n);
  LEV_TRY(lev_arena_push(r->arenas[LEV_MEM_DEVICE], &r->stream, 1));
  lev_status st = step_in_scope(r, n, lr, grad_scale);
  LEV_TRY(lev_arena_pop(r->arenas[LEV_MEM_DEVICE]));
  lev_status sync = lev_stream_sync(r->stream);
  return st != LEV_OK ? st : sync;
}

/* ---- oracle ---- */

/* out[m,n] = a[m,k] b[k,n] */
static void multiply(const double *a, const double *b, double *out, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
      out[i * n + j] = sum;
    }
}

static void transpose(const double *in, double *out, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) out[j * rows + i] = in[i * cols + j];
}

/* x [n, m], n <= m, orthogonalised in place. */
static void newton_schulz(const muon_config *c, double *x, int64_t n, int64_t m) {
  size_t big = sizeof(double) * (size_t)(n * m), small = sizeof(double) * (size_t)(n * n);
  double *t = malloc(big), *y = malloc(big), *gram = malloc(small), *square = malloc(small);
  double norm = 0;
  for (int64_t i = 0; i < n * m; ++i) norm += x[i] * x[i];
  norm = sqrt(norm) * muon_set_norm_factor(c->set) + c->eps;
  for (int64_t i = 0; i < n * m; ++i) x[i] /= norm;
  int steps = c->steps ? c->steps : muon_set_steps(c->set);
  for (int s = 0; s < steps; ++s) {
    double abc[3];
    muon_set_row(c->set, s, abc);
    transpose(x, t, n, m);
    multiply(x, t, gram, n, n, m);
    multiply(gram, gram, square, n, n, n);
    for (int64_t i = 0; i < n * n; ++i) square[i] = abc[1] * gram[i] + abc[2] * square[i];
    multiply(square, x, y, n, m, n);
    for (int64_t i = 0; i < n * m; ++i) x[i] = abc[0] * x[i] + y[i];
  }
  free(t), free(y), free(gram), free(square);
}

void muon_oracle(const muon_config *c, int64_t rows, int64_t cols, double *w, double *momentum, const double *grad,
                 double lr, double grad_scale) {
  int64_t count = rows * cols;
  double *u = malloc(sizeof(double) * (size_t)count), *x = malloc(sizeof(double) * (size_t)count);
  for (int64_t i = 0; i < count; ++i) {
    double g = grad_scale * grad[i];
    momentum[i] = c->mu * momentum[i] + g;
    u[i] = c->nesterov ? g + c->mu * momentum[i] : momentum[i];
  }
  if (rows > cols) {
    transpose(u, x, rows, cols);
    newton_schulz(c, x, cols, rows);
    transpose(x, u, cols, rows);
  } else {
    newton_schulz(c, u, rows, cols);
  }
  double rate = lr * muon_scale_factor(c->scale, rows, cols);
  for (int64_t i = 0; i < count; ++i) w[i] = w[i] * (1 - lr * c->weight_decay) - rate * u[i];
  free(u), free(x);
}
