/* SPDX-License-Identifier: Apache-2.0 */
/* How long a step takes at measured ceilings, and what bounds it. An upper bound on speed: every phase is its counted
 * operations or bytes over a ceiling, routing is balanced, and whatever may overlap does so entirely.
 *
 * Operations (multiply and add count as two) of one rank in one step, from T = its tokens, F = forward passes (1; 2
 * with several micro-batches, whose routes are counted in a pass of their own), r = 1 if attention outputs are not kept
 * (attention forward then runs again in backward), else 0; symbols as in common/dims.h, I, F_l = widths of an expert
 * and of the dense or shared part of layer l:
 *
 *   attention    pairs of a query and a key it sees: S (S + 1) / 2 per sequence, or the sum of min(i + 1, window); a
 *                rank computes 1/D of its group's. Forward q k and p v: 4 A d per pair. Backward five products (scores
 *                again, dp, dv, dq, dk): 10 A d. In all (4 (F + r) + 10) A d pairs per layer.
 *   projections  W = H d (A + 2 G) [q, k, v], O = H d A, R = E H [router]: forward 2 T (W + O + R) F; backward runs q,
 *                k, v once more (twice if r), O and router once more, and two gradients of each: 4 T (W + O + R).
 *   dense        SwiGLU of width F_l: forward 6 T H F_l F; backward 4 (gate, up again) + 12 (gradients).
 *   experts      T k rows of width I: as dense, 6 F + 4 + 12 per row, H and I. The down projection is not run again.
 *   vocabulary   a product is 2 T H V: 4 of them (logits twice, dh, dw), 3 with the plain schedule or one pass.
 *   rows         bytes that norms, rotary embedding, residuals, activation and the moves of routed rows read and write,
 *                in tensors of T H, T (A + G) d, T k H and T k I scalars; the counts are at row_passes in estimate.c.
 *
 * Copies and collectives are the bytes that the dry run of the step records: to the host (labels "*.out"), from it
 * ("*.in"), sent by this rank. The optimizer follows the backward pass; its update on the card reads and writes the
 * state, gradients and weights at the copy ceiling (Muon: its products at the matmul ceiling), its update on the host
 * runs at the rate of adamw_cpu, and its copies beside either.
 *
 *   forward and backward = max(attention + projections + dense + experts + vocabulary + rows, out, in, collectives)
 *   optimizer            = max(update on the card, update on the host, out, in)
 *   step                 = their sum */
#ifndef LEV_TRAIN_ESTIMATE_H
#define LEV_TRAIN_ESTIMATE_H

#include "harness/train/plan.h"

/* Rates in operations, bytes or parameters per second. */
typedef struct lev_ceilings {
  double matmul, attention; /* operations */
  double copy;              /* device memory, bytes read + bytes written */
  double h2d, d2h;          /* host link, each way while both are busy */
  double link;              /* bytes that one rank sends to others */
  double adamw_cpu;         /* parameters updated by all host threads of a rank */
} lev_ceilings;

/* Reads [ceilings] matmul_tflops, attention_tflops, copy_tb, h2d_gb, d2h_gb, link_gb, adamw_cpu_gparams (10^12 and 10^9
 * per second). Errors: LEV_ERR_IO, LEV_ERR_CONFIG (unknown, missing or not positive; names the key). */
LEV_MUST_CHECK lev_status lev_ceilings_read(const char *path, lev_ceilings *out);

typedef enum lev_cost_id {
  LEV_COST_ATTENTION,
  LEV_COST_PROJECTIONS,
  LEV_COST_DENSE,
  LEV_COST_EXPERTS,
  LEV_COST_VOCABULARY,
  LEV_COST_ROWS,
  LEV_COST_OUT, /* to the host */
  LEV_COST_IN,  /* from the host */
  LEV_COST_COLLECTIVES,
  LEV_COST_UPDATE,      /* optimizer on the card, memory */
  LEV_COST_MUON,        /* optimizer on the card, products */
  LEV_COST_HOST_UPDATE, /* optimizer on the host */
  LEV_COST_UPDATE_OUT,
  LEV_COST_UPDATE_IN,
  LEV_COSTS
} lev_cost_id;

typedef struct lev_cost {
  const char *name, *unit, *ceiling; /* unit: "FLOP", "B" or "parameters" */
  double amount, seconds;
} lev_cost;

#define LEV_ESTIMATE_NOTES 5
#define LEV_ESTIMATE_NOTE 200
#define LEV_HOST_GPUS 8 /* ranks that a fast link connects */

typedef struct lev_estimate {
  int rank;
  lev_cost cost[LEV_COSTS];
  double compute, forward_backward, optimizer, step; /* seconds */
  double tokens_per_second;                          /* of all ranks */
  lev_cost_id bound;                                 /* the largest part of whatever takes most of the step */
  /* Where the step departs from what the usual ceilings are of: bf16, attention through cuDNN, one document in a
   * sequence, ranks of one host, GPUs. */
  char note[LEV_ESTIMATE_NOTES][LEV_ESTIMATE_NOTE];
  int n_notes;
} lev_estimate;

/* Estimates a step of `rank` from a dry run. Errors: those of lev_plan_rank, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_estimate_step(const lev_config *config, int rank, const lev_ceilings *ceilings,
                                            lev_estimate *out);

#endif
