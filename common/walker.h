/* SPDX-License-Identifier: Apache-2.0 */
/* The region walker: a module describes its buffers once, in one function that calls lev_walk() for each. Called
 * without bases it counts bytes; with a callback it lists regions; with bases it assigns pointers. So sizes and
 * pointers cannot drift.
 *
 *     static void walk(my_plan *p, lev_walker *w) {
 *       p->send = lev_walk(w, LEV_MEM_DEVICE, "llep.send", LEV_F32, rows, hidden);
 *       ...
 *     }
 *
 * A module has one walk per phase (e.g. forward, backward); regions of one phase are alive together, from bind to the
 * end of the phase. Persistent regions (state that must outlive a phase) are a phase of their own. */
#ifndef LEV_COMMON_WALKER_H
#define LEV_COMMON_WALKER_H

#include "common/arena.h"
#include "common/dims.h"
#include "common/dtype.h"
#include "common/ledger.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One region as listed by <m>_plan_regions. */
typedef struct lev_region {
  lev_mem cls;
  const char *tag; /* "module.part", static */
  lev_dtype dtype;
  int64_t rows, cols;
  size_t offset; /* from the block of its class */
  size_t bytes;  /* rounded up to LEV_ALIGN */
} lev_region;

typedef void (*lev_region_fn)(void *ctx, const lev_region *region);

/* Blocks handed to <m>_plan_bind, one per class, LEV_ALIGN aligned; `bytes` is what the caller gives. */
typedef struct lev_blocks {
  void *base[LEV_MEM_CLASSES];
  size_t bytes[LEV_MEM_CLASSES];
} lev_blocks;

typedef struct lev_walker {
  unsigned char *base[LEV_MEM_CLASSES]; /* NULL while counting */
  size_t used[LEV_MEM_CLASSES];         /* bytes walked so far, saturating */
  lev_region_fn list;                   /* nullable */
  void *list_ctx;
} lev_walker;

/* One region of rows x cols scalars: its pointer when binding, NULL when counting (and for zero bytes). */
void *lev_walk(lev_walker *walker, lev_mem cls, const char *tag, lev_dtype dtype, int64_t rows, int64_t cols);

/* Fails with LEV_ERR_CAPACITY, naming class, asked and given bytes, unless `blocks` hold what `walked` counted. */
LEV_MUST_CHECK lev_status lev_blocks_check(const lev_walker *walked, const lev_blocks *blocks, const char *what);

/* Takes every region that `walk` lists from the arenas (indexed by class; work = from the innermost scope, else
 * persistent), so that the ledger knows each tag, and returns the blocks to bind. Regions of one class come out
 * contiguous, in walk order. */
typedef void (*lev_walk_fn)(void *plan, lev_walker *walker);
LEV_MUST_CHECK lev_status lev_blocks_take(lev_arena *const arenas[LEV_MEM_CLASSES], bool work, lev_walk_fn walk,
                                          void *plan, lev_blocks *out);

#ifdef __cplusplus
}
#endif
#endif
