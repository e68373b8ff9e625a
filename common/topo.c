/* SPDX-License-Identifier: Apache-2.0 */
#include "common/topo.h"

#include <hwloc.h>
#include <stdbool.h>

#include "common/hostmem.h"

struct lev_topo {
  hwloc_topology_t topology;
  bool real; /* this machine, so binding makes sense */
  int nodes;
};

/* The topology's own limit is the cpuset of the machine; a process mask set by taskset narrows it further. */
static void restrict_to_process(hwloc_topology_t topology) {
  hwloc_bitmap_t mask = hwloc_bitmap_alloc();
  if (!mask) return;
  if (hwloc_get_cpubind(topology, mask, HWLOC_CPUBIND_PROCESS) == 0 && !hwloc_bitmap_iszero(mask))
    (void)hwloc_topology_restrict(topology, mask, 0);
  hwloc_bitmap_free(mask);
}

lev_status lev_topo_create(const char *synthetic, lev_topo **out) {
  *out = NULL;
  lev_topo *topo = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *topo);
  if (!topo) return LEV_ERR_NOMEM;
  if (hwloc_topology_init(&topo->topology) != 0) {
    lev_free(topo);
    return lev_fail(LEV_ERR_NOMEM, "no memory for a topology");
  }
  topo->real = synthetic == NULL;
  bool known = topo->real || hwloc_topology_set_synthetic(topo->topology, synthetic) == 0;
  if (!known || hwloc_topology_load(topo->topology) != 0) {
    hwloc_topology_destroy(topo->topology);
    lev_free(topo);
    return synthetic ? lev_fail(LEV_ERR_ARG, "\"%s\" is no topology that hwloc understands", synthetic)
                     : lev_fail(LEV_ERR_DEVICE, "hwloc cannot read this machine's topology");
  }
  if (topo->real) restrict_to_process(topo->topology);
  topo->nodes = hwloc_get_nbobjs_by_type(topo->topology, HWLOC_OBJ_NUMANODE);
  if (topo->nodes < 1) topo->nodes = 1;
  *out = topo;
  return LEV_OK;
}

void lev_topo_destroy(lev_topo *topo) {
  if (!topo) return;
  hwloc_topology_destroy(topo->topology);
  lev_free(topo);
}

int lev_topo_numa_nodes(const lev_topo *topo) {
  return topo->nodes;
}

int lev_topo_rank_node(const lev_topo *topo, int rank, int n_ranks) {
  if (rank < 0 || n_ranks < 1 || rank >= n_ranks) return 0;
  return (int)((int64_t)rank * topo->nodes / n_ranks);
}

static hwloc_obj_t node_object(const lev_topo *topo, int node) {
  if (!topo->real || topo->nodes < 2 || node < 0) return NULL;
  return hwloc_get_obj_by_type(topo->topology, HWLOC_OBJ_NUMANODE, (unsigned)node);
}

static lev_status check_node(const lev_topo *topo, int node) {
  if (node >= 0 && node < topo->nodes) return LEV_OK;
  return lev_fail(LEV_ERR_ARG, "NUMA node %d asked, 0 to %d exist", node, topo->nodes - 1);
}

lev_status lev_topo_bind_thread(lev_topo *topo, int node, int *bound) {
  if (bound) *bound = 0;
  LEV_TRY(check_node(topo, node));
  hwloc_obj_t object = node_object(topo, node);
  if (!object || hwloc_bitmap_iszero(object->cpuset)) return LEV_OK;
  int ok = hwloc_set_cpubind(topo->topology, object->cpuset, HWLOC_CPUBIND_THREAD) == 0;
  if (bound) *bound = ok;
  return LEV_OK;
}

#ifdef LEV_PORTABLE
/* The static hwloc wants libudev, of which there is no archive, for the vendor and serial number of disks. Topologies
 * here are loaded without disks, and hwloc takes "no udev" for an answer. */
struct udev;
struct udev_device;
struct udev *udev_new(void);
struct udev *udev_unref(struct udev *udev);
struct udev_device *udev_device_new_from_subsystem_sysname(struct udev *udev, const char *subsystem, const char *name);
struct udev_device *udev_device_unref(struct udev_device *device);
const char *udev_device_get_property_value(struct udev_device *device, const char *key);

struct udev *udev_new(void) {
  return NULL;
}
struct udev *udev_unref(struct udev *udev) {
  (void)udev;
  return NULL;
}
struct udev_device *udev_device_new_from_subsystem_sysname(struct udev *udev, const char *subsystem, const char *name) {
  (void)udev, (void)subsystem, (void)name;
  return NULL;
}
struct udev_device *udev_device_unref(struct udev_device *device) {
  (void)device;
  return NULL;
}
const char *udev_device_get_property_value(struct udev_device *device, const char *key) {
  (void)device, (void)key;
  return NULL;
}
#endif
