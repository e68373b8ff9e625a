/* SPDX-License-Identifier: Apache-2.0 */
#include "common/trace.h"

#include <string.h>
#include <time.h>

#include "common/hostmem.h"
#include "common/ledger.h"

#define MAX_NAMES 1024
#define NAME_BYTES 64
#define HASH_SLOTS 4096 /* power of two, well above MAX_NAMES */

struct lev_trace {
  lev_trace_event *events;
  int64_t count, capacity, dropped;
  int64_t start_ns;
  int enabled;
  int n_names;
  uint16_t slots[HASH_SLOTS]; /* 1 + name index, 0 = free */
  char names[MAX_NAMES][NAME_BYTES];
};

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

lev_status lev_trace_create(int64_t max_events, lev_trace **out) {
  *out = NULL;
  if (max_events < 0) return lev_fail(LEV_ERR_ARG, "trace of %lld events", (long long)max_events);
  lev_trace *trace = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *trace);
  if (!trace) return LEV_ERR_NOMEM;
  trace->events = lev_calloc(LEV_HEAP_COMMON, (size_t)max_events, sizeof *trace->events);
  if (!trace->events) {
    lev_free(trace);
    return LEV_ERR_NOMEM;
  }
  trace->capacity = max_events;
  trace->enabled = 1;
  trace->start_ns = now_ns();
  *out = trace;
  return LEV_OK;
}

void lev_trace_destroy(lev_trace *trace) {
  if (!trace) return;
  lev_free(trace->events);
  lev_free(trace);
}

/* Index of the name, added if new; -1 when the table is full. Names are told apart by their first 63 bytes. */
static int intern(lev_trace *trace, const char *name) {
  size_t length = strnlen(name, NAME_BYTES - 1);
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < length; ++i) hash = (hash ^ (unsigned char)name[i]) * 16777619u;
  for (uint32_t at = hash % HASH_SLOTS;; at = (at + 1) % HASH_SLOTS) {
    int index = (int)trace->slots[at] - 1;
    if (index < 0) {
      if (trace->n_names == MAX_NAMES) return -1;
      index = trace->n_names++;
      memcpy(trace->names[index], name, length);
      trace->slots[at] = (uint16_t)(index + 1);
      return index;
    }
    if (strncmp(trace->names[index], name, length) == 0 && trace->names[index][length] == '\0') return index;
  }
}

void lev_trace_add(lev_trace *trace, lev_event_kind kind, int cls, const char *name, uint64_t bytes) {
  if (!trace || !trace->enabled) return;
  int index = trace->count < trace->capacity ? intern(trace, name ? name : "") : -1;
  if (index < 0) {
    ++trace->dropped;
    return;
  }
  trace->events[trace->count++] = (lev_trace_event){.time_ns = now_ns() - trace->start_ns,
                                                    .bytes = bytes,
                                                    .name = (uint16_t)index,
                                                    .kind = (uint8_t)kind,
                                                    .cls = (uint8_t)cls};
}

void lev_trace_enable(lev_trace *trace, int on) {
  if (trace) trace->enabled = on != 0;
}

int64_t lev_trace_count(const lev_trace *trace) {
  return trace ? trace->count : 0;
}
int64_t lev_trace_dropped(const lev_trace *trace) {
  return trace ? trace->dropped : 0;
}

const lev_trace_event *lev_trace_at(const lev_trace *trace, int64_t i) {
  return trace && i >= 0 && i < trace->count ? &trace->events[i] : NULL;
}

const char *lev_trace_name(const lev_trace *trace, uint16_t name) {
  return trace && name < trace->n_names ? trace->names[name] : "";
}

static void write_string(FILE *file, const char *text) {
  fputc('"', file);
  for (const unsigned char *p = (const unsigned char *)text; *p; ++p) {
    if (*p == '"' || *p == '\\')
      fprintf(file, "\\%c", *p);
    else if (*p < 0x20)
      fprintf(file, "\\u%04x", *p);
    else
      fputc(*p, file);
  }
  fputc('"', file);
}

lev_status lev_trace_write(const lev_trace *trace, FILE *file) {
  static const char *const kinds[LEV_EV_KINDS] = {"alloc", "free", "bind", "phase", "copy", "coll"};
  for (int64_t i = 0; i < lev_trace_count(trace); ++i) {
    const lev_trace_event *e = &trace->events[i];
    fprintf(file, "{\"t\":%lld,\"ev\":\"%s\"", (long long)e->time_ns, kinds[e->kind]);
    if (e->kind == LEV_EV_ALLOC || e->kind == LEV_EV_FREE)
      fprintf(file, ",\"class\":\"%s\"", lev_mem_name((lev_mem)e->cls));
    fputs(",\"name\":", file);
    write_string(file, trace->names[e->name]);
    fprintf(file, ",\"bytes\":%llu}\n", (unsigned long long)e->bytes);
  }
  if (fflush(file) != 0 || ferror(file))
    return lev_fail(LEV_ERR_IO, "writing a trace of %lld events failed", (long long)lev_trace_count(trace));
  return LEV_OK;
}
