/* SPDX-License-Identifier: Apache-2.0 */
/* Test harness: tests register themselves, record failures from any thread, and the binary closes on one line
 * "N passed, N failed, N skipped". Zero executed tests is a failure, and so is a test that checked nothing.
 *
 *     T_TEST(arena_refuses_growth) {
 *       T_REQUIRE_OK(lev_arena_create(...));
 *       T_EXPECT_STATUS(lev_arena_persist(...), LEV_ERR_SEALED);
 *     }
 *
 * Command line of every test binary: [--list] [--seed=N] [SUBSTRING ...]. */
#ifndef LEV_TESTS_T_H
#define LEV_TESTS_T_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

typedef void (*t_fn)(void);
typedef void (*t_child_fn)(const char *value);
void t_register(const char *name, const char *file, t_fn fn);
void t_register_child(const char *name, const char *file, t_child_fn fn);

#define T_TEST(name)                                                                                                   \
  static void t_body_##name(void);                                                                                     \
  __attribute__((constructor)) static void t_reg_##name(void) {                                                        \
    t_register(#name, __FILE__, t_body_##name);                                                                        \
  }                                                                                                                    \
  static void t_body_##name(void)

/* Records a failure of the running test (thread-safe) and goes on. Returns `ok`. */
bool t_check(bool ok, const char *file, int line, const char *format, ...) LEV_PRINTF(4, 5);
/* Marks the running test as skipped, with the reason; the test should return at once. */
void t_skip(const char *format, ...) LEV_PRINTF(1, 2);
/* Marks the running test as one of those on a GPU, which the closing lines count (tests/backend.h calls it). */
void t_on_cuda(void);
/* True once the running test has failed (to stop long loops). */
bool t_failed(void);
/* Seed of this run (printed on failure, settable; T_SEED by default). */
#define T_SEED 20260901u
uint64_t t_seed(void);

#define T_EXPECT(cond) t_check((cond), __FILE__, __LINE__, "expected %s", #cond)
#define T_EXPECT_MSG(cond, ...) t_check((cond), __FILE__, __LINE__, __VA_ARGS__)
#define T_REQUIRE(cond)                                                                                                \
  do {                                                                                                                 \
    if (!T_EXPECT(cond)) return;                                                                                       \
  } while (0)
#define T_EXPECT_EQ_I64(a, b)                                                                                          \
  t_check((int64_t)(a) == (int64_t)(b), __FILE__, __LINE__, "%s = %lld, expected %s = %lld", #a, (long long)(a), #b,   \
          (long long)(b))
bool t_check_status(lev_status got, lev_status want, const char *expr, const char *file, int line);
#define T_EXPECT_STATUS(expr, want) t_check_status((expr), (want), #expr, __FILE__, __LINE__)
#define T_EXPECT_OK(expr) T_EXPECT_STATUS(expr, LEV_OK)
#define T_REQUIRE_OK(expr)                                                                                             \
  do {                                                                                                                 \
    if (!T_EXPECT_OK(expr)) return;                                                                                    \
  } while (0)

/* Seconds of a clock that never goes back. */
double t_now(void);
void t_sleep_ms(long ms);

/* Runs fn(rank, ctx) on `n` threads, one per rank, and waits for all. */
void t_ranks(int n, void (*fn)(int rank, void *ctx), void *ctx);

/* An entry for processes of their own: T_CHILD(name, value) { ... } runs in t_child("name", "text") alone, with that
 * text as `value`. It is no test: neither listed nor counted. */
#define T_CHILD(name, value)                                                                                           \
  static void t_child_##name(const char *value);                                                                       \
  __attribute__((constructor)) static void t_reg_##name(void) {                                                        \
    t_register_child(#name, __FILE__, t_child_##name);                                                                 \
  }                                                                                                                    \
  static void t_child_##name(const char *value)

/* Runs a T_CHILD of this program as a process of its own, its output dropped, and ended by ThreadSanitizer's first
 * report. Gives the wait status: 0 = no check failed, -1 = not started. There being no such entry is a failure of the
 * running test. */
int t_child(const char *name, const char *value);

#endif
