/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "common/fault.h"
#include "common/log.h"
#include "common/status.h"
#include "tests/t.h"

T_TEST(core_status_table) {
  T_EXPECT(strcmp(lev_status_text(LEV_OK), "ok") == 0);
  T_EXPECT(strcmp(lev_status_text(LEV_ERR_BUDGET), "memory budget too small") == 0);
  T_EXPECT(lev_status_text((lev_status)999) != NULL);
  for (int a = 0; a < LEV_STATUS_COUNT; ++a)
    for (int b = 0; b < a; ++b) {
      T_EXPECT(strcmp(lev_status_text((lev_status)a), lev_status_text((lev_status)b)) != 0);
      T_EXPECT(lev_status_exit_code((lev_status)a) != lev_status_exit_code((lev_status)b));
    }
  T_EXPECT_EQ_I64(lev_status_exit_code(LEV_OK), 0);
  T_EXPECT_EQ_I64(lev_status_exit_code(LEV_ERR_BUDGET), 3);
  T_EXPECT(lev_status_exit_code((lev_status)999) != 0);
}

static lev_status fails(int n) {
  return lev_fail(LEV_ERR_ARG, "asked %d, limit %s", n, "7");
}
static lev_status passes_on(int n) {
  LEV_TRY(fails(n));
  return LEV_OK;
}

T_TEST(core_status_detail) {
  T_EXPECT_STATUS(passes_on(9), LEV_ERR_ARG);
  T_EXPECT(strstr(lev_detail(), "asked 9, limit 7") != NULL);
  T_EXPECT(strstr(lev_detail(), "test_core_status.c:") != NULL);
  /* a failure may quote the one before it */
  T_EXPECT_EQ_I64(lev_fail(LEV_ERR_IO, "outer: %s", lev_detail()), LEV_ERR_IO);
  T_EXPECT(strstr(lev_detail(), "outer: ") != NULL && strstr(lev_detail(), "asked 9") != NULL);
  char big[4096];
  memset(big, 'x', sizeof big - 1);
  big[sizeof big - 1] = '\0';
  lev_detail_set(big);
  T_EXPECT_EQ_I64(strlen(lev_detail()), 1023);
  T_EXPECT_EQ_I64(lev_fail(LEV_ERR_IO, "%s", big), LEV_ERR_IO);
  T_EXPECT_EQ_I64(strlen(lev_detail()), 1023);
  lev_detail_set(NULL);
  T_EXPECT(lev_detail()[0] == '\0');
}

static void detail_of_rank(int rank, void *ctx) {
  (void)ctx;
  T_EXPECT(lev_detail()[0] == '\0'); /* a new thread has none */
  for (int i = 0; i < 100; ++i) {
    T_EXPECT_STATUS(fails(rank * 1000 + i), LEV_ERR_ARG);
    T_EXPECT_EQ_I64(strtol(strstr(lev_detail(), "asked ") + 6, NULL, 10), rank * 1000 + i);
  }
}
T_TEST(core_status_detail_per_thread) {
  t_ranks(4, detail_of_rank, NULL);
}

typedef struct log_seen {
  int lines, rank;
  char last[256];
} log_seen;
static void log_sink(void *ctx, lev_log_level level, lev_log_sys sys, int rank, const char *line) {
  (void)level, (void)sys;
  log_seen *s = ctx;
  ++s->lines, s->rank = rank;
  strncpy(s->last, line, sizeof s->last - 1);
}

T_TEST(core_log_masks) {
  log_seen s = {0};
  unsetenv("LEVEE_LOG");
  lev_log_set_sink(log_sink, &s);
  lev_log(LEV_LOG_INFO, LEV_SYS_PLAN, "a %d", 5);
  T_EXPECT_EQ_I64(s.lines, 1);
  T_EXPECT(strcmp(s.last, "a 5") == 0 && s.rank == -1);
  setenv("LEVEE_LOG", "info:io,nothing", 1);
  lev_log_set_sink(log_sink, &s);
  lev_log_set_rank(3);
  lev_log(LEV_LOG_WARN, LEV_SYS_PLAN, "hidden");
  lev_log(LEV_LOG_INFO, LEV_SYS_IO, "seen");
  T_EXPECT_EQ_I64(s.lines, 2);
  T_EXPECT(strcmp(s.last, "seen") == 0 && s.rank == 3);
  setenv("LEVEE_LOG", "warn", 1);
  lev_log_set_sink(log_sink, &s);
  lev_log(LEV_LOG_INFO, LEV_SYS_IO, "hidden");
  lev_log(LEV_LOG_WARN, LEV_SYS_PLAN, "seen");
  T_EXPECT_EQ_I64(s.lines, 3);
  unsetenv("LEVEE_LOG");
  lev_log_set_sink(NULL, NULL);
  lev_log_set_rank(-1);
  lev_log(LEV_LOG_WARN, LEV_SYS_PLAN, "dropped");
  T_EXPECT_EQ_I64(s.lines, 3);
}

T_TEST(core_fault_counts) {
  T_EXPECT(!lev_fault_hit(NULL, LEV_FAULT_ALLOC));
  lev_fault f = {0};
  for (int i = 0; i < 5; ++i) T_EXPECT(!lev_fault_hit(&f, LEV_FAULT_COPY));
  T_EXPECT_EQ_I64(f.seen[LEV_FAULT_COPY], 5);
  f.fail_at[LEV_FAULT_FILE] = 3;
  for (int i = 1; i <= 5; ++i) T_EXPECT(lev_fault_hit(&f, LEV_FAULT_FILE) == (i == 3));
  T_EXPECT_EQ_I64(f.seen[LEV_FAULT_COPY], 5);
}
