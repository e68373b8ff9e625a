/* SPDX-License-Identifier: Apache-2.0 */
/* The half of a decoder layer after attention: norm, then the routed experts and the shared ones, or the dense
 * feed-forward part of a leading layer. Shared experts and dense parts are one SwiGLU unit of width F that every token
 * passes; it is computed in tiles of memory.ffn_tile_rows tokens, forward again inside the tile in backward, so that
 * its bytes, 2 or 3 tiles [rows, F] T, do not grow with the tokens. */
#include "harness/train/layer.h"

#define DEFAULT_TILE_ROWS 1024

/* ---- one SwiGLU unit for all tokens ---- */

typedef struct tiles {
  int64_t rows;           /* of a full tile */
  int64_t width;          /* F */
  void *gate, *up, *grad; /* T [rows, F]; grad in backward only */
} tiles;

static lev_status take_tiles(const lev_layer_run *r, bool backward, tiles *t) {
  int64_t cap = r->rank->config->memory.ffn_tile_rows;
  t->rows = lev_min_i64(cap > 0 ? cap : DEFAULT_TILE_ROWS, r->n);
  t->width = lev_layer_ffn(r->m, r->layer);
  LEV_TRY(lev_rank_work(r->rank, "ffn.tile", r->t, t->rows, t->width, &t->gate));
  LEV_TRY(lev_rank_work(r->rank, "ffn.tile", r->t, t->rows, t->width, &t->up));
  return backward ? lev_rank_work(r->rank, "ffn.tile", r->t, t->rows, t->width, &t->grad) : LEV_OK;
}

/* Token `row` of hidden states [N, H]. */
static void *at_row(const lev_layer_run *r, const void *hidden, int64_t row) {
  return (unsigned char *)(uintptr_t)hidden + (size_t)(row * r->m->hidden) * lev_dtype_bytes(r->t);
}

/* gate and up of `rows` tokens. */
static lev_status project_up(const lev_layer_run *r, const tiles *t, int64_t rows, const void *x) {
  LEV_TRY(lev_layer_product(r, rows, x, r->m->hidden, r->w[LEV_W_FFN_GATE], t->width, t->gate, r->t, 0));
  return lev_layer_product(r, rows, x, r->m->hidden, r->w[LEV_W_FFN_UP], t->width, t->up, r->t, 0);
}

/* y += unit(x). */
static lev_status ffn_forward(const lev_layer_run *r, const void *x, void *y) {
  tiles t;
  LEV_TRY(lev_rank_push(r->rank));
  LEV_TRY(take_tiles(r, false, &t));
  for (int64_t row = 0; row < r->n; row += t.rows) {
    int64_t rows = lev_min_i64(t.rows, r->n - row);
    LEV_TRY(project_up(r, &t, rows, at_row(r, x, row)));
    lev_swiglu_args args = {r->t, rows * t.width, t.gate, t.up, t.gate};
    LEV_TRY(LEV_LAUNCH(r->rank->compute, &lev_swiglu_kernel, args));
    LEV_TRY(
        lev_layer_product(r, rows, t.gate, t.width, r->w[LEV_W_FFN_DOWN], r->m->hidden, at_row(r, y, row), r->t, 1));
  }
  return lev_rank_pop(r->rank);
}

/* Tokens [row, row + rows) of ffn_backward. */
static lev_status ffn_backward_tile(const lev_layer_run *r, const tiles *t, int64_t row, int64_t rows, const void *x,
                                    void *dx, double beta) {
  int64_t h = r->m->hidden;
  const void *xt = at_row(r, x, row), *dy = at_row(r, r->rank->hidden, row);
  LEV_TRY(project_up(r, t, rows, xt));
  LEV_TRY(lev_layer_product_dx(r, rows, dy, h, r->w[LEV_W_FFN_DOWN], t->width, t->grad, 0));
  lev_swiglu_backward_args args = {r->t, rows * t->width, t->gate, t->up, t->grad};
  LEV_TRY(LEV_LAUNCH(r->rank->compute, &lev_swiglu_backward_kernel, args));
  LEV_TRY(lev_layer_product_dw(r, rows, dy, h, t->grad, t->width, r->g[LEV_W_FFN_DOWN]));
  LEV_TRY(lev_layer_product_dw(r, rows, t->gate, t->width, xt, h, r->g[LEV_W_FFN_GATE]));
  LEV_TRY(lev_layer_product_dw(r, rows, t->up, t->width, xt, h, r->g[LEV_W_FFN_UP]));
  LEV_TRY(lev_layer_product_dx(r, rows, t->gate, t->width, r->w[LEV_W_FFN_GATE], h, at_row(r, dx, row), beta));
  return lev_layer_product_dx(r, rows, t->up, t->width, r->w[LEV_W_FFN_UP], h, at_row(r, dx, row), 1);
}

/* dx = beta dx + the gradient of x, for rank->hidden = dy. */
static lev_status ffn_backward(const lev_layer_run *r, const void *x, void *dx, double beta) {
  tiles t;
  LEV_TRY(lev_rank_push(r->rank));
  LEV_TRY(take_tiles(r, true, &t));
  for (int64_t row = 0; row < r->n; row += t.rows)
    LEV_TRY(ffn_backward_tile(r, &t, row, lev_min_i64(t.rows, r->n - row), x, dx, beta));
  return lev_rank_pop(r->rank);
}

/* ---- the half ---- */

lev_status lev_mlp_forward(const lev_layer_run *r, void *out) {
  void *x;
  LEV_TRY(lev_rank_push(r->rank));
  LEV_TRY(lev_rank_work(r->rank, "hidden.norm", r->t, r->n, r->m->hidden, &x));
  LEV_TRY(lev_layer_norm(r, out, LEV_W_POST_NORM, x));
  if (lev_layer_is_moe(r->m, r->layer)) LEV_TRY(lev_experts_forward(r, x, out));
  if (lev_layer_ffn(r->m, r->layer) > 0) LEV_TRY(ffn_forward(r, x, out));
  return lev_rank_pop(r->rank);
}

lev_status lev_mlp_backward(const lev_layer_run *r, const void *in, lev_attention_out kept, bool first) {
  void *mid, *x, *dx;
  bool moe = lev_layer_is_moe(r->m, r->layer);
  LEV_TRY(lev_rank_push(r->rank));
  LEV_TRY(lev_rank_work(r->rank, "hidden.mid", r->t, r->n, r->m->hidden, &mid));
  LEV_TRY(lev_rank_work(r->rank, "hidden.norm", r->t, r->n, r->m->hidden, &x));
  LEV_TRY(lev_rank_work(r->rank, "hidden.norm_grad", r->t, r->n, r->m->hidden, &dx));
  LEV_TRY(lev_attention_add(r, in, kept.o, mid));
  LEV_TRY(lev_layer_norm(r, mid, LEV_W_POST_NORM, x));
  if (moe) LEV_TRY(lev_experts_backward(r, x, dx, first));
  if (lev_layer_ffn(r->m, r->layer) > 0) LEV_TRY(ffn_backward(r, x, dx, moe ? 1 : 0));
  LEV_TRY(lev_layer_norm_backward(r, mid, LEV_W_POST_NORM, dx));
  return lev_rank_pop(r->rank);
}
