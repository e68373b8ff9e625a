/* SPDX-License-Identifier: Apache-2.0 */
/* Device runtime: order within a stream, events across streams, back-pressure, immediate = queued, slabs, dry = cpu. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/device.h"
#include "common/dims.h"
#include "common/hostmem.h"
#include "tests/backend.h"
#include "tests/common/test_kernels.h"
#include "tests/num.h"
#include "tests/t.h"

static lev_device *open_device(lev_device_config config) {
  lev_device *device = NULL;
  T_EXPECT_OK(lev_device_open(&config, &device));
  return device;
}

/* ---- small kernels ---- */

static void step_cpu(const void *p) {
  const step_args *a = p;
  if (a->ms) t_sleep_ms(a->ms);
  a->log[(*a->at)++] = a->value;
}
static const lev_kernel step = {.name = "test.step", .cpu = step_cpu, .cuda = LEV_CUDA(test_step_cuda)};

static void move_cpu(const void *p) {
  const move_args *a = p;
  if (a->ms) t_sleep_ms(a->ms);
  *a->to = *a->from + a->add;
}
static const lev_kernel move = {.name = "test.move", .cpu = move_cpu, .cuda = LEV_CUDA(test_move_cuda)};

static void gate_cpu(const void *p) {
  atomic_int *gate;
  memcpy(&gate, p, sizeof gate);
  while (!atomic_load(gate)) t_sleep_ms(1);
}
static const lev_kernel gate_kernel = {.name = "test.gate", .cpu = gate_cpu, .cuda = LEV_CUDA(test_gate_cuda)};

static void big_cpu(const void *p) {
  const unsigned char *bytes = p;
  unsigned char *out;
  memcpy(&out, bytes, sizeof out);
  memcpy(out, bytes, LEV_ARGS_MAX);
}
static const lev_kernel big_kernel = {.name = "test.big", .cpu = big_cpu, .cuda = LEV_CUDA(test_big_cuda)};

/* ---- tests ---- */

T_TEST(runtime_backends) {
  T_EXPECT_EQ_I64(lev_device_count(LEV_BACKEND_CPU), 1);
  T_EXPECT_EQ_I64(lev_device_count(LEV_BACKEND_DRY), 1);
  T_EXPECT(strcmp(lev_backend_name(LEV_BACKEND_CUDA), "cuda") == 0);
  lev_device *device = NULL;
#ifndef LEV_HAVE_CUDA
  T_EXPECT_EQ_I64(lev_device_count(LEV_BACKEND_CUDA), 0);
  T_EXPECT_STATUS(lev_device_open(&(lev_device_config){.backend = LEV_BACKEND_CUDA}, &device), LEV_ERR_UNSUPPORTED);
  T_EXPECT(strstr(lev_detail(), "cuda") != NULL);
#endif
  T_EXPECT_STATUS(lev_device_open(&(lev_device_config){.backend = LEV_BACKENDS}, &device), LEV_ERR_ARG);
  T_EXPECT(device == NULL);
  lev_device_close(NULL);
}

T_TEST(runtime_stream_order) {
  enum { N = 3000 };
  lev_device *device = open_device((lev_device_config){.backend = t_backend()});
  T_REQUIRE(device);
  lev_stream *stream;
  T_REQUIRE_OK(lev_stream_create(device, "order", &stream));
  T_EXPECT(strcmp(lev_stream_name(stream), "order") == 0);
  T_EXPECT(lev_stream_device(stream) == device);
  int64_t *log = t_alloc((N + 1) * sizeof *log), *at = log + N;
  *at = 0;
  for (int64_t i = 0; i < N; ++i) {
    step_args args = {log, at, i, 0};
    T_REQUIRE_OK(LEV_LAUNCH(stream, &step, args));
  }
  T_EXPECT_OK(lev_stream_sync(stream));
  T_EXPECT_EQ_I64(*at, N);
  for (int64_t i = 0; i < N && !t_failed(); ++i) T_EXPECT_EQ_I64(log[i], i);
  lev_device_close(device);
  t_free(log);
}

T_TEST(runtime_arguments_are_copied) {
  lev_device *device = open_device((lev_device_config){.backend = t_backend(), .jitter_seed = 3});
  T_REQUIRE(device);
  lev_stream *stream;
  T_REQUIRE_OK(lev_stream_create(device, "s", &stream));
  unsigned char args[LEV_ARGS_MAX + 1], want[LEV_ARGS_MAX], *out = t_alloc(LEV_ARGS_MAX);
  for (int i = 0; i < LEV_ARGS_MAX; ++i) args[i] = (unsigned char)(i * 7);
  memset(out, 0, LEV_ARGS_MAX);
  memcpy(args, &out, sizeof out);
  memcpy(want, args, sizeof want);
  T_EXPECT_OK(lev_launch(stream, &big_kernel, args, LEV_ARGS_MAX));
  memset(args, 0, sizeof args);
  T_EXPECT_OK(lev_stream_sync(stream));
  T_EXPECT(memcmp(out, want, sizeof want) == 0);
  T_EXPECT_STATUS(lev_launch(stream, &big_kernel, args, LEV_ARGS_MAX + 1), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_launch(stream, &(lev_kernel){.name = "none"}, args, 8), LEV_ERR_UNSUPPORTED);
  lev_device_close(device);
  t_free(out);
}

/* A wait keeps the mark it saw: recording the event again, on this stream or another, moves only later waits. */
T_TEST(runtime_event_marks) {
  lev_device *device = open_device((lev_device_config){.backend = t_backend()});
  T_REQUIRE(device);
  lev_stream *slow, *fast, *user;
  lev_event *event;
  T_REQUIRE_OK(lev_stream_create(device, "slow", &slow));
  T_REQUIRE_OK(lev_stream_create(device, "fast", &fast));
  T_REQUIRE_OK(lev_stream_create(device, "user", &user));
  T_REQUIRE_OK(lev_event_create(device, &event));
  struct values {
    int64_t zero, a, b, seen;
    atomic_int gate;
  } *v = t_alloc(sizeof *v);
  *v = (struct values){.seen = -1};
  atomic_int *gate_at = &v->gate;

  /* Never recorded: passes at once. */
  T_EXPECT_OK(lev_stream_wait(user, event));
  T_EXPECT_OK(lev_event_sync(event));
  T_EXPECT_OK(lev_stream_sync(user));

  /* The wait must hold `user` until slow's first move ran, although the event is then recorded on a fast stream. */
  move_args first = {&v->zero, &v->a, 1, 30}, other = {&v->zero, &v->b, 2, 0}, look = {&v->a, &v->seen, 0, 0};
  T_EXPECT_OK(LEV_LAUNCH(slow, &move, first));
  T_EXPECT_OK(lev_event_record(event, slow));
  T_EXPECT_OK(lev_stream_wait(user, event));
  T_EXPECT_OK(LEV_LAUNCH(fast, &move, other));
  T_EXPECT_OK(lev_event_record(event, fast));
  T_EXPECT_OK(lev_event_sync(event));
  T_EXPECT_EQ_I64(v->b, 2);
  T_EXPECT_OK(LEV_LAUNCH(user, &move, look));
  T_EXPECT_OK(lev_stream_sync(user));
  T_EXPECT_EQ_I64(v->seen, 1);

  /* ... and does not wait for what was recorded afterwards: slow is held at the gate, the wait was for before it. */
  T_EXPECT_OK(lev_event_record(event, slow));
  T_EXPECT_OK(lev_stream_wait(user, event));
  T_EXPECT_OK(lev_launch(slow, &gate_kernel, &gate_at, sizeof gate_at));
  T_EXPECT_OK(lev_event_record(event, slow));
  T_EXPECT_OK(lev_stream_sync(user));
  atomic_store(&v->gate, 1);
  T_EXPECT_OK(lev_event_sync(event));
  T_EXPECT_OK(lev_stream_sync(slow));

  /* An event of a destroyed stream is complete. */
  lev_stream_destroy(slow);
  T_EXPECT_OK(lev_stream_wait(user, event));
  T_EXPECT_OK(lev_event_sync(event));
  T_EXPECT_STATUS(LEV_LAUNCH(slow, &move, look), LEV_ERR_MISUSE);
  lev_event_destroy(event);
  lev_event_destroy(NULL);
  lev_device_close(device);
  t_free(v);
}

/* Two slots, a producer and a consumer stream: exact with all waits under jitter; a dropped wait changes the result. */
static int64_t pingpong(lev_device_config config, int n, long producer_ms, long consumer_ms) {
  lev_device *device = open_device(config);
  if (!device) return -1;
  lev_stream *producer = NULL, *consumer = NULL;
  lev_event *filled[2] = {0}, *freed[2] = {0};
  int64_t *source = t_alloc(130 * sizeof *source), *slot = source + 64, *sum = slot + 2;
  for (int i = 0; i < 66; ++i) source[i] = -1000;
  memset(sum, 0, 64 * sizeof *sum);
  lev_status st = lev_stream_create(device, "producer", &producer);
  if (st == LEV_OK) st = lev_stream_create(device, "consumer", &consumer);
  for (int s = 0; s < 2 && st == LEV_OK; ++s) {
    st = lev_event_create(device, &filled[s]);
    if (st == LEV_OK) st = lev_event_create(device, &freed[s]);
  }
  for (int i = 0; i < n && st == LEV_OK; ++i) {
    int s = i % 2;
    source[i] = 100 + i;
    st = lev_stream_wait(producer, freed[s]);
    move_args in = {&source[i], &slot[s], 0, producer_ms}, out = {&slot[s], &sum[i], i, consumer_ms};
    if (st == LEV_OK) st = LEV_LAUNCH(producer, &move, in);
    if (st == LEV_OK) st = lev_event_record(filled[s], producer);
    if (st == LEV_OK) st = lev_stream_wait(consumer, filled[s]);
    if (st == LEV_OK) st = LEV_LAUNCH(consumer, &move, out);
    if (st == LEV_OK) st = lev_event_record(freed[s], consumer);
  }
  if (T_EXPECT_OK(st)) {
    T_EXPECT_OK(lev_stream_sync(consumer));
    T_EXPECT_OK(lev_stream_sync(producer));
  }
  int64_t wrong = 0;
  for (int i = 0; i < n; ++i) wrong += sum[i] != 100 + 2 * i;
  lev_device_close(device);
  t_free(source);
  return wrong;
}

T_TEST(runtime_time_between_events) {
  lev_device *device = open_device((lev_device_config){.backend = t_backend()});
  T_REQUIRE(device);
  lev_stream *stream;
  lev_event *start, *stop, *plain;
  double seconds, began;
  char name[64];
  lev_device_name(device, name, sizeof name);
  T_EXPECT(name[0] != 0);
  T_REQUIRE_OK(lev_stream_create(device, "s", &stream));
  T_REQUIRE_OK(lev_event_create_timed(device, &start));
  T_REQUIRE_OK(lev_event_create_timed(device, &stop));
  T_REQUIRE_OK(lev_event_create(device, &plain));
  T_EXPECT_STATUS(lev_event_elapsed(start, stop, &seconds), LEV_ERR_MISUSE);
  int64_t *x = t_alloc(2 * sizeof *x);
  x[0] = x[1] = 0;
  move_args slow = {x, x + 1, 1, 60};
  for (int round = 0; round < 2; ++round) {
    began = t_now();
    T_REQUIRE_OK(lev_event_record(start, stream));
    T_REQUIRE_OK(LEV_LAUNCH(stream, &move, slow));
    T_REQUIRE_OK(lev_event_record(stop, stream));
    T_REQUIRE_OK(lev_event_elapsed(start, stop, &seconds));
    T_EXPECT_MSG(seconds > 0.05 && seconds <= t_now() - began + 1e-3, "%g s for 60 ms", seconds);
  }
  T_REQUIRE_OK(lev_event_record(plain, stream));
  T_EXPECT_STATUS(lev_event_elapsed(start, plain, &seconds), LEV_ERR_MISUSE);
  lev_device_close(device);
  t_free(x);
}

T_TEST(runtime_events_order_streams) {
  for (uint64_t seed = 1; seed <= 5; ++seed)
    T_EXPECT_EQ_I64(pingpong((lev_device_config){.backend = t_backend(), .jitter_seed = seed}, 64, 0, 0), 0);
  T_EXPECT_EQ_I64(pingpong((lev_device_config){.backend = t_backend(), .immediate = true}, 64, 0, 0), 0);
}

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif

#ifndef UNDER_TSAN
/* (Under ThreadSanitizer the planted race would be reported; runtime_tsan_sees_races looks at that.) */
T_TEST(runtime_dropped_wait_shows) {
  lev_fault fault = {0};
  int64_t none = pingpong((lev_device_config){.backend = t_backend(), .fault = &fault}, 6, 2, 2);
  T_EXPECT_EQ_I64(none, 0);
  /* 2 of the 12 waits are for events that were never recorded and do not count. */
  T_EXPECT_EQ_I64(fault.seen[LEV_FAULT_DROP_WAIT], 10);
  for (int64_t n = 1; n <= 10; ++n) {
    bool for_consumer = n <= 2 || n % 2 == 0; /* filled[0], filled[1], then freed, filled, freed, ... */
    fault = (lev_fault){.fail_at[LEV_FAULT_DROP_WAIT] = n};
    int64_t wrong = 0;
    for (long ms = 20; ms <= 320 && wrong == 0; ms *= 4) { /* longer where a busy machine held the other thread up */
      long producer_ms = for_consumer ? ms : 0, consumer_ms = for_consumer ? 0 : ms;
      fault.seen[LEV_FAULT_DROP_WAIT] = 0;
      wrong = pingpong((lev_device_config){.backend = t_backend(), .fault = &fault}, 6, producer_ms, consumer_ms);
    }
    T_EXPECT_MSG(wrong > 0, "wait %lld dropped without effect", (long long)n);
  }
}
#endif

/* The queue holds fewer operations than are pushed: the host waits for room, nothing is lost. */
T_TEST(runtime_full_queue_blocks_the_host) {
  lev_device *device = open_device((lev_device_config){.backend = LEV_BACKEND_CPU});
  T_REQUIRE(device);
  lev_stream *stream;
  T_REQUIRE_OK(lev_stream_create(device, "s", &stream));
  static int64_t log[2000];
  int64_t at = 0;
  step_args slow = {log, &at, -1, 50};
  T_EXPECT_OK(LEV_LAUNCH(stream, &step, slow));
  double start = t_now();
  for (int64_t i = 1; i < 2000; ++i) {
    step_args args = {log, &at, i, 0};
    T_REQUIRE_OK(LEV_LAUNCH(stream, &step, args));
  }
  T_EXPECT_MSG(t_now() - start > 0.02, "2000 operations were taken while the stream stood still");
  T_EXPECT_OK(lev_stream_sync(stream));
  T_EXPECT_EQ_I64(at, 2000);
  for (int64_t i = 1; i < 2000 && !t_failed(); ++i) T_EXPECT_EQ_I64(log[i], i);
  lev_device_close(device);
}

T_TEST(runtime_ten_thousand_small_operations) {
  enum { STREAMS = 4, N = 10000 };
  lev_device *device = open_device((lev_device_config){.backend = t_backend()});
  T_REQUIRE(device);
  lev_stream *streams[STREAMS];
  lev_event *events[STREAMS];
  for (int s = 0; s < STREAMS; ++s) {
    T_REQUIRE_OK(lev_stream_create(device, "s", &streams[s]));
    T_REQUIRE_OK(lev_event_create(device, &events[s]));
  }
  int64_t *value = t_alloc(sizeof *value);
  *value = 0;
  lev_heap_stats before, after;
  lev_heap_read(LEV_HEAP_COMMON, &before);
  for (int i = 0; i < N; ++i) { /* one counter handed from stream to stream */
    lev_stream *s = streams[i * 7 % STREAMS];
    if (i > 0) T_REQUIRE_OK(lev_stream_wait(s, events[(i - 1) % STREAMS]));
    move_args args = {value, value, 1, 0};
    T_REQUIRE_OK(LEV_LAUNCH(s, &move, args));
    T_REQUIRE_OK(lev_event_record(events[i % STREAMS], s));
  }
  lev_heap_read(LEV_HEAP_COMMON, &after);
  T_EXPECT_EQ_I64(after.calls, before.calls);
  T_EXPECT_OK(lev_event_sync(events[(N - 1) % STREAMS]));
  T_EXPECT_EQ_I64(*value, N);
  lev_device_close(device);
  t_free(value);
}

/* The same program in both modes. */
static void small_program(lev_device_config config, int64_t out[4]) {
  lev_device *device = open_device(config);
  if (!device) return;
  lev_stream *a, *b;
  lev_event *e;
  T_REQUIRE_OK(lev_stream_create(device, "a", &a));
  T_REQUIRE_OK(lev_stream_create(device, "b", &b));
  T_REQUIRE_OK(lev_event_create(device, &e));
  void *slab;
  T_REQUIRE_OK(lev_device_alloc(device, LEV_MEM_DEVICE, 4 * sizeof *out, &slab));
  int64_t *x = slab;
  T_EXPECT_OK(lev_fill(a, x, 0, 4 * sizeof *x, "zero"));
  move_args m0 = {&x[0], &x[1], 5, 1}, m1 = {&x[1], &x[2], 7, 0};
  T_EXPECT_OK(LEV_LAUNCH(a, &move, m0));
  T_EXPECT_OK(lev_event_record(e, a));
  T_EXPECT_OK(lev_stream_wait(b, e));
  T_EXPECT_OK(LEV_LAUNCH(b, &move, m1));
  T_EXPECT_OK(lev_copy(b, &x[3], &x[1], sizeof *x, "copy"));
  T_EXPECT_OK(lev_copy(b, out, x, 4 * sizeof *x, "out"));
  T_EXPECT_OK(lev_stream_sync(b));
  lev_device_close(device);
}

T_TEST(runtime_immediate_equals_queued) {
  int64_t queued[4] = {0}, immediate[4] = {0};
  small_program((lev_device_config){.backend = t_backend()}, queued);
  small_program((lev_device_config){.backend = LEV_BACKEND_CPU, .immediate = true}, immediate);
  T_EXPECT(memcmp(queued, immediate, sizeof queued) == 0);
  T_EXPECT_EQ_I64(queued[2], 12);
  T_EXPECT_EQ_I64(queued[3], 5);
}

T_TEST(runtime_slabs) {
  for (int backend = 0; backend < LEV_BACKENDS; ++backend) {
    if (backend == LEV_BACKEND_CUDA && t_backend() != LEV_BACKEND_CUDA) continue;
    lev_fault fault = {0};
    lev_device *device = open_device((lev_device_config){.backend = (lev_backend)backend, .fault = &fault});
    T_REQUIRE(device);
    void *slab[LEV_MEM_CLASSES], *none, *extra;
    for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls) {
      T_REQUIRE_OK(lev_device_alloc(device, (lev_mem)cls, 5000000, &slab[cls]));
      T_EXPECT_EQ_I64((uintptr_t)slab[cls] % 4096, 0);
      bool reachable = backend == LEV_BACKEND_CPU || (backend == LEV_BACKEND_CUDA && cls != LEV_MEM_DEVICE);
      if (reachable) memset(slab[cls], 0xA5, 5000000);
    }
    for (int a = 0; a < LEV_MEM_CLASSES; ++a)
      for (int b = 0; b < a; ++b) {
        uintptr_t x = (uintptr_t)slab[a], y = (uintptr_t)slab[b];
        T_EXPECT(x > y ? x - y >= 5000000 : y - x >= 5000000);
      }
    T_EXPECT_OK(lev_device_alloc(device, LEV_MEM_HOST, 0, &none));
    T_EXPECT(none != NULL);
    size_t free_bytes, total_bytes;
    T_EXPECT_OK(lev_device_memory(device, &free_bytes, &total_bytes));
    T_EXPECT(free_bytes > 0 && total_bytes >= free_bytes);
    if (backend != LEV_BACKEND_DRY) {
      size_t machine = backend == LEV_BACKEND_CPU ? total_bytes + 1 : SIZE_MAX / 2;
      T_EXPECT_STATUS(lev_device_alloc(device, LEV_MEM_DEVICE, SIZE_MAX, &extra), LEV_ERR_NOMEM);
      T_EXPECT_STATUS(lev_device_alloc(device, LEV_MEM_DEVICE, total_bytes + 1, &extra), LEV_ERR_NOMEM);
      T_EXPECT_STATUS(lev_device_alloc(device, LEV_MEM_PINNED, machine, &extra), LEV_ERR_NOMEM);
      T_EXPECT(extra == NULL && strstr(lev_detail(), "pinned") != NULL);
    } else {
      T_EXPECT_OK(lev_device_alloc(device, LEV_MEM_DEVICE, SIZE_MAX, &extra));
      T_EXPECT(extra != NULL);
    }
    lev_device_free(device, slab[1]);
    lev_device_free(device, NULL);
    fault = (lev_fault){.fail_at[LEV_FAULT_ALLOC] = 1};
    T_EXPECT_STATUS(lev_device_alloc(device, LEV_MEM_DEVICE, 64, &extra), LEV_ERR_NOMEM);
    T_EXPECT_OK(lev_device_alloc(device, LEV_MEM_DEVICE, 64, &extra));
    lev_device_seal(device);
    T_EXPECT_STATUS(lev_device_alloc(device, LEV_MEM_DEVICE, 64, &extra), LEV_ERR_SEALED);
    lev_device_close(device);
  }
}

T_TEST(runtime_copy_faults_and_errors) {
  lev_fault fault = {.fail_at[LEV_FAULT_COPY] = 3};
  lev_device *device = open_device((lev_device_config){.backend = t_backend(), .fault = &fault});
  lev_device *device2 = open_device((lev_device_config){.backend = t_backend()});
  T_REQUIRE(device && device2);
  T_EXPECT(lev_device_fault(device) == &fault);
  lev_stream *stream;
  lev_event *foreign;
  T_REQUIRE_OK(lev_stream_create(device, "s", &stream));
  T_REQUIRE_OK(lev_event_create(device2, &foreign));
  char a[4] = "abc", b[4] = "xyz";
  T_EXPECT_OK(lev_copy(stream, b, a, 4, "one"));
  T_EXPECT_OK(lev_copy(stream, NULL, NULL, 0, "none"));
  T_EXPECT_STATUS(lev_fill(stream, b, 0, 4, "three"), LEV_ERR_DEVICE);
  T_EXPECT(strstr(lev_detail(), "three") != NULL);
  T_EXPECT_STATUS(lev_copy(stream, NULL, a, 4, "null"), LEV_ERR_ARG);
  T_EXPECT_OK(lev_stream_sync(stream));
  T_EXPECT(strcmp(b, "abc") == 0);
  T_EXPECT_STATUS(lev_event_record(foreign, stream), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_stream_wait(stream, foreign), LEV_ERR_ARG);
  size_t bytes = 1;
  T_EXPECT(lev_stream_workspace(stream, &bytes) == NULL && bytes == 0);
  lev_stream_set_workspace(stream, a, sizeof a);
  T_EXPECT(lev_stream_workspace(stream, &bytes) == a && bytes == sizeof a);
  lev_device_close(device);
  lev_device_close(device2);
}

/* The dry device records what the cpu device records. */
static void traced_program(lev_backend backend, lev_trace *trace) {
  lev_device *device = open_device((lev_device_config){.backend = backend, .trace = trace});
  T_REQUIRE(device && lev_device_trace(device) == trace && lev_device_backend(device) == backend);
  lev_stream *a, *b;
  lev_event *e;
  void *slab;
  T_REQUIRE_OK(lev_stream_create(device, "a", &a));
  T_REQUIRE_OK(lev_stream_create(device, "b", &b));
  T_REQUIRE_OK(lev_event_create(device, &e));
  T_REQUIRE_OK(lev_device_alloc(device, LEV_MEM_DEVICE, 4096, &slab));
  int64_t *x = slab;
  for (int i = 0; i < 20; ++i) {
    move_args args = {&x[i], &x[i + 1], 1, 0};
    T_EXPECT_OK(lev_fill(a, x, i, 100 + (size_t)i, "test.fill"));
    T_EXPECT_OK(LEV_LAUNCH(a, &move, args));
    T_EXPECT_OK(lev_event_record(e, a));
    T_EXPECT_OK(lev_stream_wait(b, e));
    T_EXPECT_OK(lev_copy(b, x + 256, x, 8 * (size_t)i, "test.copy"));
    T_EXPECT_OK(lev_event_sync(e));
    T_EXPECT_OK(lev_stream_sync(b));
  }
  T_EXPECT_STATUS(lev_launch(a, &move, x, LEV_ARGS_MAX + 1), LEV_ERR_ARG);
  lev_stream_destroy(b);
  lev_device_close(device);
}

#ifdef LEV_HAVE_CUDA
/* A plan for a GPU refuses what the GPU could not run. */
T_TEST(runtime_dry_for_cuda) {
  lev_device *device = open_device((lev_device_config){.backend = LEV_BACKEND_DRY, .dry_for = LEV_BACKEND_CUDA});
  lev_stream *stream;
  int64_t x = 0;
  T_REQUIRE(device);
  T_REQUIRE_OK(lev_stream_create(device, "s", &stream));
  T_EXPECT_OK(lev_launch(stream, &move, &x, sizeof x));
  T_EXPECT_STATUS(lev_launch(stream, &(lev_kernel){.name = "none", .cpu = move_cpu}, &x, sizeof x),
                  LEV_ERR_UNSUPPORTED);
  T_EXPECT(strstr(lev_detail(), "none") != NULL);
  lev_device_close(device);
}
#endif

T_TEST(runtime_dry_trace_equals_cpu_trace) {
  lev_trace *cpu, *dry;
  T_REQUIRE_OK(lev_trace_create(1000, &cpu));
  T_REQUIRE_OK(lev_trace_create(1000, &dry));
  traced_program(t_backend(), cpu);
  traced_program(LEV_BACKEND_DRY, dry);
  T_EXPECT_EQ_I64(lev_trace_count(cpu), 40);
  T_EXPECT_EQ_I64(lev_trace_count(dry), 40);
  for (int64_t i = 0; i < 40 && !t_failed(); ++i) {
    const lev_trace_event *x = lev_trace_at(cpu, i), *y = lev_trace_at(dry, i);
    T_EXPECT(x->kind == LEV_EV_COPY && x->kind == y->kind && x->bytes == y->bytes && x->cls == y->cls);
    T_EXPECT(strcmp(lev_trace_name(cpu, x->name), lev_trace_name(dry, y->name)) == 0);
  }
  lev_trace_destroy(cpu);
  lev_trace_destroy(dry);
}

/* ---- ThreadSanitizer must see a forgotten wait, and nothing where none is forgotten ---- */

/* What the child process below runs: dropped wait number `drop` (0 = none) of a program with two slots. */
T_CHILD(runtime_race, drop) {
  lev_fault fault = {.fail_at[LEV_FAULT_DROP_WAIT] = strtol(drop, NULL, 10)};
  (void)pingpong((lev_device_config){.backend = LEV_BACKEND_CPU, .fault = &fault}, 8, 3, 1);
}

#ifdef UNDER_TSAN
T_TEST(runtime_tsan_sees_races) {
  for (int drop = 0; drop <= 14; ++drop) {
    char value[16];
    snprintf(value, sizeof value, "%d", drop);
    int status = t_child("runtime_race", value);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    T_EXPECT_MSG(code == (drop ? 66 : 0), "wait %d dropped: exit code %d", drop, code);
  }
}
#endif
