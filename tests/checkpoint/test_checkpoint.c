/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints: exact round trips, damage is noticed, and no failing file operation costs an older checkpoint. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/dims.h"
#include "harness/checkpoint/checkpoint.h"
#include "tests/num.h"
#include "tests/t.h"

enum { PIECES = 4, MOST = 64 };

/* State of one rank: its rows of two matrices, a vector and a tensor of one row, which most ranks have none of. */
typedef struct state {
  lev_state_piece pieces[PIECES];
  double data[PIECES][MOST];
} state;

static void make_state(state *s, int rank, int ranks, int64_t step) {
  const lev_dtype types[PIECES] = {LEV_F32, LEV_F32, LEV_F32, LEV_F64};
  const int64_t rows[PIECES] = {7, 11, 1, 5}, cols[PIECES] = {4, 1, 7, 3};
  memset(s, 0, sizeof *s);
  for (int i = 0; i < PIECES; ++i) {
    double whole[MOST];
    lev_state_piece *p = &s->pieces[i];
    *p = (lev_state_piece){.dtype = types[i],
                           .rows = lev_part_size(rows[i], ranks, rank),
                           .cols = cols[i],
                           .first_row = lev_part_begin(rows[i], ranks, rank),
                           .full_rows = rows[i],
                           .vector = i == 1,
                           .data = s->data[i]};
    snprintf(p->name, sizeof p->name, "master.tensor.%d", i);
    num_random(types[i], whole, NULL, rows[i] * cols[i], 1, (uint32_t)(1000 * step + i));
    size_t row = (size_t)cols[i] * lev_dtype_bytes(types[i]);
    memcpy(p->data, (unsigned char *)whole + (size_t)p->first_row * row, (size_t)p->rows * row);
  }
}

typedef struct scene {
  char folder[256];
  int ranks;
  lev_comm_hub *hub;
  const char *digest;
  int64_t save[4]; /* steps to save, 0 ends */
  int64_t fail_at; /* file operation of rank `fail_rank` that fails in the last save */
  int fail_rank;
  lev_status want_last; /* of the last save */
  int64_t want_step;    /* of the load */
  lev_status want_load;
  int64_t file_ops; /* seen in the last save */
} scene;

static void rank_scene(int rank, void *ctx) {
  scene *sc = ctx;
  lev_device *device;
  lev_comm *world;
  lev_device_config dc = {.backend = LEV_BACKEND_CPU};
  lev_fault fault = {0};
  state s, want;
  int64_t step;
  T_REQUIRE_OK(lev_device_open(&dc, &device));
  T_REQUIRE_OK(lev_comm_local_join(sc->hub, rank, device, &world));
  char layout[20];
  snprintf(layout, sizeof layout, "%d ranks", sc->ranks);
  lev_checkpoint c = {
      .folder = sc->folder, .world = world, .digest = sc->digest, .layout = layout, .keep = 2, .fault = &fault};
  for (int i = 0; sc->save[i] > 0; ++i) {
    bool last = sc->save[i + 1] == 0;
    make_state(&s, rank, sc->ranks, sc->save[i]);
    fault = (lev_fault){0};
    if (last && rank == sc->fail_rank) fault.fail_at[LEV_FAULT_FILE] = sc->fail_at;
    lev_status st = lev_checkpoint_save(&c, sc->save[i], s.pieces, PIECES);
    if (last && rank == sc->fail_rank) sc->file_ops = fault.seen[LEV_FAULT_FILE];
    if (last && sc->fail_at == 0) T_EXPECT_EQ_I64(st, sc->want_last);
    if (!last) T_EXPECT_OK(st);
  }
  fault = (lev_fault){0};
  make_state(&s, rank, sc->ranks, 999);
  for (int i = 0; i < PIECES; ++i) num_poison(s.data[i], sizeof s.data[i]);
  T_EXPECT_STATUS(lev_checkpoint_load(&c, &step, s.pieces, PIECES), sc->want_load);
  if (sc->want_step >= 0) T_EXPECT_EQ_I64(step, sc->want_step);
  if (sc->want_load == LEV_OK && step > 0) {
    make_state(&want, rank, sc->ranks, step);
    for (int i = 0; i < PIECES; ++i) {
      size_t bytes = (size_t)(want.pieces[i].rows * want.pieces[i].cols) * lev_dtype_bytes(want.pieces[i].dtype);
      T_EXPECT_MSG(memcmp(s.data[i], want.data[i], bytes) == 0, "piece %d of step %lld differs", i, (long long)step);
    }
  }
  lev_comm_destroy(world);
  lev_device_close(device);
}

static void play(scene *sc) {
  if (!sc->digest) sc->digest = "d1";
  T_REQUIRE_OK(lev_comm_hub_create(sc->ranks, 30, &sc->hub));
  t_ranks(sc->ranks, rank_scene, sc);
  lev_comm_hub_destroy(sc->hub);
}

static void fresh_folder(char *out) {
  snprintf(out, 256, "/tmp/levee-test-XXXXXX");
  T_REQUIRE(mkdtemp(out) != NULL);
}

static void remove_folder(const char *folder) {
  char command[400];
  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  T_EXPECT(system(command) == 0);
}

static bool exists(const char *folder, const char *name) {
  char path[512];
  struct stat st;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return stat(path, &st) == 0;
}

T_TEST(checkpoint_round_trip_and_retention) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    scene sc = {.ranks = ranks, .save = {10, 20, 30, 0}, .want_step = 30};
    fresh_folder(sc.folder);
    play(&sc);
    T_EXPECT(exists(sc.folder, "step-00000030") && exists(sc.folder, "step-00000020"));
    T_EXPECT(!exists(sc.folder, "step-00000010"));
    remove_folder(sc.folder);
  }
}

T_TEST(checkpoint_empty_folder_is_a_fresh_start) {
  scene sc = {.ranks = 2, .want_step = 0};
  fresh_folder(sc.folder);
  play(&sc);
  remove_folder(sc.folder);
}

/* Saved by any number of ranks, read by any other, bit for bit; saved again by these, and read by the first. */
T_TEST(checkpoint_other_layouts) {
  for (int writers = 1; writers <= 4; ++writers)
    for (int readers = 1; readers <= 4; ++readers) {
      scene sc = {.ranks = writers, .save = {10, 0}, .want_step = 10};
      fresh_folder(sc.folder);
      play(&sc);
      sc.ranks = readers, sc.save[0] = 0;
      play(&sc);
      sc.save[0] = 11, sc.want_step = 11;
      play(&sc);
      sc.ranks = writers, sc.save[0] = 0;
      play(&sc);
      remove_folder(sc.folder);
    }
}

/* Flips, cuts or removes something in the newest checkpoint; the one before must be taken, also by another layout. */
T_TEST(checkpoint_damage_falls_back) {
  const char *damage[] = {
      "printf '\\001' | dd of=%s/step-00000020/shard-00002.safetensors bs=1 seek=200 conv=notrunc 2>/dev/null",
      "printf '\\377' | dd of=%s/step-00000020/shard-00001.safetensors bs=1 seek=3 conv=notrunc 2>/dev/null",
      "truncate -s -1 %s/step-00000020/shard-00001.safetensors",
      "rm %s/step-00000020/shard-00002.safetensors",
      "rm %s/step-00000020/manifest.json",
      "sed -i 's/\"digest\": \"d1/\"digest\": \"d7/' %s/step-00000020/manifest.json",
      "sed -i 's/\"ranks\": 2/\"ranks\": 3/' %s/step-00000020/manifest.json",
      "echo '{' > %s/step-00000020/manifest.json",
      ": > %s/step-00000020/shard-00001.safetensors"};
  for (size_t i = 0; i < sizeof damage / sizeof *damage; ++i) {
    char command[600];
    scene sc = {.ranks = 2, .save = {10, 20, 0}, .want_step = 20};
    fresh_folder(sc.folder);
    play(&sc);
    snprintf(command, sizeof command, damage[i], sc.folder); /* NOLINT */
    T_EXPECT(system(command) == 0);
    sc.save[0] = 0, sc.want_step = 10;
    play(&sc);
    remove_folder(sc.folder);
  }
}

T_TEST(checkpoint_damage_is_seen_by_other_layouts) {
  static const char *const shards[] = {"shard-00001", "shard-00002", "shard-00003"};
  for (size_t i = 0; i < sizeof shards / sizeof *shards; ++i)
    for (int readers = 1; readers <= 4; ++readers) {
      char command[600];
      scene sc = {.ranks = 3, .save = {10, 20, 0}, .want_step = 20};
      fresh_folder(sc.folder);
      play(&sc);
      snprintf(command, sizeof command,
               "printf X | dd of=%s/step-00000020/%s.safetensors bs=1 seek=9 conv=notrunc 2>/dev/null", sc.folder,
               shards[i]);
      T_EXPECT(system(command) == 0);
      sc.ranks = readers, sc.save[0] = 0, sc.want_step = 10;
      play(&sc);
      remove_folder(sc.folder);
    }
}

/* Whether a checkpoint of this step is there, and whole. */
static void expect_whole(const scene *base, int64_t step) {
  scene sc = {.ranks = base->ranks, .want_step = step};
  char command[800];
  fresh_folder(sc.folder);
  snprintf(command, sizeof command, "cp -r %s/step-%08d %s/", base->folder, (int)step, sc.folder);
  if (T_EXPECT_MSG(system(command) == 0, "no checkpoint of step %d", (int)step)) play(&sc);
  remove_folder(sc.folder);
}

/* A damaged checkpoint does not count as one of the newest: two whole ones are kept, whether the run goes on to steps
 * before it, to its own step or past it. */
T_TEST(checkpoint_damaged_does_not_count_as_kept) {
  static const int64_t next[][3] = {{12, 14, 0}, {20, 0, 0}, {16, 24, 0}, {24, 0, 0}};
  for (size_t i = 0; i < sizeof next / sizeof *next; ++i) {
    char command[600];
    scene sc = {.ranks = 2, .save = {10, 20, 0}, .want_step = 20};
    fresh_folder(sc.folder);
    play(&sc);
    snprintf(command, sizeof command, "truncate -s -1 %s/step-00000020/shard-00001.safetensors", sc.folder);
    T_EXPECT(system(command) == 0);
    sc.save[0] = 0, sc.want_step = 10;
    play(&sc);
    T_EXPECT(exists(sc.folder, "step-00000020.damaged/manifest.json")); /* nothing is lost */
    int64_t last = 0, before = 10;
    for (int k = 0; (sc.save[k] = next[i][k]) > 0; ++k) before = k > 0 ? last : before, last = next[i][k];
    sc.want_step = last;
    play(&sc);
    expect_whole(&sc, last);
    expect_whole(&sc, before);
    remove_folder(sc.folder);
  }
}

/* One that could not be set aside still neither counts nor costs the one just saved. */
T_TEST(checkpoint_later_than_the_saved_one_does_not_count) {
  char command[600];
  scene sc = {.ranks = 1, .save = {20, 21, 22, 0}, .want_step = 22};
  fresh_folder(sc.folder);
  play(&sc);
  snprintf(command, sizeof command, "rm %s/step-0000002[12]/manifest.json", sc.folder);
  T_EXPECT(system(command) == 0);
  sc.save[0] = 5, sc.save[1] = 6, sc.save[2] = 7, sc.save[3] = 0, sc.want_step = 7;
  play(&sc);
  T_EXPECT(exists(sc.folder, "step-00000006") && exists(sc.folder, "step-00000007"));
  T_EXPECT(!exists(sc.folder, "step-00000005"));
  remove_folder(sc.folder);
}

T_TEST(checkpoint_none_whole_is_an_error) {
  char command[600];
  scene sc = {.ranks = 2, .save = {10, 0}, .want_step = 10};
  fresh_folder(sc.folder);
  play(&sc);
  snprintf(command, sizeof command, "rm %s/step-00000010/manifest.json", sc.folder);
  T_EXPECT(system(command) == 0);
  sc.save[0] = 0, sc.want_step = 0, sc.want_load = LEV_ERR_FORMAT;
  play(&sc);
  remove_folder(sc.folder);
}

T_TEST(checkpoint_of_another_run_is_refused) {
  scene sc = {.ranks = 2, .save = {10, 0}, .want_step = 10};
  fresh_folder(sc.folder);
  play(&sc);
  sc.save[0] = 0, sc.want_step = 0, sc.want_load = LEV_ERR_CONFIG, sc.digest = "d2";
  play(&sc);
  remove_folder(sc.folder);
}

/* Every file operation of a save fails in turn, on each rank: the load must give the old or the new step, whole. */
T_TEST(checkpoint_survives_every_failing_file_operation) {
  for (int rank = 0; rank < 2; ++rank)
    for (int64_t n = 1; n < 60; ++n) {
      scene sc = {.ranks = 2, .save = {10, 20, 0}, .fail_at = n, .fail_rank = rank, .want_step = -1};
      fresh_folder(sc.folder);
      play(&sc);
      T_EXPECT(!exists(sc.folder, "step-00000020.tmp"));
      T_EXPECT(exists(sc.folder, "step-00000010"));
      remove_folder(sc.folder);
      if (t_failed()) return;
      if (sc.file_ops < n) {
        T_EXPECT(n > 3);
        break;
      }
    }
}

T_TEST(checkpoint_stale_temporary_is_removed) {
  char command[600];
  scene sc = {.ranks = 1, .save = {10, 0}, .want_step = 10};
  fresh_folder(sc.folder);
  snprintf(command, sizeof command, "mkdir %s/step-00000005.tmp && touch %s/step-00000005.tmp/x", sc.folder, sc.folder);
  T_EXPECT(system(command) == 0);
  play(&sc);
  T_EXPECT(!exists(sc.folder, "step-00000005.tmp"));
  remove_folder(sc.folder);
}
