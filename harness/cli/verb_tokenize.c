/* SPDX-License-Identifier: Apache-2.0 */
/* levee tokenize: text to token files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/checkpoint/file.h"
#include "harness/cli/verbs.h"
#include "harness/cli/words.h"
#include "harness/data/tokenize.h"

static const char help[] =
    "levee tokenize TEXT --output PREFIX [options]: text to PREFIX.train.*, for --data.train=PREFIX.train\n"
    "  --output PREFIX    its folder is made if need be\n"
    "  --train-bpe V      learn a byte-level BPE of V entries on the training part; writes PREFIX.tokenizer.json\n"
    "  --tokenizer FILE   apply a Hugging Face tokenizer.json; without either, tokens are bytes\n"
    "  --holdout F        share of the text at its end that goes to PREFIX.valid.*, the rest to PREFIX.train.*;\n"
    "                     without it, all is for training, and PREFIX.valid.* of an earlier call is removed\n"
    "  --append-eod       end-of-document token after each document\n"
    "  --jsonl            one {\"text\": ...} object per line (default for *.jsonl)\n";

static lev_status number(const char *name, const char *text, double low, double high, double *out) {
  char *end;
  *out = strtod(text, &end);
  if (end == text || *end != '\0' || !(*out >= low && *out <= high))
    return lev_fail(LEV_ERR_ARG, "%s \"%.60s\" must be a number from %g to %g", name, text, low, high);
  return LEV_OK;
}

static lev_status parse(int argc, char **argv, lev_tokenize_options *o) {
  const char *train_bpe = NULL, *holdout = NULL;
  const lev_cli_option options[] = {{"--append-eod", .flag = &o->append_eod}, {"--jsonl", .flag = &o->jsonl},
                                    {"--output", .value = &o->output},        {"--tokenizer", .value = &o->tokenizer},
                                    {"--train-bpe", .value = &train_bpe},     {"--holdout", .value = &holdout}};
  for (int i = 0; i < argc; ++i) {
    bool known;
    LEV_TRY(lev_cli_take(options, sizeof options / sizeof *options, argc, argv, &i, &known));
    if (known) continue;
    if (argv[i][0] == '-' || o->input)
      return lev_fail(LEV_ERR_ARG, "unexpected argument \"%.100s\"; see levee tokenize --help", argv[i]);
    o->input = argv[i];
  }
  if (train_bpe) {
    double x;
    LEV_TRY(number("--train-bpe", train_bpe, 257, 1 << 24, &x));
    if (x != (double)(int64_t)x)
      return lev_fail(LEV_ERR_ARG, "--train-bpe \"%.60s\" must be a whole number", train_bpe);
    o->train_bpe = (int64_t)x;
  }
  if (holdout) LEV_TRY(number("--holdout", holdout, 0, 0.99, &o->holdout));
  if (!o->input || !o->output || o->output[0] == '\0')
    return lev_fail(LEV_ERR_ARG, "expected TEXT and --output PREFIX; see levee tokenize --help");
  if (o->tokenizer && o->train_bpe) return lev_fail(LEV_ERR_ARG, "--tokenizer and --train-bpe exclude each other");
  return LEV_OK;
}

/* The folder of the output, before any work is done for it. */
static lev_status make_folder(const char *output) {
  char folder[1024];
  const char *end = strrchr(output, '/');
  if (!end || end == output) return LEV_OK;
  size_t n = (size_t)(end - output);
  if (n >= sizeof folder) return lev_fail(LEV_ERR_ARG, "--output of %zu bytes is too long", strlen(output));
  memcpy(folder, output, n);
  folder[n] = '\0';
  return lev_make_dir(folder, NULL);
}

int lev_verb_tokenize(int argc, char **argv) {
  lev_tokenize_options options = {0};
  lev_tokenize_report report = {0};
  if (argc > 0 && strcmp(argv[0], "--help") == 0) {
    fputs(help, stdout);
    return 0;
  }
  lev_status st = parse(argc, argv, &options);
  if (st == LEV_OK) st = make_folder(options.output);
  if (st == LEV_OK) st = lev_tokenize(&options, &report);
  if (st != LEV_OK) return lev_verb_failed("tokenize", st);
  int64_t tokens = report.train_tokens + report.valid_tokens, bytes = report.train_bytes + report.valid_bytes;
  printf(
      "%lld bytes -> %lld tokens (%.3f bytes per token), vocabulary %lld; %lld for training, %lld held out; %.1f s\n",
      (long long)bytes, (long long)tokens, tokens > 0 ? (double)bytes / (double)tokens : 0, (long long)report.vocab,
      (long long)report.train_tokens, (long long)report.valid_tokens, report.seconds);
  return 0;
}
