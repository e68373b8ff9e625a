/* SPDX-License-Identifier: Apache-2.0 */
/* Set-up and tear-down of a rank. The order is: communicators, plans (which allocate no data-plane memory), slabs and
 * arenas, persistent regions, seal. */
#include "harness/train/rank.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/gemm.h"
#include "common/hostmem.h"
#include "common/profile.h"
#include "harness/model/ops.h"

#define HOST_WORKERS 16 /* more do not make an update that memory bounds faster */
#define STAGING_BYTES ((size_t)4 << 20)

size_t lev_rank_staging_bytes(void) {
  return STAGING_BYTES;
}

size_t lev_rank_route_bias_bytes(const lev_model *m) {
  return m->route_bias ? lev_bytes(lev_moe_layers(m), m->experts, lev_dtype_bytes(lev_dtype_arith(m->dtype))) : 0;
}

const void *lev_rank_route_bias(const lev_rank *rank, int layer) {
  const lev_model *m = &rank->params->model;
  size_t row = lev_bytes(1, m->experts, lev_dtype_bytes(lev_dtype_arith(m->dtype)));
  return m->route_bias ? (const unsigned char *)rank->route_bias + (size_t)lev_moe_index(m, layer) * row : NULL;
}

static bool is_dry(const lev_rank *rank) {
  return lev_device_backend(rank->device) == LEV_BACKEND_DRY;
}

/* The backend it runs on, or is planned for. */
static lev_backend backend_of(const lev_rank *rank) {
  return is_dry(rank) ? lev_run_backend(rank->config) : lev_device_backend(rank->device);
}

/* ---- shape and layout ---- */

lev_model lev_model_of(const lev_config *c) {
  return (lev_model){
      .dtype = (lev_dtype)c->model.dtype,
      .vocab = c->model.vocab_size,
      .hidden = c->model.hidden_size,
      .layers = c->model.num_hidden_layers,
      .heads = c->model.num_attention_heads,
      .kv_heads = c->model.num_key_value_heads > 0 ? c->model.num_key_value_heads : c->model.num_attention_heads,
      .head_dim = c->model.head_dim > 0 ? c->model.head_dim
                                        : c->model.hidden_size / lev_max_i64(1, c->model.num_attention_heads),
      .experts = c->model.num_experts,
      .top_k = c->model.num_experts_per_tok,
      .inter = c->model.moe_intermediate_size,
      .dense_layers = c->model.first_k_dense_replace,
      .dense_inter = c->model.intermediate_size,
      .shared_inter = c->model.n_shared_experts * c->model.moe_intermediate_size,
      .tied = c->model.tie_word_embeddings,
      .route = {.score = (lev_score)c->model.scoring_func,
                .norm_topk = c->model.norm_topk_prob,
                .groups = c->model.n_group,
                .top_groups = c->model.topk_group,
                .scale = c->model.routed_scaling_factor},
      .route_bias = c->model.balance == LEV_BALANCE_AUX_FREE,
      .bias_rate = c->model.bias_update_rate,
      .qk_norm = (lev_qk_norm)c->model.qk_norm,
      .norm_eps = c->model.rms_norm_eps,
      .clip_qkv = c->model.clip_qkv,
      .window = c->model.sliding_window,
      .window_first = c->model.max_window_layers,
      .window_pattern = c->model.sliding_window_pattern,
      .rope = {.theta = c->model.rope_theta,
               .scaling = (lev_rope_scaling)c->model.rope_scaling,
               .factor = c->model.rope_factor,
               .original_max_position = c->model.rope_original_max_position,
               .beta_fast = c->model.rope_beta_fast,
               .beta_slow = c->model.rope_beta_slow,
               .attention_factor = c->model.rope_attention_factor},
      .init_std = c->model.initializer_range,
      .aux_coef = c->model.balance == LEV_BALANCE_SWITCH ? c->model.router_aux_loss_coef : 0,
      .z_coef = c->model.router_z_loss_coef};
}

lev_layout lev_layout_of(const lev_config *c, int ranks, int rank) {
  return (lev_layout){.ranks = ranks,
                      .rank = rank,
                      .context = c->parallel.context > 0 ? (int)c->parallel.context : ranks,
                      .experts = c->parallel.experts > 0 ? (int)c->parallel.experts : ranks,
                      .vocab = c->parallel.vocab > 0 ? (int)c->parallel.vocab : ranks,
                      .whole_matrices = c->optimizer.name == LEV_OPTIMIZER_MUON};
}

static lev_dtype grad_dtype_of(const lev_config *c, int micro_batches) {
  switch (c->train.grad_dtype) {
  case LEV_GRAD_F32:
    return LEV_F32;
  case LEV_GRAD_BF16:
    return LEV_BF16;
  case LEV_GRAD_F64:
    return LEV_F64;
  default: /* bf16 holds one micro-batch; sums of several need the accumulator's type */
    return c->model.dtype == LEV_BF16 && micro_batches == 1 ? LEV_BF16 : lev_dtype_arith((lev_dtype)c->model.dtype);
  }
}

/* ---- communicators ---- */

/* This rank's run of `size` consecutive ranks. */
static lev_status run_of(lev_rank *rank, int size, lev_comm **out) {
  return lev_comm_subset(rank->world, rank->params->layout.rank / size * size, 1, size, out);
}
/* The ranks that hold the same place in their runs of `size`. */
static lev_status replicas_of(lev_rank *rank, int size, lev_comm **out) {
  const lev_layout *l = &rank->params->layout;
  return lev_comm_subset(rank->world, l->rank % size, size, l->ranks / size, out);
}

static lev_status create_groups(lev_rank *rank) {
  const lev_layout *l = &rank->params->layout;
  lev_groups *g = &rank->groups;
  LEV_TRY(run_of(rank, l->ranks, &g->stats));
  LEV_TRY(run_of(rank, l->context, &g->context));
  LEV_TRY(run_of(rank, l->experts, &g->experts));
  LEV_TRY(run_of(rank, l->vocab, &g->vocab));
  LEV_TRY(run_of(rank, l->vocab, &g->embed));
  for (int i = 0; i < 2; ++i) {
    LEV_TRY(replicas_of(rank, 1, &g->weights.dense[i]));
    LEV_TRY(replicas_of(rank, l->experts, &g->weights.experts[i]));
    LEV_TRY(replicas_of(rank, l->vocab, &g->weights.vocab[i]));
  }
  return LEV_OK;
}

static void destroy_groups(lev_groups *g) {
  for (int i = 0; i < 2; ++i) {
    lev_comm_destroy(g->weights.dense[i]);
    lev_comm_destroy(g->weights.experts[i]);
    lev_comm_destroy(g->weights.vocab[i]);
  }
  lev_comm_destroy(g->embed);
  lev_comm_destroy(g->vocab);
  lev_comm_destroy(g->experts);
  lev_comm_destroy(g->context);
  lev_comm_destroy(g->stats);
}

/* ---- plans ---- */

attn_config lev_attention_config(const lev_config *c, const lev_model *m, int64_t tokens) {
  attn_config a;
  attn_config_init(&a);
  a.max_tokens = tokens, a.heads = m->heads, a.kv_heads = m->kv_heads, a.head_dim = m->head_dim;
  a.dtype = m->dtype, a.block_q = c->memory.attention_block_q, a.block_k = c->memory.attention_block_k;
  a.route = (attn_route)c->run.attention, a.workspace = c->memory.attention_workspace, a.packed = c->data.packed;
  return a;
}

static lev_status plan_attention(lev_rank *rank) {
  attn_config a = lev_attention_config(rank->config, &rank->params->model, rank->max_tokens);
  return attn_plan_create(rank->device, rank->groups.context, &a, &rank->attention);
}

static lev_status plan_experts(lev_rank *rank) {
  const lev_model *m = &rank->params->model;
  const lev_config *c = rank->config;
  llep_config a;
  llep_config_init(&a);
  a.max_tokens = rank->max_tokens, a.hidden = m->hidden, a.inter = m->inter, a.experts = m->experts;
  a.top_k = m->top_k, a.layers = (int)lev_moe_layers(m), a.dtype = m->dtype;
  a.schedule = c->schedule.pipelined_llep == LEV_SCHEDULE_PLAIN ? LLEP_PLAIN : LLEP_BOUNDED;
  a.plain_rows = c->memory.llep_plain_rows, a.tile_rows = c->memory.llep_tile_rows;
  a.chunk_rows = c->memory.llep_chunk_rows, a.foreign_slots = c->memory.llep_foreign_slots;
  a.alpha = c->memory.llep_alpha, a.min_rows = c->memory.llep_min_rows, a.gate = c->memory.llep_gate;
  return llep_plan_create(rank->device, rank->groups.experts, &a, &rank->llep);
}

static lev_status plan_vocabulary(lev_rank *rank) {
  const lev_model *m = &rank->params->model;
  const lev_config *c = rank->config;
  rdtp_config a;
  rdtp_config_init(&a);
  a.max_tokens = rank->max_tokens, a.hidden = m->hidden, a.vocab = m->vocab, a.dtype = m->dtype;
  a.schedule = c->schedule.ring_dtp == LEV_SCHEDULE_PLAIN ? RDTP_PLAIN : RDTP_BOUNDED;
  a.branch = (rdtp_branch)c->memory.rdtp_branch, a.one_pass = c->memory.rdtp_one_pass;
  a.tile_rows = c->memory.rdtp_tile_rows, a.tile_cols = c->memory.rdtp_tile_cols;
  LEV_TRY(rdtp_plan_create(rank->device, rank->groups.vocab, &a, &rank->rdtp));
  embed_config e;
  embed_config_init(&e);
  e.max_tokens = rank->max_tokens, e.hidden = m->hidden, e.vocab = m->vocab, e.dtype = m->dtype;
  e.tile_tokens = c->memory.embed_tile_tokens;
  return embed_plan_create(rank->device, rank->groups.embed, &e, &rank->embed);
}

static lev_status plan_boundaries(lev_rank *rank) {
  const lev_model *m = &rank->params->model;
  const lev_config *c = rank->config;
  sco_config a = sco_config_default();
  a.layers = (int)m->layers;
  a.item_bytes[SCO_BOUNDARY] = lev_bytes(rank->max_tokens, m->hidden, lev_dtype_bytes(m->dtype));
  if (c->memory.sco_keep_attention) a.item_bytes[SCO_ATTENTION] = lev_attention_item_bytes(m, rank->max_tokens);
  a.host_budget = c->memory.sco_host_budget, a.fraction = c->memory.sco_fraction;
  a.schedule = c->schedule.sco == LEV_SCHEDULE_PLAIN ? SCO_PLAIN : SCO_BOUNDED;
  return sco_plan_create(rank->device, &a, &rank->sco);
}

/* Norms, embedding, head and router stay with AdamW; the other matrices go to Muon where it is chosen. */
bool lev_uses_muon(const lev_config *c, lev_param_kind kind) {
  return c->optimizer.name == LEV_OPTIMIZER_MUON && (kind == LEV_PARAM_DENSE || kind == LEV_PARAM_EXPERT);
}

/* Threads of an update on the host; they change neither bytes nor results. */
static int host_workers(const lev_rank *rank) {
  const lev_config *c = rank->config;
  int64_t cores = sysconf(_SC_NPROCESSORS_ONLN);
  if (c->memory.oadamw_workers > 0) return (int)c->memory.oadamw_workers;
  if (lev_device_backend(rank->device) != LEV_BACKEND_CUDA) return 1;
  return (int)lev_max_i64(1, lev_min_i64(HOST_WORKERS, cores / c->parallel.ranks));
}

static lev_status create_adamw(lev_rank *rank, const oadamw_segment *segments, int n) {
  const lev_config *c = rank->config;
  oadamw_config a = oadamw_config_default();
  a.segments = segments, a.n_segments = n;
  a.param_dtype = rank->params->model.dtype, a.grad_dtype = rank->grad_dtype;
  a.bucket = c->memory.oadamw_bucket, a.slots = (int)c->memory.oadamw_slots;
  a.placement = (oadamw_placement)c->memory.oadamw_placement, a.cpu_share = c->memory.oadamw_cpu_share;
  a.schedule = c->schedule.offload_adamw == LEV_SCHEDULE_PLAIN ? OADAMW_PLAIN : OADAMW_BOUNDED;
  a.workers = host_workers(rank);
  a.beta1 = c->optimizer.beta1, a.beta2 = c->optimizer.beta2, a.eps = c->optimizer.eps;
  return oadamw_plan_create(rank->device, &a, &rank->adamw);
}

lev_status lev_muon_settings(const lev_config *c, lev_dtype grad_dtype, const muon_matrix *matrices, int n,
                             muon_config *out) {
  muon_config a = muon_config_default();
  a.matrices = matrices, a.n_matrices = n;
  a.param_dtype = (lev_dtype)c->model.dtype, a.grad_dtype = grad_dtype;
  a.compute_dtype = lev_dtype_arith(a.param_dtype);
  a.mu = c->optimizer.muon_momentum, a.nesterov = c->optimizer.muon_nesterov;
  a.weight_decay = c->optimizer.weight_decay;
  a.set = muon_set_find(c->optimizer.muon_coefficients), a.scale = muon_scale_find(c->optimizer.muon_scale);
  if (a.set == MUON_SETS || a.scale == MUON_SCALES)
    return lev_fail(LEV_ERR_CONFIG,
                    "optimizer.muon_coefficients = \"%s\" or muon_scale = \"%s\" is unknown; --help-all lists them",
                    c->optimizer.muon_coefficients, c->optimizer.muon_scale);
  a.schedule = c->schedule.muon == LEV_SCHEDULE_PLAIN ? MUON_PLAIN : MUON_BOUNDED;
  a.bucket_bytes = c->memory.muon_bucket_bytes, a.slots = (int)c->memory.muon_slots;
  *out = a;
  return LEV_OK;
}

static lev_status create_muon(lev_rank *rank, const muon_matrix *matrices, int n) {
  muon_config a;
  LEV_TRY(lev_muon_settings(rank->config, rank->grad_dtype, matrices, n, &a));
  return muon_plan_create(rank->device, &a, &rank->muon);
}

static lev_status plan_optimizers(lev_rank *rank) {
  const lev_params *p = rank->params;
  const lev_config *c = rank->config;
  size_t most = (size_t)(p->n_pieces > 0 ? p->n_pieces : 1);
  oadamw_segment *segments = lev_calloc(LEV_HEAP_PLAN, most, sizeof *segments);
  muon_matrix *matrices = lev_calloc(LEV_HEAP_PLAN, most, sizeof *matrices);
  int n_segments = 0, n_matrices = 0;
  lev_status st = segments && matrices ? LEV_OK : LEV_ERR_NOMEM;
  /* without an optimizer both lists stay empty: an AdamW plan of nothing owns nothing */
  for (int i = 0; i < p->n_pieces && st == LEV_OK && c->optimizer.name != LEV_OPTIMIZER_NONE; ++i) {
    const lev_piece *piece = &p->pieces[i];
    const lev_tensor *t = &p->tensors[piece->tensor];
    bool decays = t->kind != LEV_PARAM_NORM || c->optimizer.decay_norms;
    if (lev_uses_muon(c, t->kind))
      matrices[n_matrices++] = (muon_matrix){.offset = piece->shard_offset, .rows = piece->rows, .cols = t->cols};
    else
      segments[n_segments++] =
          (oadamw_segment){.offset = piece->shard_offset,
                           .count = piece->rows * t->cols,
                           .weight_decay = decays ? c->optimizer.weight_decay : 0,
                           .lr_scale = c->optimizer.name == LEV_OPTIMIZER_MUON ? c->optimizer.adamw_lr_scale : 1};
  }
  if (st == LEV_OK) st = create_adamw(rank, segments, n_segments);
  if (st == LEV_OK && c->optimizer.name == LEV_OPTIMIZER_MUON) st = create_muon(rank, matrices, n_matrices);
  lev_free(segments);
  lev_free(matrices);
  return st;
}

/* ---- memory ---- */

static lev_status create_arenas(lev_rank *rank, const lev_slabs *slabs) {
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) {
    size_t bytes = slabs ? slabs->bytes[cls] : SIZE_MAX;
    void *base = (void *)(uintptr_t)(LEV_ALIGN << 20); /* never dereferenced on the dry backend */
    if (!is_dry(rank)) {
      LEV_TRY(lev_device_alloc(rank->device, (lev_mem)cls, bytes, &rank->slab[cls]));
      base = rank->slab[cls];
    }
    LEV_TRY(lev_arena_create(rank->device, rank->ledger, (lev_mem)cls, base, bytes, &rank->arena[cls]));
    if (rank->config->debug.poison) LEV_TRY(lev_arena_poison(rank->arena[cls], 0xFF));
  }
  return LEV_OK;
}

static lev_status persist(lev_rank *rank, lev_mem cls, const char *tag, lev_dtype dtype, int64_t rows, int64_t cols,
                          void **out) {
  return lev_arena_persist(rank->arena[cls], tag, lev_bytes(rows, cols, lev_dtype_bytes(dtype)), out);
}

static lev_status persist_blocks(lev_rank *rank, lev_walk_fn walk, void *plan, lev_blocks *blocks) {
  return lev_blocks_take(rank->arena, false, walk, plan, blocks);
}

/* The rank's own persistent buffers (fields of lev_rank). */
static lev_status persist_own(lev_rank *rank) {
  const lev_model *m = &rank->params->model;
  int64_t n = rank->max_tokens, sums = lev_rank_sums(m), s = rank->config->train.context;
  int64_t bias_bytes = (int64_t)lev_rank_route_bias_bytes(m);
  bool packed = rank->config->data.packed, documents = packed || rank->config->data.mask_eod;
  const struct {
    lev_mem cls;
    const char *tag;
    lev_dtype dtype;
    int64_t rows, cols;
    void *out;
  } list[] = {{LEV_MEM_DEVICE, "hidden.stream", m->dtype, n, m->hidden, &rank->hidden},
              {LEV_MEM_DEVICE, "router.ids", LEV_I32, lev_moe_layers(m) * n, m->top_k, &rank->ids},
              {LEV_MEM_DEVICE, "router.counts", LEV_I64, lev_moe_layers(m), m->experts, &rank->counts},
              {LEV_MEM_DEVICE, "router.bias", LEV_U8, 1, bias_bytes, &rank->route_bias},
              {LEV_MEM_PINNED, "router.bias", LEV_U8, 1, bias_bytes, &rank->route_bias_pinned},
              {LEV_MEM_DEVICE, "batch.tokens", LEV_I32, 1, n, &rank->tokens},
              {LEV_MEM_DEVICE, "batch.tokens", LEV_I32, 1, n, &rank->labels},
              {LEV_MEM_DEVICE, "batch.tokens", LEV_I32, 1, n, &rank->position},
              {LEV_MEM_DEVICE, "batch.documents", LEV_I64, packed, n, &rank->doc_begin},
              {LEV_MEM_PINNED, "batch.documents", LEV_I64, packed, n, &rank->doc_begin_pinned},
              {LEV_MEM_HOST, "batch.documents", LEV_I32, documents, s + 1, &rank->documents},
              {LEV_MEM_DEVICE, "step.sums", LEV_F64, 1, sums, &rank->sums},
              {LEV_MEM_PINNED, "batch.tokens", LEV_I32, 3, n, &rank->batch_pinned},
              {LEV_MEM_PINNED, "step.sums", LEV_F64, 1, sums, &rank->sums_pinned},
              {LEV_MEM_HOST, "batch.sequence", LEV_I32, 2, s, &rank->sequence},
              {LEV_MEM_HOST, "host.staging", LEV_U8, 1, (int64_t)lev_rank_staging_bytes(), &rank->staging}};
  for (size_t i = 0; i < sizeof list / sizeof *list; ++i) {
    void *p;
    if (list[i].rows == 0 || list[i].cols == 0) continue; /* stays NULL */
    LEV_TRY(persist(rank, list[i].cls, list[i].tag, list[i].dtype, list[i].rows, list[i].cols, &p));
    memcpy(list[i].out, &p, sizeof p);
  }
  void *p;
  LEV_TRY(lev_arena_persist(rank->arena[LEV_MEM_DEVICE], "step.norm",
                            oadamw_norm_scratch_bytes(rank->params->shard_elements), &p));
  rank->norm_scratch = p;
  lev_backend backend = backend_of(rank);
  size_t workspace = lev_max_size(lev_gemm_workspace_bytes(backend, m->dtype), lev_ops_scratch_bytes(backend));
  LEV_TRY(lev_arena_persist(rank->arena[LEV_MEM_DEVICE], "library", workspace, &p));
  lev_stream_set_workspace(rank->compute, p, workspace);
  return LEV_OK;
}

static lev_status persist_all(lev_rank *rank) {
  lev_blocks blocks;
  LEV_TRY(persist_blocks(rank, lev_weights_walk, rank->weights, &blocks));
  LEV_TRY(lev_weights_bind(rank->weights, &blocks));
  LEV_TRY(persist_own(rank));
  LEV_TRY(persist_blocks(rank, attn_walk_persistent, rank->attention, &blocks));
  LEV_TRY(attn_plan_bind(rank->attention, ATTN_PERSISTENT, &blocks));
  LEV_TRY(persist_blocks(rank, embed_walk_persistent, rank->embed, &blocks));
  LEV_TRY(embed_plan_bind(rank->embed, EMBED_PERSISTENT, &blocks));
  LEV_TRY(persist_blocks(rank, llep_walk_persistent, rank->llep, &blocks));
  LEV_TRY(llep_plan_bind(rank->llep, LLEP_PERSISTENT, &blocks));
  LEV_TRY(persist_blocks(rank, rdtp_walk_persistent, rank->rdtp, &blocks));
  LEV_TRY(rdtp_plan_bind(rank->rdtp, RDTP_PERSISTENT, &blocks));
  LEV_TRY(persist_blocks(rank, sco_walk, rank->sco, &blocks));
  LEV_TRY(sco_plan_bind(rank->sco, SCO_PERSISTENT, &blocks));
  LEV_TRY(persist_blocks(rank, oadamw_walk_persistent, rank->adamw, &blocks));
  LEV_TRY(oadamw_plan_bind(rank->adamw, OADAMW_PERSISTENT, &blocks));
  if (rank->muon) {
    LEV_TRY(persist_blocks(rank, muon_walk_persistent, rank->muon, &blocks));
    LEV_TRY(muon_plan_bind(rank->muon, MUON_PERSISTENT, &blocks));
  }
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) lev_arena_seal(rank->arena[cls]);
  lev_device_seal(rank->device);
  return LEV_OK;
}

/* ---- create and destroy ---- */

static lev_status create_local(lev_rank *rank, const lev_rank_options *o) {
  const lev_config *c = o->config;
  lev_layout layout = lev_layout_of(c, lev_comm_size(o->world), lev_comm_rank(o->world));
  lev_model model = lev_model_of(c);
  LEV_TRY(lev_params_create(&model, &layout, &rank->params));
  int groups = layout.ranks / layout.context;
  rank->micro_batches = (int)lev_ceil_div(c->train.global_batch, groups);
  rank->grad_dtype = grad_dtype_of(c, rank->micro_batches);
  for (int r = 0; r < layout.context; ++r)
    rank->max_tokens = lev_max_i64(rank->max_tokens, attn_shard_tokens(c->train.context, layout.context, r));
  rank->batch.rank_tokens = lev_calloc(LEV_HEAP_MODEL, (size_t)layout.ranks, sizeof(int64_t));
  if (!rank->batch.rank_tokens) return LEV_ERR_NOMEM;
  LEV_TRY(lev_stream_create(rank->device, "compute", &rank->compute));
  return LEV_OK;
}

static lev_status create_plans(lev_rank *rank) {
  LEV_TRY(plan_attention(rank));
  LEV_TRY(plan_experts(rank));
  LEV_TRY(plan_vocabulary(rank));
  LEV_TRY(plan_boundaries(rank));
  LEV_TRY(plan_optimizers(rank));
  bool single = rank->micro_batches == 1 && lev_moe_layers(&rank->params->model) > 0 &&
                llep_plan_info(rank->llep).single_products;
  return lev_weights_create(rank->device, rank->params, &rank->groups.weights, rank->grad_dtype, single,
                            &rank->weights);
}

lev_status lev_rank_create(const lev_rank_options *options, lev_rank **out) {
  *out = NULL;
  lev_rank *rank = lev_calloc(LEV_HEAP_MODEL, 1, sizeof *rank);
  if (!rank) return LEV_ERR_NOMEM;
  rank->config = options->config, rank->device = options->device, rank->world = options->world;
  rank->ledger = options->ledger;
  lev_rank_phase(rank, "set-up", -1);
  /* every stage ends in an agreement, so that no rank enters the next one's collectives alone */
  lev_status st = lev_comm_agree(rank->world, create_local(rank, options));
  if (st == LEV_OK) st = create_groups(rank);
  if (st == LEV_OK) st = lev_comm_agree(rank->world, create_plans(rank));
  if (st == LEV_OK) {
    lev_status mine = create_arenas(rank, options->slabs);
    if (mine == LEV_OK) mine = persist_all(rank);
    st = lev_comm_agree(rank->world, mine);
  }
  if (st != LEV_OK) {
    lev_rank_destroy(rank);
    return st;
  }
  *out = rank;
  return LEV_OK;
}

void lev_rank_destroy(lev_rank *rank) {
  if (!rank) return;
  lev_stream_destroy(rank->compute); /* after a failure it may still be running on the memory freed below */
  muon_destroy(rank->muon);
  oadamw_destroy(rank->adamw);
  sco_plan_destroy(rank->sco);
  rdtp_destroy(rank->rdtp);
  llep_destroy(rank->llep);
  embed_destroy(rank->embed);
  attn_destroy(rank->attention);
  lev_weights_destroy(rank->weights);
  destroy_groups(&rank->groups);
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) {
    lev_arena_destroy(rank->arena[cls]);
    if (rank->slab[cls]) lev_device_free(rank->device, rank->slab[cls]);
  }
  lev_free(rank->batch.rank_tokens);
  lev_params_destroy(rank->params);
  lev_free(rank);
}

lev_slabs lev_rank_slabs(const lev_rank *rank) {
  lev_slabs slabs;
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls)
    slabs.bytes[cls] = lev_sat_add(lev_arena_persistent(rank->arena[cls]), lev_arena_work_peak(rank->arena[cls]));
  return slabs;
}

void lev_rank_phase(lev_rank *rank, const char *name, int64_t index) {
  lev_ledger_phase(rank->ledger, name, index);
  lev_device_phase(rank->device, name, index);
}

/* ---- work scopes ---- */

lev_status lev_rank_push(lev_rank *rank) {
  return lev_arena_push(rank->arena[LEV_MEM_DEVICE], &rank->compute, 1);
}

lev_status lev_rank_pop(lev_rank *rank) {
  return lev_arena_pop(rank->arena[LEV_MEM_DEVICE]);
}

lev_status lev_rank_take(lev_rank *rank, lev_walk_fn walk, void *plan, lev_blocks *blocks) {
  return lev_blocks_take(rank->arena, true, walk, plan, blocks);
}

lev_status lev_rank_work(lev_rank *rank, const char *tag, lev_dtype dtype, int64_t rows, int64_t cols, void **out) {
  return lev_arena_alloc(rank->arena[LEV_MEM_DEVICE], tag, lev_bytes(rows, cols, lev_dtype_bytes(dtype)), out);
}
