/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the parts of one decoder layer (private to harness/train): the layer's tensors, products with its weights,
 * and the halves that layer.c puts in order. */
#ifndef LEV_TRAIN_LAYER_H
#define LEV_TRAIN_LAYER_H

#include "harness/model/ops.h"
#include "harness/train/rank.h"

/* The layer's tensors and what every part of it needs. */
typedef struct lev_layer_run {
  lev_rank *rank;
  const lev_model *m;
  int layer;
  int64_t n;      /* tokens of this rank */
  lev_dtype t, a; /* storage and arithmetic type */
  int64_t q_cols, kv_cols;
  const void *w[LEV_W_DENSE_SLOTS]; /* T */
  void *g[LEV_W_DENSE_SLOTS];       /* A, backward only */
} lev_layer_run;

/* Attention output and log-sum-exp: one block, so that SCO can keep both as one item. */
typedef struct lev_attention_out {
  void *o;   /* T [N, A, d] */
  void *lse; /* A [N, A] */
} lev_attention_out;

/* ---- layer.c: products with a weight W [out, in] over `rows` tokens ---- */

/* y [rows, out] = x [rows, in] W^T + beta y; y of type `y_type`. */
LEV_MUST_CHECK lev_status lev_layer_product(const lev_layer_run *r, int64_t rows, const void *x, int64_t in,
                                            const void *w, int64_t out, void *y, lev_dtype y_type, double beta);
/* y [rows, out] = x [rows, in] W^T + add, all T. */
LEV_MUST_CHECK lev_status lev_layer_product_add(const lev_layer_run *r, int64_t rows, const void *x, int64_t in,
                                                const void *w, int64_t out, void *y, const void *add);
/* dx [rows, in] = dy [rows, out] W + beta dx. */
LEV_MUST_CHECK lev_status lev_layer_product_dx(const lev_layer_run *r, int64_t rows, const void *dy, int64_t out,
                                               const void *w, int64_t in, void *dx, double beta);
/* dW [out, in] += dy^T x, in A. */
LEV_MUST_CHECK lev_status lev_layer_product_dw(const lev_layer_run *r, int64_t rows, const void *dy, int64_t out,
                                               const void *x, int64_t in, void *dw);
/* y = RMS norm of x [N, H] with the weight in slot `weight`. */
LEV_MUST_CHECK lev_status lev_layer_norm(const lev_layer_run *r, const void *x, lev_slot weight, void *y);
/* rank->hidden += d norm(x) / dx applied to dy. */
LEV_MUST_CHECK lev_status lev_layer_norm_backward(const lev_layer_run *r, const void *x, lev_slot weight,
                                                  const void *dy);

/* ---- layer_attention.c ---- */

/* Attention of norm(in), before the output projection. */
LEV_MUST_CHECK lev_status lev_attention_forward(const lev_layer_run *r, const void *in, lev_attention_out out);
/* out = in + O Wo. */
LEV_MUST_CHECK lev_status lev_attention_add(const lev_layer_run *r, const void *in, const void *o, void *out);
/* rank->hidden, the gradient of in + O Wo, gains that of `in` through attention. */
LEV_MUST_CHECK lev_status lev_attention_backward(const lev_layer_run *r, const void *in, lev_attention_out kept);

/* ---- layer_mlp.c: the half after attention, out = h' + mlp(norm(h')) ---- */

/* out += mlp(norm(out)). */
LEV_MUST_CHECK lev_status lev_mlp_forward(const lev_layer_run *r, void *out);
/* rank->hidden, the gradient of h' + mlp(norm(h')) with h' = in + O Wo rebuilt, becomes that of h'. */
LEV_MUST_CHECK lev_status lev_mlp_backward(const lev_layer_run *r, const void *in, lev_attention_out kept, bool first);

/* ---- layer_experts.c ---- */

/* y += routed experts of x [N, H]. */
LEV_MUST_CHECK lev_status lev_experts_forward(const lev_layer_run *r, const void *x, void *y);
/* dx = the gradient of x through router and experts, for rank->hidden = dy. */
LEV_MUST_CHECK lev_status lev_experts_backward(const lev_layer_run *r, const void *x, void *dx, bool first);

#endif
