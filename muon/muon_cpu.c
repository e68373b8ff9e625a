/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "muon/muon_ops.h"

#define LANES 16
#define PIECE 512

/* Pieces of A to and from arrays of the compute type: f64 goes with f64 only, f32 and bf16 with f32. */
static void put_f64(lev_dtype type, void *array, int64_t at, const double *piece, int64_t n) {
  (void)type;
  /* cppcheck-suppress uninitvar ; the first n are set */
  memcpy((double *)array + at, piece, (size_t)n * sizeof *piece);
}
static void get_f64(lev_dtype type, const void *array, int64_t at, double *piece, int64_t n) {
  (void)type;
  memcpy(piece, (const double *)array + at, (size_t)n * sizeof *piece);
}
static void put_f32(lev_dtype type, void *array, int64_t at, const float *piece, int64_t n) {
  if (type == LEV_F32) {
    /* cppcheck-suppress uninitvar ; the first n are set */
    memcpy((float *)array + at, piece, (size_t)n * sizeof *piece);
    return;
  }
  lev_bf16 *out = (lev_bf16 *)array + at;
  for (int64_t i = 0; i < n; ++i) out[i] = lev_bf16_from_f32(piece[i]);
}
static void get_f32(lev_dtype type, const void *array, int64_t at, float *piece, int64_t n) {
  if (type == LEV_F32) {
    memcpy(piece, (const float *)array + at, (size_t)n * sizeof *piece);
    return;
  }
  const lev_bf16 *in = (const lev_bf16 *)array + at;
  for (int64_t i = 0; i < n; ++i) piece[i] = lev_bf16_to_f32(in[i]);
}
#define put_bf16 put_f32
#define get_bf16 get_f32

#define LEV_KERNELS "muon/muon_cpu.inc"
#include "common/for_each_dtype.h"

static void momentum(const void *args) {
  const muon_momentum_args *k = args;
  LEV_PICK(k->grad_dtype, momentum)(k);
}
static void normalize(const void *args) {
  const muon_normalize_args *k = args;
  LEV_PICK(k->grad_dtype, normalize)(k);
}
static void duplicate(const void *args) {
  const muon_duplicate_args *k = args;
  memcpy(k->dst, k->src, k->bytes);
}
static void update(const void *args) {
  const muon_update_args *k = args;
  LEV_PICK(k->param_dtype, update)(k);
}
static void convert(const void *args) {
  const muon_convert_args *k = args;
  LEV_PICK(k->param_dtype, convert)(k);
}

const lev_kernel muon_momentum_kernel = {"muon.momentum", momentum, LEV_CUDA(muon_momentum_cuda)};
const lev_kernel muon_normalize_kernel = {"muon.normalize", normalize, LEV_CUDA(muon_normalize_cuda)};
const lev_kernel muon_duplicate_kernel = {"muon.duplicate", duplicate, LEV_CUDA(muon_duplicate_cuda)};
const lev_kernel muon_update_kernel = {"muon.update", update, LEV_CUDA(muon_update_cuda)};
const lev_kernel muon_convert_kernel = {"muon.convert", convert, LEV_CUDA(muon_convert_cuda)};
