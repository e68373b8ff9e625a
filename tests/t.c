/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/t.h"

#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#define T_MAX 1024
#define T_RANKS_MAX 64

typedef struct t_entry {
  const char *name, *file;
  t_fn fn;          /* NULL: a child */
  t_child_fn child; /* NULL: a test */
} t_entry;

static t_entry entries[T_MAX];
static int n_entries;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int failures;        /* of the running test */
static atomic_llong checks; /* likewise */
static bool skipped, on_cuda;
static uint64_t seed = T_SEED;

static void add_entry(t_entry entry) {
  if (n_entries == T_MAX) {
    fprintf(stderr, "too many tests\n");
    exit(2);
  }
  entries[n_entries++] = entry;
}

void t_register(const char *name, const char *file, t_fn fn) {
  add_entry((t_entry){name, file, fn, NULL});
}

void t_register_child(const char *name, const char *file, t_child_fn fn) {
  add_entry((t_entry){name, file, NULL, fn});
}

bool t_check(bool ok, const char *file, int line, const char *format, ...) {
  atomic_fetch_add_explicit(&checks, 1, memory_order_relaxed);
  if (ok) return true;
  pthread_mutex_lock(&lock);
  if (++failures <= 20) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "  %s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
  }
  pthread_mutex_unlock(&lock);
  return false;
}

bool t_check_status(lev_status got, lev_status want, const char *expr, const char *file, int line) {
  return t_check(got == want, file, line, "%s: got \"%s\" (%s), expected \"%s\"", expr, lev_status_text(got),
                 lev_detail(), lev_status_text(want));
}

void t_skip(const char *format, ...) {
  va_list args;
  va_start(args, format);
  pthread_mutex_lock(&lock);
  skipped = true;
  printf("  skipped: ");
  vprintf(format, args);
  putchar('\n');
  pthread_mutex_unlock(&lock);
  va_end(args);
}

void t_on_cuda(void) {
  pthread_mutex_lock(&lock);
  on_cuda = true;
  pthread_mutex_unlock(&lock);
}

bool t_failed(void) {
  pthread_mutex_lock(&lock);
  bool failed = failures > 0;
  pthread_mutex_unlock(&lock);
  return failed;
}

uint64_t t_seed(void) {
  return seed;
}

typedef struct t_rank_arg {
  void (*fn)(int rank, void *ctx);
  void *ctx;
  int rank;
} t_rank_arg;

static void *rank_main(void *arg) {
  t_rank_arg *a = arg;
  a->fn(a->rank, a->ctx);
  return NULL;
}

void t_ranks(int n, void (*fn)(int rank, void *ctx), void *ctx) {
  pthread_t threads[T_RANKS_MAX];
  t_rank_arg args[T_RANKS_MAX];
  if (!t_check(n > 0 && n <= T_RANKS_MAX, __FILE__, __LINE__, "%d ranks", n)) return;
  for (int r = 0; r < n; ++r) {
    args[r] = (t_rank_arg){fn, ctx, r};
    if (pthread_create(&threads[r], NULL, rank_main, &args[r]) != 0) {
      fprintf(stderr, "cannot start a rank thread\n");
      exit(2);
    }
  }
  for (int r = 0; r < n; ++r) pthread_join(threads[r], NULL);
}

extern char **environ;

static const t_entry *find_child(const char *name) {
  for (int e = 0; e < n_entries; ++e)
    if (entries[e].child && strcmp(entries[e].name, name) == 0) return &entries[e];
  return NULL;
}

int t_child(const char *name, const char *value) {
  char exe[] = "/proc/self/exe";
  char *argv[] = {exe, NULL};
  if (!t_check(find_child(name) != NULL, __FILE__, __LINE__, "no T_CHILD(%s, ...) here", name)) return -1;
  setenv("TSAN_OPTIONS", "halt_on_error=1", 0);
  setenv("T_CHILD", name, 1);
  setenv("T_CHILD_VALUE", value, 1);
  posix_spawn_file_actions_t quiet;
  posix_spawn_file_actions_init(&quiet);
  posix_spawn_file_actions_addopen(&quiet, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&quiet, 2, "/dev/null", O_WRONLY, 0);
  pid_t pid;
  int status = -1;
  if (posix_spawn(&pid, exe, &quiet, NULL, argv, environ) == 0) waitpid(pid, &status, 0);
  posix_spawn_file_actions_destroy(&quiet);
  unsetenv("T_CHILD");
  unsetenv("T_CHILD_VALUE");
  return status;
}

/* What a process started by t_child does; its exit status. */
static int run_child(const char *name) {
  const t_entry *child = find_child(name);
  const char *value = getenv("T_CHILD_VALUE");
  if (!child || !value) return 2;
  child->child(value);
  return t_failed();
}

static bool wanted(const char *name, int argc, char **argv) {
  bool any = false;
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-') continue; /* --seed */
    any = true;
    if (strstr(name, argv[i])) return true;
  }
  return !any;
}

double t_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void t_sleep_ms(long ms) {
  nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* Runs a test; true unless it failed. */
static bool run_test(const t_entry *entry) {
  failures = 0, skipped = on_cuda = false;
  atomic_store(&checks, 0);
  printf("- %s\n", entry->name);
  double start = t_now();
  entry->fn();
  double seconds = t_now() - start;
  t_check(skipped || atomic_load(&checks) > 0, entry->file, 0, "%s checked nothing", entry->name);
  if (t_failed()) printf("  FAILED %s (%s), seed %llu\n", entry->name, entry->file, (unsigned long long)seed);
  if (!t_failed() && !skipped && seconds > 1) printf("  %.1f s\n", seconds);
  return !t_failed();
}

int main(int argc, char **argv) {
  int passed = 0, failed = 0, n_skipped = 0, n_cuda = 0;
  const char *child = getenv("T_CHILD");
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (child) return run_child(child);
  for (int i = 1; i < argc; ++i) {
    if (strncmp(argv[i], "--seed=", 7) == 0) {
      seed = strtoull(argv[i] + 7, NULL, 10);
    } else if (strcmp(argv[i], "--list") == 0) {
      for (int e = 0; e < n_entries; ++e)
        if (entries[e].fn) puts(entries[e].name);
      return 0;
    } else if (argv[i][0] == '-') {
      fprintf(stderr, "%s: no option of a test program; --list, --seed=N, SUBSTRING ...\n", argv[i]);
      return 2;
    }
  }
  for (int e = 0; e < n_entries; ++e) {
    if (!entries[e].fn || !wanted(entries[e].name, argc, argv)) continue;
    if (!run_test(&entries[e]))
      ++failed;
    else if (skipped)
      ++n_skipped;
    else
      ++passed, n_cuda += on_cuda;
  }
  if (n_cuda > 0) printf("%d passed on cuda\n", n_cuda);
  printf("%d passed, %d failed, %d skipped\n", passed, failed, n_skipped);
  return failed > 0 || passed + n_skipped == 0 ? 1 : 0;
}
