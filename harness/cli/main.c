/* SPDX-License-Identifier: Apache-2.0 */
/* levee VERB ... */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"
#include "common/status.h"
#include "harness/bench/bench.h"
#include "harness/cli/verbs.h"
#include "harness/config/config.h"

#ifndef LEV_VERSION
#define LEV_VERSION "unknown"
#endif

static const struct {
  const char *name;
  int (*run)(int argc, char **argv);
  const char *arguments, *help;
} verbs[] = {
    {"train", lev_verb_train, "CONFIG.toml [--section.key=value ...]", "train, or go on from the newest checkpoint"},
    {"plan", lev_verb_plan, "CONFIG.toml [--auto] [--plain] [--json] ... [--section.key=value ...]",
     "every byte of a run before it starts; levee plan --help has all options"},
    {"bench", lev_verb_bench, "[AREA|CASE ...] [--backend cpu|cuda] [--json] [--results FILE]",
     "time the kernels and modules against the rates of this machine"},
    {"trace", lev_verb_trace, "RUN", "timeline of bytes by tag: a table, and RUN/trace.html"},
    {"tokenize", lev_verb_tokenize, "TEXT --output PREFIX [--train-bpe V | --tokenizer FILE] ...",
     "text to token files"},
    {"export", lev_verb_export, "CHECKPOINT FOLDER [--dtype bf16|f32|f64]",
     "weights of a checkpoint as safetensors with Hugging Face's names"},
};

int lev_verb_failed(const char *verb, lev_status status) {
  fprintf(stderr, "levee %s: %s\n  %.1000s\n", verb, lev_status_text(status), lev_detail());
  return lev_status_exit_code(status);
}

static void usage(FILE *out) {
  fputs("levee trains long-context mixture-of-experts models inside a memory budget fixed before the first step.\n\n",
        out);
  for (size_t i = 0; i < sizeof verbs / sizeof *verbs; ++i)
    fprintf(out, "  levee %-9s %s\n                    %s\n", verbs[i].name, verbs[i].arguments, verbs[i].help);
  fputs("  levee --help-all  every setting with its default; --print-config after CONFIG.toml shows the resolved "
        "ones\n  levee --version\n",
        out);
}

/* Warnings and notes of the library, on stderr. */
static void log_line(void *ctx, lev_log_level level, lev_log_sys sys, int rank, const char *line) {
  static const char *const words[] = {"warning", "info"};
  (void)ctx, (void)sys;
  if (rank >= 0)
    fprintf(stderr, "%s: rank %d: %s\n", words[level], rank, line);
  else
    fprintf(stderr, "%s: %s\n", words[level], line);
}

/* --help among the arguments, wherever, asks for nothing else. */
static int run_verb(int (*run)(int argc, char **argv), int argc, char **argv) {
  for (int i = 1; i < argc; ++i)
    if (strcmp(argv[i], "--help") == 0) return run(1, &argv[i]);
  return run(argc, argv);
}

static int dispatch(int argc, char **argv) {
  const char *verb = argc > 1 ? argv[1] : "";
  for (size_t i = 0; i < sizeof verbs / sizeof *verbs; ++i)
    if (strcmp(verb, verbs[i].name) == 0) return run_verb(verbs[i].run, argc - 2, argv + 2);
  if (strcmp(verb, "--help") == 0 || strcmp(verb, "-h") == 0 || strcmp(verb, "help") == 0) {
    usage(stdout);
    return 0;
  }
  if (strcmp(verb, "--help-all") == 0) {
    lev_config_help(stdout);
    return 0;
  }
  if (strcmp(verb, "--version") == 0) {
    printf("levee %s (%s)\n", LEV_VERSION, bench_revision());
    return 0;
  }
  if (*verb)
    fprintf(stderr, "levee: unknown verb \"%.60s\"; see levee --help\n", verb);
  else
    fputs("levee: no verb; see levee --help\n", stderr);
  return lev_status_exit_code(LEV_ERR_ARG);
}

/* A standard stream that the caller closed would give its number to the next file opened, and what is printed would go
 * into a checkpoint or metrics file. /dev/null takes its place, opened the wrong way round so that using it still
 * fails. */
static void hold_standard_streams(void) {
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) _exit(8);
}

int main(int argc, char **argv) {
  hold_standard_streams();
  signal(SIGXFSZ, SIG_IGN); /* a file over its limit is an error of the write, which names the file */
  lev_log_set_sink(log_line, NULL);
  int code = dispatch(argc, argv);
  if ((fflush(stdout) != 0 || ferror(stdout)) && code == 0) { /* a full disk behind > FILE */
    fputs("levee: cannot write the output\n", stderr);
    code = lev_status_exit_code(LEV_ERR_IO);
  }
  return code;
}
