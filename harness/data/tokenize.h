/* SPDX-License-Identifier: Apache-2.0 */
/* Text to token files: the work of `levee tokenize`.
 *
 * Input is plain text (one document, any bytes) or JSONL (one object with a "text" string per line and document; blank
 * lines are skipped). Tokens are those of a tokenizer.json, of a byte-level BPE learned here, or the bytes themselves
 * (vocabulary 256; 257 with end of document, id 256).
 *
 * OUTPUT.train.{bin,idx} (megatron_index.h) and, with a held-out share, OUTPUT.valid.{bin,idx}; without one, those of
 * an earlier call are removed. Beside each a sidecar
 * OUTPUT.{train,valid}.json: "vocab_size", "tokens", "documents", "text_bytes" (of the text itself, without JSON
 * quoting and without end-of-document tokens), "eod_id" (null if none), "tokenizer" (file name, null for bytes),
 * "tokenizer_xxh3_128" (null for bytes). A learned BPE goes to OUTPUT.tokenizer.json. Every file is written under a
 * temporary name and renamed when whole. Memory does not grow with the text (mapped), except as tokenizer.h says, for
 * the different words a BPE learns from, and by one JSONL line. */
#ifndef LEV_DATA_TOKENIZE_H
#define LEV_DATA_TOKENIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lev_tokenize_options {
  const char *input;     /* text file */
  const char *output;    /* prefix of the files written; its folder must exist */
  const char *tokenizer; /* tokenizer.json to apply; NULL = none */
  int64_t train_bpe;     /* entries to learn, at least 257 (<|endoftext|> is the last of them); 0 = do not learn. A text
                          * with too few repeated pairs ends with fewer: see the report. */
  double holdout;  /* share of the text at its end that is held out, in [0, 1); 0 = none. The cut is the first line
                    * start at or after that point (before it, if there is none after). A BPE is learned on the
                    * training part alone. */
  bool append_eod; /* end-of-document token after each document */
  bool jsonl;      /* also implied by an input named *.jsonl */
  const char *eod_token; /* which added token of `tokenizer` ends documents; NULL = the first that it has of
                          * <|endoftext|>, <|end_of_text|>, </s>, <eos>, <|eod|>, [EOS] */
} lev_tokenize_options;

typedef struct lev_tokenize_report {
  int64_t vocab; /* largest id + 1 */
  int64_t train_tokens, valid_tokens;
  int64_t train_bytes, valid_bytes; /* of text */
  double seconds;
} lev_tokenize_report;

/* Errors: LEV_ERR_CONFIG (options that exclude each other or are out of range, an empty part, no end-of-document
 * token), LEV_ERR_IO, LEV_ERR_FORMAT (JSON: names the line), LEV_ERR_UNSUPPORTED (of the tokenizer), LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_tokenize(const lev_tokenize_options *options, lev_tokenize_report *report);

#ifdef __cplusplus
}
#endif
#endif
