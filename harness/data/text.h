/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes and UTF-8: growable arrays, the byte alphabet of byte-level tokenizers. Private to harness/data.
 */
#ifndef LEV_DATA_TEXT_H
#define LEV_DATA_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Growable arrays on LEV_HEAP_DATA; zero-initialise, free with lev_bytes_free / lev_ids_free. */
typedef struct lev_bytes_buffer {
  uint8_t *data;
  size_t size, capacity;
} lev_bytes_buffer;

typedef struct lev_ids {
  int32_t *data;
  size_t size, capacity;
} lev_ids;

/* Makes room for `extra` more; LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_bytes_reserve(lev_bytes_buffer *buffer, size_t extra);
LEV_MUST_CHECK lev_status lev_bytes_append(lev_bytes_buffer *buffer, const void *data, size_t size);
void lev_bytes_free(lev_bytes_buffer *buffer);
LEV_MUST_CHECK lev_status lev_ids_reserve(lev_ids *ids, size_t extra);
LEV_MUST_CHECK lev_status lev_ids_append(lev_ids *ids, int32_t id);
void lev_ids_free(lev_ids *ids);
/* Grows a plain array of `size`-byte elements to hold at least `need`; *array and *capacity change together. */
LEV_MUST_CHECK lev_status lev_grow(void **array, size_t *capacity, size_t need, size_t size);

/* ---- UTF-8 ---- */

/* Length of the longest run at the start of text [size >= 1] that is all valid UTF-8 (*valid = true) or all invalid. */
size_t lev_utf8_run(const uint8_t *text, size_t size, bool *valid);
/* Code point at the start of valid UTF-8 text; *length = its bytes. */
uint32_t lev_utf8_decode(const uint8_t *text, size_t *length);
/* Writes 1 to 4 bytes, returns how many. */
size_t lev_utf8_encode(uint32_t code, uint8_t out[4]);
/* Unicode property White_Space. */
bool lev_is_white_space(uint32_t code);
/* White_Space of the character that starts text, or ends it, when that is valid UTF-8; *length = its bytes. */
bool lev_space_at_start(const uint8_t *text, size_t size, size_t *length);
bool lev_space_at_end(const uint8_t *text, size_t size, size_t *length);

/* ---- byte alphabet ---- */

/* Byte-level tokenizers spell each byte as one printable character: graphic Latin-1 bytes as themselves, the n-th of
 * the others as U+0100 + n. */
uint32_t lev_byte_char(uint8_t byte);
/* Byte of a character, -1 if it spells none. */
int lev_char_byte(uint32_t code);
/* Spells bytes as UTF-8 text. */
LEV_MUST_CHECK lev_status lev_bytes_spell(const uint8_t *bytes, size_t size, lev_bytes_buffer *out);
/* Bytes of a spelled token (valid UTF-8). *spelled = false, and the text itself, if any character is outside the
 * alphabet. */
LEV_MUST_CHECK lev_status lev_bytes_unspell(const char *text, size_t size, lev_bytes_buffer *out, bool *spelled);

#ifdef __cplusplus
}
#endif
#endif
