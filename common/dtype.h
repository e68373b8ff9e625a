/* SPDX-License-Identifier: Apache-2.0 */
/* Storage types. bf16 is kept as its 16 bits and rounded to nearest, ties to even, denormals included: here in
 * integers, so that every SIMD path agrees, on the GPU by its own instruction, which agrees but for NaN (0x7fff there;
 * sign and payload are kept here). Arithmetic is f64 for LEV_F64 storage and f32 for LEV_F32 and LEV_BF16
 * (lev_dtype_arith). */
#ifndef LEV_COMMON_DTYPE_H
#define LEV_COMMON_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef uint16_t lev_bf16;

/* name, bytes, arithmetic type, safetensors word */
#define LEV_DTYPE_TABLE(X)                                                                                             \
  X(F64, 8, F64, "F64")                                                                                                \
  X(F32, 4, F32, "F32")                                                                                                \
  X(BF16, 2, F32, "BF16")                                                                                              \
  X(I32, 4, I32, "I32")                                                                                                \
  X(I64, 8, I64, "I64")                                                                                                \
  X(U8, 1, U8, "U8")

typedef enum lev_dtype {
#define LEV_DTYPE_ENUM(name, bytes, arith, word) LEV_##name,
  LEV_DTYPE_TABLE(LEV_DTYPE_ENUM)
#undef LEV_DTYPE_ENUM
      LEV_DTYPE_COUNT
} lev_dtype;

size_t lev_dtype_bytes(lev_dtype t);     /* bytes of one scalar; 0 outside the table */
lev_dtype lev_dtype_arith(lev_dtype t);  /* type of accumulators, softmax state, weight gradients */
const char *lev_dtype_name(lev_dtype t); /* "f64", "bf16", ... */
/* Finds a dtype by its lower-case name ("bf16") or safetensors word; LEV_DTYPE_COUNT if unknown. */
lev_dtype lev_dtype_find(const char *name);

static inline float lev_bf16_to_f32(lev_bf16 x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

/* Round to nearest even in integers; NaN stays NaN (quieted). */
static inline lev_bf16 lev_bf16_from_f32(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  uint32_t quiet = (u >> 16) | 0x40u;
  return (lev_bf16)((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* Reads / writes element i of an array of floating storage type t, through double. For tests, checkpoints and
 * host-side set-up; kernels use the typed templates of for_each_dtype.h. */
double lev_dtype_load(lev_dtype t, const void *array, int64_t i);
void lev_dtype_store(lev_dtype t, void *array, int64_t i, double value);
/* n elements from one floating type to another, each rounded once. Neither side need be aligned; they must not overlap.
 */
void lev_dtype_convert(lev_dtype to, void *out, lev_dtype from, const void *in, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
