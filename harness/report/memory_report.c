/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/report/memory_report.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"

const char *const lev_module_name[LEV_MODULES] = {"pipelined_llep", "ring_dtp", "sco", "offload_adamw", "muon"};
const char *const lev_module_prefix[LEV_MODULES] = {"llep", "rdtp", "sco", "oadamw", "muon"};

char *lev_bytes_text(size_t bytes, char *text) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double x = (double)bytes;
  int unit = 0;
  while (x >= 1024 && unit < 5) x /= 1024, ++unit;
  snprintf(text, 24, unit == 0 ? "%.0f %s" : x < 10 ? "%.3f %s" : x < 100 ? "%.2f %s" : "%.1f %s", x, units[unit]);
  return text;
}

/* ---- JSON ---- */

static json_t *bytes_pair(size_t planned, size_t peak, bool measured) {
  json_t *pair = json_pack("{s:I}", "planned_bytes", (json_int_t)planned);
  if (measured) json_object_set_new(pair, "peak_bytes", json_integer((json_int_t)peak));
  return pair;
}

static json_t *class_json(const lev_memory_rank *r, lev_mem cls) {
  bool measured = r->measured != NULL;
  json_t *out =
      bytes_pair(lev_ledger_peak(r->planned, cls), measured ? lev_ledger_peak(r->measured, cls) : 0, measured);
  json_object_set_new(out, "peak_phase", json_string(lev_ledger_peak_phase(measured ? r->measured : r->planned, cls)));
  json_t *tags = json_object();
  for (int i = 0; i < lev_ledger_count(r->planned); ++i) {
    lev_ledger_row row = lev_ledger_at(r->planned, i);
    if (row.cls != cls) continue;
    json_object_set_new(tags, row.tag,
                        bytes_pair(row.peak, measured ? lev_ledger_tag_peak(r->measured, cls, row.tag) : 0, measured));
  }
  for (int i = 0; measured && i < lev_ledger_count(r->measured); ++i) { /* unplanned tags must not hide */
    lev_ledger_row row = lev_ledger_at(r->measured, i);
    if (row.cls == cls && !json_object_get(tags, row.tag))
      json_object_set_new(tags, row.tag, bytes_pair(0, row.peak, true));
  }
  json_object_set_new(out, "tags", tags);
  return out;
}

static json_t *heap_json(const lev_memory_report *report) {
  json_t *out = json_object();
  size_t allocated = 0, peak = 0, rss, peak_rss;
  for (int h = 0; h < LEV_HEAP_COUNT; ++h) {
    lev_heap_stats s;
    lev_heap_read((lev_heap)h, &s);
    json_object_set_new(out, lev_heap_name((lev_heap)h),
                        json_pack("{s:I, s:I, s:I}", "allocated_bytes", (json_int_t)s.allocated, "peak_bytes",
                                  (json_int_t)s.peak, "calls", (json_int_t)s.calls));
    allocated += s.allocated, peak += s.peak;
  }
  lev_process_memory(&rss, &peak_rss);
  json_object_set_new(out, "allocated_bytes", json_integer((json_int_t)allocated));
  json_object_set_new(out, "peak_bytes", json_integer((json_int_t)peak));
  json_object_set_new(out, "cap_bytes", json_integer((json_int_t)report->heap_cap));
  json_object_set_new(out, "rss_bytes", json_integer((json_int_t)rss));
  json_object_set_new(out, "peak_rss_bytes", json_integer((json_int_t)peak_rss));
  return out;
}

/* The tags of any reported rank that may grow with tokens, each once. */
static json_t *growing_json(const lev_memory_report *report) {
  json_t *seen = json_object(), *list = json_array();
  for (int i = 0; i < report->n; ++i)
    for (int t = 0; t < lev_ledger_count(report->rank[i].planned); ++t) {
      const char *tag = lev_ledger_at(report->rank[i].planned, t).tag;
      if (!report->grows(report->grows_ctx, tag) || json_object_get(seen, tag)) continue;
      json_object_set_new(seen, tag, json_true());
      json_array_append_new(list, json_string(tag));
    }
  json_decref(seen);
  return list;
}

static json_t *json_bytes(size_t bytes) {
  return json_integer(bytes > INT64_MAX ? INT64_MAX : (json_int_t)bytes);
}

static json_t *limits_json(const lev_memory_report *report) {
  size_t device, host;
  json_t *out = json_object();
  lev_memory_excess(report, &device, &host);
  if (lev_is_limit(report->device_memory)) {
    json_object_set_new(out, "device_memory_bytes", json_bytes(report->device_memory));
    json_object_set_new(out, "reserve_bytes", json_bytes(report->device_reserve));
  }
  if (lev_is_limit(report->host_memory)) json_object_set_new(out, "host_memory_bytes", json_bytes(report->host_memory));
  json_object_set_new(out, "device_excess_bytes", json_bytes(device));
  json_object_set_new(out, "host_excess_bytes", json_bytes(host));
  return out;
}

char *lev_memory_json(const lev_memory_report *report) {
  json_t *root = json_pack("{s:i}", "ranks", report->ranks), *list = json_array();
  bool measured = false;
  for (int i = 0; i < report->n; ++i) {
    json_t *one = json_pack("{s:i}", "rank", report->rank[i].rank);
    for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls)
      json_object_set_new(one, lev_mem_name((lev_mem)cls), class_json(&report->rank[i], (lev_mem)cls));
    if (report->rank[i].trace_events > 0 || report->rank[i].trace_dropped > 0)
      json_object_set_new(one, "trace",
                          json_pack("{s:I, s:I}", "events", (json_int_t)report->rank[i].trace_events, "dropped_events",
                                    (json_int_t)report->rank[i].trace_dropped));
    json_array_append_new(list, one);
    measured |= report->rank[i].measured != NULL;
  }
  json_object_set_new(root, "per_rank", list);
  if (measured) json_object_set_new(root, "heap", heap_json(report));
  if (lev_is_limit(report->device_memory) || lev_is_limit(report->host_memory))
    json_object_set_new(root, "limits", limits_json(report));
  if (report->grows) json_object_set_new(root, "grows_with_tokens", growing_json(report));
  for (int i = 0; i < report->n_notes; ++i)
    json_object_set_new(root, report->notes[i].key, json_loads(report->notes[i].json, JSON_DECODE_ANY, NULL));
  char *text = json_dumps(root, JSON_INDENT(1));
  json_decref(root);
  return text;
}

lev_status lev_memory_write(const lev_memory_report *report, const char *path) {
  char temporary[1024];
  char *text = lev_memory_json(report);
  if (!text) return lev_fail(LEV_ERR_NOMEM, "no memory for %s", path);
  snprintf(temporary, sizeof temporary, "%.1000s.tmp", path);
  FILE *file = fopen(temporary, "w");
  bool ok = file && fputs(text, file) >= 0 && fputc('\n', file) != EOF;
  if (file && fclose(file) != 0) ok = false;
  free(text);
  if (ok && rename(temporary, path) == 0) return LEV_OK;
  lev_status st = lev_fail(LEV_ERR_IO, "cannot write %s: %s", path, strerror(errno));
  remove(temporary);
  return st;
}

/* ---- limits ---- */

static size_t over(size_t bytes, size_t limit) {
  return lev_is_limit(limit) && bytes > limit ? bytes - limit : 0;
}

size_t lev_memory_excess(const lev_memory_report *report, size_t *device, size_t *host) {
  *device = *host = 0;
  for (int i = 0; i < report->n; ++i) {
    const lev_ledger *l = report->rank[i].planned;
    size_t d = lev_sat_add(lev_ledger_peak(l, LEV_MEM_DEVICE), report->device_reserve);
    size_t h = lev_sat_add(lev_ledger_peak(l, LEV_MEM_PINNED), lev_ledger_peak(l, LEV_MEM_HOST));
    *device = lev_max_size(*device, over(d, report->device_memory));
    *host = lev_max_size(*host, over(h, report->host_memory));
  }
  return lev_sat_add(*device, *host);
}

char *lev_memory_over_device(const lev_memory_report *report, size_t excess, char text[160]) {
  char a[24], b[24], c[24];
  snprintf(text, 160, "%s over memory.device_memory = %s%s%s", lev_bytes_text(excess, a),
           lev_bytes_text(report->device_memory, b), report->device_reserve > 0 ? " with a reserve of " : "",
           report->device_reserve > 0 ? lev_bytes_text(report->device_reserve, c) : "");
  return text;
}

/* ---- tables ---- */

static int by_peak(const void *a, const void *b) {
  const lev_ledger_row *x = a, *y = b;
  return x->peak < y->peak ? 1 : x->peak > y->peak ? -1 : strcmp(x->tag, y->tag);
}

static void class_table(const lev_memory_report *report, const lev_memory_rank *r, lev_mem cls, FILE *out) {
  lev_ledger_row rows[256] = {{0}};
  int n = 0;
  char a[24], b[24];
  for (int i = 0; i < lev_ledger_count(r->planned) && n < 256; ++i) {
    lev_ledger_row row = lev_ledger_at(r->planned, i);
    if (row.cls == cls) rows[n++] = row;
  }
  if (n == 0) return;
  qsort(rows, (size_t)n, sizeof *rows, by_peak);
  size_t planned = lev_ledger_peak(r->planned, cls);
  fprintf(out, "  %-20s %14s", lev_mem_name(cls), lev_bytes_text(planned, a));
  if (r->measured) fprintf(out, " %14s", lev_bytes_text(lev_ledger_peak(r->measured, cls), b));
  fprintf(out, "   peak in %s\n", lev_ledger_peak_phase(r->planned, cls));
  for (int i = 0; i < n; ++i) {
    fprintf(out, "    %-18s %14s", rows[i].tag, lev_bytes_text(rows[i].peak, a));
    if (r->measured) fprintf(out, " %14s", lev_bytes_text(lev_ledger_tag_peak(r->measured, cls, rows[i].tag), b));
    fprintf(out, "   %s%s\n",
            rows[i].at_peak == rows[i].peak ? "live at the peak"
            : rows[i].at_peak > 0           ? "partly live at the peak"
                                            : "not live at the peak",
            report->grows && report->grows(report->grows_ctx, rows[i].tag) ? ", may grow with tokens" : "");
  }
}

void lev_memory_table(const lev_memory_report *report, FILE *out) {
  for (int i = 0; i < report->n; ++i) {
    const lev_memory_rank *r = &report->rank[i];
    fprintf(out, "rank %d of %d  %12s%s\n", r->rank, report->ranks, "planned", r->measured ? "       measured" : "");
    for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) class_table(report, r, (lev_mem)cls, out);
  }
}

/* The tag of a class whose measured peak is farthest from the plan: its name, NULL where all are as planned; and how
 * many differ. */
static const char *worst_tag(const lev_memory_rank *r, lev_mem cls, int *differ) {
  const lev_ledger *const both[2] = {r->planned, r->measured};
  const char *worst = NULL;
  size_t most = 0;
  *differ = 0;
  for (int b = 0; b < 2; ++b)
    for (int i = 0; i < lev_ledger_count(both[b]); ++i) {
      lev_ledger_row row = lev_ledger_at(both[b], i);
      size_t planned = lev_ledger_tag_peak(r->planned, cls, row.tag);
      size_t peak = lev_ledger_tag_peak(r->measured, cls, row.tag);
      if (row.cls != cls || peak == planned || (b == 1 && planned > 0)) continue;
      ++*differ;
      size_t by = peak > planned ? peak - planned : planned - peak;
      if (by > most) most = by, worst = row.tag;
    }
  return worst;
}

int lev_memory_exact(const lev_memory_report *report, FILE *out) {
  char a[24], b[24];
  int exact = 0, differ;
  for (int i = 0; i < report->n; ++i)
    for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) {
      const lev_memory_rank *r = &report->rank[i];
      size_t planned = lev_ledger_peak(r->planned, (lev_mem)cls), peak = lev_ledger_peak(r->measured, (lev_mem)cls);
      const char *tag = worst_tag(r, (lev_mem)cls, &differ);
      exact += !tag && peak == planned;
      if (!tag && peak == planned) continue;
      fprintf(out, "rank %d, %s: planned %s, measured %s", r->rank, lev_mem_name((lev_mem)cls),
              lev_bytes_text(planned, a), lev_bytes_text(peak, b));
      if (tag)
        fprintf(out, "; %d tag%s not as planned: %s %s, measured %s", differ, differ == 1 ? "" : "s", tag,
                lev_bytes_text(lev_ledger_tag_peak(r->planned, (lev_mem)cls, tag), a),
                lev_bytes_text(lev_ledger_tag_peak(r->measured, (lev_mem)cls, tag), b));
      fputc('\n', out);
    }
  return exact;
}

size_t lev_module_device_bytes(const lev_memory_report *report, int module, bool measured) {
  size_t most = 0;
  for (int i = 0; i < report->n; ++i) {
    const lev_ledger *l = measured ? report->rank[i].measured : report->rank[i].planned;
    if (l) most = lev_max_size(most, lev_ledger_module_peak(l, LEV_MEM_DEVICE, lev_module_prefix[module]));
  }
  return most;
}

void lev_module_table(const lev_memory_report *report, const size_t plain[LEV_MODULES], FILE *out) {
  char a[24], b[24], c[24];
  fprintf(out, "%-16s %14s %14s %18s\n", "device bytes", "planned", "measured", "plain schedule");
  for (int m = 0; m < LEV_MODULES; ++m) {
    size_t planned = lev_module_device_bytes(report, m, false), measured = lev_module_device_bytes(report, m, true);
    bool known = plain[m] != SIZE_MAX;
    if (planned == 0 && measured == 0 && (!known || plain[m] == 0)) continue;
    fprintf(out, "%-16s %14s %14s %18s", lev_module_name[m], lev_bytes_text(planned, a), lev_bytes_text(measured, b),
            known ? lev_bytes_text(plain[m], c) : "?");
    if (known && plain[m] > 0 && planned < plain[m])
      fprintf(out, "   saves %.1f %%", 100.0 * (1.0 - (double)planned / (double)plain[m]));
    fputc('\n', out);
  }
}
