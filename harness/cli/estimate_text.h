/* SPDX-License-Identifier: Apache-2.0 */
/* The estimate of a step, for people and for machines. */
#ifndef LEV_CLI_ESTIMATE_TEXT_H
#define LEV_CLI_ESTIMATE_TEXT_H

#include <stdio.h>

#include "harness/train/estimate.h"

/* Table of phases: amount, seconds, share of the step, ceiling; then the sums, what bounds the step, and notes. */
void lev_estimate_table(const lev_estimate *estimate, const char *ceilings, FILE *out);
/* {"ceilings", "rank", "phases": [{"name", "amount", "unit", "ceiling", "seconds"}], "compute_seconds", ..., "notes"};
 * to be freed with free(), NULL if memory ran out. */
char *lev_estimate_json(const lev_estimate *estimate, const char *ceilings);

#endif
