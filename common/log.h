/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines go to a callback; with none set they are dropped. Failures are no log lines: they are a lev_status. What
 * is shown is chosen once at start: environment LEVEE_LOG, "warn" or "info" (default), then perhaps a colon and those
 * subsystems alone that are wanted, "info:plan,io". Never used on hot paths. */
#ifndef LEV_COMMON_LOG_H
#define LEV_COMMON_LOG_H

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_log_level { LEV_LOG_WARN, LEV_LOG_INFO } lev_log_level;
typedef enum lev_log_sys { LEV_SYS_PLAN, LEV_SYS_IO } lev_log_sys;

/* `line` has no newline; `rank` is -1 outside a rank thread. May be called from several threads at once. */
typedef void (*lev_log_sink)(void *ctx, lev_log_level level, lev_log_sys sys, int rank, const char *line);

/* Sets the process-wide sink (NULL = drop) and reads LEVEE_LOG. Call before any other thread starts. */
void lev_log_set_sink(lev_log_sink sink, void *ctx);
/* Rank shown for lines logged by this thread. */
void lev_log_set_rank(int rank);
void lev_log(lev_log_level level, lev_log_sys sys, const char *format, ...) LEV_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif
#endif
