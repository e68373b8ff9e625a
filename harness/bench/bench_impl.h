/* SPDX-License-Identifier: Apache-2.0 */
/* Private to harness/bench: the running set of cases. */
#ifndef LEV_HARNESS_BENCH_BENCH_IMPL_H
#define LEV_HARNESS_BENCH_BENCH_IMPL_H

#include "harness/bench/bench.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BENCH_SLABS 64 /* of one case */
#define BENCH_REPETITIONS 20
#define BENCH_LEAST 3
#define BENCH_LONG 5.0 /* seconds: work as long as that needs no warming up */
#define BENCH_WARM 1.0 /* seconds of warming up on a GPU, until its clocks are those of steady work */
/* Seconds of a repetition on a GPU, at least: so many calls in a row. Twenty cover the second in which a GPU at its
 * power limit moves its clocks up and down, by 7 % with matrix products: single calls would sample one phase of it. */
#define BENCH_SPAN 0.05
#define BENCH_WARM_RUNS 10000 /* at most */

struct bench {
  const bench_options *options;
  lev_device *device;
  lev_stream *stream;
  lev_event *event[2];
  void *slabs[BENCH_SLABS];
  int n_slabs;
  char device_name[128];
  double copy_ceiling, matmul_ceiling;
  /* of the running case */
  const bench_case *of;
  bench_result result;
  int checks;
  bool measured;
  uint32_t tensors;
};

LEV_MUST_CHECK lev_status bench_measure_ceilings(bench *b);
/* Gives back what the case took. */
void bench_release(bench *b);

/* ---- report.c ---- */

/* One line of the table, or one record, in options->out; and the record in the results file. */
LEV_MUST_CHECK lev_status bench_report(const bench *b, const bench_result *result);
LEV_MUST_CHECK lev_status bench_report_figure(const bench *b, const char *name, double value, const char *unit);
/* Whether records can be written, before anything is measured; makes the file. Errors: LEV_ERR_IO. */
LEV_MUST_CHECK lev_status bench_report_check(const bench_options *o);
void bench_report_head(const bench *b);
/* A line about the running case: why it was not measured. */
void bench_report_not(const bench *b, const char *what, const char *why);

/* Enqueued filling of memory with random values. */
typedef struct bench_random_args {
  lev_dtype dtype;
  void *to;
  int64_t count;
  double scale;
  uint32_t tensor;
} bench_random_args;
extern const lev_kernel bench_random_kernel;
#ifdef LEV_HAVE_CUDA
lev_status bench_random_cuda(const void *args, void *stream);
#endif

/* Element i of a random array: the sum of four uniform numbers, so that CPU and GPU give the same bits. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline double
    bench_random_value(uint32_t tensor, uint64_t i, double scale) {
  uint64_t x = (i + 1) * 0x9E3779B97F4A7C15u + (uint64_t)tensor * 0xD1B54A32D192ED03u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  int64_t sum = (int64_t)(x & 0xffff) + (int64_t)(x >> 16 & 0xffff) + (int64_t)(x >> 32 & 0xffff) + (int64_t)(x >> 48);
  return (double)(2 * sum - 4 * 65535) * (scale * 0.8660254037844386 / 65536); /* variance of the sum: 4 / 12 */
}

#ifdef __cplusplus
}
#endif
#endif
