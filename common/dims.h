/* SPDX-License-Identifier: Apache-2.0 */
/* Symbol glossary and checked size arithmetic.
 *
 *   W   ranks (world)                    D   context (sequence) group size
 *   Ep  expert group size                P   vocabulary group size
 *   S   sequence length (tokens)         N   tokens of one rank
 *   H   hidden size                      I   expert (or FFN) intermediate size
 *   E   routed experts                   k   experts per token (top_k)
 *   V   vocabulary rows                  L   layers
 *   A   query heads                      G   key/value heads       d  head size
 *   K   chunks of one dispatch           c   token cap of one chunk
 *   b   bytes of one stored scalar       beta  optimizer bucket, in elements
 *
 * Counts, dims and indices are int64_t, bytes are size_t. Byte products saturate at SIZE_MAX, so that a
 * walker can add up sizes without a check at every step and refuse a saturated total once. */
#ifndef LEV_COMMON_DIMS_H
#define LEV_COMMON_DIMS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Functions that kernels call too. */
#if defined(__CUDACC__)
#define LEV_HD __host__ __device__
#else
#define LEV_HD
#endif

/* Every region starts on this alignment (bytes), on every backend and memory class. */
#define LEV_ALIGN ((size_t)256)

LEV_HD static inline int64_t lev_min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
LEV_HD static inline int64_t lev_max_i64(int64_t a, int64_t b) {
  return a > b ? a : b;
}
static inline size_t lev_max_size(size_t a, size_t b) {
  return a > b ? a : b;
}

/* ceil(a / b) for a >= 0, b > 0 (which the analyzer loses over a subtraction). */
LEV_HD static inline int64_t lev_ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0); /* NOLINT(clang-analyzer-core.DivideZero) */
}

/* a * b and a + b, saturating at SIZE_MAX. */
static inline size_t lev_sat_mul(size_t a, size_t b) {
  size_t out;
  return __builtin_mul_overflow(a, b, &out) ? SIZE_MAX : out;
}
static inline size_t lev_sat_add(size_t a, size_t b) {
  size_t out;
  return __builtin_add_overflow(a, b, &out) ? SIZE_MAX : out;
}

/* Bytes of rows x cols scalars of `elem` bytes; a negative count saturates too. */
static inline size_t lev_bytes(int64_t rows, int64_t cols, size_t elem) {
  if (rows < 0 || cols < 0) return SIZE_MAX;
  return lev_sat_mul(lev_sat_mul((size_t)rows, (size_t)cols), elem);
}

/* Rounds up to a multiple of LEV_ALIGN; saturates. */
static inline size_t lev_align_up(size_t bytes) {
  return bytes > SIZE_MAX - LEV_ALIGN ? SIZE_MAX : (bytes + LEV_ALIGN - 1) / LEV_ALIGN * LEV_ALIGN;
}

/* First index of part i when n items are dealt to `parts` as evenly as possible (the first n % parts
 * get one more). Part i holds [lev_part_begin(n,parts,i), lev_part_begin(n,parts,i+1)). */
LEV_HD static inline int64_t lev_part_begin(int64_t n, int64_t parts, int64_t i) {
  return n / parts * i + lev_min_i64(i, n % parts);
}
LEV_HD static inline int64_t lev_part_size(int64_t n, int64_t parts, int64_t i) {
  return n / parts + (i < n % parts);
}

/* The part that owns item j in the split above. */
LEV_HD static inline int64_t lev_part_of(int64_t n, int64_t parts, int64_t j) {
  int64_t q = n / parts, r = n % parts, wide = r * (q + 1);
  return j < wide ? j / (q + 1) : r + (j - wide) / q;
}

#ifdef __cplusplus
}
#endif
#endif
