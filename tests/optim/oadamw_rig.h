/* SPDX-License-Identifier: Apache-2.0 */
/* One rank with exactly the memory that an AdamW plan asks for, and a naive f64 AdamW to compare with. */
#ifndef LEV_TESTS_OADAMW_RIG_H
#define LEV_TESTS_OADAMW_RIG_H

#include "common/arena.h"
#include "common/device.h"
#include "offload_adamw/offload_adamw.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

#if defined(__SANITIZE_THREAD__)
#define OADAMW_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define OADAMW_TSAN 1
#endif
#endif
#ifndef OADAMW_TSAN
#define OADAMW_TSAN 0
#endif

typedef struct oadamw_rig {
  lev_fault fault;
  lev_trace *trace;
  lev_ledger *ledger;
  lev_device *device;
  void *slab[LEV_MEM_CLASSES];
  lev_arena *arena[LEV_MEM_CLASSES];
  lev_stream *compute;
  oadamw_config config;
  oadamw_plan *plan;
  int64_t shard;        /* elements of the flat shard: beyond the last segment too */
  void *params, *grads; /* [shard] on the device */
  uint64_t seen;        /* digest of params as the compute stream saw them after each step */
  lev_stream *slow;     /* nullable: gets a pause at the start of each step */
} oadamw_rig;

/* Segments with gaps, an empty one, one of a single element, and neighbours with equal rates. */
#define OADAMW_RIG_SEGMENTS 7
#define OADAMW_RIG_SHARD 900
extern const oadamw_segment oadamw_rig_segments[OADAMW_RIG_SEGMENTS];
oadamw_config oadamw_rig_config(lev_dtype param, lev_dtype grad);

/* Makes everything (poisoned), binds the persistent phase, fills params with reproducible values and initialises the
 * state. */
bool oadamw_rig_open(oadamw_rig *r, lev_backend backend, const oadamw_config *config, int64_t shard, uint64_t jitter);
void oadamw_rig_close(oadamw_rig *r);

/* Gradient element i of `step` before rounding to grad_dtype, in [-2, 2). */
double oadamw_rig_grad(int64_t step, int64_t i);
/* The gradient of `step` is written on the compute stream, slots are poisoned before and after, all without waiting. */
lev_status oadamw_rig_step(oadamw_rig *r, int64_t step, double lr, double grad_scale);
/* Steps first .. last with lr = 0.01 / step and grad_scale 0.7, then waits. */
lev_status oadamw_rig_run(oadamw_rig *r, int64_t first, int64_t last);
/* FNV digest of params and state; waits. */
uint64_t oadamw_rig_digest(oadamw_rig *r);

/* Naive reference over the whole shard, f64, written as the formula is printed in the literature. */
typedef struct oadamw_oracle {
  double *p, *m, *v; /* [shard] */
  int64_t shard;
} oadamw_oracle;
bool oadamw_oracle_open(oadamw_oracle *o, const oadamw_rig *r);
void oadamw_oracle_step(oadamw_oracle *o, const oadamw_rig *r, int64_t step, double lr, double grad_scale);
void oadamw_oracle_close(oadamw_oracle *o);
/* Compares params (over the shard) and state (concatenated segments). */
void oadamw_oracle_check(const oadamw_oracle *o, oadamw_rig *r, double param_tolerance, double state_tolerance);

#endif
