/* SPDX-License-Identifier: Apache-2.0 */
#include "common/hostmem.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/dims.h"

static const char *const heap_names[LEV_HEAP_COUNT] = {
#define HEAP_NAME(name, text) [LEV_HEAP_##name] = text,
    LEV_HEAP_TABLE(HEAP_NAME)
#undef HEAP_NAME
};

static atomic_size_t heap_calls[LEV_HEAP_COUNT];
static atomic_size_t heap_peak[LEV_HEAP_COUNT];

const char *lev_heap_name(lev_heap heap) {
  return (unsigned)heap < LEV_HEAP_COUNT ? heap_names[heap] : "?";
}

static void raise_peak(lev_heap heap, size_t live) {
  size_t peak = atomic_load_explicit(&heap_peak[heap], memory_order_relaxed);
  while (live > peak && !atomic_compare_exchange_weak_explicit(&heap_peak[heap], &peak, live, memory_order_relaxed,
                                                               memory_order_relaxed)) {
  }
}

#ifdef LEV_PLAIN_MALLOC

/* Each block is preceded by its size and heap; 16 bytes, so that malloc's alignment is kept. */
typedef union header {
  struct {
    size_t bytes;
    lev_heap heap;
  } is;
  max_align_t align;
} header;

static atomic_size_t heap_live[LEV_HEAP_COUNT];

static void count_add(lev_heap heap, size_t bytes) {
  size_t live = atomic_fetch_add_explicit(&heap_live[heap], bytes, memory_order_relaxed) + bytes;
  raise_peak(heap, live);
}

static void count_sub(lev_heap heap, size_t bytes) {
  atomic_fetch_sub_explicit(&heap_live[heap], bytes, memory_order_relaxed);
}

static void *block_new(lev_heap heap, size_t bytes) {
  if (bytes > SIZE_MAX - sizeof(header)) return NULL;
  header *h = calloc(1, sizeof(header) + bytes);
  if (!h) return NULL;
  h->is.bytes = bytes;
  h->is.heap = heap;
  count_add(heap, bytes);
  return h + 1;
}

static void *block_resize(lev_heap heap, void *pointer, size_t bytes) {
  header *old = (header *)pointer - 1;
  size_t old_bytes = old->is.bytes;
  lev_heap old_heap = old->is.heap;
  if (bytes > SIZE_MAX - sizeof(header)) return NULL;
  header *h = realloc(old, sizeof(header) + bytes);
  if (!h) return NULL;
  h->is.bytes = bytes;
  h->is.heap = heap;
  count_sub(old_heap, old_bytes);
  count_add(heap, bytes);
  return h + 1;
}

static void block_free(void *pointer) {
  header *h = (header *)pointer - 1;
  count_sub(h->is.heap, h->is.bytes);
  free(h);
}

static size_t read_live(lev_heap heap, size_t *resident) {
  *resident = 0;
  return atomic_load_explicit(&heap_live[heap], memory_order_relaxed);
}

#else

#include <jemalloc/jemalloc.h>

static pthread_once_t arenas_once = PTHREAD_ONCE_INIT;
static unsigned arena_index[LEV_HEAP_COUNT];
static int arena_known[LEV_HEAP_COUNT]; /* 0: the heap shares jemalloc's automatic arenas and has no statistics */

static void make_arenas(void) {
  for (int i = 0; i < LEV_HEAP_COUNT; ++i) {
    size_t bytes = sizeof arena_index[i];
    arena_known[i] = mallctl("arenas.create", &arena_index[i], &bytes, NULL, 0) == 0;
  }
}

/* No thread cache: a freed block goes back to its arena at once, so that the statistics are exact. */
static int heap_flags(lev_heap heap) {
  pthread_once(&arenas_once, make_arenas);
  return arena_known[heap] ? MALLOCX_ARENA(arena_index[heap]) | MALLOCX_TCACHE_NONE : 0;
}

static void *block_new(lev_heap heap, size_t bytes) {
  return bytes > PTRDIFF_MAX ? NULL : mallocx(bytes, heap_flags(heap) | MALLOCX_ZERO);
}

static void *block_resize(lev_heap heap, void *pointer, size_t bytes) {
  return bytes > PTRDIFF_MAX ? NULL : rallocx(pointer, bytes, heap_flags(heap));
}

static void block_free(void *pointer) {
  dallocx(pointer, MALLOCX_TCACHE_NONE);
}

static size_t read_stat(unsigned arena, const char *leaf) {
  char key[96];
  size_t value = 0, bytes = sizeof value;
  snprintf(key, sizeof key, "stats.arenas.%u.%s", arena, leaf);
  return mallctl(key, &value, &bytes, NULL, 0) == 0 ? value : 0;
}

static size_t read_live(lev_heap heap, size_t *resident) {
  *resident = 0;
  (void)heap_flags(heap);
  if (!arena_known[heap]) return 0;
  uint64_t epoch = 1;
  size_t bytes = sizeof epoch;
  (void)mallctl("epoch", &epoch, &bytes, &epoch, sizeof epoch);
  unsigned arena = arena_index[heap];
  *resident = read_stat(arena, "resident");
  return read_stat(arena, "small.allocated") + read_stat(arena, "large.allocated");
}

#endif

void *lev_calloc(lev_heap heap, size_t n, size_t size) {
  if ((unsigned)heap >= LEV_HEAP_COUNT) {
    (void)lev_fail(LEV_ERR_ARG, "unknown heap %d", (int)heap);
    return NULL;
  }
  size_t bytes = lev_sat_mul(n, size);
  void *pointer = block_new(heap, bytes ? bytes : 1);
  if (!pointer) {
    (void)lev_fail(LEV_ERR_NOMEM, "%s: no memory for %zu x %zu bytes", heap_names[heap], n, size);
    return NULL;
  }
  atomic_fetch_add_explicit(&heap_calls[heap], 1, memory_order_relaxed);
  return pointer;
}

void *lev_realloc(lev_heap heap, void *pointer, size_t bytes) {
  if (!pointer) return lev_calloc(heap, bytes, 1);
  if ((unsigned)heap >= LEV_HEAP_COUNT) {
    (void)lev_fail(LEV_ERR_ARG, "unknown heap %d", (int)heap);
    return NULL;
  }
  void *moved = block_resize(heap, pointer, bytes ? bytes : 1);
  if (!moved) {
    (void)lev_fail(LEV_ERR_NOMEM, "%s: no memory to resize a block to %zu bytes", heap_names[heap], bytes);
    return NULL;
  }
  atomic_fetch_add_explicit(&heap_calls[heap], 1, memory_order_relaxed);
  return moved;
}

char *lev_strdup(lev_heap heap, const char *text) {
  size_t bytes = strlen(text) + 1;
  char *copy = lev_calloc(heap, bytes, 1);
  if (copy) memcpy(copy, text, bytes);
  return copy;
}

void lev_free(void *pointer) {
  if (pointer) block_free(pointer);
}

void lev_heap_read(lev_heap heap, lev_heap_stats *out) {
  *out = (lev_heap_stats){0};
  if ((unsigned)heap >= LEV_HEAP_COUNT) return;
  out->allocated = read_live(heap, &out->resident);
  raise_peak(heap, out->allocated);
  out->peak = atomic_load_explicit(&heap_peak[heap], memory_order_relaxed);
  out->calls = atomic_load_explicit(&heap_calls[heap], memory_order_relaxed);
}

void lev_process_memory(size_t *rss, size_t *peak_rss) {
  *rss = 0, *peak_rss = 0;
  FILE *file = fopen("/proc/self/status", "r");
  if (!file) return;
  char line[256];
  while (fgets(line, sizeof line, file)) {
    unsigned long long kib;
    if (sscanf(line, "VmRSS: %llu kB", &kib) == 1) *rss = (size_t)kib * 1024;
    if (sscanf(line, "VmHWM: %llu kB", &kib) == 1) *peak_rss = (size_t)kib * 1024;
  }
  fclose(file);
}
