/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/train/oracle.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/t.h"
#include "tests/train/tokens.h"

/* One sequence on its way through the model. */
typedef struct sequence {
  const lev_config *c;
  const rig_result *weights;
  int64_t s, h, heads, kv_heads, d, experts, k, inter;
  double *x, *y;           /* [S, H] residual stream, and its norm */
  double *q, *key, *value; /* [S, A d], [S, G d], [S, G d] */
  double *o;               /* [S, A d] */
  double *prob;            /* [layers, E] sums of probabilities */
  oracle_result *out;
} sequence;

__attribute__((format(printf, 2, 3))) static const double *weight(const sequence *q, const char *format, ...) {
  char name[96];
  va_list args;
  va_start(args, format);
  vsnprintf(name, sizeof name, format, args);
  va_end(args);
  for (int i = 0; i < RIG_TENSORS; ++i)
    if (q->weights->weight[i] && strcmp(q->weights->name[i], name) == 0) return q->weights->weight[i];
  T_EXPECT_MSG(false, "the run left no tensor %s", name);
  abort();
}

/* y [rows, out] = x [rows, in] W^T. */
static void linear(const double *x, int64_t rows, int64_t in, const double *w, int64_t out, double *y) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
}

static void rms_norm(const double *x, int64_t rows, int64_t n, const double *w, double eps, double *y) {
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[r * n + i] * x[r * n + i];
    double scale = 1 / sqrt(sum / (double)n + eps);
    for (int64_t i = 0; i < n; ++i) y[r * n + i] = x[r * n + i] * scale * w[i];
  }
}

static void rotate(const sequence *q, double *x, int64_t heads) {
  int64_t half = q->d / 2;
  for (int64_t p = 0; p < q->s; ++p)
    for (int64_t head = 0; head < heads; ++head) {
      double *v = x + (p * heads + head) * q->d;
      for (int64_t i = 0; i < half; ++i) {
        double angle = (double)p * pow(q->c->model.rope_theta, -2.0 * (double)i / (double)q->d);
        double a = v[i], b = v[i + half];
        v[i] = a * cos(angle) - b * sin(angle);
        v[i + half] = b * cos(angle) + a * sin(angle);
      }
    }
}

static void attend(const sequence *q) {
  double *score = malloc(sizeof(double) * (size_t)q->s);
  for (int64_t p = 0; p < q->s; ++p)
    for (int64_t head = 0; head < q->heads; ++head) {
      int64_t group = head / (q->heads / q->kv_heads);
      const double *mine = q->q + (p * q->heads + head) * q->d;
      double *o = q->o + (p * q->heads + head) * q->d, most = -INFINITY, sum = 0;
      for (int64_t t = 0; t <= p; ++t) {
        score[t] = 0;
        for (int64_t i = 0; i < q->d; ++i) score[t] += mine[i] * q->key[(t * q->kv_heads + group) * q->d + i];
        score[t] /= sqrt((double)q->d);
        most = fmax(most, score[t]);
      }
      for (int64_t t = 0; t <= p; ++t) sum += score[t] = exp(score[t] - most);
      for (int64_t i = 0; i < q->d; ++i) {
        o[i] = 0;
        for (int64_t t = 0; t <= p; ++t) o[i] += score[t] / sum * q->value[(t * q->kv_heads + group) * q->d + i];
      }
    }
  free(score);
}

static void attention_half(const sequence *q, int l) {
  int64_t a = q->heads * q->d, g = q->kv_heads * q->d;
  double eps = q->c->model.rms_norm_eps, *added = malloc(sizeof(double) * (size_t)(q->s * q->h));
  rms_norm(q->x, q->s, q->h, weight(q, "model.layers.%d.input_layernorm.weight", l), eps, q->y);
  linear(q->y, q->s, q->h, weight(q, "model.layers.%d.self_attn.q_proj.weight", l), a, q->q);
  linear(q->y, q->s, q->h, weight(q, "model.layers.%d.self_attn.k_proj.weight", l), g, q->key);
  linear(q->y, q->s, q->h, weight(q, "model.layers.%d.self_attn.v_proj.weight", l), g, q->value);
  rms_norm(q->q, q->s, a, weight(q, "model.layers.%d.self_attn.q_norm.weight", l), eps, q->q);
  rms_norm(q->key, q->s, g, weight(q, "model.layers.%d.self_attn.k_norm.weight", l), eps, q->key);
  rotate(q, q->q, q->heads);
  rotate(q, q->key, q->kv_heads);
  attend(q);
  linear(q->o, q->s, a, weight(q, "model.layers.%d.self_attn.o_proj.weight", l), q->h, added);
  for (int64_t i = 0; i < q->s * q->h; ++i) q->x[i] += added[i];
  free(added);
}

/* x += p * expert(y) for one token. */
static void add_expert(const sequence *q, int l, int64_t e, double p, const double *y, double *x) {
  double gate[256], up[256], down[256];
  if (!T_EXPECT(q->inter <= 256 && q->h <= 256)) return;
  linear(y, 1, q->h, weight(q, "model.layers.%d.mlp.experts.%lld.gate_proj.weight", l, (long long)e), q->inter, gate);
  linear(y, 1, q->h, weight(q, "model.layers.%d.mlp.experts.%lld.up_proj.weight", l, (long long)e), q->inter, up);
  for (int64_t i = 0; i < q->inter; ++i) up[i] *= gate[i] / (1 + exp(-gate[i]));
  linear(up, 1, q->inter, weight(q, "model.layers.%d.mlp.experts.%lld.down_proj.weight", l, (long long)e), q->h, down);
  for (int64_t i = 0; i < q->h; ++i) x[i] += p * down[i];
}

/* Routes one token. */
static void route(const sequence *q, int l, const double *y, double *x) {
  double logit[ORACLE_EXPERTS], sum = 0, most = -INFINITY, last = INFINITY;
  bool chosen[ORACLE_EXPERTS] = {false};
  linear(y, 1, q->h, weight(q, "model.layers.%d.mlp.gate.weight", l), q->experts, logit);
  for (int64_t e = 0; e < q->experts; ++e) most = fmax(most, logit[e]);
  for (int64_t e = 0; e < q->experts; ++e) sum += exp(logit[e] - most);
  for (int64_t e = 0; e < q->experts; ++e) q->prob[l * q->experts + e] += exp(logit[e] - most) / sum;
  for (int64_t j = 0; j < q->k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < q->experts; ++e)
      if (!chosen[e] && (best < 0 || logit[e] > logit[best])) best = e;
    chosen[best] = true, last = logit[best];
    ++q->out->load[l][best];
    add_expert(q, l, best, exp(logit[best] - most) / sum, y, x);
  }
  for (int64_t e = 0; e < q->experts; ++e)
    if (!chosen[e]) q->out->gap = fmin(q->out->gap, last - logit[e]);
  q->out->z_loss += (most + log(sum)) * (most + log(sum));
}

static void expert_half(const sequence *q, int l) {
  rms_norm(q->x, q->s, q->h, weight(q, "model.layers.%d.post_attention_layernorm.weight", l), q->c->model.rms_norm_eps,
           q->y);
  for (int64_t p = 0; p < q->s; ++p) route(q, l, q->y + p * q->h, q->x + p * q->h);
}

/* Sum of the negative log-likelihoods of the sequence. */
static double sequence_loss(const sequence *q, const int32_t *tokens, const int32_t *labels) {
  const double *embed = weight(q, "model.embed_tokens.weight"), *head = weight(q, "lm_head.weight");
  int64_t v = q->c->model.vocab_size;
  double total = 0, *logit = malloc(sizeof(double) * (size_t)v);
  for (int64_t p = 0; p < q->s; ++p)
    for (int64_t i = 0; i < q->h; ++i) q->x[p * q->h + i] = embed[tokens[p] * q->h + i];
  for (int l = 0; l < (int)q->c->model.num_hidden_layers; ++l) {
    attention_half(q, l);
    expert_half(q, l);
  }
  rms_norm(q->x, q->s, q->h, weight(q, "model.norm.weight"), q->c->model.rms_norm_eps, q->y);
  for (int64_t p = 0; p < q->s; ++p) {
    double most = -INFINITY, sum = 0;
    linear(q->y + p * q->h, 1, q->h, head, v, logit);
    for (int64_t i = 0; i < v; ++i) most = fmax(most, logit[i]);
    for (int64_t i = 0; i < v; ++i) sum += exp(logit[i] - most);
    total += most + log(sum) - logit[labels[p]];
  }
  free(logit);
  return total;
}

static void finish(const sequence *q, int64_t sequences) {
  oracle_result *out = q->out;
  double tokens = (double)(q->s * sequences), layers = (double)q->c->model.num_hidden_layers;
  double mean = tokens * (double)q->k / (double)q->experts;
  out->loss /= tokens, out->z_loss /= tokens * layers;
  for (int l = 0; l < (int)layers; ++l)
    for (int64_t e = 0; e < q->experts; ++e) {
      double load = (double)out->load[l][e];
      out->balance +=
          (double)q->experts * load / (tokens * (double)q->k) * q->prob[l * q->experts + e] / tokens / layers;
      out->max_vio = fmax(out->max_vio, load / mean - 1);
    }
}

void oracle_run(const lev_config *c, const rig_result *weights, int64_t first_sample, oracle_result *out) {
  int64_t s = c->train.context, h = c->model.hidden_size, q_cols = c->model.num_attention_heads * c->model.head_dim;
  sequence q = {.c = c, .weights = weights, .s = s, .h = h, .out = out};
  q.heads = c->model.num_attention_heads, q.kv_heads = c->model.num_key_value_heads, q.d = c->model.head_dim;
  q.experts = c->model.num_experts, q.k = c->model.num_experts_per_tok, q.inter = c->model.moe_intermediate_size;
  memset(out, 0, sizeof *out);
  out->gap = INFINITY;
  T_REQUIRE(q.experts <= ORACLE_EXPERTS && c->model.num_hidden_layers <= ORACLE_LAYERS);
  double *room = calloc((size_t)(s * (2 * h + 4 * q_cols) + ORACLE_LAYERS * ORACLE_EXPERTS), sizeof(double));
  int32_t *ids = calloc((size_t)(2 * s), sizeof *ids);
  q.x = room, q.y = q.x + s * h, q.q = q.y + s * h, q.key = q.q + s * q_cols, q.value = q.key + s * q_cols;
  q.o = q.value + s * q_cols, q.prob = q.o + s * q_cols;
  lev_loader *loader = tokens_loader(c);
  for (int64_t i = 0; i < c->train.global_batch; ++i) {
    T_EXPECT_OK(lev_loader_fetch(loader, first_sample + i, ids, ids + s));
    out->loss += sequence_loss(&q, ids, ids + s);
  }
  finish(&q, c->train.global_batch);
  lev_loader_close(loader);
  free(room);
  free(ids);
}
