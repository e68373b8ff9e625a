/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/dims.h"
#include "common/hostmem.h"

#define HEADER_MAX 100000000u /* the format's own limit */
#define HEADER_ALIGN 64

static const char *word_of(lev_dtype t) {
  static const char *const words[] = {
#define WORD(name, bytes, arith, word) word,
      LEV_DTYPE_TABLE(WORD)
#undef WORD
  };
  return words[t];
}

/* ---- writing ---- */

static json_t *entry(const lev_safetensor *t) {
  json_t *shape = json_array();
  for (int i = 0; i < t->n_dims; ++i) json_array_append_new(shape, json_integer(t->dims[i]));
  return json_pack("{s:s, s:o, s:[I,I]}", "dtype", word_of(t->dtype), "shape", shape, "data_offsets",
                   (json_int_t)t->begin, (json_int_t)t->end);
}

static json_t *metadata(const lev_safetensor *tensors, int n, bool sharded) {
  json_t *meta = json_pack("{s:s}", "format", "pt");
  if (!sharded) return meta;
  json_t *info = json_object();
  for (int i = 0; i < n; ++i) {
    json_t *offsets = json_array();
    for (int d = 0; d < tensors[i].n_dims; ++d) json_array_append_new(offsets, json_integer(tensors[i].offset[d]));
    json_object_set_new(info, tensors[i].name, json_pack("{s:o}", "saved_offsets", offsets));
  }
  char *text = json_dumps(info, JSON_COMPACT);
  if (text) {
    json_object_set_new(meta, "DCP_SHARDING_INFO", json_string(text));
    json_object_set_new(meta, "DCP_VERSION", json_string("1.0"));
  }
  free(text);
  json_decref(info);
  return meta;
}

lev_status lev_safetensors_begin(lev_file *file, lev_safetensor *tensors, int n, bool sharded) {
  uint64_t at = 0;
  for (int i = 0; i < n; ++i) {
    lev_safetensor *t = &tensors[i];
    size_t bytes = lev_bytes(t->n_dims > 0 ? t->dims[0] : 1, t->n_dims > 1 ? t->dims[1] : 1, lev_dtype_bytes(t->dtype));
    t->begin = at, t->end = at += bytes;
  }
  json_t *root = json_object();
  json_object_set_new(root, "__metadata__", metadata(tensors, n, sharded));
  for (int i = 0; i < n; ++i) json_object_set_new(root, tensors[i].name, entry(&tensors[i]));
  char *text = json_dumps(root, JSON_COMPACT);
  bool complete = text && json_object_size(root) == (size_t)n + 1;
  json_decref(root);
  if (!complete) {
    free(text);
    return text ? lev_fail(LEV_ERR_ARG, "%s: a tensor name occurs twice", file->path)
                : lev_fail(LEV_ERR_NOMEM, "no memory for the header of %s", file->path);
  }
  static const char spaces[HEADER_ALIGN + 1] = "                                                                ";
  uint64_t length = strlen(text), padded = (length + 8 + HEADER_ALIGN - 1) / HEADER_ALIGN * HEADER_ALIGN - 8;
  unsigned char prefix[8];
  for (int i = 0; i < 8; ++i) prefix[i] = (unsigned char)(padded >> (8 * i));
  lev_status st = lev_file_write(file, prefix, 8);
  if (st == LEV_OK) st = lev_file_write(file, text, length);
  if (st == LEV_OK) st = lev_file_write(file, spaces, padded - length);
  free(text);
  return st;
}

/* ---- reading ---- */

static lev_status malformed(const char *path, const char *name, const char *what) {
  return lev_fail(LEV_ERR_FORMAT, "%s: tensor \"%.100s\": %s", path, name, what);
}

static lev_status read_entry(const char *path, const char *name, json_t *value, uint64_t data_bytes,
                             lev_safetensor *t) {
  const char *word;
  json_t *shape;
  json_int_t begin, end;
  if (json_unpack(value, "{s:s, s:o, s:[I,I]}", "dtype", &word, "shape", &shape, "data_offsets", &begin, &end) != 0 ||
      !json_is_array(shape))
    return malformed(path, name, "entry lacks dtype, shape or data_offsets");
  if (strlen(name) >= sizeof t->name) return malformed(path, name, "name too long");
  memcpy(t->name, name, strlen(name) + 1);
  t->dtype = lev_dtype_find(word);
  if (t->dtype == LEV_DTYPE_COUNT) return malformed(path, name, "unknown dtype");
  if (json_array_size(shape) > 2)
    return lev_fail(LEV_ERR_UNSUPPORTED, "%s: tensor \"%s\" has %zu dims, at most 2 are read", path, name,
                    json_array_size(shape));
  t->n_dims = (int)json_array_size(shape);
  for (int i = 0; i < t->n_dims; ++i) {
    json_t *dim = json_array_get(shape, (size_t)i);
    if (!json_is_integer(dim) || json_integer_value(dim) < 0) return malformed(path, name, "bad shape");
    t->dims[i] = json_integer_value(dim);
  }
  size_t bytes = lev_bytes(t->n_dims > 0 ? t->dims[0] : 1, t->n_dims > 1 ? t->dims[1] : 1, lev_dtype_bytes(t->dtype));
  if (begin < 0 || end < begin || (uint64_t)end > data_bytes) return malformed(path, name, "data outside the file");
  if ((uint64_t)(end - begin) != bytes) return malformed(path, name, "size does not match shape and dtype");
  t->begin = (uint64_t)begin, t->end = (uint64_t)end;
  return LEV_OK;
}

/* Offsets of blocks, where the file is a shard; tensors that it does not name keep 0. */
static lev_status read_offsets(const char *path, const json_t *root, lev_safetensors *f) {
  const char *text = json_string_value(json_object_get(json_object_get(root, "__metadata__"), "DCP_SHARDING_INFO"));
  if (!text) return LEV_OK;
  json_error_t error;
  json_t *info = json_loads(text, JSON_REJECT_DUPLICATES, &error);
  lev_status st = info ? LEV_OK : lev_fail(LEV_ERR_FORMAT, "%s: DCP_SHARDING_INFO: %s", path, error.text);
  for (int i = 0; i < f->n_tensors && st == LEV_OK; ++i) {
    lev_safetensor *t = &f->tensors[i];
    const json_t *offsets = json_object_get(json_object_get(info, t->name), "saved_offsets");
    for (int d = 0; offsets && d < t->n_dims && st == LEV_OK; ++d) {
      const json_t *offset = json_array_get(offsets, (size_t)d);
      t->offset[d] = json_integer_value(offset);
      if (!json_is_integer(offset) || t->offset[d] < 0 || t->offset[d] > INT64_MAX - t->dims[d])
        st = malformed(path, t->name, "bad saved_offsets");
    }
  }
  json_decref(info);
  return st;
}

static int by_begin(const void *a, const void *b) {
  const lev_safetensor *x = a, *y = b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  return x->end < y->end ? -1 : x->end > y->end;
}
static int by_name(const void *a, const void *b) {
  return strcmp(((const lev_safetensor *)a)->name, ((const lev_safetensor *)b)->name);
}

static lev_status check_tiling(const char *path, const lev_safetensors *f, uint64_t data_bytes) {
  uint64_t at = 0;
  qsort(f->tensors, (size_t)f->n_tensors, sizeof *f->tensors, by_begin);
  for (int i = 0; i < f->n_tensors; ++i) {
    if (f->tensors[i].begin != at) return malformed(path, f->tensors[i].name, "hole or overlap before it");
    at = f->tensors[i].end;
  }
  if (at != data_bytes) return lev_fail(LEV_ERR_FORMAT, "%s: bytes after the last tensor", path);
  qsort(f->tensors, (size_t)f->n_tensors, sizeof *f->tensors, by_name);
  return LEV_OK;
}

static lev_status parse(const char *path, lev_safetensors *f) {
  uint64_t length = 0;
  if (f->bytes < 8) return lev_fail(LEV_ERR_FORMAT, "%s: %llu bytes, too short", path, (unsigned long long)f->bytes);
  for (int i = 7; i >= 0; --i) length = length << 8 | f->map[i];
  if (length > HEADER_MAX || length > f->bytes - 8)
    return lev_fail(LEV_ERR_FORMAT, "%s: header of %llu bytes does not fit the file", path, (unsigned long long)length);
  json_error_t error;
  json_t *root = json_loadb((const char *)f->map + 8, (size_t)length, JSON_REJECT_DUPLICATES, &error), *value;
  if (!root || !json_is_object(root)) {
    json_decref(root);
    return lev_fail(LEV_ERR_FORMAT, "%s: header is no JSON object: %s", path, root ? "" : error.text);
  }
  const char *name;
  lev_status st = LEV_OK;
  f->data = f->map + 8 + length;
  f->tensors = lev_calloc(LEV_HEAP_REPORT, json_object_size(root) + 1, sizeof *f->tensors);
  if (!f->tensors) st = LEV_ERR_NOMEM;
  json_object_foreach(root, name, value) {
    if (st != LEV_OK || strcmp(name, "__metadata__") == 0) continue;
    st = read_entry(path, name, value, f->bytes - 8 - length, &f->tensors[f->n_tensors++]);
  }
  if (st == LEV_OK) st = read_offsets(path, root, f);
  json_decref(root);
  return st == LEV_OK ? check_tiling(path, f, f->bytes - 8 - length) : st;
}

lev_status lev_safetensors_open(const char *path, lev_fault *fault, lev_safetensors *out) {
  memset(out, 0, sizeof *out);
  if (lev_fault_hit(fault, LEV_FAULT_FILE)) return lev_fail(LEV_ERR_IO, "cannot open %s: injected failure", path);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return lev_fail(LEV_ERR_IO, "cannot open %s: %s", path, strerror(errno));
  struct stat st;
  void *map = fstat(fd, &st) == 0 && st.st_size > 0 ? mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)
                                                    : MAP_FAILED;
  close(fd);
  if (map == MAP_FAILED) return lev_fail(LEV_ERR_FORMAT, "%s: empty or cannot be mapped", path);
  out->map = map, out->bytes = (uint64_t)st.st_size;
  lev_status status = parse(path, out);
  if (status != LEV_OK) lev_safetensors_close(out);
  return status;
}

void lev_safetensors_close(lev_safetensors *file) {
  if (file->map) munmap(file->map, (size_t)file->bytes);
  lev_free(file->tensors);
  memset(file, 0, sizeof *file);
}

const lev_safetensor *lev_safetensors_find(const lev_safetensors *file, const char *name) {
  lev_safetensor key = {0};
  if (strlen(name) >= sizeof key.name) return NULL;
  memcpy(key.name, name, strlen(name) + 1);
  return bsearch(&key, file->tensors, (size_t)file->n_tensors, sizeof key, by_name);
}
