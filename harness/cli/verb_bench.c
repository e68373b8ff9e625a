/* SPDX-License-Identifier: Apache-2.0 */
/* levee bench */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/bench/bench.h"
#include "harness/cli/verbs.h"
#include "harness/cli/words.h"

static const char help[] =
    "levee bench [AREA|CASE ...] [--backend cpu|cuda] [--json] [--results FILE.jsonl] [--seconds S] [--list]\n"
    "\n"
    "Compares each case with a reference, then times it: median of 20 repetitions, or as many as fit the time (3 at\n"
    "least), and its share of the copy and matrix rates measured in the same run. A wrong case is refused (exit code\n"
    "17). Without names all cases run; a name may also be the beginning of case names up to a '.'.\n"
    "\n"
    "  --backend cpu|cuda  default: cuda where there is a GPU\n"
    "  --json              a JSON record per line instead of the table\n"
    "  --results FILE      appends the records to FILE\n"
    "  --seconds S         time for the repetitions of a case (60)\n"
    "  --list              the cases\n";

typedef struct bench_line {
  bench_options options;
  const char *select[64];
  char command[600];
} bench_line;

/* Whether `word` names where records go. */
static bool is_results(const char *word) {
  return strcmp(word, "--results") == 0 || strncmp(word, "--results=", 10) == 0;
}

static lev_status parse(int argc, char **argv, bench_line *line) {
  bench_options *o = &line->options;
  const char *backend = NULL, *seconds = NULL;
  const lev_cli_option options[] = {{"--json", .flag = &o->json},
                                    {"--list", .flag = &o->list},
                                    {"--results", .value = &o->results},
                                    {"--backend", .value = &backend},
                                    {"--seconds", .value = &seconds}};
  o->backend = lev_device_count(LEV_BACKEND_CUDA) > 0 ? LEV_BACKEND_CUDA : LEV_BACKEND_CPU;
  o->areas = bench_areas, o->n_areas = bench_n_areas, o->out = stdout, o->select = line->select;
  snprintf(line->command, sizeof line->command, "levee bench");
  for (int i = 0; i < argc; ++i) {
    size_t at = strlen(line->command);
    if (is_results(argv[i])) { /* where the record goes does not belong to what it says */
      i += argv[i][strlen("--results")] == 0;
      continue;
    }
    snprintf(line->command + at, sizeof line->command - at, " %s", argv[i]);
  }
  o->command = line->command;
  for (int i = 0; i < argc; ++i) {
    bool known;
    LEV_TRY(lev_cli_take(options, sizeof options / sizeof *options, argc, argv, &i, &known));
    if (known) continue;
    if (argv[i][0] == '-') return lev_fail(LEV_ERR_ARG, "unknown option %.60s; see levee bench --help", argv[i]);
    if (o->n_select == (int)(sizeof line->select / sizeof *line->select))
      return lev_fail(LEV_ERR_ARG, "more than %d names", o->n_select);
    line->select[o->n_select++] = argv[i];
  }
  if (backend && strcmp(backend, "cpu") != 0 && strcmp(backend, "cuda") != 0)
    return lev_fail(LEV_ERR_ARG, "--backend is cpu or cuda, not \"%.40s\"", backend);
  if (backend) o->backend = strcmp(backend, "cuda") == 0 ? LEV_BACKEND_CUDA : LEV_BACKEND_CPU;
  if (seconds) {
    char *end;
    o->seconds = strtod(seconds, &end);
    if (end == seconds || *end || !(o->seconds > 0))
      return lev_fail(LEV_ERR_ARG, "--seconds %.40s: not a time", seconds);
  }
  return LEV_OK;
}

int lev_verb_bench(int argc, char **argv) {
  bench_line line = {0};
  bench_totals totals;
  if (argc > 0 && strcmp(argv[0], "--help") == 0) {
    fputs(help, stdout);
    return 0;
  }
  lev_status st = parse(argc, argv, &line);
  if (st == LEV_OK) st = bench_run(&line.options, &totals);
  return st == LEV_OK ? 0 : lev_verb_failed("bench", st);
}
