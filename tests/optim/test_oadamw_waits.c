/* SPDX-License-Identifier: Apache-2.0 */
/* Mutation test: every event wait of a step is dropped in turn, and the damage must show: as wrong bits under random
 * delays, or, under ThreadSanitizer, as a report of a child process. */
#include <stdio.h>
#include <stdlib.h>

#include "tests/optim/oadamw_rig.h"

enum { TRIES = 200, LENGTH = OADAMW_TSAN ? 3000 : 30000 };

/* Buckets take long enough to update that a copy which does not wait for them comes too early. */
static const oadamw_segment segments[2] = {{100, LENGTH, 0.1, 1}, {100 + LENGTH, 3 * LENGTH, 0, 0.5}};

/* Two steps with wait number `drop` (0 = none) left out. Try 0 has no delays; the others have random ones, and each
 * slows down another stream. Gives the digest and the waits seen. */
static uint64_t play(oadamw_placement placement, int64_t drop, int try, int64_t *waits) {
  oadamw_config c = oadamw_rig_config(LEV_F64, LEV_F64);
  c.segments = segments, c.n_segments = 2, c.simd = OADAMW_SIMD_SCALAR;
  c.placement = placement, c.bucket = LENGTH, c.slots = 2, c.workers = 2; /* 5 buckets */
  oadamw_rig r = {0};
  uint64_t digest = 0;
  if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, 5 * LENGTH, (uint64_t)try)) {
    lev_stream *own[OADAMW_STREAMS_MAX + 1];
    int n = oadamw_streams(r.plan, own, OADAMW_STREAMS_MAX);
    own[n] = r.compute;
    if (try > 0) r.slow = own[try % (n + 1)];
    r.fault.seen[LEV_FAULT_DROP_WAIT] = 0;
    r.fault.fail_at[LEV_FAULT_DROP_WAIT] = drop;
    T_EXPECT_OK(oadamw_rig_run(&r, 1, 2));
    *waits = r.fault.seen[LEV_FAULT_DROP_WAIT];
    for (int i = 0; i < n; ++i) T_EXPECT_OK(lev_stream_sync(own[i]));
    digest = oadamw_rig_digest(&r) ^ r.seen;
  }
  oadamw_rig_close(&r);
  return digest;
}

#if !OADAMW_TSAN
T_TEST(oadamw_dropped_wait_gives_wrong_bits) {
  for (int placement = OADAMW_GPU; placement <= OADAMW_SPLIT; ++placement) {
    int64_t waits = 0, ignored;
    uint64_t want = play((oadamw_placement)placement, 0, 0, &waits);
    T_EXPECT(waits >= 14);
    int64_t last = placement == OADAMW_SPLIT ? waits / 2 : waits; /* step 2 repeats step 1 */
    for (int64_t drop = 1; drop <= last; ++drop) {
      bool caught = false;
      for (int try = 1; try <= TRIES && !caught; ++try)
        caught = play((oadamw_placement)placement, drop, try, &ignored) != want;
      T_EXPECT_MSG(caught, "placement %d: dropping wait %d of %d went unnoticed", placement, (int)drop, (int)waits);
    }
  }
}
#endif

/* Child of the test below. */
T_CHILD(oadamw_wait_mutation, value) {
  int placement, drop;
  T_REQUIRE(sscanf(value, "%d:%d", &placement, &drop) == 2);
  int64_t ignored;
  for (int try = 1; try <= 5; ++try) (void)play((oadamw_placement)placement, drop, try, &ignored);
}

#if OADAMW_TSAN
static int run_child(int placement, int64_t drop) {
  char value[32];
  snprintf(value, sizeof value, "%d:%d", placement, (int)drop);
  return t_child("oadamw_wait_mutation", value);
}

T_TEST(oadamw_dropped_wait_is_a_reported_race) {
  for (int placement = OADAMW_GPU; placement <= OADAMW_CPU; ++placement) {
    int64_t waits = 0;
    (void)play((oadamw_placement)placement, 0, 0, &waits);
    T_EXPECT_MSG(run_child(placement, 0) == 0, "placement %d races with all waits in place", placement);
    for (int64_t drop = 1; drop <= waits / 2 + 1; ++drop) /* step 1 and the fork of step 2 */
      T_EXPECT_MSG(run_child(placement, drop) != 0, "placement %d: dropping wait %d of %d is not reported", placement,
                   (int)drop, (int)waits);
  }
}
#endif
