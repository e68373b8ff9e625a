/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/train/estimate.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/config/toml.h"

#define TRACE_EVENTS (1 << 22)

/* ---- ceilings ---- */

static const struct {
  const char *key;
  size_t field;
  double unit;
} keys[] = {{"ceilings.matmul_tflops", offsetof(lev_ceilings, matmul), 1e12},
            {"ceilings.attention_tflops", offsetof(lev_ceilings, attention), 1e12},
            {"ceilings.copy_tb", offsetof(lev_ceilings, copy), 1e12},
            {"ceilings.h2d_gb", offsetof(lev_ceilings, h2d), 1e9},
            {"ceilings.d2h_gb", offsetof(lev_ceilings, d2h), 1e9},
            {"ceilings.link_gb", offsetof(lev_ceilings, link), 1e9},
            {"ceilings.adamw_cpu_gparams", offsetof(lev_ceilings, adamw_cpu), 1e9}};
enum { KEYS = sizeof keys / sizeof *keys };

/* Of a rate as written; beyond, the times would not be numbers. */
#define RATE_LEAST 1e-9
#define RATE_MOST 1e9

typedef struct reading {
  const char *path;
  lev_ceilings *out;
} reading;

static double *field(lev_ceilings *c, int key) {
  return (double *)(void *)((unsigned char *)c + keys[key].field);
}

static lev_status take_key(void *ctx, const char *name, const char *value, bool is_string, int line) {
  const reading *r = ctx;
  for (int i = 0; i < KEYS; ++i) {
    if (strcmp(name, keys[i].key) != 0) continue;
    char *end;
    double rate = strtod(value, &end);
    if (is_string || *value == '\0' || *end != '\0' || !(rate >= RATE_LEAST && rate <= RATE_MOST))
      return lev_fail(LEV_ERR_CONFIG, "%s:%d: %s = %s, a number from %g to %g is needed", r->path, line, name, value,
                      RATE_LEAST, RATE_MOST);
    *field(r->out, i) = rate * keys[i].unit;
    return LEV_OK;
  }
  return lev_fail(LEV_ERR_CONFIG,
                  "%s:%d: unknown key %s; there are matmul_tflops, attention_tflops, copy_tb, h2d_gb, "
                  "d2h_gb, link_gb, adamw_cpu_gparams in [ceilings]",
                  r->path, line, name);
}

lev_status lev_ceilings_read(const char *path, lev_ceilings *out) {
  char text[16384];
  reading r = {path, out};
  memset(out, 0, sizeof *out);
  FILE *file = fopen(path, "r");
  if (!file) return lev_fail(LEV_ERR_IO, "cannot read %s: %s", path, strerror(errno));
  size_t n = fread(text, 1, sizeof text, file);
  bool bad = ferror(file) != 0;
  fclose(file);
  if (bad || n == sizeof text) return lev_fail(LEV_ERR_IO, "cannot read %s, or it is not below 16 KiB", path);
  text[n] = '\0';
  LEV_TRY(lev_toml_parse(text, path, take_key, &r));
  for (int i = 0; i < KEYS; ++i)
    if (*field(out, i) <= 0) return lev_fail(LEV_ERR_CONFIG, "%s: %s is missing", path, keys[i].key);
  return LEV_OK;
}

/* ---- operations ---- */

typedef struct work {
  const lev_config *c;
  lev_model m;
  double tokens, sequences; /* of this rank; of its context group */
  double forwards, reruns;  /* F, r */
  int context, experts;     /* D, Ep */
} work;

static work work_of(const lev_config *c, int rank) {
  lev_layout l = lev_layout_of(c, (int)c->parallel.ranks, rank);
  int groups = l.ranks / l.context, group = rank / l.context;
  int64_t sequences = lev_ceil_div(lev_max_i64(0, c->train.global_batch - group), groups);
  return (work){.c = c,
                .m = lev_model_of(c),
                .tokens = (double)sequences * (double)attn_shard_tokens(c->train.context, l.context, rank % l.context),
                .sequences = (double)sequences,
                .forwards = c->train.global_batch > groups ? 2 : 1,
                .reruns = c->memory.sco_keep_attention ? 0 : 1,
                .context = l.context,
                .experts = l.experts};
}

/* Pairs of a query and a key that it sees, in one sequence. */
static double pairs(int64_t tokens, int64_t window) {
  double s = (double)tokens, w = window > 0 && window < tokens ? (double)window : s;
  return w * (w + 1) / 2 + (s - w) * w;
}

static double attention_flops(const work *w) {
  double sum = 0;
  for (int l = 0; l < (int)w->m.layers; ++l) sum += pairs(w->c->train.context, lev_layer_window(&w->m, l));
  return sum * w->sequences / w->context * (double)(w->m.heads * w->m.head_dim) * (4 * (w->forwards + w->reruns) + 10);
}

static double projection_flops(const work *w) {
  const lev_model *m = &w->m;
  double h = (double)m->hidden, d = (double)m->head_dim, moe = 0;
  double qkv = h * d * (double)(m->heads + 2 * m->kv_heads), o = h * d * (double)m->heads;
  for (int l = 0; l < (int)m->layers; ++l) moe += lev_layer_is_moe(m, l);
  double router = (double)m->experts * h * moe, layers = (double)m->layers;
  double again = layers * ((1 + w->reruns) * qkv + o) + router;
  return w->tokens * (2 * again + (2 * w->forwards + 4) * (layers * (qkv + o) + router));
}

static double swiglu(const work *w, double rows, double width) {
  return rows * (double)w->m.hidden * width * (6 * w->forwards + 4 + 12);
}

static double dense_flops(const work *w) {
  double sum = 0;
  for (int l = 0; l < (int)w->m.layers; ++l) sum += swiglu(w, w->tokens, (double)lev_layer_ffn(&w->m, l));
  return sum;
}

static double expert_flops(const work *w) {
  double sum = 0;
  for (int l = 0; l < (int)w->m.layers; ++l)
    if (lev_layer_is_moe(&w->m, l)) sum += swiglu(w, w->tokens * (double)w->m.top_k, (double)w->m.inter);
  return sum;
}

static double vocabulary_flops(const work *w) {
  double products = w->c->schedule.ring_dtp == LEV_SCHEDULE_PLAIN || w->c->memory.rdtp_one_pass ? 3 : 4;
  return products * 2 * w->tokens * (double)w->m.hidden * (double)w->m.vocab;
}

/* Tensors read or written by operations that are no products, in one layer. */
static const struct row_passes {
  double hidden; /* [T, H] */
  double qk;     /* [T, (A + G) d] */
  double rows;   /* [T k, H] */
  double packed; /* likewise, where experts are spread over ranks and rows are packed by expert */
  double inter;  /* [T k, I] */
} row_passes[] = {
    /* two norms 4, residual 2, sum of the routes' results 2; norm and rotary embedding of q, k 2; gather of routed rows
     * 2 and reading them back 1; packed to a tile and back 4; activation 3 */
    {8, 2, 3, 4, 3},
    /* backward: the same again but the results' sum, 6, norms backward 2 x 4, sum of dX 2; q, k again 2 and backward 3;
     * rows X and dY 4, dX back 1; packed 6; activation backward 2 + 1 read, 2 + 1 written */
    {16, 5, 5, 6, 6}};

static double row_bytes(const work *w) {
  const lev_model *m = &w->m;
  double b = (double)lev_dtype_bytes(m->dtype), sum = 0;
  for (int l = 0; l < (int)m->layers; ++l)
    for (int back = 0; back < 2; ++back) {
      const struct row_passes *p = &row_passes[back];
      double times = back ? 1 : w->forwards, routed = lev_layer_is_moe(m, l) ? (double)m->top_k : 0;
      double extra =
          back ? w->reruns * (2 * (double)m->hidden + 2 * (double)((m->heads + m->kv_heads) * m->head_dim)) : 0;
      sum += times * (p->hidden * (double)m->hidden + p->qk * (double)((m->heads + m->kv_heads) * m->head_dim) +
                      routed * (double)m->hidden * (p->rows + (w->experts > 1 ? p->packed : 0)) +
                      routed * (double)m->inter * p->inter + extra);
    }
  return sum * w->tokens * b;
}

/* ---- what the dry run records ---- */

static bool ends_with(const char *text, const char *end) {
  size_t n = strlen(text), m = strlen(end);
  return n >= m && strcmp(text + n - m, end) == 0;
}

/* Copies between card and host and collectives, from the first batch to the batch of the evaluation that follows the
 * step, which ends with the norm of the gradients or with the optimizer. One micro-batch stands for those alike. */
static void count_events(const lev_trace *trace, int64_t micro_batches, lev_cost *cost) {
  bool step = false, optimizer = false, gradients = false;
  double times = 1;
  for (int64_t i = 0; i < lev_trace_count(trace); ++i) {
    const lev_trace_event *e = lev_trace_at(trace, i);
    const char *name = lev_trace_name(trace, e->name);
    double bytes = times * (double)e->bytes;
    if (e->kind == LEV_EV_PHASE) {
      bool batch = strcmp(name, "batch") == 0;
      if (batch && gradients) return;
      if (batch) times = e->bytes == LEV_MICRO_ALIKE ? (double)lev_max_i64(1, micro_batches - 2) : 1;
      step |= batch;
      gradients |= strcmp(name, "grad_norm") == 0;
      if (gradients) times = 1;
      optimizer |= strncmp(name, "optimizer.", 10) == 0;
    } else if (step && e->kind == LEV_EV_COLL) {
      cost[LEV_COST_COLLECTIVES].amount += bytes;
    } else if (step && e->kind == LEV_EV_COPY && ends_with(name, ".out")) {
      cost[optimizer ? LEV_COST_UPDATE_OUT : LEV_COST_OUT].amount += bytes;
    } else if (step && e->kind == LEV_EV_COPY && ends_with(name, ".in")) {
      cost[optimizer ? LEV_COST_UPDATE_IN : LEV_COST_IN].amount += bytes;
    }
  }
}

/* Bytes of the update on the card: gradients read for the norm; then AdamW's three state arrays read and written (in
 * its placement's share), Muon's two likewise, gradients read and weights written. */
static void count_update(const lev_config *c, const lev_rank_plan *plan, lev_cost *cost) {
  bool plain = c->schedule.offload_adamw == LEV_SCHEDULE_PLAIN;
  double a = (double)lev_dtype_bytes(lev_dtype_arith((lev_dtype)c->model.dtype));
  double b = (double)lev_dtype_bytes((lev_dtype)c->model.dtype);
  double host = plain || c->memory.oadamw_placement == OADAMW_GPU ? 0
                : c->memory.oadamw_placement == OADAMW_CPU        ? 1
                                                                  : c->memory.oadamw_cpu_share;
  double adamw = (double)plan->adamw_elements, muon = (double)plan->muon_elements;
  double g = (double)lev_dtype_bytes(plan->grad_dtype);
  cost[LEV_COST_UPDATE].amount = (adamw + muon) * g + (1 - host) * adamw * (6 * a + g + b) + muon * (4 * a + g + b);
  cost[LEV_COST_MUON].amount = plan->muon_flops;
  cost[LEV_COST_HOST_UPDATE].amount = host * adamw;
}

/* ---- what the ceilings may not be of ---- */

/* Why attention does not go through cuDNN on a GPU; NULL where it does. */
static const char *own_kernels(const lev_config *c, const work *w, int64_t max_tokens) {
  attn_config a = lev_attention_config(c, &w->m, max_tokens);
  bool ring = w->context > 1;
  if (attn_least_workspace(w->context, &a) > 0) return ring && w->m.window > 0 ? "a sliding window on a ring" : NULL;
  if (c->run.attention == ATTN_TILED) return "run.attention = tiled";
  return ring && c->data.packed ? "packed documents on a ring" : "its length or head size";
}

static void note(lev_estimate *e, const char *form, ...) __attribute__((format(printf, 2, 3)));
static void note(lev_estimate *e, const char *form, ...) {
  va_list args;
  va_start(args, form);
  vsnprintf(e->note[e->n_notes++], LEV_ESTIMATE_NOTE, form, args);
  va_end(args);
}

static void take_notes(const lev_config *c, const work *w, int64_t max_tokens, lev_estimate *e) {
  bool gpu = lev_run_backend(c) == LEV_BACKEND_CUDA, bf16 = w->m.dtype == LEV_BF16;
  const char *own = gpu && bf16 ? own_kernels(c, w, max_tokens) : NULL;
  if (!gpu) note(e, "planned for the CPU, to which ceilings of a GPU do not apply (--run.device=cuda plans for GPUs)");
  if (!bf16)
    note(e, "computes in %s, attention through our own kernels: ceilings of bf16 and cuDNN are out of reach",
         lev_dtype_name(w->m.dtype));
  if (own) note(e, "attention goes through our own kernels (%s): a ceiling of cuDNN is out of reach", own);
  if (c->data.packed)
    note(e, "attention is counted over whole sequences; packed documents take less, by lengths no plan knows");
  if (gpu && c->parallel.ranks > LEV_HOST_GPUS)
    note(e, "%lld ranks are more than a host of %d GPUs has: between hosts a link ceiling of NVLink is out of reach",
         (long long)c->parallel.ranks, LEV_HOST_GPUS);
}

/* ---- the estimate ---- */

static const struct {
  const char *name, *unit, *ceiling;
  size_t rate;
} costs[LEV_COSTS] = {
    [LEV_COST_ATTENTION] = {"attention", "FLOP", "attention", offsetof(lev_ceilings, attention)},
    [LEV_COST_PROJECTIONS] = {"projections", "FLOP", "matmul", offsetof(lev_ceilings, matmul)},
    [LEV_COST_DENSE] = {"dense", "FLOP", "matmul", offsetof(lev_ceilings, matmul)},
    [LEV_COST_EXPERTS] = {"experts", "FLOP", "matmul", offsetof(lev_ceilings, matmul)},
    [LEV_COST_VOCABULARY] = {"vocabulary", "FLOP", "matmul", offsetof(lev_ceilings, matmul)},
    [LEV_COST_ROWS] = {"rows", "B", "copy", offsetof(lev_ceilings, copy)},
    [LEV_COST_OUT] = {"offload.out", "B", "d2h", offsetof(lev_ceilings, d2h)},
    [LEV_COST_IN] = {"offload.in", "B", "h2d", offsetof(lev_ceilings, h2d)},
    [LEV_COST_COLLECTIVES] = {"collectives", "B", "link", offsetof(lev_ceilings, link)},
    [LEV_COST_UPDATE] = {"optimizer.update", "B", "copy", offsetof(lev_ceilings, copy)},
    [LEV_COST_MUON] = {"optimizer.muon", "FLOP", "matmul", offsetof(lev_ceilings, matmul)},
    [LEV_COST_HOST_UPDATE] = {"optimizer.host", "parameters", "adamw_cpu", offsetof(lev_ceilings, adamw_cpu)},
    [LEV_COST_UPDATE_OUT] = {"optimizer.out", "B", "d2h", offsetof(lev_ceilings, d2h)},
    [LEV_COST_UPDATE_IN] = {"optimizer.in", "B", "h2d", offsetof(lev_ceilings, h2d)}};

static lev_cost_id largest(const lev_estimate *e, int first, int last) {
  int best = first;
  for (int i = first; i <= last; ++i)
    if (e->cost[i].seconds > e->cost[best].seconds) best = i;
  return (lev_cost_id)best;
}

static void sum_up(const lev_config *c, const lev_ceilings *ceilings, lev_estimate *e) {
  for (int i = 0; i < LEV_COSTS; ++i) {
    lev_cost *k = &e->cost[i];
    double rate;
    memcpy(&rate, (const unsigned char *)ceilings + costs[i].rate, sizeof rate);
    k->name = costs[i].name, k->unit = costs[i].unit, k->ceiling = costs[i].ceiling;
    k->seconds = k->amount / rate;
  }
  for (int i = LEV_COST_ATTENTION; i <= LEV_COST_ROWS; ++i) e->compute += e->cost[i].seconds;
  lev_cost_id beside = largest(e, LEV_COST_OUT, LEV_COST_COLLECTIVES);
  lev_cost_id update = largest(e, LEV_COST_HOST_UPDATE, LEV_COST_UPDATE_IN);
  double card = e->cost[LEV_COST_UPDATE].seconds + e->cost[LEV_COST_MUON].seconds;
  e->forward_backward = fmax(e->compute, e->cost[beside].seconds);
  e->optimizer = fmax(card, e->cost[update].seconds);
  e->step = e->forward_backward + e->optimizer;
  if (e->optimizer > e->forward_backward)
    e->bound = card < e->cost[update].seconds ? update : largest(e, LEV_COST_UPDATE, LEV_COST_MUON);
  else
    e->bound = e->compute < e->cost[beside].seconds ? beside : largest(e, LEV_COST_ATTENTION, LEV_COST_ROWS);
  double tokens = (double)c->train.context * (double)c->train.global_batch;
  e->tokens_per_second = e->step > 0 ? tokens / e->step : 0;
}

lev_status lev_estimate_step(const lev_config *config, int rank, const lev_ceilings *ceilings, lev_estimate *out) {
  lev_trace *trace = NULL;
  lev_rank_plan plan;
  *out = (lev_estimate){.rank = rank};
  LEV_TRY(lev_trace_create(TRACE_EVENTS, &trace));
  lev_status st = lev_plan_rank(config, rank, trace, &plan);
  if (st == LEV_OK && lev_trace_dropped(trace) > 0)
    st = lev_fail(LEV_ERR_CAPACITY, "a step of more than %d events: too many chunks or tiles to count its copies",
                  TRACE_EVENTS);
  if (st == LEV_OK) {
    work w = work_of(config, rank);
    out->cost[LEV_COST_ATTENTION].amount = attention_flops(&w);
    out->cost[LEV_COST_PROJECTIONS].amount = projection_flops(&w);
    out->cost[LEV_COST_DENSE].amount = dense_flops(&w);
    out->cost[LEV_COST_EXPERTS].amount = expert_flops(&w);
    out->cost[LEV_COST_VOCABULARY].amount = vocabulary_flops(&w);
    out->cost[LEV_COST_ROWS].amount = row_bytes(&w);
    count_events(trace, plan.micro_batches, out->cost);
    count_update(config, &plan, out->cost);
    sum_up(config, ceilings, out);
    take_notes(config, &w, plan.max_tokens, out);
    lev_rank_plan_free(&plan);
  }
  lev_trace_destroy(trace);
  return st;
}
