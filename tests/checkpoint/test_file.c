/* SPDX-License-Identifier: Apache-2.0 */
/* Reading whole files. */
#include <errno.h>
#include <sys/stat.h>

#include "harness/checkpoint/file.h"
#include "tests/t.h"

/* A file that ends before its size, as one does that shrinks under the reader: sysfs has such. */
T_TEST(file_shorter_than_its_size) {
  static const char path[] = "/sys/devices/system/cpu/online";
  struct stat st;
  char *text;
  if (stat(path, &st) != 0 || st.st_size < 4096) {
    t_skip("no %s with the size of a page", path);
    return;
  }
  errno = EINTR; /* left over from an earlier call: the end of the file is no interruption */
  T_EXPECT_STATUS(lev_read_text(path, 1 << 20, NULL, &text), LEV_ERR_IO);
  T_EXPECT(text == NULL);
}
