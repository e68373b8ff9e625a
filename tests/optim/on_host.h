/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that a test writes for the host alone. */
#ifndef LEV_TESTS_OPTIM_ON_HOST_H
#define LEV_TESTS_OPTIM_ON_HOST_H

#include "common/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* On a GPU's stream: waits for it, then runs fn on the caller's thread. */
lev_status test_on_host(void (*fn)(const void *args), const void *args, void *stream);

#ifdef __cplusplus
}
#endif

/* Declares kernel `name` around the function `fn`. */
#ifdef LEV_HAVE_CUDA
#define TEST_HOST_KERNEL(name, fn)                                                                                     \
  static lev_status fn##_cuda(const void *args, void *stream) {                                                        \
    return test_on_host(fn, args, stream);                                                                             \
  }                                                                                                                    \
  static const lev_kernel name = {"test." #fn, fn, fn##_cuda}
#else
#define TEST_HOST_KERNEL(name, fn) static const lev_kernel name = {"test." #fn, fn, NULL}
#endif

#endif
