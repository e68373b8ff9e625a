/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that share one host update, where a GPU's runtime gives a single thread for all of them. */
#ifndef LEV_OFFLOAD_ADAMW_OFFLOAD_ADAMW_TEAM_H
#define LEV_OFFLOAD_ADAMW_OFFLOAD_ADAMW_TEAM_H

#include "offload_adamw/offload_adamw_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct oadamw_team oadamw_team;

/* `threads` >= 1, the caller of oadamw_team_update among them: one makes no thread. Errors: LEV_ERR_NOMEM,
 * LEV_ERR_DEVICE (no thread). */
LEV_MUST_CHECK lev_status oadamw_team_create(int threads, oadamw_team **out);
/* No update may be running. NULL is fine. */
void oadamw_team_destroy(oadamw_team *team);

/* oadamw_kernel_host_update of the piece in even parts, the same bits; returns when all are done. Callers take turns.
 */
void oadamw_team_update(oadamw_team *team, const oadamw_update_args *args);

#ifdef __cplusplus
}
#endif
#endif
