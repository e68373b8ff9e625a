/* SPDX-License-Identifier: Apache-2.0 */
/* The router on the GPU: a warp per token, thread `lane` of it owns the experts lane, lane + 32, ...
 *
 * The best experts are found one after another: scores become unsigned keys in the same order, each thread knows the
 * best of its own, and only the owner of a chosen one looks again. Statistics are kept per warp and owner, summed per
 * block into the scratch, and over blocks in order; counts are integers. */
#include "harness/model/ops.h"
#include "harness/model/rows.cuh"

namespace {

using namespace lev_rows;

constexpr int kMostWarps = 8, kMostParts = kMultiprocessors * 4;
constexpr size_t kSharedWanted = 48 * 1024; /* per block, where one warp needs less */
constexpr double kTiny = 1e-20;             /* keeps the sum of the chosen scores off zero */
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}
__device__ __forceinline__ float logarithm(float x) {
  return logf(x);
}
__device__ __forceinline__ double logarithm(double x) {
  return log(x);
}

/* ---- keys: unsigned numbers in the order of the scores; 0 is taken, 1 NaN, below minus infinity ---- */

template <class A> struct key_of;
template <> struct key_of<float> { using type = uint32_t; };
template <> struct key_of<double> { using type = unsigned long long; };
template <class A> using key = typename key_of<A>::type;

__device__ __forceinline__ uint32_t make_key(float x) {
  if (x != x) return 1;
  uint32_t bits = __float_as_uint(x + 0.0f); /* -0 is 0 */
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ unsigned long long make_key(double x) {
  if (x != x) return 1;
  unsigned long long bits = (unsigned long long)__double_as_longlong(x + 0.0);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

/* The largest key of the warp and, among its owners, the smallest index; the same on every thread. */
template <class K> __device__ __forceinline__ void warp_best(K &best, int &index) {
  for (int step = 16; step > 0; step /= 2) {
    K other = __shfl_xor_sync(kAll, best, step);
    int other_index = __shfl_xor_sync(kAll, index, step);
    if (other > best || (other == best && other_index < index)) best = other, index = other_index;
  }
}

/* Best of a thread's own keys; the first of equals. */
template <class K> __device__ __forceinline__ void own_best(const K *keys, int n, int lane, K &best, int &index) {
  best = 0, index = n;
  for (int e = lane; e < n; e += 32)
    if (keys[e] > best) best = keys[e], index = e;
}

/* Takes the `count` best of n keys; calls found(j, index) on every thread. Taken keys become 0. */
template <class K, class F> __device__ __forceinline__ void take_best(K *keys, int n, int count, int lane, F found) {
  K mine;
  int mine_at;
  own_best(keys, n, lane, mine, mine_at);
  for (int j = 0; j < count; ++j) {
    K best = mine;
    int at = mine_at;
    warp_best(best, at);
    found(j, at);
    if (at != mine_at) continue;
    keys[at] = 0;
    own_best(keys, n, lane, mine, mine_at);
  }
  __syncwarp();
}

/* ---- scores ---- */

template <class A> __device__ __forceinline__ A warp_sum(A x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

template <class A> __device__ __forceinline__ A log_sum_exp(const A *logits, int n, int lane) {
  A top = -(A)INFINITY, sum = 0;
  for (int e = lane; e < n; e += 32) top = logits[e] > top || logits[e] != logits[e] ? logits[e] : top;
  for (int step = 16; step > 0; step /= 2) {
    A other = __shfl_xor_sync(kAll, top, step);
    top = other > top || other != other ? other : top;
  }
  for (int e = lane; e < n; e += 32) sum += exponential(logits[e] - top);
  return top + logarithm(warp_sum(sum));
}

template <class A> __device__ __forceinline__ A score_of(const lev_route_rule &rule, A logit, A lse) {
  return rule.score == LEV_SCORE_SIGMOID ? 1 / (1 + exponential(-logit)) : exponential(logit - lse);
}

template <class A>
__device__ __forceinline__ A score_sum(const lev_route_rule &rule, const A *logits, int n, int lane, A lse) {
  A sum = 0;
  for (int e = lane; e < n; e += 32) sum += score_of(rule, logits[e], lse);
  return warp_sum(sum);
}

/* ---- the choice ---- */

template <class A> union choice_value {
  A score;
  key<A> ordered;
};

/* Outside the best groups, choices become minus infinity. `best`: a key per group. */
template <class A>
__device__ __forceinline__ void keep_groups(const lev_route_rule &rule, A *choice, int n, key<A> *best, int lane) {
  const int groups = (int)rule.groups, size = n / groups;
  for (int g = lane; g < groups; g += 32) {
    A first = choice[g * size], second = size > 1 ? -(A)INFINITY : (A)0;
    for (int e = g * size + 1; e < (g + 1) * size; ++e) {
      A low = choice[e] > first ? first : choice[e];
      first = choice[e] > first ? choice[e] : first;
      second = low > second ? low : second;
    }
    best[g] = make_key(first + second);
  }
  __syncwarp();
  take_best(best, groups, (int)rule.top_groups, lane, [](int, int) {});
  for (int e = lane; e < n; e += 32)
    if (e >= groups * size || best[e / size] != 0) choice[e] = -(A)INFINITY;
}

template <class A>
__device__ __forceinline__ void select(const lev_router_args &a, int64_t row, const A *logits, A lse,
                                       choice_value<A> *choice, key<A> *groups, int lane) {
  const int n = (int)a.experts, k = (int)a.top_k;
  int32_t *ids = a.ids + row * k;
  const A *bias = (const A *)a.bias;
  if (a.uniform) {
    for (int j = lane; j < k; j += 32) ids[j] = (int32_t)((row * k + j) % n);
    return;
  }
  if (!bias && a.rule.groups == 1) { /* the logits have the order of the scores and do not saturate */
    for (int e = lane; e < n; e += 32) choice[e].ordered = make_key(logits[e]);
  } else {
    for (int e = lane; e < n; e += 32) choice[e].score = score_of(a.rule, logits[e], lse) + (bias ? bias[e] : 0);
    __syncwarp();
    if (a.rule.groups > 1) keep_groups(a.rule, &choice[0].score, n, groups, lane);
    for (int e = lane; e < n; e += 32) choice[e].ordered = make_key(choice[e].score);
  }
  take_best(&choice[0].ordered, n, k, lane, [&](int j, int at) {
    if (lane == j % 32) ids[j] = at;
  });
}

/* ---- forward ---- */

/* Shared memory of one warp: choices, group keys, sums of p, loads. */
template <class A> struct warp_memory {
  double *mass;
  choice_value<A> *choice;
  key<A> *groups;
  unsigned *load;
  static __host__ __device__ size_t bytes(const lev_router_args &a) {
    size_t n = (size_t)a.experts, groups = a.rule.groups > 1 ? (size_t)a.rule.groups : 0;
    size_t sum = n * (sizeof(double) + sizeof(A) + sizeof(unsigned)) + groups * sizeof(A);
    return (sum + 15) / 16 * 16;
  }
  __device__ warp_memory(const lev_router_args &a, unsigned char *base) {
    mass = (double *)base;
    choice = (choice_value<A> *)(mass + a.experts);
    groups = (key<A> *)(choice + a.experts);
    load = (unsigned *)(groups + (a.rule.groups > 1 ? a.rule.groups : 0));
  }
};

/* Leaves the block's sums in partial[block]: squared log-sum-exp, p per expert, assignments per expert. */
template <class A>
__device__ __forceinline__ void leave_sums(const lev_router_args &a, unsigned char *shared, size_t one, int warps,
                                           double squares, double *partial) {
  __shared__ double square[kMostWarps];
  const int n = (int)a.experts;
  if (threadIdx.x % 32 == 0) square[threadIdx.x / 32] = squares;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += warps * 32) {
    double mass = 0;
    unsigned long long load = 0;
    for (int w = 0; w < warps; ++w) {
      warp_memory<A> m(a, shared + w * one);
      mass += m.mass[i], load += m.load[i];
    }
    if (a.sums) {
      double *to = partial + (int64_t)blockIdx.x * (1 + 2 * n);
      to[1 + i] = mass, to[1 + n + i] = (double)load;
    }
    if (a.counts && load > 0) atomicAdd((unsigned long long *)a.counts + i, load);
  }
  if (!a.sums || threadIdx.x != 0) return;
  double sum = 0;
  for (int w = 0; w < warps; ++w) sum += square[w];
  partial[(int64_t)blockIdx.x * (1 + 2 * n)] = sum;
}

template <class A>
__global__ void __launch_bounds__(kMostWarps * 32) forward_kernel(const lev_router_args a, double *partial) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int n = (int)a.experts, k = (int)a.top_k;
  const size_t one = warp_memory<A>::bytes(a);
  warp_memory<A> m(a, shared + warp * one);
  double squares = 0;
  const bool statistics = a.sums || a.counts;
  for (int e = lane; e < n && statistics; e += 32) m.mass[e] = 0, m.load[e] = 0;
  for (int64_t row = (int64_t)blockIdx.x * warps + warp; row < a.rows; row += (int64_t)gridDim.x * warps) {
    const A *logits = (const A *)a.logits + row * n;
    const int32_t *ids = a.ids + row * k;
    A lse = log_sum_exp(logits, n, lane), sum = 0;
    if (a.select) select<A>(a, row, logits, lse, m.choice, m.groups, lane);
    __syncwarp();
    for (int j = lane; j < k; j += 32) sum += score_of(a.rule, logits[ids[j]], lse);
    sum = warp_sum(sum) + (A)kTiny;
    A scale = (A)a.rule.scale / (a.rule.norm_topk ? sum : 1);
    for (int j = lane; j < k; j += 32) ((A *)a.weights)[row * k + j] = scale * score_of(a.rule, logits[ids[j]], lse);
    if (!statistics) continue;
    for (int j = 0; j < k; ++j) {
      int id = ids[j];
      if (id % 32 == lane) m.load[id] += 1;
    }
    if (!a.sums) continue;
    A share = 1;
    if (a.rule.score != LEV_SCORE_SOFTMAX) share = 1 / (score_sum(a.rule, logits, n, lane, lse) + (A)kTiny);
    for (int e = lane; e < n; e += 32) m.mass[e] += (double)(share * score_of(a.rule, logits[e], lse));
    squares += (double)lse * (double)lse;
  }
  if (statistics) leave_sums<A>(a, shared, one, warps, squares, partial);
}

/* Warps per block, and the dynamic shared memory made available. */
template <class F> lev_status shape(F kernel, size_t one_warp, int *warps, size_t *bytes) {
  *warps = (int)lev_max_i64(1, lev_min_i64(kMostWarps, (int64_t)(kSharedWanted / (one_warp ? one_warp : 1))));
  *bytes = one_warp * (size_t)*warps;
  return *bytes > kSharedWanted ? lev_allow_shared(kernel) : LEV_OK;
}

template <class A> lev_status forward(const lev_router_args *a, cudaStream_t stream) {
  int64_t width = 1 + 2 * a->experts, parts = kMostParts;
  int warps;
  size_t bytes;
  if (a->sums) parts = parts_in(a->scratch_bytes, width, sizeof(double), kMostParts);
  if (parts < 1)
    return lev_fail(LEV_ERR_CAPACITY, "model.router needs a scratch of %zu bytes at least, it has %zu",
                    (size_t)width * sizeof(double), a->scratch_bytes);
  LEV_TRY(shape(forward_kernel<A>, warp_memory<A>::bytes(*a), &warps, &bytes));
  unsigned blocks = blocks_for(a->rows, warps, parts);
  double *partial = (double *)a->scratch;
  forward_kernel<A><<<blocks, warps * 32, bytes, stream>>>(*a, partial);
  LEV_TRY(lev_cuda_launched("model.router"));
  return a->sums ? fold((const double *)partial, blocks, width, width, a->sums, stream) : LEV_OK;
}

/* ---- backward ---- */

/* A warp per token; `gradient`: d/dscore per expert, in shared memory. */
template <class T>
__global__ void __launch_bounds__(kMostWarps * 32) backward_kernel(const lev_router_backward_args a) {
  using A = lev_arith<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int n = (int)a.experts, k = (int)a.top_k;
  const bool sigmoid = a.rule.score == LEV_SCORE_SIGMOID, balance = a.balance_scale != 0;
  const A balance_scale = (A)a.balance_scale, factor = (A)a.rule.scale;
  A *gradient = (A *)shared + (int64_t)warp * n;
  for (int64_t row = (int64_t)blockIdx.x * warps + warp; row < a.rows; row += (int64_t)gridDim.x * warps) {
    const A *logits = (const A *)a.logits + row * n, *dw = (const A *)a.dweights + row * k;
    const int32_t *ids = a.ids + row * k;
    T *out = (T *)a.dlogits + row * n;
    A lse = log_sum_exp(logits, n, lane), pull = (A)(2 * a.z_scale) * lse, sum = 0, inner = 0, dot = 0;
    for (int e = lane; e < n; e += 32) gradient[e] = 0;
    for (int j = lane; j < k; j += 32) {
      A score = score_of(a.rule, logits[ids[j]], lse);
      sum += score, inner += score * dw[j];
    }
    sum = warp_sum(sum) + (A)kTiny, inner = warp_sum(inner);
    A share = a.rule.norm_topk ? factor / sum : factor, mean = a.rule.norm_topk ? inner / sum : 0;
    __syncwarp();
    for (int j = 0; j < k; ++j) /* each expert by its owner */
      if (ids[j] % 32 == lane) gradient[ids[j]] += share * (dw[j] - mean);
    A inverse = 1; /* of the sum of the scores */
    if (sigmoid && balance) inverse = 1 / (score_sum(a.rule, logits, n, lane, lse) + (A)kTiny);
    for (int e = lane; e < n; e += 32) {
      A score = score_of(a.rule, logits[e], lse);
      if (sigmoid) {
        if (balance) dot += balance_scale * (A)a.counts[e] * score * inverse;
      } else {
        if (balance) gradient[e] += balance_scale * (A)a.counts[e];
        dot += score * gradient[e];
      }
    }
    dot = warp_sum(dot);
    for (int e = lane; e < n; e += 32) {
      A score = score_of(a.rule, logits[e], lse), g = gradient[e];
      if (!sigmoid) {
        g = score * (g - dot + pull);
      } else {
        if (balance) g += (balance_scale * (A)a.counts[e] - dot) * inverse;
        g *= score * (1 - score);
        if (a.z_scale != 0) g += pull * exponential(logits[e] - lse);
      }
      out[e] = lev_store<T>(g);
    }
    __syncwarp();
  }
}

template <class T> lev_status backward(const lev_router_backward_args *a, cudaStream_t stream) {
  int warps;
  size_t bytes;
  LEV_TRY(shape(backward_kernel<T>, (size_t)a->experts * sizeof(lev_arith<T>), &warps, &bytes));
  backward_kernel<T><<<blocks_for(a->rows, warps, kMultiprocessors * 8), warps * 32, bytes, stream>>>(*a);
  return lev_cuda_launched("model.router_backward");
}

/* ---- selection bias: sums in the order of the experts, as on the CPU, for the sign depends on them ---- */

template <class A> __global__ void __launch_bounds__(256) bias_kernel(const lev_route_bias_args a) {
  __shared__ double share[LEV_EXPERTS_MAX], mean_of, shift_of;
  const int n = (int)a.experts;
  for (int e = threadIdx.x; e < n; e += 256) share[e] = a.counts[e] / (double)n;
  __syncthreads();
  if (threadIdx.x == 0) {
    double mean = 0;
    for (int e = 0; e < n; ++e) mean += share[e];
    mean_of = mean;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < n; e += 256) share[e] = (a.counts[e] < mean_of) - (a.counts[e] > mean_of);
  __syncthreads();
  if (threadIdx.x == 0) {
    double shift = 0;
    for (int e = 0; e < n; ++e) shift += share[e];
    shift_of = shift / (double)n;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < n; e += 256) ((A *)a.bias)[e] += (A)(a.rate * (share[e] - shift_of));
}

} // namespace

lev_status lev_router_cuda(const void *args, void *stream) {
  const lev_router_args *a = (const lev_router_args *)args;
  if (a->rows == 0) return LEV_OK;
  return a->dtype == LEV_F64 ? forward<double>(a, (cudaStream_t)stream) : forward<float>(a, (cudaStream_t)stream);
}

lev_status lev_router_backward_cuda(const void *args, void *stream) {
  const lev_router_backward_args *a = (const lev_router_backward_args *)args;
  if (a->rows == 0) return LEV_OK;
  return LEV_CUDA_PICK(a->dtype, backward)(a, (cudaStream_t)stream);
}

lev_status lev_route_bias_cuda(const void *args, void *stream) {
  const lev_route_bias_args *a = (const lev_route_bias_args *)args;
  if (a->experts == 0) return LEV_OK;
  if (a->dtype == LEV_F64)
    bias_kernel<double><<<1, 256, 0, (cudaStream_t)stream>>>(*a);
  else
    bias_kernel<float><<<1, 256, 0, (cudaStream_t)stream>>>(*a);
  return lev_cuda_launched("model.route_bias");
}
