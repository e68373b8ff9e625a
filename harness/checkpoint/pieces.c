/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/checkpoint/pieces.h"

#include <string.h>

#include "common/dims.h"

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
  if (t->dtype == p->dtype) {
    memcpy(dst, src, lev_bytes(rows, p->cols, lev_dtype_bytes(p->dtype)));
    return;
  }
  size_t bytes = lev_dtype_bytes(t->dtype);
  double one = 0; /* aligned, which data of foreign files need not be */
  for (int64_t i = 0; i < rows * p->cols; ++i) {
    memcpy(&one, src + (size_t)i * bytes, bytes);
    lev_dtype_store(p->dtype, dst, i, lev_dtype_load(t->dtype, &one, 0));
  }
}

lev_status lev_pieces_fill(const lev_safetensors *file, const char *path, size_t skip, const lev_state_piece *pieces,
                           int n, int64_t *filled, unsigned char *used) {
  for (int i = 0; i < n; ++i) {
    const lev_state_piece *p = &pieces[i];
    const lev_safetensor *t = lev_safetensors_find(file, p->name + skip);
    if (!t) continue;
    int64_t end = t->offset[0] + (t->n_dims > 0 ? t->dims[0] : 1);
    if (t->n_dims != (p->vector ? 1 : 2) || (!p->vector && (t->dims[1] != p->cols || t->offset[1] != 0)) ||
        end > p->full_rows || (t->dtype != p->dtype && (!is_float(t->dtype) || !is_float(p->dtype))))
      return differs(path, t, p);
    if (used) used[t - file->tensors] = 1;
    int64_t from = lev_max_i64(t->offset[0], p->first_row), to = lev_min_i64(end, p->first_row + p->rows);
    if (from >= to) continue;
    if (to - from > p->rows - filled[i])
      return lev_fail(LEV_ERR_FORMAT, "%s: rows of tensor \"%s\" are in another file too", path, t->name);
    copy_rows(file, t, from - t->offset[0], p, from - p->first_row, to - from);
    filled[i] += to - from;
  }
  return LEV_OK;
}

lev_status lev_pieces_complete(const char *where, const lev_state_piece *pieces, int n, const int64_t *filled) {
  for (int i = 0; i < n; ++i)
    if (filled[i] != pieces[i].rows)
      return lev_fail(LEV_ERR_FORMAT, "%s: has %lld of %lld rows of tensor \"%s\" from row %lld on", where,
                      (long long)filled[i], (long long)pieces[i].rows, pieces[i].name, (long long)pieces[i].first_row);
  return LEV_OK;
}
