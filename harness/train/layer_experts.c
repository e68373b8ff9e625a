/* SPDX-License-Identifier: Apache-2.0 */
/* Router and routed experts of a decoder layer. */
#include "harness/train/layer.h"

static int32_t *layer_ids(const lev_layer_run *r) {
  return r->rank->ids + lev_moe_index(r->m, r->layer) * r->rank->max_tokens * r->m->top_k;
}
static int64_t *layer_counts(const lev_layer_run *r) {
  return r->rank->counts + lev_moe_index(r->m, r->layer) * r->m->experts;
}

/* Router scores in A, then ids (when `select`) and weights. */
static lev_status route(const lev_layer_run *r, const void *x, bool select, void **logits, void **weights) {
  lev_rank *rank = r->rank;
  LEV_TRY(lev_rank_work(rank, "router.logits", r->a, r->n, r->m->experts, logits));
  LEV_TRY(lev_rank_work(rank, "router.weights", r->a, r->n, r->m->top_k, weights));
  LEV_TRY(lev_layer_product(r, r->n, x, r->m->hidden, r->w[LEV_W_ROUTER], r->m->experts, *logits, r->a, 0));
  lev_router_args args = {.dtype = r->t,
                          .rows = r->n,
                          .experts = r->m->experts,
                          .top_k = r->m->top_k,
                          .rule = r->m->route,
                          .select = select,
                          .uniform = rank->config->debug.uniform_routing,
                          .logits = *logits,
                          .bias = lev_rank_route_bias(rank, r->layer),
                          .ids = layer_ids(r),
                          .weights = *weights};
  if (select && rank->counting != LEV_COUNT_OFF) args.counts = layer_counts(r);
  if (select && rank->counting != LEV_COUNT_LOCAL) args.sums = lev_layer_sums(r->m, rank->sums, r->layer);
  args.scratch = lev_stream_workspace(rank->compute, &args.scratch_bytes);
  LEV_TRY(LEV_LAUNCH(rank->compute, &lev_router_kernel, args));
  if (!select || rank->counting != LEV_COUNT_GLOBAL) return LEV_OK;
  return lev_comm_all_reduce(rank->groups.stats, rank->compute, layer_counts(r), r->m->experts, LEV_I64, LEV_SUM);
}

/* Token counts of this rank's expert group. */
static const int64_t *group_tokens(const lev_rank *rank) {
  int size = rank->params->layout.experts;
  return rank->batch.rank_tokens + rank->params->layout.rank / size * size;
}

lev_status lev_experts_forward(const lev_layer_run *r, const void *x, void *y) {
  lev_rank *rank = r->rank;
  int unit = lev_unit_experts(rank->params, r->layer);
  lev_blocks blocks;
  void *logits, *weights;
  const void *w;
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(route(r, x, true, &logits, &weights));
  LEV_TRY(lev_weights_get(rank->weights, unit, rank->compute, &w));
  LEV_TRY(lev_rank_take(rank, llep_walk_forward, rank->llep, &blocks));
  LEV_TRY(llep_plan_bind(rank->llep, LLEP_FORWARD, &blocks));
  llep_forward_args args = {.layer = (int)lev_moe_index(r->m, r->layer),
                            .tokens = r->n,
                            .rank_tokens = group_tokens(rank),
                            .x = x,
                            .ids = layer_ids(r),
                            .probs = weights,
                            .w = w,
                            .y = y,
                            .accumulate = true};
  LEV_TRY(llep_forward(rank->llep, &args, rank->compute));
  LEV_TRY(lev_weights_release(rank->weights, unit, rank->compute));
  return lev_rank_pop(rank);
}

/* d logits, then the router weight's gradient and its share of dx. */
static lev_status router_backward(const lev_layer_run *r, const void *x, const void *logits, const void *dweights,
                                  void *dx) {
  lev_rank *rank = r->rank;
  const lev_model *m = r->m;
  double tokens = (double)(rank->config->train.context * rank->config->train.global_batch);
  double per_layer = 1 / ((double)lev_moe_layers(m) * tokens);
  void *dlogits;
  LEV_TRY(lev_rank_work(rank, "router.logits_grad", r->t, r->n, m->experts, &dlogits));
  lev_router_backward_args args = {.dtype = r->t,
                                   .rows = r->n,
                                   .experts = m->experts,
                                   .top_k = m->top_k,
                                   .rule = m->route,
                                   .logits = logits,
                                   .ids = layer_ids(r),
                                   .dweights = dweights,
                                   .counts = layer_counts(r),
                                   .balance_scale =
                                       m->aux_coef * per_layer * (double)m->experts / (tokens * (double)m->top_k),
                                   .z_scale = m->z_coef * per_layer,
                                   .dlogits = dlogits};
  LEV_TRY(LEV_LAUNCH(rank->compute, &lev_router_backward_kernel, args));
  LEV_TRY(lev_layer_product_dw(r, r->n, dlogits, m->experts, x, m->hidden, r->g[LEV_W_ROUTER]));
  return lev_layer_product_dx(r, r->n, dlogits, m->experts, r->w[LEV_W_ROUTER], m->hidden, dx, 1);
}

lev_status lev_experts_backward(const lev_layer_run *r, const void *x, void *dx, bool first) {
  lev_rank *rank = r->rank;
  int unit = lev_unit_experts(rank->params, r->layer);
  lev_blocks blocks;
  void *logits, *weights, *dweights, *dw;
  const void *w;
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(route(r, x, false, &logits, &weights));
  LEV_TRY(lev_rank_work(rank, "router.weights", r->a, r->n, r->m->top_k, &dweights));
  LEV_TRY(lev_weights_get(rank->weights, unit, rank->compute, &w));
  LEV_TRY(lev_grads_begin(rank->weights, unit, rank->compute, first, &dw));
  LEV_TRY(lev_rank_push(rank)); /* the chunks' buffers end before the router's backward needs its own */
  LEV_TRY(lev_rank_take(rank, llep_walk_backward, rank->llep, &blocks));
  LEV_TRY(llep_plan_bind(rank->llep, LLEP_BACKWARD, &blocks));
  llep_backward_args args = {.layer = (int)lev_moe_index(r->m, r->layer),
                             .tokens = r->n,
                             .rank_tokens = group_tokens(rank),
                             .x = x,
                             .ids = layer_ids(r),
                             .probs = weights,
                             .w = w,
                             .dy = rank->hidden,
                             .dx = dx,
                             .dprobs = dweights,
                             .dw = dw,
                             .overwrite_dw = lev_grads_overwritten(rank->weights, unit)};
  LEV_TRY(llep_backward(rank->llep, &args, rank->compute));
  LEV_TRY(lev_rank_pop(rank));
  LEV_TRY(lev_grads_end(rank->weights, unit, rank->compute, first));
  LEV_TRY(lev_weights_release(rank->weights, unit, rank->compute));
  LEV_TRY(router_backward(r, x, logits, dweights, dx));
  return lev_rank_pop(rank);
}
