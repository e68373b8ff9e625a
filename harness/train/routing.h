/* SPDX-License-Identifier: Apache-2.0 */
/* The plain expert dispatch holds as many rows as one rank receives, so its plan needs an assumption about the routing.
 * The bounded one does not. */
#ifndef LEV_TRAIN_ROUTING_H
#define LEV_TRAIN_ROUTING_H

#include "harness/train/rank.h"

/* Profile r/h of arXiv:2609.14306, appendix B.2, the same on every rank with its N tokens: the first floor(r N) tokens
 * pick the hot experts j mod h, j = 0 .. k-1; token i after them picks h + ((i + j) mod (E - h)). Balanced: (i + j) mod
 * E. */
typedef struct lev_routing {
  const char *name; /* "balanced", "95/4" */
  const char *text; /* for people */
  double share;     /* r; 0 = balanced */
  int64_t hot;      /* h */
} lev_routing;
enum { LEV_ROUTING_BALANCED, LEV_ROUTING_SKEWED, LEV_ROUTINGS };
extern const lev_routing lev_routings[LEV_ROUTINGS];

/* Most rows that a rank receives in one layer, every context group having a sequence. Never below what the dry run's
 * own routing (ids[t, j] = (t k + j) mod E) brings. Errors: LEV_ERR_CONFIG (layout), LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_routing_rows(const lev_config *config, const lev_routing *routing, int64_t *rows);

/* Sets schedule.<module> = plain (module NULL: all of them), and the rows of the dispatch where it is among them.
 * Errors: LEV_ERR_ARG (no such module; the detail lists them), LEV_ERR_CONFIG (more rows than int32 can number). */
LEV_MUST_CHECK lev_status lev_make_plain(lev_config *config, const char *module, const lev_routing *routing);

#endif
