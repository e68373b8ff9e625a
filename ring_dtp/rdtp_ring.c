/* SPDX-License-Identifier: Apache-2.0 */
/* The ring: order of hops, products and merges, whatever moves. */
#include "ring_dtp/ring_dtp_plan.h"

lev_status rdtp_mark(const rdtp_run *run) {
  LEV_TRY(lev_event_record(run->p->mark, run->stream));
  return lev_stream_wait(run->p->comm_stream, run->p->mark);
}

static int rdtp_owner(const rdtp_ring *ring, int hop) {
  const rdtp_plan *p = ring->run->p;
  return (p->rank - hop + p->size) % p->size;
}

/* Rows of the chunk that rank - 1 holds now, i.e. of the one that arrives next. */
static int64_t rdtp_rows_next(const rdtp_ring *ring, int hop, int64_t round) {
  return ring->rows(ring->run, rdtp_owner(ring, (hop + 1) % ring->run->p->size), round);
}

static lev_status rdtp_hop_payload(rdtp_ring *ring, const rdtp_visit *visit) {
  rdtp_plan *p = ring->run->p;
  int slot = visit->hop & 1;
  int64_t next = rdtp_rows_next(ring, visit->hop, visit->round);
  for (int part = 0; part < ring->n_parts; ++part)
    LEV_TRY(lev_comm_ring_shift(p->comm, p->comm_stream, visit->data[part],
                                (size_t)visit->rows * ring->part_bytes[part], ring->slot[part][slot],
                                (size_t)next * ring->part_bytes[part]));
  return lev_event_record(p->arrived[slot], p->comm_stream);
}

/* The accumulator of the previous step leaves, its predecessor's arrives beside the one that this step fills. */
static lev_status rdtp_hop_acc(rdtp_ring *ring) {
  rdtp_plan *p = ring->run->p;
  int64_t mine = ring->rows(ring->run, rdtp_owner(ring, ring->pending_hop), ring->pending_round);
  int64_t next = rdtp_rows_next(ring, ring->pending_hop, ring->pending_round);
  LEV_TRY(lev_comm_ring_shift(p->comm, p->comm_stream, ring->acc[(ring->step + 2) % 3], (size_t)mine * ring->acc_bytes,
                              ring->acc[(ring->step + 1) % 3], (size_t)next * ring->acc_bytes));
  return lev_event_record(p->acc_arrived, p->comm_stream);
}

static lev_status rdtp_land_acc(rdtp_ring *ring, void *acc, int64_t rows) {
  rdtp_run *run = ring->run;
  LEV_TRY(lev_stream_wait(run->stream, run->p->acc_arrived));
  const void *incoming = ring->acc[(ring->step + 1) % 3];
  if (ring->pending_hop < run->p->size - 1) return ring->merge(run, acc, incoming, rows);
  run->own_clock = run->clock + 1;
  return ring->home(run, incoming, ring->pending_round);
}

/* The comm stream must not send what is still being summed nor overwrite what is still being read: it waits for point
 * `clock` of the compute stream unless it has done so already. */
static lev_status rdtp_mark_from(rdtp_run *run, int64_t clock) {
  if (clock <= run->marked) return LEV_OK;
  run->marked = run->clock;
  return rdtp_mark(run);
}

/* The accumulator hops first, because it is needed first. */
static lev_status rdtp_ring_step(rdtp_ring *ring, rdtp_visit *visit) {
  rdtp_run *run = ring->run;
  int hop = visit->hop;
  if (ring->pending) {
    LEV_TRY(rdtp_mark_from(run, ring->pending_clock));
    LEV_TRY(rdtp_hop_acc(ring));
  }
  if (hop < run->p->size - 1) {
    LEV_TRY(rdtp_mark_from(run, lev_max_i64(run->slot_clock[hop & 1], hop == 0 ? run->own_clock : 0)));
    LEV_TRY(rdtp_hop_payload(ring, visit));
  }
  if (hop > 0) LEV_TRY(lev_stream_wait(run->stream, run->p->arrived[(hop - 1) & 1]));
  LEV_TRY(ring->compute(run, visit));
  if (ring->pending) LEV_TRY(rdtp_land_acc(ring, visit->acc, visit->rows));
  ++run->clock;
  if (hop > 0) run->slot_clock[(hop - 1) & 1] = run->clock;
  if (ring->acc_bytes == 0) return LEV_OK;
  ring->pending = true;
  ring->pending_hop = hop;
  ring->pending_round = visit->round;
  ring->pending_clock = run->clock;
  ++ring->step;
  return LEV_OK;
}

lev_status rdtp_ring_round(rdtp_ring *ring, int64_t round) {
  rdtp_plan *p = ring->run->p;
  for (int hop = 0; hop < p->size; ++hop) {
    rdtp_visit visit = {.round = round, .hop = hop, .owner = rdtp_owner(ring, hop)};
    visit.rows = ring->rows(ring->run, visit.owner, round);
    for (int part = 0; part < ring->n_parts; ++part)
      visit.data[part] = hop == 0 ? ring->own(ring->run, round, part) : ring->slot[part][(hop - 1) & 1];
    visit.acc = ring->acc_bytes ? ring->acc[ring->step % 3] : NULL;
    if (p->size > 1) {
      LEV_TRY(rdtp_ring_step(ring, &visit));
      continue;
    }
    visit.acc = ring->acc_bytes ? ring->acc[0] : NULL;
    LEV_TRY(ring->compute(ring->run, &visit));
    if (ring->home) LEV_TRY(ring->home(ring->run, visit.acc, round));
  }
  return LEV_OK;
}

lev_status rdtp_ring_flush(rdtp_ring *ring) {
  if (!ring->pending) return LEV_OK;
  LEV_TRY(rdtp_mark_from(ring->run, ring->pending_clock));
  LEV_TRY(rdtp_hop_acc(ring));
  LEV_TRY(rdtp_land_acc(ring, NULL, 0));
  ++ring->run->clock;
  ring->pending = false;
  return LEV_OK;
}
