/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped products on GPUs: the kernel of gemm_grouped.cuh where the operands allow it, else one product per group
 * through cuBLASLt. What the kernel needs to know travels in its parameters, made on the host's stack per launch. */
#include <algorithm>
#include <climits>

#include "common/gemm_grouped.cuh"
#include "common/gemm_ops.h"

namespace {

using namespace lev_grouped;

using encode_fn = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                               const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function, asked for at run time: nothing links the driver. */
lev_status find_encode(encode_fn *out) {
  static encode_fn found; /* the same for every caller: a race is harmless */
  encode_fn encode = __atomic_load_n(&found, __ATOMIC_RELAXED);
  if (!encode) {
    void *at = nullptr;
    cudaDriverEntryPointQueryResult result;
    LEV_CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || !at)
      return lev_fail(LEV_ERR_UNSUPPORTED, "the driver has no cuTensorMapEncodeTiled");
    encode = reinterpret_cast<encode_fn>(at);
    __atomic_store_n(&found, encode, __ATOMIC_RELAXED);
  }
  *out = encode;
  return LEV_OK;
}

/* Row-major bf16 [rows, cols] in boxes of box_rows x 64; what lies outside is read as zeros. */
lev_status make_map(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int64_t ld, int box_rows) {
  encode_fn encode = nullptr;
  LEV_TRY(find_encode(&encode));
  cuuint64_t sizes[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, stride = (cuuint64_t)ld * 2;
  cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, steps[2] = {1, 1};
  CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(data), sizes, &stride, box,
                           steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return lev_fail(LEV_ERR_DEVICE, "cuTensorMapEncodeTiled of [%lld, %lld], row length %lld: error %d",
                    (long long)rows, (long long)cols, (long long)ld, (int)result);
  return LEV_OK;
}

/* ---- the order of tiles by depth ---- */

/* Tiles of a deep group take longer. The deepest come first, each to the cluster that has the least to do (longest
 * processing time first). A tile costs its stages and about `kEpilogue` more for reading and writing C. */
constexpr int64_t kEpilogue = 6;

struct load {
  int64_t cost;
  int worker;
};

/* Gives `tiles` of one cost to the workers, always to the least loaded, and says to whom. `sorted` by load. Loads that
 * were raised come back in the order in which they were raised, so that two queues replace a heap. */
void give_out(load *sorted, int workers, int tiles, int64_t cost, uint8_t *owner) {
  load raised[kWorkers];
  int old = 0, head = 0, waiting = 0; /* raised: a ring of `waiting` from `head` on */
  for (int t = 0; t < tiles; ++t) {
    bool from_old = old < workers && (waiting == 0 || sorted[old].cost <= raised[head].cost);
    load least = from_old ? sorted[old++] : raised[head];
    if (!from_old) head = head + 1 == workers ? 0 : head + 1, --waiting;
    owner[t] = (uint8_t)least.worker;
    least.cost += cost;
    int tail = head + waiting++;
    raised[tail < workers ? tail : tail - workers] = least;
  }
  load rest[kWorkers];
  int n = 0;
  while (old < workers || waiting > 0)
    if (old < workers && (waiting == 0 || sorted[old].cost <= raised[head].cost))
      rest[n++] = sorted[old++];
    else
      rest[n++] = raised[head], head = head + 1 == workers ? 0 : head + 1, --waiting;
  std::copy(rest, rest + workers, sorted);
}

void order_tiles(params<true> *p, int workers) {
  int tiles = p->first_tile[p->groups];
  p->ordered = p->rows[0] != p->rows[p->groups - 1] && workers <= kWorkers && tiles <= kOrder;
  if (!p->ordered) return;
  load sorted[kWorkers];
  uint8_t owner[kOrder];
  int next[kWorkers] = {0};
  for (int w = 0; w < workers; ++w) sorted[w] = {0, w};
  for (int g = 0; g < p->groups; ++g)
    give_out(sorted, workers, p->first_tile[g + 1] - p->first_tile[g], (p->rows[g] + kStep - 1) / kStep + kEpilogue,
             owner + p->first_tile[g]);
  for (int t = 0; t < tiles; ++t) ++next[owner[t]];
  for (int w = 0, sum = 0; w <= workers; ++w) {
    p->order_begin[w] = sum;
    if (w < workers) sum += next[w], next[w] = p->order_begin[w];
  }
  for (int t = 0; t < tiles; ++t) p->order[next[owner[t]]++] = (uint16_t)t;
}

/* ---- launches ---- */

/* Groups of one launch: indices into the caller's arrays. */
struct batch {
  int groups;
  int64_t at[kGroups];
};

template <class S> lev_status fill_groups(const lev_gemm_grouped_args *a, const batch &b, params<S::by_depth> *p) {
  const lev_gemm_args *g = &a->gemm;
  int64_t tiles = 0, tiles_n = lev_ceil_div(g->n, S::span_n);
  p->groups = b.groups;
  for (int i = 0; i < b.groups; ++i) {
    int64_t at = b.at[i];
    p->begin[i] = (int32_t)a->first[at], p->rows[i] = (int32_t)a->rows[at];
    p->first_tile[i] = (int32_t)tiles;
    tiles += lev_ceil_div(S::by_depth ? g->m : a->rows[at], S::span_m) * tiles_n;
    if (tiles > INT_MAX) return lev_fail(LEV_ERR_UNSUPPORTED, "grouped gemm: more than 2^31 - 1 tiles");
    if constexpr (S::by_depth)
      p->c[i] = a->each[at];
    else
      LEV_TRY(S::trans_b ? make_map(&p->b[i], a->each[at], g->n, g->k, g->ldb, S::copy_b)
                         : make_map(&p->b[i], a->each[at], g->k, g->n, g->ldb, kStep));
  }
  p->first_tile[b.groups] = (int32_t)tiles;
  return LEV_OK;
}

template <class S> lev_status launch(const lev_gemm_grouped_args *a, const batch &b, cudaStream_t stream) {
  const lev_gemm_args *g = &a->gemm;
  params<S::by_depth> p;
  int device, processors;
  int64_t rows = 0; /* of A, up to the end of the last group */
  for (int64_t i = 0; i < a->groups; ++i) rows = lev_max_i64(rows, a->first[i] + a->rows[i]);
  LEV_CUDA_TRY(cudaGetDevice(&device));
  LEV_CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  p.ldc = g->ldc, p.m = (int32_t)g->m, p.n = (int32_t)g->n, p.k = (int32_t)g->k;
  p.ordered = false;
  LEV_TRY(fill_groups<S>(a, b, &p));
  LEV_TRY(make_map(&p.a, g->a, rows, S::by_depth ? g->m : g->k, g->lda, S::by_depth ? kStep : S::copy_a));
  int workers = std::max(1, processors / kBlocks);
  if constexpr (S::by_depth) {
    LEV_TRY(make_map(&p.b[0], g->b, rows, g->n, g->ldb, kStep));
    order_tiles(&p, workers);
  } else {
    p.c[0] = g->c;
  }
  workers = std::min(workers, p.first_tile[p.groups]);
  if (workers == 0) return LEV_OK;
  LEV_TRY(lev_allow_shared(multiply_groups<S>));
  multiply_groups<S><<<(unsigned)(workers * kBlocks), kThreads, kShared, stream>>>(p);
  return lev_cuda_launched("gemm_grouped");
}

/* Tiles that a cluster of two along M, or along N, computes for these rows: ends of groups leave more empty ones along
 * M, ends of columns along N. */
int64_t cluster_tiles(const lev_gemm_grouped_args *a, const batch &b, int64_t span_m, int64_t span_n) {
  int64_t sum = 0;
  for (int i = 0; i < b.groups; ++i) sum += lev_ceil_div(a->rows[b.at[i]], span_m);
  return sum * lev_ceil_div(a->gemm.n, span_n);
}

/* Sharing B among two rows of tiles takes less from L2 than sharing A among two columns: 1 to 2 % of the time. */
bool pair_along_m(const lev_gemm_grouped_args *a, const batch &b) {
  return 98 * cluster_tiles(a, b, 2 * kTileM, kTileN) <= 100 * cluster_tiles(a, b, kTileM, 2 * kTileN);
}

template <bool by_depth, bool trans_b, pairing pair>
lev_status launch_into(const lev_gemm_grouped_args *a, const batch &b, cudaStream_t stream) {
  if (a->gemm.c_type == LEV_BF16) return launch<shape<by_depth, trans_b, lev_bf16, false, pair>>(a, b, stream);
  if (a->gemm.beta == 0) return launch<shape<by_depth, trans_b, float, false, pair>>(a, b, stream);
  return launch<shape<by_depth, trans_b, float, true, pair>>(a, b, stream);
}

/* The instance for the operands. */
lev_status launch_batch(const lev_gemm_grouped_args *a, const batch &b, cudaStream_t stream) {
  if (a->ragged == LEV_RAGGED_DEPTH) return launch_into<true, false, PAIR_ALONG_M>(a, b, stream);
  if (pair_along_m(a, b))
    return a->gemm.trans_b ? launch_into<false, true, PAIR_ALONG_M>(a, b, stream)
                           : launch_into<false, false, PAIR_ALONG_M>(a, b, stream);
  return a->gemm.trans_b ? launch_into<false, true, PAIR_ALONG_N>(a, b, stream)
                         : launch_into<false, false, PAIR_ALONG_N>(a, b, stream);
}

/* The next groups that have work to do, from *next on; by depth the deepest first. */
batch next_batch(const lev_gemm_grouped_args *a, int64_t *next) {
  bool depth = a->ragged == LEV_RAGGED_DEPTH;
  batch b;
  for (b.groups = 0; *next < a->groups && b.groups < kGroups; ++*next)
    if (a->rows[*next] > 0 || (depth && a->gemm.beta == 0)) b.at[b.groups++] = *next;
  if (depth)
    std::sort(b.at, b.at + b.groups,
              [a](int64_t x, int64_t y) { return a->rows[x] != a->rows[y] ? a->rows[x] > a->rows[y] : x < y; });
  return b;
}

} // namespace

lev_status lev_gemm_grouped_cuda(const void *args, void *cuda_stream) {
  const lev_gemm_grouped_args *a = static_cast<const lev_gemm_grouped_launch *>(args)->args;
  cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
  for (int64_t next = 0; next < a->groups;) {
    batch b = next_batch(a, &next);
    if (b.groups > 0) LEV_TRY(launch_batch(a, b, stream));
  }
  return LEV_OK;
}
