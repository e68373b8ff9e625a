/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA side of common/ shares. Private to the .cu files there and comm_local_cuda.c; free of CUDA headers. */
#ifndef LEV_COMMON_CUDA_IMPL_H
#define LEV_COMMON_CUDA_IMPL_H

#include "common/device_impl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A CUDA stream carries a sticky error, as a cpu stream does: set by a failed collective or CUDA call, passed on to
 * streams that wait for it, returned by every wait of the host. Operations enqueued on a failed stream are skipped.
 * The first error stays; its text is this thread's detail. */
void lev_cuda_stream_fail(lev_stream *stream, lev_status status);
/* The sticky error, LEV_OK if none; sets this thread's detail. */
lev_status lev_cuda_stream_status(lev_stream *stream);

/* As lev_stream_wait, for an event of another rank, possibly on another GPU: no error passes on, and the event's own
 * bookkeeping is not read, so its rank may go on using it. It must have been recorded at least once, before the ranks
 * met. */
LEV_MUST_CHECK lev_status lev_cuda_wait_peer(lev_stream *stream, const lev_event *event);
/* Lets kernels of `device` read and write the memory of GPU `peer`. Errors: LEV_ERR_UNSUPPORTED. */
LEV_MUST_CHECK lev_status lev_cuda_reach(lev_device *device, int peer);
/* Waits until GPU `peer` has done all that was enqueued on it, if it is another than the device's. */
void lev_cuda_drain(lev_device *device, int peer);

#ifdef __cplusplus
}
#endif
#endif
