/* SPDX-License-Identifier: Apache-2.0 */
/* A context group of rank threads around attention, with a naive f64 oracle over the whole sequence and full rows of
 * scores. */
#ifndef LEV_TESTS_ATTENTION_RIG_H
#define LEV_TESTS_ATTENTION_RIG_H

#include "common/fault.h"
#include "common/trace.h"
#include "harness/model/attention.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

#define ATTN_RANKS 8

#if defined(__SANITIZE_THREAD__)
#define ATTN_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ATTN_TSAN 1
#endif
#endif
#ifndef ATTN_TSAN
#define ATTN_TSAN 0
#endif

typedef struct attn_case {
  int ranks;
  int64_t seq, heads, kv_heads, dim;
  lev_dtype dtype;
  int64_t block_q, block_k, window;
  int64_t document;         /* length of the packed documents, 0 = one */
  const int64_t *documents; /* or lengths that repeat, ended by 0 */
  bool no_host;             /* documents are on the device only */
  bool fused;               /* q, k, v in one buffer of padded rows, and so their gradients */
  int64_t pad;              /* scalars between fused rows, 0 = 3 */
  int through;   /* on a GPU, calls must take 1: cuDNN, 2: cuDNN in forward only, -1: our own kernels, 0: either */
  double size;   /* of the entries of q and k; 0 = 1 */
  double tilt;   /* scores of a query rise by about this much per key position */
  int64_t spare; /* max_tokens above the largest share */
  uint64_t jitter;
  int jitter_rank; /* random delays on this rank only; 0 = on all */
  bool immediate;
  attn_route route;
  size_t workspace; /* cap, see attn_config */
} attn_case;

typedef struct attn_rig_rank {
  lev_trace *trace;
  lev_fault fault;
  lev_status status;
  size_t planned, peak; /* device bytes of the larger phase; ledger */
} attn_rig_rank;

/* Everything in sequence order. */
typedef struct attn_rig {
  attn_case c;
  double *q, *k, *v, *d_o;                  /* inputs, rounded to dtype */
  double *o64, *lse64, *dq64, *dk64, *dv64; /* wanted */
  void *o, *lse, *dq, *dk, *dv;             /* got: dtype, lse in A */
  lev_backend backend;
  lev_comm_hub *hub;
  attn_rig_rank rank[ATTN_RANKS];
} attn_rig;

bool attn_rig_open(attn_rig *r, const attn_case *c);
void attn_rig_close(attn_rig *r);
/* Wanted values from the inputs. */
void attn_rig_oracle(attn_rig *r);
/* Forward and backward on all ranks (dry: one after the other) in poisoned regions of exactly the planned size, outputs
 * poisoned before. Checks statuses, planned = peak, that one alignment unit less is refused, and that gaps between
 * strided rows are left alone. */
void attn_rig_run(attn_rig *r, lev_backend backend);
/* Largest relative error of the five outputs. */
double attn_rig_error(const attn_rig *r);
/* NUM_CHECK of the five outputs. */
void attn_rig_check(const attn_rig *r, double tolerance, const char *what);
/* Open, run, check, close; on a GPU with cuDNN, again through that where it takes the case. */
void attn_case_check(const attn_case *c, double tolerance, const char *what);
attn_config attn_rig_config(const attn_case *c);
/* Whether cuDNN can be used here; lev_detail() says why not. */
bool attn_rig_cudnn(void);

#endif
