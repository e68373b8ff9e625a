/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/model/ops_rig.h"

#include <stdlib.h>

#include "common/dims.h"
#include "harness/model/ops.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

#define POOL ((size_t)64 << 20)
#define SCRATCH ((size_t)8 << 20)

static unsigned char *pool, *scratch;
static size_t used;
static lev_device *device;
static lev_stream *stream;

static void close_all(void) {
  lev_device_close(device);
  t_free(pool);
  t_free(scratch);
}

void ops_begin(void) {
  if (!pool) {
    pool = t_alloc(POOL), scratch = t_alloc(SCRATCH);
    atexit(close_all);
  }
  used = 0;
  lev_backend backend = t_backend();
  if (device) return;
  T_EXPECT_OK(lev_device_open(&(lev_device_config){.backend = backend}, &device));
  T_EXPECT_OK(lev_stream_create(device, "ops", &stream));
}

void *ops_room(size_t bytes) {
  void *out = pool + used;
  used += lev_align_up(bytes);
  if (!T_EXPECT(used <= POOL)) return pool;
  num_poison(out, bytes);
  return out;
}

void *ops_scratch(size_t *bytes) {
  *bytes = lev_ops_scratch_bytes(t_backend());
  T_EXPECT(*bytes <= SCRATCH);
  num_poison(scratch, *bytes);
  return scratch;
}

void ops_run(const lev_kernel *kernel, const void *args, size_t args_bytes) {
  T_EXPECT_OK(lev_launch(stream, kernel, args, args_bytes));
  T_EXPECT_OK(lev_stream_sync(stream));
}
