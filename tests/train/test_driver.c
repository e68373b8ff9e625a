/* SPDX-License-Identifier: Apache-2.0 */
/* What a GPU's driver says is free falls by at most what is planned and the reserve; nothing is asked on the CPU. */
#include <stdio.h>
#include <stdlib.h>

#include "harness/train/run.h"
#include "tests/backend.h"
#include "tests/t.h"
#include "tests/train/rig.h"
#include "tests/train/tokens.h"

#define MIB ((size_t)1 << 20)

T_TEST(driver_drop_against_what_is_allowed) {
  lev_run_gpu g = {.planned_bytes = 100 * MIB, .reserve_bytes = 20 * MIB, .total_bytes = 1000 * MIB};
  g.start_free_bytes = 900 * MIB, g.free_bytes = 780 * MIB; /* 100 MiB are in use before: not ours */
  T_EXPECT(lev_run_gpu_drop(&g) == 120 * MIB && lev_run_gpu_allowed(&g) == 120 * MIB && lev_run_gpu_holds(&g));
  g.free_bytes -= 1;
  T_EXPECT(lev_run_gpu_drop(&g) == 120 * MIB + 1 && !lev_run_gpu_holds(&g));
  g.free_bytes = 950 * MIB; /* another process left */
  T_EXPECT(lev_run_gpu_drop(&g) == 0 && lev_run_gpu_holds(&g));
  g.reserve_bytes = SIZE_MAX; /* "unlimited" */
  T_EXPECT(lev_run_gpu_allowed(&g) == SIZE_MAX);
}

T_TEST(driver_reserve_by_device) {
  lev_config c;
  rig_config(&c);
  c.memory.device_memory = 3 * LEV_CONTEXT_RESERVE;
  T_EXPECT(c.run.device == LEV_DEVICE_CPU && lev_context_reserve(&c) == 0);
  T_EXPECT(lev_device_limit(&c) == 3 * LEV_CONTEXT_RESERVE);
  c.run.device = LEV_DEVICE_CUDA;
  T_EXPECT(lev_context_reserve(&c) == (size_t)1 << 30 && lev_device_limit(&c) == 2 * LEV_CONTEXT_RESERVE);
  T_EXPECT(lev_gpu_reserve(&c, 4) == LEV_CONTEXT_RESERVE); /* one context for all ranks of a process */
  c.memory.device_memory = LEV_CONTEXT_RESERVE;
  T_EXPECT(lev_device_limit(&c) == 1); /* nothing fits, and it is no missing limit */
  c.memory.device_memory = 0;
  T_EXPECT(lev_device_limit(&c) == 0);
  c.memory.device_memory = SIZE_MAX; /* "unlimited" stays so, and is no limit to search against */
  T_EXPECT(lev_device_limit(&c) == SIZE_MAX);
  c.memory.device_memory = 5 * MIB, c.memory.context_reserve = MIB;
  T_EXPECT(lev_device_limit(&c) == 4 * MIB);
  T_EXPECT(lev_gpu_reserve(&c, 1) == MIB && lev_gpu_reserve(&c, 4) == 4 * MIB);
  c.memory.context_reserve = 0;
  T_EXPECT(lev_device_limit(&c) == 5 * MIB);
}

typedef struct seen {
  int ranks, gpus, sharing; /* sharing: ranks over all GPUs */
  size_t planned, on_gpus;
  int finished;
} seen;

static void on_finished(void *ctx, const lev_run_memory *memory) {
  seen *s = ctx;
  ++s->finished, s->gpus = memory->n_gpus, s->ranks = memory->ranks;
  for (int r = 0; r < memory->ranks; ++r) s->planned += memory->planned[r].slabs.bytes[LEV_MEM_DEVICE];
  for (int i = 0; i < memory->n_gpus; ++i) {
    const lev_run_gpu *g = &memory->gpus[i];
    size_t drop = lev_run_gpu_drop(g);
    s->sharing += g->ranks, s->on_gpus += g->planned_bytes;
    T_EXPECT_MSG(lev_run_gpu_holds(g), "GPU %d: free memory fell by %zu, planned %zu, reserve %zu", g->index, drop,
                 g->planned_bytes, g->reserve_bytes);
    T_EXPECT_MSG(drop >= g->planned_bytes / 2, "GPU %d: free memory fell by %zu only, planned %zu", g->index, drop,
                 g->planned_bytes); /* the slabs are in it, but for what tests before this one left to their driver */
    T_EXPECT(g->reserve_bytes == LEV_CONTEXT_RESERVE && g->start_free_bytes <= g->total_bytes);
  }
}

T_TEST(driver_drop_of_runs) {
  static const int ranks[] = {1, 4};
  bool cuda = t_backend() == LEV_BACKEND_CUDA;
  for (int i = 0; i < 2; ++i) {
    char folder[] = "/tmp/levee-driver-XXXXXX", command[96];
    lev_config c;
    seen s = {0};
    T_REQUIRE(mkdtemp(folder) != NULL);
    rig_config(&c);
    c.run.device = cuda ? LEV_DEVICE_CUDA : LEV_DEVICE_CPU;
    c.model.dtype = LEV_F32;
    c.model.vocab_size = 16384, c.model.hidden_size = 256; /* slabs of tens of MiB */
    c.memory.rdtp_tile_cols = 0;
    c.parallel.ranks = ranks[i];
    c.optimizer.name = LEV_OPTIMIZER_NONE;
    c.train.steps = 1, c.train.eval_at_end = false;
    c.run.trace_steps = 0;
    snprintf(c.data.train, sizeof c.data.train, "%s/t", folder);
    c.data.valid[0] = '\0';
    snprintf(c.run.folder, sizeof c.run.folder, "%s/run", folder);
    tokens_write(&c, c.data.train);
    lev_run_observer o = {.ctx = &s, .finished = on_finished};
    T_EXPECT_OK(lev_run(&c, &o, NULL));
    int there = cuda ? lev_device_count(LEV_BACKEND_CUDA) : 0;
    T_EXPECT_EQ_I64(s.finished, 1);
    T_EXPECT_EQ_I64(s.gpus, there < ranks[i] ? there : ranks[i]);
    T_EXPECT_EQ_I64(s.sharing, cuda ? ranks[i] : 0);
    T_EXPECT(s.planned > 64 * MIB && s.on_gpus == (cuda ? s.planned : 0));
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    T_EXPECT(system(command) == 0);
  }
}
