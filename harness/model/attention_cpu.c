/* SPDX-License-Identifier: Apache-2.0 */
/* Blocked attention on one core: blocks of queries x keys, products through lev_gemm_host, online softmax between them.
 * The heads that share a key head are stacked into one matrix: row (t, h) of a block is query token t, head h. */
#include <string.h>

#include "common/dims.h"
#include "common/gemm.h"
#include "harness/model/attention_ops.h"

#define ATTN_LANES 16 /* partial sums per row; fixes the order of additions */

static int64_t attn_pad(int64_t n) {
  return lev_ceil_div(n, ATTN_LANES) * ATTN_LANES;
}
static int64_t attn_group(const attn_shape *s) {
  return s->heads / s->kv_heads;
}

/* Scratch of one block, in scalars of A: rows of queries (and, in backward, of d_o and dq), one or two matrices of
 * scores, two vectors of the rows, widened keys and values for bf16. */
int64_t attn_scratch_scalars(const attn_shape *s, bool backward) {
  int64_t rows = s->block_q * attn_group(s), count = 0;
  count += (backward ? 3 : 2) * attn_pad(rows * s->head_dim);
  count += (backward ? 2 : 1) * rows * attn_pad(s->block_k);
  count += 2 * attn_pad(rows);
  if (s->dtype == LEV_BF16) count += 2 * attn_pad(s->block_k * s->head_dim);
  return count;
}

/* One block of queries against one block of keys. Rows are local (row 0 = first token of the rank / chunk), pos are
 * positions in the sequence; both run over one piece only. */
typedef struct attn_block {
  int64_t head; /* key head */
  int64_t q_row, q_pos, q_count;
  int64_t k_row, k_pos, k_count;
} attn_block;

/* First key position that the query in local row `row`, at position `pos`, sees. */
static int64_t attn_first_key(const attn_step *s, int64_t row, int64_t pos) {
  int64_t first = s->window > 0 ? lev_max_i64(0, pos - s->window + 1) : 0;
  return s->doc_begin ? lev_max_i64(first, s->doc_begin[row]) : first;
}

/* Columns [begin, end) of the block that token t of it sees. */
typedef struct attn_cols {
  int64_t begin, end;
} attn_cols;
static attn_cols attn_seen(const attn_step *s, const attn_block *b, int64_t t) {
  int64_t pos = b->q_pos + t, first = attn_first_key(s, b->q_row + t, pos);
  attn_cols c = {lev_max_i64(0, first - b->k_pos), lev_min_i64(b->k_count, pos - b->k_pos + 1)};
  if (c.end < c.begin) c.end = c.begin = 0;
  return c;
}

/* Next block of queries in row order; false after the last. Start with *b = {0}. */
static bool attn_next_queries(const attn_step *s, attn_block *b) {
  int64_t row = b->q_row + b->q_count, base = 0;
  for (int i = 0; i < 2; ++i) {
    int64_t count = s->q_range[i].end - s->q_range[i].begin;
    if (row < base + count) {
      b->q_row = row, b->q_pos = s->q_range[i].begin + row - base;
      b->q_count = lev_min_i64(s->shape.block_q, s->q_range[i].end - b->q_pos);
      b->k_row = b->k_pos = b->k_count = 0;
      return true;
    }
    base += count;
  }
  return false;
}

/* Next block of keys that some query of the block sees, in row order; false after the last. Causality holds
 * because a piece's rows are in position order. */
static bool attn_next_keys(const attn_step *s, attn_block *b) {
  int64_t row = b->k_row + b->k_count, base = 0, first = attn_first_key(s, b->q_row, b->q_pos);
  for (int i = 0; i < 2; ++i) {
    attn_range r = s->k_range[i];
    int64_t begin = lev_max_i64(r.begin + lev_max_i64(0, row - base), first);
    int64_t end = lev_min_i64(r.end, b->q_pos + b->q_count);
    if (begin < end) {
      b->k_pos = begin, b->k_row = base + begin - r.begin;
      b->k_count = lev_min_i64(s->shape.block_k, end - begin);
      return true;
    }
    base += r.end - r.begin;
  }
  return false;
}

#define LEV_KERNELS "harness/model/attention_cpu.inc"
#include "common/for_each_dtype.h"

static void attn_forward_cpu(const void *args) {
  const attn_forward_step *a = args;
  LEV_PICK(a->step.shape.dtype, attn_forward)(a);
}
static void attn_backward_cpu(const void *args) {
  const attn_backward_step *a = args;
  LEV_PICK(a->step.shape.dtype, attn_backward)(a);
}
static void attn_pack_cpu(const void *args) {
  const attn_chunk_args *a = args;
  LEV_PICK(a->dtype, attn_pack)(a);
}
static void attn_unpack_cpu(const void *args) {
  const attn_chunk_args *a = args;
  LEV_PICK(a->dtype, attn_unpack)(a);
}

const lev_kernel attn_forward_kernel = {"attn.forward", attn_forward_cpu, LEV_CUDA(attn_forward_cuda)};
const lev_kernel attn_backward_kernel = {"attn.backward", attn_backward_cpu, LEV_CUDA(attn_backward_cuda)};
const lev_kernel attn_pack_kernel = {"attn.pack", attn_pack_cpu, LEV_CUDA(attn_pack_cuda)};
const lev_kernel attn_unpack_kernel = {"attn.unpack", attn_unpack_cpu, LEV_CUDA(attn_unpack_cuda)};
