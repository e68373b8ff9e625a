/* SPDX-License-Identifier: Apache-2.0 */
/* Control-plane heap: one jemalloc arena per tag, so that the memory report can say what the host side itself uses.
 * Under sanitizers (LEV_PLAIN_MALLOC) the same calls use malloc and count requested bytes. Thread-safe. Data-plane
 * memory never comes from here: it comes from the arenas. */
#ifndef LEV_COMMON_HOSTMEM_H
#define LEV_COMMON_HOSTMEM_H

#include <stddef.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LEV_HEAP_TABLE(X)                                                                                              \
  X(COMMON, "heap.common") /* devices, streams, communicators, ledgers, traces */                                      \
  X(PLAN, "heap.plan")     /* module plans and host-side routing tables */                                             \
  X(MODEL, "heap.model")   /* parameter tables */                                                                      \
  X(DATA, "heap.data")     /* loaders, tokenizers */                                                                   \
  X(REPORT, "heap.report") /* JSON documents, strings */

typedef enum lev_heap {
#define LEV_HEAP_ENUM(name, text) LEV_HEAP_##name,
  LEV_HEAP_TABLE(LEV_HEAP_ENUM)
#undef LEV_HEAP_ENUM
      LEV_HEAP_COUNT
} lev_heap;

const char *lev_heap_name(lev_heap heap);
/* Zeroed memory; NULL (with lev_detail set) when it cannot be had or the product overflows. n = 0 gives a valid
 * pointer. */
void *lev_calloc(lev_heap heap, size_t n, size_t size);
/* Grows or shrinks; new bytes are not zeroed. The old block stays valid on failure (NULL). */
void *lev_realloc(lev_heap heap, void *pointer, size_t bytes);
char *lev_strdup(lev_heap heap, const char *text);
void lev_free(void *pointer); /* NULL is fine */

typedef struct lev_heap_stats {
  size_t allocated; /* bytes in live allocations now */
  size_t peak;      /* highest value seen by lev_heap_read (sampled) or exactly under LEV_PLAIN_MALLOC */
  size_t resident;  /* bytes the arena holds from the system, 0 if unknown */
  size_t calls;     /* allocations so far */
} lev_heap_stats;
void lev_heap_read(lev_heap heap, lev_heap_stats *out);
/* Resident set of the process in bytes (VmRSS) and its high-water mark (VmHWM); 0 if unknown. */
void lev_process_memory(size_t *rss, size_t *peak_rss);

#ifdef __cplusplus
}
#endif
#endif
