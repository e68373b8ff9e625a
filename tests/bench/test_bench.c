/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmark runner: what it refuses, what it records. The cases are fakes; of the figures only their size is looked
 * at. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/bench/bench.h"
#include "tests/backend.h"
#include "tests/t.h"

enum { N = 4096 };

typedef struct fill {
  void *to;
  size_t bytes;
  int times;
} fill;

static lev_status fill_once(bench *b, void *ctx) {
  const fill *f = ctx;
  for (int i = 0; i < f->times; ++i) LEV_TRY(lev_fill(bench_stream(b), f->to, 0, f->bytes, "test.fill"));
  return LEV_OK;
}

typedef struct fake {
  double error;              /* relative, of one value */
  bool unchecked, add, slow; /* add: no bench_measure, one bench_add; slow: a few ms on a GPU */
  lev_status fails;
} fake;

static lev_status run_fake(bench *b, const void *arg) {
  const fake *f = arg;
  void *x;
  double got[N], want[N];
  if (f->fails != LEV_OK) return lev_fail(f->fails, "as told");
  size_t bytes = f->slow ? (size_t)bench_size(b, (int64_t)1 << 29, sizeof got) : sizeof got;
  LEV_TRY(bench_alloc(b, bytes, &x));
  LEV_TRY(bench_random(b, LEV_F64, x, N, 2.0));
  LEV_TRY(bench_read(b, LEV_F64, x, 0, N, got));
  memcpy(want, got, sizeof got);
  got[7] += f->error * 2.0 * sqrt((double)N);
  if (!f->unchecked) LEV_TRY(bench_close(b, "x", got, want, N, 1e-6));
  fill fills = {x, bytes, f->slow ? 16 : 1};
  bench_work work = {.once = fill_once, .plain = fill_once, .ctx = &fills, .flops = 1e3};
  work.bytes = (double)bytes * fills.times, work.held_bytes = 10, work.plain_bytes = 20, work.kernels = "some kernels";
  if (f->add) return bench_add(b, ".figure", 3.5, "things");
  LEV_TRY(bench_measure(b, &work, BENCH_GBPS));
  return bench_add(b, ".figure", 3.5, "things");
}

static const fake right = {.error = 1e-9}, wrong = {.error = 1e-3}, nothing = {.error = NAN}, slow = {.slow = true},
                  bare = {.unchecked = true}, broken = {.fails = LEV_ERR_CAPACITY}, figure = {.add = true};

static const bench_case good_cases[] = {
    {"fake.good", "4096 values", run_fake, &right, false},
    {"fake.good.again", NULL, run_fake, &right, false},
    {"fake.slow", NULL, run_fake, &slow, false},
};
static const bench_case bad_cases[] = {
    {"bad.wrong", NULL, run_fake, &wrong, false},  {"bad.nan", NULL, run_fake, &nothing, false},
    {"bad.bare", NULL, run_fake, &bare, false},    {"bad.broken", NULL, run_fake, &broken, false},
    {"bad.after", NULL, run_fake, &figure, false},
};
static const bench_case gpu_cases[] = {{"gpu.only", NULL, run_fake, &right, true}};

static double count(const bench_result *results, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += results[i].seconds > 0 && results[i].copy_fraction > 0;
  return sum;
}
static const bench_area good = {"fake", good_cases, 3, "measured", "cases", count},
                        bad = {.name = "bad", .cases = bad_cases, .n_cases = 5},
                        gpu = {.name = "gpu", .cases = gpu_cases, .n_cases = 1};
static const bench_area *const all_areas[] = {&good, &bad, &gpu};

typedef struct run {
  bench_totals totals;
  lev_status status;
  char *text, *records; /* output, results file */
} run;

static char *read_all(FILE *file) {
  char *text = calloc(1, 1 << 16);
  rewind(file);
  if (text && fread(text, 1, (1 << 16) - 1, file) == 0) text[0] = 0;
  return text;
}

static run run_words(const char *const *words, int n, bool json) {
  run r = {.status = LEV_ERR_INTERNAL};
  char path[] = "/tmp/levee_bench_XXXXXX";
  int file = mkstemp(path);
  FILE *out = tmpfile(), *results = file >= 0 ? fdopen(file, "r") : NULL;
  if (!T_EXPECT(out && results)) exit(2);
  bench_options o = {.backend = t_backend(), .select = words, .n_select = n, .seconds = 0.01, .json = json};
  o.results = path, o.command = "test \"quoted\"", o.areas = all_areas, o.n_areas = 3, o.out = out;
  r.status = bench_run(&o, &r.totals);
  r.text = read_all(out), r.records = read_all(results);
  fclose(out), fclose(results);
  remove(path);
  return r;
}
static void end(run *r) {
  free(r->text), free(r->records);
}

T_TEST(bench_wrong_cases_are_refused) {
  run r = run_words((const char *[]){"bad"}, 1, false);
  T_EXPECT_STATUS(r.status, LEV_ERR_WRONG);
  T_EXPECT_EQ_I64(r.totals.refused, 4);
  T_EXPECT_EQ_I64(r.totals.measured, 1); /* the set goes on after a refusal */
  T_EXPECT(strstr(r.text, "bad.wrong") && strstr(r.text, "REFUSED"));
  T_EXPECT(strstr(r.text, "not compared"));
  T_EXPECT(strstr(r.text, "as told"));
  /* Nothing of a refused case is recorded. */
  T_EXPECT(!strstr(r.records, "bad.wrong") && !strstr(r.records, "bad.nan") && !strstr(r.records, "bad.bare"));
  T_EXPECT(strstr(r.records, "bad.after.figure"));
  end(&r);
}

static void check_record(const json_t *record, const char *name) {
  const char *const text[] = {"case", "unit", "command", "revision", "device", "time", "backend", "kernels"};
  const char *const numbers[] = {
      "value",           "ms",       "ms_p10",      "ms_p90",       "bytes",         "copy_fraction", "flops",
      "matmul_fraction", "plain_ms", "times_plain", "copy_ceiling", "matmul_ceiling"};
  int year, month, day, hour, minute, second, length = 0;
  for (size_t i = 0; i < sizeof text / sizeof *text; ++i) {
    const char *value = json_string_value(json_object_get(record, text[i]));
    T_EXPECT_MSG(value && *value, "no %s in a record", text[i]);
  }
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i)
    T_EXPECT_MSG(json_number_value(json_object_get(record, numbers[i])) > 0, "no %s in a record", numbers[i]);
  T_EXPECT(strcmp(json_string_value(json_object_get(record, "case")), name) == 0);
  T_EXPECT(strcmp(json_string_value(json_object_get(record, "command")), "test \"quoted\"") == 0);
  T_EXPECT_EQ_I64(json_integer_value(json_object_get(record, "held_bytes")), 10);
  T_EXPECT_EQ_I64(json_integer_value(json_object_get(record, "plain_bytes")), 20);
  const char *time = json_string_value(json_object_get(record, "time"));
  T_EXPECT(sscanf(time, "%4d-%2d-%2dT%2d:%2d:%2dZ%n", &year, &month, &day, &hour, &minute, &second, &length) == 6);
  T_EXPECT(length == (int)strlen(time) && length == 20);
}

static double number(const json_t *record, const char *name) {
  return json_number_value(json_object_get(record, name));
}

/* The rule of the repetitions: single calls on the CPU, as many as 50 ms take on a GPU. Calls of a few microseconds are
 * as long as the host takes to launch them, which other work on the machine may double. */
static void check_timing(const json_t *record, bool is_slow) {
  double calls = number(record, "calls"), ms = number(record, "ms");
  T_EXPECT(number(record, "repetitions") >= 3);
  T_EXPECT(ms >= number(record, "ms_p10") && ms <= number(record, "ms_p90"));
  T_EXPECT(fabs(number(record, "value") * ms - number(record, "bytes") * 1e-6) <=
           1e-6 * number(record, "bytes") * 1e-6);
  if (t_backend() == LEV_BACKEND_CPU) {
    T_EXPECT(calls == 1);
    return;
  }
  T_EXPECT_MSG(calls > 1 && calls * ms > (is_slow ? 25 : 10) && calls * ms < 500, "%g calls of %g ms in a repetition",
               calls, ms);
  if (is_slow) T_EXPECT_MSG(ms > 1 && ms < 20, "%g ms for 8 GiB", ms);
}

T_TEST(bench_records_are_complete) {
  run r = run_words((const char *[]){"fake"}, 1, true);
  T_EXPECT_OK(r.status);
  T_EXPECT_EQ_I64(r.totals.measured, 3);
  T_EXPECT(strcmp(r.text, r.records) == 0); /* --json prints what the file gets */
  const char *const names[] = {"fake.good", "fake.good.figure", "fake.good.again", "fake.good.again.figure",
                               "fake.slow", "fake.slow.figure", "fake.measured"};
  int n = 0;
  for (char *line = strtok(r.records, "\n"); line; line = strtok(NULL, "\n"), ++n) {
    json_t *record = json_loads(line, 0, NULL);
    T_REQUIRE(record && n < 7);
    if (strstr(names[n], "figure") || strstr(names[n], "measured")) {
      T_EXPECT(strcmp(json_string_value(json_object_get(record, "case")), names[n]) == 0);
      T_EXPECT(json_number_value(json_object_get(record, "value")) == (n == 6 ? 3 : 3.5));
    } else {
      check_record(record, names[n]);
      check_timing(record, n == 4);
    }
    json_decref(record);
  }
  T_EXPECT_EQ_I64(n, 7);
  end(&r);
}

T_TEST(bench_selection) {
  run r = run_words((const char *[]){"fake.good.again"}, 1, false);
  T_EXPECT_OK(r.status);
  T_EXPECT_EQ_I64(r.totals.measured, 1);
  T_EXPECT(!strstr(r.records, "fake.measured")); /* not all cases ran */
  end(&r);
  r = run_words((const char *[]){"fake.good"}, 1, false);
  T_EXPECT_EQ_I64(r.totals.measured, 2); /* a beginning up to a '.' */
  end(&r);
  /* Unknown names list what there is: the areas, or the area's cases. */
  r = run_words((const char *[]){"fake", "nope"}, 2, false);
  T_EXPECT_STATUS(r.status, LEV_ERR_ARG);
  T_EXPECT(strstr(lev_detail(), "fake, bad, gpu"));
  T_EXPECT_EQ_I64(r.totals.measured, 0);
  end(&r);
  r = run_words((const char *[]){"fake.goo"}, 1, false);
  T_EXPECT_STATUS(r.status, LEV_ERR_ARG);
  T_EXPECT(strstr(lev_detail(), "fake.good, fake.good.again"));
  end(&r);
}

T_TEST(bench_nothing_measured_is_a_failure) {
  if (t_backend() == LEV_BACKEND_CUDA) {
    t_skip("the case is measured on a GPU");
    return;
  }
  run r = run_words((const char *[]){"gpu"}, 1, false);
  T_EXPECT_STATUS(r.status, LEV_ERR_MISUSE);
  T_EXPECT_EQ_I64(r.totals.skipped, 1);
  end(&r);
}

T_TEST(bench_areas_are_well_formed) {
  for (int a = 0; a < bench_n_areas; ++a) {
    const bench_area *area = bench_areas[a];
    T_EXPECT(area->n_cases > 0);
    for (int c = 0; c < area->n_cases; ++c) {
      size_t n = strlen(area->name);
      T_EXPECT_MSG(strncmp(area->cases[c].name, area->name, n) == 0 && area->cases[c].name[n] == '.', "%s in area %s",
                   area->cases[c].name, area->name);
      for (int before = 0; before < c; ++before)
        T_EXPECT_MSG(strcmp(area->cases[c].name, area->cases[before].name) != 0, "%s twice", area->cases[c].name);
    }
  }
  T_EXPECT(strlen(bench_revision()) > 0);
}
