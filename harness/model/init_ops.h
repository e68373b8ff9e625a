/* SPDX-License-Identifier: Apache-2.0 */
/* First values of weights, written where the weights lie (see lev_param_init): the same bits on every backend.
 *
 * A GPU's logarithm and cosine may differ from the host's in the last bit. So it only stores a value that rounds to the
 * same bits at both ends of an interval of `margin` around it, and lists every other element; the caller works those
 * out on the host and patches them. With LEV_INIT_MARGIN about one f32 value in 2^22 is listed, and hardly any bf16
 * value; in f64 all would be, which is why that type has no CUDA side here (LEV_ERR_UNSUPPORTED). */
#ifndef LEV_MODEL_INIT_OPS_H
#define LEV_MODEL_INIT_OPS_H

#include "common/device.h"
#include "common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Relative; errors of a few units in the last place of f64 on either side are 2^-50. */
#define LEV_INIT_MARGIN 0x1p-47

/* out[i] = std x (normal number of element first + i, |number| <= 3), or 1 where `constant`. */
typedef struct lev_init_args {
  lev_dtype dtype;
  bool constant;
  uint64_t seed;
  uint32_t tensor; /* lev_tensor.id */
  double std, margin;
  int64_t first, n; /* elements, row-major in the whole tensor */
  void *out;        /* T [n] */
  int64_t place;    /* number under which out[0] is listed */
  int64_t *list;    /* [1 + cap]: how many were listed (in no order; those past cap are only counted), their places. The
                       caller zeroes list[0]. Not used on the cpu, which has the host's own values */
  int64_t cap;
} lev_init_args;
extern const lev_kernel lev_init_kernel;

/* out[place[i]] = value[i] */
#define LEV_INIT_PATCHES 24
typedef struct lev_init_patch_args {
  lev_dtype dtype;
  int n;
  void *out; /* T */
  int64_t place[LEV_INIT_PATCHES];
  double value[LEV_INIT_PATCHES]; /* rounded to T once */
} lev_init_patch_args;
extern const lev_kernel lev_init_patch_kernel;

/* CUDA launchers of the kernels above. */
lev_status lev_init_cuda(const void *args, void *cuda_stream);
lev_status lev_init_patch_cuda(const void *args, void *cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
