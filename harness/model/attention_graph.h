/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of attention through cuDNN's graph API: shapes, memory, execution (private).
 *
 * A block is attention of some query heads over their key heads, queries x keys, all keys seen or causally. Its graph
 * is the composite of single operations (matrix products, pointwise, reductions, transpositions) that the library
 * recognises as flash attention: one kernel forward and a few backward, scores exist on the chip only. Backward adds dq
 * up in f32 by atomic additions, so its last bits change from run to run.
 * Source: the attention patterns in the chapter on graphs of the cuDNN developer guide. */
#ifndef LEV_MODEL_ATTENTION_GRAPH_H
#define LEV_MODEL_ATTENTION_GRAPH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"
#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Scalars between tokens and between heads of a tensor [heads, tokens, dim]. */
typedef struct attn_layout {
  int64_t row, head;
} attn_layout;

/* Compared as bytes: no padding. */
typedef struct attn_block_shape {
  int64_t heads, kv_heads; /* query heads, a multiple of key heads: each key head serves consecutive ones */
  int64_t queries, keys;   /* not both 1 */
  int64_t dim;             /* a multiple of 8, at most 256 */
  int64_t window;          /* causal: keys that a query sees at most, itself included; 0 = all before it */
  attn_layout q, k, v;     /* all bf16 */
  attn_layout o;           /* of d_o too */
  attn_layout dq, dk, dv;
  attn_layout lse;   /* with documents; without, [heads, queries] */
  int64_t documents; /* 0: one sequence; else this many side by side, each of at most queries = keys tokens; causal */
  int32_t causal;    /* query i sees keys up to i (queries = keys); else all */
  int32_t backward;
} attn_block_shape;

/* Arrays that documents lie in, by their rows: where each document begins differs between them. Forward has those
 * before ATTN_AT_DK. */
typedef enum attn_place {
  ATTN_AT_Q,
  ATTN_AT_K,
  ATTN_AT_V,
  ATTN_AT_O, /* d_o too */
  ATTN_AT_LSE,
  ATTN_AT_DK,
  ATTN_AT_DV,
  ATTN_AT_DELTA, /* [tokens, heads] */
  ATTN_AT_HEADS, /* dq, dq_sum, dk_heads, dv_heads: [tokens, heads, dim]; q too where there is one */
  ATTN_PLACES
} attn_place;

/* Device addresses of a block, multiples of 16 (lse with documents: of 4). With documents, an array's address is that
 * of the first token of all. In backward, q and dq then are dense, [tokens, heads, dim], and dk and dv lie like k and
 * v; with several query heads per key head all four are dense, [tokens, kv_heads, dim]. */
typedef struct attn_block_data {
  const void *q, *k, *v, *d_o; /* d_o: backward */
  void *o;                     /* out; read by backward */
  float *lse;                  /* out; read by backward */
  void *dq, *dk, *dv;          /* out, backward */
  float *delta, *dq_sum;       /* backward's scratch: [heads, queries], [heads, queries, dim] in an order of its own */
  void *library;               /* attn_library_bytes() of scratch */
  float scale;
  const int64_t *places[ATTN_PLACES]; /* with documents: [documents + 1] scalars before each in such an array,
                                         ascending, and the end of the last */
  const int32_t *lengths;             /* with documents: [documents] tokens of each, 0 = not there */
  void *dk_heads, *dv_heads;          /* with documents and several query heads per key head: bf16 scratch */
} attn_block_data;

/* Scratch that the library asks for, known without it: 256 bytes, and in backward with several query heads per key head
 * bf16 dk and dv of each query head, rounded up to LEV_ALIGN. With documents, 2048 bytes and 512 for each. */
size_t attn_library_bytes(const attn_block_shape *shape);

/* ---- packed documents ---- */

#define ATTN_DOCUMENTS 256 /* that one call of the library takes; more take several */

/* Documents of a sequence, and in all of them the pairs of a query and a key before it. */
typedef struct attn_packing {
  int64_t documents;
  double pairs;
} attn_packing;

/* What attn_forward_args.doc_begin_host describes. LEV_ERR_ARG where a document begins behind its own last token. */
LEV_MUST_CHECK lev_status attn_packing_of(const int64_t *doc_begin, int64_t tokens, attn_packing *out);
/* The last documents of the first `tokens` ones, at most ATTN_DOCUMENTS: the first token of each in their order and,
 * behind them, `tokens`. Returns how many; at least one where tokens > 0. */
int64_t attn_documents_before(const int64_t *doc_begin, int64_t tokens, int64_t begin[ATTN_DOCUMENTS + 1]);
/* Scalars from token to token in each array of a block. */
void attn_place_rows(const attn_block_shape *shape, int64_t rows[ATTN_PLACES]);

/* ---- a rank's work in blocks of heads ---- */

/* Key heads of a block, and query heads of each key head in one pass: all of them, or one after the other. */
typedef struct attn_cut {
  int64_t kv_heads, per_key;
} attn_cut;

/* The scratch of a block, carved from one piece of memory. Which parts exist depends on where results go:
 *   - on a ring, o, dk and dv of one hop, to be merged with or added to those of other hops
 *   - where per_key is less than a key head serves, dk and dv of one pass, and, off a ring, their sums
 *   - with documents, their tables, and backward q and dq in rows of the block's heads; where a key head serves several
 *     query heads, k, v, dk and dv too, and where per_key is not 1, dk and dv of each query head. So all that the
 *     library places by one table where it should take another's lies alike: a block is a model of so many heads,
 *     dense. lse then is for calls without documents, which take less */
typedef struct attn_room {
  void *library;
  int64_t *places[ATTN_PLACES]; /* [documents + 1] */
  int32_t *lengths;             /* [documents] */
  float *lse, *delta, *dq_sum;  /* [h, queries], the same, [h, queries, dim] */
  lev_bf16 *o_part;             /* [h, queries, dim] */
  lev_bf16 *q_part, *dq_part;   /* [queries, h, dim] */
  lev_bf16 *k_copy[2];          /* k and v: [keys, kv_heads, dim] */
  lev_bf16 *heads_part[2];      /* dk and dv: [keys, h, dim] */
  lev_bf16 *k_part[2];          /* dk and dv: [kv_heads, keys, dim], with documents [keys, kv_heads, dim] */
  float *k_sum[2];
} attn_room;

typedef struct attn_room_shape {
  attn_cut cut;
  int64_t per_key; /* query heads of a key head in all */
  int64_t queries, keys, dim;
  int64_t documents; /* 0 or ATTN_DOCUMENTS */
  bool backward, ring;
} attn_room_shape;

/* Bytes of a block's scratch; with `base` (aligned to 256) also its parts. */
size_t attn_room_carve(const attn_room_shape *shape, void *base, attn_room *out);

/* The largest cut whose scratch stays within `cap` bytes, of heads that come in groups of a multiple of `unit` key
 * heads; the smallest there is if none does. Gives its bytes. */
attn_cut attn_cut_choose(attn_room_shape shape, int64_t unit, size_t cap, size_t *bytes);

/* ---- the library ---- */

/* cuDNN, loaded and of a release that can be trusted with this work, with plans of the blocks seen so far. Not
 * thread-safe: one per rank. */
typedef struct attn_cudnn attn_cudnn;

/* Loads the library for the current GPU. LEV_ERR_UNSUPPORTED with the reason: not built in, not found, a release known
 * to be bad; LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status attn_cudnn_open(attn_cudnn **out);
/* No block may be running. NULL is fine. */
void attn_cudnn_close(attn_cudnn *library);
/* The release, e.g. "cuDNN 9.19.0". */
const char *attn_cudnn_name(const attn_cudnn *library);
/* Makes the plan of a block, or finds it; a new one takes about half a second of the host. LEV_ERR_UNSUPPORTED where
 * the library has none, LEV_ERR_CAPACITY where it wants more scratch than attn_library_bytes. */
LEV_MUST_CHECK lev_status attn_cudnn_prepare(attn_cudnn *library, const attn_block_shape *shape);
/* Enqueues a block on a cudaStream_t, after preparing it. Errors: those, LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status attn_cudnn_run(attn_cudnn *library, const attn_block_shape *shape,
                                         const attn_block_data *data, void *cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
