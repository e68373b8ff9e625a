/* SPDX-License-Identifier: Apache-2.0 */
/* The cpu backend: every stream is a ring of operations and one worker thread.
 *
 * A stream counts the operations pushed by the host and done by its worker. An event's mark is a pair (stream, number
 * of operations pushed), so recording costs nothing and a wait is "done >= number" on that stream: the latest mark at
 * the time of the call, as on a GPU. Nothing is allocated after a stream was opened; a full ring makes the host wait
 * for room.
 *
 * An operation that fails (only collectives can) leaves a sticky error: later operations of the stream are skipped, and
 * the error passes on to every stream that waits for it. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "common/device_impl.h"
#include "common/dims.h"
#include "common/gemm_ops.h"
#include "common/hostmem.h"
#include "common/tsan_impl.h"

#define RING 256 /* operations a stream holds */
#define SPINS 200
#define DETAIL_BYTES 1024

typedef enum op_kind { OP_KERNEL, OP_HOST, OP_COPY, OP_FILL, OP_WAIT } op_kind;

typedef struct cpu_stream cpu_stream;

typedef struct copy_args {
  void *dst;
  const void *src;
  size_t bytes;
  int byte;
} copy_args;
typedef struct wait_args {
  cpu_stream *on;
  uint64_t number;
} wait_args;

/* The first two members stand for the edges enqueue -> run and run -> waiter that ThreadSanitizer is told of. */
typedef struct op {
  uint64_t pushed_edge, done_edge;
  op_kind kind;
  uint32_t args_bytes;
  union {
    void (*kernel)(const void *args);
    lev_cpu_fn host;
  } fn;
  _Alignas(16) unsigned char args[LEV_ARGS_MAX];
} op;

struct cpu_stream {
  lev_stream base;
  op *ring;
  uint64_t n_pushed; /* host's own count */
  _Atomic uint64_t pushed, done;
  atomic_int asleep;       /* the worker waits on `wake` */
  _Atomic uint64_t wanted; /* least number that threads waiting on `progress` want done; UINT64_MAX = none */
  atomic_bool stop;
  pthread_mutex_t lock;
  pthread_cond_t wake, progress;
  pthread_t worker;
  bool threaded;
  int number;       /* of the device's streams, from 1 */
  uint64_t jitter;  /* random state, 0 = none */
  uint64_t slow_at; /* this operation ... */
  int64_t slow_ns;  /* ... begins so much later; see common/fault.h */
  atomic_int status;
  char detail[DETAIL_BYTES]; /* written once, before status leaves LEV_OK */
};

typedef struct cpu_event {
  lev_event base;
  cpu_stream *stream;
  uint64_t number;
  double seconds; /* timed: written by the stream's worker, read after its mark has passed */
} cpu_event;

typedef struct cpu_device {
  lev_device base;
  int n_streams;
  bool spin; /* more than one core: a short spin saves most sleeps */
} cpu_device;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int spins(const cpu_stream *s) {
  return ((const cpu_device *)s->base.device)->spin ? SPINS : 0;
}

/* ---- progress of a stream ---- */

static void wait_done(cpu_stream *s, uint64_t number) {
  for (int i = spins(s); i > 0 && atomic_load(&s->done) < number; --i) relax();
  if (atomic_load(&s->done) >= number) return;
  pthread_mutex_lock(&s->lock);
  for (;;) {
    if (number < atomic_load(&s->wanted)) atomic_store(&s->wanted, number);
    if (atomic_load(&s->done) >= number) break;
    pthread_cond_wait(&s->progress, &s->lock);
  }
  pthread_mutex_unlock(&s->lock);
}

/* Waits for operation `number` (1-based; 0 = nothing) and takes over what it and those before it did. */
static void wait_for(cpu_stream *s, uint64_t number) {
  if (number == 0) return;
  lev_tsan_quiet();
  wait_done(s, number);
  op *last = s->ring ? &s->ring[(number - 1) % RING] : NULL;
  lev_tsan_loud();
  if (last) lev_tsan_acquire(&last->done_edge);
}

static void post_done(cpu_stream *s, op *o, uint64_t number) {
  lev_tsan_release(&o->done_edge);
  lev_tsan_quiet();
  atomic_store(&s->done, number);
  if (number >= atomic_load(&s->wanted)) { /* all wake; those that want more say so again */
    pthread_mutex_lock(&s->lock);
    atomic_store(&s->wanted, UINT64_MAX);
    pthread_mutex_unlock(&s->lock);
    pthread_cond_broadcast(&s->progress);
  }
  lev_tsan_loud();
}

static void set_error(cpu_stream *s, lev_status status, const char *detail) {
  if (status == LEV_OK || atomic_load(&s->status) != LEV_OK) return;
  snprintf(s->detail, sizeof s->detail, "%s", detail);
  atomic_store(&s->status, (int)status);
}

static lev_status get_error(cpu_stream *s) {
  lev_status status = (lev_status)atomic_load(&s->status);
  if (status != LEV_OK) lev_detail_set(s->detail);
  return status;
}

/* ---- running operations ---- */

static void run_op(cpu_stream *s, const op *o) {
  lev_status status = (lev_status)atomic_load(&s->status);
  if (o->kind == OP_WAIT) {
    wait_args w;
    memcpy(&w, o->args, sizeof w);
    wait_for(w.on, w.number);
    lev_status other = (lev_status)atomic_load(&w.on->status);
    if (other != LEV_OK) set_error(s, other, w.on->detail);
  } else if (o->kind == OP_HOST) {
    set_error(s, o->fn.host(o->args, status), lev_detail());
  } else if (status != LEV_OK) {
    return;
  } else if (o->kind == OP_KERNEL) {
    o->fn.kernel(o->args);
  } else {
    copy_args c;
    memcpy(&c, o->args, sizeof c);
    if (o->kind == OP_COPY)
      memcpy(c.dst, c.src, c.bytes);
    else
      memset(c.dst, c.byte, c.bytes);
  }
}

static void jitter(cpu_stream *s) {
  s->jitter = s->jitter * 6364136223846793005u + 1442695040888963407u;
  uint64_t r = s->jitter >> 33;
  if (r % 4 == 0) return;
  nanosleep(&(struct timespec){.tv_nsec = (long)(r % 100000)}, NULL);
}

static void delay(const cpu_stream *s) {
  struct timespec t = {.tv_sec = (time_t)(s->slow_ns / 1000000000), .tv_nsec = (long)(s->slow_ns % 1000000000)};
  nanosleep(&t, NULL);
}

/* Waits until operation `number` was pushed; false when the stream stops instead. */
static bool wait_pushed(cpu_stream *s, uint64_t number) {
  for (int i = spins(s); i > 0 && atomic_load(&s->pushed) < number; --i) relax();
  if (atomic_load(&s->pushed) >= number) return true;
  pthread_mutex_lock(&s->lock);
  atomic_store(&s->asleep, 1);
  while (atomic_load(&s->pushed) < number && !atomic_load(&s->stop)) pthread_cond_wait(&s->wake, &s->lock);
  atomic_store(&s->asleep, 0);
  pthread_mutex_unlock(&s->lock);
  return atomic_load(&s->pushed) >= number;
}

static void *worker_main(void *arg) {
  cpu_stream *s = arg;
  for (uint64_t number = 1;; ++number) {
    op local;
    lev_tsan_quiet();
    bool more = wait_pushed(s, number);
    op *slot = &s->ring[(number - 1) % RING];
    if (more) {
      memcpy(&local, slot, offsetof(op, args));
      memcpy(local.args, slot->args, slot->args_bytes);
    }
    lev_tsan_loud();
    if (!more) return NULL;
    lev_tsan_acquire(&slot->pushed_edge);
    if (s->jitter) jitter(s);
    if (number == s->slow_at) delay(s);
    run_op(s, &local);
    post_done(s, slot, number);
  }
}

/* ---- pushing operations ---- */

static void wake_worker(cpu_stream *s) {
  if (!atomic_load(&s->asleep)) return;
  pthread_mutex_lock(&s->lock); /* it sleeps now, or has seen what was pushed */
  pthread_mutex_unlock(&s->lock);
  pthread_cond_signal(&s->wake);
}

static void fill_op(op *o, op_kind kind, const void *args, size_t args_bytes) {
  o->kind = kind;
  o->args_bytes = (uint32_t)args_bytes;
  if (args_bytes) memcpy(o->args, args, args_bytes);
}

/* `head` carries kind and function. */
static void push(cpu_stream *s, const op *head, const void *args, size_t args_bytes) {
  uint64_t number = ++s->n_pushed;
  if (!s->threaded) {
    op local = {.fn = head->fn};
    fill_op(&local, head->kind, args, args_bytes);
    run_op(s, &local);
    atomic_store(&s->done, number);
    return;
  }
  lev_tsan_quiet();
  if (number > RING) wait_done(s, number - RING);
  op *slot = &s->ring[(number - 1) % RING];
  slot->fn = head->fn;
  fill_op(slot, head->kind, args, args_bytes);
  lev_tsan_loud();
  lev_tsan_release(&slot->pushed_edge);
  lev_tsan_quiet();
  atomic_store(&s->pushed, number);
  wake_worker(s);
  lev_tsan_loud();
}

lev_status lev_cpu_enqueue(lev_stream *stream, lev_cpu_fn fn, const void *args, size_t args_bytes) {
  if (args_bytes > LEV_ARGS_MAX)
    return lev_fail(LEV_ERR_INTERNAL, "%zu bytes of arguments, at most %d fit", args_bytes, LEV_ARGS_MAX);
  op head;
  head.kind = OP_HOST, head.fn.host = fn;
  push((cpu_stream *)stream, &head, args, args_bytes);
  return LEV_OK;
}

static lev_status cpu_launch(lev_stream *stream, const lev_kernel *kernel, const void *args, size_t args_bytes) {
  if (!kernel->cpu) return lev_fail(LEV_ERR_UNSUPPORTED, "%s has no cpu side", kernel->name);
  op head;
  head.kind = OP_KERNEL, head.fn.kernel = kernel->cpu;
  push((cpu_stream *)stream, &head, args, args_bytes);
  return LEV_OK;
}

static lev_status push_copy(lev_stream *stream, op_kind kind, copy_args args) {
  op head;
  head.kind = kind, head.fn.kernel = NULL;
  push((cpu_stream *)stream, &head, &args, sizeof args);
  return LEV_OK;
}

static lev_status cpu_copy(lev_stream *stream, void *dst, const void *src, size_t bytes) {
  return push_copy(stream, OP_COPY, (copy_args){.dst = dst, .src = src, .bytes = bytes});
}

static lev_status cpu_fill(lev_stream *stream, void *dst, int byte, size_t bytes) {
  return push_copy(stream, OP_FILL, (copy_args){.dst = dst, .byte = byte, .bytes = bytes});
}

/* ---- streams and events ---- */

static lev_status start_worker(cpu_stream *s) {
  s->ring = lev_calloc(LEV_HEAP_COMMON, RING, sizeof *s->ring);
  if (!s->ring) return LEV_ERR_NOMEM;
  atomic_store(&s->wanted, UINT64_MAX);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->wake, NULL);
  pthread_cond_init(&s->progress, NULL);
  /* Signals belong to the program's own threads. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&s->worker, NULL, worker_main, s);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error == 0) {
    s->threaded = true;
    return LEV_OK;
  }
  pthread_cond_destroy(&s->progress);
  pthread_cond_destroy(&s->wake);
  pthread_mutex_destroy(&s->lock);
  lev_free(s->ring);
  return lev_fail(LEV_ERR_DEVICE, "no thread for stream %s: %s", s->base.name, strerror(error));
}

static lev_status cpu_stream_open(lev_stream *stream) {
  cpu_stream *s = (cpu_stream *)stream;
  cpu_device *device = (cpu_device *)stream->device;
  const lev_fault *fault = stream->device->config.fault;
  s->number = ++device->n_streams;
  if (stream->device->config.immediate) return LEV_OK;
  uint64_t seed = stream->device->config.jitter_seed;
  s->jitter = seed ? (seed * 0x9E3779B97F4A7C15u + (uint64_t)s->number) | 1u : 0;
  if (fault && fault->slow_stream == s->number) s->slow_at = fault->slow_operation, s->slow_ns = fault->slow_ns;
  return start_worker(s);
}

static void cpu_stream_stop(lev_stream *stream) {
  cpu_stream *s = (cpu_stream *)stream;
  if (!s->threaded) return;
  wait_for(s, s->n_pushed);
  lev_tsan_quiet();
  pthread_mutex_lock(&s->lock);
  atomic_store(&s->stop, true);
  pthread_cond_signal(&s->wake);
  pthread_mutex_unlock(&s->lock);
  lev_tsan_loud();
  pthread_join(s->worker, NULL);
}

static void cpu_stream_close(lev_stream *stream) {
  cpu_stream *s = (cpu_stream *)stream;
  if (!s->threaded) return;
  pthread_cond_destroy(&s->progress);
  pthread_cond_destroy(&s->wake);
  pthread_mutex_destroy(&s->lock);
  lev_free(s->ring);
}

/* Tells a test of the wait; `waiter` NULL = the host. */
static void note_wait(const cpu_stream *waiter, const cpu_stream *on, uint64_t number) {
  lev_fault *f = on->base.device->config.fault;
  if (!f || f->n_waits >= f->max_waits) return;
  lev_fault_wait w = {.on = on->number, .number = number};
  if (waiter) w.waiter = waiter->number, w.at = waiter->n_pushed + 1, w.site = f->site;
  f->waits[f->n_waits++] = w;
}

static lev_status cpu_stream_sync(lev_stream *stream) {
  cpu_stream *s = (cpu_stream *)stream;
  note_wait(NULL, s, s->n_pushed);
  wait_for(s, s->n_pushed);
  return get_error(s);
}

static lev_status cpu_event_open(lev_event *event) {
  (void)event;
  return LEV_OK;
}
static void cpu_event_close(lev_event *event) {
  (void)event;
}

static lev_status note_time(const void *args, lev_status stream_status) {
  cpu_event *e;
  struct timespec now;
  memcpy(&e, args, sizeof(cpu_event *));
  clock_gettime(CLOCK_MONOTONIC, &now);
  e->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
  return stream_status;
}

static lev_status cpu_event_record(lev_event *event, lev_stream *stream) {
  cpu_event *e = (cpu_event *)event;
  if (event->timed) LEV_TRY(lev_cpu_enqueue(stream, note_time, &e, sizeof(cpu_event *)));
  e->stream = (cpu_stream *)stream;
  e->number = e->stream->n_pushed;
  return LEV_OK;
}

static lev_status cpu_event_sync(lev_event *event) {
  cpu_event *e = (cpu_event *)event;
  note_wait(NULL, e->stream, e->number);
  wait_for(e->stream, e->number);
  return get_error(e->stream);
}

static lev_status cpu_elapsed(lev_event *start, lev_event *stop, double *seconds) {
  *seconds = ((cpu_event *)stop)->seconds - ((cpu_event *)start)->seconds;
  return LEV_OK;
}

static lev_status cpu_stream_wait(lev_stream *stream, lev_event *event) {
  cpu_event *e = (cpu_event *)event;
  wait_args args = {e->stream, e->number};
  note_wait((cpu_stream *)stream, e->stream, e->number);
  op head;
  head.kind = OP_WAIT, head.fn.kernel = NULL;
  push((cpu_stream *)stream, &head, &args, sizeof args);
  return LEV_OK;
}

/* ---- device and memory ---- */

static int cpu_count(void) {
  return 1;
}

static lev_status cpu_open(lev_device *device) {
  ((cpu_device *)device)->spin = sysconf(_SC_NPROCESSORS_ONLN) > 1;
  return lev_gemm_cpu_ready();
}

static void cpu_close(lev_device *device) {
  (void)device;
}

static lev_status cpu_memory(lev_device *device, size_t *free_bytes, size_t *total_bytes) {
  (void)device;
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  *total_bytes = lev_sat_mul((size_t)sysconf(_SC_PHYS_PAGES), page);
  *free_bytes = *total_bytes;
  FILE *file = fopen("/proc/meminfo", "r");
  if (!file) return LEV_OK;
  char line[256];
  unsigned long long kib;
  while (fgets(line, sizeof line, file))
    if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) *free_bytes = (size_t)kib * 1024;
  fclose(file);
  return LEV_OK;
}

static void cpu_name(lev_device *device, char *out, size_t size) {
  (void)device;
  char line[256];
  int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
  const char *model = "CPU";
  FILE *file = fopen("/proc/cpuinfo", "r");
  while (file && fgets(line, sizeof line, file)) {
    if (strncmp(line, "model name", 10) != 0 || !strchr(line, ':')) continue;
    line[strcspn(line, "\n")] = 0;
    model = strchr(line, ':') + 1;
    model += strspn(model, " \t");
    break;
  }
  if (file) fclose(file);
  snprintf(out, size, "%s, %d cores", model, cores);
}

static size_t slab_bytes(size_t bytes) {
  size_t page = 4096;
  long system_page = sysconf(_SC_PAGESIZE);
  if (system_page > 4096) page = (size_t)system_page;
  if (bytes == 0) return page;
  return bytes > SIZE_MAX - page ? SIZE_MAX : (bytes + page - 1) / page * page;
}

/* A zero-byte slab is a page that faults when touched. */
static lev_status cpu_alloc(lev_device *device, lev_mem cls, size_t bytes, void **out) {
  size_t mapped = slab_bytes(bytes), free_bytes, total_bytes;
  LEV_TRY(cpu_memory(device, &free_bytes, &total_bytes));
  bool touched = cls == LEV_MEM_PINNED;
  void *slab = MAP_FAILED;
  if (mapped <= total_bytes && (!touched || mapped <= free_bytes))
    slab = mmap(NULL, mapped, bytes ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (slab == MAP_FAILED)
    return lev_fail(LEV_ERR_NOMEM, "%zu bytes of %s memory asked, %zu of %zu bytes of this machine are free", bytes,
                    lev_mem_name(cls), free_bytes, total_bytes);
#ifdef MADV_HUGEPAGE
  if (cls != LEV_MEM_HOST) (void)madvise(slab, mapped, MADV_HUGEPAGE);
#endif
  if (touched && bytes) memset(slab, 0, mapped);
  *out = slab;
  return LEV_OK;
}

static void cpu_free(lev_device *device, lev_mem cls, void *slab, size_t bytes) {
  (void)device, (void)cls;
  munmap(slab, slab_bytes(bytes));
}

const lev_device_ops lev_device_cpu_ops = {
    .count = cpu_count,
    .device_bytes = sizeof(cpu_device),
    .stream_bytes = sizeof(cpu_stream),
    .event_bytes = sizeof(cpu_event),
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .memory = cpu_memory,
    .name = cpu_name,
    .stream_open = cpu_stream_open,
    .stream_stop = cpu_stream_stop,
    .stream_close = cpu_stream_close,
    .stream_sync = cpu_stream_sync,
    .event_open = cpu_event_open,
    .event_close = cpu_event_close,
    .event_record = cpu_event_record,
    .event_sync = cpu_event_sync,
    .event_elapsed = cpu_elapsed,
    .stream_wait = cpu_stream_wait,
    .copy = cpu_copy,
    .fill = cpu_fill,
    .launch = cpu_launch,
};
