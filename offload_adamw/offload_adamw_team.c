/* SPDX-License-Identifier: Apache-2.0 */
#include "offload_adamw/offload_adamw_team.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"

#define GRAIN 64              /* elements: parts begin on whole cache lines where the piece does */
#define ALONE ((int64_t)8192) /* pieces below this are not worth waking anyone */

typedef struct member {
  oadamw_team *team;
  int number; /* of its part; the caller has part 0 */
  pthread_t thread;
} member;

struct oadamw_team {
  int threads, started; /* started: members with a thread */
  pthread_mutex_t turn; /* held during an update */
  pthread_mutex_t lock; /* of what follows */
  pthread_cond_t begin, end;
  int64_t update; /* number of the update to share, from 1 */
  int busy;       /* members that have not done their part of it */
  bool stop;
  oadamw_update_args args;
  member *members;
};

static void *shift(const void *base, int64_t elements, lev_dtype type) {
  return (unsigned char *)(uintptr_t)base + (size_t)elements * lev_dtype_bytes(type);
}

static void update_part(const oadamw_update_args *args, int threads, int number) {
  int64_t grains = lev_ceil_div(args->count, GRAIN);
  int64_t begin = lev_min_i64(args->count, lev_part_begin(grains, threads, number) * GRAIN);
  int64_t end = lev_min_i64(args->count, lev_part_begin(grains, threads, number + 1) * GRAIN);
  if (begin == end) return;
  lev_dtype a = lev_dtype_arith(args->param_dtype);
  oadamw_update_args part = *args;
  part.count = end - begin;
  part.grads = shift(args->grads, begin, args->grad_dtype);
  part.params = shift(args->params, begin, args->param_dtype);
  part.master = shift(args->master, begin, a);
  part.exp_avg = shift(args->exp_avg, begin, a);
  part.exp_avg_sq = shift(args->exp_avg_sq, begin, a);
  oadamw_kernel_host_update.cpu(&part);
}

static void *member_main(void *arg) {
  member *m = arg;
  oadamw_team *team = m->team;
  for (int64_t next = 1;; ++next) {
    pthread_mutex_lock(&team->lock);
    while (team->update < next && !team->stop) pthread_cond_wait(&team->begin, &team->lock);
    bool stop = team->stop;
    pthread_mutex_unlock(&team->lock);
    if (stop) return NULL;
    update_part(&team->args, team->threads, m->number);
    pthread_mutex_lock(&team->lock);
    if (--team->busy == 0) pthread_cond_signal(&team->end);
    pthread_mutex_unlock(&team->lock);
  }
}

/* Signals belong to the program's own threads. */
static lev_status start(oadamw_team *team) {
  sigset_t all, before;
  int error = 0;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 1; i < team->threads && error == 0; ++i) {
    member *m = &team->members[i];
    *m = (member){.team = team, .number = i};
    error = pthread_create(&m->thread, NULL, member_main, m);
    if (error == 0) ++team->started;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error == 0 ? LEV_OK : lev_fail(LEV_ERR_DEVICE, "no thread for host updates: %s", strerror(error));
}

lev_status oadamw_team_create(int threads, oadamw_team **out) {
  *out = NULL;
  oadamw_team *team = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *team);
  if (!team) return LEV_ERR_NOMEM;
  team->threads = threads;
  pthread_mutex_init(&team->turn, NULL);
  pthread_mutex_init(&team->lock, NULL);
  pthread_cond_init(&team->begin, NULL);
  pthread_cond_init(&team->end, NULL);
  team->members = lev_calloc(LEV_HEAP_PLAN, (size_t)threads, sizeof *team->members);
  lev_status st = team->members ? start(team) : LEV_ERR_NOMEM;
  if (st != LEV_OK) {
    oadamw_team_destroy(team);
    return st;
  }
  *out = team;
  return LEV_OK;
}

void oadamw_team_destroy(oadamw_team *team) {
  if (!team) return;
  pthread_mutex_lock(&team->lock);
  team->stop = true;
  pthread_cond_broadcast(&team->begin);
  pthread_mutex_unlock(&team->lock);
  for (int i = 1; i <= team->started; ++i) pthread_join(team->members[i].thread, NULL);
  pthread_cond_destroy(&team->begin);
  pthread_cond_destroy(&team->end);
  pthread_mutex_destroy(&team->lock);
  pthread_mutex_destroy(&team->turn);
  lev_free(team->members);
  lev_free(team);
}

void oadamw_team_update(oadamw_team *team, const oadamw_update_args *args) {
  if (team->threads == 1 || args->count < ALONE) {
    oadamw_kernel_host_update.cpu(args);
    return;
  }
  pthread_mutex_lock(&team->turn);
  pthread_mutex_lock(&team->lock);
  team->args = *args;
  team->busy = team->threads - 1;
  ++team->update;
  pthread_cond_broadcast(&team->begin);
  pthread_mutex_unlock(&team->lock);
  update_part(args, team->threads, 0);
  pthread_mutex_lock(&team->lock);
  while (team->busy > 0) pthread_cond_wait(&team->end, &team->lock);
  pthread_mutex_unlock(&team->lock);
  pthread_mutex_unlock(&team->turn);
}
