/* SPDX-License-Identifier: Apache-2.0 */
/* CPU side: choice of the instruction set, the kernel tables, init / publish and the norm. */
#include "offload_adamw/offload_adamw_ops.h"

#include <math.h>

/* ---- instruction sets ---- */

const char *oadamw_simd_name(oadamw_simd simd) {
  static const char *const names[OADAMW_SIMDS] = {"auto", "scalar", "avx2", "avx512"};
  return (int)simd >= 0 && simd < OADAMW_SIMDS ? names[simd] : "unknown";
}

bool oadamw_simd_supported(oadamw_simd simd) {
  switch (simd) {
  case OADAMW_SIMD_AUTO:
  case OADAMW_SIMD_SCALAR:
    return true;
#if defined(__x86_64__)
  case OADAMW_SIMD_AVX2:
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  case OADAMW_SIMD_AVX512:
    return __builtin_cpu_supports("avx512f");
#else
  case OADAMW_SIMD_AVX2:
  case OADAMW_SIMD_AVX512:
#endif
  case OADAMW_SIMDS:
  default:
    return false;
  }
}

/* ---- update ---- */

static void update(const void *args) {
  const oadamw_update_args *u = args;
  oadamw_pair pair = oadamw_pair_of(u->param_dtype, u->grad_dtype);
  const oadamw_update_fn *table = oadamw_scalar_table;
#if defined(__x86_64__)
  if (u->simd == OADAMW_SIMD_AVX2) table = oadamw_avx2_table;
  if (u->simd == OADAMW_SIMD_AVX512) table = oadamw_avx512_table;
#endif
  table[pair](u);
}

const lev_kernel oadamw_kernel_update = {.name = "oadamw.update", .cpu = update, .cuda = LEV_CUDA(oadamw_update_cuda)};
const lev_kernel oadamw_kernel_host_update = {
    .name = "oadamw.host_update", .cpu = update, .cuda = LEV_CUDA(oadamw_host_update_cuda)};

/* ---- init, publish, norm: once per storage type ---- */

#define LEV_KERNELS "offload_adamw/offload_adamw_cpu.inc"
#include "common/for_each_dtype.h"

static void init(const void *args) {
  const oadamw_convert_args *c = args;
  LEV_PICK(c->param_dtype, init)(c);
}
static void publish(const void *args) {
  const oadamw_convert_args *c = args;
  LEV_PICK(c->param_dtype, publish)(c);
}
static void norm_blocks(const void *args) {
  const oadamw_norm_args *n = args;
  for (int64_t begin = 0, block = 0; begin < n->count; begin += OADAMW_NORM_BLOCK, ++block) {
    int64_t size = lev_min_i64(OADAMW_NORM_BLOCK, n->count - begin);
    LEV_PICK(n->dtype, norm_block)(n->grads, begin, size, n->scratch + 2 * block);
  }
}

/* Pairwise over blocks: step 1 adds block 2i+1 to block 2i, step 2 block 4i+2 to 4i, and so on. */
static void norm_tree(const void *args) {
  const oadamw_norm_args *n = args;
  int64_t blocks = lev_ceil_div(n->count, OADAMW_NORM_BLOCK);
  for (int64_t step = 1; step < blocks; step *= 2) {
    for (int64_t i = 0; i + step < blocks; i += 2 * step) {
      n->scratch[2 * i] += n->scratch[2 * (i + step)];
      n->scratch[2 * i + 1] += n->scratch[2 * (i + step) + 1];
    }
  }
  if (blocks > 0) n->out2[0] += n->scratch[0], n->out2[1] += n->scratch[1];
}

const lev_kernel oadamw_kernel_init = {.name = "oadamw.init", .cpu = init, .cuda = LEV_CUDA(oadamw_init_cuda)};
const lev_kernel oadamw_kernel_publish = {
    .name = "oadamw.publish", .cpu = publish, .cuda = LEV_CUDA(oadamw_publish_cuda)};
const lev_kernel oadamw_kernel_norm_blocks = {
    .name = "oadamw.norm_blocks", .cpu = norm_blocks, .cuda = LEV_CUDA(oadamw_norm_blocks_cuda)};
const lev_kernel oadamw_kernel_norm_tree = {
    .name = "oadamw.norm_tree", .cpu = norm_tree, .cuda = LEV_CUDA(oadamw_norm_tree_cuda)};
