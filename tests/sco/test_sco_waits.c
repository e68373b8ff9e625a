/* SPDX-License-Identifier: Apache-2.0 */
/* Mutation tests: every event wait of the schedule is dropped in turn, and the damage must show. Without a sanitizer
 * the evidence is wrong bytes, made certain by slowing down one stream at a time. Under ThreadSanitizer it is a report,
 * taken from a child process; that also covers the waits that only keep copies nobody reads any more from racing. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/sco/sco_rig.h"

enum { SLOWS = 4 };

typedef enum scenario {
  FULL,    /* two micro-batches */
  ABANDON, /* a prefetched item is never read; then a reset and a micro-batch */
  EARLY,   /* forward stops halfway, backward from there */
  RESTART, /* forward stops halfway, then a reset and a micro-batch */
  SCENARIOS
} scenario;

/* Runs it; *settled = waits seen before the part whose result is checked. */
static lev_status play(rig *r, scenario what, int64_t *settled) {
  int layers = r->config.layers;
  void *at;
  *settled = 0;
  if (what == FULL) return rig_run(r, 2, true);
  if (what == ABANDON) { /* only the micro-batch after it is slow: the late restore falls into its forward */
    int slow_compute = r->slow_compute;
    r->slow_compute = 0;
    LEV_TRY(rig_forward(r, 0, layers));
    r->slow_compute = slow_compute;
    LEV_TRY(sco_read(r->plan, layers - 1, SCO_BOUNDARY, r->compute, &at));
    LEV_TRY(sco_release(r->plan, layers - 1, SCO_BOUNDARY, r->compute));
    lev_stream *out, *in;
    sco_streams(r->plan, &out, &in);
    LEV_TRY(rig_delay(r, in, r->slow_in));
    *settled = r->fault.seen[LEV_FAULT_DROP_WAIT] + 1; /* the restore itself may race with nothing that is read */
    LEV_TRY(sco_prefetch(r->plan, layers - 3, SCO_BOUNDARY, r->compute));
  } else {
    LEV_TRY(rig_forward(r, 0, layers / 2));
    if (what == EARLY) LEV_TRY(rig_backward(r, 0, layers / 2, 0, true));
    *settled = r->fault.seen[LEV_FAULT_DROP_WAIT];
    if (what == EARLY) return rig_sync(r);
  }
  LEV_TRY(sco_reset(r->plan));
  LEV_TRY(rig_forward(r, 1, layers));
  LEV_TRY(rig_backward(r, 1, layers, 0, true));
  return rig_sync(r);
}

/* Drops wait number `drop` (0 = none) with one stream slow (0 compute, 1 out, 2 in, 3 compute and in). Returns wrong
 * bytes; gives the waits seen. */
static int64_t play_dropped(scenario what, int64_t drop, int slow, int64_t *settled, int64_t *waits) {
  sco_config c = sco_config_default();
  c.layers = what == EARLY ? 8 : 5;
  c.item_bytes[SCO_BOUNDARY] = 300;
  rig r = {0};
  int64_t wrong = -1;
  if (rig_open(&r, LEV_BACKEND_CPU, &c, 0)) {
    r.full = true;
    r.fault.fail_at[LEV_FAULT_DROP_WAIT] = drop;
    r.slow_compute = slow == 0 || slow == 3 ? 1000 : 0, r.slow_out = slow == 1 ? 1500 : 0,
    r.slow_in = slow >= 2 ? 1500 : 0;
    r.fault.seen[LEV_FAULT_DROP_WAIT] = 0;
    T_EXPECT_OK(play(&r, what, settled));
    *waits = r.fault.seen[LEV_FAULT_DROP_WAIT];
    wrong = r.wrong;
  }
  rig_close(&r);
  return wrong;
}

#if !RIG_TSAN
T_TEST(sco_dropped_wait_gives_wrong_bytes) {
  for (int what = FULL; what <= ABANDON; ++what) {
    int64_t settled, waits, ignored;
    for (int slow = 0; slow < SLOWS; ++slow)
      T_EXPECT_EQ_I64(play_dropped((scenario)what, 0, slow, &settled, &waits), 0);
    T_EXPECT_MSG(waits >= 12, "scenario %d has only %d waits", what, (int)waits);
    for (int64_t drop = settled + 1; drop <= waits; ++drop) {
      int64_t wrong = 0;
      for (int i = 0; i < 3 * SLOWS && wrong == 0; ++i)
        wrong = play_dropped((scenario)what, drop, i % SLOWS, &ignored, &ignored);
      T_EXPECT_MSG(wrong > 0, "scenario %d: dropping wait %d of %d went unnoticed", what, (int)drop, (int)waits);
    }
  }
}
#endif

/* Child of the test below: runs one mutation and lets the sanitizer set the exit status. */
T_CHILD(sco_wait_mutation, value) {
  int what, drop;
  T_REQUIRE(sscanf(value, "%d:%d", &what, &drop) == 2);
  int64_t ignored;
  for (int slow = 0; slow < SLOWS; ++slow) (void)play_dropped((scenario)what, drop, slow, &ignored, &ignored);
}

#if RIG_TSAN
static int run_child(int what, int64_t drop) {
  char value[32];
  snprintf(value, sizeof value, "%d:%d", what, (int)drop);
  return t_child("sco_wait_mutation", value);
}

/* The last restore of EARLY waits for a copy-out that the restore before it has waited for already, the stream being in
 * order. */
static bool covered(int what, int64_t drop) {
  return what == EARLY && drop == 11;
}

T_TEST(sco_dropped_wait_is_a_reported_race) {
  for (int what = FULL; what < SCENARIOS; ++what) {
    int64_t settled, waits;
    T_EXPECT_EQ_I64(play_dropped((scenario)what, 0, 0, &settled, &waits), 0);
    T_EXPECT_MSG(run_child(what, 0) == 0, "scenario %d races with all waits in place", what);
    int64_t last = what == FULL ? waits / 2 : what == EARLY ? settled : lev_min_i64(waits, settled + 2);
    for (int64_t drop = what == FULL || what == EARLY ? 1 : settled + 1; drop <= last; ++drop)
      T_EXPECT_MSG(covered(what, drop) || run_child(what, drop) != 0,
                   "scenario %d: dropping wait %d of %d is not reported", what, (int)drop, (int)waits);
  }
}
#endif
