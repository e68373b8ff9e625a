/* SPDX-License-Identifier: Apache-2.0 */
/* The attention half of a decoder layer. */
#include "harness/train/layer.h"

typedef struct qkv {
  void *q, *k, *v; /* T [N, A d], [N, G d], [N, G d] */
} qkv;

static lev_status take_qkv(const lev_layer_run *r, qkv *out) {
  LEV_TRY(lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->q_cols, &out->q));
  LEV_TRY(lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->kv_cols, &out->k));
  return lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->kv_cols, &out->v);
}

/* Norm and rotary embedding of queries and keys, from `raw` to `out` (which may be the same). */
static lev_status finish_qk(const lev_layer_run *r, const qkv *raw, const qkv *out) {
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
static lev_status project_qkv(const lev_layer_run *r, const void *in, void *x, const qkv *out) {
  LEV_TRY(lev_layer_norm(r, in, LEV_W_INPUT_NORM, x));
  LEV_TRY(lev_layer_product(r, r->n, x, r->m->hidden, r->w[LEV_W_Q], r->q_cols, out->q, r->t, 0));
  LEV_TRY(lev_layer_product(r, r->n, x, r->m->hidden, r->w[LEV_W_K], r->kv_cols, out->k, r->t, 0));
  return lev_layer_product(r, r->n, x, r->m->hidden, r->w[LEV_W_V], r->kv_cols, out->v, r->t, 0);
}

lev_status lev_attention_forward(const lev_layer_run *r, const void *in, lev_attention_out out) {
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
lev_status lev_attention_add(const lev_layer_run *r, const void *in, const void *o, void *out) {
  LEV_TRY(lev_copy(r->rank->compute, out, in, lev_bytes(r->n, r->m->hidden, lev_dtype_bytes(r->t)), "hidden.residual"));
  return lev_layer_product(r, r->n, o, r->q_cols, r->w[LEV_W_O], r->m->hidden, out, r->t, 1);
}

/* Gradients of one projection of q, k or v: dW += dp^T x, dx (+)= dp W. */
static lev_status projection_backward(const lev_layer_run *r, lev_slot slot, int64_t cols, const void *dp,
                                      const void *x, void *dx, double beta) {
  LEV_TRY(lev_layer_product_dw(r, r->n, dp, cols, x, r->m->hidden, r->g[slot]));
  return lev_layer_product_dx(r, r->n, dp, cols, r->w[slot], r->m->hidden, dx, beta);
}

static lev_status qk_backward(const lev_layer_run *r, bool query, const void *raw, void *d) {
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

lev_status lev_attention_backward(const lev_layer_run *r, const void *in, lev_attention_out kept) {
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
  LEV_TRY(lev_layer_product_dw(r, r->n, rank->hidden, m->hidden, kept.o, r->q_cols, r->g[LEV_W_O]));
  LEV_TRY(lev_layer_product_dx(r, r->n, rank->hidden, m->hidden, r->w[LEV_W_O], r->q_cols, d_o, 0));
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
  LEV_TRY(lev_layer_norm_backward(r, in, LEV_W_INPUT_NORM, dx));
  return lev_rank_pop(rank);
}
