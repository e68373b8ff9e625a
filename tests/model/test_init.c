/* SPDX-License-Identifier: Apache-2.0 */
/* First values of weights: the bits of lev_param_init on every backend. */
#include <stdlib.h>
#include <string.h>

#include "harness/model/init_ops.h"
#include "harness/model/ops.h"
#include "tests/backend.h"
#include "tests/model/ops_rig.h"
#include "tests/t.h"

enum { N = 400003, PLACE = 1000 };
static const int64_t first = ((int64_t)1 << 32) - 1234; /* element numbers pass 2^32 */

typedef struct scene {
  lev_init_args args;
  lev_model model;
  lev_tensor tensor;
} scene;

static scene begin(lev_dtype dtype, double margin, int64_t cap) {
  ops_begin();
  scene s = {.model = {.init_std = 0.02}, .tensor = {.kind = LEV_PARAM_DENSE, .id = 77}};
  s.args = (lev_init_args){.dtype = dtype,
                           .seed = 0x123456789abcdefu,
                           .tensor = s.tensor.id,
                           .std = s.model.init_std,
                           .margin = margin,
                           .first = first,
                           .n = N,
                           .out = ops_room(N * lev_dtype_bytes(dtype)),
                           .place = PLACE,
                           .list = ops_room(sizeof(int64_t) * (size_t)(1 + cap)),
                           .cap = cap};
  s.args.list[0] = 0;
  return s;
}

static double want(const scene *s, int64_t i) {
  return lev_param_init(&s->model, &s->tensor, s->args.seed, first + i);
}

/* Puts the host's values in for all that was listed. */
static void patch(const scene *s) {
  for (int64_t done = 0; done < s->args.list[0];) {
    lev_init_patch_args p = {.dtype = s->args.dtype,
                             .out = (unsigned char *)s->args.out - PLACE * (int64_t)lev_dtype_bytes(s->args.dtype)};
    for (; p.n < LEV_INIT_PATCHES && done < s->args.list[0]; ++p.n, ++done) {
      p.place[p.n] = s->args.list[1 + done];
      T_EXPECT(p.place[p.n] >= PLACE && p.place[p.n] < PLACE + N);
      p.value[p.n] = want(s, p.place[p.n] - PLACE);
    }
    ops_run(&lev_init_patch_kernel, &p, sizeof p);
  }
}

static int64_t differences(const scene *s) {
  unsigned char one[8];
  size_t bytes = lev_dtype_bytes(s->args.dtype);
  int64_t n = 0;
  for (int64_t i = 0; i < N; ++i) {
    lev_dtype_store(s->args.dtype, one, 0, want(s, i));
    n += memcmp(one, (const unsigned char *)s->args.out + (size_t)i * bytes, bytes) != 0;
  }
  return n;
}

static bool listed_ones(lev_dtype dtype) {
  return t_backend() == LEV_BACKEND_CUDA && dtype != LEV_F64;
}

T_TEST(init_gives_the_bits_of_the_host) {
  static const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16};
  for (int i = 0; i < 3; ++i) {
    scene s = begin(types[i], LEV_INIT_MARGIN, N);
    if (types[i] == LEV_F64 && t_backend() == LEV_BACKEND_CUDA) continue; /* no CUDA side, see the next test */
    ops_run(&lev_init_kernel, &s.args, sizeof s.args);
    T_EXPECT(s.args.list[0] < 10);
    patch(&s);
    T_EXPECT_EQ_I64(differences(&s), 0);
  }
}

/* With a margin of 2^-20 many elements are listed; spoiling what is listed and patching it restores every bit, so
 * listing and patching name the same elements, tails near 3 sigma included. */
T_TEST(init_lists_what_it_is_not_sure_of) {
  static const lev_dtype types[] = {LEV_F32, LEV_BF16};
  for (int i = 0; i < 2; ++i) {
    scene s = begin(types[i], 0x1p-20, N);
    ops_run(&lev_init_kernel, &s.args, sizeof s.args);
    size_t bytes = lev_dtype_bytes(types[i]);
    if (listed_ones(types[i])) T_EXPECT(s.args.list[0] > (types[i] == LEV_F32 ? N / 4 : 10));
    T_EXPECT(s.args.list[0] <= N);
    for (int64_t k = 0; k < s.args.list[0]; ++k)
      memset((unsigned char *)s.args.out + (size_t)(s.args.list[1 + k] - PLACE) * bytes, 0x5a, bytes);
    T_EXPECT_EQ_I64(differences(&s), s.args.list[0]);
    patch(&s);
    T_EXPECT_EQ_I64(differences(&s), 0);
  }
}

/* A list that is too short counts what it has no room for. */
T_TEST(init_counts_past_the_list) {
  enum { CAP = 5 };
  scene s = begin(LEV_F32, 0x1p-20, CAP + 1);
  s.args.cap = CAP, s.args.list[CAP + 1] = -7;
  ops_run(&lev_init_kernel, &s.args, sizeof s.args);
  if (listed_ones(LEV_F32)) T_EXPECT(s.args.list[0] > CAP);
  T_EXPECT_EQ_I64(s.args.list[CAP + 1], -7);
}

T_TEST(init_of_norms_is_one) {
  static const lev_dtype types[] = {LEV_F32, LEV_BF16};
  for (int i = 0; i < 2; ++i) {
    scene s = begin(types[i], LEV_INIT_MARGIN, 4);
    s.args.constant = true;
    ops_run(&lev_init_kernel, &s.args, sizeof s.args);
    for (int64_t k = 0; k < N; ++k)
      if (!T_EXPECT(lev_dtype_load(types[i], s.args.out, k) == 1)) break;
  }
}
