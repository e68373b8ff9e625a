/* SPDX-License-Identifier: Apache-2.0 */
/* First values of the weights, and of the optimizers' state. On the cpu they are made by the kernel alone. On a GPU the
 * kernel makes nearly all of them where they lie and lists the few that the host must work out (init_ops.h). */
#include "harness/model/init_ops.h"
#include "harness/train/rank.h"

#define LIST_BYTES ((size_t)64 << 10) /* of listed elements, read to the staging buffer at once */
#define LIST_CAP ((int64_t)(LIST_BYTES / sizeof(int64_t)) - 1)
#define BATCH ((int64_t)1 << 30) /* elements between two looks at the list */

static lev_init_args init_args(const lev_rank *rank, const lev_piece *piece) {
  const lev_model *m = &rank->params->model;
  const lev_tensor *t = &rank->params->tensors[piece->tensor];
  unsigned char *shard = lev_weights_shard(rank->weights);
  return (lev_init_args){.dtype = m->dtype,
                         .constant = t->kind == LEV_PARAM_NORM,
                         .seed = (uint64_t)rank->config->debug.seed,
                         .tensor = t->id,
                         .std = m->init_std,
                         .margin = LEV_INIT_MARGIN,
                         .first = (t->first_row + piece->row) * t->cols,
                         .n = piece->rows * t->cols,
                         .out = shard + (size_t)piece->shard_offset * lev_dtype_bytes(m->dtype),
                         .place = piece->shard_offset};
}

/* ---- through the host: what no kernel can do ---- */

static lev_status init_run(lev_rank *rank, const lev_piece *piece, int64_t from, int64_t n) {
  const lev_model *m = &rank->params->model;
  const lev_tensor *t = &rank->params->tensors[piece->tensor];
  size_t elem = lev_dtype_bytes(m->dtype);
  int64_t global = (t->first_row + piece->row) * t->cols + from;
  if (lev_device_backend(rank->device) != LEV_BACKEND_DRY)
    for (int64_t i = 0; i < n; ++i)
      lev_dtype_store(m->dtype, rank->staging, i, lev_param_init(m, t, (uint64_t)rank->config->debug.seed, global + i));
  unsigned char *dst = lev_weights_shard(rank->weights);
  LEV_TRY(lev_copy(rank->compute, dst + (size_t)(piece->shard_offset + from) * elem, rank->staging, (size_t)n * elem,
                   "weights.init"));
  return lev_stream_sync(rank->compute);
}

static lev_status init_on_host(lev_rank *rank, const lev_piece *piece) {
  int64_t run = (int64_t)(lev_rank_staging_bytes() / lev_dtype_bytes(rank->params->model.dtype));
  int64_t n = piece->rows * rank->params->tensors[piece->tensor].cols;
  for (int64_t from = 0; from < n; from += run) LEV_TRY(init_run(rank, piece, from, lev_min_i64(run, n - from)));
  return LEV_OK;
}

/* ---- on a GPU ---- */

/* The host's value of the element at `place` of the shard, which lies in one of pieces [first, end). */
static double value_at(const lev_rank *rank, int first, int end, int64_t place) {
  const lev_params *p = rank->params;
  while (end - first > 1) { /* pieces are in shard order */
    int middle = first + (end - first) / 2;
    if (p->pieces[middle].shard_offset <= place)
      first = middle;
    else
      end = middle;
  }
  const lev_piece *piece = &p->pieces[first];
  const lev_tensor *t = &p->tensors[piece->tensor];
  int64_t element = (t->first_row + piece->row) * t->cols + (place - piece->shard_offset);
  return lev_param_init(&p->model, t, (uint64_t)rank->config->debug.seed, element);
}

/* Reads the list of pieces [first, end) and puts the host's values in. */
static lev_status patch_listed(lev_rank *rank, int first, int end, const int64_t *list) {
  const int64_t *listed = rank->staging;
  LEV_TRY(lev_copy(rank->compute, rank->staging, list, LIST_BYTES, "weights.init"));
  LEV_TRY(lev_stream_sync(rank->compute));
  if (lev_device_backend(rank->device) == LEV_BACKEND_DRY) return LEV_OK;
  if (listed[0] > LIST_CAP) { /* never seen: each by itself */
    for (int i = first; i < end; ++i) LEV_TRY(init_on_host(rank, &rank->params->pieces[i]));
    return LEV_OK;
  }
  for (int64_t done = 0; done < listed[0];) {
    lev_init_patch_args a = {.dtype = rank->params->model.dtype, .out = lev_weights_shard(rank->weights)};
    for (; a.n < LEV_INIT_PATCHES && done < listed[0]; ++a.n, ++done) {
      a.place[a.n] = listed[1 + done];
      a.value[a.n] = value_at(rank, first, end, a.place[a.n]);
    }
    LEV_TRY(LEV_LAUNCH(rank->compute, &lev_init_patch_kernel, a));
  }
  return LEV_OK;
}

static lev_status init_on_gpu(lev_rank *rank) {
  const lev_params *p = rank->params;
  size_t room;
  int64_t *list = lev_stream_workspace(rank->compute, &room), elements = 0;
  if (room < LIST_BYTES)
    return lev_fail(LEV_ERR_MISUSE, "%zu bytes of workspace; first values need %zu", room, LIST_BYTES);
  for (int i = 0, first = 0; i < p->n_pieces; ++i) {
    if (elements == 0) LEV_TRY(lev_fill(rank->compute, list, 0, LIST_BYTES, "weights.init"));
    lev_init_args args = init_args(rank, &p->pieces[i]);
    args.list = list, args.cap = LIST_CAP;
    LEV_TRY(LEV_LAUNCH(rank->compute, &lev_init_kernel, args));
    elements += args.n;
    if (elements < BATCH && i + 1 < p->n_pieces) continue;
    LEV_TRY(patch_listed(rank, first, i + 1, list));
    first = i + 1, elements = 0;
  }
  return LEV_OK;
}

static lev_status init_weights(lev_rank *rank) {
  const lev_params *p = rank->params;
  bool dry = lev_device_backend(rank->device) == LEV_BACKEND_DRY;
  bool gpu = (dry ? lev_run_backend(rank->config) : lev_device_backend(rank->device)) == LEV_BACKEND_CUDA;
  if (gpu && p->model.dtype != LEV_F64) return init_on_gpu(rank);
  for (int i = 0; i < p->n_pieces; ++i) {
    if (gpu) {
      LEV_TRY(init_on_host(rank, &p->pieces[i]));
      continue;
    }
    lev_init_args args = init_args(rank, &p->pieces[i]);
    LEV_TRY(LEV_LAUNCH(rank->compute, &lev_init_kernel, args));
  }
  return LEV_OK;
}

lev_status lev_rank_init_weights(lev_rank *rank) {
  const lev_params *p = rank->params;
  LEV_TRY(init_weights(rank));
  LEV_TRY(oadamw_init(rank->adamw, lev_weights_shard(rank->weights), rank->compute));
  if (rank->route_bias)
    LEV_TRY(lev_fill(rank->compute, rank->route_bias, 0, lev_rank_route_bias_bytes(&p->model), "router.bias"));
  if (rank->muon) LEV_TRY(muon_init(rank->muon, lev_weights_shard(rank->weights), rank->compute));
  LEV_TRY(lev_weights_updated(rank->weights, rank->compute));
  return lev_stream_sync(rank->compute);
}
