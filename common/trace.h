/* SPDX-License-Identifier: Apache-2.0 */
/* Event record of one rank: every allocation, free, bind, phase mark, copy and collective, in the order in which the
 * rank's host thread issued them. Reports, the timeline page and the "dry run = real run" test are made from it.
 * Recording stops silently at the cap given at creation (`lev_trace_dropped` counts the rest); nothing is allocated
 * after creation. Used by one thread. */
#ifndef LEV_COMMON_TRACE_H
#define LEV_COMMON_TRACE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_event_kind {
  LEV_EV_ALLOC, /* bytes of a tag become live                    name = tag   */
  LEV_EV_FREE,  /* bytes of a tag end                            name = tag   */
  LEV_EV_BIND,  /* a module plan received its blocks; bytes of the device's   name = module.phase */
  LEV_EV_PHASE, /* the step entered a phase                      name = phase, bytes = step or layer number */
  LEV_EV_COPY,  /* lev_copy / lev_fill enqueued                  name = label */
  LEV_EV_COLL,  /* a collective enqueued; bytes = bytes sent by this rank   name = operation */
  LEV_EV_KINDS
} lev_event_kind;

typedef struct lev_trace_event {
  int64_t time_ns; /* monotonic, since creation; not part of comparisons */
  uint64_t bytes;
  uint16_t name; /* index for lev_trace_name */
  uint8_t kind;  /* lev_event_kind */
  uint8_t cls;   /* lev_mem for ALLOC / FREE, else 0 */
} lev_trace_event;

typedef struct lev_trace lev_trace;

/* Room for `max_events` events, allocated here once. Errors: LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_trace_create(int64_t max_events, lev_trace **out);
void lev_trace_destroy(lev_trace *trace);

/* Appends an event; `trace` may be NULL (no-op). `name` is interned by content (at most 1024 names). */
void lev_trace_add(lev_trace *trace, lev_event_kind kind, int cls, const char *name, uint64_t bytes);
/* Pauses and resumes recording (e.g. only the first steps of a run are kept). */
void lev_trace_enable(lev_trace *trace, int on);

int64_t lev_trace_count(const lev_trace *trace);
int64_t lev_trace_dropped(const lev_trace *trace);
const lev_trace_event *lev_trace_at(const lev_trace *trace, int64_t i);
const char *lev_trace_name(const lev_trace *trace, uint16_t name);

/* One JSON object per line: {"t":ns,"ev":"alloc","class":"device","name":"llep.send","bytes":n}. The caller owns
 * `file`. */
LEV_MUST_CHECK lev_status lev_trace_write(const lev_trace *trace, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
