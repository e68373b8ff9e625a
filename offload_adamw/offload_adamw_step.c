/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule. Both pipes fork from the caller's stream (`begin`) and join it again (`end`); per bucket
 *
 *     gpu   state_in: copy master, m, v to the slot | caller's stream: update | state_out: copy them home
 *     cpu   grads_out: copy gradients to staging    | worker: update          | params_in: copy new weights to the
 * device
 *
 * with one event after each stage. Before a slot is filled again, its filling stream waits for the last stage of the
 * slot's previous bucket; that covers both of a slot's halves, since stages are chained. */
#include <math.h>

#include "offload_adamw/offload_adamw_plan.h"

static unsigned char *at(unsigned char *base, int64_t element, size_t elem) {
  return base + (size_t)element * elem;
}

static oadamw_state_set shift(oadamw_state_set s, int64_t element, size_t elem) {
  return (oadamw_state_set){at(s.master, element, elem), at(s.exp_avg, element, elem), at(s.exp_avg_sq, element, elem)};
}

/* ---- init and publish ---- */

static lev_status ready(const oadamw_plan *p, bool step, const char *call) {
  if (p->cut.n == 0) return LEV_OK;
  if (!p->bound[OADAMW_PERSISTENT]) return lev_fail(LEV_ERR_MISUSE, "%s: the persistent phase is not bound", call);
  bool slots = p->config.schedule == OADAMW_BOUNDED && p->config.placement != OADAMW_CPU;
  if (step && slots && !p->bound[OADAMW_STEP]) return lev_fail(LEV_ERR_MISUSE, "%s: the step phase is not bound", call);
  return LEV_OK;
}

static lev_status convert(oadamw_plan *p, const unsigned char *in, unsigned char *out, const lev_kernel *kernel,
                          lev_stream *stream) {
  size_t a = lev_dtype_bytes(p->arith), b = lev_dtype_bytes(p->config.param_dtype);
  int64_t state = 0;
  for (int s = 0; s < p->n_segments; ++s) {
    const oadamw_segment *seg = &p->segments[s];
    oadamw_state_set set = shift(p->at.state, state, a);
    oadamw_convert_args args = {.params_in = in ? in + (size_t)seg->offset * b : NULL,
                                .params_out = out ? at(out, seg->offset, b) : NULL,
                                .master = set.master,
                                .exp_avg = set.exp_avg,
                                .exp_avg_sq = set.exp_avg_sq,
                                .count = seg->count,
                                .param_dtype = p->config.param_dtype};
    LEV_TRY(LEV_LAUNCH(stream, kernel, args));
    state += seg->count;
  }
  return LEV_OK;
}

lev_status oadamw_init(oadamw_plan *p, const void *params, lev_stream *stream) {
  if (!p || !stream || (p->cut.n > 0 && !params)) return lev_fail(LEV_ERR_ARG, "oadamw_init: NULL argument");
  LEV_TRY(ready(p, false, "oadamw_init"));
  return convert(p, params, NULL, &oadamw_kernel_init, stream);
}

lev_status oadamw_publish(oadamw_plan *p, void *params, lev_stream *stream) {
  if (!p || !stream || (p->cut.n > 0 && !params)) return lev_fail(LEV_ERR_ARG, "oadamw_publish: NULL argument");
  LEV_TRY(ready(p, false, "oadamw_publish"));
  return convert(p, NULL, params, &oadamw_kernel_publish, stream);
}

lev_status oadamw_state(oadamw_plan *p, lev_stream *stream, oadamw_state_view *out) {
  if (!p || !out) return lev_fail(LEV_ERR_ARG, "oadamw_state: NULL argument");
  LEV_TRY(ready(p, false, "oadamw_state"));
  if (stream) LEV_TRY(lev_stream_sync(stream));
  *out = (oadamw_state_view){.master = p->at.state.master,
                             .exp_avg = p->at.state.exp_avg,
                             .exp_avg_sq = p->at.state.exp_avg_sq,
                             .count = p->cut.n,
                             .dtype = p->arith,
                             .cls = p->config.schedule == OADAMW_PLAIN ? LEV_MEM_DEVICE : LEV_MEM_PINNED};
  return LEV_OK;
}

/* ---- step ---- */

static void set_rates(oadamw_plan *p, const oadamw_step_args *args) {
  const oadamw_config *c = &p->config;
  double bc1 = 1 - pow(c->beta1, (double)args->step), bc2 = 1 - pow(c->beta2, (double)args->step);
  for (int s = 0; s < p->n_segments; ++s) {
    double lr = args->lr * p->segments[s].lr_scale;
    p->rates[s] = (oadamw_rates){.grad_scale = args->grad_scale,
                                 .beta1 = c->beta1,
                                 .one_beta1 = 1 - c->beta1,
                                 .beta2 = c->beta2,
                                 .one_beta2 = 1 - c->beta2,
                                 .inv_sqrt_bc2 = 1 / sqrt(bc2),
                                 .eps = c->eps,
                                 .decay = lr * p->segments[s].weight_decay,
                                 .rate = lr / bc1};
  }
}

/* Updates one piece. `grads` and `params` point to its first elements, as does `state`. */
static lev_status launch(oadamw_plan *p, const lev_kernel *kernel, lev_stream *stream, int segment, int64_t count,
                         const void *grads, void *params, oadamw_state_set state) {
  oadamw_update_args args = {.grads = grads,
                             .params = params,
                             .master = state.master,
                             .exp_avg = state.exp_avg,
                             .exp_avg_sq = state.exp_avg_sq,
                             .count = count,
                             .param_dtype = p->config.param_dtype,
                             .grad_dtype = p->config.grad_dtype,
                             .simd = p->simd,
                             .rates = p->rates[segment]};
  if (kernel != &oadamw_kernel_host_update) return LEV_LAUNCH(stream, kernel, args);
  if (p->host_slots) args.slot = &p->host_slots[p->host_updates++ % (2 * p->n_pieces)];
  return lev_launch_host(stream, kernel, &args, sizeof args);
}

static lev_status step_plain(oadamw_plan *p, const oadamw_step_args *args, lev_stream *stream) {
  size_t a = lev_dtype_bytes(p->arith), pb = lev_dtype_bytes(p->config.param_dtype),
         gb = lev_dtype_bytes(p->config.grad_dtype);
  int64_t state = 0;
  for (int s = 0; s < p->n_segments; ++s) {
    const oadamw_segment *seg = &p->segments[s];
    LEV_TRY(launch(p, &oadamw_kernel_update, stream, s, seg->count,
                   (const unsigned char *)args->grads + (size_t)seg->offset * gb, at(args->params, seg->offset, pb),
                   shift(p->at.state, state, a)));
    state += seg->count;
  }
  return LEV_OK;
}

/* The pipe's next slot, once it is free to be filled. */
static lev_status next_slot(const oadamw_plan *p, oadamw_pipe *pipe, int *slot) {
  *slot = (int)(pipe->used % p->config.slots);
  if (pipe->used == 0) LEV_TRY(lev_stream_wait(pipe->in, p->begin));
  if (pipe->used >= p->config.slots) LEV_TRY(lev_stream_wait(pipe->in, pipe->left[*slot]));
  ++pipe->used;
  return LEV_OK;
}

static lev_status gpu_bucket(oadamw_plan *p, const oadamw_bucket *b, const oadamw_step_args *args, lev_stream *stream) {
  size_t a = lev_dtype_bytes(p->arith), pb = lev_dtype_bytes(p->config.param_dtype),
         gb = lev_dtype_bytes(p->config.grad_dtype), bytes = (size_t)b->size * a;
  oadamw_pipe *pipe = &p->gpu;
  int s;
  LEV_TRY(next_slot(p, pipe, &s));
  oadamw_state_set home = shift(p->at.state, b->begin, a), slot = p->at.slot[s];
  LEV_TRY(lev_copy(pipe->in, slot.master, home.master, bytes, "oadamw.master.in"));
  LEV_TRY(lev_copy(pipe->in, slot.exp_avg, home.exp_avg, bytes, "oadamw.exp_avg.in"));
  LEV_TRY(lev_copy(pipe->in, slot.exp_avg_sq, home.exp_avg_sq, bytes, "oadamw.exp_avg_sq.in"));
  LEV_TRY(lev_event_record(pipe->arrived[s], pipe->in));
  LEV_TRY(lev_stream_wait(stream, pipe->arrived[s]));
  for (int64_t i = 0; i < b->pieces; ++i) {
    const oadamw_piece *x = &p->piece[b->first_piece + i];
    LEV_TRY(launch(p, &oadamw_kernel_update, stream, x->segment, x->count,
                   (const unsigned char *)args->grads + (size_t)x->offset * gb, at(args->params, x->offset, pb),
                   shift(slot, x->state - b->begin, a)));
  }
  LEV_TRY(lev_event_record(pipe->updated[s], stream));
  LEV_TRY(lev_stream_wait(pipe->out, pipe->updated[s]));
  LEV_TRY(lev_copy(pipe->out, home.master, slot.master, bytes, "oadamw.master.out"));
  LEV_TRY(lev_copy(pipe->out, home.exp_avg, slot.exp_avg, bytes, "oadamw.exp_avg.out"));
  LEV_TRY(lev_copy(pipe->out, home.exp_avg_sq, slot.exp_avg_sq, bytes, "oadamw.exp_avg_sq.out"));
  return lev_event_record(pipe->left[s], pipe->out);
}

static lev_status cpu_bucket(oadamw_plan *p, const oadamw_bucket *b, const oadamw_step_args *args) {
  size_t a = lev_dtype_bytes(p->arith), pb = lev_dtype_bytes(p->config.param_dtype),
         gb = lev_dtype_bytes(p->config.grad_dtype);
  oadamw_pipe *pipe = &p->cpu;
  lev_stream *worker = p->worker[pipe->used % p->streams];
  int s;
  LEV_TRY(next_slot(p, pipe, &s));
  for (int64_t i = 0; i < b->pieces; ++i) {
    const oadamw_piece *x = &p->piece[b->first_piece + i];
    LEV_TRY(lev_copy(pipe->in, at(p->at.grads[s], x->state - b->begin, gb),
                     (const unsigned char *)args->grads + (size_t)x->offset * gb, (size_t)x->count * gb,
                     "oadamw.grads.out"));
  }
  LEV_TRY(lev_event_record(pipe->arrived[s], pipe->in));
  LEV_TRY(lev_stream_wait(worker, pipe->arrived[s]));
  for (int64_t i = 0; i < b->pieces; ++i) {
    const oadamw_piece *x = &p->piece[b->first_piece + i];
    int64_t local = x->state - b->begin;
    LEV_TRY(launch(p, &oadamw_kernel_host_update, worker, x->segment, x->count, at(p->at.grads[s], local, gb),
                   at(p->at.params[s], local, pb), shift(p->at.state, x->state, a)));
  }
  LEV_TRY(lev_event_record(pipe->updated[s], worker));
  LEV_TRY(lev_stream_wait(pipe->out, pipe->updated[s]));
  for (int64_t i = 0; i < b->pieces; ++i) {
    const oadamw_piece *x = &p->piece[b->first_piece + i];
    LEV_TRY(lev_copy(pipe->out, at(args->params, x->offset, pb), at(p->at.params[s], x->state - b->begin, pb),
                     (size_t)x->count * pb, "oadamw.params.in"));
  }
  return lev_event_record(pipe->left[s], pipe->out);
}

/* Bucket b of the split goes to the host: evenly spread, cpu_share of them. */
static bool on_cpu(const oadamw_plan *p, int64_t b) {
  double share = p->config.cpu_share;
  if (p->config.placement != OADAMW_SPLIT) return p->config.placement == OADAMW_CPU;
  return floor((double)(b + 1) * share + 1e-9) > floor((double)b * share + 1e-9);
}

static lev_status join_pipe(oadamw_pipe *pipe, lev_stream *stream) {
  if (pipe->used == 0) return LEV_OK;
  LEV_TRY(lev_event_record(pipe->end, pipe->out));
  return lev_stream_wait(stream, pipe->end);
}

static lev_status step_bounded(oadamw_plan *p, const oadamw_step_args *args, lev_stream *stream) {
  LEV_TRY(lev_event_record(p->begin, stream));
  p->gpu.used = p->cpu.used = 0;
  for (int64_t b = 0; b < p->cut.buckets; ++b)
    LEV_TRY(on_cpu(p, b) ? cpu_bucket(p, &p->bucket[b], args) : gpu_bucket(p, &p->bucket[b], args, stream));
  LEV_TRY(join_pipe(&p->gpu, stream));
  return join_pipe(&p->cpu, stream);
}

lev_status oadamw_step(oadamw_plan *p, const oadamw_step_args *args, lev_stream *stream) {
  if (!p || !args || !stream) return lev_fail(LEV_ERR_ARG, "oadamw_step: NULL argument");
  if (p->cut.n > 0 && (!args->params || !args->grads))
    return lev_fail(LEV_ERR_ARG, "oadamw_step: NULL params or grads with %lld elements", (long long)p->cut.n);
  if (args->step < 1) return lev_fail(LEV_ERR_ARG, "oadamw_step: step %lld; steps count from 1", (long long)args->step);
  if (!isfinite(args->lr) || !isfinite(args->grad_scale))
    return lev_fail(LEV_ERR_NUMERIC, "oadamw_step: lr %g, grad_scale %g; nothing was changed", args->lr,
                    args->grad_scale);
  LEV_TRY(ready(p, true, "oadamw_step"));
  if (p->cut.n == 0) return LEV_OK;
  set_rates(p, args);
  return p->config.schedule == OADAMW_PLAIN ? step_plain(p, args, stream) : step_bounded(p, args, stream);
}
