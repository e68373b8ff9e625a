/* SPDX-License-Identifier: Apache-2.0 */
/* What initcheck makes of threads that each allocate, fill all of it, wait, read, and free. Nothing is read before it
 * is written, so that a right tool reports nothing; on a busy GPU it reports reads of memory never written, or crashes
 * the program. Tells a report of `make sanitize-cuda` that is the tool's from one that is ours. Not part of the build:
 *
 *   nvcc -arch=sm_90 -o initcheck_threads tests/initcheck_threads.cu
 *   for i in 1 2 3 4; do compute-sanitizer --tool initcheck ./initcheck_threads & done; wait
 */
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

enum { THREADS = 4, ROUNDS = 1500 };

#define MUST(call)                                                                                                     \
  do {                                                                                                                 \
    cudaError_t error = (call);                                                                                        \
    if (error != cudaSuccess) {                                                                                        \
      printf("%s: %s\n", #call, cudaGetErrorString(error));                                                            \
      exit(2);                                                                                                         \
    }                                                                                                                  \
  } while (0)

__global__ void read_all(const unsigned char *at, size_t bytes, unsigned long long *out) {
  unsigned long long sum = 0;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += gridDim.x * blockDim.x) sum += at[i];
  if (sum == 1) *out = sum; /* never: all bytes are 255; keeps the reads alive */
}

void rounds(unsigned seed, unsigned long long *out) {
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int i = 0; i < ROUNDS; ++i) {
    unsigned char *small, *large;
    size_t bytes = 1024 + rand_r(&seed) % 200000, large_bytes = 32 << 20;
    MUST(cudaMalloc(&large, large_bytes));
    MUST(cudaMalloc(&small, bytes));
    MUST(cudaMemsetAsync(small, 0xFF, bytes, stream));
    MUST(cudaMemsetAsync(large, 0xFF, large_bytes, stream));
    MUST(cudaStreamSynchronize(stream));
    read_all<<<4, 128, 0, stream>>>(small, bytes, out);
    read_all<<<4, 128, 0, stream>>>(large, 300000, out);
    MUST(cudaMemsetAsync(small, 0xFF, bytes, stream));
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaFree(small));
    MUST(cudaFree(large));
  }
  MUST(cudaStreamDestroy(stream));
}

} // namespace

int main() {
  unsigned long long *out;
  MUST(cudaMalloc(&out, sizeof *out));
  std::vector<std::thread> threads;
  for (int t = 0; t < THREADS; ++t) threads.emplace_back(rounds, t + 1, out);
  for (std::thread &t : threads) t.join();
  printf("%d rounds in each of %d threads\n", ROUNDS, THREADS);
}
