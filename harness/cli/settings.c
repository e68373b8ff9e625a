/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/cli/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/dims.h"
#include "harness/report/memory_report.h"

lev_status lev_settings(lev_config *config, int *argc, char **argv) {
  lev_config_defaults(config);
  if (*argc < 1 || argv[0][0] == '-') return lev_fail(LEV_ERR_ARG, "expected CONFIG.toml as the first argument");
  LEV_TRY(lev_config_read(config, argv[0]));
  --*argc;
  for (int i = 0; i < *argc; ++i) argv[i] = argv[i + 1];
  LEV_TRY(lev_config_arguments(config, argc, argv));
  LEV_TRY(lev_config_validate(config));
  if (*argc == 1 && strcmp(argv[0], "--print-config") == 0) { /* any verb: show what was resolved, do nothing */
    lev_config_print(config, stdout);
    exit(fflush(stdout) == 0 && !ferror(stdout) ? 0 : lev_status_exit_code(LEV_ERR_IO));
  }
  return LEV_OK;
}

void lev_print_model(const lev_config *config, const lev_rank_plan *plan) {
  bool small = plan->total < 1000000000;
  double unit = small ? 1e6 : 1e9;
  const char *letter = small ? "M" : "B";
  long long ranks = config->parallel.ranks;
  printf(
      "model %s: %.3f %s parameters, %.3f %s active; %s, context %lld, %lld rank%s on %s, %lld tokens each at most\n",
      config->model.name[0] ? config->model.name : "without name", (double)plan->total / unit, letter,
      (double)plan->active / unit, letter, lev_dtype_name((lev_dtype)config->model.dtype),
      (long long)config->train.context, ranks, ranks == 1 ? "" : "s", lev_backend_name(lev_run_backend(config)),
      (long long)plan->max_tokens);
}

void lev_print_together(const lev_rank_plan *plan, const int *of, int ranks) {
  size_t device = 0, host = 0;
  char a[24], b[24];
  for (int r = 0; r < ranks; ++r) {
    const lev_rank_plan *p = &plan[of ? of[r] : r];
    device = lev_sat_add(device, lev_ledger_peak(p->ledger, LEV_MEM_DEVICE));
    host = lev_sat_add(host, lev_rank_plan_host(p));
  }
  if (ranks > 1)
    printf("all %d ranks together: %s of devices, %s of pinned and host memory\n", ranks, lev_bytes_text(device, a),
           lev_bytes_text(host, b));
}
