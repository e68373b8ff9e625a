/* SPDX-License-Identifier: Apache-2.0 */
/* First values of the weights, through the staging buffer, and of the optimizers' state. */
#include "harness/train/rank.h"

/* Fills staging with elements [from, from + n) of a piece and copies them to the shard. */
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

lev_status lev_rank_init_weights(lev_rank *rank) {
  const lev_params *p = rank->params;
  int64_t run = (int64_t)(lev_rank_staging_bytes() / lev_dtype_bytes(p->model.dtype));
  for (int i = 0; i < p->n_pieces; ++i) {
    int64_t n = p->pieces[i].rows * p->tensors[p->pieces[i].tensor].cols;
    for (int64_t from = 0; from < n; from += run)
      LEV_TRY(init_run(rank, &p->pieces[i], from, lev_min_i64(run, n - from)));
  }
  LEV_TRY(oadamw_init(rank->adamw, lev_weights_shard(rank->weights), rank->compute));
  if (rank->route_bias)
    LEV_TRY(lev_fill(rank->compute, rank->route_bias, 0, lev_rank_route_bias_bytes(&p->model), "router.bias"));
  if (rank->muon) LEV_TRY(muon_init(rank->muon, lev_weights_shard(rank->weights), rank->compute));
  LEV_TRY(lev_weights_updated(rank->weights, rank->compute));
  return lev_stream_sync(rank->compute);
}
