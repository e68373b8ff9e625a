/* SPDX-License-Identifier: Apache-2.0 */
/* CPU side of the sharded embedding. */
#include <string.h>

#include "harness/model/embed_ops.h"

#define LEV_KERNELS "harness/model/embed_cpu.inc"
#include "common/for_each_dtype.h"

static void take_cpu(const void *args) {
  const embed_take_args *p = args;
  LEV_PICK(p->dtype, embed_take)(p);
}
static void add_cpu(const void *args) {
  const embed_add_args *p = args;
  LEV_PICK(p->dtype, embed_add)(p);
}

const lev_kernel embed_take_kernel = {.name = "embed.take", .cpu = take_cpu, .cuda = LEV_CUDA(embed_take_cuda)};
const lev_kernel embed_add_kernel = {.name = "embed.add", .cpu = add_cpu, .cuda = LEV_CUDA(embed_add_cuda)};
