/* SPDX-License-Identifier: Apache-2.0 */
/* Private to gemm.c and its backends. */
#ifndef LEV_COMMON_GEMM_OPS_H
#define LEV_COMMON_GEMM_OPS_H

#include "common/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lev_gemm_launch {
  lev_gemm_args gemm;
  void *workspace;
  size_t workspace_bytes;
} lev_gemm_launch;

extern const lev_kernel lev_gemm_kernel; /* args: lev_gemm_launch */
/* For what gemm.c's one_launch says yes to, on cuda only; the arrays are read during the launch. */
typedef struct lev_gemm_grouped_launch {
  const lev_gemm_grouped_args *args;
} lev_gemm_grouped_launch;
extern const lev_kernel lev_gemm_grouped_kernel; /* args: lev_gemm_grouped_launch */
lev_status lev_gemm_grouped_cuda(const void *args, void *cuda_stream);

size_t lev_gemm_cpu_workspace(lev_dtype ab_type);
/* Makes sure that OpenBLAS has one working buffer at least: called where a cpu device is opened. LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_gemm_cpu_ready(void);
lev_status lev_gemm_cuda(const void *args, void *cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
