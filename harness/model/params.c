/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/model/params.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"
#include "common/rng.h"

static lev_status check(const lev_model *m, const lev_layout *l) {
  const struct {
    const char *name;
    int64_t value;
  } positive[] = {{"model.vocab_size", m->vocab},
                  {"model.hidden_size", m->hidden},
                  {"model.num_hidden_layers", m->layers},
                  {"model.num_attention_heads", m->heads},
                  {"model.num_key_value_heads", m->kv_heads},
                  {"model.head_dim", m->head_dim},
                  {"model.num_experts", m->experts},
                  {"model.num_experts_per_tok", m->top_k}};
  for (size_t i = 0; i < sizeof positive / sizeof *positive; ++i)
    if (positive[i].value <= 0)
      return lev_fail(LEV_ERR_CONFIG, "%s = %lld, must be at least 1", positive[i].name, (long long)positive[i].value);
  if (m->inter <= 0)
    return lev_fail(LEV_ERR_CONFIG,
                    "model.moe_intermediate_size = %lld, must be at least 1: the width of one expert, Mixtral's "
                    "intermediate_size (model.intermediate_size is of dense layers)",
                    (long long)m->inter);
  if (m->heads % m->kv_heads != 0)
    return lev_fail(LEV_ERR_CONFIG,
                    "model.num_attention_heads = %lld is no multiple of model.num_key_value_heads = %lld",
                    (long long)m->heads, (long long)m->kv_heads);
  if (m->head_dim % 2 != 0)
    return lev_fail(LEV_ERR_CONFIG, "head size %lld is odd; rotary embedding needs pairs", (long long)m->head_dim);
  if (m->head_dim > LEV_HEAD_DIM_MAX)
    return lev_fail(LEV_ERR_CONFIG, "head size %lld exceeds %d", (long long)m->head_dim, LEV_HEAD_DIM_MAX);
  if (m->dense_layers < 0 || m->dense_layers >= m->layers)
    return lev_fail(LEV_ERR_CONFIG, "model.first_k_dense_replace = %lld must leave one of %lld layers with experts",
                    (long long)m->dense_layers, (long long)m->layers);
  if (m->shared_inter < 0)
    return lev_fail(LEV_ERR_CONFIG, "width %lld of shared experts must not be negative", (long long)m->shared_inter);
  if (m->dense_layers > 0 && m->dense_inter < 1)
    return lev_fail(
        LEV_ERR_CONFIG,
        "model.first_k_dense_replace = %lld dense layers need model.intermediate_size of at least 1, not %lld",
        (long long)m->dense_layers, (long long)m->dense_inter);
  LEV_TRY(lev_rope_check(&m->rope));
  if (!(m->clip_qkv >= 0)) return lev_fail(LEV_ERR_CONFIG, "model.clip_qkv = %g, must not be negative", m->clip_qkv);
  if (m->window < 0 || m->window_first < 0 || m->window_pattern < 0)
    return lev_fail(LEV_ERR_CONFIG,
                    "model.sliding_window = %lld, max_window_layers = %lld, sliding_window_pattern = %lld: none may be "
                    "negative",
                    (long long)m->window, (long long)m->window_first, (long long)m->window_pattern);
  if (m->experts > LEV_EXPERTS_MAX)
    return lev_fail(LEV_ERR_CONFIG, "model.num_experts = %lld exceeds %d", (long long)m->experts, LEV_EXPERTS_MAX);
  if (m->top_k > m->experts)
    return lev_fail(LEV_ERR_CONFIG, "model.num_experts_per_tok = %lld exceeds model.num_experts = %lld",
                    (long long)m->top_k, (long long)m->experts);
  int64_t widest =
      lev_max_i64(lev_max_i64(m->vocab, m->inter * m->experts), lev_max_i64(m->dense_inter, m->shared_inter));
  if (lev_bytes(widest, m->hidden, 8) > SIZE_MAX / 4)
    return lev_fail(LEV_ERR_CONFIG, "the model's parameter count overflows");
  const struct {
    const char *name;
    int value;
  } groups[] = {{"parallel.context", l->context}, {"parallel.experts", l->experts}, {"parallel.vocab", l->vocab}};
  if (l->ranks < 1 || l->rank < 0 || l->rank >= l->ranks)
    return lev_fail(LEV_ERR_CONFIG, "rank %d of parallel.ranks = %d does not exist", l->rank, l->ranks);
  for (int i = 0; i < 3; ++i)
    if (groups[i].value < 1 || l->ranks % groups[i].value != 0)
      return lev_fail(LEV_ERR_CONFIG, "%s = %d must divide parallel.ranks = %d", groups[i].name, groups[i].value,
                      l->ranks);
  return LEV_OK;
}

static lev_status check_route(const lev_model *m) {
  const lev_route_rule *r = &m->route;
  if (r->groups < 1 || m->experts % r->groups != 0 || r->top_groups < 1 || r->top_groups > r->groups)
    return lev_fail(LEV_ERR_CONFIG,
                    "model.n_group = %lld must divide model.num_experts = %lld, and model.topk_group = %lld must be "
                    "between 1 and it",
                    (long long)r->groups, (long long)m->experts, (long long)r->top_groups);
  if (m->top_k > r->top_groups * (m->experts / r->groups))
    return lev_fail(LEV_ERR_CONFIG, "model.num_experts_per_tok = %lld, but %lld groups have %lld experts",
                    (long long)m->top_k, (long long)r->top_groups,
                    (long long)(r->top_groups * (m->experts / r->groups)));
  if (!(r->scale > 0)) return lev_fail(LEV_ERR_CONFIG, "model.routed_scaling_factor = %g, must be above 0", r->scale);
  return LEV_OK;
}

/* ---- building the tensor list ---- */

typedef struct builder {
  lev_params *p;
  uint32_t next_id;
} builder;

static lev_tensor *add_tensor(builder *b, lev_param_kind kind, lev_slot slot, int unit, int64_t rows, int64_t cols) {
  lev_tensor *t = &b->p->tensors[b->p->n_tensors++];
  t->kind = kind, t->slot = slot, t->unit = unit;
  t->rows = rows, t->cols = cols, t->full_rows = rows;
  t->vector = kind == LEV_PARAM_NORM;
  t->id = b->next_id++;
  return t;
}

static void add_vocab(builder *b, lev_param_kind kind, lev_slot slot, int unit, const char *name) {
  const lev_model *m = &b->p->model;
  int64_t parts = b->p->layout.vocab, part = b->p->layout.rank % parts;
  lev_tensor *t = add_tensor(b, kind, slot, unit, lev_part_size(m->vocab, parts, part), m->hidden);
  t->full_rows = m->vocab;
  t->first_row = lev_part_begin(m->vocab, parts, part);
  snprintf(t->name, sizeof t->name, "%s", name);
}

static void add_dense(builder *b, int layer, int unit) {
  const lev_model *m = &b->p->model;
  int64_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
  int64_t q_norm = m->qk_norm == LEV_QK_NORM_FULL ? q : m->head_dim;
  int64_t k_norm = m->qk_norm == LEV_QK_NORM_FULL ? kv : m->head_dim;
  int64_t ffn = lev_layer_ffn(m, layer);
  bool moe = lev_layer_is_moe(m, layer);
  const struct {
    const char *name;
    lev_param_kind kind;
    lev_slot slot;
    int64_t rows, cols;
  } list[] = {
      {"input_layernorm", LEV_PARAM_NORM, LEV_W_INPUT_NORM, m->hidden, 1},
      {"self_attn.q_proj", LEV_PARAM_DENSE, LEV_W_Q, q, m->hidden},
      {"self_attn.k_proj", LEV_PARAM_DENSE, LEV_W_K, kv, m->hidden},
      {"self_attn.v_proj", LEV_PARAM_DENSE, LEV_W_V, kv, m->hidden},
      {"self_attn.o_proj", LEV_PARAM_DENSE, LEV_W_O, m->hidden, q},
      {"self_attn.q_norm", LEV_PARAM_NORM, LEV_W_Q_NORM, q_norm, 1},
      {"self_attn.k_norm", LEV_PARAM_NORM, LEV_W_K_NORM, k_norm, 1},
      {"post_attention_layernorm", LEV_PARAM_NORM, LEV_W_POST_NORM, m->hidden, 1},
      {"mlp.gate", LEV_PARAM_ROUTER, LEV_W_ROUTER, moe ? m->experts : 0, m->hidden},
      {moe ? "mlp.shared_experts.gate_proj" : "mlp.gate_proj", LEV_PARAM_DENSE, LEV_W_FFN_GATE, ffn, m->hidden},
      {moe ? "mlp.shared_experts.up_proj" : "mlp.up_proj", LEV_PARAM_DENSE, LEV_W_FFN_UP, ffn, m->hidden},
      {moe ? "mlp.shared_experts.down_proj" : "mlp.down_proj", LEV_PARAM_DENSE, LEV_W_FFN_DOWN, m->hidden, ffn}};
  for (size_t i = 0; i < sizeof list / sizeof *list; ++i) {
    bool qk = list[i].slot == LEV_W_Q_NORM || list[i].slot == LEV_W_K_NORM;
    if ((qk && m->qk_norm == LEV_QK_NORM_NONE) || list[i].rows == 0 || list[i].cols == 0) continue;
    lev_tensor *t = add_tensor(b, list[i].kind, list[i].slot, unit, list[i].rows, list[i].cols);
    snprintf(t->name, sizeof t->name, "model.layers.%d.%s.weight", layer, list[i].name);
  }
}

static void add_experts(builder *b, int layer, int unit) {
  const lev_model *m = &b->p->model;
  static const char *const part[3] = {"gate_proj", "up_proj", "down_proj"};
  int64_t parts = b->p->layout.experts, mine = b->p->layout.rank % parts;
  int64_t begin = lev_part_begin(m->experts, parts, mine), end = lev_part_begin(m->experts, parts, mine + 1);
  uint32_t first_id = b->next_id;
  for (int64_t e = begin; e < end; ++e)
    for (int i = 0; i < 3; ++i) {
      int64_t rows = i < 2 ? m->inter : m->hidden, cols = i < 2 ? m->hidden : m->inter;
      lev_tensor *t = add_tensor(b, LEV_PARAM_EXPERT, LEV_W_EXPERTS, unit, rows, cols);
      t->id = first_id + (uint32_t)(3 * e + i);
      snprintf(t->name, sizeof t->name, "model.layers.%d.mlp.experts.%lld.%s.weight", layer, (long long)e, part[i]);
    }
  b->next_id = first_id + (uint32_t)(3 * m->experts);
}

static void add_unit(lev_params *p, lev_unit_kind kind, int layer) {
  int group = kind == LEV_UNIT_EXPERTS                          ? p->layout.experts
              : kind == LEV_UNIT_EMBED || kind == LEV_UNIT_HEAD ? p->layout.vocab
                                                                : 1;
  lev_unit *u = &p->units[p->n_units++];
  u->kind = kind, u->layer = layer;
  u->replicas = p->layout.ranks / group, u->replica = p->layout.rank / group;
  for (int s = 0; s < LEV_W_DENSE_SLOTS; ++s) u->slot_offset[s] = -1;
}

static void build_tensors(lev_params *p) {
  builder b = {p, 0};
  add_unit(p, LEV_UNIT_EMBED, -1);
  add_vocab(&b, LEV_PARAM_EMBED, LEV_W_EMBED, p->n_units - 1, "model.embed_tokens.weight");
  for (int l = 0; l < (int)p->model.layers; ++l) {
    add_unit(p, LEV_UNIT_DENSE, l);
    add_dense(&b, l, p->n_units - 1);
    if (!lev_layer_is_moe(&p->model, l)) continue;
    add_unit(p, LEV_UNIT_EXPERTS, l);
    add_experts(&b, l, p->n_units - 1);
  }
  add_unit(p, LEV_UNIT_NORM, -1);
  lev_tensor *t = add_tensor(&b, LEV_PARAM_NORM, LEV_W_FINAL_NORM, p->n_units - 1, p->model.hidden, 1);
  snprintf(t->name, sizeof t->name, "model.norm.weight");
  if (p->model.tied) return;
  add_unit(p, LEV_UNIT_HEAD, -1);
  add_vocab(&b, LEV_PARAM_HEAD, LEV_W_HEAD, p->n_units - 1, "lm_head.weight");
}

/* ---- storage: who keeps which rows ---- */

static int64_t elements(const lev_tensor *t) {
  return t->rows * t->cols;
}

/* Even cuts moved down to the nearest row border. */
static void cut_by_rows(const lev_params *p, lev_unit *u, int first, int end) {
  int64_t before = 0;
  for (int r = 1; r <= u->replicas; ++r) {
    int64_t target = lev_part_begin(u->elements, u->replicas, r), cut = target;
    for (int i = first; i < end; ++i) {
      const lev_tensor *t = &p->tensors[i];
      if (target >= t->offset && target < t->offset + elements(t))
        cut = t->offset + (target - t->offset) / t->cols * t->cols;
    }
    u->counts[r - 1] = cut - before;
    before = cut;
  }
}

static int by_size(const void *a, const void *b) {
  const lev_tensor *const *x = a, *const *y = b;
  int64_t dx = elements(*x), dy = elements(*y);
  return dx != dy ? (dx < dy ? 1 : -1) : ((*x)->id < (*y)->id ? -1 : 1);
}

/* Whole tensors to the least loaded replica, largest first; `load` carries over units so that owners even out over
 * layers. Tensors are then laid out by owner. */
static lev_status cut_by_tensors(lev_params *p, lev_unit *u, int first, int end, int64_t *load) {
  int n = end - first;
  lev_tensor **order = lev_calloc(LEV_HEAP_MODEL, (size_t)n, sizeof *order);
  int *owner = lev_calloc(LEV_HEAP_MODEL, (size_t)n, sizeof *owner);
  if (order && owner) {
    for (int i = 0; i < n; ++i) order[i] = &p->tensors[first + i];
    qsort(order, (size_t)n, sizeof *order, by_size);
    for (int i = 0; i < n; ++i) {
      int best = 0;
      for (int r = 1; r < u->replicas; ++r)
        if (load[r] < load[best]) best = r;
      owner[order[i] - &p->tensors[first]] = best;
      load[best] += elements(order[i]);
      u->counts[best] += elements(order[i]);
    }
    int64_t offset = 0;
    for (int r = 0; r < u->replicas; ++r)
      for (int i = 0; i < n; ++i)
        if (owner[i] == r) {
          p->tensors[first + i].offset = offset;
          offset += elements(&p->tensors[first + i]);
        }
  }
  bool ok = order && owner;
  lev_free(order);
  lev_free(owner);
  return ok ? LEV_OK : LEV_ERR_NOMEM;
}

/* Units come in order, and their tensors one after the other: *next is the first of this unit, then of the one after
 * it.
 */
static lev_status place_unit(lev_params *p, int index, int *next, int64_t *load) {
  lev_unit *u = &p->units[index];
  int first = *next, end = first;
  for (; end < p->n_tensors && p->tensors[end].unit == index; ++end) {
    p->tensors[end].offset = u->elements;
    u->elements += elements(&p->tensors[end]);
  }
  *next = end;
  u->counts = lev_calloc(LEV_HEAP_MODEL, (size_t)u->replicas, sizeof *u->counts);
  if (!u->counts) return LEV_ERR_NOMEM;
  bool whole = p->layout.whole_matrices;
  if (whole && u->kind == LEV_UNIT_DENSE) {
    LEV_TRY(cut_by_tensors(p, u, first, end, load));
  } else if (whole && u->kind == LEV_UNIT_EXPERTS) {
    int64_t one = 3 * p->model.inter * p->model.hidden;
    for (int r = 0; r < u->replicas; ++r) u->counts[r] = lev_part_size(u->elements / one, u->replicas, r) * one;
  } else {
    cut_by_rows(p, u, first, end);
  }
  for (int r = 0; r < u->replica; ++r) u->shard_begin += u->counts[r];
  u->shard_offset = p->shard_elements;
  p->shard_elements += u->counts[u->replica];
  for (int i = first; i < end && u->kind == LEV_UNIT_DENSE; ++i)
    u->slot_offset[p->tensors[i].slot] = p->tensors[i].offset;
  return LEV_OK;
}

static int by_shard(const void *a, const void *b) {
  const lev_piece *x = a, *y = b;
  return x->shard_offset < y->shard_offset ? -1 : x->shard_offset > y->shard_offset;
}

static void list_pieces(lev_params *p) {
  for (int i = 0; i < p->n_tensors; ++i) {
    const lev_tensor *t = &p->tensors[i];
    const lev_unit *u = &p->units[t->unit];
    int64_t begin = lev_max_i64(t->offset, u->shard_begin);
    int64_t end = lev_min_i64(t->offset + elements(t), u->shard_begin + u->counts[u->replica]);
    if (begin >= end) continue;
    p->pieces[p->n_pieces++] = (lev_piece){.tensor = i,
                                           .row = (begin - t->offset) / t->cols,
                                           .rows = (end - begin) / t->cols,
                                           .shard_offset = u->shard_offset + (begin - u->shard_begin)};
  }
  qsort(p->pieces, (size_t)p->n_pieces, sizeof *p->pieces, by_shard);
}

static void count_parameters(lev_params *p) {
  const lev_model *m = &p->model;
  int64_t attention = m->hidden * m->head_dim * 2 * (m->heads + m->kv_heads);
  int64_t norms = 2 * m->hidden;
  if (m->qk_norm == LEV_QK_NORM_FULL) norms += (m->heads + m->kv_heads) * m->head_dim;
  if (m->qk_norm == LEV_QK_NORM_HEAD) norms += 2 * m->head_dim;
  int64_t router = m->experts * m->hidden, expert = 3 * m->inter * m->hidden, shared = 3 * m->shared_inter * m->hidden;
  int64_t common = m->layers * (attention + norms) + m->dense_layers * 3 * m->dense_inter * m->hidden +
                   lev_moe_layers(m) * (router + shared);
  p->total = common + lev_moe_layers(m) * m->experts * expert + (m->tied ? 1 : 2) * m->vocab * m->hidden + m->hidden;
  p->active = common + lev_moe_layers(m) * m->top_k * expert + m->vocab * m->hidden + m->hidden;
}

lev_status lev_params_create(const lev_model *model, const lev_layout *layout, lev_params **out) {
  *out = NULL;
  LEV_TRY(check(model, layout));
  LEV_TRY(check_route(model));
  lev_params *p = lev_calloc(LEV_HEAP_MODEL, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  p->model = *model, p->layout = *layout;
  int64_t local = lev_ceil_div(model->experts, layout->experts);
  size_t most = (size_t)(3 + model->layers * (12 + 3 * local));
  int64_t *load = lev_calloc(LEV_HEAP_MODEL, (size_t)layout->ranks, sizeof *load);
  p->tensors = lev_calloc(LEV_HEAP_MODEL, most, sizeof *p->tensors);
  p->pieces = lev_calloc(LEV_HEAP_MODEL, most, sizeof *p->pieces);
  p->units = lev_calloc(LEV_HEAP_MODEL, (size_t)(3 + 2 * model->layers), sizeof *p->units);
  lev_status st = load && p->tensors && p->pieces && p->units ? LEV_OK : LEV_ERR_NOMEM;
  if (st == LEV_OK) {
    int next = 0;
    build_tensors(p);
    for (int u = 0; u < p->n_units && st == LEV_OK; ++u) st = place_unit(p, u, &next, load);
  }
  lev_free(load);
  if (st != LEV_OK) {
    lev_params_destroy(p);
    return st;
  }
  list_pieces(p);
  count_parameters(p);
  *out = p;
  return LEV_OK;
}

void lev_params_destroy(lev_params *p) {
  if (!p) return;
  for (int u = 0; u < p->n_units; ++u) lev_free(p->units[u].counts);
  lev_free(p->units);
  lev_free(p->tensors);
  lev_free(p->pieces);
  lev_free(p);
}

int64_t lev_layer_window(const lev_model *m, int layer) {
  bool full = layer < m->window_first || (m->window_pattern > 0 && (layer + 1) % m->window_pattern == 0);
  return full ? 0 : m->window;
}

int lev_unit_embed(const lev_params *p) {
  (void)p;
  return 0;
}
int lev_unit_dense(const lev_params *p, int layer) {
  return 1 + layer + (int)lev_max_i64(0, lev_moe_index(&p->model, layer));
}
int lev_unit_experts(const lev_params *p, int layer) {
  return lev_unit_dense(p, layer) + 1;
}
int lev_unit_final_norm(const lev_params *p) {
  return p->n_units - (p->model.tied ? 1 : 2);
}
int lev_unit_head(const lev_params *p) {
  return p->model.tied ? lev_unit_embed(p) : p->n_units - 1;
}

double lev_param_init(const lev_model *model, const lev_tensor *tensor, uint64_t seed, int64_t i) {
  if (tensor->kind == LEV_PARAM_NORM) return 1.0;
  lev_rng_key key = {seed, 0x1417u, tensor->id};
  double x = lev_rng_normal(key, (uint64_t)i);
  for (uint32_t again = 1; fabs(x) > 3.0; ++again) { /* redraw the tails */
    key.step = 0x1417u + again;
    x = lev_rng_normal(key, (uint64_t)i);
  }
  return model->init_std * x;
}
