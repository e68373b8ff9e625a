/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are threads: kernels launched by several at once, of unlike shapes, neither fail nor change a bit. */
#include <stdio.h>
#include <string.h>

#include "common/dims.h"
#include "harness/model/ops.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

enum { THREADS = 4, ROUNDS = 100, ROWS = 33, DIM = 64 };

/* What a thread works on: `heads` decides how much shared memory its kernels take. */
typedef struct worker {
  lev_device *device;
  lev_stream *stream;
  lev_qk_args args;
  unsigned char *memory, *first;
  size_t out_bytes;
} worker;

static void *part(worker *w, size_t *at, size_t bytes) {
  void *out = w->memory + *at;
  *at += lev_align_up(bytes);
  return out;
}

static bool open_worker(worker *w, int64_t heads) {
  size_t cols = (size_t)heads * DIM, row_bytes = ROWS * cols * sizeof(lev_bf16), at = 0;
  size_t scratch = lev_ops_scratch_bytes(t_backend());
  w->out_bytes = 2 * lev_align_up(row_bytes) + lev_align_up(cols * sizeof(float));
  w->memory = t_alloc(2 * lev_align_up(row_bytes) + lev_align_up(cols * 2) + w->out_bytes + lev_align_up(scratch));
  w->first = t_alloc(w->out_bytes);
  void *x = part(w, &at, row_bytes), *dy = part(w, &at, row_bytes), *weight = part(w, &at, cols * sizeof(lev_bf16));
  num_random(LEV_BF16, x, NULL, (int64_t)(ROWS * cols), 1, 1);
  num_random(LEV_BF16, dy, NULL, (int64_t)(ROWS * cols), 1, 2);
  num_random(LEV_BF16, weight, NULL, (int64_t)cols, 1, 3);
  w->args = (lev_qk_args){.dtype = LEV_BF16,
                          .rows = ROWS,
                          .heads = heads,
                          .head_dim = DIM,
                          .norm = LEV_QK_NORM_FULL,
                          .eps = 1e-6,
                          .x = x,
                          .w = weight,
                          .dy = dy,
                          .scratch_bytes = scratch};
  w->args.y = part(w, &at, row_bytes), w->args.dx = part(w, &at, row_bytes);
  w->args.dw = part(w, &at, cols * sizeof(float)), w->args.scratch = part(w, &at, scratch);
  return T_EXPECT_OK(lev_device_open(&(lev_device_config){.backend = t_backend()}, &w->device)) &&
         T_EXPECT_OK(lev_stream_create(w->device, "ops", &w->stream));
}

static bool run_round(worker *w) {
  memset(w->args.y, 0, w->out_bytes);
  return T_EXPECT_OK(LEV_LAUNCH(w->stream, &lev_qk_kernel, w->args)) &&
         T_EXPECT_OK(LEV_LAUNCH(w->stream, &lev_qk_backward_kernel, w->args)) &&
         T_EXPECT_OK(lev_stream_sync(w->stream));
}

static void work(int index, void *ctx) {
  static const int64_t heads[THREADS] = {1, 3, 8, 30};
  worker w = {0};
  (void)ctx;
  bool ok = open_worker(&w, heads[index]) && run_round(&w);
  if (ok) memcpy(w.first, w.args.y, w.out_bytes);
  for (int i = 0; ok && i < ROUNDS; ++i)
    ok = run_round(&w) && T_EXPECT_MSG(memcmp(w.first, w.args.y, w.out_bytes) == 0, "%lld heads, round %d: other bits",
                                       (long long)heads[index], i);
  lev_device_close(w.device);
  t_free(w.memory);
  t_free(w.first);
}

T_TEST(ops_in_threads_of_unlike_shapes) {
  t_backend();
  t_ranks(THREADS, work, NULL);
}
