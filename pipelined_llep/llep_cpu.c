/* SPDX-License-Identifier: Apache-2.0 */
/* CPU side of the operations in llep_ops.h. */
#include <string.h>

#include "common/dims.h"
#include "pipelined_llep/llep_ops.h"

#define LEV_KERNELS "pipelined_llep/llep_cpu.inc"
#include "common/for_each_dtype.h"

static void count_cpu(const void *args) {
  const llep_count_args *a = args;
  llep_count(a->ids, a->routes, a->experts, a->counts);
}

static void lend_cpu(const void *args) {
  const llep_lend_args *a = args;
  llep_lend(&a->rules, a->counts, a->rank, a->table, a->scratch);
}

static void assign_cpu(const void *args) {
  const llep_assign_args *a = args;
  llep_table t = llep_table_at(&a->rules, a->table);
  llep_assign(&a->rules, a->ids, a->tokens, a->top_k, a->blocks, &t, a->seen, a->routes, a->histogram);
  if (!a->own) return;
  for (int64_t d = 0; d < a->rules.ranks; ++d) {
    int64_t *own = a->own + d * a->blocks, end = llep_column_begin(&a->rules, d + 1);
    memset(own, 0, sizeof *own * (size_t)a->blocks);
    for (int64_t c = llep_column_begin(&a->rules, d); c < end; ++c)
      for (int64_t b = 0; b < a->blocks; ++b) own[b] += a->histogram[c * a->blocks + b];
    memcpy(a->total + d * a->blocks, own, sizeof *own * (size_t)a->blocks);
  }
}

static void number_cpu(const void *args) {
  const llep_number_args *a = args;
  llep_number(&a->rules, a->tokens, a->top_k, a->blocks, a->first, a->last, a->histogram, a->next, a->routes);
}

/* Writes one row k times: the source row stays in cache. */
static void gather_rows(const llep_gather_args *a, const void *src, void *send, size_t row_bytes) {
  for (int64_t t0 = 0; t0 < a->tokens; t0 += a->blocks) {
    int64_t end = lev_min_i64(t0 + a->last, a->tokens);
    for (int64_t t = t0 + a->first; t < end; ++t)
      for (int64_t j = 0; j < a->top_k; ++j)
        memcpy((unsigned char *)send + (size_t)a->routes[t * a->top_k + j] * row_bytes,
               (const unsigned char *)src + (size_t)t * row_bytes, row_bytes);
  }
}

static void gather_cpu(const void *args) {
  const llep_gather_args *a = args;
  size_t row_bytes = (size_t)a->hidden * lev_dtype_bytes(a->dtype);
  gather_rows(a, a->x, a->send_x, row_bytes);
  if (a->dy) gather_rows(a, a->dy, a->send_dy, row_bytes);
  if (!a->probs) return;
  size_t scalar = lev_dtype_bytes(lev_dtype_arith(a->dtype));
  for (int64_t t0 = 0; t0 < a->tokens; t0 += a->blocks) {
    int64_t end = lev_min_i64(t0 + a->last, a->tokens);
    for (int64_t q = (t0 + a->first) * a->top_k; q < end * a->top_k; ++q)
      memcpy((unsigned char *)a->send_probs + (size_t)a->routes[q] * scalar,
             (const unsigned char *)a->probs + (size_t)q * scalar, scalar);
  }
}

static void pack_cpu(const void *args) {
  const llep_pack_args *a = args;
  for (int i = 0; i < a->n_parts; ++i) {
    size_t row_bytes = a->part[i].row_bytes;
    unsigned char *tile = a->part[i].tile;
    for (int r = 0; r < a->n_runs; ++r) {
      unsigned char *run = (unsigned char *)a->part[i].rows + (size_t)a->start[r] * row_bytes;
      size_t bytes = (size_t)a->count[r] * row_bytes;
      memcpy(a->unpack ? run : tile, a->unpack ? tile : run, bytes);
      tile += bytes;
    }
  }
}

static void act_cpu(const void *args) {
  const llep_act_args *a = args;
  LEV_PICK(a->dtype, act)(a);
}

static void act_backward_cpu(const void *args) {
  const llep_act_backward_args *a = args;
  LEV_PICK(a->dtype, act_backward)(a);
}

static void combine_cpu(const void *args) {
  const llep_combine_args *a = args;
  LEV_PICK(a->dtype, combine)(a);
}

static void add_cpu(const void *args) {
  const llep_add_args *a = args;
  LEV_PICK(a->arith, add)(a);
}

const lev_kernel llep_count_kernel = {"llep.count", count_cpu, LEV_CUDA(llep_count_cuda)};
const lev_kernel llep_lend_kernel = {"llep.lend", lend_cpu, LEV_CUDA(llep_lend_cuda)};
const lev_kernel llep_assign_kernel = {"llep.assign", assign_cpu, LEV_CUDA(llep_assign_cuda)};
const lev_kernel llep_number_kernel = {"llep.number", number_cpu, LEV_CUDA(llep_number_cuda)};
const lev_kernel llep_gather_kernel = {"llep.gather", gather_cpu, LEV_CUDA(llep_gather_cuda)};
const lev_kernel llep_pack_kernel = {"llep.pack", pack_cpu, LEV_CUDA(llep_pack_cuda)};
const lev_kernel llep_act_kernel = {"llep.act", act_cpu, LEV_CUDA(llep_act_cuda)};
const lev_kernel llep_act_backward_kernel = {"llep.act_backward", act_backward_cpu, LEV_CUDA(llep_act_backward_cuda)};
const lev_kernel llep_combine_kernel = {"llep.combine", combine_cpu, LEV_CUDA(llep_combine_cuda)};
const lev_kernel llep_add_kernel = {"llep.add", add_cpu, LEV_CUDA(llep_add_cuda)};
