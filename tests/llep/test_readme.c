/* SPDX-License-Identifier: Apache-2.0 */
/* The table of pipelined_llep/README.md: planned bytes, the ledger's peak of a run on the cpu backend, chunks, and how
 * full the fullest rank is before and after lending. */
#include <stdio.h>

#include "tests/llep/layer.h"
#include "tests/readme.h"

static void row(l_case c, llep_schedule schedule, l_routing routing, const char *name) {
  c.cfg.schedule = schedule, c.routing = routing;
  l_data d;
  l_make(&c, &d);
  l_run(&d);
  bool ok = true;
  for (int r = 0; r < c.ranks; ++r) ok &= T_EXPECT_OK(d.status[r]);
  if (ok) {
    l_check(&d, 1e-5);
    for (int r = 1; r < c.ranks; ++r) T_EXPECT(d.planned[r][0] == d.planned[0][0] && d.peak[r][0] == d.peak[0][0]);
    const llep_stats *s = &d.stats[0];
    char met[96] = "";
    if (schedule == LLEP_PLAIN)
      snprintf(met, sizeof met, " %lld | | |", (long long)s->chunks);
    else if (routing != L_ZIPF || t_seed() == T_SEED) /* its picks are random */
      snprintf(met, sizeof met, " %lld | %.2f | %.2f |", (long long)s->chunks, s->native_max / s->rows_mean,
               s->rows_max / s->rows_mean);
    t_readme("pipelined_llep/README.md", "| %s | %s | %s | %s |%s", schedule == LLEP_PLAIN ? "plain" : "bounded", name,
             T_COMMAS(d.planned[0][0]), T_COMMAS(d.peak[0][0]), met);
  }
  l_free(&d);
}

static l_case case_of(int ranks, int64_t tokens, int64_t experts, int64_t top_k) {
  l_case c = {.ranks = ranks};
  llep_config_init(&c.cfg);
  c.cfg.max_tokens = tokens, c.cfg.hidden = 32, c.cfg.inter = 16, c.cfg.experts = experts, c.cfg.top_k = top_k;
  c.cfg.chunk_rows = tokens, c.cfg.tile_rows = 256, c.cfg.min_rows = 64, c.cfg.gate = 1;
  for (int r = 0; r < ranks; ++r) c.tokens[r] = tokens;
  return c;
}

T_TEST(llep_readme) {
  if (!t_readme_runs()) return;
  const l_case cases[] = {case_of(4, 1024, 16, 4), case_of(8, 2048, 64, 8)};
  for (int i = 0; i < 2; ++i) {
    row(cases[i], LLEP_BOUNDED, L_BALANCED, "balanced");
    row(cases[i], LLEP_BOUNDED, L_ZIPF, "Zipf 1.2");
    row(cases[i], LLEP_BOUNDED, L_ONE_EXPERT, i == 0 ? "4 experts" : "8 experts");
    row(cases[i], LLEP_PLAIN, L_ZIPF, "any");
  }
}
