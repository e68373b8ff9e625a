/* SPDX-License-Identifier: Apache-2.0 */
#include "common/profile.h"

#include <stdio.h>

#include "common/device_impl.h"
#include "common/hostmem.h"

#define PHASES 4096
#define STREAMS 256

struct lev_profile {
  lev_device *device;
  bool on;
  int64_t cap, n, dropped;
  lev_span *spans;
  lev_event **marks; /* [2 cap]: begin and end of each span, made at their first use */
  lev_event *origin;
  const lev_stream *streams[STREAMS];
  int n_streams, n_phases;
  lev_profile_phase phases[PHASES]; /* the last one takes what finds no room */
};

const char *lev_span_kind_name(lev_span_kind kind) {
  static const char *const names[LEV_SPAN_KINDS] = {[LEV_SPAN_KERNEL] = "kernel",
                                                    [LEV_SPAN_COPY] = "copy",
                                                    [LEV_SPAN_FILL] = "fill",
                                                    [LEV_SPAN_COLL] = "collective",
                                                    [LEV_SPAN_HOST] = "host"};
  return (unsigned)kind < LEV_SPAN_KINDS ? names[kind] : "?";
}

lev_status lev_profile_create(lev_device *device, int64_t max_spans, lev_profile **out) {
  *out = NULL;
  if (device->profile) return lev_fail(LEV_ERR_MISUSE, "the device has a profile already");
  lev_profile *p = lev_calloc(LEV_HEAP_REPORT, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  p->device = device, p->cap = max_spans;
  p->spans = lev_calloc(LEV_HEAP_REPORT, (size_t)max_spans, sizeof *p->spans);
  p->marks = lev_calloc(LEV_HEAP_REPORT, (size_t)max_spans, 2 * sizeof *p->marks);
  if (!p->spans || !p->marks) {
    lev_profile_destroy(p);
    return LEV_ERR_NOMEM;
  }
  lev_status st = lev_event_create_timed(device, &p->origin);
  if (st != LEV_OK) {
    lev_profile_destroy(p);
    return st;
  }
  *out = device->profile = p;
  return LEV_OK;
}

void lev_profile_destroy(lev_profile *p) {
  if (!p) return;
  lev_free(p->marks);
  lev_free(p->spans);
  lev_free(p);
}

lev_status lev_profile_start(lev_profile *p, lev_stream *stream) {
  p->n = p->dropped = 0;
  p->n_streams = p->n_phases = 0;
  p->on = p->device->config.backend != LEV_BACKEND_DRY;
  return p->on ? lev_event_record(p->origin, stream) : LEV_OK;
}

void lev_profile_stop(lev_profile *p) {
  p->on = false;
}

lev_status lev_profile_read(lev_profile *p) {
  for (lev_stream *s = p->device->streams; s; s = s->next)
    if (!s->stopped) LEV_TRY(lev_stream_sync(s));
  for (int64_t i = 0; i < p->n; ++i) {
    LEV_TRY(lev_event_elapsed(p->origin, p->marks[2 * i], &p->spans[i].begin));
    LEV_TRY(lev_event_elapsed(p->origin, p->marks[2 * i + 1], &p->spans[i].end));
  }
  return LEV_OK;
}

int64_t lev_profile_count(const lev_profile *p) {
  return p->n;
}
int64_t lev_profile_dropped(const lev_profile *p) {
  return p->dropped;
}
const lev_span *lev_profile_at(const lev_profile *p, int64_t i) {
  return &p->spans[i];
}
int lev_profile_streams(const lev_profile *p) {
  return p->n_streams;
}
const char *lev_profile_stream(const lev_profile *p, int stream) {
  return p->streams[stream]->name;
}
lev_profile_phase lev_profile_phase_at(const lev_profile *p, int phase) {
  return p->phases[phase];
}

/* ---- what device.c and comm.c record ---- */

/* Number of a stream, those with the same name apart; the last one takes what finds no room. */
static int stream_index(lev_profile *p, const lev_stream *stream) {
  for (int i = p->n_streams - 1; i >= 0; --i)
    if (p->streams[i] == stream) return i;
  if (p->n_streams == STREAMS) return STREAMS - 1;
  p->streams[p->n_streams] = stream;
  return p->n_streams++;
}

/* Whether an address lies in a slab of device memory; addresses of no slab are peers' or library's: device memory too.
 */
static bool on_device(const lev_device *device, const void *address) {
  uintptr_t a = (uintptr_t)address;
  for (const lev_slab *s = device->slabs; s; s = s->next)
    if (a >= (uintptr_t)s->address && a - (uintptr_t)s->address < s->bytes) return s->cls == LEV_MEM_DEVICE;
  return true;
}

static lev_status mark(lev_stream *stream, lev_event **event) {
  if (!*event) LEV_TRY(lev_event_create_timed(stream->device, event));
  return lev_event_record(*event, stream);
}

int64_t lev_span_begin(lev_stream *stream, lev_span_kind kind, const char *name, uint64_t bytes, const void *to,
                       const void *from) {
  lev_profile *p = stream->device->profile;
  if (!p || !p->on) return -1;
  if (p->n == p->cap) {
    ++p->dropped;
    return -1;
  }
  int64_t i = p->n;
  if (mark(stream, &p->marks[2 * i]) != LEV_OK) return -1;
  p->spans[i] = (lev_span){.name = name ? name : "",
                           .stream = stream_index(p, stream),
                           .phase = p->n_phases - 1,
                           .kind = kind,
                           .host_link = to && from && on_device(stream->device, to) != on_device(stream->device, from),
                           .bytes = bytes};
  ++p->n;
  return i;
}

void lev_span_end(lev_stream *stream, int64_t span) {
  lev_profile *p = stream->device->profile;
  if (span < 0) return;
  if (mark(stream, &p->marks[2 * span + 1]) != LEV_OK) p->n = span; /* a failing stream */
}

void lev_device_phase(lev_device *device, const char *name, int64_t index) {
  lev_profile *p = device->profile;
  if (device->ops->phase) device->ops->phase(device, name, index);
  if (!p || !p->on) return;
  if (p->n_phases < PHASES) ++p->n_phases;
  p->phases[p->n_phases - 1] = (lev_profile_phase){name, index};
}
