/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the attention plan and their arguments (private). T is the storage type `dtype`, A its arithmetic type.
 *
 * One ring step attends the rank's queries to one rank's keys. A chunk of n tokens as it travels is [G, n, 2, d]: per
 * key head the rows (k, v), so that a group of heads is contiguous; its gradient has the same shape in A. */
#ifndef LEV_MODEL_ATTENTION_OPS_H
#define LEV_MODEL_ATTENTION_OPS_H

#include <stdbool.h>
#include <string.h>

#include "common/device.h"
#include "common/dtype.h"
#include "harness/model/attention.h"
#include "harness/model/attention_graph.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attn_shape {
  lev_dtype dtype;
  int64_t heads, kv_heads, head_dim;
  int64_t block_q, block_k; /* tokens */
  double scale;
} attn_shape;

/* Rows of keys and values, or of their gradients: token t of key head h at k + t * k_row + h * head. */
typedef struct attn_rows {
  void *k, *v;
  int64_t k_row, v_row, head; /* scalars */
} attn_rows;

/* What one ring step reads. */
typedef struct attn_step {
  attn_shape shape;
  int64_t window;                    /* 0 = none */
  attn_range q_range[2], k_range[2]; /* positions of the queries / keys, in row order */
  const void *q;                     /* T */
  int64_t q_stride;
  attn_rows kv;             /* T, read only */
  const int64_t *doc_begin; /* [N] of the queries, nullable */
  const int64_t *documents; /* with the library: the same on the host; NULL: one document */
  int64_t longest;          /* that a document may be */
  void *scratch;            /* attn_scratch_scalars() of A */
  bool first, last;         /* step of the ring */
  attn_cudnn *library;      /* NULL: our own kernels. Set on all steps of a call or on none */
  bool may_fall_back;       /* first and last step: to our own kernels, where the library has no plan for the shape */
  void *workspace;          /* attn_room_carve() of the cuts */
  attn_cut forward_cut, backward_cut;
} attn_step;

/* Scalars of A that a forward / backward kernel needs as scratch. */
int64_t attn_scratch_scalars(const attn_shape *shape, bool backward);

/* Folds one step into the softmax state; between steps the unnormalised output stays in acc, m in lse, l in sum (with
 * the library: o in acc, log-sum-exp in lse). The last step writes o and lse. */
typedef struct attn_forward_step {
  attn_step step;
  void *acc; /* [N,A,d] A; o itself where T = A; unused if first and last */
  void *sum; /* [N,A] A; likewise */
  void *o;   /* [N,A,d] T */
  void *lse; /* [N,A] A */
} attn_forward_step;
extern const lev_kernel attn_forward_kernel;

/* Adds one step's share to dq and to the gradients of its keys, for key heads [head_begin, head_end). The first step
 * overwrites both. */
typedef struct attn_backward_step {
  attn_step step;
  int64_t head_begin, head_end;
  const void *o, *lse, *d_o;
  attn_rows dkv;    /* A */
  bool dkv_rounded; /* first and last step: dkv is in T, the caller's own (not on cpu) */
  void *acc;        /* A: sum of dq between steps; dq itself where T = A; unused if first and last */
  int64_t acc_stride;
  void *dq; /* T, written by the last step */
  int64_t dq_stride;
} attn_backward_step;
extern const lev_kernel attn_backward_kernel;

/* Between caller rows `rows` (T) and a dense chunk of n tokens, key heads [head_begin, head_end): pack copies rows to
 * the chunk (T), unpack rounds the chunk (A) to rows. */
typedef struct attn_chunk_args {
  lev_dtype dtype;
  int64_t tokens, head_dim, head_begin, head_end;
  attn_rows rows;
  void *chunk; /* [G, n, 2, d] */
} attn_chunk_args;
extern const lev_kernel attn_pack_kernel, attn_unpack_kernel;

/* e^x for x <= 88, with a relative error below 1.2e-7 (one unit in the last place of f32) where the result is a
 * normal number; 0 below x = -87.33; NaN stays NaN. Free of branches, so that loops over it vectorise.
 * Reduction to |r| <= ln(2)/2 and the polynomial of Cephes (expf), in Horner form with fused multiply-add. */
static inline float attn_exp_f32(float x) {
  const float low = -87.33f, high = 88.0f, shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  float y = x < low ? low : x;
  y = y > high ? high : y;
  float t = __builtin_fmaf(y, 1.44269504088896341f, shift);
  float n = t - shift;
  float r = __builtin_fmaf(n, -0.693359375f, y);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  uint32_t bits;
  memcpy(&bits, &t, sizeof bits);
  bits = (bits + 127u) << 23; /* the low bits of t hold n */
  float power;
  memcpy(&power, &bits, sizeof power);
  return x < low ? 0.0f : p * power;
}

/* CUDA launchers of the kernels above. */
lev_status attn_forward_cuda(const void *args, void *cuda_stream);
lev_status attn_backward_cuda(const void *args, void *cuda_stream);
lev_status attn_pack_cuda(const void *args, void *cuda_stream);
lev_status attn_unpack_cuda(const void *args, void *cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
