/* SPDX-License-Identifier: Apache-2.0 */
/* Validation, buckets, regions and binding. The step's schedule is in muon_step.c. */
#include "muon/muon.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"
#include "muon/muon_plan.h"

muon_config muon_config_default(void) {
  return (muon_config){.size = sizeof(muon_config),
                       .param_dtype = LEV_F32,
                       .grad_dtype = LEV_F32,
                       .compute_dtype = LEV_F32,
                       .mu = 0.95,
                       .nesterov = true,
                       .weight_decay = 0.1,
                       .eps = 1e-7,
                       .set = MUON_SIMPLE,
                       .scale = MUON_SCALE_MOONLIGHT,
                       .schedule = MUON_BOUNDED,
                       .slots = 2};
}

static lev_status check_scalars(const muon_config *c) {
  if (!c || c->size != sizeof *c)
    return lev_fail(LEV_ERR_ARG, "muon_config of %zu bytes, %zu expected", c ? c->size : 0, sizeof(muon_config));
  if (c->n_matrices < 0 || (c->n_matrices > 0 && !c->matrices))
    return lev_fail(LEV_ERR_ARG, "%d matrices at %p", c->n_matrices, (const void *)c->matrices);
  if (!(c->mu >= 0 && c->mu < 1)) return lev_fail(LEV_ERR_ARG, "mu %g is outside [0, 1)", c->mu);
  if (!(c->weight_decay >= 0 && isfinite(c->weight_decay)))
    return lev_fail(LEV_ERR_ARG, "weight_decay %g is negative or not finite", c->weight_decay);
  if (!(c->eps > 0 && isfinite(c->eps))) return lev_fail(LEV_ERR_ARG, "eps %g is not positive", c->eps);
  if ((unsigned)c->set >= MUON_SETS || (unsigned)c->scale >= MUON_SCALES || (unsigned)c->schedule > MUON_PLAIN)
    return lev_fail(LEV_ERR_ARG, "unknown coefficient set %d, scale %d or schedule %d", (int)c->set, (int)c->scale,
                    (int)c->schedule);
  if (c->steps < 0 || c->steps > MUON_STEPS_MAX)
    return lev_fail(LEV_ERR_ARG, "%d Newton-Schulz steps, 0 to %d can be asked", c->steps, MUON_STEPS_MAX);
  if (c->slots < 1 || c->slots > MUON_SLOTS_MAX)
    return lev_fail(LEV_ERR_ARG, "%d slots, 1 to %d can be asked", c->slots, MUON_SLOTS_MAX);
  bool wide = c->param_dtype == LEV_F64;
  const lev_dtype types[3] = {c->param_dtype, c->grad_dtype, c->compute_dtype};
  for (int i = 0; i < 3; ++i) {
    bool fits = wide ? types[i] == LEV_F64 : types[i] == LEV_F32 || types[i] == LEV_BF16;
    if (!fits)
      return lev_fail(LEV_ERR_UNSUPPORTED, "params %s, gradients %s, compute %s: f64 with f64, or f32 and bf16 mixed",
                      lev_dtype_name(types[0]), lev_dtype_name(types[1]), lev_dtype_name(types[2]));
  }
  return LEV_OK;
}

static int64_t size_of(const muon_matrix *m) {
  return m->rows * m->cols;
}

static bool overlap(const muon_matrix *a, const muon_matrix *b) {
  return size_of(a) > 0 && size_of(b) > 0 && a->offset < b->offset + size_of(b) && b->offset < a->offset + size_of(a);
}

static lev_status check_matrices(const muon_config *c) {
  int64_t total = 0, end = 0;
  bool ascending = true;
  for (int i = 0; i < c->n_matrices; ++i) {
    const muon_matrix *m = &c->matrices[i];
    int64_t size, stop;
    if (m->rows < 0 || m->cols < 0 || m->rows > INT_MAX || m->cols > INT_MAX || m->offset < 0 ||
        __builtin_mul_overflow(m->rows, m->cols, &size) || __builtin_add_overflow(m->offset, size, &stop) ||
        __builtin_add_overflow(total, size, &total) || lev_bytes(2, stop, sizeof(double)) == SIZE_MAX ||
        lev_bytes(2, total, sizeof(double)) == SIZE_MAX)
      return lev_fail(LEV_ERR_ARG, "matrix %d: %lld x %lld at element %lld", i, (long long)m->rows, (long long)m->cols,
                      (long long)m->offset);
    if (size > 0) {
      ascending = ascending && m->offset >= end;
      end = stop;
    }
  }
  if (ascending) return LEV_OK;
  for (int i = 0; i < c->n_matrices; ++i)
    for (int j = 0; j < i; ++j)
      if (overlap(&c->matrices[i], &c->matrices[j]))
        return lev_fail(LEV_ERR_ARG, "matrices %d (at element %lld) and %d (at element %lld) overlap", j,
                        (long long)c->matrices[j].offset, i, (long long)c->matrices[i].offset);
  return LEV_OK;
}

/* Whether some step of the set has a quadratic term, so that a second Gram-sized buffer is needed. */
static bool has_square(const muon_config *c) {
  int steps = c->steps > 0 ? c->steps : muon_set_steps(c->set);
  for (int i = 0; i < steps; ++i) {
    double abc[3];
    muon_set_row(c->set, i, abc);
    if (abc[2] != 0) return true;
  }
  return false;
}

static muon_extent measure(const muon_config *c) {
  muon_extent e = {.square = has_square(c)};
  for (int i = 0; i < c->n_matrices; ++i) {
    const muon_matrix *m = &c->matrices[i];
    int64_t n = lev_min_i64(m->rows, m->cols);
    if (size_of(m) > e.elements) e.elements = size_of(m), e.largest = i;
    e.gram_side = lev_max_i64(e.gram_side, n);
  }
  return e;
}

/* The work regions, which both schedules share. */
static void lay_work(const muon_extent *e, lev_dtype type, lev_walker *w, muon_layout *at) {
  if (e->elements == 0) return;
  at->x[0] = lev_walk(w, LEV_MEM_DEVICE, "muon.work", type, 1, e->elements);
  at->x[1] = lev_walk(w, LEV_MEM_DEVICE, "muon.work", type, 1, e->elements);
  at->gram = lev_walk(w, LEV_MEM_DEVICE, "muon.work", type, e->gram_side, e->gram_side);
  at->square = lev_walk(w, LEV_MEM_DEVICE, "muon.work", type, e->square ? e->gram_side : 0, e->gram_side);
  at->partial = lev_walk(w, LEV_MEM_DEVICE, "muon.work", LEV_F64, 1, lev_ceil_div(e->elements, MUON_NORM_BLOCK));
}

static size_t work_bytes(const muon_config *c, const muon_extent *e) {
  lev_walker w = {0};
  muon_layout unused = {0};
  lay_work(e, c->compute_dtype, &w, &unused);
  return w.used[LEV_MEM_DEVICE];
}

static size_t slot_bytes(const muon_config *c, int64_t elements) {
  return lev_align_up(lev_bytes(2, elements, lev_dtype_bytes(lev_dtype_arith(c->param_dtype))));
}

/* Buckets of at most `cap` elements, filled in order; writes them where `out` is given. Returns their number. */
static int cut(const muon_config *c, int64_t cap, muon_bucket *out, int64_t *largest) {
  int n = 0;
  int64_t filled = 0, begin = 0;
  *largest = 0;
  for (int i = 0; i < c->n_matrices; ++i) {
    int64_t size = size_of(&c->matrices[i]);
    if (size == 0) continue;
    if (n == 0 || size > cap - filled) {
      begin += filled, filled = 0;
      if (out) out[n] = (muon_bucket){.first = i, .begin = begin};
      ++n;
    }
    filled += size;
    *largest = lev_max_i64(*largest, filled);
    if (out) out[n - 1].last = i, out[n - 1].elements = filled;
  }
  return n;
}

/* Number of slots that can ever be in use with a cap: never more than buckets. */
static int used_slots(const muon_config *c, int64_t cap) {
  int64_t largest;
  return (int)lev_min_i64(c->slots, cut(c, cap, NULL, &largest));
}

size_t muon_bucket_bytes_min(const muon_config *c) {
  if (check_scalars(c) != LEV_OK || check_matrices(c) != LEV_OK) return SIZE_MAX;
  muon_extent e = measure(c);
  if (c->schedule == MUON_PLAIN) return work_bytes(c, &e);
  size_t slots = lev_sat_mul((size_t)used_slots(c, e.elements), slot_bytes(c, e.elements));
  return lev_sat_add(work_bytes(c, &e), slots);
}

/* Elements a bucket may have under bucket_bytes. */
static lev_status bucket_cap(const muon_config *c, const muon_extent *e, int64_t *cap) {
  *cap = e->elements;
  if (c->schedule == MUON_PLAIN || e->elements == 0 || c->bucket_bytes == 0) return LEV_OK;
  size_t least = muon_bucket_bytes_min(c), work = work_bytes(c, e);
  const muon_matrix *m = &c->matrices[e->largest];
  if (c->bucket_bytes < least)
    return lev_fail(LEV_ERR_BUDGET,
                    "bucket_bytes %zu cannot hold %d slots of the largest matrix (%lld x %lld) and %zu bytes of work; "
                    "the smallest bucket_bytes that fits is %zu",
                    c->bucket_bytes, used_slots(c, e->elements), (long long)m->rows, (long long)m->cols, work, least);
  /* All slots where the largest matrix fits each of them; else only as many as the buckets can use. */
  size_t arith = lev_dtype_bytes(lev_dtype_arith(c->param_dtype));
  for (int slots = c->slots; slots > 0; --slots) {
    size_t room = (c->bucket_bytes - work) / (size_t)slots / LEV_ALIGN * LEV_ALIGN;
    *cap = (int64_t)(room / (2 * arith));
    if (*cap >= e->elements && (slots == c->slots || used_slots(c, *cap) <= slots)) break;
  }
  return LEV_OK;
}

lev_status muon_supports(const muon_config *config) {
  LEV_TRY(check_scalars(config));
  LEV_TRY(check_matrices(config));
  muon_extent e = measure(config);
  int64_t cap;
  return bucket_cap(config, &e, &cap);
}

static lev_status make_buckets(muon_plan *p) {
  const muon_config *c = &p->config;
  int64_t cap;
  LEV_TRY(bucket_cap(c, &p->extent, &cap));
  for (int i = 0; i < c->n_matrices; ++i) {
    p->begin[i] = p->count;
    p->count += size_of(&p->matrices[i]);
  }
  if (c->schedule == MUON_PLAIN) return LEV_OK;
  int n = cut(c, cap, NULL, &p->slot_elements);
  p->buckets = lev_calloc(LEV_HEAP_PLAN, (size_t)n, sizeof *p->buckets);
  if (!p->buckets) return LEV_ERR_NOMEM;
  p->n_buckets = cut(c, cap, p->buckets, &p->slot_elements);
  p->n_slots = (int)lev_min_i64(c->slots, n);
  return LEV_OK;
}

static lev_status make_streams(muon_plan *p) {
  LEV_TRY(lev_event_create(p->device, &p->start));
  if (p->n_buckets == 0) return LEV_OK;
  LEV_TRY(lev_stream_create(p->device, "muon.in", &p->in));
  LEV_TRY(lev_stream_create(p->device, "muon.out", &p->out));
  for (int s = 0; s < p->n_slots; ++s) {
    LEV_TRY(lev_event_create(p->device, &p->loaded[s]));
    LEV_TRY(lev_event_create(p->device, &p->updated[s]));
    LEV_TRY(lev_event_create(p->device, &p->stored[s]));
  }
  return LEV_OK;
}

lev_status muon_plan_create(lev_device *device, const muon_config *config, muon_plan **out) {
  *out = NULL;
  if (!device) return lev_fail(LEV_ERR_ARG, "muon_plan_create: no device");
  LEV_TRY(muon_supports(config));
  muon_plan *p = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  lev_status st = LEV_OK;
  p->device = device;
  p->config = *config;
  p->steps = config->steps > 0 ? config->steps : muon_set_steps(config->set);
  p->arith = lev_dtype_arith(config->param_dtype);
  p->extent = measure(config);
  p->matrices = lev_calloc(LEV_HEAP_PLAN, (size_t)config->n_matrices, sizeof *p->matrices);
  p->begin = lev_calloc(LEV_HEAP_PLAN, (size_t)config->n_matrices, sizeof *p->begin);
  if (!p->matrices || !p->begin) {
    st = LEV_ERR_NOMEM;
    goto fail;
  }
  if (config->n_matrices > 0) memcpy(p->matrices, config->matrices, (size_t)config->n_matrices * sizeof *p->matrices);
  p->config.matrices = p->matrices;
  LEV_TRY_GOTO(st, make_buckets(p), fail);
  LEV_TRY_GOTO(st, make_streams(p), fail);
  *out = p;
  return LEV_OK;
fail:
  muon_destroy(p);
  return st;
}

void muon_destroy(muon_plan *p) {
  if (!p) return;
  if (p->in) lev_stream_destroy(p->in);
  if (p->out) lev_stream_destroy(p->out);
  for (int s = 0; s < MUON_SLOTS_MAX; ++s) {
    if (p->loaded[s]) lev_event_destroy(p->loaded[s]);
    if (p->updated[s]) lev_event_destroy(p->updated[s]);
    if (p->stored[s]) lev_event_destroy(p->stored[s]);
  }
  if (p->start) lev_event_destroy(p->start);
  lev_free(p->buckets);
  lev_free(p->begin);
  lev_free(p->matrices);
  lev_free(p);
}

/* ---- regions ---- */

static void lay(const muon_plan *p, muon_phase phase, lev_walker *w, muon_layout *at) {
  bool bounded = p->config.schedule == MUON_BOUNDED;
  if (phase == MUON_PERSISTENT) {
    lev_mem home = bounded ? LEV_MEM_PINNED : LEV_MEM_DEVICE;
    at->master = lev_walk(w, home, "muon.master", p->arith, 1, p->count);
    at->momentum = lev_walk(w, home, "muon.momentum", p->arith, 1, p->count);
    return;
  }
  for (int s = 0; s < p->n_slots; ++s)
    at->slots[s] = lev_walk(w, LEV_MEM_DEVICE, "muon.slots", p->arith, 2, p->slot_elements);
  lay_work(&p->extent, p->config.compute_dtype, w, at);
}

void muon_walk_persistent(void *plan, lev_walker *walker) {
  muon_layout unused = {0};
  lay(plan, MUON_PERSISTENT, walker, &unused);
}

void muon_walk_step(void *plan, lev_walker *walker) {
  muon_layout unused = {0};
  lay(plan, MUON_STEP, walker, &unused);
}

void muon_plan_bytes(const muon_plan *p, muon_phase phase, size_t bytes[LEV_MEM_CLASSES]) {
  lev_walker w = {0};
  muon_layout unused = {0};
  lay(p, phase, &w, &unused);
  memcpy(bytes, w.used, sizeof w.used);
}

void muon_plan_regions(const muon_plan *p, muon_phase phase, lev_region_fn fn, void *ctx) {
  lev_walker w = {.list = fn, .list_ctx = ctx};
  muon_layout unused = {0};
  lay(p, phase, &w, &unused);
}

lev_status muon_plan_bind(muon_plan *p, muon_phase phase, const lev_blocks *blocks) {
  if (!p || !blocks || (unsigned)phase >= MUON_PHASES) return lev_fail(LEV_ERR_ARG, "muon_plan_bind: bad argument");
  if (phase == MUON_PERSISTENT && p->bound[phase])
    return lev_fail(LEV_ERR_MISUSE, "the persistent phase of this muon plan is bound already");
  static const char *const names[MUON_PHASES] = {"muon.persistent", "muon.step"};
  lev_walker count = {0}, assign = {0};
  muon_layout unused = {0};
  lay(p, phase, &count, &unused);
  LEV_TRY(lev_blocks_check(&count, blocks, names[phase]));
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) assign.base[c] = blocks->base[c];
  lay(p, phase, &assign, &p->at);
  lev_trace_add(lev_device_trace(p->device), LEV_EV_BIND, 0, names[phase], count.used[LEV_MEM_DEVICE]);
  p->bound[phase] = true;
  return LEV_OK;
}

/* ---- queries ---- */

int64_t muon_count(const muon_plan *p) {
  return p->count;
}
int muon_buckets(const muon_plan *p) {
  return p->n_buckets;
}

double muon_flops(const muon_plan *p) {
  double total = 0;
  for (int i = 0; i < p->config.n_matrices; ++i) {
    const muon_matrix *m = &p->matrices[i];
    double n = (double)lev_min_i64(m->rows, m->cols), big = (double)lev_max_i64(m->rows, m->cols);
    for (int step = 0; step < p->steps; ++step) {
      double abc[3];
      muon_set_row(p->config.set, step, abc);
      total += 4 * big * n * n + (abc[2] != 0 ? 2 * n * n * n : 0);
    }
  }
  return total;
}

lev_status muon_state(muon_plan *p, int matrix, void **master, void **momentum) {
  *master = *momentum = NULL;
  if (matrix < 0 || matrix >= p->config.n_matrices)
    return lev_fail(LEV_ERR_ARG, "matrix %d of %d", matrix, p->config.n_matrices);
  if (size_of(&p->matrices[matrix]) == 0) return LEV_OK;
  if (!p->bound[MUON_PERSISTENT])
    return lev_fail(LEV_ERR_MISUSE, "the persistent phase of this muon plan is not bound");
  *master = muon_at(p->at.master, p->begin[matrix], p->arith);
  *momentum = muon_at(p->at.momentum, p->begin[matrix], p->arith);
  return LEV_OK;
}
