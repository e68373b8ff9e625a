/* SPDX-License-Identifier: Apache-2.0 */
/* levee train: runs lev_run, prints the plan, a line per step and the closing table, and keeps metrics.jsonl and
 * memory.json. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "common/dims.h"
#include "harness/checkpoint/file.h"
#include "harness/cli/settings.h"
#include "harness/cli/verbs.h"
#include "harness/report/memory_report.h"
#include "harness/report/metrics.h"
#include "harness/report/profile_report.h"
#include "harness/train/run.h"

typedef struct train {
  lev_config config;
  lev_metrics metrics;
  size_t plain[LEV_MODULES]; /* device bytes of each module's plain schedule, planned */
  int64_t first_step, last_step, saved_step;
  int64_t skips;         /* steps skipped in this process */
  bool skipped;          /* the newest one */
  bool validated;        /* in this process */
  double step_seconds;   /* running mean for the ETA */
  lev_status unwritten;  /* first failure to write metrics.jsonl, which ends there */
  lev_status unreported; /* of the last memory.json */
  lev_status unsaved;    /* of the last checkpoint */
  lev_memory_rank *ranks;
  bool colour;
} train;

#define PROFILE_ROWS 30

/* ---- signals ---- */

static atomic_int stop_asked; /* lock-free, so that a signal handler may set it */

/* The first signal stops the run after its step. A later SIGINT ends it at once, unless it comes within a second: some
 * launchers pass on the Ctrl-C that the terminal has sent to everyone. */
static void on_signal(int number) {
  static const char heard[] = "stopping after this step; Ctrl-C (SIGINT) once more ends at once, without saving\n";
  static atomic_llong first; /* nanoseconds; 0: none yet */
  struct timespec t;
  int kept = errno;
  clock_gettime(CLOCK_MONOTONIC, &t);
  long long now = (long long)t.tv_sec * 1000000000 + t.tv_nsec, before = 0;
  if (atomic_compare_exchange_strong(&first, &before, now)) {
    atomic_store(&stop_asked, 1);
    ssize_t told = write(STDERR_FILENO, heard, sizeof heard - 1);
    (void)told; /* nobody may be there to read it */
  } else if (number == SIGINT && now - before > 1000000000) {
    signal(SIGINT, SIG_DFL);
    raise(SIGINT); /* taken when this handler returns */
  }
  errno = kept;
}

/* A reader of the output that leaves (`| tee` dies of the same Ctrl-C) takes no training with it. */
static void catch_signals(void) {
  struct sigaction action = {.sa_handler = on_signal}, hangup;
  sigaction(SIGTERM, &action, NULL);
  sigaction(SIGINT, &action, NULL);
  if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) /* ignored: nohup */
    sigaction(SIGHUP, &action, NULL);
  signal(SIGPIPE, SIG_IGN);
}

/* ---- memory ---- */

static lev_memory_report report_of(train *t, const lev_run_memory *memory) {
  for (int i = 0; i < memory->ranks; ++i) {
    t->ranks[i] = (lev_memory_rank){.rank = i, .planned = memory->planned[i].ledger};
    if (memory->measured) t->ranks[i].measured = memory->measured[i];
    if (!memory->traces) continue;
    t->ranks[i].trace_events = memory->traces[i].events, t->ranks[i].trace_dropped = memory->traces[i].dropped;
  }
  return (lev_memory_report){.ranks = memory->ranks,
                             .rank = t->ranks,
                             .n = memory->ranks,
                             .device_memory = t->config.memory.device_memory,
                             .device_reserve = lev_context_reserve(&t->config),
                             .host_memory = t->config.memory.host_memory,
                             .heap_cap = t->config.memory.heap_cap};
}

/* The drivers' counts as a JSON array; empty where there is none, or no room. */
static void gpus_json(const lev_run_memory *memory, char *text, size_t room) {
  size_t at = 0;
  for (int i = 0; i < memory->n_gpus && at < room; ++i) {
    const lev_run_gpu *g = &memory->gpus[i];
    at += (size_t)snprintf(
        text + at, room - at,
        "%s{\"gpu\": %d, \"ranks\": %d, \"planned_bytes\": %zu, \"reserve_bytes\": %zu, \"start_free_bytes\": %zu, "
        "\"drop_bytes\": %zu, \"within_plan\": %s, \"used_bytes\": %zu, \"total_bytes\": %zu}",
        i == 0 ? "[" : ", ", g->index, g->ranks, g->planned_bytes, g->reserve_bytes, g->start_free_bytes,
        lev_run_gpu_drop(g), lev_run_gpu_holds(g) ? "true" : "false", g->total_bytes - g->free_bytes, g->total_bytes);
  }
  if (at > 0 && at < room) at += (size_t)snprintf(text + at, room - at, "]");
  if (at == 0 || at >= room) text[0] = '\0';
}

static void write_memory(train *t, const lev_run_memory *memory) {
  char path[1024], gpus[8192];
  lev_memory_report report = report_of(t, memory);
  lev_memory_note note = {"gpus", gpus};
  gpus_json(memory, gpus, sizeof gpus);
  report.notes = &note, report.n_notes = gpus[0] != '\0';
  snprintf(path, sizeof path, "%.900s/memory.json", t->config.run.folder);
  lev_status st = lev_memory_write(&report, path);
  if (st != LEV_OK && t->unreported == LEV_OK) fprintf(stderr, "warning: %s\n", lev_detail());
  t->unreported = st;
}

/* What each module would take on its plain schedule, from dry runs of the largest rank. */
static void plan_plain(train *t, int rank) {
  int *const choice[LEV_MODULES] = {&t->config.schedule.pipelined_llep, &t->config.schedule.ring_dtp,
                                    &t->config.schedule.sco, &t->config.schedule.offload_adamw,
                                    &t->config.schedule.muon};
  for (int m = 0; m < LEV_MODULES; ++m) {
    lev_rank_plan plan;
    int kept = *choice[m];
    t->plain[m] = SIZE_MAX;
    *choice[m] = LEV_SCHEDULE_PLAIN;
    if (lev_plan_rank(&t->config, rank, NULL, &plan) == LEV_OK) {
      t->plain[m] = lev_ledger_module_peak(plan.ledger, LEV_MEM_DEVICE, lev_module_prefix[m]);
      lev_rank_plan_free(&plan);
    }
    *choice[m] = kept;
  }
}

static int largest(const lev_run_memory *memory) {
  int best = 0;
  for (int i = 1; i < memory->ranks; ++i)
    if (memory->planned[i].slabs.bytes[LEV_MEM_DEVICE] > memory->planned[best].slabs.bytes[LEV_MEM_DEVICE]) best = i;
  return best;
}

/* A run over its limits would die later, or take what is not its own. */
static lev_status within_limits(const lev_memory_report *report) {
  char text[160], a[24], b[24];
  size_t device, host;
  lev_memory_excess(report, &device, &host);
  if (device)
    return lev_fail(LEV_ERR_BUDGET, "does not fit: %s; levee plan shows every byte",
                    lev_memory_over_device(report, device, text));
  if (host)
    return lev_fail(LEV_ERR_BUDGET, "does not fit: %s over memory.host_memory = %s; levee plan shows every byte",
                    lev_bytes_text(host, a), lev_bytes_text(report->host_memory, b));
  return LEV_OK;
}

static lev_status on_planned(void *ctx, const lev_run_memory *memory) {
  train *t = ctx;
  int rank = largest(memory);
  lev_memory_report report = report_of(t, memory);
  lev_memory_report one = report;
  one.rank = &t->ranks[rank], one.n = 1;
  lev_print_model(&t->config, &memory->planned[rank]);
  lev_memory_table(&one, stdout);
  lev_print_together(memory->planned, NULL, memory->ranks);
  fflush(stdout);
  LEV_TRY(within_limits(&report));
  plan_plain(t, rank);
  return LEV_OK;
}

/* ---- steps ---- */

static char *metrics_path(const train *t, char path[1024]) {
  snprintf(path, 1024, "%.900s/metrics.jsonl", t->config.run.folder);
  return path;
}

static lev_status on_started(void *ctx, int64_t first_step) {
  train *t = ctx;
  char path[1024];
  t->first_step = first_step, t->last_step = t->saved_step = first_step - 1;
  if (first_step > t->config.train.steps)
    printf("nothing left to do: %lld of %lld steps are done; --checkpoint.resume=false starts over\n",
           (long long)(first_step - 1), (long long)t->config.train.steps);
  else if (first_step > 1)
    printf("resumed: step %lld is next\n", (long long)first_step);
  else if (t->config.checkpoint.initial_load_path[0] != '\0')
    printf("weights from %s\n", t->config.checkpoint.initial_load_path);
  bool append = first_step > 1 || t->config.train.steps == 0; /* without a step there is nothing to write */
  LEV_TRY(lev_metrics_open(&t->metrics, metrics_path(t, path), append));
  if (t->metrics.aside[0] != '\0') printf("earlier metrics are now in %s\n", t->metrics.aside);
  return LEV_OK;
}

static bool on_validated(void *ctx, int64_t step) {
  char path[1024];
  return lev_metrics_has(metrics_path(ctx, path), step, "val_loss");
}

/* Training goes on without metrics once a line could not be written; the exit status tells. */
static void write_metrics(train *t, const lev_metric *fields, size_t n) {
  if (t->unwritten != LEV_OK) return;
  t->unwritten = lev_metrics_line(&t->metrics, fields, (int)n);
  if (t->unwritten != LEV_OK)
    fprintf(stderr, "warning: no metrics from here on (%s); training goes on\n", lev_detail());
}

/* Share of the devices' peak that the model's operations took; ranks may share a device. */
static double mfu(const train *t, const lev_step_record *r) {
  int64_t devices = lev_min_i64(t->config.parallel.ranks, lev_device_count(lev_run_backend(&t->config)));
  double peak = t->config.run.peak_tflops * 1e12 * (double)devices;
  return peak > 0 ? r->flops_per_token * r->tokens_per_second / peak : 0;
}

static void record_step(train *t, const lev_step_record *r) {
  const lev_step_result *x = &r->result;
  double flops = r->flops_per_token * r->tokens_per_second;
  size_t n = t->config.run.peak_tflops > 0 ? 15 : 14; /* without a peak there is no share of it */
  const lev_metric fields[] = {LEV_INT("step", r->step),
                               LEV_REAL("loss", x->loss),
                               LEV_REAL("grad_norm", x->grad_norm),
                               LEV_REAL("lr", r->lr),
                               LEV_REAL("balance_loss", x->balance),
                               LEV_REAL("z_loss", x->z_loss),
                               LEV_REAL("max_vio", x->max_vio),
                               LEV_REAL("rows_max_mean", x->rows_max_mean),
                               LEV_INT("chunks", x->chunks),
                               LEV_INT("tokens", x->valid),
                               LEV_INT("skipped", x->skipped),
                               LEV_REAL("tokens_per_second", r->tokens_per_second),
                               LEV_REAL("step_seconds", r->seconds),
                               LEV_REAL("tflops", flops / 1e12),
                               LEV_REAL("mfu", mfu(t, r))};
  write_metrics(t, fields, n);
}

/* "1h02m", "3m07s", "12s" */
static char *duration(double seconds, char text[32]) {
  long s = (long)(seconds + 0.5);
  if (s >= 3600)
    snprintf(text, 32, "%ldh%02ldm", s / 3600, s % 3600 / 60);
  else if (s >= 60)
    snprintf(text, 32, "%ldm%02lds", s / 60, s % 60);
  else
    snprintf(text, 32, "%lds", s);
  return text;
}

/* Of the sign of a NaN nothing is to be told. */
static double shown(double x) {
  return isnan(x) ? (double)NAN : x;
}

static void print_step(train *t, const lev_step_record *r, const lev_run_memory *memory) {
  char bytes[24], bound[24], eta[32];
  lev_memory_report report = report_of(t, memory);
  size_t peak = 0, planned = 0;
  for (int i = 0; i < memory->ranks; ++i) {
    size_t p = lev_ledger_peak(memory->measured[i], LEV_MEM_DEVICE),
           q = lev_ledger_peak(memory->planned[i].ledger, LEV_MEM_DEVICE);
    if (p > peak) peak = p;
    if (q > planned) planned = q;
  }
  printf("%sstep %lld/%lld%s  loss %.4f  grad_norm %.3f%s  memory %s (%.0f%% of plan)  tps %.0f  tflops %.3f  "
         "max_vio %.2f  K %lld ",
         t->colour ? "\033[1m" : "", (long long)r->step, (long long)r->steps, t->colour ? "\033[0m" : "",
         shown(r->result.loss), shown(r->result.grad_norm), r->result.skipped ? " SKIPPED" : "",
         lev_bytes_text(peak, bytes), planned ? 100.0 * (double)peak / (double)planned : 0, r->tokens_per_second,
         r->flops_per_token * r->tokens_per_second / 1e12, r->result.max_vio, (long long)r->result.chunks);
  if (t->config.run.peak_tflops > 0) printf(" mfu %.3f ", mfu(t, r));
  for (int m = 0; m < LEV_MODULES; ++m) {
    size_t q = lev_module_device_bytes(&report, m, false);
    if (q == 0) continue;
    printf(" %s %s/%s", lev_module_prefix[m], lev_bytes_text(lev_module_device_bytes(&report, m, true), bytes),
           lev_bytes_text(q, bound));
  }
  printf("  eta %s\n", duration(t->step_seconds * (double)(r->steps - r->step), eta));
  fflush(stdout);
}

static void on_step(void *ctx, const lev_step_record *r, const lev_run_memory *memory) {
  train *t = ctx;
  bool first = r->step == t->first_step;
  t->step_seconds = first ? r->seconds : 0.9 * t->step_seconds + 0.1 * r->seconds;
  t->last_step = r->step, t->skipped = r->result.skipped;
  if (t->skipped && t->skips++ == 0)
    fprintf(stderr,
            "warning: step %lld was skipped, its loss or gradients are not finite; later ones are marked SKIPPED\n",
            (long long)r->step);
  record_step(t, r);
  if (first || r->step == r->steps || r->step % t->config.run.log_freq == 0) print_step(t, r, memory);
  if (first) write_memory(t, memory);
}

static void on_validation(void *ctx, const lev_validation_record *r) {
  train *t = ctx;
  t->validated = true;
  const lev_metric fields[] = {LEV_INT("step", r->step),
                               LEV_REAL("val_loss", r->val_loss),
                               LEV_TEXT("val_unit", r->per_byte ? "nats/byte" : "nats/token"),
                               LEV_REAL("val_nll_per_token", r->nll_per_token),
                               LEV_INT("val_tokens", r->tokens),
                               LEV_REAL("val_seconds", r->seconds)};
  write_metrics(t, fields, sizeof fields / sizeof *fields);
  printf("validation after step %lld: val_loss %.4f %s, %.4f nats per token over %lld tokens (%.1f s)\n",
         (long long)r->step, shown(r->val_loss), r->per_byte ? "nats per byte" : "nats per token",
         shown(r->nll_per_token), (long long)r->tokens, r->seconds);
  fflush(stdout);
}

static void on_checkpoint(void *ctx, int64_t step, lev_status status, const char *detail) {
  train *t = ctx;
  t->unsaved = status;
  if (status == LEV_OK) t->saved_step = step;
  if (status == LEV_OK)
    printf("checkpoint of step %lld in %s/%s\n", (long long)step, t->config.run.folder, t->config.checkpoint.folder);
  else
    fprintf(stderr, "warning: no checkpoint of step %lld (%s)%s\n", (long long)step, detail,
            step < t->config.train.steps ? "; training goes on" : "");
  fflush(stdout);
}

static lev_status on_profiled(void *ctx, int rank, int64_t step, const lev_profile *profile) {
  const train *t = ctx;
  char path[1024];
  snprintf(path, sizeof path, "%.900s/profile.rank%d.json", t->config.run.folder, rank);
  LEV_TRY(lev_profile_write(profile, rank, path));
  if (rank > 0) return LEV_OK;
  printf("step %lld of rank 0 in %s (open it in ui.perfetto.dev)\n", (long long)step, path);
  LEV_TRY(lev_profile_print(profile, PROFILE_ROWS, stdout));
  fflush(stdout);
  return LEV_OK;
}

/* Other heap: a row of its own with a stated cap, never hidden. */
static void heap_row(const train *t) {
  size_t allocated = 0, rss, peak_rss;
  char a[24], b[24], c[24];
  for (int h = 0; h < LEV_HEAP_COUNT; ++h) {
    lev_heap_stats s;
    lev_heap_read((lev_heap)h, &s);
    allocated += s.peak;
  }
  lev_process_memory(&rss, &peak_rss);
  printf("control-plane heap of all ranks: %s of at most %s; process %s at its peak\n", lev_bytes_text(allocated, a),
         lev_bytes_text(t->config.memory.heap_cap, b), lev_bytes_text(peak_rss, c));
  if (allocated > t->config.memory.heap_cap)
    fprintf(stderr, "warning: the control-plane heap passed memory.heap_cap; raise it, or record fewer steps with "
                    "--run.trace_steps\n");
}

/* Whether the free memory of each GPU fell by no more than is planned and reserved. More is no failure: another process
 * may have taken it meanwhile. */
static void gpu_rows(const lev_run_memory *memory) {
  char drop[24], most[24], planned[24], reserve[24], used[24];
  for (int i = 0; i < memory->n_gpus; ++i) {
    const lev_run_gpu *g = &memory->gpus[i];
    bool holds = lev_run_gpu_holds(g);
    lev_bytes_text(lev_run_gpu_drop(g), drop), lev_bytes_text(lev_run_gpu_allowed(g), most);
    lev_bytes_text(g->planned_bytes, planned), lev_bytes_text(g->reserve_bytes, reserve);
    lev_bytes_text(g->total_bytes - g->free_bytes, used);
    printf(
        "driver: GPU %d took %s, at most %s (planned %s, reserve %s) %s; in use, context and other processes too: %s\n",
        g->index, drop, most, planned, reserve, holds ? "holds" : "does NOT hold", used);
    if (!holds)
      fprintf(
          stderr,
          "warning: free memory of GPU %d fell by %s, allowed were %s (planned %s, memory.context_reserve %s): another "
          "process took the rest, or the reserve is too small\n",
          g->index, drop, most, planned, reserve);
  }
}

/* Whether a run that was told to stop before its last step can go on from there. */
static void stopped_row(const train *t) {
  if (t->last_step >= t->config.train.steps) return;
  printf("stopped at step %lld of %lld, %s\n", (long long)t->last_step, (long long)t->config.train.steps,
         t->saved_step == t->last_step ? "checkpoint saved: the same command goes on from there"
         : t->skipped                  ? "which was skipped and is not saved"
         : t->unsaved != LEV_OK        ? "its checkpoint could not be written"
                                       : "no checkpoint saved");
}

/* memory.json of a run without steps: what is planned. */
static void report_plan(train *t, const lev_run_memory *memory) {
  lev_run_memory planned = *memory;
  planned.measured = NULL, planned.traces = NULL;
  write_memory(t, &planned);
}

static void on_finished(void *ctx, const lev_run_memory *memory) {
  train *t = ctx;
  lev_memory_report report = report_of(t, memory), one = report;
  int rank = largest(memory);
  if (t->config.train.steps == 0) report_plan(t, memory);
  if (t->first_step > t->config.train.steps) return; /* nothing measured: an earlier run's report stays */
  write_memory(t, memory);
  one.rank = &t->ranks[rank], one.n = 1;
  printf("\n");
  lev_memory_table(&one, stdout);
  printf("\n");
  lev_module_table(&report, t->plain, stdout);
  int exact = lev_memory_exact(&report, stdout);
  printf("planned = measured on %d of %d (rank, memory class) pairs\n", exact, memory->ranks * LEV_MEM_CLASSES);
  if (exact < memory->ranks * LEV_MEM_CLASSES && t->config.data.valid[0] != '\0' && !t->validated)
    puts("no validation this time; ranks without a sequence in a step work in validation alone");
  gpu_rows(memory);
  heap_row(t);
  stopped_row(t);
  fflush(stdout);
}

/* Length of the shortest part of a path that is not there yet; 0: all of it is. */
static size_t first_missing(const char *path) {
  char part[LEV_TEXT_MAX];
  for (size_t n = 1; path[n - 1]; ++n) {
    if (path[n] != '/' && path[n] != '\0') continue;
    snprintf(part, sizeof part, "%.*s", (int)n, path);
    if (access(part, F_OK) != 0) return n;
  }
  return 0;
}

/* Takes empty folders away, the last one first, down to the one that ends at `first` bytes (0: none). */
static void remove_empty(const char *folder, size_t first) {
  char path[LEV_TEXT_MAX];
  size_t n = strlen(folder);
  snprintf(path, sizeof path, "%s", folder);
  while (first > 0 && n >= first && rmdir(path) == 0) {
    while (n > 0 && path[n - 1] == '/') --n; /* behind the name */
    while (n > 0 && path[n - 1] != '/') --n;
    while (n > 0 && path[n - 1] == '/') --n;
    path[n] = '\0';
  }
}

/* One run per folder: two would take each other's checkpoints away. Held until the process ends. */
static lev_status lock_folder(const char *folder) {
  static int held;
  held = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (held < 0) return lev_fail(LEV_ERR_IO, "cannot open %s: %s", folder, strerror(errno));
  if (flock(held, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return LEV_OK; /* without locks, it goes without */
  close(held);
  return lev_fail(LEV_ERR_CONFIG, "another run is at work in %s; wait for its end or choose another run.folder",
                  folder);
}

static lev_status train_in_folder(train *t) {
  LEV_TRY(lev_make_dir(t->config.run.folder, NULL));
  LEV_TRY(lock_folder(t->config.run.folder));
  t->ranks = lev_calloc(LEV_HEAP_REPORT, (size_t)t->config.parallel.ranks, sizeof *t->ranks);
  if (!t->ranks) return LEV_ERR_NOMEM;
  t->colour = isatty(STDOUT_FILENO) && !getenv("NO_COLOR");
  catch_signals();
  lev_run_observer observer = {.ctx = t,
                               .planned = on_planned,
                               .started = on_started,
                               .validated = on_validated,
                               .step = on_step,
                               .validation = on_validation,
                               .checkpoint = on_checkpoint,
                               .profiled = on_profiled,
                               .finished = on_finished};
  lev_status st = lev_run(&t->config, &observer, &stop_asked);
  lev_metrics_close(&t->metrics);
  lev_free(t->ranks);
  if (st == LEV_OK && t->skipped)
    st = lev_fail(LEV_ERR_NUMERIC,
                  "step %lld, the last one, was skipped: loss or gradients are not finite (%lld skipped in all)",
                  (long long)t->last_step, (long long)t->skips);
  if (st == LEV_OK && t->unwritten != LEV_OK) st = lev_fail(t->unwritten, "metrics.jsonl is not whole");
  if (st == LEV_OK && t->unreported != LEV_OK) st = lev_fail(t->unreported, "memory.json could not be written");
  if (st == LEV_OK && t->unsaved != LEV_OK) st = lev_fail(t->unsaved, "the last checkpoint could not be written");
  return st;
}

static const char help[] =
    "levee train CONFIG.toml [options] [--section.key=value ...]: trains, or goes on from the newest whole checkpoint\n"
    "  --profile          the second step as a timeline, run.folder/profile.rankN.json\n"
    "  --print-config     alone: the settings as resolved\n"
    "SIGTERM, SIGHUP and SIGINT (Ctrl-C) save a checkpoint and leave, a second SIGINT without saving. levee --help-all "
    "lists the settings.\n";

int lev_verb_train(int argc, char **argv) {
  static char profile[] = "--run.profile=true"; /* what --profile is short for */
  static train t;                               /* large, and outlives the rank threads */
  memset(&t, 0, sizeof t);
  if (argc > 0 && strcmp(argv[0], "--help") == 0) {
    fputs(help, stdout);
    return 0;
  }
  for (int i = 0; i < argc; ++i)
    if (strcmp(argv[i], "--profile") == 0) argv[i] = profile;
  lev_status st = lev_settings(&t.config, &argc, argv);
  if (st == LEV_OK && argc > 0) st = lev_config_unexpected(argv[0]);
  if (st != LEV_OK) return lev_verb_failed("train", st);
  size_t made = first_missing(t.config.run.folder);
  st = train_in_folder(&t);
  if (st != LEV_OK) remove_empty(t.config.run.folder, made); /* of a run that was refused */
  return st == LEV_OK ? 0 : lev_verb_failed("train", st);
}
