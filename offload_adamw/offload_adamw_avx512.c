/* SPDX-License-Identifier: Apache-2.0 */
/* Update functions for AVX-512 (foundation instructions only). */
#include "offload_adamw/offload_adamw_ops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ISA(name) oadamw_avx512_##name
#define TARGET __attribute__((target("avx512f")))
#define INLINE __attribute__((target("avx512f"), always_inline)) static inline

#define F_VEC __m512
#define F_LANES 16
#define F_SET _mm512_set1_ps
#define F_LOAD _mm512_loadu_ps
#define F_STORE _mm512_storeu_ps
#define F_STREAM _mm512_stream_ps
#define F_MUL _mm512_mul_ps
#define F_DIV _mm512_div_ps
#define F_SQRT _mm512_sqrt_ps
#define F_FMA _mm512_fmadd_ps

#define D_VEC __m512d
#define D_LANES 8
#define D_SET _mm512_set1_pd
#define D_LOAD _mm512_loadu_pd
#define D_STORE _mm512_storeu_pd
#define D_STREAM _mm512_stream_pd
#define D_MUL _mm512_mul_pd
#define D_DIV _mm512_div_pd
#define D_SQRT _mm512_sqrt_pd
#define D_FMA _mm512_fmadd_pd

INLINE __m512 load_bf16(const lev_bf16 *at) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* As lev_bf16_from_f32: the processor's own conversion would flush denormals. */
INLINE __m256i round_bf16(__m512 value) {
  __m512i u = _mm512_castps_si512(value);
  __m512i high = _mm512_srli_epi32(u, 16);
  __m512i odd = _mm512_and_epi32(high, _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  __m512i quiet = _mm512_or_epi32(high, _mm512_set1_epi32(0x40));
  __m512i magnitude = _mm512_and_epi32(u, _mm512_set1_epi32(0x7fffffff));
  __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
}

#define F_LOAD_BF16 load_bf16
#define F_STORE_BF16(at, value) _mm256_storeu_si256((__m256i *)(void *)(at), round_bf16(value))
#define F_STREAM_BF16(at, value) _mm256_stream_si256((__m256i *)(void *)(at), round_bf16(value))

#include "offload_adamw/offload_adamw_simd.inc"
#else
typedef int oadamw_avx512_not_built;
#endif
