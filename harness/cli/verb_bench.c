/* SPDX-License-Identifier: Apache-2.0 */
/* levee bench */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/bench/bench.h"
#include "harness/cli/verbs.h"

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

static lev_status value_of(int argc, char **argv, int *i, const char *name, const char **out) {
  size_t n = strlen(name);
  if (argv[*i][n] == '=') {
    *out = argv[*i] + n + 1;
    return LEV_OK;
  }
  if (++*i >= argc) return lev_fail(LEV_ERR_ARG, "%s needs a value", name);
  *out = argv[*i];
  return LEV_OK;
}

/* Whether argv[i] is `--name`, `--name=...`. */
static bool is(const char *word, const char *name) {
  size_t n = strlen(name);
  return strncmp(word, name, n) == 0 && (word[n] == 0 || word[n] == '=');
}

static lev_status parse_option(int argc, char **argv, int *i, bench_options *o) {
  const char *word = argv[*i], *text;
  if (strcmp(word, "--json") == 0) {
    o->json = true;
  } else if (strcmp(word, "--list") == 0) {
    o->list = true;
  } else if (is(word, "--results")) {
    return value_of(argc, argv, i, "--results", &o->results);
  } else if (is(word, "--backend")) {
    LEV_TRY(value_of(argc, argv, i, "--backend", &text));
    if (strcmp(text, "cpu") != 0 && strcmp(text, "cuda") != 0)
      return lev_fail(LEV_ERR_ARG, "--backend is cpu or cuda, not \"%.40s\"", text);
    o->backend = strcmp(text, "cuda") == 0 ? LEV_BACKEND_CUDA : LEV_BACKEND_CPU;
  } else if (is(word, "--seconds")) {
    char *end;
    LEV_TRY(value_of(argc, argv, i, "--seconds", &text));
    o->seconds = strtod(text, &end);
    if (end == text || *end || !(o->seconds > 0)) return lev_fail(LEV_ERR_ARG, "--seconds %.40s: not a time", text);
  } else {
    return lev_fail(LEV_ERR_ARG, "unknown option %.60s; see levee bench --help", word);
  }
  return LEV_OK;
}

static lev_status parse(int argc, char **argv, bench_line *line) {
  bench_options *o = &line->options;
  o->backend = lev_device_count(LEV_BACKEND_CUDA) > 0 ? LEV_BACKEND_CUDA : LEV_BACKEND_CPU;
  o->areas = bench_areas, o->n_areas = bench_n_areas, o->out = stdout, o->select = line->select;
  snprintf(line->command, sizeof line->command, "levee bench");
  for (int i = 0; i < argc; ++i) {
    size_t at = strlen(line->command);
    if (is(argv[i], "--results")) { /* where the record goes does not belong to what it says */
      i += argv[i][strlen("--results")] == 0;
      continue;
    }
    snprintf(line->command + at, sizeof line->command - at, " %s", argv[i]);
  }
  o->command = line->command;
  for (int i = 0; i < argc; ++i) {
    if (argv[i][0] == '-') {
      LEV_TRY(parse_option(argc, argv, &i, o));
      continue;
    }
    if (o->n_select == (int)(sizeof line->select / sizeof *line->select))
      return lev_fail(LEV_ERR_ARG, "more than %d names", o->n_select);
    line->select[o->n_select++] = argv[i];
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
