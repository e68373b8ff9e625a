/* SPDX-License-Identifier: Apache-2.0 */
/* A byte-level BPE tokenizer as Hugging Face's `tokenizers` runs it: added tokens are cut out of the text (leftmost,
 * then longest), the rest is normalised, split by the pre-tokenizer's steps, and merged.
 *
 * Text may hold any bytes. Runs of valid UTF-8 go through normaliser and patterns as they would there; a run of
 * invalid bytes between them is one piece of its own, so that decoding gives the very bytes back (unless NFC or an
 * added space changed valid text). */
#ifndef LEV_DATA_TOKENIZER_H
#define LEV_DATA_TOKENIZER_H

#include "harness/data/bpe.h"
#include "harness/data/split.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LEV_PRE_STEPS_MAX 8

typedef struct lev_added_token {
  char *text; /* owned */
  size_t size;
  int32_t id;
  bool special;        /* left out by decoding with skip_special */
  bool normalized;     /* looked for in the normalised text instead of the original */
  bool lstrip, rstrip; /* takes the white space before / after it along */
} lev_added_token;

typedef enum lev_pre_kind { LEV_PRE_SPLIT, LEV_PRE_DIGITS, LEV_PRE_BYTE_LEVEL } lev_pre_kind;

typedef struct lev_pre_step {
  lev_pre_kind kind;
  char *pattern;         /* SPLIT: owned */
  bool individual;       /* DIGITS: one digit per piece */
  bool use_regex;        /* BYTE_LEVEL: splits by GPT-2's pattern */
  bool add_prefix_space; /* BYTE_LEVEL: every piece begins with a space */
  lev_split *split;      /* owned; NULL if the step does not split */
} lev_pre_step;

/* Everything a tokenizer.json says. Zero-initialised, then filled by tokenizer_json.c or by hand (all steps but the
 * last SPLIT or DIGITS, the last one BYTE_LEVEL); lev_tokenizer_prepare once it is complete. */
typedef struct lev_tokenizer {
  lev_bpe *bpe; /* owned */
  bool nfc;
  lev_pre_step steps[LEV_PRE_STEPS_MAX];
  int n_steps;
  lev_added_token *added; /* owned, sorted by descending size when prepared */
  int64_t n_added;
  lev_ids before, after; /* what the post-processor puts around a text */
  char hash[33];         /* XXH3-128 of the tokenizer.json, hexadecimal */
  lev_bpe_coder *coder;  /* scratch from here on: one thread at a time */
  lev_ids found;
  lev_bytes_buffer normal, spaced;
  void *points; /* int32_t, of normalisation */
  size_t points_capacity;
  bool starts[2][256]; /* first bytes of added tokens: of the original, of the normalised text */
} lev_tokenizer;

LEV_MUST_CHECK lev_status lev_tokenizer_create(lev_tokenizer **out);
void lev_tokenizer_close(lev_tokenizer *t); /* NULL is fine */
/* Appends a pre-tokenizer step and compiles its pattern (copied; NULL for none). */
LEV_MUST_CHECK lev_status lev_tokenizer_add_step(lev_tokenizer *t, lev_pre_step step);
/* Appends an added token (text copied); its id is named in the vocabulary unless the vocabulary has it already.
 * LEV_ERR_FORMAT if the vocabulary says otherwise. */
LEV_MUST_CHECK lev_status lev_tokenizer_add_token(lev_tokenizer *t, lev_added_token token);
/* LEV_ERR_UNSUPPORTED if a byte has no token or the last step is not BYTE_LEVEL. Encoding works afterwards. */
LEV_MUST_CHECK lev_status lev_tokenizer_prepare(lev_tokenizer *t);

/* Receives ids; a failure ends the run and is passed on. */
typedef lev_status (*lev_id_sink)(void *ctx, const int32_t *ids, size_t n);
/* Encodes one text. `special` adds what the post-processor adds. Memory does not grow with the text, except for
 * pieces without a split and for normalising text that holds characters from U+0300 on. */
LEV_MUST_CHECK lev_status lev_tokenizer_encode(lev_tokenizer *t, const void *text, size_t size, bool special,
                                               lev_id_sink sink, void *ctx);
/* Appends the bytes of ids to `out`. LEV_ERR_ARG for an id without a name. */
LEV_MUST_CHECK lev_status lev_tokenizer_decode(const lev_tokenizer *t, const int32_t *ids, size_t n, bool skip_special,
                                               lev_bytes_buffer *out);
/* Pieces of a text as they are merged (the trainer counts them): everything of encode but the merging. */
LEV_MUST_CHECK lev_status lev_tokenizer_pieces(lev_tokenizer *t, const void *text, size_t size, lev_piece_fn fn,
                                               void *ctx);
/* Id of an added token, -1 if there is none of that text. */
int32_t lev_tokenizer_added_id(const lev_tokenizer *t, const char *text);
int64_t lev_tokenizer_vocab(const lev_tokenizer *t); /* largest id + 1 */

#ifdef __cplusplus
}
#endif
#endif
