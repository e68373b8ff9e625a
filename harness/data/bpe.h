/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-level byte-pair encoding: a vocabulary of byte strings and a ranked list of merges.
 *
 * Encoding a word starts from its single bytes and, while any two neighbours form a known pair, joins the pair of
 * lowest rank (leftmost first): a priority queue per word, O(n log n). Source: Sennrich et al., 2016 (arXiv
 * 1508.07909); the order in corner cases (two merges giving the same token) is that of Hugging Face tokenizers. */
#ifndef LEV_DATA_BPE_H
#define LEV_DATA_BPE_H

#include <stdbool.h>
#include <stdint.h>

#include "harness/data/text.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LEV_VOCAB_MAX ((int64_t)1 << 22)
#define LEV_EOD_NAME "<|endoftext|>"

typedef struct lev_bpe lev_bpe;             /* immutable once built */
typedef struct lev_bpe_coder lev_bpe_coder; /* one thread's scratch and word cache */

LEV_MUST_CHECK lev_status lev_bpe_create(lev_bpe **out);
void lev_bpe_destroy(lev_bpe *bpe);
/* Gives `id` its bytes. `findable` = false: it can be decoded, but no merge leads to it. Errors: LEV_ERR_FORMAT (id
 * negative, at or above LEV_VOCAB_MAX or taken; bytes taken; no bytes). */
LEV_MUST_CHECK lev_status lev_bpe_set_token(lev_bpe *bpe, int64_t id, const uint8_t *bytes, size_t size, bool findable);
/* Appends a merge; its rank is its place (a pair given twice keeps the later one). The joined bytes must be a token.
 * Errors: LEV_ERR_FORMAT. */
LEV_MUST_CHECK lev_status lev_bpe_add_merge(lev_bpe *bpe, int32_t left, int32_t right);
/* A word that is itself a token is taken whole, whatever the merges say. */
void lev_bpe_set_ignore_merges(lev_bpe *bpe, bool ignore);

bool lev_bpe_ignore_merges(const lev_bpe *bpe);
int64_t lev_bpe_ids(const lev_bpe *bpe);    /* largest id + 1; ids in between may be free */
int64_t lev_bpe_merges(const lev_bpe *bpe); /* merges in rank order */
void lev_bpe_merge(const lev_bpe *bpe, int64_t rank, int32_t *left, int32_t *right);
/* Bytes of a token; NULL if the id is free or out of range. */
const uint8_t *lev_bpe_token(const lev_bpe *bpe, int64_t id, size_t *size);
bool lev_bpe_findable(const lev_bpe *bpe, int64_t id);
/* Id of a byte string, -1 if it is no (findable) token. */
int32_t lev_bpe_find(const lev_bpe *bpe, const uint8_t *bytes, size_t size);

LEV_MUST_CHECK lev_status lev_bpe_coder_create(const lev_bpe *bpe, lev_bpe_coder **out);
void lev_bpe_coder_destroy(lev_bpe_coder *coder);
/* Appends the tokens of one word to `out`. Errors: LEV_ERR_FORMAT (a byte has no token), LEV_ERR_CAPACITY (word of 2^30
 * bytes or more), LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_bpe_encode(lev_bpe_coder *coder, const uint8_t *word, size_t size, lev_ids *out);

#ifdef __cplusplus
}
#endif
#endif
