/* SPDX-License-Identifier: Apache-2.0 */
/* First values of weights on the GPU; init_ops.h says why some elements are left to the host. */
#include "common/kernel.cuh"
#include "common/rng.h"
#include "harness/model/init_ops.h"

namespace {

constexpr int kThreads = 256;
constexpr double kTail = 3.0;            /* numbers beyond are drawn again, as in lev_param_init */
constexpr uint32_t kFirstDraw = 0x1417u; /* lev_rng_key.step of the first draw */

__device__ void round_to(double x, double *out) {
  *out = x;
}
__device__ void round_to(double x, float *out) {
  *out = (float)x;
}
/* One rounding: the step through f32 rounds to odd (lev_dtype_store does the same). */
__device__ void round_to(double x, lev_bf16 *out) {
  float near = __double2float_rz(x);
  uint32_t bits = __float_as_uint(near);
  if ((double)near != x) bits |= 1u;
  *out = lev_store<lev_bf16>(__uint_as_float(bits));
}

__device__ bool same_bits(float a, float b) {
  return __float_as_uint(a) == __float_as_uint(b);
}
__device__ bool same_bits(lev_bf16 a, lev_bf16 b) {
  return a == b;
}

/* The value of one element; false if the host may round it differently. */
template <class T> __device__ bool draw(const lev_init_args &a, uint64_t element, T *out) {
  lev_rng_key key = {a.seed, kFirstDraw, a.tensor};
  double x = lev_rng_normal(key, element);
  bool sure = fabs(fabs(x) - kTail) > kTail * a.margin;
  while (sure && fabs(x) > kTail) {
    ++key.step;
    x = lev_rng_normal(key, element);
    sure = fabs(fabs(x) - kTail) > kTail * a.margin;
  }
  T low, high;
  round_to(a.std * x * (1 - a.margin), &low);
  round_to(a.std * x * (1 + a.margin), &high);
  round_to(a.std * x, out);
  return sure && same_bits(low, high);
}

template <class T> __global__ void __launch_bounds__(kThreads) init_kernel(lev_init_args a) {
  T *out = (T *)a.out, one;
  round_to(1.0, &one);
  int64_t step = (int64_t)gridDim.x * kThreads;
  for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < a.n; i += step) {
    if (a.constant) {
      out[i] = one;
      continue;
    }
    T value;
    if (!draw(a, (uint64_t)(a.first + i), &value)) {
      /* the order of the list is of no matter: every entry is patched by its place */
      int64_t at = (int64_t)atomicAdd((unsigned long long *)a.list, 1ull);
      if (at < a.cap) a.list[1 + at] = a.place + i;
    }
    out[i] = value;
  }
}

template <class T> __global__ void patch_kernel(lev_init_patch_args a) {
  int i = (int)threadIdx.x;
  if (i < a.n) round_to(a.value[i], (T *)a.out + a.place[i]);
}

} // namespace

lev_status lev_init_cuda(const void *args, void *cuda_stream) {
  const lev_init_args *a = static_cast<const lev_init_args *>(args);
  cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
  if (a->dtype != LEV_F32 && a->dtype != LEV_BF16)
    return lev_fail(LEV_ERR_UNSUPPORTED, "model.init of %s on a GPU; f32 and bf16 are possible",
                    lev_dtype_name(a->dtype));
  if (a->n == 0) return LEV_OK;
  unsigned grid = lev_grid(a->n, kThreads, 132 * 16);
  if (a->dtype == LEV_F32)
    init_kernel<float><<<grid, kThreads, 0, stream>>>(*a);
  else
    init_kernel<lev_bf16><<<grid, kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("model.init");
}

lev_status lev_init_patch_cuda(const void *args, void *cuda_stream) {
  const lev_init_patch_args *a = static_cast<const lev_init_patch_args *>(args);
  cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
  if (a->dtype == LEV_F64)
    patch_kernel<double><<<1, 32, 0, stream>>>(*a);
  else if (a->dtype == LEV_F32)
    patch_kernel<float><<<1, 32, 0, stream>>>(*a);
  else
    patch_kernel<lev_bf16><<<1, 32, 0, stream>>>(*a);
  return lev_cuda_launched("model.init_patch");
}
