/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA side of ring_dtp's kernels. */
#include <cstdint>

#include "common/kernel.cuh"
#include "ring_dtp/ring_dtp.h"
#include "ring_dtp/ring_dtp_ops.h"

namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 1024;

template <class A> struct row_state {
  A m, z; /* running maximum and sum of e^(x - m); after finish z = grad_scale / z */
  union {
    A y;           /* logit of the label, 0 until met */
    int32_t label; /* after finish: the label, -1 if the token does not count */
  } u;
};
static_assert(sizeof(row_state<float>) == RDTP_STATE * sizeof(float));
static_assert(sizeof(row_state<double>) == RDTP_STATE * sizeof(double));

__device__ __forceinline__ float exponential(float x) {
  return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}
template <class A> __device__ __forceinline__ A lowest() {
  return -A(INFINITY);
}

/* Exponents are taken relative to the maximum, or to 0 where there is none yet. */
template <class A> __device__ __forceinline__ A base_of(A m) {
  return m == lowest<A>() ? A(0) : m;
}
/* The maximum ignores NaN; a NaN logit ends up in z. */
template <class A> __device__ __forceinline__ A larger(A a, A b) {
  return b > a ? b : a;
}

/* Maximum and sum of disjoint columns. */
template <class A> __device__ __forceinline__ void join(A &m, A &z, A m2, A z2) {
  A most = larger(m, m2), base = base_of(most);
  z = exponential(m - base) * z + exponential(m2 - base) * z2;
  m = most;
}

template <class A> __device__ row_state<A> joined(const row_state<A> &a, const row_state<A> &b) {
  row_state<A> to = a;
  join(to.m, to.z, b.m, b.z);
  to.u.y = a.u.y + b.u.y;
  return to;
}

/* ---- fold ---- */

/* (m, z) of a block's threads, folded in a fixed order; thread 0 has the result. */
template <class A> __device__ __forceinline__ void block_join(A &m, A &z, A (*memory)[2]) {
  for (int step = 16; step > 0; step /= 2)
    join(m, z, __shfl_down_sync(0xffffffffu, m, step), __shfl_down_sync(0xffffffffu, z, step));
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32][0] = m, memory[threadIdx.x / 32][1] = z;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  bool mine = threadIdx.x < kThreads / 32;
  m = mine ? memory[threadIdx.x][0] : lowest<A>(), z = mine ? memory[threadIdx.x][1] : A(0);
  for (int step = 16; step > 0; step /= 2)
    join(m, z, __shfl_down_sync(0xffffffffu, m, step), __shfl_down_sync(0xffffffffu, z, step));
}

/* One block per row, one pass: each thread keeps a running maximum and rescales its sum when it rises. */
template <class A> __global__ void __launch_bounds__(kThreads) fold_rows(rdtp_fold_args p) {
  constexpr int per = lev_per_16<A>;
  __shared__ A memory[kThreads / 32][2];
  int64_t i = blockIdx.x;
  const A *x = static_cast<const A *>(p.tile) + i * p.ld;
  A m = lowest<A>(), z = 0;
  for (int64_t j = (int64_t)threadIdx.x * per; j < p.cols; j += kThreads * per) {
    lev_vec<A, per> v;
    if (j + per <= p.cols)
      v = *reinterpret_cast<const lev_vec<A, per> *>(x + j);
    else
      for (int k = 0; k < per; ++k) v.at[k] = j + k < p.cols ? x[j + k] : lowest<A>();
    A most = m;
    for (int k = 0; k < per; ++k) most = larger(most, v.at[k]);
    A base = base_of(most), sum = 0;
    for (int k = 0; k < per; ++k) sum += exponential(v.at[k] - base);
    z = most > m ? exponential(m - base) * z + sum : z + sum;
    m = most;
  }
  block_join(m, z, memory);
  if (threadIdx.x > 0) return;
  row_state<A> strip;
  int64_t column = (int64_t)p.labels[i] - p.begin;
  strip.m = m, strip.z = z, strip.u.y = column >= 0 && column < p.cols ? x[column] : A(0);
  row_state<A> *state = static_cast<row_state<A> *>(p.state) + i;
  *state = p.first ? strip : joined(*state, strip);
}

template <class T> lev_status fold(const rdtp_fold_args *p, cudaStream_t stream) {
  if (p->rows > 0) fold_rows<lev_arith<T>><<<(unsigned)p->rows, kThreads, 0, stream>>>(*p);
  return lev_cuda_launched("rdtp.fold");
}

/* ---- merge, combine ---- */

template <class A> __global__ void merge_rows(rdtp_merge_args p) {
  row_state<A> *state = static_cast<row_state<A> *>(p.state);
  const row_state<A> *incoming = static_cast<const row_state<A> *>(p.incoming);
  int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (i < p.rows) state[i] = joined(incoming[i], state[i]);
}

template <class T> lev_status merge(const rdtp_merge_args *p, cudaStream_t stream) {
  if (p->rows > 0) merge_rows<lev_arith<T>><<<lev_grid(p->rows, kThreads, INT32_MAX), kThreads, 0, stream>>>(*p);
  return lev_cuda_launched("rdtp.merge");
}

template <class A> __global__ void combine_rows(rdtp_combine_args p) {
  const row_state<A> *parts = static_cast<const row_state<A> *>(p.parts);
  int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (i >= p.rows) return;
  row_state<A> sum;
  sum.m = lowest<A>(), sum.z = 0, sum.u.y = 0;
  for (int64_t k = 0; k < p.n_parts; ++k) sum = joined(sum, parts[k * p.rows + i]);
  static_cast<row_state<A> *>(p.state)[i] = sum;
}

template <class T> lev_status combine(const rdtp_combine_args *p, cudaStream_t stream) {
  if (p->rows > 0 && p->n_parts > 0)
    combine_rows<lev_arith<T>><<<lev_grid(p->rows, kThreads, INT32_MAX), kThreads, 0, stream>>>(*p);
  return lev_cuda_launched("rdtp.combine");
}

/* ---- finish ---- */

/* One block: thread t adds rows t, t + 1024, ... of the range, then the threads' sums meet in one tree. */
template <class A> __global__ void __launch_bounds__(kSumThreads) finish_sums(rdtp_finish_args p) {
  __shared__ double memory[3][kSumThreads / 32];
  const row_state<A> *state = static_cast<const row_state<A> *>(p.state);
  double nll = 0, valid = 0, bad = 0;
  for (int64_t i = p.loss_begin + threadIdx.x; i < p.loss_end; i += kSumThreads) {
    int32_t label = p.labels[i];
    bool counts = label >= 0 && label < p.vocab;
    if (counts) nll += (double)state[i].m + log((double)state[i].z) - (double)state[i].u.y;
    valid += counts;
    bad += !counts && label != RDTP_IGNORE;
  }
  nll = lev_block_sum<kSumThreads>(nll, memory[0]);
  valid = lev_block_sum<kSumThreads>(valid, memory[1]);
  bad = lev_block_sum<kSumThreads>(bad, memory[2]);
  if (threadIdx.x == 0) p.sums[0] += nll, p.sums[1] += valid, p.sums[2] += bad;
}

/* Runs after the sums: the record may be the state. */
template <class A> __global__ void finish_records(rdtp_finish_args p) {
  int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (i >= p.rows) return;
  int32_t label = p.labels[i];
  bool counts = label >= 0 && label < p.vocab;
  row_state<A> from = static_cast<const row_state<A> *>(p.state)[i], to;
  to.m = from.m, to.z = counts ? A(p.scale) / from.z : A(0);
  to.u.y = 0, to.u.label = counts ? label : -1;
  static_cast<row_state<A> *>(p.record)[i] = to;
}

template <class T> lev_status finish(const rdtp_finish_args *p, cudaStream_t stream) {
  if (p->loss_end > p->loss_begin) finish_sums<lev_arith<T>><<<1, kSumThreads, 0, stream>>>(*p);
  if (p->record && p->rows > 0)
    finish_records<lev_arith<T>><<<lev_grid(p->rows, kThreads, INT32_MAX), kThreads, 0, stream>>>(*p);
  return lev_cuda_launched("rdtp.finish");
}

/* ---- residual ---- */

/* One block per row. A result may be narrower than the logit whose place it takes, so results of a stretch of columns
 * are written when the whole block has read that stretch; they fall on columns of it or of earlier ones. */
template <class T> __global__ void __launch_bounds__(kThreads) residual_rows(rdtp_residual_args p) {
  using A = lev_arith<T>;
  constexpr int per = lev_per_16<T>, per_a = lev_per_16<A>;
  int64_t i = blockIdx.x;
  A *x = static_cast<A *>(p.tile) + i * p.ld;
  T *out = reinterpret_cast<T *>(x);
  row_state<A> record = static_cast<const row_state<A> *>(p.record)[i];
  int32_t label = record.u.label;
  int64_t own = label < 0 ? -1 : label - p.begin;
  for (int64_t j0 = 0; j0 < p.cols; j0 += kThreads * per) {
    int64_t j = j0 + (int64_t)threadIdx.x * per;
    bool whole = j + per <= p.cols;
    lev_vec<T, per> result;
    if (label < 0) {
      for (int k = 0; k < per; ++k) result.at[k] = T(0);
    } else {
      alignas(16) A v[per];
      if (whole) {
        for (int k = 0; k < per; k += per_a)
          *reinterpret_cast<lev_vec<A, per_a> *>(v + k) = *reinterpret_cast<const lev_vec<A, per_a> *>(x + j + k);
      } else {
        for (int k = 0; k < per; ++k) v[k] = j + k < p.cols ? x[j + k] : A(0);
      }
      for (int k = 0; k < per; ++k) {
        A probability = exponential(v[k] - record.m) * record.z;
        result.at[k] = lev_store<T>(j + k == own ? probability - A(p.scale) : probability);
      }
    }
    __syncthreads();
    if (whole)
      *reinterpret_cast<lev_vec<T, per> *>(out + j) = result;
    else
      for (int k = 0; k < per; ++k)
        if (j + k < p.cols) out[j + k] = result.at[k];
  }
}

template <class T> lev_status residual(const rdtp_residual_args *p, cudaStream_t stream) {
  if (p->rows > 0 && p->cols > 0) residual_rows<T><<<(unsigned)p->rows, kThreads, 0, stream>>>(*p);
  return lev_cuda_launched("rdtp.residual");
}

/* ---- add, store ---- */

template <class A, int per> __global__ void add_scalars(A *dst, const A *src, int64_t count) {
  using vec = lev_vec<A, per>;
  int64_t step = (int64_t)gridDim.x * kThreads;
  for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < count / per; i += step) {
    vec to = reinterpret_cast<vec *>(dst)[i], from = reinterpret_cast<const vec *>(src)[i];
    for (int k = 0; k < per; ++k) to.at[k] += from.at[k];
    reinterpret_cast<vec *>(dst)[i] = to;
  }
}

template <class T> lev_status add(const rdtp_add_args *p, cudaStream_t stream) {
  using A = lev_arith<T>;
  constexpr int per = lev_per_16<A>;
  A *dst = static_cast<A *>(p->dst);
  const A *src = static_cast<const A *>(p->src);
  bool wide = lev_divides(16, p->dst, p->src, (size_t)p->count * sizeof(A));
  if (p->count > 0 && wide)
    add_scalars<A, per><<<lev_grid(p->count / per, kThreads), kThreads, 0, stream>>>(dst, src, p->count);
  else if (p->count > 0)
    add_scalars<A, 1><<<lev_grid(p->count, kThreads), kThreads, 0, stream>>>(dst, src, p->count);
  return lev_cuda_launched("rdtp.add");
}

template <class T, int per> __global__ void store_scalars(T *dst, const lev_arith<T> *src, int64_t count) {
  using A = lev_arith<T>;
  constexpr int per_a = per < lev_per_16<A> ? per : lev_per_16<A>;
  int64_t step = (int64_t)gridDim.x * kThreads;
  for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < count / per; i += step) {
    lev_vec<T, per> to;
    for (int k = 0; k < per; k += per_a) {
      lev_vec<A, per_a> from = reinterpret_cast<const lev_vec<A, per_a> *>(src)[(i * per + k) / per_a];
      for (int n = 0; n < per_a; ++n) to.at[k + n] = lev_store<T>(from.at[n]);
    }
    reinterpret_cast<lev_vec<T, per> *>(dst)[i] = to;
  }
}

template <class T> lev_status store(const rdtp_store_args *p, cudaStream_t stream) {
  using A = lev_arith<T>;
  constexpr int per = lev_per_16<T>;
  T *dst = static_cast<T *>(p->dst);
  const A *src = static_cast<const A *>(p->src);
  bool wide = lev_divides(16, p->dst, p->src, (size_t)p->count * sizeof(T));
  if (p->count > 0 && wide)
    store_scalars<T, per><<<lev_grid(p->count / per, kThreads), kThreads, 0, stream>>>(dst, src, p->count);
  else if (p->count > 0)
    store_scalars<T, 1><<<lev_grid(p->count, kThreads), kThreads, 0, stream>>>(dst, src, p->count);
  return lev_cuda_launched("rdtp.store");
}

} // namespace

#define RDTP_LAUNCHER(op)                                                                                              \
  lev_status rdtp_##op##_cuda(const void *args, void *stream) {                                                        \
    const rdtp_##op##_args *p = static_cast<const rdtp_##op##_args *>(args);                                           \
    return LEV_CUDA_PICK(p->dtype, op)(p, static_cast<cudaStream_t>(stream));                                          \
  }
RDTP_LAUNCHER(fold)
RDTP_LAUNCHER(merge)
RDTP_LAUNCHER(combine)
RDTP_LAUNCHER(finish)
RDTP_LAUNCHER(residual)
RDTP_LAUNCHER(add)
RDTP_LAUNCHER(store)
