/* SPDX-License-Identifier: Apache-2.0 */
/* The table of sco/README.md: planned bytes and the ledger's peak of a run, on the cpu backend. */
#include <stdio.h>

#include "tests/readme.h"
#include "tests/sco/sco_rig.h"

static void row(int layers, size_t boundary, size_t attention, sco_schedule schedule, size_t budget) {
  sco_config c = sco_config_default();
  c.layers = layers, c.item_bytes[SCO_BOUNDARY] = boundary, c.item_bytes[SCO_ATTENTION] = attention;
  c.schedule = schedule, c.host_budget = budget;
  rig r = {.full = true};
  size_t planned[LEV_MEM_CLASSES];
  char name[64];
  snprintf(name, sizeof name, "budget %s", T_COMMAS(budget));
  if (rig_open(&r, LEV_BACKEND_CPU, &c, 0) && T_EXPECT_OK(rig_run(&r, 1, true))) {
    sco_plan_bytes(r.plan, SCO_PERSISTENT, planned);
    T_EXPECT_EQ_I64(r.wrong, 0);
    t_readme("sco/README.md", "| %s | %s | %s | %s | %s |",
             schedule == SCO_PLAIN ? "plain"
             : budget == SIZE_MAX  ? "unlimited"
                                   : name,
             T_COMMAS(planned[LEV_MEM_DEVICE]), T_COMMAS(lev_ledger_peak(r.ledger, LEV_MEM_DEVICE)),
             T_COMMAS(planned[LEV_MEM_PINNED]), T_COMMAS(lev_ledger_peak(r.ledger, LEV_MEM_PINNED)));
  }
  rig_close(&r);
}

T_TEST(sco_readme) {
  if (!t_readme_runs()) return;
  const size_t m = 1 << 20;
  row(8, m, m + 32768, SCO_PLAIN, SIZE_MAX);
  row(8, m, m + 32768, SCO_BOUNDED, 4 * m);
  row(8, m, m + 32768, SCO_BOUNDED, SIZE_MAX);
  row(16, 4 * m, 0, SCO_PLAIN, SIZE_MAX);
  row(16, 4 * m, 0, SCO_BOUNDED, 32 * m);
  row(16, 4 * m, 0, SCO_BOUNDED, SIZE_MAX);
}
