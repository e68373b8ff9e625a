/* SPDX-License-Identifier: Apache-2.0 */
/* Private to area modules: each of the five modules alone, bounded, then plain, both compared first. */
#ifndef LEV_HARNESS_BENCH_MODULES_H
#define LEV_HARNESS_BENCH_MODULES_H

#include "harness/bench/bench.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MODULE_SAMPLES 8

/* Compares two device arrays [rows, cols] in sampled rows. */
LEV_MUST_CHECK lev_status module_same(bench *b, const char *what, lev_dtype dtype, const void *got, const void *want,
                                      int64_t rows, int64_t cols, double limit);
/* A communicator of one rank on the bench's device; module_leave ends it. */
typedef struct module_world {
  struct lev_comm_hub *hub;
  struct lev_comm *comm;
} module_world;
LEV_MUST_CHECK lev_status module_join(bench *b, module_world *out);
void module_leave(module_world *world);

lev_status module_llep(bench *b, const void *unused);
lev_status module_rdtp(bench *b, const void *one_pass); /* bool */
lev_status module_sco(bench *b, const void *unused);
lev_status module_oadamw(bench *b, const void *placement); /* oadamw_placement */
lev_status module_muon(bench *b, const void *unused);

#ifdef __cplusplus
}
#endif
#endif
