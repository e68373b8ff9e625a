/* SPDX-License-Identifier: Apache-2.0 */
/* Vocabulary projection and cross entropy over a vocabulary-sharded head, without ever holding the logits.
 *
 * The head [V,H] is dealt by rows over the P ranks of one group; every rank has its own N tokens. One call gives the
 * loss, the gradient of the hidden states and the gradient of the shard. What moves around the ring is a chunk of a
 * fixed size:
 *
 *   weights      chunks of `tile_cols` head rows visit every rank, their gradient (arithmetic type) travels one hop
 * behind and comes home; activations  chunks of `tile_rows` tokens with labels and softmax state visit every shard,
 * their gradient travels likewise.
 *
 * Logits exist as one tile [tile_rows, tile_cols] in the arithmetic type A and are recomputed for the gradient; per
 * token only the running maximum m, the sum z and the label's logit y are kept (online softmax). `one_pass` keeps the
 * logits of a block of tokens instead and saves that recomputation; `plain` gathers the head and forms all logits: the
 * reference and the baseline.
 *
 * All results are deterministic: sums run in an order fixed by ranks and tiles, never by timing.
 * Source: arXiv 2609.14306, section 3.2, appendix C and algorithm 2; online softmax of Milakov and Gimelshein, arXiv
 * 1805.02867. */
#ifndef LEV_RING_DTP_RING_DTP_H
#define LEV_RING_DTP_RING_DTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/comm.h"
#include "common/device.h"
#include "common/status.h"
#include "common/walker.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum rdtp_schedule { RDTP_BOUNDED, RDTP_PLAIN } rdtp_schedule;

/* What moves around the ring. AUTO takes the cheaper traffic, one decision for the whole group made from the caps:
 * weights if max_tokens > V/P, else activations (and activations for P = 1, where nothing moves and no token-sized
 * buffer is needed). */
typedef enum rdtp_branch { RDTP_AUTO, RDTP_MOVE_WEIGHTS, RDTP_MOVE_ACTIVATIONS } rdtp_branch;

typedef struct rdtp_config {
  size_t size;        /* sizeof(rdtp_config), set by rdtp_config_init */
  int64_t max_tokens; /* cap on N of any rank of the group; the same value on all ranks */
  int64_t hidden;     /* H */
  int64_t vocab;      /* V, at most 2^31 - 1 */
  lev_dtype dtype;    /* T, of h, dh and w: f64, f32 or bf16; the arithmetic type A is lev_dtype_arith(dtype) */
  rdtp_schedule schedule;
  rdtp_branch branch;
  int64_t tile_rows; /* tokens per logits tile; 0 = chosen (the largest that fits `budget`, 1024 without a budget) */
  int64_t tile_cols; /* head rows per logits tile; 0 = chosen (the largest that fits `budget`, 4096 without a budget) */
  size_t budget;     /* device work bytes of RDTP_STEP; 0 = none */
  bool one_pass; /* keep the logits of tile_rows tokens of every rank over all of V (3 matrix products instead of 4) if
                    the budget holds blocks of min(max_tokens, 64) tokens or more; otherwise the plan falls back to the
                    two-pass ring */
} rdtp_config;

/* Defaults: everything zero but `size`, dtype f32, bounded, AUTO. */
void rdtp_config_init(rdtp_config *config);

/* Whether a plan can exist for this configuration on a group of `ranks` ranks, budget aside. LEV_ERR_CONFIG with the
 * reason in lev_detail() otherwise. */
LEV_MUST_CHECK lev_status rdtp_supports(lev_backend backend, int ranks, const rdtp_config *config);

typedef struct rdtp_plan rdtp_plan;

/* Plans; `device` and `vocab_comm` are borrowed until rdtp_destroy and `config` is copied. Creates a communication
 * stream and events, but neither memory of the data plane nor collectives: every rank must pass the same configuration.
 * Errors: LEV_ERR_CONFIG (see rdtp_supports), LEV_ERR_BUDGET (the detail names the smallest budget that would do; so
 * does rdtp_smallest_budget), LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status rdtp_plan_create(lev_device *device, lev_comm *vocab_comm, const rdtp_config *config,
                                           rdtp_plan **out);
/* Never frees caller memory; the streams it was used on must be idle. NULL is fine. */
void rdtp_destroy(rdtp_plan *plan);

/* Smallest `budget` with which this configuration (given tiles kept) can be planned on a group of `ranks`; SIZE_MAX
 * when it cannot be planned at all. Bytes are the same on every rank of the group: shards are counted as the largest of
 * them. */
size_t rdtp_smallest_budget(int ranks, const rdtp_config *config);

/* What the plan chose. */
typedef struct rdtp_info {
  rdtp_schedule schedule;
  rdtp_branch branch; /* never RDTP_AUTO */
  bool one_pass;
  int64_t tile_rows,
      tile_cols; /* the logits buffer holds tile_rows x tile_cols: plain N x V, one-pass (P * rows) x V/P */
  int64_t vocab_begin, vocab_end; /* head rows of this rank */
} rdtp_info;
rdtp_info rdtp_plan_info(const rdtp_plan *plan);

/* Phases: regions of one phase are alive together. PERSISTENT is empty; STEP serves rdtp_step and rdtp_eval; EVAL
 * serves rdtp_eval only and is smaller (no gradients). */
typedef enum rdtp_phase { RDTP_PERSISTENT, RDTP_STEP, RDTP_EVAL, RDTP_PHASES } rdtp_phase;

/* Bytes by memory class / the regions of a phase, listed in order. Tags: rdtp.tile (logits), rdtp.ring (moving chunks),
 * rdtp.grad (moving gradients), rdtp.state (m, z, y), rdtp.dx (bf16 with moving weights: gradient of h in A). With
 * schedule bounded only rdtp.state and rdtp.dx depend on max_tokens, and only where weights move. */
void rdtp_plan_bytes(const rdtp_plan *plan, rdtp_phase phase, size_t bytes[LEV_MEM_CLASSES]);
void rdtp_plan_regions(const rdtp_plan *plan, rdtp_phase phase, lev_region_fn list, void *ctx);

/* The same as lev_walk_fn, for lev_blocks_take; `plan` is a rdtp_plan. */
void rdtp_walk_persistent(void *plan, lev_walker *walker);
void rdtp_walk_step(void *plan, lev_walker *walker);
void rdtp_walk_eval(void *plan, lev_walker *walker);

/* Binds caller-owned blocks for a phase; they stay bound until the next bind. Binding EVAL ends an earlier STEP binding
 * and vice versa. Errors: LEV_ERR_CAPACITY (asked and given), LEV_ERR_ARG. */
LEV_MUST_CHECK lev_status rdtp_plan_bind(rdtp_plan *plan, rdtp_phase phase, const lev_blocks *blocks);

#define RDTP_SUMS                                                                                                      \
  3 /* [0] sum of NLL in nats over valid tokens  [1] valid tokens  [2] labels outside [0,V) other than -100 */
#define RDTP_IGNORE (-100)

/* Inputs and outputs of one call on one rank. Device pointers unless noted; none may overlap another. */
typedef struct rdtp_args {
  int64_t tokens;             /* N of this rank, 0 .. max_tokens */
  const int64_t *rank_tokens; /* host [P]: N of every rank, read during the call; NULL = all have `tokens` */
  const void *h;              /* [N,H] T, in */
  const int32_t *labels; /* [N], in: -100 is ignored, any other value outside [0,V) is ignored and counted in sums[2] */
  const void *w;         /* [Vr,H] T, in: rows [lev_part_begin(V,P,r), lev_part_begin(V,P,r+1)) of the head */
  void *dh;              /* [N,H] T, out: overwritten; rows of tokens without a valid label are zero (step only) */
  void *dw;              /* [Vr,H] A, in/out: += (step only) */
  double *sums;          /* [RDTP_SUMS] f64, in/out: += over this rank's tokens */
  double
      grad_scale; /* factor on the gradient of the NLL sum, 1 / global number of valid tokens as a rule (step only) */
} rdtp_args;

/* Loss, dh and dw: enqueued on `stream` and on the plan's communication stream, which is joined back into `stream`
 * before the call returns, so that work enqueued on `stream` afterwards sees all results and may reuse inputs and bound
 * blocks. Collective over vocab_comm, same sizes on all ranks; allocates nothing and never waits on the host. bf16
 * needs a GEMM workspace on `stream`. A NaN logit makes the NLL of its token NaN; -inf logits are masked. Errors,
 * before any collective: LEV_ERR_MISUSE (STEP not bound), LEV_ERR_CAPACITY (tokens above max_tokens), LEV_ERR_ARG;
 * afterwards those of lev_comm and lev_device. */
LEV_MUST_CHECK lev_status rdtp_step(rdtp_plan *plan, const rdtp_args *args, lev_stream *stream);

/* Loss only: as rdtp_step with either phase bound; dh, dw and grad_scale are not looked at. */
LEV_MUST_CHECK lev_status rdtp_eval(rdtp_plan *plan, const rdtp_args *args, lev_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
