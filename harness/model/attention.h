/* SPDX-License-Identifier: Apache-2.0 */
/* Exact causal grouped-query attention over a sequence that is sharded over the D ranks of a context group.
 *
 * The S tokens are cut into 2 D even pieces, lev_part_begin(S, 2 D, i); rank r holds piece r followed by piece
 * 2 D - 1 - r ("zigzag"), so every rank has the same causal work. Any S >= 0 is legal: pieces may differ by one token
 * and be empty. D = 1 holds the whole sequence in order.
 *
 * Keys and values travel around a ring in storage type T while each rank computes against the chunk it holds; the
 * softmax state (running maximum m, sum l, unnormalised output) stays in the arithmetic type A. In backward, the
 * gradients of keys and values travel with them in A, in two groups of heads: one group moves while the other is
 * computed. No matrix of scores larger than one block exists, and nothing here grows with S beyond what grows with the
 * rank's own N tokens.
 *
 * Device bytes of a plan, with b bytes of T, a bytes of A, N = max_tokens, R = A/G query heads per key head; each
 * region is rounded up to LEV_ALIGN, and all but the scratch grow with N:
 *   - attn.kv: 2 chunks of 2 N G d b where D > 1, both phases
 *   - attn.dkv: 2 chunks of 2 N G d a where D > 1, one for bf16 where D = 1 on the cpu; backward
 *   - attn.acc: N A d a for bf16 where D > 1, both phases (f64 and f32 accumulate in o and dq themselves)
 *   - attn.state: N A a where D > 1, forward
 *   - attn.scratch: about R block_q (2 d + block_k + 2) a forward, R block_q (3 d + 2 block_k + 2) a backward, and for
 *     bf16 2 block_k d a more
 *
 *   - attn.workspace: on the GPU where cuDNN may be used, at most config.workspace; see below
 *
 * On the GPU, our own kernels keep their tiles in shared memory and leave attn.scratch, block_q and block_k alone;
 * heads have at most 640 scalars (f64: 320). bf16 with heads of 8 to 256 scalars in steps of 8 can go through cuDNN
 * instead (route), several times as fast: one call of the library per block of heads, and on a ring the blocks' results
 * merged in f32. A block of h = n r query heads over n key heads, with R = A / G, takes (each part rounded up to
 * LEV_ALIGN)
 *   - forward:  256 + 4 h N, and 2 h N d where D > 1
 *   - backward: 256 + 8 h N + 4 h N d, and 4 h N d where r > 1; 4 n N d where D > 1 or r < R; 8 n N d where both D = 1
 *     and r < R
 * r is R, or 1 where that does not fit; n is the largest divisor of G (in backward with D > 1: of both halves of the
 * key heads) that fits. For packed documents (config.packed, D = 1, d in steps of 16) the 256 are 154,880 instead, and
 * backward takes 4 h N d more, and where R > 1 also 4 n N d, or 8 n N d where r = R. The library
 * then works on up to 256 documents at a time, wherever they lie, and the cost is that of their own lengths. The
 * library is loaded when the plan is made, from libcudnn.so.9; releases before 9.15.1 are refused. Its own scratch is
 * planned by formula, so a plan on a machine without it counts the same bytes; a larger demand is LEV_ERR_CAPACITY,
 * when the plan is made or, for other lengths and on a ring, at the first such call. Calls that the library does not
 * take go to our own kernels: with ATTN_AUTO and D = 1 shapes that it has no plan for, a window with D > 1, pieces of
 * fewer than two tokens, rows off 16-byte boundaries, and packed documents where the configuration or the call leaves
 * them out (packed, doc_begin_host) or, with ATTN_AUTO, where there are so many and short ones that the library's calls
 * would cost more than they save.
 *
 * All sums run in an order fixed by ranks, heads and blocks, so results do not depend on timing - except dq through
 * cuDNN, which adds its parts up in any order (f32), and so differs in its last bits from run to run.
 * Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", arXiv 2310.01889; Dao,
 * "FlashAttention-2", arXiv 2307.08691; Brandon et al., "Striped Attention", arXiv 2311.09431 (balanced causal rings).
 */
#ifndef LEV_MODEL_ATTENTION_H
#define LEV_MODEL_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/comm.h"
#include "common/device.h"
#include "common/dtype.h"
#include "common/status.h"
#include "common/walker.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- which tokens a rank holds ---- */

/* Positions [begin, end) of the sequence. */
typedef struct attn_range {
  int64_t begin, end;
} attn_range;

/* The two pieces of `rank` in the order in which its rows are stored: row i is position ranges[0].begin + i, or, from
 * row ranges[0].end - ranges[0].begin on, counts from ranges[1].begin. Either may be empty. */
void attn_shard_ranges(int64_t seq_len, int ranks, int rank, attn_range ranges[2]);
/* N: tokens of `rank`. */
int64_t attn_shard_tokens(int64_t seq_len, int ranks, int rank);
/* Position in the sequence of local row `row`, 0 <= row < N. */
int64_t attn_token_position(int64_t seq_len, int ranks, int rank, int64_t row);

/* ---- plan ---- */

/* Which kernels a GPU uses: AUTO cuDNN where it is there, max_tokens is 1024 or more and, for packed documents, it
 * takes them; else our own. CUDNN asks for it whatever the length: a configuration that it does not take is
 * LEV_ERR_CONFIG, a machine without it LEV_ERR_UNSUPPORTED. The cpu has one set of kernels. */
typedef enum attn_route { ATTN_AUTO, ATTN_CUDNN, ATTN_TILED } attn_route;

typedef struct attn_config {
  size_t size;        /* sizeof(attn_config), set by attn_config_init */
  int64_t max_tokens; /* cap on N of any rank of the group; the same value on all ranks */
  int64_t heads;      /* A, a multiple of kv_heads */
  int64_t kv_heads;   /* G */
  int64_t head_dim;   /* d */
  double scale;       /* factor on q k; 0 = 1 / sqrt(d) */
  lev_dtype dtype;    /* T: f64, f32 or bf16; A is lev_dtype_arith(dtype) */
  int64_t block_q;    /* query tokens per block; 0 = chosen (128, or fewer with many query heads per key head) */
  int64_t block_k;    /* keys per block; 0 = chosen (256) */
  attn_route route;
  bool packed;      /* calls pack documents (doc_begin): cuDNN, where it is used, keeps room for theirs too */
  size_t workspace; /* most bytes of attn.workspace; 0 = 256 MiB, or what one block takes if that is more */
} attn_config;

/* Defaults: everything zero but `size` and dtype f32. */
void attn_config_init(attn_config *config);
/* Whether a plan can exist for this configuration on a group of `ranks`; LEV_ERR_CONFIG with the reason otherwise. */
LEV_MUST_CHECK lev_status attn_supports(lev_backend backend, int ranks, const attn_config *config);

/* The least config.workspace with which a plan can exist for a GPU; 0 where it has none. */
size_t attn_least_workspace(int ranks, const attn_config *config);

typedef struct attn_plan attn_plan;

/* Plans; `device` and `context_comm` are borrowed until attn_destroy, `config` is copied. Creates a communication
 * stream and events, but neither data-plane memory nor collectives; every rank must pass the same configuration. On the
 * GPU, logs which kernels it will use. Errors: LEV_ERR_CONFIG (see attn_supports; a workspace below what one head
 * takes, which it names), LEV_ERR_ARG, LEV_ERR_NOMEM, LEV_ERR_UNSUPPORTED and LEV_ERR_CAPACITY (see route and above).
 */
LEV_MUST_CHECK lev_status attn_plan_create(lev_device *device, lev_comm *context_comm, const attn_config *config,
                                           attn_plan **out);
/* What runs the plan's calls, where they can take it: "own kernels" or the library's name and release. */
const char *attn_plan_kernels(const attn_plan *plan);
/* Whether the last call was given to that library; where it has no plan for the shape, our own kernels did the work. */
bool attn_plan_through_library(const attn_plan *plan);
/* Never frees caller memory; the streams it was used on must be idle. NULL is fine. */
void attn_destroy(attn_plan *plan);

/* Phases: regions of one phase are alive together, from bind to the end of the call. PERSISTENT is empty. */
typedef enum attn_phase { ATTN_PERSISTENT, ATTN_FORWARD, ATTN_BACKWARD, ATTN_PHASES } attn_phase;

/* Bytes by memory class / the regions of a phase, listed in order (tags above; the same on all ranks of the group). */
void attn_plan_bytes(const attn_plan *plan, attn_phase phase, size_t bytes[LEV_MEM_CLASSES]);
void attn_plan_regions(const attn_plan *plan, attn_phase phase, lev_region_fn list, void *ctx);
/* The same as lev_walk_fn, for lev_blocks_take; `plan` is an attn_plan. */
void attn_walk_persistent(void *plan, lev_walker *walker);
void attn_walk_forward(void *plan, lev_walker *walker);
void attn_walk_backward(void *plan, lev_walker *walker);
/* Binds caller-owned blocks for a phase; a later bind ends it. Errors: LEV_ERR_CAPACITY (asked and given), LEV_ERR_ARG.
 */
LEV_MUST_CHECK lev_status attn_plan_bind(attn_plan *plan, attn_phase phase, const lev_blocks *blocks);

/* ---- calls ----
 * Device pointers. Rotary embedding and norms of q and k are already applied. Row strides are in scalars of T and cover
 * one token (0 = dense: heads x d); head h of a row starts at h x d. So q, k and v may live in one fused projection
 * buffer. o, d_o and lse are dense. No output may overlap an input or another output, bound regions included. Every
 * rank of the group makes the same call with the same seq_len; with seq_len = 0 nothing happens. Work is enqueued on
 * `stream` and on the plan's communication stream, which is joined back into `stream` before the call returns: work
 * enqueued on `stream` afterwards sees all results and may reuse inputs and bound blocks. Nothing is allocated and the
 * host never waits. Errors, before any collective: LEV_ERR_MISUSE (phase not bound), LEV_ERR_CAPACITY (a rank's share
 * of seq_len above max_tokens: all ranks fail alike), LEV_ERR_ARG (NULL array, stride below one row, negative window,
 * doc_begin_host, where it is read, with a document that begins behind its last token);
 * afterwards those of lev_comm and lev_device. A NaN score makes the row that sees it NaN. */

typedef struct attn_forward_args {
  int64_t seq_len;   /* S of the whole group, 0 .. what max_tokens allows */
  const void *q;     /* [N,A,d] T */
  const void *k, *v; /* [N,G,d] T */
  int64_t q_stride, k_stride, v_stride;
  int64_t window;                /* keys that a query sees at most, itself included; 0 = all before it */
  const int64_t *doc_begin;      /* [N] nullable: position at which the document of each token begins; earlier keys are
                                    not seen (packed sequences). Never falls along the sequence, nor passes the
                                    token's own */
  const int64_t *doc_begin_host; /* [N] nullable: the same in host memory, without which cuDNN takes no packed
                                    sequence. Read, where D = 1, before the call returns */
  void *o;                       /* [N,A,d] T, out */
  void *lse;                     /* [N,A] A, out: log of the sum of exp(scale q k) over the keys seen */
} attn_forward_args;

LEV_MUST_CHECK lev_status attn_forward(attn_plan *plan, const attn_forward_args *args, lev_stream *stream);

typedef struct attn_backward_args {
  int64_t seq_len;
  const void *q, *k, *v; /* as in forward */
  int64_t q_stride, k_stride, v_stride;
  int64_t window;                            /* as in forward */
  const int64_t *doc_begin, *doc_begin_host; /* as in forward */
  const void *o, *lse;                       /* results of forward */
  const void *d_o;                           /* [N,A,d] T: gradient of o */
  void *dq;                                  /* [N,A,d] T, out: overwritten */
  void *dk, *dv;                             /* [N,G,d] T, out: overwritten, the sum over all ranks' queries */
  int64_t dq_stride, dk_stride, dv_stride;
} attn_backward_args;

LEV_MUST_CHECK lev_status attn_backward(attn_plan *plan, const attn_backward_args *args, lev_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
