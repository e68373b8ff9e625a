/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/checkpoint/initial.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/hostmem.h"
#include "harness/checkpoint/checkpoint.h"

#define INDEX_MAX ((size_t)256 << 20)

typedef struct file_list {
  char folder[700];
  char (*names)[256];
  int n;
} file_list;

static void list_path(const void *ctx, int file, char *out, size_t size) {
  const file_list *list = ctx;
  snprintf(out, size, "%s%s%s", list->folder, *list->folder ? "/" : "", list->names[file]);
}

static int by_text(const void *a, const void *b) {
  return strcmp(a, b);
}

/* The files that an index names, once each. */
static lev_status read_index(const char *path, lev_fault *fault, file_list *out) {
  char *text;
  const char *tensor;
  json_error_t error;
  json_t *value;
  LEV_TRY(lev_read_text(path, INDEX_MAX, fault, &text));
  json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &error), *map = json_object_get(root, "weight_map");
  lev_free(text);
  lev_status st = json_object_size(map) > 0 ? LEV_OK
                                            : lev_fail(LEV_ERR_FORMAT, "%s: no weight_map (%s)", path,
                                                       root ? "its keys are others" : error.text);
  out->names = lev_calloc(LEV_HEAP_REPORT, json_object_size(map) + 1, sizeof *out->names);
  if (!out->names) st = LEV_ERR_NOMEM;
  json_object_foreach(map, tensor, value) {
    const char *file = json_string_value(value);
    if (st == LEV_OK && (!file || strlen(file) >= sizeof *out->names || strchr(file, '/')))
      st = lev_fail(LEV_ERR_FORMAT, "%s: the file of \"%.100s\" is no plain name", path, tensor);
    if (st == LEV_OK) snprintf(out->names[out->n++], sizeof *out->names, "%s", file);
  }
  json_decref(root);
  if (st != LEV_OK) return st;
  int kept = 0;
  qsort(out->names, (size_t)out->n, sizeof *out->names, by_text);
  for (int i = 0; i < out->n; ++i)
    if (i == 0 || strcmp(out->names[i], out->names[kept - 1]) != 0) memmove(out->names[kept++], out->names[i], 256);
  out->n = kept;
  return LEV_OK;
}

/* The files of a Hugging Face model. */
static lev_status list_files(const char *path, lev_fault *fault, file_list *out) {
  char at[1024];
  struct stat info;
  if (strlen(path) >= sizeof out->folder) return lev_fail(LEV_ERR_IO, "%.60s...: the path is too long", path);
  if (stat(path, &info) != 0) return lev_fail(LEV_ERR_IO, "cannot open %s: %s", path, strerror(errno));
  bool folder = S_ISDIR(info.st_mode);
  if (folder) snprintf(out->folder, sizeof out->folder, "%s", path);
  snprintf(at, sizeof at, "%s/model.safetensors.index.json", path);
  if (folder && access(at, F_OK) == 0) return read_index(at, fault, out);
  snprintf(at, sizeof at, "%s/model.safetensors", path);
  if (folder && access(at, F_OK) != 0)
    return lev_fail(LEV_ERR_IO, "%s has neither model.safetensors.index.json nor model.safetensors nor manifest.json",
                    path);
  out->names = lev_calloc(LEV_HEAP_REPORT, 1, sizeof *out->names);
  if (!out->names) return LEV_ERR_NOMEM;
  if (!folder && strlen(path) >= sizeof *out->names)
    return lev_fail(LEV_ERR_IO, "%.60s...: the path of a single file is too long; give its folder", path);
  snprintf(out->names[out->n++], sizeof *out->names, "%s", folder ? "model.safetensors" : path);
  return LEV_OK;
}

static lev_status read_model(const char *path, lev_comm *world, lev_fault *fault, const lev_state_piece *masters,
                             int n) {
  file_list list = {0};
  lev_piece_files from = {
      .where = path, .path = list_path, .ctx = &list, .skip = strlen(LEV_STATE_MASTER), .fault = fault};
  lev_status st = lev_comm_agree(world, list_files(path, fault, &list));
  from.end = list.n;
  if (st == LEV_OK) st = lev_pieces_read_whole(&from, "", world, masters, n);
  lev_free(list.names);
  return st;
}

lev_status lev_initial_weights(const char *path, lev_comm *world, lev_fault *fault, const lev_state_piece *pieces,
                               int n) {
  char manifest[1024];
  int n_masters = 0;
  lev_state_piece *masters = lev_calloc(LEV_HEAP_REPORT, (size_t)n + 1, sizeof *masters);
  lev_status st = lev_comm_agree(world, masters ? LEV_OK : LEV_ERR_NOMEM);
  for (int i = 0; i < n && masters && st == LEV_OK; ++i)
    if (strncmp(pieces[i].name, LEV_STATE_MASTER, strlen(LEV_STATE_MASTER)) == 0) masters[n_masters++] = pieces[i];
  snprintf(manifest, sizeof manifest, "%.900s/manifest.json", path);
  if (st == LEV_OK)
    st = access(manifest, F_OK) == 0 ? lev_checkpoint_weights(path, world, fault, masters, n_masters)
                                     : read_model(path, world, fault, masters, n_masters);
  lev_free(masters);
  return st;
}
