/* SPDX-License-Identifier: Apache-2.0 */
/* One rank with exactly the memory that an SCO plan asks for, and a driver that writes reproducible items and checks
 * every byte that comes back. */
#ifndef LEV_TESTS_SCO_RIG_H
#define LEV_TESTS_SCO_RIG_H

#include "common/arena.h"
#include "common/device.h"
#include "sco/sco.h"
#include "tests/t.h"

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

typedef struct rig {
  lev_fault fault;
  lev_trace *trace;
  lev_ledger *ledger;
  lev_device *device;
  void *slab[LEV_MEM_CLASSES];
  lev_arena *arena[LEV_MEM_CLASSES];
  lev_stream *compute;
  sco_config config;
  sco_plan *plan;
  /* Delays in microseconds put before each operation of a stream, to make races certain. */
  int slow_compute, slow_out, slow_in;
  int64_t wrong;   /* bytes that came back different; written by the compute stream */
  bool full;       /* every item has item_bytes bytes */
  uint64_t digest; /* of all bytes that came back */
  struct rig_staged *staged;
} rig;

/* Makes device, plan, arenas of exactly the planned size (poisoned), and binds. False (and a recorded failure) if
 * anything fails. */
bool rig_open(rig *r, lev_backend backend, const sco_config *config, uint64_t jitter);
void rig_close(rig *r);

/* Bytes of the item in micro-batch `mb`: at most the cap, different per layer, sometimes 0. */
size_t rig_item_bytes(const rig *r, int mb, int layer, int kind);

/* Forward over layers [0, layers); each layer also checks the items of the layer before, as the contract allows. */
lev_status rig_forward(rig *r, int mb, int layers);
/* Backward over layers [from, layers) downward, with or without prefetch of the next layer. */
lev_status rig_backward(rig *r, int mb, int layers, int from, bool prefetch);
/* `n` micro-batches, then waits for everything. */
lev_status rig_run(rig *r, int n, bool prefetch);
lev_status rig_sync(rig *r);
/* Puts a pause of `us` microseconds on a stream of the cpu backend. */
lev_status rig_delay(rig *r, lev_stream *stream, int us);

#endif
