/* SPDX-License-Identifier: Apache-2.0 */
/* Streaming AdamW: bounds what the optimizer state holds on the device. Master weights and both moments live in pinned
 * host memory and are updated bucket by bucket; the card holds `slots` buckets at a time, whatever the parameter count.
 *
 * One update of element i with gradient x, all in type A = lev_dtype_arith(param_dtype), in exactly this order (each
 * line rounds once, except where two operations are written; fma = fused multiply-add):
 *
 *     g      = grad_scale * x
 *     m      = fma(beta1, m, (1 - beta1) * g)
 *     v      = fma(beta2, v, ((1 - beta2) * g) * g)
 *     d      = fma(sqrt(v), 1 / sqrt(1 - beta2^step), eps)
 *     p      = fma(-(lr * weight_decay), p, p)                          decoupled decay, on the master weight
 *     p      = fma(-(lr / (1 - beta1^step)), m / d, p)
 *     param  = round(p)                                                 nearest, ties to even
 *
 * Here lr = the step's lr times the segment's lr_scale; the constants are computed once per step in double and rounded
 * once to A. So the result does not depend on placement, schedule, bucket, slots, workers or SIMD path, bit for bit.
 *
 * Bytes, with n elements in all segments, a = bytes of A, c = elements of the largest bucket:
 *
 *     bounded         pinned 3 x n x a
 *       gpu, split    device 3 x slots x c x a, during the step only
 *       cpu, split    pinned slots x c x (bytes of a parameter + bytes of a gradient)
 *     plain           device 3 x n x a
 *
 * Sources: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019); OffloadStreamAdamW in Nguyen,
 * Pandit, Zhao, Joty, arXiv:2609.14306, section 3.4. */
#ifndef LEV_OFFLOAD_ADAMW_OFFLOAD_ADAMW_H
#define LEV_OFFLOAD_ADAMW_OFFLOAD_ADAMW_H

#include <stdbool.h>

#include "common/device.h"
#include "common/walker.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A range of the rank's flat parameter shard (and of its flat gradient shard: same offsets) with its own rates. */
typedef struct oadamw_segment {
  int64_t offset, count; /* elements; count = 0 is legal; segments must not overlap */
  double weight_decay;   /* decoupled, times lr */
  double lr_scale;       /* multiplies the step's lr */
} oadamw_segment;

typedef enum oadamw_placement {
  OADAMW_GPU,  /* state streams through device slots: copy in / update / copy out, on three streams */
  OADAMW_CPU,  /* gradients come to the host by buckets, host threads update, new weights go back */
  OADAMW_SPLIT /* a share `cpu_share` of the buckets as OADAMW_CPU, the others as OADAMW_GPU, both at once */
} oadamw_placement;

typedef enum oadamw_schedule {
  OADAMW_BOUNDED,
  OADAMW_PLAIN /* state resident on the device, one launch per segment; placement, bucket and slots do not apply */
} oadamw_schedule;

/* Host instruction sets; all give the same bits. */
typedef enum oadamw_simd {
  OADAMW_SIMD_AUTO, /* the widest that this CPU has */
  OADAMW_SIMD_SCALAR,
  OADAMW_SIMD_AVX2,
  OADAMW_SIMD_AVX512,
  OADAMW_SIMDS
} oadamw_simd;
const char *oadamw_simd_name(oadamw_simd simd); /* "auto", "scalar", "avx2", "avx512" */
bool oadamw_simd_supported(oadamw_simd simd);   /* by this CPU and this build */

typedef enum oadamw_phase {
  OADAMW_PERSISTENT, /* bounded: pinned oadamw.master, oadamw.exp_avg, oadamw.exp_avg_sq, and (cpu, split)
                        oadamw.staging; plain: the first three, on the device */
  OADAMW_STEP,       /* device oadamw.slots; alive during oadamw_step only */
  OADAMW_PHASES
} oadamw_phase;

/* Start from oadamw_config_default(). */
typedef struct oadamw_config {
  size_t size; /* sizeof(oadamw_config) */
  const oadamw_segment
      *segments; /* copied; their concatenation in this order is the state's order. NULL where n_segments = 0 */
  int n_segments;
  lev_dtype param_dtype, grad_dtype; /* f64 with f64; f32 and bf16 in any mix */
  int64_t bucket; /* beta: most elements of a bucket; 0 = the largest that `budget` holds, at most 2^24 */
  int slots;      /* buckets in flight per placement, 1 .. OADAMW_SLOTS_MAX */
  oadamw_placement placement;
  double cpu_share; /* split: 0 .. 1 */
  int workers;      /* cpu, split: host threads, 1 .. OADAMW_WORKERS_MAX */
  oadamw_schedule schedule;
  double beta1, beta2, eps;
  size_t budget; /* device bytes of both phases; SIZE_MAX = unlimited */
  oadamw_simd simd;
} oadamw_config;
#define OADAMW_SLOTS_MAX 8
#define OADAMW_WORKERS_MAX 64

/* Bounded on the GPU placement, bucket 0, 2 slots, 1 worker, cpu_share 0.5, f32, beta 0.9 / 0.95, eps 1e-8, unlimited
 * budget, no segments. */
oadamw_config oadamw_config_default(void);
/* Same checks as oadamw_plan_create, without making anything. Errors: LEV_ERR_ARG, LEV_ERR_UNSUPPORTED (dtypes, simd),
 * LEV_ERR_BUDGET. */
LEV_MUST_CHECK lev_status oadamw_supports(const oadamw_config *config);

typedef struct oadamw_plan oadamw_plan;

/* Cuts the concatenated segments into equal buckets (tensors are split; borders on multiples of 64 elements where the
 * bucket is that long) and creates the plan's streams on `device`, which outlives the plan. Errors: LEV_ERR_ARG,
 * LEV_ERR_UNSUPPORTED, LEV_ERR_BUDGET (says the smallest budget that would do, and for a given bucket the one that
 * would fit), LEV_ERR_NOMEM, LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status oadamw_plan_create(lev_device *device, const oadamw_config *config, oadamw_plan **out);
/* Waits for the plan's own streams; never frees the bound blocks. NULL is fine. */
void oadamw_destroy(oadamw_plan *plan);

void oadamw_plan_bytes(const oadamw_plan *plan, oadamw_phase phase, size_t bytes[LEV_MEM_CLASSES]);
void oadamw_plan_regions(const oadamw_plan *plan, oadamw_phase phase, lev_region_fn fn, void *ctx);
/* lev_walk_fn of each phase, for lev_blocks_take. They only describe: pointers are set by oadamw_plan_bind. */
void oadamw_walk_persistent(void *plan, lev_walker *walker);
void oadamw_walk_step(void *plan, lev_walker *walker);
/* Uses the caller's blocks. OADAMW_PERSISTENT once; OADAMW_STEP before each oadamw_step whose slots moved (a phase
 * without bytes need not be bound). Errors: LEV_ERR_CAPACITY (a block is too small), LEV_ERR_ARG (alignment),
 * LEV_ERR_MISUSE (persistent bound twice). */
LEV_MUST_CHECK lev_status oadamw_plan_bind(oadamw_plan *plan, oadamw_phase phase, const lev_blocks *blocks);

/* Elements in all segments; buckets; elements of the largest bucket. */
int64_t oadamw_count(const oadamw_plan *plan);
int64_t oadamw_buckets(const oadamw_plan *plan);
int64_t oadamw_bucket_size(const oadamw_plan *plan);

/* The plan's own streams, at most `max` of them into out[]; returns their number. For naming them in a trace or waiting
 * for them after a failed step; a good step joins the caller's stream. */
#define OADAMW_STREAMS_MAX (4 + OADAMW_WORKERS_MAX)
int oadamw_streams(const oadamw_plan *plan, lev_stream **out, int max);

/* master = params, moments = 0, for the flat parameter shard `params` (device, param_dtype). Needs OADAMW_PERSISTENT
 * only. Done when `stream` passes this point. Errors: LEV_ERR_MISUSE (not bound), LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status oadamw_init(oadamw_plan *plan, const void *params, lev_stream *stream);
/* params = round(master), e.g. after a checkpoint was read into the state. Elements outside all segments are untouched.
 */
LEV_MUST_CHECK lev_status oadamw_publish(oadamw_plan *plan, void *params, lev_stream *stream);

typedef struct oadamw_step_args {
  void *params;      /* device, param_dtype: flat parameter shard; written in all segments, never read */
  const void *grads; /* device, grad_dtype: flat gradient shard; read only */
  double lr;
  int64_t step;      /* 1-based, for the bias corrections */
  double grad_scale; /* multiplies every gradient: clipping and averaging in one factor */
} oadamw_step_args;

/* One update of all segments, enqueued. It forks from `stream` and joins it again: when `stream` passes this point,
 * params are new, the state is home in pinned memory, and slots, grads and params may be reused. Waits on nothing on
 * the host. Bytes moved per element: gpu 3a in, 3a out; cpu grad out, param in. Call it only after the gradient was
 * found finite (oadamw_norm_launch): there is no undo. Errors: LEV_ERR_ARG (NULL pointers with n > 0, step < 1),
 * LEV_ERR_NUMERIC (lr or grad_scale not finite; nothing was changed), LEV_ERR_MISUSE (not bound), LEV_ERR_DEVICE (the
 * state is then undefined). */
LEV_MUST_CHECK lev_status oadamw_step(oadamw_plan *plan, const oadamw_step_args *args, lev_stream *stream);

/* The state for checkpoints and resume: n elements of `dtype` each, in the order of the concatenated segments, in
 * memory class `cls` (pinned when bounded, device when plain; fake addresses on the dry backend). */
typedef struct oadamw_state_view {
  void *master, *exp_avg, *exp_avg_sq;
  int64_t count;
  lev_dtype dtype;
  lev_mem cls;
} oadamw_state_view;
/* Host waits for `stream` (the one last given to oadamw_step or oadamw_init; NULL = the caller has waited), then the
 * view may be read or, until the next step, written by the host. Errors: LEV_ERR_MISUSE (not bound), LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status oadamw_state(oadamw_plan *plan, lev_stream *stream, oadamw_state_view *out);

/* ---- global gradient norm ----
 * Sum of squares of a flat array over one fixed tree: blocks of OADAMW_NORM_BLOCK elements, 16 interleaved partial sums
 * per block, then pairwise over blocks. It depends on the values and the count alone, not on buckets, placement or SIMD
 * path. Accumulates in f64 for every dtype. */
#define OADAMW_NORM_BLOCK 16384
/* Device bytes of the scratch for `count` elements: two f64 per block. */
size_t oadamw_norm_scratch_bytes(int64_t count);
/* out2[0] += sum of squares of the finite elements; out2[1] += number of elements that are not finite. `grads`: device,
 * [count] of `dtype` (f64, f32, bf16); `scratch`, `out2`: device f64, alive until `stream` has passed. The caller
 * zeroes out2 first (lev_fill). Errors: LEV_ERR_ARG, LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status oadamw_norm_launch(lev_stream *stream, lev_dtype dtype, const void *grads, int64_t count,
                                             double *scratch, double *out2);
/* min(1, max_norm / (sqrt(norm_sq) + 1e-6)), as torch.nn.utils.clip_grad_norm_; 1 where max_norm <= 0 (clipping off);
 * NaN if norm_sq is not finite, which oadamw_step refuses. */
double oadamw_clip_scale(double norm_sq, double max_norm);

#ifdef __cplusplus
}
#endif
#endif
