/* SPDX-License-Identifier: Apache-2.0 */
/* The step: Newton-Schulz of one matrix, and the schedules that bring state and matrices together. */
#include <math.h>

#include "common/dims.h"
#include "common/gemm.h"
#include "muon/muon_plan.h"

static lev_status duplicate(lev_stream *stream, const void *src, void *dst, int64_t count, lev_dtype type) {
  muon_duplicate_args args = {src, dst, (size_t)count * lev_dtype_bytes(type)};
  return LEV_LAUNCH(stream, &muon_duplicate_kernel, args);
}

/* One iteration from x to y (rows x cols). The Gram matrix G is n x n with n the smaller side; its place in the
 * products follows from the shape, so that no matrix is ever transposed in memory. */
static lev_status iterate(muon_plan *p, const muon_matrix *m, const double abc[3], void *x, void *y,
                          lev_stream *stream) {
  lev_dtype type = p->config.compute_dtype;
  bool tall = m->rows > m->cols;
  int64_t n = lev_min_i64(m->rows, m->cols);
  lev_gemm_args product = {.ab_type = type, .c_type = type};
  /* G = X X^T or X^T X */
  product.m = product.n = n, product.k = tall ? m->rows : m->cols;
  product.trans_a = tall, product.trans_b = !tall;
  product.a = product.b = x, product.lda = product.ldb = m->cols;
  product.c = p->at.gram, product.ldc = n;
  product.alpha = 1, product.beta = 0;
  LEV_TRY(lev_gemm(stream, &product));
  /* B = b G + c G G; with c = 0, b G is folded into the last product */
  void *factor = p->at.gram;
  double alpha = abc[1];
  if (abc[2] != 0) {
    LEV_TRY(duplicate(stream, p->at.gram, p->at.square, n * n, type));
    product.k = n, product.trans_a = product.trans_b = false;
    product.a = product.b = p->at.gram, product.lda = product.ldb = n;
    product.c = p->at.square;
    product.alpha = abc[2], product.beta = abc[1];
    LEV_TRY(lev_gemm(stream, &product));
    factor = p->at.square, alpha = 1;
  }
  /* Y = a X + B X or a X + X B */
  LEV_TRY(duplicate(stream, x, y, m->rows * m->cols, type));
  product.m = m->rows, product.n = m->cols, product.k = n;
  product.trans_a = product.trans_b = false;
  product.a = tall ? x : factor, product.lda = tall ? m->cols : n;
  product.b = tall ? factor : x, product.ldb = tall ? n : m->cols;
  product.c = y, product.ldc = m->cols;
  product.alpha = alpha, product.beta = abc[0];
  return lev_gemm(stream, &product);
}

/* The whole update of matrix i, its state being at `master` and `momentum`. */
static lev_status update_matrix(muon_plan *p, const muon_step_args *step, int i, void *master, void *momentum,
                                lev_stream *stream) {
  const muon_config *c = &p->config;
  const muon_matrix *m = &p->matrices[i];
  int64_t count = m->rows * m->cols;
  const void *grad = muon_at(step->grads, m->offset, c->grad_dtype);
  muon_momentum_args momentum_args = {grad,  momentum,    p->at.partial, count, step->grad_scale,
                                      c->mu, c->nesterov, c->grad_dtype};
  LEV_TRY(LEV_LAUNCH(stream, &muon_momentum_kernel, momentum_args));
  void *x = p->at.x[0], *y = p->at.x[1];
  muon_normalize_args normalize_args = {.grad = grad,
                                        .momentum = momentum,
                                        .partial = p->at.partial,
                                        .x = x,
                                        .count = count,
                                        .grad_scale = step->grad_scale,
                                        .mu = c->mu,
                                        .norm_factor = muon_set_norm_factor(c->set),
                                        .eps = c->eps,
                                        .nesterov = c->nesterov,
                                        .grad_dtype = c->grad_dtype,
                                        .x_dtype = c->compute_dtype};
  LEV_TRY(LEV_LAUNCH(stream, &muon_normalize_kernel, normalize_args));
  for (int s = 0; s < p->steps; ++s) {
    double abc[3];
    muon_set_row(c->set, s, abc);
    LEV_TRY(iterate(p, m, abc, x, y, stream));
    void *next = y;
    y = x, x = next;
  }
  muon_update_args update_args = {.x = x,
                                  .master = master,
                                  .param = muon_at(step->params, m->offset, c->param_dtype),
                                  .count = count,
                                  .decay = step->lr * c->weight_decay,
                                  .rate = step->lr * muon_scale_factor(c->scale, m->rows, m->cols),
                                  .x_dtype = c->compute_dtype,
                                  .param_dtype = c->param_dtype};
  return LEV_LAUNCH(stream, &muon_update_kernel, update_args);
}

static lev_status step_plain(muon_plan *p, const muon_step_args *step, lev_stream *stream) {
  for (int i = 0; i < p->config.n_matrices; ++i) {
    if (p->matrices[i].rows * p->matrices[i].cols == 0) continue;
    LEV_TRY(update_matrix(p, step, i, muon_at(p->at.master, p->begin[i], p->arith),
                          muon_at(p->at.momentum, p->begin[i], p->arith), stream));
  }
  return LEV_OK;
}

/* Brings bucket b into its slot, once the bucket that had the slot before is home. */
static lev_status load(muon_plan *p, int b) {
  const muon_bucket *bucket = &p->buckets[b];
  int s = b % p->n_slots;
  size_t bytes = (size_t)bucket->elements * lev_dtype_bytes(p->arith);
  if (b >= p->n_slots) LEV_TRY(lev_stream_wait(p->in, p->stored[s]));
  LEV_TRY(lev_copy(p->in, p->at.slots[s], muon_at(p->at.master, bucket->begin, p->arith), bytes, "muon.in"));
  LEV_TRY(lev_copy(p->in, muon_at(p->at.slots[s], p->slot_elements, p->arith),
                   muon_at(p->at.momentum, bucket->begin, p->arith), bytes, "muon.in"));
  return lev_event_record(p->loaded[s], p->in);
}

static lev_status store(muon_plan *p, int b) {
  const muon_bucket *bucket = &p->buckets[b];
  int s = b % p->n_slots;
  size_t bytes = (size_t)bucket->elements * lev_dtype_bytes(p->arith);
  LEV_TRY(lev_stream_wait(p->out, p->updated[s]));
  LEV_TRY(lev_copy(p->out, muon_at(p->at.master, bucket->begin, p->arith), p->at.slots[s], bytes, "muon.out"));
  LEV_TRY(lev_copy(p->out, muon_at(p->at.momentum, bucket->begin, p->arith),
                   muon_at(p->at.slots[s], p->slot_elements, p->arith), bytes, "muon.out"));
  return lev_event_record(p->stored[s], p->out);
}

static lev_status step_bounded(muon_plan *p, const muon_step_args *step, lev_stream *stream) {
  LEV_TRY(lev_event_record(p->start, stream));
  LEV_TRY(lev_stream_wait(p->in, p->start));
  for (int b = 0; b < p->n_slots; ++b) LEV_TRY(load(p, b));
  for (int b = 0; b < p->n_buckets; ++b) {
    const muon_bucket *bucket = &p->buckets[b];
    int s = b % p->n_slots;
    LEV_TRY(lev_stream_wait(stream, p->loaded[s]));
    for (int i = bucket->first; i <= bucket->last; ++i) {
      if (p->matrices[i].rows * p->matrices[i].cols == 0) continue;
      int64_t at = p->begin[i] - bucket->begin;
      LEV_TRY(update_matrix(p, step, i, muon_at(p->at.slots[s], at, p->arith),
                            muon_at(p->at.slots[s], p->slot_elements + at, p->arith), stream));
    }
    LEV_TRY(lev_event_record(p->updated[s], stream));
    LEV_TRY(store(p, b));
    if (b + p->n_slots < p->n_buckets) LEV_TRY(load(p, b + p->n_slots));
  }
  /* The copies out run in order, so the last one's mark covers all of them. */
  return lev_stream_wait(stream, p->stored[(p->n_buckets - 1) % p->n_slots]);
}

lev_status muon_step(muon_plan *p, const muon_step_args *step, lev_stream *stream) {
  if (!p || !step || !stream) return lev_fail(LEV_ERR_ARG, "muon_step: no plan, arguments or stream");
  if (step->step < 1) return lev_fail(LEV_ERR_ARG, "muon_step: step %lld, the first is 1", (long long)step->step);
  if (!isfinite(step->lr) || !isfinite(step->grad_scale))
    return lev_fail(LEV_ERR_NUMERIC, "muon_step: lr %g, grad_scale %g", step->lr, step->grad_scale);
  if (p->count == 0) return LEV_OK;
  if (!step->params || !step->grads) return lev_fail(LEV_ERR_ARG, "muon_step: params or grads are NULL");
  if (!p->bound[MUON_PERSISTENT] || !p->bound[MUON_STEP])
    return lev_fail(LEV_ERR_MISUSE, "muon_step: bind both phases first");
  size_t given, needed = lev_gemm_workspace_bytes(lev_device_backend(p->device), p->config.compute_dtype);
  (void)lev_stream_workspace(stream, &given);
  if (given < needed)
    return lev_fail(LEV_ERR_CAPACITY, "muon_step: stream %s has %zu bytes of workspace, products in %s need %zu",
                    lev_stream_name(stream), given, lev_dtype_name(p->config.compute_dtype), needed);
  return p->config.schedule == MUON_PLAIN ? step_plain(p, step, stream) : step_bounded(p, step, stream);
}

static lev_status convert(muon_plan *p, void *params, bool to_master, lev_stream *stream) {
  if (p->count == 0) return LEV_OK;
  if (!params) return lev_fail(LEV_ERR_ARG, "muon: params are NULL");
  if (!p->bound[MUON_PERSISTENT])
    return lev_fail(LEV_ERR_MISUSE, "the persistent phase of this muon plan is not bound");
  for (int i = 0; i < p->config.n_matrices; ++i) {
    const muon_matrix *m = &p->matrices[i];
    muon_convert_args args = {muon_at(params, m->offset, p->config.param_dtype),
                              muon_at(p->at.master, p->begin[i], p->arith),
                              muon_at(p->at.momentum, p->begin[i], p->arith),
                              m->rows * m->cols,
                              to_master,
                              p->config.param_dtype};
    if (args.count > 0) LEV_TRY(LEV_LAUNCH(stream, &muon_convert_kernel, args));
  }
  return LEV_OK;
}

lev_status muon_init(muon_plan *p, const void *params, lev_stream *stream) {
  /* The kernel only reads params in this direction. */
  return convert(p, (void *)(uintptr_t)params, true, stream);
}

lev_status muon_publish(muon_plan *p, void *params, lev_stream *stream) {
  return convert(p, params, false, stream);
}
