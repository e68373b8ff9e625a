/* SPDX-License-Identifier: Apache-2.0 */
/* Traces read back: numbers against the ledger that was traced, the page, the table, damaged files. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/ledger.h"
#include "common/rng.h"
#include "harness/report/memory_report.h"
#include "harness/report/timeline.h"
#include "harness/report/trace_report.h"
#include "harness/report/trace_samples.h"
#include "tests/t.h"

/* A tag that tries to leave the HTML attribute, the element and the script it is written into. */
#define NASTY "evil.</script><b a=\"x\" c='y'>&amp;\\"

/* ---- a run folder ---- */

typedef struct folder {
  char path[64];
} folder;

static folder make_folder(void) {
  folder f;
  snprintf(f.path, sizeof f.path, "/tmp/levee-trace-XXXXXX");
  T_EXPECT(mkdtemp(f.path) != NULL);
  return f;
}

static char *in_folder(const folder *f, const char *name) {
  static char path[128];
  snprintf(path, sizeof path, "%s/%s", f->path, name);
  return path;
}

static void put_bytes(const folder *f, const char *name, const void *bytes, size_t n) {
  FILE *file = fopen(in_folder(f, name), "w");
  T_REQUIRE(file != NULL);
  T_EXPECT(fwrite(bytes, 1, n, file) == n);
  fclose(file);
}

static void put(const folder *f, const char *name, const char *text) {
  put_bytes(f, name, text, strlen(text));
}

/* Whole file; free() it. */
static char *get(const char *path) {
  FILE *file = fopen(path, "r");
  if (!T_EXPECT_MSG(file != NULL, "cannot read %s", path)) return calloc(1, 1);
  size_t n = 0, room = 1 << 16;
  char *text = malloc(room);
  for (size_t got; (got = fread(text + n, 1, room - n - 1, file)) > 0;)
    if ((n += got) + 1 == room) text = realloc(text, room *= 2);
  text[n] = '\0';
  fclose(file);
  return text;
}

static void remove_folder(const folder *f) {
  static const char *const names[] = {"trace.rank0.jsonl", "trace.rank1.jsonl", "memory.json", "trace.html"};
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i) unlink(in_folder(f, names[i]));
  T_EXPECT_MSG(rmdir(f->path) == 0, "%s holds files that nobody asked for", f->path);
}

/* ---- a run ---- */

typedef struct traced_tag {
  lev_mem cls;
  const char *name;
} traced_tag;
static const traced_tag tags[] = {{LEV_MEM_DEVICE, "weights"},   {LEV_MEM_DEVICE, "llep.send"},
                                  {LEV_MEM_DEVICE, "rdtp.tile"}, {LEV_MEM_DEVICE, NASTY},
                                  {LEV_MEM_PINNED, "sco.slab"},  {LEV_MEM_PINNED, "oadamw.state"},
                                  {LEV_MEM_HOST, "oadamw.norms"}};
enum { TAGS = sizeof tags / sizeof *tags };

/* Random allocations and frees in phases; the ledger is the oracle of everything read back. */
static lev_ledger *make_run(const folder *f, int rank, int changes, size_t spike) {
  lev_trace *trace = NULL;
  lev_ledger *ledger = NULL;
  size_t live[TAGS] = {0};
  uint64_t state = t_seed() + 77 + (uint64_t)rank;
  if (lev_trace_create(4 * changes + 64, &trace) != LEV_OK || lev_ledger_create(trace, &ledger) != LEV_OK) return NULL;
  T_EXPECT_OK(lev_ledger_add(ledger, LEV_MEM_DEVICE, "weights", 5000));
  live[0] = 5000;
  for (int i = 0; i < changes; ++i) {
    if (i % 9 == 0)
      lev_ledger_phase(ledger,
                       i % 27 == 0   ? "forward"
                       : i % 27 == 9 ? "backward"
                                     : "loss",
                       i % 27 == 18 ? -1 : i / 27 % 5);
    state = state * 6364136223846793005u + 1442695040888963407u;
    int k = 1 + (int)((state >> 33) % (TAGS - 1));
    size_t bytes = (size_t)(state >> 40) % 4096;
    lev_trace_add(trace, LEV_EV_COPY, 0, "copy", bytes);
    if (i == changes / 2 && spike > 0) {
      T_EXPECT_OK(lev_ledger_add(ledger, LEV_MEM_DEVICE, "rdtp.tile", spike));
      T_EXPECT_OK(lev_ledger_sub(ledger, LEV_MEM_DEVICE, "rdtp.tile", spike));
    }
    if (live[k] > 0) {
      T_EXPECT_OK(lev_ledger_sub(ledger, tags[k].cls, tags[k].name, live[k]));
      live[k] = 0;
    } else {
      T_EXPECT_OK(lev_ledger_add(ledger, tags[k].cls, tags[k].name, bytes));
      live[k] = bytes;
    }
  }
  char name[32];
  snprintf(name, sizeof name, "trace.rank%d.jsonl", rank);
  FILE *file = fopen(in_folder(f, name), "w");
  if (file) {
    T_EXPECT_OK(lev_trace_write(trace, file));
    fclose(file);
  }
  return ledger;
}

static void end_run(lev_ledger *ledger) {
  lev_trace *trace = lev_ledger_trace(ledger);
  lev_ledger_destroy(ledger);
  lev_trace_destroy(trace);
}

static void put_memory(const folder *f, lev_ledger *const *ledgers, int n) {
  lev_memory_rank ranks[2];
  for (int i = 0; i < n; ++i) ranks[i] = (lev_memory_rank){.rank = i, .planned = ledgers[i], .measured = ledgers[i]};
  T_EXPECT_OK(lev_memory_write(&(lev_memory_report){.ranks = n, .rank = ranks, .n = n}, in_folder(f, "memory.json")));
}

/* ---- numbers ---- */

static void check_against(const lev_timeline *t, const lev_ledger *ledger) {
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    size_t sum = 0;
    T_EXPECT_EQ_I64(t->classes[c].peak, lev_ledger_peak(ledger, (lev_mem)c));
    T_EXPECT_EQ_I64(t->classes[c].planned, lev_ledger_peak(ledger, (lev_mem)c));
    const char *phase = lev_timeline_peak_phase(t, (lev_mem)c)->name;
    T_EXPECT_MSG(strcmp(phase, lev_ledger_peak_phase(ledger, (lev_mem)c)) == 0, "class %d peaks in \"%s\", not \"%s\"",
                 c, lev_ledger_peak_phase(ledger, (lev_mem)c), phase);
    for (int k = 0; k < t->n_tags; ++k) sum += t->tags[k].cls == (lev_mem)c ? t->tags[k].at_peak : 0;
    T_EXPECT_EQ_I64(sum, t->classes[c].peak);
  }
  for (int i = 0; i < lev_ledger_count(ledger); ++i) {
    lev_ledger_row row = lev_ledger_at(ledger, i);
    int found = 0;
    for (int k = 0; k < t->n_tags; ++k) {
      if (t->tags[k].cls != row.cls || strcmp(t->tags[k].name, row.tag) != 0) continue;
      ++found;
      T_EXPECT_EQ_I64(t->tags[k].peak, row.peak);
      T_EXPECT_EQ_I64(t->tags[k].at_peak, row.at_peak);
      T_EXPECT_EQ_I64(t->tags[k].planned, row.peak);
    }
    T_EXPECT_EQ_I64(found, 1);
  }
  T_EXPECT_EQ_I64(t->n_tags, lev_ledger_count(ledger));
  T_EXPECT_EQ_I64(t->unmatched, 0);
}

T_TEST(trace_numbers_equal_the_ledger) {
  folder f = make_folder();
  lev_ledger *ledger = make_run(&f, 0, 300, 0);
  lev_timeline *t = NULL;
  put_memory(&f, &ledger, 1);
  if (T_EXPECT_OK(lev_timeline_read(f.path, 0, &t))) {
    check_against(t, ledger);
    T_EXPECT(t->has_plan && t->has_reported && t->ranks == 1);
  }
  lev_timeline_destroy(t);
  end_run(ledger);
  remove_folder(&f);
}

T_TEST(trace_picks_the_largest_rank) {
  folder f = make_folder();
  lev_ledger *ledgers[2] = {make_run(&f, 0, 100, 0), make_run(&f, 1, 100, 100000)};
  lev_timeline *t = NULL;
  put_memory(&f, ledgers, 2);
  if (T_EXPECT_OK(lev_timeline_read(f.path, -1, &t))) {
    T_EXPECT_EQ_I64(t->rank, 1);
    check_against(t, ledgers[1]);
  }
  lev_timeline_destroy(t);
  t = NULL;
  if (T_EXPECT_OK(lev_timeline_read(f.path, 0, &t))) check_against(t, ledgers[0]);
  lev_timeline_destroy(t);
  T_EXPECT_STATUS(lev_timeline_read(f.path, 2, &t), LEV_ERR_IO);
  end_run(ledgers[0]);
  end_run(ledgers[1]);
  remove_folder(&f);
}

/* Two changes of 20000 hold the peak: it must be among the few moments a page keeps. */
T_TEST(trace_samples_keep_the_peak) {
  folder f = make_folder();
  lev_ledger *ledger = make_run(&f, 0, 20000, 1000000);
  lev_timeline *t = NULL;
  lev_samples s = {0};
  put_memory(&f, &ledger, 1);
  if (T_EXPECT_OK(lev_timeline_read(f.path, 0, &t)) && T_EXPECT_OK(lev_samples_take(t, 50, &s))) {
    T_EXPECT_MSG(s.n <= 50 * 2 * (LEV_MEM_CLASSES + 1), "%lld moments of 50 stretches", (long long)s.n);
    for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
      size_t most = 0;
      for (int64_t j = 0; j < s.n; ++j) {
        size_t sum = 0;
        for (int k = 0; k < t->n_tags; ++k) sum += t->tags[k].cls == (lev_mem)c ? s.live[j * t->n_tags + k] : 0;
        most = sum > most ? sum : most;
      }
      T_EXPECT_EQ_I64(most, lev_ledger_peak(ledger, (lev_mem)c));
    }
    for (int64_t j = 1; j < s.n; ++j) T_EXPECT(s.change[j] > s.change[j - 1]);
  }
  lev_samples_free(&s);
  lev_timeline_destroy(t);
  end_run(ledger);
  remove_folder(&f);
}

/* ---- page and table ---- */

static size_t json_bytes(const json_t *object, const char *key) {
  json_t *value = json_object_get(object, key);
  T_EXPECT_MSG(json_is_integer(value), "no integer \"%s\"", key);
  return (size_t)json_integer_value(value);
}

/* The object in <script id="levee-trace">; json_decref it. */
static json_t *page_numbers(const char *page) {
  static const char open[] = "<script type=\"application/json\" id=\"levee-trace\">";
  const char *from = strstr(page, open), *to = from ? strstr(from, "</script>") : NULL;
  if (!T_EXPECT_MSG(from && to, "the page holds no numbers")) return NULL;
  from += sizeof open - 1;
  json_error_t error;
  json_t *root = json_loadb(from, (size_t)(to - from), 0, &error);
  T_EXPECT_MSG(root != NULL, "numbers of the page: %s", error.text);
  return root;
}

/* Numbers of section i. */
static json_t *page_rank(const char *page, size_t i) {
  json_t *root = page_numbers(page);
  json_t *rank = json_incref(json_array_get(json_object_get(root, "ranks"), i));
  T_EXPECT(rank != NULL);
  json_decref(root);
  return rank;
}

static void check_page(const char *page, size_t section, const lev_ledger *ledger) {
  json_t *root = page_rank(page, section);
  for (int i = 0; i < lev_ledger_count(ledger); ++i) {
    lev_ledger_row row = lev_ledger_at(ledger, i);
    json_t *cls = json_object_get(root, lev_mem_name(row.cls));
    json_t *tag = json_object_get(json_object_get(cls, "tags"), row.tag);
    T_EXPECT_EQ_I64(json_bytes(cls, "peak_bytes"), lev_ledger_peak(ledger, row.cls));
    T_EXPECT_EQ_I64(json_bytes(cls, "planned_bytes"), lev_ledger_peak(ledger, row.cls));
    T_EXPECT_EQ_I64(json_bytes(tag, "peak_bytes"), row.peak);
    T_EXPECT_EQ_I64(json_bytes(tag, "at_peak_bytes"), row.at_peak);
    T_EXPECT_EQ_I64(json_bytes(tag, "planned_bytes"), row.peak);
  }
  json_decref(root);
}

T_TEST(trace_page_numbers_and_escaping) {
  folder f = make_folder();
  lev_ledger *ledger = make_run(&f, 0, 300, 9000);
  lev_timeline *t = NULL;
  put_memory(&f, &ledger, 1);
  if (T_EXPECT_OK(lev_timeline_read(f.path, 0, &t)) &&
      T_EXPECT_OK(
          lev_trace_page((const lev_timeline *const *)&t, 1, "<i>run</i> & \"more\"", in_folder(&f, "trace.html")))) {
    char *page = get(in_folder(&f, "trace.html"));
    check_page(page, 0, ledger);
    T_EXPECT(strstr(page, "<i>run") == NULL && strstr(page, "<b a=") == NULL);
    T_EXPECT(strstr(page, "evil.&lt;/script&gt;&lt;b a=&quot;x&quot;") != NULL);
    T_EXPECT(strstr(page, "http://") == NULL && strstr(page, "https://") == NULL && strstr(page, " src=") == NULL);
    T_EXPECT(strstr(page, "<svg") != NULL && strstr(page, "class=\"bound\"") != NULL);
    T_EXPECT(strstr(page, "nan") == NULL && strstr(page, "inf") == NULL);
    free(page);
  }
  T_EXPECT_STATUS(lev_trace_page((const lev_timeline *const *)&t, 1, "x", in_folder(&f, "none/trace.html")),
                  LEV_ERR_IO);
  T_EXPECT(strstr(lev_detail(), "none/trace.html") != NULL);
  lev_timeline_destroy(t);
  end_run(ledger);
  remove_folder(&f);
}

static int count_of(const char *text, const char *word) {
  int n = 0;
  for (; (text = strstr(text, word)) != NULL; text += strlen(word)) ++n;
  return n;
}

T_TEST(trace_page_of_two_ranks) {
  folder f = make_folder();
  lev_ledger *ledgers[2] = {make_run(&f, 0, 300, 0), make_run(&f, 1, 200, 70000)};
  lev_timeline *t[2] = {NULL};
  put_memory(&f, ledgers, 2);
  if (T_EXPECT_OK(lev_timeline_read(f.path, -1, &t[0])) && T_EXPECT_OK(lev_timeline_read(f.path, 0, &t[1])) &&
      T_EXPECT_OK(lev_trace_page((const lev_timeline *const *)t, 2, "x", in_folder(&f, "trace.html")))) {
    char *page = get(in_folder(&f, "trace.html"));
    check_page(page, 0, ledgers[1]);
    check_page(page, 1, ledgers[0]);
    T_EXPECT_EQ_I64(count_of(page, "<details class=\"rank\""), 2);
    T_EXPECT_EQ_I64(count_of(page, "data-rank=\"1\" open"), 1);
    T_EXPECT_EQ_I64(count_of(page, "data-rank=\"0\" open"), 0);
    free(page);
  }
  T_EXPECT_STATUS(lev_trace_page((const lev_timeline *const *)t, 0, "x", in_folder(&f, "no.html")), LEV_ERR_ARG);
  lev_timeline_destroy(t[0]);
  lev_timeline_destroy(t[1]);
  end_run(ledgers[0]);
  end_run(ledgers[1]);
  remove_folder(&f);
}

T_TEST(trace_page_without_plan) {
  folder f = make_folder();
  lev_ledger *ledger = make_run(&f, 0, 50, 0);
  lev_timeline *t = NULL;
  if (T_EXPECT_OK(lev_timeline_read(f.path, -1, &t)) &&
      T_EXPECT_OK(lev_trace_page((const lev_timeline *const *)&t, 1, "x", in_folder(&f, "trace.html")))) {
    char *page = get(in_folder(&f, "trace.html"));
    json_t *root = page_rank(page, 0), *device = json_object_get(root, "device");
    T_EXPECT(!t->has_plan && strstr(page, "class=\"bound\"") == NULL);
    T_EXPECT_EQ_I64(json_bytes(device, "peak_bytes"), lev_ledger_peak(ledger, LEV_MEM_DEVICE));
    T_EXPECT(json_object_get(device, "planned_bytes") == NULL);
    json_decref(root);
    free(page);
  }
  lev_timeline_destroy(t);
  end_run(ledger);
  remove_folder(&f);
}

static const char small_trace[] =
    "{\"t\":10,\"ev\":\"alloc\",\"class\":\"device\",\"name\":\"weights\",\"bytes\":1048576}\n"
    "{\"t\":20,\"ev\":\"phase\",\"name\":\"forward\",\"bytes\":0}\n"
    "{\"t\":30,\"ev\":\"alloc\",\"class\":\"device\",\"name\":\"llep.send\",\"bytes\":2097152}\n"
    "{\"t\":40,\"ev\":\"copy\",\"name\":\"x\",\"bytes\":7}\n"
    "{\"t\":50,\"ev\":\"free\",\"class\":\"device\",\"name\":\"llep.send\",\"bytes\":2097152}\n"
    "{\"t\":60,\"ev\":\"phase\",\"name\":\"loss\",\"bytes\":18446744073709551615}\n"
    "{\"t\":70,\"ev\":\"coll\",\"name\":\"all_reduce\",\"bytes\":9}\n"
    "{\"t\":80,\"ev\":\"alloc\",\"class\":\"pinned\",\"name\":\"sco.slab\",\"bytes\":4096}\n";

T_TEST(trace_table_text) {
  folder f = make_folder();
  lev_timeline *t = NULL;
  put(&f, "trace.rank0.jsonl", small_trace);
  if (T_EXPECT_OK(lev_timeline_read(f.path, 0, &t))) {
    T_EXPECT_EQ_I64(t->n_phases, 3);
    T_EXPECT_EQ_I64(t->phases[2].index, -1);
    T_EXPECT_EQ_I64(t->phases[1].copied, 7);
    T_EXPECT_EQ_I64(t->phases[2].sent, 9);
    T_EXPECT_EQ_I64(t->total_peak, 3145728);
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    T_EXPECT_OK(lev_trace_table(t, true, out));
    fclose(out);
    T_EXPECT_MSG(strstr(text, "forward 0") && strstr(text, "loss") && strstr(text, "3.000 MiB") &&
                     strstr(text, "3145728 bytes in forward 0") && strstr(text, "llep"),
                 "table:\n%s", text);
    free(text);
  }
  lev_timeline_destroy(t);
  remove_folder(&f);
}

/* ---- damaged files ---- */

static void expect_refused(const char *trace, const char *memory, const char *detail) {
  folder f = make_folder();
  lev_timeline *t = NULL;
  put(&f, "trace.rank0.jsonl", trace);
  if (memory) put(&f, "memory.json", memory);
  T_EXPECT_STATUS(lev_timeline_read(f.path, 0, &t), LEV_ERR_FORMAT);
  T_EXPECT_MSG(strstr(lev_detail(), detail) != NULL, "detail is \"%s\", expected \"%s\" in it", lev_detail(), detail);
  T_EXPECT(t == NULL);
  remove_folder(&f);
}

T_TEST(trace_refuses_damage) {
  expect_refused("", NULL, "no memory event");
  expect_refused("{\"t\":1,\"ev\":\"phase\",\"name\":\"loss\",\"bytes\":1}\n", NULL, "no memory event");
  expect_refused("nonsense\n", NULL, "trace.rank0.jsonl:1:");
  expect_refused("{\"t\":1,\"ev\":\"copy\",\"name\":\"a\",\"bytes\":1}\n{\"t\":1,\"ev\n", NULL, "jsonl:2:");
  expect_refused("[]\n", NULL, "jsonl:1:");
  expect_refused("{\"t\":1,\"ev\":\"alloc\",\"class\":\"moon\",\"name\":\"a\",\"bytes\":1}\n", NULL, "\"moon\"");
  expect_refused("{\"t\":1,\"ev\":\"alloc\",\"name\":\"a\",\"bytes\":1}\n", NULL, "memory class");
  expect_refused("{\"t\":1,\"ev\":\"alloc\",\"class\":\"host\",\"name\":\"a\",\"bytes\":\"1\"}\n", NULL, "\"bytes\"");
  expect_refused("{\"t\":1,\"ev\":\"alloc\",\"class\":\"host\",\"name\":7,\"bytes\":1}\n", NULL, "\"name\"");
  expect_refused(small_trace, "{\"ranks\": 2,", "memory.json:1:");
}

/* A run that was killed leaves half a line: what stands before it still counts. */
T_TEST(trace_cut_short_is_read) {
  folder f = make_folder();
  lev_timeline *t = NULL;
  for (size_t n = sizeof small_trace - 2; n > 90; n -= 7) {
    put_bytes(&f, "trace.rank0.jsonl", small_trace, n);
    if (!T_EXPECT_OK(lev_timeline_read(f.path, 0, &t))) break;
    T_EXPECT(t->classes[LEV_MEM_DEVICE].peak >= 1048576);
    lev_timeline_destroy(t);
    t = NULL;
  }
  remove_folder(&f);
}

/* What the run says it recorded, against what is there. */
T_TEST(trace_says_what_is_missing) {
  folder f = make_folder();
  lev_timeline *t = NULL;
  lev_ledger *ledger = make_run(&f, 0, 300, 0);
  int64_t events = lev_trace_count(lev_ledger_trace(ledger));
  char *whole = get(in_folder(&f, "trace.rank0.jsonl"));
  size_t length = strlen(whole), line = length - 1;
  while (whole[line - 1] != '\n') --line; /* where the last line begins */
  const struct {
    size_t bytes;
    int64_t dropped;
    lev_status want;
    const char *words;
  } cases[] = {{length, 0, LEV_OK, ""},
               {line, 0, LEV_ERR_FORMAT, "ends early"},
               {line + 5, 0, LEV_ERR_FORMAT, "last line is unfinished"},
               {length / 2, 7, LEV_ERR_FORMAT, "ends early"},
               {length, 7, LEV_ERR_CAPACITY, "7 more are missing"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    lev_memory_rank rank = {.planned = ledger, .measured = ledger, .trace_events = events};
    rank.trace_dropped = cases[i].dropped;
    put_bytes(&f, "trace.rank0.jsonl", whole, cases[i].bytes);
    T_EXPECT_OK(
        lev_memory_write(&(lev_memory_report){.ranks = 1, .rank = &rank, .n = 1}, in_folder(&f, "memory.json")));
    if (!T_EXPECT_OK(lev_timeline_read(f.path, 0, &t))) break;
    T_EXPECT_EQ_I64(t->recorded, events);
    T_EXPECT_STATUS(lev_timeline_whole(t), cases[i].want);
    if (cases[i].want != LEV_OK)
      T_EXPECT_MSG(strstr(lev_detail(), cases[i].words), "case %d: \"%s\"", (int)i, lev_detail());
    json_t *json = lev_trace_json(t, 10);
    T_EXPECT(json_is_true(json_object_get(json, "whole")) == (cases[i].want == LEV_OK));
    json_decref(json);
    T_EXPECT_OK(lev_trace_page((const lev_timeline *const *)&t, 1, "run", in_folder(&f, "trace.html")));
    char *page = get(in_folder(&f, "trace.html"));
    T_EXPECT((strstr(page, "Incomplete:") != NULL) == (cases[i].want != LEV_OK));
    free(page);
    lev_timeline_destroy(t);
    t = NULL;
  }
  free(whole);
  end_run(ledger);
  remove_folder(&f);
}

/* Values no run writes: read without a crash, and the page is still made. */
T_TEST(trace_strange_values) {
  static const char *const memories[] = {"[]", "[{}, null]", "{\"ranks\":\"x\",\"per_rank\":{}}",
                                         "{\"per_rank\":[7,{\"rank\":0,\"device\":[],\"host\":{\"tags\":3}}]}",
                                         "{\"per_rank\":[{\"rank\":0,\"device\":{\"planned_bytes\":-5}}]}"};
  static const char strange[] =
      "{\"t\":-9223372036854775807,\"ev\":\"free\",\"class\":\"device\",\"name\":\"never\",\"bytes\":5}\n"
      "{\"t\":9223372036854775807,\"ev\":\"alloc\",\"class\":\"device\",\"name\":\"\",\"bytes\":9223372036854775807}\n"
      "{\"t\":\"x\",\"ev\":\"alloc\",\"class\":\"device\",\"name\":\"b\",\"bytes\":9223372036854775807}\n"
      "{\"t\":0,\"ev\":\"alloc\",\"class\":\"device\",\"name\":\"c\",\"bytes\":9223372036854775807}\n"
      "{\"t\":0,\"ev\":\"alloc\",\"class\":\"host\",\"name\":\"d\",\"bytes\":-3}\n"
      "{\"t\":0,\"ev\":\"phase\",\"name\":\"p\",\"bytes\":-9223372036854775807}\n"
      "{\"t\":0,\"ev\":\"unheard\",\"name\":\"q\",\"bytes\":0}\n"
      "{\"t\":0,\"ev\":\"alloc\",\"class\":\"host\",\"name\":\""
      "\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4"
      "\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4"
      "\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\",\"bytes\":1234}\n";
  folder f = make_folder();
  put(&f, "trace.rank0.jsonl", strange);
  for (size_t i = 0; i < sizeof memories / sizeof *memories; ++i) {
    lev_timeline *t = NULL;
    put(&f, "memory.json", memories[i]);
    if (T_EXPECT_OK(lev_timeline_read(f.path, 0, &t))) {
      T_EXPECT_EQ_I64(t->unmatched, 1);
      T_EXPECT_OK(lev_trace_page((const lev_timeline *const *)&t, 1, "x", in_folder(&f, "trace.html")));
      char *page = get(in_folder(&f, "trace.html"));
      json_t *root = page_rank(page, 0), *tag;
      const char *name;
      size_t sum = 0;
      json_object_foreach(json_object_get(json_object_get(root, "host"), "tags"), name, tag) sum +=
          json_bytes(tag, "peak_bytes");
      T_EXPECT_EQ_I64(sum, 1234); /* the long name is cut between characters, not lost */
      json_decref(root);
      free(page);
    }
    lev_timeline_destroy(t);
  }
  remove_folder(&f);
}

/* Every one-byte damage of a trace is read or refused, never more. */
T_TEST(trace_any_byte_may_change) {
  folder f = make_folder();
  char copy[sizeof small_trace];
  int refused = 0;
  for (size_t i = 0; i < sizeof small_trace - 1 && !t_failed(); ++i)
    for (int b = 0; b < 3; ++b) {
      lev_timeline *t = NULL;
      memcpy(copy, small_trace, sizeof copy);
      copy[i] = "\0\"9"[b];
      put_bytes(&f, "trace.rank0.jsonl", copy, sizeof copy - 1);
      lev_status st = lev_timeline_read(f.path, 0, &t);
      T_EXPECT_MSG(st == LEV_OK || st == LEV_ERR_FORMAT, "byte %zu -> %d: %s", i, b, lev_status_text(st));
      T_EXPECT((st == LEV_OK) == (t != NULL));
      refused += st != LEV_OK;
      lev_timeline_destroy(t);
    }
  T_EXPECT_MSG(refused > 100, "%d damages were refused", refused);
  remove_folder(&f);
}
