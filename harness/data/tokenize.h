/* SPDX-License-Identifier: Apache-2.0 */
/* Text to token files: the work of `levee tokenize`.
 *
 * Input is plain text (one document) or JSONL (one object with a "text" string per line and document; blank lines are
 * skipped). Plain text may hold any bytes. Tokens are the bytes themselves (vocabulary 257: 256 bytes and end of
 * document, id 256), or those of a byte-level BPE that is learned here or read from a Hugging Face tokenizer.json.
 *
 * Files of each part: NAME.bin and NAME.idx (megatron_index.h) and NAME.json, where NAME is `output`, or with a
 * held-out share `output`.train and `output`.valid. NAME.json holds format "levee-tokens 1", vocab_size, eod_id (null
 * if none), tokens, documents, text_bytes, first_token_bytes, token_bytes (2 or 4), bin_xxh3_128, tokenizer (file name,
 * null for bytes), tokenizer_xxh3_128 (null for bytes). text_bytes is the input text in bytes, without JSON quoting;
 * first_token_bytes is what the first token stands for: no label covers it. A learned BPE goes to
 * `output`.tokenizer.json. Files are written under a temporary name and renamed when all are complete, so a failure
 * leaves the old ones. */
#ifndef LEV_DATA_TOKENIZE_H
#define LEV_DATA_TOKENIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/fault.h"
#include "common/status.h"

typedef struct lev_tokenize_options {
  const char *input;     /* text file */
  const char *output;    /* prefix of the files written */
  const char *tokenizer; /* tokenizer.json to apply; NULL = none */
  int64_t train_bpe;     /* entries to learn, 257 .. 2^22, end-of-document token included; 0 = do not learn.
                          * A text with too few repeated pairs ends with fewer: see the report. */
  double holdout;  /* share of the text at its end for validation, in [0, 1); 0 = no split. The cut is the first line
                    * start at or after it (JSONL: hence a document start); in text without one, the first
                    * blank, else the first character start. A BPE is learned on the training part alone. */
  bool append_eod; /* end-of-document token after each document */
  bool jsonl;      /* also implied by an input named *.jsonl */
  const char *eod_token; /* which token of `tokenizer` ends documents; NULL = the first that it has of <|endoftext|>,
                          * <|end_of_text|>, </s>, <eos>, <|eod|> */
  lev_fault *fault;      /* nullable: file operations count as LEV_FAULT_FILE */
} lev_tokenize_options;

typedef struct lev_tokenize_report {
  int64_t vocab;
  int64_t eod_id;                           /* -1 if none */
  int64_t train_documents, valid_documents; /* empty documents are not written and not counted */
  int64_t train_tokens, valid_tokens;       /* without a held-out share all are train */
  int64_t train_bytes, valid_bytes;         /* text_bytes */
  double seconds;                           /* wall time of the whole call */
} lev_tokenize_report;

/* Errors: LEV_ERR_ARG (options that exclude each other, out of range, a part without any token, no end-of-document
 * token), LEV_ERR_IO, LEV_ERR_FORMAT (JSON; names the line), LEV_ERR_UNSUPPORTED (tokenizer features), LEV_ERR_NOMEM.
 */
LEV_MUST_CHECK lev_status lev_tokenize(const lev_tokenize_options *options, lev_tokenize_report *report);

#endif
