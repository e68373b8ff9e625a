/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes and the detail text of the last failure.
 *
 * Every fallible function returns a lev_status, which callers must check. The function that first sees
 * a failure calls lev_fail(), which stores one readable sentence (what was asked, what there was, what
 * would fit) in thread-local storage; callers above only pass the code on with LEV_TRY. Library code
 * never prints and never exits. */
#ifndef LEV_COMMON_STATUS_H
#define LEV_COMMON_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* name, text, process exit code used by the command line */
#define LEV_STATUS_TABLE(X)                                                                                            \
  X(OK, "ok", 0)                                                                                                       \
  X(ERR_ARG, "invalid argument", 1)                                                                                    \
  X(ERR_CONFIG, "invalid configuration", 2)                                                                            \
  X(ERR_BUDGET, "memory budget too small", 3)                                                                          \
  X(ERR_CAPACITY, "actual size above the planned cap", 4)                                                              \
  X(ERR_NOMEM, "out of memory", 5)                                                                                     \
  X(ERR_SEALED, "allocation after the memory plan was sealed", 6)                                                      \
  X(ERR_MISUSE, "call out of order", 7)                                                                                \
  X(ERR_IO, "input/output error", 8)                                                                                   \
  X(ERR_FORMAT, "malformed data", 9)                                                                                   \
  X(ERR_COMM, "collective failed", 10)                                                                                 \
  X(ERR_ABORTED, "aborted because another rank failed", 11)                                                            \
  X(ERR_TIMEOUT, "deadline passed", 12)                                                                                \
  X(ERR_DEVICE, "device error", 13)                                                                                    \
  X(ERR_UNSUPPORTED, "not supported", 14)                                                                              \
  X(ERR_NUMERIC, "non-finite value", 15)                                                                               \
  X(ERR_INTERNAL, "internal error", 16)                                                                                \
  X(ERR_WRONG, "wrong result", 17)

typedef enum lev_status {
#define LEV_STATUS_ENUM(name, text, exit_code) LEV_##name,
  LEV_STATUS_TABLE(LEV_STATUS_ENUM)
#undef LEV_STATUS_ENUM
      LEV_STATUS_COUNT
} lev_status;

#if defined(__GNUC__)
#define LEV_MUST_CHECK __attribute__((warn_unused_result))
#define LEV_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define LEV_MUST_CHECK
#define LEV_PRINTF(fmt, args)
#endif

/* Static text of a status; never NULL, also for values outside the table. */
const char *lev_status_text(lev_status status);

/* Process exit code for a status (the table's third column). */
int lev_status_exit_code(lev_status status);

/* Stores "file:line: text" as this thread's detail and returns `status`. Use through lev_fail(). */
lev_status lev_fail_at(lev_status status, const char *file, int line, const char *format, ...) LEV_PRINTF(4, 5);

/* lev_fail(LEV_ERR_ARG, "tokens %lld exceed the cap %lld", ...) : records detail, yields the status. */
/* (The comma lets static analysers see the status.) */
#define lev_fail(status, ...) (lev_fail_at((status), __FILE__, __LINE__, __VA_ARGS__), (status))

/* Detail text of this thread's latest lev_fail(); "" if none. Valid until the next failure here. */
const char *lev_detail(void);

/* Copies a detail text taken on another thread into this thread (truncates at 1023 bytes). */
void lev_detail_set(const char *text);

#define LEV_TRY(expr)                                                                                                  \
  do {                                                                                                                 \
    lev_status lev_try_status_ = (expr);                                                                               \
    if (lev_try_status_ != LEV_OK) return lev_try_status_;                                                             \
  } while (0)

/* Sets the variable `st` and jumps to `label` on failure. */
#define LEV_TRY_GOTO(st, expr, label)                                                                                  \
  do {                                                                                                                 \
    (st) = (expr);                                                                                                     \
    if ((st) != LEV_OK) goto label;                                                                                    \
  } while (0)

#ifdef __cplusplus
}
#endif
#endif
