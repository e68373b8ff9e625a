/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/optim/oadamw_rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/optim/on_host.h"

const oadamw_segment oadamw_rig_segments[OADAMW_RIG_SEGMENTS] = {
    {.offset = 500, .count = 131, .weight_decay = 0.1, .lr_scale = 1},
    {.offset = 0, .count = 0, .weight_decay = 0.1, .lr_scale = 1},
    {.offset = 3, .count = 17, .weight_decay = 0, .lr_scale = 0.5},
    {.offset = 20, .count = 1, .weight_decay = 0, .lr_scale = 0.5}, /* joins the one before */
    {.offset = 21, .count = 301, .weight_decay = 0.01, .lr_scale = 2},
    {.offset = 640, .count = 1, .weight_decay = 0.5, .lr_scale = 1},
    {.offset = 641, .count = 199, .weight_decay = 0.1, .lr_scale = 1},
};

oadamw_config oadamw_rig_config(lev_dtype param, lev_dtype grad) {
  oadamw_config c = oadamw_config_default();
  c.segments = oadamw_rig_segments, c.n_segments = OADAMW_RIG_SEGMENTS;
  c.param_dtype = param, c.grad_dtype = grad;
  return c;
}

static uint64_t fold(uint64_t h, const void *bytes, size_t n) {
  const unsigned char *b = bytes;
  for (; n >= 8; n -= 8, b += 8) {
    uint64_t word;
    memcpy(&word, b, 8);
    h = (h ^ word) * 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
  }
  for (size_t i = 0; i < n; ++i) h = (h ^ b[i]) * 0x100000001b3u;
  return h;
}

double oadamw_rig_grad(int64_t step, int64_t i) {
  uint64_t x = (uint64_t)i * 0x9E3779B97F4A7C15u + (uint64_t)step * 0xD1B54A32D192ED03u;
  x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9u;
  return (double)((x ^ x >> 27) >> 11) * 0x1p-51 - 2;
}

typedef struct rig_args {
  oadamw_rig *r;
  int64_t step;
} rig_args;

static void fill_params(const void *args) {
  const rig_args *a = args;
  num_random(a->r->config.param_dtype, a->r->params, NULL, a->r->shard, 1, 1);
}
static void fill_grads(const void *args) {
  const rig_args *a = args;
  lev_dtype t = a->r->config.grad_dtype;
  for (int64_t i = 0; i < a->r->shard; ++i) lev_dtype_store(t, a->r->grads, i, oadamw_rig_grad(a->step, i));
}
static void look(const void *args) {
  oadamw_rig *r = ((const rig_args *)args)->r;
  r->seen = fold(r->seen, r->params, (size_t)r->shard * lev_dtype_bytes(r->config.param_dtype));
}
TEST_HOST_KERNEL(params_kernel, fill_params);
TEST_HOST_KERNEL(grads_kernel, fill_grads);
TEST_HOST_KERNEL(look_kernel, look);

static void pause_8ms(const void *args) {
  (void)args;
  nanosleep(&(struct timespec){.tv_nsec = 8000000}, NULL);
}
TEST_HOST_KERNEL(pause_kernel, pause_8ms);
static bool open_memory(oadamw_rig *r, lev_backend backend) {
  size_t bytes[LEV_MEM_CLASSES], step[LEV_MEM_CLASSES];
  oadamw_plan_bytes(r->plan, OADAMW_PERSISTENT, bytes);
  oadamw_plan_bytes(r->plan, OADAMW_STEP, step);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    size_t all = bytes[c] + step[c];
    if (!T_EXPECT_OK(lev_device_alloc(r->device, t_mem((lev_mem)c), all, &r->slab[c]))) return false;
    if (backend != LEV_BACKEND_DRY) memset(r->slab[c], 0xFF, all);
    if (!T_EXPECT_OK(lev_arena_create(r->device, r->ledger, (lev_mem)c, r->slab[c], all, &r->arena[c]))) return false;
  }
  lev_blocks blocks;
  if (!T_EXPECT_OK(lev_blocks_take(r->arena, false, oadamw_walk_persistent, r->plan, &blocks)) ||
      !T_EXPECT_OK(oadamw_plan_bind(r->plan, OADAMW_PERSISTENT, &blocks)))
    return false;
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) lev_arena_seal(r->arena[c]);
  size_t pb = (size_t)r->shard * lev_dtype_bytes(r->config.param_dtype);
  size_t gb = (size_t)r->shard * lev_dtype_bytes(r->config.grad_dtype);
  return T_EXPECT_OK(lev_device_alloc(r->device, t_mem(LEV_MEM_DEVICE), pb, &r->params)) &&
         T_EXPECT_OK(lev_device_alloc(r->device, t_mem(LEV_MEM_DEVICE), gb, &r->grads));
}

bool oadamw_rig_open(oadamw_rig *r, lev_backend backend, const oadamw_config *config, int64_t shard, uint64_t jitter) {
  r->config = *config;
  r->shard = shard;
  bool ok = T_EXPECT_OK(lev_trace_create(1 << 16, &r->trace)) && T_EXPECT_OK(lev_ledger_create(r->trace, &r->ledger));
  lev_device_config dc = {.backend = backend, .jitter_seed = jitter, .trace = r->trace, .fault = &r->fault};
  ok = ok && T_EXPECT_OK(lev_device_open(&dc, &r->device)) &&
       T_EXPECT_OK(lev_stream_create(r->device, "compute", &r->compute)) &&
       T_EXPECT_OK(oadamw_plan_create(r->device, config, &r->plan)) && open_memory(r, backend);
  rig_args a = {r, 0};
  return ok && T_EXPECT_OK(LEV_LAUNCH(r->compute, &params_kernel, a)) &&
         T_EXPECT_OK(oadamw_init(r->plan, r->params, r->compute));
}

void oadamw_rig_close(oadamw_rig *r) {
  oadamw_destroy(r->plan);
  if (r->compute) lev_stream_destroy(r->compute);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) lev_arena_destroy(r->arena[c]);
  lev_device_close(r->device);
  lev_ledger_destroy(r->ledger);
  lev_trace_destroy(r->trace);
}

/* Overwrites the whole work region, as a later phase of the step would. */
static lev_status poison_work(oadamw_rig *r) {
  size_t bytes[LEV_MEM_CLASSES];
  void *at;
  oadamw_plan_bytes(r->plan, OADAMW_STEP, bytes);
  if (bytes[LEV_MEM_DEVICE] == 0) return LEV_OK;
  LEV_TRY(lev_arena_push(r->arena[LEV_MEM_DEVICE], &r->compute, 1));
  LEV_TRY(lev_arena_alloc(r->arena[LEV_MEM_DEVICE], "test.other_phase", bytes[LEV_MEM_DEVICE], &at));
  LEV_TRY(lev_fill(r->compute, at, 0xFF, bytes[LEV_MEM_DEVICE], "test.poison"));
  return lev_arena_pop(r->arena[LEV_MEM_DEVICE]);
}

lev_status oadamw_rig_step(oadamw_rig *r, int64_t step, double lr, double grad_scale) {
  rig_args a = {r, step};
  if (r->slow) LEV_TRY(LEV_LAUNCH(r->slow, &pause_kernel, a));
  LEV_TRY(poison_work(r));
  LEV_TRY(LEV_LAUNCH(r->compute, &grads_kernel, a));
  LEV_TRY(lev_arena_push(r->arena[LEV_MEM_DEVICE], &r->compute, 1));
  lev_blocks blocks;
  LEV_TRY(lev_blocks_take(r->arena, true, oadamw_walk_step, r->plan, &blocks));
  LEV_TRY(oadamw_plan_bind(r->plan, OADAMW_STEP, &blocks));
  oadamw_step_args args = {.params = r->params, .grads = r->grads, .lr = lr, .step = step, .grad_scale = grad_scale};
  LEV_TRY(oadamw_step(r->plan, &args, r->compute));
  LEV_TRY(lev_arena_pop(r->arena[LEV_MEM_DEVICE]));
  LEV_TRY(poison_work(r));
  LEV_TRY(LEV_LAUNCH(r->compute, &look_kernel, a));
  return lev_fill(r->compute, r->grads, 0xFF, (size_t)r->shard * lev_dtype_bytes(r->config.grad_dtype), "test.poison");
}

lev_status oadamw_rig_run(oadamw_rig *r, int64_t first, int64_t last) {
  for (int64_t step = first; step <= last; ++step) LEV_TRY(oadamw_rig_step(r, step, 0.01 / (double)step, 0.7));
  return lev_stream_sync(r->compute);
}

uint64_t oadamw_rig_digest(oadamw_rig *r) {
  oadamw_state_view view;
  if (!T_EXPECT_OK(oadamw_state(r->plan, r->compute, &view))) return 0;
  size_t bytes = (size_t)view.count * lev_dtype_bytes(view.dtype);
  uint64_t h = fold(0xcbf29ce484222325u, r->params, (size_t)r->shard * lev_dtype_bytes(r->config.param_dtype));
  h = fold(h, view.master, bytes);
  h = fold(h, view.exp_avg, bytes);
  return fold(h, view.exp_avg_sq, bytes);
}

/* ---- oracle ---- */

bool oadamw_oracle_open(oadamw_oracle *o, const oadamw_rig *r) {
  size_t n = (size_t)r->shard;
  o->shard = r->shard;
  o->p = calloc(n + 1, sizeof(double)), o->m = calloc(n + 1, sizeof(double)), o->v = calloc(n + 1, sizeof(double));
  void *rounded = calloc(n + 1, sizeof(double));
  bool ok = o->p && o->m && o->v && rounded;
  if (ok) num_random(r->config.param_dtype, rounded, o->p, r->shard, 1, 1);
  free(rounded);
  return T_EXPECT(ok);
}

void oadamw_oracle_close(oadamw_oracle *o) {
  free(o->p);
  free(o->m);
  free(o->v);
}

void oadamw_oracle_step(oadamw_oracle *o, const oadamw_rig *r, int64_t step, double lr, double grad_scale) {
  const oadamw_config *c = &r->config;
  for (int s = 0; s < c->n_segments; ++s) {
    double rate = lr * c->segments[s].lr_scale;
    for (int64_t i = c->segments[s].offset; i < c->segments[s].offset + c->segments[s].count; ++i) {
      double rounded;
      lev_dtype_store(c->grad_dtype, &rounded, 0, oadamw_rig_grad(step, i));
      double grad = lev_dtype_load(c->grad_dtype, &rounded, 0) * grad_scale;
      o->p[i] -= rate * c->segments[s].weight_decay * o->p[i];
      o->m[i] = c->beta1 * o->m[i] + (1 - c->beta1) * grad;
      o->v[i] = c->beta2 * o->v[i] + (1 - c->beta2) * grad * grad;
      double m_hat = o->m[i] / (1 - pow(c->beta1, (double)step)), v_hat = o->v[i] / (1 - pow(c->beta2, (double)step));
      o->p[i] -= rate * m_hat / (sqrt(v_hat) + c->eps);
    }
  }
}

void oadamw_oracle_check(const oadamw_oracle *o, oadamw_rig *r, double param_tolerance, double state_tolerance) {
  oadamw_state_view view;
  if (!T_EXPECT_OK(oadamw_state(r->plan, r->compute, &view))) return;
  int64_t rows = 9; /* only for the checks' own sabotage */
  if (o->shard % rows == 0)
    NUM_CHECK(r->config.param_dtype, r->params, o->p, rows, o->shard / rows, param_tolerance, "params");
  double *want[3] = {o->p, o->m, o->v};
  const void *got[3] = {view.master, view.exp_avg, view.exp_avg_sq};
  static const char *const names[3] = {"master", "exp_avg", "exp_avg_sq"};
  double *flat = calloc((size_t)view.count + 1, sizeof *flat);
  for (int a = 0; a < 3 && T_EXPECT(flat); ++a) {
    int64_t n = 0;
    for (int s = 0; s < r->config.n_segments; ++s)
      for (int64_t i = 0; i < r->config.segments[s].count; ++i) flat[n++] = want[a][r->config.segments[s].offset + i];
    T_EXPECT_EQ_I64(n, view.count);
    int64_t cols = n % 10 == 0 ? n / 10 : 1;
    NUM_CHECK(view.dtype, got[a], flat, n / cols, cols, state_tolerance, names[a]);
  }
  free(flat);
}
