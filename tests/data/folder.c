/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/data/folder.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/t.h"

bool folder_make(folder *f) {
  *f = (folder){.root = "/tmp/levee-data-XXXXXX"};
  return T_EXPECT(mkdtemp(f->root) != NULL);
}

char *folder_path(folder *f, const char *name) {
  char *path = f->path[f->next++ % 8];
  size_t root = strlen(f->root), n = strnlen(name, sizeof f->path[0] - sizeof f->root - 2);
  memcpy(path, f->root, root);
  path[root] = '/';
  memcpy(path + root + 1, name, n);
  path[root + 1 + n] = '\0';
  return path;
}

bool folder_write(folder *f, const char *name, const void *data, size_t bytes) {
  FILE *out = fopen(folder_path(f, name), "wb");
  if (!T_EXPECT(out != NULL)) return false;
  bool ok = fwrite(data, 1, bytes, out) == bytes;
  return T_EXPECT(fclose(out) == 0 && ok);
}

void folder_remove(folder *f) {
  char path[400];
  DIR *dir = opendir(f->root);
  if (!dir) return;
  for (struct dirent *e; (e = readdir(dir));) {
    if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
    snprintf(path, sizeof path, "%s/%s", f->root, e->d_name);
    unlink(path);
  }
  closedir(dir);
  rmdir(f->root);
}
