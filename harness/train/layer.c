/* SPDX-License-Identifier: Apache-2.0 */
/* One decoder layer, forward and backward, in the order that keeps attention, dispatch and the rest from being live
 * together:
 *
 *   forward   x = norm(h); q, k, v; attention -> O;  h' = h + O Wo     [scope 1]
 *             x = norm(h'); router; experts chunk by chunk: out = h' + moe(x)     [scope 2]
 *   backward  (O recomputed if it was not kept)     [scope 1]
 *             expert half: h' rebuilt from h and O; router and experts backward     [scope 2]
 *             attention half: q, k, v rebuilt; attention backward     [scope 3] */
#include "common/gemm.h"
#include "harness/model/ops.h"
#include "harness/train/rank.h"

/* The layer's tensors and what every part of it needs. */
typedef struct layer_run {
  lev_rank *rank;
  const lev_model *m;
  int layer;
  int64_t n;      /* tokens of this rank */
  lev_dtype t, a; /* storage and arithmetic type */
  int64_t q_cols, kv_cols;
  const void *w[LEV_W_DENSE_SLOTS]; /* T */
  void *g[LEV_W_DENSE_SLOTS];       /* A, backward only */
} layer_run;

/* Attention output and log-sum-exp: one block, so that SCO can keep both as one item. */
typedef struct attention_out {
  void *o;   /* T [N, A, d] */
  void *lse; /* A [N, A] */
} attention_out;

typedef struct qkv {
  void *q, *k, *v; /* T [N, A d], [N, G d], [N, G d] */
} qkv;

size_t lev_attention_item_bytes(const lev_model *m, int64_t tokens) {
  return lev_sat_add(lev_align_up(lev_bytes(tokens, m->heads * m->head_dim, lev_dtype_bytes(m->dtype))),
                     lev_bytes(tokens, m->heads, lev_dtype_bytes(lev_dtype_arith(m->dtype))));
}

static attention_out split_item(const layer_run *r, void *item) {
  size_t o_bytes = lev_align_up(lev_bytes(r->n, r->q_cols, lev_dtype_bytes(r->t)));
  return (attention_out){item, (unsigned char *)item + o_bytes};
}

static lev_status begin(layer_run *r, lev_rank *rank, int layer) {
  const lev_model *m = &rank->params->model;
  *r = (layer_run){.rank = rank, .m = m, .layer = layer, .n = rank->batch.tokens, .t = m->dtype};
  r->a = lev_dtype_arith(m->dtype);
  r->q_cols = m->heads * m->head_dim, r->kv_cols = m->kv_heads * m->head_dim;
  int unit = lev_unit_dense(rank->params, layer);
  const void *base;
  LEV_TRY(lev_weights_get(rank->weights, unit, rank->compute, &base));
  for (int s = 0; s < LEV_W_DENSE_SLOTS; ++s) {
    int64_t offset = rank->params->units[unit].slot_offset[s];
    r->w[s] = offset < 0 ? NULL : (const unsigned char *)base + (size_t)offset * lev_dtype_bytes(r->t);
  }
  return LEV_OK;
}

static lev_status begin_grads(layer_run *r, bool first) {
  int unit = lev_unit_dense(r->rank->params, r->layer);
  void *base;
  LEV_TRY(lev_grads_begin(r->rank->weights, unit, r->rank->compute, first, &base));
  for (int s = 0; s < LEV_W_DENSE_SLOTS; ++s) {
    int64_t offset = r->rank->params->units[unit].slot_offset[s];
    r->g[s] = offset < 0 ? NULL : (unsigned char *)base + (size_t)offset * lev_dtype_bytes(r->a);
  }
  return LEV_OK;
}

/* Starts gathering the units of a neighbouring layer, if there is one. */
static lev_status prefetch(lev_rank *rank, int layer) {
  if (layer < 0 || layer >= (int)rank->params->model.layers) return LEV_OK;
  LEV_TRY(lev_weights_prefetch(rank->weights, lev_unit_dense(rank->params, layer)));
  return lev_weights_prefetch(rank->weights, lev_unit_experts(rank->params, layer));
}

/* ---- products with a weight W [out, in] ---- */

/* y [n, out] = x [n, in] W^T + beta y; y of type `y_type`. */
static lev_status project(const layer_run *r, const void *x, int64_t in, const void *w, int64_t out, void *y,
                          lev_dtype y_type, double beta) {
  return lev_gemm(r->rank->compute, &(lev_gemm_args){.m = r->n,
                                                     .n = out,
                                                     .k = in,
                                                     .trans_b = true,
                                                     .a = x,
                                                     .b = w,
                                                     .c = y,
                                                     .lda = in,
                                                     .ldb = in,
                                                     .ldc = out,
                                                     .ab_type = r->t,
                                                     .c_type = y_type,
                                                     .alpha = 1,
                                                     .beta = beta});
}

/* dx [n, in] = dy [n, out] W + beta dx. */
static lev_status project_dx(const layer_run *r, const void *dy, int64_t out, const void *w, int64_t in, void *dx,
                             double beta) {
  return lev_gemm(r->rank->compute, &(lev_gemm_args){.m = r->n,
                                                     .n = in,
                                                     .k = out,
                                                     .a = dy,
                                                     .b = w,
                                                     .c = dx,
                                                     .lda = out,
                                                     .ldb = in,
                                                     .ldc = in,
                                                     .ab_type = r->t,
                                                     .c_type = r->t,
                                                     .alpha = 1,
                                                     .beta = beta});
}

/* dW [out, in] += dy^T x, in A. */
static lev_status project_dw(const layer_run *r, const void *dy, int64_t out, const void *x, int64_t in, void *dw) {
  return lev_gemm(r->rank->compute, &(lev_gemm_args){.m = out,
                                                     .n = in,
                                                     .k = r->n,
                                                     .trans_a = true,
                                                     .a = dy,
                                                     .b = x,
                                                     .c = dw,
                                                     .lda = out,
                                                     .ldb = in,
                                                     .ldc = in,
                                                     .ab_type = r->t,
                                                     .c_type = r->a,
                                                     .alpha = 1,
                                                     .beta = 1});
}

static lev_status norm(const layer_run *r, const void *x, lev_slot weight, void *y) {
  lev_rmsnorm_args args = {r->t, r->n, r->m->hidden, r->m->norm_eps, x, r->w[weight], y};
  return LEV_LAUNCH(r->rank->compute, &lev_rmsnorm_kernel, args);
}

/* rank->hidden += d norm(x) / dx applied to dy. */
static lev_status norm_backward(const layer_run *r, const void *x, lev_slot weight, const void *dy) {
  lev_rmsnorm_backward_args args = {.dtype = r->t,
                                    .rows = r->n,
                                    .cols = r->m->hidden,
                                    .eps = r->m->norm_eps,
                                    .x = x,
                                    .w = r->w[weight],
                                    .dy = dy,
                                    .dx = r->rank->hidden,
                                    .dw = r->g[weight],
                                    .accumulate = true};
  return LEV_LAUNCH(r->rank->compute, &lev_rmsnorm_backward_kernel, args);
}

/* ---- attention half ---- */

static lev_status take_qkv(const layer_run *r, qkv *out) {
  LEV_TRY(lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->q_cols, &out->q));
  LEV_TRY(lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->kv_cols, &out->k));
  return lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->kv_cols, &out->v);
}

/* Norm and rotary embedding of queries and keys, from `raw` to `out` (which may be the same). */
static lev_status finish_qk(const layer_run *r, const qkv *raw, const qkv *out) {
  for (int i = 0; i < 2; ++i) {
    lev_qk_args args = {.dtype = r->t,
                        .rows = r->n,
                        .heads = i == 0 ? r->m->heads : r->m->kv_heads,
                        .head_dim = r->m->head_dim,
                        .norm = r->m->qk_norm,
                        .eps = r->m->norm_eps,
                        .theta = r->m->rope_theta,
                        .position = r->rank->position,
                        .x = i == 0 ? raw->q : raw->k,
                        .w = r->w[i == 0 ? LEV_W_Q_NORM : LEV_W_K_NORM],
                        .y = i == 0 ? out->q : out->k};
    LEV_TRY(LEV_LAUNCH(r->rank->compute, &lev_qk_kernel, args));
  }
  return LEV_OK;
}

/* x = norm(in), then the three projections before norm and rotary embedding. */
static lev_status project_qkv(const layer_run *r, const void *in, void *x, const qkv *out) {
  LEV_TRY(norm(r, in, LEV_W_INPUT_NORM, x));
  LEV_TRY(project(r, x, r->m->hidden, r->w[LEV_W_Q], r->q_cols, out->q, r->t, 0));
  LEV_TRY(project(r, x, r->m->hidden, r->w[LEV_W_K], r->kv_cols, out->k, r->t, 0));
  return project(r, x, r->m->hidden, r->w[LEV_W_V], r->kv_cols, out->v, r->t, 0);
}

static lev_status attention_forward(const layer_run *r, const void *in, attention_out out) {
  lev_rank *rank = r->rank;
  lev_blocks blocks;
  qkv p;
  void *x;
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(lev_rank_work(rank, "hidden.norm", r->t, r->n, r->m->hidden, &x));
  LEV_TRY(take_qkv(r, &p));
  LEV_TRY(project_qkv(r, in, x, &p));
  LEV_TRY(finish_qk(r, &p, &p));
  LEV_TRY(lev_rank_take(rank, attn_walk_forward, rank->attention, &blocks));
  LEV_TRY(attn_plan_bind(rank->attention, ATTN_FORWARD, &blocks));
  attn_forward_args args = {.seq_len = rank->batch.seq_len,
                            .q = p.q,
                            .k = p.k,
                            .v = p.v,
                            .q_stride = r->q_cols,
                            .k_stride = r->kv_cols,
                            .v_stride = r->kv_cols,
                            .o = out.o,
                            .lse = out.lse};
  LEV_TRY(attn_forward(rank->attention, &args, rank->compute));
  return lev_rank_pop(rank);
}

/* out = in + O Wo. */
static lev_status add_attention(const layer_run *r, const void *in, const void *o, void *out) {
  LEV_TRY(lev_copy(r->rank->compute, out, in, lev_bytes(r->n, r->m->hidden, lev_dtype_bytes(r->t)), "hidden.residual"));
  return project(r, o, r->q_cols, r->w[LEV_W_O], r->m->hidden, out, r->t, 1);
}

/* Gradients of one projection of q, k or v: dW += dp^T x, dx (+)= dp W. */
static lev_status projection_backward(const layer_run *r, lev_slot slot, int64_t cols, const void *dp, const void *x,
                                      void *dx, double beta) {
  LEV_TRY(project_dw(r, dp, cols, x, r->m->hidden, r->g[slot]));
  return project_dx(r, dp, cols, r->w[slot], r->m->hidden, dx, beta);
}

static lev_status qk_backward(const layer_run *r, bool query, const void *raw, void *d) {
  lev_qk_args args = {.dtype = r->t,
                      .rows = r->n,
                      .heads = query ? r->m->heads : r->m->kv_heads,
                      .head_dim = r->m->head_dim,
                      .norm = r->m->qk_norm,
                      .eps = r->m->norm_eps,
                      .theta = r->m->rope_theta,
                      .position = r->rank->position,
                      .x = raw,
                      .w = r->w[query ? LEV_W_Q_NORM : LEV_W_K_NORM],
                      .dy = d,
                      .dx = d,
                      .dw = r->g[query ? LEV_W_Q_NORM : LEV_W_K_NORM]};
  return LEV_LAUNCH(r->rank->compute, &lev_qk_backward_kernel, args);
}

static lev_status attention_backward(const layer_run *r, const void *in, attention_out kept) {
  lev_rank *rank = r->rank;
  const lev_model *m = r->m;
  lev_blocks blocks;
  qkv raw, ready, d;
  void *x, *d_o;
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(lev_rank_work(rank, "hidden.norm", r->t, r->n, m->hidden, &x));
  LEV_TRY(take_qkv(r, &raw));
  ready = raw;
  if (m->qk_norm != LEV_QK_NORM_NONE) { /* its backward needs the projections before the norm */
    LEV_TRY(lev_rank_work(rank, "attn.qkv", r->t, r->n, r->q_cols, &ready.q));
    LEV_TRY(lev_rank_work(rank, "attn.qkv", r->t, r->n, r->kv_cols, &ready.k));
  }
  LEV_TRY(take_qkv(r, &d));
  LEV_TRY(lev_rank_work(rank, "attn.out_grad", r->t, r->n, r->q_cols, &d_o));
  LEV_TRY(project_qkv(r, in, x, &raw));
  LEV_TRY(finish_qk(r, &raw, &ready));
  LEV_TRY(project_dw(r, rank->hidden, m->hidden, kept.o, r->q_cols, r->g[LEV_W_O]));
  LEV_TRY(project_dx(r, rank->hidden, m->hidden, r->w[LEV_W_O], r->q_cols, d_o, 0));
  LEV_TRY(lev_rank_take(rank, attn_walk_backward, rank->attention, &blocks));
  LEV_TRY(attn_plan_bind(rank->attention, ATTN_BACKWARD, &blocks));
  attn_backward_args args = {.seq_len = rank->batch.seq_len,
                             .q = ready.q,
                             .k = ready.k,
                             .v = ready.v,
                             .q_stride = r->q_cols,
                             .k_stride = r->kv_cols,
                             .v_stride = r->kv_cols,
                             .o = kept.o,
                             .lse = kept.lse,
                             .d_o = d_o,
                             .dq = d.q,
                             .dk = d.k,
                             .dv = d.v,
                             .dq_stride = r->q_cols,
                             .dk_stride = r->kv_cols,
                             .dv_stride = r->kv_cols};
  LEV_TRY(attn_backward(rank->attention, &args, rank->compute));
  LEV_TRY(qk_backward(r, true, raw.q, d.q));
  LEV_TRY(qk_backward(r, false, raw.k, d.k));
  void *dx = d_o; /* as large as [N, H] only when A d >= H, so it has its own region otherwise */
  if (r->q_cols < m->hidden) LEV_TRY(lev_rank_work(rank, "hidden.norm_grad", r->t, r->n, m->hidden, &dx));
  LEV_TRY(projection_backward(r, LEV_W_Q, r->q_cols, d.q, x, dx, 0));
  LEV_TRY(projection_backward(r, LEV_W_K, r->kv_cols, d.k, x, dx, 1));
  LEV_TRY(projection_backward(r, LEV_W_V, r->kv_cols, d.v, x, dx, 1));
  LEV_TRY(norm_backward(r, in, LEV_W_INPUT_NORM, dx));
  return lev_rank_pop(rank);
}

/* ---- expert half ---- */

static int32_t *layer_ids(const layer_run *r) {
  return r->rank->ids + (int64_t)r->layer * r->rank->max_tokens * r->m->top_k;
}
static int64_t *layer_counts(const layer_run *r) {
  return r->rank->counts + (int64_t)r->layer * r->m->experts;
}

/* Router scores in A, then ids (when `select`) and weights. */
static lev_status route(const layer_run *r, const void *x, bool select, void **logits, void **weights) {
  lev_rank *rank = r->rank;
  LEV_TRY(lev_rank_work(rank, "router.logits", r->a, r->n, r->m->experts, logits));
  LEV_TRY(lev_rank_work(rank, "router.weights", r->a, r->n, r->m->top_k, weights));
  LEV_TRY(project(r, x, r->m->hidden, r->w[LEV_W_ROUTER], r->m->experts, *logits, r->a, 0));
  lev_router_args args = {.dtype = r->t,
                          .rows = r->n,
                          .experts = r->m->experts,
                          .top_k = r->m->top_k,
                          .norm_topk = r->m->norm_topk,
                          .select = select,
                          .uniform = rank->config->debug.uniform_routing,
                          .logits = *logits,
                          .ids = layer_ids(r),
                          .weights = *weights};
  if (select) {
    size_t bytes = sizeof(int64_t) * (size_t)r->m->experts;
    LEV_TRY(lev_fill(rank->compute, layer_counts(r), 0, bytes, "router.counts"));
    args.counts = layer_counts(r);
    args.sums = lev_layer_sums(r->m, rank->sums, r->layer);
  }
  LEV_TRY(LEV_LAUNCH(rank->compute, &lev_router_kernel, args));
  if (!select) return LEV_OK;
  return lev_comm_all_reduce(rank->groups.stats, rank->compute, layer_counts(r), r->m->experts, LEV_I64, LEV_SUM);
}

/* Token counts of this rank's expert group. */
static const int64_t *group_tokens(const lev_rank *rank) {
  int size = rank->params->layout.experts;
  return rank->batch.rank_tokens + rank->params->layout.rank / size * size;
}

static lev_status experts_forward(const layer_run *r, void *out) {
  lev_rank *rank = r->rank;
  int unit = lev_unit_experts(rank->params, r->layer);
  lev_blocks blocks;
  void *x, *logits, *weights;
  const void *w;
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(lev_rank_work(rank, "hidden.norm", r->t, r->n, r->m->hidden, &x));
  LEV_TRY(norm(r, out, LEV_W_POST_NORM, x));
  LEV_TRY(route(r, x, true, &logits, &weights));
  LEV_TRY(lev_weights_get(rank->weights, unit, rank->compute, &w));
  LEV_TRY(lev_rank_take(rank, llep_walk_forward, rank->llep, &blocks));
  LEV_TRY(llep_plan_bind(rank->llep, LLEP_FORWARD, &blocks));
  llep_forward_args args = {.layer = r->layer,
                            .tokens = r->n,
                            .rank_tokens = group_tokens(rank),
                            .x = x,
                            .ids = layer_ids(r),
                            .probs = weights,
                            .w = w,
                            .y = out,
                            .accumulate = true};
  LEV_TRY(llep_forward(rank->llep, &args, rank->compute));
  LEV_TRY(lev_weights_release(rank->weights, unit, rank->compute));
  return lev_rank_pop(rank);
}

/* d logits, then the router weight's gradient and its share of dx. */
static lev_status router_backward(const layer_run *r, const void *x, const void *logits, const void *dweights,
                                  void *dx) {
  lev_rank *rank = r->rank;
  const lev_model *m = r->m;
  double micro = 0, all = (double)(rank->config->train.context * rank->config->train.global_batch);
  for (int i = 0; i < rank->params->layout.ranks; ++i) micro += (double)rank->batch.rank_tokens[i];
  double per_layer = micro > 0 ? 1 / ((double)m->layers * all) : 0;
  void *dlogits;
  LEV_TRY(lev_rank_work(rank, "router.logits_grad", r->t, r->n, m->experts, &dlogits));
  lev_router_backward_args args = {
      .dtype = r->t,
      .rows = r->n,
      .experts = m->experts,
      .top_k = m->top_k,
      .norm_topk = m->norm_topk,
      .logits = logits,
      .ids = layer_ids(r),
      .dweights = dweights,
      .counts = layer_counts(r),
      .balance_scale = micro > 0 ? m->aux_coef * per_layer * (double)m->experts / (micro * (double)m->top_k) : 0,
      .z_scale = m->z_coef * per_layer,
      .dlogits = dlogits};
  LEV_TRY(LEV_LAUNCH(rank->compute, &lev_router_backward_kernel, args));
  LEV_TRY(project_dw(r, dlogits, m->experts, x, m->hidden, r->g[LEV_W_ROUTER]));
  return project_dx(r, dlogits, m->experts, r->w[LEV_W_ROUTER], m->hidden, dx, 1);
}

static lev_status experts_backward(const layer_run *r, const void *in, attention_out kept, bool first) {
  lev_rank *rank = r->rank;
  int unit = lev_unit_experts(rank->params, r->layer);
  lev_blocks blocks;
  void *mid, *x, *dx, *logits, *weights, *dweights, *dw;
  const void *w;
  LEV_TRY(lev_rank_push(rank));
  LEV_TRY(lev_rank_work(rank, "hidden.mid", r->t, r->n, r->m->hidden, &mid));
  LEV_TRY(lev_rank_work(rank, "hidden.norm", r->t, r->n, r->m->hidden, &x));
  LEV_TRY(lev_rank_work(rank, "hidden.norm_grad", r->t, r->n, r->m->hidden, &dx));
  LEV_TRY(add_attention(r, in, kept.o, mid));
  LEV_TRY(norm(r, mid, LEV_W_POST_NORM, x));
  LEV_TRY(route(r, x, false, &logits, &weights));
  LEV_TRY(lev_rank_work(rank, "router.weights", r->a, r->n, r->m->top_k, &dweights));
  LEV_TRY(lev_weights_get(rank->weights, unit, rank->compute, &w));
  LEV_TRY(lev_grads_begin(rank->weights, unit, rank->compute, first, &dw));
  LEV_TRY(lev_rank_push(rank)); /* the chunks' buffers end before the router's backward needs its own */
  LEV_TRY(lev_rank_take(rank, llep_walk_backward, rank->llep, &blocks));
  LEV_TRY(llep_plan_bind(rank->llep, LLEP_BACKWARD, &blocks));
  llep_backward_args args = {.layer = r->layer,
                             .tokens = r->n,
                             .rank_tokens = group_tokens(rank),
                             .x = x,
                             .ids = layer_ids(r),
                             .probs = weights,
                             .w = w,
                             .dy = rank->hidden,
                             .dx = dx,
                             .dprobs = dweights,
                             .dw = dw};
  LEV_TRY(llep_backward(rank->llep, &args, rank->compute));
  LEV_TRY(lev_rank_pop(rank));
  LEV_TRY(lev_grads_end(rank->weights, unit, rank->compute, first));
  LEV_TRY(lev_weights_release(rank->weights, unit, rank->compute));
  LEV_TRY(router_backward(r, x, logits, dweights, dx));
  LEV_TRY(norm_backward(r, mid, LEV_W_POST_NORM, dx));
  return lev_rank_pop(rank);
}

/* ---- the layer ---- */

lev_status lev_layer_forward(lev_rank *rank, int layer, const void *in, void *out) {
  layer_run r;
  void *item;
  bool keep = rank->config->memory.sco_keep_attention;
  lev_ledger_phase(rank->ledger, "forward", layer);
  LEV_TRY(begin(&r, rank, layer));
  LEV_TRY(lev_weights_prefetch(rank->weights, lev_unit_experts(rank->params, layer)));
  LEV_TRY(prefetch(rank, layer + 1));
  size_t bytes = lev_attention_item_bytes(r.m, r.n);
  LEV_TRY(lev_rank_push(rank));
  if (keep)
    LEV_TRY(sco_write_begin(rank->sco, layer, SCO_ATTENTION, rank->compute, &item));
  else
    LEV_TRY(lev_rank_work(rank, "attn.out", LEV_U8, 1, (int64_t)bytes, &item));
  attention_out kept = split_item(&r, item);
  LEV_TRY(attention_forward(&r, in, kept));
  if (keep) LEV_TRY(sco_write_end(rank->sco, layer, SCO_ATTENTION, bytes, rank->compute));
  LEV_TRY(add_attention(&r, in, kept.o, out));
  LEV_TRY(lev_rank_pop(rank));
  LEV_TRY(experts_forward(&r, out));
  return lev_weights_release(rank->weights, lev_unit_dense(rank->params, layer), rank->compute);
}

lev_status lev_layer_backward(lev_rank *rank, int layer, bool first) {
  layer_run r;
  void *in, *item;
  bool keep = rank->config->memory.sco_keep_attention;
  lev_ledger_phase(rank->ledger, "backward", layer);
  LEV_TRY(begin(&r, rank, layer));
  LEV_TRY(begin_grads(&r, first));
  LEV_TRY(lev_weights_prefetch(rank->weights, lev_unit_experts(rank->params, layer)));
  LEV_TRY(prefetch(rank, layer - 1));
  LEV_TRY(sco_read(rank->sco, layer, SCO_BOUNDARY, rank->compute, &in));
  if (keep) LEV_TRY(sco_read(rank->sco, layer, SCO_ATTENTION, rank->compute, &item));
  if (layer > 0) {
    LEV_TRY(sco_prefetch(rank->sco, layer - 1, SCO_BOUNDARY, rank->compute));
    if (keep) LEV_TRY(sco_prefetch(rank->sco, layer - 1, SCO_ATTENTION, rank->compute));
  }
  LEV_TRY(lev_rank_push(rank));
  if (!keep) LEV_TRY(lev_rank_work(rank, "attn.out", LEV_U8, 1, (int64_t)lev_attention_item_bytes(r.m, r.n), &item));
  attention_out kept = split_item(&r, item);
  if (!keep) LEV_TRY(attention_forward(&r, in, kept));
  LEV_TRY(experts_backward(&r, in, kept, first));
  LEV_TRY(attention_backward(&r, in, kept));
  LEV_TRY(lev_rank_pop(rank));
  if (keep) LEV_TRY(sco_release(rank->sco, layer, SCO_ATTENTION, rank->compute));
  LEV_TRY(sco_release(rank->sco, layer, SCO_BOUNDARY, rank->compute));
  LEV_TRY(lev_grads_end(rank->weights, lev_unit_dense(rank->params, layer), rank->compute, first));
  return lev_weights_release(rank->weights, lev_unit_dense(rank->params, layer), rank->compute);
}
