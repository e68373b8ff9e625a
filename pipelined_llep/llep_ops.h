/* SPDX-License-Identifier: Apache-2.0 */
/* Device operations of pipelined_llep. Row arrays are row-major [rows, H]; T = dtype, A = its arithmetic type. The
 * tokens of a chunk are those of blocks [first, last): t mod B in that range. */
#ifndef LEV_PIPELINED_LLEP_OPS_H
#define LEV_PIPELINED_LLEP_OPS_H

#include "common/device.h"
#include "common/dtype.h"
#include "pipelined_llep/llep_route.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels on a GPU keep two numbers per expert and lent slot in a multiprocessor's shared memory. */
#define LLEP_GPU_SHARED (200 << 10)
#define LLEP_GPU_COLUMNS (LLEP_GPU_SHARED / (2 * (int)sizeof(int32_t)))

/* A device counts routes in `parts` consecutive parts at once: `seen` [parts, E] is scratch of a row for each. */

/* counts [E + 1] of this rank's ids. */
typedef struct llep_count_args {
  const int32_t *ids;
  int64_t routes, experts;
  int64_t *counts;
  int64_t parts, *seen;
} llep_count_args;
extern const lev_kernel llep_count_kernel;

/* Lending plan from the counts of all ranks. */
typedef struct llep_lend_args {
  llep_rules rules;
  int rank;
  const int64_t *counts; /* [Ep, E + 1] */
  int64_t *table, *scratch;
} llep_lend_args;
extern const lev_kernel llep_lend_kernel;

/* Columns of all routes and their histogram. */
typedef struct llep_assign_args {
  llep_rules rules;
  const int32_t *ids;
  int64_t tokens, top_k, blocks;
  int64_t parts, *seen;
  int64_t *table;
  int32_t *routes, *histogram;
  int64_t *own;   /* nullable [Ep, B]: rows for each rank */
  int64_t *total; /* nullable [Ep, B]: the same, to be summed over ranks */
} llep_assign_args;
extern const lev_kernel llep_assign_kernel;

/* Rows in send order of one chunk's routes. */
typedef struct llep_number_args {
  llep_rules rules;
  int64_t tokens, top_k, blocks, first, last;
  const int32_t *histogram;
  int32_t *next, *routes;
} llep_number_args;
extern const lev_kernel llep_number_kernel;

/* send[routes[t, j]] = x[t] for a chunk; dy and probs likewise where not NULL. */
typedef struct llep_gather_args {
  lev_dtype dtype;
  int64_t tokens, top_k, hidden, blocks, first, last;
  const int32_t *routes;
  const void *x, *dy, *probs;
  void *send_x, *send_dy, *send_probs;
} llep_gather_args;
extern const lev_kernel llep_gather_kernel;

/* Rows of one expert lie in a received chunk as one run per source rank. Copies runs to a contiguous tile or back. */
#define LEV_LLEP_RUNS 40
#define LEV_LLEP_PARTS 3
typedef struct llep_pack_args {
  int n_runs, n_parts;
  bool unpack; /* tile -> runs */
  struct {
    void *rows, *tile;
    size_t row_bytes;
  } part[LEV_LLEP_PARTS];
  int32_t start[LEV_LLEP_RUNS], count[LEV_LLEP_RUNS];
} llep_pack_args;
extern const lev_kernel llep_pack_kernel;

/* h [rows, 2 I] holds gate | up; the first half becomes silu(gate) * up. */
typedef struct llep_act_args {
  lev_dtype dtype;
  int64_t rows, inter;
  void *h;
} llep_act_args;
extern const lev_kernel llep_act_kernel;

/* h = gate | up, q [rows, I] = dA' = dY down, p [rows] = route weight. In place: h = p x gradient of gate | up, q = p x
 * silu(gate) * up, p = gradient of the route weight = dA' . (silu(gate) * up). */
typedef struct llep_act_backward_args {
  lev_dtype dtype;
  int64_t rows, inter;
  void *h, *q, *p;
} llep_act_backward_args;
extern const lev_kernel llep_act_backward_kernel;

/* out[t] = [out[t] +] sum_j probs[t, j] * rows[routes[t, j]] over a chunk's tokens (probs = NULL: weights 1); and where
 * not NULL scalars[t, j] = row_scalars[routes[t, j]]. */
typedef struct llep_combine_args {
  lev_dtype dtype;
  int64_t tokens, top_k, hidden, blocks, first, last;
  const int32_t *routes;
  const void *probs, *rows, *row_scalars;
  void *out, *scalars;
  bool accumulate;
} llep_combine_args;
extern const lev_kernel llep_combine_kernel;

/* dst += src over n scalars of the arithmetic type `arith`. */
typedef struct llep_add_args {
  lev_dtype arith;
  int64_t n;
  const void *src;
  void *dst;
} llep_add_args;
extern const lev_kernel llep_add_kernel;

/* CUDA launchers of the kernels above. */
lev_status llep_count_cuda(const void *args, void *cuda_stream);
lev_status llep_lend_cuda(const void *args, void *cuda_stream);
lev_status llep_assign_cuda(const void *args, void *cuda_stream);
lev_status llep_number_cuda(const void *args, void *cuda_stream);
lev_status llep_gather_cuda(const void *args, void *cuda_stream);
lev_status llep_pack_cuda(const void *args, void *cuda_stream);
lev_status llep_act_cuda(const void *args, void *cuda_stream);
lev_status llep_act_backward_cuda(const void *args, void *cuda_stream);
lev_status llep_combine_cuda(const void *args, void *cuda_stream);
lev_status llep_add_cuda(const void *args, void *cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
