/* SPDX-License-Identifier: Apache-2.0 */
#include <cstring>

#include "common/cuda.cuh"
#include "common/device.h"
#include "tests/common/test_kernels.h"

namespace {

/* Waits `ms`, at most a second. */
__device__ void pause(int64_t ms) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (ms > 0 && now - start < (uint64_t)(ms < 1000 ? ms : 1000) * 1000000);
}

__global__ void step_kernel(step_args a) {
  pause(a.ms);
  a.log[(*a.at)++] = a.value;
}

__global__ void move_kernel(move_args a) {
  pause(a.ms);
  *a.to = *(const volatile int64_t *)a.from + a.add;
}

/* Gives up after two seconds, so that a failed test ends. */
__global__ void gate_kernel(const volatile int *gate) {
  for (int i = 0; i < 2000 && !*gate; ++i) pause(1);
}

struct big_args {
  unsigned char bytes[LEV_ARGS_MAX];
};
__global__ void big_kernel(big_args a) {
  unsigned char *out;
  std::memcpy(&out, a.bytes, sizeof out);
  for (int i = 0; i < LEV_ARGS_MAX; ++i) out[i] = a.bytes[i];
}

cudaStream_t on(void *stream) {
  return static_cast<cudaStream_t>(stream);
}

} // namespace

lev_status test_step_cuda(const void *args, void *stream) {
  step_kernel<<<1, 1, 0, on(stream)>>>(*static_cast<const step_args *>(args));
  return lev_cuda_launched("test.step");
}
lev_status test_move_cuda(const void *args, void *stream) {
  move_kernel<<<1, 1, 0, on(stream)>>>(*static_cast<const move_args *>(args));
  return lev_cuda_launched("test.move");
}
lev_status test_gate_cuda(const void *args, void *stream) {
  gate_kernel<<<1, 1, 0, on(stream)>>>(*static_cast<const volatile int *const *>(args));
  return lev_cuda_launched("test.gate");
}
lev_status test_big_cuda(const void *args, void *stream) {
  big_kernel<<<1, 1, 0, on(stream)>>>(*static_cast<const big_args *>(args));
  return lev_cuda_launched("test.big");
}
