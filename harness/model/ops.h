/* SPDX-License-Identifier: Apache-2.0 */
/* Row-wise operations of the model, launched on a stream (see lev_launch). T is the storage dtype, A its arithmetic
 * type; rows of hidden states are dense [rows, cols]. Weight gradients (A) are accumulated in row order. */
#ifndef LEV_MODEL_OPS_H
#define LEV_MODEL_OPS_H

#include <stdbool.h>

#include "common/device.h"
#include "common/dtype.h"
#include "harness/model/params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of `scratch` in the backward passes of the norms and in the router's forward pass: sums over tokens are taken
 * in two stages there. 0 on the CPU. More is not used; less, down to one row of the sum in A (f64 for the router),
 * means fewer parts. A stream's workspace will do: it is in use only while the operation runs. */
size_t lev_ops_scratch_bytes(lev_backend backend);

/* y = x * w / sqrt(mean(x^2) + eps) per row. y may be x. */
typedef struct lev_rmsnorm_args {
  lev_dtype dtype;
  int64_t rows, cols;
  double eps;
  const void *x, *w; /* T [rows, cols], T [cols] */
  void *y;           /* T [rows, cols] */
} lev_rmsnorm_args;
extern const lev_kernel lev_rmsnorm_kernel;

/* dx (= or +=) d/dx, dw += d/dw. dx may be x or dy when not accumulating onto it. */
typedef struct lev_rmsnorm_backward_args {
  lev_dtype dtype;
  int64_t rows, cols;
  double eps;
  const void *x, *w, *dy;
  void *dx;        /* T [rows, cols] */
  void *dw;        /* A [cols] */
  bool accumulate; /* dx += */
  void *scratch;   /* GPU only: see lev_ops_scratch_bytes */
  size_t scratch_bytes;
} lev_rmsnorm_backward_args;
extern const lev_kernel lev_rmsnorm_backward_kernel;

/* out = silu(gate) * up; out may be gate. */
typedef struct lev_swiglu_args {
  lev_dtype dtype;
  int64_t count;
  const void *gate, *up; /* T [count] */
  void *out;             /* T [count] */
} lev_swiglu_args;
extern const lev_kernel lev_swiglu_kernel;

/* In place: gate and up become their gradients, d (the gradient of silu(gate) * up) becomes silu(gate) * up. */
typedef struct lev_swiglu_backward_args {
  lev_dtype dtype;
  int64_t count;
  void *gate, *up, *d; /* T [count] */
} lev_swiglu_backward_args;
extern const lev_kernel lev_swiglu_backward_kernel;

/* One projection of queries, keys or values: optional RMS norm (whole row or per head), then clamping to [-clip, clip],
 * then rotary embedding in the rotate-half form at position[row]. */
typedef struct lev_qk_args {
  lev_dtype dtype;
  int64_t rows, heads, head_dim;
  lev_qk_norm norm;
  double eps, clip; /* clip 0 = off; the gradient passes where |norm(x)| <= clip */
  lev_rope rope;
  const int32_t *position; /* [rows]; NULL = not rotated */
  const void *x;           /* T [rows, heads * head_dim], the projection */
  const void *w;           /* T, norm weight; NULL without norm */
  void *y;                 /* forward: T out; may be x */
  const void *dy;          /* backward: T, gradient of y */
  void *dx;                /* backward: T out; may be dy */
  void *dw;                /* backward: A +=; NULL without norm */
  void *scratch;           /* backward with norm, GPU only: see lev_ops_scratch_bytes */
  size_t scratch_bytes;
} lev_qk_args;
extern const lev_kernel lev_qk_kernel, lev_qk_backward_kernel;

/* Router, forward: scores of the logits, the chosen experts and their weights, as lev_route_rule says; best first.
 * `select` false keeps the given ids and only rebuilds the weights. Probabilities p, for the statistics and the balance
 * loss, are the scores divided by their sum over E. */
typedef struct lev_router_args {
  lev_dtype dtype;
  int64_t rows, experts, top_k;
  lev_route_rule rule;
  bool select, uniform; /* uniform: ids[t, j] = (t * top_k + j) mod E whatever the scores */
  const void *logits;   /* A [rows, E] */
  const void *bias;     /* A [E], added to the scores for the choice; NULL = none */
  int32_t *ids;         /* [rows, k] */
  void *weights;        /* A [rows, k] */
  int64_t *counts;      /* [E] +=, assignments; NULL = not wanted */
  double *sums;  /* f64 [1 + 2 E] +=: sum of squared log-sum-exp, of p per expert, assignments per expert; or NULL */
  void *scratch; /* GPU only, with counts or sums: see lev_ops_scratch_bytes */
  size_t scratch_bytes;
} lev_router_args;
extern const lev_kernel lev_router_kernel;

/* Router, backward: d logits from d weights plus the balance and z-loss terms.
 * balance: d/dp[t,e] += balance_scale * counts[e]; z: d/dlogit += z_scale * 2 * lse * softmax. */
typedef struct lev_router_backward_args {
  lev_dtype dtype;
  int64_t rows, experts, top_k;
  lev_route_rule rule;
  const void *logits;    /* A [rows, E] */
  const int32_t *ids;    /* [rows, k] */
  const void *dweights;  /* A [rows, k] */
  const int64_t *counts; /* [E] of the whole batch; read only where balance_scale != 0 */
  double balance_scale, z_scale;
  void *dlogits; /* T [rows, E] out */
} lev_router_backward_args;
extern const lev_kernel lev_router_backward_kernel;

/* Selection bias after a step: bias[e] += d[e] - mean(d), d[e] = rate * sign(mean(counts) - counts[e]). */
typedef struct lev_route_bias_args {
  lev_dtype dtype;
  int64_t experts;
  double rate;
  const double *counts; /* f64 [E], assignments over the whole batch */
  void *bias;           /* A [E] */
} lev_route_bias_args;
extern const lev_kernel lev_route_bias_kernel;

#ifdef LEV_HAVE_CUDA
lev_status lev_rmsnorm_cuda(const void *args, void *stream);
lev_status lev_rmsnorm_backward_cuda(const void *args, void *stream);
lev_status lev_swiglu_cuda(const void *args, void *stream);
lev_status lev_swiglu_backward_cuda(const void *args, void *stream);
lev_status lev_qk_cuda(const void *args, void *stream);
lev_status lev_qk_backward_cuda(const void *args, void *stream);
lev_status lev_router_cuda(const void *args, void *stream);
lev_status lev_router_backward_cuda(const void *args, void *stream);
lev_status lev_route_bias_cuda(const void *args, void *stream);
#endif

#ifdef __cplusplus
}
#endif

#endif
