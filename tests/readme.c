/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/readme.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/backend.h"
#include "tests/t.h"

enum { FILE_MOST = 1 << 17 };

bool t_readme_runs(void) {
  if (t_backend() == LEV_BACKEND_CPU) return true;
  t_skip("the table is of the cpu backend");
  return false;
}

bool t_readme(const char *path, const char *format, ...) {
  char want[512];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(want, sizeof want, format, args);
  va_end(args);
  printf("  %s\n", want);
  char *text = calloc(1, FILE_MOST);
  FILE *file = fopen(path, "r");
  bool ok = T_EXPECT_MSG(text && file && n > 0 && n < (int)sizeof want, "%s cannot be read", path);
  if (ok) {
    size_t got = fread(text, 1, FILE_MOST - 1, file);
    ok = T_EXPECT_MSG(got < FILE_MOST - 1, "%s is longer than this test reads", path) &&
         T_EXPECT_MSG(strstr(text, want), "%s does not say: %s", path, want);
  }
  if (file) fclose(file);
  free(text);
  return ok;
}

const char *t_commas(int64_t n, char out[32]) {
  char digits[24];
  int length = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
  for (int i = 0; i < length; ++i) {
    if (i > 0 && (length - i) % 3 == 0) out[at++] = ',';
    out[at++] = digits[i];
  }
  out[at] = 0;
  return out;
}
