/* SPDX-License-Identifier: Apache-2.0 */
/* memory.json and the tables, from ledgers filled by hand. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "harness/report/memory_report.h"
#include "tests/t.h"

/* A step of two phases. `extra` more bytes of llep.recv, and a tag of its own where `rogue`. */
static lev_ledger *ledger_of(size_t extra, bool rogue) {
  lev_ledger *l = NULL;
  T_EXPECT_OK(lev_ledger_create(NULL, &l));
  if (!l) return NULL;
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "weights.shard", 4096));
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_PINNED, "sco.boundary", 2048));
  lev_ledger_phase(l, "forward", 0);
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "llep.send", 512));
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "llep.recv", 1024 + extra));
  T_EXPECT_OK(lev_ledger_sub(l, LEV_MEM_DEVICE, "llep.send", 512));
  T_EXPECT_OK(lev_ledger_sub(l, LEV_MEM_DEVICE, "llep.recv", 1024 + extra));
  lev_ledger_phase(l, "loss", -1);
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "rdtp.tile", 256));
  T_EXPECT_OK(lev_ledger_sub(l, LEV_MEM_DEVICE, "rdtp.tile", 256));
  if (rogue) T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_HOST, "stray.bytes", 77));
  return l;
}

static json_t *parsed(const lev_memory_report *report) {
  char *text = lev_memory_json(report);
  json_t *root = text ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;
  free(text);
  return root;
}

/* Member by path "per_rank/0/device/planned_bytes"; -1 where missing. */
static int64_t number(const json_t *at, const char *path) {
  char part[64];
  for (; *path && at; path += path[0] == '/') {
    size_t n = strcspn(path, "/");
    snprintf(part, sizeof part, "%.*s", (int)n, path);
    at = json_is_array(at) ? json_array_get(at, (size_t)atoi(part)) : json_object_get(at, part);
    path += n;
  }
  return json_is_integer(at) ? (int64_t)json_integer_value(at) : -1;
}

T_TEST(memory_json_of_a_plan) {
  lev_ledger *l = ledger_of(0, false);
  T_REQUIRE(l != NULL);
  lev_memory_rank rank = {.rank = 3, .planned = l};
  lev_memory_report report = {.ranks = 8, .rank = &rank, .n = 1};
  json_t *root = parsed(&report);
  T_EXPECT_EQ_I64(number(root, "ranks"), 8);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/rank"), 3);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/device/planned_bytes"), 4096 + 512 + 1024);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/device/tags/llep.recv/planned_bytes"), 1024);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/pinned/tags/sco.boundary/planned_bytes"), 2048);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/host/planned_bytes"), 0);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/device/peak_bytes"), -1); /* none in a plan */
  T_EXPECT_EQ_I64(number(root, "per_rank/0/device/tags/llep.recv/peak_bytes"), -1);
  json_decref(root);
  lev_ledger_destroy(l);
}

T_TEST(memory_json_of_a_run_hides_nothing) {
  lev_ledger *plan = ledger_of(0, false), *run = ledger_of(64, true);
  T_REQUIRE(plan && run);
  lev_memory_rank ranks[2] = {{.rank = 0, .planned = plan, .measured = run},
                              {.rank = 1, .planned = plan, .measured = plan}};
  lev_memory_report report = {.ranks = 2, .rank = ranks, .n = 2, .heap_cap = 1000};
  json_t *root = parsed(&report);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/device/planned_bytes"), 5632);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/device/peak_bytes"), 5696);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/device/tags/llep.recv/peak_bytes"), 1088);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/host/tags/stray.bytes/planned_bytes"), 0);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/host/tags/stray.bytes/peak_bytes"), 77);
  T_EXPECT_EQ_I64(number(root, "per_rank/1/device/peak_bytes"), 5632);
  T_EXPECT_EQ_I64(number(root, "heap/cap_bytes"), 1000);
  T_EXPECT(number(root, "heap/peak_bytes") > 0);
  json_decref(root);
  lev_ledger_destroy(plan);
  lev_ledger_destroy(run);
}

T_TEST(memory_limits) {
  lev_ledger *l = ledger_of(0, false);
  T_REQUIRE(l != NULL);
  lev_memory_rank rank = {.rank = 0, .planned = l};
  lev_memory_report report = {.ranks = 1, .rank = &rank, .n = 1};
  size_t device, host;
  T_EXPECT(lev_memory_excess(&report, &device, &host) == 0);
  report.device_memory = 5632, report.host_memory = 2048;
  T_EXPECT(lev_memory_excess(&report, &device, &host) == 0);
  report.device_memory = 5631;
  T_EXPECT(lev_memory_excess(&report, &device, &host) == 1 && device == 1 && host == 0);
  report.host_memory = 2000;
  T_EXPECT(lev_memory_excess(&report, &device, &host) == 49 && host == 48);
  json_t *root = parsed(&report);
  T_EXPECT_EQ_I64(number(root, "limits/device_excess_bytes"), 1);
  T_EXPECT_EQ_I64(number(root, "limits/host_excess_bytes"), 48);
  T_EXPECT_EQ_I64(number(root, "limits/device_memory_bytes"), 5631);
  T_EXPECT_EQ_I64(number(root, "limits/reserve_bytes"), 0);
  T_EXPECT_EQ_I64(number(root, "limits/host_memory_bytes"), 2000);
  json_decref(root);
  char text[160];
  T_EXPECT(strcmp(lev_memory_over_device(&report, 1, text), "1 B over memory.device_memory = 5.499 KiB") == 0);
  report.device_memory = 1024, report.device_reserve = 2048; /* a reserve that takes more than there is */
  T_EXPECT(lev_memory_excess(&report, &device, &host) == 6656 + 48 && device == 6656);
  T_EXPECT_MSG(strcmp(lev_memory_over_device(&report, device, text),
                      "6.500 KiB over memory.device_memory = 1.000 KiB with a reserve of 2.000 KiB") == 0,
               "%s", text);
  report.device_reserve = SIZE_MAX;
  root = parsed(&report);
  T_EXPECT(number(root, "limits/reserve_bytes") == INT64_MAX && number(root, "limits/device_excess_bytes") > INT32_MAX);
  json_decref(root);
  report.device_memory = SIZE_MAX; /* "unlimited" */
  root = parsed(&report);
  T_EXPECT(!json_object_get(json_object_get(root, "limits"), "device_memory_bytes"));
  T_EXPECT(!json_object_get(json_object_get(root, "limits"), "reserve_bytes"));
  T_EXPECT_EQ_I64(number(root, "limits/device_excess_bytes"), 0);
  T_EXPECT_EQ_I64(number(root, "limits/host_excess_bytes"), 48);
  json_decref(root);
  report.host_memory = 0;
  root = parsed(&report);
  T_EXPECT(!json_object_get(root, "limits"));
  json_decref(root);
  lev_ledger_destroy(l);
}

T_TEST(memory_file_replaces_the_old_one_whole) {
  char folder[] = "/tmp/levee-memory-XXXXXX", path[64];
  lev_ledger *l = ledger_of(0, false);
  T_REQUIRE(l && mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/memory.json", folder);
  lev_memory_rank rank = {.rank = 0, .planned = l, .measured = l};
  lev_memory_report report = {.ranks = 1, .rank = &rank, .n = 1};
  T_EXPECT_OK(lev_memory_write(&report, path));
  T_EXPECT_OK(lev_memory_write(&report, path));
  json_t *root = json_load_file(path, 0, NULL);
  T_EXPECT_EQ_I64(number(root, "per_rank/0/device/peak_bytes"), 5632);
  json_decref(root);
  unlink(path);
  T_EXPECT(mkdir(path, 0700) == 0); /* a folder of this name cannot be replaced */
  T_EXPECT_STATUS(lev_memory_write(&report, path), LEV_ERR_IO);
  rmdir(path);
  T_EXPECT(rmdir(folder) == 0); /* nothing else was left behind */
  T_EXPECT_STATUS(lev_memory_write(&report, path), LEV_ERR_IO);
  lev_ledger_destroy(l);
}

T_TEST(memory_tables) {
  lev_ledger *plan = ledger_of(0, false), *run = ledger_of(0, false);
  T_REQUIRE(plan && run);
  lev_memory_rank rank = {.rank = 0, .planned = plan, .measured = run};
  lev_memory_report report = {.ranks = 1, .rank = &rank, .n = 1};
  size_t plain[LEV_MODULES] = {3072, 512, 0, 0, SIZE_MAX}, bytes = 0;
  T_EXPECT(lev_module_device_bytes(&report, 0, false) == 1536 && lev_module_device_bytes(&report, 1, true) == 256);
  char *text = NULL;
  FILE *out = open_memstream(&text, &bytes);
  T_REQUIRE(out != NULL);
  lev_memory_table(&report, out);
  lev_module_table(&report, plain, out);
  fclose(out);
  T_EXPECT(strstr(text, "weights.shard") && strstr(text, "4.000 KiB") && strstr(text, "peak in forward"));
  T_EXPECT(strstr(text, "pipelined_llep") && strstr(text, "saves 50.0 %") && strstr(text, "not live at the peak"));
  free(text);
  lev_ledger_destroy(plan);
  lev_ledger_destroy(run);
}

T_TEST(memory_exact_names_what_is_not_as_planned) {
  lev_ledger *plan = ledger_of(0, false), *more = ledger_of(8192, true), *less = NULL;
  T_REQUIRE(plan && more && lev_ledger_create(NULL, &less) == LEV_OK);
  T_EXPECT_OK(
      lev_ledger_add(less, LEV_MEM_DEVICE, "weights.shard", 5632)); /* the class's peak is right, tags are not */
  T_EXPECT_OK(lev_ledger_add(less, LEV_MEM_PINNED, "sco.boundary", 2048));
  lev_memory_rank ranks[3] = {{.rank = 0, .planned = plan, .measured = plan},
                              {.rank = 1, .planned = plan, .measured = more},
                              {.rank = 2, .planned = plan, .measured = less}};
  lev_memory_report report = {.ranks = 3, .rank = ranks, .n = 3};
  char *text = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&text, &bytes);
  T_REQUIRE(out != NULL);
  int exact = lev_memory_exact(&report, out);
  fclose(out);
  T_EXPECT_EQ_I64(exact, 9 - 3);
  T_EXPECT_MSG(
      strcmp(text, "rank 1, device: planned 5.500 KiB, measured 13.50 KiB; 1 tag not as planned: llep.recv 1.000 KiB, "
                   "measured 9.000 KiB\n"
                   "rank 1, host: planned 0 B, measured 77 B; 1 tag not as planned: stray.bytes 0 B, measured 77 B\n"
                   "rank 2, device: planned 5.500 KiB, measured 5.500 KiB; 4 tags not as planned: weights.shard "
                   "4.000 KiB, measured 5.500 KiB\n") == 0,
      "%s", text);
  free(text);
  lev_ledger_destroy(plan);
  lev_ledger_destroy(more);
  lev_ledger_destroy(less);
}

T_TEST(memory_byte_texts) {
  static const struct {
    size_t bytes;
    const char *text;
  } cases[] = {{0, "0 B"},
               {1023, "1023 B"},
               {1024, "1.000 KiB"},
               {1536, "1.500 KiB"},
               {(size_t)64 << 30, "64.00 GiB"},
               {(size_t)139 << 30, "139.0 GiB"}};
  char text[24];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i)
    T_EXPECT_MSG(strcmp(lev_bytes_text(cases[i].bytes, text), cases[i].text) == 0, "%zu gives %s", cases[i].bytes,
                 text);
}
