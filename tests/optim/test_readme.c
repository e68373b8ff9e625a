/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of offload_adamw/README.md and muon/README.md: planned bytes and the ledger's peak of a run, on the cpu
 * backend. */
#include "tests/optim/muon_rig.h"
#include "tests/optim/oadamw_rig.h"
#include "tests/readme.h"

static void adamw_row(int64_t n, int64_t bucket, oadamw_placement placement, oadamw_schedule schedule) {
  const char *names[] = {[OADAMW_GPU] = "gpu", [OADAMW_CPU] = "cpu"};
  oadamw_segment all = {.offset = 0, .count = n, .weight_decay = 0.1, .lr_scale = 1};
  oadamw_config c = oadamw_rig_config(LEV_BF16, LEV_BF16);
  c.segments = &all, c.n_segments = 1, c.bucket = bucket, c.slots = 2, c.placement = placement, c.schedule = schedule;
  oadamw_rig r = {0};
  size_t keep[LEV_MEM_CLASSES], step[LEV_MEM_CLASSES];
  if (oadamw_rig_open(&r, LEV_BACKEND_CPU, &c, n, 0) && T_EXPECT_OK(oadamw_rig_run(&r, 1, 1))) {
    oadamw_plan_bytes(r.plan, OADAMW_PERSISTENT, keep);
    oadamw_plan_bytes(r.plan, OADAMW_STEP, step);
    t_readme(
        "offload_adamw/README.md", "| %s | %s | %s | %s | %s |", schedule == OADAMW_PLAIN ? "plain" : names[placement],
        T_COMMAS(keep[LEV_MEM_DEVICE] + step[LEV_MEM_DEVICE]), T_COMMAS(lev_ledger_peak(r.ledger, LEV_MEM_DEVICE)),
        T_COMMAS(keep[LEV_MEM_PINNED] + step[LEV_MEM_PINNED]), T_COMMAS(lev_ledger_peak(r.ledger, LEV_MEM_PINNED)));
  }
  oadamw_rig_close(&r);
}

T_TEST(oadamw_readme) {
  if (!t_readme_runs()) return;
  const int64_t n[] = {1200000, 1 << 22}, bucket[] = {1 << 16, 1 << 18};
  for (int i = 0; i < 2; ++i) {
    adamw_row(n[i], bucket[i], OADAMW_GPU, OADAMW_BOUNDED);
    adamw_row(n[i], bucket[i], OADAMW_CPU, OADAMW_BOUNDED);
    adamw_row(n[i], bucket[i], OADAMW_GPU, OADAMW_PLAIN);
  }
}

static muon_config muon_config_of(muon_matrix *matrices, int n, int64_t rows, int64_t cols, muon_schedule schedule) {
  muon_config c = muon_config_default();
  for (int i = 0; i < n; ++i) matrices[i] = (muon_matrix){i * rows * cols, rows, cols};
  c.matrices = matrices, c.n_matrices = n, c.schedule = schedule, c.slots = 2, c.bucket_bytes = 0;
  c.param_dtype = c.grad_dtype = c.compute_dtype = LEV_F32;
  return c;
}

static void muon_row(int n, int64_t rows, int64_t cols, muon_schedule schedule) {
  muon_matrix matrices[24];
  muon_config c = muon_config_of(matrices, n, rows, cols, schedule);
  muon_rig r;
  size_t keep[LEV_MEM_CLASSES], step[LEV_MEM_CLASSES];
  if (muon_rig_open(&r, &c, n * rows * cols, (muon_rig_options){.backend = LEV_BACKEND_CPU}) &&
      T_EXPECT_OK(muon_rig_step(&r, 1, 0.01, 1))) {
    muon_plan_bytes(r.plan, MUON_PERSISTENT, keep);
    muon_plan_bytes(r.plan, MUON_STEP, step);
    t_readme("muon/README.md", "| %s | %s | %s | %s | %s |", schedule == MUON_PLAIN ? "plain" : "bounded",
             T_COMMAS(keep[LEV_MEM_DEVICE] + step[LEV_MEM_DEVICE]),
             T_COMMAS(lev_ledger_module_peak(r.ledger, LEV_MEM_DEVICE, "muon.")),
             T_COMMAS(keep[LEV_MEM_PINNED] + step[LEV_MEM_PINNED]),
             T_COMMAS(lev_ledger_module_peak(r.ledger, LEV_MEM_PINNED, "muon.")));
  }
  muon_rig_close(&r);
}

T_TEST(muon_readme) {
  if (!t_readme_runs()) return;
  for (int schedule = MUON_BOUNDED; schedule <= MUON_PLAIN; ++schedule) {
    muon_row(24, 192, 512, (muon_schedule)schedule);
    muon_row(4, 512, 512, (muon_schedule)schedule);
  }
}

/* Too large to run. */
T_TEST(muon_readme_planned) {
  enum { N = 18432 };
  static muon_matrix matrices[N];
  size_t bytes[2];
  lev_device *device = NULL;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_DRY}, &device));
  for (int schedule = MUON_BOUNDED; schedule <= MUON_PLAIN; ++schedule) {
    muon_config c = muon_config_of(matrices, N, 768, 2048, (muon_schedule)schedule);
    c.param_dtype = c.grad_dtype = c.compute_dtype = LEV_BF16;
    muon_plan *plan = NULL;
    size_t keep[LEV_MEM_CLASSES], step[LEV_MEM_CLASSES];
    T_REQUIRE_OK(muon_plan_create(device, &c, &plan));
    muon_plan_bytes(plan, MUON_PERSISTENT, keep);
    muon_plan_bytes(plan, MUON_STEP, step);
    bytes[schedule] = keep[LEV_MEM_DEVICE] + step[LEV_MEM_DEVICE];
    muon_destroy(plan);
  }
  t_readme("muon/README.md", "%s device bytes bounded, %s plain", T_COMMAS(bytes[MUON_BOUNDED]),
           T_COMMAS(bytes[MUON_PLAIN]));
  lev_device_close(device);
}
