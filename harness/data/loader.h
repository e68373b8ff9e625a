/* SPDX-License-Identifier: Apache-2.0 */
/* Samples for training and validation out of mapped token files.
 *
 * The files' tokens form one stream of n tokens. Sample i of context length S reads the S + 1 tokens [i*S, i*S + S]:
 * the first S are the inputs, the last S the labels (the next token at each position), so every token but the first
 * is a label exactly once.
 *
 *   training     (n - 1) / S samples; the rest of the stream is dropped. The order is one permutation of all samples
 *                per epoch, keyed by (seed, epoch), computed in O(1) memory (Feistel network with cycle walking), so a
 *                run resumes from the sample counter alone, at any number of ranks.
 *   validation   ceil((n - 1) / S) samples in order; the last one is padded (token 0, label LEV_LABEL_IGNORED), so
 *                every held-out token after the first is scored exactly once.
 *
 * A loader is immutable after open: any number of threads may fetch from it. Nothing is allocated after open. A file
 * that is truncated by another process while mapped ends the process with SIGBUS. */
#ifndef LEV_DATA_LOADER_H
#define LEV_DATA_LOADER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

#define LEV_LABEL_IGNORED (-100)

typedef enum lev_token_format {
  LEV_TOKENS_MEGATRON, /* name is a prefix: PREFIX.idx and PREFIX.bin (megatron_index.h) */
  LEV_TOKENS_RAW_U16,  /* name is a headerless file of little-endian u16 */
  LEV_TOKENS_RAW_U32   /* the same in u32, every value below 2^31 */
} lev_token_format;

typedef struct lev_loader lev_loader;

typedef struct lev_loader_options {
  const char *prefix;       /* one Megatron prefix; or NULL, and */
  const char *const *files; /* [n_files] names, read one after the other */
  int64_t n_files;
  lev_token_format format; /* of `files` */
  int64_t context;         /* S >= 1 */
  int64_t vocab;           /* tokens must be below it; 0 = anything an int32 holds */
  uint64_t seed;
  bool validation;
} lev_loader_options;

/* Maps the files, checks their sizes and index. Errors: LEV_ERR_ARG, LEV_ERR_IO, LEV_ERR_FORMAT (damaged file, or a
 * stream too short for one sample), LEV_ERR_UNSUPPORTED, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_loader_open(const lev_loader_options *options, lev_loader **out);
void lev_loader_close(lev_loader *loader); /* NULL is fine */

/* Samples of one epoch, or of the whole validation pass. */
int64_t lev_loader_samples(const lev_loader *loader);
/* Tokens of the whole stream. */
int64_t lev_loader_tokens(const lev_loader *loader);
/* Bytes of text: those that the labels of one validation pass stand for, or, for training, of the whole stream. From
 * the sidecar PREFIX.json that `levee tokenize` writes; 0 if any file has none. Sum of losses / this = nats per byte.
 */
int64_t lev_loader_bytes(const lev_loader *loader);

/* One sample into tokens [S] and labels [S], int32. `sample` is a global counter from 0: in training, epochs roll over
 * at multiples of lev_loader_samples; in validation it must be below lev_loader_samples.
 * Errors: LEV_ERR_ARG (sample out of range), LEV_ERR_FORMAT (a token outside the vocabulary: names file and position).
 */
LEV_MUST_CHECK lev_status lev_loader_fetch(const lev_loader *loader, int64_t sample, int32_t *tokens, int32_t *labels);

/* Where documents start inside a sample: ascending positions in (0, S) into starts [capacity]; *count is how many there
 * are (more than capacity = only the first ones were stored). Position 0 is never listed; raw files have no documents
 * but start one each. Errors: LEV_ERR_ARG. */
LEV_MUST_CHECK lev_status lev_loader_documents(const lev_loader *loader, int64_t sample, int64_t *starts,
                                               int64_t capacity, int64_t *count);

/* The sample of the stream that global counter `sample` shows; exposed for tests and reports. */
int64_t lev_loader_stream_sample(const lev_loader *loader, int64_t sample);

#endif
