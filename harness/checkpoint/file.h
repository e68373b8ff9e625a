/* SPDX-License-Identifier: Apache-2.0 */
/* File operations that fail loudly: each reports path and errno, counts as one LEV_FAULT_FILE event, and nothing is
 * ever retried after a failed fsync. */
#ifndef LEV_CHECKPOINT_FILE_H
#define LEV_CHECKPOINT_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/fault.h"
#include "common/status.h"

/* A file being written, hashed on the way (XXH3-128). */
typedef struct lev_file {
  int fd;
  char path[1024];
  uint64_t bytes;
  void *hash;       /* XXH3 state */
  lev_fault *fault; /* nullable */
} lev_file;

LEV_MUST_CHECK lev_status lev_file_create(lev_file *file, const char *path, lev_fault *fault);
LEV_MUST_CHECK lev_status lev_file_write(lev_file *file, const void *data, size_t bytes);
/* fsync and close; `hex` (33 bytes, nullable) receives the hash. */
LEV_MUST_CHECK lev_status lev_file_commit(lev_file *file, char *hex);
/* Closes and removes a half-written file; safe on a failed or committed one. */
void lev_file_discard(lev_file *file);

LEV_MUST_CHECK lev_status lev_make_dir(const char *path, lev_fault *fault); /* with parents; existing is fine */
LEV_MUST_CHECK lev_status lev_rename(const char *from, const char *to, lev_fault *fault);
/* Makes a new directory "PATH.tmp.XXXXXX" beside `path` (with parents), which nobody else has; `out` gets its name. */
LEV_MUST_CHECK lev_status lev_make_temporary_dir(const char *path, char *out, size_t size, lev_fault *fault);
/* Renames a directory; one that is there is exchanged for it at once, where the file system can, and removed. */
LEV_MUST_CHECK lev_status lev_replace_dir(const char *from, const char *to, lev_fault *fault);
LEV_MUST_CHECK lev_status lev_sync_dir(const char *path, lev_fault *fault);
/* Removes a directory and the plain files in it. */
LEV_MUST_CHECK lev_status lev_remove_dir(const char *path, lev_fault *fault);
/* Whole small file as a string (lev_free); at most `limit` bytes. */
LEV_MUST_CHECK lev_status lev_read_text(const char *path, size_t limit, lev_fault *fault, char **out);
/* Hash of a string; hex as above. */
void lev_hash_text(const char *text, char *hex);
/* Size and hash of a file. */
LEV_MUST_CHECK lev_status lev_hash_file(const char *path, lev_fault *fault, uint64_t *bytes, char *hex);

#endif
