/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in and out: models in files of whole tensors and checkpoints give the same rows to any number of ranks, what
 * does not fit the model is refused by name, and an export is the same tensors again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/dims.h"
#include "harness/checkpoint/checkpoint.h"
#include "harness/checkpoint/export.h"
#include "harness/checkpoint/initial.h"
#include "tests/num.h"
#include "tests/t.h"

enum { TENSORS = 4, MOST = 64, RANKS = 4 };

/* The whole model: two matrices, a vector, and one that files need not have. */
static const struct {
  const char *name;
  int64_t rows, cols;
  bool vector, optional;
} model[TENSORS] = {{"model.embed_tokens.weight", 7, 4, false, false},
                    {"model.layers.0.mlp.experts.0.up_proj.weight", 5, 9, false, false},
                    {"model.layers.0.mlp.gate.e_score_correction_bias", 6, 1, true, true},
                    {"model.norm.weight", 11, 1, true, false}};

static void values_of(int tensor, lev_dtype dtype, void *out) {
  num_random(dtype, out, NULL, model[tensor].rows * model[tensor].cols, 1, (uint32_t)(50 + tensor));
}

typedef struct scene {
  char folder[256]; /* of the test */
  char path[300];   /* to load from */
  int ranks;
  lev_comm_hub *hub;
  lev_dtype dtype; /* of the files */
  lev_status want;
  bool save; /* a checkpoint into the folder, instead of loading */
  bool kept; /* the optional tensor keeps its values */
} scene;

/* This rank's masters and, after each, a moment that no file of weights has. */
static void make_pieces(lev_state_piece *pieces, double data[][MOST], int rank, int ranks) {
  for (int i = 0; i < 2 * TENSORS; ++i) {
    int t = i / 2;
    pieces[i] = (lev_state_piece){.dtype = LEV_F32,
                                  .rows = lev_part_size(model[t].rows, ranks, rank),
                                  .cols = model[t].cols,
                                  .first_row = lev_part_begin(model[t].rows, ranks, rank),
                                  .full_rows = model[t].rows,
                                  .vector = model[t].vector,
                                  .optional = model[t].optional,
                                  .data = data[i]};
    snprintf(pieces[i].name, sizeof pieces[i].name, "%s%s", i % 2 ? "exp_avg." : LEV_STATE_MASTER, model[t].name);
  }
}

static void check_pieces(const scene *s, const lev_state_piece *pieces, const double data[][MOST]) {
  double poison[MOST];
  num_poison(poison, sizeof poison);
  for (int i = 0; i < 2 * TENSORS; ++i) {
    double whole[MOST];
    const lev_state_piece *p = &pieces[i];
    if (i % 2 || (s->kept && p->optional)) {
      T_EXPECT_MSG(memcmp(data[i], poison, sizeof poison) == 0, "%s: was not to be read", p->name);
      continue;
    }
    values_of(i / 2, s->dtype, whole);
    for (int64_t j = 0; j < p->rows * p->cols; ++j) {
      double want = lev_dtype_load(s->dtype, whole, p->first_row * p->cols + j),
             got = lev_dtype_load(LEV_F32, data[i], j);
      T_EXPECT_MSG(got == want, "%s: element %lld is %g, not %g", p->name, (long long)j, got, want);
    }
  }
}

static void rank_main(int rank, void *ctx) {
  scene *s = ctx;
  lev_device *device;
  lev_comm *world;
  lev_state_piece pieces[2 * TENSORS];
  double data[2 * TENSORS][MOST];
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &device));
  T_REQUIRE_OK(lev_comm_local_join(s->hub, rank, device, &world));
  for (int i = 0; i < 2 * TENSORS; ++i) num_poison(data[i], sizeof data[i]);
  make_pieces(pieces, data, rank, s->ranks);
  if (s->save) {
    lev_checkpoint c = {.folder = s->folder, .world = world, .digest = "d", .layout = "l", .keep = 2};
    for (int i = 0; i < 2 * TENSORS; ++i) {
      double whole[MOST];
      values_of(i / 2, LEV_F32, whole);
      memcpy(data[i], (float *)whole + pieces[i].first_row * pieces[i].cols, lev_piece_bytes(&pieces[i]));
    }
    T_EXPECT_OK(lev_checkpoint_save(&c, 3, pieces, 2 * TENSORS));
  } else {
    T_EXPECT_STATUS(lev_initial_weights(s->path, world, NULL, pieces, 2 * TENSORS), s->want);
    if (s->want == LEV_OK) check_pieces(s, pieces, data);
  }
  lev_comm_destroy(world);
  lev_device_close(device);
}

static void play(scene *s) {
  T_REQUIRE_OK(lev_comm_hub_create(s->ranks, 30, &s->hub));
  t_ranks(s->ranks, rank_main, s);
  lev_comm_hub_destroy(s->hub);
}

static void begin(scene *s) {
  snprintf(s->folder, sizeof s->folder, "/tmp/levee-weights-XXXXXX");
  T_REQUIRE(mkdtemp(s->folder) != NULL);
  snprintf(s->path, sizeof s->path, "%s", s->folder);
}

static void end(const scene *s) {
  char command[400];
  snprintf(command, sizeof command, "rm -rf '%s'", s->folder);
  T_EXPECT(system(command) == 0);
}

static bool exists(const scene *s, const char *name) {
  char path[512];
  struct stat info;
  snprintf(path, sizeof path, "%s/%s", s->folder, name);
  return stat(path, &info) == 0;
}

/* What a file gets of a tensor. */
typedef struct part {
  int tensor;
  const char *name;    /* NULL: its own */
  int64_t first, rows; /* rows 0: all */
  bool flat;           /* as a vector */
  int64_t more;        /* rows beyond */
} part;

static void write_file(const scene *s, const char *name, const part *parts, int n) {
  lev_safetensor list[8] = {0};
  char path[512];
  lev_file file;
  bool sharded = false;
  snprintf(path, sizeof path, "%s/%s", s->folder, name);
  for (int i = 0; i < n; ++i) {
    int t = parts[i].tensor;
    snprintf(list[i].name, sizeof list[i].name, "%s", parts[i].name ? parts[i].name : model[t].name);
    list[i].dtype = s->dtype, list[i].n_dims = model[t].vector || parts[i].flat ? 1 : 2;
    list[i].dims[0] = (parts[i].rows ? parts[i].rows : model[t].rows) + parts[i].more, list[i].dims[1] = model[t].cols;
    if (parts[i].flat) list[i].dims[0] *= model[t].cols;
    list[i].offset[0] = parts[i].first, sharded |= parts[i].rows > 0;
  }
  T_REQUIRE_OK(lev_file_create(&file, path, NULL));
  T_EXPECT_OK(lev_safetensors_begin(&file, list, n, sharded));
  for (int i = 0; i < n; ++i) {
    double whole[2 * MOST] = {0};
    values_of(parts[i].tensor, s->dtype, whole);
    T_EXPECT_OK(lev_file_write(
        &file, (char *)whole + lev_bytes(parts[i].first, model[parts[i].tensor].cols, lev_dtype_bytes(s->dtype)),
        (size_t)(list[i].end - list[i].begin)));
  }
  T_REQUIRE_OK(lev_file_commit(&file, NULL));
}

static void write_text(const scene *s, const char *name, const char *text) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", s->folder, name);
  FILE *f = fopen(path, "w");
  T_REQUIRE(f != NULL);
  fputs(text, f);
  fclose(f);
}

#define INDEX(a, b) "{\"weight_map\": {\"model.embed_tokens.weight\": \"" a "\", \"model.norm.weight\": \"" b "\"}}"

T_TEST(weights_from_a_model) {
  const lev_dtype types[] = {LEV_F32, LEV_BF16, LEV_F64};
  for (int ranks = 1; ranks <= RANKS; ++ranks)
    for (int d = 0; d < 2; ++d)
      for (int bias = 0; bias < 2; ++bias) {
        scene s = {.ranks = ranks, .dtype = types[d], .kept = !bias};
        begin(&s);
        write_file(&s, "model.safetensors", (const part[]){{.tensor = 0}, {.tensor = 1}, {.tensor = 3}, {.tensor = 2}},
                   bias ? 4 : 3);
        play(&s);
        snprintf(s.path, sizeof s.path, "%s/model.safetensors", s.folder); /* the file itself */
        play(&s);
        end(&s);
      }
}

T_TEST(weights_from_several_files) {
  for (int ranks = 1; ranks <= RANKS; ++ranks) {
    scene s = {.ranks = ranks, .dtype = LEV_BF16};
    begin(&s);
    write_file(&s, "a.safetensors", (const part[]){{.tensor = 1}, {.tensor = 3}}, 2);
    write_file(&s, "b.safetensors", (const part[]){{.tensor = 0}, {.tensor = 2}}, 2);
    write_text(&s, "model.safetensors.index.json", INDEX("b.safetensors", "a.safetensors"));
    play(&s);
    end(&s);
  }
}

T_TEST(weights_that_do_not_fit_are_refused) {
  static const struct {
    part parts[5];
    int n;
  } bad[] = {{{{.tensor = 0}, {.tensor = 1}}, 2}, /* one is missing */
             {{{.tensor = 0}, {.tensor = 1}, {.tensor = 3}, {.tensor = 3, .name = "model.layers.1.norm.weight"}}, 4},
             {{{.tensor = 0}, {.tensor = 1, .flat = true}, {.tensor = 3}}, 3},
             {{{.tensor = 0, .more = 1}, {.tensor = 1}, {.tensor = 3}}, 3},
             {{{.tensor = 0}, {.tensor = 1}, {.tensor = 3, .more = -1}}, 3},
             {{{.tensor = 0, .first = 2, .rows = 5}, {.tensor = 1}, {.tensor = 3}}, 3}, /* the first two are nowhere */
             {{{.tensor = 1, .name = "model.embed_tokens.weight"}, {.tensor = 1}, {.tensor = 3}}, 3}}; /* too wide */
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i)
    for (int ranks = 1; ranks <= 3; ++ranks) {
      scene s = {.ranks = ranks, .dtype = LEV_F32, .want = LEV_ERR_FORMAT};
      begin(&s);
      write_file(&s, "model.safetensors", bad[i].parts, bad[i].n);
      play(&s);
      end(&s);
    }
}

/* The same rows twice, whose number alone would do. */
T_TEST(weights_rows_given_twice_are_refused) {
  scene s = {.ranks = 1, .dtype = LEV_F32, .want = LEV_ERR_FORMAT};
  begin(&s);
  write_file(&s, "a.safetensors", (const part[]){{.tensor = 1, .rows = 2}, {.tensor = 0}, {.tensor = 3}}, 3);
  write_file(&s, "b.safetensors", (const part[]){{.tensor = 1, .rows = 3}}, 1);
  write_text(&s, "model.safetensors.index.json", INDEX("a.safetensors", "b.safetensors"));
  play(&s);
  write_file(&s, "b.safetensors", (const part[]){{.tensor = 1, .first = 2, .rows = 3}}, 1);
  s.want = LEV_OK, s.kept = true;
  play(&s);
  end(&s);
}

T_TEST(weights_that_are_not_there) {
  static const struct {
    const char *index;
    lev_status want;
  } bad[] = {{NULL, LEV_ERR_IO},
             {"{", LEV_ERR_FORMAT},
             {"{\"weight_map\": {}}", LEV_ERR_FORMAT},
             {"{\"weight_map\": {\"a\": 3}}", LEV_ERR_FORMAT},
             {INDEX("../a.safetensors", "b.safetensors"), LEV_ERR_FORMAT},
             {INDEX("a.safetensors", "b.safetensors"), LEV_ERR_IO}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    scene s = {.ranks = 2, .dtype = LEV_F32, .want = bad[i].want};
    begin(&s);
    if (bad[i].index) write_text(&s, "model.safetensors.index.json", bad[i].index);
    play(&s);
    strcat(s.path, "/nowhere");
    s.want = LEV_ERR_IO;
    play(&s);
    end(&s);
  }
}

/* A checkpoint of any layout as first weights of any other, and as an export that is the same model again. */
T_TEST(weights_of_a_checkpoint) {
  for (int writers = 1; writers <= RANKS; ++writers)
    for (int readers = 1; readers <= RANKS; ++readers) {
      char from[300], to[300];
      lev_exported done;
      scene s = {.ranks = writers, .dtype = LEV_F32, .save = true};
      begin(&s);
      play(&s);
      s.ranks = readers, s.save = false;
      snprintf(s.path, sizeof s.path, "%s/step-00000003", s.folder);
      play(&s);
      snprintf(from, sizeof from, "%s", readers % 2 ? s.folder : s.path);
      snprintf(to, sizeof to, "%s/out", s.folder);
      T_EXPECT_OK(lev_checkpoint_export(from, to, LEV_F32, readers > 2 ? 1 : 1000, NULL, &done));
      T_EXPECT_EQ_I64(done.tensors, TENSORS);
      T_EXPECT_EQ_I64(done.parameters, 7 * 4 + 5 * 9 + 6 + 11);
      T_EXPECT_EQ_I64(done.files, readers > 2 ? TENSORS : 1);
      T_EXPECT(exists(&s, readers > 2 ? "out/model-00004-of-00004.safetensors" : "out/model.safetensors"));
      snprintf(s.path, sizeof s.path, "%s", to);
      play(&s);
      T_EXPECT_STATUS(lev_checkpoint_export(from, to, LEV_F32, 1000, NULL, &done), LEV_ERR_ARG);
      T_EXPECT_STATUS(lev_checkpoint_export(from, "", LEV_F32, 1000, NULL, &done), LEV_ERR_ARG);
      char command[700];
      snprintf(command, sizeof command, "mkdir %s/two.tmp && touch %s/two.tmp/kept", s.folder, s.folder); /* ours not */
      T_EXPECT(system(command) == 0);
      snprintf(to, sizeof to, "%s/two//", s.folder);
      T_EXPECT_OK(lev_checkpoint_export(s.folder, to, LEV_F32, 1000, NULL, &done));
      T_EXPECT(exists(&s, "two/model.safetensors") && exists(&s, "two.tmp/kept"));
      end(&s);
    }
}

/* bf16 is rounded once; selection biases keep their type. */
T_TEST(weights_exported_in_bf16) {
  char to[300];
  lev_exported done;
  lev_safetensors file;
  scene s = {.ranks = 3, .dtype = LEV_F32, .save = true};
  begin(&s);
  play(&s);
  snprintf(to, sizeof to, "%s/out", s.folder);
  T_REQUIRE_OK(lev_checkpoint_export(s.folder, to, LEV_BF16, 1000, NULL, &done));
  strcat(to, "/model.safetensors");
  T_REQUIRE_OK(lev_safetensors_open(to, NULL, &file));
  for (int t = 0; t < TENSORS; ++t) {
    double whole[MOST];
    const lev_safetensor *got = lev_safetensors_find(&file, model[t].name);
    T_REQUIRE(got != NULL);
    T_EXPECT_EQ_I64(got->dtype, model[t].optional ? LEV_F32 : LEV_BF16);
    T_EXPECT_EQ_I64((int64_t)(got->begin % lev_dtype_bytes(got->dtype)), 0);
    values_of(t, LEV_F32, whole);
    for (int64_t j = 0; j < model[t].rows * model[t].cols; ++j) {
      float f = (float)lev_dtype_load(LEV_F32, whole, j);
      double want = model[t].optional ? f : lev_bf16_to_f32(lev_bf16_from_f32(f));
      T_EXPECT(lev_dtype_load(got->dtype, file.data + got->begin, j) == want);
    }
  }
  lev_safetensors_close(&file);
  end(&s);
}

/* Every file operation of an export fails in turn: nothing stands under its name, or all of it does. */
T_TEST(weights_export_survives_every_failing_file_operation) {
  char to[300];
  lev_exported done;
  scene s = {.ranks = 2, .dtype = LEV_F32, .save = true};
  begin(&s);
  play(&s);
  snprintf(to, sizeof to, "%s/out", s.folder);
  s.ranks = 1, s.save = false;
  snprintf(s.path, sizeof s.path, "%s", to);
  for (int64_t n = 1; n < 100; ++n) {
    lev_fault fault = {0};
    fault.fail_at[LEV_FAULT_FILE] = n;
    lev_status st = lev_checkpoint_export(s.folder, to, LEV_F32, 1, &fault, &done);
    char command[400];
    snprintf(command, sizeof command, "! ls '%s' | grep -q tmp", s.folder);
    T_EXPECT(system(command) == 0);
    if (st == LEV_OK) {
      T_EXPECT(n > 10 && fault.seen[LEV_FAULT_FILE] < n);
      play(&s);
      break;
    }
    T_EXPECT_EQ_I64(st, LEV_ERR_IO);
    T_EXPECT(!exists(&s, "out"));
    if (t_failed()) break;
  }
  end(&s);
}
