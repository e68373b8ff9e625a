/* SPDX-License-Identifier: Apache-2.0 */
/* metrics.jsonl: exact numbers, whole lines whatever happened before. */
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/report/metrics.h"
#include "tests/t.h"

static char path[64];

static bool make_path(void) {
  snprintf(path, sizeof path, "/tmp/levee-metrics-XXXXXX");
  int file = mkstemp(path);
  if (file >= 0) close(file);
  return T_EXPECT(file >= 0);
}

static void put(const char *text) {
  FILE *file = fopen(path, "w");
  T_REQUIRE(file != NULL);
  fputs(text, file);
  fclose(file);
}

/* The file as one text of at most 4095 bytes. */
static const char *content(void) {
  static char text[4096];
  FILE *file = fopen(path, "r");
  size_t n = file ? fread(text, 1, sizeof text - 1, file) : 0;
  text[n] = '\0';
  if (file) fclose(file);
  return text;
}

static void write_step(lev_metrics *m, int64_t step, double loss) {
  const lev_metric fields[] = {LEV_INT("step", step), LEV_REAL("loss", loss)};
  T_EXPECT_OK(lev_metrics_line(m, fields, 2));
}

T_TEST(metrics_reals_keep_every_bit) {
  static const double values[] = {
      0.1, 1.0 / 3, 2, -0.0, 1e300, 5e-324, 123456789012345678.0, 1e15, 0.30000000000000004};
  lev_metrics m = {0};
  T_REQUIRE(make_path());
  T_REQUIRE_OK(lev_metrics_open(&m, path, 0));
  for (size_t i = 0; i < sizeof values / sizeof *values; ++i) write_step(&m, (int64_t)i, values[i]);
  lev_metrics_close(&m);
  FILE *file = fopen(path, "r");
  T_REQUIRE(file != NULL);
  for (size_t i = 0; i < sizeof values / sizeof *values; ++i) {
    json_t *row = json_loadf(file, JSON_DISABLE_EOF_CHECK, NULL);
    const json_t *loss = json_object_get(row, "loss");
    T_EXPECT_MSG(json_is_real(loss), "value %zu is no real", i);
    T_EXPECT_MSG(json_real_value(loss) == values[i], "value %zu reads back as %.17g", i, json_real_value(loss));
    T_EXPECT_EQ_I64(json_integer_value(json_object_get(row, "step")), (int64_t)i);
    json_decref(row);
  }
  fclose(file);
  unlink(path);
}

T_TEST(metrics_not_finite_is_null_and_text_is_escaped) {
  lev_metrics m = {0};
  T_REQUIRE(make_path());
  T_REQUIRE_OK(lev_metrics_open(&m, path, 0));
  const lev_metric fields[] = {LEV_REAL("a", NAN), LEV_REAL("b", INFINITY), LEV_TEXT("c", "q\" b\\ n\n \x01")};
  T_EXPECT_OK(lev_metrics_line(&m, fields, 3));
  json_t *row = json_loads(content(), 0, NULL); /* before the close: the line is out already */
  T_EXPECT(row && json_is_null(json_object_get(row, "a")) && json_is_null(json_object_get(row, "b")));
  T_EXPECT(row && strcmp(json_string_value(json_object_get(row, "c")), "q\" b\\ n\n \x01") == 0);
  json_decref(row);
  lev_metrics_close(&m);
  unlink(path);
}

T_TEST(metrics_append_after_an_unfinished_line) {
  static const struct {
    const char *before, *kept;
  } cases[] = {{"", ""},
               {"{\"step\": 1}\n", "{\"step\": 1}\n"},
               {"{\"step\": 1}\n{\"step\": 2, \"lo", "{\"step\": 1}\n"},
               {"{\"step\": 1, \"lo", ""},
               {"\n", "\n"}};
  T_REQUIRE(make_path());
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    lev_metrics m = {0};
    char want[128];
    put(cases[i].before);
    T_REQUIRE_OK(lev_metrics_open(&m, path, 1));
    write_step(&m, 3, 1.5);
    lev_metrics_close(&m);
    snprintf(want, sizeof want, "%s{\"step\": 3, \"loss\": 1.5}\n", cases[i].kept);
    T_EXPECT_MSG(strcmp(content(), want) == 0, "case %zu: \"%s\"", i, content());
  }
  unlink(path);
}

T_TEST(metrics_append_after_a_long_unfinished_line) {
  lev_metrics m = {0};
  char text[2048] = "{\"step\": 1}\n";
  T_REQUIRE(make_path());
  memset(text + 12, 'x', 1700); /* spans several of the blocks that are searched */
  put(text);
  T_REQUIRE_OK(lev_metrics_open(&m, path, 1));
  lev_metrics_close(&m);
  T_EXPECT(strcmp(content(), "{\"step\": 1}\n") == 0);
  unlink(path);
}

T_TEST(metrics_has_finds_whole_lines_of_a_step) {
  char text[6000];
  T_REQUIRE(make_path());
  put("{\"step\": 3, \"loss\": 1.5}\n{\"step\": 3, \"val_loss\": 1.5}\n{\"step\": 12, \"val_loss\": 2}\n{\"step\": 4, "
      "\"val_loss\": 1");
  T_EXPECT(lev_metrics_has(path, 3, "val_loss"));
  T_EXPECT(lev_metrics_has(path, 12, "val_loss"));
  T_EXPECT(!lev_metrics_has(path, 12, "loss"));
  T_EXPECT(!lev_metrics_has(path, 2, "val_loss"));
  T_EXPECT(!lev_metrics_has(path, 1, "val_loss"));
  T_EXPECT(!lev_metrics_has(path, 4, "val_loss")); /* a kill cut it off */
  /* the tail of a line that is longer than the reader's block does not pass for a line */
  memset(text, 'x', 4095);
  snprintf(text + 4095, sizeof text - 4095, "{\"step\": 5, \"val_loss\": 1}\n");
  put(text);
  T_EXPECT(!lev_metrics_has(path, 5, "val_loss"));
  unlink(path);
  T_EXPECT(!lev_metrics_has(path, 3, "val_loss"));
}

T_TEST(metrics_start_over_keeps_earlier_lines) {
  lev_metrics m = {0};
  char aside[80], want[32];
  T_REQUIRE(make_path());
  for (int run = 0; run < 3; ++run) { /* the first finds an empty file */
    T_REQUIRE_OK(lev_metrics_open(&m, path, 0));
    T_EXPECT(content()[0] == '\0');
    snprintf(aside, sizeof aside, "%s.%d", path, run);
    T_EXPECT_MSG(strcmp(m.aside, run ? aside : "") == 0, "run %d: \"%s\"", run, m.aside);
    T_EXPECT(access(aside, F_OK) == (run ? 0 : -1));
    write_step(&m, run, 1.5);
    lev_metrics_close(&m);
  }
  for (int run = 1; run < 3; ++run) {
    snprintf(aside, sizeof aside, "%s.%d", path, run);
    snprintf(want, sizeof want, "{\"step\": %d, \"loss\": 1.5}\n", run - 1);
    T_EXPECT(rename(aside, path) == 0 && strcmp(content(), want) == 0);
  }
  unlink(path);
}

T_TEST(metrics_failures_are_errors) {
  lev_metrics m = {0};
  T_EXPECT_STATUS(lev_metrics_open(&m, "/nowhere/metrics.jsonl", 0), LEV_ERR_IO);
  lev_metrics_close(&m);
  if (access("/dev/full", W_OK) != 0) {
    t_skip("no /dev/full here");
    return;
  }
  T_REQUIRE_OK(lev_metrics_open(&m, "/dev/full", 0));
  const lev_metric field = LEV_INT("step", 1);
  T_EXPECT_STATUS(lev_metrics_line(&m, &field, 1), LEV_ERR_IO);
  lev_metrics_close(&m);
}
