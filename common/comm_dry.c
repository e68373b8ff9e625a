/* SPDX-License-Identifier: Apache-2.0 */
/* A world of any size of which one rank is executed: collectives only count, the control plane sees this rank
 * everywhere. */
#include <string.h>

#include "common/comm_impl.h"
#include "common/hostmem.h"

static const lev_comm_ops dry_ops;

static lev_status create(lev_device *device, int rank, int size, int first, int stride, int world_size,
                         lev_comm **out) {
  lev_comm *comm = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *comm);
  if (!comm) return LEV_ERR_NOMEM;
  *comm = (lev_comm){.ops = &dry_ops,
                     .device = device,
                     .rank = rank,
                     .size = size,
                     .world_rank = first + rank * stride,
                     .world_size = world_size,
                     .first = first,
                     .stride = stride};
  *out = comm;
  return LEV_OK;
}

static lev_status dry_enqueue(lev_comm *comm, lev_stream *stream, const lev_coll *coll) {
  (void)comm, (void)stream, (void)coll;
  return LEV_OK;
}

static lev_status dry_agree(lev_comm *comm, lev_status mine) {
  (void)comm;
  return mine;
}

static lev_status dry_host_all_gather(lev_comm *comm, const void *send, void *recv, size_t bytes) {
  for (int r = 0; r < comm->size; ++r)
    if (bytes > 0) memmove((char *)recv + (size_t)r * bytes, send, bytes);
  return LEV_OK;
}

static void dry_abort(lev_comm *comm) {
  (void)comm;
}

static lev_status dry_split(lev_comm *comm, int color, int key, lev_comm **out) {
  (void)key;
  if (color < 0) return LEV_OK;
  /* Groups of one need nobody's answer. */
  if (comm->size == 1) return create(comm->device, 0, 1, comm->world_rank, 1, comm->world_size, out);
  return lev_fail(LEV_ERR_UNSUPPORTED,
                  "a dry world cannot ask its other %d ranks for their colors; name the group with "
                  "lev_comm_subset",
                  comm->size - 1);
}

static lev_status dry_subset(lev_comm *comm, int first, int stride, int size, int rank, lev_comm **out) {
  return create(comm->device, rank, size, first, stride, comm->world_size, out);
}

static void dry_destroy(lev_comm *comm) {
  lev_free(comm);
}

static const lev_comm_ops dry_ops = {
    .enqueue = dry_enqueue,
    .agree = dry_agree,
    .host_all_gather = dry_host_all_gather,
    .abort = dry_abort,
    .split = dry_split,
    .subset = dry_subset,
    .destroy = dry_destroy,
};

lev_status lev_comm_dry_create(int size, int rank, lev_device *device, lev_comm **out) {
  *out = NULL;
  if (size < 1 || rank < 0 || rank >= size) return lev_fail(LEV_ERR_ARG, "rank %d of a world of %d", rank, size);
  if (lev_device_backend(device) != LEV_BACKEND_DRY)
    return lev_fail(LEV_ERR_ARG, "a dry world runs on a dry device, not on %s",
                    lev_backend_name(lev_device_backend(device)));
  return create(device, rank, size, 0, 1, size, out);
}
