/* SPDX-License-Identifier: Apache-2.0 */
/* Area modules: what each bounded schedule costs and saves against the plain one. */
#include "common/comm.h"
#include "harness/bench/modules.h"
#include "offload_adamw/offload_adamw.h"

lev_status module_same(bench *b, const char *what, lev_dtype dtype, const void *got, const void *want, int64_t rows,
                       int64_t cols, double limit) {
  double *x, *y;
  LEV_TRY(bench_doubles(b, MODULE_SAMPLES * cols, &x));
  LEV_TRY(bench_doubles(b, MODULE_SAMPLES * cols, &y));
  for (int s = 0; s < MODULE_SAMPLES; ++s) {
    int64_t first = s * (rows - 1) / (MODULE_SAMPLES - 1) * cols;
    LEV_TRY(bench_read(b, dtype, got, first, cols, x + s * cols));
    LEV_TRY(bench_read(b, dtype, want, first, cols, y + s * cols));
  }
  return bench_close(b, what, x, y, MODULE_SAMPLES * cols, limit);
}

lev_status module_join(bench *b, module_world *out) {
  *out = (module_world){0};
  LEV_TRY(lev_comm_hub_create(1, 0, &out->hub));
  return lev_comm_local_join(out->hub, 0, bench_device(b), &out->comm);
}

void module_leave(module_world *world) {
  lev_comm_destroy(world->comm);
  lev_comm_hub_destroy(world->hub);
}

static const bool no = false, yes = true;
static const oadamw_placement gpu = OADAMW_GPU, cpu = OADAMW_CPU, split = OADAMW_SPLIT;

static const bench_case cases[] = {
    {"modules.pipelined_llep", "32,768 tokens, 64 experts of 1024, top 8, H 2048, forward and backward", module_llep,
     NULL, false},
    {"modules.ring_dtp", "32,768 tokens, H 2048, V 151,936, two passes", module_rdtp, &no, false},
    {"modules.ring_dtp.one_pass", "32,768 tokens, H 2048, V 151,936, one pass", module_rdtp, &yes, false},
    {"modules.sco", "16 layers of 65,536 x 2048, 8 products of 2048 each way", module_sco, NULL, false},
    {"modules.offload_adamw.gpu", "2^28 parameters", module_oadamw, &gpu, false},
    {"modules.offload_adamw.cpu", "2^28 parameters", module_oadamw, &cpu, false},
    {"modules.offload_adamw.split", "2^28 parameters, half on each side", module_oadamw, &split, false},
    {"modules.muon", "192 matrices of 2048 x 1024", module_muon, NULL, false},
};

const bench_area bench_area_modules = {.name = "modules", .cases = cases, .n_cases = sizeof cases / sizeof *cases};
