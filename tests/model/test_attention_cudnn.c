/* SPDX-License-Identifier: Apache-2.0 */
/* Attention through cuDNN: how its work is cut and planned (anywhere), and its numbers (on a GPU that has it). */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/dims.h"
#include "harness/model/attention_graph.h"
#include "tests/model/attention_rig.h"
#include "tests/readme.h"

#define TOLERANCE 8e-3 /* bf16 results */

/* ---- plans ---- */

typedef struct dry_world {
  lev_device *device;
  lev_comm *comm;
  attn_plan *plan;
} dry_world;

static lev_status dry_open(dry_world *w, int ranks, lev_backend target, const attn_config *config) {
  *w = (dry_world){0};
  lev_device_config dc = {.backend = LEV_BACKEND_DRY, .dry_for = target};
  LEV_TRY(lev_device_open(&dc, &w->device));
  LEV_TRY(lev_comm_dry_create(ranks, 0, w->device, &w->comm));
  return attn_plan_create(w->device, w->comm, config, &w->plan);
}
static void dry_close(dry_world *w) {
  attn_destroy(w->plan);
  lev_comm_destroy(w->comm);
  lev_device_close(w->device);
}

static attn_config config_of(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim) {
  attn_config c;
  attn_config_init(&c);
  c.max_tokens = tokens, c.heads = heads, c.kv_heads = kv_heads, c.head_dim = dim, c.dtype = LEV_BF16;
  return c;
}

static void add_workspace(void *ctx, const lev_region *region) {
  if (strcmp(region->tag, "attn.workspace") == 0) *(size_t *)ctx += region->bytes;
}
static size_t workspace(const attn_plan *plan, attn_phase phase) {
  size_t bytes = 0;
  attn_plan_regions(plan, phase, add_workspace, &bytes);
  return bytes;
}
static size_t planned(int ranks, lev_backend target, const attn_config *config, attn_phase phase) {
  dry_world w;
  size_t bytes = T_EXPECT_OK(dry_open(&w, ranks, target, config)) ? workspace(w.plan, phase) : 0;
  dry_close(&w);
  return bytes;
}

/* The formula of attention.h, written down again: n key heads and r of the R query heads of each, for N tokens that
 * divide LEV_ALIGN. */
static size_t backward_bytes(int64_t n, int64_t r, int64_t R, int64_t N, int64_t d, bool ring) {
  int64_t h = n * r, bytes = 256 + 8 * h * N + 4 * h * N * d;
  if (r > 1) bytes += 4 * h * N * d;
  if (ring || r < R) bytes += 4 * n * N * d;
  if (!ring && r < R) bytes += 8 * n * N * d;
  return (size_t)bytes;
}

T_TEST(attention_workspace_follows_the_formula) {
  const int64_t n = 4096, d = 64;
  attn_config c = config_of(n, 8, 2, d);
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_FORWARD), 256 + 4 * 8 * n);
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), backward_bytes(2, 4, 4, n, d, false));
  T_EXPECT_EQ_I64(planned(2, LEV_BACKEND_CUDA, &c, ATTN_FORWARD), 256 + 4 * 8 * n + 2 * 8 * n * d);
  T_EXPECT_EQ_I64(planned(2, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), backward_bytes(1, 4, 4, n, d, true));
  c.workspace = backward_bytes(1, 4, 4, n, d, false); /* one key head and all its query heads */
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), c.workspace);
  c.workspace -= 1; /* a query head of each at a time */
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), backward_bytes(2, 1, 4, n, d, false));
}

/* The table of README.md's section "Bytes". */
T_TEST(attention_readme) {
  const int64_t tokens[] = {32768, 131072, 1048576}, heads[] = {16, 16, 8}, d = 128;
  for (int i = 0; i < 3; ++i) {
    attn_config c = config_of(tokens[i], heads[i], heads[i], d);
    size_t some = planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD);
    int64_t at_a_time = 1;
    while (at_a_time < heads[i] && backward_bytes(at_a_time, 1, 1, tokens[i], d, false) < some) at_a_time *= 2;
    T_EXPECT_EQ_I64(backward_bytes(at_a_time, 1, 1, tokens[i], d, false), some);
    c.workspace = (size_t)1 << 40;
    double all = (double)planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD) / (1 << 20);
    t_readme("harness/model/README.md", "| %s | %lld | %.0f MiB: %lld at a time | %.*f %s |", T_COMMAS(tokens[i]),
             (long long)heads[i], (double)some / (1 << 20), (long long)at_a_time, all < 1024 ? 0 : 2,
             all < 1024 ? all : all / 1024, all < 1024 ? "MiB" : "GiB");
  }
}

/* Room for packed documents: tables, q and dq apart from the caller's, and with several query heads per key head k, v,
 * dk and dv too. A group of ranks and heads that the library cannot take packed have none. */
T_TEST(attention_workspace_of_packed_documents) {
  const int64_t n = 4096, d = 64, tables = 154880 - 256, copies = 4 * 8 * n * d, keys = 8 * 2 * n * d;
  attn_config c = config_of(n, 8, 8, d);
  c.packed = true;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_FORWARD), 256 + 4 * 8 * n + tables);
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD),
                  (int64_t)backward_bytes(8, 1, 1, n, d, false) + tables + copies);
  c.kv_heads = 2;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_FORWARD), 256 + 4 * 8 * n + tables);
  const int64_t all = (int64_t)backward_bytes(2, 4, 4, n, d, false) + tables + copies + keys;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), all);
  c.workspace = (size_t)all - 1;
  const int64_t half = (int64_t)backward_bytes(1, 4, 4, n, d, false) + tables + (copies + keys) / 2;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), half);
  c.workspace = (size_t)half - 1; /* a query head of each at a time: gradients of keys are in its formula */
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD),
                  (int64_t)backward_bytes(2, 1, 4, n, d, false) + tables + copies / 4 + keys / 2);
  c.workspace = 0;
  T_EXPECT_EQ_I64(planned(2, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), 0); /* left to our own kernels ... */
  c.head_dim = 72;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), 0);
  c.route = ATTN_CUDNN; /* ... unless asked for, for calls without documents */
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), backward_bytes(2, 4, 4, n, 72, false));
  c.head_dim = d;
  T_EXPECT_EQ_I64(planned(2, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), backward_bytes(1, 4, 4, n, d, true));
  c.workspace = 1 << 20;
  dry_world w;
  T_EXPECT_STATUS(dry_open(&w, 1, LEV_BACKEND_CUDA, &c), LEV_ERR_CONFIG);
  dry_close(&w);
  c.workspace = attn_least_workspace(1, &c);
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), c.workspace);
}

/* Forward of packed documents holds all heads, or nothing is planned for the library: however long the sequence is. */
T_TEST(attention_workspace_of_long_packed_documents) {
  const int64_t shapes[][3] = {{32, 4, 128}, {64, 8, 128}, {16, 16, 128}, {128, 128, 16}, {256, 8, 64}};
  const int64_t tables = 154880 - 256;
  int without = 0;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i)
    for (int64_t n = 4096; n <= 1 << 21; n *= 8) {
      attn_config c = config_of(n, shapes[i][0], shapes[i][1], shapes[i][2]);
      c.packed = true;
      int64_t forward = (int64_t)planned(1, LEV_BACKEND_CUDA, &c, ATTN_FORWARD);
      int64_t backward = (int64_t)planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD);
      bool none = forward == 0 && backward == 0;
      T_EXPECT(none || (forward == 256 + 4 * c.heads * n + tables && backward > 0));
      without += none;
    }
  T_EXPECT_EQ_I64(without, 1); /* 128 heads of 16 scalars, 2^21 tokens */
}

T_TEST(attention_cuts_of_packed_documents) {
  attn_room_shape s = {.queries = 300, .keys = 300, .dim = 64, .documents = ATTN_DOCUMENTS, .backward = true};
  for (int per_key = 1; per_key <= 3; per_key += 2) {
    s.per_key = per_key;
    for (size_t cap = 64 << 10; cap < (size_t)16 << 20; cap += cap / 4) {
      size_t bytes;
      attn_cut cut = attn_cut_choose(s, 4, cap, &bytes);
      T_EXPECT(4 % cut.kv_heads == 0 && (cut.per_key == 1 || cut.per_key == per_key));
      T_EXPECT(bytes <= cap || (cut.kv_heads == 1 && cut.per_key == 1));
      s.cut = cut;
      T_EXPECT_EQ_I64(attn_room_carve(&s, NULL, NULL), bytes);
    }
  }
}

T_TEST(attention_documents_are_found_from_the_end) {
  enum { TOKENS = 1000 };
  int64_t begin[TOKENS], group[ATTN_DOCUMENTS + 1];
  attn_packing packing;
  for (int64_t longest = 1; longest < 1200; longest += longest / 2 + 1) {
    int64_t documents = 0;
    double pairs = 0;
    for (int64_t i = 0, at = 0, length = longest; i < TOKENS; ++i) { /* lengths 1 .. longest in turn */
      if (i == at + length) at = i, length = length % longest + 1;
      begin[i] = at, documents += i == at, pairs += (double)(i - at + 1);
    }
    T_EXPECT_OK(attn_packing_of(begin, TOKENS, &packing));
    T_EXPECT(packing.documents == documents && packing.pairs == pairs);
    int64_t end = TOKENS, seen = 0;
    while (end > 0) {
      int64_t count = attn_documents_before(begin, end, group);
      T_EXPECT(count >= 1 && count <= ATTN_DOCUMENTS && (count == ATTN_DOCUMENTS || group[0] == 0));
      T_EXPECT_EQ_I64(group[count], end);
      for (int64_t i = 0; i < count; ++i) {
        T_EXPECT(group[i] < group[i + 1] && begin[group[i]] == group[i]);
        T_EXPECT_EQ_I64(begin[group[i + 1] - 1], group[i]);
      }
      seen += count, end = group[0];
    }
    T_EXPECT_EQ_I64(seen, documents);
  }
  begin[400] = 401;
  for (int64_t i = 401; i < TOKENS; ++i) begin[i] = 401;
  T_EXPECT_STATUS(attn_packing_of(begin, TOKENS, &packing), LEV_ERR_ARG);
  T_EXPECT(strstr(lev_detail(), "token 400 begins at 401") != NULL);
  begin[400] = -1;
  T_EXPECT_STATUS(attn_packing_of(begin, TOKENS, &packing), LEV_ERR_ARG);
  T_EXPECT_OK(attn_packing_of(begin, 0, &packing));
  T_EXPECT_EQ_I64(packing.documents, 0);
}

T_TEST(attention_workspace_is_a_cap) {
  for (int64_t tokens = 1 << 15; tokens <= 1 << 21; tokens *= 4) {
    for (int64_t heads = 8; heads <= 32; heads *= 2) {
      for (int64_t kv_heads = heads / 4; kv_heads <= heads; kv_heads *= 2) {
        attn_config c = config_of(tokens, heads, kv_heads, 128);
        int64_t each = heads / kv_heads;
        size_t one = backward_bytes(1, 1, each, tokens, 128, false);
        size_t whole = backward_bytes(1, each, each, tokens, 128, false);
        if (whole < one) one = whole;
        for (c.workspace = one; c.workspace < (size_t)16 << 30; c.workspace *= 3) {
          size_t bytes = planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD);
          T_EXPECT_MSG(bytes >= one && bytes <= c.workspace, "%lld tokens, %lld/%lld heads: %zu bytes, cap %zu",
                       (long long)tokens, (long long)heads, (long long)kv_heads, bytes, c.workspace);
        }
        c.workspace = one - 1;
        dry_world w;
        T_EXPECT_STATUS(dry_open(&w, 1, LEV_BACKEND_CUDA, &c), LEV_ERR_CONFIG);
        char least[32];
        snprintf(least, sizeof least, "takes %zu", one);
        T_EXPECT_MSG(strstr(lev_detail(), least) != NULL, "%s", lev_detail());
        dry_close(&w);
      }
    }
  }
}

/* What it depends on: the setting and the device planned for, never the machine. */
T_TEST(attention_workspace_is_planned_by_setting_and_device) {
  attn_config c = config_of(4096, 8, 2, 64);
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CPU, &c, ATTN_BACKWARD), 0);
  c.route = ATTN_TILED;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), 0);
  c.route = ATTN_AUTO, c.dtype = LEV_F32;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), 0);
  c.dtype = LEV_BF16, c.head_dim = 65;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), 0);
  c.head_dim = 64, c.max_tokens = 1023;
  T_EXPECT_EQ_I64(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD), 0);
  c.route = ATTN_CUDNN;
  T_EXPECT(planned(1, LEV_BACKEND_CUDA, &c, ATTN_BACKWARD) > 0);
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CPU, 1, &c), LEV_ERR_CONFIG);
  c.head_dim = 264;
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CUDA, 1, &c), LEV_ERR_CONFIG);
  T_EXPECT(strstr(lev_detail(), "264") != NULL);
  c.head_dim = 64, c.route = (attn_route)3;
  T_EXPECT_STATUS(attn_supports(LEV_BACKEND_CUDA, 1, &c), LEV_ERR_CONFIG);
}

/* The parts of a block's scratch lie one behind the other, aligned, inside what was counted. */
T_TEST(attention_room_parts_do_not_overlap) {
  static unsigned char memory[2 << 20];
  unsigned char *base = memory + (256 - (uintptr_t)memory % 256) % 256;
  for (int bits = 0; bits < 16; ++bits) {
    if ((bits & 10) == 10) continue; /* documents on a ring */
    attn_room_shape s = {.cut = {2, bits & 4 ? 1 : 3}, .per_key = 3, .queries = 37, .keys = 41, .dim = 8};
    s.backward = bits & 1, s.ring = bits & 2, s.documents = bits & 8 ? ATTN_DOCUMENTS : 0;
    bool passes = s.backward && s.cut.per_key < s.per_key;
    bool packed_back = s.backward && s.documents > 0;
    attn_room room;
    size_t bytes = attn_room_carve(&s, base, &room), rows = (size_t)(s.cut.kv_heads * s.cut.per_key * s.queries);
    T_EXPECT_EQ_I64(bytes, attn_room_carve(&s, NULL, NULL));
    struct {
      const void *at;
      size_t bytes;
    } part[] = {{room.lengths, 1024},
                {room.lse, rows * 4},
                {room.delta, rows * 4},
                {room.dq_sum, rows * 32},
                {room.o_part, rows * 16},
                {room.q_part, rows * 16},
                {room.dq_part, rows * 16},
                {room.k_copy[0], 82 * 16},
                {room.k_copy[1], 82 * 16},
                {room.heads_part[0], rows * 16},
                {room.heads_part[1], rows * 16},
                {room.k_part[0], 82 * 16},
                {room.k_part[1], 82 * 16},
                {room.k_sum[0], 82 * 32},
                {room.k_sum[1], 82 * 32}};
    const unsigned char *end = base + (s.documents > 0 ? 2048 + 512 * ATTN_DOCUMENTS : 256);
    for (int i = 0; i < ATTN_PLACES; ++i) {
      const unsigned char *at = (const unsigned char *)room.places[i];
      T_EXPECT((at != NULL) == (s.documents > 0));
      if (!at) continue;
      T_EXPECT((uintptr_t)at % LEV_ALIGN == 0 && at >= end);
      end = at + (ATTN_DOCUMENTS + 1) * sizeof(int64_t);
    }
    for (size_t i = 0; i < sizeof part / sizeof *part; ++i) {
      if (!part[i].at) continue;
      const unsigned char *at = part[i].at;
      T_EXPECT((uintptr_t)at % LEV_ALIGN == 0 && at >= end);
      end = at + part[i].bytes;
    }
    T_EXPECT(end <= base + bytes);
    T_EXPECT((room.lengths != NULL) == (s.documents > 0));
    T_EXPECT((room.dq_part != NULL) == packed_back && !room.dq_part == !room.q_part);
    T_EXPECT((room.k_copy[0] != NULL) == packed_back);
    T_EXPECT((room.heads_part[0] != NULL) == (packed_back && s.cut.per_key > 1));
    T_EXPECT((room.k_part[0] != NULL) == (passes || packed_back || (s.ring && s.backward)));
    T_EXPECT((room.k_sum[0] != NULL) == (passes && !s.ring));
    T_EXPECT((room.o_part != NULL) == (s.ring && !s.backward) && (room.dq_sum != NULL) == s.backward);
  }
}

/* ---- numbers ---- */

/* On the cpu, the same cases run on its own kernels. */
static bool pick_route(attn_route *route) {
  bool gpu = t_backend() == LEV_BACKEND_CUDA, can = !gpu || attn_rig_cudnn();
  if (!can) t_skip("%s", lev_detail());
  *route = gpu ? ATTN_CUDNN : ATTN_AUTO;
  return can;
}

/* Heads, ratios and sizes; lengths beside the library's tiles. */
static const attn_case shapes[] = {
    {.ranks = 1, .seq = 2, .heads = 2, .kv_heads = 1, .dim = 64},
    {.ranks = 1, .seq = 64, .heads = 4, .kv_heads = 4, .dim = 128},
    {.ranks = 1, .seq = 192, .heads = 4, .kv_heads = 1, .dim = 128},
    {.ranks = 1, .seq = 333, .heads = 6, .kv_heads = 2, .dim = 64},
    {.ranks = 1, .seq = 257, .heads = 4, .kv_heads = 2, .dim = 8},
    {.ranks = 1, .seq = 129, .heads = 2, .kv_heads = 2, .dim = 256},
    {.ranks = 1, .seq = 511, .heads = 4, .kv_heads = 2, .dim = 128, .window = 100},
    {.ranks = 1, .seq = 200, .heads = 4, .kv_heads = 2, .dim = 64, .window = 1000},
};

static const attn_case rings[] = {
    {.ranks = 2, .seq = 333, .heads = 4, .kv_heads = 2, .dim = 64},
    {.ranks = 3, .seq = 600, .heads = 6, .kv_heads = 3, .dim = 128},
    {.ranks = 4, .seq = 257, .heads = 4, .kv_heads = 4, .dim = 64, .spare = 9},
    {.ranks = 2, .seq = 7, .heads = 2, .kv_heads = 1, .dim = 64},
    {.ranks = 2, .seq = 200, .heads = 2, .kv_heads = 1, .dim = 64, .window = 33},
    {.ranks = 5, .seq = 1111, .heads = 5, .kv_heads = 5, .dim = 32},
};

/* Lengths that divide nothing, of one token, at a tile's end and beyond; ends that fall within the last. */
static const int64_t mixed[] = {1, 37, 128, 200, 1, 64, 3, 129, 2, 0}, few[] = {300, 150, 1, 0},
                     last[] = {1, 1, 2000, 0};

static const attn_case packings[] = {
    {.ranks = 1, .seq = 700, .heads = 4, .kv_heads = 4, .dim = 128, .documents = mixed},
    {.ranks = 1, .seq = 600, .heads = 4, .kv_heads = 2, .dim = 64, .documents = few, .window = 50},
    {.ranks = 1, .seq = 600, .heads = 2, .kv_heads = 2, .dim = 16, .documents = few, .spare = 500},
    {.ranks = 1, .seq = 300, .heads = 2, .kv_heads = 2, .dim = 256, .documents = mixed},
    {.ranks = 1, .seq = 300, .heads = 2, .kv_heads = 1, .dim = 64, .documents = last},
    {.ranks = 1, .seq = 333, .heads = 6, .kv_heads = 2, .dim = 64, .document = 333}, /* one */
    {.ranks = 1, .seq = 600, .heads = 2, .kv_heads = 1, .dim = 64, .document = 2},   /* more than one call takes */
    {.ranks = 1, .seq = 300, .heads = 2, .kv_heads = 2, .dim = 64, .document = 1},
};

/* The same with 2, 4 and 8 query heads per key head, and one key head for all. */
static const attn_case packed_groups[] = {
    {.ranks = 1, .seq = 700, .heads = 8, .kv_heads = 2, .dim = 128, .documents = mixed},
    {.ranks = 1, .seq = 500, .heads = 8, .kv_heads = 1, .dim = 64, .documents = mixed},
    {.ranks = 1, .seq = 333, .heads = 16, .kv_heads = 2, .dim = 128, .documents = few, .spare = 200},
    {.ranks = 1, .seq = 600, .heads = 8, .kv_heads = 4, .dim = 128, .documents = few, .window = 50},
    {.ranks = 1, .seq = 300, .heads = 6, .kv_heads = 2, .dim = 16, .documents = mixed},
    {.ranks = 1, .seq = 300, .heads = 4, .kv_heads = 2, .dim = 256, .documents = mixed},
    {.ranks = 1, .seq = 700, .heads = 8, .kv_heads = 2, .dim = 64, .document = 2},
    {.ranks = 1, .seq = 300, .heads = 4, .kv_heads = 1, .dim = 128, .document = 1},
};

static void check_all(const attn_case *cases, size_t count, int through, const char *what) {
  attn_route route;
  if (!pick_route(&route)) return;
  if (t_backend() == LEV_BACKEND_CPU) count = 1; /* the CPU has one set of kernels, which the other tests go through */
  for (size_t i = 0; i < count; ++i) {
    attn_case c = cases[i];
    c.dtype = LEV_BF16, c.route = route, c.through = through;
    attn_case_check(&c, TOLERANCE, what);
  }
}
T_TEST(attention_cudnn_equals_the_full_matrix) {
  check_all(shapes, sizeof shapes / sizeof *shapes, 1, "cuDNN");
}
T_TEST(attention_cudnn_on_rings) {
  check_all(rings, sizeof rings / sizeof *rings, 0, "cuDNN");
}
T_TEST(attention_cudnn_packed_documents) {
  check_all(packings, sizeof packings / sizeof *packings, 1, "packed");
}

T_TEST(attention_cudnn_packed_groups_of_heads) {
  check_all(packed_groups, sizeof packed_groups / sizeof *packed_groups, 1, "packed groups");
}

/* Rows further apart than they are long. */
static const attn_case strided[] = {
    {.ranks = 1, .seq = 300, .heads = 3, .kv_heads = 3, .dim = 48, .documents = few, .fused = true, .pad = 16},
    {.ranks = 1, .seq = 400, .heads = 4, .kv_heads = 1, .dim = 64, .documents = mixed, .fused = true, .pad = 8},
    {.ranks = 1, .seq = 333, .heads = 8, .kv_heads = 2, .dim = 128, .documents = few, .fused = true, .pad = 8},
};
T_TEST(attention_cudnn_packed_in_strided_rows) {
  check_all(strided, sizeof strided / sizeof *strided, 1, "strided");
}

/* Packed documents that go to our own kernels, in the memory planned for cuDNN. */
T_TEST(attention_cudnn_packed_documents_left_out) {
  static const attn_case cases[] = {
      {.ranks = 1, .seq = 160, .heads = 4, .kv_heads = 2, .dim = 64, .document = 37, .no_host = true},
      {.ranks = 1, .seq = 160, .heads = 4, .kv_heads = 2, .dim = 72, .document = 37},
      {.ranks = 1, .seq = 160, .heads = 4, .kv_heads = 2, .dim = 64, .documents = few, .fused = true},
      {.ranks = 2, .seq = 160, .heads = 4, .kv_heads = 2, .dim = 64, .documents = mixed},
  };
  check_all(cases, sizeof cases / sizeof *cases, -1, "left out");
}

/* Where nothing is asked for, many short documents go to our own kernels; a long one among them makes up for their
 * calls. */
T_TEST(attention_cudnn_is_chosen_by_the_packing) {
  static int64_t one_long[300] = {2200};
  for (int i = 1; i < 299; ++i) one_long[i] = 1 + i % 3;
  attn_route route;
  if (!pick_route(&route)) return;
  attn_case c = {.ranks = 1, .seq = 600, .heads = 2, .dim = 64, .dtype = LEV_BF16, .spare = 1000};
  attn_rig r;
  const int64_t documents[] = {2, 3, 333};
  const int count = t_backend() == LEV_BACKEND_CUDA ? 4 : 3; /* the CPU takes all alike, and long for the last */
  for (int i = 0; i < count; ++i) {
    c.document = i < 3 ? documents[i] : 0, c.documents = i < 3 ? NULL : one_long, c.seq = i < 3 ? 600 : 2700;
    c.through = i == 0 ? -1 : 1, c.kv_heads = 1 + i % 2;
    if (attn_rig_open(&r, &c)) attn_rig_run(&r, t_backend()), attn_rig_check(&r, TOLERANCE, "by the packing");
    attn_rig_close(&r);
  }
}

/* Small caps: several blocks of heads, and query heads of a key head in passes of their own. */
static void check_blocks(const attn_case *cases, int count) {
  attn_route route;
  if (!pick_route(&route)) return;
  for (int i = 0; i < count; ++i) {
    attn_case c = cases[i];
    c.dtype = LEV_BF16, c.route = route, c.through = 1;
    attn_config config = attn_rig_config(&c);
    config.route = ATTN_CUDNN;
    size_t before = 0;
    int cuts = 0;
    for (c.workspace = 200 << 10; c.workspace < (size_t)8 << 20; c.workspace += c.workspace / 2) {
      config.workspace = c.workspace;
      dry_world w;
      lev_status st = dry_open(&w, c.ranks, LEV_BACKEND_CUDA, &config);
      size_t bytes = st == LEV_OK ? workspace(w.plan, ATTN_BACKWARD) : 0;
      dry_close(&w);
      if (bytes == before) continue; /* too small, or the same cut */
      before = bytes, ++cuts;
      attn_case_check(&c, TOLERANCE, "blocks");
    }
    T_EXPECT_MSG(cuts >= (c.ranks == 1 ? 4 : 2), "%d cuts on %d ranks", cuts, c.ranks);
  }
}
T_TEST(attention_cudnn_in_blocks_of_heads) {
  static const attn_case cases[] = {{.ranks = 1, .seq = 300, .heads = 12, .kv_heads = 4, .dim = 64},
                                    {.ranks = 2, .seq = 300, .heads = 12, .kv_heads = 4, .dim = 64}};
  check_blocks(cases, 2);
}
T_TEST(attention_cudnn_packed_in_blocks_of_heads) {
  static const attn_case cases[] = {
      {.ranks = 1, .seq = 300, .heads = 12, .kv_heads = 4, .dim = 64, .documents = mixed},
      {.ranks = 1, .seq = 200, .heads = 16, .kv_heads = 2, .dim = 128, .documents = few, .fused = true, .pad = 8}};
  check_blocks(cases, 2);
}

/* Rows whose log-sum-exp is far below -88.7, lengths beside a tile's half. */
T_TEST(attention_cudnn_very_negative_scores) {
  attn_route route;
  if (!pick_route(&route)) return;
  for (int64_t seq = 192; seq <= 320; seq += 64) {
    attn_case c = {.ranks = 1, .seq = seq, .heads = 2, .kv_heads = 1, .dim = 64, .dtype = LEV_BF16, .tilt = 0.01};
    c.route = route;
    attn_rig r;
    if (attn_rig_open(&r, &c)) {
      for (int64_t i = 0; i < c.seq * c.kv_heads; ++i) r.k[i * c.dim] = -1024;
      attn_rig_oracle(&r);
      for (int64_t i = 0; i < c.seq * c.heads; ++i) T_EXPECT(r.lse64[i] < -200);
      attn_rig_run(&r, t_backend());
      int64_t n = c.seq * c.heads * c.dim;
      T_EXPECT(num_rel_l2(c.dtype, r.o, r.o64, n) <= TOLERANCE);
      T_EXPECT(num_rel_l2(c.dtype, r.dv, r.dv64, n / 2) <= TOLERANCE);
      for (int64_t i = 0; i < n; ++i) T_EXPECT(isfinite(lev_dtype_load(c.dtype, r.dq, i)));
      for (int64_t i = 0; i < n / 2; ++i) T_EXPECT(isfinite(lev_dtype_load(c.dtype, r.dk, i)));
    }
    attn_rig_close(&r);
  }
}

/* Forward and backward from one sequence length to another, and back: plans of several shapes side by side. The result
 * of a length does not depend on what ran before. */
T_TEST(attention_cudnn_forward_is_the_same_twice) {
  attn_route route;
  if (!pick_route(&route)) return;
  attn_case c = {.ranks = 1, .heads = 4, .kv_heads = 2, .dim = 128, .dtype = LEV_BF16, .route = route};
  c.seq = t_backend() == LEV_BACKEND_CUDA ? 777 : 150;
  attn_rig first = {0}, again = {0};
  if (attn_rig_open(&first, &c) && attn_rig_open(&again, &c)) {
    attn_rig_run(&first, t_backend());
    attn_rig_run(&again, t_backend());
    size_t n = (size_t)(c.seq * c.heads * c.dim);
    T_EXPECT(memcmp(first.o, again.o, n * 2) == 0);
    T_EXPECT(memcmp(first.lse, again.lse, n / (size_t)c.dim * 4) == 0);
    T_EXPECT(memcmp(first.dv, again.dv, n) == 0); /* half the heads */
    attn_rig_check(&again, TOLERANCE, "again");
  }
  attn_rig_close(&again);
  attn_rig_close(&first);
}
