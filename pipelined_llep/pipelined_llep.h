/* SPDX-License-Identifier: Apache-2.0 */
/* Expert dispatch with a hard cap on the rows that any rank sends or receives at once, whatever the routing.
 *
 * The E experts are dealt over the Ep ranks of one group; rank r owns [lev_part_begin(E, Ep, r), + El) with
 * El = lev_part_size(E, Ep, r). A route is one (token, pick) pair, a row is its hidden vector [H]. An expert is a
 * SwiGLU unit, x -> (silu(x gate^T) * (x up^T)) down^T, and a layer returns y[t] = sum over picks j of probs[t,j] *
 * expert(ids[t,j])(x[t]), summed in pick order in the arithmetic type A and rounded once.
 *
 *   bounded  Once per layer and identically on all ranks, experts of overloaded ranks lend token ranges to less loaded
 *            ranks (least loaded assignment); a lent expert's weights move once. Token t belongs to block t mod B. The
 *            histogram of blocks x destinations is summed over the group, and a chunk ends before the block with
 *            which the fullest receiver or sender would pass chunk_rows: all ranks know K and every count. Dispatch of
 *            chunk i+1 overlaps the experts of chunk i and the combine of chunk i-1. Backward sends X and dY again and
 *            recomputes the expert inside the chunk, so no route-sized tensor is ever kept.
 *   plain    standard expert parallelism: owners only, one chunk. The reference and the baseline.
 *
 * All results are deterministic. Source: Nguyen, Pandit, Zhao, Joty, arXiv 2609.14306, section 3.1, appendix B and
 * algorithm 1; least loaded expert parallelism, arXiv 2601.17111; gradient of the route weight as the row product of
 * dA' and A: SonicMoE, arXiv 2512.14080. */
#ifndef LEV_PIPELINED_LLEP_PIPELINED_LLEP_H
#define LEV_PIPELINED_LLEP_PIPELINED_LLEP_H

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

typedef enum llep_schedule { LLEP_BOUNDED, LLEP_PLAIN } llep_schedule;

/* The same values on every rank of the group. */
typedef struct llep_config {
  size_t size;        /* sizeof(llep_config), set by llep_config_init */
  int64_t max_tokens; /* cap on N of any rank */
  int64_t hidden;     /* H */
  int64_t inter;      /* I */
  int64_t experts;    /* E, >= Ep */
  int64_t top_k;      /* k */
  int layers;         /* layers whose routes are remembered between forward and backward */
  lev_dtype dtype;    /* T, of x, y and w: f64, f32 or bf16; the arithmetic type A is lev_dtype_arith(dtype) */
  llep_schedule schedule;
  int64_t chunk_rows; /* bounded: hard cap on the rows that any rank sends, and on those that any rank receives, in one
                         chunk, >= Ep * k. 0 = the largest that fits `budget`; without a budget, 4096 tokens' rows */
  int64_t tile_rows;  /* rows of one or several experts computed at a time (activations exist for these only).
                         0 = min(chunk_rows, 1024), on a GPU 8192; plain: all rows received */
  int64_t
      foreign_slots;  /* bounded: lent experts a rank can hold at once. 0 = half of its own, at least one; -1 = none */
  double alpha;       /* a rank is overloaded above alpha * mean rows per rank; 1 .. 1e6 */
  int64_t min_rows;   /* m: a rank may exceed that by m rows rather than lend fewer than m rows */
  double gate;        /* below this max/mean rows per rank nothing is lent */
  size_t budget;      /* device work bytes of the larger of FORWARD and BACKWARD; 0 = none */
  int64_t plain_rows; /* plain: rows a rank can receive. 0 = N * Ep * min(k, El), the worst case of distinct picks */
} llep_config;

/* Defaults: f32, bounded, one layer, alpha 1, min_rows 1024, gate 1.3; the rest zero but `size`. */
void llep_config_init(llep_config *config);

/* Whether a plan can exist for this configuration on a group of `ranks` ranks, budget aside. LEV_ERR_CONFIG with the
 * reason in lev_detail() otherwise. */
LEV_MUST_CHECK lev_status llep_supports(lev_backend backend, int ranks, const llep_config *config);

typedef struct llep_plan llep_plan;

/* Plans; `device` and `ep_comm` are borrowed until llep_destroy and `config` is copied. Collective over ep_comm (a
 * second communicator of the same ranks is made from it; from now on ep_comm is used on the plan's dispatch stream
 * only). Creates the dispatch and combine streams, events and host tables; no data-plane memory. Errors: LEV_ERR_CONFIG
 * (see llep_supports), LEV_ERR_BUDGET (the detail names the smallest budget that would do, so does
 * llep_smallest_budget), LEV_ERR_NOMEM, those of lev_comm_subset. If one rank fails, all do. */
LEV_MUST_CHECK lev_status llep_plan_create(lev_device *device, lev_comm *ep_comm, const llep_config *config,
                                           llep_plan **out);
/* Never frees caller memory; the plan's streams and those it was used on must be idle. NULL is fine. */
void llep_destroy(llep_plan *plan);

/* Smallest `budget` with which this configuration (given chunk_rows kept) can be planned on `ranks` ranks of a backend;
 * SIZE_MAX if it cannot be planned at all. */
size_t llep_smallest_budget(lev_backend backend, int ranks, const llep_config *config);

/* What the plan chose; the same on every rank but for the expert range. */
typedef struct llep_info {
  int64_t chunk_rows;               /* hard cap on rows received in a chunk (plain: plain_rows) */
  int64_t send_rows;                /* hard cap on rows sent in a chunk */
  int64_t tile_rows;                /* rows of experts computed at a time */
  int64_t blocks;                   /* B, token blocks; K never passes it */
  int64_t foreign_slots;            /* lent experts a rank can hold */
  int64_t expert_begin, expert_end; /* own experts of this rank */
  bool single_products; /* one rank, whose chunk and tile hold all rows: an expert's gradient is one product, see
                           overwrite_dw */
} llep_info;
llep_info llep_plan_info(const llep_plan *plan);

/* Phases: regions of one phase are alive together. PERSISTENT lives as long as the plan and is bound once. */
typedef enum llep_phase { LLEP_PERSISTENT, LLEP_FORWARD, LLEP_BACKWARD, LLEP_PHASES } llep_phase;

/* Bytes by memory class / the regions of a phase, listed in order; identical on every rank of the group. Tags:
 * llep.send, llep.recv, llep.return (rows), llep.act (one tile), llep.foreign (lent weights), llep.foreign_grad (their
 * gradients), llep.tables (routes and plans), llep.counts (pinned). Of these llep.tables grows with max_tokens, for it
 * holds [N, k] int32; and with the blocks B, of which more tokens in chunks of the same size take more, both
 * llep.tables and llep.counts. */
void llep_plan_bytes(const llep_plan *plan, llep_phase phase, size_t bytes[LEV_MEM_CLASSES]);
void llep_plan_regions(const llep_plan *plan, llep_phase phase, lev_region_fn list, void *ctx);

/* The same as lev_walk_fn, for lev_blocks_take; `plan` is a llep_plan. */
void llep_walk_persistent(void *plan, lev_walker *walker);
void llep_walk_forward(void *plan, lev_walker *walker);
void llep_walk_backward(void *plan, lev_walker *walker);

/* Binds caller-owned blocks for a phase; they stay bound until the next bind of FORWARD or BACKWARD (each ends the
 * other). Errors: LEV_ERR_CAPACITY (asked and given), LEV_ERR_ARG, LEV_ERR_MISUSE (PERSISTENT a second time). */
LEV_MUST_CHECK lev_status llep_plan_bind(llep_plan *plan, llep_phase phase, const lev_blocks *blocks);

/* One layer on one rank. Device pointers unless noted; none may overlap another. */
typedef struct llep_forward_args {
  int layer;                  /* 0 .. layers-1: where the routes are remembered */
  int64_t tokens;             /* N of this rank, 0 .. max_tokens */
  const int64_t *rank_tokens; /* host [Ep]: N of every rank, read during the call; NULL = all have `tokens` */
  const void *x;              /* [N, H] T */
  const int32_t *ids;         /* [N, k] expert of each pick, 0 .. E-1 */
  const void *probs;          /* [N, k] A, weight of each pick */
  const void *w;              /* [El, 3 I H] T: per expert gate [I, H], up [I, H], down [H, I] */
  void *y;                    /* [N, H] T, out */
  bool accumulate;            /* y += instead of y = */
} llep_forward_args;

/* Enqueued on `stream` and on the plan's own streams, which are joined back into `stream` before the call returns: work
 * enqueued on `stream` afterwards sees y and may reuse inputs and bound blocks. Waits once on the host, for the counts;
 * allocates nothing. Collective over the group. bf16 needs a GEMM workspace on `stream`. The dry backend cannot read
 * ids and plans for ids[t, j] = (t k + j) mod E on every rank.
 * Errors before any collective: LEV_ERR_MISUSE (PERSISTENT or FORWARD not bound), LEV_ERR_CAPACITY (a rank's tokens
 * above max_tokens), LEV_ERR_ARG. After the counts but before any row moves, the same on all ranks: LEV_ERR_ARG (an id
 * outside 0 .. E-1), LEV_ERR_CAPACITY (plain: more rows for a rank than plain_rows). Then those of lev_comm and
 * lev_device, after which the caller aborts the communicator. */
LEV_MUST_CHECK lev_status llep_forward(llep_plan *plan, const llep_forward_args *args, lev_stream *stream);

typedef struct llep_backward_args {
  int layer;                  /* its latest llep_forward is undone; inputs as they were then */
  int64_t tokens;             /* as in forward */
  const int64_t *rank_tokens; /* as in forward */
  const void *x;              /* [N, H] T */
  const int32_t *ids;         /* [N, k] */
  const void *probs;          /* [N, k] A */
  const void *w;              /* [El, 3 I H] T */
  const void *dy;             /* [N, H] T, gradient of y */
  void *dx;                   /* [N, H] T, out: overwritten */
  void *dprobs;               /* [N, k] A, out: overwritten */
  void *dw;                   /* [El, 3 I H] A, in/out: += */
  bool overwrite_dw;          /* dw is T instead, out: overwritten, rounded once; only with llep_info.single_products */
} llep_backward_args;

/* Gradients; never waits on the host. Streams, collectives and errors as llep_forward; LEV_ERR_MISUSE if the layer was
 * not run forward with the same tokens, or if dw cannot be overwritten. */
LEV_MUST_CHECK lev_status llep_backward(llep_plan *plan, const llep_backward_args *args, lev_stream *stream);

/* What the latest llep_forward of a layer met; all zero before. Pointers belong to the plan. */
typedef struct llep_stats {
  int64_t chunks;               /* K */
  int64_t moves;                /* experts lent, over the group */
  int64_t chunk_rows;           /* most rows that one rank sent or received in one chunk */
  double rows_max, rows_mean;   /* rows received in the layer, over ranks */
  double native_max;            /* rows of the fullest rank if nothing were lent */
  const int64_t *expert_counts; /* [E] routes per expert, over the group */
  const int64_t *rank_rows;     /* [Ep] rows received */
} llep_stats;
void llep_get_stats(const llep_plan *plan, int layer, llep_stats *out);

#ifdef __cplusplus
}
#endif
#endif
