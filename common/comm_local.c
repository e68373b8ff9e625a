/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/comm_local_impl.h"
#include "common/device_impl.h"
#include "common/dims.h"
#include "common/hostmem.h"
#include "common/tsan_impl.h"

#define TEXT_BYTES 512
#define SPINS 300

struct lev_comm_hub {
  int size;
  double timeout;
  int spins; /* 0 where ranks outnumber the cores */
  pthread_mutex_t lock;
  lev_local_group *groups; /* oldest first */
  lev_local_group *world;
  bool *joined;        /* [size] */
  lev_backend backend; /* of all members: the first one's, LEV_BACKENDS before it came */
  atomic_bool aborted;
  char reason[TEXT_BYTES]; /* written once, before any lane is killed */
};

static const lev_comm_ops local_ops;

/* ---- lanes ---- */

static lev_status lane_open(lev_local_lane *lane, int size) {
  lane->slots = lev_calloc(LEV_HEAP_COMMON, (size_t)size, sizeof *lane->slots);
  lane->met = lev_calloc(LEV_HEAP_COMMON, (size_t)size, sizeof *lane->met);
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&lane->changed, &attr);
  pthread_condattr_destroy(&attr);
  pthread_mutex_init(&lane->lock, NULL);
  return lane->slots && lane->met ? LEV_OK : LEV_ERR_NOMEM;
}

static void lane_close(lev_local_lane *lane) {
  pthread_mutex_destroy(&lane->lock);
  pthread_cond_destroy(&lane->changed);
  lev_free(lane->slots);
  lev_free(lane->met);
}

static void lane_kill(lev_local_lane *lane) {
  pthread_mutex_lock(&lane->lock);
  lane->dead = true;
  pthread_cond_broadcast(&lane->changed);
  pthread_mutex_unlock(&lane->lock);
}

static struct timespec deadline_after(double seconds) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  double whole = seconds < 1e9 ? seconds : 1e9;
  t.tv_sec += (time_t)whole;
  t.tv_nsec += (long)((whole - (double)(time_t)whole) * 1e9);
  if (t.tv_nsec >= 1000000000) t.tv_nsec -= 1000000000, ++t.tv_sec;
  return t;
}

/* "2, 5" of the world ranks that have not arrived. */
static void missing_text(const lev_local_group *group, const lev_local_lane *lane, char *text, size_t bytes) {
  size_t at = 0;
  text[0] = '\0';
  for (int r = 0; r < group->size; ++r) {
    if (lane->met[r] || at >= bytes) continue;
    int n = snprintf(text + at, bytes - at, "%s%d", at ? ", " : "", group->world_ranks[r]);
    if (n > 0) at += (size_t)n;
  }
}

/* Called with the lane locked. */
static lev_status aborted(const lev_local_group *group, const lev_local_lane *lane, const char *what) {
  return lev_fail(LEV_ERR_ABORTED, "%s: the world was aborted: %s", what,
                  lane->missed[0] ? lane->missed : group->hub->reason);
}

/* Waits for the meeting after number `before`. Called with the lane locked. */
static lev_status wait_met(lev_local_group *group, lev_local_lane *lane, uint64_t before, const char *what) {
  struct timespec deadline = deadline_after(group->hub->timeout);
  while (atomic_load(&lane->meetings) == before && !lane->dead) {
    if (pthread_cond_timedwait(&lane->changed, &lane->lock, &deadline) != ETIMEDOUT) continue;
    if (atomic_load(&lane->meetings) != before || lane->dead) break;
    char missing[TEXT_BYTES / 2];
    missing_text(group, lane, missing, sizeof missing);
    lane->dead = true;
    pthread_cond_broadcast(&lane->changed);
    snprintf(lane->missed, sizeof lane->missed, "%s: rank(s) %s did not come within %g s", what, missing,
             group->hub->timeout);
    return lev_fail(LEV_ERR_TIMEOUT, "%s", lane->missed);
  }
  return atomic_load(&lane->meetings) != before ? LEV_OK : aborted(group, lane, what);
}

lev_status lev_local_meet(lev_local_group *group, lev_local_lane *lane, int rank, const void *mine, const char *what) {
  pthread_mutex_lock(&lane->lock);
  if (lane->dead) {
    lev_status st = aborted(group, lane, what);
    pthread_mutex_unlock(&lane->lock);
    return st;
  }
  uint64_t before = atomic_load(&lane->meetings);
  lane->slots[rank] = mine;
  lane->met[rank] = true;
  if (++lane->n_met == group->size) {
    lane->n_met = 0;
    memset(lane->met, 0, (size_t)group->size * sizeof *lane->met);
    atomic_store(&lane->meetings, before + 1);
    pthread_mutex_unlock(&lane->lock);
    pthread_cond_broadcast(&lane->changed); /* the group stays until this member leaves it */
    return LEV_OK;
  }
  if (group->hub->spins) {
    pthread_mutex_unlock(&lane->lock);
    for (int i = group->hub->spins; i > 0; --i)
      if (atomic_load(&lane->meetings) != before) return LEV_OK;
    pthread_mutex_lock(&lane->lock);
  }
  lev_status st = wait_met(group, lane, before, what);
  pthread_mutex_unlock(&lane->lock);
  if (st == LEV_ERR_TIMEOUT) lev_local_abort(group->hub, lev_detail());
  return st;
}

void lev_local_part(lev_local_lane *lane, int size) {
  pthread_mutex_lock(&lane->lock);
  uint64_t before = atomic_load(&lane->partings);
  bool last = ++lane->n_parted == size;
  if (last) {
    lane->n_parted = 0;
    atomic_store(&lane->partings, before + 1);
  } else {
    while (atomic_load(&lane->partings) == before) pthread_cond_wait(&lane->changed, &lane->lock);
  }
  pthread_mutex_unlock(&lane->lock);
  if (last) pthread_cond_broadcast(&lane->changed);
}

/* ---- groups ---- */

static void group_free(lev_local_group *group) {
  lane_close(&group->stream_lane);
  lane_close(&group->host_lane);
  lev_free(group->joined);
  lev_free(group->world_ranks);
  lev_free(group);
}

/* Called with the hub locked, or before it is shared. Appends to the hub's list. NULL: out of memory. */
static lev_local_group *group_new(lev_comm_hub *hub, int size) {
  lev_local_group *group = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *group);
  if (!group) return NULL;
  group->hub = hub, group->size = size, group->refs = size;
  group->joined = lev_calloc(LEV_HEAP_COMMON, (size_t)size, sizeof *group->joined);
  group->world_ranks = lev_calloc(LEV_HEAP_COMMON, (size_t)size, sizeof *group->world_ranks);
  lev_status stream = lane_open(&group->stream_lane, size), host = lane_open(&group->host_lane, size);
  if (!group->joined || !group->world_ranks || stream != LEV_OK || host != LEV_OK) {
    group_free(group);
    return NULL;
  }
  group->stream_lane.dead = group->host_lane.dead = atomic_load(&hub->aborted);
  lev_local_group **at = &hub->groups;
  while (*at) at = &(*at)->next;
  *at = group;
  return group;
}

static void group_leave(lev_local_group *group) {
  lev_comm_hub *hub = group->hub;
  pthread_mutex_lock(&hub->lock);
  if (--group->refs == 0) {
    lev_local_group **at = &hub->groups;
    while (*at != group) at = &(*at)->next;
    *at = group->next;
    group_free(group);
  }
  pthread_mutex_unlock(&hub->lock);
}

void lev_local_abort(lev_comm_hub *hub, const char *reason) {
  pthread_mutex_lock(&hub->lock);
  if (!atomic_load(&hub->aborted)) {
    snprintf(hub->reason, sizeof hub->reason, "%s", reason);
    atomic_store(&hub->aborted, true);
    for (lev_local_group *g = hub->groups; g; g = g->next) {
      lane_kill(&g->stream_lane);
      lane_kill(&g->host_lane);
    }
  }
  pthread_mutex_unlock(&hub->lock);
}

static void local_abort(lev_comm *comm) {
  lev_local_comm *c = (lev_local_comm *)comm;
  char reason[64];
  snprintf(reason, sizeof reason, "rank %d gave up", comm->world_rank);
  lev_local_abort(c->group->hub, reason);
}

/* ---- hub ---- */

lev_status lev_comm_hub_create(int size, double timeout_seconds, lev_comm_hub **out) {
  *out = NULL;
  if (size < 1 || !(timeout_seconds >= 0))
    return lev_fail(LEV_ERR_ARG, "a hub of %d ranks with a timeout of %g s", size, timeout_seconds);
  lev_comm_hub *hub = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *hub);
  if (!hub) return LEV_ERR_NOMEM;
  hub->size = size, hub->backend = LEV_BACKENDS;
  hub->timeout = timeout_seconds > 0 ? timeout_seconds : 600;
  hub->spins = sysconf(_SC_NPROCESSORS_ONLN) >= size ? SPINS : 0;
  pthread_mutex_init(&hub->lock, NULL);
  hub->joined = lev_calloc(LEV_HEAP_COMMON, (size_t)size, sizeof *hub->joined);
  hub->world = group_new(hub, size);
  if (!hub->joined || !hub->world) {
    lev_comm_hub_destroy(hub);
    return LEV_ERR_NOMEM;
  }
  for (int r = 0; r < size; ++r) hub->world->world_ranks[r] = r;
  *out = hub;
  return LEV_OK;
}

void lev_comm_hub_destroy(lev_comm_hub *hub) {
  if (!hub) return;
  while (hub->groups) {
    lev_local_group *next = hub->groups->next;
    group_free(hub->groups);
    hub->groups = next;
  }
  pthread_mutex_destroy(&hub->lock);
  lev_free(hub->joined);
  lev_free(hub);
}

void lev_comm_hub_abort(lev_comm_hub *hub) {
  lev_local_abort(hub, "a rank failed");
}

/* ---- communicators ---- */

static void comm_free(lev_local_comm *c) {
  if (!c) return;
#ifdef LEV_HAVE_CUDA
  lev_local_cuda_close(c);
#endif
  for (int i = 0; i < LEV_LOCAL_OPS; ++i) lev_free(c->ops[i].counts);
  lev_free(c->moves);
  lev_free(c->cursor);
  pthread_mutex_destroy(&c->lock);
  pthread_cond_destroy(&c->finished);
  lev_free(c);
}

static lev_status comm_new(lev_local_group *group, int rank, lev_device *device, lev_local_comm **out) {
  lev_local_comm *c = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *c);
  *out = NULL;
  if (!c) return LEV_ERR_NOMEM;
  c->base = (lev_comm){.ops = &local_ops,
                       .device = device,
                       .rank = rank,
                       .size = group->size,
                       .world_rank = group->world_ranks[rank],
                       .world_size = group->hub->size,
                       .first = group->world_ranks[0],
                       .stride = group->size > 1 ? group->world_ranks[1] - group->world_ranks[0] : 1};
  for (int r = 1; r < group->size; ++r)
    if (group->world_ranks[r] - group->world_ranks[r - 1] != c->base.stride || c->base.stride < 0) c->base.stride = 0;
  c->group = group;
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->finished, NULL);
  c->moves = lev_calloc(LEV_HEAP_COMMON, LEV_LOCAL_MOVES, sizeof *c->moves);
  c->cursor = lev_calloc(LEV_HEAP_COMMON, (size_t)group->size, sizeof *c->cursor);
  bool ok = c->moves && c->cursor;
  for (int i = 0; i < LEV_LOCAL_OPS && ok; ++i) {
    c->ops[i].comm = c;
    c->ops[i].counts = lev_calloc(LEV_HEAP_COMMON, (size_t)group->size, 2 * sizeof(int64_t));
    ok = c->ops[i].counts != NULL;
  }
  lev_status st = ok ? LEV_OK : LEV_ERR_NOMEM;
#ifdef LEV_HAVE_CUDA
  if (ok && lev_device_backend(device) == LEV_BACKEND_CUDA) st = lev_local_cuda_open(c);
#endif
  if (st != LEV_OK) {
    comm_free(c);
    return st;
  }
  *out = c;
  return LEV_OK;
}

static void local_destroy(lev_comm *comm) {
  lev_local_comm *c = (lev_local_comm *)comm;
  lev_local_group *group = c->group;
  comm_free(c);
  group_leave(group);
}

/* Makes this member's communicator and waits until all members have theirs; if one cannot, none gets one. */
static lev_status enter(lev_local_group *group, int rank, lev_device *device, lev_comm **out) {
  lev_local_comm *c;
  lev_status st = comm_new(group, rank, device, &c);
  if (st != LEV_OK) {
    lev_local_abort(group->hub, lev_detail());
    group_leave(group);
    return st;
  }
  st = lev_local_meet(group, &group->host_lane, rank, c, "joining a group");
  if (st == LEV_OK) {
#ifdef LEV_HAVE_CUDA
    if (lev_device_backend(device) == LEV_BACKEND_CUDA) st = lev_local_cuda_connect(c);
#endif
    lev_local_part(&group->host_lane, group->size);
    if (st != LEV_OK) lev_local_abort(group->hub, lev_detail());
  }
  if (st != LEV_OK) {
    local_destroy(&c->base);
    return st;
  }
  *out = &c->base;
  return LEV_OK;
}

lev_status lev_comm_local_join(lev_comm_hub *hub, int rank, lev_device *device, lev_comm **out) {
  *out = NULL;
  if (rank < 0 || rank >= hub->size) return lev_fail(LEV_ERR_ARG, "rank %d joins a world of %d ranks", rank, hub->size);
  lev_backend backend = lev_device_backend(device);
  if (backend != LEV_BACKEND_CPU && backend != LEV_BACKEND_CUDA)
    return lev_fail(LEV_ERR_UNSUPPORTED, "local ranks run on cpu or cuda devices, not on %s",
                    lev_backend_name(backend));
  pthread_mutex_lock(&hub->lock);
  bool twice = hub->joined[rank];
  if (hub->backend == LEV_BACKENDS) hub->backend = backend;
  lev_backend others = hub->backend;
  if (others == backend) hub->joined[rank] = true;
  pthread_mutex_unlock(&hub->lock);
  if (twice) return lev_fail(LEV_ERR_MISUSE, "rank %d joins twice", rank);
  if (others != backend)
    return lev_fail(LEV_ERR_ARG, "rank %d joins with a %s device, the others have %s", rank, lev_backend_name(backend),
                    lev_backend_name(others));
  return enter(hub->world, rank, device, out);
}

/* ---- control plane ---- */

typedef struct host_note {
  bool is_gather;
  lev_status status;
  const char *detail;
  const void *data;
  size_t bytes;
} host_note;

static const host_note *note_of(const lev_local_comm *c, int rank) {
  return c->group->host_lane.slots[rank];
}

/* All members made the same call? The verdict is the same everywhere. */
static lev_status match_notes(const lev_local_comm *c) {
  const host_note *zero = note_of(c, 0);
  for (int r = 1; r < c->base.size; ++r) {
    const host_note *note = note_of(c, r);
    if (note->is_gather != zero->is_gather || note->bytes != zero->bytes)
      return lev_fail(LEV_ERR_COMM, "rank %d calls %s with %zu bytes, rank %d %s with %zu", c->group->world_ranks[0],
                      zero->is_gather ? "host_all_gather" : "agree", zero->bytes, c->group->world_ranks[r],
                      note->is_gather ? "host_all_gather" : "agree", note->bytes);
  }
  return LEV_OK;
}

static lev_status local_agree(lev_comm *comm, lev_status mine) {
  lev_local_comm *c = (lev_local_comm *)comm;
  host_note note = {.status = mine, .detail = mine == LEV_OK ? "" : lev_detail()};
  LEV_TRY(lev_local_meet(c->group, &c->group->host_lane, comm->rank, &note, "agree"));
  lev_status st = match_notes(c);
  for (int r = 0; r < comm->size && st == LEV_OK; ++r) {
    const host_note *other = note_of(c, r);
    if (other->status == LEV_OK) continue;
    st = other->status;
    /* Peers read this thread's detail until all have parted, so the new text waits in `text`. */
    char text[2 * TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d: %s%s%s", c->group->world_ranks[r], lev_status_text(st),
             other->detail[0] ? ": " : "", other->detail);
    lev_local_part(&c->group->host_lane, comm->size);
    lev_detail_set(text);
    return st;
  }
  lev_local_part(&c->group->host_lane, comm->size);
  return st;
}

static lev_status local_host_all_gather(lev_comm *comm, const void *send, void *recv, size_t bytes) {
  lev_local_comm *c = (lev_local_comm *)comm;
  host_note note = {.is_gather = true, .data = send, .bytes = bytes};
  LEV_TRY(lev_local_meet(c->group, &c->group->host_lane, comm->rank, &note, "host_all_gather"));
  lev_status st = match_notes(c);
  if (st == LEV_OK && bytes > 0)
    for (int r = 0; r < comm->size; ++r) {
      void *to = (char *)recv + (size_t)r * bytes;
      const void *from = note_of(c, r)->data;
      if (to != from) memcpy(to, from, bytes);
    }
  lev_local_part(&c->group->host_lane, comm->size);
  return st;
}

/* ---- split and subset ---- */

typedef struct split_entry {
  int color, key;
} split_entry;

/* Place of rank `rank` among the ranks of its color; *size counts them all, *leader is the first of them. */
static int split_place(const split_entry *all, int n, int rank, int *size, int *leader) {
  int place = 0;
  *size = 0, *leader = rank;
  for (int r = 0; r < n; ++r) {
    if (all[r].color != all[rank].color) continue;
    ++*size;
    if (all[r].key < all[rank].key || (r < rank && all[r].key == all[rank].key)) ++place;
    if (all[r].key < all[*leader].key || (r < *leader && all[r].key == all[*leader].key)) *leader = r;
  }
  return place;
}

static lev_local_group *split_group(lev_local_comm *c, const split_entry *all, int size) {
  pthread_mutex_lock(&c->group->hub->lock);
  lev_local_group *group = group_new(c->group->hub, size);
  for (int r = 0; r < c->base.size && group; ++r) {
    int unused_size, unused_leader;
    if (all[r].color == all[c->base.rank].color)
      group->world_ranks[split_place(all, c->base.size, r, &unused_size, &unused_leader)] = c->group->world_ranks[r];
  }
  pthread_mutex_unlock(&c->group->hub->lock);
  return group;
}

static lev_status local_split(lev_comm *comm, int color, int key, lev_comm **out) {
  lev_local_comm *c = (lev_local_comm *)comm;
  split_entry mine = {color < 0 ? -1 : color, key};
  size_t n = (size_t)comm->size;
  /* Both tables in one block: [size] entries, [size] group pointers. */
  lev_local_group **groups = lev_calloc(LEV_HEAP_COMMON, n, sizeof *groups + sizeof mine);
  lev_status st = lev_comm_agree(comm, groups ? LEV_OK : LEV_ERR_NOMEM);
  if (st != LEV_OK || !groups) { /* without a table of our own the answer is a failure */
    lev_free(groups);
    return st;
  }
  split_entry *all = (split_entry *)(groups + n);
  int size, leader, place = 0;
  lev_local_group *group = NULL;
  LEV_TRY_GOTO(st, local_host_all_gather(comm, &mine, all, sizeof mine), done);
  place = split_place(all, comm->size, comm->rank, &size, &leader);
  if (color >= 0 && leader == comm->rank) group = split_group(c, all, size);
  LEV_TRY_GOTO(st, local_host_all_gather(comm, &group, groups, sizeof group), done);
  if (color < 0) goto done;
  group = groups[leader];
  if (group)
    st = enter(group, place, comm->device, out);
  else
    st = lev_fail(LEV_ERR_NOMEM, "no memory for a group of %d ranks", size);
done:
  lev_free(groups);
  return st;
}

/* The oldest such group that this member has not entered yet: the n-th call of every member yields the same one. */
static lev_local_group *subset_group(lev_comm_hub *hub, int first, int stride, int size, int rank) {
  pthread_mutex_lock(&hub->lock);
  lev_local_group *group = hub->groups;
  while (group && !(group->first == first && group->stride == stride && group->size == size && !group->joined[rank]))
    group = group->next;
  if (!group) {
    group = group_new(hub, size);
    if (group) {
      group->first = first, group->stride = stride;
      for (int r = 0; r < size; ++r) group->world_ranks[r] = first + r * stride;
    }
  }
  if (group) group->joined[rank] = true;
  pthread_mutex_unlock(&hub->lock);
  return group;
}

static lev_status local_subset(lev_comm *comm, int first, int stride, int size, int rank, lev_comm **out) {
  lev_local_comm *c = (lev_local_comm *)comm;
  lev_local_group *group = subset_group(c->group->hub, first, stride, size, rank);
  return group ? enter(group, rank, comm->device, out) : LEV_ERR_NOMEM;
}

/* ---- collectives ---- */

/* On the stream's worker. */
static lev_status run_coll(lev_local_comm *c, const lev_local_op *op, lev_status stream_status) {
  lev_local_group *group = c->group;
  const char *name = lev_coll_name(op->coll.kind);
  if (stream_status != LEV_OK) {
    /* The peers would wait for a call that never comes. */
    char reason[TEXT_BYTES];
    snprintf(reason, sizeof reason, "rank %d skips %s because its stream had failed (%s)", c->base.world_rank, name,
             lev_status_text(stream_status));
    lev_local_abort(group->hub, reason);
    return stream_status;
  }
  LEV_TRY(lev_local_meet(group, &group->stream_lane, c->base.rank, op, name));
  const lev_local_op *const *ops = (const lev_local_op *const *)group->stream_lane.slots;
  lev_status st = lev_local_match(group, ops);
  if (st == LEV_OK) st = lev_local_move_data(c, ops);
  lev_local_part(&group->stream_lane, group->size);
  if (st != LEV_OK) lev_local_abort(group->hub, lev_detail());
  return st;
}

static lev_status worker_op(const void *args, lev_status stream_status) {
  const lev_local_op *op;
  memcpy(&op, args, sizeof op);
  lev_local_comm *c = op->comm;
  lev_status st = run_coll(c, op, stream_status);
  lev_tsan_quiet();
  pthread_mutex_lock(&c->lock);
  atomic_fetch_add(&c->n_finished, 1);
  pthread_cond_signal(&c->finished);
  pthread_mutex_unlock(&c->lock);
  lev_tsan_loud();
  return st;
}

static void wait_finished(lev_local_comm *c, int64_t n) {
  if (atomic_load(&c->n_finished) >= n) return;
  pthread_mutex_lock(&c->lock);
  while (atomic_load(&c->n_finished) < n) pthread_cond_wait(&c->finished, &c->lock);
  pthread_mutex_unlock(&c->lock);
}

/* Copies the moves into the ring, waiting until the oldest calls that hold its space have run. */
static void keep_moves(lev_local_comm *c, lev_local_op *op, const lev_comm_move *moves, int n) {
  int64_t begin = c->moves_end;
  if (begin % LEV_LOCAL_MOVES + n > LEV_LOCAL_MOVES) begin += LEV_LOCAL_MOVES - begin % LEV_LOCAL_MOVES;
  int64_t oldest = lev_max_i64(0, c->n_enqueued - LEV_LOCAL_OPS + 1);
  while (oldest < c->n_enqueued && begin + n - c->ops[oldest % LEV_LOCAL_OPS].moves_begin > LEV_LOCAL_MOVES)
    wait_finished(c, ++oldest);
  op->moves_begin = begin;
  c->moves_end = begin + n;
  op->coll.moves = c->moves + begin % LEV_LOCAL_MOVES;
  for (int i = 0; i < n; ++i) c->moves[begin % LEV_LOCAL_MOVES + i] = moves[i];
}

static lev_status local_enqueue(lev_comm *comm, lev_stream *stream, const lev_coll *coll) {
  lev_local_comm *c = (lev_local_comm *)comm;
  if (stream->stopped) return lev_fail(LEV_ERR_MISUSE, "stream %s was destroyed", stream->name);
  if (coll->n_moves > LEV_LOCAL_MOVES)
    return lev_fail(LEV_ERR_CAPACITY, "exchange of %d moves; at most %d fit", coll->n_moves, LEV_LOCAL_MOVES);
#ifdef LEV_HAVE_CUDA
  if (lev_device_backend(comm->device) == LEV_BACKEND_CUDA) return lev_local_cuda_enqueue(c, stream, coll);
#endif
  lev_tsan_quiet();
  wait_finished(c, c->n_enqueued - LEV_LOCAL_OPS + 1);
  lev_local_op *op = &c->ops[c->n_enqueued % LEV_LOCAL_OPS];
  op->coll = *coll;
  int64_t *send_counts = op->counts, *recv_counts = op->counts + comm->size;
  for (int r = 0; r < comm->size && coll->send_counts; ++r) send_counts[r] = coll->send_counts[r];
  for (int r = 0; r < comm->size && coll->recv_counts; ++r) recv_counts[r] = coll->recv_counts[r];
  op->coll.send_counts = send_counts, op->coll.recv_counts = recv_counts;
  keep_moves(c, op, coll->moves, coll->n_moves);
  ++c->n_enqueued;
  lev_tsan_loud();
  return lev_cpu_enqueue(stream, worker_op, &op, sizeof op);
}

static const lev_comm_ops local_ops = {
    .enqueue = local_enqueue,
    .agree = local_agree,
    .host_all_gather = local_host_all_gather,
    .abort = local_abort,
    .split = local_split,
    .subset = local_subset,
    .destroy = local_destroy,
};
