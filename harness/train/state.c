/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/train/state.h"

#include <stdio.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common/hostmem.h"

/* Appends the block of one state tensor. */
static void add(lev_state_piece *list, int *n, const char *state, const lev_params *p, const lev_piece *piece,
                lev_dtype dtype, void *data) {
  const lev_tensor *t = &p->tensors[piece->tensor];
  lev_state_piece *s = &list[(*n)++];
  snprintf(s->name, sizeof s->name, "%s%s", state, t->name);
  s->dtype = dtype, s->data = data;
  s->rows = piece->rows, s->cols = t->cols, s->vector = t->vector;
  s->first_row = t->first_row + piece->row, s->full_rows = t->full_rows;
}

static void *at(void *base, int64_t element, lev_dtype dtype) {
  return (unsigned char *)base + (size_t)element * lev_dtype_bytes(dtype);
}

/* The selection biases: rank 0 keeps them for all. */
static lev_status add_route_bias(lev_rank *rank, lev_state_piece *list, int *n) {
  const lev_model *m = &rank->params->model;
  if (!m->route_bias) return LEV_OK;
  lev_dtype a = lev_dtype_arith(m->dtype);
  LEV_TRY(
      lev_copy(rank->compute, rank->route_bias_pinned, rank->route_bias, lev_rank_route_bias_bytes(m), "router.bias"));
  LEV_TRY(lev_stream_sync(rank->compute));
  for (int l = (int)m->dense_layers; l < (int)m->layers && rank->params->layout.rank == 0; ++l) {
    lev_state_piece *s = &list[(*n)++];
    snprintf(s->name, sizeof s->name, LEV_STATE_MASTER "model.layers.%d.mlp.gate.e_score_correction_bias", l);
    s->dtype = a, s->rows = s->full_rows = m->experts, s->cols = 1, s->vector = s->optional = true;
    s->data = at(rank->route_bias_pinned, lev_moe_index(m, l) * m->experts, a);
  }
  return LEV_OK;
}

lev_status lev_state_pieces(lev_rank *rank, lev_state_piece **out, int *n) {
  const lev_params *p = rank->params;
  bool muon_run = rank->muon != NULL;
  oadamw_state_view adamw;
  *n = 0;
  LEV_TRY(lev_stream_sync(rank->compute));
  LEV_TRY(oadamw_state(rank->adamw, rank->compute, &adamw));
  if (adamw.cls == LEV_MEM_DEVICE && lev_device_backend(rank->device) == LEV_BACKEND_CUDA)
    return lev_fail(LEV_ERR_UNSUPPORTED, "checkpoints need schedule.offload_adamw = bounded on this device");
  *out = lev_calloc(LEV_HEAP_REPORT, (size_t)(3 * p->n_pieces + p->model.layers), sizeof **out);
  if (!*out) return LEV_ERR_NOMEM;
  int64_t element = 0; /* of the concatenated AdamW segments */
  int matrix = 0;      /* of the Muon list; both lists follow the pieces' order */
  lev_status st = LEV_OK;
  for (int i = 0; i < p->n_pieces && st == LEV_OK; ++i) {
    const lev_piece *piece = &p->pieces[i];
    const lev_tensor *t = &p->tensors[piece->tensor];
    if (muon_run && (t->kind == LEV_PARAM_DENSE || t->kind == LEV_PARAM_EXPERT)) {
      void *master, *momentum;
      st = muon_state(rank->muon, matrix++, &master, &momentum);
      if (st != LEV_OK) break;
      add(*out, n, LEV_STATE_MASTER, p, piece, adamw.dtype, master);
      add(*out, n, "momentum.", p, piece, adamw.dtype, momentum);
    } else {
      add(*out, n, LEV_STATE_MASTER, p, piece, adamw.dtype, at(adamw.master, element, adamw.dtype));
      add(*out, n, "exp_avg.", p, piece, adamw.dtype, at(adamw.exp_avg, element, adamw.dtype));
      add(*out, n, "exp_avg_sq.", p, piece, adamw.dtype, at(adamw.exp_avg_sq, element, adamw.dtype));
      element += piece->rows * t->cols;
    }
  }
  if (st == LEV_OK) st = add_route_bias(rank, *out, n);
  if (st != LEV_OK) lev_free(*out);
  return st;
}

lev_status lev_state_publish(lev_rank *rank) {
  LEV_TRY(oadamw_publish(rank->adamw, lev_weights_shard(rank->weights), rank->compute));
  if (rank->muon) LEV_TRY(muon_publish(rank->muon, lev_weights_shard(rank->weights), rank->compute));
  size_t bias = lev_rank_route_bias_bytes(&rank->params->model);
  if (bias > 0) {
    LEV_TRY(lev_copy(rank->compute, rank->route_bias, rank->route_bias_pinned, bias, "router.bias"));
    LEV_TRY(lev_comm_broadcast(rank->groups.stats, rank->compute, rank->route_bias, bias, 0));
  }
  LEV_TRY(lev_weights_updated(rank->weights, rank->compute));
  return lev_stream_sync(rank->compute);
}

void lev_state_digest(const lev_rank *rank, char *hex) {
  const lev_config *c = rank->config;
  const lev_model *m = &rank->params->model;
  const double values[] = {m->dtype,
                           (double)m->vocab,
                           (double)m->hidden,
                           (double)m->layers,
                           (double)m->heads,
                           (double)m->kv_heads,
                           (double)m->head_dim,
                           (double)m->experts,
                           (double)m->top_k,
                           (double)m->inter,
                           (double)m->dense_layers,
                           (double)m->dense_inter,
                           (double)m->shared_inter,
                           m->tied,
                           m->route.score,
                           m->route.norm_topk,
                           (double)m->route.groups,
                           (double)m->route.top_groups,
                           m->route.scale,
                           m->route_bias,
                           m->qk_norm,
                           m->norm_eps,
                           m->clip_qkv,
                           (double)m->window,
                           (double)m->window_first,
                           (double)m->window_pattern,
                           m->rope.theta,
                           m->rope.scaling,
                           m->rope.factor,
                           (double)m->rope.original_max_position,
                           m->rope.beta_fast,
                           m->rope.beta_slow,
                           m->rope.attention_factor,
                           c->optimizer.name,
                           c->data.packed,
                           c->data.mask_eod,
                           (double)c->train.context,
                           (double)c->train.global_batch};
  char text[2048];
  size_t length = (size_t)snprintf(text, sizeof text, "%lld", (long long)c->debug.seed);
  for (size_t i = 0; i < sizeof values / sizeof *values; ++i)
    length += (size_t)snprintf(text + length, sizeof text - length, " %a", values[i]);
  XXH128_hash_t h = XXH3_128bits(text, length);
  snprintf(hex, 33, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
}

void lev_state_layout(const lev_rank *rank, char *text, size_t size) {
  const lev_layout *l = &rank->params->layout;
  snprintf(text, size, "%d ranks (context %d, experts %d, vocab %d)", l->ranks, l->context, l->experts, l->vocab);
}
