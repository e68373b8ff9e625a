/* SPDX-License-Identifier: Apache-2.0 */
#include "common/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const level_words[] = {"warn", "info"};
static const char *const sys_words[] = {"plan", "io"};
#define N_LEVELS ((int)(sizeof level_words / sizeof *level_words))
#define N_SYS ((int)(sizeof sys_words / sizeof *sys_words))

/* Written by lev_log_set_sink only, before other threads start. */
static lev_log_sink sink;
static void *sink_ctx;
static int max_level = LEV_LOG_INFO;
static unsigned sys_mask = ~0u;
static _Thread_local int log_rank = -1;

static int find_word(const char *const *words, int n, const char *text, size_t length) {
  for (int i = 0; i < n; ++i)
    if (strlen(words[i]) == length && strncmp(words[i], text, length) == 0) return i;
  return -1;
}

/* "LEVEL" or "LEVEL:SYS,SYS"; unknown words are ignored. */
static void read_environment(void) {
  max_level = LEV_LOG_INFO, sys_mask = ~0u;
  const char *text = getenv("LEVEE_LOG");
  if (!text) return;
  size_t length = strcspn(text, ":");
  int level = find_word(level_words, N_LEVELS, text, length);
  if (level >= 0) max_level = level;
  text += length;
  if (*text != ':') return;
  sys_mask = 0;
  while (*text) {
    ++text; /* ':' or ',' */
    length = strcspn(text, ",");
    int sys = find_word(sys_words, N_SYS, text, length);
    if (sys >= 0) sys_mask |= 1u << sys;
    text += length;
  }
}

void lev_log_set_sink(lev_log_sink new_sink, void *ctx) {
  sink = new_sink, sink_ctx = ctx;
  read_environment();
}

void lev_log_set_rank(int rank) {
  log_rank = rank;
}

void lev_log(lev_log_level level, lev_log_sys sys, const char *format, ...) {
  if (!sink || (int)level > max_level || !(sys_mask >> sys & 1u)) return;
  char line[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  sink(sink_ctx, level, sys, log_rank, line);
}
