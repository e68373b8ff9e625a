/* SPDX-License-Identifier: Apache-2.0 */
#include "common/kernel.cuh"
#include "harness/bench/bench_impl.h"

namespace {

template <class T> __global__ void __launch_bounds__(256) random_kernel(const bench_random_args a) {
  T *to = (T *)a.to;
  for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < a.count; i += (int64_t)gridDim.x * 256)
    to[i] = lev_store<T>((lev_arith<T>)bench_random_value(a.tensor, (uint64_t)i, a.scale));
}

template <class T> void fill(const bench_random_args *a, cudaStream_t stream) {
  random_kernel<T><<<lev_grid(a->count, 256, 132 * 32), 256, 0, stream>>>(*a);
}

} // namespace

lev_status bench_random_cuda(const void *args, void *stream) {
  const bench_random_args *a = (const bench_random_args *)args;
  LEV_CUDA_PICK(a->dtype, fill)(a, (cudaStream_t)stream);
  return lev_cuda_launched("bench.random");
}
