/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines go to a callback; with none set they are dropped. Levels and subsystems are masked once at
 * start (environment LEVEE_LOG, e.g. "debug" or "info:mem,comm"). Never used on hot paths. */
#ifndef LEV_COMMON_LOG_H
#define LEV_COMMON_LOG_H

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lev_log_level { LEV_LOG_ERROR, LEV_LOG_WARN, LEV_LOG_INFO, LEV_LOG_DEBUG } lev_log_level;
typedef enum lev_log_sys { LEV_SYS_MEM, LEV_SYS_COMM, LEV_SYS_PLAN, LEV_SYS_IO, LEV_SYS_DEVICE } lev_log_sys;

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
