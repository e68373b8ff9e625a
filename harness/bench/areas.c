/* SPDX-License-Identifier: Apache-2.0 */
/* The areas of `levee bench`. */
#include "harness/bench/bench.h"

extern const bench_area bench_area_attn, bench_area_gemm, bench_area_grouped, bench_area_kernels, bench_area_modules;

const bench_area *const bench_areas[] = {
    &bench_area_kernels, &bench_area_attn, &bench_area_modules, &bench_area_gemm, &bench_area_grouped,
};
const int bench_n_areas = (int)(sizeof bench_areas / sizeof *bench_areas);
