/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that run on any backend: T_BACKEND=cpu (default) or cuda. With cuda and no GPU the whole program is one
 * failure. */
#ifndef LEV_TESTS_BACKEND_H
#define LEV_TESTS_BACKEND_H

#include <stddef.h>

#include "common/device.h"

/* The backend asked for; marks the running test as one of its cases (the closing lines count those on cuda). */
lev_backend t_backend(void);

/* The GPU of a rank: ranks share those there are in turn, as `levee train` does; 0 on other backends. */
int t_gpu(int rank);

/* Memory that both the test's own code and kernels of t_backend() reach: malloc, or pinned memory on cuda. Any thread;
 * exits when there is none. */
void *t_alloc(size_t bytes);
void t_free(void *memory);

/* The class for a slab that the test's own code reads or writes: LEV_MEM_PINNED instead of LEV_MEM_DEVICE on cuda. */
lev_mem t_mem(lev_mem cls);

#endif
