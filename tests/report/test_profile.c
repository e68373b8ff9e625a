/* SPDX-License-Identifier: Apache-2.0 */
/* Overlap, totals and timeline of a profiled step. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/comm.h"
#include "common/hostmem.h"
#include "harness/report/profile_report.h"
#include "tests/t.h"

static lev_span kernel(double begin, double end) {
  return (lev_span){.name = "k", .kind = LEV_SPAN_KERNEL, .begin = begin, .end = end};
}
static lev_span copy(double begin, double end, uint64_t bytes) {
  return (lev_span){.name = "c", .kind = LEV_SPAN_COPY, .host_link = true, .begin = begin, .end = end, .bytes = bytes};
}

static bool near(double a, double b) {
  double d = a - b;
  return d < 1e-12 && d > -1e-12;
}

/* Times of n spans counted cell by cell: what the sweep must give. Spans begin and end at whole numbers. */
static lev_overlap counted(const lev_span *spans, int n) {
  lev_overlap out = {.share = 1};
  double first = 1e9, last = -1e9;
  for (int i = 0; i < n; ++i) {
    if (spans[i].begin < first) first = spans[i].begin;
    if (spans[i].end > last) last = spans[i].end;
  }
  out.length = last - first;
  for (double t = first; t < last; t += 1) {
    bool k = false, c = false;
    for (int i = 0; i < n; ++i) {
      bool open = spans[i].begin <= t && t < spans[i].end;
      k |= open && spans[i].kind == LEV_SPAN_KERNEL;
      c |= open && spans[i].kind == LEV_SPAN_COPY && spans[i].host_link;
    }
    out.compute += k, out.copy += c, out.inside += k && c;
  }
  if (out.copy > 0) out.share = out.inside / out.copy;
  return out;
}

T_TEST(profile_overlap_of_a_few_spans) {
  lev_overlap o;
  T_REQUIRE_OK(lev_overlap_of(NULL, 0, &o));
  T_EXPECT(o.share == 1 && o.length == 0);
  /* kernels 1-4 and 6-8, a second stream's kernel 3-5; copies 0-2 and 4-7 (the latter twice at once) */
  lev_span spans[] = {copy(4, 7, 5), kernel(6, 8), kernel(1, 4), copy(0, 2, 3), kernel(3, 5), copy(4, 7, 5)};
  T_REQUIRE_OK(lev_overlap_of(spans, 6, &o));
  T_EXPECT(near(o.length, 8) && near(o.compute, 6) && near(o.copy, 5) && near(o.inside, 3));
  T_EXPECT(near(o.share, 0.6));
  T_EXPECT_EQ_I64((int64_t)o.host_bytes, 13);
  spans[3].host_link = false; /* a copy inside the device is no host copy */
  T_REQUIRE_OK(lev_overlap_of(spans, 6, &o));
  T_EXPECT(near(o.copy, 3) && near(o.inside, 2) && near(o.compute, 6));
  T_EXPECT_EQ_I64((int64_t)o.host_bytes, 10);
  static const lev_span_kind others[] = {LEV_SPAN_FILL, LEV_SPAN_COLL, LEV_SPAN_HOST};
  for (int k = 0; k < 3; ++k) { /* nor is a fill, the wait inside a collective, or a host thread's work computing */
    spans[1].kind = others[k];
    T_REQUIRE_OK(lev_overlap_of(spans, 6, &o));
    T_EXPECT_MSG(near(o.compute, 4) && near(o.inside, 1), "%s: %g computing", lev_span_kind_name(others[k]), o.compute);
  }
}

T_TEST(profile_overlap_of_many_spans) {
  enum { SPANS = 60 };
  lev_span spans[SPANS];
  unsigned seed = 12345;
  for (int round = 0; round < 200; ++round) {
    int n = 1 + round % SPANS;
    for (int i = 0; i < n; ++i) {
      unsigned r[4];
      for (int k = 0; k < 4; ++k) r[k] = (seed = seed * 1664525u + 1013904223u) >> 8;
      double begin = r[0] % 100, end = begin + r[1] % 9;
      spans[i] = (lev_span){.name = "s",
                            .kind = (lev_span_kind)(r[2] % LEV_SPAN_KINDS),
                            .host_link = r[3] % 3 > 0,
                            .begin = begin,
                            .end = end};
    }
    lev_overlap o, want = counted(spans, n);
    T_REQUIRE_OK(lev_overlap_of(spans, n, &o));
    T_EXPECT_MSG(near(o.length, want.length) && near(o.compute, want.compute) && near(o.copy, want.copy) &&
                     near(o.inside, want.inside) && near(o.share, want.share),
                 "round %d: %g %g %g, counted %g %g %g", round, o.compute, o.copy, o.inside, want.compute, want.copy,
                 want.inside);
  }
}

/* ---- a device's own spans ---- */

static void sleep_ms(const void *args) {
  int ms;
  memcpy(&ms, args, sizeof ms);
  nanosleep(&(struct timespec){.tv_nsec = ms * 1000000L}, NULL);
}
static const lev_kernel sleep_kernel = {"test.sleep", sleep_ms, NULL};

typedef struct scene {
  lev_device *device;
  lev_stream *compute, *side;
  lev_profile *profile;
  void *card, *pinned;
} scene;

static void open_scene(scene *s, lev_backend backend, int64_t spans) {
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = backend}, &s->device));
  T_REQUIRE_OK(lev_stream_create(s->device, "compute", &s->compute));
  T_REQUIRE_OK(lev_stream_create(s->device, "side", &s->side));
  T_REQUIRE_OK(lev_device_alloc(s->device, LEV_MEM_DEVICE, 8192, &s->card));
  T_REQUIRE_OK(lev_device_alloc(s->device, LEV_MEM_PINNED, 8192, &s->pinned));
  T_REQUIRE_OK(lev_profile_create(s->device, spans, &s->profile));
}

static void work(scene *s) {
  int ms = 3;
  unsigned char *card = s->card;
  lev_device_phase(s->device, "first", 4);
  T_EXPECT_OK(lev_launch(s->compute, &sleep_kernel, &ms, sizeof ms));
  T_EXPECT_OK(lev_copy(s->side, s->pinned, card, 4096, "test.out"));
  lev_device_phase(s->device, "second", -1);
  T_EXPECT_OK(lev_copy(s->side, card + 4096, card, 1000, "test.inside"));
  T_EXPECT_OK(lev_launch(s->compute, &sleep_kernel, &ms, sizeof ms));
  T_EXPECT_OK(lev_fill(s->compute, card + 6000, 0, 77, "test.fill")); /* bytes that no copy touches */
  T_EXPECT_OK(lev_copy(s->compute, card, s->pinned, 0, "test.nothing"));
}

T_TEST(profile_spans_of_a_device) {
  scene s;
  open_scene(&s, LEV_BACKEND_CPU, 100);
  work(&s); /* before the start: not recorded */
  T_EXPECT_EQ_I64(lev_profile_count(s.profile), 0);
  for (int round = 0; round < 2; ++round) { /* starting again forgets the first round */
    T_REQUIRE_OK(lev_profile_start(s.profile, s.compute));
    work(&s);
    lev_profile_stop(s.profile);
    work(&s);
    T_REQUIRE_OK(lev_profile_read(s.profile));
    T_EXPECT_EQ_I64(lev_profile_count(s.profile), 5);
    T_EXPECT_EQ_I64(lev_profile_streams(s.profile), 2);
  }
  const lev_span *a = lev_profile_at(s.profile, 0), *out = lev_profile_at(s.profile, 1),
                 *inside = lev_profile_at(s.profile, 2), *b = lev_profile_at(s.profile, 3),
                 *fill = lev_profile_at(s.profile, 4);
  T_EXPECT(strcmp(a->name, "test.sleep") == 0 && a->kind == LEV_SPAN_KERNEL && a->end - a->begin >= 2.9e-3);
  T_EXPECT(a->begin >= 0 && b->begin >= a->end && fill->begin >= b->end && inside->begin >= out->end);
  T_EXPECT(out->host_link && !inside->host_link && out->bytes == 4096 && inside->bytes == 1000);
  T_EXPECT(fill->kind == LEV_SPAN_FILL && fill->bytes == 77);
  T_EXPECT(out->phase == 0 && b->phase == 1 && lev_profile_phase_at(s.profile, 0).index == 4);
  T_EXPECT(strcmp(lev_profile_stream(s.profile, out->stream), "side") == 0);
  lev_device_close(s.device);
}

enum { LATE_MS = 30, WORK_MS = 10 };

/* Rank 0 waits in a barrier for rank 1, which comes late; then host threads work for it. */
static void waiting_rank(int index, void *hub) {
  scene s;
  lev_comm *world;
  lev_overlap o;
  int late = LATE_MS, work_ms = WORK_MS;
  open_scene(&s, LEV_BACKEND_CPU, 100);
  T_REQUIRE_OK(lev_comm_local_join(hub, index, s.device, &world));
  T_EXPECT_OK(lev_profile_start(s.profile, s.compute));
  if (index == 1) T_EXPECT_OK(lev_launch(s.compute, &sleep_kernel, &late, sizeof late));
  T_EXPECT_OK(lev_comm_barrier(world, s.compute));
  T_EXPECT_OK(lev_launch_host(s.compute, &sleep_kernel, &work_ms, sizeof work_ms));
  T_EXPECT_OK(lev_profile_read(s.profile));
  T_REQUIRE_OK(lev_overlap_of(lev_profile_at(s.profile, 0), lev_profile_count(s.profile), &o));
  if (index == 0) T_EXPECT(lev_profile_at(s.profile, 0)->kind == LEV_SPAN_COLL && o.compute == 0);
  if (index == 1)
    T_EXPECT_MSG(o.compute >= 1e-3 * (LATE_MS - 1) && o.length - o.compute >= 1e-3 * (WORK_MS - 1), "%g of %g s",
                 o.compute, o.length);
  const lev_span *last = lev_profile_at(s.profile, lev_profile_count(s.profile) - 1);
  T_EXPECT(last->kind == LEV_SPAN_HOST && strcmp(lev_span_kind_name(last->kind), "host") == 0);
  T_EXPECT(o.length >= 1e-3 * (WORK_MS - 1));
  T_EXPECT_OK(lev_comm_agree(world, LEV_OK)); /* nobody leaves while the other still waits */
  lev_comm_destroy(world);
  lev_device_close(s.device);
}

T_TEST(profile_waits_and_host_work_are_not_computing) {
  lev_comm_hub *hub;
  T_REQUIRE_OK(lev_comm_hub_create(2, 60, &hub));
  t_ranks(2, waiting_rank, hub);
  lev_comm_hub_destroy(hub);
}

T_TEST(profile_without_room_counts_what_it_drops) {
  scene s;
  open_scene(&s, LEV_BACKEND_CPU, 2);
  lev_profile *second;
  T_EXPECT_STATUS(lev_profile_create(s.device, 2, &second), LEV_ERR_MISUSE);
  T_REQUIRE_OK(lev_profile_start(s.profile, s.compute));
  work(&s);
  T_REQUIRE_OK(lev_profile_read(s.profile));
  T_EXPECT_EQ_I64(lev_profile_count(s.profile), 2);
  T_EXPECT_EQ_I64(lev_profile_dropped(s.profile), 3);
  lev_device_close(s.device);
}

T_TEST(profile_of_a_dry_device_is_empty) {
  scene s;
  open_scene(&s, LEV_BACKEND_DRY, 100);
  T_REQUIRE_OK(lev_profile_start(s.profile, s.compute));
  work(&s);
  T_REQUIRE_OK(lev_profile_read(s.profile));
  T_EXPECT_EQ_I64(lev_profile_count(s.profile), 0);
  lev_device_close(s.device);
}

T_TEST(profile_prints_phases_and_operations) {
  scene s;
  char *text = NULL;
  size_t bytes = 0;
  open_scene(&s, LEV_BACKEND_CPU, 100);
  T_REQUIRE_OK(lev_profile_start(s.profile, s.compute));
  work(&s);
  lev_profile_stop(s.profile);
  T_REQUIRE_OK(lev_profile_read(s.profile));
  FILE *file = open_memstream(&text, &bytes);
  T_REQUIRE(file != NULL);
  T_EXPECT_OK(lev_profile_print(s.profile, 2, file));
  fclose(file);
  static const char *const words[] = {"while computing", "\n  first  ", "\n  second  ", "test.sleep"};
  for (size_t i = 0; i < sizeof words / sizeof *words; ++i)
    T_EXPECT_MSG(strstr(text, words[i]) != NULL, "\"%s\" is not in:\n%s", words[i], text);
  int lines = 0;
  for (const char *c = text; *c; ++c) lines += *c == '\n';
  T_EXPECT_EQ_I64(lines, 1 + 3 + 3); /* the overlap; two phases and two rows, each under its head */
  free(text);
  lev_device_close(s.device);
}

T_TEST(profile_timeline_reads_as_json) {
  scene s;
  char path[] = "/tmp/levee_profile_XXXXXX";
  int fd = mkstemp(path);
  T_REQUIRE(fd >= 0);
  close(fd);
  open_scene(&s, LEV_BACKEND_CPU, 100);
  T_REQUIRE_OK(lev_profile_start(s.profile, s.compute));
  work(&s);
  lev_profile_stop(s.profile);
  T_REQUIRE_OK(lev_profile_read(s.profile));
  T_REQUIRE_OK(lev_profile_write(s.profile, 3, path));
  json_t *root = json_load_file(path, 0, NULL), *event;
  T_REQUIRE(root != NULL);
  size_t i, spans = 0, phases = 0, names = 0;
  json_array_foreach(json_object_get(root, "traceEvents"), i, event) {
    bool bar = strcmp(json_string_value(json_object_get(event, "ph")), "X") == 0;
    int64_t row = json_integer_value(json_object_get(event, "tid"));
    T_EXPECT_EQ_I64(json_integer_value(json_object_get(event, "pid")), 3);
    spans += bar && row > 0, phases += bar && row == 0, names += !bar;
    if (bar) T_EXPECT(json_number_value(json_object_get(event, "dur")) >= 0);
  }
  T_EXPECT(spans == 5 && phases == 2 && names == 4); /* the process, the phases' row and two streams */
  json_t *levee = json_object_get(root, "levee");
  T_EXPECT_EQ_I64(json_integer_value(json_object_get(levee, "host_bytes")), 4096);
  T_EXPECT(json_array_size(json_object_get(levee, "operations")) == 5);
  lev_overlap o;
  T_REQUIRE_OK(lev_overlap_of(lev_profile_at(s.profile, 0), lev_profile_count(s.profile), &o));
  T_EXPECT(o.share >= 0 && o.share <= 1 && o.compute >= 5.8e-3);
  double stored = json_number_value(json_object_get(levee, "overlap"));
  T_EXPECT(stored - o.share < 1e-6 && o.share - stored < 1e-6);
  json_decref(root);
  T_EXPECT_STATUS(lev_profile_write(s.profile, 3, "/nonexistent/folder/profile.json"), LEV_ERR_IO);
  lev_device_close(s.device);
  unlink(path);
}
