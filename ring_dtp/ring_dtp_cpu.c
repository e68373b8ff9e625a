/* SPDX-License-Identifier: Apache-2.0 */
/* CPU side of ring_dtp's kernels. */
#include <math.h>
#include <string.h>

#include "common/dims.h"
#include "ring_dtp/ring_dtp.h"
#include "ring_dtp/ring_dtp_ops.h"

#define RDTP_LANES 16
#define RDTP_BLOCK 256

/* e^x for x <= 0 (and small positive rounding), branch-free so that loops over it vectorise; error under 2 ulp. Results
 * below the smallest normal number are 0, NaN stays NaN. Range reduction and polynomial as in Cephes' expf. */
static inline float rdtp_expf(float x) {
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves round(t) in the low mantissa bits */
  float t = x * 1.44269504088896341f + magic;
  float n = t - magic;
  float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  memcpy(&bits, &t, sizeof bits);
  bits = (bits + 127u) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return x < -87.0f ? 0.0f : p * scale;
}

#define LEV_KERNELS "ring_dtp/ring_dtp_cpu.inc"
#include "common/for_each_dtype.h"

#define RDTP_KERNEL(op)                                                                                                \
  static void op##_cpu(const void *args) {                                                                             \
    const rdtp_##op##_args *p = args;                                                                                  \
    LEV_PICK(p->dtype, rdtp_##op)(p);                                                                                  \
  }                                                                                                                    \
  const lev_kernel rdtp_##op##_kernel = {.name = "rdtp." #op, .cpu = op##_cpu, .cuda = LEV_CUDA(rdtp_##op##_cuda)}

RDTP_KERNEL(fold);
RDTP_KERNEL(merge);
RDTP_KERNEL(combine);
RDTP_KERNEL(finish);
RDTP_KERNEL(residual);
RDTP_KERNEL(add);
RDTP_KERNEL(store);
