/* SPDX-License-Identifier: Apache-2.0 */
/* Options of a verb, beside settings. */
#ifndef LEV_CLI_WORDS_H
#define LEV_CLI_WORDS_H

#include <stdbool.h>

#include "common/status.h"

/* `--name` alone sets *flag; with `value` it is `--name=VALUE` or `--name VALUE`, and the last one counts. */
typedef struct lev_cli_option {
  const char *name;
  bool *flag;
  const char **value;
} lev_cli_option;

/* Takes the word argv[*i], and the next where that is its value, if it is one of the `n` options; *known tells. *i
 * stays on the last word taken. Errors: LEV_ERR_ARG (no value). */
LEV_MUST_CHECK lev_status lev_cli_take(const lev_cli_option *options, int n, int argc, char **argv, int *i,
                                       bool *known);

#endif
