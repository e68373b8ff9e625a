/* SPDX-License-Identifier: Apache-2.0 */
/* Validation, plan and regions. The schedule is in offload_adamw_step.c. */
#include "offload_adamw/offload_adamw.h"

#include <math.h>
#include <stdlib.h>

#include "common/hostmem.h"
#include "offload_adamw/offload_adamw_plan.h"

#define DEFAULT_BUCKET ((int64_t)1 << 24)

oadamw_config oadamw_config_default(void) {
  return (oadamw_config){.size = sizeof(oadamw_config),
                         .param_dtype = LEV_F32,
                         .grad_dtype = LEV_F32,
                         .slots = 2,
                         .placement = OADAMW_GPU,
                         .cpu_share = 0.5,
                         .workers = 1,
                         .schedule = OADAMW_BOUNDED,
                         .beta1 = 0.9,
                         .beta2 = 0.95,
                         .eps = 1e-8,
                         .budget = SIZE_MAX,
                         .simd = OADAMW_SIMD_AUTO};
}

/* ---- validation ---- */

static int by_offset(const void *a, const void *b) {
  const oadamw_segment *x = a, *y = b;
  return (x->offset > y->offset) - (x->offset < y->offset);
}

static lev_status check_segments(const oadamw_config *c, int64_t *total) {
  if (c->n_segments < 0 || (c->n_segments > 0 && !c->segments))
    return lev_fail(LEV_ERR_ARG, "oadamw: %d segments at %p", c->n_segments, (const void *)c->segments);
  *total = 0;
  oadamw_segment *sorted = lev_calloc(LEV_HEAP_PLAN, (size_t)c->n_segments, sizeof *sorted);
  if (!sorted) return LEV_ERR_NOMEM;
  lev_status st = LEV_OK;
  int n = 0;
  for (int i = 0; i < c->n_segments && st == LEV_OK; ++i) {
    const oadamw_segment *s = &c->segments[i];
    if (s->offset < 0 || s->count < 0 || s->offset > INT64_MAX / 16 - s->count || *total > INT64_MAX / 16 - s->count)
      st = lev_fail(LEV_ERR_ARG, "oadamw segment %d: offset %lld, count %lld", i, (long long)s->offset,
                    (long long)s->count);
    else if (!isfinite(s->weight_decay) || !isfinite(s->lr_scale))
      st = lev_fail(LEV_ERR_ARG, "oadamw segment %d: weight decay %g, lr scale %g", i, s->weight_decay, s->lr_scale);
    else if (s->count > 0)
      sorted[n++] = *s, *total += s->count;
  }
  qsort(sorted, (size_t)n, sizeof *sorted, by_offset);
  for (int i = 1; i < n && st == LEV_OK; ++i)
    if (sorted[i - 1].offset + sorted[i - 1].count > sorted[i].offset)
      st = lev_fail(LEV_ERR_ARG, "oadamw segments at offsets %lld (count %lld) and %lld overlap",
                    (long long)sorted[i - 1].offset, (long long)sorted[i - 1].count, (long long)sorted[i].offset);
  lev_free(sorted);
  return st;
}

static lev_status check_fields(const oadamw_config *c) {
  if (!c || c->size != sizeof *c) return lev_fail(LEV_ERR_ARG, "oadamw_config.size must be %zu", sizeof *c);
  if (c->bucket < 0) return lev_fail(LEV_ERR_ARG, "oadamw bucket of %lld elements", (long long)c->bucket);
  if (c->slots < 1 || c->slots > OADAMW_SLOTS_MAX)
    return lev_fail(LEV_ERR_ARG, "oadamw slots %d are not within 1 .. %d", c->slots, OADAMW_SLOTS_MAX);
  if (c->workers < 1 || c->workers > OADAMW_WORKERS_MAX)
    return lev_fail(LEV_ERR_ARG, "oadamw workers %d are not within 1 .. %d", c->workers, OADAMW_WORKERS_MAX);
  if ((int)c->placement < 0 || c->placement > OADAMW_SPLIT || (int)c->schedule < 0 || c->schedule > OADAMW_PLAIN)
    return lev_fail(LEV_ERR_ARG, "oadamw placement %d or schedule %d unknown", (int)c->placement, (int)c->schedule);
  if (!(c->cpu_share >= 0 && c->cpu_share <= 1))
    return lev_fail(LEV_ERR_ARG, "oadamw cpu_share %g is not within 0 .. 1", c->cpu_share);
  if (!(c->beta1 >= 0 && c->beta1 < 1) || !(c->beta2 >= 0 && c->beta2 < 1))
    return lev_fail(LEV_ERR_ARG, "oadamw betas %g, %g are not within [0, 1)", c->beta1, c->beta2);
  if (!(c->eps >= 0 && isfinite(c->eps))) return lev_fail(LEV_ERR_ARG, "oadamw eps %g", c->eps);
  if (oadamw_pair_of(c->param_dtype, c->grad_dtype) == OADAMW_PAIRS)
    return lev_fail(LEV_ERR_UNSUPPORTED, "oadamw has no update of %s parameters with %s gradients",
                    lev_dtype_name(c->param_dtype), lev_dtype_name(c->grad_dtype));
  if (!oadamw_simd_supported(c->simd))
    return lev_fail(LEV_ERR_UNSUPPORTED, "oadamw simd path %s is not available on this CPU", oadamw_simd_name(c->simd));
  return LEV_OK;
}

/* ---- buckets ---- */

/* Cuts n elements into equal buckets of at most `cap`, on borders of `unit` elements. */
static void cut(int64_t n, int64_t cap, oadamw_cut *out) {
  out->n = n;
  out->unit = cap >= OADAMW_UNIT ? OADAMW_UNIT : 1;
  out->units = lev_ceil_div(n, out->unit);
  out->buckets = n == 0 ? 0 : cap >= n ? 1 : lev_ceil_div(out->units, cap / out->unit);
  out->size = out->buckets == 0 ? 0 : lev_min_i64(n, lev_ceil_div(out->units, out->buckets) * out->unit);
}

static size_t slot_bytes(const oadamw_config *c, int64_t bucket) {
  size_t one = lev_align_up(lev_bytes(bucket, 1, lev_dtype_bytes(lev_dtype_arith(c->param_dtype))));
  return lev_sat_mul(one, 3 * (size_t)c->slots);
}

/* Largest bucket, at most 2^24, whose slots fit `budget`; 0 if none does. One bucket needs only its elements. */
static int64_t choose_bucket(const oadamw_config *c, int64_t n, size_t budget) {
  size_t a = lev_dtype_bytes(lev_dtype_arith(c->param_dtype));
  size_t array = budget / (3 * (size_t)c->slots) / LEV_ALIGN * LEV_ALIGN; /* bytes of one slot's array */
  int64_t cap = array / a > (size_t)DEFAULT_BUCKET ? DEFAULT_BUCKET : (int64_t)(array / a);
  int64_t all = lev_max_i64(1, n);
  return cap >= all ? all : cap < OADAMW_UNIT ? cap : cap / OADAMW_UNIT * OADAMW_UNIT;
}

static lev_status check(const oadamw_config *c, oadamw_cut *out) {
  LEV_TRY(check_fields(c));
  int64_t n = 0;
  LEV_TRY(check_segments(c, &n));
  size_t a = lev_dtype_bytes(lev_dtype_arith(c->param_dtype));
  if (c->schedule == OADAMW_PLAIN) {
    size_t need = lev_sat_mul(3, lev_align_up(lev_bytes(n, 1, a)));
    if (need > c->budget)
      return lev_fail(LEV_ERR_BUDGET, "oadamw (plain) holds %zu bytes of state on the device and may use %zu", need,
                      c->budget);
    cut(n, lev_max_i64(1, n), out);
    return LEV_OK;
  }
  bool device = c->placement != OADAMW_CPU && n > 0;
  int64_t bucket = c->bucket;
  if (bucket == 0) bucket = choose_bucket(c, n, device ? c->budget : SIZE_MAX);
  if (bucket == 0)
    return lev_fail(LEV_ERR_BUDGET, "oadamw needs at least %zu device bytes for %d slots and may use %zu",
                    slot_bytes(c, 1), c->slots, c->budget);
  cut(n, bucket, out);
  size_t need = device ? slot_bytes(c, out->size) : 0;
  if (need > c->budget)
    return lev_fail(LEV_ERR_BUDGET,
                    "oadamw: %d slots of %lld elements need %zu device bytes and may use %zu; the largest bucket that "
                    "fits is %lld (0 = none); the smallest budget for any bucket is %zu",
                    c->slots, (long long)out->size, need, c->budget, (long long)choose_bucket(c, n, c->budget),
                    slot_bytes(c, 1));
  return LEV_OK;
}

lev_status oadamw_supports(const oadamw_config *config) {
  oadamw_cut cuts;
  return check(config, &cuts);
}

/* ---- plan ---- */

static int64_t bucket_begin(const oadamw_plan *p, int64_t b) {
  return lev_min_i64(p->cut.n, p->cut.unit * lev_part_begin(p->cut.units, p->cut.buckets, b));
}

/* Copies the segments that have elements, joining neighbours with the same rates. */
static void copy_segments(oadamw_plan *p, const oadamw_config *c) {
  for (int i = 0; i < c->n_segments; ++i) {
    const oadamw_segment *s = &c->segments[i];
    if (s->count == 0) continue;
    oadamw_segment *last = p->n_segments > 0 ? &p->segments[p->n_segments - 1] : NULL;
    if (last && last->offset + last->count == s->offset && last->weight_decay == s->weight_decay &&
        last->lr_scale == s->lr_scale)
      last->count += s->count;
    else
      p->segments[p->n_segments++] = *s;
  }
}

/* Cuts the segments at the bucket borders. */
static void make_pieces(oadamw_plan *p) {
  int s = 0;
  int64_t done = 0; /* of segment s */
  for (int64_t b = 0; b < p->cut.buckets; ++b) {
    int64_t begin = bucket_begin(p, b), end = bucket_begin(p, b + 1);
    p->bucket[b] = (oadamw_bucket){.begin = begin, .size = end - begin, .first_piece = p->n_pieces};
    for (int64_t at = begin; at < end;) {
      const oadamw_segment *seg = &p->segments[s];
      int64_t count = lev_min_i64(seg->count - done, end - at);
      p->piece[p->n_pieces++] = (oadamw_piece){.segment = s, .offset = seg->offset + done, .state = at, .count = count};
      at += count, done += count;
      if (done == seg->count) ++s, done = 0;
    }
    p->bucket[b].pieces = p->n_pieces - p->bucket[b].first_piece;
  }
}

static lev_status create_tables(oadamw_plan *p, const oadamw_config *c) {
  p->segments = lev_calloc(LEV_HEAP_PLAN, (size_t)c->n_segments, sizeof *p->segments);
  if (!p->segments) return LEV_ERR_NOMEM;
  copy_segments(p, c);
  p->config.segments = NULL;
  p->rates = lev_calloc(LEV_HEAP_PLAN, (size_t)p->n_segments, sizeof *p->rates);
  p->bucket = lev_calloc(LEV_HEAP_PLAN, (size_t)p->cut.buckets, sizeof *p->bucket);
  p->piece = lev_calloc(LEV_HEAP_PLAN, (size_t)(p->n_segments + p->cut.buckets), sizeof *p->piece);
  if (!p->rates || !p->bucket || !p->piece) return LEV_ERR_NOMEM;
  make_pieces(p);
  bool host = c->schedule == OADAMW_BOUNDED && c->placement != OADAMW_GPU && p->n_pieces > 0;
  if (!host || lev_device_backend(p->device) != LEV_BACKEND_CUDA) return LEV_OK;
  p->host_slots = lev_calloc(LEV_HEAP_PLAN, (size_t)(2 * p->n_pieces), sizeof *p->host_slots);
  if (!p->host_slots) return LEV_ERR_NOMEM;
  LEV_TRY(oadamw_team_create(c->workers, &p->team));
  for (int64_t i = 0; i < 2 * p->n_pieces; ++i) p->host_slots[i].team = p->team;
  return LEV_OK;
}

static lev_status create_pipe(oadamw_plan *p, oadamw_pipe *pipe, const char *in, const char *out) {
  LEV_TRY(lev_stream_create(p->device, in, &pipe->in));
  LEV_TRY(lev_stream_create(p->device, out, &pipe->out));
  LEV_TRY(lev_event_create(p->device, &pipe->end));
  for (int s = 0; s < p->config.slots; ++s) {
    LEV_TRY(lev_event_create(p->device, &pipe->arrived[s]));
    LEV_TRY(lev_event_create(p->device, &pipe->updated[s]));
    LEV_TRY(lev_event_create(p->device, &pipe->left[s]));
  }
  return LEV_OK;
}

static lev_status create_streams(oadamw_plan *p) {
  LEV_TRY(lev_event_create(p->device, &p->begin));
  if (p->config.schedule == OADAMW_PLAIN) return LEV_OK;
  if (p->config.placement != OADAMW_CPU) LEV_TRY(create_pipe(p, &p->gpu, "oadamw.state_in", "oadamw.state_out"));
  if (p->config.placement == OADAMW_GPU) return LEV_OK;
  LEV_TRY(create_pipe(p, &p->cpu, "oadamw.grads_out", "oadamw.params_in"));
  p->streams = p->team ? 1 : p->config.workers;
  for (int w = 0; w < p->streams; ++w) LEV_TRY(lev_stream_create(p->device, "oadamw.worker", &p->worker[w]));
  return LEV_OK;
}

lev_status oadamw_plan_create(lev_device *device, const oadamw_config *config, oadamw_plan **out) {
  if (!device || !out) return lev_fail(LEV_ERR_ARG, "oadamw_plan_create needs a device and a place for the plan");
  *out = NULL;
  oadamw_cut cuts;
  LEV_TRY(check(config, &cuts));
  oadamw_plan *p = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  p->device = device;
  p->config = *config;
  p->cut = cuts;
  p->arith = lev_dtype_arith(config->param_dtype);
  p->simd = config->simd;
  for (int s = OADAMW_SIMDS - 1; p->simd == OADAMW_SIMD_AUTO; --s)
    if (oadamw_simd_supported((oadamw_simd)s)) p->simd = (oadamw_simd)s;
  lev_status st = LEV_OK;
  LEV_TRY_GOTO(st, create_tables(p, config), fail);
  LEV_TRY_GOTO(st, create_streams(p), fail);
  *out = p;
  return LEV_OK;
fail:
  oadamw_destroy(p);
  return st;
}

static void destroy_pipe(oadamw_pipe *pipe) {
  if (pipe->in) lev_stream_destroy(pipe->in);
  if (pipe->out) lev_stream_destroy(pipe->out);
  if (pipe->end) lev_event_destroy(pipe->end);
  for (int s = 0; s < OADAMW_SLOTS_MAX; ++s) {
    if (pipe->arrived[s]) lev_event_destroy(pipe->arrived[s]);
    if (pipe->updated[s]) lev_event_destroy(pipe->updated[s]);
    if (pipe->left[s]) lev_event_destroy(pipe->left[s]);
  }
}

void oadamw_destroy(oadamw_plan *p) {
  if (!p) return;
  for (int w = 0; w < OADAMW_WORKERS_MAX; ++w)
    if (p->worker[w]) lev_stream_destroy(p->worker[w]);
  destroy_pipe(&p->gpu);
  destroy_pipe(&p->cpu);
  if (p->begin) lev_event_destroy(p->begin);
  oadamw_team_destroy(p->team); /* the worker streams have stopped */
  lev_free(p->segments);
  lev_free(p->rates);
  lev_free(p->bucket);
  lev_free(p->piece);
  lev_free(p->host_slots);
  lev_free(p);
}

int64_t oadamw_count(const oadamw_plan *p) {
  return p->cut.n;
}
int64_t oadamw_buckets(const oadamw_plan *p) {
  return p->cut.buckets;
}
int64_t oadamw_bucket_size(const oadamw_plan *p) {
  return p->cut.size;
}

int oadamw_streams(const oadamw_plan *p, lev_stream **out, int max) {
  lev_stream *pipes[] = {p->gpu.in, p->gpu.out, p->cpu.in, p->cpu.out};
  int n = 0;
  for (int i = 0; i < 4 && n < max; ++i)
    if (pipes[i]) out[n++] = pipes[i];
  for (int w = 0; w < OADAMW_WORKERS_MAX && n < max; ++w)
    if (p->worker[w]) out[n++] = p->worker[w];
  return n;
}

/* ---- regions ---- */

static oadamw_state_set walk_state(const oadamw_plan *p, lev_walker *w, lev_mem cls) {
  oadamw_state_set at = {0};
  if (p->cut.n == 0) return at;
  at.master = lev_walk(w, cls, "oadamw.master", p->arith, p->cut.n, 1);
  at.exp_avg = lev_walk(w, cls, "oadamw.exp_avg", p->arith, p->cut.n, 1);
  at.exp_avg_sq = lev_walk(w, cls, "oadamw.exp_avg_sq", p->arith, p->cut.n, 1);
  return at;
}

static void lay_persistent(const oadamw_plan *p, lev_walker *w, oadamw_layout *out) {
  bool plain = p->config.schedule == OADAMW_PLAIN;
  out->state = walk_state(p, w, plain ? LEV_MEM_DEVICE : LEV_MEM_PINNED);
  if (plain || p->config.placement == OADAMW_GPU || p->cut.n == 0) return;
  for (int s = 0; s < p->config.slots; ++s) {
    out->grads[s] = lev_walk(w, LEV_MEM_PINNED, "oadamw.staging", p->config.grad_dtype, p->cut.size, 1);
    out->params[s] = lev_walk(w, LEV_MEM_PINNED, "oadamw.staging", p->config.param_dtype, p->cut.size, 1);
  }
}

static void lay_step(const oadamw_plan *p, lev_walker *w, oadamw_layout *out) {
  if (p->config.schedule == OADAMW_PLAIN || p->config.placement == OADAMW_CPU || p->cut.n == 0) return;
  for (int s = 0; s < p->config.slots; ++s) {
    out->slot[s].master = lev_walk(w, LEV_MEM_DEVICE, "oadamw.slots", p->arith, p->cut.size, 1);
    out->slot[s].exp_avg = lev_walk(w, LEV_MEM_DEVICE, "oadamw.slots", p->arith, p->cut.size, 1);
    out->slot[s].exp_avg_sq = lev_walk(w, LEV_MEM_DEVICE, "oadamw.slots", p->arith, p->cut.size, 1);
  }
}

static void lay(const oadamw_plan *p, oadamw_phase phase, lev_walker *w, oadamw_layout *out) {
  if (phase == OADAMW_PERSISTENT) lay_persistent(p, w, out);
  if (phase == OADAMW_STEP) lay_step(p, w, out);
}

void oadamw_walk_persistent(void *plan, lev_walker *walker) {
  oadamw_layout unused = {0};
  lay_persistent(plan, walker, &unused);
}

void oadamw_walk_step(void *plan, lev_walker *walker) {
  oadamw_layout unused = {0};
  lay_step(plan, walker, &unused);
}

void oadamw_plan_regions(const oadamw_plan *p, oadamw_phase phase, lev_region_fn fn, void *ctx) {
  lev_walker w = {.list = fn, .list_ctx = ctx};
  oadamw_layout unused = {0};
  lay(p, phase, &w, &unused);
}

void oadamw_plan_bytes(const oadamw_plan *p, oadamw_phase phase, size_t bytes[LEV_MEM_CLASSES]) {
  lev_walker w = {0};
  oadamw_layout unused = {0};
  lay(p, phase, &w, &unused);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) bytes[c] = w.used[c];
}

lev_status oadamw_plan_bind(oadamw_plan *p, oadamw_phase phase, const lev_blocks *blocks) {
  if (!p || !blocks || (int)phase < 0 || phase >= OADAMW_PHASES)
    return lev_fail(LEV_ERR_ARG, "oadamw_plan_bind: bad argument");
  if (phase == OADAMW_PERSISTENT && p->bound[phase])
    return lev_fail(LEV_ERR_MISUSE, "the persistent phase of this oadamw plan is bound already");
  static const char *const names[OADAMW_PHASES] = {"oadamw.persistent", "oadamw.step"};
  lev_walker count = {0}, assign = {0};
  oadamw_layout unused = {0};
  lay(p, phase, &count, &unused);
  LEV_TRY(lev_blocks_check(&count, blocks, names[phase]));
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) assign.base[c] = blocks->base[c];
  lay(p, phase, &assign, &p->at);
  lev_trace_add(lev_device_trace(p->device), LEV_EV_BIND, 0, names[phase], count.used[LEV_MEM_DEVICE]);
  p->bound[phase] = true;
  return LEV_OK;
}
