/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/text.h"

#include <string.h>

#include "common/hostmem.h"

lev_status lev_grow(void **array, size_t *capacity, size_t need, size_t size) {
  if (need <= *capacity) return LEV_OK;
  size_t to = *capacity + *capacity / 2;
  if (to < need) to = need;
  if (to < 64) to = 64;
  if (to > SIZE_MAX / size) return lev_fail(LEV_ERR_NOMEM, "array of %zu elements of %zu bytes", to, size);
  void *grown = lev_realloc(LEV_HEAP_DATA, *array, to * size);
  if (!grown) return LEV_ERR_NOMEM;
  *array = grown, *capacity = to;
  return LEV_OK;
}

lev_status lev_bytes_reserve(lev_bytes_buffer *buffer, size_t extra) {
  if (extra > SIZE_MAX - buffer->size) return lev_fail(LEV_ERR_NOMEM, "buffer of more than SIZE_MAX bytes");
  void *data = buffer->data;
  LEV_TRY(lev_grow(&data, &buffer->capacity, buffer->size + extra, 1));
  buffer->data = data;
  return LEV_OK;
}

lev_status lev_bytes_append(lev_bytes_buffer *buffer, const void *data, size_t size) {
  LEV_TRY(lev_bytes_reserve(buffer, size));
  if (size > 0) memcpy(buffer->data + buffer->size, data, size);
  buffer->size += size;
  return LEV_OK;
}

void lev_bytes_free(lev_bytes_buffer *buffer) {
  lev_free(buffer->data);
  memset(buffer, 0, sizeof *buffer);
}

lev_status lev_ids_reserve(lev_ids *ids, size_t extra) {
  if (extra > SIZE_MAX - ids->size) return lev_fail(LEV_ERR_NOMEM, "more than SIZE_MAX tokens");
  void *data = ids->data;
  LEV_TRY(lev_grow(&data, &ids->capacity, ids->size + extra, sizeof *ids->data));
  ids->data = data;
  return LEV_OK;
}

lev_status lev_ids_append(lev_ids *ids, int32_t id) {
  if (ids->size == ids->capacity) LEV_TRY(lev_ids_reserve(ids, 1));
  ids->data[ids->size++] = id;
  return LEV_OK;
}

void lev_ids_free(lev_ids *ids) {
  lev_free(ids->data);
  memset(ids, 0, sizeof *ids);
}

/* ---- UTF-8 ---- */

static bool is_tail(uint8_t c) {
  return (c & 0xC0) == 0x80;
}

/* Bytes of the valid character at the start of text, 0 if there is none. */
static size_t valid_length(const uint8_t *t, size_t size) {
  uint8_t c = t[0];
  if (c < 0x80) return 1;
  if (c < 0xC2 || c > 0xF4) return 0;
  size_t n = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
  if (size < n) return 0;
  for (size_t i = 1; i < n; ++i)
    if (!is_tail(t[i])) return 0;
  if (c == 0xE0 && t[1] < 0xA0) return 0; /* longer than needed */
  if (c == 0xED && t[1] > 0x9F) return 0; /* surrogate */
  if (c == 0xF0 && t[1] < 0x90) return 0;
  if (c == 0xF4 && t[1] > 0x8F) return 0;
  return n;
}

size_t lev_utf8_run(const uint8_t *text, size_t size, bool *valid) {
  size_t i = 0;
  *valid = valid_length(text, size) > 0;
  while (i < size) {
    while (*valid && i + 8 <= size) { /* eight ASCII bytes at once */
      uint64_t eight;
      memcpy(&eight, text + i, 8);
      if (eight & 0x8080808080808080u) break;
      i += 8;
    }
    if (i == size) break;
    size_t n = valid_length(text + i, size - i);
    if ((n > 0) != *valid) break;
    i += n > 0 ? n : 1;
  }
  return i;
}

uint32_t lev_utf8_decode(const uint8_t *t, size_t *length) {
  uint32_t c = t[0];
  if (c < 0x80) {
    *length = 1;
    return c;
  }
  if (c < 0xE0) {
    *length = 2;
    return (c & 0x1F) << 6 | (t[1] & 0x3Fu);
  }
  if (c < 0xF0) {
    *length = 3;
    return (c & 0x0F) << 12 | (t[1] & 0x3Fu) << 6 | (t[2] & 0x3Fu);
  }
  *length = 4;
  return (c & 0x07) << 18 | (t[1] & 0x3Fu) << 12 | (t[2] & 0x3Fu) << 6 | (t[3] & 0x3Fu);
}

size_t lev_utf8_encode(uint32_t code, uint8_t out[4]) {
  if (code < 0x80) {
    out[0] = (uint8_t)code;
    return 1;
  }
  size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  for (size_t i = n - 1; i > 0; --i, code >>= 6) out[i] = (uint8_t)(0x80 | (code & 0x3F));
  out[0] = (uint8_t)((n == 2 ? 0xC0 : n == 3 ? 0xE0 : 0xF0) | code);
  return n;
}

bool lev_is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool lev_space_at_start(const uint8_t *text, size_t size, size_t *length) {
  *length = 0;
  if (size == 0 || valid_length(text, size) == 0) return false;
  return lev_is_white_space(lev_utf8_decode(text, length));
}

bool lev_space_at_end(const uint8_t *text, size_t size, size_t *length) {
  *length = 0;
  for (size_t n = 1; n <= 4 && n <= size; ++n)
    if (valid_length(text + size - n, n) == n) return lev_space_at_start(text + size - n, n, length);
  return false;
}

/* ---- byte alphabet ---- */

static bool is_graphic(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

/* How many bytes below this one are not graphic: 0x00-0x20, 0x7F-0xA0, 0xAD. */
static unsigned unprintable_below(unsigned byte) {
  return byte <= 0x20 ? byte : byte <= 0xA0 ? 33 + (byte - 0x7F) : 67;
}

uint32_t lev_byte_char(uint8_t byte) {
  return is_graphic(byte) ? byte : 0x100 + unprintable_below(byte);
}

int lev_char_byte(uint32_t code) {
  if (code < 0x100) return is_graphic(code) ? (int)code : -1;
  unsigned n = code - 0x100;
  if (n > 67) return -1;
  return (int)(n < 33 ? n : n < 67 ? n - 33 + 0x7F : 0xAD);
}

lev_status lev_bytes_spell(const uint8_t *bytes, size_t size, lev_bytes_buffer *out) {
  LEV_TRY(lev_bytes_reserve(out, 2 * size));
  for (size_t i = 0; i < size; ++i) out->size += lev_utf8_encode(lev_byte_char(bytes[i]), out->data + out->size);
  return LEV_OK;
}

lev_status lev_bytes_unspell(const char *text, size_t size, lev_bytes_buffer *out, bool *spelled) {
  size_t start = out->size, length;
  *spelled = true;
  LEV_TRY(lev_bytes_reserve(out, size));
  for (size_t i = 0; i < size; i += length) {
    int byte = lev_char_byte(lev_utf8_decode((const uint8_t *)text + i, &length));
    if (byte < 0) {
      *spelled = false;
      out->size = start;
      return lev_bytes_append(out, text, size);
    }
    out->data[out->size++] = (uint8_t)byte;
  }
  return LEV_OK;
}
