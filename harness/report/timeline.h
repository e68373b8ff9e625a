/* SPDX-License-Identifier: Apache-2.0 */
/* A run's memory over its recorded events, read back from RUN/trace.rank<r>.jsonl (lev_trace_write) and, where it is
 * there, RUN/memory.json for what was planned. Tables and pages are made from it. */
#ifndef LEV_REPORT_TIMELINE_H
#define LEV_REPORT_TIMELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/ledger.h"
#include "common/status.h"

#define LEV_TIMELINE_NAME 64 /* bytes of a tag or phase name, end included */

typedef struct lev_timeline_tag {
  char name[LEV_TIMELINE_NAME];
  lev_mem cls;
  size_t peak;     /* highest live bytes in the trace */
  size_t at_peak;  /* live bytes when its class peaked first */
  size_t planned;  /* memory.json; 0 where it has none */
  size_t reported; /* peak of the whole run in memory.json; 0 where it has none */
  double steady;   /* mean live bytes over all changes / peak: 1 = always there */
} lev_timeline_tag;

/* One stretch between two phase marks. Phase 0 is what comes before the first mark. */
typedef struct lev_timeline_phase {
  char name[LEV_TIMELINE_NAME];
  int64_t index; /* layer, step or micro-batch; -1 = none */
  int64_t first; /* number of changes before it */
  int64_t time_ns;
  size_t peak[LEV_MEM_CLASSES];         /* highest live bytes, what it found included */
  int64_t peak_change[LEV_MEM_CLASSES]; /* the change after which that was so; -1 = before any */
  int64_t copies, collectives;
  size_t copied, sent; /* bytes */
} lev_timeline_phase;

/* Bytes of a tag began or ended. */
typedef struct lev_timeline_change {
  int64_t time_ns;
  size_t bytes;
  uint32_t phase;
  uint16_t tag;
  bool is_free;
} lev_timeline_change;

typedef struct lev_timeline_class {
  size_t peak;
  int64_t peak_change; /* the first one that reached it; -1 = class unused */
  size_t planned;      /* memory.json */
  size_t reported;     /* peak of the whole run in memory.json */
} lev_timeline_class;

typedef struct lev_timeline {
  int rank, ranks;   /* ranks: 0 where memory.json is missing */
  bool has_plan;     /* memory.json lists this rank */
  bool has_reported; /* ... with measured peaks */
  lev_timeline_tag *tags;
  int n_tags;
  lev_timeline_phase *phases;
  int64_t n_phases;
  lev_timeline_change *changes;
  int64_t n_changes;
  lev_timeline_class classes[LEV_MEM_CLASSES];
  size_t total_peak; /* of all classes together at one moment */
  int64_t total_peak_change;
  int64_t events;    /* lines of the file */
  int64_t recorded;  /* events that the run put into the file, by memory.json; 0 where that does not tell */
  int64_t dropped;   /* events after the run had stopped recording at its cap, by memory.json */
  bool cut;          /* the last line is not finished */
  int64_t unmatched; /* frees of more bytes than were live (recording began late); taken as all of them */
} lev_timeline;

/* Reads rank `rank` of the run folder, -1 for the largest one in memory.json (rank 0 without it). Errors: LEV_ERR_IO
 * (no trace), LEV_ERR_FORMAT (file:line), LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_timeline_read(const char *folder, int rank, lev_timeline **out);
void lev_timeline_destroy(lev_timeline *timeline);
/* LEV_OK where everything is there that the run did while it recorded. Errors, with what is missing: LEV_ERR_FORMAT
 * (the file ends early), LEV_ERR_CAPACITY (recording stopped at its cap). */
LEV_MUST_CHECK lev_status lev_timeline_whole(const lev_timeline *timeline);

/* Applies change `i` to live[n_tags]. */
void lev_timeline_apply(const lev_timeline *timeline, int64_t i, size_t *live);
/* "forward 3", "loss" into text of LEV_TIMELINE_NAME + 24 bytes; returns text. */
char *lev_timeline_phase_text(const lev_timeline_phase *phase, char *text);
/* The phase that holds the class's peak. */
const lev_timeline_phase *lev_timeline_peak_phase(const lev_timeline *timeline, lev_mem cls);

#endif
