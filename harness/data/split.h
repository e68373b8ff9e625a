/* SPDX-License-Identifier: Apache-2.0 */
/* Text cut into pieces by a regular expression: every match and every gap between matches is a piece ("Isolated" in
 * Hugging Face's terms). Patterns are written for Oniguruma (which Hugging Face uses) and run on PCRE2 with its JIT:
 * what the two read differently is translated (\s as Unicode White_Space: PCRE2 adds U+180E; \v, \uHHHH; line anchors)
 * or refused with LEV_ERR_UNSUPPORTED (\w, \b, \h, backreferences, nested character classes, {n,m}+, patterns that
 * match the empty string). Letters and digits are those of the Unicode version of the PCRE2 library. */
#ifndef LEV_DATA_SPLIT_H
#define LEV_DATA_SPLIT_H

#include <stdbool.h>
#include <stddef.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The pattern of GPT-2, which byte-level pre-tokenizers use unless told otherwise. */
extern const char lev_split_gpt2[];

typedef struct lev_split lev_split;
/* Receives each piece in turn (never empty); a failure ends the run and is passed on. */
typedef lev_status (*lev_piece_fn)(void *ctx, const unsigned char *piece, size_t bytes);

LEV_MUST_CHECK lev_status lev_split_create(const char *pattern, lev_split **out);
void lev_split_close(lev_split *split); /* NULL is fine */
/* `text` must be valid UTF-8. One thread at a time; fn may use the same split again. */
LEV_MUST_CHECK lev_status lev_split_each(lev_split *split, const unsigned char *text, size_t bytes, lev_piece_fn fn,
                                         void *ctx);

#ifdef __cplusplus
}
#endif
#endif
