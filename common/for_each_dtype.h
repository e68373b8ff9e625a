/* SPDX-License-Identifier: Apache-2.0 */
/* Instantiates a CPU kernel file once per floating storage type. Usage:
 *
 *     #define LEV_KERNELS "ring_dtp_cpu.inc"
 *     #include "common/for_each_dtype.h"
 *
 * Inside the file: T is the storage type, A the arithmetic type, LOAD(x) turns a T into an A, STORE(a) an A
 * into a T, FN(name) yields name_f64 / name_f32 / name_bf16, and LEV_T_F64 / LEV_T_F32 / LEV_T_BF16 is defined for the
 * current one. LEV_PICK(dtype, name) is the matching function pointer outside the file. No include guard: meant to be
 * included repeatedly. */
#ifndef LEV_KERNELS
#error "define LEV_KERNELS to the quoted file name first"
#endif
#include <math.h>

#include "common/dtype.h"

#undef LEV_PICK
#define LEV_PICK(dtype, name) ((dtype) == LEV_F64 ? name##_f64 : (dtype) == LEV_F32 ? name##_f32 : name##_bf16)

#define T double
#define A double
#define LOAD(x) (x)
#define STORE(a) (a)
#define FN(name) name##_f64
#define EXP(x) exp(x)
#define LOG(x) log(x)
#define SQRT(x) sqrt(x)
#define LEV_T_F64 1
#include LEV_KERNELS
#undef LEV_T_F64
#undef EXP
#undef LOG
#undef SQRT
#undef T
#undef A
#undef FN

#define T float
#define A float
#define FN(name) name##_f32
#define EXP(x) expf(x)
#define LOG(x) logf(x)
#define SQRT(x) sqrtf(x)
#define LEV_T_F32 1
#include LEV_KERNELS
#undef LEV_T_F32
#undef T
#undef LOAD
#undef STORE
#undef FN

#define T lev_bf16
#define LOAD(x) lev_bf16_to_f32(x)
#define STORE(a) lev_bf16_from_f32(a)
#define FN(name) name##_bf16
#define LEV_T_BF16 1
#include LEV_KERNELS
#undef LEV_T_BF16
#undef T
#undef A
#undef LOAD
#undef STORE
#undef FN
#undef EXP
#undef LOG
#undef SQRT
#undef LEV_KERNELS
