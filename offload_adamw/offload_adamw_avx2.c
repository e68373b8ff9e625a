/* SPDX-License-Identifier: Apache-2.0 */
/* Update functions for AVX2 with FMA. */
#include "offload_adamw/offload_adamw_ops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ISA(name) oadamw_avx2_##name
#define TARGET __attribute__((target("avx2,fma")))
#define INLINE __attribute__((target("avx2,fma"), always_inline)) static inline

#define F_VEC __m256
#define F_LANES 8
#define F_SET _mm256_set1_ps
#define F_LOAD _mm256_loadu_ps
#define F_STORE _mm256_storeu_ps
#define F_STREAM _mm256_stream_ps
#define F_MUL _mm256_mul_ps
#define F_DIV _mm256_div_ps
#define F_SQRT _mm256_sqrt_ps
#define F_FMA _mm256_fmadd_ps

#define D_VEC __m256d
#define D_LANES 4
#define D_SET _mm256_set1_pd
#define D_LOAD _mm256_loadu_pd
#define D_STORE _mm256_storeu_pd
#define D_STREAM _mm256_stream_pd
#define D_MUL _mm256_mul_pd
#define D_DIV _mm256_div_pd
#define D_SQRT _mm256_sqrt_pd
#define D_FMA _mm256_fmadd_pd

INLINE __m256 load_bf16(const lev_bf16 *at) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* As lev_bf16_from_f32. */
INLINE __m128i round_bf16(__m256 value) {
  __m256i u = _mm256_castps_si256(value);
  __m256i high = _mm256_srli_epi32(u, 16);
  __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  __m256i magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xD8);
  return _mm256_castsi256_si128(packed);
}

#define F_LOAD_BF16 load_bf16
#define F_STORE_BF16(at, value) _mm_storeu_si128((__m128i *)(void *)(at), round_bf16(value))
#define F_STREAM_BF16(at, value) _mm_stream_si128((__m128i *)(void *)(at), round_bf16(value))

#include "offload_adamw/offload_adamw_simd.inc"
#else
typedef int oadamw_avx2_not_built;
#endif
