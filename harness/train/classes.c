/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/train/classes.h"

#include <string.h>

#include "common/hostmem.h"

/* What the plan of a rank depends on; compared field by field, so it holds 64-bit numbers only. */
typedef struct rank_key {
  int64_t tokens, micro_batches;   /* of this rank in each micro-batch that has a sequence for it; how many have */
  int64_t expert_part, vocab_part; /* experts and head rows it computes with */
  int64_t stored, stored_adamw;    /* elements */
  uint64_t muon[MUON_PHASES * LEV_MEM_CLASSES]; /* bytes */
} rank_key;

/* A parameter table and the running sums of what its replicas store. Ranks whose parts are equally large share the
 * shape of the table, whatever experts and rows they hold. */
typedef struct part_table {
  struct part_table *next;
  int64_t expert_part, vocab_part;
  lev_params *params;
  int *first_tensor; /* [n_units + 1] */
  int64_t **begin;   /* [n_units][replicas + 1] */
} part_table;

static void free_table(part_table *t) {
  for (int u = 0; t->begin && u < t->params->n_units; ++u) lev_free(t->begin[u]);
  lev_free(t->begin);
  lev_free(t->first_tensor);
  lev_params_destroy(t->params);
  lev_free(t);
}

static lev_status index_table(part_table *t) {
  const lev_params *p = t->params;
  t->first_tensor = lev_calloc(LEV_HEAP_PLAN, (size_t)p->n_units + 1, sizeof *t->first_tensor);
  t->begin = lev_calloc(LEV_HEAP_PLAN, (size_t)p->n_units, sizeof *t->begin);
  if (!t->first_tensor || !t->begin) return LEV_ERR_NOMEM;
  for (int i = 0; i < p->n_tensors; ++i) t->first_tensor[p->tensors[i].unit + 1] = i + 1;
  for (int u = 0; u < p->n_units; ++u) {
    const lev_unit *unit = &p->units[u];
    if (t->first_tensor[u + 1] == 0) t->first_tensor[u + 1] = t->first_tensor[u]; /* a unit of no experts */
    t->begin[u] = lev_calloc(LEV_HEAP_PLAN, (size_t)unit->replicas + 1, sizeof **t->begin);
    if (!t->begin[u]) return LEV_ERR_NOMEM;
    for (int r = 0; r < unit->replicas; ++r) t->begin[u][r + 1] = t->begin[u][r] + unit->counts[r];
  }
  return LEV_OK;
}

/* The table for this rank's part sizes, made on first use. */
static lev_status find_table(part_table **list, const lev_config *c, const lev_model *model, int rank,
                             const rank_key *key, part_table **out) {
  for (*out = *list; *out; *out = (*out)->next)
    if ((*out)->expert_part == key->expert_part && (*out)->vocab_part == key->vocab_part) return LEV_OK;
  part_table *t = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *t);
  if (!t) return LEV_ERR_NOMEM;
  lev_layout layout = lev_layout_of(c, (int)c->parallel.ranks, rank);
  lev_status st = lev_params_create(model, &layout, &t->params);
  if (st == LEV_OK) st = index_table(t);
  if (st != LEV_OK) {
    free_table(t);
    return st;
  }
  t->expert_part = key->expert_part, t->vocab_part = key->vocab_part;
  t->next = *list, *list = *out = t;
  return LEV_OK;
}

/* Elements that `rank` stores, and the blocks of rows among them that go to Muon, in shard order. */
static int64_t stored_by(const part_table *t, const lev_config *c, int rank, muon_matrix *matrices, int *n) {
  const lev_params *p = t->params;
  int64_t stored = 0;
  *n = 0;
  for (int u = 0; u < p->n_units; ++u) {
    const lev_unit *unit = &p->units[u];
    int replica = rank / (p->layout.ranks / unit->replicas);
    int64_t begin = t->begin[u][replica], end = t->begin[u][replica + 1];
    for (int i = t->first_tensor[u]; i < t->first_tensor[u + 1]; ++i) {
      const lev_tensor *tensor = &p->tensors[i];
      int64_t from = lev_max_i64(begin, tensor->offset);
      int64_t to = lev_min_i64(end, tensor->offset + tensor->rows * tensor->cols);
      if (from < to && lev_uses_muon(c, tensor->kind))
        matrices[(*n)++] =
            (muon_matrix){.offset = stored + from - begin, .rows = (to - from) / tensor->cols, .cols = tensor->cols};
    }
    stored += end - begin;
  }
  return stored;
}

static lev_status muon_bytes(const lev_config *c, lev_device *device, const muon_matrix *matrices, int n,
                             rank_key *key) {
  muon_config settings;
  muon_plan *plan;
  lev_dtype grads = lev_dtype_arith((lev_dtype)c->model.dtype); /* no size depends on it */
  LEV_TRY(lev_muon_settings(c, grads, matrices, n, &settings));
  LEV_TRY(muon_plan_create(device, &settings, &plan));
  for (int phase = 0; phase < MUON_PHASES; ++phase) {
    size_t bytes[LEV_MEM_CLASSES];
    muon_plan_bytes(plan, (muon_phase)phase, bytes);
    for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) key->muon[phase * LEV_MEM_CLASSES + cls] = bytes[cls];
  }
  muon_destroy(plan);
  return LEV_OK;
}

typedef struct search {
  const lev_config *config;
  lev_model model;
  lev_device *device; /* dry */
  part_table *tables;
  muon_matrix *matrices;
  int room;
  rank_key *keys; /* [n] of the classes */
} search;

static lev_status key_of(search *s, int rank, rank_key *key) {
  const lev_config *c = s->config;
  lev_layout l = lev_layout_of(c, (int)c->parallel.ranks, rank);
  part_table *table;
  int n;
  memset(key, 0, sizeof *key);
  key->expert_part = lev_part_size(s->model.experts, l.experts, rank % l.experts);
  key->vocab_part = lev_part_size(s->model.vocab, l.vocab, rank % l.vocab);
  LEV_TRY(find_table(&s->tables, c, &s->model, rank, key, &table)); /* checks the layout */
  int groups = l.ranks / l.context, group = rank / l.context;
  key->tokens = attn_shard_tokens(c->train.context, l.context, rank % l.context);
  key->micro_batches = lev_ceil_div(lev_max_i64(0, c->train.global_batch - group), groups);
  if (s->room < table->params->n_tensors) {
    lev_free(s->matrices);
    s->room = table->params->n_tensors;
    s->matrices = lev_calloc(LEV_HEAP_PLAN, (size_t)s->room, sizeof *s->matrices);
    if (!s->matrices) return LEV_ERR_NOMEM;
  }
  key->stored = key->stored_adamw = stored_by(table, c, rank, s->matrices, &n);
  for (int i = 0; i < n; ++i) key->stored_adamw -= s->matrices[i].rows * s->matrices[i].cols;
  return c->optimizer.name == LEV_OPTIMIZER_MUON ? muon_bytes(c, s->device, s->matrices, n, key) : LEV_OK;
}

static lev_status classify(search *s, lev_rank_classes *out) {
  for (int r = 0; r < out->ranks; ++r) {
    rank_key key;
    LEV_TRY(key_of(s, r, &key));
    int c = 0;
    while (c < out->n && memcmp(&s->keys[c], &key, sizeof key) != 0) ++c;
    if (c == out->n) {
      s->keys[c] = key;
      out->first[out->n++] = r;
    }
    out->of[r] = c;
  }
  return LEV_OK;
}

lev_status lev_rank_classes_create(const lev_config *config, lev_rank_classes *out) {
  lev_device_config dc = {.backend = LEV_BACKEND_DRY, .dry_for = lev_run_backend(config)};
  size_t ranks = (size_t)config->parallel.ranks;
  search s = {.config = config, .model = lev_model_of(config)};
  lev_status st;
  *out = (lev_rank_classes){.ranks = (int)ranks};
  out->of = lev_calloc(LEV_HEAP_PLAN, ranks, sizeof *out->of);
  out->first = lev_calloc(LEV_HEAP_PLAN, ranks, sizeof *out->first);
  s.keys = lev_calloc(LEV_HEAP_PLAN, ranks, sizeof *s.keys);
  st = out->of && out->first && s.keys ? LEV_OK : LEV_ERR_NOMEM;
  if (st == LEV_OK) st = lev_device_open(&dc, &s.device);
  if (st == LEV_OK) st = classify(&s, out);
  while (s.tables) {
    part_table *next = s.tables->next;
    free_table(s.tables);
    s.tables = next;
  }
  lev_device_close(s.device);
  lev_free(s.matrices);
  lev_free(s.keys);
  if (st != LEV_OK) lev_rank_classes_free(out);
  return st;
}

void lev_rank_classes_free(lev_rank_classes *classes) {
  lev_free(classes->of);
  lev_free(classes->first);
  *classes = (lev_rank_classes){0};
}
