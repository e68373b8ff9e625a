/* SPDX-License-Identifier: Apache-2.0 */
/* Fault injection: makes the n-th event of a kind fail, so that tests can walk every error path. One object per rank,
 * reached through the device; a NULL pointer never fails anything. */
#ifndef LEV_COMMON_FAULT_H
#define LEV_COMMON_FAULT_H

#include <stdint.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_fault_kind {
  LEV_FAULT_ALLOC,      /* lev_device_alloc, a region of an arena */
  LEV_FAULT_COPY,       /* lev_copy, lev_fill */
  LEV_FAULT_COLLECTIVE, /* any lev_comm_* enqueue */
  LEV_FAULT_FILE,       /* open, write, fsync, rename, ... */
  LEV_FAULT_DROP_WAIT,  /* lev_stream_wait number n is silently dropped (mutation test) */
  LEV_FAULT_KINDS
} lev_fault_kind;

/* Stream `waiter` (0 = the host) goes on with its operation `at` only when operation `number` of stream `on` is done.
 * Streams and their operations count from 1, in order of creation and of enqueueing. */
typedef struct lev_fault_wait {
  int waiter, on;
  uint64_t at, number;
  const void *site; /* where lev_stream_wait was called; NULL for the host */
} lev_fault_wait;

typedef struct lev_fault {
  int64_t fail_at[LEV_FAULT_KINDS]; /* 1-based event number that fails; 0 = never */
  int64_t seen[LEV_FAULT_KINDS];    /* events so far; written by the owning rank's thread only */
  /* For tests that drop waits, cpu streams only. All waits go to a list of the test's, as far as there is room; and one
   * operation begins late, so that who no longer waits for it overtakes it. */
  lev_fault_wait *waits; /* [max_waits]; NULL = not wanted */
  int64_t n_waits, max_waits;
  const void *site; /* of the call at work */
  int slow_stream;  /* 0 = none */
  uint64_t slow_operation;
  int64_t slow_ns;
} lev_fault;

/* Counts one event; true when this is the one that must fail. `fault` may be NULL. */
static inline int lev_fault_hit(lev_fault *fault, lev_fault_kind kind) {
  if (!fault) return 0;
  return ++fault->seen[kind] == fault->fail_at[kind];
}

#ifdef __cplusplus
}
#endif
#endif
