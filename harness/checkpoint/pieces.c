/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/checkpoint/pieces.h"

#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"

size_t lev_piece_bytes(const lev_state_piece *p) {
  return lev_bytes(p->rows, p->cols, lev_dtype_bytes(p->dtype));
}

static bool is_float(lev_dtype t) {
  return t == LEV_F64 || t == LEV_F32 || t == LEV_BF16;
}

static lev_status differs(const char *path, const lev_safetensor *t, const lev_state_piece *p) {
  return lev_fail(LEV_ERR_FORMAT,
                  "%s: tensor \"%s\" has %d dims and ends at row %lld of %lld columns (%s); this model's has %d, %lld "
                  "rows and %lld columns",
                  path, t->name, t->n_dims, (long long)(t->offset[0] + t->dims[0]),
                  (long long)(t->n_dims > 1 ? t->dims[1] : 1), lev_dtype_name(t->dtype), p->vector ? 1 : 2,
                  (long long)p->full_rows, (long long)p->cols);
}

/* `rows` rows from row `from` of the tensor to row `to` of the piece. */
static void copy_rows(const lev_safetensors *file, const lev_safetensor *t, int64_t from, const lev_state_piece *p,
                      int64_t to, int64_t rows) {
  const unsigned char *src = file->data + t->begin + lev_bytes(from, p->cols, lev_dtype_bytes(t->dtype));
  unsigned char *dst = (unsigned char *)p->data + lev_bytes(to, p->cols, lev_dtype_bytes(p->dtype));
  lev_dtype_convert(p->dtype, dst, t->dtype, src, rows * p->cols);
}

/* Which rows of the pieces were read. */
typedef struct seen {
  int64_t *first;      /* [n] number of a piece's first row among the rows of all pieces */
  int64_t *filled;     /* [n] rows read */
  unsigned char *bits; /* a bit per row */
} seen;

static void seen_free(seen *s) {
  lev_free(s->first);
  lev_free(s->filled);
  lev_free(s->bits);
}

static lev_status seen_create(const lev_state_piece *pieces, int n, seen *out) {
  int64_t rows = 0;
  out->first = lev_calloc(LEV_HEAP_REPORT, (size_t)n + 1, sizeof *out->first);
  out->filled = lev_calloc(LEV_HEAP_REPORT, (size_t)n + 1, sizeof *out->filled);
  for (int i = 0; i < n && out->first; ++i) out->first[i] = rows, rows += pieces[i].rows;
  out->bits = lev_calloc(LEV_HEAP_REPORT, (size_t)rows / 8 + 1, 1);
  return out->first && out->filled && out->bits ? LEV_OK : LEV_ERR_NOMEM;
}

/* False where one of the rows was there already. */
static bool seen_add(seen *s, int piece, int64_t row, int64_t rows) {
  bool fresh = true;
  for (int64_t i = s->first[piece] + row, end = i + rows; i < end; ++i) {
    fresh &= !(s->bits[i / 8] >> (i % 8) & 1);
    s->bits[i / 8] |= (unsigned char)(1 << (i % 8));
  }
  s->filled[piece] += rows;
  return fresh;
}

/* Copies the rows that the file holds; used[]: its tensors that are tensors of pieces, their rows or others. */
static lev_status fill(const lev_safetensors *file, const char *path, size_t skip, const lev_state_piece *pieces, int n,
                       seen *rows, unsigned char *used) {
  for (int i = 0; i < n; ++i) {
    const lev_state_piece *p = &pieces[i];
    const lev_safetensor *t = lev_safetensors_find(file, p->name + skip);
    if (!t) continue;
    int64_t end = t->offset[0] + (t->n_dims > 0 ? t->dims[0] : 1);
    if (t->n_dims != (p->vector ? 1 : 2) || (!p->vector && (t->dims[1] != p->cols || t->offset[1] != 0)) ||
        end > p->full_rows || (t->dtype != p->dtype && (!is_float(t->dtype) || !is_float(p->dtype))))
      return differs(path, t, p);
    used[t - file->tensors] = 1;
    int64_t from = lev_max_i64(t->offset[0], p->first_row), to = lev_min_i64(end, p->first_row + p->rows);
    if (from >= to) continue;
    if (!seen_add(rows, i, from - p->first_row, to - from))
      return lev_fail(LEV_ERR_FORMAT, "%s: rows of tensor \"%s\" are in another file too", path, t->name);
    copy_rows(file, t, from - t->offset[0], p, from - p->first_row, to - from);
  }
  return LEV_OK;
}

static lev_status complete(const char *where, const lev_state_piece *pieces, int n, const int64_t *filled) {
  for (int i = 0; i < n; ++i)
    if (filled[i] != pieces[i].rows && !(pieces[i].optional && filled[i] == 0))
      return lev_fail(LEV_ERR_FORMAT, "%s: has %lld of %lld rows of tensor \"%s\" from row %lld on", where,
                      (long long)filled[i], (long long)pieces[i].rows, pieces[i].name, (long long)pieces[i].first_row);
  return LEV_OK;
}

/* Every tensor whose name begins with `prefix` was used by some rank. Collective. */
static lev_status none_left(const lev_safetensors *file, const char *path, const char *prefix, lev_comm *world,
                            const unsigned char *used) {
  size_t n = (size_t)file->n_tensors;
  int ranks = lev_comm_size(world);
  unsigned char *all = lev_calloc(LEV_HEAP_REPORT, n * (size_t)ranks + 1, 1);
  lev_status st = lev_comm_agree(world, all ? LEV_OK : LEV_ERR_NOMEM);
  if (st == LEV_OK && n > 0) st = lev_comm_host_all_gather(world, used, all, n);
  for (size_t t = 0; t < n && all && st == LEV_OK; ++t) {
    bool taken = strncmp(file->tensors[t].name, prefix, strlen(prefix)) != 0;
    for (int r = 0; r < ranks; ++r) taken |= all[(size_t)r * n + t];
    if (!taken)
      st = lev_fail(LEV_ERR_FORMAT, "%s: tensor \"%s\" has no place in this model", path, file->tensors[t].name);
  }
  lev_free(all);
  return st;
}

/* One file; collective where there is a world. */
static lev_status read_file(const lev_piece_files *files, int i, const char *prefix, lev_comm *world,
                            const lev_state_piece *pieces, int n, seen *rows) {
  char path[1024];
  lev_safetensors file = {0};
  unsigned char *used = NULL;
  files->path(files->ctx, i, path, sizeof path);
  lev_status st = lev_safetensors_open(path, files->fault, &file);
  if (st == LEV_OK) {
    used = lev_calloc(LEV_HEAP_REPORT, (size_t)file.n_tensors + 1, 1);
    st = used ? fill(&file, path, files->skip, pieces, n, rows, used) : LEV_ERR_NOMEM;
  }
  if (world) {
    st = lev_comm_agree(world, st);
    if (st == LEV_OK) st = none_left(&file, path, prefix, world, used);
  }
  lev_free(used);
  lev_safetensors_close(&file);
  return st;
}

static lev_status read_all(const lev_piece_files *files, const char *prefix, lev_comm *world,
                           const lev_state_piece *pieces, int n) {
  seen rows = {0};
  lev_status st = seen_create(pieces, n, &rows);
  if (world) st = lev_comm_agree(world, st);
  for (int i = files->begin; i < files->end && st == LEV_OK; ++i)
    st = read_file(files, i, prefix, world, pieces, n, &rows);
  if (st == LEV_OK) {
    st = complete(files->where, pieces, n, rows.filled);
    if (world) st = lev_comm_agree(world, st);
  }
  seen_free(&rows);
  return st;
}

lev_status lev_pieces_read(const lev_piece_files *files, const lev_state_piece *pieces, int n) {
  return read_all(files, "", NULL, pieces, n);
}

lev_status lev_pieces_read_whole(const lev_piece_files *files, const char *prefix, lev_comm *world,
                                 const lev_state_piece *pieces, int n) {
  return read_all(files, prefix, world, pieces, n);
}
