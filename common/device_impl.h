/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend of device.h provides. Private to common/: device.c validates, counts faults, records the trace and
 * keeps the lists; a backend only does the work. A backend's own structs start with the base structs below. */
#ifndef LEV_COMMON_DEVICE_IMPL_H
#define LEV_COMMON_DEVICE_IMPL_H

#include "common/device.h"
#include "common/profile.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lev_device_ops {
  int (*count)(void);
  size_t device_bytes, stream_bytes, event_bytes; /* of the backend's own structs, allocated zeroed by device.c */

  /* `device` has ops and config filled in. close runs after all streams were stopped and all slabs freed. */
  lev_status (*open)(lev_device *device);
  void (*close)(lev_device *device);
  /* bytes may be 0: still a valid address. The slab is given back with the same cls and bytes. */
  lev_status (*alloc)(lev_device *device, lev_mem cls, size_t bytes, void **out);
  void (*free)(lev_device *device, lev_mem cls, void *slab, size_t bytes);
  lev_status (*memory)(lev_device *device, size_t *free_bytes, size_t *total_bytes);
  void (*name)(lev_device *device, char *out, size_t size);

  lev_status (*stream_open)(lev_stream *stream);
  void (*stream_stop)(lev_stream *stream);  /* drains it, ends its thread; marks on it stay valid */
  void (*stream_close)(lev_stream *stream); /* with the device, after all streams were stopped */
  lev_status (*stream_sync)(lev_stream *stream);

  lev_status (*event_open)(lev_event *event);
  void (*event_close)(lev_event *event);
  lev_status (*event_record)(lev_event *event, lev_stream *stream);
  lev_status (*event_sync)(lev_event *event); /* recorded at least once */
  /* Both timed, recorded at least once, waited for. */
  lev_status (*event_elapsed)(lev_event *start, lev_event *stop, double *seconds);
  /* The event was recorded at least once, last on another stream. */
  lev_status (*stream_wait)(lev_stream *stream, lev_event *event);

  lev_status (*copy)(lev_stream *stream, void *dst, const void *src, size_t bytes);
  lev_status (*fill)(lev_stream *stream, void *dst, int byte, size_t bytes);
  lev_status (*launch)(lev_stream *stream, const lev_kernel *kernel, const void *args, size_t args_bytes);

  /* Nullable: tells tools of a phase; a NULL name ends the last one. */
  void (*phase)(lev_device *device, const char *name, int64_t index);
} lev_device_ops;

extern const lev_device_ops lev_device_cpu_ops;
extern const lev_device_ops lev_device_dry_ops;
#ifdef LEV_HAVE_CUDA
extern const lev_device_ops lev_device_cuda_ops;
#endif

typedef struct lev_slab {
  struct lev_slab *next;
  void *address;
  size_t bytes;
  lev_mem cls;
} lev_slab;

struct lev_device {
  const lev_device_ops *ops;
  lev_device_config config;
  bool sealed;
  lev_slab *slabs;
  lev_stream *streams;
  lev_event *events;
  lev_profile *profile; /* nullable */
};

/* Opens and closes the span of an operation about to be enqueued; `to` and `from` only for copies. -1: not recorded. */
int64_t lev_span_begin(lev_stream *stream, lev_span_kind kind, const char *name, uint64_t bytes, const void *to,
                       const void *from);
void lev_span_end(lev_stream *stream, int64_t span);
/* With the device; its events end with the device's. */
void lev_profile_destroy(lev_profile *profile);

struct lev_stream {
  lev_device *device;
  lev_stream *next;
  void *workspace;
  size_t workspace_bytes;
  bool stopped;
  char name[32];
};

struct lev_event {
  lev_device *device;
  lev_event *next, **link; /* link: where the pointer to this event is stored */
  lev_stream *stream;      /* of the latest mark, NULL before any */
  bool timed;              /* set before event_open */
};

/* Enqueues a host function on a cpu stream. It runs on the stream's worker with `stream_status`, the error the stream
 * already carries (LEV_OK: none), and its own failure becomes the stream's error, with this thread's detail text.
 * At most LEV_ARGS_MAX bytes of args are copied. */
typedef lev_status (*lev_cpu_fn)(const void *args, lev_status stream_status);
LEV_MUST_CHECK lev_status lev_cpu_enqueue(lev_stream *stream, lev_cpu_fn fn, const void *args, size_t args_bytes);

#ifdef __cplusplus
}
#endif
#endif
