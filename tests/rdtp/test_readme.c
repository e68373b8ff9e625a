/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of ring_dtp/README.md: planned bytes, and the ledger's peak of a run on the cpu backend. */
#include "tests/rdtp/rdtp_rig.h"
#include "tests/readme.h"

typedef struct kind {
  const char *name;
  rdtp_schedule schedule;
  rdtp_branch branch;
  bool one_pass;
} kind;
static const kind kinds[] = {{"moving weights", RDTP_BOUNDED, RDTP_MOVE_WEIGHTS, false},
                             {"moving activations", RDTP_BOUNDED, RDTP_MOVE_ACTIVATIONS, false},
                             {"one-pass", RDTP_BOUNDED, RDTP_MOVE_ACTIVATIONS, true},
                             {"plain", RDTP_PLAIN, RDTP_MOVE_WEIGHTS, false}};
enum { KINDS = 4 };

static void row(rig_case c, const kind *k, int64_t rows, int64_t cols) {
  c.schedule = k->schedule, c.branch = k->branch, c.one_pass = k->one_pass;
  bool tiled = k->schedule == RDTP_BOUNDED;
  c.rows = !tiled ? 0 : k->one_pass ? rows / c.ranks : rows, c.cols = tiled && !k->one_pass ? cols : 0;
  rig r;
  if (rig_open(&r, &c)) {
    rig_run(&r, RDTP_STEP, LEV_BACKEND_CPU);
    rig_check(&r, c.dtype == LEV_BF16 ? 2e-2 : 1e-4, k->name);
    for (int i = 1; i < c.ranks; ++i)
      T_EXPECT(r.rank[i].planned == r.rank[0].planned && r.rank[i].peak == r.rank[0].peak);
    t_readme("ring_dtp/README.md", "| %s | %s x %s | %s | %s |", k->name, T_COMMAS(tiled ? rows : c.tokens[0]),
             T_COMMAS(!tiled        ? c.vocab
                      : k->one_pass ? c.vocab / c.ranks
                                    : cols),
             T_COMMAS(r.rank[0].planned), T_COMMAS(r.rank[0].peak));
  }
  rig_close(&r);
}

T_TEST(rdtp_readme) {
  if (!t_readme_runs()) return;
  const rig_case f32 = {.ranks = 4, .hidden = 64, .vocab = 1024, .tokens = {256, 256, 256, 256}, .dtype = LEV_F32},
                 bf16 = {.ranks = 2, .hidden = 64, .vocab = 2048, .tokens = {512, 512}, .dtype = LEV_BF16};
  for (int i = 0; i < KINDS; ++i) {
    row(f32, &kinds[i], 64, 128);
    row(bf16, &kinds[i], 128, 256);
  }
}

/* bf16, P 8, H 2048, V 50,304; tiles of 1024 x 2048, one-pass 128 tokens of every rank. */
static size_t planned(lev_device *device, lev_comm *comm, const kind *k, int64_t tokens) {
  rdtp_config c;
  rdtp_config_init(&c);
  c.max_tokens = tokens, c.hidden = 2048, c.vocab = 50304, c.dtype = LEV_BF16;
  c.schedule = k->schedule, c.branch = k->branch, c.one_pass = k->one_pass;
  if (k->schedule == RDTP_BOUNDED) c.tile_rows = k->one_pass ? 128 : 1024, c.tile_cols = 2048;
  rdtp_plan *plan = NULL;
  size_t bytes[LEV_MEM_CLASSES] = {0};
  if (T_EXPECT_OK(rdtp_plan_create(device, comm, &c, &plan))) rdtp_plan_bytes(plan, RDTP_STEP, bytes);
  rdtp_destroy(plan);
  return bytes[LEV_MEM_DEVICE];
}

T_TEST(rdtp_readme_planned) {
  lev_device *device = NULL;
  lev_comm *comm = NULL;
  lev_device_config dry = {.backend = LEV_BACKEND_DRY};
  T_REQUIRE_OK(lev_device_open(&dry, &device));
  if (T_EXPECT_OK(lev_comm_dry_create(8, 0, device, &comm)))
    for (int64_t tokens = 16384; tokens <= 131072; tokens *= 8) {
      double mib[KINDS];
      for (int i = 0; i < KINDS; ++i) mib[i] = (double)planned(device, comm, &kinds[i], tokens) / (1 << 20);
      t_readme("ring_dtp/README.md", "| %s | %.1f MiB | %.1f MiB | %.1f MiB | %.1f MiB |", T_COMMAS(tokens), mib[0],
               mib[1], mib[2], mib[3]);
    }
  lev_comm_destroy(comm);
  lev_device_close(device);
}
