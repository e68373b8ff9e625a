/* SPDX-License-Identifier: Apache-2.0 */
/* Which tokens a rank works on. A global batch is a run of sequences; micro-batch m gives sequence m * groups + g to
 * context group g, and each rank of the group takes its pieces of it. A group without a sequence left works on zero
 * tokens. */
#include <string.h>

#include "harness/train/rank.h"

static bool is_dry(const lev_rank *rank) {
  return lev_device_backend(rank->device) == LEV_BACKEND_DRY;
}

static int groups_of(const lev_rank *rank) {
  return rank->params->layout.ranks / rank->params->layout.context;
}

/* Sets the shape of micro-batch `micro` of `n_samples` sequences; true if this rank's group has one. */
static bool set_shape(lev_rank *rank, int64_t n_samples, int micro) {
  const lev_layout *l = &rank->params->layout;
  int64_t s = rank->config->train.context;
  for (int r = 0; r < l->ranks; ++r) {
    bool active = (int64_t)micro * groups_of(rank) + r / l->context < n_samples;
    rank->batch.rank_tokens[r] = active ? attn_shard_tokens(s, l->context, r % l->context) : 0;
  }
  bool mine = (int64_t)micro * groups_of(rank) + l->rank / l->context < n_samples;
  rank->batch.seq_len = mine ? s : 0;
  rank->batch.tokens = rank->batch.rank_tokens[l->rank];
  return mine;
}

/* Tokens and labels of this group's whole sequence into rank->sequence, document borders into rank->documents; labels
 * that begin a document are masked where asked. */
static lev_status fetch(lev_rank *rank, lev_loader *loader, int64_t first_sample, int micro) {
  int64_t s = rank->config->train.context;
  int64_t sample =
      first_sample + (int64_t)micro * groups_of(rank) + rank->params->layout.rank / rank->params->layout.context;
  int32_t *labels = rank->sequence + s, *documents = rank->documents;
  LEV_TRY(lev_loader_fetch(loader, sample, rank->sequence, labels));
  if (!documents) return LEV_OK;
  LEV_TRY(lev_loader_documents(loader, sample, documents));
  for (int64_t p = 0; p < s && rank->config->data.mask_eod; ++p)
    if (documents[p + 1] != documents[p]) labels[p] = RDTP_IGNORE;
  return LEV_OK;
}

/* This rank's rows of the sequence, and their positions, into the pinned staging buffer. */
static void take_pieces(lev_rank *rank) {
  const lev_layout *l = &rank->params->layout;
  int64_t s = rank->config->train.context, n = rank->batch.tokens, row = 0;
  int32_t *tokens = rank->batch_pinned, *labels = tokens + rank->max_tokens, *position = labels + rank->max_tokens;
  attn_range piece[2];
  attn_shard_ranges(rank->batch.seq_len, l->context, l->rank % l->context, piece);
  for (int i = 0; i < 2; ++i)
    for (int64_t p = piece[i].begin; p < piece[i].end && row < n; ++p, ++row) {
      tokens[row] = rank->sequence[p];
      labels[row] = rank->sequence[s + p];
      position[row] = (int32_t)p;
      if (!rank->doc_begin) continue;
      rank->doc_begin_pinned[row] = rank->documents[p];
      position[row] = (int32_t)p - rank->documents[p];
    }
}

lev_status lev_batch_load(lev_rank *rank, lev_loader *loader, int64_t first_sample, int64_t n_samples, int micro) {
  bool mine = set_shape(rank, n_samples, micro);
  lev_rank_phase(rank, "batch", micro);
  LEV_TRY(lev_stream_sync(rank->compute)); /* the staging buffer is being read until then */
  if (mine && !is_dry(rank)) {
    LEV_TRY(fetch(rank, loader, first_sample, micro));
    take_pieces(rank);
  }
  int32_t *const device[3] = {rank->tokens, rank->labels, rank->position};
  size_t bytes = sizeof(int32_t) * (size_t)rank->batch.tokens;
  for (int i = 0; i < 3; ++i)
    LEV_TRY(lev_copy(rank->compute, device[i], rank->batch_pinned + i * rank->max_tokens, bytes, "batch.tokens"));
  if (!rank->doc_begin) return LEV_OK;
  bytes = sizeof(int64_t) * (size_t)rank->batch.tokens;
  return lev_copy(rank->compute, rank->doc_begin, rank->doc_begin_pinned, bytes, "batch.documents");
}

lev_status lev_batch_count_valid(lev_rank *rank, lev_loader *loader, int64_t first_sample, int64_t n_samples,
                                 int64_t *valid) {
  const lev_layout *l = &rank->params->layout;
  int64_t s = rank->config->train.context, mine = 0, sum = 0, all[LEV_RANKS_MAX];
  *valid = s * n_samples;
  if (is_dry(rank)) return LEV_OK;
  for (int micro = 0; micro < rank->micro_batches; ++micro) {
    if (!set_shape(rank, n_samples, micro) || l->rank % l->context != 0) continue; /* one rank counts for its group */
    LEV_TRY(fetch(rank, loader, first_sample, micro));
    for (int64_t i = 0; i < s; ++i) mine += rank->sequence[s + i] >= 0;
  }
  LEV_TRY(lev_comm_host_all_gather(rank->world, &mine, all, sizeof mine));
  for (int r = 0; r < l->ranks; ++r) sum += all[r];
  *valid = sum;
  return LEV_OK;
}
