/* SPDX-License-Identifier: Apache-2.0 */
/* A temporary folder of one test. */
#ifndef LEV_TESTS_DATA_FOLDER_H
#define LEV_TESTS_DATA_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

typedef struct folder {
  char root[64];
  char path[8][128]; /* results of folder_path, used in turn */
  int next;
} folder;

bool folder_make(folder *f);
/* ROOT/NAME; valid until eight further calls. */
char *folder_path(folder *f, const char *name);
bool folder_write(folder *f, const char *name, const void *data, size_t bytes);
/* Removes the folder and the files in it. */
void folder_remove(folder *f);

#endif
