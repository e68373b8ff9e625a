/* SPDX-License-Identifier: Apache-2.0 */
/* A vocabulary group of rank threads around ring_dtp, with a naive f64 oracle that knows the whole head and all tokens.
 */
#ifndef LEV_TESTS_RDTP_RIG_H
#define LEV_TESTS_RDTP_RIG_H

#include "ring_dtp/ring_dtp.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

#define RIG_RANKS 8

typedef enum rig_labels { RIG_MIXED, RIG_ALL_IGNORED, RIG_BORDERS, RIG_BAD } rig_labels;

typedef struct rig_case {
  int ranks;
  int64_t hidden, vocab, tokens[RIG_RANKS];
  lev_dtype dtype;
  rdtp_schedule schedule;
  rdtp_branch branch;
  int64_t rows, cols; /* tile */
  bool one_pass;
  size_t budget;
  rig_labels labels;
  double scale; /* of h and w entries; 0 = 1 */
  uint64_t jitter;
  bool immediate;
} rig_case;

typedef struct rig_rank {
  int64_t tokens, vocab_begin, vocab_rows;
  void *h, *w, *dh, *dw; /* as in rdtp_args */
  int32_t *labels;
  unsigned char *kept; /* copies of h, w and labels while a run moves the originals; then of dh and dw */
  double *sums;        /* [RDTP_SUMS] */
  double *h64, *w64, *dh64, *dw64, *dw0; /* rounded inputs, wanted outputs, dw before the call */
  double sums64[RDTP_SUMS];
  lev_trace *trace;
  size_t planned, peak;
  lev_status status;
  lev_fault fault;
} rig_rank;

typedef struct rig {
  rig_case c;
  double grad_scale;
  rig_rank rank[RIG_RANKS];
  rdtp_phase phase; /* RDTP_STEP: rdtp_step; RDTP_EVAL: rdtp_eval */
  lev_backend backend;
  lev_comm_hub *hub;
} rig;

bool rig_open(rig *r, const rig_case *c);
void rig_close(rig *r);
/* Inputs were changed: outputs reset, wanted values recomputed. */
void rig_oracle(rig *r);
/* Runs all ranks (dry: one after the other; else t_backend()) in regions of exactly the planned size, poisoned first.
 */
void rig_run(rig *r, rdtp_phase phase, lev_backend backend);
/* Outputs of a step against the oracle. */
void rig_check(const rig *r, double tolerance, const char *what);
/* Runs a step, checks outputs, planned = peak. */
void rig_case_check(const rig_case *c, double tolerance, const char *what);
/* The configuration of a case. */
rdtp_config rig_config(const rig_case *c);

#endif
