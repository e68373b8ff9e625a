/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/report/metrics.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static lev_status failed(const lev_metrics *m, const char *what) {
  return lev_fail(LEV_ERR_IO, "cannot %s %s: %s", what, m->path, strerror(errno));
}

lev_status lev_metrics_open(lev_metrics *metrics, const char *path, int append) {
  snprintf(metrics->path, sizeof metrics->path, "%s", path);
  metrics->file = fopen(path, append ? "a" : "w");
  return metrics->file ? LEV_OK : failed(metrics, "open");
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
  else /* a real stays a real for readers that tell the two apart */
    fprintf(out, fmod(f->real, 1) == 0 && fabs(f->real) < 1e15 ? "%.1f" : "%.17g", f->real);
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
