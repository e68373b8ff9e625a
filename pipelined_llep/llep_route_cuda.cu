/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA side of the tables in llep_ops.h: the functions of llep_route.h in parallel, with the same results and no
 * atomics. Routes are ranked 32 at a time: lanes with the same key find each other, the first of them moves the warp's
 * counter of that key, and the others stand behind it in order of lanes. Warps of a block take consecutive stretches of
 * the sequence, and their counts are summed up in between. */
#include <cstdint>

#include "common/kernel.cuh"
#include "pipelined_llep/llep_ops.h"

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr size_t kSharedMost = LLEP_GPU_SHARED;
constexpr int64_t kNumberBlocks = 264; /* two per multiprocessor */

/* ---- ranking ---- */

/* Lanes with the same key as this one. */
__device__ __forceinline__ unsigned peers_of(int key) {
  return __match_any_sync(kAll, key);
}
__device__ __forceinline__ unsigned lanes_below() {
  return (1u << threadIdx.x % 32) - 1;
}

/* The warp counts the keys of its lanes; keys below 0 do not count. */
__device__ __forceinline__ void count_keys(int32_t *counter, int key) {
  unsigned peers = peers_of(key);
  if (key >= 0 && (peers & lanes_below()) == 0) counter[key] += __popc(peers);
  __syncwarp();
}

/* The same, and what the counter of its key would be when its turn comes. */
__device__ __forceinline__ int32_t rank_key(int32_t *counter, int key) {
  unsigned peers = peers_of(key);
  int32_t rank = key < 0 ? -1 : counter[key] + __popc(peers & lanes_below());
  __syncwarp();
  if (key >= 0 && (peers & lanes_below()) == 0) counter[key] += __popc(peers);
  __syncwarp();
  return rank;
}

/* Part `i` of n items over the warps of a block, each a multiple of 32 items but for the end. */
__device__ __forceinline__ int64_t warp_begin(int64_t n, int i) {
  int64_t warps = blockDim.x / 32, each = lev_ceil_div(lev_ceil_div(n, 32), warps) * 32;
  return lev_min_i64(n, each * i);
}

__device__ __forceinline__ void clear(int32_t *counters, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) counters[i] = 0;
  __syncthreads();
}

/* Every warp counts the keys key(i) of its stretch of i = 0 .. n - 1. */
template <class Key> __device__ void count_sequence(int32_t *counters, int64_t width, int64_t n, Key key) {
  int warp = threadIdx.x / 32;
  clear(counters, width * (blockDim.x / 32));
  for (int64_t i = warp_begin(n, warp), end = warp_begin(n, warp + 1); i < end; i += 32) {
    int64_t at = i + threadIdx.x % 32;
    count_keys(counters + warp * width, at < end ? key(at) : -1);
  }
  __syncthreads();
}

/* Warps' counts become where each warp starts: after `from(key)` and the warps before it; `left(key, n)` takes the end.
 */
template <class From, class Left> __device__ void stack_warps(int32_t *counters, int64_t width, From from, Left left) {
  for (int64_t k = threadIdx.x; k < width; k += blockDim.x) {
    int32_t sum = from(k);
    for (int w = 0; w < (int)blockDim.x / 32; ++w) {
      int32_t n = counters[w * width + k];
      counters[w * width + k] = sum;
      sum += n;
    }
    left(k, sum);
  }
  __syncthreads();
}

/* Ranks the sequence after stack_warps: use(i, key, rank) for every item. */
template <class Key, class Use>
__device__ void rank_sequence(int32_t *counters, int64_t width, int64_t n, Key key, Use use) {
  int warp = threadIdx.x / 32;
  for (int64_t i = warp_begin(n, warp), end = warp_begin(n, warp + 1); i < end; i += 32) {
    int64_t at = i + threadIdx.x % 32;
    int k = at < end ? key(at) : -1;
    int32_t rank = rank_key(counters + warp * width, k);
    if (at < end) use(at, k, rank);
  }
  __syncthreads();
}

/* Threads whose counters, and `extra` more rows of `width` numbers, fit a block's shared memory; 0 if none do. */
struct shared_shape {
  int threads;
  size_t bytes;
};
shared_shape shape_for(int64_t width, int extra) {
  for (int warps = kWarps; warps > 0; warps /= 2) {
    size_t bytes = (size_t)width * (size_t)(warps + extra) * sizeof(int32_t);
    if (bytes <= kSharedMost) return {32 * warps, bytes};
  }
  return {0, 0};
}
lev_status too_wide(const char *what, int64_t width) {
  return lev_fail(LEV_ERR_UNSUPPORTED, "%s: %lld experts and lent slots pass a multiprocessor's shared memory", what,
                  (long long)width);
}
template <class Kernel> lev_status let_use(Kernel *kernel, size_t bytes) {
  return bytes <= 48 << 10 ? LEV_OK : lev_allow_shared(kernel);
}

/* ---- counts per part ---- */

struct part_of_routes {
  const int32_t *ids;
  int64_t routes, experts, parts;
  __device__ __forceinline__ int64_t begin(int64_t part) const { return lev_part_begin(routes, parts, part); }
  __device__ __forceinline__ int key(int64_t q) const {
    int32_t e = ids[q];
    return e < 0 || e >= experts ? -1 : e;
  }
};

/* seen[part, e] = ids e among the part's routes. One block per part. */
__global__ void __launch_bounds__(kThreads) count_parts(part_of_routes r, int64_t *seen) {
  extern __shared__ int32_t counters[];
  int64_t begin = r.begin(blockIdx.x), n = r.begin(blockIdx.x + 1) - begin;
  count_sequence(counters, r.experts, n, [&](int64_t i) { return r.key(begin + i); });
  stack_warps(
      counters, r.experts, [](int64_t) { return 0; },
      [&](int64_t e, int32_t sum) { seen[blockIdx.x * r.experts + e] = sum; });
}

/* counts[e] = sum over parts. */
__global__ void __launch_bounds__(kThreads)
    sum_parts(const int64_t *seen, int64_t parts, int64_t experts, int64_t *counts) {
  int64_t e = (int64_t)blockIdx.x * kThreads + threadIdx.x, sum = 0;
  if (e >= experts) return;
  for (int64_t i = 0; i < parts; ++i) sum += seen[i * experts + e];
  counts[e] = sum;
}

/* counts[E] = routes without an expert. One block. */
__global__ void __launch_bounds__(kThreads) count_bad(int64_t *counts, int64_t routes, int64_t experts) {
  __shared__ int64_t memory[kWarps];
  int64_t sum = 0;
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) sum += counts[e];
  sum = lev_block_sum<kThreads>(sum, memory);
  if (threadIdx.x == 0) counts[experts] = routes - sum;
}

lev_status enqueue_parts(const part_of_routes &r, int64_t *seen, cudaStream_t stream) {
  shared_shape s = shape_for(r.experts, 0);
  if (s.threads == 0) return too_wide("llep.count", r.experts);
  LEV_TRY(let_use(count_parts, s.bytes));
  count_parts<<<(unsigned)r.parts, s.threads, s.bytes, stream>>>(r, seen);
  return lev_cuda_launched("llep.count");
}

lev_status count(const llep_count_args *a, cudaStream_t stream) {
  part_of_routes r = {a->ids, a->routes, a->experts, a->parts};
  LEV_TRY(enqueue_parts(r, a->seen, stream));
  sum_parts<<<lev_grid(a->experts, kThreads), kThreads, 0, stream>>>(a->seen, a->parts, a->experts, a->counts);
  count_bad<<<1, kThreads, 0, stream>>>(a->counts, a->routes, a->experts);
  return lev_cuda_launched("llep.count");
}

/* ---- columns of routes ---- */

/* seen[part, e] becomes the position of the part's first route of e: base[e] and the parts before. One warp per
 * expert. */
__global__ void __launch_bounds__(kThreads)
    place_parts(llep_rules rules, int64_t *table, int64_t parts, int64_t *seen) {
  int64_t e = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (e >= rules.experts) return;
  int64_t sum = llep_table_at(&rules, table).base[e];
  for (int64_t first = 0; first < parts; first += 32) {
    int64_t i = first + lane, own = i < parts ? seen[i * rules.experts + e] : 0, upto = own;
    for (int step = 1; step < 32; step *= 2) {
      int64_t before = __shfl_up_sync(kAll, upto, step);
      if (lane >= step) upto += before;
    }
    if (i < parts) seen[i * rules.experts + e] = sum + upto - own;
    sum += __shfl_sync(kAll, upto, 31);
  }
}

/* routes[q] = column of route q, -1 for a bad id. One block per part. */
__global__ void __launch_bounds__(kThreads)
    assign_columns(llep_rules rules, part_of_routes r, int64_t *table, const int64_t *seen, int32_t *routes) {
  extern __shared__ int32_t counters[];
  llep_table t = llep_table_at(&rules, table);
  int64_t begin = r.begin(blockIdx.x), n = r.begin(blockIdx.x + 1) - begin;
  auto key = [&](int64_t i) { return r.key(begin + i); };
  count_sequence(counters, r.experts, n, key);
  stack_warps(
      counters, r.experts, [](int64_t) { return 0; }, [](int64_t, int32_t) {});
  rank_sequence(counters, r.experts, n, key, [&](int64_t i, int e, int32_t rank) {
    int32_t column = -1;
    if (e >= 0) {
      int64_t position = seen[blockIdx.x * r.experts + e] + rank, s = t.seg[e], end = t.seg[e + 1];
      while (s + 1 < end && t.start[s + 1] <= position) ++s;
      column = (int32_t)t.column[s];
    }
    routes[begin + i] = column;
  });
}

/* Routes of one token block in order: tokens b, b + B, ..., picks within a token. */
struct block_routes {
  const int32_t *routes;
  int64_t tokens, top_k, blocks, block;
  __device__ __forceinline__ int64_t count() const {
    return block < tokens ? lev_ceil_div(tokens - block, blocks) * top_k : 0;
  }
  __device__ __forceinline__ int64_t at(int64_t i) const { return (i / top_k * blocks + block) * top_k + i % top_k; }
  __device__ __forceinline__ int key(int64_t i) const { return routes[at(i)]; }
};

/* histogram[c, b] of all token blocks, one at a time. */
__global__ void __launch_bounds__(kThreads) count_blocks(llep_assign_args a) {
  extern __shared__ int32_t counters[];
  int64_t columns = llep_columns(&a.rules);
  for (int64_t b = blockIdx.x; b < a.blocks; b += gridDim.x) {
    block_routes r = {a.routes, a.tokens, a.top_k, a.blocks, b};
    count_sequence(counters, columns, r.count(), [&](int64_t i) { return r.key(i); });
    stack_warps(
        counters, columns, [](int64_t) { return 0; },
        [&](int64_t c, int32_t sum) { a.histogram[c * a.blocks + b] = sum; });
  }
}

/* own[d, b] = total[d, b] = rows of block b for rank d. */
__global__ void __launch_bounds__(kThreads) sum_ranks(llep_assign_args a) {
  int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x, d = i / a.blocks, b = i % a.blocks, rows = 0;
  if (d >= a.rules.ranks) return;
  int64_t end = llep_column_begin(&a.rules, d + 1);
  for (int64_t c = llep_column_begin(&a.rules, d); c < end; ++c) rows += a.histogram[c * a.blocks + b];
  a.own[i] = a.total[i] = rows;
}

lev_status assign(const llep_assign_args *a, cudaStream_t stream) {
  int64_t experts = a->rules.experts, columns = llep_columns(&a->rules);
  part_of_routes r = {a->ids, a->tokens * a->top_k, experts, a->parts};
  LEV_TRY(enqueue_parts(r, a->seen, stream));
  place_parts<<<lev_grid(experts, kWarps), kThreads, 0, stream>>>(a->rules, a->table, a->parts, a->seen);
  shared_shape s = shape_for(experts, 0);
  LEV_TRY(let_use(assign_columns, s.bytes));
  assign_columns<<<(unsigned)a->parts, s.threads, s.bytes, stream>>>(a->rules, r, a->table, a->seen, a->routes);
  s = shape_for(columns, 0);
  if (s.threads == 0) return too_wide("llep.assign", columns);
  LEV_TRY(let_use(count_blocks, s.bytes));
  count_blocks<<<lev_grid(a->blocks, 1), s.threads, s.bytes, stream>>>(*a);
  if (a->own) sum_ranks<<<lev_grid(a->rules.ranks * a->blocks, kThreads, INT32_MAX), kThreads, 0, stream>>>(*a);
  return lev_cuda_launched("llep.assign");
}

/* ---- send order ---- */

/* Rows of column c in token blocks [first, last); every lane has the sum. */
__device__ __forceinline__ int32_t block_rows(const int32_t *histogram, int64_t blocks, int64_t c, int64_t first,
                                              int64_t last) {
  int32_t sum = 0;
  for (int64_t b = first + threadIdx.x % 32; b < last; b += 32) sum += histogram[c * blocks + b];
  return __reduce_add_sync(kAll, sum);
}

/* next[c] = rows of the chunk in column c. One warp per column. */
__global__ void __launch_bounds__(kThreads) count_columns(llep_number_args a) {
  int64_t c = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32;
  if (c >= llep_columns(&a.rules)) return;
  int32_t sum = block_rows(a.histogram, a.blocks, c, a.first, a.last);
  if (threadIdx.x % 32 == 0) a.next[c] = sum;
}

/* start[c] = first row of token block `block`: after the columns before c, and the blocks before it. */
__device__ void place_columns(const llep_number_args &a, int64_t columns, int64_t block, int32_t *start) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    int32_t sum = 0;
    for (int64_t first = 0; first < columns; first += 32) {
      int32_t own = first + lane < columns ? a.next[first + lane] : 0, upto = own;
      for (int step = 1; step < 32; step *= 2) {
        int32_t before = __shfl_up_sync(kAll, upto, step);
        if (lane >= step) upto += before;
      }
      if (first + lane < columns) start[first + lane] = sum + upto - own;
      sum += __shfl_sync(kAll, upto, 31);
    }
  }
  __syncthreads();
  for (int64_t c = warp; c < columns; c += blockDim.x / 32) {
    int32_t before = block_rows(a.histogram, a.blocks, c, a.first, block);
    if (lane == 0) start[c] += before;
  }
  __syncthreads();
}

/* Every block of threads takes a stretch of the chunk's token blocks. */
__global__ void __launch_bounds__(kThreads) number_routes(llep_number_args a) {
  extern __shared__ int32_t counters[];
  int64_t columns = llep_columns(&a.rules), width = a.last - a.first;
  int32_t *start = counters + columns * (blockDim.x / 32);
  int64_t first = a.first + lev_part_begin(width, gridDim.x, blockIdx.x);
  int64_t last = a.first + lev_part_begin(width, gridDim.x, (int64_t)blockIdx.x + 1);
  place_columns(a, columns, first, start);
  for (int64_t b = first; b < last; ++b) {
    block_routes r = {a.routes, a.tokens, a.top_k, a.blocks, b};
    auto key = [&](int64_t i) { return r.key(i); };
    count_sequence(counters, columns, r.count(), key);
    stack_warps(
        counters, columns, [&](int64_t c) { return start[c]; }, [&](int64_t c, int32_t end) { start[c] = end; });
    rank_sequence(counters, columns, r.count(), key, [&](int64_t i, int, int32_t row) { a.routes[r.at(i)] = row; });
  }
}

lev_status number(const llep_number_args *a, cudaStream_t stream) {
  int64_t columns = llep_columns(&a->rules);
  if (a->last <= a->first) return LEV_OK;
  shared_shape s = shape_for(columns, 1);
  if (s.threads == 0) return too_wide("llep.number", columns);
  LEV_TRY(let_use(number_routes, s.bytes));
  count_columns<<<lev_grid(columns, kWarps), kThreads, 0, stream>>>(*a);
  number_routes<<<lev_grid(a->last - a->first, 1, kNumberBlocks), s.threads, s.bytes, stream>>>(*a);
  return lev_cuda_launched("llep.number");
}

/* ---- lending plan ---- */

/* The largest of `value` over the warp's lanes whose index is not -1, ties to the lower index; its index, or -1. */
__device__ int64_t pick_largest(int64_t value, int64_t index) {
  for (int step = 16; step > 0; step /= 2) {
    int64_t v = __shfl_xor_sync(kAll, value, step), i = __shfl_xor_sync(kAll, index, step);
    if (i >= 0 && (index < 0 || v > value || (v == value && i < index))) value = v, index = i;
  }
  return index;
}

struct lending {
  int64_t cap, moves;
  bool on;
};

/* Loads, cap and whether anything is lent (llep_overloaded), by one block. */
__device__ void measure_load(const llep_rules &r, const int64_t *counts, const llep_scratch &s, lending *shared) {
  for (int64_t e = threadIdx.x; e < r.experts; e += kThreads) {
    int64_t rows = 0;
    for (int64_t d = 0; d < r.ranks; ++d) rows += counts[d * (r.experts + 1) + e];
    s.rows[e] = rows, s.kept[e] = -1;
  }
  __syncthreads();
  for (int64_t d = threadIdx.x; d < r.ranks; d += kThreads) {
    int64_t load = 0, end = lev_part_begin(r.experts, r.ranks, d + 1);
    for (int64_t e = lev_part_begin(r.experts, r.ranks, d); e < end; ++e) load += s.rows[e];
    s.load[d] = load, s.used[d] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t total = 0, most = 0;
    for (int64_t d = 0; d < r.ranks; ++d) total += s.load[d], most = lev_max_i64(most, s.load[d]);
    double mean = (double)total / r.ranks, limit = r.alpha * mean;
    shared->cap = (int64_t)limit;
    if ((double)shared->cap < limit) ++shared->cap;
    shared->on = r.slots > 0 && most > shared->cap + r.min_rows && (double)most >= r.gate * mean;
    shared->moves = 0;
  }
  __syncthreads();
}

/* llep_spill by one warp. */
__device__ int64_t spill(const llep_rules &r, const llep_scratch &s, int64_t *moves, int64_t e, int64_t o, int64_t left,
                         int64_t cap) {
  int lane = threadIdx.x % 32;
  while (left > 0 && s.load[o] + left > cap + r.min_rows) {
    int64_t g = -1, room = 0;
    for (int64_t d = lane; d < r.ranks; d += 32)
      if (d != o && s.used[d] < r.slots && (g < 0 || s.load[d] < s.load[g])) g = d;
    g = pick_largest(g < 0 ? 0 : -s.load[g], g);
    if (g < 0 || s.load[g] >= cap) break;
    room = cap - s.load[g];
    int64_t take = left <= room + r.min_rows ? left : lev_max_i64(room, r.min_rows);
    int64_t column = llep_column_begin(&r, g + 1) - r.slots + s.used[g];
    __syncwarp();
    if (lane == 0) {
      s.expert[*moves] = e, s.column[*moves] = column, s.amount[*moves] = take;
      ++s.used[g], s.load[g] += take;
    }
    __syncwarp();
    ++*moves, left -= take;
  }
  return left;
}

/* The loop of llep_lend by one warp; returns the number of moves. */
__device__ int64_t lend_rows(const llep_rules &r, const llep_scratch &s, int64_t cap) {
  int lane = threadIdx.x % 32;
  int64_t moves = 0;
  for (;;) {
    int64_t e = -1;
    for (int64_t i = lane; i < r.experts; i += 32)
      if (s.kept[i] < 0 && s.load[lev_part_of(r.experts, r.ranks, i)] > cap + r.min_rows && s.rows[i] > 0 &&
          (e < 0 || s.rows[i] > s.rows[e]))
        e = i;
    e = pick_largest(e < 0 ? 0 : s.rows[e], e);
    if (e < 0) return moves;
    int64_t o = lev_part_of(r.experts, r.ranks, e), away = lev_min_i64(s.rows[e], s.load[o] - cap);
    __syncwarp();
    if (lane == 0) s.load[o] -= away;
    __syncwarp();
    int64_t back = spill(r, s, &moves, e, o, away, cap);
    __syncwarp();
    if (lane == 0) s.load[o] += back, s.kept[e] = s.rows[e] - away + back;
    __syncwarp();
  }
}

/* Segments of expert e from the moves in the order they were made. */
__device__ void write_segments(const llep_rules &r, const llep_scratch &s, const llep_table &t, int64_t moves,
                               int64_t e) {
  int64_t n = e, position = s.kept[e] < 0 ? s.rows[e] : s.kept[e];
  for (int64_t i = 0; i < moves; ++i) n += s.expert[i] < e;
  t.seg[e] = n;
  t.start[n] = 0;
  t.column[n++] = e + lev_part_of(r.experts, r.ranks, e) * r.slots;
  for (int64_t i = 0; i < moves; ++i) {
    if (s.expert[i] != e) continue;
    t.start[n] = position;
    t.column[n++] = s.column[i];
    position += s.amount[i];
  }
}

__global__ void __launch_bounds__(kThreads) lend_experts(llep_lend_args a) {
  __shared__ lending shared;
  const llep_rules &r = a.rules;
  llep_scratch s = llep_scratch_at(&r, a.scratch);
  llep_table t = llep_table_at(&r, a.table);
  measure_load(r, a.counts, s, &shared);
  if (threadIdx.x < 32 && shared.on) {
    int64_t moves = lend_rows(r, s, shared.cap);
    if (threadIdx.x == 0) shared.moves = moves;
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < r.experts; e += kThreads) {
    write_segments(r, s, t, shared.moves, e);
    int64_t base = 0;
    for (int64_t d = 0; d < a.rank; ++d) base += a.counts[d * (r.experts + 1) + e];
    t.base[e] = base;
  }
  if (threadIdx.x == 0) t.seg[r.experts] = r.experts + shared.moves, *t.moves = shared.moves;
}

} // namespace

lev_status llep_count_cuda(const void *args, void *stream) {
  return count(static_cast<const llep_count_args *>(args), static_cast<cudaStream_t>(stream));
}
lev_status llep_lend_cuda(const void *args, void *stream) {
  lend_experts<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*static_cast<const llep_lend_args *>(args));
  return lev_cuda_launched("llep.lend");
}
lev_status llep_assign_cuda(const void *args, void *stream) {
  return assign(static_cast<const llep_assign_args *>(args), static_cast<cudaStream_t>(stream));
}
lev_status llep_number_cuda(const void *args, void *stream) {
  return number(static_cast<const llep_number_args *>(args), static_cast<cudaStream_t>(stream));
}
