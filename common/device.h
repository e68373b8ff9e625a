/* SPDX-License-Identifier: Apache-2.0 */
/* The device runtime: slabs of memory, copies, streams, events, kernel launches. One lev_device belongs to one rank
 * and is driven by one host thread.
 *
 *   cpu   every stream is a queue with its own worker thread, so a missing event wait is a real race that
 *         ThreadSanitizer sees; `immediate` runs each operation inline instead (debugging, tiny tests).
 *   cuda  streams and events of one GPU; an absent driver means zero devices.
 *   dry   no memory and no arithmetic: addresses are fake, launches and copies are only recorded. It is what
 *         `levee plan` runs, through the same code path.
 *
 * Everything here is asynchronous on its stream unless its comment says that it waits. */
#ifndef LEV_COMMON_DEVICE_H
#define LEV_COMMON_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/fault.h"
#include "common/ledger.h"
#include "common/status.h"
#include "common/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_backend { LEV_BACKEND_CPU, LEV_BACKEND_CUDA, LEV_BACKEND_DRY, LEV_BACKENDS } lev_backend;
const char *lev_backend_name(lev_backend backend);

typedef struct lev_device lev_device;
typedef struct lev_stream lev_stream;
typedef struct lev_event lev_event;

typedef struct lev_device_config {
  lev_backend backend;
  int index;            /* GPU number (cuda); ignored elsewhere */
  bool immediate;       /* cpu: run operations inline on the caller's thread */
  uint64_t jitter_seed; /* cpu: nonzero = random delay before each queued operation (race tests) */
  bool pin_beyond_free; /* cuda: pinned slabs may pass what the machine has free, and has at all: for machines whose
                           memory grows as it is touched. Where it does not, the system may end the process */
  lev_backend dry_for;  /* dry: the backend planned for; a launch without its side fails as it would there */
  lev_trace *trace;     /* nullable; outlives the device */
  lev_fault *fault;     /* nullable; outlives the device */
} lev_device_config;

/* Devices of a backend on this machine (cpu: 1, dry: 1; cuda: GPUs before the first one without compute capability 9.0,
 * 0 without a driver or in a CUDA=0 build). */
int lev_device_count(lev_backend backend);
LEV_MUST_CHECK lev_status lev_device_open(const lev_device_config *config, lev_device **out);
/* Waits for all streams, destroys them and frees what lev_device_alloc gave and was not freed. NULL is fine. */
void lev_device_close(lev_device *device);
lev_backend lev_device_backend(const lev_device *device);
/* The backend whose plans this device makes: dry_for on dry, its own otherwise. */
lev_backend lev_device_target(const lev_device *device);
lev_trace *lev_device_trace(const lev_device *device);
lev_fault *lev_device_fault(const lev_device *device);

/* A slab of `bytes` in class `cls`, aligned to 4096. LEV_MEM_DEVICE is host memory on cpu; LEV_MEM_PINNED is one
 * mapping, huge pages advised, touched, and registered with the GPU on cuda. Meant for set-up: once lev_device_seal was
 * called this is LEV_ERR_SEALED. Posts nothing to any ledger: arenas do. Waits. Errors: LEV_ERR_NOMEM (says bytes and
 * what is free), LEV_ERR_SEALED. bytes = 0 yields a valid pointer that must not be read. */
LEV_MUST_CHECK lev_status lev_device_alloc(lev_device *device, lev_mem cls, size_t bytes, void **out);
void lev_device_free(lev_device *device, void *slab);
void lev_device_seal(lev_device *device);
/* The device in words ("NVIDIA H200", a CPU's model name, "dry"), cut off at `size` bytes. */
void lev_device_name(lev_device *device, char *out, size_t size);
/* Free and total bytes of the device (cpu: of the machine; dry: SIZE_MAX both). */
LEV_MUST_CHECK lev_status lev_device_memory(lev_device *device, size_t *free_bytes, size_t *total_bytes);

/* Streams and events are created at set-up and owned by the device (destroy is optional, and waits). Errors: creating
 * gives LEV_ERR_NOMEM and LEV_ERR_DEVICE; calls on a destroyed stream LEV_ERR_MISUSE, on a stream and an event of two
 * devices LEV_ERR_ARG, and where the device itself fails LEV_ERR_DEVICE; what waits also gives the error of what it
 * waited for. */
LEV_MUST_CHECK lev_status lev_stream_create(lev_device *device, const char *name, lev_stream **out);
void lev_stream_destroy(lev_stream *stream);
/* Host waits until everything enqueued so far has run; returns the stream's sticky error, if any. */
LEV_MUST_CHECK lev_status lev_stream_sync(lev_stream *stream);
lev_device *lev_stream_device(const lev_stream *stream);
const char *lev_stream_name(const lev_stream *stream);

LEV_MUST_CHECK lev_status lev_event_create(lev_device *device, lev_event **out);
void lev_event_destroy(lev_event *event);
/* Marks the stream's current end. Recording again moves the mark; waits already enqueued keep the old one. */
LEV_MUST_CHECK lev_status lev_event_record(lev_event *event, lev_stream *stream);
/* Later work of `stream` starts only after the event's latest mark at the time of this call; a never recorded event
 * passes at once. */
LEV_MUST_CHECK lev_status lev_stream_wait(lev_stream *stream, lev_event *event);
/* Host waits for the latest mark. */
LEV_MUST_CHECK lev_status lev_event_sync(lev_event *event);
/* An event whose marks carry the time at which the stream reached them (cpu: of the clock, cuda: of the GPU). It costs
 * more than a plain one, and is recorded again only after its mark has passed: for measurements. */
LEV_MUST_CHECK lev_status lev_event_create_timed(lev_device *device, lev_event **out);
/* Seconds between the latest marks of two timed events of one device; waits for both. 0 on dry. Errors: LEV_ERR_MISUSE
 * (not timed, or never recorded), LEV_ERR_ARG (two devices), the streams' errors. */
LEV_MUST_CHECK lev_status lev_event_elapsed(lev_event *start, lev_event *stop, double *seconds);

/* Copies between any two classes of this device; regions must not overlap. `label` (static text) names it in the trace.
 * 0 bytes is a no-op that still counts as an event. Errors: LEV_ERR_ARG (bytes, but a NULL address), LEV_ERR_MISUSE (a
 * destroyed stream), LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status lev_copy(lev_stream *stream, void *dst, const void *src, size_t bytes, const char *label);
LEV_MUST_CHECK lev_status lev_fill(lev_stream *stream, void *dst, int byte, size_t bytes, const char *label);

/* A compute operation, one entry per backend. `args` points to the operation's own plain struct, which lev_launch
 * copies (at most LEV_ARGS_MAX bytes); everything it points to must stay valid until the stream has run it. cpu runs on
 * the stream's worker and cannot fail: validate before launching. cuda enqueues kernels on a cudaStream_t. */
#define LEV_ARGS_MAX 512
typedef struct lev_kernel {
  const char *name; /* "module.operation" */
  void (*cpu)(const void *args);
  lev_status (*cuda)(const void *args, void *cuda_stream); /* NULL: no CUDA side (LEV_ERR_UNSUPPORTED) */
} lev_kernel;

/* Names a CUDA launcher in a kernel table, NULL in CUDA=0 builds. */
#ifdef LEV_HAVE_CUDA
#define LEV_CUDA(function) function
#else
#define LEV_CUDA(function) NULL
#endif

/* Enqueues the kernel; on dry it does nothing. Errors: LEV_ERR_ARG (args too large), LEV_ERR_UNSUPPORTED,
 * LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status lev_launch(lev_stream *stream, const lev_kernel *kernel, const void *args, size_t args_bytes);
#define LEV_LAUNCH(stream, kernel, args) lev_launch((stream), (kernel), &(args), sizeof(args))
/* The same of work that host threads do on cuda too: a profile does not count its time as the device computing. */
LEV_MUST_CHECK lev_status lev_launch_host(lev_stream *stream, const lev_kernel *kernel, const void *args,
                                          size_t args_bytes);

/* The stream's own scratch for library calls (bf16 GEMM panels on cpu, cuBLAS workspace on cuda), given by the owner
 * out of an arena under the tag "library". Streams without it cannot run bf16 GEMMs. NULL / 0 where none was set. */
void lev_stream_set_workspace(lev_stream *stream, void *workspace, size_t bytes);
void *lev_stream_workspace(const lev_stream *stream, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
