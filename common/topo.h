/* SPDX-License-Identifier: Apache-2.0 */
/* Machine topology through hwloc: where rank threads and their stream workers should live. */
#ifndef LEV_COMMON_TOPO_H
#define LEV_COMMON_TOPO_H

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lev_topo lev_topo;

/* Loads this machine's topology, or a synthetic one ("numa:2 core:4 pu:2", hwloc syntax) for tests; NULL = this
 * machine. */
LEV_MUST_CHECK lev_status lev_topo_create(const char *synthetic, lev_topo **out);
void lev_topo_destroy(lev_topo *topo);
int lev_topo_numa_nodes(const lev_topo *topo); /* that this process may use (affinity mask respected), >= 1 */
/* NUMA node for local rank r of n, ranks dealt evenly over nodes. */
int lev_topo_rank_node(const lev_topo *topo, int rank, int n_ranks);
/* Binds the calling thread (and threads it creates later) to the cores of a node; with one node, or where binding is
 * not permitted, does nothing and *bound = 0. Never an error for lack of information. */
LEV_MUST_CHECK lev_status lev_topo_bind_thread(lev_topo *topo, int node, int *bound);
#ifdef __cplusplus
}
#endif
#endif
