/* SPDX-License-Identifier: Apache-2.0 */
/* Runs single kernels of the model on the backend under test, over memory that both sides reach. */
#ifndef LEV_TESTS_MODEL_OPS_RIG_H
#define LEV_TESTS_MODEL_OPS_RIG_H

#include "common/device.h"

/* Everything that ops_room gave is free again. */
void ops_begin(void);
/* Poisoned memory, aligned to 256 bytes, until the next ops_begin. */
void *ops_room(size_t bytes);
/* Scratch for one operation at a time. */
void *ops_scratch(size_t *bytes);
/* Runs and waits. */
void ops_run(const lev_kernel *kernel, const void *args, size_t args_bytes);
#define OPS_RUN(kernel, args) ops_run(&(kernel), &(args), sizeof(args))
/* Declares name as an array of `count` values in shared memory. */
#define OPS_ROOM(type, name, count) type *name = ops_room(sizeof(type) * (size_t)(count))

#endif
