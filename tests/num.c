/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/num.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/rng.h"
#include "tests/t.h"

double num_rel_l2_f64(const double *got, const double *want, int64_t n) {
  double error = 0, norm = 0;
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) {
    double d = got[i] - want[i];
    error += d * d, norm += want[i] * want[i];
    bad |= !isfinite(got[i]);
  }
  if (bad) return INFINITY;
  if (norm == 0) return error == 0 ? 0 : INFINITY;
  return sqrt(error / norm);
}

double num_rel_l2(lev_dtype type, const void *got, const double *want, int64_t n) {
  double *wide = malloc(sizeof(double) * (size_t)(n > 0 ? n : 1));
  if (!wide) return INFINITY;
  for (int64_t i = 0; i < n; ++i) wide[i] = lev_dtype_load(type, got, i);
  double error = num_rel_l2_f64(wide, want, n);
  free(wide);
  return error;
}

/* True when the comparison tells a damaged copy of `wide` from `want`. */
static bool rejects(const double *damaged, const double *want, int64_t n, double tolerance) {
  return !(num_rel_l2_f64(damaged, want, n) <= tolerance);
}

static bool has_teeth(const double *want, int64_t rows, int64_t cols, double tolerance) {
  int64_t n = rows * cols, big = -1, other = -1;
  double *copy = malloc(sizeof(double) * (size_t)n);
  bool ok = copy != NULL;
  for (int64_t i = 0; ok && i < n; ++i) copy[i] = NAN;
  ok = ok && rejects(copy, want, n, tolerance);
  /* the row with the largest norm zeroed; two rows that differ swapped */
  double best = 0;
  for (int64_t r = 0; r < rows; ++r) {
    double norm = 0;
    for (int64_t c = 0; c < cols; ++c) norm += want[r * cols + c] * want[r * cols + c];
    if (norm > best) best = norm, big = r;
  }
  if (ok && big >= 0) {
    memcpy(copy, want, sizeof(double) * (size_t)n);
    memset(copy + big * cols, 0, sizeof(double) * (size_t)cols);
    ok = rejects(copy, want, n, tolerance);
    for (int64_t r = 0; r < rows && other < 0; ++r)
      if (memcmp(want + r * cols, want + big * cols, sizeof(double) * (size_t)cols) != 0) other = r;
    if (ok && other >= 0) {
      memcpy(copy, want, sizeof(double) * (size_t)n);
      memcpy(copy + big * cols, want + other * cols, sizeof(double) * (size_t)cols);
      memcpy(copy + other * cols, want + big * cols, sizeof(double) * (size_t)cols);
      ok = rejects(copy, want, n, tolerance);
    }
  }
  free(copy);
  return ok;
}

bool num_check_at(lev_dtype type, const void *got, const double *want, int64_t rows, int64_t cols, double tolerance,
                  const char *what, const char *file, int line) {
  int64_t n = rows * cols;
  double error = num_rel_l2(type, got, want, n);
  bool close = error <= tolerance;
  t_check(close, file, line, "%s: relative error %.3g > %.3g (%lld x %lld %s)", what, error, tolerance, (long long)rows,
          (long long)cols, lev_dtype_name(type));
  bool teeth = n == 0 || has_teeth(want, rows, cols, tolerance);
  t_check(teeth, file, line, "%s: the comparison accepts a sabotaged output", what);
  return close && teeth;
}

void num_random(lev_dtype type, void *out, double *out64, int64_t n, double scale, uint32_t stream) {
  lev_rng_key key = {t_seed(), 0, stream};
  for (int64_t i = 0; i < n; ++i) {
    lev_dtype_store(type, out, i, scale * (2 * lev_rng_uniform(key, (uint64_t)i) - 1));
    if (out64) out64[i] = lev_dtype_load(type, out, i);
  }
}

void num_poison(void *out, size_t bytes) {
  memset(out, 0xFF, bytes);
}

int64_t num_poisoned(lev_dtype type, const void *array, int64_t n) {
  size_t size = lev_dtype_bytes(type);
  const unsigned char *bytes = array;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    bool all = true;
    for (size_t b = 0; b < size; ++b) all &= bytes[(size_t)i * size + b] == 0xFF;
    count += all;
  }
  return count;
}
