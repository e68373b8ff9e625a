/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* renameat2 */
#include "harness/checkpoint/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common/hostmem.h"

#define CHUNK ((size_t)1 << 20)

static lev_status failed(const char *what, const char *path, int error) {
  return lev_fail(LEV_ERR_IO, "cannot %s %s: %s", what, path, strerror(error));
}

/* True (with the detail set) when fault injection wants this operation to fail. */
static bool injected(lev_fault *fault, const char *what, const char *path) {
  if (!lev_fault_hit(fault, LEV_FAULT_FILE)) return false;
  (void)lev_fail(LEV_ERR_IO, "cannot %s %s: injected failure", what, path);
  return true;
}

static void hex_of(XXH128_hash_t h, char *hex) {
  snprintf(hex, 33, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
}

lev_status lev_file_create(lev_file *file, const char *path, lev_fault *fault) {
  *file = (lev_file){.fd = -1, .fault = fault};
  if ((size_t)snprintf(file->path, sizeof file->path, "%s", path) >= sizeof file->path)
    return lev_fail(LEV_ERR_ARG, "path of %zu bytes is too long (limit %zu)", strlen(path), sizeof file->path - 1);
  if (injected(fault, "create", path)) return LEV_ERR_IO;
  file->hash = lev_calloc(LEV_HEAP_REPORT, 1, sizeof(XXH3_state_t) + 64);
  if (!file->hash) return LEV_ERR_NOMEM;
  XXH3_128bits_reset((XXH3_state_t *)(((uintptr_t)file->hash + 63) & ~(uintptr_t)63));
  file->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file->fd >= 0) return LEV_OK;
  int error = errno;
  lev_free(file->hash);
  file->hash = NULL;
  return failed("create", path, error);
}

static XXH3_state_t *state(const lev_file *file) {
  return (XXH3_state_t *)(((uintptr_t)file->hash + 63) & ~(uintptr_t)63);
}

lev_status lev_file_write(lev_file *file, const void *data, size_t bytes) {
  if (injected(file->fault, "write", file->path)) return LEV_ERR_IO;
  XXH3_128bits_update(state(file), data, bytes);
  const unsigned char *p = data;
  while (bytes > 0) {
    ssize_t n = write(file->fd, p, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("write", file->path, errno);
    p += n, bytes -= (size_t)n, file->bytes += (uint64_t)n;
  }
  return LEV_OK;
}

lev_status lev_file_commit(lev_file *file, char *hex) {
  if (injected(file->fault, "fsync", file->path)) return LEV_ERR_IO;
  if (fsync(file->fd) != 0) return failed("fsync", file->path, errno);
  int fd = file->fd;
  file->fd = -1;
  if (hex) hex_of(XXH3_128bits_digest(state(file)), hex);
  lev_free(file->hash);
  file->hash = NULL;
  return close(fd) == 0 ? LEV_OK : failed("close", file->path, errno);
}

void lev_file_discard(lev_file *file) {
  if (file->fd < 0) return;
  close(file->fd);
  unlink(file->path);
  file->fd = -1;
  lev_free(file->hash);
  file->hash = NULL;
}

lev_status lev_make_dir(const char *path, lev_fault *fault) {
  char part[1024];
  if (injected(fault, "create directory", path)) return LEV_ERR_IO;
  if ((size_t)snprintf(part, sizeof part, "%s", path) >= sizeof part)
    return lev_fail(LEV_ERR_ARG, "path of %zu bytes is too long (limit %zu)", strlen(path), sizeof part - 1);
  for (char *p = part + 1;; ++p) {
    bool end = *p == '\0';
    if (!end && *p != '/') continue;
    *p = '\0';
    struct stat found;
    if (mkdir(part, 0755) != 0 && errno != EEXIST) return failed("create directory", part, errno);
    if (stat(part, &found) != 0) return failed("create directory", part, errno);
    if (!S_ISDIR(found.st_mode)) return failed("create directory", part, ENOTDIR);
    if (end) return LEV_OK;
    *p = '/';
  }
}

lev_status lev_make_temporary_dir(const char *path, char *out, size_t size, lev_fault *fault) {
  const char *name = strrchr(path, '/');
  if ((size_t)snprintf(out, size, "%s.tmp.XXXXXX", path) >= size)
    return lev_fail(LEV_ERR_ARG, "path of %zu bytes is too long", strlen(path));
  if (name && name > path) {
    out[name - path] = '\0';
    LEV_TRY(lev_make_dir(out, fault));
    out[name - path] = '/';
  }
  if (injected(fault, "create directory", out)) return LEV_ERR_IO;
  if (!mkdtemp(out)) return failed("create directory", out, errno);
  return chmod(out, 0755) == 0 ? LEV_OK : failed("change the mode of", out, errno);
}

lev_status lev_rename(const char *from, const char *to, lev_fault *fault) {
  if (injected(fault, "rename", from)) return LEV_ERR_IO;
  return rename(from, to) == 0 ? LEV_OK : failed("rename", from, errno);
}

lev_status lev_replace_dir(const char *from, const char *to, lev_fault *fault) {
  if (access(to, F_OK) != 0) return lev_rename(from, to, fault);
  if (injected(fault, "rename", from)) return LEV_ERR_IO;
  if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE) == 0) return lev_remove_dir(from, fault);
  LEV_TRY(lev_remove_dir(to, fault));
  return lev_rename(from, to, fault);
}

lev_status lev_sync_dir(const char *path, lev_fault *fault) {
  if (injected(fault, "fsync directory", path)) return LEV_ERR_IO;
  int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return failed("open directory", path, errno);
  int error = fsync(fd) == 0 ? 0 : errno;
  close(fd);
  return error == 0 ? LEV_OK : failed("fsync directory", path, error);
}

lev_status lev_remove_dir(const char *path, lev_fault *fault) {
  char entry_path[1400];
  if (injected(fault, "remove", path)) return LEV_ERR_IO;
  DIR *dir = opendir(path);
  if (!dir) return errno == ENOENT ? LEV_OK : failed("open directory", path, errno);
  for (struct dirent *e; (e = readdir(dir));) {
    if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
    snprintf(entry_path, sizeof entry_path, "%s/%s", path, e->d_name);
    unlink(entry_path);
  }
  closedir(dir);
  return rmdir(path) == 0 ? LEV_OK : failed("remove", path, errno);
}

lev_status lev_read_text(const char *path, size_t limit, lev_fault *fault, char **out) {
  *out = NULL;
  if (injected(fault, "read", path)) return LEV_ERR_IO;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return failed("open", path, errno);
  struct stat st;
  lev_status status = LEV_OK;
  if (fstat(fd, &st) != 0) status = failed("stat", path, errno);
  if (status == LEV_OK && (uint64_t)st.st_size > limit)
    status = lev_fail(LEV_ERR_FORMAT, "%s has %lld bytes, at most %zu expected", path, (long long)st.st_size, limit);
  char *text = status == LEV_OK ? lev_calloc(LEV_HEAP_REPORT, (size_t)st.st_size + 1, 1) : NULL;
  if (status == LEV_OK && !text) status = LEV_ERR_NOMEM;
  for (size_t at = 0; status == LEV_OK && at < (size_t)st.st_size;) {
    ssize_t n = read(fd, text + at, (size_t)st.st_size - at);
    if (n == 0 || (n < 0 && errno != EINTR)) status = failed("read", path, n == 0 ? EIO : errno);
    if (n > 0) at += (size_t)n;
  }
  close(fd);
  if (status == LEV_OK)
    *out = text;
  else
    lev_free(text);
  return status;
}

void lev_hash_text(const char *text, char *hex) {
  hex_of(XXH3_128bits(text, strlen(text)), hex);
}

lev_status lev_hash_file(const char *path, lev_fault *fault, uint64_t *bytes, char *hex) {
  if (injected(fault, "read", path)) return LEV_ERR_IO;
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return failed("open", path, errno);
  unsigned char *buffer = lev_calloc(LEV_HEAP_REPORT, CHUNK, 1);
  XXH3_state_t *hash = XXH3_createState();
  lev_status status = buffer && hash ? LEV_OK : LEV_ERR_NOMEM;
  if (hash) XXH3_128bits_reset(hash);
  *bytes = 0;
  while (status == LEV_OK) {
    ssize_t n = read(fd, buffer, CHUNK);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) status = failed("read", path, errno);
    if (n <= 0) break;
    XXH3_128bits_update(hash, buffer, (size_t)n);
    *bytes += (uint64_t)n;
  }
  if (status == LEV_OK) hex_of(XXH3_128bits_digest(hash), hex);
  if (hash) XXH3_freeState(hash);
  lev_free(buffer);
  close(fd);
  return status;
}
