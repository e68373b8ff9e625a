/* SPDX-License-Identifier: Apache-2.0 */
/* Counter-based random numbers (Philox4x32-10, Salmon et al., SC'11): the value depends only on (seed, step, tensor,
 * element), never on launch shape, rank count or call order. Header-only so that host and device share it. */
#ifndef LEV_COMMON_RNG_H
#define LEV_COMMON_RNG_H

#include <math.h>
#include <stdint.h>

#include "common/dims.h" /* LEV_HD */

typedef struct lev_rng_key {
  uint64_t seed;   /* run seed */
  uint32_t step;   /* training step, or another purpose number */
  uint32_t tensor; /* tensor or stream number */
} lev_rng_key;

/* 128 random bits for one element. */
LEV_HD static inline void lev_rng_block(lev_rng_key key, uint64_t element, uint32_t out[4]) {
  uint32_t c0 = (uint32_t)element, c1 = (uint32_t)(element >> 32), c2 = key.step, c3 = key.tensor;
  uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1, c3 = (uint32_t)p0, c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

LEV_HD static inline uint64_t lev_rng_u64(lev_rng_key key, uint64_t element) {
  uint32_t r[4];
  lev_rng_block(key, element, r);
  return (uint64_t)r[1] << 32 | r[0];
}

/* Uniform in [0, 1), 53 bits. */
LEV_HD static inline double lev_rng_uniform(lev_rng_key key, uint64_t element) {
  return (double)(lev_rng_u64(key, element) >> 11) * 0x1p-53;
}

/* Standard normal (Box-Muller; one value per element). */
LEV_HD static inline double lev_rng_normal(lev_rng_key key, uint64_t element) {
  uint32_t r[4];
  lev_rng_block(key, element, r);
  double u = ((double)((uint64_t)r[1] << 21 ^ r[0] >> 11) + 0.5) * 0x1p-53;
  double v = (double)((uint64_t)r[3] << 21 ^ r[2] >> 11) * 0x1p-53;
  return sqrt(-2.0 * log(u)) * cos(6.283185307179586476925 * v);
}

#endif
