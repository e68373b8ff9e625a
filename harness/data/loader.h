/* SPDX-License-Identifier: Apache-2.0 */
/* Training and validation samples from a token file.
 *
 * Sample i of context S is tokens [i * S, i * S + S] of the concatenated stream: S inputs, and as labels the S tokens
 * one later. Training runs through all n whole windows once per epoch, in an order that is one keyed permutation of
 * (seed, epoch) computed per sample in constant memory; a sample number is a global counter, so resuming needs nothing
 * but that number. Validation reads in order and keeps the last partial window, so that every token after the first is
 * a label exactly once. */
#ifndef LEV_DATA_LOADER_H
#define LEV_DATA_LOADER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lev_loader_options {
  const char *prefix; /* PREFIX.idx, PREFIX.bin and, if there, PREFIX.json (see tokenize.h) */
  int64_t context;    /* S, tokens per sample */
  int64_t vocab;      /* V: ids must be below it */
  uint64_t seed;      /* of the order (training only) */
  bool validation;
} lev_loader_options;

typedef struct lev_loader lev_loader;

/* Maps the files. LEV_ERR_CONFIG if there are fewer than S + 1 tokens (validation: fewer than 2) or the sidecar says
 * that the vocabulary is larger than V; LEV_ERR_IO, LEV_ERR_FORMAT, LEV_ERR_UNSUPPORTED as lev_megatron_open. */
LEV_MUST_CHECK lev_status lev_loader_open(const lev_loader_options *options, lev_loader **out);
void lev_loader_close(lev_loader *loader); /* NULL is fine */

/* LEV_ERR_CONFIG if the sidecars name different tokenizers (bytes are one, too), so that an id of one file is not the
 * same text in the other. */
LEV_MUST_CHECK lev_status lev_loader_same_tokens(const lev_loader *a, const lev_loader *b);

/* Samples per epoch (validation: in all). */
int64_t lev_loader_samples(const lev_loader *loader);
/* Bytes of text that the labels of the whole file stand for, from PREFIX.json: all but those of its first token, which
 * is no label. 0 if unknown. */
int64_t lev_loader_bytes(const lev_loader *loader);

/* tokens[S] and labels[S] of one sample; where the stream has ended, token 0 and label -100. Training: any sample >= 0
 * (epoch = sample / samples); validation: sample < samples, else LEV_ERR_ARG. LEV_ERR_FORMAT naming file and position
 * for an id outside [0, V). Allocates nothing; thread-safe. */
LEV_MUST_CHECK lev_status lev_loader_fetch(lev_loader *loader, int64_t sample, int32_t *tokens, int32_t *labels);

/* begin[S + 1]: for each token of the sample, and for the one after its last, the position in the sample at which its
 * document begins; 0 if before the sample. Past the end of the stream the last document goes on. LEV_ERR_ARG as
 * lev_loader_fetch. Thread-safe. */
LEV_MUST_CHECK lev_status lev_loader_documents(lev_loader *loader, int64_t sample, int32_t *begin);

#ifdef __cplusplus
}
#endif
#endif
