/* SPDX-License-Identifier: Apache-2.0 */
/* Files of the data pipeline: read by mapping, written beside their final name and renamed when whole. */
#ifndef LEV_DATA_IO_H
#define LEV_DATA_IO_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A whole file, mapped read-only. An empty file has bytes = 0 and a valid data pointer. A file that another program
 * truncates while it is mapped ends the process (SIGBUS), as with every mapped file. */
typedef struct lev_map {
  const unsigned char *data;
  size_t bytes;
} lev_map;

/* LEV_ERR_IO naming the path (missing, not a regular file, cannot be mapped). */
LEV_MUST_CHECK lev_status lev_map_open(const char *path, lev_map *out);
void lev_map_close(lev_map *map); /* zeroed and closed maps are fine */

/* A file being written as PATH.tmp through a buffer. */
typedef struct lev_out {
  int fd; /* -1: not open */
  char path[1024], temporary[1032];
  unsigned char *buffer;
  size_t held;
  uint64_t bytes; /* accepted so far */
} lev_out;

LEV_MUST_CHECK lev_status lev_out_open(lev_out *out, const char *path);
LEV_MUST_CHECK lev_status lev_out_write(lev_out *out, const void *data, size_t bytes);
/* Flushes, fsyncs, closes, renames to the final name. On failure the temporary file is gone and the old file stays. */
LEV_MUST_CHECK lev_status lev_out_commit(lev_out *out);
/* Closes and removes the temporary file; fine on one that is not open (set fd = -1 or call after commit). */
void lev_out_discard(lev_out *out);

/* PREFIX and SUFFIX joined; LEV_ERR_ARG if that does not fit `size`. */
LEV_MUST_CHECK lev_status lev_path_join(char *out, size_t size, const char *prefix, const char *suffix);

#ifdef __cplusplus
}
#endif
#endif
