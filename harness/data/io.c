/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/hostmem.h"

#define BUFFER ((size_t)1 << 18)

static lev_status failed(const char *what, const char *path, int error) {
  return lev_fail(LEV_ERR_IO, "cannot %s %s: %s", what, path, strerror(error));
}

lev_status lev_path_join(char *out, size_t size, const char *prefix, const char *suffix) {
  if ((size_t)snprintf(out, size, "%s%s", prefix, suffix) >= size)
    return lev_fail(LEV_ERR_ARG, "path %.60s...%s has %zu bytes, at most %zu fit", prefix, suffix,
                    strlen(prefix) + strlen(suffix), size - 1);
  return LEV_OK;
}

lev_status lev_map_open(const char *path, lev_map *out) {
  static const unsigned char nothing[1];
  struct stat st;
  *out = (lev_map){.data = nothing};
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return failed("open", path, errno);
  lev_status status = LEV_OK;
  if (fstat(fd, &st) != 0)
    status = failed("stat", path, errno);
  else if (!S_ISREG(st.st_mode))
    status = lev_fail(LEV_ERR_IO, "cannot map %s: not a regular file", path);
  else if (st.st_size > 0) {
    void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED)
      status = failed("map", path, errno);
    else
      *out = (lev_map){.data = data, .bytes = (size_t)st.st_size};
  }
  close(fd);
  return status;
}

void lev_map_close(lev_map *map) {
  if (map->bytes > 0) munmap((void *)(uintptr_t)map->data, map->bytes);
  *map = (lev_map){0};
}

lev_status lev_out_open(lev_out *out, const char *path) {
  *out = (lev_out){.fd = -1};
  LEV_TRY(lev_path_join(out->path, sizeof out->path, path, ""));
  LEV_TRY(lev_path_join(out->temporary, sizeof out->temporary, path, ".tmp"));
  out->buffer = lev_calloc(LEV_HEAP_DATA, BUFFER, 1);
  if (!out->buffer) return LEV_ERR_NOMEM;
  out->fd = open(out->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (out->fd >= 0) return LEV_OK;
  int error = errno;
  lev_free(out->buffer);
  out->buffer = NULL;
  return failed("create", out->temporary, error);
}

static lev_status write_all(lev_out *out, const unsigned char *p, size_t bytes) {
  while (bytes > 0) {
    ssize_t n = write(out->fd, p, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("write", out->temporary, errno);
    p += n, bytes -= (size_t)n;
  }
  return LEV_OK;
}

lev_status lev_out_write(lev_out *out, const void *data, size_t bytes) {
  if (bytes > BUFFER - out->held) {
    LEV_TRY(write_all(out, out->buffer, out->held));
    out->held = 0;
  }
  out->bytes += bytes;
  if (bytes > BUFFER) return write_all(out, data, bytes);
  if (bytes > 0) memcpy(out->buffer + out->held, data, bytes);
  out->held += bytes;
  return LEV_OK;
}

lev_status lev_out_commit(lev_out *out) {
  lev_status st = write_all(out, out->buffer, out->held);
  out->held = 0;
  if (st == LEV_OK && fsync(out->fd) != 0) st = failed("fsync", out->temporary, errno);
  int fd = out->fd;
  if (st == LEV_OK) {
    out->fd = -1;
    if (close(fd) != 0) st = failed("close", out->temporary, errno);
    if (st == LEV_OK && rename(out->temporary, out->path) != 0) st = failed("rename", out->temporary, errno);
    if (st != LEV_OK) unlink(out->temporary);
  }
  lev_out_discard(out);
  return st;
}

void lev_out_discard(lev_out *out) {
  if (out->fd >= 0) {
    close(out->fd);
    unlink(out->temporary);
  }
  out->fd = -1;
  lev_free(out->buffer);
  out->buffer = NULL;
}
