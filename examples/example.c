/* SPDX-License-Identifier: Apache-2.0 */
#include "example.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>

#include "common/rng.h"

#define MAX_RANKS 8

typedef struct thread_args {
  ex_rank rank;
  lev_comm_hub *hub;
  lev_status (*body)(ex_rank *r, void *problem);
  void *problem;
  lev_status status;
} thread_args;

static lev_status open_rank(ex_rank *r, lev_comm_hub *hub) {
  lev_device_config config = {.backend = LEV_BACKEND_CPU};
  LEV_TRY(lev_ledger_create(NULL, &r->ledger));
  LEV_TRY(lev_device_open(&config, &r->device));
  LEV_TRY(lev_stream_create(r->device, "compute", &r->stream));
  return hub ? lev_comm_local_join(hub, r->rank, r->device, &r->comm) : LEV_OK;
}

static void close_rank(ex_rank *r) {
  lev_comm_destroy(r->comm);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) lev_arena_destroy(r->arena[c]);
  lev_device_close(r->device); /* frees what lev_device_alloc gave */
  lev_ledger_destroy(r->ledger);
}

static void *rank_main(void *args) {
  thread_args *a = args;
  a->status = open_rank(&a->rank, a->hub);
  if (a->status == LEV_OK) a->status = a->body(&a->rank, a->problem);
  if (a->status != LEV_OK) {
    printf("rank %d: %s: %s\n", a->rank.rank, lev_status_text(a->status), lev_detail());
    if (a->hub) lev_comm_hub_abort(a->hub);
  }
  close_rank(&a->rank);
  return NULL;
}

bool ex_run(int ranks, lev_status (*body)(ex_rank *r, void *problem), void *problem) {
  pthread_t thread[MAX_RANKS];
  thread_args args[MAX_RANKS];
  lev_comm_hub *hub = NULL;
  if (ranks > MAX_RANKS || (ranks > 1 && lev_comm_hub_create(ranks, 60, &hub) != LEV_OK)) return false;
  int started = 0;
  for (; started < ranks; ++started) {
    args[started] = (thread_args){.rank = {.rank = started, .ranks = ranks}, hub, body, problem, LEV_OK};
    if (pthread_create(&thread[started], NULL, rank_main, &args[started]) != 0) break;
  }
  bool ok = started == ranks;
  if (!ok && hub) lev_comm_hub_abort(hub);
  for (int i = 0; i < started; ++i) {
    pthread_join(thread[i], NULL);
    ok = ok && args[i].status == LEV_OK;
  }
  lev_comm_hub_destroy(hub);
  return ok;
}

lev_status ex_arenas(ex_rank *r, const size_t bytes[LEV_MEM_CLASSES]) {
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    void *block;
    if (bytes[c] == 0) continue;
    LEV_TRY(lev_device_alloc(r->device, (lev_mem)c, bytes[c], &block));
    LEV_TRY(lev_arena_create(r->device, r->ledger, (lev_mem)c, block, bytes[c], &r->arena[c]));
  }
  return LEV_OK;
}

lev_status ex_array(ex_rank *r, const void *host, size_t bytes, void **out) {
  LEV_TRY(lev_device_alloc(r->device, LEV_MEM_DEVICE, bytes, out));
  if (host) return lev_copy(r->stream, *out, host, bytes, "example.in");
  return lev_fill(r->stream, *out, 0, bytes, "example.zero");
}

void ex_print_region(void *unused, const lev_region *region) {
  (void)unused;
  printf("  %-8s %-20s %6lld x %-6lld %-5s at %8zu: %8zu bytes\n", lev_mem_name(region->cls), region->tag,
         (long long)region->rows, (long long)region->cols, lev_dtype_name(region->dtype), region->offset,
         region->bytes);
}

lev_status ex_refused(const ex_rank *r, size_t budget, lev_status status) {
  if (status != LEV_ERR_BUDGET) return lev_fail(LEV_ERR_INTERNAL, "a budget of %zu bytes was not refused", budget);
  if (r->rank == 0) printf("with %zu bytes: %s: %s\n", budget, lev_status_text(status), lev_detail());
  return LEV_OK;
}

lev_status ex_as_planned(const ex_rank *r, const size_t planned[LEV_MEM_CLASSES]) {
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    size_t peak = lev_ledger_peak(r->ledger, (lev_mem)c);
    if (r->rank == 0 && planned[c] > 0)
      printf("%s: planned %zu bytes, ledger peak %zu bytes\n", lev_mem_name((lev_mem)c), planned[c], peak);
    if (peak != planned[c])
      return lev_fail(LEV_ERR_INTERNAL, "%s: planned %zu bytes, the peak was %zu", lev_mem_name((lev_mem)c), planned[c],
                      peak);
  }
  return LEV_OK;
}

void ex_random(double *x, int64_t n, double scale, uint32_t tensor) {
  lev_rng_key key = {.seed = 1, .tensor = tensor};
  for (int64_t i = 0; i < n; ++i) x[i] = scale * lev_rng_normal(key, (uint64_t)i);
}

bool ex_close(const char *name, const double *got, const double *want, int64_t n, double limit) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < n; ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  bool ok = sqrt(error) <= limit * sqrt(norm); /* false for NaN */
  printf("%s: relative error %.1e%s\n", name, norm > 0 ? sqrt(error / norm) : sqrt(error), ok ? "" : ", WRONG");
  return ok;
}
