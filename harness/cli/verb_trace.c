/* SPDX-License-Identifier: Apache-2.0 */
/* levee trace: where the bytes of a run were, from its trace file. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/cli/verbs.h"
#include "harness/cli/words.h"
#include "harness/report/trace_report.h"

static const char help[] =
    "levee trace RUN [options]: timeline of bytes by tag, from RUN/trace.rank<r>.jsonl and RUN/memory.json\n"
    "  --rank R       this rank alone; default: the one with the largest device plan, and on the page up to 7 more\n"
    "  --phases       a row for every occurrence of a phase, in order; default: one row per phase name\n"
    "  --output FILE  where the page goes; default RUN/trace.html, with --rank R RUN/trace.rankR.html\n"
    "  --json         the numbers behind the page on stdout; no table, no page\n"
    "A trace that ends early, or that the run stopped recording at its cap, is shown as far as it goes; the exit "
    "status\n"
    "is 9 or 4 then, and a line on stderr says what is missing.\n";

enum { MOST_RANKS = 8 };

typedef struct trace_options {
  const char *run, *output;
  int rank;
  bool phases, json;
} trace_options;

static lev_status parse(int argc, char **argv, trace_options *o) {
  const char *rank = NULL;
  const lev_cli_option options[] = {{"--phases", .flag = &o->phases},
                                    {"--json", .flag = &o->json},
                                    {"--output", .value = &o->output},
                                    {"--rank", .value = &rank}};
  for (int i = 0; i < argc; ++i) {
    bool known;
    LEV_TRY(lev_cli_take(options, sizeof options / sizeof *options, argc, argv, &i, &known));
    if (known) continue;
    if (argv[i][0] == '-' || o->run)
      return lev_fail(LEV_ERR_ARG, "unexpected argument \"%.100s\"; see levee trace --help", argv[i]);
    o->run = argv[i];
  }
  if (rank) {
    char *end;
    long number = strtol(rank, &end, 10);
    if (end == rank || *end != '\0' || number < 0 || number > 1000000)
      return lev_fail(LEV_ERR_ARG, "--rank \"%.40s\" is no rank number", rank);
    o->rank = (int)number;
  }
  return o->run ? LEV_OK : lev_fail(LEV_ERR_ARG, "expected a run folder; see levee trace --help");
}

static lev_status print_json(const lev_timeline *timeline) {
  json_t *root = lev_trace_json(timeline, 1000);
  if (!root) return lev_fail(LEV_ERR_NOMEM, "no memory for the JSON text");
  int failed = json_dumpf(root, stdout, JSON_COMPACT);
  json_decref(root);
  if (failed || putchar('\n') == EOF || fflush(stdout) != 0)
    return lev_fail(LEV_ERR_IO, "cannot write the JSON text: %s", strerror(errno));
  return LEV_OK;
}

static lev_status show(const trace_options *o, const lev_timeline *const *ranks, int n) {
  char path[1024], title[512], rank[32] = "";
  size_t length = strlen(o->run);
  while (length > 1 && o->run[length - 1] == '/') --length;
  snprintf(title, sizeof title, "%.*s", length < 500 ? (int)length : 500, o->run);
  if (o->rank >= 0) snprintf(rank, sizeof rank, ".rank%d", o->rank);
  snprintf(path, sizeof path, "%.*s/trace%s.html", length < 900 ? (int)length : 900, o->run, rank);
  if (o->json) return print_json(ranks[0]);
  const char *page = o->output ? o->output : path;
  LEV_TRY(lev_trace_table(ranks[0], o->phases, stdout));
  LEV_TRY(lev_trace_page(ranks, n, title, page));
  printf("page: %s\n", page);
  return fflush(stdout) == 0 ? LEV_OK : lev_fail(LEV_ERR_IO, "cannot write: %s", strerror(errno));
}

/* The rank asked for, or the largest; for the page, also the others that left a trace. */
static lev_status read_ranks(const trace_options *o, lev_timeline *ranks[MOST_RANKS], int *n) {
  LEV_TRY(lev_timeline_read(o->run, o->rank, &ranks[0]));
  *n = 1;
  for (int r = 0; o->rank < 0 && !o->json && r < ranks[0]->ranks && *n < MOST_RANKS; ++r) {
    if (r == ranks[0]->rank) continue;
    lev_status st = lev_timeline_read(o->run, r, &ranks[*n]);
    if (st == LEV_OK)
      ++*n;
    else if (st != LEV_ERR_IO) /* processes of other machines leave theirs elsewhere */
      return st;
  }
  return LEV_OK;
}

/* Warns of traces that are not whole; the exit status is that of the first one. */
static int judge(lev_timeline *const *ranks, int n) {
  int code = 0;
  for (int i = 0; i < n; ++i) {
    lev_status st = lev_timeline_whole(ranks[i]);
    if (st == LEV_OK) continue;
    const char *text = strstr(lev_detail(), ": ");
    fprintf(stderr, "warning: %s\n", text ? text + 2 : lev_detail());
    if (code == 0) code = lev_status_exit_code(st);
  }
  return code;
}

int lev_verb_trace(int argc, char **argv) {
  trace_options options = {.rank = -1};
  lev_timeline *ranks[MOST_RANKS] = {NULL};
  int n = 0;
  if (argc > 0 && strcmp(argv[0], "--help") == 0) {
    fputs(help, stdout);
    return 0;
  }
  lev_status st = parse(argc, argv, &options);
  if (st == LEV_OK) st = read_ranks(&options, ranks, &n);
  if (st == LEV_OK) st = show(&options, (const lev_timeline *const *)ranks, n);
  int code = st == LEV_OK ? judge(ranks, n) : 0;
  while (n > 0) lev_timeline_destroy(ranks[--n]);
  return st == LEV_OK ? code : lev_verb_failed("trace", st);
}
