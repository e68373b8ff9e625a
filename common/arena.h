/* SPDX-License-Identifier: Apache-2.0 */
/* One block of one memory class of one rank: a persistent region that grows from its start and, once that is
 * sealed, a stack of work scopes above it, shared by all phases of a step. Nothing here asks the system for memory: the
 * block comes from lev_device_alloc, its size from a dry run of the same code.
 *
 * Work bytes are reused by later scopes, so closing a scope marks the streams that used it and the next scope that
 * opens makes its own streams wait for those marks. What must outlive its phase is persistent. Every allocation is
 * rounded up to LEV_ALIGN and posted to the ledger, so ledger peak = arena peak to the byte. */
#ifndef LEV_COMMON_ARENA_H
#define LEV_COMMON_ARENA_H

#include <stddef.h>

#include "common/device.h"
#include "common/ledger.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LEV_SCOPE_STREAMS 6 /* most streams one scope can name */
#define LEV_SCOPE_DEPTH 8   /* most scopes open at once */

typedef struct lev_arena lev_arena;

/* `base` is a block of `bytes` (aligned to LEV_ALIGN) that outlives the arena, or, on the dry backend, any fake address
 * with bytes = SIZE_MAX. Errors: LEV_ERR_ARG, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_arena_create(lev_device *device, lev_ledger *ledger, lev_mem cls, void *base,
                                           size_t bytes, lev_arena **out);
void lev_arena_destroy(lev_arena *arena);

/* A region that lives as long as the arena. Errors: LEV_ERR_SEALED after lev_arena_seal, LEV_ERR_CAPACITY
 * (asked, left). bytes = 0 yields a valid, unreadable pointer and no ledger row. */
LEV_MUST_CHECK lev_status lev_arena_persist(lev_arena *arena, const char *tag, size_t bytes, void **out);
/* Ends the persistent region; scopes may open only afterwards. */
void lev_arena_seal(lev_arena *arena);

/* Opens a scope used by exactly the named streams; they wait for the marks left by closed scopes. */
LEV_MUST_CHECK lev_status lev_arena_push(lev_arena *arena, lev_stream *const *streams, int n_streams);
/* A region that ends with the innermost scope. Errors: LEV_ERR_MISUSE (no scope), LEV_ERR_CAPACITY. */
LEV_MUST_CHECK lev_status lev_arena_alloc(lev_arena *arena, const char *tag, size_t bytes, void **out);
/* Closes the innermost scope: frees its regions and records a mark on each of its streams. */
LEV_MUST_CHECK lev_status lev_arena_pop(lev_arena *arena);

/* Bytes of the persistent region and the highest use of the work stack; their sum is the block a real run needs. */
size_t lev_arena_persistent(const lev_arena *arena);
size_t lev_arena_work_peak(const lev_arena *arena);
/* Fills all work bytes not in use with `byte` (poison tests); waits. No-op on dry. */
LEV_MUST_CHECK lev_status lev_arena_poison(lev_arena *arena, int byte);

#ifdef __cplusplus
}
#endif
#endif
