/* SPDX-License-Identifier: Apache-2.0 */
/* The table and the records. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <jansson.h>

#include "harness/bench/bench_impl.h"

/* ---- table ---- */

static void bytes_text(size_t bytes, char text[24]) {
  if (bytes == 0)
    snprintf(text, 24, "-");
  else if (bytes >= (size_t)1 << 30)
    snprintf(text, 24, "%.2f GiB", (double)bytes / (1 << 30));
  else
    snprintf(text, 24, "%.2f MiB", (double)bytes / (1 << 20));
}

static void ratio_text(double x, const char *format, char text[24]) {
  if (x > 0)
    snprintf(text, 24, format, x); /* NOLINT(clang-diagnostic-format-nonliteral) */
  else
    snprintf(text, 24, "-");
}

void bench_report_head(const bench *b) {
  FILE *out = b->options->out;
  if (b->options->json) return;
  fprintf(out, "%s; copy %.3g GB/s (read + write), matrix product %.4g TFLOP/s; revision %s\n%s\n", b->device_name,
          b->copy_ceiling * 1e-9, b->matmul_ceiling * 1e-12, bench_revision(),
          bench_backend(b) == LEV_BACKEND_CPU ? "on the CPU, small shapes: they show that the cases run, not a speed\n"
                                              : "");
  fprintf(out, "%-34s %18s %10s %17s %6s %7s %7s %11s %11s\n", "case", "value", "ms", "p10 .. p90", "copy", "matmul",
          "x plain", "bytes", "plain");
}

static void print_row(const bench *b, const bench_result *r) {
  char copy[24], matmul[24], plain[24], held[24], plain_held[24], spread[40], value[40];
  ratio_text(100 * r->copy_fraction, "%.0f %%", copy);
  ratio_text(100 * r->matmul_fraction, "%.0f %%", matmul);
  ratio_text(r->plain_seconds / r->seconds, "%.2f", plain);
  bytes_text(r->work.held_bytes, held);
  bytes_text(r->work.plain_bytes, plain_held);
  snprintf(value, sizeof value, "%.4g %s", r->value, r->unit);
  snprintf(spread, sizeof spread, "%.4g .. %.4g", r->low * 1e3, r->high * 1e3);
  fprintf(b->options->out, "%-34s %18s %10.4g %17s %6s %7s %7s %11s %11s\n", r->of->name, value, r->seconds * 1e3,
          spread, copy, matmul, plain, held, plain_held);
}

void bench_report_not(const bench *b, const char *what, const char *why) {
  FILE *out = b->options->json ? stderr : b->options->out;
  fprintf(out, "%-34s %s: %.600s\n", b->of->name, what, why);
}

/* ---- records ---- */

static void set_number(json_t *record, const char *key, double x) {
  (void)json_object_set_new(record, key, json_real(x)); /* NaN has no JSON form: the key is then missing */
}

static json_t *new_record(const bench *b, const char *name, double value, const char *unit) {
  char at[32];
  time_t now = time(NULL);
  struct tm utc;
  gmtime_r(&now, &utc);
  strftime(at, sizeof at, "%Y-%m-%dT%H:%M:%SZ", &utc);
  json_t *record = json_object();
  if (!record) return NULL;
  (void)json_object_set_new(record, "case", json_string(name));
  set_number(record, "value", value);
  (void)json_object_set_new(record, "unit", json_string(unit));
  (void)json_object_set_new(record, "command", json_string(b->options->command ? b->options->command : ""));
  (void)json_object_set_new(record, "revision", json_string(bench_revision()));
  (void)json_object_set_new(record, "device", json_string(b->device_name));
  (void)json_object_set_new(record, "time", json_string(at));
  (void)json_object_set_new(record, "backend", json_string(lev_backend_name(b->options->backend)));
  set_number(record, "copy_ceiling", b->copy_ceiling);
  set_number(record, "matmul_ceiling", b->matmul_ceiling);
  if (b->of && b->of->about && b->options->backend != LEV_BACKEND_CPU)
    (void)json_object_set_new(record, "shape", json_string(b->of->about));
  return record;
}

/* Appends a line to the file of results; NULL: only makes the file. A last line that a killed run left without its end
 * gets one, so that it spoils no other. */
static lev_status append(const bench_options *o, const char *line) {
  FILE *file = fopen(o->results, "a+");
  bool torn = file && fseek(file, -1, SEEK_END) == 0 && fgetc(file) != '\n';
  if (torn) torn = fseek(file, 0, SEEK_END) == 0; /* between reading and writing */
  bool wrong = !file || (torn && fputc('\n', file) == EOF) || (line && fprintf(file, "%s\n", line) < 0);
  if (file) wrong |= fclose(file) != 0;
  return wrong ? lev_fail(LEV_ERR_IO, "cannot write %s: %s", o->results, strerror(errno)) : LEV_OK;
}

lev_status bench_report_check(const bench_options *o) {
  return o->results ? append(o, NULL) : LEV_OK;
}

/* Appends the line; consumes the record. */
static lev_status write_record(const bench *b, json_t *record) {
  char *text = record ? json_dumps(record, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
  lev_status st = text ? LEV_OK : lev_fail(LEV_ERR_NOMEM, "no memory for a record");
  if (text && b->options->json) fprintf(b->options->out, "%s\n", text);
  if (text && b->options->results) st = append(b->options, text);
  fflush(b->options->out); /* a run that is killed later leaves what it measured */
  free(text);
  json_decref(record);
  return st;
}

lev_status bench_report(const bench *b, const bench_result *r) {
  json_t *record = new_record(b, r->of->name, r->value, r->unit);
  if (record) {
    set_number(record, "ms", r->seconds * 1e3);
    set_number(record, "ms_p10", r->low * 1e3);
    set_number(record, "ms_p90", r->high * 1e3);
    (void)json_object_set_new(record, "repetitions", json_integer(r->repetitions));
    (void)json_object_set_new(record, "calls", json_integer(r->calls));
    if (r->work.kernels) (void)json_object_set_new(record, "kernels", json_string(r->work.kernels));
    if (r->work.bytes > 0) {
      set_number(record, "bytes", r->work.bytes);
      set_number(record, "copy_fraction", r->copy_fraction);
    }
    if (r->work.flops > 0) {
      set_number(record, "flops", r->work.flops);
      set_number(record, "matmul_fraction", r->matmul_fraction);
    }
    if (r->plain_seconds > 0) {
      set_number(record, "plain_ms", r->plain_seconds * 1e3);
      set_number(record, "times_plain", r->plain_seconds / r->seconds);
    }
    if (r->work.held_bytes)
      (void)json_object_set_new(record, "held_bytes", json_integer((json_int_t)r->work.held_bytes));
    if (r->work.plain_bytes)
      (void)json_object_set_new(record, "plain_bytes", json_integer((json_int_t)r->work.plain_bytes));
  }
  if (!b->options->json) print_row(b, r);
  return write_record(b, record);
}

lev_status bench_report_figure(const bench *b, const char *name, double value, const char *unit) {
  char text[40];
  snprintf(text, sizeof text, "%.4g %s", value, unit);
  if (!b->options->json) fprintf(b->options->out, "%-34s %18s\n", name, text);
  return write_record(b, new_record(b, name, value, unit));
}
