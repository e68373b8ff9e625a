/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of the grouped products: bf16 operands, f32 sums, one launch for up to kGroups groups.
 *
 * A block of three warpgroups works off tiles of 128 x 256. One warp of the first copies A and B into a ring of kStages
 * stages (bulk tensor copies, 128-byte swizzle), where they lie as boxes of 64 x 64 elements: an operand stored along K
 * by one copy of all its boxes (up to 256 x 64), another by a copy per box. Each of the other two warpgroups multiplies
 * 64 rows of the tile and stores them. The two run apart by up to the depth of the ring, so that one stores while the
 * other multiplies. Long products run at the chip's power limit, so that every instruction saved in these loops is
 * speed. Two blocks make a cluster and share the boxes they have in common: neighbours along M share B, neighbours
 * along N share A; each fetches half of them for both.
 *
 * Ragged groups. By rows (forward, gradient of the input): a tile that passes the end of its group multiplies rows of
 * the next one too and does not store them. By depth (gradient of weights): K is the group's rows; what the last box
 * holds beyond them is overwritten with zeros before it is multiplied, so not even a NaN of the next group gets in.
 *
 * Every element of C is summed by one thread in the order of K: the bits do not depend on the schedule. */
#ifndef LEV_COMMON_GEMM_GROUPED_CUH
#define LEV_COMMON_GEMM_GROUPED_CUH

#include "common/hopper.cuh"
#include "common/kernel.cuh"

namespace lev_grouped {

constexpr int kGroups = 64;                           /* of one launch */
constexpr int kTileM = 128, kTileN = 256, kStep = 64; /* of one block; depth of a stage */
constexpr int kStages = 4;
constexpr uint32_t kBox = 64 * 64 * 2, kBoxesA = kTileM / 64, kBoxesB = kTileN / 64; /* boxes of 8 KiB */
constexpr uint32_t kStage = (kBoxesA + kBoxesB) * kBox;
constexpr uint32_t kSlice = 16 * 64 * 2; /* results in bf16 that a warp turns around at a time */
constexpr uint32_t kSlices = 8 * kSlice;
constexpr uint32_t kShared = kStages * kStage + kSlices + 2 * kStages * 8 + 1024; /* 1024: alignment of the ring */
constexpr int kThreads = 384;
constexpr int kPanel = 2048;  /* columns of C that are worked off together, for reuse in L2 */
constexpr int kOrder = 4096;  /* tiles whose order a launch can prescribe */
constexpr int kWorkers = 160; /* clusters of a launch */

constexpr int kBlocks = 2; /* of a cluster: two tiles, next to each other along M or N */
enum pairing { PAIR_ALONG_M, PAIR_ALONG_N };

/* One instance of the kernel. by_depth: K is ragged, else M. trans_b: B is stored [N, K]. Out: float, or lev_bf16 where
 * it does not accumulate (C +=). */
template <bool by_depth_, bool trans_b_, class Out_, bool accumulate_, pairing pair_> struct shape {
  static constexpr bool by_depth = by_depth_, trans_b = trans_b_, accumulate = accumulate_;
  using Out = Out_;
  static constexpr pairing pair = pair_;
  static constexpr int copy_a = kTileM / (pair_ == PAIR_ALONG_N ? 2 : 1); /* rows of A, and of B, that a block */
  static constexpr int copy_b = kTileN / (pair_ == PAIR_ALONG_M ? 2 : 1); /* copies at once where K is inside */
  static constexpr int span_m = kTileM * (pair_ == PAIR_ALONG_M ? 2 : 1); /* of a cluster's tile */
  static constexpr int span_n = kTileN * (pair_ == PAIR_ALONG_N ? 2 : 1);
};

/* Kernel parameters. Tiles of clusters are numbered group by group. */
template <bool by_depth> struct params {
  CUtensorMap a;
  CUtensorMap b[by_depth ? 1 : kGroups];
  void *c[by_depth ? kGroups : 1];
  int32_t begin[kGroups], rows[kGroups]; /* of each group, in A (and C or B) */
  int32_t first_tile[kGroups + 1];
  int64_t ldc;
  int32_t groups, m, n, k; /* m or k: unused where it is the ragged one */
  bool ordered;            /* worker w takes order[order_begin[w]] to order[order_begin[w + 1] - 1] */
  int32_t order_begin[by_depth ? kWorkers + 1 : 1];
  uint16_t order[by_depth ? kOrder : 1];
};

/* A block's tile. */
struct tile {
  int group, m, n; /* first row and column within the group */
  int begin;       /* first row of the group */
  int depth;       /* K */
  int rows;        /* of C in this group from the tile's first on; may be <= 0 or past the tile */
};

/* Works off the tiles of a block: their groups only grow, so that each is found from the one before. Group tables lie
 * in shared memory, since parameters read at computed places come slowly. */
struct group_table {
  int32_t begin[kGroups], rows[kGroups], first_tile[kGroups + 1];
};
template <class S> struct tiles {
  const params<S::by_depth> &p;
  const group_table &groups;
  int rank, worker, step, at, end, group = 0;

  __device__ __forceinline__ tiles(const params<S::by_depth> &p_, const group_table &groups_, uint32_t rank_)
      : p(p_), groups(groups_), rank((int)rank_), worker(blockIdx.x / kBlocks), step(gridDim.x / kBlocks) {
    at = worker, end = groups.first_tile[p.groups];
    if constexpr (S::by_depth)
      if (p.ordered) at = p.order_begin[worker], end = p.order_begin[worker + 1], step = 1;
  }

  /* The next tile; false past the last one. Uniform over the cluster but for m and n. */
  __device__ __forceinline__ bool next(tile *t) {
    if (at >= end) return false;
    int i = at;
    at += step;
    if constexpr (S::by_depth)
      if (p.ordered) i = p.order[i];
    while (groups.first_tile[group + 1] <= i) ++group;
    i -= groups.first_tile[group];
    int m = S::by_depth ? p.m : groups.rows[group];
    int tiles_m = (m + S::span_m - 1) / S::span_m, tiles_n = (p.n + S::span_n - 1) / S::span_n;
    constexpr int width = kPanel / S::span_n;
    int panel = i / (width * tiles_m), in_panel = i % (width * tiles_m);
    int columns = min(width, tiles_n - panel * width);
    t->group = group;
    t->begin = groups.begin[group];
    t->m = in_panel / columns * S::span_m + (S::pair == PAIR_ALONG_M ? rank * kTileM : 0);
    t->n = (panel * width + in_panel % columns) * S::span_n + (S::pair == PAIR_ALONG_N ? rank * kTileN : 0);
    t->depth = S::by_depth ? groups.rows[group] : p.k;
    t->rows = m - t->m;
    return true;
  }
};

/* Ring position: stage and the parity of its phase. */
struct place {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};
struct ring {
  uint32_t data, slices, full, empty; /* shared addresses */
  __device__ __forceinline__ uint32_t a(uint32_t stage) const { return data + stage * kStage; }
  __device__ __forceinline__ uint32_t b(uint32_t stage) const { return data + stage * kStage + kBoxesA * kBox; }
  __device__ __forceinline__ uint32_t filled(uint32_t stage) const { return full + stage * 8; }
  __device__ __forceinline__ uint32_t emptied(uint32_t stage) const { return empty + stage * 8; }
};

/* ---- the warp that copies ---- */

/* `count` boxes, from box `first` on, of an operand whose rows (M or N) start at `row`. Stored [rows, K], a copy
 * fetches all boxes of a block (copy_rows); stored [K, rows], one. */
template <bool k_inside, int copy_rows, bool shared>
__device__ __forceinline__ void load_boxes(uint32_t to, const CUtensorMap *map, uint32_t full, int row, int k,
                                           int first, int count) {
#pragma unroll
  for (int i = 0; i < count; i += k_inside ? copy_rows / 64 : 1) {
    int at = row + 64 * (first + i), x = k_inside ? k : at, y = k_inside ? at : k;
    if (shared)
      lev_tma_load_to(to + (first + i) * kBox, map, full, x, y, 3);
    else
      lev_tma_load(to + (first + i) * kBox, map, full, x, y);
  }
}

template <class S>
__device__ __forceinline__ void load_stage(const params<S::by_depth> &p, const ring &r, const tile &t, int k,
                                           uint32_t stage, uint32_t rank) {
  constexpr bool share_a = S::pair == PAIR_ALONG_N, share_b = S::pair == PAIR_ALONG_M;
  constexpr int n_a = share_a ? kBoxesA / 2 : kBoxesA, n_b = share_b ? kBoxesB / 2 : kBoxesB;
  uint32_t full = r.filled(stage);
  int at = S::by_depth ? t.begin + k : k, row_a = S::by_depth ? t.m : t.begin + t.m;
  lev_barrier_expect(full, kStage);
  load_boxes<!S::by_depth, S::copy_a, share_a>(r.a(stage), &p.a, full, row_a, at, share_a ? (int)rank * n_a : 0, n_a);
  load_boxes<S::trans_b, S::copy_b, share_b>(r.b(stage), &p.b[S::by_depth ? 0 : t.group], full, t.n, at,
                                             share_b ? (int)rank * n_b : 0, n_b);
}

template <class S>
__device__ void copy_tiles(const params<S::by_depth> &p, tiles<S> todo, const ring &r, uint32_t rank, int lane) {
  place at;
  tile t;
  while (todo.next(&t)) {
    if (!S::by_depth && lane == 0) lev_tma_prefetch_map(&p.b[t.group]);
#pragma unroll 1
    for (int k = 0; k < t.depth; k += kStep, at.next()) {
      lev_barrier_wait(r.emptied(at.stage), at.parity ^ 1);
      if (lane == 0) load_stage<S>(p, r, t, k, at.stage, rank);
      __syncwarp();
    }
  }
}

/* ---- the warpgroups that multiply ---- */

/* This warp has read the stage: tells every block that copies into it, a lane each. `emptied`: the barriers of the
 * lane's block. */
__device__ __forceinline__ void release(uint32_t emptied, uint32_t stage, int lane) {
  if (lane < kBlocks) lev_barrier_arrive_at(emptied + stage * 8);
}

/* Rows `valid` to 63 of all boxes of the stage become zero. Both warpgroups that multiply. */
__device__ __forceinline__ void blank_rows(const ring &r, uint32_t stage, int valid) {
  constexpr int boxes = kBoxesA + kBoxesB;
  int rest = (kStep - valid) * 8; /* 16-byte units of a box */
  for (int i = threadIdx.x - 128; i < rest * boxes; i += 256)
    asm volatile(
        "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(r.a(stage) + i / rest * kBox + valid * 128 + i % rest * 16),
        "r"(0)
        : "memory");
  lev_async_fence();
  lev_named_sync(1, 256);
}

/* The sums of 64 rows, stage by stage; all stages are released. */
template <class S>
__device__ __forceinline__ void multiply(const ring &r, uint32_t emptied, place *at, int depth, int group64, int lane,
                                         float (&d)[128]) {
  constexpr uint32_t step_a = S::by_depth ? 16 * 128 : 32, step_b = S::trans_b ? 32 : 16 * 128; /* of K = 16 */
  uint32_t first_a = lev_wgmma_operand(r.a(0) + group64 * kBox, kBox), first_b = lev_wgmma_operand(r.b(0), kBox);
  uint32_t before = 0;
#pragma unroll 1
  for (int k = 0; k < depth; k += kStep, at->next()) {
    lev_barrier_wait(r.filled(at->stage), at->parity);
    if (S::by_depth && depth - k < kStep) blank_rows(r, at->stage, depth - k);
    uint32_t a = first_a + at->stage * (kStage >> 4), b = first_b + at->stage * (kStage >> 4);
    lev_wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i)
      lev_wgmma_64x256<S::by_depth, !S::trans_b>(d, a + i * (step_a >> 4), b + i * (step_b >> 4), k > 0 || i > 0);
    lev_wgmma_commit();
    lev_wgmma_wait<1>();
    if (k > 0) release(emptied, before, lane);
    before = at->stage;
  }
  lev_wgmma_wait<0>();
  if (depth > 0) release(emptied, before, lane);
}

/* By rows: a warpgroup whose rows are all past the end. By depth it multiplies its zeros: both are needed where rows
 * are blanked. */
__device__ __forceinline__ void pass_by(const ring &r, uint32_t emptied, place *at, int depth, int lane) {
#pragma unroll 1
  for (int k = 0; k < depth; k += kStep, at->next()) {
    lev_barrier_wait(r.filled(at->stage), at->parity);
    release(emptied, at->stage, lane);
  }
}

/* which ? a : b, never as a branch: sums that are read in a divergent branch would make the compiler wait for every
 * product before it starts the next. */
__device__ __forceinline__ uint32_t pick(bool which, uint32_t a, uint32_t b) {
  uint32_t out;
  asm("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nselp.b32 %0, %1, %2, p;\n}"
      : "=r"(out)
      : "r"(a), "r"(b), "r"((uint32_t)which));
  return out;
}
__device__ __forceinline__ float pick(bool which, float a, float b) {
  return __uint_as_float(pick(which, __float_as_uint(a), __float_as_uint(b)));
}
__device__ __forceinline__ uint32_t from_lane_xor(uint32_t x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
__device__ __forceinline__ float from_lane_xor(float x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

/* One access, which the compiler would sometimes split. */
__device__ __forceinline__ void store_16(void *to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* Four matrices of 8 x 8 elements of 16 bits: lane l holds two neighbours of row l / 4 of each and names the shared
 * address of row l % 8 of matrix l / 8. */
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ uint32_t two_bf16(float a, float b) {
  __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
  uint32_t out;
  memcpy(&out, &two, 4);
  return out;
}

/* Stores 64 rows: `c` at the first row and column, `rows` and `columns` of them exist. bf16: a warp turns its 16 rows
 * around in shared memory, 64 columns at a time (16-byte units, swizzled), so that a row is stored by whole lines. */
template <bool accumulate>
__device__ __forceinline__ void store_rows(const float (&d)[128], lev_bf16 *c, int64_t ldc, int rows, int columns,
                                           const ring &r) {
  static_assert(!accumulate, "C += in bf16");
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row8 = lane % 8;
  uint32_t slice = r.slices + (threadIdx.x / 32 - 4) * kSlice;
  uint32_t in = slice + (lane / 8 % 2 * 8 + row8) * 128, unit = (uint32_t)(lane / 16) ^ (uint32_t)row8;
  uint32_t out = slice + lane / 8 * 128, out_unit = (uint32_t)row8 ^ (uint32_t)(lane / 8);
  c += (int64_t)(warp * 16 + lane / 8) * ldc + 8 * row8;
  rows -= warp * 16 + lane / 8, columns -= 8 * row8;
#pragma unroll
  for (int j = 0; j < kTileN / 64; ++j) {
    const float *x = d + 32 * j;
#pragma unroll
    for (int i = 0; i < 4; ++i, x += 8)
      store_matrices(in + ((unit ^ 2 * i) << 4), two_bf16(x[0], x[1]), two_bf16(x[2], x[3]), two_bf16(x[4], x[5]),
                     two_bf16(x[6], x[7]));
    __syncwarp();
    uint4 y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = load_shared_16(out + i * 512 + ((out_unit ^ i % 2 * 4) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * i < rows && 64 * j < columns) store_16(c + 4 * i * ldc + 64 * j, y[i].x, y[i].y, y[i].z, y[i].w);
    __syncwarp();
  }
}
template <bool accumulate>
__device__ __forceinline__ void store_rows(const float (&d)[128], float *c, int64_t ldc, int rows, int columns,
                                           const ring &) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, q = lane % 4;
  bool odd = q & 1;
  int in_pair = 4 * (q / 2) + (odd ? 8 : 0); /* column within 16: even lanes take the first 8, odd ones the others */
#pragma unroll
  for (int j = 0; j < 16; j += 4) { /* 64 columns at a time: the reads of eight stores are under way together */
    float4 sum[8], old[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int row = warp * 16 + lane / 4 + 8 * (i / 4), column = 16 * (j + i % 4) + in_pair;
      old[i] = make_float4(0, 0, 0, 0);
      if (accumulate && row < rows && column < columns)
        old[i] = *reinterpret_cast<const float4 *>(c + row * ldc + column);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float *x = d + 8 * (j + i % 4) + 2 * (i / 4), *y = x + 4;
      float u = from_lane_xor(pick(odd, x[0], y[0]), 1), v = from_lane_xor(pick(odd, x[1], y[1]), 1);
      sum[i] = make_float4(pick(odd, u, x[0]), pick(odd, v, x[1]), pick(odd, y[0], u), pick(odd, y[1], v));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int row = warp * 16 + lane / 4 + 8 * (i / 4), column = 16 * (j + i % 4) + in_pair;
      if (accumulate) sum[i].x += old[i].x, sum[i].y += old[i].y, sum[i].z += old[i].z, sum[i].w += old[i].w;
      if (row < rows && column < columns)
        store_16(c + row * ldc + column, __float_as_uint(sum[i].x), __float_as_uint(sum[i].y),
                 __float_as_uint(sum[i].z), __float_as_uint(sum[i].w));
    }
  }
}

/* The product of a group without rows, by depth. */
template <class Out> __device__ __forceinline__ void store_zeros(Out *c, int64_t ldc, int rows, int columns) {
  constexpr int units = kTileN * (int)sizeof(Out) / 16; /* of a row */
  for (int i = threadIdx.x % 128; i < 64 * units; i += 128)
    if (i / units < rows && i % units * (16 / (int)sizeof(Out)) < columns)
      reinterpret_cast<uint4 *>(c + i / units * ldc)[i % units] = make_uint4(0, 0, 0, 0);
}

template <class S>
__device__ void multiply_tiles(const params<S::by_depth> &p, tiles<S> todo, const ring &r, int group64, int lane) {
  using Out = typename S::Out;
  uint32_t emptied = lev_cluster_address(r.empty, (uint32_t)lane % kBlocks);
  place at;
  tile t;
  float d[128];
  while (todo.next(&t)) {
    int rows = t.rows - group64 * 64;
    if (!S::by_depth && (rows <= 0 || t.n >= p.n)) {
      pass_by(r, emptied, &at, t.depth, lane);
      continue;
    }
    Out *c = static_cast<Out *>(p.c[S::by_depth ? t.group : 0]) +
             ((S::by_depth ? 0 : t.begin) + (int64_t)t.m + group64 * 64) * p.ldc + t.n;
    if (S::by_depth && t.depth == 0) {
      if (!S::accumulate) store_zeros(c, p.ldc, rows, p.n - t.n);
      continue;
    }
    multiply<S>(r, emptied, &at, t.depth, group64, lane, d);
    store_rows<S::accumulate>(d, c, p.ldc, rows, p.n - t.n, r);
  }
}

/* ---- the kernel ---- */

template <class S>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    multiply_groups(const __grid_constant__ params<S::by_depth> p) {
  extern __shared__ unsigned char shared[];
  __shared__ group_table groups;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t rank = lev_cluster_rank();
  ring r;
  /* Through a shuffle, or the compiler would work the address out again in every loop. */
  r.data = __shfl_sync(0xffffffffu, (lev_shared_address(shared) + 1023) & ~1023u, 0);
  r.slices = r.data + kStages * kStage, r.full = r.slices + kSlices, r.empty = r.full + kStages * 8;
  for (int i = threadIdx.x; i <= p.groups; i += kThreads) {
    groups.first_tile[i] = p.first_tile[i];
    if (i < p.groups) groups.begin[i] = p.begin[i], groups.rows[i] = p.rows[i];
  }
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < kStages; ++s) {
      lev_barrier_init(r.filled(s), 1);
      lev_barrier_init(r.emptied(s), 8 * kBlocks);
    }
    lev_barriers_ready();
    lev_tma_prefetch_map(&p.a);
  }
  lev_cluster_sync();
  tiles<S> todo(p, groups, rank);
  if (warp < 4) {
    lev_give_registers<56>();
    if (warp == 0) copy_tiles<S>(p, todo, r, rank, lane);
  } else {
    lev_take_registers<224>();
    multiply_tiles<S>(p, todo, r, warp / 4 - 1, lane);
  }
  lev_cluster_sync(); /* a block stays while the other may still copy into it or arrive at its barriers */
}

} // namespace lev_grouped

#endif
