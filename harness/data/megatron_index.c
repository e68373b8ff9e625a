/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/megatron_index.h"

#include <stdbool.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/data/text.h"

#define HEADER 34
#define VOCAB_U16 65500
#define SLAB 4096 /* ids converted at once */

static const char MAGIC[9] = "MMIDIDX\0\0";

enum { CODE_U8 = 1, CODE_I8, CODE_I16, CODE_I32, CODE_I64, CODE_F64, CODE_F32, CODE_U16 };

static uint64_t load_le(const unsigned char *p, int bytes) {
  uint64_t v = 0;
  for (int i = 0; i < bytes; ++i) v |= (uint64_t)p[i] << (8 * i);
  return v;
}

static void store_le(unsigned char *p, uint64_t v, int bytes) {
  for (int i = 0; i < bytes; ++i) p[i] = (unsigned char)(v >> (8 * i));
}

/* ---- reading ---- */

static int64_t bytes_of_dtype(int code) {
  switch (code) {
  case CODE_U8:
  case CODE_I8:
    return 1;
  case CODE_I16:
  case CODE_U16:
    return 2;
  case CODE_I32:
    return 4;
  case CODE_I64:
    return 8;
  default:
    return 0;
  }
}

int64_t lev_megatron_length(const lev_megatron *m, int64_t i) {
  return (int32_t)(uint32_t)load_le(m->idx.data + HEADER + 4 * i, 4);
}

static int64_t pointer_of(const lev_megatron *m, int64_t i) {
  return (int64_t)load_le(m->idx.data + HEADER + 4 * m->sequences + 8 * i, 8);
}

int64_t lev_megatron_document(const lev_megatron *m, int64_t i) {
  return (int64_t)load_le(m->idx.data + HEADER + 12 * m->sequences + 8 * i, 8);
}

int64_t lev_megatron_document_begin(const lev_megatron *m, int64_t i) {
  int64_t sequence = lev_megatron_document(m, i);
  while (sequence < m->sequences && lev_megatron_length(m, sequence) == 0) ++sequence; /* these may point anywhere */
  return sequence < m->sequences ? pointer_of(m, sequence) / m->token_bytes : m->tokens;
}

static lev_status read_header(lev_megatron *m, const char *path) {
  const unsigned char *p = m->idx.data;
  uint64_t size = m->idx.bytes;
  if (size < HEADER)
    return lev_fail(LEV_ERR_FORMAT, "%s has %llu bytes, the header alone takes %d", path, (unsigned long long)size,
                    HEADER);
  if (memcmp(p, MAGIC, sizeof MAGIC) != 0)
    return lev_fail(LEV_ERR_FORMAT, "%s is not a Megatron index (no MMIDIDX at its start)", path);
  if (load_le(p + 9, 8) != 1)
    return lev_fail(LEV_ERR_UNSUPPORTED, "%s has index version %llu, only 1 is known", path,
                    (unsigned long long)load_le(p + 9, 8));
  m->dtype = p[17];
  m->token_bytes = bytes_of_dtype(m->dtype);
  if (m->token_bytes == 0)
    return lev_fail(m->dtype == CODE_F32 || m->dtype == CODE_F64 ? LEV_ERR_UNSUPPORTED : LEV_ERR_FORMAT,
                    "%s has dtype code %d, which is not an integer type", path, m->dtype);
  uint64_t seq = load_le(p + 18, 8), docs = load_le(p + 26, 8);
  if (seq > size / 12 || docs > size / 8)
    return lev_fail(LEV_ERR_FORMAT,
                    "%s claims %llu sequences and %llu document entries, its %llu bytes cannot hold them", path,
                    (unsigned long long)seq, (unsigned long long)docs, (unsigned long long)size);
  uint64_t need = HEADER + 12 * seq + 8 * docs;
  if (size != need && size != need + seq)
    return lev_fail(LEV_ERR_FORMAT, "%s has %llu bytes, %llu sequences and %llu document entries take %llu (or %llu)",
                    path, (unsigned long long)size, (unsigned long long)seq, (unsigned long long)docs,
                    (unsigned long long)need, (unsigned long long)(need + seq));
  m->sequences = (int64_t)seq, m->documents = (int64_t)docs;
  return LEV_OK;
}

static lev_status check_sequences(lev_megatron *m, const char *path) {
  int64_t room = (int64_t)m->bin.bytes / m->token_bytes;
  for (int64_t i = 0; i < m->sequences; ++i) {
    int64_t length = lev_megatron_length(m, i), at = pointer_of(m, i);
    if (length < 0 || length > room - m->tokens)
      return lev_fail(LEV_ERR_FORMAT, "%s: sequence %lld of %lld tokens after %lld others exceeds %s, which holds %lld",
                      path, (long long)i, (long long)length, (long long)m->tokens, m->bin_path, (long long)room);
    if (at < 0 || at > (int64_t)m->bin.bytes - length * m->token_bytes)
      return lev_fail(LEV_ERR_FORMAT, "%s: sequence %lld begins at byte %lld, outside %s (%zu bytes)", path,
                      (long long)i, (long long)at, m->bin_path, m->bin.bytes);
    if (length > 0 && at != m->tokens * m->token_bytes)
      return lev_fail(LEV_ERR_UNSUPPORTED, "%s: sequence %lld begins at byte %lld, not at %lld where the last one ends",
                      path, (long long)i, (long long)at, (long long)(m->tokens * m->token_bytes));
    m->tokens += length;
  }
  if (m->tokens * m->token_bytes != (int64_t)m->bin.bytes)
    return lev_fail(LEV_ERR_FORMAT, "%s accounts for %lld bytes, %s has %zu", path,
                    (long long)(m->tokens * m->token_bytes), m->bin_path, m->bin.bytes);
  return LEV_OK;
}

static lev_status check_documents(const lev_megatron *m, const char *path) {
  int64_t last = 0;
  for (int64_t i = 0; i < m->documents; ++i) {
    int64_t d = lev_megatron_document(m, i);
    if (d < last || d > m->sequences || (i == 0 && d != 0))
      return lev_fail(LEV_ERR_FORMAT, "%s: document entry %lld is %lld (previous %lld, sequences %lld)", path,
                      (long long)i, (long long)d, (long long)last, (long long)m->sequences);
    last = d;
  }
  if (m->documents == 0 ? m->sequences > 0 : last != m->sequences)
    return lev_fail(LEV_ERR_FORMAT, "%s: documents end at sequence %lld of %lld", path, (long long)last,
                    (long long)m->sequences);
  return LEV_OK;
}

lev_status lev_megatron_open(const char *prefix, lev_megatron *out) {
  char idx_path[1024];
  *out = (lev_megatron){0};
  LEV_TRY(lev_path_join(idx_path, sizeof idx_path, prefix, ".idx"));
  LEV_TRY(lev_path_join(out->bin_path, sizeof out->bin_path, prefix, ".bin"));
  LEV_TRY(lev_map_open(idx_path, &out->idx));
  lev_status st = lev_map_open(out->bin_path, &out->bin);
  if (st == LEV_OK) st = read_header(out, idx_path);
  if (st == LEV_OK) st = check_sequences(out, idx_path);
  if (st == LEV_OK) st = check_documents(out, idx_path);
  if (st != LEV_OK) lev_megatron_close(out);
  return st;
}

void lev_megatron_close(lev_megatron *m) {
  lev_map_close(&m->idx);
  lev_map_close(&m->bin);
  *m = (lev_megatron){0};
}

static int64_t token_at(const lev_megatron *m, const unsigned char *p) {
  uint64_t v = load_le(p, (int)m->token_bytes);
  switch (m->dtype) {
  case CODE_I8:
    return (int8_t)(uint8_t)v;
  case CODE_I16:
    return (int16_t)(uint16_t)v;
  case CODE_I32:
    return (int32_t)(uint32_t)v;
  default:
    return (int64_t)v;
  }
}

lev_status lev_megatron_read(const lev_megatron *m, int64_t first, int64_t n, int64_t vocab, int32_t *out) {
  if (first < 0 || n < 0 || first > m->tokens || n > m->tokens - first)
    return lev_fail(LEV_ERR_ARG, "tokens %lld to %lld asked, %s has %lld", (long long)first, (long long)(first + n),
                    m->bin_path, (long long)m->tokens);
  const unsigned char *p = m->bin.data + first * m->token_bytes;
  for (int64_t i = 0; i < n; ++i, p += m->token_bytes) {
    int64_t id = token_at(m, p);
    if (id < 0 || id >= vocab)
      return lev_fail(LEV_ERR_FORMAT, "%s: token %lld is %lld, outside the vocabulary of %lld", m->bin_path,
                      (long long)(first + i), (long long)id, (long long)vocab);
    out[i] = (int32_t)id;
  }
  return LEV_OK;
}

/* ---- writing ---- */

struct lev_megatron_writer {
  lev_out bin;
  char idx_path[1024];
  int64_t vocab, tokens, open; /* open: tokens of the current sequence */
  int32_t *length;             /* [sequences] */
  int64_t *document;           /* [documents], the leading 0 not stored */
  int64_t sequences, documents;
  size_t sequence_room, document_room;
  bool wide; /* i32 */
};

lev_status lev_megatron_create(const char *prefix, int64_t vocab, lev_megatron_writer **out) {
  char bin_path[1024];
  *out = NULL;
  if (vocab < 1 || vocab > INT32_MAX) return lev_fail(LEV_ERR_ARG, "vocabulary of %lld ids", (long long)vocab);
  LEV_TRY(lev_path_join(bin_path, sizeof bin_path, prefix, ".bin"));
  lev_megatron_writer *w = lev_calloc(LEV_HEAP_DATA, 1, sizeof *w);
  if (!w) return LEV_ERR_NOMEM;
  w->bin.fd = -1, w->vocab = vocab, w->wide = vocab >= VOCAB_U16;
  lev_status st = lev_path_join(w->idx_path, sizeof w->idx_path, prefix, ".idx");
  if (st == LEV_OK) st = lev_out_open(&w->bin, bin_path);
  if (st == LEV_OK)
    *out = w;
  else
    lev_megatron_writer_close(w);
  return st;
}

static lev_status end_sequence(lev_megatron_writer *w) {
  if (w->open == 0) return LEV_OK;
  void *array = w->length;
  LEV_TRY(lev_grow(&array, &w->sequence_room, (size_t)w->sequences + 1, sizeof *w->length));
  w->length = array;
  w->length[w->sequences++] = (int32_t)w->open;
  w->open = 0;
  return LEV_OK;
}

lev_status lev_megatron_append(lev_megatron_writer *w, const int32_t *ids, int64_t n) {
  unsigned char slab[SLAB * 4];
  int width = w->wide ? 4 : 2;
  while (n > 0) {
    if (w->open == INT32_MAX) LEV_TRY(end_sequence(w));
    int64_t take = n < SLAB ? n : SLAB;
    if (take > INT32_MAX - w->open) take = INT32_MAX - w->open;
    for (int64_t i = 0; i < take; ++i) {
      if (ids[i] < 0 || ids[i] >= w->vocab)
        return lev_fail(LEV_ERR_ARG, "token id %d is outside the vocabulary of %lld", (int)ids[i], (long long)w->vocab);
      store_le(slab + i * width, (uint64_t)ids[i], width);
    }
    LEV_TRY(lev_out_write(&w->bin, slab, (size_t)(take * width)));
    w->open += take, w->tokens += take;
    ids += take, n -= take;
  }
  return LEV_OK;
}

lev_status lev_megatron_end_document(lev_megatron_writer *w) {
  LEV_TRY(end_sequence(w));
  int64_t begun = w->documents ? w->document[w->documents - 1] : 0;
  if (begun == w->sequences) return LEV_OK;
  void *array = w->document;
  LEV_TRY(lev_grow(&array, &w->document_room, (size_t)w->documents + 1, sizeof *w->document));
  w->document = array;
  w->document[w->documents++] = w->sequences;
  return LEV_OK;
}

int64_t lev_megatron_written(const lev_megatron_writer *w) {
  return w->tokens;
}

static lev_status write_number(lev_out *out, uint64_t value, int bytes) {
  unsigned char raw[8];
  store_le(raw, value, bytes);
  return lev_out_write(out, raw, (size_t)bytes);
}

static lev_status write_index(const lev_megatron_writer *w, lev_out *out) {
  int64_t at = 0, width = w->wide ? 4 : 2;
  LEV_TRY(lev_out_write(out, MAGIC, sizeof MAGIC));
  LEV_TRY(write_number(out, 1, 8));
  LEV_TRY(write_number(out, w->wide ? CODE_I32 : CODE_U16, 1));
  LEV_TRY(write_number(out, (uint64_t)w->sequences, 8));
  LEV_TRY(write_number(out, (uint64_t)w->documents + 1, 8));
  for (int64_t i = 0; i < w->sequences; ++i) LEV_TRY(write_number(out, (uint64_t)w->length[i], 4));
  for (int64_t i = 0; i < w->sequences; at += width * w->length[i], ++i) LEV_TRY(write_number(out, (uint64_t)at, 8));
  LEV_TRY(write_number(out, 0, 8));
  for (int64_t i = 0; i < w->documents; ++i) LEV_TRY(write_number(out, (uint64_t)w->document[i], 8));
  return LEV_OK;
}

lev_status lev_megatron_commit(lev_megatron_writer *w) {
  lev_out idx;
  LEV_TRY(lev_megatron_end_document(w));
  LEV_TRY(lev_out_open(&idx, w->idx_path));
  lev_status st = write_index(w, &idx);
  if (st == LEV_OK) st = lev_out_commit(&w->bin);
  if (st == LEV_OK) st = lev_out_commit(&idx);
  lev_out_discard(&idx);
  return st;
}

void lev_megatron_writer_close(lev_megatron_writer *w) {
  if (!w) return;
  lev_out_discard(&w->bin);
  lev_free(w->length);
  lev_free(w->document);
  lev_free(w);
}
