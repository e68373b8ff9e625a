/* SPDX-License-Identifier: Apache-2.0 */
#include "common/device.h"

#include <stdio.h>

#include "common/device_impl.h"
#include "common/hostmem.h"

/* NULL: not part of this build. */
static const lev_device_ops *const backends[LEV_BACKENDS] = {
    [LEV_BACKEND_CPU] = &lev_device_cpu_ops,
    [LEV_BACKEND_DRY] = &lev_device_dry_ops,
#ifdef LEV_HAVE_CUDA
    [LEV_BACKEND_CUDA] = &lev_device_cuda_ops,
#endif
};

const char *lev_backend_name(lev_backend backend) {
  static const char *const names[LEV_BACKENDS] = {
      [LEV_BACKEND_CPU] = "cpu", [LEV_BACKEND_CUDA] = "cuda", [LEV_BACKEND_DRY] = "dry"};
  return (unsigned)backend < LEV_BACKENDS ? names[backend] : "?";
}

int lev_device_count(lev_backend backend) {
  return (unsigned)backend < LEV_BACKENDS && backends[backend] ? backends[backend]->count() : 0;
}

/* ---- devices ---- */

lev_status lev_device_open(const lev_device_config *config, lev_device **out) {
  *out = NULL;
  if ((unsigned)config->backend >= LEV_BACKENDS)
    return lev_fail(LEV_ERR_ARG, "unknown device backend %d", (int)config->backend);
  const lev_device_ops *ops = backends[config->backend];
  if (!ops)
    return lev_fail(LEV_ERR_UNSUPPORTED, "this build has no %s backend; cpu and dry are always there",
                    lev_backend_name(config->backend));
  int count = ops->count();
  if (count == 0)
    return lev_fail(LEV_ERR_DEVICE, "no %s device found on this machine", lev_backend_name(config->backend));
  if (config->backend == LEV_BACKEND_CUDA && (config->index < 0 || config->index >= count))
    return lev_fail(LEV_ERR_ARG, "%s device %d asked, 0 to %d exist", lev_backend_name(config->backend), config->index,
                    count - 1);
  lev_device *device = lev_calloc(LEV_HEAP_COMMON, 1, ops->device_bytes);
  if (!device) return LEV_ERR_NOMEM;
  device->ops = ops, device->config = *config;
  lev_status st = ops->open(device);
  if (st != LEV_OK) {
    lev_free(device);
    return st;
  }
  *out = device;
  return LEV_OK;
}

void lev_device_close(lev_device *device) {
  if (!device) return;
  for (lev_stream *s = device->streams; s; s = s->next) lev_stream_destroy(s);
  lev_profile_destroy(device->profile);
  if (device->ops->phase) device->ops->phase(device, NULL, -1);
  while (device->events) lev_event_destroy(device->events);
  while (device->streams) {
    lev_stream *next = device->streams->next;
    device->ops->stream_close(device->streams);
    lev_free(device->streams);
    device->streams = next;
  }
  while (device->slabs) lev_device_free(device, device->slabs->address);
  device->ops->close(device);
  lev_free(device);
}

lev_backend lev_device_backend(const lev_device *device) {
  return device->config.backend;
}
lev_backend lev_device_target(const lev_device *device) {
  return device->config.backend == LEV_BACKEND_DRY ? device->config.dry_for : device->config.backend;
}
lev_trace *lev_device_trace(const lev_device *device) {
  return device->config.trace;
}
lev_fault *lev_device_fault(const lev_device *device) {
  return device->config.fault;
}
void lev_device_seal(lev_device *device) {
  device->sealed = true;
}

void lev_device_name(lev_device *device, char *out, size_t size) {
  device->ops->name(device, out, size);
}

lev_status lev_device_memory(lev_device *device, size_t *free_bytes, size_t *total_bytes) {
  return device->ops->memory(device, free_bytes, total_bytes);
}

/* ---- slabs ---- */

lev_status lev_device_alloc(lev_device *device, lev_mem cls, size_t bytes, void **out) {
  *out = NULL;
  if ((unsigned)cls >= LEV_MEM_CLASSES) return lev_fail(LEV_ERR_ARG, "unknown memory class %d", (int)cls);
  if (device->sealed)
    return lev_fail(LEV_ERR_SEALED, "%zu bytes of %s memory asked after the device was sealed", bytes,
                    lev_mem_name(cls));
  if (bytes > 0 && lev_fault_hit(device->config.fault, LEV_FAULT_ALLOC))
    return lev_fail(LEV_ERR_NOMEM, "allocation of %zu bytes of %s memory failed (injected)", bytes, lev_mem_name(cls));
  lev_slab *slab = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *slab);
  if (!slab) return LEV_ERR_NOMEM;
  slab->cls = cls, slab->bytes = bytes;
  lev_status st = device->ops->alloc(device, cls, bytes, &slab->address);
  if (st != LEV_OK) {
    lev_free(slab);
    return st;
  }
  slab->next = device->slabs;
  device->slabs = slab;
  *out = slab->address;
  return LEV_OK;
}

void lev_device_free(lev_device *device, void *address) {
  if (!address) return;
  for (lev_slab **at = &device->slabs; *at; at = &(*at)->next) {
    lev_slab *slab = *at;
    if (slab->address != address) continue;
    *at = slab->next;
    device->ops->free(device, slab->cls, slab->address, slab->bytes);
    lev_free(slab);
    return;
  }
}

/* ---- streams and events ---- */

lev_status lev_stream_create(lev_device *device, const char *name, lev_stream **out) {
  *out = NULL;
  lev_stream *stream = lev_calloc(LEV_HEAP_COMMON, 1, device->ops->stream_bytes);
  if (!stream) return LEV_ERR_NOMEM;
  stream->device = device;
  snprintf(stream->name, sizeof stream->name, "%s", name ? name : "");
  lev_status st = device->ops->stream_open(stream);
  if (st != LEV_OK) {
    lev_free(stream);
    return st;
  }
  stream->next = device->streams;
  device->streams = stream;
  *out = stream;
  return LEV_OK;
}

/* The struct stays: marks of events, also those that other streams were told to wait for, point to it. */
void lev_stream_destroy(lev_stream *stream) {
  if (!stream || stream->stopped) return;
  stream->device->ops->stream_stop(stream);
  stream->stopped = true;
}

lev_status lev_stream_sync(lev_stream *stream) {
  return stream->device->ops->stream_sync(stream);
}
lev_device *lev_stream_device(const lev_stream *stream) {
  return stream->device;
}
const char *lev_stream_name(const lev_stream *stream) {
  return stream->name;
}

static lev_status event_create(lev_device *device, bool timed, lev_event **out) {
  *out = NULL;
  lev_event *event = lev_calloc(LEV_HEAP_COMMON, 1, device->ops->event_bytes);
  if (!event) return LEV_ERR_NOMEM;
  event->device = device;
  event->timed = timed;
  lev_status st = device->ops->event_open(event);
  if (st != LEV_OK) {
    lev_free(event);
    return st;
  }
  event->next = device->events;
  event->link = &device->events;
  if (event->next) event->next->link = &event->next;
  device->events = event;
  *out = event;
  return LEV_OK;
}

lev_status lev_event_create(lev_device *device, lev_event **out) {
  return event_create(device, false, out);
}
lev_status lev_event_create_timed(lev_device *device, lev_event **out) {
  return event_create(device, true, out);
}

void lev_event_destroy(lev_event *event) {
  if (!event) return;
  event->device->ops->event_close(event);
  *event->link = event->next;
  if (event->next) event->next->link = event->link;
  lev_free(event);
}

static lev_status same_device(const lev_stream *stream, const lev_event *event) {
  if (stream->device == event->device) return LEV_OK;
  return lev_fail(LEV_ERR_ARG, "stream %s and the event belong to different devices", stream->name);
}

static lev_status not_stopped(const lev_stream *stream) {
  if (!stream->stopped) return LEV_OK;
  return lev_fail(LEV_ERR_MISUSE, "stream %s was destroyed", stream->name);
}

lev_status lev_event_record(lev_event *event, lev_stream *stream) {
  LEV_TRY(same_device(stream, event));
  LEV_TRY(not_stopped(stream));
  LEV_TRY(stream->device->ops->event_record(event, stream));
  event->stream = stream;
  return LEV_OK;
}

lev_status lev_stream_wait(lev_stream *stream, lev_event *event) {
  LEV_TRY(same_device(stream, event));
  LEV_TRY(not_stopped(stream));
  if (!event->stream || event->stream == stream) return LEV_OK; /* nothing to wait for: not counted either */
  lev_fault *fault = stream->device->config.fault;
  if (lev_fault_hit(fault, LEV_FAULT_DROP_WAIT)) return LEV_OK;
  if (fault) fault->site = __builtin_return_address(0);
  return stream->device->ops->stream_wait(stream, event);
}

lev_status lev_event_sync(lev_event *event) {
  return event->stream ? event->device->ops->event_sync(event) : LEV_OK;
}

lev_status lev_event_elapsed(lev_event *start, lev_event *stop, double *seconds) {
  *seconds = 0;
  if (start->device != stop->device) return lev_fail(LEV_ERR_ARG, "the two events belong to different devices");
  if (!start->timed || !stop->timed || !start->stream || !stop->stream)
    return lev_fail(LEV_ERR_MISUSE, "time between events that were %s",
                    start->timed && stop->timed ? "never recorded" : "not created as timed ones");
  LEV_TRY(lev_event_sync(start));
  LEV_TRY(lev_event_sync(stop));
  return start->device->ops->event_elapsed(start, stop, seconds);
}

void lev_stream_set_workspace(lev_stream *stream, void *workspace, size_t bytes) {
  stream->workspace = workspace;
  stream->workspace_bytes = workspace ? bytes : 0;
}

void *lev_stream_workspace(const lev_stream *stream, size_t *bytes) {
  if (bytes) *bytes = stream->workspace_bytes;
  return stream->workspace;
}

/* ---- operations ---- */

static lev_status begin_copy(lev_stream *stream, const char *what, size_t bytes, const char *label) {
  LEV_TRY(not_stopped(stream));
  const lev_device_config *config = &stream->device->config;
  if (lev_fault_hit(config->fault, LEV_FAULT_COPY))
    return lev_fail(LEV_ERR_DEVICE, "%s of %zu bytes (%s) failed (injected)", what, bytes, label ? label : "");
  lev_trace_add(config->trace, LEV_EV_COPY, 0, label, bytes);
  return LEV_OK;
}

lev_status lev_copy(lev_stream *stream, void *dst, const void *src, size_t bytes, const char *label) {
  if (bytes > 0 && (!dst || !src))
    return lev_fail(LEV_ERR_ARG, "copy of %zu bytes (%s) from %p to %p", bytes, label ? label : "", src, dst);
  LEV_TRY(begin_copy(stream, "copy", bytes, label));
  if (bytes == 0) return LEV_OK;
  int64_t span = lev_span_begin(stream, LEV_SPAN_COPY, label, bytes, dst, src);
  lev_status st = stream->device->ops->copy(stream, dst, src, bytes);
  lev_span_end(stream, span);
  return st;
}

lev_status lev_fill(lev_stream *stream, void *dst, int byte, size_t bytes, const char *label) {
  if (bytes > 0 && !dst) return lev_fail(LEV_ERR_ARG, "fill of %zu bytes (%s) at NULL", bytes, label ? label : "");
  LEV_TRY(begin_copy(stream, "fill", bytes, label));
  if (bytes == 0) return LEV_OK;
  int64_t span = lev_span_begin(stream, LEV_SPAN_FILL, label, bytes, NULL, NULL);
  lev_status st = stream->device->ops->fill(stream, dst, byte, bytes);
  lev_span_end(stream, span);
  return st;
}

static lev_status launch(lev_stream *stream, const lev_kernel *kernel, const void *args, size_t args_bytes,
                         lev_span_kind kind) {
  LEV_TRY(not_stopped(stream));
  if (args_bytes > LEV_ARGS_MAX)
    return lev_fail(LEV_ERR_ARG, "%s: %zu bytes of arguments, at most %d fit", kernel->name, args_bytes, LEV_ARGS_MAX);
  int64_t span = lev_span_begin(stream, kind, kernel->name, 0, NULL, NULL);
  lev_status st = stream->device->ops->launch(stream, kernel, args, args_bytes);
  lev_span_end(stream, span);
  return st;
}

lev_status lev_launch(lev_stream *stream, const lev_kernel *kernel, const void *args, size_t args_bytes) {
  return launch(stream, kernel, args, args_bytes, LEV_SPAN_KERNEL);
}

lev_status lev_launch_host(lev_stream *stream, const lev_kernel *kernel, const void *args, size_t args_bytes) {
  return launch(stream, kernel, args, args_bytes, LEV_SPAN_HOST);
}
