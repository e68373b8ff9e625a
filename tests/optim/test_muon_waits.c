/* SPDX-License-Identifier: Apache-2.0 */
/* Mutation test: every event wait of a step is dropped in turn, and the damage must show: as wrong bits with a stream
 * held up, or, under ThreadSanitizer, as a report of a child process. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/dims.h"
#include "muon/muon_plan.h"
#include "tests/num.h"
#include "tests/optim/muon_rig.h"
#include "tests/t.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#ifndef UNDER_TSAN
#define UNDER_TSAN 0
#endif

enum { ROWS = 4, COLS = UNDER_TSAN ? 100 : 2000, SIZE = ROWS * COLS, N = UNDER_TSAN ? 3 : 5, HELD_STREAMS = 4 };

static int pause_ms = 8; /* longer where the machine is slow */

static void pause_cpu(const void *args) {
  (void)args;
  nanosleep(&(struct timespec){.tv_nsec = pause_ms * 1000000L}, NULL);
}
static const lev_kernel pause_kernel = {"test.pause", pause_cpu, NULL};

/* One step of equal matrices, one per bucket, with wait number `drop` left out (0 = none) and one stream (1
 * compute, 2 in, 3 out) held up at its start. Gives a digest of the state and the number of waits. */
static uint64_t play(int slots, int64_t drop, int held, int64_t *waits) {
  muon_matrix matrices[N];
  for (int i = 0; i < N; ++i) matrices[i] = (muon_matrix){i * SIZE, ROWS, COLS};
  muon_config c = muon_config_default();
  c.matrices = matrices, c.n_matrices = N, c.slots = slots, c.set = MUON_CUBIC, c.steps = 1;
  c.schedule = MUON_BOUNDED;
  muon_rig r;
  uint64_t digest = 14695981039346656037u;
  if (muon_rig_open(&r, &c, N * SIZE, (muon_rig_options){.backend = LEV_BACKEND_CPU, .jitter_seed = (uint64_t)held})) {
    lev_stream *const streams[HELD_STREAMS] = {NULL, r.stream, r.plan->in, r.plan->out};
    T_EXPECT_OK(lev_stream_sync(r.stream));
    muon_rig_grads(&r, 1);
    for (int i = 0; i < N; ++i) { /* what muon_init left first must not pass for what it leaves next */
      void *state[2];
      T_EXPECT_OK(muon_state(r.plan, i, &state[0], &state[1]));
      for (int s = 0; s < 2; ++s) num_poison(state[s], SIZE * sizeof(float));
    }
    r.fault.seen[LEV_FAULT_DROP_WAIT] = 0;
    r.fault.fail_at[LEV_FAULT_DROP_WAIT] = drop;
    int none = 0;
    if (held) T_EXPECT_OK(LEV_LAUNCH(streams[held], &pause_kernel, none));
    /* the state is written right before the step, on its own stream */
    T_EXPECT_OK(muon_init(r.plan, r.params, r.stream));
    lev_blocks blocks;
    T_EXPECT_OK(lev_arena_push(r.arenas[LEV_MEM_DEVICE], &r.stream, 1));
    T_EXPECT_OK(lev_blocks_take(r.arenas, true, muon_walk_step, r.plan, &blocks));
    T_EXPECT_OK(muon_plan_bind(r.plan, MUON_STEP, &blocks));
    muon_step_args args = {r.params, r.grads, 0.1, 1, 1};
    T_EXPECT_OK(muon_step(r.plan, &args, r.stream));
    /* and the slots have another user right after it */
    T_EXPECT_OK(lev_fill(r.stream, blocks.base[LEV_MEM_DEVICE], 0xFF, blocks.bytes[LEV_MEM_DEVICE], "next"));
    T_EXPECT_OK(lev_arena_pop(r.arenas[LEV_MEM_DEVICE]));
    *waits = r.fault.seen[LEV_FAULT_DROP_WAIT];
    for (int s = 1; s < HELD_STREAMS; ++s) T_EXPECT_OK(lev_stream_sync(streams[s]));
    for (int i = 0; i < N; ++i) {
      void *state[2];
      T_EXPECT_OK(muon_state(r.plan, i, &state[0], &state[1]));
      for (int64_t at = 0; at < 2 * SIZE; ++at) {
        uint32_t bits;
        memcpy(&bits, (float *)state[at / SIZE] + at % SIZE, sizeof bits);
        digest = (digest ^ bits) * 1099511628211u;
      }
    }
  }
  muon_rig_close(&r);
  return digest;
}

#if !UNDER_TSAN
T_TEST(muon_dropped_wait_gives_wrong_bits) {
  for (int slots = 1; slots <= 2; ++slots) {
    int64_t waits = 0, ignored;
    uint64_t want = play(slots, 0, 0, &waits);
    for (int held = 1; held < HELD_STREAMS; ++held) T_EXPECT(play(slots, 0, held, &ignored) == want);
    T_EXPECT_EQ_I64(waits, 1 + 2 * N + (N - slots) + 1);
    for (int64_t drop = 1; drop <= waits; ++drop) {
      /* Loads that follow right behind another one are never late here: only ThreadSanitizer sees their waits missing.
       */
      if (slots == 2 && (drop == 5 || drop == 11 || drop == 13)) continue;
      bool caught = false;
      for (pause_ms = 8; pause_ms <= 200 && !caught; pause_ms *= 5)
        for (int held = 0; held < HELD_STREAMS && !caught; ++held) caught = play(slots, drop, held, &ignored) != want;
      pause_ms = 8;
      T_EXPECT_MSG(caught, "%d slots: dropping wait %d of %d went unnoticed", slots, (int)drop, (int)waits);
    }
  }
}
#endif

/* Child of the test below. */
T_CHILD(muon_wait_mutation, value) {
  int slots, drop;
  T_REQUIRE(sscanf(value, "%d:%d", &slots, &drop) == 2);
  int64_t ignored;
  (void)play(slots, drop, 0, &ignored);
}

#if UNDER_TSAN
static int run_child(int slots, int64_t drop) {
  char value[32];
  snprintf(value, sizeof value, "%d:%d", slots, (int)drop);
  return t_child("muon_wait_mutation", value);
}

T_TEST(muon_dropped_wait_is_a_reported_race) {
  int64_t waits = 0;
  (void)play(2, 0, 0, &waits);
  T_EXPECT_MSG(run_child(2, 0) == 0, "a race with all waits in place");
  for (int64_t drop = 1; drop <= waits; ++drop)
    T_EXPECT_MSG(run_child(2, drop) != 0, "dropping wait %d of %d is not reported", (int)drop, (int)waits);
}
#endif
