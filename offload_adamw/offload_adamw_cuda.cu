/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW on the GPU: every operation rounds as on the CPU (explicit intrinsics, nothing contracted), so the bits are
 * equal. Four elements at a time where all arrays allow it, else one. The norm keeps the CPU's order of additions. */
#include <ctime>

#include <cuda_pipeline.h>

#include "common/kernel.cuh"
#include "offload_adamw/offload_adamw_team.h"

namespace {

constexpr int kThreads = 256, kMostBlocks = 132 * 32;

__device__ __forceinline__ float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ __forceinline__ double multiply(double a, double b) {
  return __dmul_rn(a, b);
}
__device__ __forceinline__ float fused(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double fused(double a, double b, double c) {
  return __fma_rn(a, b, c);
}
__device__ __forceinline__ float divide(float a, float b) {
  return __fdiv_rn(a, b);
}
__device__ __forceinline__ double divide(double a, double b) {
  return __ddiv_rn(a, b);
}
__device__ __forceinline__ float root(float x) {
  return __fsqrt_rn(x);
}
__device__ __forceinline__ double root(double x) {
  return __dsqrt_rn(x);
}

unsigned blocks_for(int64_t count, int n) {
  return lev_grid(lev_ceil_div(count, n), kThreads, kMostBlocks);
}

/* ---- update ---- */

template <class P, class G> struct update_job {
  const G *grads;
  P *params;
  lev_arith<P> *master, *exp_avg, *exp_avg_sq;
  int64_t count;
  lev_arith<P> scale, beta1, one_beta1, beta2, one_beta2, inv_sqrt_bc2, eps, minus_decay, minus_rate;
};

/* The order of operations is the one in offload_adamw.h. */
template <class P, class G, int n> __device__ __forceinline__ void update_at(const update_job<P, G> &j, int64_t i) {
  using A = lev_arith<P>;
  lev_vec<G, n> x = lev_read<G, n>(j.grads + i);
  lev_vec<A, n> w = lev_read<A, n>(j.master + i), m = lev_read<A, n>(j.exp_avg + i),
                v = lev_read<A, n>(j.exp_avg_sq + i);
  lev_vec<P, n> out;
#pragma unroll
  for (int k = 0; k < n; ++k) {
    A g = multiply(j.scale, lev_load(x.at[k]));
    m.at[k] = fused(j.beta1, m.at[k], multiply(j.one_beta1, g));
    v.at[k] = fused(j.beta2, v.at[k], multiply(multiply(j.one_beta2, g), g));
    A d = fused(root(v.at[k]), j.inv_sqrt_bc2, j.eps);
    A p = fused(j.minus_decay, w.at[k], w.at[k]);
    w.at[k] = fused(j.minus_rate, divide(m.at[k], d), p);
    out.at[k] = lev_store<P>(w.at[k]);
  }
  lev_write<A, n>(j.exp_avg + i, m);
  lev_write<A, n>(j.exp_avg_sq + i, v);
  lev_write<A, n>(j.master + i, w);
  lev_write<P, n>(j.params + i, out);
}

template <class P, class G, int n> __global__ void __launch_bounds__(kThreads) update_kernel(const update_job<P, G> j) {
  const int64_t stride = (int64_t)gridDim.x * kThreads, id = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  const int64_t groups = j.count / n;
  for (int64_t i = id; i < groups; i += stride) update_at<P, G, n>(j, i * n);
  for (int64_t i = groups * n + id; i < j.count; i += stride) update_at<P, G, 1>(j, i);
}

template <class P, class G> lev_status update(const oadamw_update_args *u, cudaStream_t stream) {
  using A = lev_arith<P>;
  const oadamw_rates *r = &u->rates;
  update_job<P, G> j = {(const G *)u->grads, (P *)u->params, (A *)u->master,   (A *)u->exp_avg,
                        (A *)u->exp_avg_sq,  u->count,       (A)r->grad_scale, (A)r->beta1,
                        (A)r->one_beta1,     (A)r->beta2,    (A)r->one_beta2,  (A)r->inv_sqrt_bc2,
                        (A)r->eps,           -(A)r->decay,   -(A)r->rate};
  constexpr size_t p_unit = sizeof(P) * 4 < 16 ? sizeof(P) * 4 : 16, g_unit = sizeof(G) * 4 < 16 ? sizeof(G) * 4 : 16;
  bool aligned = lev_divides(16, u->master, u->exp_avg, u->exp_avg_sq) && lev_divides(p_unit, u->params) &&
                 lev_divides(g_unit, u->grads);
  if (aligned)
    update_kernel<P, G, 4><<<blocks_for(u->count, 4), kThreads, 0, stream>>>(j);
  else
    update_kernel<P, G, 1><<<blocks_for(u->count, 1), kThreads, 0, stream>>>(j);
  return lev_cuda_launched("oadamw.update");
}

/* ---- update on the host ---- */

void CUDART_CB run_on_host(void *data) {
  oadamw_host_slot *slot = (oadamw_host_slot *)data;
  oadamw_team_update(slot->team, &slot->args);
  __atomic_store_n(&slot->busy, 0, __ATOMIC_RELEASE);
}

/* ---- between parameters and state ---- */

template <class T, int n> __global__ void __launch_bounds__(kThreads) init_kernel(const oadamw_convert_args c) {
  using A = lev_arith<T>;
  const int64_t stride = (int64_t)gridDim.x * kThreads, id = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  const int64_t groups = c.count / n;
  const T *params = (const T *)c.params_in;
  A *master = (A *)c.master, *exp_avg = (A *)c.exp_avg, *exp_avg_sq = (A *)c.exp_avg_sq;
  const lev_vec<A, n> zero = {};
  for (int64_t i = id; i < groups; i += stride) {
    lev_vec<T, n> x = lev_read<T, n>(params + i * n);
    lev_vec<A, n> wide;
    for (int k = 0; k < n; ++k) wide.at[k] = lev_load(x.at[k]);
    lev_write<A, n>(master + i * n, wide);
    lev_write<A, n>(exp_avg + i * n, zero);
    lev_write<A, n>(exp_avg_sq + i * n, zero);
  }
  for (int64_t i = groups * n + id; i < c.count; i += stride)
    master[i] = lev_load(params[i]), exp_avg[i] = 0, exp_avg_sq[i] = 0;
}

template <class T, int n> __global__ void __launch_bounds__(kThreads) publish_kernel(const oadamw_convert_args c) {
  using A = lev_arith<T>;
  const int64_t stride = (int64_t)gridDim.x * kThreads, id = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  const int64_t groups = c.count / n;
  T *params = (T *)c.params_out;
  const A *master = (const A *)c.master;
  for (int64_t i = id; i < groups; i += stride) {
    lev_vec<A, n> wide = lev_read<A, n>(master + i * n);
    lev_vec<T, n> x;
    for (int k = 0; k < n; ++k) x.at[k] = lev_store<T>(wide.at[k]);
    lev_write<T, n>(params + i * n, x);
  }
  for (int64_t i = groups * n + id; i < c.count; i += stride) params[i] = lev_store<T>(master[i]);
}

template <class T> lev_status init(const oadamw_convert_args *c, cudaStream_t stream) {
  constexpr size_t unit = sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16;
  if (lev_divides(16, c->master, c->exp_avg, c->exp_avg_sq) && lev_divides(unit, c->params_in))
    init_kernel<T, 4><<<blocks_for(c->count, 4), kThreads, 0, stream>>>(*c);
  else
    init_kernel<T, 1><<<blocks_for(c->count, 1), kThreads, 0, stream>>>(*c);
  return lev_cuda_launched("oadamw.init");
}

template <class T> lev_status publish(const oadamw_convert_args *c, cudaStream_t stream) {
  constexpr size_t unit = sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16;
  if (lev_divides(16, c->master) && lev_divides(unit, c->params_out))
    publish_kernel<T, 4><<<blocks_for(c->count, 4), kThreads, 0, stream>>>(*c);
  else
    publish_kernel<T, 1><<<blocks_for(c->count, 1), kThreads, 0, stream>>>(*c);
  return lev_cuda_launched("oadamw.publish");
}

/* ---- norm ---- */

constexpr int kLanes = 16;  /* interleaved sums of a block of the norm */
constexpr int kLevels = 11; /* of the tree over blocks, per launch */
constexpr int kNodes = 1 << kLevels;

/* Adds the value to its sum, or counts it when it is not finite. Squares of f32 are exact in f64, so that a fused
 * multiply-add rounds as the two operations do. */
__device__ __forceinline__ void square_into(float x, double &sum, int &bad) {
  bool finite = x - x == 0;
  double value = finite ? (double)x : 0.0;
  sum = __fma_rn(value, value, sum);
  bad += !finite;
}
__device__ __forceinline__ void square_into(double x, double &sum, int &bad) {
  bool finite = x - x == 0;
  double value = finite ? x : 0.0;
  sum = __dadd_rn(sum, __dmul_rn(value, value));
  bad += !finite;
}

/* 16 / n neighbouring threads hold n sums each: adds them pairwise; the first of the threads leaves the result. */
template <int n> __device__ __forceinline__ void fold_lanes(double (&sum)[n], int bad, bool first, double *out) {
  constexpr int owners = kLanes / n;
#pragma unroll
  for (int width = kLanes / 2; width >= n; width /= 2) {
#pragma unroll
    for (int k = 0; k < n; ++k) sum[k] = __dadd_rn(sum[k], __shfl_down_sync(0xffffffffu, sum[k], width / n, owners));
    bad += __shfl_down_sync(0xffffffffu, bad, width / n, owners);
  }
#pragma unroll
  for (int width = n / 2; width > 0; width /= 2)
#pragma unroll
    for (int k = 0; k < width; ++k) sum[k] = __dadd_rn(sum[k], sum[k + width]);
  if (first) out[0] = sum[0], out[1] = (double)bad;
}

/* Any block: 16 / n threads for it, each with n neighbouring sums, which it reads n elements at a time. */
template <class T, int n> __global__ void __launch_bounds__(kThreads) norm_blocks_kernel(const oadamw_norm_args a) {
  constexpr int owners = kLanes / n;
  const int64_t blocks = lev_ceil_div(a.count, OADAMW_NORM_BLOCK);
  const int64_t id = (int64_t)blockIdx.x * kThreads + threadIdx.x, block = id / owners;
  const int own = (int)(id % owners) * n;
  const int64_t begin = block * OADAMW_NORM_BLOCK;
  const int size = block < blocks ? (int)lev_min_i64(OADAMW_NORM_BLOCK, a.count - begin) : 0, whole = size / kLanes;
  const T *x = (const T *)a.grads + begin + own;
  double sum[n] = {};
  int bad = 0;
#pragma unroll 8
  for (int i = 0; i < whole; ++i) {
    lev_vec<T, n> piece = lev_read<T, n>(x + i * kLanes);
#pragma unroll
    for (int k = 0; k < n; ++k) square_into(lev_load(piece.at[k]), sum[k], bad);
  }
#pragma unroll
  for (int k = 0; k < n; ++k)
    if (whole * kLanes + own + k < size) square_into(lev_load(x[whole * kLanes + k]), sum[k], bad);
  fold_lanes<n>(sum, bad, own == 0 && block < blocks, a.scratch + 2 * block);
}

/* Whole blocks, aligned: the same threads and sums, but a warp fetches 256 neighbouring bytes of each of its blocks at
 * a time, so that memory is read in long stretches. kStages of these are in shared memory or on their way. */
constexpr int kNormThreads = 128, kPiece = 256, kStages = 3;

template <class T> struct norm_tile {
  static constexpr int n = lev_per_16<T>, owners = kLanes / n, blocks = 32 / owners; /* of a warp */
  static constexpr int pitch = kPiece + owners * 16; /* spreads the blocks over the banks */
  static constexpr int pieces = OADAMW_NORM_BLOCK * (int)sizeof(T) / kPiece;
  static constexpr int warp_bytes = kStages * blocks * pitch, bytes = kNormThreads / 32 * warp_bytes;
};

template <class T>
__device__ __forceinline__ void fetch_piece(const unsigned char *from, int64_t left, int piece, unsigned char *tile) {
  using tile_of = norm_tile<T>;
  constexpr int64_t block_bytes = (int64_t)OADAMW_NORM_BLOCK * sizeof(T);
  tile += piece % kStages * tile_of::blocks * tile_of::pitch;
#pragma unroll
  for (int i = threadIdx.x % 32; i < tile_of::blocks * (kPiece / 16); i += 32) {
    int block = i / (kPiece / 16), at = i % (kPiece / 16) * 16;
    if (piece < tile_of::pieces && block < left)
      __pipeline_memcpy_async(tile + block * tile_of::pitch + at,
                              from + block * block_bytes + (int64_t)piece * kPiece + at, 16);
  }
  __pipeline_commit();
}

template <class T>
__global__ void __launch_bounds__(kNormThreads) norm_whole_kernel(const T *grads, int64_t blocks, double *scratch) {
  using tile_of = norm_tile<T>;
  constexpr int n = tile_of::n, row = kLanes * (int)sizeof(T);
  extern __shared__ uint4 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = lane / tile_of::owners,
            own = lane % tile_of::owners;
  const int64_t first = ((int64_t)blockIdx.x * (kNormThreads / 32) + warp) * tile_of::blocks, left = blocks - first;
  const unsigned char *from = (const unsigned char *)(grads + first * OADAMW_NORM_BLOCK);
  unsigned char *tile = (unsigned char *)memory + warp * tile_of::warp_bytes;
  double sum[n] = {};
  int bad = 0;
  for (int piece = 0; piece < kStages - 1; ++piece) fetch_piece<T>(from, left, piece, tile);
  for (int piece = 0; piece < tile_of::pieces; ++piece) {
    fetch_piece<T>(from, left, piece + kStages - 1, tile);
    __pipeline_wait_prior(kStages - 1);
    __syncwarp();
    const unsigned char *at = tile + (piece % kStages * tile_of::blocks + mine) * tile_of::pitch + own * 16;
#pragma unroll
    for (int i = 0; i < kPiece / row && mine < left; ++i) {
      lev_vec<T, n> values = lev_read<T, n>((const T *)(at + i * row));
#pragma unroll
      for (int k = 0; k < n; ++k) square_into(lev_load(values.at[k]), sum[k], bad);
    }
    __syncwarp();
  }
  fold_lanes<n>(sum, bad, own == 0 && mine < left, scratch + 2 * (first + mine));
}

/* Levels of the pairwise tree: block b adds up the nodes `stride` apart from number b * kNodes on; its root stays in
 * the scratch, or is added to out2 when it is the root of all. */
__global__ void __launch_bounds__(1024) norm_tree_kernel(const oadamw_norm_args a, int64_t blocks, int64_t stride) {
  __shared__ double2 node[kNodes];
  const int64_t first = (int64_t)blockIdx.x * kNodes, all = lev_ceil_div(blocks, stride);
  const int n = (int)lev_min_i64(kNodes, all - first);
  for (int i = threadIdx.x; i < n; i += 1024) {
    const double *from = a.scratch + 2 * (first + i) * stride;
    node[i] = make_double2(from[0], from[1]);
  }
  __syncthreads();
  for (int step = 1; step < n; step *= 2) {
    for (int i = threadIdx.x * 2 * step; i + step < n; i += 1024 * 2 * step) {
      node[i].x = __dadd_rn(node[i].x, node[i + step].x);
      node[i].y += node[i + step].y;
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  a.scratch[2 * first * stride] = node[0].x, a.scratch[2 * first * stride + 1] = node[0].y;
  if (all <= kNodes) a.out2[0] = __dadd_rn(a.out2[0], node[0].x), a.out2[1] += node[0].y;
}

template <class T> lev_status norm_blocks(const oadamw_norm_args *a, cudaStream_t stream) {
  constexpr int n = lev_per_16<T>, per_warp = norm_tile<T>::blocks, per_block = kNormThreads / 32 * per_warp;
  oadamw_norm_args rest = *a;
  bool aligned = lev_divides(16, a->grads);
  if (aligned && a->count >= OADAMW_NORM_BLOCK) {
    int64_t whole = a->count / OADAMW_NORM_BLOCK;
    auto kernel = norm_whole_kernel<T>;
    LEV_TRY(lev_allow_shared(kernel));
    kernel<<<(unsigned)lev_ceil_div(whole, per_block), kNormThreads, norm_tile<T>::bytes, stream>>>((const T *)a->grads,
                                                                                                    whole, a->scratch);
    LEV_TRY(lev_cuda_launched("oadamw.norm_blocks"));
    rest.grads = (const T *)a->grads + whole * OADAMW_NORM_BLOCK, rest.scratch += 2 * whole;
    rest.count -= whole * OADAMW_NORM_BLOCK;
    if (rest.count == 0) return LEV_OK;
  }
  int64_t blocks = lev_ceil_div(rest.count, OADAMW_NORM_BLOCK);
  if (aligned)
    norm_blocks_kernel<T, n><<<(unsigned)lev_ceil_div(blocks * (kLanes / n), kThreads), kThreads, 0, stream>>>(rest);
  else
    norm_blocks_kernel<T, 1><<<(unsigned)lev_ceil_div(blocks * kLanes, kThreads), kThreads, 0, stream>>>(rest);
  return lev_cuda_launched("oadamw.norm_blocks");
}

} // namespace

lev_status oadamw_update_cuda(const void *args, void *stream) {
  const oadamw_update_args *u = (const oadamw_update_args *)args;
  if (u->count == 0) return LEV_OK;
  switch (oadamw_pair_of(u->param_dtype, u->grad_dtype)) {
  case OADAMW_F64_F64:
    return update<double, double>(u, (cudaStream_t)stream);
  case OADAMW_F32_F32:
    return update<float, float>(u, (cudaStream_t)stream);
  case OADAMW_F32_BF16:
    return update<float, lev_bf16>(u, (cudaStream_t)stream);
  case OADAMW_BF16_F32:
    return update<lev_bf16, float>(u, (cudaStream_t)stream);
  case OADAMW_BF16_BF16:
    return update<lev_bf16, lev_bf16>(u, (cudaStream_t)stream);
  default:
    return lev_fail(LEV_ERR_UNSUPPORTED, "oadamw.update of %s parameters with %s gradients",
                    lev_dtype_name(u->param_dtype), lev_dtype_name(u->grad_dtype));
  }
}

lev_status oadamw_host_update_cuda(const void *args, void *stream) {
  const oadamw_update_args *u = (const oadamw_update_args *)args;
  oadamw_host_slot *slot = u->slot;
  /* Busy: the update that had the slot before, two steps ago, has not run yet. */
  while (__atomic_load_n(&slot->busy, __ATOMIC_ACQUIRE)) {
    cudaError_t lost = cudaStreamQuery((cudaStream_t)stream); /* after a device error it never will */
    if (lost != cudaSuccess && lost != cudaErrorNotReady)
      return lev_cuda_fail(lost, "waiting for an update on the host");
    timespec pause = {0, 50000};
    nanosleep(&pause, nullptr);
  }
  slot->args = *u;
  slot->busy = 1;
  cudaError_t error = cudaLaunchHostFunc((cudaStream_t)stream, run_on_host, slot);
  if (error == cudaSuccess) return LEV_OK;
  slot->busy = 0;
  return lev_cuda_fail(error, "cudaLaunchHostFunc");
}

lev_status oadamw_init_cuda(const void *args, void *stream) {
  const oadamw_convert_args *c = (const oadamw_convert_args *)args;
  if (c->count == 0) return LEV_OK;
  return LEV_CUDA_PICK(c->param_dtype, init)(c, (cudaStream_t)stream);
}

lev_status oadamw_publish_cuda(const void *args, void *stream) {
  const oadamw_convert_args *c = (const oadamw_convert_args *)args;
  if (c->count == 0) return LEV_OK;
  return LEV_CUDA_PICK(c->param_dtype, publish)(c, (cudaStream_t)stream);
}

lev_status oadamw_norm_blocks_cuda(const void *args, void *stream) {
  const oadamw_norm_args *a = (const oadamw_norm_args *)args;
  if (a->count == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, norm_blocks)(a, (cudaStream_t)stream);
}

lev_status oadamw_norm_tree_cuda(const void *args, void *stream) {
  const oadamw_norm_args *a = (const oadamw_norm_args *)args;
  int64_t blocks = lev_ceil_div(a->count, OADAMW_NORM_BLOCK);
  for (int64_t stride = 1; stride < blocks || stride == 1; stride *= kNodes) {
    int64_t nodes = lev_ceil_div(blocks, stride);
    if (nodes == 0) break;
    norm_tree_kernel<<<(unsigned)lev_ceil_div(nodes, kNodes), 1024, 0, (cudaStream_t)stream>>>(*a, blocks, stride);
    LEV_TRY(lev_cuda_launched("oadamw.norm_tree"));
  }
  return LEV_OK;
}
