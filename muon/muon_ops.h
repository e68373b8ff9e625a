/* SPDX-License-Identifier: Apache-2.0 */
/* Private: arguments and tables of Muon's own kernels. Matrix products go through lev_gemm. */
#ifndef LEV_MUON_MUON_OPS_H
#define LEV_MUON_MUON_OPS_H

#include <stdbool.h>

#include "common/device.h"
#include "common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Partial sums of squares: one f64 per block of this many elements. */
#define MUON_NORM_BLOCK 4096

/* momentum = fma(mu, momentum, g); partial[b] = sum of u^2 over block b, in f64 and in an order fixed per backend (cpu:
 * 16 interleaved sums added in order). */
typedef struct muon_momentum_args {
  const void *grad; /* [count] of grad_dtype */
  void *momentum;   /* [count] of A */
  double *partial;  /* [ceil(count / MUON_NORM_BLOCK)] */
  int64_t count;
  double grad_scale, mu;
  bool nesterov;
  lev_dtype grad_dtype;
} muon_momentum_args;

/* x = u / (norm_factor ||u|| + eps), u as above from the new momentum; the partial sums are added in a fixed order. */
typedef struct muon_normalize_args {
  const void *grad, *momentum;
  const double *partial;
  void *x; /* [count] of x_dtype */
  int64_t count;
  double grad_scale, mu, norm_factor, eps;
  bool nesterov;
  lev_dtype grad_dtype, x_dtype;
} muon_normalize_args;

/* Copy inside the device that is part of a product (preloading its accumulator). */
typedef struct muon_duplicate_args {
  const void *src;
  void *dst;
  size_t bytes;
} muon_duplicate_args;

/* master = fma(-decay, master, master); master = fma(-rate, x, master); param = round(master). */
typedef struct muon_update_args {
  const void *x; /* [count] of x_dtype */
  void *master;  /* [count] of A */
  void *param;   /* [count] of param_dtype */
  int64_t count;
  double decay, rate;
  lev_dtype x_dtype, param_dtype;
} muon_update_args;

/* master = param and momentum = 0 (to_master), or param = round(master). */
typedef struct muon_convert_args {
  void *param, *master, *momentum;
  int64_t count;
  bool to_master;
  lev_dtype param_dtype;
} muon_convert_args;

extern const lev_kernel muon_momentum_kernel;
extern const lev_kernel muon_normalize_kernel;
extern const lev_kernel muon_duplicate_kernel;
extern const lev_kernel muon_update_kernel;
extern const lev_kernel muon_convert_kernel;

#ifdef LEV_HAVE_CUDA
lev_status muon_momentum_cuda(const void *args, void *stream);
lev_status muon_normalize_cuda(const void *args, void *stream);
lev_status muon_duplicate_cuda(const void *args, void *stream);
lev_status muon_update_cuda(const void *args, void *stream);
lev_status muon_convert_cuda(const void *args, void *stream);
#endif

#ifdef __cplusplus
}
#endif

#endif
