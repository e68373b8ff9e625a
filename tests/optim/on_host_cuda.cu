/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cuda.cuh"
#include "tests/optim/on_host.h"

lev_status test_on_host(void (*fn)(const void *args), const void *args, void *stream) {
  LEV_CUDA_TRY(cudaStreamSynchronize((cudaStream_t)stream));
  fn(args);
  return LEV_OK;
}
