/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "common/ledger.h"
#include "common/trace.h"
#include "tests/t.h"

static lev_ledger_row row_of(const lev_ledger *l, const char *tag) {
  for (int i = 0; i < lev_ledger_count(l); ++i)
    if (strcmp(lev_ledger_at(l, i).tag, tag) == 0) return lev_ledger_at(l, i);
  return (lev_ledger_row){LEV_MEM_HOST, "", 0, 0, 0};
}

T_TEST(core_ledger_peaks) {
  lev_ledger *l;
  T_REQUIRE_OK(lev_ledger_create(NULL, &l));
  T_EXPECT(strcmp(lev_ledger_peak_phase(l, LEV_MEM_DEVICE), "") == 0);
  lev_ledger_phase(l, "setup", 0);
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "weights", 100));
  lev_ledger_phase(l, "forward", 1);
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "llep.send", 50));
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "llep.recv", 70)); /* class peak 220, llep 120 */
  T_EXPECT_OK(lev_ledger_sub(l, LEV_MEM_DEVICE, "llep.send", 50));
  T_EXPECT_OK(lev_ledger_sub(l, LEV_MEM_DEVICE, "llep.recv", 70));
  lev_ledger_phase(l, "backward", 2);
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "llep.send", 90));  /* its own peak, not the class's */
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_DEVICE, "llepx.send", 30)); /* class 220 again: not above */
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_PINNED, "llep.send", 1000));
  T_EXPECT_EQ_I64(lev_ledger_peak(l, LEV_MEM_DEVICE), 220);
  T_EXPECT_EQ_I64(lev_ledger_live(l, LEV_MEM_DEVICE), 220);
  T_EXPECT(strcmp(lev_ledger_peak_phase(l, LEV_MEM_DEVICE), "forward") == 0);
  T_EXPECT(strcmp(lev_ledger_peak_phase(l, LEV_MEM_PINNED), "backward") == 0);
  T_EXPECT_EQ_I64(lev_ledger_tag_peak(l, LEV_MEM_DEVICE, "llep.send"), 90);
  T_EXPECT_EQ_I64(lev_ledger_tag_peak(l, LEV_MEM_DEVICE, "none"), 0);
  T_EXPECT_EQ_I64(lev_ledger_module_peak(l, LEV_MEM_DEVICE, "llep."), 120);
  T_EXPECT_EQ_I64(lev_ledger_module_peak(l, LEV_MEM_DEVICE, "llep"), 120);
  T_EXPECT_EQ_I64(lev_ledger_module_peak(l, LEV_MEM_DEVICE, "llepx."), 30);
  T_EXPECT_EQ_I64(lev_ledger_module_peak(l, LEV_MEM_PINNED, "llep."), 1000);
  T_EXPECT_EQ_I64(lev_ledger_module_peak(l, LEV_MEM_DEVICE, "rdtp."), 0);
  /* the live set at the class's peak adds up to it */
  T_EXPECT_EQ_I64(row_of(l, "weights").at_peak, 100);
  T_EXPECT_EQ_I64(row_of(l, "llep.recv").at_peak, 70);
  size_t sum = 0;
  for (int i = 0; i < lev_ledger_count(l); ++i)
    if (lev_ledger_at(l, i).cls == LEV_MEM_DEVICE) sum += lev_ledger_at(l, i).at_peak;
  T_EXPECT_EQ_I64(sum, 220);
  T_EXPECT_EQ_I64(row_of(l, "llepx.send").at_peak, 0);
  lev_ledger_destroy(l);
}

T_TEST(core_ledger_errors) {
  lev_ledger *l;
  T_REQUIRE_OK(lev_ledger_create(NULL, &l));
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_HOST, "a.b", 10));
  T_EXPECT_STATUS(lev_ledger_sub(l, LEV_MEM_HOST, "a.b", 11), LEV_ERR_INTERNAL);
  T_EXPECT_STATUS(lev_ledger_sub(l, LEV_MEM_DEVICE, "a.b", 1), LEV_ERR_INTERNAL);
  T_EXPECT_STATUS(lev_ledger_sub(l, LEV_MEM_HOST, "a", 1), LEV_ERR_INTERNAL);
  T_EXPECT_EQ_I64(lev_ledger_live(l, LEV_MEM_HOST), 10);
  T_EXPECT_STATUS(lev_ledger_add(l, LEV_MEM_HOST, "", 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_ledger_add(l, LEV_MEM_CLASSES, "x", 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_ledger_add(l, LEV_MEM_HOST, "a.b", SIZE_MAX), LEV_ERR_CAPACITY);
  for (int i = 1; i < 256; ++i) {
    char tag[32];
    snprintf(tag, sizeof tag, "m%d.x", i);
    T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_HOST, tag, 1));
  }
  T_EXPECT_STATUS(lev_ledger_add(l, LEV_MEM_HOST, "one.more", 1), LEV_ERR_CAPACITY);
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_HOST, "m255.x", 1));
  T_EXPECT_EQ_I64(lev_ledger_live(l, LEV_MEM_HOST), 10 + 256);
  T_EXPECT_STATUS(lev_ledger_add(l, LEV_MEM_HOST, "a.b", SIZE_MAX), LEV_ERR_CAPACITY);
  T_EXPECT_EQ_I64(lev_ledger_live(l, LEV_MEM_HOST), 10 + 256);
  lev_ledger_destroy(l);
}

T_TEST(core_trace_names_and_cap) {
  lev_trace *t;
  T_REQUIRE_OK(lev_trace_create(1500, &t));
  lev_trace_add(NULL, LEV_EV_COPY, 0, "nothing", 1);
  char name[32] = "sco.out"; /* names are told apart by content, not address */
  lev_trace_add(t, LEV_EV_COPY, 0, name, 5);
  strcpy(name, "sco.in");
  lev_trace_add(t, LEV_EV_COPY, 0, name, 6);
  strcpy(name, "sco.out");
  lev_trace_add(t, LEV_EV_COLL, 0, name, 7);
  T_EXPECT_EQ_I64(lev_trace_count(t), 3);
  T_EXPECT(lev_trace_at(t, 0)->name == lev_trace_at(t, 2)->name);
  T_EXPECT(lev_trace_at(t, 0)->name != lev_trace_at(t, 1)->name);
  T_EXPECT(strcmp(lev_trace_name(t, lev_trace_at(t, 1)->name), "sco.in") == 0);
  T_EXPECT_EQ_I64(lev_trace_at(t, 2)->bytes, 7);
  T_EXPECT_EQ_I64(lev_trace_at(t, 2)->kind, LEV_EV_COLL);
  T_EXPECT(lev_trace_at(t, 1)->time_ns >= lev_trace_at(t, 0)->time_ns && lev_trace_at(t, 0)->time_ns >= 0);
  T_EXPECT(lev_trace_at(t, 3) == NULL && lev_trace_at(t, -1) == NULL);
  lev_trace_enable(t, 0);
  lev_trace_add(t, LEV_EV_COPY, 0, "paused", 1);
  lev_trace_enable(t, 1);
  T_EXPECT_EQ_I64(lev_trace_count(t), 3);
  T_EXPECT_EQ_I64(lev_trace_dropped(t), 0);
  for (int i = 0; i < 1024; ++i) { /* 1022 new names fit, two do not */
    snprintf(name, sizeof name, "n%d", i);
    lev_trace_add(t, LEV_EV_PHASE, 0, name, 0);
  }
  T_EXPECT_EQ_I64(lev_trace_count(t), 3 + 1022);
  T_EXPECT_EQ_I64(lev_trace_dropped(t), 2);
  for (int i = 0; i < 1000; ++i) lev_trace_add(t, LEV_EV_PHASE, 0, "n7", 0);
  T_EXPECT_EQ_I64(lev_trace_count(t), 1500);
  T_EXPECT_EQ_I64(lev_trace_dropped(t), 2 + 1000 - (1500 - 1025));
  lev_trace_destroy(t);
  T_EXPECT_STATUS(lev_trace_create(-1, &t), LEV_ERR_ARG);
  T_REQUIRE_OK(lev_trace_create(0, &t));
  lev_trace_add(t, LEV_EV_COPY, 0, "x", 1);
  T_EXPECT_EQ_I64(lev_trace_count(t), 0);
  T_EXPECT_EQ_I64(lev_trace_dropped(t), 1);
  lev_trace_destroy(t);
}

T_TEST(core_trace_lines) {
  lev_trace *t;
  lev_ledger *l;
  T_REQUIRE_OK(lev_trace_create(16, &t));
  T_REQUIRE_OK(lev_ledger_create(t, &l));
  T_EXPECT(lev_ledger_trace(l) == t);
  lev_ledger_phase(l, "fwd \"q\"", 12);
  T_EXPECT_OK(lev_ledger_add(l, LEV_MEM_PINNED, "sco.slab", 4096));
  T_EXPECT_OK(lev_ledger_sub(l, LEV_MEM_PINNED, "sco.slab", 96));
  FILE *f = tmpfile();
  T_REQUIRE(f != NULL);
  T_EXPECT_OK(lev_trace_write(t, f));
  rewind(f);
  char line[3][200];
  for (int i = 0; i < 3; ++i) T_REQUIRE(fgets(line[i], sizeof line[i], f) != NULL);
  T_EXPECT(strstr(line[0], ",\"ev\":\"phase\",\"name\":\"fwd \\\"q\\\"\",\"bytes\":12}\n") != NULL);
  T_EXPECT(strstr(line[1], ",\"ev\":\"alloc\",\"class\":\"pinned\",\"name\":\"sco.slab\",\"bytes\":4096}\n") != NULL);
  T_EXPECT(strstr(line[2], ",\"ev\":\"free\",\"class\":\"pinned\",\"name\":\"sco.slab\",\"bytes\":96}\n") != NULL);
  T_EXPECT(strncmp(line[0], "{\"t\":", 5) == 0);
  fclose(f);
  FILE *full = fopen("/dev/full", "w");
  if (full) {
    T_EXPECT_STATUS(lev_trace_write(t, full), LEV_ERR_IO);
    fclose(full);
  }
  lev_ledger_destroy(l);
  lev_trace_destroy(t);
}
