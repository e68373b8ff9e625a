/* SPDX-License-Identifier: Apache-2.0 */
/* Global gradient norm: launches and the clipping rule. */
#include <math.h>

#include "offload_adamw/offload_adamw_ops.h"

size_t oadamw_norm_scratch_bytes(int64_t count) {
  if (count < 0) return SIZE_MAX;
  return lev_align_up(lev_bytes(lev_ceil_div(count, OADAMW_NORM_BLOCK), 2, sizeof(double)));
}

lev_status oadamw_norm_launch(lev_stream *stream, lev_dtype dtype, const void *grads, int64_t count, double *scratch,
                              double *out2) {
  if (!stream || !out2 || count < 0 || (count > 0 && (!grads || !scratch)))
    return lev_fail(LEV_ERR_ARG, "oadamw_norm_launch: NULL pointer or negative count %lld", (long long)count);
  if (dtype != LEV_F64 && dtype != LEV_F32 && dtype != LEV_BF16)
    return lev_fail(LEV_ERR_ARG, "oadamw_norm_launch: gradients of type %s", lev_dtype_name(dtype));
  if (count == 0) return LEV_OK;
  oadamw_norm_args args = {.grads = grads, .count = count, .dtype = dtype, .scratch = scratch, .out2 = out2};
  LEV_TRY(LEV_LAUNCH(stream, &oadamw_kernel_norm_blocks, args));
  return LEV_LAUNCH(stream, &oadamw_kernel_norm_tree, args);
}

double oadamw_clip_scale(double norm_sq, double max_norm) {
  if (!isfinite(norm_sq)) return NAN;
  if (!(max_norm > 0)) return 1;
  double scale = max_norm / (sqrt(norm_sq) + 1e-6);
  return scale < 1 ? scale : 1;
}
