/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/train/run.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "common/dims.h"
#include "common/log.h"
#include "common/topo.h"
#include "harness/checkpoint/initial.h"
#include "harness/train/state.h"

#define DETAIL_BYTES 1024
#define TRACE_EVENTS_PER_STEP 65536
#define PROFILE_SPANS ((int64_t)1 << 18) /* of all ranks */

typedef struct run run;

/* What one rank's thread works on. */
typedef struct rank_run {
  run *shared;
  int index;
  lev_device *device;
  lev_trace *trace;
  lev_comm *world;
  lev_profile *profile;
  lev_rank *rank;
  lev_checkpoint checkpoint;
  char folder[2 * LEV_TEXT_MAX], digest[40], layout[80];
  int64_t skips; /* newest steps that were skipped, one after the other; the same on every rank */
  lev_status status;
  char detail[DETAIL_BYTES];
} rank_run;

struct run {
  const lev_config *config;
  const lev_run_observer *observer;
  const atomic_int *stop;
  int ranks;
  lev_loader *train, *valid; /* of all ranks; valid: NULL without held-out text */
  lev_topo *topo;
  lev_comm_hub *hub;
  lev_rank_plan *plans;
  lev_ledger **measured;
  lev_run_trace *traces;
  lev_run_gpu *gpus;
  int n_gpus; /* once counted */
  rank_run *rank_runs;
  pthread_t *threads;
};

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double lev_learning_rate(const lev_config *c, int64_t step) {
  int64_t warmup = c->lr_scheduler.warmup_steps;
  double lr = c->optimizer.lr, floor = c->lr_scheduler.min_lr_factor;
  if (step <= warmup) return lr * (double)step / (double)warmup;
  int64_t span = lev_max_i64(1, c->train.steps - warmup);
  double done = fmin(1, (double)(step - warmup) / (double)span);
  switch (c->lr_scheduler.decay) {
  case LEV_DECAY_COSINE:
    return lr * (floor + (1 - floor) * 0.5 * (1 + cos(3.14159265358979323846 * done)));
  case LEV_DECAY_LINEAR:
    return lr * (1 - (1 - floor) * done);
  default:
    return lr;
  }
}

static lev_run_memory memory_of(const run *r, bool measured) {
  return (lev_run_memory){.ranks = r->ranks,
                          .planned = r->plans,
                          .measured = measured ? r->measured : NULL,
                          .traces = measured ? r->traces : NULL,
                          .gpus = r->gpus,
                          .n_gpus = measured ? r->n_gpus : 0};
}

size_t lev_run_gpu_drop(const lev_run_gpu *gpu) {
  return gpu->start_free_bytes > gpu->free_bytes ? gpu->start_free_bytes - gpu->free_bytes : 0;
}

size_t lev_run_gpu_allowed(const lev_run_gpu *gpu) {
  return lev_sat_add(gpu->planned_bytes, gpu->reserve_bytes);
}

bool lev_run_gpu_holds(const lev_run_gpu *gpu) {
  return lev_run_gpu_drop(gpu) <= lev_run_gpu_allowed(gpu);
}

/* Local ranks share the GPUs in turn. */
static int gpus_of(const run *r) {
  if (lev_run_backend(r->config) != LEV_BACKEND_CUDA) return 0;
  int there = lev_device_count(LEV_BACKEND_CUDA);
  return r->ranks < there ? r->ranks : there;
}

/* ---- one rank ---- */

/* The first rank of each GPU asks its driver what is free. No rank has a slab yet: a rank makes its own
 * after all have joined the world. */
static lev_status open_gpu(rank_run *rr, int gpus) {
  run *r = rr->shared;
  if (rr->index >= gpus) return LEV_OK;
  lev_run_gpu *g = &r->gpus[rr->index];
  *g = (lev_run_gpu){.index = rr->index};
  for (int i = rr->index; i < r->ranks; i += gpus, ++g->ranks)
    g->planned_bytes += r->plans[i].slabs.bytes[LEV_MEM_DEVICE];
  g->reserve_bytes = lev_gpu_reserve(r->config, g->ranks);
  return lev_device_memory(rr->device, &g->start_free_bytes, &g->total_bytes);
}

static lev_status open_rank(rank_run *rr) {
  run *r = rr->shared;
  const lev_config *c = r->config;
  int gpus = gpus_of(r);
  lev_device_config dc = {.backend = lev_run_backend(c),
                          .index = gpus > 0 ? rr->index % gpus : 0,
                          .immediate = c->run.compute_immediate,
                          .jitter_seed = (uint64_t)c->debug.jitter_seed,
                          .pin_beyond_free = !c->run.check_host_memory};
  int bound;
  LEV_TRY(lev_topo_bind_thread(r->topo, lev_topo_rank_node(r->topo, rr->index, r->ranks), &bound));
  if (c->run.trace_steps > 0) LEV_TRY(lev_trace_create(TRACE_EVENTS_PER_STEP * (c->run.trace_steps + 1), &rr->trace));
  dc.trace = rr->trace;
  LEV_TRY(lev_ledger_create(rr->trace, &r->measured[rr->index]));
  LEV_TRY(lev_device_open(&dc, &rr->device));
  LEV_TRY(open_gpu(rr, gpus));
  return c->run.profile ? lev_profile_create(rr->device, PROFILE_SPANS / r->ranks, &rr->profile) : LEV_OK;
}

/* Without an optimizer there is nothing to go on from. */
static bool checkpoints(const lev_config *c) {
  return c->checkpoint.enable && c->optimizer.name != LEV_OPTIMIZER_NONE;
}

/* First values: those of the newest checkpoint, of checkpoint.initial_load_path, or random. */
static lev_status restore(rank_run *rr, int64_t *step) {
  run *r = rr->shared;
  const lev_config *c = r->config;
  lev_state_piece *pieces;
  int n;
  *step = 0;
  snprintf(rr->folder, sizeof rr->folder, "%s/%s", c->run.folder, c->checkpoint.folder);
  lev_state_digest(rr->rank, rr->digest);
  lev_state_layout(rr->rank, rr->layout, sizeof rr->layout);
  rr->checkpoint = (lev_checkpoint){.folder = rr->folder,
                                    .world = rr->world,
                                    .digest = rr->digest,
                                    .layout = rr->layout,
                                    .keep = c->checkpoint.keep_latest_k};
  LEV_TRY(lev_rank_init_weights(rr->rank));
  bool resume = checkpoints(c) && c->checkpoint.resume, initial = c->checkpoint.initial_load_path[0] != '\0';
  bool over = checkpoints(c) && !resume; /* what there was is moved once nothing can refuse the start any more */
  if (!resume && !initial) return over ? lev_checkpoint_set_aside(&rr->checkpoint) : LEV_OK;
  LEV_TRY(lev_state_pieces(rr->rank, &pieces, &n));
  lev_status st = resume ? lev_checkpoint_load(&rr->checkpoint, step, pieces, n) : LEV_OK;
  initial &= *step == 0;
  if (st == LEV_OK && initial) st = lev_initial_weights(c->checkpoint.initial_load_path, rr->world, NULL, pieces, n);
  lev_free(pieces);
  if (st == LEV_OK && (*step > 0 || initial)) st = lev_state_publish(rr->rank);
  return st == LEV_OK && over ? lev_checkpoint_set_aside(&rr->checkpoint) : st;
}

/* A failed save is reported and training goes on: the earlier checkpoints are whole. Nor is one replaced by the state
 * at a skipped step, which may be of a model that has gone wrong; a single one is chance, and saved at the end. */
static lev_status save(rank_run *rr, int64_t step, bool end) {
  const lev_run_observer *o = rr->shared->observer;
  lev_state_piece *pieces;
  int n;
  if (rr->skips > end) {
    if (rr->index == 0 && o->checkpoint) o->checkpoint(o->ctx, step, LEV_ERR_NUMERIC, "it was skipped");
    return LEV_OK;
  }
  LEV_TRY(lev_state_pieces(rr->rank, &pieces, &n));
  lev_status st = lev_checkpoint_save(&rr->checkpoint, step, pieces, n);
  lev_free(pieces);
  if (rr->index == 0 && o->checkpoint) o->checkpoint(o->ctx, step, st, st == LEV_OK ? "" : lev_detail());
  return st == LEV_ERR_ABORTED || st == LEV_ERR_COMM || st == LEV_ERR_TIMEOUT ? st : LEV_OK;
}

/* What rank 0 says, on every rank. */
static lev_status from_rank0(rank_run *rr, bool *value) {
  int32_t mine = *value, all[LEV_RANKS_MAX];
  LEV_TRY(lev_comm_host_all_gather(rr->world, &mine, all, sizeof mine));
  *value = all[0] != 0;
  return LEV_OK;
}

/* True on every rank once rank 0 saw the stop flag. */
static lev_status asked_to_stop(rank_run *rr, bool *stop) {
  *stop = rr->shared->stop && atomic_load(rr->shared->stop) != 0;
  return from_rank0(rr, stop);
}

/* Over the whole held-out text, one micro-batch of all groups after the other. When asked to stop meanwhile (*stop) it
 * leaves after the present one and records nothing. */
static lev_status validate(rank_run *rr, int64_t step, bool *stop) {
  lev_validation_record record = {.step = step};
  lev_loader *valid = rr->shared->valid;
  double nll = 0, start = now();
  int64_t samples = lev_loader_samples(valid), bytes = lev_loader_bytes(valid);
  int64_t groups = rr->rank->params->layout.ranks / rr->rank->params->layout.context;
  for (int64_t at = 0; at < samples; at += groups) {
    double part;
    int64_t tokens;
    LEV_TRY(lev_evaluate(rr->rank, valid, at, lev_min_i64(groups, samples - at), &part, &tokens));
    nll += part, record.tokens += tokens;
    LEV_TRY(asked_to_stop(rr, stop));
    if (*stop) return LEV_OK;
  }
  record.nll_per_token = record.tokens > 0 ? nll / (double)record.tokens : 0;
  record.per_byte = bytes > 0 && !rr->shared->config->data.mask_eod; /* masked tokens stand for bytes without a loss */
  record.val_loss = record.per_byte ? nll / (double)bytes : record.nll_per_token;
  record.seconds = now() - start;
  const lev_run_observer *o = rr->shared->observer;
  if (rr->index == 0 && o->validation) o->validation(o->ctx, &record);
  return LEV_OK;
}

static double flops_per_token(const lev_rank *rank) {
  const lev_model *m = &rank->params->model;
  double attention = 6.0 * (double)m->layers * (double)(m->heads * m->head_dim) * (double)rank->config->train.context;
  return 6.0 * (double)rank->params->active + attention;
}

static bool validation_due(const rank_run *rr, int64_t step) {
  const lev_config *c = rr->shared->config;
  if (!rr->shared->valid || step < 1) return false;
  return (c->train.eval_interval > 0 && step % c->train.eval_interval == 0) ||
         (step == c->train.steps && c->train.eval_at_end);
}

static lev_status one_step(rank_run *rr, int64_t step) {
  const lev_config *c = rr->shared->config;
  lev_step_record record = {.step = step, .steps = c->train.steps, .lr = lev_learning_rate(c, step)};
  double start = now(), tokens = (double)(c->train.context * c->train.global_batch);
  LEV_TRY(
      lev_train_step(rr->rank, rr->shared->train, step, (step - 1) * c->train.global_batch, record.lr, &record.result));
  rr->skips = record.result.skipped ? rr->skips + 1 : 0;
  record.seconds = now() - start;
  record.tokens_per_second = tokens / record.seconds;
  record.flops_per_token = flops_per_token(rr->rank);
  /* peaks of all ranks are read below: everyone must have posted its own */
  LEV_TRY(lev_comm_agree(rr->world, LEV_OK));
  const lev_run_observer *o = rr->shared->observer;
  if (rr->index == 0 && o->step) {
    lev_run_memory memory = memory_of(rr->shared, true);
    o->step(o->ctx, &record, &memory);
  }
  return lev_comm_agree(rr->world, LEV_OK);
}

/* The run that saved this checkpoint was told to stop before the validation that follows the step was done. */
static lev_status make_up_validation(rank_run *rr, int64_t done, bool *stop) {
  const lev_run_observer *o = rr->shared->observer;
  if (!validation_due(rr, done) || !o->validated) return LEV_OK;
  bool missing = rr->index == 0 && !o->validated(o->ctx, done);
  LEV_TRY(from_rank0(rr, &missing));
  return missing ? validate(rr, done, stop) : LEV_OK;
}

/* An earlier run's trace stays until this one is whole. */
static lev_status write_trace(rank_run *rr) {
  char path[LEV_TEXT_MAX + 64], temporary[LEV_TEXT_MAX + 80];
  if (!rr->trace) return LEV_OK;
  snprintf(path, sizeof path, "%s/trace.rank%d.jsonl", rr->shared->config->run.folder, rr->index);
  snprintf(temporary, sizeof temporary, "%s.tmp", path);
  FILE *file = fopen(temporary, "w");
  bool ok = file && lev_trace_write(rr->trace, file) == LEV_OK;
  int error = errno;
  if (file && fclose(file) != 0 && ok) ok = false, error = errno;
  if (ok && rename(temporary, path) != 0) ok = false, error = errno;
  rr->shared->traces[rr->index] = (lev_run_trace){lev_trace_count(rr->trace), lev_trace_dropped(rr->trace)};
  if (ok) return LEV_OK;
  (void)remove(temporary);
  return lev_fail(LEV_ERR_IO, "cannot write %s: %s", path, strerror(error));
}

/* One step with the profile on; the ranks report in turn. */
static lev_status profiled_step(rank_run *rr, int64_t step) {
  const lev_run_observer *o = rr->shared->observer;
  LEV_TRY(lev_profile_start(rr->profile, rr->rank->compute));
  LEV_TRY(one_step(rr, step));
  lev_profile_stop(rr->profile);
  LEV_TRY(lev_profile_read(rr->profile));
  lev_status st = LEV_OK;
  for (int r = 0; r < rr->shared->ranks; ++r) {
    if (r == rr->index && o->profiled) st = o->profiled(o->ctx, r, step, rr->profile);
    LEV_TRY(lev_comm_agree(rr->world, st));
  }
  return LEV_OK;
}

/* The same rank of each GPU asks again, while every rank still holds its memory. */
static lev_status count_gpu(rank_run *rr) {
  run *r = rr->shared;
  int gpus = gpus_of(r);
  LEV_TRY(lev_comm_agree(rr->world, LEV_OK));
  lev_status st = LEV_OK;
  if (rr->index < gpus) {
    lev_run_gpu *g = &r->gpus[rr->index];
    st = lev_device_memory(rr->device, &g->free_bytes, &g->total_bytes);
  }
  if (rr->index == 0) r->n_gpus = gpus;
  return lev_comm_agree(rr->world, st);
}

static lev_status steps(rank_run *rr) {
  const lev_config *c = rr->shared->config;
  int64_t done, first;
  bool stop = false;
  LEV_TRY(restore(rr, &done));
  first = done + 1;
  const lev_run_observer *o = rr->shared->observer;
  LEV_TRY(lev_comm_agree(rr->world, rr->index == 0 && o->started ? o->started(o->ctx, first) : LEV_OK));
  LEV_TRY(make_up_validation(rr, done, &stop));
  for (int64_t step = first; step <= c->train.steps && !stop; ++step) {
    lev_trace_enable(rr->trace, step < first + c->run.trace_steps);
    bool profiled = rr->profile && step == lev_min_i64(first + 1, c->train.steps);
    LEV_TRY(profiled ? profiled_step(rr, step) : one_step(rr, step));
    LEV_TRY(asked_to_stop(rr, &stop));
    bool last = step == c->train.steps;
    if (validation_due(rr, step) && !stop) LEV_TRY(validate(rr, step, &stop));
    bool periodic = c->checkpoint.interval > 0 && step % c->checkpoint.interval == 0;
    if (checkpoints(c) && (periodic || last || stop)) LEV_TRY(save(rr, step, last || stop));
  }
  LEV_TRY(count_gpu(rr));
  return first <= c->train.steps ? write_trace(rr) : LEV_OK; /* no step: the earlier run's trace stays */
}

static lev_status rank_work(rank_run *rr) {
  run *r = rr->shared;
  LEV_TRY(open_rank(rr));
  LEV_TRY(lev_comm_local_join(r->hub, rr->index, rr->device, &rr->world));
  lev_rank_options options = {.config = r->config,
                              .device = rr->device,
                              .world = rr->world,
                              .ledger = r->measured[rr->index],
                              .slabs = &r->plans[rr->index].slabs};
  LEV_TRY(lev_rank_create(&options, &rr->rank));
  return steps(rr);
}

static void *rank_main(void *arg) {
  rank_run *rr = arg;
  lev_log_set_rank(rr->index);
  rr->status = rank_work(rr);
  if (rr->status != LEV_OK) {
    snprintf(rr->detail, sizeof rr->detail, "%s", lev_detail());
    lev_comm_hub_abort(rr->shared->hub); /* also wakes ranks that have not joined yet */
  }
  lev_rank_destroy(rr->rank);
  lev_comm_destroy(rr->world);
  lev_device_close(rr->device);
  return NULL;
}

/* ---- all ranks ---- */

/* What the run needs from outside, before anything is planned: a device, and the token files. */
static lev_status open_inputs(run *r) {
  const lev_config *c = r->config;
  lev_device_config dc = {.backend = lev_run_backend(c)};
  lev_device *device = NULL;
  if (lev_device_count(dc.backend) == 0) { /* opening one says why */
    LEV_TRY(lev_device_open(&dc, &device));
    lev_device_close(device);
  }
  if (c->data.train[0] == '\0')
    return lev_fail(LEV_ERR_CONFIG, "data.train is empty; it takes the prefix of token files (levee tokenize TEXT "
                                    "--output PREFIX writes them)");
  lev_loader_options o = {.prefix = c->data.train,
                          .context = c->train.context,
                          .vocab = c->model.vocab_size,
                          .seed = (uint64_t)c->debug.seed};
  LEV_TRY(lev_loader_open(&o, &r->train));
  if (c->data.valid[0] == '\0') return LEV_OK;
  o.prefix = c->data.valid, o.validation = true;
  LEV_TRY(lev_loader_open(&o, &r->valid));
  return lev_loader_same_tokens(r->train, r->valid);
}

static lev_status allocate(run *r) {
  size_t n = (size_t)r->ranks;
  r->plans = lev_calloc(LEV_HEAP_COMMON, n, sizeof *r->plans);
  r->measured = lev_calloc(LEV_HEAP_COMMON, n, sizeof *r->measured);
  r->traces = lev_calloc(LEV_HEAP_COMMON, n, sizeof *r->traces);
  r->gpus = lev_calloc(LEV_HEAP_COMMON, n, sizeof *r->gpus);
  r->rank_runs = lev_calloc(LEV_HEAP_COMMON, n, sizeof *r->rank_runs);
  r->threads = lev_calloc(LEV_HEAP_COMMON, n, sizeof *r->threads);
  return r->plans && r->measured && r->traces && r->gpus && r->rank_runs && r->threads ? LEV_OK : LEV_ERR_NOMEM;
}

/* The status of the rank that failed of itself, rather than of one that was only told to stop. */
static lev_status first_failure(const run *r) {
  const rank_run *worst = NULL;
  for (int i = 0; i < r->ranks; ++i) {
    const rank_run *rr = &r->rank_runs[i];
    if (rr->status != LEV_OK && (!worst || worst->status == LEV_ERR_ABORTED)) worst = rr;
  }
  if (!worst) return LEV_OK;
  int named; /* where the ranks agreed on a failure, the text says whose it is */
  if (sscanf(worst->detail, "rank %d: ", &named) == 1) return lev_fail(worst->status, "%s", worst->detail);
  return lev_fail(worst->status, "rank %d: %s", worst->index, worst->detail);
}

static lev_status run_ranks(run *r) {
  int started = 0;
  lev_status st = LEV_OK;
  LEV_TRY(lev_comm_hub_create(r->ranks, 0, &r->hub));
  for (; started < r->ranks; ++started) {
    r->rank_runs[started] = (rank_run){.shared = r, .index = started};
    int error = pthread_create(&r->threads[started], NULL, rank_main, &r->rank_runs[started]);
    if (error != 0) {
      st = lev_fail(LEV_ERR_NOMEM, "cannot start rank %d: %s", started, strerror(error));
      lev_comm_hub_abort(r->hub);
      break;
    }
  }
  for (int i = 0; i < started; ++i) pthread_join(r->threads[i], NULL);
  return st == LEV_OK ? first_failure(r) : st;
}

static void release(run *r) {
  for (int i = 0; i < r->ranks; ++i) {
    if (r->plans) lev_rank_plan_free(&r->plans[i]);
    if (r->measured) lev_ledger_destroy(r->measured[i]);
    if (r->rank_runs) lev_trace_destroy(r->rank_runs[i].trace);
  }
  if (r->hub) lev_comm_hub_destroy(r->hub);
  lev_loader_close(r->train);
  lev_loader_close(r->valid);
  lev_topo_destroy(r->topo);
  lev_free(r->plans);
  lev_free(r->measured);
  lev_free(r->traces);
  lev_free(r->gpus);
  lev_free(r->rank_runs);
  lev_free(r->threads);
}

lev_status lev_run(const lev_config *config, const lev_run_observer *observer, const atomic_int *stop) {
  run r = {.config = config, .observer = observer, .stop = stop, .ranks = (int)config->parallel.ranks};
  lev_status st;
  LEV_TRY_GOTO(st, allocate(&r), end);
  LEV_TRY_GOTO(st, lev_topo_create(NULL, &r.topo), end);
  LEV_TRY_GOTO(st, open_inputs(&r), end);
  for (int i = 0; i < r.ranks; ++i) LEV_TRY_GOTO(st, lev_plan_run(config, i, r.valid, &r.plans[i]), end);
  lev_run_memory memory = memory_of(&r, false);
  if (observer->planned) LEV_TRY_GOTO(st, observer->planned(observer->ctx, &memory), end);
  LEV_TRY_GOTO(st, run_ranks(&r), end);
  memory = memory_of(&r, true);
  if (observer->finished) observer->finished(observer->ctx, &memory);
end:
  release(&r);
  return st;
}
