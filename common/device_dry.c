/* SPDX-License-Identifier: Apache-2.0 */
/* The dry backend: addresses nobody may touch, and operations that do nothing. */
#include <stdint.h>
#include <stdio.h>

#include "common/device_impl.h"
#include "common/dims.h"

/* Addresses start where no process has memory, so that a stray access faults; slabs do not overlap and keep a gap. */
#define DRY_BASE ((uintptr_t)1 << 56)
#define DRY_GAP ((uintptr_t)1 << 20)
#define DRY_LARGEST ((size_t)1 << 55) /* address space one slab is given at most, whatever its size */

typedef struct dry_device {
  lev_device base;
  uintptr_t next;
} dry_device;

static int dry_count(void) {
  return 1;
}

static lev_status dry_open(lev_device *device) {
  ((dry_device *)device)->next = DRY_BASE;
  return LEV_OK;
}
static void dry_close(lev_device *device) {
  (void)device;
}

static lev_status dry_alloc(lev_device *device, lev_mem cls, size_t bytes, void **out) {
  (void)cls;
  dry_device *dry = (dry_device *)device;
  size_t room = bytes < DRY_LARGEST ? bytes : DRY_LARGEST;
  *out = (void *)dry->next;
  dry->next += (room + 2 * DRY_GAP - 1) / DRY_GAP * DRY_GAP;
  return LEV_OK;
}
static void dry_free(lev_device *device, lev_mem cls, void *slab, size_t bytes) {
  (void)device, (void)cls, (void)slab, (void)bytes;
}
static void dry_name(lev_device *device, char *out, size_t size) {
  (void)device;
  snprintf(out, size, "dry");
}
static lev_status dry_memory(lev_device *device, size_t *free_bytes, size_t *total_bytes) {
  (void)device;
  *free_bytes = *total_bytes = SIZE_MAX;
  return LEV_OK;
}

static lev_status dry_stream(lev_stream *stream) {
  (void)stream;
  return LEV_OK;
}
static void dry_stream_end(lev_stream *stream) {
  (void)stream;
}
static lev_status dry_event(lev_event *event) {
  (void)event;
  return LEV_OK;
}
static void dry_event_close(lev_event *event) {
  (void)event;
}
static lev_status dry_elapsed(lev_event *start, lev_event *stop, double *seconds) {
  (void)start, (void)stop;
  *seconds = 0;
  return LEV_OK;
}
static lev_status dry_record(lev_event *event, lev_stream *stream) {
  (void)event, (void)stream;
  return LEV_OK;
}
static lev_status dry_wait(lev_stream *stream, lev_event *event) {
  (void)stream, (void)event;
  return LEV_OK;
}
static lev_status dry_copy(lev_stream *stream, void *dst, const void *src, size_t bytes) {
  (void)stream, (void)dst, (void)src, (void)bytes;
  return LEV_OK;
}
static lev_status dry_fill(lev_stream *stream, void *dst, int byte, size_t bytes) {
  (void)stream, (void)dst, (void)byte, (void)bytes;
  return LEV_OK;
}
static lev_status dry_launch(lev_stream *stream, const lev_kernel *kernel, const void *args, size_t args_bytes) {
  (void)stream, (void)kernel, (void)args, (void)args_bytes;
#ifdef LEV_HAVE_CUDA
  if (stream->device->config.dry_for == LEV_BACKEND_CUDA && !kernel->cuda)
    return lev_fail(LEV_ERR_UNSUPPORTED, "%s has no cuda side", kernel->name);
#endif
  return LEV_OK;
}

const lev_device_ops lev_device_dry_ops = {
    .count = dry_count,
    .device_bytes = sizeof(dry_device),
    .stream_bytes = sizeof(lev_stream),
    .event_bytes = sizeof(lev_event),
    .open = dry_open,
    .close = dry_close,
    .alloc = dry_alloc,
    .free = dry_free,
    .memory = dry_memory,
    .name = dry_name,
    .stream_open = dry_stream,
    .stream_stop = dry_stream_end,
    .stream_close = dry_stream_end,
    .stream_sync = dry_stream,
    .event_open = dry_event,
    .event_close = dry_event_close,
    .event_record = dry_record,
    .event_sync = dry_event,
    .event_elapsed = dry_elapsed,
    .stream_wait = dry_wait,
    .copy = dry_copy,
    .fill = dry_fill,
    .launch = dry_launch,
};
