/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/train/rig.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "common/rng.h"
#include "harness/train/state.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"
#include "tests/train/tokens.h"

void rig_config(lev_config *config) {
  lev_config_defaults(config);
  T_EXPECT_OK(lev_config_parse(config,
                               "[model]\ndtype = 'f64'\nvocab_size = 61\nhidden_size = 24\nnum_hidden_layers = 3\n"
                               "num_attention_heads = 4\nnum_key_value_heads = 2\nhead_dim = 8\nnum_experts = 10\n"
                               "num_experts_per_tok = 3\nmoe_intermediate_size = 12\nqk_norm = 'full'\n"
                               "initializer_range = 0.3\n"
                               "[train]\nsteps = 4\ncontext = 53\nglobal_batch = 2\n"
                               "[optimizer]\nlr = 0.01\n"
                               "[memory]\nllep_chunk_rows = 40\nllep_min_rows = 2\nllep_gate = 1.1\n"
                               "rdtp_tile_rows = 7\nrdtp_tile_cols = 9\nsco_keep_attention = true\n"
                               "oadamw_bucket = 257\nattention_block_q = 8\nattention_block_k = 8\n"
                               "embed_tile_tokens = 5\n"
                               "[data]\nvalid = 'tokens'\n" /* what o->evaluate goes through is planned */
                               "[run]\ndevice = 'cpu'\n",
                               "rig"));
}

static const struct {
  const char *name, *text;
} variants[] = {
    {"tied embeddings", "[model]\ntie_word_embeddings = true\n"},
    {"clipped q, k, v", "[model]\nclip_qkv = 0.8\n"},
    {"clipped q, k, v without norms", "[model]\nclip_qkv = 0.5\nqk_norm = 'none'\n"},
    {"linear rotary scaling, windows from layer 1", "[model]\nrope_scaling = 'linear'\nrope_factor = 2.5\n"
                                                    "sliding_window = 7\nmax_window_layers = 1\n"},
    {"yarn, every second layer full", "[model]\nqk_norm = 'head'\nrope_scaling = 'yarn'\nrope_factor = 4\n"
                                      "rope_original_max_position = 32\nrope_theta = 100\nrope_beta_fast = 4\n"
                                      "sliding_window = 19\nsliding_window_pattern = 2\n"},
    {"sigmoid scores, bias", "[model]\nscoring_func = 'sigmoid'\nbalance = 'aux_free'\nbias_update_rate = 0.05\n"
                             "norm_topk_prob = true\nrouted_scaling_factor = 2.5\n"},
    {"sigmoid scores, Switch loss", "[model]\nscoring_func = 'sigmoid'\nrouter_aux_loss_coef = 0.3\n"},
    {"sigmoid scores, groups", "[model]\nscoring_func = 'sigmoid'\nn_group = 5\ntopk_group = 3\nbalance = 'aux_free'\n"
                               "bias_update_rate = 0.05\n"},
    {"softmax scores, groups, bias", "[model]\nn_group = 5\ntopk_group = 2\nbalance = 'aux_free'\n"
                                     "bias_update_rate = 0.02\nnorm_topk_prob = true\n"},
    {"shared experts", "[model]\nn_shared_experts = 2\n[memory]\nffn_tile_rows = 9\n"},
    {"dense first layer", "[model]\nfirst_k_dense_replace = 1\nintermediate_size = 31\n[memory]\nffn_tile_rows = 7\n"},
    {"DeepSeek form", "[model]\nscoring_func = 'sigmoid'\nn_group = 5\ntopk_group = 3\nnorm_topk_prob = true\n"
                      "routed_scaling_factor = 2.5\nbalance = 'aux_free'\nbias_update_rate = 0.05\n"
                      "n_shared_experts = 1\nfirst_k_dense_replace = 2\nintermediate_size = 40\n"
                      "tie_word_embeddings = true\n[memory]\nffn_tile_rows = 1024\n"},
    {"packed documents", "[data]\npacked = true\n"},
    {"packed documents, masked ends, windows", "[data]\npacked = true\nmask_eod = true\n[model]\nsliding_window = 11\n"
                                               "sliding_window_pattern = 3\n"}};

const char *rig_variant(lev_config *config, int variant) {
  if (variant >= (int)(sizeof variants / sizeof *variants)) return NULL;
  rig_config(config);
  T_EXPECT_OK(lev_config_parse(config, variants[variant].text, "variant"));
  return variants[variant].name;
}

typedef struct rig {
  const rig_options *o;
  rig_result *result;
  lev_comm_hub *hub;
  pthread_mutex_t lock;
} rig;

double rig_direction(int tensor, int64_t element) {
  return lev_rng_normal((lev_rng_key){77, 1, (uint32_t)tensor}, (uint64_t)element);
}

/* Calls fn for each stored element of the rank: (tensor, global element, index in the flat shard). */
static void each_element(const lev_params *p, void (*fn)(void *, const lev_tensor *, int64_t, int64_t), void *ctx) {
  for (int i = 0; i < p->n_pieces; ++i) {
    const lev_piece *piece = &p->pieces[i];
    const lev_tensor *t = &p->tensors[piece->tensor];
    int64_t first = (t->first_row + piece->row) * t->cols;
    for (int64_t e = 0; e < piece->rows * t->cols; ++e) fn(ctx, t, first + e, piece->shard_offset + e);
  }
}

/* The rank's bytes as host memory, whatever the backend: the caller frees them. */
static void *fetch(lev_rank *rank, const void *from, size_t bytes) {
  void *copy = malloc(bytes ? bytes : 1);
  T_EXPECT_OK(lev_copy(rank->compute, copy, from, bytes, "test.fetch"));
  T_EXPECT_OK(lev_stream_sync(rank->compute));
  return copy;
}

static size_t shard_bytes(const lev_rank *rank, lev_dtype dtype) {
  return (size_t)rank->params->shard_elements * lev_dtype_bytes(dtype);
}

typedef struct change_ctx {
  const rig_options *o;
  lev_dtype dtype;
  void *shard;
} change_ctx;

static void change_one(void *ctx, const lev_tensor *t, int64_t element, int64_t at) {
  change_ctx *c = ctx;
  double x = lev_dtype_load(c->dtype, c->shard, at);
  if (c->o->alter) x = c->o->alter(t, element, x);
  if (c->o->shift != 0) x += c->o->shift * c->o->direction * rig_direction((int)t->id, element);
  lev_dtype_store(c->dtype, c->shard, at, x);
}

/* First weights: initialised, altered and moved as asked; the optimizers' masters follow. */
static void first_weights(const rig_options *o, lev_rank *rank) {
  T_EXPECT_OK(lev_rank_init_weights(rank));
  if (!o->alter && o->shift == 0) return;
  lev_dtype dtype = rank->params->model.dtype;
  void *shard = lev_weights_shard(rank->weights), *copy = fetch(rank, shard, shard_bytes(rank, dtype));
  each_element(rank->params, change_one, &(change_ctx){o, dtype, copy});
  T_EXPECT_OK(lev_copy(rank->compute, shard, copy, shard_bytes(rank, dtype), "test.change"));
  T_EXPECT_OK(lev_stream_sync(rank->compute));
  free(copy);
  T_EXPECT_OK(oadamw_init(rank->adamw, lev_weights_shard(rank->weights), rank->compute));
  if (rank->muon) T_EXPECT_OK(muon_init(rank->muon, lev_weights_shard(rank->weights), rank->compute));
  T_EXPECT_OK(lev_stream_sync(rank->compute));
}

typedef struct collect_ctx {
  lev_rank *rank;
  rig_result *out;
  const void *grads, *shard; /* copies */
} collect_ctx;

static void collect_one(void *ctx, const lev_tensor *t, int64_t element, int64_t at) {
  collect_ctx *c = ctx;
  int id = (int)t->id;
  if (!c->out->gradient[id]) {
    c->out->elements[id] = t->full_rows * t->cols;
    c->out->gradient[id] = calloc((size_t)c->out->elements[id], sizeof(double));
    c->out->weight[id] = calloc((size_t)c->out->elements[id], sizeof(double));
    memcpy(c->out->name[id], t->name, sizeof c->out->name[id]);
  }
  c->out->gradient[id][element] = lev_dtype_load(c->rank->grad_dtype, c->grads, at);
  c->out->weight[id][element] = lev_dtype_load(c->rank->params->model.dtype, c->shard, at);
}

static void collect_tensors(lev_rank *rank, rig_result *out) {
  void *grads = fetch(rank, lev_weights_grads(rank->weights), shard_bytes(rank, rank->grad_dtype));
  void *shard = fetch(rank, lev_weights_shard(rank->weights), shard_bytes(rank, rank->params->model.dtype));
  each_element(rank->params, collect_one, &(collect_ctx){rank, out, grads, shard});
  free(grads);
  free(shard);
}

/* Planned and measured peaks agree, tag by tag and in total. */
static bool same_peaks(const lev_ledger *planned, const lev_ledger *measured) {
  bool same = true;
  for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls)
    same &= T_EXPECT_EQ_I64(lev_ledger_peak(measured, (lev_mem)cls), lev_ledger_peak(planned, (lev_mem)cls));
  for (int i = 0; i < lev_ledger_count(planned); ++i) {
    lev_ledger_row row = lev_ledger_at(planned, i);
    size_t got = lev_ledger_tag_peak(measured, row.cls, row.tag);
    same &= t_check(got == row.peak, __FILE__, __LINE__, "%s: planned %zu, measured %zu", row.tag, row.peak, got);
  }
  return same & T_EXPECT_EQ_I64(lev_ledger_count(measured), lev_ledger_count(planned));
}

/* Saves the rank's state, or reads it; *step as for the checkpoint's functions. */
static void checkpoint(const rig_options *o, lev_rank *rank, lev_comm *world, bool load, int64_t *step) {
  char digest[33], layout[80];
  lev_state_piece *pieces;
  int n;
  lev_state_digest(rank, digest);
  lev_state_layout(rank, layout, sizeof layout);
  lev_checkpoint c = {.folder = o->folder, .world = world, .digest = digest, .layout = layout, .keep = 2};
  T_REQUIRE_OK(lev_state_pieces(rank, &pieces, &n));
  if (load) {
    T_EXPECT_OK(lev_checkpoint_load(&c, step, pieces, n));
    T_EXPECT_OK(lev_state_publish(rank));
  } else {
    T_EXPECT_OK(lev_checkpoint_save(&c, *step, pieces, n));
  }
  lev_free(pieces);
}

static void collect_bias(lev_rank *rank, rig_result *out) {
  const lev_model *m = &rank->params->model;
  int64_t n = (int64_t)(lev_rank_route_bias_bytes(m) / lev_dtype_bytes(lev_dtype_arith(m->dtype)));
  bool mine = out->route_bias == NULL;
  if (n == 0) return;
  if (mine) out->route_bias = calloc((size_t)n, sizeof(double));
  void *bias = fetch(rank, rank->route_bias, lev_rank_route_bias_bytes(m));
  for (int64_t i = 0; i < n; ++i) {
    double b = lev_dtype_load(lev_dtype_arith(m->dtype), bias, i);
    if (mine) out->route_bias[i] = b;
    T_EXPECT_MSG(out->route_bias[i] == b, "selection bias %lld differs between ranks", (long long)i);
  }
  free(bias);
}

/* The ledger's peaks as text. */
static char *peaks_text(const lev_ledger *ledger) {
  enum { LINE = 96 };
  int n = lev_ledger_count(ledger);
  size_t room = (size_t)(n + LEV_MEM_CLASSES) * LINE, at = 0;
  char *text = calloc(1, room);
  for (int i = 0; i < n; ++i) {
    lev_ledger_row row = lev_ledger_at(ledger, i);
    at += (size_t)snprintf(text + at, room - at, "%s %.40s %zu\n", lev_mem_name(row.cls), row.tag, row.peak);
  }
  for (int c = 0; c < LEV_MEM_CLASSES; ++c)
    at += (size_t)snprintf(text + at, room - at, "%s %zu\n", lev_mem_name((lev_mem)c),
                           lev_ledger_peak(ledger, (lev_mem)c));
  return text;
}

static void collect_dispatch(const lev_rank *rank, rig_result *out) {
  const lev_model *m = &rank->params->model;
  llep_info info = llep_plan_info(rank->llep);
  out->chunk_cap = lev_max_i64(out->chunk_cap, lev_max_i64(info.chunk_rows, info.send_rows));
  for (int l = 0; l < (int)lev_moe_layers(m); ++l) {
    llep_stats s;
    llep_get_stats(rank->llep, l, &s);
    out->chunk_rows = lev_max_i64(out->chunk_rows, s.chunk_rows);
    out->chunks = lev_max_i64(out->chunks, s.chunks);
    for (int64_t e = 0; e < m->experts && s.expert_counts; ++e)
      out->route_rows_max = lev_max_i64(out->route_rows_max, s.expert_counts[e]);
  }
}

static void run_steps(rig *g, lev_rank *rank, lev_comm *world, lev_loader *loader, lev_step_result *step) {
  const rig_options *o = g->o;
  int64_t done = 0;
  if (!o->update) {
    T_EXPECT_OK(lev_step_gradients(rank, loader, o->first_sample, step));
    return;
  }
  int64_t n = o->steps > 0 ? o->steps : 1;
  if (o->resume) checkpoint(o, rank, world, true, &done);
  for (int64_t i = done; i < n; ++i) {
    T_EXPECT_OK(lev_train_step(rank, loader, i + 1, o->first_sample + i * o->config->train.global_batch,
                               o->config->optimizer.lr, step));
    if (lev_comm_rank(world) != 0 || i >= RIG_STEPS) continue;
    g->result->max_vio[i] = step->max_vio, g->result->loss[i] = step->loss;
  }
  if (o->folder && !o->resume) checkpoint(o, rank, world, false, &n);
}

static void rank_main(int index, void *ctx) {
  rig *g = ctx;
  const rig_options *o = g->o;
  lev_rank_plan plan;
  lev_device *device;
  lev_comm *world;
  lev_ledger *ledger;
  lev_rank *rank;
  lev_step_result step = {0};
  double nll = 0;
  int64_t valid = 0;
  lev_config config = *o->config;
  config.run.device = t_backend() == LEV_BACKEND_CUDA ? LEV_DEVICE_CUDA : LEV_DEVICE_CPU;
  lev_device_config dc = {.backend = t_backend(),
                          .index = t_gpu(index),
                          .immediate = config.run.compute_immediate,
                          .jitter_seed = (uint64_t)config.debug.jitter_seed};
  T_REQUIRE_OK(lev_plan_rank(&config, index, NULL, &plan));
  T_REQUIRE_OK(lev_device_open(&dc, &device));
  T_REQUIRE_OK(lev_ledger_create(NULL, &ledger));
  T_REQUIRE_OK(lev_comm_local_join(g->hub, index, device, &world));
  lev_rank_options ro = {.config = &config, .device = device, .world = world, .ledger = ledger, .slabs = &plan.slabs};
  T_REQUIRE_OK(lev_rank_create(&ro, &rank));
  lev_loader *loader = o->documents ? tokens_loader_of(o->config, o->first_token, o->documents, o->n_documents)
                       : o->text    ? tokens_loader_text(o->config)
                                    : tokens_loader(o->config);
  if (o->poison) T_EXPECT_OK(lev_arena_poison(rank->arena[LEV_MEM_DEVICE], 0xFF));
  first_weights(o, rank);
  run_steps(g, rank, world, loader, &step);
  int64_t groups = o->config->parallel.ranks / rank->params->layout.context; /* every rank has tokens in one at least */
  if (o->evaluate) T_EXPECT_OK(lev_evaluate(rank, loader, 0, lev_max_i64(3, groups), &nll, &valid));
  pthread_mutex_lock(&g->lock);
  collect_tensors(rank, g->result);
  collect_bias(rank, g->result);
  collect_dispatch(rank, g->result);
  g->result->peaks[index] = peaks_text(ledger);
  g->result->plan_exact &= !o->evaluate || !o->update || same_peaks(plan.ledger, ledger);
  if (index == 0) g->result->step = step, g->result->nll = nll, g->result->valid = valid;
  g->result->bytes_sent += lev_comm_bytes_sent(world);
  pthread_mutex_unlock(&g->lock);
  lev_loader_close(loader);
  lev_rank_destroy(rank);
  lev_comm_destroy(world);
  lev_device_close(device);
  lev_ledger_destroy(ledger);
  lev_rank_plan_free(&plan);
}

void rig_run(const rig_options *options, rig_result *result) {
  rig g = {.o = options, .result = result, .lock = PTHREAD_MUTEX_INITIALIZER};
  memset(result, 0, sizeof *result);
  result->plan_exact = true;
  T_REQUIRE_OK(lev_comm_hub_create((int)options->config->parallel.ranks, 60, &g.hub));
  t_ranks((int)options->config->parallel.ranks, rank_main, &g);
  lev_comm_hub_destroy(g.hub);
}

void rig_free(rig_result *result) {
  for (int i = 0; i < RIG_TENSORS; ++i) {
    free(result->gradient[i]);
    free(result->weight[i]);
  }
  for (int r = 0; r < RIG_RANKS; ++r) free(result->peaks[r]);
  free(result->route_bias);
  memset(result, 0, sizeof *result);
}

double rig_gradient_distance(const rig_result *got, const rig_result *want, const char **worst) {
  double most = 0;
  *worst = "";
  for (int i = 0; i < RIG_TENSORS; ++i) {
    if (!want->gradient[i]) continue;
    double d = got->gradient[i] ? num_rel_l2_f64(got->gradient[i], want->gradient[i], want->elements[i]) : INFINITY;
    if (d > most) most = d, *worst = want->name[i];
  }
  return most;
}
