/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/report/metrics.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static lev_status failed(const lev_metrics *m, const char *what) {
  return lev_fail(LEV_ERR_IO, "cannot %s %s: %s", what, m->path, strerror(errno));
}

/* Cuts off what follows the last newline: a line that a killed run did not finish would spoil the next one. */
static lev_status cut_unfinished(lev_metrics *m) {
  char block[512];
  int file = fileno(m->file);
  off_t end = lseek(file, 0, SEEK_END), from;
  for (bool found = false; end > 0 && !found;) {
    from = end > (off_t)sizeof block ? end - (off_t)sizeof block : 0;
    ssize_t n = pread(file, block, (size_t)(end - from), from);
    if (n != (ssize_t)(end - from)) return failed(m, "read");
    while (n > 0 && block[n - 1] != '\n') --n;
    found = n > 0;
    end = from + (off_t)n;
  }
  return end >= 0 && ftruncate(file, end) == 0 ? LEV_OK : failed(m, "shorten");
}

static lev_status set_aside(lev_metrics *m) {
  struct stat s;
  m->aside[0] = '\0';
  if (stat(m->path, &s) != 0 || !S_ISREG(s.st_mode) || s.st_size == 0) return LEV_OK; /* opening it tells the rest */
  for (int i = 1; i == 1 || access(m->aside, F_OK) == 0; ++i) snprintf(m->aside, sizeof m->aside, "%s.%d", m->path, i);
  return rename(m->path, m->aside) == 0 ? LEV_OK : failed(m, "rename");
}

lev_status lev_metrics_open(lev_metrics *metrics, const char *path, int append) {
  snprintf(metrics->path, sizeof metrics->path, "%s", path);
  if (!append) LEV_TRY(set_aside(metrics));
  metrics->file = fopen(path, append ? "a+" : "w");
  if (!metrics->file) return failed(metrics, "open");
  lev_status st = append ? cut_unfinished(metrics) : LEV_OK;
  if (st != LEV_OK) lev_metrics_close(metrics);
  return st;
}

bool lev_metrics_has(const char *path, int64_t step, const char *name) {
  char start[96], line[4096];
  bool found = false, whole = true; /* whole: what fgets reads next is the begin of a line */
  FILE *file = fopen(path, "r");
  int n = snprintf(start, sizeof start, "{\"step\": %lld, \"%.40s\": ", (long long)step, name);
  while (file && !found && fgets(line, sizeof line, file)) {
    bool end = strchr(line, '\n') != NULL;
    found = whole && end && strncmp(line, start, (size_t)n) == 0;
    whole = end;
  }
  if (file) (void)fclose(file);
  return found;
}

void lev_metrics_close(lev_metrics *metrics) {
  if (metrics->file) (void)fclose(metrics->file);
  metrics->file = NULL;
}

static void quoted(FILE *out, const char *text) {
  fputc('"', out);
  for (; *text; ++text)
    if (*text == '"' || *text == '\\')
      fprintf(out, "\\%c", *text);
    else if ((unsigned char)*text < 0x20)
      fprintf(out, "\\u%04x", *text);
    else
      fputc(*text, out);
  fputc('"', out);
}

static void value(FILE *out, const lev_metric *f) {
  if (f->type == LEV_METRIC_INT)
    fprintf(out, "%lld", (long long)f->integer);
  else if (f->type == LEV_METRIC_TEXT)
    quoted(out, f->text);
  else if (!isfinite(f->real))
    fputs("null", out);
  else { /* a real stays a real for readers that tell the two apart */
    char text[40];
    snprintf(text, sizeof text, "%.17g", f->real);
    fprintf(out, "%s%s", text, strpbrk(text, ".e") ? "" : ".0");
  }
}

lev_status lev_metrics_line(lev_metrics *metrics, const lev_metric *fields, int n) {
  for (int i = 0; i < n; ++i) {
    fputs(i ? ", " : "{", metrics->file);
    quoted(metrics->file, fields[i].name);
    fputs(": ", metrics->file);
    value(metrics->file, &fields[i]);
  }
  fputs("}\n", metrics->file);
  return fflush(metrics->file) == 0 && !ferror(metrics->file) ? LEV_OK : failed(metrics, "write");
}
