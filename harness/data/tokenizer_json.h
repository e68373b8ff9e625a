/* SPDX-License-Identifier: Apache-2.0 */
/* Hugging Face tokenizer.json, read and written.
 *
 * Understood: byte-level BPE models (merges as "a b" or ["a", "b"], ignore_merges); normalizer null, NFC, Sequence of
 * NFC; pre-tokenizer ByteLevel, Split (Regex, Isolated), Digits, Sequence of these with ByteLevel last; post-processor
 * null, ByteLevel, TemplateProcessing (its form for a single text), Sequence of these; decoder null or ByteLevel; added
 * tokens with special, normalized, lstrip, rstrip. Truncation and padding are ignored: a corpus is neither cut nor
 * filled up. Everything else is refused by name with LEV_ERR_UNSUPPORTED. */
#ifndef LEV_DATA_TOKENIZER_JSON_H
#define LEV_DATA_TOKENIZER_JSON_H

#include "harness/data/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A prepared tokenizer, with its hash. LEV_ERR_IO, LEV_ERR_FORMAT (JSON, ids, merges: says where),
 * LEV_ERR_UNSUPPORTED. The caller closes it. */
LEV_MUST_CHECK lev_status lev_tokenizer_read(const char *path, lev_tokenizer **out);
/* The same from memory; `name` stands in for the path in messages. */
LEV_MUST_CHECK lev_status lev_tokenizer_parse(const char *json, size_t size, const char *name, lev_tokenizer **out);
/* Writes a prepared tokenizer (temporary name, then rename) and sets its hash. Merges are written as "a b", which every
 * version of Hugging Face's library reads. */
LEV_MUST_CHECK lev_status lev_tokenizer_write(lev_tokenizer *t, const char *path);

#ifdef __cplusplus
}
#endif
#endif
