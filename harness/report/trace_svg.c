/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/report/trace_svg.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/report/memory_report.h"

/* Plot area inside the view box, in SVG units. */
#define LEFT 78.0
#define RIGHT 1192.0
#define TOP 42.0
#define STRIP_TOP 4.0
#define STRIP_HEIGHT 14.0
#define VIEW_WIDTH 1200.0
#define VIEW_BOTTOM 20.0

enum { TEXT = LEV_TIMELINE_NAME + 24 };

void lev_html_text(FILE *out, const char *text) {
  for (; *text; ++text) switch (*text) {
    case '&':
      fputs("&amp;", out);
      break;
    case '<':
      fputs("&lt;", out);
      break;
    case '>':
      fputs("&gt;", out);
      break;
    case '"':
      fputs("&quot;", out);
      break;
    default:
      fputc(*text, out);
    }
}

/* ---- colours ---- */

char *lev_tag_colour(const lev_timeline *t, int tag, char *text) {
  static const struct {
    const char *prefix;
    int hue, saturation;
  } palette[] = {{"weights", 215, 42}, {"grads", 255, 38}, {"hidden", 195, 30}, {"attn", 30, 78}, {"embed", 55, 60},
                 {"router", 340, 55},  {"llep", 4, 68},    {"rdtp", 145, 45},   {"sco", 178, 58}, {"oadamw", 285, 45},
                 {"muon", 315, 48},    {"library", 0, 0},  {"context", 0, 0},   {"comm", 90, 42}, {"norm", 70, 35}};
  const char *name = t->tags[tag].name;
  size_t length = strcspn(name, ".");
  int hue = 0, saturation = 30, part = 0;
  for (size_t i = 0; i < length; ++i) hue = (hue * 31 + (unsigned char)name[i]) % 360;
  for (size_t i = 0; i < sizeof palette / sizeof *palette; ++i)
    if (strlen(palette[i].prefix) == length && memcmp(palette[i].prefix, name, length) == 0)
      hue = palette[i].hue, saturation = palette[i].saturation;
  for (int k = 0; k < tag; ++k)
    part += t->tags[k].cls == t->tags[tag].cls && strncmp(t->tags[k].name, name, length + 1) == 0;
  snprintf(text, LEV_SVG_TEXT, "hsl(%d %d%% %d%%)", hue, saturation, 46 + 8 * (part % 4));
  return text;
}

char *lev_class_colour(lev_mem cls, char *text) {
  static const char *const colours[LEV_MEM_CLASSES] = {"hsl(215 45% 52%)", "hsl(30 70% 55%)", "hsl(145 38% 48%)"};
  snprintf(text, LEV_SVG_TEXT, "%s", colours[cls]);
  return text;
}

/* ---- series ---- */

bool lev_tag_steady(const lev_timeline_tag *tag) {
  return tag->steady > 0.9;
}

/* One stacked area: a tag, or a class in the total chart. */
typedef struct series {
  int tag, cls;
  size_t peak;
  bool steady;
  char key[LEV_TIMELINE_NAME];
} series;

typedef struct plot {
  const lev_chart *chart;
  const lev_timeline *t;
  FILE *out;
  series *order;
  int n;
  double bottom, top_bytes;
  size_t peak, planned;
  int64_t peak_change;
  double *low, *high; /* y of the two edges of the current area, per sample */
  size_t *base;       /* bytes under it */
} plot;

static bool in_series(const series *s, const lev_timeline *t, int tag) {
  return s->tag >= 0 ? tag == s->tag : t->tags[tag].cls == (lev_mem)s->cls;
}

/* What is always there lies at the bottom, the largest first; above, tags of one prefix side by side. */
static int by_layer(const void *a, const void *b) {
  const series *x = a, *y = b;
  if (x->steady != y->steady) return x->steady ? -1 : 1;
  if (!x->steady) {
    size_t nx = strcspn(x->key, "."), ny = strcspn(y->key, ".");
    if (nx != ny || memcmp(x->key, y->key, nx) != 0) return strcmp(x->key, y->key);
  }
  return x->peak < y->peak ? 1 : x->peak > y->peak ? -1 : strcmp(x->key, y->key);
}

static void find_series(plot *p) {
  int cls = p->chart->cls;
  if (cls == LEV_MEM_CLASSES) {
    for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
      if (p->t->classes[c].peak == 0) continue;
      series *s = &p->order[p->n++];
      *s = (series){.tag = -1, .cls = c, .peak = p->t->classes[c].peak};
      snprintf(s->key, sizeof s->key, "%s", lev_mem_name((lev_mem)c));
    }
    return;
  }
  for (int k = 0; k < p->t->n_tags; ++k) {
    const lev_timeline_tag *tag = &p->t->tags[k];
    if (tag->cls != (lev_mem)cls || tag->peak == 0 || (p->chart->work && lev_tag_steady(tag))) continue;
    series *s = &p->order[p->n++];
    *s = (series){.tag = k, .cls = cls, .peak = tag->peak, .steady = lev_tag_steady(tag)};
    memcpy(s->key, tag->name, sizeof s->key);
  }
  qsort(p->order, (size_t)p->n, sizeof *p->order, by_layer);
}

static double x_of(const plot *p, int64_t change) {
  return LEFT + (RIGHT - LEFT) * (double)change / (double)p->t->n_changes;
}
static double y_of(const plot *p, double bytes) {
  return p->bottom - (p->bottom - TOP) * bytes / p->top_bytes;
}
static bool differs(double a, double b) {
  return fabs(a - b) >= 0.05;
}

/* Left end of sample j. */
static double start_of(const plot *p, int64_t j) {
  return j >= p->chart->samples->n ? RIGHT : j == 0 ? LEFT : x_of(p, p->chart->samples->change[j]);
}

/* The piece [a, b) of the area between the edges `low` and `high`: right along the upper one, back along the lower one.
 */
static void write_piece(const plot *p, int64_t a, int64_t b) {
  double y = p->high[a];
  fprintf(p->out, "M%.1f %.1f", start_of(p, a), y);
  for (int64_t j = a + 1; j < b; ++j) {
    if (!differs(p->high[j], y)) continue;
    y = p->high[j];
    fprintf(p->out, "H%.1fV%.1f", start_of(p, j), y);
  }
  y = p->low[b - 1];
  fprintf(p->out, "H%.1fV%.1f", start_of(p, b), y);
  for (int64_t j = b - 2; j >= a; --j) {
    if (!differs(p->low[j], y)) continue;
    y = p->low[j];
    fprintf(p->out, "H%.1fV%.1f", start_of(p, j + 1), y);
  }
  fprintf(p->out, "H%.1fZ", start_of(p, a));
}

/* One piece for each stretch in which there is something to see. */
static void write_path(const plot *p) {
  int64_t n = p->chart->samples->n;
  for (int64_t a = 0, b; a < n; a = b) {
    bool seen = differs(p->low[a], p->high[a]);
    for (b = a + 1; b < n && differs(p->low[b], p->high[b]) == seen; ++b) {
    }
    if (seen) write_piece(p, a, b);
  }
}

static void write_area(plot *p, const series *s) {
  const lev_samples *samples = p->chart->samples;
  char colour[LEV_SVG_TEXT], bytes[24];
  for (int64_t j = 0; j < samples->n; ++j) {
    p->low[j] = y_of(p, (double)p->base[j]);
    for (int k = 0; k < p->t->n_tags; ++k)
      if (in_series(s, p->t, k)) p->base[j] += samples->live[j * p->t->n_tags + k];
    p->high[j] = y_of(p, (double)p->base[j]);
  }
  s->tag >= 0 ? lev_tag_colour(p->t, s->tag, colour) : lev_class_colour((lev_mem)s->cls, colour);
  fprintf(p->out, "<path class=\"area\" fill=\"%s\" stroke=\"%s\" data-tag=\"", colour, colour);
  lev_html_text(p->out, s->key);
  fputs("\" d=\"", p->out);
  write_path(p);
  fputs("\"><title>", p->out);
  lev_html_text(p->out, s->key);
  fprintf(p->out, ": at most %s (%zu bytes)</title></path>\n", lev_bytes_text(s->peak, bytes), s->peak);
}

/* ---- axes, lines, phases ---- */

/* A step of 1, 2 or 5 x 10^k of a binary unit, so that about five fit. */
static double tick_step(double most) {
  double unit = 1;
  while (most / unit >= 1024) unit *= 1024;
  double rough = most / unit / 4.5, power = pow(10, floor(log10(rough))), lead = rough / power;
  double step = (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10) * power * unit;
  return step < 1 ? 1 : step;
}

static void write_ticks(const plot *p) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double step = tick_step(p->top_bytes);
  int n = (int)floor(p->top_bytes * 1.0001 / step);
  for (int i = 0; i <= n; ++i) {
    double shown = step * i, y = y_of(p, shown);
    int unit = 0;
    while (shown >= 1024 && unit < 5) shown /= 1024, ++unit;
    fprintf(p->out, "<line class=\"grid\" x1=\"%.0f\" x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\"/>", LEFT, RIGHT, y, y);
    fprintf(p->out, "<text class=\"tick\" x=\"%.0f\" y=\"%.1f\">%.4g %s</text>\n", LEFT - 6, y + 3.5, shown,
            units[unit]);
  }
}

/* Times since the start below the changes they belong to. */
static void write_times(const plot *p) {
  const lev_timeline *t = p->t;
  int64_t ticks = t->n_changes < 9 ? t->n_changes : 9;
  for (int64_t i = 0; i < ticks; ++i) {
    int64_t change = ticks > 1 ? i * (t->n_changes - 1) / (ticks - 1) : 0;
    double ms = (double)t->changes[change].time_ns / 1e6, x = (x_of(p, change) + x_of(p, change + 1)) / 2;
    const char *anchor = i == 0 ? "start" : i == ticks - 1 ? "end" : "middle";
    fprintf(p->out, "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>", x, x, p->bottom,
            p->bottom + 4);
    fprintf(p->out, "<text text-anchor=\"%s\" x=\"%.1f\" y=\"%.1f\">%.*f %s</text>\n", anchor,
            i == ticks - 1 ? RIGHT : x, p->bottom + 15,
            ms < 10 || ms >= 1000 ? 2
            : ms < 100            ? 1
                                  : 0,
            ms < 1000 ? ms : ms / 1000, ms < 1000 ? "ms" : "s");
  }
}

static void write_strip(const plot *p, double y, double x, double width, int shade, const char *label,
                        const char *title) {
  fprintf(p->out, "<rect class=\"phase p%d\" x=\"%.1f\" y=\"%.0f\" width=\"%.1f\" height=\"%.0f\"><title>", shade, x, y,
          width, STRIP_HEIGHT);
  lev_html_text(p->out, title);
  fputs("</title></rect>", p->out);
  if (width > 6.2 * (double)strlen(label)) {
    fprintf(p->out, "<text class=\"name\" x=\"%.1f\" y=\"%.1f\">", x + width / 2, y + STRIP_HEIGHT - 3.5);
    lev_html_text(p->out, label);
    fputs("</text>", p->out);
  }
}

static double phase_start(const plot *p, int64_t i) {
  return i < p->t->n_phases ? x_of(p, p->t->phases[i].first) : RIGHT;
}

/* Upper strip: runs of phases of one name. Lower strip: each phase by its number; those too narrow to see share a box.
 */
static void write_phases(const plot *p) {
  const lev_timeline *t = p->t;
  char first[TEXT], last[TEXT], title[2 * TEXT + 16], number[24];
  int shade = 0;
  for (int64_t i = 0, next; i < t->n_phases; i = next) {
    for (next = i + 1; next < t->n_phases && strcmp(t->phases[next].name, t->phases[i].name) == 0;) ++next;
    double x = phase_start(p, i), width = phase_start(p, next) - x;
    if (width < 0.05) continue;
    lev_timeline_phase_text(&t->phases[i], first);
    lev_timeline_phase_text(&t->phases[next - 1], last);
    snprintf(title, sizeof title, next == i + 1 ? "%s" : "%s ... %s", first, last);
    write_strip(p, STRIP_TOP, x, width, shade, t->phases[i].name, title);
    shade = 1 - shade;
  }
  for (int64_t i = 0, next; i < t->n_phases; i = next) {
    double x = phase_start(p, i);
    for (next = i + 1; next < t->n_phases && phase_start(p, next) - x < 2;) ++next;
    double width = phase_start(p, next) - x;
    if (width < 0.05) continue;
    lev_timeline_phase_text(&t->phases[i], first);
    lev_timeline_phase_text(&t->phases[next - 1], last);
    snprintf(title, sizeof title, next == i + 1 ? "%s" : "%s ... %s", first, last);
    number[0] = '\0';
    if (next == i + 1 && t->phases[i].index >= 0)
      snprintf(number, sizeof number, "%lld", (long long)t->phases[i].index);
    write_strip(p, STRIP_TOP + STRIP_HEIGHT + 1, x, width, shade, number, title);
    fprintf(p->out, "<line class=\"edge\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.0f\" y2=\"%.0f\"/>\n", x, x, TOP, p->bottom);
    shade = 1 - shade;
  }
}

static void write_bound(const plot *p) {
  char bytes[24];
  double y = y_of(p, (double)p->planned);
  fprintf(p->out, "<line class=\"bound\" x1=\"%.0f\" x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\"><title>planned %zu bytes",
          LEFT, RIGHT, y, y, p->planned);
  fprintf(p->out, "</title></line><text class=\"boundtext\" x=\"%.0f\" y=\"%.1f\">planned %s</text>\n", RIGHT - 4,
          y - 4, lev_bytes_text(p->planned, bytes));
}

static void write_peak(const plot *p) {
  char bytes[24];
  if (p->peak_change < 0) return;
  double x = (x_of(p, p->peak_change) + x_of(p, p->peak_change + 1)) / 2, y = y_of(p, (double)p->peak);
  bool right = x > LEFT + 200;
  fprintf(p->out, "<line class=\"peakline\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>", x, x, y, p->bottom);
  fprintf(p->out, "<circle class=\"peak\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"><title>peak %zu bytes</title></circle>", x,
          y, p->peak);
  fprintf(p->out, "<text class=\"peaktext\" text-anchor=\"%s\" x=\"%.1f\" y=\"%.1f\">peak %s</text>\n",
          right ? "end" : "start", right ? x - 7 : x + 7, y - 4, lev_bytes_text(p->peak, bytes));
}

/* Peak and plan of the chart. Of what comes and goes, the plan leaves what is not always there. */
static void find_lines(plot *p) {
  const lev_timeline *t = p->t;
  if (p->chart->cls == LEV_MEM_CLASSES) {
    p->peak = t->total_peak, p->peak_change = t->total_peak_change;
    for (int c = 0; c < LEV_MEM_CLASSES; ++c) p->planned += t->classes[c].planned;
    return;
  }
  const lev_timeline_class *c = &t->classes[p->chart->cls];
  p->peak = c->peak, p->planned = c->planned, p->peak_change = c->peak_change;
  for (int k = 0; k < t->n_tags && p->chart->work; ++k) {
    if (t->tags[k].cls != (lev_mem)p->chart->cls || !lev_tag_steady(&t->tags[k])) continue;
    p->peak -= t->tags[k].at_peak;
    p->planned -= t->tags[k].at_peak < p->planned ? t->tags[k].at_peak : p->planned;
  }
}

/* Highest sum of the chart's series, for the scale. */
static size_t highest(const plot *p) {
  size_t most = p->peak > p->planned ? p->peak : p->planned;
  for (int64_t j = 0; j < p->chart->samples->n; ++j) {
    size_t sum = 0;
    for (int i = 0; i < p->n; ++i)
      for (int k = 0; k < p->t->n_tags; ++k)
        if (in_series(&p->order[i], p->t, k)) sum += p->chart->samples->live[j * p->t->n_tags + k];
    if (sum > most) most = sum;
  }
  return most;
}

static void write_all(plot *p) {
  const char *name = p->chart->cls < LEV_MEM_CLASSES ? lev_mem_name((lev_mem)p->chart->cls) : "total";
  size_t most = highest(p);
  p->bottom = TOP + p->chart->height;
  p->top_bytes = most > 0 ? 1.1 * (double)most : 1;
  fprintf(p->out, "<svg class=\"chart%s\" data-class=\"%s\" data-left=\"%.0f\" data-right=\"%.0f\" ",
          p->chart->work ? " work" : "", name, LEFT, RIGHT);
  fprintf(p->out, "viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s bytes by tag\">\n", VIEW_WIDTH,
          p->bottom + VIEW_BOTTOM, name);
  write_ticks(p);
  for (int i = 0; i < p->n; ++i) write_area(p, &p->order[i]);
  write_phases(p);
  if (p->t->has_plan && p->planned > 0) write_bound(p);
  write_peak(p);
  write_times(p);
  fprintf(p->out, "<line class=\"cross\" x1=\"0\" x2=\"0\" y1=\"%.0f\" y2=\"%.0f\"/></svg>\n", TOP, p->bottom);
}

lev_status lev_chart_write(const lev_chart *chart, FILE *out) {
  const lev_timeline *t = chart->timeline;
  plot p = {.chart = chart, .t = t, .out = out};
  size_t n = (size_t)chart->samples->n;
  p.order = lev_calloc(LEV_HEAP_REPORT, (size_t)t->n_tags + LEV_MEM_CLASSES, sizeof *p.order);
  p.low = lev_calloc(LEV_HEAP_REPORT, n, sizeof *p.low);
  p.high = lev_calloc(LEV_HEAP_REPORT, n, sizeof *p.high);
  p.base = lev_calloc(LEV_HEAP_REPORT, n, sizeof *p.base);
  bool ok = p.order && p.low && p.high && p.base;
  if (ok) {
    find_series(&p);
    find_lines(&p);
    write_all(&p);
  }
  lev_free(p.order);
  lev_free(p.low);
  lev_free(p.high);
  lev_free(p.base);
  return ok ? LEV_OK : LEV_ERR_NOMEM;
}
