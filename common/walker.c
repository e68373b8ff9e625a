/* SPDX-License-Identifier: Apache-2.0 */
#include "common/walker.h"

void *lev_walk(lev_walker *walker, lev_mem cls, const char *tag, lev_dtype dtype, int64_t rows, int64_t cols) {
  size_t offset = walker->used[cls];
  size_t bytes = lev_align_up(lev_bytes(rows, cols, lev_dtype_bytes(dtype)));
  walker->used[cls] = lev_sat_add(offset, bytes);
  if (walker->list) {
    lev_region region = {cls, tag, dtype, rows, cols, offset, bytes};
    walker->list(walker->list_ctx, &region);
  }
  return walker->base[cls] && bytes > 0 ? walker->base[cls] + offset : NULL;
}

lev_status lev_blocks_check(const lev_walker *walked, const lev_blocks *blocks, const char *what) {
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    size_t need = walked->used[c];
    if (need == 0) continue;
    size_t given = blocks->base[c] ? blocks->bytes[c] : 0;
    if (need == SIZE_MAX || given < need)
      return lev_fail(LEV_ERR_CAPACITY, "%s needs %zu bytes of %s memory, the block has %zu", what, need,
                      lev_mem_name((lev_mem)c), given);
    if ((uintptr_t)blocks->base[c] % LEV_ALIGN != 0)
      return lev_fail(LEV_ERR_ARG, "%s: the %s block at %p is not aligned to %zu bytes", what, lev_mem_name((lev_mem)c),
                      blocks->base[c], LEV_ALIGN);
  }
  return LEV_OK;
}

typedef struct take_ctx {
  lev_arena *const *arenas;
  bool work;
  lev_status status;
  lev_blocks *out;
} take_ctx;

static lev_status take(take_ctx *t, const lev_region *region) {
  lev_arena *arena = t->arenas[region->cls];
  if (!arena)
    return lev_fail(LEV_ERR_ARG, "%s needs %zu bytes of %s memory, and there is no such arena", region->tag,
                    region->bytes, lev_mem_name(region->cls));
  void *at;
  if (t->work)
    LEV_TRY(lev_arena_alloc(arena, region->tag, region->bytes, &at));
  else
    LEV_TRY(lev_arena_persist(arena, region->tag, region->bytes, &at));
  size_t before = t->out->bytes[region->cls];
  if (before == 0) t->out->base[region->cls] = at;
  if ((uintptr_t)at != (uintptr_t)t->out->base[region->cls] + before)
    return lev_fail(LEV_ERR_INTERNAL, "%s: arena regions are not contiguous", region->tag);
  t->out->bytes[region->cls] = before + region->bytes;
  return LEV_OK;
}

static void take_region(void *ctx, const lev_region *region) {
  take_ctx *t = ctx;
  if (t->status == LEV_OK && region->bytes > 0) t->status = take(t, region);
}

lev_status lev_blocks_take(lev_arena *const arenas[LEV_MEM_CLASSES], bool work, lev_walk_fn walk, void *plan,
                           lev_blocks *out) {
  *out = (lev_blocks){{NULL}, {0}};
  take_ctx t = {arenas, work, LEV_OK, out};
  lev_walker walker = {.list = take_region, .list_ctx = &t};
  walk(plan, &walker);
  return t.status;
}
