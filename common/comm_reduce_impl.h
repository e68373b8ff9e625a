/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over ranks on a GPU. Private to common/. */
#ifndef LEV_COMMON_COMM_REDUCE_IMPL_H
#define LEV_COMMON_COMM_REDUCE_IMPL_H

#include "common/device.h"
#include "common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LEV_REDUCE_RANKS 64

/* Every out[o][i] = the sum (or maximum) over r = 0, 1, ... of in[r][i], in this order, in the arithmetic type of
 * in_type, rounded once; accumulate adds what out held. out may be the inputs. NaN goes through a maximum. */
typedef struct lev_reduce_args {
  const void *in[LEV_REDUCE_RANKS]; /* [n_in] of [count] */
  void *out[LEV_REDUCE_RANKS];      /* [n_out] of [count] */
  int64_t count;
  int n_in, n_out;
  lev_dtype in_type, out_type; /* integers: equal */
  bool max, accumulate;        /* accumulate: with n_out = 1 and a sum of floats */
} lev_reduce_args;

extern const lev_kernel lev_reduce_kernel;
lev_status lev_reduce_cuda(const void *args, void *cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
