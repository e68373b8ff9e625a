/* SPDX-License-Identifier: Apache-2.0 */
/* The model's shape, the rank layout, and the table of parameters: which tensor exists, which unit it travels in,
 * and which rows of it this rank stores.
 *
 * A *unit* is what is gathered and reduced as one flat array: the dense weights of a layer, the experts of a layer that
 * live on this expert rank, the vocabulary shard of the embedding, of the head, the final norm. A unit is computed with
 * by `group` ranks, each holding its own part (dense: group 1, experts: Ep, vocabulary: P), and stored by the W / group
 * ranks that compute with the same part (its replicas): replica j keeps the elements [cut j, cut j+1). Cuts fall on row
 * borders, and with whole-matrix optimizers on tensor borders (experts: on whole experts), so every stored piece is a
 * block of rows. */
#ifndef LEV_MODEL_PARAMS_H
#define LEV_MODEL_PARAMS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/dtype.h"
#include "common/status.h"
#include "harness/model/rope.h"

#define LEV_HEAD_DIM_MAX 1024
#define LEV_EXPERTS_MAX 4096

typedef enum lev_qk_norm { LEV_QK_NORM_NONE, LEV_QK_NORM_FULL, LEV_QK_NORM_HEAD } lev_qk_norm;

typedef enum lev_score { LEV_SCORE_SOFTMAX, LEV_SCORE_SIGMOID } lev_score;

/* How a token's router logits become experts and weights. s = softmax or sigmoid of the logits. Chosen are the top_k
 * largest s + bias, where there are expert groups only among the top_groups groups whose two best sum highest; ties go
 * to the lower id. Weights are scale * s, or scale * s / sum of the chosen s. The bias steers the choice alone (Wang et
 * al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437). */
typedef struct lev_route_rule {
  lev_score score;
  bool norm_topk;             /* divide the chosen scores by their sum */
  int64_t groups, top_groups; /* groups of consecutive experts, and how many a token may use; groups = 1: off */
  double scale;
} lev_route_rule;

/* Shape and constants of a decoder-only MoE model; symbols as in common/dims.h. */
typedef struct lev_model {
  lev_dtype dtype; /* of weights and hidden states */
  int64_t vocab, hidden, layers, heads, kv_heads, head_dim, experts, top_k, inter;
  int64_t dense_layers; /* first layers with a dense feed-forward part instead of experts */
  int64_t dense_inter;  /* its width */
  int64_t shared_inter; /* width of the shared experts of every other layer; 0 = none */
  bool tied;            /* the embedding table is the head too: one tensor, its gradient the sum of both uses */
  lev_route_rule route;
  bool route_bias;     /* selection bias, updated after each step */
  lev_qk_norm qk_norm; /* FULL: RMS over the whole projection (OLMoE); HEAD: per head (Qwen3) */
  double clip_qkv;     /* q, k and v clamped to [-clip, clip], after the norms; 0 = off */
  int64_t window;      /* keys that a query of a sliding-window layer sees at most; 0 = no such layers */
  int64_t window_first, window_pattern; /* see lev_layer_window */
  lev_rope rope;
  double norm_eps, init_std;
  double aux_coef, z_coef; /* Switch balance loss and router z-loss; 0 = off */
  double bias_rate;        /* step of the selection bias */
} lev_model;

/* Who computes what. All groups are runs of consecutive ranks; D, Ep and P divide W. */
typedef struct lev_layout {
  int ranks, rank;             /* W and this rank */
  int context, experts, vocab; /* D, Ep, P */
  bool whole_matrices;         /* store whole matrices on one owner (Muon) */
} lev_layout;

typedef enum lev_param_kind {
  LEV_PARAM_EMBED,
  LEV_PARAM_HEAD,
  LEV_PARAM_NORM,
  LEV_PARAM_ROUTER,
  LEV_PARAM_DENSE,
  LEV_PARAM_EXPERT
} lev_param_kind;

typedef enum lev_slot { /* place of a tensor inside its layer, for pointer look-up */
                        LEV_W_INPUT_NORM,
                        LEV_W_Q,
                        LEV_W_K,
                        LEV_W_V,
                        LEV_W_O,
                        LEV_W_Q_NORM,
                        LEV_W_K_NORM,
                        LEV_W_POST_NORM,
                        LEV_W_ROUTER,
                        LEV_W_FFN_GATE, /* dense layers: the feed-forward part; others: the shared experts */
                        LEV_W_FFN_UP,
                        LEV_W_FFN_DOWN,
                        LEV_W_DENSE_SLOTS,
                        LEV_W_EXPERTS = LEV_W_DENSE_SLOTS,
                        LEV_W_EMBED,
                        LEV_W_HEAD,
                        LEV_W_FINAL_NORM
} lev_slot;

/* One tensor as far as this rank's unit holds it. */
typedef struct lev_tensor {
  char name[96]; /* Hugging Face name */
  lev_param_kind kind;
  lev_slot slot;
  int unit;           /* index into lev_params.units */
  int64_t rows, cols; /* of the part in the unit; vectors are [n, 1] */
  int64_t full_rows;  /* rows of the whole tensor */
  int64_t first_row;  /* of the unit's part in the whole tensor (vocabulary shards) */
  bool vector;        /* shape is [rows] */
  uint32_t id;        /* number of the tensor in the whole model, independent of the layout (keys random init) */
  int64_t offset;     /* elements, from the unit's start */
} lev_tensor;

typedef enum lev_unit_kind {
  LEV_UNIT_EMBED,
  LEV_UNIT_DENSE,
  LEV_UNIT_EXPERTS,
  LEV_UNIT_NORM,
  LEV_UNIT_HEAD
} lev_unit_kind;

typedef struct lev_unit {
  lev_unit_kind kind;
  int layer;                              /* -1 outside layers */
  int replicas, replica;                  /* how many ranks share its storage, and which of them this rank is */
  int64_t elements;                       /* of the whole unit as computed with on this rank */
  int64_t *counts;                        /* [replicas] elements kept by each replica */
  int64_t shard_begin;                    /* first element of the unit kept here */
  int64_t shard_offset;                   /* where that element lies in this rank's flat shard */
  int64_t slot_offset[LEV_W_DENSE_SLOTS]; /* elements from the unit's start, dense units only; -1 = tensor absent */
} lev_unit;

/* A block of rows of one tensor kept by this rank. */
typedef struct lev_piece {
  int tensor;           /* index into lev_params.tensors */
  int64_t row, rows;    /* of the unit's part of the tensor */
  int64_t shard_offset; /* elements, in this rank's flat shard */
} lev_piece;

typedef struct lev_params {
  lev_model model;
  lev_layout layout;
  lev_tensor *tensors;
  int n_tensors;
  lev_unit *units; /* embed, per layer dense and (unless a dense layer) experts, final norm, head unless tied */
  int n_units;
  lev_piece *pieces; /* in flat-shard order */
  int n_pieces;
  int64_t shard_elements; /* length of this rank's flat shard */
  int64_t total;          /* parameters of the whole model */
  int64_t active;         /* parameters one token touches, embedding rows not counted */
} lev_params;

/* Checks shape and layout and builds the tables. Errors: LEV_ERR_CONFIG naming the value and what would do,
 * LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_params_create(const lev_model *model, const lev_layout *layout, lev_params **out);
void lev_params_destroy(lev_params *params);

/* Layers with experts, whether a layer is one of them, and its number among them. */
static inline int64_t lev_moe_layers(const lev_model *model) {
  return model->layers - model->dense_layers;
}
static inline bool lev_layer_is_moe(const lev_model *model, int64_t layer) {
  return layer >= model->dense_layers;
}
static inline int64_t lev_moe_index(const lev_model *model, int64_t layer) {
  return layer - model->dense_layers;
}
/* Width of the layer's FFN slots; 0 = it has none. */
static inline int64_t lev_layer_ffn(const lev_model *model, int64_t layer) {
  return lev_layer_is_moe(model, layer) ? model->shared_inter : model->dense_inter;
}

/* Keys that a query of this layer sees at most, 0 = all before it. Layers below window_first see everything, and so
 * does every window_pattern-th layer, counted from 1 (0 = none): Qwen's max_window_layers, Gemma's
 * sliding_window_pattern. */
int64_t lev_layer_window(const lev_model *model, int layer);

/* Unit indices. */
int lev_unit_embed(const lev_params *params);
int lev_unit_dense(const lev_params *params, int layer);
int lev_unit_experts(const lev_params *params, int layer); /* of a layer with experts */
int lev_unit_final_norm(const lev_params *params);
int lev_unit_head(const lev_params *params); /* the embedding unit when tied */

/* First value of element `i` (row-major in the whole tensor): 1 for norms, else truncated normal (3 sigma) with
 * init_std, keyed by (seed, tensor id, i), so it does not depend on the layout. */
double lev_param_init(const lev_model *model, const lev_tensor *tensor, uint64_t seed, int64_t i);

#endif
