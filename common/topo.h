/* SPDX-License-Identifier: Apache-2.0 */
/* Machine topology through hwloc: where rank threads, their stream workers and pinned slabs should live. */
#ifndef LEV_COMMON_TOPO_H
#define LEV_COMMON_TOPO_H

#include <stddef.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lev_topo lev_topo;

/* Loads this machine's topology, or a synthetic one ("numa:2 core:4 pu:2", hwloc syntax) for tests; NULL = this
 * machine. */
LEV_MUST_CHECK lev_status lev_topo_create(const char *synthetic, lev_topo **out);
void lev_topo_destroy(lev_topo *topo);
int lev_topo_cores(const lev_topo *topo);      /* cores this process may use (affinity mask respected), >= 1 */
int lev_topo_numa_nodes(const lev_topo *topo); /* >= 1 */
/* NUMA node for local rank r of n, ranks dealt evenly over nodes (cuda: the GPU's node when known). */
int lev_topo_rank_node(const lev_topo *topo, int rank, int n_ranks);
/* Binds the calling thread (and threads it creates later) to the cores of a node; with one node, or where binding is
 * not permitted, does nothing and *bound = 0. Never an error for lack of information. */
LEV_MUST_CHECK lev_status lev_topo_bind_thread(lev_topo *topo, int node, int *bound);
/* Asks that a mapped, untouched range be placed on a node; same rule. */
LEV_MUST_CHECK lev_status lev_topo_bind_memory(lev_topo *topo, void *address, size_t bytes, int node, int *bound);
/* One line: "2 cores, 1 NUMA node, ranks unbound". `text` has room for `size` bytes. */
void lev_topo_describe(const lev_topo *topo, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
