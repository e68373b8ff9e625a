/* SPDX-License-Identifier: Apache-2.0 */
/* What blocks of threads share in attention: which queries and keys a block works on, and what a query sees. */
#ifndef LEV_MODEL_ATTENTION_WALK_CUH
#define LEV_MODEL_ATTENTION_WALK_CUH

#include "common/kernel.cuh"
#include "harness/model/attention_ops.h"

/* Tokens in consecutive rows at consecutive positions. */
struct attn_span {
  int64_t row, pos;
  int count;
};

__host__ __device__ __forceinline__ int64_t attn_length(const attn_range &r) {
  return r.end - r.begin;
}

/* Blocks of `size` tokens over the two pieces of a rank; a block lies in one piece. */
__host__ __device__ __forceinline__ int64_t attn_blocks(const attn_range range[2], int size) {
  return lev_ceil_div(attn_length(range[0]), size) + lev_ceil_div(attn_length(range[1]), size);
}
__device__ __forceinline__ attn_span attn_block_at(const attn_range range[2], int size, int64_t block) {
  int64_t base = attn_length(range[0]), first = lev_ceil_div(base, size);
  int64_t at = (block < first ? block : block - first) * size;
  attn_range r = range[block < first ? 0 : 1];
  return {(block < first ? 0 : base) + at, r.begin + at, (int)lev_min_i64(size, attn_length(r) - at)};
}

/* First key position that the query in local row `row`, at position `pos`, sees. It never falls along the sequence. */
__device__ __forceinline__ int64_t attn_first_key(const attn_step &s, int64_t row, int64_t pos) {
  int64_t first = s.window > 0 ? lev_max_i64(0, pos - s.window + 1) : 0;
  return s.doc_begin ? lev_max_i64(first, s.doc_begin[row]) : first;
}

/* Goes through tokens of the two pieces whose positions lie in [from, to), `size` at most at a time. */
struct attn_walk {
  int64_t from, to, at;
  int piece;
  __device__ __forceinline__ attn_walk(int64_t from, int64_t to) : from(from), to(to), at(0), piece(0) {}
  __device__ __forceinline__ bool next(const attn_range range[2], int size, attn_span *out) {
    for (; piece < 2; ++piece, at = 0) {
      attn_range r = range[piece];
      int64_t begin = lev_max_i64(lev_max_i64(r.begin, from), at), end = lev_min_i64(r.end, to);
      if (begin >= end) continue;
      out->row = (piece == 0 ? 0 : attn_length(range[0])) + begin - r.begin;
      out->pos = begin, out->count = (int)lev_min_i64(size, end - begin);
      at = begin + out->count;
      return true;
    }
    return false;
  }
};

/* Columns [begin, end) of a block of keys that a query sees. */
struct attn_columns {
  int begin, end;
};
__device__ __forceinline__ attn_columns attn_seen(const attn_span &k, int64_t pos, int64_t first) {
  attn_columns c = {(int)lev_min_i64(k.count, lev_max_i64(0, first - k.pos)),
                    (int)lev_max_i64(0, lev_min_i64(k.count, pos - k.pos + 1))};
  return c;
}

/* Tensor cores, bf16 and head size 64 or 128 (attention_mma_cuda.cu); *taken tells whether the shape is one of theirs.
 */
lev_status attn_mma_forward(const attn_forward_step *a, cudaStream_t stream, bool *taken);
lev_status attn_mma_backward(const attn_backward_step *a, cudaStream_t stream, bool *taken);

/* Through step.library (attention_library_cuda.cu). */
lev_status attn_library_forward(const attn_forward_step *a, cudaStream_t stream);
lev_status attn_library_backward(const attn_backward_step *a, cudaStream_t stream);

#endif
