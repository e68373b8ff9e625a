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

/* Arguments of norm, clamping and rotary embedding for one of q, k (slot of its norm weight given) and v (`weight` < 0:
 * clamping only). */
static lev_qk_args qk_args(const lev_layer_run *r, int weight) {
  const lev_model *m = r->m;
  bool value = weight < 0;
  size_t scratch_bytes;
  void *scratch = lev_stream_workspace(r->rank->compute, &scratch_bytes);
  return (lev_qk_args){.dtype = r->t,
                       .rows = r->n,
                       .heads = weight == LEV_W_Q_NORM ? m->heads : m->kv_heads,
                       .head_dim = m->head_dim,
                       .norm = value ? LEV_QK_NORM_NONE : m->qk_norm,
                       .eps = m->norm_eps,
                       .clip = m->clip_qkv,
                       .rope = m->rope,
                       .position = value ? NULL : r->rank->position,
                       /* cppcheck-suppress negativeIndex */
                       .w = value ? NULL : r->w[weight],
                       /* cppcheck-suppress negativeIndex */
                       .dw = value ? NULL : r->g[weight],
                       .scratch = scratch,
                       .scratch_bytes = scratch_bytes};
}

/* From the projections `raw` to what attention takes, `out` (which may be the same). */
static lev_status finish_qkv(const lev_layer_run *r, const qkv *raw, const qkv *out) {
  lev_qk_args q = qk_args(r, LEV_W_Q_NORM), k = qk_args(r, LEV_W_K_NORM), v = qk_args(r, -1);
  q.x = raw->q, q.y = out->q;
  k.x = raw->k, k.y = out->k;
  v.x = raw->v, v.y = out->v;
  LEV_TRY(LEV_LAUNCH(r->rank->compute, &lev_qk_kernel, q));
  LEV_TRY(LEV_LAUNCH(r->rank->compute, &lev_qk_kernel, k));
  return r->m->clip_qkv > 0 ? LEV_LAUNCH(r->rank->compute, &lev_qk_kernel, v) : LEV_OK;
}

/* The gradients `d` of what attention takes become, in place, those of the projections. */
static lev_status finish_qkv_backward(const lev_layer_run *r, const qkv *raw, const qkv *d) {
  lev_qk_args q = qk_args(r, LEV_W_Q_NORM), k = qk_args(r, LEV_W_K_NORM), v = qk_args(r, -1);
  q.x = raw->q, q.dy = q.dx = d->q;
  k.x = raw->k, k.dy = k.dx = d->k;
  v.x = raw->v, v.dy = v.dx = d->v;
  LEV_TRY(LEV_LAUNCH(r->rank->compute, &lev_qk_backward_kernel, q));
  LEV_TRY(LEV_LAUNCH(r->rank->compute, &lev_qk_backward_kernel, k));
  return r->m->clip_qkv > 0 ? LEV_LAUNCH(r->rank->compute, &lev_qk_backward_kernel, v) : LEV_OK;
}

/* Backward needs the projections too, wherever finish_qkv does more than turn them. */
static lev_status take_ready(const lev_layer_run *r, const qkv *raw, qkv *ready) {
  *ready = *raw;
  bool clipped = r->m->clip_qkv > 0;
  if (clipped || r->m->qk_norm != LEV_QK_NORM_NONE) {
    LEV_TRY(lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->q_cols, &ready->q));
    LEV_TRY(lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->kv_cols, &ready->k));
  }
  return clipped ? lev_rank_work(r->rank, "attn.qkv", r->t, r->n, r->kv_cols, &ready->v) : LEV_OK;
}

/* x = norm(in), then the three projections before norm, clamping and rotary embedding. */
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
  LEV_TRY(finish_qkv(r, &p, &p));
  LEV_TRY(lev_rank_take(rank, attn_walk_forward, rank->attention, &blocks));
  LEV_TRY(attn_plan_bind(rank->attention, ATTN_FORWARD, &blocks));
  attn_forward_args args = {.seq_len = rank->batch.seq_len,
                            .q = p.q,
                            .k = p.k,
                            .v = p.v,
                            .q_stride = r->q_cols,
                            .k_stride = r->kv_cols,
                            .v_stride = r->kv_cols,
                            .window = lev_layer_window(r->m, r->layer),
                            .doc_begin = rank->doc_begin,
                            .doc_begin_host = rank->doc_begin_pinned,
                            .o = out.o,
                            .lse = out.lse};
  LEV_TRY(attn_forward(rank->attention, &args, rank->compute));
  return lev_rank_pop(rank);
}

/* out = in + O Wo. */
lev_status lev_attention_add(const lev_layer_run *r, const void *in, const void *o, void *out) {
  return lev_layer_product_add(r, r->n, o, r->q_cols, r->w[LEV_W_O], r->m->hidden, out, in);
}

/* Gradients of one projection of q, k or v: dW += dp^T x, dx (+)= dp W. */
static lev_status projection_backward(const lev_layer_run *r, lev_slot slot, int64_t cols, const void *dp,
                                      const void *x, void *dx, double beta) {
  LEV_TRY(lev_layer_product_dw(r, r->n, dp, cols, x, r->m->hidden, r->g[slot]));
  return lev_layer_product_dx(r, r->n, dp, cols, r->w[slot], r->m->hidden, dx, beta);
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
  LEV_TRY(take_ready(r, &raw, &ready));
  LEV_TRY(take_qkv(r, &d));
  LEV_TRY(lev_rank_work(rank, "attn.out_grad", r->t, r->n, r->q_cols, &d_o));
  LEV_TRY(project_qkv(r, in, x, &raw));
  LEV_TRY(finish_qkv(r, &raw, &ready));
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
                             .window = lev_layer_window(r->m, r->layer),
                             .doc_begin = rank->doc_begin,
                             .doc_begin_host = rank->doc_begin_pinned,
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
  LEV_TRY(finish_qkv_backward(r, &raw, &d));
  void *dx = d_o; /* as large as [N, H] only when A d >= H, so it has its own region otherwise */
  if (r->q_cols < m->hidden) LEV_TRY(lev_rank_work(rank, "hidden.norm_grad", r->t, r->n, m->hidden, &dx));
  LEV_TRY(projection_backward(r, LEV_W_Q, r->q_cols, d.q, x, dx, 0));
  LEV_TRY(projection_backward(r, LEV_W_K, r->kv_cols, d.k, x, dx, 1));
  LEV_TRY(projection_backward(r, LEV_W_V, r->kv_cols, d.v, x, dx, 1));
  LEV_TRY(lev_layer_norm_backward(r, in, LEV_W_INPUT_NORM, dx));
  return lev_rank_pop(rank);
}
