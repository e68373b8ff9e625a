/* SPDX-License-Identifier: Apache-2.0 */
/* The products and kernels that every schedule is made of. */
#include "ring_dtp/ring_dtp_plan.h"

lev_status rdtp_logits(const rdtp_run *run, const rdtp_piece *piece) {
  const rdtp_plan *p = run->p;
  int64_t hidden = p->config.hidden;
  lev_gemm_args args = {.m = piece->rows,
                        .n = piece->cols,
                        .k = hidden,
                        .trans_b = true,
                        .a = piece->h,
                        .b = piece->w,
                        .c = p->tile,
                        .lda = hidden,
                        .ldb = hidden,
                        .ldc = p->tile_ld,
                        .ab_type = p->config.dtype,
                        .c_type = p->arith,
                        .alpha = 1.0,
                        .beta = 0.0};
  return lev_gemm(run->stream, &args);
}

lev_status rdtp_fold(const rdtp_run *run, const rdtp_piece *piece, const int32_t *labels, void *state, bool first) {
  const rdtp_plan *p = run->p;
  rdtp_fold_args args = {.dtype = p->config.dtype,
                         .tile = p->tile,
                         .ld = p->tile_ld,
                         .rows = piece->rows,
                         .cols = piece->cols,
                         .begin = piece->begin,
                         .labels = labels,
                         .state = state,
                         .first = first};
  return LEV_LAUNCH(run->stream, &rdtp_fold_kernel, args);
}

lev_status rdtp_residual(const rdtp_run *run, const rdtp_piece *piece, const void *record) {
  const rdtp_plan *p = run->p;
  rdtp_residual_args args = {.dtype = p->config.dtype,
                             .tile = p->tile,
                             .ld = p->tile_ld,
                             .rows = piece->rows,
                             .cols = piece->cols,
                             .begin = piece->begin,
                             .record = record,
                             .scale = run->args->grad_scale};
  return LEV_LAUNCH(run->stream, &rdtp_residual_kernel, args);
}

/* Row pitch of the residual in scalars of T. */
static int64_t rdtp_residual_ld(const rdtp_plan *p) {
  return p->tile_ld * (int64_t)(p->a_bytes / p->t_bytes);
}

lev_status rdtp_grad_h(const rdtp_run *run, const rdtp_piece *piece, void *dh, lev_dtype type, bool add) {
  const rdtp_plan *p = run->p;
  int64_t hidden = p->config.hidden;
  lev_gemm_args args = {.m = piece->rows,
                        .n = hidden,
                        .k = piece->cols,
                        .a = p->tile,
                        .b = piece->w,
                        .c = dh,
                        .lda = rdtp_residual_ld(p),
                        .ldb = hidden,
                        .ldc = hidden,
                        .ab_type = p->config.dtype,
                        .c_type = type,
                        .alpha = 1.0,
                        .beta = add ? 1.0 : 0.0};
  return lev_gemm(run->stream, &args);
}

lev_status rdtp_grad_w(const rdtp_run *run, const rdtp_piece *piece, void *dw, bool add) {
  const rdtp_plan *p = run->p;
  int64_t hidden = p->config.hidden;
  lev_gemm_args args = {.m = piece->cols,
                        .n = hidden,
                        .k = piece->rows,
                        .trans_a = true,
                        .a = p->tile,
                        .b = piece->h,
                        .c = dw,
                        .lda = rdtp_residual_ld(p),
                        .ldb = hidden,
                        .ldc = hidden,
                        .ab_type = p->config.dtype,
                        .c_type = p->arith,
                        .alpha = 1.0,
                        .beta = add ? 1.0 : 0.0};
  return lev_gemm(run->stream, &args);
}

lev_status rdtp_finish(const rdtp_run *run, const int32_t *labels, const void *state, void *record, int64_t rows,
                       int64_t begin, int64_t end) {
  const rdtp_plan *p = run->p;
  rdtp_finish_args args = {.dtype = p->config.dtype,
                           .labels = labels,
                           .state = state,
                           .record = record,
                           .rows = rows,
                           .vocab = p->config.vocab,
                           .loss_begin = begin,
                           .loss_end = end,
                           .scale = run->args->grad_scale,
                           .sums = run->args->sums};
  return LEV_LAUNCH(run->stream, &rdtp_finish_kernel, args);
}

lev_status rdtp_add(const rdtp_run *run, void *dst, const void *src, int64_t count) {
  rdtp_add_args args = {.dtype = run->p->config.dtype, .dst = dst, .src = src, .count = count};
  return LEV_LAUNCH(run->stream, &rdtp_add_kernel, args);
}

lev_status rdtp_store(const rdtp_run *run, void *dst, const void *src, int64_t count) {
  rdtp_store_args args = {.dtype = run->p->config.dtype, .dst = dst, .src = src, .count = count};
  return LEV_LAUNCH(run->stream, &rdtp_store_kernel, args);
}
