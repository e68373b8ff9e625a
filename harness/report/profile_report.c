/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/report/profile_report.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"

/* ---- overlap ---- */

/* A span opens (+1) or closes (-1) among the kernels or among the copies. */
typedef struct edge {
  double time;
  int kernel, copy;
} edge;

static int by_time(const void *a, const void *b) {
  double x = ((const edge *)a)->time, y = ((const edge *)b)->time;
  return x < y ? -1 : x > y;
}

lev_status lev_overlap_of(const lev_span *spans, int64_t n, lev_overlap *out) {
  *out = (lev_overlap){.share = 1};
  if (n == 0) return LEV_OK;
  edge *edges = lev_calloc(LEV_HEAP_REPORT, 2 * (size_t)n, sizeof *edges);
  if (!edges) return LEV_ERR_NOMEM;
  for (int64_t i = 0; i < n; ++i) {
    const lev_span *s = &spans[i];
    int kernel = s->kind == LEV_SPAN_KERNEL, copy = s->kind == LEV_SPAN_COPY && s->host_link;
    edges[2 * i] = (edge){s->begin, kernel, copy};
    edges[2 * i + 1] = (edge){s->end, -kernel, -copy};
    if (copy) out->host_bytes += s->bytes;
  }
  qsort(edges, 2 * (size_t)n, sizeof *edges, by_time);
  int64_t kernels = 0, copies = 0;
  for (int64_t i = 0; i + 1 < 2 * n; ++i) {
    kernels += edges[i].kernel, copies += edges[i].copy;
    double gap = edges[i + 1].time - edges[i].time;
    if (kernels > 0) out->compute += gap;
    if (copies > 0) out->copy += gap;
    if (kernels > 0 && copies > 0) out->inside += gap;
  }
  out->length = edges[2 * n - 1].time - edges[0].time;
  if (out->copy > 0) out->share = out->inside / out->copy;
  lev_free(edges);
  return LEV_OK;
}

/* ---- totals ---- */

static const char *phase_name(const lev_profile *p, const lev_span *s) {
  return s->phase < 0 ? "" : lev_profile_phase_at(p, s->phase).name;
}

static int by_seconds(const void *a, const void *b) {
  double x = ((const lev_profile_row *)a)->seconds, y = ((const lev_profile_row *)b)->seconds;
  return x > y ? -1 : x < y;
}

static lev_profile_row *row_of(lev_profile_row *rows, int *n, const char *phase, const lev_span *s) {
  for (int i = 0; i < *n; ++i)
    if (rows[i].kind == s->kind && strcmp(rows[i].name, s->name) == 0 && strcmp(rows[i].phase, phase) == 0)
      return &rows[i];
  rows[*n] = (lev_profile_row){.phase = phase, .name = s->name, .kind = s->kind};
  return &rows[(*n)++];
}

lev_status lev_profile_rows(const lev_profile *p, lev_profile_row **out, int *n) {
  int64_t spans = lev_profile_count(p);
  int room = 0;
  *n = 0, *out = NULL;
  for (int64_t i = 0; i < spans; ++i) {
    const lev_span *s = lev_profile_at(p, i);
    if (*n == room) {
      room = room ? 2 * room : 64;
      lev_profile_row *more = lev_realloc(LEV_HEAP_REPORT, *out, (size_t)room * sizeof *more);
      if (!more) {
        lev_free(*out);
        *out = NULL, *n = 0;
        return LEV_ERR_NOMEM;
      }
      *out = more;
    }
    lev_profile_row *row = row_of(*out, n, phase_name(p, s), s);
    ++row->count, row->seconds += s->end - s->begin, row->bytes += s->bytes;
  }
  if (*n > 0) qsort(*out, (size_t)*n, sizeof **out, by_seconds);
  return LEV_OK;
}

/* ---- Chrome trace ---- */

/* Names are static texts of this program: no quotes or control characters in them. */
static void write_span(const lev_profile *p, const lev_span *s, int rank, FILE *out) {
  fprintf(out, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"cat\":\"%s\",\"ts\":%.3f,\"dur\":%.3f", rank,
          s->stream + 1, s->name, lev_span_kind_name(s->kind), 1e6 * s->begin, 1e6 * (s->end - s->begin));
  fprintf(out, ",\"args\":{\"phase\":\"%s\"", phase_name(p, s));
  if (s->bytes > 0) fprintf(out, ",\"bytes\":%llu", (unsigned long long)s->bytes);
  if (s->host_link) fprintf(out, ",\"host\":true");
  fprintf(out, "}}");
}

/* -1: none of this name did anything. */
static int compute_stream(const lev_profile *p) {
  for (int s = 0; s < lev_profile_streams(p); ++s)
    if (strcmp(lev_profile_stream(p, s), "compute") == 0) return s;
  return -1;
}

/* Spans of one phase follow each other on the compute stream: one bar from the first to the last. */
static void write_phases(const lev_profile *p, int rank, FILE *out) {
  int64_t n = lev_profile_count(p);
  int compute = compute_stream(p);
  for (int64_t i = 0; i < n;) {
    const lev_span *first = lev_profile_at(p, i);
    double begin = first->begin, end = first->end;
    bool found = false;
    int64_t j = i;
    for (; j < n && lev_profile_at(p, j)->phase == first->phase; ++j) {
      const lev_span *s = lev_profile_at(p, j);
      if (s->stream != compute) continue;
      if (!found || s->begin < begin) begin = s->begin;
      if (!found || s->end > end) end = s->end;
      found = true;
    }
    i = j;
    if (!found || first->phase < 0) continue;
    lev_profile_phase phase = lev_profile_phase_at(p, first->phase);
    fprintf(out, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":0,\"name\":\"%s", rank, phase.name);
    if (phase.index >= 0) fprintf(out, " %lld", (long long)phase.index);
    fprintf(out, "\",\"ts\":%.3f,\"dur\":%.3f}", 1e6 * begin, 1e6 * (end - begin));
  }
}

static void write_summary(const lev_profile *p, const lev_overlap *o, const lev_profile_row *rows, int n, FILE *out) {
  fprintf(out,
          "\n],\n\"levee\":{\"seconds\":%.9g,\"compute_seconds\":%.9g,\"host_copy_seconds\":%.9g,"
          "\"host_copy_inside_compute_seconds\":%.9g,\"overlap\":%.9g,\"host_bytes\":%llu,\"spans\":%lld,"
          "\"dropped\":%lld,\n\"operations\":[",
          o->length, o->compute, o->copy, o->inside, o->share, (unsigned long long)o->host_bytes,
          (long long)lev_profile_count(p), (long long)lev_profile_dropped(p));
  for (int i = 0; i < n; ++i)
    fprintf(out,
            "%s\n{\"phase\":\"%s\",\"name\":\"%s\",\"kind\":\"%s\",\"count\":%lld,\"seconds\":%.9g,\"bytes\":%llu}",
            i ? "," : "", rows[i].phase, rows[i].name, lev_span_kind_name(rows[i].kind), (long long)rows[i].count,
            rows[i].seconds, (unsigned long long)rows[i].bytes);
  fprintf(out, "\n]}}\n");
}

static void write_trace(const lev_profile *p, int rank, FILE *out) {
  fprintf(out, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  fprintf(out, "{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d\"}}", rank, rank);
  fprintf(out, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"thread_name\",\"args\":{\"name\":\"phases\"}}", rank);
  for (int s = 0; s < lev_profile_streams(p); ++s)
    fprintf(out, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}", rank,
            s + 1, lev_profile_stream(p, s));
  write_phases(p, rank, out);
  for (int64_t i = 0; i < lev_profile_count(p); ++i) write_span(p, lev_profile_at(p, i), rank, out);
}

/* The spans as one array, as lev_overlap_of takes them. */
static const lev_span *spans_of(const lev_profile *p) {
  return lev_profile_count(p) > 0 ? lev_profile_at(p, 0) : NULL;
}

lev_status lev_profile_write(const lev_profile *p, int rank, const char *path) {
  lev_overlap overlap;
  lev_profile_row *rows;
  int n;
  LEV_TRY(lev_overlap_of(spans_of(p), lev_profile_count(p), &overlap));
  LEV_TRY(lev_profile_rows(p, &rows, &n));
  FILE *file = fopen(path, "w");
  if (file) {
    write_trace(p, rank, file);
    write_summary(p, &overlap, rows, n, file);
  }
  lev_free(rows);
  bool failed = !file || ferror(file) != 0;
  if (file && fclose(file) != 0) failed = true;
  return failed ? lev_fail(LEV_ERR_IO, "cannot write %s: %s", path, strerror(errno)) : LEV_OK;
}

/* Time of the phases of one name: operations of the compute stream and of all others. */
typedef struct phase_time {
  const char *name;
  int64_t operations;
  double compute, others;
} phase_time;

enum { PHASE_NAMES = 32 };

/* Phases by name, in the order of their first operation; those past the room are left out. */
static int phase_times(const lev_profile *p, phase_time *times) {
  int n = 0, compute = compute_stream(p);
  for (int64_t i = 0; i < lev_profile_count(p); ++i) {
    const lev_span *s = lev_profile_at(p, i);
    const char *name = phase_name(p, s);
    int at = 0;
    while (at < n && strcmp(times[at].name, name) != 0) ++at;
    if (at == PHASE_NAMES) continue;
    if (at == n) times[n++] = (phase_time){.name = name};
    ++times[at].operations;
    *(s->stream == compute ? &times[at].compute : &times[at].others) += s->end - s->begin;
  }
  return n;
}

/* Operations before the first phase have none. */
static const char *shown(const char *phase) {
  return phase[0] ? phase : "(before)";
}

static void print_phases(const lev_profile *p, FILE *out) {
  phase_time times[PHASE_NAMES];
  int n = phase_times(p, times);
  fprintf(out, "  %-24s %12s %14s %14s\n", "phase (ms)", "operations", "compute stream", "other streams");
  for (int i = 0; i < n; ++i)
    fprintf(out, "  %-24s %12lld %14.3f %14.3f\n", shown(times[i].name), (long long)times[i].operations,
            1e3 * times[i].compute, 1e3 * times[i].others);
}

lev_status lev_profile_print(const lev_profile *p, int most, FILE *out) {
  lev_overlap o;
  lev_profile_row *rows;
  int n;
  LEV_TRY(lev_overlap_of(spans_of(p), lev_profile_count(p), &o));
  LEV_TRY(lev_profile_rows(p, &rows, &n));
  fprintf(out,
          "profile: %.3f ms, computing in %.3f ms of them; %.3f GiB over the host link in %.3f ms, of which %.3f ms "
          "(%.1f %%) while computing\n",
          1e3 * o.length, 1e3 * o.compute, (double)o.host_bytes / 0x1p30, 1e3 * o.copy, 1e3 * o.inside, 100 * o.share);
  if (lev_profile_dropped(p) > 0) fprintf(out, "  %lld operations found no room\n", (long long)lev_profile_dropped(p));
  print_phases(p, out);
  fprintf(out, "  %-24s %-28s %-10s %8s %12s %10s\n", "phase", "operation", "kind", "count", "ms", "GB/s");
  for (int i = 0; i < n && i < most; ++i) {
    const lev_profile_row *r = &rows[i];
    fprintf(out, "  %-24s %-28s %-10s %8lld %12.3f", shown(r->phase), r->name, lev_span_kind_name(r->kind),
            (long long)r->count, 1e3 * r->seconds);
    if (r->bytes > 0 && r->seconds > 0)
      fprintf(out, " %10.1f\n", 1e-9 * (double)r->bytes / r->seconds);
    else
      fprintf(out, "\n");
  }
  lev_free(rows);
  return LEV_OK;
}
