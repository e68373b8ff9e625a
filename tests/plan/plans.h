/* SPDX-License-Identifier: Apache-2.0 */
/* Configurations that the plan tests share. */
#ifndef LEV_TESTS_PLAN_PLANS_H
#define LEV_TESTS_PLAN_PLANS_H

#include "harness/config/config.h"
#include "harness/report/memory_report.h"

/* A small model whose sizes divide by nothing, in forms that store and compute differently. */
enum { PLAN_VARIANTS = 5 };
void plan_small(lev_config *config, int variant);

/* harness/configs/NAME.toml over the defaults; failures are recorded in the running test. */
void plan_read(lev_config *config, const char *name);

/* One setting from its words, as on the command line. */
void plan_set(lev_config *config, const char *name, const char *value);

#endif
