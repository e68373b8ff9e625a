/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that share a host update give the bits of one thread. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "offload_adamw/offload_adamw_team.h"
#include "tests/num.h"
#include "tests/t.h"

enum { ARRAYS = 5 };

typedef struct piece {
  oadamw_update_args args;
  unsigned char *array[ARRAYS]; /* grads, params, master, moments */
  size_t bytes[ARRAYS];
} piece;

static piece make(lev_dtype param, lev_dtype grad, int64_t count, uint32_t seed) {
  lev_dtype a = lev_dtype_arith(param);
  const lev_dtype types[ARRAYS] = {grad, param, a, a, a};
  piece p = {.args = {.count = count,
                      .param_dtype = param,
                      .grad_dtype = grad,
                      .simd = OADAMW_SIMD_SCALAR,
                      .rates = {0.5, 0.9, 0.1, 0.95, 0.05, 1.3, 1e-8, 1e-3, 2e-3}}};
  for (int i = 0; i < ARRAYS; ++i) {
    p.bytes[i] = (size_t)count * lev_dtype_bytes(types[i]);
    p.array[i] = malloc(p.bytes[i]);
    num_random(types[i], p.array[i], NULL, count, 1, seed + (uint32_t)i);
  }
  for (int64_t i = 0; i < count; ++i) /* the second moment is no less than 0 */
    lev_dtype_store(a, p.array[4], i, lev_dtype_load(a, p.array[4], i) * lev_dtype_load(a, p.array[4], i));
  p.args.grads = p.array[0], p.args.params = p.array[1], p.args.master = p.array[2];
  p.args.exp_avg = p.array[3], p.args.exp_avg_sq = p.array[4];
  return p;
}

static void drop(piece *p) {
  for (int i = 0; i < ARRAYS; ++i) free(p->array[i]);
}

static bool same(const piece *a, const piece *b) {
  bool equal = true;
  for (int i = 0; i < ARRAYS; ++i) equal &= memcmp(a->array[i], b->array[i], a->bytes[i]) == 0;
  return equal;
}

T_TEST(oadamw_team_gives_the_bits_of_one_thread) {
  static const lev_dtype pairs[][2] = {{LEV_F64, LEV_F64}, {LEV_F32, LEV_BF16}, {LEV_BF16, LEV_BF16}};
  static const int64_t counts[] = {0, 1, 8191, 8192, 8257, 100001};
  static const int threads[] = {1, 2, 3, 5};
  for (int t = 0; t < 4; ++t) {
    oadamw_team *team;
    T_REQUIRE_OK(oadamw_team_create(threads[t], &team));
    for (int p = 0; p < 3; ++p)
      for (int c = 0; c < 6; ++c) {
        piece one = make(pairs[p][0], pairs[p][1], counts[c], 7), many = make(pairs[p][0], pairs[p][1], counts[c], 7);
        for (int step = 0; step < 3; ++step) {
          oadamw_kernel_host_update.cpu(&one.args);
          oadamw_team_update(team, &many.args);
          T_EXPECT_MSG(same(&one, &many), "%d threads, pair %d, %lld elements, step %d", threads[t], p,
                       (long long)counts[c], step);
        }
        if (counts[c] > 0) { /* a spoilt element is seen */
          many.array[2][many.bytes[2] - 1] ^= 1;
          T_EXPECT(!same(&one, &many));
        }
        drop(&one), drop(&many);
      }
    oadamw_team_destroy(team);
  }
}

typedef struct caller {
  oadamw_team *team;
  uint32_t seed;
  bool ok;
} caller;

static void *call(void *arg) {
  caller *c = arg;
  piece one = make(LEV_F32, LEV_F32, 20000, c->seed), many = make(LEV_F32, LEV_F32, 20000, c->seed);
  for (int step = 0; step < 20; ++step) {
    oadamw_kernel_host_update.cpu(&one.args);
    oadamw_team_update(c->team, &many.args);
  }
  c->ok = same(&one, &many);
  drop(&one), drop(&many);
  return NULL;
}

T_TEST(oadamw_team_callers_take_turns) {
  enum { CALLERS = 3 };
  caller callers[CALLERS];
  pthread_t threads[CALLERS];
  oadamw_team *team;
  T_REQUIRE_OK(oadamw_team_create(3, &team));
  for (int i = 0; i < CALLERS; ++i) {
    callers[i] = (caller){.team = team, .seed = 100 * (uint32_t)i};
    T_REQUIRE(pthread_create(&threads[i], NULL, call, &callers[i]) == 0);
  }
  for (int i = 0; i < CALLERS; ++i) {
    pthread_join(threads[i], NULL);
    T_EXPECT(callers[i].ok);
  }
  oadamw_team_destroy(team);
}
