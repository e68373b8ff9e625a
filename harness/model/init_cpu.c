/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/model/init_ops.h"

#include "harness/model/params.h"

static void init(const void *args) {
  const lev_init_args *a = args;
  lev_model model = {.init_std = a->std};
  lev_tensor tensor = {.kind = a->constant ? LEV_PARAM_NORM : LEV_PARAM_DENSE, .id = a->tensor};
  for (int64_t i = 0; i < a->n; ++i)
    lev_dtype_store(a->dtype, a->out, i, lev_param_init(&model, &tensor, a->seed, a->first + i));
}
const lev_kernel lev_init_kernel = {"model.init", init, LEV_CUDA(lev_init_cuda)};

static void patch(const void *args) {
  const lev_init_patch_args *a = args;
  for (int i = 0; i < a->n; ++i) lev_dtype_store(a->dtype, a->out, a->place[i], a->value[i]);
}
const lev_kernel lev_init_patch_kernel = {"model.init_patch", patch, LEV_CUDA(lev_init_patch_cuda)};
