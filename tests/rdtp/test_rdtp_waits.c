/* SPDX-License-Identifier: Apache-2.0 */
/* Mutation test: every event wait of a call is dropped in turn on one rank, and ThreadSanitizer must report a race in a
 * child process. Random delays vary the order, since an accidental one can hide the race. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/rdtp/rdtp_rig.h"

#if defined(__SANITIZE_THREAD__)
#define RIG_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RIG_TSAN 1
#endif
#endif
#ifndef RIG_TSAN
#define RIG_TSAN 0
#endif

enum { TRIES = 16 };

/* Three rounds, so that every buffer is used again. */
static const rig_case cases[] = {
    {.ranks = 3,
     .hidden = 32,
     .vocab = 90,
     .tokens = {50, 55, 45},
     .dtype = LEV_F64,
     .rows = 16,
     .cols = 10,
     .branch = RDTP_MOVE_WEIGHTS},
    {.ranks = 3,
     .hidden = 32,
     .vocab = 90,
     .tokens = {50, 55, 45},
     .dtype = LEV_F64,
     .rows = 20,
     .cols = 16,
     .branch = RDTP_MOVE_ACTIVATIONS},
    {.ranks = 3, .hidden = 32, .vocab = 90, .tokens = {50, 55, 45}, .dtype = LEV_F64, .rows = 20, .one_pass = true},
    {.ranks = 3, .hidden = 32, .vocab = 90, .tokens = {50, 55, 45}, .dtype = LEV_F64, .schedule = RDTP_PLAIN},
};
#define N_CASES ((int)(sizeof cases / sizeof *cases))

/* True when the outputs are right with wait number `drop` of rank 1 left out (0 = none); gives the waits seen. */
static bool play(int which, int64_t drop, uint64_t jitter, int64_t *waits) {
  rig r;
  rig_case c = cases[which];
  c.jitter = jitter;
  bool right = true;
  if (rig_open(&r, &c)) {
    r.rank[1].fault.fail_at[LEV_FAULT_DROP_WAIT] = drop;
    rig_run(&r, RDTP_STEP, t_backend());
    *waits = r.rank[1].fault.seen[LEV_FAULT_DROP_WAIT];
    for (int i = 0; i < c.ranks; ++i) {
      const rig_rank *k = &r.rank[i];
      right &= num_rel_l2(c.dtype, k->dh, k->dh64, k->tokens * c.hidden) < 1e-11;
      right &= num_rel_l2(c.dtype, k->dw, k->dw64, k->vocab_rows * c.hidden) < 1e-11;
      right &= num_rel_l2_f64(k->sums, k->sums64, RDTP_SUMS) < 1e-11;
    }
  }
  rig_close(&r);
  return right;
}

T_TEST(rdtp_waits_are_counted) {
  for (int which = 0; which < N_CASES; ++which) {
    int64_t waits = 0;
    T_EXPECT(play(which, 0, 1, &waits));
    T_EXPECT(waits > 0);
  }
}

/* Child of the test below. */
T_CHILD(rdtp_wait_mutation, value) {
  int which, drop;
  T_REQUIRE(sscanf(value, "%d:%d", &which, &drop) == 2);
  int64_t ignored;
  for (uint64_t jitter = 0; jitter < (drop ? TRIES : 4); ++jitter) (void)play(which, drop, jitter, &ignored);
}

#if RIG_TSAN
static int run_child(int which, int64_t drop) {
  char value[32];
  snprintf(value, sizeof value, "%d:%d", which, (int)drop);
  return t_child("rdtp_wait_mutation", value);
}

T_TEST(rdtp_dropped_wait_is_a_reported_race) {
  for (int which = 0; which < N_CASES; ++which) {
    int64_t waits = 0;
    (void)play(which, 0, 0, &waits);
    T_EXPECT_MSG(run_child(which, 0) == 0, "case %d races with all waits in place", which);
    for (int64_t drop = 1; drop <= waits; ++drop)
      T_EXPECT_MSG(run_child(which, drop) != 0, "case %d: dropping wait %d of %d is not reported", which, (int)drop,
                   (int)waits);
  }
}
#endif
