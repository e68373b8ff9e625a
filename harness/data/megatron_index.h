/* SPDX-License-Identifier: Apache-2.0 */
/* Token files in Megatron-LM's indexed format: PREFIX.bin holds the token ids of all sequences one after the other,
 * PREFIX.idx says where each begins (little-endian, unaligned):
 *
 *     "MMIDIDX\0\0"  u64 version = 1  u8 dtype  u64 sequences  u64 documents
 *     i32 length[sequences]  i64 byte_pointer[sequences]  i64 document_index[documents]  (i8 mode[sequences])
 *
 * dtype: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16 (6 and 7 are floats: refused). document_index begins with 0 and gives
 * the first sequence of each document, then the number of sequences. Source: NVIDIA Megatron-LM,
 * megatron/core/datasets/indexed_dataset.py. */
#ifndef LEV_DATA_MEGATRON_INDEX_H
#define LEV_DATA_MEGATRON_INDEX_H

#include <stdint.h>

#include "common/status.h"
#include "harness/data/io.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An opened pair of files. Fields are read-only for callers. */
typedef struct lev_megatron {
  lev_map idx, bin;
  int dtype;           /* code in the file */
  int64_t token_bytes; /* 1, 2, 4 or 8 */
  int64_t sequences;
  int64_t documents; /* entries of document_index: one more than there are documents */
  int64_t tokens;    /* in all sequences */
  char bin_path[1024];
} lev_megatron;

/* Maps both files and checks every field against the file sizes: all sequences must lie in PREFIX.bin in order and
 * without gaps (as Megatron's builder writes them), so that position p of the token stream is at p * token_bytes.
 * LEV_ERR_IO, LEV_ERR_FORMAT (what is wrong, where), LEV_ERR_UNSUPPORTED (float ids, gaps). */
LEV_MUST_CHECK lev_status lev_megatron_open(const char *prefix, lev_megatron *out);
void lev_megatron_close(lev_megatron *m); /* a zeroed one is fine */

/* Tokens [first, first + n) of the stream into out[n]. LEV_ERR_ARG outside the stream; LEV_ERR_FORMAT naming file and
 * position if an id is not in [0, vocab). Thread-safe. */
LEV_MUST_CHECK lev_status lev_megatron_read(const lev_megatron *m, int64_t first, int64_t n, int64_t vocab,
                                            int32_t *out);
/* Length in tokens of sequence i; entry i of document_index. */
int64_t lev_megatron_length(const lev_megatron *m, int64_t i);
int64_t lev_megatron_document(const lev_megatron *m, int64_t i);
/* Position in the stream at which entry i of document_index begins: the first token of document i, `tokens` for the
 * last entry. Never falls with i. */
int64_t lev_megatron_document_begin(const lev_megatron *m, int64_t i);

typedef struct lev_megatron_writer lev_megatron_writer;

/* Begins PREFIX.bin.tmp; ids are written as u16 when vocab < 65,500, else as i32 (Megatron's rule). */
LEV_MUST_CHECK lev_status lev_megatron_create(const char *prefix, int64_t vocab, lev_megatron_writer **out);
/* Appends ids (each in [0, vocab), else LEV_ERR_ARG) to the current document. A document beyond 2^31 - 1 tokens goes
 * on in a further sequence. */
LEV_MUST_CHECK lev_status lev_megatron_append(lev_megatron_writer *w, const int32_t *ids, int64_t n);
/* Ends the document; an empty one leaves no trace. */
LEV_MUST_CHECK lev_status lev_megatron_end_document(lev_megatron_writer *w);
int64_t lev_megatron_written(const lev_megatron_writer *w); /* tokens so far */
/* Ends the document, writes PREFIX.idx, renames both files to their final names. Close follows in either case. */
LEV_MUST_CHECK lev_status lev_megatron_commit(lev_megatron_writer *w);
/* Frees; removes what was not committed. NULL is fine. */
void lev_megatron_writer_close(lev_megatron_writer *w);

#ifdef __cplusplus
}
#endif
#endif
