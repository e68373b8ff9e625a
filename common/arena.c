/* SPDX-License-Identifier: Apache-2.0 */
#include "common/arena.h"

#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"

#define MAX_STREAMS 32   /* streams that ever used one arena */
#define MAX_REGIONS 1024 /* work regions open at once */
#define MAX_TAGS 256     /* as in the ledger */

/* A stream that has used work bytes. `event` marks its end at the last scope it closed here; the mark has number `mark`
 * (0 = none yet), and waited[j] is the mark of entry j that this stream has already been told to wait for. */
typedef struct user {
  lev_stream *stream;
  lev_event *event;
  uint64_t mark;
  uint64_t waited[MAX_STREAMS];
} user;

typedef struct scope {
  int users[LEV_SCOPE_STREAMS];
  int n_users;
  int first_region;
  size_t start; /* work bytes below this scope */
  bool stale;   /* an inner scope has closed: bytes above may still be in use by its streams */
} scope;

typedef struct region {
  const char *tag; /* the ledger's text */
  size_t bytes;
} region;

struct lev_arena {
  lev_device *device;
  lev_ledger *ledger;
  lev_mem cls;
  uintptr_t base;
  size_t bytes;
  size_t persistent, work, work_peak;
  bool sealed;
  int depth, n_users, n_regions, n_persistent;
  scope scopes[LEV_SCOPE_DEPTH];
  user users[MAX_STREAMS];
  region regions[MAX_REGIONS];
  region persistents[MAX_TAGS]; /* one per tag */
};

lev_status lev_arena_create(lev_device *device, lev_ledger *ledger, lev_mem cls, void *base, size_t bytes,
                            lev_arena **out) {
  *out = NULL;
  if (!device || !ledger || (unsigned)cls >= LEV_MEM_CLASSES)
    return lev_fail(LEV_ERR_ARG, "an arena needs a device, a ledger and a memory class");
  if ((!base && bytes > 0) || (uintptr_t)base % LEV_ALIGN != 0)
    return lev_fail(LEV_ERR_ARG, "%s arena: block %p of %zu bytes is not aligned to %zu", lev_mem_name(cls), base,
                    bytes, LEV_ALIGN);
  lev_arena *arena = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *arena);
  if (!arena) return LEV_ERR_NOMEM;
  arena->device = device, arena->ledger = ledger, arena->cls = cls;
  arena->base = (uintptr_t)base, arena->bytes = bytes;
  *out = arena;
  return LEV_OK;
}

void lev_arena_destroy(lev_arena *arena) {
  if (!arena) return;
  /* What is live came from here, so taking it off the books cannot fail. */
  for (int i = arena->n_regions - 1; i >= 0; --i)
    (void)!lev_ledger_sub(arena->ledger, arena->cls, arena->regions[i].tag, arena->regions[i].bytes);
  for (int i = arena->n_persistent - 1; i >= 0; --i)
    (void)!lev_ledger_sub(arena->ledger, arena->cls, arena->persistents[i].tag, arena->persistents[i].bytes);
  for (int i = 0; i < arena->n_users; ++i) lev_event_destroy(arena->users[i].event);
  lev_free(arena);
}

size_t lev_arena_persistent(const lev_arena *arena) {
  return arena->persistent;
}
size_t lev_arena_work_peak(const lev_arena *arena) {
  return arena->work_peak;
}

/* The ledger's own copy of a tag that was just posted. */
static const char *ledger_text(const lev_arena *arena, const char *tag) {
  for (int i = 0; i < lev_ledger_count(arena->ledger); ++i) {
    lev_ledger_row row = lev_ledger_at(arena->ledger, i);
    if (row.cls == arena->cls && strcmp(row.tag, tag) == 0) return row.tag;
  }
  return tag;
}

/* Takes `bytes` after everything in use: checks room and posts the rounded size. */
static lev_status take(lev_arena *arena, const char *tag, size_t bytes, size_t *rounded, void **out) {
  size_t used = arena->persistent + arena->work, left = arena->bytes - used;
  *rounded = lev_align_up(bytes);
  if (*rounded > left || *rounded == SIZE_MAX)
    return lev_fail(LEV_ERR_CAPACITY, "%s: %zu bytes of %s memory asked (%zu with rounding), %zu of %zu left", tag,
                    bytes, lev_mem_name(arena->cls), *rounded, left, arena->bytes);
  if (bytes > 0) {
    if (lev_fault_hit(lev_device_fault(arena->device), LEV_FAULT_ALLOC))
      return lev_fail(LEV_ERR_NOMEM, "%s: allocation of %zu bytes of %s memory failed (injected)", tag, bytes,
                      lev_mem_name(arena->cls));
    LEV_TRY(lev_ledger_add(arena->ledger, arena->cls, tag, *rounded));
  }
  *out = (void *)(arena->base + used);
  return LEV_OK;
}

lev_status lev_arena_persist(lev_arena *arena, const char *tag, size_t bytes, void **out) {
  *out = NULL;
  if (arena->sealed)
    return lev_fail(LEV_ERR_SEALED, "%s: %zu persistent bytes of %s memory asked after the arena was sealed", tag,
                    bytes, lev_mem_name(arena->cls));
  size_t rounded;
  LEV_TRY(take(arena, tag, bytes, &rounded, out));
  arena->persistent += rounded;
  if (rounded == 0) return LEV_OK;
  const char *text = ledger_text(arena, tag);
  int i = 0;
  while (i < arena->n_persistent && arena->persistents[i].tag != text) ++i;
  if (i == arena->n_persistent) arena->persistents[arena->n_persistent++] = (region){text, 0};
  arena->persistents[i].bytes += rounded;
  return LEV_OK;
}

void lev_arena_seal(lev_arena *arena) {
  arena->sealed = true;
}

/* Entry of a stream, created (with its event) at its first use of this arena. */
static lev_status find_user(lev_arena *arena, lev_stream *stream, int *out) {
  for (*out = 0; *out < arena->n_users; ++*out)
    if (arena->users[*out].stream == stream) return LEV_OK;
  if (arena->n_users == MAX_STREAMS)
    return lev_fail(LEV_ERR_CAPACITY, "stream %s would be number %d to use one arena, room for %d",
                    lev_stream_name(stream), MAX_STREAMS + 1, MAX_STREAMS);
  user *u = &arena->users[arena->n_users];
  LEV_TRY(lev_event_create(arena->device, &u->event));
  u->stream = stream;
  ++arena->n_users;
  return LEV_OK;
}

/* The scope's streams wait for all marks of other streams that they have not waited for yet. */
static lev_status wait_marks(lev_arena *arena, scope *s) {
  for (int i = 0; i < s->n_users; ++i) {
    user *waiter = &arena->users[s->users[i]];
    for (int j = 0; j < arena->n_users; ++j) {
      user *marked = &arena->users[j];
      if (marked == waiter || marked->mark == waiter->waited[j]) continue;
      LEV_TRY(lev_stream_wait(waiter->stream, marked->event));
      waiter->waited[j] = marked->mark;
    }
  }
  s->stale = false;
  return LEV_OK;
}

lev_status lev_arena_push(lev_arena *arena, lev_stream *const *streams, int n_streams) {
  if (!arena->sealed) return lev_fail(LEV_ERR_MISUSE, "a scope opens only after lev_arena_seal");
  if (arena->depth == LEV_SCOPE_DEPTH)
    return lev_fail(LEV_ERR_CAPACITY, "scope %d asked, %d can be open", LEV_SCOPE_DEPTH + 1, LEV_SCOPE_DEPTH);
  if (n_streams < 0 || n_streams > LEV_SCOPE_STREAMS)
    return lev_fail(LEV_ERR_ARG, "a scope of %d streams; 0 to %d can be named", n_streams, LEV_SCOPE_STREAMS);
  scope s = {.n_users = n_streams, .first_region = arena->n_regions, .start = arena->work};
  for (int i = 0; i < n_streams; ++i) LEV_TRY(find_user(arena, streams[i], &s.users[i]));
  LEV_TRY(wait_marks(arena, &s));
  arena->scopes[arena->depth++] = s;
  return LEV_OK;
}

lev_status lev_arena_alloc(lev_arena *arena, const char *tag, size_t bytes, void **out) {
  *out = NULL;
  if (arena->depth == 0) return lev_fail(LEV_ERR_MISUSE, "%s: %zu work bytes asked outside any scope", tag, bytes);
  scope *s = &arena->scopes[arena->depth - 1];
  if (arena->n_regions == MAX_REGIONS)
    return lev_fail(LEV_ERR_CAPACITY, "%s: more than %d work regions open", tag, MAX_REGIONS);
  size_t rounded;
  LEV_TRY(take(arena, tag, bytes, &rounded, out));
  if (rounded == 0) return LEV_OK;
  arena->regions[arena->n_regions++] = (region){ledger_text(arena, tag), rounded};
  arena->work += rounded;
  arena->work_peak = lev_max_size(arena->work_peak, arena->work);
  if (s->stale) LEV_TRY(wait_marks(arena, s));
  return LEV_OK;
}

lev_status lev_arena_pop(lev_arena *arena) {
  if (arena->depth == 0) return lev_fail(LEV_ERR_MISUSE, "no scope is open");
  const scope *s = &arena->scopes[--arena->depth];
  lev_status first = LEV_OK;
  for (int i = arena->n_regions - 1; i >= s->first_region; --i) {
    lev_status st = lev_ledger_sub(arena->ledger, arena->cls, arena->regions[i].tag, arena->regions[i].bytes);
    if (first == LEV_OK) first = st;
  }
  arena->n_regions = s->first_region;
  arena->work = s->start;
  for (int i = 0; i < s->n_users; ++i) {
    user *u = &arena->users[s->users[i]];
    lev_status st = lev_event_record(u->event, u->stream);
    if (st == LEV_OK) ++u->mark;
    if (first == LEV_OK) first = st;
  }
  if (arena->depth > 0) arena->scopes[arena->depth - 1].stale = true;
  return first;
}

lev_status lev_arena_poison(lev_arena *arena, int byte) {
  lev_backend backend = lev_device_backend(arena->device);
  size_t used = arena->persistent + arena->work;
  if (backend == LEV_BACKEND_DRY || used == arena->bytes) return LEV_OK;
  for (int i = 0; i < arena->n_users; ++i)
    if (arena->users[i].mark > 0) LEV_TRY(lev_event_sync(arena->users[i].event));
  void *at = (void *)(arena->base + used);
  size_t bytes = arena->bytes - used;
  if (backend == LEV_BACKEND_CPU || arena->cls != LEV_MEM_DEVICE) {
    memset(at, byte, bytes);
    return LEV_OK;
  }
  lev_stream *stream;
  LEV_TRY(lev_stream_create(arena->device, "arena.poison", &stream));
  lev_status st = lev_fill(stream, at, byte, bytes, "arena.poison");
  if (st == LEV_OK) st = lev_stream_sync(stream);
  lev_stream_destroy(stream);
  return st;
}
