/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of the module and their arguments. All pointers are in the memory that the kernel runs on, unless said. */
#ifndef LEV_OFFLOAD_ADAMW_OFFLOAD_ADAMW_OPS_H
#define LEV_OFFLOAD_ADAMW_OFFLOAD_ADAMW_OPS_H

#include "common/device.h"
#include "common/dtype.h"
#include "offload_adamw/offload_adamw.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Constants of one step and one segment, in double; kernels round each to A once. */
typedef struct oadamw_rates {
  double grad_scale;
  double beta1, one_beta1; /* beta1, 1 - beta1 */
  double beta2, one_beta2;
  double inv_sqrt_bc2; /* 1 / sqrt(1 - beta2^step) */
  double eps;
  double decay; /* lr * weight_decay */
  double rate;  /* lr / (1 - beta1^step) */
} oadamw_rates;

typedef struct oadamw_host_slot oadamw_host_slot;

/* One piece: `count` consecutive elements of one segment. */
typedef struct oadamw_update_args {
  const void *grads;                   /* [count] grad_dtype */
  void *params;                        /* [count] param_dtype, written only */
  void *master, *exp_avg, *exp_avg_sq; /* [count] A */
  int64_t count;
  lev_dtype param_dtype, grad_dtype;
  oadamw_simd simd; /* host only; resolved, never AUTO */
  oadamw_rates rates;
  oadamw_host_slot *slot; /* cuda, host_update: where the arguments wait for their turn */
} oadamw_update_args;

/* Arguments of an update that a GPU's stream will run on the host. */
struct oadamw_host_slot {
  struct oadamw_team *team; /* shares it */
  oadamw_update_args args;
  int busy; /* atomic; from the launch until the update has run */
};

extern const lev_kernel oadamw_kernel_update;      /* on the device */
extern const lev_kernel oadamw_kernel_host_update; /* on host memory, on every backend */

/* master = params, moments = 0; or params = round(master). The state may be pinned: a GPU reaches it over the bus. */
typedef struct oadamw_convert_args {
  const void *params_in;               /* init: [count] param_dtype */
  void *params_out;                    /* publish: [count] param_dtype */
  void *master, *exp_avg, *exp_avg_sq; /* [count] A; the moments are NULL for publish */
  int64_t count;
  lev_dtype param_dtype;
} oadamw_convert_args;
extern const lev_kernel oadamw_kernel_init;
extern const lev_kernel oadamw_kernel_publish;

typedef struct oadamw_norm_args {
  const void *grads; /* [count] */
  int64_t count;
  lev_dtype dtype;
  double *scratch; /* [blocks, 2]: sum of squares, non-finite count */
  double *out2;
} oadamw_norm_args;
extern const lev_kernel oadamw_kernel_norm_blocks; /* grads -> scratch */
extern const lev_kernel oadamw_kernel_norm_tree;   /* scratch -> out2 += */

#ifdef LEV_HAVE_CUDA
lev_status oadamw_update_cuda(const void *args, void *stream);
lev_status oadamw_host_update_cuda(const void *args, void *stream);
lev_status oadamw_init_cuda(const void *args, void *stream);
lev_status oadamw_publish_cuda(const void *args, void *stream);
lev_status oadamw_norm_blocks_cuda(const void *args, void *stream);
lev_status oadamw_norm_tree_cuda(const void *args, void *stream);
#endif

/* ---- host update functions, one table per instruction set; index: oadamw_pair ---- */
typedef enum oadamw_pair { /* param_dtype, grad_dtype */
                           OADAMW_F64_F64,
                           OADAMW_F32_F32,
                           OADAMW_F32_BF16,
                           OADAMW_BF16_F32,
                           OADAMW_BF16_BF16,
                           OADAMW_PAIRS
} oadamw_pair;
/* OADAMW_PAIRS if the combination is not supported. */
oadamw_pair oadamw_pair_of(lev_dtype param, lev_dtype grad);

typedef void (*oadamw_update_fn)(const oadamw_update_args *args);
extern const oadamw_update_fn oadamw_scalar_table[OADAMW_PAIRS];
#if defined(__x86_64__)
extern const oadamw_update_fn oadamw_avx2_table[OADAMW_PAIRS];
extern const oadamw_update_fn oadamw_avx512_table[OADAMW_PAIRS];
#endif

/* Elements [begin, end) of the piece, one at a time: the scalar path, and head and tail of the vector paths. */
void oadamw_scalar_range(oadamw_pair pair, const oadamw_update_args *args, int64_t begin, int64_t end);

#ifdef __cplusplus
}
#endif
#endif
