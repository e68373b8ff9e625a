/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of bytes in the modules' READMEs, worked out again by tests named <module>_readme: `make test-AREA T=readme`
 * prints their rows. */
#ifndef LEV_TESTS_README_H
#define LEV_TESTS_README_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

/* False where tests run on a GPU, and the running test is skipped: the tables are of the cpu backend. */
bool t_readme_runs(void);

/* Prints a text and checks that the file at `path`, as seen from the root of the tree, holds it. */
bool t_readme(const char *path, const char *format, ...) LEV_PRINTF(2, 3);

/* 1234567 as 1,234,567; returns `out`. */
const char *t_commas(int64_t n, char out[32]);
#define T_COMMAS(n) t_commas((int64_t)(n), (char[32]){0})

#endif
