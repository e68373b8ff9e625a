/* SPDX-License-Identifier: Apache-2.0 */
/* Control-plane heap and topology. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "common/topo.h"
#include "tests/t.h"

T_TEST(runtime_heap_counts_by_tag) {
  lev_heap_stats before, during, after, other_before, other_after;
  lev_heap_read(LEV_HEAP_DATA, &before);
  lev_heap_read(LEV_HEAP_REPORT, &other_before);
  unsigned char *a = lev_calloc(LEV_HEAP_DATA, 1000, 100);
  char *text = lev_strdup(LEV_HEAP_DATA, "levee");
  T_REQUIRE(a && text);
  for (int i = 0; i < 100000; ++i) T_EXPECT(a[i] == 0);
  T_EXPECT(strcmp(text, "levee") == 0);
  T_EXPECT_EQ_I64((uintptr_t)a % 16, 0);
  lev_heap_read(LEV_HEAP_DATA, &during);
  T_EXPECT_MSG(during.allocated - before.allocated >= 100006 && during.allocated - before.allocated < 140000,
               "%zu bytes live", during.allocated - before.allocated);
  T_EXPECT_EQ_I64(during.calls - before.calls, 2);
  T_EXPECT(during.peak >= during.allocated);
  memset(a, 7, 100000);
  unsigned char *b = lev_realloc(LEV_HEAP_DATA, a, 300000);
  T_REQUIRE(b);
  T_EXPECT(b[0] == 7 && b[99999] == 7);
  lev_heap_read(LEV_HEAP_DATA, &during);
  T_EXPECT(during.allocated - before.allocated >= 300006);
#ifndef LEV_PLAIN_MALLOC
  T_EXPECT(during.resident >= during.allocated);
#else
  T_EXPECT_EQ_I64(during.allocated - before.allocated, 300006);
#endif
  lev_free(b);
  lev_free(text);
  lev_free(NULL);
  lev_heap_read(LEV_HEAP_DATA, &after);
  T_EXPECT_EQ_I64(after.allocated, before.allocated);
  T_EXPECT(after.peak >= during.allocated);
  lev_heap_read(LEV_HEAP_REPORT, &other_after);
  T_EXPECT_EQ_I64(other_after.allocated, other_before.allocated);
  T_EXPECT(strcmp(lev_heap_name(LEV_HEAP_PLAN), "heap.plan") == 0);
}

T_TEST(runtime_heap_edges) {
  void *none = lev_calloc(LEV_HEAP_COMMON, 0, 8);
  T_EXPECT(none != NULL);
  lev_free(none);
  T_EXPECT(lev_calloc(LEV_HEAP_COMMON, SIZE_MAX / 2, 3) == NULL);
  T_EXPECT(strstr(lev_detail(), "heap.common") != NULL);
  T_EXPECT(lev_calloc(LEV_HEAP_COUNT, 1, 1) == NULL);
  char *text = lev_realloc(LEV_HEAP_COMMON, NULL, 4);
  T_REQUIRE(text);
  memcpy(text, "abc", 4);
  T_EXPECT(lev_realloc(LEV_HEAP_COMMON, text, SIZE_MAX - 8) == NULL);
  T_EXPECT(strcmp(text, "abc") == 0);
  lev_free(text);
}

static void heap_main(int rank, void *p) {
  (void)p;
  void *blocks[50];
  for (int round = 0; round < 40; ++round) {
    for (int i = 0; i < 50; ++i) {
      size_t bytes = (size_t)(1 + (rank * 31 + i * 17 + round) % 3000);
      blocks[i] = lev_calloc((lev_heap)((rank + i) % LEV_HEAP_COUNT), 1, bytes);
      if (!T_EXPECT(blocks[i] != NULL)) return;
      memset(blocks[i], rank, bytes);
    }
    for (int i = 0; i < 50; ++i) lev_free(blocks[i]);
  }
}

T_TEST(runtime_heap_threads) {
  lev_heap_stats before[LEV_HEAP_COUNT], after;
  for (int h = 0; h < LEV_HEAP_COUNT; ++h) lev_heap_read((lev_heap)h, &before[h]);
  t_ranks(6, heap_main, NULL);
  for (int h = 0; h < LEV_HEAP_COUNT; ++h) {
    lev_heap_read((lev_heap)h, &after);
    T_EXPECT_EQ_I64(after.allocated, before[h].allocated);
    T_EXPECT_EQ_I64(after.calls - before[h].calls, 6 * 40 * 50 / LEV_HEAP_COUNT);
  }
}

T_TEST(runtime_process_memory) {
  size_t rss, peak;
  lev_process_memory(&rss, &peak);
  T_EXPECT(rss > 100000 && peak >= rss / 2);
}

T_TEST(runtime_topology_of_this_machine) {
  lev_topo *topo;
  T_REQUIRE_OK(lev_topo_create(NULL, &topo));
  T_EXPECT(lev_topo_numa_nodes(topo) >= 1);
  int bound = -1;
  T_EXPECT_STATUS(lev_topo_bind_thread(topo, lev_topo_numa_nodes(topo), &bound), LEV_ERR_ARG);
  if (lev_topo_numa_nodes(topo) == 1) {
    T_EXPECT_OK(lev_topo_bind_thread(topo, 0, &bound));
    T_EXPECT_EQ_I64(bound, 0);
  }
  lev_topo_destroy(topo);
  lev_topo_destroy(NULL);
}

T_TEST(runtime_topology_synthetic) {
  lev_topo *topo;
  T_REQUIRE_OK(lev_topo_create("numa:2 core:4 pu:2", &topo));
  T_EXPECT_EQ_I64(lev_topo_numa_nodes(topo), 2);
  static const int want[5] = {0, 0, 0, 1, 1};
  for (int r = 0; r < 5; ++r) T_EXPECT_EQ_I64(lev_topo_rank_node(topo, r, 5), want[r]);
  T_EXPECT_EQ_I64(lev_topo_rank_node(topo, 0, 1), 0);
  T_EXPECT_EQ_I64(lev_topo_rank_node(topo, 7, 5), 0);
  int bound = -1;
  T_EXPECT_OK(lev_topo_bind_thread(topo, 1, &bound)); /* not this machine: nothing is bound */
  T_EXPECT_EQ_I64(bound, 0);
  T_EXPECT_STATUS(lev_topo_bind_thread(topo, 2, NULL), LEV_ERR_ARG);
  lev_topo_destroy(topo);
  T_EXPECT_STATUS(lev_topo_create("numa:many", &topo), LEV_ERR_ARG);
  T_EXPECT(topo == NULL);
}
