/* SPDX-License-Identifier: Apache-2.0 */
/* For every .cu file: CUDA errors as lev_status. */
#ifndef LEV_COMMON_CUDA_CUH
#define LEV_COMMON_CUDA_CUH

#include <cuda_runtime.h>

#include "common/status.h"

/* Records "what: CUDA's text" and clears the error where CUDA allows it. The expression's value is the status. */
#define lev_cuda_fail(error, what)                                                                                     \
  ((void)cudaGetLastError(), lev_fail_at(LEV_ERR_DEVICE, __FILE__, __LINE__, "%s: %s (%s)", (what),                    \
                                         cudaGetErrorString(error), cudaGetErrorName(error)))

/* Returns LEV_ERR_DEVICE from the enclosing function unless `call` yields cudaSuccess. */
#define LEV_CUDA_TRY(call)                                                                                             \
  do {                                                                                                                 \
    cudaError_t lev_cuda_error_ = (call);                                                                              \
    if (lev_cuda_error_ != cudaSuccess) return lev_cuda_fail(lev_cuda_error_, #call);                                  \
  } while (0)

/* After kernel<<<...>>>: the status of the launch. */
#define lev_cuda_launched(what) lev_cuda_launched_at((what), __FILE__, __LINE__)
static inline lev_status lev_cuda_launched_at(const char *what, const char *file, int line) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return LEV_OK;
  return lev_fail_at(LEV_ERR_DEVICE, file, line, "%s: %s (%s)", what, cudaGetErrorString(error),
                     cudaGetErrorName(error));
}

/* Lets a kernel have as much dynamic shared memory as a block of this GPU can, never what one launch needs: the setting
 * is the kernel's, and ranks are threads, so that another launch may come between a setting and the launch it was for.
 */
template <class Kernel> lev_status lev_allow_shared(Kernel *kernel) {
  int device, most;
  cudaFuncAttributes own;
  LEV_CUDA_TRY(cudaGetDevice(&device));
  LEV_CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  LEV_CUDA_TRY(cudaFuncGetAttributes(&own, kernel));
  LEV_CUDA_TRY(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - (int)own.sharedSizeBytes));
  return LEV_OK;
}

#endif
