/* SPDX-License-Identifier: Apache-2.0 */
/* Byte accounts of one rank: live and peak bytes by (memory class, tag), and the live set at each class's peak.
 * The arenas post here; nothing else holds memory worth naming. A ledger filled by the dry backend *is* the plan: the
 * planned bytes of a tag are its peak there. Used by one thread. */
#ifndef LEV_COMMON_LEDGER_H
#define LEV_COMMON_LEDGER_H

#include <stddef.h>

#include "common/status.h"
#include "common/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_mem {
  LEV_MEM_DEVICE, /* device arena */
  LEV_MEM_PINNED, /* page-locked host slab */
  LEV_MEM_HOST,   /* named host buffers */
  LEV_MEM_CLASSES
} lev_mem;

const char *lev_mem_name(lev_mem cls); /* "device", "pinned", "host" */

typedef struct lev_ledger lev_ledger;

typedef struct lev_ledger_row {
  lev_mem cls;
  const char *tag; /* "module.part"; owned by the ledger */
  size_t live;     /* bytes now */
  size_t peak;     /* highest live bytes of this tag */
  size_t at_peak;  /* live bytes of this tag when its class was at its peak */
} lev_ledger_row;

/* `trace` may be NULL; it must outlive the ledger. At most 256 tags. Errors: LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_ledger_create(lev_trace *trace, lev_ledger **out);
void lev_ledger_destroy(lev_ledger *ledger);

/* Post `bytes` more / fewer live bytes. Errors: LEV_ERR_CAPACITY (too many tags); subtracting more than is live is
 * LEV_ERR_INTERNAL and changes nothing. */
LEV_MUST_CHECK lev_status lev_ledger_add(lev_ledger *ledger, lev_mem cls, const char *tag, size_t bytes);
LEV_MUST_CHECK lev_status lev_ledger_sub(lev_ledger *ledger, lev_mem cls, const char *tag, size_t bytes);

/* Marks the phase shown for later peaks ("forward.attention", ...); `index` = layer or step. */
void lev_ledger_phase(lev_ledger *ledger, const char *phase, int64_t index);

size_t lev_ledger_live(const lev_ledger *ledger, lev_mem cls);
size_t lev_ledger_peak(const lev_ledger *ledger, lev_mem cls);
/* Phase in which the class peaked ("" before any). */
const char *lev_ledger_peak_phase(const lev_ledger *ledger, lev_mem cls);

/* Row i (0 .. count-1), in order of first use. */
int lev_ledger_count(const lev_ledger *ledger);
lev_ledger_row lev_ledger_at(const lev_ledger *ledger, int i);
/* Peak bytes of one tag, 0 if it never appeared. */
size_t lev_ledger_tag_peak(const lev_ledger *ledger, lev_mem cls, const char *tag);
/* Highest sum of live bytes over all tags starting with `prefix` ("llep.") at one moment, tracked from the first post
 * on; the prefix is the part before the first dot. */
size_t lev_ledger_module_peak(const lev_ledger *ledger, lev_mem cls, const char *prefix);

lev_trace *lev_ledger_trace(const lev_ledger *ledger);

#ifdef __cplusplus
}
#endif
#endif
