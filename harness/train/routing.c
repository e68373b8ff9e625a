/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/train/routing.h"

#include <string.h>

#include "common/hostmem.h"

const lev_routing lev_routings[LEV_ROUTINGS] = {{"balanced", "balanced routing", 0, 0},
                                                {"95/4", "95 % of the tokens on the same 4 experts", 0.95, 4}};

/* Adds the picks of one rank's `tokens` to counts [E]. */
static void count_picks(const lev_routing *routing, int64_t tokens, int64_t experts, int64_t top_k, int64_t *counts) {
  int64_t hot = lev_min_i64(routing->hot, experts - 1);
  int64_t hot_tokens = hot > 0 ? (int64_t)(routing->share * (double)tokens) : 0;
  if (hot_tokens == 0) hot = 0;
  for (int64_t j = 0; j < top_k && hot > 0; ++j) counts[j % hot] += hot_tokens;
  for (int64_t i = hot_tokens; i < tokens; ++i)
    for (int64_t j = 0; j < top_k; ++j) ++counts[hot + (i + j) % (experts - hot)];
}

/* The routing of the dry run. */
static void count_dry(int64_t tokens, int64_t experts, int64_t top_k, int64_t *counts) {
  int64_t routes = tokens * top_k;
  for (int64_t e = 0; e < experts; ++e) counts[e] += routes / experts + (e < routes % experts);
}

/* Rows of the fullest rank of the expert group that begins at rank `first`. */
static int64_t fullest(const int64_t *counts, int64_t experts, int64_t parts) {
  int64_t most = 0;
  for (int64_t d = 0; d < parts; ++d) {
    int64_t rows = 0;
    for (int64_t e = lev_part_begin(experts, parts, d); e < lev_part_begin(experts, parts, d + 1); ++e)
      rows += counts[e];
    most = lev_max_i64(most, rows);
  }
  return most;
}

/* counts [2, E] of ranks with `tokens` tokens: by the profile, and by the dry run. */
static void count_rank(const lev_routing *routing, int64_t tokens, int64_t experts, int64_t top_k, int64_t *counts) {
  memset(counts, 0, sizeof *counts * (size_t)(2 * experts));
  count_picks(routing, tokens, experts, top_k, counts);
  count_dry(tokens, experts, top_k, counts + experts);
}

lev_status lev_routing_rows(const lev_config *c, const lev_routing *routing, int64_t *rows) {
  int ranks = (int)c->parallel.ranks;
  lev_layout l = lev_layout_of(c, ranks, 0);
  int64_t experts = c->model.num_experts, top_k = c->model.num_experts_per_tok;
  if (ranks % l.experts != 0 || ranks % l.context != 0 || experts < 1 || top_k < 1)
    return lev_fail(LEV_ERR_CONFIG, "parallel.experts = %d and parallel.context = %d must divide parallel.ranks = %d",
                    l.experts, l.context, ranks);
  int64_t *counts = lev_calloc(LEV_HEAP_PLAN, (size_t)(4 * experts), sizeof *counts), *sum;
  if (!counts) return LEV_ERR_NOMEM;
  sum = counts + 2 * experts;
  int64_t counted = -1;
  *rows = 0;
  for (int first = 0; first < ranks; first += l.experts) {
    memset(sum, 0, sizeof *sum * (size_t)(2 * experts));
    for (int r = first; r < first + l.experts; ++r) {
      int64_t tokens = attn_shard_tokens(c->train.context, l.context, r % l.context);
      if (tokens != counted) count_rank(routing, tokens, experts, top_k, counts);
      counted = tokens;
      for (int64_t e = 0; e < 2 * experts; ++e) sum[e] += counts[e];
    }
    *rows = lev_max_i64(*rows, fullest(sum, experts, l.experts));
    *rows = lev_max_i64(*rows, fullest(sum + experts, experts, l.experts));
  }
  lev_free(counts);
  return LEV_OK;
}

lev_status lev_make_plain(lev_config *c, const char *module, const lev_routing *routing) {
  struct {
    const char *name;
    int *schedule;
  } const all[] = {{"pipelined_llep", &c->schedule.pipelined_llep},
                   {"ring_dtp", &c->schedule.ring_dtp},
                   {"sco", &c->schedule.sco},
                   {"offload_adamw", &c->schedule.offload_adamw},
                   {"muon", &c->schedule.muon}};
  bool found = false;
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
    if (module && strcmp(module, all[i].name) != 0) continue;
    *all[i].schedule = LEV_SCHEDULE_PLAIN;
    found = true;
  }
  if (!found)
    return lev_fail(LEV_ERR_ARG, "no module \"%s\"; there are pipelined_llep, ring_dtp, sco, offload_adamw, muon",
                    module);
  if (c->schedule.pipelined_llep != LEV_SCHEDULE_PLAIN) return LEV_OK;
  int64_t rows;
  LEV_TRY(lev_routing_rows(c, routing, &rows));
  if (rows > INT32_MAX)
    return lev_fail(LEV_ERR_CONFIG, "plain dispatch under %s: %lld rows on one rank, at most 2^31 - 1 can be numbered",
                    routing->text, (long long)rows);
  c->memory.llep_plain_rows = lev_max_i64(1, rows);
  return LEV_OK;
}
