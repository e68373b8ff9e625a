/* SPDX-License-Identifier: Apache-2.0 */
/* Mutation test: every event wait of forward and backward is dropped in turn, on all ranks at once (a single rank that
 * forgets one is mostly saved by the order its peers keep), and ThreadSanitizer must report a race in a child process.
 */
#include <stdio.h>
#include <stdlib.h>

#include "tests/llep/layer.h"

#if defined(__SANITIZE_THREAD__)
#define LAYER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LAYER_TSAN 1
#endif
#endif
#ifndef LAYER_TSAN
#define LAYER_TSAN 0
#endif

enum { TRIES = 8 };

/* Rank 0 owns the hot expert and lends to both others; at least three chunks, so that buffers are used again. */
static l_case waits_case(int lend) {
  l_case c = l_small(3, 6, 1, 24);
  c.cfg.chunk_rows = 9, c.cfg.foreign_slots = lend ? 1 : -1, c.cfg.min_rows = 0, c.routing = L_ONE_EXPERT;
  return c;
}

static void play(int lend, int call, int wait, uint64_t jitter, int64_t waits[2]) {
  l_case c = waits_case(lend);
  c.drop_call = call, c.drop_wait = wait, c.jitter = jitter;
  l_data d;
  l_make(&c, &d);
  l_run(&d);
  for (int i = 0; i < 2; ++i) waits[i] = d.waits[1][i];
  if (call == 0) {
    for (int r = 0; r < 3; ++r) {
      T_EXPECT_OK(d.status[r]);
      T_EXPECT(d.stats[r].chunks >= 3);
      T_EXPECT_EQ_I64(d.stats[r].moves, lend ? 2 : 0);
    }
    l_check(&d, 1e-11);
  }
  l_free(&d);
}

T_TEST(llep_waits_are_counted) {
  for (int lend = 0; lend < 2; ++lend) {
    int64_t waits[2];
    play(lend, 0, 0, 1, waits);
    T_EXPECT(waits[0] > 6 && waits[1] > 6);
  }
}

/* Child of the test below. */
T_CHILD(llep_wait_mutation, value) {
  int lend, call, wait;
  int64_t ignored[2];
  T_REQUIRE(sscanf(value, "%d:%d:%d", &lend, &call, &wait) == 3);
  for (uint64_t jitter = 0; jitter < (call ? TRIES : 4); ++jitter) play(lend, call, wait, jitter, ignored);
}

#if LAYER_TSAN
static int run_child(int lend, int call, int wait) {
  char value[32];
  snprintf(value, sizeof value, "%d:%d:%d", lend, call, wait);
  return t_child("llep_wait_mutation", value);
}

T_TEST(llep_dropped_wait_is_a_reported_race) {
  int64_t waits[2];
  play(1, 0, 0, 0, waits); /* lending has all kinds of waits */
  T_EXPECT_MSG(run_child(1, 0, 0) == 0, "races with all waits in place");
  for (int call = 1; call <= 2; ++call)
    for (int wait = 1; wait <= waits[call - 1]; ++wait)
      T_EXPECT_MSG(run_child(1, call, wait) != 0, "call %d: dropping wait %d of %d is not reported", call, wait,
                   (int)waits[call - 1]);
}
#endif
