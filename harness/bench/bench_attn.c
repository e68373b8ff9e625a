/* SPDX-License-Identifier: Apache-2.0 */
/* Area attn: causal attention over one sequence on one rank, forward and backward, bf16, heads of 128. */
#include <math.h>
#include <string.h>

#include "common/comm.h"
#include "common/dims.h"
#include "common/hostmem.h"
#include "harness/bench/bench.h"
#include "harness/model/attention_ops.h"

#define DIM 128

typedef struct shape {
  int64_t tokens, heads, kv_heads;
  attn_route route;
  int64_t row; /* scalars between tokens of q, k, v and their gradients; 0 = dense */
  bool packed; /* the sequence is documents */
} shape;

/* Lengths of documents, unlike and beside every tile, in parts of 32,768. */
static const int64_t documents[] = {12000, 7001, 5003, 3000, 2500, 1500, 1000, 764};

/* A case's arrays in device memory, and its plan. */
typedef struct job {
  int64_t n, heads, kv_heads, q_row, k_row;
  lev_comm_hub *hub;
  lev_comm *comm;
  attn_plan *plan;
  lev_blocks blocks;
  void *q, *k, *v, *d_o, *o, *dq, *dk, *dv; /* bf16 [n, heads, DIM]; d_o and o dense */
  void *lse;                                /* f32 [n, heads] */
  int64_t *begin;                           /* host [n]: first token of each one's document */
  void *begin_on_device;                    /* NULL: one document */
  double squares;                           /* sum of the squares of the documents' lengths */
} job;

static lev_status forward(bench *b, job *j) {
  LEV_TRY(attn_plan_bind(j->plan, ATTN_FORWARD, &j->blocks));
  attn_forward_args a = {.seq_len = j->n, .q = j->q, .k = j->k, .v = j->v, .o = j->o, .lse = j->lse};
  a.q_stride = j->q_row, a.k_stride = a.v_stride = j->k_row;
  a.doc_begin = j->begin_on_device, a.doc_begin_host = j->begin;
  return attn_forward(j->plan, &a, bench_stream(b));
}

static lev_status both(bench *b, void *ctx) {
  job *j = ctx;
  LEV_TRY(forward(b, j));
  LEV_TRY(attn_plan_bind(j->plan, ATTN_BACKWARD, &j->blocks));
  attn_backward_args a = {.seq_len = j->n,
                          .q = j->q,
                          .k = j->k,
                          .v = j->v,
                          .o = j->o,
                          .lse = j->lse,
                          .d_o = j->d_o,
                          .dq = j->dq,
                          .dk = j->dk,
                          .dv = j->dv};
  a.q_stride = a.dq_stride = j->q_row, a.k_stride = a.v_stride = a.dk_stride = a.dv_stride = j->k_row;
  a.doc_begin = j->begin_on_device, a.doc_begin_host = j->begin;
  return attn_backward(j->plan, &a, bench_stream(b));
}

/* ---- comparison: sampled rows of one key head and one of its query heads, in f64 ----
 *
 * o and dq of a row from q, k, v and d_o alone. dk and dv of a row take the o and log-sum-exp of every later row, whose
 * own sums would be as much work as the whole: these are the ones that forward left, of which samples were compared. */

enum { SAMPLES = 5 };

typedef struct head {
  int64_t n;
  const int64_t *begin;
  const lev_bf16 *kv, *qo, *o; /* (k, v), (q, d_o) and (o, o), row by row */
  const float *lse;
  double *p; /* [n] */
  double scale;
} head;

static double dot(const lev_bf16 *a, const lev_bf16 *b) {
  double sum = 0;
  for (int x = 0; x < DIM; ++x) sum += (double)lev_bf16_to_f32(a[x]) * (double)lev_bf16_to_f32(b[x]);
  return sum;
}
static void add(double *to, double factor, const lev_bf16 *row) {
  for (int x = 0; x < DIM; ++x) to[x] += factor * (double)lev_bf16_to_f32(row[x]);
}
static const lev_bf16 *row_of(const lev_bf16 *pairs, int64_t i, int second) {
  return pairs + (2 * i + second) * DIM;
}

/* o, dq and log-sum-exp of row i. */
static void query_row(const head *h, int64_t i, double *o, double *dq, double *lse) {
  const lev_bf16 *q = row_of(h->qo, i, 0), *d_o = row_of(h->qo, i, 1);
  double most = -INFINITY, sum = 0, delta = 0;
  const int64_t first = h->begin[i];
  for (int64_t t = first; t <= i; ++t) most = fmax(most, h->p[t] = h->scale * dot(q, row_of(h->kv, t, 0)));
  for (int64_t t = first; t <= i; ++t) sum += h->p[t] = exp(h->p[t] - most);
  for (int x = 0; x < DIM; ++x) o[x] = dq[x] = 0;
  for (int64_t t = first; t <= i; ++t) add(o, h->p[t] /= sum, row_of(h->kv, t, 1));
  for (int x = 0; x < DIM; ++x) delta += o[x] * (double)lev_bf16_to_f32(d_o[x]);
  for (int64_t t = first; t <= i; ++t)
    add(dq, h->scale * h->p[t] * (dot(d_o, row_of(h->kv, t, 1)) - delta), row_of(h->kv, t, 0));
  *lse = most + log(sum);
}

/* Adds one query head's share to dk and dv of row t. */
static void key_row(const head *h, int64_t t, double *dk, double *dv) {
  const lev_bf16 *k = row_of(h->kv, t, 0), *v = row_of(h->kv, t, 1);
  for (int64_t i = t; i < h->n && h->begin[i] == h->begin[t]; ++i) {
    const lev_bf16 *q = row_of(h->qo, i, 0), *d_o = row_of(h->qo, i, 1);
    double p = exp(h->scale * dot(q, k) - (double)h->lse[i]);
    add(dv, p, d_o);
    add(dk, h->scale * p * (dot(d_o, v) - dot(d_o, row_of(h->o, i, 0))), q);
  }
}

/* Host copy of the rows of head `at` of two arrays, side by side. `*out` stays NULL on failure. */
static lev_status fetch(bench *b, const job *j, const attn_rows *rows, int64_t at, void *chunk, lev_bf16 **out) {
  size_t bytes = (size_t)(2 * j->n * DIM) * sizeof(lev_bf16);
  attn_chunk_args pack = {.dtype = LEV_BF16, .tokens = j->n, .head_dim = DIM, .head_begin = at, .head_end = at + 1};
  pack.rows = *rows, pack.rows.head = DIM;
  pack.chunk = (char *)chunk - (size_t)at * bytes; /* only head `at` is written */
  LEV_TRY(LEV_LAUNCH(bench_stream(b), &attn_pack_kernel, pack));
  *out = lev_calloc(LEV_HEAP_REPORT, 1, bytes);
  if (!*out) return LEV_ERR_NOMEM;
  lev_status st = lev_copy(bench_stream(b), *out, chunk, bytes, "bench.read");
  lev_status waited = lev_stream_sync(bench_stream(b));
  return st != LEV_OK ? st : waited;
}

typedef struct samples {
  double got[4][SAMPLES * DIM], want[4][SAMPLES * DIM]; /* o, dq, dk, dv */
  double lse[SAMPLES], want_lse[SAMPLES];
} samples;

/* Not among the first (of a document), where a query sees so few keys that dq and dk are differences of much larger
 * terms. */
static int64_t sample_row(const job *j, int s) {
  return s == SAMPLES - 1 ? j->n - 1 : j->n * (s + 1) / SAMPLES + 3 * s;
}

/* Query head g * R + r, where R = heads / kv_heads: its rows of o and dq, and its share of dk and dv. */
static lev_status compare_head(bench *b, const job *j, int64_t g, int64_t r, const head *h, samples *s) {
  int64_t at = g * (j->heads / j->kv_heads) + r;
  for (int i = 0; i < SAMPLES; ++i) {
    int64_t row = sample_row(j, i), q_at = row * j->q_row + at * DIM, k_at = row * j->k_row + g * DIM;
    key_row(h, row, s->want[2] + i * DIM, s->want[3] + i * DIM);
    if (r > 0) continue;
    query_row(h, row, s->want[0] + i * DIM, s->want[1] + i * DIM, &s->want_lse[i]);
    s->lse[i] = (double)h->lse[row];
    LEV_TRY(bench_read(b, LEV_BF16, j->o, (row * j->heads + at) * DIM, DIM, s->got[0] + i * DIM));
    LEV_TRY(bench_read(b, LEV_BF16, j->dq, q_at, DIM, s->got[1] + i * DIM));
    LEV_TRY(bench_read(b, LEV_BF16, j->dk, k_at, DIM, s->got[2] + i * DIM));
    LEV_TRY(bench_read(b, LEV_BF16, j->dv, k_at, DIM, s->got[3] + i * DIM));
  }
  return LEV_OK;
}

static lev_status compare_with(bench *b, const job *j, int64_t g, head *h, float *lse, float *all, void *chunk,
                               samples *s) {
  int64_t per_key = j->heads / j->kv_heads;
  lev_bf16 *kv = NULL;
  const int64_t dense = j->heads * DIM;
  const attn_rows keys = {j->k, j->v, j->k_row, j->k_row, 0}, queries = {j->q, j->d_o, j->q_row, dense, 0};
  const attn_rows outputs = {j->o, j->o, dense, dense, 0};
  lev_status st = fetch(b, j, &keys, g, chunk, &kv);
  h->kv = kv;
  for (int64_t r = 0; r < per_key && st == LEV_OK; ++r) {
    lev_bf16 *qo = NULL, *o = NULL;
    int64_t at = g * per_key + r;
    st = fetch(b, j, &queries, at, chunk, &qo);
    if (st == LEV_OK) st = fetch(b, j, &outputs, at, chunk, &o);
    for (int64_t i = 0; i < j->n; ++i) lse[i] = all[i * j->heads + at];
    h->qo = qo, h->o = o;
    if (st == LEV_OK) st = compare_head(b, j, g, r, h, s);
    lev_free(qo), lev_free(o);
  }
  lev_free(kv);
  return st;
}

/* The sampled rows of one key head and its queries. */
static lev_status close_to(bench *b, const job *j, const samples *s) {
  static const char *const names[4] = {"o", "dq", "dk", "dv"};
  LEV_TRY(bench_close(b, "lse", s->lse, s->want_lse, SAMPLES, 1e-5));
  for (int i = 0; i < 4 * SAMPLES; ++i) { /* row by row: their sizes differ */
    char name[40];
    snprintf(name, sizeof name, "%s of row %lld", names[i / SAMPLES], (long long)sample_row(j, i % SAMPLES));
    int64_t at = (int64_t)(i % SAMPLES) * DIM;
    LEV_TRY(bench_close(b, name, s->got[i / SAMPLES] + at, s->want[i / SAMPLES] + at, DIM, 8e-3));
  }
  return LEV_OK;
}

static lev_status compare(bench *b, const job *j) {
  size_t rows = (size_t)(j->n * j->heads);
  void *chunk;
  LEV_TRY(bench_alloc(b, (size_t)(2 * j->n * DIM) * sizeof(lev_bf16), &chunk));
  samples *s = lev_calloc(LEV_HEAP_REPORT, 1, sizeof *s);
  float *lse = lev_calloc(LEV_HEAP_REPORT, (size_t)j->n, sizeof *lse);
  float *all = lev_calloc(LEV_HEAP_REPORT, rows, sizeof *all);
  double *p = lev_calloc(LEV_HEAP_REPORT, (size_t)j->n, sizeof *p);
  head h = {.n = j->n, .begin = j->begin, .lse = lse, .p = p, .scale = 1 / sqrt((double)DIM)};
  lev_status st =
      s && lse && all && p ? lev_copy(bench_stream(b), all, j->lse, rows * sizeof *all, "bench.read") : LEV_ERR_NOMEM;
  if (st == LEV_OK) st = lev_stream_sync(bench_stream(b));
  /* The first and the last key head: blocks of heads begin and end there. */
  for (int64_t g = 0; g < j->kv_heads && st == LEV_OK; g += lev_max_i64(1, j->kv_heads - 1)) {
    memset(s, 0, sizeof *s);
    st = compare_with(b, j, g, &h, lse, all, chunk, s);
    if (st == LEV_OK) st = close_to(b, j, s);
  }
  lev_free(s), lev_free(lse), lev_free(all), lev_free(p);
  return st;
}

/* ---- cases ---- */

/* Where documents begin: on the host, and where there are several on the device too. */
static lev_status open_documents(bench *b, const shape *s, job *j) {
  const size_t count = s->packed ? sizeof documents / sizeof *documents : 1;
  int64_t before = 0, row = 0;
  j->begin = lev_calloc(LEV_HEAP_REPORT, (size_t)j->n, sizeof *j->begin);
  if (!j->begin) return LEV_ERR_NOMEM;
  for (size_t i = 0; i < count; ++i) {
    int64_t first = row, end = i + 1 < count ? (before += documents[i]) * j->n / s->tokens : j->n;
    for (; row < end; ++row) j->begin[row] = first;
    j->squares += (double)(end - first) * (double)(end - first);
  }
  if (!s->packed) return LEV_OK;
  size_t bytes = (size_t)j->n * sizeof *j->begin;
  LEV_TRY(bench_alloc(b, bytes, &j->begin_on_device));
  LEV_TRY(lev_copy(bench_stream(b), j->begin_on_device, j->begin, bytes, "bench.documents"));
  return lev_stream_sync(bench_stream(b));
}

static lev_status open_job(bench *b, const shape *s, job *j) {
  *j = (job){.n = bench_size(b, s->tokens, s->packed ? 1200 : 300), .heads = s->heads, .kv_heads = s->kv_heads};
  attn_config c;
  attn_config_init(&c);
  c.max_tokens = j->n, c.heads = j->heads, c.kv_heads = j->kv_heads, c.head_dim = DIM, c.dtype = LEV_BF16;
  c.packed = s->packed;
  c.route = bench_backend(b) == LEV_BACKEND_CUDA ? s->route : ATTN_AUTO;
  LEV_TRY(open_documents(b, s, j));
  LEV_TRY(lev_comm_hub_create(1, 60, &j->hub));
  LEV_TRY(lev_comm_local_join(j->hub, 0, bench_device(b), &j->comm));
  LEV_TRY(attn_plan_create(bench_device(b), j->comm, &c, &j->plan));
  j->q_row = s->row ? s->row : j->heads * DIM, j->k_row = s->row ? s->row : j->kv_heads * DIM;
  size_t heads = (size_t)(j->n * j->q_row) * 2, keys = (size_t)(j->n * j->k_row) * 2;
  size_t dense = (size_t)(j->n * j->heads * DIM) * 2;
  struct {
    void **at;
    size_t bytes;
  } arrays[] = {{&j->q, heads},   {&j->k, keys},  {&j->v, keys},
                {&j->d_o, dense}, {&j->o, dense}, {&j->dq, heads},
                {&j->dk, keys},   {&j->dv, keys}, {&j->lse, (size_t)(j->n * j->heads) * sizeof(float)}};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) {
    LEV_TRY(bench_alloc(b, arrays[i].bytes, arrays[i].at));
    if (i < 4) LEV_TRY(bench_random(b, LEV_BF16, *arrays[i].at, (int64_t)(arrays[i].bytes / 2), i == 0 ? 2 : 1));
  }
  for (attn_phase phase = ATTN_FORWARD; phase < ATTN_PHASES; ++phase) {
    size_t bytes[LEV_MEM_CLASSES];
    attn_plan_bytes(j->plan, phase, bytes);
    j->blocks.bytes[LEV_MEM_DEVICE] = lev_max_size(j->blocks.bytes[LEV_MEM_DEVICE], bytes[LEV_MEM_DEVICE]);
  }
  return bench_alloc(b, j->blocks.bytes[LEV_MEM_DEVICE], &j->blocks.base[LEV_MEM_DEVICE]);
}

static lev_status measure(bench *b, job *j) {
  LEV_TRY(both(b, j));
  LEV_TRY(compare(b, j));
  double n = (double)j->n, heads = (double)j->heads, rows = 4 * heads + 4 * (double)j->kv_heads;
  bench_work work = {.once = both, .ctx = j, .held_bytes = j->blocks.bytes[LEV_MEM_DEVICE]};
  work.bytes = n * DIM * 2 * rows;                 /* read q, k, v, d_o, write o, dq, dk, dv */
  work.flops = 3.5 * 2 * j->squares * heads * DIM; /* causal: 2 products forward and 5 backward, half of each */
  work.kernels = attn_plan_through_library(j->plan) ? attn_plan_kernels(j->plan) : "own kernels";
  return bench_measure(b, &work, BENCH_TFLOPS);
}

static lev_status run(bench *b, const void *arg) {
  job j;
  lev_status st = open_job(b, arg, &j);
  if (st == LEV_OK) st = measure(b, &j);
  lev_status waited = lev_stream_sync(bench_stream(b));
  attn_destroy(j.plan);
  lev_comm_destroy(j.comm);
  lev_comm_hub_destroy(j.hub);
  lev_free(j.begin);
  return st != LEV_OK ? st : waited;
}

#define SHAPE(name, tokens, heads, kv_heads, route) static const shape name = {tokens, heads, kv_heads, route, 0, false}
SHAPE(s32k, 32768, 16, 16, ATTN_AUTO);
SHAPE(s32k_8, 32768, 8, 8, ATTN_AUTO);
SHAPE(s32k_gqa, 32768, 16, 4, ATTN_AUTO);
SHAPE(s32k_tiled, 32768, 16, 16, ATTN_TILED);
SHAPE(s128k, 131072, 16, 16, ATTN_AUTO);
SHAPE(s128k_8, 131072, 8, 8, ATTN_AUTO);
SHAPE(s128k_gqa, 131072, 16, 4, ATTN_AUTO);
SHAPE(s1m, 1048576, 8, 8, ATTN_AUTO);
SHAPE(s1m_gqa, 1048576, 8, 2, ATTN_AUTO);
SHAPE(s1m_16, 1048576, 16, 16, ATTN_AUTO);
/* What a block of one head of 16 meets: rows so far apart that their places pass 2^32 scalars. */
static const shape s2m = {2097152, 1, 1, ATTN_AUTO, 16 * DIM, false};
static const shape s32k_packed = {32768, 16, 16, ATTN_AUTO, 0, true};
static const shape s32k_packed_gqa = {32768, 16, 4, ATTN_AUTO, 0, true};
static const shape s32k_packed_tiled = {32768, 16, 16, ATTN_TILED, 0, true};

static const bench_case cases[] = {
    {"attn.fwdbwd.32768", "32,768 tokens, 16 heads", run, &s32k, false},
    {"attn.fwdbwd.32768.h8", "32,768 tokens, 8 heads", run, &s32k_8, false},
    {"attn.fwdbwd.32768.gqa", "32,768 tokens, 16 query heads, 4 key heads", run, &s32k_gqa, false},
    {"attn.fwdbwd.32768.tiled", "32,768 tokens, 16 heads, our own kernels", run, &s32k_tiled, false},
    {"attn.fwdbwd.32768.packed", "8 documents of 764 to 12,000 tokens, 16 heads", run, &s32k_packed, false},
    {"attn.fwdbwd.32768.packed.gqa", "the same, 4 key heads", run, &s32k_packed_gqa, false},
    {"attn.fwdbwd.32768.packed.tiled", "the same, 16 key heads, our own kernels", run, &s32k_packed_tiled, false},
    {"attn.fwdbwd.131072", "131,072 tokens, 16 heads", run, &s128k, true},
    {"attn.fwdbwd.131072.h8", "131,072 tokens, 8 heads", run, &s128k_8, true},
    {"attn.fwdbwd.131072.gqa", "131,072 tokens, 16 query heads, 4 key heads", run, &s128k_gqa, true},
    {"attn.fwdbwd.1048576", "1,048,576 tokens, 8 heads", run, &s1m, true},
    {"attn.fwdbwd.1048576.gqa", "1,048,576 tokens, 8 query heads, 2 key heads", run, &s1m_gqa, true},
    {"attn.fwdbwd.1048576.h16", "1,048,576 tokens, 16 heads", run, &s1m_16, true},
    {"attn.fwdbwd.2097152.one", "2,097,152 tokens, one head in rows of 16", run, &s2m, true},
};

const bench_area bench_area_attn = {.name = "attn", .cases = cases, .n_cases = sizeof cases / sizeof *cases};
