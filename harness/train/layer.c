/* SPDX-License-Identifier: Apache-2.0 */
/* One decoder layer, forward and backward, in the order that keeps attention, dispatch and the rest from being live
 * together:
 *
 *   forward   x = norm(h); q, k, v; attention -> O;  h' = h + O Wo     [scope 1]
 *             x = norm(h'); out = h' + mlp(x): router, experts chunk by chunk, shared experts tile by tile  [scope 2]
 *   backward  (O recomputed if it was not kept)     [scope 1]
 *             expert half: h' rebuilt from h and O; shared experts, router and experts backward     [scope 2]
 *             attention half: q, k, v rebuilt; attention backward     [scope 3] */
#include "harness/train/layer.h"

#include "common/gemm.h"
#include "common/profile.h"

size_t lev_attention_item_bytes(const lev_model *m, int64_t tokens) {
  return lev_sat_add(lev_align_up(lev_bytes(tokens, m->heads * m->head_dim, lev_dtype_bytes(m->dtype))),
                     lev_bytes(tokens, m->heads, lev_dtype_bytes(lev_dtype_arith(m->dtype))));
}

static lev_attention_out split_item(const lev_layer_run *r, void *item) {
  size_t o_bytes = lev_align_up(lev_bytes(r->n, r->q_cols, lev_dtype_bytes(r->t)));
  return (lev_attention_out){item, (unsigned char *)item + o_bytes};
}

static lev_status begin(lev_layer_run *r, lev_rank *rank, int layer) {
  const lev_model *m = &rank->params->model;
  *r = (lev_layer_run){.rank = rank, .m = m, .layer = layer, .n = rank->batch.tokens, .t = m->dtype};
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

static lev_status begin_grads(lev_layer_run *r, bool first) {
  int unit = lev_unit_dense(r->rank->params, r->layer);
  void *base;
  LEV_TRY(lev_grads_begin(r->rank->weights, unit, r->rank->compute, first, &base));
  for (int s = 0; s < LEV_W_DENSE_SLOTS; ++s) {
    int64_t offset = r->rank->params->units[unit].slot_offset[s];
    r->g[s] = offset < 0 ? NULL : (unsigned char *)base + (size_t)offset * lev_dtype_bytes(r->a);
  }
  return LEV_OK;
}

/* Starts gathering the units of a layer, if there is one of this number. */
static lev_status prefetch(lev_rank *rank, int layer) {
  if (layer < 0 || layer >= (int)rank->params->model.layers) return LEV_OK;
  LEV_TRY(lev_weights_prefetch(rank->weights, lev_unit_dense(rank->params, layer)));
  if (!lev_layer_is_moe(&rank->params->model, layer)) return LEV_OK;
  return lev_weights_prefetch(rank->weights, lev_unit_experts(rank->params, layer));
}

/* ---- products with a weight W [out, in] ---- */

static lev_gemm_args product(const lev_layer_run *r, int64_t rows, const void *x, int64_t in, const void *w,
                             int64_t out, void *y, lev_dtype y_type) {
  return (lev_gemm_args){.m = rows,
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
                         .alpha = 1};
}

lev_status lev_layer_product(const lev_layer_run *r, int64_t rows, const void *x, int64_t in, const void *w,
                             int64_t out, void *y, lev_dtype y_type, double beta) {
  lev_gemm_args args = product(r, rows, x, in, w, out, y, y_type);
  args.beta = beta;
  return lev_gemm(r->rank->compute, &args);
}

lev_status lev_layer_product_add(const lev_layer_run *r, int64_t rows, const void *x, int64_t in, const void *w,
                                 int64_t out, void *y, const void *add) {
  lev_gemm_args args = product(r, rows, x, in, w, out, y, r->t);
  args.beta = 1, args.add = add;
  return lev_gemm(r->rank->compute, &args);
}

lev_status lev_layer_product_dx(const lev_layer_run *r, int64_t rows, const void *dy, int64_t out, const void *w,
                                int64_t in, void *dx, double beta) {
  return lev_gemm(r->rank->compute, &(lev_gemm_args){.m = rows,
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

lev_status lev_layer_product_dw(const lev_layer_run *r, int64_t rows, const void *dy, int64_t out, const void *x,
                                int64_t in, void *dw) {
  return lev_gemm(r->rank->compute, &(lev_gemm_args){.m = out,
                                                     .n = in,
                                                     .k = rows,
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

lev_status lev_layer_norm(const lev_layer_run *r, const void *x, lev_slot weight, void *y) {
  lev_rmsnorm_args args = {r->t, r->n, r->m->hidden, r->m->norm_eps, x, r->w[weight], y};
  return LEV_LAUNCH(r->rank->compute, &lev_rmsnorm_kernel, args);
}

lev_status lev_layer_norm_backward(const lev_layer_run *r, const void *x, lev_slot weight, const void *dy) {
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
  args.scratch = lev_stream_workspace(r->rank->compute, &args.scratch_bytes);
  return LEV_LAUNCH(r->rank->compute, &lev_rmsnorm_backward_kernel, args);
}

/* ---- the layer ---- */

lev_status lev_layer_forward(lev_rank *rank, int layer, const void *in, void *out) {
  lev_layer_run r;
  void *item;
  bool keep = rank->config->memory.sco_keep_attention;
  lev_rank_phase(rank, "forward", layer);
  LEV_TRY(begin(&r, rank, layer));
  LEV_TRY(prefetch(rank, layer));
  LEV_TRY(prefetch(rank, layer + 1));
  size_t bytes = lev_attention_item_bytes(r.m, r.n);
  LEV_TRY(lev_rank_push(rank));
  if (keep)
    LEV_TRY(sco_write_begin(rank->sco, layer, SCO_ATTENTION, rank->compute, &item));
  else
    LEV_TRY(lev_rank_work(rank, "attn.out", LEV_U8, 1, (int64_t)bytes, &item));
  lev_attention_out kept = split_item(&r, item);
  lev_device_phase(rank->device, "forward.attention", layer);
  LEV_TRY(lev_attention_forward(&r, in, kept));
  if (keep) LEV_TRY(sco_write_end(rank->sco, layer, SCO_ATTENTION, bytes, rank->compute));
  LEV_TRY(lev_attention_add(&r, in, kept.o, out));
  LEV_TRY(lev_rank_pop(rank));
  lev_device_phase(rank->device, "forward.experts", layer);
  LEV_TRY(lev_mlp_forward(&r, out));
  return lev_weights_release(rank->weights, lev_unit_dense(rank->params, layer), rank->compute);
}

lev_status lev_layer_backward(lev_rank *rank, int layer, bool first) {
  lev_layer_run r;
  void *in, *item;
  bool keep = rank->config->memory.sco_keep_attention;
  lev_rank_phase(rank, "backward", layer);
  LEV_TRY(begin(&r, rank, layer));
  LEV_TRY(begin_grads(&r, first));
  LEV_TRY(prefetch(rank, layer));
  LEV_TRY(prefetch(rank, layer - 1));
  LEV_TRY(sco_read(rank->sco, layer, SCO_BOUNDARY, rank->compute, &in));
  if (keep) LEV_TRY(sco_read(rank->sco, layer, SCO_ATTENTION, rank->compute, &item));
  if (layer > 0) {
    LEV_TRY(sco_prefetch(rank->sco, layer - 1, SCO_BOUNDARY, rank->compute));
    if (keep) LEV_TRY(sco_prefetch(rank->sco, layer - 1, SCO_ATTENTION, rank->compute));
  }
  LEV_TRY(lev_rank_push(rank));
  if (!keep) LEV_TRY(lev_rank_work(rank, "attn.out", LEV_U8, 1, (int64_t)lev_attention_item_bytes(r.m, r.n), &item));
  lev_attention_out kept = split_item(&r, item);
  if (!keep) LEV_TRY(lev_attention_forward(&r, in, kept));
  lev_device_phase(rank->device, "backward.experts", layer);
  LEV_TRY(lev_mlp_backward(&r, in, kept, first));
  lev_device_phase(rank->device, "backward.attention", layer);
  LEV_TRY(lev_attention_backward(&r, in, kept));
  LEV_TRY(lev_rank_pop(rank));
  if (keep) LEV_TRY(sco_release(rank->sco, layer, SCO_ATTENTION, rank->compute));
  LEV_TRY(sco_release(rank->sco, layer, SCO_BOUNDARY, rank->compute));
  LEV_TRY(lev_grads_end(rank->weights, lev_unit_dense(rank->params, layer), rank->compute, first));
  return lev_weights_release(rank->weights, lev_unit_dense(rank->params, layer), rank->compute);
}
