/* SPDX-License-Identifier: Apache-2.0 */
/* CPU kernels of harness/model/ops.h. */
#include "harness/model/ops.h"

#include <math.h>
#include <string.h>

size_t lev_ops_scratch_bytes(lev_backend backend) {
  return backend == LEV_BACKEND_CUDA ? (size_t)8 << 20 : 0;
}

#define LEV_KERNELS "harness/model/ops_cpu.inc"
#include "common/for_each_dtype.h"

static void rmsnorm_cpu(const void *args) {
  const lev_rmsnorm_args *a = args;
  LEV_PICK(a->dtype, rmsnorm)(a);
}
const lev_kernel lev_rmsnorm_kernel = {"model.rmsnorm", rmsnorm_cpu, LEV_CUDA(lev_rmsnorm_cuda)};

static void rmsnorm_backward_cpu(const void *args) {
  const lev_rmsnorm_backward_args *a = args;
  LEV_PICK(a->dtype, rmsnorm_backward)(a);
}
const lev_kernel lev_rmsnorm_backward_kernel = {"model.rmsnorm_backward", rmsnorm_backward_cpu,
                                                LEV_CUDA(lev_rmsnorm_backward_cuda)};

static void qk_cpu(const void *args) {
  const lev_qk_args *a = args;
  LEV_PICK(a->dtype, qk)(a);
}
const lev_kernel lev_qk_kernel = {"model.qk", qk_cpu, LEV_CUDA(lev_qk_cuda)};

static void qk_backward_cpu(const void *args) {
  const lev_qk_args *a = args;
  LEV_PICK(a->dtype, qk_backward)(a);
}
const lev_kernel lev_qk_backward_kernel = {"model.qk_backward", qk_backward_cpu, LEV_CUDA(lev_qk_backward_cuda)};

static void swiglu_cpu(const void *args) {
  const lev_swiglu_args *a = args;
  LEV_PICK(a->dtype, swiglu)(a);
}
const lev_kernel lev_swiglu_kernel = {"model.swiglu", swiglu_cpu, LEV_CUDA(lev_swiglu_cuda)};

static void swiglu_backward_cpu(const void *args) {
  const lev_swiglu_backward_args *a = args;
  LEV_PICK(a->dtype, swiglu_backward)(a);
}
const lev_kernel lev_swiglu_backward_kernel = {"model.swiglu_backward", swiglu_backward_cpu,
                                               LEV_CUDA(lev_swiglu_backward_cuda)};

static void router_cpu(const void *args) {
  const lev_router_args *a = args;
  if (a->dtype == LEV_F64)
    router_f64(a);
  else
    router_f32(a);
}
const lev_kernel lev_router_kernel = {"model.router", router_cpu, LEV_CUDA(lev_router_cuda)};

static void router_backward_cpu(const void *args) {
  const lev_router_backward_args *a = args;
  int64_t n = a->experts;
  if (a->dtype == LEV_F64) {
    for (int64_t t = 0; t < a->rows; ++t) router_backward_row_f64(a, t, (double *)a->dlogits + t * n);
  } else if (a->dtype == LEV_F32) {
    for (int64_t t = 0; t < a->rows; ++t) router_backward_row_f32(a, t, (float *)a->dlogits + t * n);
  } else {
    float row[LEV_EXPERTS_MAX];
    for (int64_t t = 0; t < a->rows; ++t) {
      router_backward_row_f32(a, t, row);
      for (int64_t e = 0; e < n; ++e) ((lev_bf16 *)a->dlogits)[t * n + e] = lev_bf16_from_f32(row[e]);
    }
  }
}
const lev_kernel lev_router_backward_kernel = {"model.router_backward", router_backward_cpu,
                                               LEV_CUDA(lev_router_backward_cuda)};

static void route_bias_cpu(const void *args) {
  const lev_route_bias_args *a = args;
  if (a->dtype == LEV_F64)
    route_bias_f64(a);
  else
    route_bias_f32(a);
}
const lev_kernel lev_route_bias_kernel = {"model.route_bias", route_bias_cpu, LEV_CUDA(lev_route_bias_cuda)};
