/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/checkpoint/export.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/dims.h"
#include "common/hostmem.h"
#include "common/log.h"
#include "harness/checkpoint/checkpoint.h"

#define BUFFER_BYTES ((size_t)1 << 20)
#define PATH_BYTES 1024

/* Rows of a master in one of the shards. */
typedef struct block {
  const lev_safetensors *shard;
  const lev_safetensor *t;
} block;

typedef struct export {
  lev_safetensors *shards;
  int n_shards;
  block *blocks; /* by tensor, then by row */
  int n_blocks;
  lev_safetensor *tensors; /* whole ones, as they are written; offset[0] = first block, offset[1] = their number */
  int n_tensors;
  lev_dtype dtype;
  unsigned char *buffer; /* [BUFFER_BYTES] */
  lev_fault *fault;
}
export;

static int by_place(const void *a, const void *b) {
  const lev_safetensor *x = ((const block *)a)->t, *y = ((const block *)b)->t;
  int names = strcmp(x->name, y->name);
  return names ? names : (x->offset[0] > y->offset[0]) - (x->offset[0] < y->offset[0]);
}

static lev_status open_shards(export *e, const char *dir, int files) {
  char path[PATH_BYTES];
  size_t most = 0;
  e->shards = lev_calloc(LEV_HEAP_REPORT, (size_t)files + 1, sizeof *e->shards);
  if (!e->shards) return LEV_ERR_NOMEM;
  for (; e->n_shards < files; ++e->n_shards) {
    lev_checkpoint_shard(dir, e->n_shards, path, sizeof path);
    LEV_TRY(lev_safetensors_open(path, e->fault, &e->shards[e->n_shards]));
    most += (size_t)e->shards[e->n_shards].n_tensors;
  }
  e->blocks = lev_calloc(LEV_HEAP_REPORT, most + 1, sizeof *e->blocks);
  e->buffer = lev_calloc(LEV_HEAP_REPORT, BUFFER_BYTES, 1);
  if (!e->blocks || !e->buffer) return LEV_ERR_NOMEM;
  for (int s = 0; s < e->n_shards; ++s)
    for (int i = 0; i < e->shards[s].n_tensors; ++i) {
      const lev_safetensor *t = &e->shards[s].tensors[i];
      if (strncmp(t->name, LEV_STATE_MASTER, strlen(LEV_STATE_MASTER)) == 0)
        e->blocks[e->n_blocks++] = (block){&e->shards[s], t};
    }
  qsort(e->blocks, (size_t)e->n_blocks, sizeof *e->blocks, by_place);
  return LEV_OK;
}

/* Wide elements first, as other writers do: then each tensor is aligned in its file. */
static int by_alignment(const void *a, const void *b) {
  const lev_safetensor *x = a, *y = b;
  size_t wide = lev_dtype_bytes(x->dtype), other = lev_dtype_bytes(y->dtype);
  return wide != other ? (wide < other) - (wide > other) : strcmp(x->name, y->name);
}

/* Selection biases stay as they are: they move by steps below the rounding of bf16, and models keep them in f32. */
static bool is_bias(const lev_safetensor *t) {
  return strstr(t->name, ".e_score_correction_bias") != NULL;
}

/* Blocks of a tensor follow each other without holes. Where the last one ends nobody says: a rank's file that the
 * manifest names was checked whole. */
static lev_status join_blocks(export *e, const char *dir) {
  e->tensors = lev_calloc(LEV_HEAP_REPORT, (size_t)e->n_blocks + 1, sizeof *e->tensors);
  if (!e->tensors) return LEV_ERR_NOMEM;
  for (int i = 0; i < e->n_blocks; ++i) {
    const lev_safetensor *b = e->blocks[i].t;
    lev_safetensor *t = e->n_tensors > 0 ? &e->tensors[e->n_tensors - 1] : NULL;
    if (!t || strcmp(t->name, b->name + strlen(LEV_STATE_MASTER)) != 0) {
      t = &e->tensors[e->n_tensors++];
      snprintf(t->name, sizeof t->name, "%s", b->name + strlen(LEV_STATE_MASTER));
      t->dtype = is_bias(b) ? b->dtype : e->dtype, t->n_dims = b->n_dims, t->dims[1] = b->dims[1];
      t->offset[0] = i;
    }
    if (b->offset[0] != t->dims[0] || b->n_dims != t->n_dims || b->dims[1] != t->dims[1])
      return lev_fail(LEV_ERR_FORMAT, "%s: rows of tensor \"%s\" before row %lld are missing, or its shapes differ",
                      dir, b->name, (long long)b->offset[0]);
    t->dims[0] += b->dims[0], ++t->offset[1];
  }
  qsort(e->tensors, (size_t)e->n_tensors, sizeof *e->tensors, by_alignment);
  return e->n_tensors > 0 ? LEV_OK : lev_fail(LEV_ERR_FORMAT, "%s holds no weights", dir);
}

static size_t tensor_bytes(const lev_safetensor *t) {
  return lev_bytes(t->dims[0], t->n_dims > 1 ? t->dims[1] : 1, lev_dtype_bytes(t->dtype));
}

static lev_status write_block(const export *e, lev_file *file, const block *b, lev_dtype dtype) {
  int64_t n = b->t->dims[0] * (b->t->n_dims > 1 ? b->t->dims[1] : 1);
  int64_t room = (int64_t)(BUFFER_BYTES / lev_dtype_bytes(dtype));
  size_t bytes = lev_dtype_bytes(b->t->dtype);
  const unsigned char *src = b->shard->data + b->t->begin;
  for (int64_t at = 0; at < n; at += room) {
    int64_t count = lev_min_i64(room, n - at);
    lev_dtype_convert(dtype, e->buffer, b->t->dtype, src + (size_t)at * bytes, count);
    LEV_TRY(lev_file_write(file, e->buffer, (size_t)count * lev_dtype_bytes(dtype)));
  }
  return LEV_OK;
}

/* Tensors begin .. end - 1. */
static lev_status write_file(const export *e, const char *path, int begin, int end) {
  lev_file file;
  LEV_TRY(lev_file_create(&file, path, e->fault));
  lev_status st = lev_safetensors_begin(&file, e->tensors + begin, end - begin, false);
  for (int i = begin; i < end && st == LEV_OK; ++i)
    for (int64_t b = 0; b < e->tensors[i].offset[1] && st == LEV_OK; ++b)
      st = write_block(e, &file, &e->blocks[e->tensors[i].offset[0] + b], e->tensors[i].dtype);
  if (st == LEV_OK) st = lev_file_commit(&file, NULL);
  if (st != LEV_OK) lev_file_discard(&file);
  return st;
}

static int file_end(const export *e, int begin, size_t file_bytes) {
  size_t bytes = 0;
  int end = begin;
  while (end < e->n_tensors && (end == begin || bytes + tensor_bytes(&e->tensors[end]) <= file_bytes))
    bytes += tensor_bytes(&e->tensors[end++]);
  return end;
}

static void file_name(char *out, int file, int files) {
  if (files == 1)
    snprintf(out, 64, "model.safetensors");
  else
    snprintf(out, 64, "model-%05d-of-%05d.safetensors", file + 1, files);
}

static lev_status write_index(const export *e, const char *dir, json_t *map) {
  char path[PATH_BYTES];
  lev_file file;
  size_t bytes = 0;
  for (int i = 0; i < e->n_tensors; ++i) bytes += tensor_bytes(&e->tensors[i]);
  json_t *root = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)bytes, "weight_map", map);
  char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
  json_decref(root);
  if (!text) return lev_fail(LEV_ERR_NOMEM, "no memory for the index");
  snprintf(path, sizeof path, "%.900s/model.safetensors.index.json", dir);
  lev_status st = lev_file_create(&file, path, e->fault);
  if (st == LEV_OK) {
    st = lev_file_write(&file, text, strlen(text));
    if (st == LEV_OK) st = lev_file_commit(&file, NULL);
    if (st != LEV_OK) lev_file_discard(&file);
  }
  free(text);
  return st;
}

static lev_status write_files(const export *e, const char *dir, size_t file_bytes, int *files) {
  char name[64], path[PATH_BYTES];
  lev_status st = LEV_OK;
  *files = 0;
  for (int at = 0; at < e->n_tensors; at = file_end(e, at, file_bytes)) ++*files;
  json_t *map = json_object();
  for (int f = 0, at = 0; f < *files && st == LEV_OK; ++f) {
    int end = file_end(e, at, file_bytes);
    file_name(name, f, *files);
    snprintf(path, sizeof path, "%.900s/%s", dir, name);
    st = write_file(e, path, at, end);
    for (; at < end; ++at) json_object_set_new(map, e->tensors[at].name, json_string(name));
  }
  if (st == LEV_OK && *files > 1) st = write_index(e, dir, map);
  json_decref(map);
  return st == LEV_OK ? lev_sync_dir(dir, e->fault) : st;
}

static lev_status write_model(const export *e, const char *to, size_t file_bytes, int *files) {
  char temporary[PATH_BYTES];
  LEV_TRY(lev_make_temporary_dir(to, temporary, sizeof temporary, e->fault));
  lev_status st = write_files(e, temporary, file_bytes, files);
  if (st == LEV_OK) st = lev_rename(temporary, to, e->fault);
  if (st == LEV_OK) return LEV_OK;
  lev_status cleaned = lev_remove_dir(temporary, NULL);
  if (cleaned != LEV_OK) lev_log(LEV_LOG_WARN, LEV_SYS_IO, "%s", lev_detail());
  return st;
}

lev_status lev_checkpoint_export(const char *from, const char *folder, lev_dtype dtype, size_t file_bytes,
                                 lev_fault *fault, lev_exported *out) {
  char dir[PATH_BYTES], to[PATH_BYTES];
  int files;
  export e = {.dtype = dtype, .fault = fault};
  *out = (lev_exported){0};
  size_t length = strlen(folder);
  while (length > 0 && folder[length - 1] == '/') --length;
  if (length == 0 || length > 900)
    return lev_fail(LEV_ERR_ARG, "\"%.60s\" names no new folder, or its path is too long", folder);
  snprintf(to, sizeof to, "%.*s", (int)length, folder);
  if (access(to, F_OK) == 0) return lev_fail(LEV_ERR_ARG, "%s exists; name a new folder", to);
  LEV_TRY(lev_checkpoint_find(from, dir, sizeof dir, &files));
  lev_status st = open_shards(&e, dir, files);
  if (st == LEV_OK) st = join_blocks(&e, dir);
  if (st == LEV_OK) st = write_model(&e, to, file_bytes, &out->files);
  out->tensors = e.n_tensors;
  for (int i = 0; i < e.n_tensors; ++i)
    out->parameters += (int64_t)(tensor_bytes(&e.tensors[i]) / lev_dtype_bytes(e.tensors[i].dtype));
  for (int i = 0; i < e.n_shards; ++i) lev_safetensors_close(&e.shards[i]);
  lev_free(e.shards);
  lev_free(e.blocks);
  lev_free(e.tensors);
  lev_free(e.buffer);
  return st;
}
