/* SPDX-License-Identifier: Apache-2.0 */
/* When every operation of a device ran: one span per launch, copy, fill and collective, with the times its
 * stream came to it and left it (CUDA events; the worker's clock on the cpu). Each span belongs to the phase that the
 * host was in when it enqueued the operation.
 *
 * Spans cost a few microseconds each, so a profiled step is slower than others by that much per launch; off, they cost
 * a comparison. A GPU's times have a resolution of half a microsecond. Used by the device's host thread. */
#ifndef LEV_COMMON_PROFILE_H
#define LEV_COMMON_PROFILE_H

#include "common/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_span_kind {
  LEV_SPAN_KERNEL,
  LEV_SPAN_COPY,
  LEV_SPAN_FILL,
  LEV_SPAN_COLL, /* from this rank's arrival: the wait for the others is inside */
  LEV_SPAN_HOST, /* launched work of host threads (lev_launch_host) */
  LEV_SPAN_KINDS
} lev_span_kind;
const char *lev_span_kind_name(lev_span_kind kind);

typedef struct lev_span {
  const char *name; /* kernel, label of the copy, or collective; static text */
  int stream;       /* index for lev_profile_stream */
  int phase;        /* index for lev_profile_phase_at; -1 before the first */
  lev_span_kind kind;
  bool host_link;    /* a copy between device memory and host or pinned memory */
  uint64_t bytes;    /* copied, filled, or sent to other ranks */
  double begin, end; /* seconds since lev_profile_start; filled in by lev_profile_read */
} lev_span;

typedef struct lev_profile lev_profile;

/* Attaches a profile to `device`, at most one, with room for max_spans spans; it ends with the device. Nothing is
 * recorded before lev_profile_start. On the dry backend it records nothing ever. Errors: LEV_ERR_NOMEM, LEV_ERR_MISUSE.
 */
LEV_MUST_CHECK lev_status lev_profile_create(lev_device *device, int64_t max_spans, lev_profile **out);

/* Forgets what was recorded and records from now on; `stream` gives the origin of time. The events of the spans are
 * made as they are first needed and kept. */
LEV_MUST_CHECK lev_status lev_profile_start(lev_profile *profile, lev_stream *stream);
/* Records no further. */
void lev_profile_stop(lev_profile *profile);
/* Waits for all streams of the device and fills in the times. */
LEV_MUST_CHECK lev_status lev_profile_read(lev_profile *profile);

int64_t lev_profile_count(const lev_profile *profile);
/* Operations that found no room. */
int64_t lev_profile_dropped(const lev_profile *profile);
const lev_span *lev_profile_at(const lev_profile *profile, int64_t i);
int lev_profile_streams(const lev_profile *profile);
const char *lev_profile_stream(const lev_profile *profile, int stream);

typedef struct lev_profile_phase {
  const char *name; /* static text */
  int64_t index;    /* layer, micro-batch or step; -1 = none */
} lev_profile_phase;
lev_profile_phase lev_profile_phase_at(const lev_profile *profile, int phase);

/* The host enters a phase (`name`: static text): later spans belong to it, and tools that read NVTX see it as a range
 * of this thread until the next one. Works without a profile. */
void lev_device_phase(lev_device *device, const char *name, int64_t index);

#ifdef __cplusplus
}
#endif
#endif
