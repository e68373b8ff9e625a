/* SPDX-License-Identifier: Apache-2.0 */
/* A whole training run of local ranks: plan, set up, resume, steps, validation, checkpoints. Prints nothing: what
 * happens goes to an observer, called on rank 0's thread (or the caller's, before and after the ranks run). */
#ifndef LEV_TRAIN_RUN_H
#define LEV_TRAIN_RUN_H

#include <stdatomic.h>

#include "common/hostmem.h"
#include "common/profile.h"
#include "harness/train/plan.h"

/* One finished step. */
typedef struct lev_step_record {
  int64_t step, steps; /* this one and how many there will be */
  lev_step_result result;
  double lr;
  double seconds;           /* of this step */
  double tokens_per_second; /* of all ranks */
  double flops_per_token;   /* model FLOPs, forward and backward: 6 active + 6 L A d S (causal attention) */
} lev_step_record;

typedef struct lev_validation_record {
  int64_t step;
  double nll_per_token; /* nats */
  double val_loss;      /* nats per byte of text where the data's sidecar tells the bytes, else nats per token */
  bool per_byte;
  int64_t tokens;
  double seconds;
} lev_validation_record;

/* Events of a rank's trace file, and those that came once recording had stopped at its cap; 0 until it is written. */
typedef struct lev_run_trace {
  int64_t events, dropped;
} lev_run_trace;

/* A GPU as its driver sees it. CUDA tells what is free once the context is there: that is asked before any rank has a
 * slab, and again after the last step, all memory still held. So what other processes hold all the time is not in the
 * drop between the two, nor is the bare context; kernels, libraries and what others take meanwhile are. */
typedef struct lev_run_gpu {
  int index, ranks;     /* ranks that share it */
  size_t planned_bytes; /* their slabs */
  size_t reserve_bytes; /* lev_gpu_reserve */
  size_t start_free_bytes, free_bytes, total_bytes;
} lev_run_gpu;

/* Bytes by which free memory fell; 0 where it rose. */
size_t lev_run_gpu_drop(const lev_run_gpu *gpu);
/* Most that it should fall by: what is planned and the reserve. */
size_t lev_run_gpu_allowed(const lev_run_gpu *gpu);
bool lev_run_gpu_holds(const lev_run_gpu *gpu);

/* The memory of all ranks, planned and measured so far. Arrays have `ranks` entries. */
typedef struct lev_run_memory {
  int ranks;
  const lev_rank_plan *planned;
  lev_ledger *const *measured; /* NULL before the ranks run */
  const lev_run_trace *traces; /* likewise */
  const lev_run_gpu *gpus;     /* [n_gpus] */
  int n_gpus;                  /* 0 on the CPU, and before the last step */
} lev_run_memory;

/* Every callback may be NULL. A failure that `planned` or `started` returns ends the run there. */
typedef struct lev_run_observer {
  void *ctx;
  lev_status (*planned)(void *ctx, const lev_run_memory *memory);
  lev_status (*started)(void *ctx, int64_t first_step); /* 1, or the step after the resumed one */
  /* Whether the validation after this step is recorded. A run stopped between the save and the validation of a step
   * makes up for it when it resumes from there; NULL: it does not. */
  bool (*validated)(void *ctx, int64_t step);
  void (*step)(void *ctx, const lev_step_record *record, const lev_run_memory *memory);
  void (*validation)(void *ctx, const lev_validation_record *record);
  /* Saved, or why not; LEV_ERR_NUMERIC: the step was skipped, and the checkpoints before it stay the newest. */
  void (*checkpoint)(void *ctx, int64_t step, lev_status status, const char *detail);
  /* The profiled step of a rank, on that rank's thread, one rank after another. A failure ends the run. */
  lev_status (*profiled)(void *ctx, int rank, int64_t step, const lev_profile *profile);
  void (*finished)(void *ctx, const lev_run_memory *memory);
} lev_run_observer;

/* Trains. `stop` (nullable) is looked at between steps and between the batches of a validation, which is then left
 * unrecorded: once nonzero, the run saves a checkpoint and returns. Errors:
 * those of configuration, plan, data and ranks; the detail names the rank that failed first. */
LEV_MUST_CHECK lev_status lev_run(const lev_config *config, const lev_run_observer *observer, const atomic_int *stop);

/* Learning rate of a 1-based step: linear warm-up, then the chosen decay to lr * min_lr_factor at the last step. */
double lev_learning_rate(const lev_config *config, int64_t step);

#endif
