/* SPDX-License-Identifier: Apache-2.0 */
/* Planned and measured bytes, for machines (memory.json, plan --json) and for people. */
#ifndef LEV_REPORT_MEMORY_REPORT_H
#define LEV_REPORT_MEMORY_REPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/ledger.h"

/* One rank. Planned bytes of a tag are its peak in the plan's ledger. */
typedef struct lev_memory_rank {
  int rank;
  const lev_ledger *planned;
  const lev_ledger *measured; /* NULL in a plan */
  /* of the rank's trace file: events in it, and events after recording had stopped at its cap; both 0 = no file yet */
  int64_t trace_events, trace_dropped;
} lev_memory_rank;

/* A further member of the JSON object: its value as JSON text. */
typedef struct lev_memory_note {
  const char *key, *json;
} lev_memory_note;

typedef struct lev_memory_report {
  int ranks;                   /* W of the run */
  const lev_memory_rank *rank; /* the ones reported */
  int n;
  /* Limits of a rank; 0 and SIZE_MAX = none. Of its device memory the reserve stays free; the host limit is for pinned
   * and named host bytes together. */
  size_t device_memory, device_reserve, host_memory;
  size_t heap_cap; /* of the control-plane heap; shown beside its use where measured */
  /* nullable: whether a tag may grow with the tokens of a rank. Then the table marks these tags, and the JSON lists
   * them under "grows_with_tokens" */
  bool (*grows)(const void *ctx, const char *tag);
  const void *grows_ctx;
  const lev_memory_note *notes;
  int n_notes;
} lev_memory_report;

/* {"ranks": W, "per_rank": [{"rank", "device": {"planned_bytes", "peak_bytes", "peak_phase", "tags": {...}}, "pinned",
 * "host", "trace": {"events", "dropped_events"}}], ...}; no peak_bytes and no trace in a plan. "limits", where there
 * are any: "device_memory_bytes" with "reserve_bytes", "host_memory_bytes", and by how much they are passed. Returns a
 * string to be freed with free(); NULL if memory ran out. */
char *lev_memory_json(const lev_memory_report *report);
/* Writes it to PATH, by a temporary file and a rename. */
LEV_MUST_CHECK lev_status lev_memory_write(const lev_memory_report *report, const char *path);

static inline bool lev_is_limit(size_t bytes) {
  return bytes != 0 && bytes != SIZE_MAX;
}
/* Bytes planned over a limit, the reserve added: 0 = fits. */
size_t lev_memory_excess(const lev_memory_report *report, size_t *device, size_t *host);
/* "X over memory.device_memory = Y with a reserve of Z" of such an excess of device bytes; returns text. */
char *lev_memory_over_device(const lev_memory_report *report, size_t excess, char text[160]);

/* Table of bytes by class and tag, largest first, with the phase of each class's peak. */
void lev_memory_table(const lev_memory_report *report, FILE *out);

/* How many (rank, memory class) pairs peaked at what was planned, the class and each of its tags. The others are listed
 * on `out`, a line each with the tag that differs most. */
int lev_memory_exact(const lev_memory_report *report, FILE *out);

/* Modules with a schedule of their own, by the prefix of their tags. */
#define LEV_MODULES 5
extern const char *const lev_module_name[LEV_MODULES];   /* "pipelined_llep", ... as in schedule.<module> */
extern const char *const lev_module_prefix[LEV_MODULES]; /* "llep", ... */
/* Largest device bytes of a module at one moment over the ranks. */
size_t lev_module_device_bytes(const lev_memory_report *report, int module, bool measured);
/* The closing table: per module planned and measured peak on the device, and what its plain schedule would take.
 * `plain` may hold SIZE_MAX for unknown. */
void lev_module_table(const lev_memory_report *report, const size_t plain[LEV_MODULES], FILE *out);

/* "1.50 GiB", "12.3 MiB", "640 B" into text of at least 24 bytes; returns text. */
char *lev_bytes_text(size_t bytes, char *text);

#endif
