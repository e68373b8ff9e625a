/* SPDX-License-Identifier: Apache-2.0 */
/* Coefficient sets, scale modes and owners: tables and pure functions. */
#include <math.h>
#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"
#include "muon/muon.h"

#define ROWS_MAX 10

typedef struct coefficient_set {
  int steps;
  double norm_factor;
  double rows[ROWS_MAX][3];
} coefficient_set;

#define JORDAN                                                                                                         \
  { 3.4445, -4.7750, 2.0315 }

static const coefficient_set sets[MUON_SETS] = {
    [MUON_SIMPLE] = {5, 1, {JORDAN, JORDAN, JORDAN, JORDAN, JORDAN}},
    [MUON_QUINTIC] = {5,
                      1,
                      {{4.0848, -6.8946, 2.9270},
                       {3.9505, -6.3029, 2.6377},
                       {3.7418, -5.5913, 2.3037},
                       {2.8769, -3.1427, 1.2046},
                       {2.8366, -3.0525, 1.2012}}},
    [MUON_POLAR_EXPRESS] = {5,
                            1.02,
                            {{8.1566, -22.4833, 15.8788},
                             {4.0429, -2.8089, 0.5000},
                             {3.8917, -2.7725, 0.5061},
                             {3.2858, -2.3681, 0.4645},
                             {2.3465, -1.7098, 0.4232}}},
    [MUON_POLAR_EXPRESS_8] = {8,
                              1,
                              {{8.2051, -22.9019, 16.4607},
                               {4.0664, -2.8612, 0.5184},
                               {3.9096, -2.8234, 0.5250},
                               {3.2856, -2.4153, 0.4853},
                               {2.2779, -1.6198, 0.3985},
                               {1.8726, -1.2307, 0.3585},
                               {1.8564, -1.2132, 0.3568},
                               {1.8750, -1.2500, 0.3750}}},
    [MUON_DEEPSEEK_V4] =
        {10, 1, {JORDAN, JORDAN, JORDAN, JORDAN, JORDAN, JORDAN, JORDAN, JORDAN, {2, -1.5, 0.5}, {2, -1.5, 0.5}}},
    [MUON_CUBIC] = {5,
                    1,
                    {{3.3657, -3.3421, 0},
                     {2.5744, -1.4957, 0},
                     {2.5369, -1.4313, 0},
                     {2.4419, -1.2764, 0},
                     {2.2230, -0.9631, 0}}},
};

static const char *const set_names[MUON_SETS] = {
#define SET_NAME(name, text) text,
    MUON_SET_TABLE(SET_NAME)
#undef SET_NAME
};
static const char *const scale_names[MUON_SCALES] = {
#define SCALE_NAME(name, text) text,
    MUON_SCALE_TABLE(SCALE_NAME)
#undef SCALE_NAME
};

static int find(const char *const *names, int n, const char *name) {
  for (int i = 0; i < n; ++i)
    if (name && strcmp(names[i], name) == 0) return i;
  return n;
}

const char *muon_set_name(muon_set set) {
  return (unsigned)set < MUON_SETS ? set_names[set] : "?";
}
muon_set muon_set_find(const char *name) {
  return (muon_set)find(set_names, MUON_SETS, name);
}
int muon_set_steps(muon_set set) {
  return sets[set].steps;
}
double muon_set_norm_factor(muon_set set) {
  return sets[set].norm_factor;
}
void muon_set_row(muon_set set, int step, double abc[3]) {
  memcpy(abc, sets[set].rows[step < sets[set].steps ? step : sets[set].steps - 1], 3 * sizeof *abc);
}

const char *muon_scale_name(muon_scale scale) {
  return (unsigned)scale < MUON_SCALES ? scale_names[scale] : "?";
}
muon_scale muon_scale_find(const char *name) {
  return (muon_scale)find(scale_names, MUON_SCALES, name);
}

double muon_scale_factor(muon_scale scale, int64_t rows, int64_t cols) {
  double out = (double)rows, in = (double)cols;
  switch (scale) {
  case MUON_SCALE_MOONLIGHT:
    return 0.2 * sqrt(fmax(out, in));
  case MUON_SCALE_ORIGINAL:
    return sqrt(fmax(1, out / in));
  case MUON_SCALE_SPECTRAL:
    return sqrt(out / in);
  case MUON_SCALE_NONE:
  case MUON_SCALES:
    break;
  }
  return 1;
}

static double cost(const muon_matrix *m) {
  double n = (double)lev_min_i64(m->rows, m->cols), big = (double)lev_max_i64(m->rows, m->cols);
  return 4 * big * n * n + 2 * n * n * n;
}

lev_status muon_owners(const muon_matrix *matrices, int n, int ranks, int *owner) {
  if (n < 0 || ranks < 1 || (n > 0 && (!matrices || !owner)))
    return lev_fail(LEV_ERR_ARG, "muon_owners: %d matrices over %d ranks", n, ranks);
  double *load = lev_calloc(LEV_HEAP_PLAN, (size_t)ranks, sizeof *load);
  if (!load) return LEV_ERR_NOMEM;
  for (int i = 0; i < n; ++i) owner[i] = -1;
  for (int dealt = 0; dealt < n; ++dealt) {
    int next = -1, rank = 0;
    for (int i = 0; i < n; ++i)
      if (owner[i] < 0 && (next < 0 || cost(&matrices[i]) > cost(&matrices[next]))) next = i;
    for (int r = 1; r < ranks; ++r)
      if (load[r] < load[rank]) rank = r;
    owner[next] = rank;
    load[rank] += cost(&matrices[next]);
  }
  lev_free(load);
  return LEV_OK;
}
