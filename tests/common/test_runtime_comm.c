/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives of local ranks against naive loops, for 1 to 8 ranks, uneven and zero counts; groups, dry worlds. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/comm.h"
#include "common/dims.h"
#include "common/rng.h"
#include "tests/backend.h"
#include "tests/num.h"
#include "tests/t.h"

#define MAX_RANKS 8

/* Count of rank r in case `which`: equal, uneven with zeros, large, one rank only. */
static int64_t count_of(int which, int r) {
  static const int64_t uneven[MAX_RANKS] = {3, 0, 17, 1, 0, 5, 2, 11};
  return which == 0 ? 4 : which == 1 ? uneven[r] : which == 2 ? 700 + 31 * r : r == 1 ? 9 : 0;
}
#define CASES 4

/* Value of element i of rank r; small integers are exact in every type, fractions are not. */
static double value_of(int r, int64_t i) {
  return (double)((i * 7 + r * 13) % 23 - 11) / (r % 2 ? 3.0 : 8.0);
}

typedef struct rig {
  int size;
  lev_comm_hub *hub;
  lev_device_config config;
  void (*body)(lev_comm *comm, lev_stream *stream, void *ctx);
  void *ctx;
} rig;

static void rank_main(int rank, void *p) {
  rig *g = p;
  lev_device *device;
  lev_comm *comm;
  lev_stream *stream;
  lev_device_config config = g->config;
  config.index = t_gpu(rank);
  T_REQUIRE_OK(lev_device_open(&config, &device));
  T_REQUIRE_OK(lev_comm_local_join(g->hub, rank, device, &comm));
  T_EXPECT_EQ_I64(lev_comm_rank(comm), rank);
  T_EXPECT_EQ_I64(lev_comm_size(comm), g->size);
  T_EXPECT(lev_comm_device(comm) == device);
  T_REQUIRE_OK(lev_stream_create(device, "comm", &stream));
  g->body(comm, stream, g->ctx);
  (void)!lev_stream_sync(stream);
  lev_comm_destroy(comm);
  lev_device_close(device);
}

static void run_world(int size, double timeout, lev_device_config config,
                      void (*body)(lev_comm *, lev_stream *, void *), void *ctx) {
  rig g = {.size = size, .config = config, .body = body, .ctx = ctx};
  g.config.backend = t_backend();
  T_REQUIRE_OK(lev_comm_hub_create(size, timeout, &g.hub));
  t_ranks(size, rank_main, &g);
  lev_comm_hub_destroy(g.hub);
}

static void run_all_sizes(void (*body)(lev_comm *, lev_stream *, void *)) {
  for (int size = 1; size <= MAX_RANKS && !t_failed(); ++size)
    for (int mode = 0; mode < (t_backend() == LEV_BACKEND_CPU ? 3 : 1); ++mode)
      run_world(size, 60, (lev_device_config){.immediate = mode == 1, .jitter_seed = mode == 2 ? (uint64_t)size : 0},
                body, NULL);
}

/* Every rank's own memory, poisoned. */
static void *new_buffer(size_t bytes) {
  void *p = t_alloc(bytes);
  num_poison(p, bytes);
  return p;
}

static void expect_value(lev_dtype t, const void *got, int64_t i, double want, const char *what) {
  double x = lev_dtype_load(t, got, i);
  T_EXPECT_MSG(x == want || (isnan(x) && isnan(want)), "%s of %s: element %lld is %.17g, expected %.17g", what,
               lev_dtype_name(t), (long long)i, x, want);
}

/* What storing `x` as t and loading it again gives. */
static double as(lev_dtype t, double x) {
  char scalar[8];
  lev_dtype_store(t, scalar, 0, x);
  return lev_dtype_load(t, scalar, 0);
}

static void body_all_gather(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)ctx;
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  static const lev_dtype types[] = {LEV_F64, LEV_BF16, LEV_U8, LEV_I64};
  for (int which = 0; which < CASES; ++which)
    for (int t = 0; t < 4; ++t)
      for (int in_place = 0; in_place < 2; ++in_place) {
        lev_dtype type = types[t];
        size_t elem = lev_dtype_bytes(type);
        int64_t counts[MAX_RANKS] = {0}, total = 0, mine = 0;
        for (int r = 0; r < n; ++r) {
          if (r == rank) mine = total;
          counts[r] = count_of(which, r), total += counts[r];
        }
        char *recv = new_buffer((size_t)total * elem), *send = new_buffer((size_t)counts[rank] * elem);
        void *from = in_place ? recv + (size_t)mine * elem : send;
        for (int64_t i = 0; i < counts[rank]; ++i) lev_dtype_store(type, from, i, (double)(rank * 16 + i % 16));
        uint64_t before = lev_comm_bytes_sent(comm);
        T_EXPECT_OK(lev_comm_all_gather(comm, stream, from, recv, counts, type));
        T_EXPECT_EQ_I64(lev_comm_bytes_sent(comm) - before, (size_t)counts[rank] * elem * (size_t)(n - 1));
        memset(counts, 0x7F, sizeof counts); /* read during the call only */
        T_EXPECT_OK(lev_stream_sync(stream));
        int64_t at = 0;
        for (int r = 0; r < n; ++r)
          for (int64_t i = 0; i < count_of(which, r); ++i)
            expect_value(type, recv, at++, (double)(r * 16 + i % 16), "all_gather");
        t_free(recv), t_free(send);
      }
}
T_TEST(runtime_comm_all_gather) {
  run_all_sizes(body_all_gather);
}

static void body_reduce_scatter(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)ctx;
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  static const lev_dtype pairs[][2] = {{LEV_F64, LEV_F64},  {LEV_F32, LEV_F32},   {LEV_F32, LEV_BF16},
                                       {LEV_BF16, LEV_F32}, {LEV_BF16, LEV_BF16}, {LEV_F64, LEV_F32}};
  for (int which = 0; which < CASES; ++which)
    for (int p = 0; p < 6; ++p)
      for (int accumulate = 0; accumulate < 2; ++accumulate) {
        lev_dtype st = pairs[p][0], rt = pairs[p][1], arith = lev_dtype_arith(st);
        int64_t counts[MAX_RANKS] = {0}, total = 0, mine = 0;
        for (int r = 0; r < n; ++r) {
          if (r == rank) mine = total;
          counts[r] = count_of(which, r), total += counts[r];
        }
        void *send = new_buffer((size_t)total * lev_dtype_bytes(st));
        void *recv = new_buffer((size_t)counts[rank] * lev_dtype_bytes(rt));
        for (int64_t i = 0; i < total; ++i) lev_dtype_store(st, send, i, value_of(rank, i));
        if (accumulate)
          for (int64_t i = 0; i < counts[rank]; ++i) lev_dtype_store(rt, recv, i, 0.75);
        T_EXPECT_OK(lev_comm_reduce_scatter(comm, stream, send, st, recv, rt, counts, accumulate != 0));
        T_EXPECT_OK(lev_stream_sync(stream));
        for (int64_t i = 0; i < counts[rank]; ++i) {
          double sum = as(st, value_of(0, mine + i));
          for (int r = 1; r < n; ++r) sum = as(arith, sum + as(st, value_of(r, mine + i)));
          if (accumulate) sum = lev_dtype_arith(rt) == arith ? as(arith, 0.75 + sum) : 0.75 + sum;
          expect_value(rt, recv, i, as(rt, sum), "reduce_scatter");
        }
        t_free(send), t_free(recv);
      }
}
T_TEST(runtime_comm_reduce_scatter) {
  run_all_sizes(body_reduce_scatter);
}

static void body_all_reduce(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)ctx;
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  static const lev_dtype types[] = {LEV_F64, LEV_F32, LEV_BF16, LEV_I32, LEV_I64};
  static const int64_t counts[] = {0, 1, 5, 4099};
  for (int c = 0; c < 4; ++c)
    for (int t = 0; t < 5; ++t)
      for (int op = LEV_SUM; op <= LEV_MAX; ++op) {
        lev_dtype type = types[t], arith = lev_dtype_arith(type);
        void *buffer = new_buffer((size_t)counts[c] * lev_dtype_bytes(type));
        for (int64_t i = 0; i < counts[c]; ++i) lev_dtype_store(type, buffer, i, value_of(rank, i) * (t > 2 ? 24 : 1));
        T_EXPECT_OK(lev_comm_all_reduce(comm, stream, buffer, counts[c], type, (lev_reduce)op));
        T_EXPECT_OK(lev_stream_sync(stream));
        for (int64_t i = 0; i < counts[c]; ++i) {
          double sum = 0;
          for (int r = 0; r < n; ++r) {
            double x = as(type, value_of(r, i) * (t > 2 ? 24 : 1));
            sum = r == 0 ? x : op == LEV_MAX ? fmax(sum, x) : as(arith, sum + x);
          }
          expect_value(type, buffer, i, as(type, sum), op == LEV_MAX ? "max" : "sum");
        }
        t_free(buffer);
      }
  /* NaN on one rank reaches all; large i64 values stay exact. */
  float *x = new_buffer(3 * sizeof *x);
  int64_t *big = new_buffer(sizeof *big);
  x[0] = (float)rank, x[1] = rank == n - 1 ? NAN : 1, x[2] = rank == 0 ? NAN : 1;
  *big = (int64_t)1 << 60 | rank;
  T_EXPECT_OK(lev_comm_all_reduce(comm, stream, x, 3, LEV_F32, LEV_MAX));
  T_EXPECT_OK(lev_comm_all_reduce(comm, stream, big, 1, LEV_I64, LEV_MAX));
  T_EXPECT_OK(lev_stream_sync(stream));
  T_EXPECT(x[0] == (float)(n - 1) && isnan(x[1]) && isnan(x[2]));
  T_EXPECT_EQ_I64(*big, ((int64_t)1 << 60 | (n - 1)));
  t_free(x), t_free(big);
}
T_TEST(runtime_comm_all_reduce) {
  run_all_sizes(body_all_reduce);
}

/* Rows from s to d. */
static int64_t rows_of(int which, int s, int d) {
  return which == 0 ? 2 : which == 1 ? (s * 5 + d * 3) % 4 : which == 2 ? (d == 0 ? 40 + s : 0) : 0;
}

static void body_all_to_all(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)ctx;
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  for (int which = 0; which < 4; ++which) {
    static const size_t row_bytes[3] = {8, 24, 2};
    int64_t send_rows[MAX_RANKS] = {0}, recv_rows[MAX_RANKS] = {0}, sent = 0, received = 0;
    for (int r = 0; r < n; ++r) {
      send_rows[r] = rows_of(which, rank, r), sent += send_rows[r];
      recv_rows[r] = rows_of(which, r, rank), received += recv_rows[r];
    }
    lev_comm_part parts[3];
    unsigned char *send[3], *recv[3];
    for (int p = 0; p < 3; ++p) {
      send[p] = new_buffer((size_t)sent * row_bytes[p]), recv[p] = new_buffer((size_t)received * row_bytes[p]);
      parts[p] = (lev_comm_part){send[p], recv[p], row_bytes[p]};
      int64_t row = 0;
      for (int d = 0; d < n; ++d)
        for (int64_t i = 0; i < send_rows[d]; ++i, ++row)
          for (size_t b = 0; b < row_bytes[p]; ++b)
            send[p][(size_t)row * row_bytes[p] + b] = (unsigned char)(rank * 50 + d * 20 + i + (int64_t)b + p);
    }
    T_EXPECT_OK(lev_comm_all_to_all(comm, stream, parts, 3, send_rows, recv_rows));
    T_EXPECT_OK(lev_stream_sync(stream));
    for (int p = 0; p < 3; ++p) {
      int64_t row = 0;
      for (int s = 0; s < n; ++s)
        for (int64_t i = 0; i < recv_rows[s]; ++i, ++row)
          for (size_t b = 0; b < row_bytes[p]; ++b)
            T_EXPECT_EQ_I64(recv[p][(size_t)row * row_bytes[p] + b],
                            (unsigned char)(s * 50 + rank * 20 + i + (int64_t)b + p));
      t_free(send[p]), t_free(recv[p]);
    }
  }
}
T_TEST(runtime_comm_all_to_all) {
  run_all_sizes(body_all_to_all);
}

static void body_ring(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)ctx;
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm), before = (rank + n - 1) % n;
  for (int hop = 0; hop < 4; ++hop) {
    size_t send_bytes = hop == 3 ? 0 : (size_t)(rank * 7 + hop) % 11 * 100;
    size_t recv_bytes = hop == 3 ? 0 : (size_t)(before * 7 + hop) % 11 * 100;
    unsigned char *send = new_buffer(send_bytes), *recv = new_buffer(recv_bytes);
    memset(send, rank + hop, send_bytes);
    T_EXPECT_OK(lev_comm_ring_shift(comm, stream, send, send_bytes, recv, recv_bytes));
    T_EXPECT_OK(lev_stream_sync(stream));
    for (size_t i = 0; i < recv_bytes; ++i) T_EXPECT_EQ_I64(recv[i], before + hop);
    t_free(send), t_free(recv);
  }
  int64_t *x = new_buffer(100 * sizeof *x);
  for (int root = 0; root < n; ++root) {
    for (int i = 0; i < 100; ++i) x[i] = rank == root ? root * 1000 + i : -1;
    T_EXPECT_OK(lev_comm_broadcast(comm, stream, x, 100 * sizeof *x, root));
    T_EXPECT_OK(lev_comm_broadcast(comm, stream, NULL, 0, root));
    T_EXPECT_OK(lev_comm_barrier(comm, stream));
    T_EXPECT_OK(lev_stream_sync(stream));
    for (int i = 0; i < 100; ++i) T_EXPECT_EQ_I64(x[i], root * 1000 + i);
  }
  t_free(x);
}
T_TEST(runtime_comm_ring_and_broadcast) {
  run_all_sizes(body_ring);
}

/* Each rank sends (s + d) % 3 transfers to every other, of differing sizes; often enough to wrap the ring of moves. */
static void body_exchange(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)ctx;
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  static const int64_t room = 64;
  int64_t *mine = new_buffer(sizeof *mine * MAX_RANKS * 3 * 64),
          *theirs = new_buffer(sizeof *theirs * MAX_RANKS * 3 * 64);
  lev_comm_move moves[2 * 3 * MAX_RANKS];
  for (int repeat = 0; repeat < 4; ++repeat) {
    int n_moves = 0;
    for (int peer = 0; peer < n; ++peer)
      for (int i = 0; i < 3 && peer != rank; ++i) {
        int64_t slot = (peer * 3 + i) * room;
        if (i < (rank + peer + 1) % 4) { /* listed receive first on some ranks, send first on others */
          size_t bytes = 8 * (size_t)((rank * 3 + peer + i) % 7), back = 8 * (size_t)((peer * 3 + rank + i) % 7);
          for (int64_t j = 0; j < room; ++j) mine[slot + j] = rank * 1000 + peer * 100 + i * 10 + j;
          lev_comm_move out = {peer, true, mine + slot, bytes}, in = {peer, false, theirs + slot, back};
          moves[n_moves++] = rank < peer ? out : in;
          moves[n_moves++] = rank < peer ? in : out;
        }
      }
    num_poison(theirs, sizeof *theirs * MAX_RANKS * 3 * 64);
    T_EXPECT_OK(lev_comm_exchange(comm, stream, moves, n_moves));
    memset(moves, 0x7F, sizeof moves);
    T_EXPECT_OK(lev_stream_sync(stream));
    for (int peer = 0; peer < n; ++peer)
      for (int i = 0; i < 3 && peer != rank; ++i)
        for (int64_t j = 0; j < room; ++j) {
          bool there = i < (rank + peer + 1) % 4 && j < (peer * 3 + rank + i) % 7;
          T_EXPECT_EQ_I64(theirs[(peer * 3 + i) * room + j], there ? peer * 1000 + rank * 100 + i * 10 + j : -1);
        }
  }
  t_free(mine), t_free(theirs);
}
T_TEST(runtime_comm_exchange) {
  run_all_sizes(body_exchange);
}

/* More calls and moves in flight than the rings hold. */
static void body_many(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)ctx;
  enum { N = 2000, MOVES = 300 };
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  int64_t(*slots)[2] = new_buffer(MOVES * sizeof *slots);
  lev_comm_move moves[MOVES];
  int64_t total = 0;
  for (int i = 0; i < N; ++i) {
    if (i % 20 == 7 && n == 2) {
      for (int m = 0; m < MOVES; ++m) {
        bool is_send = (m + rank) % 2 == 0;
        moves[m] = (lev_comm_move){1 - rank, is_send, &slots[m][!is_send], 8};
      }
      T_EXPECT_OK(lev_comm_exchange(comm, stream, moves, i % 40 == 7 ? MOVES : MOVES / 2));
    } else {
      T_EXPECT_OK(lev_comm_barrier(comm, stream));
    }
    ++total;
  }
  T_EXPECT_OK(lev_stream_sync(stream));
  T_EXPECT_EQ_I64(lev_comm_calls(comm), total);
  t_free(slots);
}
T_TEST(runtime_comm_many_calls_in_flight) {
  run_world(2, 60, (lev_device_config){0}, body_many, NULL);
  run_world(5, 60, (lev_device_config){0}, body_many, NULL);
}

/* ---- groups ---- */

static void body_groups(lev_comm *world, lev_stream *stream, void *ctx) {
  (void)ctx;
  int n = lev_comm_size(world), rank = lev_comm_rank(world);
  lev_device *device = lev_comm_device(world);
  lev_stream *other;
  T_REQUIRE_OK(lev_stream_create(device, "other", &other));
  /* Rows and columns of a grid, overlapping; and the columns once more by split with reversed order. */
  int width = n >= 4 ? 2 : 1, height = n / width;
  lev_comm *row = NULL, *column = NULL, *split = NULL, *outside = NULL, *none = NULL;
  if (rank < width * height) {
    T_REQUIRE_OK(lev_comm_subset(world, rank / width * width, 1, width, &row));
    T_REQUIRE_OK(lev_comm_subset(world, rank % width, width, height, &column));
    T_EXPECT_EQ_I64(lev_comm_rank(row), rank % width);
    T_EXPECT_EQ_I64(lev_comm_rank(column), rank / width);
  }
  T_REQUIRE_OK(lev_comm_split(world, rank % width, -rank, &split));
  T_REQUIRE_OK(lev_comm_split(world, rank == 0 ? -1 : 3, 0, &outside));
  T_EXPECT((outside == NULL) == (rank == 0));
  T_EXPECT_STATUS(lev_comm_subset(world, rank + 1, 1, 1, &none), LEV_ERR_ARG);
  T_EXPECT(none == NULL);
  if (row) { /* the same group again: another communicator */
    lev_comm *again;
    T_REQUIRE_OK(lev_comm_subset(world, rank / width * width, 1, width, &again));
    lev_comm_destroy(row);
    row = again;
  }
  int64_t *x = new_buffer(3 * sizeof *x);
  for (int repeat = 0; repeat < 20; ++repeat) { /* two communicators at once, on two streams */
    x[0] = x[1] = x[2] = rank + 1;
    if (row) {
      T_EXPECT_OK(lev_comm_all_reduce(row, stream, &x[0], 1, LEV_I64, LEV_SUM));
      T_EXPECT_OK(lev_comm_all_reduce(column, other, &x[1], 1, LEV_I64, LEV_SUM));
    }
    T_EXPECT_OK(lev_comm_all_reduce(split, other, &x[2], 1, LEV_I64, LEV_SUM));
    T_EXPECT_OK(lev_stream_sync(stream));
    T_EXPECT_OK(lev_stream_sync(other));
    int64_t in_row = 0, in_column = 0, in_split = 0;
    for (int r = 0; r < n; ++r) {
      if (r < width * height && r / width == rank / width) in_row += r + 1;
      if (r < width * height && r % width == rank % width) in_column += r + 1;
      if (r % width == rank % width) in_split += r + 1;
    }
    if (row) {
      T_EXPECT_EQ_I64(x[0], in_row);
      T_EXPECT_EQ_I64(x[1], in_column);
    }
    T_EXPECT_EQ_I64(x[2], in_split);
  }
  t_free(x);
  int64_t seen[MAX_RANKS], mine = rank;
  T_EXPECT_OK(lev_comm_host_all_gather(split, &mine, seen, sizeof mine));
  for (int r = 1; r < lev_comm_size(split); ++r) T_EXPECT(seen[r] < seen[r - 1]);
  lev_comm_destroy(outside);
  lev_comm_destroy(split);
  lev_comm_destroy(column);
  lev_comm_destroy(row);
  lev_comm_destroy(NULL);
}
T_TEST(runtime_comm_groups) {
  for (int size = 1; size <= MAX_RANKS && !t_failed(); ++size)
    for (uint64_t seed = 0; seed < 2; ++seed)
      run_world(size, 60, (lev_device_config){.jitter_seed = seed}, body_groups, NULL);
}

/* Subsets count the ranks of the communicator they are made from. */
static void body_nested(lev_comm *world, lev_stream *stream, void *ctx) {
  (void)ctx;
  int rank = lev_comm_rank(world);
  lev_comm *odd, *pair, *split, *part = NULL;
  T_REQUIRE_OK(lev_comm_subset(world, rank % 2, 2, 4, &odd)); /* world ranks p, p + 2, p + 4, p + 6 */
  T_REQUIRE_OK(lev_comm_subset(odd, lev_comm_rank(odd) % 2, 2, 2, &pair));
  T_EXPECT_EQ_I64(lev_comm_rank(pair), rank / 4);
  int64_t *x = new_buffer(sizeof *x);
  *x = 1 << rank;
  T_EXPECT_OK(lev_comm_all_reduce(pair, stream, x, 1, LEV_I64, LEV_SUM));
  T_EXPECT_OK(lev_stream_sync(stream));
  T_EXPECT_EQ_I64(*x, 1 << rank | 1 << (rank ^ 4));
  t_free(x);
  T_EXPECT_STATUS(lev_comm_subset(pair, 0, 1, 3, &part), LEV_ERR_ARG);
  /* 0 1 3 7 are not evenly spaced, and neither are 6 5 4 2 in this order. */
  bool low = rank == 0 || rank == 1 || rank == 3 || rank == 7;
  T_REQUIRE_OK(lev_comm_split(world, low, low ? rank : -rank, &split));
  T_EXPECT_STATUS(lev_comm_subset(split, 0, 1, 4, &part), LEV_ERR_UNSUPPORTED);
  T_EXPECT(part == NULL);
  lev_comm_destroy(split);
  lev_comm_destroy(pair);
  lev_comm_destroy(odd);
}
T_TEST(runtime_comm_nested_subsets) {
  run_world(8, 60, (lev_device_config){0}, body_nested, NULL);
}

/* ---- control plane ---- */

static void body_agree(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)stream, (void)ctx;
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  T_EXPECT_OK(lev_comm_agree(comm, LEV_OK));
  lev_status mine = LEV_OK;
  if (rank == n - 1) mine = lev_fail(LEV_ERR_BUDGET, "a budget of %d", 42);
  if (rank == n / 2) mine = lev_fail(LEV_ERR_CAPACITY, "a cap of %d", 7);
  T_EXPECT_STATUS(lev_comm_agree(comm, mine), LEV_ERR_CAPACITY);
  T_EXPECT(strstr(lev_detail(), "a cap of 7") != NULL);
  char want[32] = "rank ";
  want[5] = (char)('0' + n / 2);
  T_EXPECT_MSG(strstr(lev_detail(), want) != NULL, "\"%s\" does not name \"%s\"", lev_detail(), want);
  double x = rank * 1.5, all[MAX_RANKS];
  T_EXPECT_OK(lev_comm_host_all_gather(comm, &x, all, sizeof x));
  for (int r = 0; r < n; ++r) T_EXPECT(all[r] == r * 1.5);
  T_EXPECT_OK(lev_comm_host_all_gather(comm, NULL, NULL, 0));
}
T_TEST(runtime_comm_agree) {
  for (int size = 1; size <= MAX_RANKS; ++size) run_world(size, 60, (lev_device_config){0}, body_agree, NULL);
}

/* ---- arguments ---- */

static void body_arguments(lev_comm *comm, lev_stream *stream, void *ctx) {
  (void)ctx;
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  int64_t counts[MAX_RANKS] = {2, 2}, bad[MAX_RANKS] = {2, -1}, huge[MAX_RANKS] = {INT64_MAX, INT64_MAX};
  double x[8] = {0}, y[8] = {0};
  T_EXPECT_STATUS(lev_comm_all_gather(comm, stream, x, y, bad, LEV_F64), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_gather(comm, stream, x, y, huge, LEV_F64), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_gather(comm, stream, x, y, NULL, LEV_F64), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_gather(comm, stream, NULL, y, counts, LEV_F64), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_gather(comm, stream, y + 1, y, counts, LEV_F64), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_gather(comm, stream, x, y, counts, LEV_DTYPE_COUNT), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_reduce_scatter(comm, stream, x, LEV_I64, y, LEV_I64, counts, false), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_reduce_scatter(comm, stream, x, LEV_F64, x + 3, LEV_F64, counts, false), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_reduce(comm, stream, x, -1, LEV_F64, LEV_SUM), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_reduce(comm, stream, x, 1, LEV_U8, LEV_SUM), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_reduce(comm, stream, NULL, 1, LEV_F64, LEV_SUM), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_ring_shift(comm, stream, x, 16, x + 1, 16), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_broadcast(comm, stream, x, 8, n), LEV_ERR_ARG);
  lev_comm_move self = {rank, true, x, 8};
  T_EXPECT_STATUS(lev_comm_exchange(comm, stream, &self, 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_exchange(comm, stream, NULL, 1), LEV_ERR_ARG);
  lev_comm_part parts[5] = {{x, y, 8}};
  T_EXPECT_STATUS(lev_comm_all_to_all(comm, stream, parts, 5, counts, counts), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_all_to_all(comm, stream, parts, 0, counts, counts), LEV_ERR_ARG);
  lev_device *device;
  lev_stream *foreign;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &device));
  T_REQUIRE_OK(lev_stream_create(device, "foreign", &foreign));
  T_EXPECT_STATUS(lev_comm_barrier(comm, foreign), LEV_ERR_ARG);
  lev_device_close(device);
  /* All ranks made the same mistakes, so the world is still in step. */
  T_EXPECT_OK(lev_comm_barrier(comm, stream));
  T_EXPECT_OK(lev_stream_sync(stream));
}
T_TEST(runtime_comm_arguments) {
  run_world(2, 60, (lev_device_config){0}, body_arguments, NULL);
}

/* ---- dry = local: bytes, calls and trace ---- */

static void program(lev_comm *comm, lev_stream *stream, char *memory) {
  int n = lev_comm_size(comm), rank = lev_comm_rank(comm);
  int64_t counts[MAX_RANKS] = {0}, send_rows[MAX_RANKS] = {0}, recv_rows[MAX_RANKS] = {0};
  char *a = memory, *b = memory + 100000;
  for (int r = 0; r < n; ++r) {
    counts[r] = count_of(1, r);
    send_rows[r] = rows_of(1, rank, r), recv_rows[r] = rows_of(1, r, rank);
  }
  lev_comm_part part = {a, b, 24};
  lev_comm_move move = {rank ^ 1, rank % 2 == 0, a, 48};
  lev_comm *row;
  T_EXPECT_OK(lev_comm_subset(comm, rank / 2 * 2, 1, 2, &row));
  T_EXPECT_OK(lev_comm_all_gather(comm, stream, a, b, counts, LEV_F32));
  T_EXPECT_OK(lev_comm_reduce_scatter(comm, stream, a, LEV_F32, b, LEV_F32, counts, false));
  T_EXPECT_OK(lev_comm_all_reduce(comm, stream, a, 13, LEV_F32, LEV_SUM));
  T_EXPECT_OK(lev_comm_all_to_all(comm, stream, &part, 1, send_rows, recv_rows));
  T_EXPECT_OK(lev_comm_ring_shift(row, stream, a, 40, b, 40));
  T_EXPECT_OK(lev_comm_exchange(comm, stream, &move, 1));
  T_EXPECT_OK(lev_comm_broadcast(comm, stream, a, 8, 2));
  T_EXPECT_OK(lev_comm_barrier(comm, stream));
  T_EXPECT_OK(lev_comm_agree(comm, LEV_OK));
  T_EXPECT_OK(lev_stream_sync(stream));
  lev_comm_destroy(row);
}

typedef struct traced {
  uint64_t bytes;
  int64_t calls;
  lev_trace *trace;
} traced;

static void traced_rank(lev_comm_hub *hub, int rank, traced *out) {
  lev_device *device;
  lev_comm *comm;
  lev_stream *stream;
  void *memory;
  T_REQUIRE_OK(lev_trace_create(100, &out->trace));
  T_REQUIRE_OK(lev_device_open(
      &(lev_device_config){.backend = hub ? t_backend() : LEV_BACKEND_DRY, .trace = out->trace}, &device));
  if (hub)
    T_REQUIRE_OK(lev_comm_local_join(hub, rank, device, &comm));
  else
    T_REQUIRE_OK(lev_comm_dry_create(4, rank, device, &comm));
  T_REQUIRE_OK(lev_stream_create(device, "s", &stream));
  T_REQUIRE_OK(lev_device_alloc(device, t_mem(LEV_MEM_DEVICE), 200000, &memory));
  if (hub) memset(memory, 0, 200000);
  program(comm, stream, memory);
  out->bytes = lev_comm_bytes_sent(comm), out->calls = lev_comm_calls(comm);
  lev_comm_destroy(comm);
  lev_device_close(device);
}

typedef struct traced_world {
  lev_comm_hub *hub;
  traced ranks[4];
} traced_world;
static void traced_main(int rank, void *p) {
  traced_world *w = p;
  traced_rank(w->hub, rank, &w->ranks[rank]);
}

T_TEST(runtime_comm_dry_equals_local) {
  traced_world w = {0};
  T_REQUIRE_OK(lev_comm_hub_create(4, 60, &w.hub));
  t_ranks(4, traced_main, &w);
  lev_comm_hub_destroy(w.hub);
  for (int r = 0; r < 4; ++r) {
    traced dry = {0}, *real = &w.ranks[r];
    traced_rank(NULL, r, &dry);
    T_EXPECT_EQ_I64(dry.bytes, real->bytes);
    T_EXPECT_EQ_I64(dry.calls, 7);
    T_EXPECT_EQ_I64(real->calls, 7);
    T_EXPECT_EQ_I64(lev_trace_count(dry.trace), 8);
    T_EXPECT_EQ_I64(lev_trace_count(real->trace), 8);
    for (int64_t i = 0; i < 8 && !t_failed(); ++i) {
      const lev_trace_event *x = lev_trace_at(dry.trace, i), *y = lev_trace_at(real->trace, i);
      T_EXPECT(x->kind == LEV_EV_COLL && y->kind == LEV_EV_COLL && x->bytes == y->bytes);
      T_EXPECT(strcmp(lev_trace_name(dry.trace, x->name), lev_trace_name(real->trace, y->name)) == 0);
    }
    lev_trace_destroy(dry.trace);
    lev_trace_destroy(real->trace);
  }
}

T_TEST(runtime_comm_dry_world) {
  lev_device *dry, *cpu;
  lev_comm *comm = NULL, *part = NULL;
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_DRY}, &dry));
  T_REQUIRE_OK(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CPU}, &cpu));
  T_EXPECT_STATUS(lev_comm_dry_create(8, 8, dry, &comm), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_comm_dry_create(8, 0, cpu, &comm), LEV_ERR_ARG);
  T_REQUIRE_OK(lev_comm_dry_create(4096, 1000, dry, &comm));
  T_EXPECT_EQ_I64(lev_comm_size(comm), 4096);
  T_EXPECT_STATUS(lev_comm_split(comm, 0, 0, &part), LEV_ERR_UNSUPPORTED);
  T_EXPECT_OK(lev_comm_split(comm, -1, 0, &part));
  T_EXPECT(part == NULL);
  T_REQUIRE_OK(lev_comm_subset(comm, 8, 8, 500, &part));
  T_EXPECT_EQ_I64(lev_comm_rank(part), 124);
  T_EXPECT_EQ_I64(lev_comm_size(part), 500);
  T_EXPECT_STATUS(lev_comm_agree(part, LEV_ERR_IO), LEV_ERR_IO);
  static int32_t all[4096];
  int32_t mine = 5;
  T_EXPECT_OK(lev_comm_host_all_gather(comm, &mine, all, sizeof mine));
  T_EXPECT(all[0] == 5 && all[4095] == 5);
  lev_comm_abort(comm);
  lev_comm_destroy(part);
  lev_comm_destroy(comm);
  lev_device_close(dry);
  lev_device_close(cpu);
}
