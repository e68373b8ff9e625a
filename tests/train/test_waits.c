/* SPDX-License-Identifier: Apache-2.0 */
/* Mutation test of the composed step: the event waits of two training steps and an evaluation are dropped one at a
 * time, on all ranks, and the result must be wrong.
 *
 * To make that certain the operation that was waited for begins late. A wait that the other waits and the host's own
 * waiting imply (by vector clocks over the list of all waits) orders nothing and cannot be missed. Of the others, each
 * place in the code must have one that is: not every time it is passed there is something that could be overtaken. A
 * mutated run may go astray in any way, so each has a process of its own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/train/state.h"
#include "tests/t.h"
#include "tests/train/rig.h"
#include "tests/train/tokens.h"

#ifdef LEV_PLAIN_MALLOC
enum { EVERY = 7 }; /* sanitizers are an order slower: one place of seven */
#else
enum { EVERY = 1 };
#endif

enum { RANKS = 2, STEPS = 2, WAITS = 2048, STREAMS = 32, KINDS = 3, CHANCES = 12, TRIES = 12 };

typedef struct scene {
  lev_config config;
  lev_comm_hub *hub;
  lev_fault fault[RANKS];
  lev_status status[RANKS];
  uint64_t digest[RANKS]; /* of results, weights and the optimizers' state */
} scene;

static void settings(lev_config *c, int kind) {
  rig_config(c);
  c->model.dtype = LEV_F32, c->model.num_hidden_layers = 4;
  c->parallel.ranks = RANKS;
  c->train.context = 13, c->train.global_batch = 1;
  c->memory.llep_chunk_rows = 12, c->memory.oadamw_bucket = 900, c->memory.oadamw_slots = 2;
  c->memory.rdtp_tile_rows = c->memory.rdtp_tile_cols = 64, c->memory.embed_tile_tokens = 3;
  c->memory.sco_keep_attention = kind == 0;
  c->debug.poison = true;
  if (kind == 1) c->optimizer.name = LEV_OPTIMIZER_MUON, c->memory.muon_slots = 2, c->memory.muon_bucket_bytes = 24000;
  if (kind == 2) c->train.global_batch = 2, c->memory.oadamw_placement = OADAMW_SPLIT, c->memory.rdtp_branch = 2;
}

/* ---- one run ---- */

static uint64_t mix(uint64_t h, const void *data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) h = (h ^ ((const unsigned char *)data)[i]) * 1099511628211u;
  return h;
}

static lev_status mix_state(lev_rank *rank, uint64_t *h) {
  lev_state_piece *pieces;
  int n;
  LEV_TRY(lev_state_pieces(rank, &pieces, &n));
  for (int i = 0; i < n; ++i)
    *h = mix(*h, pieces[i].data, (size_t)(pieces[i].rows * pieces[i].cols) * lev_dtype_bytes(pieces[i].dtype));
  lev_free(pieces);
  return LEV_OK;
}

static lev_status work(scene *s, int index, lev_rank *rank, lev_loader *loader) {
  lev_step_result result;
  double nll;
  int64_t valid;
  uint64_t h = 14695981039346656037u;
  LEV_TRY(lev_rank_init_weights(rank));
  s->fault[index].n_waits = 0;
  memset(s->fault[index].seen, 0, sizeof s->fault[index].seen);
  for (int step = 1; step <= STEPS; ++step) {
    LEV_TRY(lev_train_step(rank, loader, step, step * s->config.train.global_batch, 0.01, &result));
    h = mix(h, &result.loss, sizeof result.loss);
    h = mix(h, &result.grad_norm, sizeof result.grad_norm);
  }
  LEV_TRY(mix_state(rank, &h));
  LEV_TRY(lev_evaluate(rank, loader, 0, 2, &nll, &valid));
  h = mix(h, &nll, sizeof nll);
  s->digest[index] = mix(h, lev_weights_shard(rank->weights),
                         (size_t)rank->params->shard_elements * lev_dtype_bytes(rank->params->model.dtype));
  return LEV_OK;
}

static void rank_main(int index, void *ctx) {
  scene *s = ctx;
  lev_rank_plan plan;
  lev_device *device;
  lev_comm *world;
  lev_ledger *ledger;
  lev_rank *rank = NULL;
  T_REQUIRE_OK(lev_plan_rank(&s->config, index, NULL, &plan));
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU, .fault = &s->fault[index]}, &device));
  T_REQUIRE_OK(lev_ledger_create(NULL, &ledger));
  T_REQUIRE_OK(lev_comm_local_join(s->hub, index, device, &world));
  lev_rank_options options = {
      .config = &s->config, .device = device, .world = world, .ledger = ledger, .slabs = &plan.slabs};
  lev_loader *loader = tokens_loader(&s->config);
  s->status[index] = lev_rank_create(&options, &rank);
  if (s->status[index] == LEV_OK) s->status[index] = work(s, index, rank, loader);
  if (s->status[index] != LEV_OK) lev_comm_abort(world);
  lev_loader_close(loader);
  lev_rank_destroy(rank);
  lev_comm_destroy(world);
  lev_device_close(device);
  lev_ledger_destroy(ledger);
  lev_rank_plan_free(&plan);
}

/* The digest of the ranks' results; 0 after a failure. */
static uint64_t play(scene *s) {
  uint64_t h = 0;
  if (!T_EXPECT_OK(lev_comm_hub_create(RANKS, 10, &s->hub))) return 0;
  t_ranks(RANKS, rank_main, s);
  lev_comm_hub_destroy(s->hub);
  for (int r = 0; r < RANKS; ++r) {
    if (s->status[r] != LEV_OK) return 0;
    h = mix(h, &s->digest[r], sizeof s->digest[r]);
  }
  return h;
}

/* ---- which waits order something ---- */

/* What is known to be done before a point: operations of every stream. */
typedef struct vclock {
  uint64_t done[STREAMS];
} vclock;

typedef struct history {
  uint64_t at[WAITS]; /* operations of the stream that came with news, in order */
  vclock known[WAITS];
  int n;
} history;

static void join(vclock *into, const vclock *more) {
  for (int i = 0; i < STREAMS; ++i)
    if (more->done[i] > into->done[i]) into->done[i] = more->done[i];
}

/* What operation `number` of a stream knows. */
static vclock known_at(const history *h, uint64_t number) {
  vclock none = {{0}};
  int i = h->n;
  while (i > 0 && h->at[i - 1] > number) --i;
  return i > 0 ? h->known[i - 1] : none;
}

/* Fills implied[i] for each wait of a stream, in the order in which lev_stream_wait counts; returns how many. */
static int find_implied(const lev_fault *f, bool implied[WAITS], lev_fault_wait waits[WAITS]) {
  history *all = calloc(STREAMS, sizeof *all);
  vclock host = {{0}};
  int n = 0;
  for (int64_t i = 0; i < f->n_waits && all; ++i) {
    lev_fault_wait w = f->waits[i];
    if (!T_EXPECT(w.waiter < STREAMS && w.on < STREAMS)) break;
    vclock news = known_at(&all[w.on], w.number);
    news.done[w.on] = w.number > news.done[w.on] ? w.number : news.done[w.on];
    if (w.waiter == 0) {
      join(&host, &news);
      continue;
    }
    history *h = &all[w.waiter];
    vclock mine = known_at(h, w.at);
    join(&mine, &host);
    implied[n] = mine.done[w.on] >= w.number, waits[n++] = w;
    join(&mine, &news);
    h->at[h->n] = w.at, h->known[h->n++] = mine;
  }
  free(all);
  return n;
}

/* ---- mutations ---- */

static scene the_scene;
static lev_fault_wait list[RANKS][WAITS];

static void open_scene(scene *s, int kind) {
  memset(s, 0, sizeof *s);
  settings(&s->config, kind);
}

/* Child of the test below; fails where the mutation shows. */
T_CHILD(waits_mutation, value) {
  static const int64_t delays[] = {2000000, 10000000, 40000000, 200000000};
  int kind, drop, on, tries;
  unsigned long long number, want;
  T_REQUIRE(sscanf(value, "%d:%d:%d:%llu:%llx:%d", &kind, &drop, &on, &number, &want, &tries) == 6);
  for (int try = 0; try < tries && !t_failed(); ++try) {
    open_scene(&the_scene, kind);
    for (int r = 0; r < RANKS; ++r) {
      lev_fault *f = &the_scene.fault[r];
      f->fail_at[LEV_FAULT_DROP_WAIT] = drop;
      f->slow_stream = on, f->slow_ns = delays[try / 3];
      uint64_t earlier = (uint64_t)(try % 3 == 0 ? 0 : try % 3 == 1 ? 1 : 4);
      f->slow_operation = number > earlier ? number - earlier : 1;
    }
    T_EXPECT(play(&the_scene) == want);
  }
}

/* Exit status of a process that runs one mutation. */
static int run_child(int kind, int drop, const lev_fault_wait *w, uint64_t want, int tries) {
  char value[96];
  snprintf(value, sizeof value, "%d:%d:%d:%llu:%llx:%d", kind, drop, w->on, (unsigned long long)w->number,
           (unsigned long long)want, tries);
  return t_child("waits_mutation", value);
}

/* The waits of a kind of run, in the order in which lev_stream_wait counts. */
static lev_fault_wait waits[WAITS];
static bool implied[WAITS];
static int n_waits;

static uint64_t record(int kind) {
  open_scene(&the_scene, kind);
  for (int r = 0; r < RANKS; ++r) the_scene.fault[r].waits = list[r], the_scene.fault[r].max_waits = WAITS;
  uint64_t digest = play(&the_scene);
  T_EXPECT(digest != 0);
  n_waits = find_implied(&the_scene.fault[0], implied, waits);
  T_EXPECT_EQ_I64(n_waits, the_scene.fault[0].seen[LEV_FAULT_DROP_WAIT]);
  return digest;
}

/* Drops the waits of one place until the result is wrong. True if so, or if none of them orders anything. */
static bool is_missed(int kind, const void *site, uint64_t want, int *orders) {
  int tried = 0;
  for (int i = 0; i < n_waits && tried < CHANCES; ++i)
    if (waits[i].site == site && !implied[i]) {
      *orders += tried++ == 0;
      if (run_child(kind, i + 1, &waits[i], want, TRIES) != 0) return true;
    }
  return tried == 0;
}

T_TEST(waits_dropped_one_by_one_give_wrong_results) {
  static const void *done[WAITS]; /* places that an earlier kind of run has dealt with */
  int n_done = 0, n_places = 0, orders = 0;
  for (int kind = 0; kind < KINDS; ++kind) {
    uint64_t want = record(kind);
    for (int i = 0, begun = n_done; i < n_waits; ++i) {
      int d = 0;
      while (d < n_done && done[d] != waits[i].site) ++d;
      if (d < n_done || implied[i] || n_places++ % EVERY != 0) continue;
      done[n_done++] = waits[i].site;
      if ((n_done - begun) % 8 == 1) /* being late alone changes nothing */
        T_EXPECT_MSG(run_child(kind, 0, &waits[i], want, 3) == 0, "kind %d: a late operation alone shows", kind);
      T_EXPECT_MSG(is_missed(kind, waits[i].site, want, &orders),
                   "kind %d: wait %d of %d and those of the same place (stream %d, for operation %d of stream %d) are "
                   "not missed",
                   kind, i + 1, n_waits, waits[i].waiter, (int)waits[i].number, waits[i].on);
    }
  }
  T_EXPECT_MSG(n_places > 40 && orders * EVERY + EVERY > 40, "only %d places in the code wait", n_places);
}
