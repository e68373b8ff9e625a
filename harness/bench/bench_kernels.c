/* SPDX-License-Identifier: Apache-2.0 */
/* Area kernels: everything between the matrix products, against the copy rate. */
#include "harness/bench/kernels.h"
#include "harness/model/params.h"

lev_status kernel_launch(bench *b, const kernel_job *job) {
  return lev_launch(bench_stream(b), job->kernel, job->args, job->bytes);
}

static lev_status once(bench *b, void *job) {
  return kernel_launch(b, job);
}

lev_status kernel_measure(bench *b, kernel_job *job, double bytes) {
  return bench_measure(b, &(bench_work){.once = once, .ctx = job, .bytes = bytes}, BENCH_COPY_FRACTION);
}

int64_t kernel_row(int64_t rows, int s) {
  return s * (rows - 1) / (KERNEL_SAMPLES - 1);
}

lev_status kernel_rows(bench *b, lev_dtype dtype, const void *x, int64_t rows, int64_t cols, double **out) {
  LEV_TRY(bench_doubles(b, KERNEL_SAMPLES * cols, out));
  for (int s = 0; s < KERNEL_SAMPLES; ++s)
    LEV_TRY(bench_read(b, dtype, x, kernel_row(rows, s) * cols, cols, *out + s * cols));
  return LEV_OK;
}

lev_status kernel_array(bench *b, int64_t count, double scale, void **out) {
  LEV_TRY(bench_alloc(b, (size_t)count * sizeof(lev_bf16), out));
  return bench_random(b, LEV_BF16, *out, count, scale);
}

lev_status kernel_zeros(bench *b, size_t bytes, void **out) {
  LEV_TRY(bench_alloc(b, bytes, out));
  return lev_fill(bench_stream(b), *out, 0, bytes, "bench.zero");
}

static const lev_qk_norm none = LEV_QK_NORM_NONE, full = LEV_QK_NORM_FULL, head = LEV_QK_NORM_HEAD;
static const bool no = false, yes = true;

static const bench_case cases[] = {
    {"kernels.rmsnorm.forward", "262,144 x 2048", kernel_rmsnorm, NULL, false},
    {"kernels.rmsnorm.backward", "262,144 x 2048", kernel_rmsnorm_backward, &no, false},
    {"kernels.rmsnorm.backward_add", "262,144 x 2048, gradient added", kernel_rmsnorm_backward, &yes, false},
    {"kernels.rope.forward", "262,144 x 16 heads of 128", kernel_qk, &none, false},
    {"kernels.rope.backward", "262,144 x 16 heads of 128", kernel_qk_backward, &none, false},
    {"kernels.qk_norm_full.forward", "262,144 x 16 heads of 128, norm and rotation", kernel_qk, &full, false},
    {"kernels.qk_norm_full.backward", "262,144 x 16 heads of 128, norm and rotation", kernel_qk_backward, &full, false},
    {"kernels.qk_norm_head.forward", "262,144 x 16 heads of 128, norm and rotation", kernel_qk, &head, false},
    {"kernels.qk_norm_head.backward", "262,144 x 16 heads of 128, norm and rotation", kernel_qk_backward, &head, false},
    {"kernels.swiglu.forward", "262,144 x 2048", kernel_swiglu, NULL, false},
    {"kernels.swiglu.backward", "262,144 x 2048", kernel_swiglu_backward, NULL, false},
    {"kernels.gather.forward", "65,536 x 2048 to 8 experts", kernel_gather, &no, false},
    {"kernels.gather.backward", "65,536 x 2048 to 8 experts, with gradient and weights", kernel_gather, &yes, false},
    {"kernels.combine.forward", "8 x 65,536 x 2048, weighted, added", kernel_combine, &no, false},
    {"kernels.combine.backward", "8 x 65,536 x 2048", kernel_combine, &yes, false},
    {"kernels.pack", "262,144 x 2048 in 8 runs", kernel_pack, &no, false},
    {"kernels.unpack", "262,144 x 2048 in 8 runs", kernel_pack, &yes, false},
    {"kernels.expert_act.forward", "524,288 x 2 x 1024", kernel_act, NULL, false},
    {"kernels.expert_act.backward", "524,288 x 2 x 1024", kernel_act_backward, NULL, false},
    {"kernels.add", "2^29 f32", kernel_add, NULL, false},
    {"kernels.cast", "2^29 f32 to bf16", kernel_cast, NULL, false},
    {"kernels.adamw", "2^28 parameters, bf16, f32 state", kernel_adamw, NULL, false},
    {"kernels.grad_norm", "2^30 bf16", kernel_norm, NULL, false},
    {"kernels.embed.forward", "262,144 x 2048", kernel_embed, NULL, false},
    {"kernels.embed.backward", "262,144 x 2048", kernel_embed_backward, NULL, false},
    {"kernels.xent_fold", "8192 x 131,072 f32 logits", kernel_fold, NULL, false},
    {"kernels.xent_residual", "8192 x 131,072 f32 logits", kernel_residual, NULL, false},
};

static double least(const bench_result *results, int n) {
  double x = results[0].copy_fraction;
  for (int i = 1; i < n; ++i)
    if (results[i].copy_fraction < x) x = results[i].copy_fraction;
  return x;
}

const bench_area bench_area_kernels = {.name = "kernels",
                                       .cases = cases,
                                       .n_cases = sizeof cases / sizeof *cases,
                                       .summary = "min_copy_fraction",
                                       .summary_unit = "fraction",
                                       .summarize = least};
