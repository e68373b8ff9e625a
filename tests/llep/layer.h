/* SPDX-License-Identifier: Apache-2.0 */
/* Runs one expert layer on rank threads and holds the naive oracle it is compared with. */
#ifndef LEV_TESTS_LLEP_LAYER_H
#define LEV_TESTS_LLEP_LAYER_H

#include "common/trace.h"
#include "pipelined_llep/pipelined_llep.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

#define L_RANKS 8

typedef enum l_routing {
  L_BALANCED,   /* (t k + j) mod E */
  L_ZIPF,       /* distinct picks, expert e with weight 1 / (e + 1)^1.2 */
  L_ONE_EXPERT, /* first pick of every token is expert 0, the others follow it */
  L_SAME,       /* every pick is expert E - 1 */
  L_EVEN_ONLY,  /* odd experts get nothing (E = 1 excepted) */
  L_ROUTINGS
} l_routing;

typedef struct l_case {
  int ranks;
  llep_config cfg; /* shape and schedule */
  int64_t tokens[L_RANKS];
  l_routing routing;
  bool accumulate;
  bool overwrite;  /* llep_backward_args.overwrite_dw: dw is T, rubbish before */
  int passes;      /* forward + backward this often (dw adds up); 0 = 1 */
  uint64_t jitter; /* lev_device_config.jitter_seed */
  bool immediate;
  int drop_call; /* drop a wait on all ranks in the first forward (1) or backward (2); 0 = none */
  int drop_wait; /* 1-based number of the wait within that call */
  int fail_kind; /* fail event number fail_at of this lev_fault_kind on rank 1 (0 = none), counted from the first call
                  */
  int64_t fail_at;
  size_t less; /* bytes withheld from each work block */
} l_case;

/* Arrays of all ranks, concatenated; the f64 copies hold the rounded inputs and the oracle's results. */
typedef struct l_data {
  const l_case *c;
  int64_t n, row0[L_RANKS + 1]; /* tokens before rank r */
  void *x, *probs, *w, *dy, *y, *y0, *dx, *dprobs, *dw;
  int32_t *ids;
  double *x64, *probs64, *w64, *dy64, *y64, *dx64, *dprobs64, *dw64;
  lev_status status[L_RANKS]; /* of the run */
  char detail[L_RANKS][512];  /* of a failure */
  llep_stats stats[L_RANKS];  /* without pointers */
  llep_info info[L_RANKS];
  size_t planned[L_RANKS][2], peak[L_RANKS][2]; /* device, pinned */
  lev_trace *trace[L_RANKS];
  uint64_t sent[L_RANKS];
  int64_t waits[L_RANKS][2]; /* of the last forward and backward */
  lev_backend backend;
  lev_comm_hub *hub;
} l_data;

void l_make(const l_case *c, l_data *d); /* inputs and oracle */
void l_free(l_data *d);
void l_run(l_data *d); /* all ranks on t_backend(); statuses in d->status */
void l_check(const l_data *d, double tolerance);
/* Both, and that all ranks succeeded, memory was as planned and caps held. */
void l_case_check(const l_case *c, double tolerance);
/* The same calls for rank `rank` on the dry backend; returns the trace (caller destroys). */
lev_trace *l_dry(const l_case *c, int rank);

/* A small f64 case: E experts over `ranks` ranks, every rank with `tokens` tokens. */
l_case l_small(int ranks, int64_t experts, int64_t top_k, int64_t tokens);

#endif
