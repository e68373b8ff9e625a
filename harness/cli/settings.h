/* SPDX-License-Identifier: Apache-2.0 */
/* What the verbs that take CONFIG.toml share: reading settings, and the line that says what is planned. */
#ifndef LEV_CLI_SETTINGS_H
#define LEV_CLI_SETTINGS_H

#include "harness/train/plan.h"

/* Defaults, then the file argv[0], then --section.key words, then lev_config_validate. Leftover arguments (not
 * settings) stay in argv behind the file; *argc is their count. Errors: LEV_ERR_ARG (no file), those of lev_config_*.
 */
LEV_MUST_CHECK lev_status lev_settings(lev_config *config, int *argc, char **argv);

/* "model NAME: ... parameters, ... active; bf16, context ..., ... ranks on ..., ... tokens each at most". */
void lev_print_model(const lev_config *config, const lev_rank_plan *plan);
/* "all N ranks together: ...", of plans by class (`of` NULL: one of each rank); nothing for a single rank. */
void lev_print_together(const lev_rank_plan *plan, const int *of, int ranks);

#endif
