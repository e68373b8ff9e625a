/* SPDX-License-Identifier: Apache-2.0 */
/* Stacked areas over the changes of a timeline, as inline SVG. */
#ifndef LEV_REPORT_TRACE_SVG_H
#define LEV_REPORT_TRACE_SVG_H

#include <stdio.h>

#include "harness/report/trace_samples.h"

#define LEV_SVG_TEXT 32

/* One chart: a memory class by tag, or (cls = LEV_MEM_CLASSES) all classes together by class. */
typedef struct lev_chart {
  const lev_timeline *timeline;
  const lev_samples *samples;
  int cls;
  bool work;     /* only the tags that come and go */
  double height; /* of the plot, in SVG units; the width is fixed */
} lev_chart;

/* Writes <svg>...</svg>: areas (path.area with data-tag), the planned bytes as a dashed line, the peak, bytes to
 * the left, times below, the phases as strips on top. Errors: LEV_ERR_NOMEM; the caller checks `out` for write errors.
 */
LEV_MUST_CHECK lev_status lev_chart_write(const lev_chart *chart, FILE *out);

/* True for tags that are live nearly all the time. */
bool lev_tag_steady(const lev_timeline_tag *tag);
/* CSS colour of a tag (or class name): one hue per prefix, one lightness per part. Into LEV_SVG_TEXT bytes. */
char *lev_tag_colour(const lev_timeline *timeline, int tag, char *text);
char *lev_class_colour(lev_mem cls, char *text);
/* Writes text with & < > " escaped. */
void lev_html_text(FILE *out, const char *text);

#endif
