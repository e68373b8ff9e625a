/* SPDX-License-Identifier: Apache-2.0 */
/* levee export: weights of a checkpoint for other programs. */
#include <stdio.h>
#include <string.h>

#include "harness/checkpoint/export.h"
#include "harness/cli/verbs.h"
#include "harness/cli/words.h"

static const char help[] =
    "levee export CHECKPOINT FOLDER [--dtype bf16|f32|f64]: the weights as safetensors with Hugging Face's names\n"
    "  CHECKPOINT         RUN/checkpoints/step-N, or RUN/checkpoints for the newest\n"
    "  FOLDER             new; gets model.safetensors, or files of at most 5 GB and their index\n"
    "  --dtype            of the tensors (bf16); masters are f32, of f64 runs f64\n"
    "config.json and the tokenizer are not written: copy those of the model that the run began with.\n";

static lev_status parse(int argc, char **argv, const char *words[2], lev_dtype *dtype) {
  const char *type = "bf16";
  const lev_cli_option options[] = {{"--dtype", .value = &type}};
  int n = 0;
  for (int i = 0; i < argc; ++i) {
    bool known;
    LEV_TRY(lev_cli_take(options, 1, argc, argv, &i, &known));
    if (known) continue;
    if (argv[i][0] == '-' || n == 2)
      return lev_fail(LEV_ERR_ARG, "unexpected argument \"%.100s\"; see levee export --help", argv[i]);
    words[n++] = argv[i];
  }
  *dtype = lev_dtype_find(type);
  if (*dtype != LEV_BF16 && *dtype != LEV_F32 && *dtype != LEV_F64)
    return lev_fail(LEV_ERR_ARG, "--dtype \"%.40s\" is none of bf16, f32, f64", type);
  return n == 2 ? LEV_OK : lev_fail(LEV_ERR_ARG, "expected a checkpoint and a new folder; see levee export --help");
}

int lev_verb_export(int argc, char **argv) {
  const char *words[2] = {NULL, NULL};
  lev_dtype dtype;
  lev_exported done;
  if (argc > 0 && strcmp(argv[0], "--help") == 0) {
    fputs(help, stdout);
    return 0;
  }
  lev_status st = parse(argc, argv, words, &dtype);
  if (st == LEV_OK) st = lev_checkpoint_export(words[0], words[1], dtype, LEV_EXPORT_FILE_BYTES, NULL, &done);
  if (st != LEV_OK) return lev_verb_failed("export", st);
  printf("%s: %lld tensors, %lld parameters in %s, %d file%s\n", words[1], (long long)done.tensors,
         (long long)done.parameters, lev_dtype_name(dtype), done.files, done.files == 1 ? "" : "s");
  return 0;
}
