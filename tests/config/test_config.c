/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/config/config.h"
#include "harness/config/foreign.h"
#include "tests/t.h"

/* lev_config is large: tests keep theirs off the stack. */
static lev_config config, other;

static void refuses(lev_status st, const char *a, const char *b, int line) {
  t_check(st == LEV_ERR_CONFIG, __FILE__, line, "status %s", lev_status_text(st));
  t_check(strstr(lev_detail(), a) && strstr(lev_detail(), b), __FILE__, line, "detail \"%s\" lacks \"%s\" or \"%s\"",
          lev_detail(), a, b);
  t_check(strchr(lev_detail(), '\n') == NULL, __FILE__, line, "more than one line: %s", lev_detail());
}
/* The text over the defaults is refused; the detail holds both words. */
#define REFUSES(toml, a, b)                                                                                            \
  do {                                                                                                                 \
    lev_config_defaults(&config);                                                                                      \
    refuses(lev_config_parse(&config, (toml), "my.toml"), (a), (b), __LINE__);                                         \
  } while (0)

/* Runs lev_config_arguments on words; the count that is left. */
static int arguments(lev_status *st, const char **words, int n) {
  char *argv[16];
  int argc = n;
  for (int i = 0; i < n; ++i) argv[i] = (char *)(uintptr_t)words[i];
  *st = lev_config_arguments(&config, &argc, argv);
  for (int i = 0; i < argc; ++i) words[i] = argv[i];
  return argc;
}
#define ARGUMENTS(st, ...)                                                                                             \
  arguments((st), (const char *[]){__VA_ARGS__}, sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *))

/* The defaults, with the folder that a file's name would give. */
static void valid_defaults(void) {
  lev_config_defaults(&config);
  snprintf(config.run.folder, sizeof config.run.folder, "runs/test");
}

T_TEST(config_defaults_pass_validation) {
  valid_defaults();
  T_EXPECT_OK(lev_config_validate(&config));
  T_EXPECT_EQ_I64(config.model.dtype, LEV_F32);
  T_EXPECT_EQ_I64(config.schedule.sco, LEV_SCHEDULE_BOUNDED);
  T_EXPECT_EQ_I64(config.checkpoint.keep_latest_k, 2);
  T_EXPECT(config.checkpoint.resume && config.checkpoint.enable);
  T_EXPECT(config.memory.sco_host_budget == SIZE_MAX);
}

T_TEST(config_reads_every_type) {
  lev_config_defaults(&config);
  T_REQUIRE_OK(
      lev_config_parse(&config,
                       "[train]\nsteps = 1_000\ncontext = \"4K\"\nmax_norm = 2\neval_at_end = false\n"
                       "[model]\nname = \"a \\\"b\\\"\"\ndtype = \"bf16\"\nrope_theta = 1e6\n"
                       "[memory]\ndevice_memory = \"1.5GiB\"\nhost_memory = 512MiB\nsco_host_budget = \"unlimited\"\n"
                       "llep_foreign_slots = -1\nllep_chunk_rows = 1M\n",
                       "f"));
  T_EXPECT_EQ_I64(config.train.steps, 1000);
  T_EXPECT_EQ_I64(config.train.context, 4096);
  T_EXPECT(config.train.max_norm == 2.0 && config.model.rope_theta == 1e6);
  T_EXPECT(!config.train.eval_at_end);
  T_EXPECT(strcmp(config.model.name, "a \"b\"") == 0);
  T_EXPECT_EQ_I64(config.model.dtype, LEV_BF16);
  T_EXPECT(config.memory.device_memory == (size_t)3 << 29);
  T_EXPECT(config.memory.host_memory == (size_t)512 << 20);
  T_EXPECT(config.memory.sco_host_budget == SIZE_MAX);
  T_EXPECT(config.memory.context_reserve == LEV_SIZE_AUTO);
  T_EXPECT_OK(lev_config_set(&config, "memory.context_reserve", "300MiB", "x"));
  T_EXPECT(config.memory.context_reserve == (size_t)300 << 20);
  T_EXPECT_OK(lev_config_set(&config, "memory.context_reserve", "auto", "x"));
  T_EXPECT(config.memory.context_reserve == LEV_SIZE_AUTO);
  T_EXPECT_STATUS(lev_config_set(&config, "memory.heap_cap", "auto", "x"), LEV_ERR_CONFIG); /* no default of its own */
  T_EXPECT_EQ_I64(config.memory.llep_foreign_slots, -1);
  T_EXPECT_EQ_I64(config.memory.llep_chunk_rows, 1 << 20);
}

T_TEST(config_exact_integers) {
  lev_config_defaults(&config);
  T_EXPECT_OK(lev_config_set(&config, "debug.seed", "9007199254740993", "x"));
  T_EXPECT_EQ_I64(config.debug.seed, 9007199254740993);
  T_EXPECT_OK(lev_config_set(&config, "debug.seed", "9223372036854775807", "x"));
  T_EXPECT_EQ_I64(config.debug.seed, INT64_MAX);
  T_EXPECT_STATUS(lev_config_set(&config, "debug.seed", "9223372036854775808", "x"), LEV_ERR_CONFIG);
  T_EXPECT_STATUS(lev_config_set(&config, "debug.seed", "9223372036854775807K", "x"), LEV_ERR_CONFIG);
  T_EXPECT_STATUS(lev_config_set(&config, "memory.device_memory", "99999999TiB", "x"), LEV_ERR_CONFIG);
  T_EXPECT_EQ_I64(config.debug.seed, INT64_MAX); /* a refused value changes nothing */
}

T_TEST(config_errors_name_file_line_and_nearest_key) {
  REFUSES("[train]\n\nstps = 3\n", "my.toml:3", "train.steps");
  REFUSES("[training]\nsteps = 3\n", "my.toml:2", "train.steps");
  REFUSES("[train]\nlr = 1e-3\n", "my.toml:2", "optimizer.lr"); /* the same key elsewhere is nearer than any edit */
  REFUSES("[parallelism]\ncontext = 1\n", "my.toml:2", "parallel.context");
  REFUSES("[train]\nseed = 1\n", "my.toml:2", "debug.seed");
  REFUSES("[train]\nglobal_batch_size = 8\n", "my.toml:2", "train.global_batch");
  REFUSES("[data]\nval = 'x'\n", "my.toml:2", "data.valid");
  REFUSES("[model]\nembedding_multiplier = 12\n", "my.toml:2", "--help-all"); /* like none */
  REFUSES("[model]\nhidden_sum = 1\n", "my.toml:2", "model.hidden_size");
  REFUSES("[model]\nhidden_map = 1\n", "my.toml:2", "--help-all"); /* no nearer to model.hidden_size than that */
  REFUSES("[train]\nsteps = 3\nsteps = 4\n", "my.toml:3", "twice");
  REFUSES("[train]\nsteps = \"many\"\n", "my.toml:2", "many");
  REFUSES("[train]\nsteps = 2.5\n", "my.toml:2", "2.5");
  REFUSES("[train]\nsteps = 0x10\n", "my.toml:2", "0x10");
  REFUSES("[train]\nsteps = true\n", "my.toml:2", "train.steps");
  REFUSES("[train]\nsteps = -1\n", "my.toml:2", "0 ..");
  REFUSES("[train]\ncontext = 0\n", "my.toml:2", "1 ..");
  REFUSES("[train]\nmax_norm = \"1\"\n", "my.toml:2", "train.max_norm");
  REFUSES("[train]\nmax_norm = nan\n", "my.toml:2", "number");
  REFUSES("[train]\nmax_norm = inf\n", "my.toml:2", "number");
  REFUSES("[train]\nmax_norm = 0x1p3\n", "my.toml:2", "number");
  REFUSES("[train]\neval_at_end = \"true\"\n", "my.toml:2", "train.eval_at_end");
  REFUSES("[train]\neval_at_end = 1\n", "my.toml:2", "true or false");
  REFUSES("[model]\nname = 5\n", "my.toml:2", "quotes");
  REFUSES("[model]\ndtype = \"f16\"\n", "my.toml:2", "f64|f32|bf16");
  REFUSES("[model]\ndtype = \"bfloat16\"\n", "my.toml:2", "it is called bf16");
  REFUSES("[model]\ndtype = \"float32\"\n", "my.toml:2", "it is called f32");
  REFUSES("[train]\ngrad_dtype = \"float32\"\n", "my.toml:2", "it is called f32");
  REFUSES("[model]\nlayer_types = [\"a\"]\n", "my.toml:2: layer_types", "array");
  REFUSES("[memory]\ndevice_memory = \"4 parsecs\"\n", "my.toml:2", "512MiB");
  REFUSES("[memory]\ndevice_memory = -1\n", "my.toml:2", "device_memory");
  REFUSES("[memory]\nsco_fraction = 1.5\n", "my.toml:2", "0 .. 1");
  REFUSES("[optimizer]\nbeta2 = 1\n", "my.toml:2", "beta2 = 1 is outside 0 .. 0.9999999"); /* not rounded to 1 */
  REFUSES("[checkpoint]\nkeep_latest_k = 1\n", "my.toml:2", "2 ..");
  REFUSES("steps = 3\n", "my.toml:1", "train.steps");
}

/* The printed settings, as lev_config_print writes them. */
static char *printed(const lev_config *c) {
  char *text = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&text, &bytes);
  if (!out) return NULL;
  lev_config_print(c, out);
  fclose(out);
  return text;
}

/* Keys of Hugging Face's config.json, and what is said of each: a setting that exists, or why there is none. */
T_TEST(config_keys_of_other_model_files) {
  static const char *const cases[][2] = {
      {"torch_dtype", "model.dtype"},
      {"num_local_experts", "model.num_experts "},
      {"n_routed_experts", "model.num_experts "},
      {"shared_expert_intermediate_size", "model.n_shared_experts"},
      {"decoder_sparse_step", "model.first_k_dense_replace"},
      {"moe_layer_freq", "model.first_k_dense_replace"},
      {"aux_loss_alpha", "model.router_aux_loss_coef"},
      {"topk_method", "model.balance"},
      {"layer_norm_eps", "model.rms_norm_eps"},
      {"use_qk_norm", "model.qk_norm"},
      {"use_sliding_window", "model.sliding_window"},
      {"max_position_embeddings", "train.context"},
      {"rope_scaling.factor", "model.rope_factor"},
      {"rope_parameters.rope_type", "model.rope_scaling"},
      {"hidden_act", "not needed"},
      {"attention_bias", "not supported"},
      {"attention_dropout", "not supported"},
      {"kv_lora_rank", "latent attention is not supported"},
      {"partial_rotary_factor", "not supported"},
      {"num_nextn_predict_layers", "not supported"},
      {"model_type", "not needed"},
      {"use_cache", "not needed"},
      {"eos_token_id", "not needed"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    char text[128], setting[64];
    snprintf(text, sizeof text, "[model]\n%s = 1\n", cases[i][0]);
    REFUSES(text, cases[i][0], cases[i][1]);
    T_EXPECT_MSG(!strstr(lev_detail(), "nearest"), "%s", lev_detail());
    if (!strstr(cases[i][1], "model.") && !strstr(cases[i][1], "train.")) continue;
    snprintf(setting, sizeof setting, "%.*s", (int)strcspn(cases[i][1], " "), cases[i][1]);
    T_EXPECT_STATUS(lev_config_set(&config, setting, "?", "named"), LEV_ERR_CONFIG);
    T_EXPECT_MSG(!strstr(lev_detail(), "unknown setting"), "%s", lev_detail());
  }
}

/* What a table of foreign names must not hold: names that are settings. */
T_TEST(config_settings_are_not_foreign) {
  lev_config_defaults(&config);
  char *text = printed(&config);
  T_REQUIRE(text != NULL);
  int n = 0;
  for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
    line[strcspn(line, " ")] = '\0';
    if (line[0] == '[' || line[0] == '\0') continue;
    T_EXPECT_MSG(!lev_foreign_key(line), "%s is a setting", line);
    ++n;
  }
  T_EXPECT(n > 80);
  free(text);
}

T_TEST(config_command_line_wins_over_the_file) {
  lev_status st;
  lev_config_defaults(&config);
  T_REQUIRE_OK(lev_config_parse(&config, "[train]\nsteps = 5\neval_at_end = true\n[optimizer]\nlr = 1.0\n", "f"));
  int left =
      ARGUMENTS(&st, "--train.steps=7", "--json", "--optimizer.lr", "2e-3", "--no-train.eval_at_end",
                "--memory.llep_foreign_slots", "-1", "--debug.poison", "x.toml", "--model.name=", "--out", "a.b");
  T_EXPECT_OK(st);
  T_EXPECT_EQ_I64(left, 4);
  T_EXPECT_EQ_I64(config.train.steps, 7);
  T_EXPECT(config.optimizer.lr == 2e-3 && !config.train.eval_at_end && config.debug.poison);
  T_EXPECT_EQ_I64(config.memory.llep_foreign_slots, -1);
  T_EXPECT(config.model.name[0] == '\0');
}

T_TEST(config_leftover_arguments_keep_their_order) {
  const char *words[] = {"--json", "--train.steps", "3", "a", "--checkpoint.resume", "false", "--all-ranks"};
  lev_status st;
  lev_config_defaults(&config);
  int left = arguments(&st, words, 7);
  T_EXPECT_EQ_I64(left, 3);
  T_EXPECT_OK(st);
  T_EXPECT(strcmp(words[0], "--json") == 0 && strcmp(words[1], "a") == 0 && strcmp(words[2], "--all-ranks") == 0);
  T_EXPECT(!config.checkpoint.resume);
}

T_TEST(config_command_line_errors) {
  lev_status st;
  lev_config_defaults(&config);
  (void)ARGUMENTS(&st, "--train.stps=3");
  refuses(st, "train.stps", "train.steps", __LINE__);
  (void)ARGUMENTS(&st, "--train.steps");
  refuses(st, "--train.steps", "value", __LINE__);
  (void)ARGUMENTS(&st, "--train.steps", "--json");
  refuses(st, "--train.steps", "value", __LINE__);
  (void)ARGUMENTS(&st, "--no-train.steps");
  refuses(st, "--no-train.steps", "true/false", __LINE__);
  (void)ARGUMENTS(&st, "--checkpoint.resume=no");
  refuses(st, "checkpoint.resume", "true or false", __LINE__);
}

T_TEST(config_words_that_are_nearly_settings) {
  static const char *const cases[][2] = {
      {"--context", "the setting is --train.context or --parallel.context"},
      {"--context=1024", "the setting is --train.context or --parallel.context"},
      {"--device-memory", "the setting is --memory.device_memory"},
      {"--lr", "the setting is --optimizer.lr"},
      {"--frobnicate", "unexpected argument \"--frobnicate\""},
      {"--", "unexpected argument \"--\""},
      {"context", "unexpected argument \"context\""},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    T_EXPECT_STATUS(lev_config_unexpected(cases[i][0]), LEV_ERR_ARG);
    T_EXPECT_MSG(strstr(lev_detail(), cases[i][1]), "%s", lev_detail());
    T_EXPECT_MSG(strstr(cases[i][1], "setting") || !strstr(lev_detail(), "setting"), "%s", lev_detail());
  }
}

T_TEST(config_run_folder_is_the_name_of_the_file) {
  static const struct {
    const char *name, *folder;
  } cases[] = {{"demo.toml", "runs/demo"}, {"qwen2.5-moe.toml", "runs/qwen2.5-moe"}, {"plain", "runs/plain"}};
  char folder[] = "/tmp/levee_config_XXXXXX", path[256];
  T_REQUIRE(mkdtemp(folder) != NULL);
  for (int i = 0; i < 3; ++i) {
    snprintf(path, sizeof path, "%s/%s", folder, cases[i].name);
    FILE *file = fopen(path, "w");
    T_REQUIRE(file != NULL);
    fputs("[train]\nsteps = 3\n", file);
    fclose(file);
    lev_config_defaults(&config);
    T_EXPECT_OK(lev_config_read(&config, path));
    T_EXPECT_MSG(strcmp(config.run.folder, cases[i].folder) == 0, "%s gives %s", cases[i].name, config.run.folder);
    unlink(path);
  }
  lev_config_defaults(&config);
  T_EXPECT_STATUS(lev_config_read(&config, path), LEV_ERR_IO);
  T_EXPECT_STATUS(lev_config_read(&config, folder), LEV_ERR_IO); /* a folder */
  rmdir(folder);
}

T_TEST(config_print_reads_back_the_same) {
  lev_config_defaults(&config);
  config.optimizer.lr = 0.1 + 0.2, config.model.rms_norm_eps = 1e-300, config.train.max_norm = 1.0 / 3.0;
  config.memory.device_memory = ((size_t)64 << 30) + 1, config.memory.llep_foreign_slots = -1;
  config.debug.seed = INT64_MAX, config.train.eval_at_end = false, config.model.qk_norm = 2;
  snprintf(config.model.name, sizeof config.model.name, "q\" b\\ n\n t\t r\r bell\x07 del\x7f \xc3\xa9 # = [x]");
  char *first = printed(&config), *second = NULL;
  T_REQUIRE(first != NULL);
  lev_config_defaults(&other);
  T_EXPECT_OK(lev_config_parse(&other, first, "printed"));
  T_EXPECT(other.optimizer.lr == config.optimizer.lr && other.model.rms_norm_eps == config.model.rms_norm_eps &&
           other.train.max_norm == config.train.max_norm);
  T_EXPECT(other.memory.device_memory == config.memory.device_memory);
  T_EXPECT_EQ_I64(other.debug.seed, config.debug.seed);
  T_EXPECT(strcmp(other.model.name, config.model.name) == 0);
  second = printed(&other);
  T_EXPECT(second && strcmp(first, second) == 0);
  free(first);
  free(second);
}

T_TEST(config_help_lists_every_setting) {
  char *text = NULL, *settings = NULL;
  size_t bytes = 0;
  lev_config_defaults(&config);
  FILE *out = open_memstream(&text, &bytes);
  T_REQUIRE(out != NULL);
  lev_config_help(out);
  fclose(out);
  settings = printed(&config);
  T_REQUIRE(settings != NULL);
  char section[64] = "", name[256];
  int n = 0;
  for (char *line = strtok(settings, "\n"); line; line = strtok(NULL, "\n")) {
    if (sscanf(line, "[%63[^]]]", section) == 1) continue;
    snprintf(name, sizeof name, "--%s.%.*s ", section, (int)strcspn(line, " "), line);
    T_EXPECT_MSG(strstr(text, name) != NULL, "help lacks %s", name);
    ++n;
  }
  T_EXPECT(n > 80);
  T_EXPECT(strstr(text, "1 .. 1073741824") != NULL); /* the range of train.context */
  T_EXPECT(strstr(text, "0 .. 0.9999999]") != NULL); /* of optimizer.beta2 */
  free(text);
  free(settings);
}

#define INVALID(name, value, a, b)                                                                                     \
  do {                                                                                                                 \
    T_EXPECT_OK(lev_config_set(&config, (name), (value), "test"));                                                     \
    refuses(lev_config_validate(&config), (a), (b), __LINE__);                                                         \
    valid_defaults();                                                                                                  \
  } while (0)

T_TEST(config_validation_names_both_settings) {
  valid_defaults();
  INVALID("train.grad_dtype", "f64", "train.grad_dtype", "model.dtype");
  INVALID("train.grad_dtype", "bf16", "train.grad_dtype", "model.dtype");
  INVALID("lr_scheduler.warmup_steps", "101", "lr_scheduler.warmup_steps", "train.steps");
  INVALID("parallel.context", "2", "parallel.context", "parallel.ranks");
  config.parallel.ranks = 6;
  T_EXPECT_OK(lev_config_set(&config, "parallel.experts", "3", "test"));
  T_EXPECT_OK(lev_config_validate(&config));
  INVALID("parallel.experts", "4", "parallel.experts", "parallel.ranks");
  INVALID("run.folder", "", "run.folder", "empty");
  INVALID("checkpoint.folder", "", "checkpoint.folder", "empty");
  INVALID("checkpoint.folder", "/tmp/x", "checkpoint.folder", "inside run.folder");
  INVALID("checkpoint.folder", "x/", "checkpoint.folder", "inside run.folder");
  INVALID("checkpoint.folder", ".", "checkpoint.folder", "inside run.folder");
  INVALID("checkpoint.folder", "x/../../y", "checkpoint.folder", "inside run.folder");
  T_EXPECT_OK(lev_config_set(&config, "optimizer.name", "none", "test"));
  INVALID("checkpoint.initial_load_path", "x", "optimizer.name", "none");
}
