/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/checkpoint/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/hostmem.h"
#include "common/log.h"
#include "harness/checkpoint/safetensors.h"

#define MANIFEST_MAX ((size_t)64 << 20)
#define PATH_MAX_BYTES 1024
#define FORMAT_VERSION 2

/* What a rank tells the others about the file it wrote. */
typedef struct file_record {
  uint64_t bytes;
  char hash[40];
} file_record;

void lev_checkpoint_shard(const void *dir, int shard, char *out, size_t size) {
  snprintf(out, size, "%.900s/shard-%05d.safetensors", (const char *)dir, shard + 1);
}

/* ---- saving ---- */

static lev_status write_pieces(lev_file *file, const lev_state_piece *pieces, int n) {
  lev_safetensor *tensors = lev_calloc(LEV_HEAP_REPORT, (size_t)n + 1, sizeof *tensors);
  if (!tensors) return LEV_ERR_NOMEM;
  for (int i = 0; i < n; ++i) {
    lev_safetensor *t = &tensors[i];
    memcpy(t->name, pieces[i].name, sizeof t->name);
    t->dtype = pieces[i].dtype, t->n_dims = pieces[i].vector ? 1 : 2;
    t->dims[0] = pieces[i].rows, t->dims[1] = pieces[i].cols, t->offset[0] = pieces[i].first_row;
  }
  lev_status st = lev_safetensors_begin(file, tensors, n, true);
  for (int i = 0; i < n && st == LEV_OK; ++i) st = lev_file_write(file, pieces[i].data, lev_piece_bytes(&pieces[i]));
  lev_free(tensors);
  return st;
}

static lev_status write_shard(const lev_checkpoint *c, const char *dir, const lev_state_piece *pieces, int n,
                              file_record *record) {
  char path[PATH_MAX_BYTES];
  lev_file file;
  lev_checkpoint_shard(dir, lev_comm_rank(c->world), path, sizeof path);
  LEV_TRY(lev_file_create(&file, path, c->fault));
  lev_status st = write_pieces(&file, pieces, n);
  if (st == LEV_OK) {
    record->bytes = file.bytes;
    st = lev_file_commit(&file, record->hash);
  }
  if (st != LEV_OK) lev_file_discard(&file);
  return st;
}

/* Hash of all that a manifest says but this hash: what damage changed is no other run. */
static lev_status manifest_hash(const json_t *root, char *hex) {
  json_t *rest = json_copy((json_t *)root);
  if (rest) (void)json_object_del(rest, "xxh3_128");
  char *text = rest ? json_dumps(rest, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
  json_decref(rest);
  if (!text) return lev_fail(LEV_ERR_NOMEM, "no memory for the checkpoint manifest");
  lev_hash_text(text, hex);
  free(text);
  return LEV_OK;
}

static lev_status write_manifest(const lev_checkpoint *c, const char *dir, int64_t step, const file_record *records) {
  char path[PATH_MAX_BYTES];
  lev_file file;
  json_t *files = json_array();
  int ranks = lev_comm_size(c->world);
  for (int r = 0; r < ranks; ++r) {
    lev_checkpoint_shard(".", r, path, sizeof path);
    json_array_append_new(files, json_pack("{s:s, s:I, s:s}", "file", path + 2, "bytes", (json_int_t)records[r].bytes,
                                           "xxh3_128", records[r].hash));
  }
  json_t *root = json_pack("{s:i, s:I, s:i, s:s, s:s, s:o}", "version", FORMAT_VERSION, "step", (json_int_t)step,
                           "ranks", ranks, "layout", c->layout, "digest", c->digest, "files", files);
  char hash[40] = "";
  lev_status hashed = root ? manifest_hash(root, hash) : LEV_ERR_NOMEM;
  if (hashed == LEV_OK) json_object_set_new(root, "xxh3_128", json_string(hash));
  char *text = hashed == LEV_OK ? json_dumps(root, JSON_INDENT(1)) : NULL;
  json_decref(root);
  if (!text) return lev_fail(LEV_ERR_NOMEM, "no memory for the checkpoint manifest");
  snprintf(path, sizeof path, "%.900s/manifest.json", dir);
  lev_status st = lev_file_create(&file, path, c->fault);
  if (st == LEV_OK) {
    st = lev_file_write(&file, text, strlen(text));
    if (st == LEV_OK) st = lev_file_commit(&file, NULL);
    if (st != LEV_OK) lev_file_discard(&file);
  }
  free(text);
  return st;
}

/* ---- the folder ---- */

/* Steps of the committed checkpoints in the folder, newest first; a missing folder has none, one that cannot be read
 * is an error: the run would start over. */
static lev_status list_steps(const char *folder, int64_t **out, int *n) {
  *out = NULL, *n = 0;
  DIR *dir = opendir(folder);
  if (!dir && errno == ENOENT) return LEV_OK;
  if (!dir) return lev_fail(LEV_ERR_IO, "cannot read %s: %s", folder, strerror(errno));
  lev_status st = LEV_OK;
  for (struct dirent *e; (e = readdir(dir));) {
    char *end;
    if (strncmp(e->d_name, "step-", 5) != 0) continue;
    long long step = strtoll(e->d_name + 5, &end, 10);
    if (*end != '\0' || end == e->d_name + 5 || step <= 0) continue;
    int64_t *grown = lev_realloc(LEV_HEAP_REPORT, *out, (size_t)(*n + 1) * sizeof **out);
    if (!grown) {
      st = LEV_ERR_NOMEM;
      break;
    }
    *out = grown;
    int at = (*n)++;
    for (; at > 0 && grown[at - 1] < step; --at) grown[at] = grown[at - 1];
    grown[at] = step;
  }
  closedir(dir);
  return st;
}

static void step_dir(char *out, const char *folder, int64_t step, const char *suffix) {
  snprintf(out, PATH_MAX_BYTES, "%.850s/step-%08lld%s", folder, (long long)step, suffix);
}

/* Removes all but the newest `keep` up to the one just saved, and directories that a killed save left half-written.
 * Later ones were passed over when the run resumed, so they do not count. A failure is only logged. */
static void retire(const lev_checkpoint *c, int64_t saved) {
  int64_t *steps;
  int n, later = 0;
  char path[PATH_MAX_BYTES];
  if (list_steps(c->folder, &steps, &n) != LEV_OK) return;
  while (later < n && steps[later] > saved) ++later;
  for (int i = later + (int)c->keep; i < n; ++i) {
    step_dir(path, c->folder, steps[i], "");
    if (lev_remove_dir(path, c->fault) != LEV_OK)
      lev_log(LEV_LOG_WARN, LEV_SYS_IO, "old checkpoint stays: %s", lev_detail());
  }
  lev_free(steps);
  DIR *dir = opendir(c->folder);
  if (!dir) return;
  for (struct dirent *e; (e = readdir(dir));) {
    size_t length = strlen(e->d_name);
    if (strncmp(e->d_name, "step-", 5) != 0 || length < 4 || strcmp(e->d_name + length - 4, ".tmp") != 0) continue;
    snprintf(path, sizeof path, "%.700s/%.300s", c->folder, e->d_name);
    if (lev_remove_dir(path, NULL) != LEV_OK)
      lev_log(LEV_LOG_WARN, LEV_SYS_IO, "half-written checkpoint stays: %s", lev_detail());
  }
  closedir(dir);
}

/* Rank 0: manifest, then the rename that makes the checkpoint exist. */
static lev_status commit(const lev_checkpoint *c, const char *temporary, int64_t step, const file_record *records) {
  char final[PATH_MAX_BYTES];
  step_dir(final, c->folder, step, "");
  LEV_TRY(write_manifest(c, temporary, step, records));
  LEV_TRY(lev_sync_dir(temporary, c->fault));
  LEV_TRY(
      lev_replace_dir(temporary, final, c->fault)); /* the same step may be there, after a resume from an older one */
  return lev_sync_dir(c->folder, c->fault);
}

lev_status lev_checkpoint_save(const lev_checkpoint *c, int64_t step, const lev_state_piece *pieces, int n) {
  char temporary[PATH_MAX_BYTES];
  bool root = lev_comm_rank(c->world) == 0;
  file_record mine = {0};
  step_dir(temporary, c->folder, step, ".tmp");
  lev_status st = LEV_OK;
  if (root) {
    st = lev_remove_dir(temporary, c->fault);
    if (st == LEV_OK) st = lev_make_dir(temporary, c->fault);
  }
  st = lev_comm_agree(c->world, st);
  if (st == LEV_OK) st = lev_comm_agree(c->world, write_shard(c, temporary, pieces, n, &mine));
  file_record *records = lev_calloc(LEV_HEAP_REPORT, (size_t)lev_comm_size(c->world), sizeof *records);
  if (st == LEV_OK) st = lev_comm_agree(c->world, records ? LEV_OK : LEV_ERR_NOMEM);
  if (st == LEV_OK) st = lev_comm_host_all_gather(c->world, &mine, records, sizeof mine);
  if (st == LEV_OK) st = lev_comm_agree(c->world, root ? commit(c, temporary, step, records) : LEV_OK);
  lev_free(records);
  if (root && st == LEV_OK) retire(c, step);
  if (root && st != LEV_OK) {
    lev_status cleaned = lev_remove_dir(temporary, NULL);
    if (cleaned != LEV_OK) lev_log(LEV_LOG_WARN, LEV_SYS_IO, "%s", lev_detail());
  }
  return st;
}

/* ---- starting over ---- */

static lev_status set_aside(const lev_checkpoint *c) {
  int64_t *steps;
  int n;
  char aside[PATH_MAX_BYTES];
  LEV_TRY(list_steps(c->folder, &steps, &n));
  lev_free(steps);
  if (n == 0) return LEV_OK;
  for (int i = 1;; ++i) {
    snprintf(aside, sizeof aside, "%.900s.%d", c->folder, i);
    if (access(aside, F_OK) != 0) break;
  }
  lev_log(LEV_LOG_WARN, LEV_SYS_IO, "starting over: earlier checkpoints are now in %s", aside);
  return lev_rename(c->folder, aside, c->fault);
}

lev_status lev_checkpoint_set_aside(const lev_checkpoint *c) {
  return lev_comm_agree(c->world, lev_comm_rank(c->world) == 0 ? set_aside(c) : LEV_OK);
}

/* ---- loading ---- */

/* What the manifest of a checkpoint says. */
typedef struct manifest {
  json_t *root; /* owns the texts */
  const char *layout;
  json_t *files;
} manifest;

/* step 0: any; without c->digest: of any run. */
static lev_status read_manifest(const lev_checkpoint *c, const char *dir, int64_t step, manifest *out) {
  char path[PATH_MAX_BYTES], hash[40], *text;
  json_error_t error;
  json_int_t found = 0;
  const char *digest;
  int version = 0, ranks;
  snprintf(path, sizeof path, "%.900s/manifest.json", dir);
  LEV_TRY(lev_read_text(path, MANIFEST_MAX, c->fault, &text));
  out->root = json_loads(text, JSON_REJECT_DUPLICATES, &error);
  lev_free(text);
  if (!out->root) return lev_fail(LEV_ERR_FORMAT, "%s: %s", path, error.text);
  if (json_unpack(out->root, "{s:i, s:I}", "version", &version, "step", &found) == 0 && version < FORMAT_VERSION)
    return lev_fail(LEV_ERR_CONFIG, "%s is of an older release; start over with --checkpoint.resume=false", dir);
  if (json_unpack(out->root, "{s:i, s:s, s:s, s:o}", "ranks", &ranks, "layout", &out->layout, "digest", &digest,
                  "files", &out->files) != 0 ||
      version != FORMAT_VERSION || (step > 0 && found != step) || ranks < 1 ||
      json_array_size(out->files) != (size_t)ranks)
    return lev_fail(LEV_ERR_FORMAT, "%s is not a manifest of this step", path);
  LEV_TRY(manifest_hash(out->root, hash));
  const char *told = json_string_value(json_object_get(out->root, "xxh3_128"));
  if (!told || strcmp(told, hash) != 0) return lev_fail(LEV_ERR_FORMAT, "%s: its hash differs from what it says", path);
  if (c->digest && strcmp(digest, c->digest) != 0)
    return lev_fail(LEV_ERR_CONFIG,
                    "%s belongs to a run of another model, optimizer, seed, context, batch or kind of data; to start "
                    "another run from its weights: --checkpoint.initial_load_path=%s and another run.folder",
                    dir, dir);
  return LEV_OK;
}

/* A file is the one that the manifest names, byte for byte. */
static lev_status verify_shard(const lev_checkpoint *c, const char *dir, const manifest *m, int shard) {
  json_int_t bytes;
  const char *hash;
  char path[PATH_MAX_BYTES], found_hash[40];
  uint64_t found;
  lev_checkpoint_shard(dir, shard, path, sizeof path);
  if (json_unpack(json_array_get(m->files, (size_t)shard), "{s:I, s:s}", "bytes", &bytes, "xxh3_128", &hash) != 0)
    return lev_fail(LEV_ERR_FORMAT, "manifest of %s lacks this file", path);
  LEV_TRY(lev_hash_file(path, c->fault, &found, found_hash));
  if (found != (uint64_t)bytes || strcmp(found_hash, hash) != 0)
    return lev_fail(LEV_ERR_FORMAT, "%s: size or hash differs from the manifest", path);
  return LEV_OK;
}

/* Out of the list, so that it neither counts as one of those kept nor is tried again. Nothing is deleted: it may only
 * have been unreadable for a while. A failure is only logged. */
static void set_damaged_aside(const lev_checkpoint *c, int64_t step) {
  char from[PATH_MAX_BYTES], to[PATH_MAX_BYTES];
  step_dir(from, c->folder, step, "");
  step_dir(to, c->folder, step, ".damaged");
  lev_status st = lev_remove_dir(to, c->fault); /* of the same step, damaged earlier */
  if (st == LEV_OK) st = lev_rename(from, to, c->fault);
  if (st != LEV_OK) lev_log(LEV_LOG_WARN, LEV_SYS_IO, "damaged checkpoint keeps its name: %s", lev_detail());
}

/* Reads the manifest and checks that all files are whole, before any rank overwrites its state. Collective. */
static lev_status open_step(const lev_checkpoint *c, const char *dir, int64_t step, manifest *m) {
  int rank = lev_comm_rank(c->world), ranks = lev_comm_size(c->world);
  lev_status st = read_manifest(c, dir, step, m);
  for (int i = rank; st == LEV_OK && i < (int)json_array_size(m->files); i += ranks) st = verify_shard(c, dir, m, i);
  return lev_comm_agree(c->world, st);
}

static lev_status load_step(const lev_checkpoint *c, int64_t step, const lev_state_piece *pieces, int n) {
  char dir[PATH_MAX_BYTES];
  manifest m = {0};
  int rank = lev_comm_rank(c->world);
  step_dir(dir, c->folder, step, "");
  lev_piece_files from = {.where = dir, .path = lev_checkpoint_shard, .ctx = dir, .fault = c->fault};
  lev_status st = open_step(c, dir, step, &m);
  if (st == LEV_OK && m.layout && strcmp(m.layout, c->layout) == 0) {
    from.begin = rank, from.end = rank + 1;
  } else if (st == LEV_OK) {
    from.end = (int)json_array_size(m.files);
    if (rank == 0)
      lev_log(LEV_LOG_WARN, LEV_SYS_IO,
              "checkpoint of step %lld was written by %s, this run has %s: sums differ in their last bits from here on",
              (long long)step, m.layout, c->layout);
  }
  json_decref(m.root);
  return st == LEV_OK ? lev_comm_agree(c->world, lev_pieces_read(&from, pieces, n)) : st;
}

lev_status lev_checkpoint_weights(const char *dir, lev_comm *world, lev_fault *fault, const lev_state_piece *pieces,
                                  int n) {
  lev_checkpoint any = {.world = world, .fault = fault};
  manifest m = {0};
  lev_piece_files from = {.where = dir, .path = lev_checkpoint_shard, .ctx = dir, .fault = fault};
  lev_status st = open_step(&any, dir, 0, &m);
  if (st == LEV_OK) from.end = (int)json_array_size(m.files);
  json_decref(m.root);
  return st == LEV_OK ? lev_pieces_read_whole(&from, LEV_STATE_MASTER, world, pieces, n) : st;
}

lev_status lev_checkpoint_load(const lev_checkpoint *c, int64_t *step, const lev_state_piece *pieces, int n) {
  int64_t *steps = NULL, *all = NULL;
  int n_steps = 0, n_passed = 0;
  lev_status st = LEV_OK;
  *step = 0;
  if (lev_comm_rank(c->world) == 0) st = list_steps(c->folder, &steps, &n_steps);
  if (st == LEV_OK) {
    all = lev_calloc(LEV_HEAP_REPORT, (size_t)lev_comm_size(c->world), sizeof *all);
    st = all ? LEV_OK : LEV_ERR_NOMEM;
  }
  st = lev_comm_agree(c->world, st);
  bool trying = st == LEV_OK && all;
  for (int i = 0; trying; ++i) { /* rank 0's list decides, so that all ranks try the same ones */
    int64_t candidate = i < n_steps ? steps[i] : 0;
    st = lev_comm_host_all_gather(c->world, &candidate, all, sizeof candidate);
    if (st == LEV_OK && all[0] == 0 && i > 0)
      st = lev_fail(LEV_ERR_FORMAT,
                    "none of the %d checkpoints in %s is whole; move them away, or start over with "
                    "--checkpoint.resume=false",
                    i, c->folder);
    if (st != LEV_OK || all[0] == 0) break; /* the end of the list: nothing to resume, or nothing whole */
    st = load_step(c, all[0], pieces, n);
    if (st == LEV_OK) *step = all[0];
    trying = st == LEV_ERR_IO || st == LEV_ERR_FORMAT;
    if (trying && lev_comm_rank(c->world) == 0) { /* all ranks have the same detail */
      lev_log(LEV_LOG_WARN, LEV_SYS_IO, "checkpoint of step %lld passed over: %s", (long long)all[0], lev_detail());
      ++n_passed;
    }
  }
  for (int i = 0; i < n_passed && st == LEV_OK; ++i) set_damaged_aside(c, steps[i]); /* there is a whole one */
  lev_free(steps);
  lev_free(all);
  return st;
}

lev_status lev_checkpoint_find(const char *folder, char *dir, size_t size, int *files) {
  char path[PATH_MAX_BYTES];
  lev_checkpoint any = {0};
  manifest m = {0};
  snprintf(path, sizeof path, "%.900s/manifest.json", folder);
  if (access(path, F_OK) == 0) {
    snprintf(path, sizeof path, "%.1000s", folder);
  } else {
    int64_t *steps;
    int n;
    LEV_TRY(list_steps(folder, &steps, &n));
    if (n > 0) step_dir(path, folder, steps[0], "");
    lev_free(steps);
    if (n == 0) return lev_fail(LEV_ERR_CONFIG, "%s is no checkpoint (step-N) and has none", folder);
  }
  snprintf(dir, size, "%s", path);
  lev_status st = read_manifest(&any, dir, 0, &m);
  *files = st == LEV_OK ? (int)json_array_size(m.files) : 0;
  for (int i = 0; i < *files && st == LEV_OK; ++i) st = verify_shard(&any, dir, &m, i);
  json_decref(m.root);
  return st;
}
