/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's backend API as loaded at run time, and the composite attention graph in its terms (private). Nothing where
 * the headers are missing. */
#ifndef LEV_MODEL_CUDNN_IMPL_H
#define LEV_MODEL_CUDNN_IMPL_H

#include "harness/model/attention_graph.h"

#ifdef LEV_HAVE_CUDNN
#include <cudnn_backend.h>

/* The library's functions: every call goes through this table, nothing is linked. */
typedef struct lev_cudnn_api {
  size_t (*version)(void);
  const char *(*error_string)(cudnnStatus_t);
  void (*last_error)(char *, size_t);
  cudnnStatus_t (*create)(cudnnHandle_t *);
  cudnnStatus_t (*destroy)(cudnnHandle_t);
  cudnnStatus_t (*set_stream)(cudnnHandle_t, cudaStream_t);
  cudnnStatus_t (*descriptor_create)(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t *);
  cudnnStatus_t (*descriptor_destroy)(cudnnBackendDescriptor_t);
  cudnnStatus_t (*finalize)(cudnnBackendDescriptor_t);
  cudnnStatus_t (*set)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, int64_t,
                       const void *);
  cudnnStatus_t (*get)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, int64_t,
                       int64_t *, void *);
  cudnnStatus_t (*execute)(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t);
} lev_cudnn_api;

/* Names of the tensors that a caller passes at execution. */
typedef enum lev_cudnn_tensor {
  LEV_CUDNN_Q = 1,
  LEV_CUDNN_K,
  LEV_CUDNN_V,
  LEV_CUDNN_O,
  LEV_CUDNN_LSE,
  LEV_CUDNN_D_O,
  LEV_CUDNN_DQ,
  LEV_CUDNN_DK,
  LEV_CUDNN_DV,
  LEV_CUDNN_DQ_SUM, /* f32, heads x queries x dim */
  LEV_CUDNN_DELTA,  /* f32, heads x queries */
  LEV_CUDNN_SCALE,  /* by value from here on */
  LEV_CUDNN_LOWEST,
  LEV_CUDNN_ONE,
  LEV_CUDNN_WINDOW,
  LEV_CUDNN_LENGTHS,
  LEV_CUDNN_DK_HEADS,
  LEV_CUDNN_DV_HEADS,
  LEV_CUDNN_PLACES, /* and one for each attn_place behind it */
  LEV_CUDNN_TENSORS = LEV_CUDNN_PLACES + ATTN_PLACES
} lev_cudnn_tensor;

/* Builds the operation graph of a block. `handle` may be NULL, for planning with described device properties. The
 * caller destroys *graph. Errors: LEV_ERR_UNSUPPORTED with the library's words. */
LEV_MUST_CHECK lev_status lev_cudnn_build(const lev_cudnn_api *api, cudnnHandle_t handle, const attn_block_shape *shape,
                                          cudnnBackendDescriptor_t *graph);
#endif
#endif
