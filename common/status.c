/* SPDX-License-Identifier: Apache-2.0 */
#include "common/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define DETAIL_BYTES 1024

static _Thread_local char detail[DETAIL_BYTES];

const char *lev_status_text(lev_status status) {
  switch (status) {
#define STATUS_TEXT(name, text, exit_code)                                                                             \
  case LEV_##name:                                                                                                     \
    return text;
    LEV_STATUS_TABLE(STATUS_TEXT)
#undef STATUS_TEXT
  case LEV_STATUS_COUNT:
    break;
  }
  return "unknown status";
}

int lev_status_exit_code(lev_status status) {
  switch (status) {
#define STATUS_EXIT(name, text, exit_code)                                                                             \
  case LEV_##name:                                                                                                     \
    return exit_code;
    LEV_STATUS_TABLE(STATUS_EXIT)
#undef STATUS_EXIT
  case LEV_STATUS_COUNT:
    break;
  }
  return lev_status_exit_code(LEV_ERR_INTERNAL);
}

lev_status lev_fail_at(lev_status status, const char *file, int line, const char *format, ...) {
  /* The arguments may point into the current detail (a failure that quotes an earlier one), so format aside first. */
  char text[DETAIL_BYTES];
  int n = snprintf(text, sizeof text, "%s:%d: ", file, line);
  size_t at = n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
  va_list args;
  va_start(args, format);
  vsnprintf(text + at, sizeof text - at, format, args);
  va_end(args);
  memcpy(detail, text, sizeof detail);
  return status;
}

const char *lev_detail(void) {
  return detail;
}

void lev_detail_set(const char *text) {
  size_t n = text ? strnlen(text, sizeof detail - 1) : 0;
  if (n) memmove(detail, text, n);
  detail[n] = '\0';
}
