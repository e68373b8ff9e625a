/* SPDX-License-Identifier: Apache-2.0 */
/* Streaming Muon: bounds what the optimizer state of weight matrices holds on the device. Master weights and momentum
 * live in pinned host memory and stream through the card by buckets of whole matrices (the update of a matrix needs all
 * of it, so a flat range is never cut); the orthogonalisation runs on the card, one matrix at a time, in scratch that
 * depends on the largest matrix only.
 *
 * One update of a matrix W (rows x cols, Hugging Face layout [out, in]) with gradient x, in type A =
 * lev_dtype_arith(param_dtype); C = compute_dtype, rounded to at each store; fma = fused multiply-add:
 *
 *     g  = grad_scale * x
 *     M  = fma(mu, M, g)                                momentum, kept
 *     u  = nesterov ? fma(mu, M, g) : M
 *     X  = u * (1 / (norm_factor * ||u||_F + eps))      norm summed in f64 over a fixed order
 *     for (a, b, c) in the coefficient set:             Newton-Schulz, on the smaller side: rows <= cols shown
 *       G = X X^T;  B = b G + c G G;  X = a X + B X     (rows > cols: G = X^T X, X = a X + X B; nothing is transposed)
 *     W  = fma(-(lr * weight_decay), W, W)              decoupled decay, on the master weight
 *     W  = fma(-(lr * scale(rows, cols)), X, W)
 *     param = round(W)                                  nearest, ties to even
 *
 * A zero gradient with zero momentum gives a zero update: only the decay acts. The result does not depend on schedule,
 * bucket_bytes or slots, bit for bit. What it does depend on is the matrix product of the backend.
 * Embeddings, the vocabulary head, norms and biases do not belong here: give them to AdamW.
 * Sources: Jordan et al., "Muon" (2024); Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982); You
 * (quintic); Amsel et al., "The Polar Express" (arXiv 2505.16932).
 *
 * Bytes, each region rounded up to LEV_ALIGN, with n elements in all matrices, a and b bytes of A and C, e elements of
 * the largest bucket, f the largest rows * cols, q the largest min(rows, cols)^2:
 *     bounded   pinned 2 n a;  step: device slots 2 e a + work
 *     plain     device 2 n a;  step: device work
 *     work      2 f b + 2 q b (one q b where every c is 0) + 8 ceil(f / 4096) */
#ifndef LEV_MUON_MUON_H
#define LEV_MUON_MUON_H

#include <stdbool.h>

#include "common/device.h"
#include "common/walker.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A weight matrix inside the rank's flat parameter shard (and at the same place in its flat gradient shard). */
typedef struct muon_matrix {
  int64_t offset;     /* elements from the start of the shard */
  int64_t rows, cols; /* [out, in], row-major, contiguous; 0 is legal */
} muon_matrix;

typedef enum muon_schedule {
  MUON_BOUNDED, /* state in pinned host memory, streamed by buckets */
  MUON_PLAIN    /* state resident on the device; bucket_bytes and slots do not apply */
} muon_schedule;

/* Newton-Schulz coefficients: name, text. Steps beyond a set's own length repeat its last row. */
#define MUON_SET_TABLE(X)                                                                                              \
  X(SIMPLE, "simple")   /* 5 x (3.4445, -4.7750, 2.0315), Jordan: singular values end in about 0.7 .. 1.2 */           \
  X(QUINTIC, "quintic") /* 5 steps, You */                                                                             \
  X(POLAR_EXPRESS, "polar_express")     /* 5 steps, norm_factor 1.02, as in dion */                                    \
  X(POLAR_EXPRESS_8, "polar_express_8") /* 8 steps, converges to 1 */                                                  \
  X(DEEPSEEK_V4, "deepseek_v4")         /* 8 x simple, then 2 x (2, -1.5, 0.5) */                                      \
  X(CUBIC, "cubic")                     /* 5 steps with c = 0: one product fewer per step */
typedef enum muon_set {
#define MUON_SET_ENUM(name, text) MUON_##name,
  MUON_SET_TABLE(MUON_SET_ENUM)
#undef MUON_SET_ENUM
      MUON_SETS
} muon_set;
const char *muon_set_name(muon_set set);  /* "?" outside the table */
muon_set muon_set_find(const char *name); /* MUON_SETS if unknown */
int muon_set_steps(muon_set set);         /* its own length */
/* Row of step i (0-based) and the factor on the norm. */
void muon_set_row(muon_set set, int step, double abc[3]);
double muon_set_norm_factor(muon_set set);

/* Size of the update relative to an orthogonal matrix: name, text. */
#define MUON_SCALE_TABLE(X)                                                                                            \
  X(SCALE_MOONLIGHT,                                                                                                   \
    "moonlight")                /* 0.2 sqrt(max(rows, cols)): update RMS as AdamW's, whose lr and decay carry over */  \
  X(SCALE_ORIGINAL, "original") /* sqrt(max(1, rows / cols)) */                                                        \
  X(SCALE_SPECTRAL, "spectral") /* sqrt(rows / cols) */                                                                \
  X(SCALE_NONE, "none")         /* 1 */
typedef enum muon_scale {
#define MUON_SCALE_ENUM(name, text) MUON_##name,
  MUON_SCALE_TABLE(MUON_SCALE_ENUM)
#undef MUON_SCALE_ENUM
      MUON_SCALES
} muon_scale;
const char *muon_scale_name(muon_scale scale);
muon_scale muon_scale_find(const char *name); /* MUON_SCALES if unknown */
double muon_scale_factor(muon_scale scale, int64_t rows, int64_t cols);

typedef enum muon_phase {
  MUON_PERSISTENT, /* bounded: pinned muon.master, muon.momentum; plain: the same on the device */
  MUON_STEP,       /* device muon.slots (bounded) and muon.work; alive during muon_step only */
  MUON_PHASES
} muon_phase;

/* Start from muon_config_default(). */
typedef struct muon_config {
  size_t size;                 /* sizeof(muon_config) */
  const muon_matrix *matrices; /* copied; state is kept in this order; must not overlap. NULL where n_matrices = 0 */
  int n_matrices;
  lev_dtype param_dtype, grad_dtype; /* f64 with f64; f32 and bf16 in any mix */
  lev_dtype compute_dtype;           /* C: f64 where params are f64, else f32 or bf16 */
  double mu;                         /* 0 .. 1, 1 excluded */
  bool nesterov;
  double weight_decay; /* decoupled, times lr */
  double eps;          /* added to the norm */
  muon_set set;
  int steps; /* 0 = the set's own length; at most MUON_STEPS_MAX */
  muon_scale scale;
  muon_schedule schedule;
  size_t bucket_bytes; /* most device bytes of MUON_STEP, slots and work together; 0 = the smallest that works (one
                          largest matrix per slot). Buckets are filled as far as it allows. */
  int slots;           /* buckets on the device at once, 1 .. MUON_SLOTS_MAX; 2 overlaps copies with compute, 3 also
                          the copy out of one bucket with the copy in of another */
} muon_config;
#define MUON_SLOTS_MAX 8
#define MUON_STEPS_MAX 64

/* Bounded, bucket_bytes 0, 2 slots, f32 throughout, mu 0.95 with Nesterov, decay 0.1, eps 1e-7, simple, moonlight, no
 * matrices. */
muon_config muon_config_default(void);
/* Same checks as muon_plan_create, without making anything. Errors: LEV_ERR_ARG, LEV_ERR_UNSUPPORTED (dtypes),
 * LEV_ERR_BUDGET. */
LEV_MUST_CHECK lev_status muon_supports(const muon_config *config);
/* Smallest bucket_bytes for this list of matrices, dtypes and slots; SIZE_MAX where a size overflows; 0 with no
 * matrices. */
size_t muon_bucket_bytes_min(const muon_config *config);

typedef struct muon_plan muon_plan;

/* Cuts the list into buckets of consecutive whole matrices and creates the plan's two copy streams on `device`, which
 * outlives the plan. Errors: LEV_ERR_ARG, LEV_ERR_UNSUPPORTED, LEV_ERR_BUDGET (names the smallest bucket_bytes that
 * fits), LEV_ERR_NOMEM, LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status muon_plan_create(lev_device *device, const muon_config *config, muon_plan **out);
/* Waits for the plan's own streams; never frees the bound blocks. NULL is fine. */
void muon_destroy(muon_plan *plan);

void muon_plan_bytes(const muon_plan *plan, muon_phase phase, size_t bytes[LEV_MEM_CLASSES]);
void muon_plan_regions(const muon_plan *plan, muon_phase phase, lev_region_fn fn, void *ctx);
/* lev_walk_fn of each phase, for lev_blocks_take. They only describe: pointers are set by muon_plan_bind. */
void muon_walk_persistent(void *plan, lev_walker *walker);
void muon_walk_step(void *plan, lev_walker *walker);
/* Uses the caller's blocks. MUON_PERSISTENT once; MUON_STEP before each muon_step whose blocks moved (a phase without
 * bytes need not be bound). Errors: LEV_ERR_CAPACITY (a block is too small), LEV_ERR_ARG (alignment), LEV_ERR_MISUSE
 * (persistent bound twice). */
LEV_MUST_CHECK lev_status muon_plan_bind(muon_plan *plan, muon_phase phase, const lev_blocks *blocks);

/* Elements in all matrices; buckets of one step (0 when plain); floating-point operations of one step's products. */
int64_t muon_count(const muon_plan *plan);
int muon_buckets(const muon_plan *plan);
double muon_flops(const muon_plan *plan);

/* master = params, momentum = 0, for the flat parameter shard `params` (device, param_dtype). Needs MUON_PERSISTENT
 * only. Done when `stream` passes this point. Errors: LEV_ERR_MISUSE (not bound), LEV_ERR_ARG, LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status muon_init(muon_plan *plan, const void *params, lev_stream *stream);
/* params = round(master), e.g. after a checkpoint was read into the state. Elements outside all matrices are untouched.
 */
LEV_MUST_CHECK lev_status muon_publish(muon_plan *plan, void *params, lev_stream *stream);

typedef struct muon_step_args {
  void *params;      /* device, param_dtype: flat parameter shard; written in all matrices, never read */
  const void *grads; /* device, grad_dtype: flat gradient shard; read only */
  double lr;
  double grad_scale; /* multiplies every gradient: clipping and averaging in one factor */
  int64_t step;      /* 1-based number of this update; validated only, no term depends on it */
} muon_step_args;

/* One update of all matrices, enqueued. It forks from `stream` and joins it again: when `stream` passes this point,
 * params are new, the state is home, and step blocks, grads and params may be reused. Waits on nothing on the host.
 * Products run on `stream`, whose workspace must hold lev_gemm_workspace_bytes(backend, compute_dtype). Bytes moved per
 * element when bounded: 2 a in, 2 a out. Call it only after the gradient was found finite: there is no undo.
 * Errors: LEV_ERR_ARG (NULL pointers, step < 1), LEV_ERR_NUMERIC (lr or grad_scale not finite; nothing was changed),
 * LEV_ERR_MISUSE (not bound), LEV_ERR_CAPACITY (no workspace), LEV_ERR_DEVICE (the state is then undefined). */
LEV_MUST_CHECK lev_status muon_step(muon_plan *plan, const muon_step_args *args, lev_stream *stream);

/* State of matrix i: rows x cols of A each, row-major, for checkpoints. Host pointers (pinned) when bounded, device
 * pointers when plain, fake on the dry backend; NULL for an empty matrix. Valid after a host sync of the stream last
 * given to muon_step or muon_init; until the next step the host may also write them. Errors: LEV_ERR_ARG,
 * LEV_ERR_MISUSE (not bound). */
LEV_MUST_CHECK lev_status muon_state(muon_plan *plan, int matrix, void **master, void **momentum);

/* Deals whole matrices to `ranks` owners: the costliest first (operations of one Newton-Schulz step), each to the least
 * loaded rank; ties to the lower index and the lower rank, so that every rank computes the same owners. owner: [n]
 * out. Errors: LEV_ERR_ARG, LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status muon_owners(const muon_matrix *matrices, int n, int ranks, int *owner);

#ifdef __cplusplus
}
#endif
#endif
