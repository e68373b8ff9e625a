/* SPDX-License-Identifier: Apache-2.0 */
/* Numeric comparison for tests: relative L2 error per tensor in f64, exact zero where the reference is zero, and guards
 * against untouched, partly written or permuted outputs. */
#ifndef LEV_TESTS_NUM_H
#define LEV_TESTS_NUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"

/* ||got - want||2 / ||want||2 over n scalars; 0 if both are exactly zero, infinity if only `want` is or any value is
 * not finite. */
double num_rel_l2(lev_dtype type, const void *got, const double *want, int64_t n);
/* As above, both sides f64. */
double num_rel_l2_f64(const double *got, const double *want, int64_t n);

/* Checks `got` against the f64 oracle within `tolerance`, and that the check itself has teeth: the same comparison must
 * reject `got` (1) left as poison, (2) with one row zeroed, (3) with two differing rows swapped. `rows` x `cols`
 * layout. */
bool num_check_at(lev_dtype type, const void *got, const double *want, int64_t rows, int64_t cols, double tolerance,
                  const char *what, const char *file, int line);
#define NUM_CHECK(type, got, want, rows, cols, tolerance, what)                                                        \
  num_check_at((type), (got), (want), (rows), (cols), (tolerance), (what), __FILE__, __LINE__)

/* Fills with reproducible values: uniform in [-scale, scale], keyed by (t_seed(), stream, element), rounded to `type`;
 * writes the rounded values to `out64` too unless NULL. */
void num_random(lev_dtype type, void *out, double *out64, int64_t n, double scale, uint32_t stream);
/* Sets every byte to 0xFF (NaN in all floating types, -1 in integers). */
void num_poison(void *out, size_t bytes);
/* Number of scalars still holding poison. */
int64_t num_poisoned(lev_dtype type, const void *array, int64_t n);

#endif
