/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives that go wrong: ranks that disagree, abort, time out, fail on the way. Nobody may hang. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "common/comm.h"
#include "tests/backend.h"
#include "tests/t.h"

#define RANKS 4

typedef struct world {
  lev_comm_hub *hub;
  bool immediate;
  int variant;
  lev_fault faults[RANKS];
  void (*body)(struct world *w, int rank, lev_comm *comm, lev_stream *stream);
  pthread_mutex_t lock;
  char details[RANKS][1024];
} world;

static void rank_main(int rank, void *p) {
  world *w = p;
  lev_device *device;
  lev_comm *comm;
  lev_stream *stream;
  lev_device_config config = {
      .backend = t_backend(), .index = t_gpu(rank), .immediate = w->immediate, .fault = &w->faults[rank]};
  T_REQUIRE_OK(lev_device_open(&config, &device));
  T_REQUIRE_OK(lev_comm_local_join(w->hub, rank, device, &comm));
  T_REQUIRE_OK(lev_stream_create(device, "comm", &stream));
  w->body(w, rank, comm, stream);
  lev_stream_destroy(stream);
  lev_comm_destroy(comm);
  lev_device_close(device);
}

static void run_world(world *w, double timeout) {
  T_REQUIRE_OK(lev_comm_hub_create(RANKS, timeout, &w->hub));
  t_ranks(RANKS, rank_main, w);
  lev_comm_hub_destroy(w->hub);
}

/* ---- disagreement ---- */

#define MISMATCHES 12
static void body_mismatch(world *w, int rank, lev_comm *comm, lev_stream *stream) {
  double *x = t_alloc(128 * sizeof *x), *y = x + 64;
  memset(x, 0, 128 * sizeof *x);
  bool odd = rank == 2;
  int64_t counts[RANKS] = {1, 2, 3, odd ? 5 : 4}, rows[RANKS] = {1, 1, 1, 1}, other[RANKS] = {1, odd ? 2 : 1, 1, 1};
  lev_comm_part part = {x, y, odd ? 16 : 8}, plain = {x, y, 8};
  lev_comm_move to = {3, true, x, 8}, from = {2, false, y, 16};
  lev_status st = LEV_OK;
  switch (w->variant) {
  case 0:
    st = odd ? lev_comm_barrier(comm, stream) : lev_comm_all_reduce(comm, stream, x, 1, LEV_F64, LEV_SUM);
    break;
  case 1:
    st = lev_comm_all_gather(comm, stream, x, y, counts, LEV_F64);
    break;
  case 2:
    st = lev_comm_all_reduce(comm, stream, x, odd ? 2 : 1, LEV_F64, LEV_SUM);
    break;
  case 3:
    st = lev_comm_all_reduce(comm, stream, x, 1, odd ? LEV_F32 : LEV_F64, LEV_SUM);
    break;
  case 4:
    st = lev_comm_all_reduce(comm, stream, x, 1, LEV_F64, odd ? LEV_MAX : LEV_SUM);
    break;
  case 5:
    st = lev_comm_broadcast(comm, stream, x, 8, odd ? 1 : 0);
    break;
  case 6:
    st = lev_comm_broadcast(comm, stream, x, odd ? 16 : 8, 0);
    break;
  case 7:
    st = lev_comm_all_to_all(comm, stream, &part, 1, rows, rows);
    break;
  case 8:
    st = lev_comm_all_to_all(comm, stream, &plain, 1, other, rows);
    break;
  case 9:
    st = lev_comm_ring_shift(comm, stream, x, odd ? 16 : 8, y, 8);
    break;
  case 10: /* 2 sends to 3 fewer bytes than that one expects */
    st = lev_comm_exchange(comm, stream, rank == 2 ? &to : rank == 3 ? &from : NULL, rank >= 2);
    break;
  case 11: /* 2 sends to 3, who expects nothing */
    st = lev_comm_exchange(comm, stream, odd ? &to : NULL, odd);
    break;
  }
  T_EXPECT_OK(w->immediate ? LEV_OK : st);
  T_EXPECT_STATUS(lev_stream_sync(stream), LEV_ERR_COMM);
  T_EXPECT_MSG(strstr(lev_detail(), "rank 2") != NULL, "variant %d: \"%s\" does not name rank 2", w->variant,
               lev_detail());
  memcpy(w->details[rank], lev_detail(), sizeof w->details[rank]);
  /* The error sticks, and the world is over. */
  T_EXPECT_OK(lev_comm_barrier(comm, stream));
  T_EXPECT_STATUS(lev_stream_sync(stream), LEV_ERR_COMM);
  T_EXPECT_STATUS(lev_comm_agree(comm, LEV_OK), LEV_ERR_ABORTED);
  t_free(x);
}

T_TEST(runtime_comm_mismatch) {
  for (int variant = 0; variant < MISMATCHES; ++variant)
    for (int immediate = 0; immediate < 2; ++immediate) {
      world w = {.body = body_mismatch, .variant = variant, .immediate = immediate};
      run_world(&w, 30);
      for (int r = 1; r < RANKS; ++r)
        T_EXPECT_MSG(strcmp(w.details[0], w.details[r]) == 0, "rank 0 says \"%s\", rank %d says \"%s\"", w.details[0],
                     r, w.details[r]);
    }
}

/* A rank whose call failed locally is one call ahead of the others: the next one shows it. */
static void body_injected(world *w, int rank, lev_comm *comm, lev_stream *stream) {
  double *x = t_alloc(8 * sizeof *x);
  memset(x, 0, 8 * sizeof *x);
  for (int i = 1; i <= 3; ++i) {
    lev_status st = lev_comm_all_reduce(comm, stream, x, 1, LEV_F64, LEV_SUM);
    bool hit = rank == 1 && i == 2;
    T_EXPECT_STATUS(st, hit ? LEV_ERR_COMM : LEV_OK);
    if (hit && w->variant == 0) {
      lev_comm_abort(comm);
      lev_comm_abort(comm);
      (void)!lev_stream_sync(stream);
      t_free(x);
      return;
    }
  }
  lev_status st = lev_stream_sync(stream);
  if (w->variant == 0)
    T_EXPECT_STATUS(st, LEV_ERR_ABORTED);
  else
    T_EXPECT_STATUS(st, LEV_ERR_COMM);
  T_EXPECT_MSG(strstr(lev_detail(), "rank 1") != NULL, "\"%s\" does not name rank 1", lev_detail());
  t_free(x);
}

T_TEST(runtime_comm_failed_call) {
  for (int variant = 0; variant < 2; ++variant) {
    world w = {.body = body_injected, .variant = variant};
    w.faults[1].fail_at[LEV_FAULT_COLLECTIVE] = 2;
    run_world(&w, 30);
  }
}

/* ---- abort ---- */

static void body_abort(world *w, int rank, lev_comm *comm, lev_stream *stream) {
  lev_comm *half;
  T_REQUIRE_OK(lev_comm_subset(comm, rank % 2, 2, RANKS / 2, &half));
  double start = t_now();
  if (rank == 3) {
    t_sleep_ms(50);
    lev_comm_abort(half);
    lev_comm_destroy(half);
    return;
  }
  lev_status st = LEV_OK, want = LEV_ERR_ABORTED;
  lev_comm *made = NULL;
  double *x = t_alloc(sizeof *x);
  *x = 1;
  /* Waiters of every kind: of the whole world, of a group with the failing rank, of a group whose other member waits
   * elsewhere. */
  if (rank == 0 && w->variant == 0) st = lev_comm_agree(comm, LEV_OK);
  if (rank == 0 && w->variant == 1) st = lev_comm_split(comm, 0, 0, &made);
  if (rank == 0 && w->variant == 2) st = lev_comm_subset(comm, 0, 1, 2, &made);
  if (rank == 1) {
    T_EXPECT_OK(lev_comm_all_reduce(half, stream, x, 1, LEV_F64, LEV_SUM));
    st = lev_stream_sync(stream);
  }
  if (rank == 2) {
    T_EXPECT_OK(lev_comm_barrier(half, stream));
    st = lev_stream_sync(stream);
  }
  T_EXPECT_STATUS(st, want);
  T_EXPECT_MSG(strstr(lev_detail(), "rank 3") != NULL, "\"%s\" does not name rank 3", lev_detail());
  T_EXPECT(made == NULL);
  T_EXPECT(t_now() - start < 20);
  t_free(x);
  lev_comm_destroy(half);
}

T_TEST(runtime_comm_abort_wakes_all) {
  for (int variant = 0; variant < 3; ++variant) {
    world w = {.body = body_abort, .variant = variant};
    run_world(&w, 30);
  }
}

/* The error of a collective passes to streams that wait for it, and a collective that is skipped for it aborts the
 * world. */
static void body_spread(world *w, int rank, lev_comm *comm, lev_stream *stream) {
  (void)w;
  lev_device *device = lev_comm_device(comm);
  lev_stream *later;
  lev_event *event;
  lev_comm *again;
  T_REQUIRE_OK(lev_stream_create(device, "later", &later));
  T_REQUIRE_OK(lev_event_create(device, &event));
  T_REQUIRE_OK(lev_comm_subset(comm, 0, 1, RANKS, &again));
  double *x = t_alloc(2 * sizeof *x), *y = x + 1;
  *x = 1, *y = 7;
  T_EXPECT_OK(lev_comm_broadcast(comm, stream, x, 8, rank == 1));
  T_EXPECT_OK(lev_event_record(event, stream));
  T_EXPECT_OK(lev_stream_wait(later, event));
  T_EXPECT_OK(lev_copy(later, y, x, 8, "skipped"));
  T_EXPECT_OK(lev_comm_barrier(again, later));
  T_EXPECT_STATUS(lev_event_sync(event), LEV_ERR_COMM);
  T_EXPECT_STATUS(lev_stream_sync(later), LEV_ERR_COMM);
  T_EXPECT(*y == 7);
  t_free(x);
  lev_comm_destroy(again);
}

T_TEST(runtime_comm_error_spreads) {
  world w = {.body = body_spread};
  run_world(&w, 30);
}

/* ---- deadline ---- */

static void body_timeout(world *w, int rank, lev_comm *comm, lev_stream *stream) {
  if (rank == 1 || rank == 2) { /* never comes */
    t_sleep_ms(600);
    return;
  }
  lev_status st;
  if (w->variant == 0) {
    T_EXPECT_OK(lev_comm_barrier(comm, stream));
    st = lev_stream_sync(stream);
  } else {
    st = lev_comm_agree(comm, LEV_OK);
  }
  T_EXPECT_MSG(st == LEV_ERR_TIMEOUT || st == LEV_ERR_ABORTED, "got \"%s\"", lev_status_text(st));
  T_EXPECT_MSG(strstr(lev_detail(), "1, 2") != NULL, "\"%s\" does not name the missing ranks", lev_detail());
  pthread_mutex_lock(&w->lock);
  if (st == LEV_ERR_TIMEOUT) ++w->variant, w->variant += 100;
  pthread_mutex_unlock(&w->lock);
}

T_TEST(runtime_comm_timeout) {
  for (int variant = 0; variant < 2; ++variant) {
    world w = {.body = body_timeout, .variant = variant, .lock = PTHREAD_MUTEX_INITIALIZER};
    run_world(&w, 0.2);
    T_EXPECT_MSG(w.variant > 100, "nobody saw the deadline");
  }
}

/* ---- joining ---- */

static void body_join(world *w, int rank, lev_comm *comm, lev_stream *stream) {
  (void)stream;
  lev_comm *twice = NULL;
  T_EXPECT_STATUS(lev_comm_local_join(w->hub, rank, lev_comm_device(comm), &twice), LEV_ERR_MISUSE);
  T_EXPECT_STATUS(lev_comm_local_join(w->hub, RANKS, lev_comm_device(comm), &twice), LEV_ERR_ARG);
  lev_device *dry;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_DRY}, &dry));
  T_EXPECT_STATUS(lev_comm_local_join(w->hub, rank, dry, &twice), LEV_ERR_UNSUPPORTED);
  lev_device_close(dry);
}

static void half_join(int rank, void *p) {
  lev_comm_hub *hub = p;
  lev_device *device;
  lev_comm *comm;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = t_backend()}, &device));
  if (rank == 2) {
    t_sleep_ms(30);
    lev_comm_hub_abort(hub);
  } else {
    T_EXPECT_STATUS(lev_comm_local_join(hub, rank, device, &comm), LEV_ERR_ABORTED);
    T_EXPECT(comm == NULL);
  }
  lev_device_close(device);
}

T_TEST(runtime_comm_joining) {
  lev_comm_hub *hub = NULL;
  T_EXPECT_STATUS(lev_comm_hub_create(0, 1, &hub), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_hub_create(2, -1, &hub), LEV_ERR_ARG);
  lev_comm_hub_destroy(NULL);
  world w = {.body = body_join};
  run_world(&w, 0);
  T_REQUIRE_OK(lev_comm_hub_create(3, 30, &hub));
  t_ranks(3, half_join, hub);
  lev_comm_hub_destroy(hub);
}

/* Aborts at random moments of a busy exchange: every rank must come back, whatever it was doing. */
static void body_storm(world *w, int rank, lev_comm *comm, lev_stream *stream) {
  double(*buffers)[512] = t_alloc(2 * sizeof *buffers);
  memset(buffers, 0, 2 * sizeof *buffers);
  int64_t counts[RANKS] = {128, 128, 128, 128};
  int stop = w->variant * 7 % 40;
  for (int i = 0; i < 60; ++i) {
    if (rank == w->variant % RANKS && i == stop) {
      lev_comm_abort(comm);
      break;
    }
    T_EXPECT_OK(lev_comm_all_gather(comm, stream, buffers[0], buffers[1], counts, LEV_F64));
    if (i % 5 == 4 && lev_comm_agree(comm, LEV_OK) != LEV_OK) break;
  }
  lev_status st = lev_stream_sync(stream);
  T_EXPECT_MSG(st == LEV_ERR_ABORTED || (rank == w->variant % RANKS && st == LEV_OK), "\"%s\"", lev_status_text(st));
  memset(buffers, 0, 2 * sizeof *buffers); /* ours again: no peer may still read it */
  t_free(buffers);
}

T_TEST(runtime_comm_abort_storm) {
  for (int variant = 0; variant < 40; ++variant) {
    world w = {.body = body_storm, .variant = variant, .immediate = variant % 4 == 3};
    run_world(&w, 30);
  }
}
