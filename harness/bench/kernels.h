/* SPDX-License-Identifier: Apache-2.0 */
/* Private to area kernels: what its files share. Every case runs one kernel on arrays of 1 GiB in bf16 (on the CPU 1
 * MiB), compared in sampled rows, and is stated as a fraction of the copy rate by the least bytes. */
#ifndef LEV_HARNESS_BENCH_KERNELS_H
#define LEV_HARNESS_BENCH_KERNELS_H

#include "harness/bench/bench.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KERNEL_SAMPLES 8
#define KERNEL_BF16_LIMIT 4e-3 /* relative; rounding to bf16 alone is 1.7e-3 */

/* A launch that can be repeated. */
typedef struct kernel_job {
  const lev_kernel *kernel;
  size_t bytes;
  const void *args; /* the caller's, alive while the job is used */
} kernel_job;
#define KERNEL_JOB(k, a) ((kernel_job){&(k), sizeof(a), &(a)})

LEV_MUST_CHECK lev_status kernel_launch(bench *b, const kernel_job *job);
/* Measures the job by its least bytes. */
LEV_MUST_CHECK lev_status kernel_measure(bench *b, kernel_job *job, double bytes);

/* Number of the s-th of KERNEL_SAMPLES rows: first and last among them. */
int64_t kernel_row(int64_t rows, int s);
/* The sampled rows of an array [rows, cols] into host memory [KERNEL_SAMPLES, cols], taken with bench_doubles. */
LEV_MUST_CHECK lev_status kernel_rows(bench *b, lev_dtype dtype, const void *x, int64_t rows, int64_t cols,
                                      double **out);
/* Array of random bf16 values, standard deviation `scale`. */
LEV_MUST_CHECK lev_status kernel_array(bench *b, int64_t count, double scale, void **out);
/* Device memory, not filled, or filled with zeros. */
LEV_MUST_CHECK lev_status kernel_zeros(bench *b, size_t bytes, void **out);

/* One function per kind of case; `arg` as its comment says. */
lev_status kernel_rmsnorm(bench *b, const void *unused);
lev_status kernel_rmsnorm_backward(bench *b, const void *accumulate); /* bool */
lev_status kernel_qk(bench *b, const void *norm);                     /* lev_qk_norm */
lev_status kernel_qk_backward(bench *b, const void *norm);
lev_status kernel_swiglu(bench *b, const void *unused);
lev_status kernel_swiglu_backward(bench *b, const void *unused);
lev_status kernel_gather(bench *b, const void *backward);  /* bool: dy and route weights, too */
lev_status kernel_combine(bench *b, const void *backward); /* bool: plain sums and route gradients instead of weights */
lev_status kernel_pack(bench *b, const void *unpack);      /* bool */
lev_status kernel_act(bench *b, const void *unused);
lev_status kernel_act_backward(bench *b, const void *unused);
lev_status kernel_add(bench *b, const void *unused);
lev_status kernel_cast(bench *b, const void *unused);
lev_status kernel_adamw(bench *b, const void *unused);
lev_status kernel_norm(bench *b, const void *unused);
lev_status kernel_embed(bench *b, const void *unused);
lev_status kernel_embed_backward(bench *b, const void *unused);
lev_status kernel_fold(bench *b, const void *unused);
lev_status kernel_residual(bench *b, const void *unused);

#ifdef __cplusplus
}
#endif
#endif
