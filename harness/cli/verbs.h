/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs of the command. Each gets the arguments behind its name and returns the process exit code; only they and
 * main.c print. */
#ifndef LEV_CLI_VERBS_H
#define LEV_CLI_VERBS_H

#include "common/status.h"

int lev_verb_train(int argc, char **argv);
int lev_verb_plan(int argc, char **argv);
int lev_verb_trace(int argc, char **argv);
int lev_verb_bench(int argc, char **argv);
int lev_verb_tokenize(int argc, char **argv);
int lev_verb_export(int argc, char **argv);

/* Prints "levee VERB: status: detail" on stderr and returns the exit code of the status. */
int lev_verb_failed(const char *verb, lev_status status);

#endif
