/* SPDX-License-Identifier: Apache-2.0 */
/* Test-only: a device, exact-size arenas and a Muon plan over a small parameter shard, and the f64 oracle. */
#ifndef LEV_TESTS_OPTIM_MUON_RIG_H
#define LEV_TESTS_OPTIM_MUON_RIG_H

#include "muon/muon.h"

typedef struct muon_rig {
  lev_fault fault;
  lev_trace *trace;
  lev_ledger *ledger;
  lev_device *device;
  lev_arena *arenas[LEV_MEM_CLASSES];
  lev_stream *stream;
  muon_plan *plan;
  int64_t shard; /* elements of params and grads */
  lev_dtype param_dtype, grad_dtype;
  void *params, *grads; /* on the device */
} muon_rig;

typedef struct muon_rig_options {
  lev_backend backend;
  uint64_t jitter_seed;
  size_t device_shortage; /* bytes the device arena lacks */
} muon_rig_options;

/* Opens everything, binds the persistent phase, sets params to num_random(stream 1), grads to zero, and runs muon_init.
 * Arenas are filled with 0xFF before. False (and a recorded failure) if any part fails; muon_rig_close is due in any
 * case. */
bool muon_rig_open(muon_rig *rig, const muon_config *config, int64_t shard, muon_rig_options options);
void muon_rig_close(muon_rig *rig);
/* Writes gradients number `n` (a reproducible random shard), runs one step in a scope of its own, and syncs. */
lev_status muon_rig_step(muon_rig *rig, int n, double lr, double grad_scale);
/* Fills the gradients only. */
void muon_rig_grads(muon_rig *rig, int n);

/* One naive update in f64 of one matrix: physically transposed Newton-Schulz, plain loops. */
void muon_oracle(const muon_config *config, int64_t rows, int64_t cols, double *w, double *momentum, const double *grad,
                 double lr, double grad_scale);

#endif
