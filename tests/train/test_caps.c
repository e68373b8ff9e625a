/* SPDX-License-Identifier: Apache-2.0 */
/* Hard caps in the composed step, whatever the routing: no rank sends or receives more rows in a chunk than planned,
 * and every rank's memory peaks at the same bytes, tag by tag. */
#include <stdio.h>
#include <string.h>

#include "tests/t.h"
#include "tests/train/rig.h"
#include "tests/train/skew.h"

typedef struct caps_case {
  const char *name;
  int ranks, context, experts, vocab;
  int64_t top_k, chunk_rows, foreign_slots, batch;
} caps_case;

static const caps_case cases[] = {
    {"owners only", 4, 4, 4, 4, 3, 13, -1, 1},
    {"lending", 4, 4, 4, 4, 3, 40, 0, 1},
    {"one pick", 4, 4, 4, 4, 1, 5, -1, 1},
    {"one pick, lending", 5, 5, 5, 5, 1, 9, 2, 1},
    {"two expert groups, accumulation", 8, 4, 4, 4, 3, 12, 0, 3},
};

static void settings(const caps_case *k, lev_config *c) {
  rig_config(c);
  c->parallel.ranks = k->ranks, c->parallel.context = k->context;
  c->parallel.experts = k->experts, c->parallel.vocab = k->vocab;
  c->model.num_experts_per_tok = k->top_k, c->train.global_batch = k->batch;
  c->memory.llep_chunk_rows = k->chunk_rows, c->memory.llep_foreign_slots = k->foreign_slots;
  c->memory.llep_min_rows = 0;
  c->debug.poison = true;
}

/* Rows one expert group routes in a micro-batch. */
static int64_t routes(const caps_case *k, const lev_config *c) {
  return c->train.context * (k->experts / k->context) * k->top_k;
}

static void expect_caps(const caps_case *k, const lev_config *c, skew how, const rig_result *r) {
  T_EXPECT_MSG(r->plan_exact, "%s, %s: measured bytes are not the planned ones", k->name, skew_name(how));
  T_EXPECT_MSG(r->chunk_cap == k->chunk_rows && r->chunk_rows > 0 && r->chunk_rows <= k->chunk_rows,
               "%s, %s: %d rows in a chunk, %d planned, %d asked", k->name, skew_name(how), (int)r->chunk_rows,
               (int)r->chunk_cap, (int)k->chunk_rows);
  bool all = how == SKEW_SAME || (how == SKEW_ONE && k->top_k == 1);
  int64_t one = routes(k, c) / k->top_k;
  if (all) T_EXPECT_MSG(r->route_rows_max == one, "%s, %s: not adversarial", k->name, skew_name(how));
  /* the owner of the chosen experts alone takes all rows of the group */
  if (all && k->foreign_slots < 0)
    T_EXPECT_MSG(r->chunks >= (routes(k, c) + k->chunk_rows - 1) / k->chunk_rows, "%s, %s: %d chunks", k->name,
                 skew_name(how), (int)r->chunks);
}

T_TEST(caps_hold_and_peaks_are_the_same_for_every_routing) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    const caps_case *k = &cases[i];
    lev_config c;
    rig_result first;
    settings(k, &c);
    for (int how = 0; how < SKEWS; ++how) {
      rig_result next, *r = how == 0 ? &first : &next;
      rig_run(
          &(rig_options){.config = &c, .alter = skew_alter((skew)how), .update = true, .steps = 2, .evaluate = true},
          r);
      expect_caps(k, &c, (skew)how, r);
      if (how == 0) continue;
      for (int rank = 0; rank < k->ranks; ++rank)
        T_EXPECT_MSG(strcmp(next.peaks[rank], first.peaks[rank]) == 0, "%s, rank %d: peaks of %s routing\n%sof %s\n%s",
                     k->name, rank, skew_name((skew)how), next.peaks[rank], skew_name(SKEW_RANDOM), first.peaks[rank]);
      rig_free(&next);
    }
    rig_free(&first);
  }
}
