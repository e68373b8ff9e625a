/* SPDX-License-Identifier: Apache-2.0 */
/* One training step: micro-batches forward and backward, then the optimizers. */
#include <math.h>
#include <string.h>

#include "harness/model/ops.h"
#include "harness/train/rank.h"

static bool is_dry(const lev_rank *rank) {
  return lev_device_backend(rank->device) == LEV_BACKEND_DRY;
}

/* Token counts of this rank's vocabulary group. */
static const int64_t *vocab_tokens(const lev_rank *rank) {
  int size = rank->params->layout.vocab;
  return rank->batch.rank_tokens + rank->params->layout.rank / size * size;
}

/* ---- ends of the model: embedding and loss ---- */

static lev_status embed(lev_rank *rank, void *out) {
  int unit = lev_unit_embed(rank->params);
  lev_blocks blocks;
  const void *w;
  lev_rank_phase(rank, "forward.embedding", -1);
  LEV_TRY(lev_weights_get(rank->weights, unit, rank->compute, &w));
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(lev_rank_take(rank, embed_walk_step, rank->embed, &blocks));
  LEV_TRY(embed_plan_bind(rank->embed, EMBED_STEP, &blocks));
  embed_forward_args args = {
      .tokens = rank->batch.tokens, .rank_tokens = vocab_tokens(rank), .ids = rank->tokens, .w = w, .out = out};
  LEV_TRY(embed_forward(rank->embed, &args, rank->compute));
  LEV_TRY(lev_rank_pop(rank));
  return lev_weights_release(rank->weights, unit, rank->compute);
}

/* Adds the embedding's gradient; with a tied head `dw` already holds the head's share, else it is begun here. */
static lev_status embed_gradient(lev_rank *rank, bool first, void *dw) {
  int unit = lev_unit_embed(rank->params);
  lev_blocks blocks;
  lev_rank_phase(rank, "backward.embedding", -1);
  if (!rank->params->model.tied) LEV_TRY(lev_grads_begin(rank->weights, unit, rank->compute, first, &dw));
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(lev_rank_take(rank, embed_walk_step, rank->embed, &blocks));
  LEV_TRY(embed_plan_bind(rank->embed, EMBED_STEP, &blocks));
  embed_backward_args args = {.tokens = rank->batch.tokens,
                              .rank_tokens = vocab_tokens(rank),
                              .ids = rank->tokens,
                              .dout = rank->hidden,
                              .dw = dw};
  LEV_TRY(embed_backward(rank->embed, &args, rank->compute));
  LEV_TRY(lev_rank_pop(rank));
  return lev_grads_end(rank->weights, unit, rank->compute, first);
}

static lev_status final_norm(lev_rank *rank, void **out) {
  const lev_model *m = &rank->params->model;
  const void *w;
  LEV_TRY(lev_rank_work(rank, "hidden.norm", m->dtype, rank->batch.tokens, m->hidden, out));
  LEV_TRY(lev_weights_get(rank->weights, lev_unit_final_norm(rank->params), rank->compute, &w));
  lev_rmsnorm_args args = {m->dtype, rank->batch.tokens, m->hidden, m->norm_eps, rank->hidden, w, *out};
  return LEV_LAUNCH(rank->compute, &lev_rmsnorm_kernel, args);
}

/* rank->hidden: the last layer's output in, d loss / d output out. Adds to sums: NLL, valid tokens, bad labels.
 * *head_grad: the head's live gradient, which stays open until embed_gradient when the head is tied. */
static lev_status loss_and_gradient(lev_rank *rank, double grad_scale, bool first, void **head_grad) {
  const lev_model *m = &rank->params->model;
  int norm_unit = lev_unit_final_norm(rank->params), head_unit = lev_unit_head(rank->params);
  lev_blocks blocks;
  const void *w, *norm_w;
  void *h, *dh, *dnorm;
  lev_rank_phase(rank, "loss", -1);
  LEV_TRY(lev_weights_get(rank->weights, head_unit, rank->compute, &w));
  LEV_TRY(lev_grads_begin(rank->weights, head_unit, rank->compute, first, head_grad));
  LEV_TRY(lev_grads_begin(rank->weights, norm_unit, rank->compute, first, &dnorm));
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(final_norm(rank, &h));
  LEV_TRY(lev_rank_work(rank, "hidden.norm_grad", m->dtype, rank->batch.tokens, m->hidden, &dh));
  LEV_TRY(lev_rank_take(rank, rdtp_walk_step, rank->rdtp, &blocks));
  LEV_TRY(rdtp_plan_bind(rank->rdtp, RDTP_STEP, &blocks));
  rdtp_args args = {.tokens = rank->batch.tokens,
                    .rank_tokens = vocab_tokens(rank),
                    .h = h,
                    .labels = rank->labels,
                    .w = w,
                    .dh = dh,
                    .dw = *head_grad,
                    .sums = rank->sums + LEV_SUM_NLL,
                    .grad_scale = grad_scale};
  LEV_TRY(rdtp_step(rank->rdtp, &args, rank->compute));
  LEV_TRY(lev_weights_get(rank->weights, norm_unit, rank->compute, &norm_w));
  lev_rmsnorm_backward_args back = {.dtype = m->dtype,
                                    .rows = rank->batch.tokens,
                                    .cols = m->hidden,
                                    .eps = m->norm_eps,
                                    .x = rank->hidden,
                                    .w = norm_w,
                                    .dy = dh,
                                    .dx = rank->hidden,
                                    .dw = dnorm};
  back.scratch = lev_stream_workspace(rank->compute, &back.scratch_bytes);
  LEV_TRY(LEV_LAUNCH(rank->compute, &lev_rmsnorm_backward_kernel, back));
  LEV_TRY(lev_rank_pop(rank));
  LEV_TRY(lev_weights_release(rank->weights, head_unit, rank->compute));
  LEV_TRY(lev_weights_release(rank->weights, norm_unit, rank->compute));
  if (!m->tied) LEV_TRY(lev_grads_end(rank->weights, head_unit, rank->compute, first));
  return lev_grads_end(rank->weights, norm_unit, rank->compute, first);
}

static lev_status loss_only(lev_rank *rank) {
  int norm_unit = lev_unit_final_norm(rank->params), head_unit = lev_unit_head(rank->params);
  lev_blocks blocks;
  const void *w;
  void *h;
  lev_rank_phase(rank, "evaluation.loss", -1);
  LEV_TRY(lev_weights_get(rank->weights, head_unit, rank->compute, &w));
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(final_norm(rank, &h));
  LEV_TRY(lev_rank_take(rank, rdtp_walk_eval, rank->rdtp, &blocks));
  LEV_TRY(rdtp_plan_bind(rank->rdtp, RDTP_EVAL, &blocks));
  rdtp_args args = {.tokens = rank->batch.tokens,
                    .rank_tokens = vocab_tokens(rank),
                    .h = h,
                    .labels = rank->labels,
                    .w = w,
                    .sums = rank->sums + LEV_SUM_NLL};
  LEV_TRY(rdtp_eval(rank->rdtp, &args, rank->compute));
  LEV_TRY(lev_rank_pop(rank));
  LEV_TRY(lev_weights_release(rank->weights, head_unit, rank->compute));
  return lev_weights_release(rank->weights, norm_unit, rank->compute);
}

/* Embedding and all layers; leaves the last output in rank->hidden. */
static lev_status forward(lev_rank *rank) {
  int layers = (int)rank->params->model.layers;
  size_t bytes = lev_bytes(rank->batch.tokens, rank->params->model.hidden, lev_dtype_bytes(rank->params->model.dtype));
  void *in, *out;
  LEV_TRY(sco_reset(rank->sco));
  LEV_TRY(sco_write_begin(rank->sco, 0, SCO_BOUNDARY, rank->compute, &in));
  LEV_TRY(embed(rank, in));
  LEV_TRY(sco_write_end(rank->sco, 0, SCO_BOUNDARY, bytes, rank->compute));
  for (int l = 0; l < layers; ++l) {
    out = rank->hidden;
    if (l + 1 < layers) LEV_TRY(sco_write_begin(rank->sco, l + 1, SCO_BOUNDARY, rank->compute, &out));
    LEV_TRY(lev_layer_forward(rank, l, in, out));
    if (l + 1 < layers) LEV_TRY(sco_write_end(rank->sco, l + 1, SCO_BOUNDARY, bytes, rank->compute));
    in = out;
  }
  return LEV_OK;
}

/* The micro-batch after `micro`. All between the first and the last are alike, in bytes and events: the dry run goes
 * through one of them. */
static int next_micro(const lev_rank *rank, int micro) {
  bool alike = is_dry(rank) && micro == LEV_MICRO_ALIKE;
  return alike ? (int)lev_max_i64(micro + 1, rank->micro_batches - 1) : micro + 1;
}

/* ---- sums over ranks ---- */

static lev_status clear_sums(lev_rank *rank) {
  size_t bytes = sizeof(double) * (size_t)lev_rank_sums(&rank->params->model);
  return lev_fill(rank->compute, rank->sums, 0, bytes, "step.sums");
}

/* Adds the sums over all ranks and brings them to rank->sums_pinned; the host waits (the dry run has nothing to read).
 */
static lev_status collect_sums(lev_rank *rank) {
  int64_t n = lev_rank_sums(&rank->params->model);
  LEV_TRY(lev_comm_all_reduce(rank->groups.stats, rank->compute, rank->sums, n, LEV_F64, LEV_SUM));
  LEV_TRY(lev_copy(rank->compute, rank->sums_pinned, rank->sums, sizeof(double) * (size_t)n, "step.sums"));
  return lev_stream_sync(rank->compute);
}

/* Balance and z-loss of the batch, and how uneven the routing was. */
static void router_result(lev_rank *rank, lev_step_result *out) {
  const lev_model *m = &rank->params->model;
  double tokens = (double)(rank->config->train.context * rank->config->train.global_batch);
  double layers = (double)lev_moe_layers(m);
  for (int l = (int)m->dense_layers; l < (int)m->layers; ++l) {
    const double *sums = lev_layer_sums(m, rank->sums_pinned, l), *p = sums + 1, *n = p + m->experts;
    double most = 0, balance = 0, mean = tokens * (double)m->top_k / (double)m->experts;
    for (int64_t e = 0; e < m->experts; ++e) {
      balance += n[e] * p[e];
      most = fmax(most, n[e]);
    }
    out->balance += balance * (double)m->experts / (tokens * tokens * (double)m->top_k) / layers;
    out->z_loss += sums[0] / tokens / layers;
    out->max_vio = fmax(out->max_vio, most / mean - 1);
    llep_stats stats;
    llep_get_stats(rank->llep, (int)lev_moe_index(m, l), &stats);
    out->rows_max_mean = fmax(out->rows_max_mean, stats.rows_mean > 0 ? stats.rows_max / stats.rows_mean : 0);
    out->chunks = lev_max_i64(out->chunks, stats.chunks);
  }
}

/* Routes per expert over the whole batch, before any gradient needs them. One micro-batch counts as it goes; several
 * take a forward pass of their own first, so that the balance loss does not depend on how the batch is cut. */
static lev_status count_routes(lev_rank *rank, lev_loader *loader, int64_t first_sample) {
  const lev_model *m = &rank->params->model;
  int64_t n = lev_moe_layers(m) * m->experts;
  rank->counting = LEV_COUNT_OFF;
  if (m->aux_coef == 0 || n == 0) return LEV_OK;
  LEV_TRY(lev_fill(rank->compute, rank->counts, 0, sizeof(int64_t) * (size_t)n, "router.counts"));
  rank->counting = rank->micro_batches == 1 ? LEV_COUNT_GLOBAL : LEV_COUNT_LOCAL;
  for (int micro = 0; micro < rank->micro_batches && rank->micro_batches > 1; micro = next_micro(rank, micro)) {
    LEV_TRY(lev_batch_load(rank, loader, first_sample, rank->config->train.global_batch, micro));
    LEV_TRY(forward(rank));
  }
  if (rank->counting == LEV_COUNT_GLOBAL) return LEV_OK;
  rank->counting = LEV_COUNT_OFF;
  return lev_comm_all_reduce(rank->groups.stats, rank->compute, rank->counts, n, LEV_I64, LEV_SUM);
}

lev_status lev_step_gradients(lev_rank *rank, lev_loader *loader, int64_t first_sample, lev_step_result *out) {
  int64_t n = rank->config->train.global_batch;
  memset(out, 0, sizeof *out);
  LEV_TRY(lev_batch_count_valid(rank, loader, first_sample, n, &out->valid));
  double grad_scale = out->valid > 0 ? 1 / (double)out->valid : 0;
  LEV_TRY(clear_sums(rank));
  LEV_TRY(count_routes(rank, loader, first_sample));
  for (int micro = 0; micro < rank->micro_batches; micro = next_micro(rank, micro)) {
    bool first = micro == 0;
    void *head_grad;
    LEV_TRY(lev_batch_load(rank, loader, first_sample, n, micro));
    LEV_TRY(forward(rank));
    LEV_TRY(loss_and_gradient(rank, grad_scale, first, &head_grad));
    for (int l = (int)rank->params->model.layers - 1; l >= 0; --l) LEV_TRY(lev_layer_backward(rank, l, first));
    LEV_TRY(embed_gradient(rank, first, head_grad));
  }
  rank->counting = LEV_COUNT_OFF;
  LEV_TRY(lev_grads_join(rank->weights, rank->compute));
  lev_rank_phase(rank, "grad_norm", -1);
  LEV_TRY(oadamw_norm_launch(rank->compute, rank->grad_dtype, lev_weights_grads(rank->weights),
                             rank->params->shard_elements, rank->norm_scratch, rank->sums + LEV_SUM_NORM));
  LEV_TRY(collect_sums(rank));
  if (is_dry(rank)) return LEV_OK;
  const double *sums = rank->sums_pinned;
  out->loss = out->valid > 0 ? sums[LEV_SUM_NLL] / (double)out->valid : 0;
  out->bad_labels = (int64_t)sums[LEV_SUM_BAD];
  out->grad_norm = sums[LEV_SUM_NONFINITE] > 0 ? NAN : sqrt(sums[LEV_SUM_NORM]); /* the sum is of finite ones */
  out->skipped = sums[LEV_SUM_NONFINITE] > 0 || !isfinite(sums[LEV_SUM_NORM]) || !isfinite(out->loss);
  router_result(rank, out);
  return LEV_OK;
}

static lev_status update(lev_rank *rank, int64_t step, double lr, double grad_scale) {
  void *params = lev_weights_shard(rank->weights);
  const void *grads = lev_weights_grads(rank->weights);
  lev_blocks blocks;
  lev_rank_phase(rank, "optimizer.adamw", step);
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(lev_rank_take(rank, oadamw_walk_step, rank->adamw, &blocks));
  LEV_TRY(oadamw_plan_bind(rank->adamw, OADAMW_STEP, &blocks));
  oadamw_step_args adamw = {params, grads, lr, step, grad_scale};
  LEV_TRY(oadamw_step(rank->adamw, &adamw, rank->compute));
  LEV_TRY(lev_rank_pop(rank));
  if (rank->muon) {
    lev_rank_phase(rank, "optimizer.muon", step);
    LEV_TRY(lev_rank_push(rank));
    LEV_TRY(lev_rank_take(rank, muon_walk_step, rank->muon, &blocks));
    LEV_TRY(muon_plan_bind(rank->muon, MUON_STEP, &blocks));
    muon_step_args muon = {.params = params, .grads = grads, .lr = lr, .grad_scale = grad_scale, .step = step};
    LEV_TRY(muon_step(rank->muon, &muon, rank->compute));
    LEV_TRY(lev_rank_pop(rank));
  }
  return lev_weights_updated(rank->weights, rank->compute);
}

/* Moves the selection bias against the loads of the whole batch, which collect_sums left in rank->sums. */
static lev_status update_route_bias(lev_rank *rank) {
  const lev_model *m = &rank->params->model;
  for (int l = (int)m->dense_layers; l < (int)m->layers && m->route_bias; ++l) {
    lev_route_bias_args args = {.dtype = m->dtype,
                                .experts = m->experts,
                                .rate = m->bias_rate,
                                .counts = lev_layer_sums(m, rank->sums, l) + 1 + m->experts,
                                .bias = (void *)(uintptr_t)lev_rank_route_bias(rank, l)};
    LEV_TRY(LEV_LAUNCH(rank->compute, &lev_route_bias_kernel, args));
  }
  return LEV_OK;
}

lev_status lev_train_step(lev_rank *rank, lev_loader *loader, int64_t step, int64_t first_sample, double lr,
                          lev_step_result *out) {
  LEV_TRY(lev_step_gradients(rank, loader, first_sample, out));
  if (out->skipped) return LEV_OK; /* the sums are the same on every rank, so all skip together */
  if (rank->config->optimizer.name == LEV_OPTIMIZER_NONE) return LEV_OK;
  double clip = is_dry(rank) ? 1 : oadamw_clip_scale(out->grad_norm * out->grad_norm, rank->config->train.max_norm);
  LEV_TRY(update(rank, step, lr, clip));
  LEV_TRY(update_route_bias(rank));
  return lev_stream_sync(rank->compute);
}

lev_status lev_evaluate(lev_rank *rank, lev_loader *loader, int64_t first, int64_t n, double *nll, int64_t *valid) {
  int groups = rank->params->layout.ranks / rank->params->layout.context;
  LEV_TRY(clear_sums(rank));
  for (int micro = 0; micro < (int)lev_ceil_div(n, groups); ++micro) {
    LEV_TRY(lev_batch_load(rank, loader, first, n, micro));
    LEV_TRY(forward(rank));
    LEV_TRY(loss_only(rank));
  }
  LEV_TRY(collect_sums(rank));
  *nll = 0, *valid = 0;
  if (is_dry(rank)) return LEV_OK;
  *nll = rank->sums_pinned[LEV_SUM_NLL], *valid = (int64_t)rank->sums_pinned[LEV_SUM_VALID];
  return LEV_OK;
}
