/* SPDX-License-Identifier: Apache-2.0 */
/* Small kernels of the device tests, and their CUDA side. */
#ifndef LEV_TESTS_COMMON_TEST_KERNELS_H
#define LEV_TESTS_COMMON_TEST_KERNELS_H

#include <stdint.h>

#include "common/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* log[(*at)++] = value, after a pause. */
typedef struct step_args {
  int64_t *log, *at;
  int64_t value;
  int64_t ms;
} step_args;

/* *to = *from + add, after a pause. */
typedef struct move_args {
  const int64_t *from;
  int64_t *to;
  int64_t add;
  int64_t ms;
} move_args;

lev_status test_step_cuda(const void *args, void *stream);
lev_status test_move_cuda(const void *args, void *stream);
lev_status test_gate_cuda(const void *args, void *stream); /* const int *gate: passes once it is not 0 */
lev_status test_big_cuda(const void *args, void *stream); /* copies its LEV_ARGS_MAX bytes to where the first 8 point */

#ifdef __cplusplus
}
#endif
#endif
