/* SPDX-License-Identifier: Apache-2.0 */
/* Plan, regions and schedule. The event waits of a hosted item l in slot l mod 2, in the order in which they happen:
 *
 * 1. copy-out waits for compute's sco_write_end(l): the item is complete.
 * 2. compute waits for the copy-out of l at sco_write_begin(l + 2): the slot may be overwritten.
 * 3. restore waits for compute's sco_release(l + 2): the slot may be overwritten. The pinned copy is complete, because
 *    compute waited for it (2) before it wrote l + 2.
 * 4. compute waits for the restore of l at sco_read(l): the item is complete again.
 *
 * If forward stopped before the last layer, the slots' last owners may have copy-outs in flight: the restore waits for
 * those too. Over a reset, compute waits at the slot's next sco_write_begin for a copy-out or restore that nobody has
 * waited for yet. No wait is there twice, so that a test can drop each one and must see the damage. */
#include "sco/sco.h"

#include <math.h>

#include "common/hostmem.h"

typedef enum item_state { ITEM_EMPTY, ITEM_WRITING, ITEM_WRITTEN, ITEM_READING, ITEM_RELEASED } item_state;
static const char *const item_words[] = {"empty", "being written", "written", "being read", "released"};

typedef struct item {
  item_state state;
  uint64_t generation; /* of the slot when the item last entered it */
  size_t bytes;        /* written */
} item;

/* A slot belongs to `owner` from the owner's write or restore until another item takes it. */
typedef struct slot {
  int owner; /* layer, -1 = nobody */
  uint64_t generation;
  bool out_pending; /* a copy-out that compute has not waited for */
  bool in_pending;  /* a restore that compute has not waited for */
  lev_event *written, *out_done, *released, *in_done;
} slot;

typedef struct kind_plan {
  size_t stride;                /* bytes of one place */
  int hosted, slotted;          /* layers below `hosted` are copied out, below `slotted` go through slots */
  const char *tag;              /* region tag */
  const char *out_tag, *in_tag; /* copy labels */
  unsigned char *slots, *own, *pinned;
  item *items; /* [layers] */
  slot slot[2];
} kind_plan;

struct sco_plan {
  lev_device *device;
  sco_config config;
  bool bound;
  lev_stream *copy_out, *restore;
  lev_stream *compute; /* of this micro-batch; NULL after a reset */
  kind_plan kind[SCO_KINDS];
  sco_counters counters;
};

static const char *const kind_names[SCO_KINDS] = {"boundary", "attention output"};

sco_config sco_config_default(void) {
  return (sco_config){.size = sizeof(sco_config),
                      .host_budget = SIZE_MAX,
                      .device_budget = SIZE_MAX,
                      .fraction = 1,
                      .schedule = SCO_BOUNDED};
}

/* ---- plan ---- */

static void split_layers(const sco_config *c, size_t host_budget, double fraction, kind_plan out[SCO_KINDS]) {
  int cap = (int)floor(fraction * c->layers + 1e-9);
  if (cap > c->layers - 2) cap = c->layers - 2;
  if (cap < 0 || c->schedule == SCO_PLAIN) cap = 0;
  for (int k = 0; k < SCO_KINDS; ++k) {
    size_t stride = lev_align_up(c->item_bytes[k]);
    size_t room = stride == 0 ? 0 : host_budget / stride;
    int hosted = room < (size_t)cap ? (int)room : cap;
    out[k].stride = stride;
    out[k].hosted = hosted;
    out[k].slotted = hosted > 0 ? hosted + 2 : 0;
    if (host_budget != SIZE_MAX) host_budget -= (size_t)hosted * stride;
  }
}

/* Device bytes, saturating. */
static size_t device_bytes(const sco_config *c, const kind_plan kinds[SCO_KINDS]) {
  size_t sum = 0;
  for (int k = 0; k < SCO_KINDS; ++k)
    sum = lev_sat_add(sum, lev_sat_mul(kinds[k].stride, (size_t)(c->layers - kinds[k].hosted)));
  return sum;
}

static lev_status check(const sco_config *c, kind_plan kinds[SCO_KINDS]) {
  if (!c || c->size != sizeof *c) return lev_fail(LEV_ERR_ARG, "sco_config.size must be %zu", sizeof *c);
  if (c->layers < 1) return lev_fail(LEV_ERR_ARG, "sco needs at least one layer, not %d", c->layers);
  if (!(c->fraction >= 0 && c->fraction <= 1))
    return lev_fail(LEV_ERR_ARG, "sco fraction %g is not within 0 .. 1", c->fraction);
  if (c->schedule != SCO_BOUNDED && c->schedule != SCO_PLAIN)
    return lev_fail(LEV_ERR_ARG, "unknown sco schedule %d", (int)c->schedule);
  split_layers(c, c->host_budget, c->fraction, kinds);
  size_t need = device_bytes(c, kinds);
  if (need == SIZE_MAX) return lev_fail(LEV_ERR_ARG, "sco items of %d layers exceed the address space", c->layers);
  if (need > c->device_budget) {
    kind_plan least[SCO_KINDS] = {0};
    split_layers(c, SIZE_MAX, 1, least);
    return lev_fail(
        LEV_ERR_BUDGET,
        "sco needs %zu device bytes and may use %zu; with an unlimited host budget and fraction 1 it needs %zu", need,
        c->device_budget, device_bytes(c, least));
  }
  return LEV_OK;
}

lev_status sco_supports(const sco_config *config) {
  kind_plan kinds[SCO_KINDS] = {0};
  return check(config, kinds);
}

static lev_status create_kind(sco_plan *p, int k) {
  static const char *const tags[SCO_KINDS][3] = {{"sco.boundary", "sco.boundary.out", "sco.boundary.in"},
                                                 {"sco.attention", "sco.attention.out", "sco.attention.in"}};
  kind_plan *kp = &p->kind[k];
  kp->tag = tags[k][0], kp->out_tag = tags[k][1], kp->in_tag = tags[k][2];
  kp->items = lev_calloc(LEV_HEAP_PLAN, (size_t)p->config.layers, sizeof *kp->items);
  if (!kp->items) return LEV_ERR_NOMEM;
  for (int s = 0; s < 2; ++s) {
    slot *sl = &kp->slot[s];
    sl->owner = -1;
    LEV_TRY(lev_event_create(p->device, &sl->written));
    LEV_TRY(lev_event_create(p->device, &sl->out_done));
    LEV_TRY(lev_event_create(p->device, &sl->released));
    LEV_TRY(lev_event_create(p->device, &sl->in_done));
  }
  return LEV_OK;
}

lev_status sco_plan_create(lev_device *device, const sco_config *config, sco_plan **out) {
  if (!device || !out) return lev_fail(LEV_ERR_ARG, "sco_plan_create needs a device and a place for the plan");
  *out = NULL;
  kind_plan kinds[SCO_KINDS] = {0};
  LEV_TRY(check(config, kinds));
  sco_plan *p = lev_calloc(LEV_HEAP_PLAN, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  p->device = device;
  p->config = *config;
  lev_status st = LEV_OK;
  for (int k = 0; k < SCO_KINDS; ++k) p->kind[k] = kinds[k];
  LEV_TRY_GOTO(st, lev_stream_create(device, "sco.out", &p->copy_out), fail);
  LEV_TRY_GOTO(st, lev_stream_create(device, "sco.in", &p->restore), fail);
  for (int k = 0; k < SCO_KINDS; ++k) LEV_TRY_GOTO(st, create_kind(p, k), fail);
  *out = p;
  return LEV_OK;
fail:
  sco_plan_destroy(p);
  return st;
}

void sco_plan_destroy(sco_plan *p) {
  if (!p) return;
  if (p->copy_out) lev_stream_destroy(p->copy_out);
  if (p->restore) lev_stream_destroy(p->restore);
  for (int k = 0; k < SCO_KINDS; ++k) {
    for (int s = 0; s < 2; ++s) {
      slot *sl = &p->kind[k].slot[s];
      lev_event *events[] = {sl->written, sl->out_done, sl->released, sl->in_done};
      for (size_t i = 0; i < sizeof events / sizeof *events; ++i)
        if (events[i]) lev_event_destroy(events[i]);
    }
    lev_free(p->kind[k].items);
  }
  lev_free(p);
}

/* ---- regions ---- */

typedef struct layout {
  void *slots, *own, *pinned;
} layout;

static void lay_out(const sco_plan *p, lev_walker *w, layout out[SCO_KINDS]) {
  for (int k = 0; k < SCO_KINDS; ++k) {
    const kind_plan *kp = &p->kind[k];
    int64_t stride = (int64_t)kp->stride;
    out[k] = (layout){0};
    /* the two layer inputs that end in slots count with the others: sco.boundary is all of them, wherever they lie */
    const char *tag = k == SCO_BOUNDARY ? kp->tag : "sco.slots";
    if (kp->hosted > 0) out[k].slots = lev_walk(w, LEV_MEM_DEVICE, tag, LEV_U8, 2, stride);
  }
  for (int k = 0; k < SCO_KINDS; ++k) {
    const kind_plan *kp = &p->kind[k];
    int64_t stride = (int64_t)kp->stride, own = p->config.layers - kp->slotted;
    if (stride > 0 && own > 0) out[k].own = lev_walk(w, LEV_MEM_DEVICE, kp->tag, LEV_U8, own, stride);
    if (kp->hosted > 0) out[k].pinned = lev_walk(w, LEV_MEM_PINNED, kp->tag, LEV_U8, kp->hosted, stride);
  }
}

void sco_walk(void *plan, lev_walker *walker) {
  layout unused[SCO_KINDS];
  lay_out(plan, walker, unused);
}

void sco_plan_regions(const sco_plan *p, sco_phase phase, lev_region_fn fn, void *ctx) {
  lev_walker w = {.list = fn, .list_ctx = ctx};
  layout unused[SCO_KINDS];
  if (phase == SCO_PERSISTENT) lay_out(p, &w, unused);
}

void sco_plan_bytes(const sco_plan *p, sco_phase phase, size_t bytes[LEV_MEM_CLASSES]) {
  lev_walker w = {0};
  layout unused[SCO_KINDS];
  if (phase == SCO_PERSISTENT) lay_out(p, &w, unused);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) bytes[c] = w.used[c];
}

lev_status sco_plan_bind(sco_plan *p, sco_phase phase, const lev_blocks *blocks) {
  if (!p || phase != SCO_PERSISTENT || !blocks) return lev_fail(LEV_ERR_ARG, "sco_plan_bind: bad argument");
  if (p->bound) return lev_fail(LEV_ERR_MISUSE, "sco plan is bound already");
  lev_walker count = {0}, assign = {0};
  layout at[SCO_KINDS];
  lay_out(p, &count, at);
  LEV_TRY(lev_blocks_check(&count, blocks, "sco.persistent"));
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) assign.base[c] = blocks->base[c];
  lay_out(p, &assign, at);
  for (int k = 0; k < SCO_KINDS; ++k)
    p->kind[k].slots = at[k].slots, p->kind[k].own = at[k].own, p->kind[k].pinned = at[k].pinned;
  lev_trace_add(lev_device_trace(p->device), LEV_EV_BIND, 0, "sco.persistent", count.used[LEV_MEM_DEVICE]);
  p->bound = true;
  return LEV_OK;
}

int sco_hosted(const sco_plan *p, sco_kind kind) {
  return p->kind[kind].hosted;
}
void sco_streams(const sco_plan *p, lev_stream **copy_out, lev_stream **restore) {
  *copy_out = p->copy_out;
  *restore = p->restore;
}
sco_counters sco_count(const sco_plan *p) {
  return p->counters;
}

/* ---- schedule ---- */

static lev_status enter(sco_plan *p, int layer, sco_kind kind, lev_stream *compute, const char *call) {
  if (!p || !compute || (int)kind < 0 || kind >= SCO_KINDS || layer < 0 || layer >= p->config.layers)
    return lev_fail(LEV_ERR_ARG, "%s: layer %d or kind %d out of range, or a NULL argument", call, layer, (int)kind);
  if (!p->bound) return lev_fail(LEV_ERR_MISUSE, "%s: the sco plan is not bound", call);
  if (p->kind[kind].stride == 0)
    return lev_fail(LEV_ERR_MISUSE, "%s: item_bytes of kind %s is 0: it is not kept", call, kind_names[kind]);
  if (p->compute && p->compute != compute)
    return lev_fail(LEV_ERR_MISUSE, "%s: compute stream %s, but this micro-batch began on %s", call,
                    lev_stream_name(compute), lev_stream_name(p->compute));
  p->compute = compute;
  return LEV_OK;
}

static lev_status wrong_state(const kind_plan *kp, sco_kind kind, int layer, const char *call, const char *needs) {
  return lev_fail(LEV_ERR_MISUSE, "%s: %s of layer %d is %s; it must be %s", call, kind_names[kind], layer,
                  item_words[kp->items[layer].state], needs);
}

static slot *slot_of(kind_plan *kp, int layer) {
  return layer < kp->slotted ? &kp->slot[layer % 2] : NULL;
}

static void *place_of(const kind_plan *kp, int layer) {
  return layer < kp->slotted ? kp->slots + (size_t)(layer % 2) * kp->stride
                             : kp->own + (size_t)(layer - kp->slotted) * kp->stride;
}

static bool in_slot(const kind_plan *kp, const slot *s, int layer) {
  return s->owner == layer && s->generation == kp->items[layer].generation;
}

static void take_slot(kind_plan *kp, slot *s, int layer) {
  s->owner = layer;
  kp->items[layer].generation = ++s->generation;
}

/* Compute waits for the copies that touch the slot and that it has not waited for. */
static lev_status settle(slot *s, lev_stream *compute) {
  if (s->out_pending) LEV_TRY(lev_stream_wait(compute, s->out_done));
  s->out_pending = false;
  if (s->in_pending) LEV_TRY(lev_stream_wait(compute, s->in_done));
  s->in_pending = false;
  return LEV_OK;
}

lev_status sco_write_begin(sco_plan *p, int layer, sco_kind kind, lev_stream *compute, void **ptr) {
  if (!ptr) return lev_fail(LEV_ERR_ARG, "sco_write_begin: ptr is NULL");
  LEV_TRY(enter(p, layer, kind, compute, "sco_write_begin"));
  kind_plan *kp = &p->kind[kind];
  if (kp->items[layer].state != ITEM_EMPTY) return wrong_state(kp, kind, layer, "sco_write_begin", "empty");
  slot *s = slot_of(kp, layer);
  if (s) {
    if (s->owner >= 0 && (kp->items[s->owner].state != ITEM_WRITTEN || s->owner >= kp->hosted))
      return lev_fail(LEV_ERR_MISUSE, "sco_write_begin: the slot of %s %d holds layer %d, which is %s%s",
                      kind_names[kind], layer, s->owner, item_words[kp->items[s->owner].state],
                      s->owner >= kp->hosted ? " and has no copy on the host: write layers in forward order" : "");
    LEV_TRY(settle(s, compute));
    take_slot(kp, s, layer);
  }
  kp->items[layer].state = ITEM_WRITING;
  *ptr = place_of(kp, layer);
  return LEV_OK;
}

lev_status sco_write_end(sco_plan *p, int layer, sco_kind kind, size_t bytes, lev_stream *compute) {
  LEV_TRY(enter(p, layer, kind, compute, "sco_write_end"));
  kind_plan *kp = &p->kind[kind];
  item *it = &kp->items[layer];
  if (it->state != ITEM_WRITING) return wrong_state(kp, kind, layer, "sco_write_end", "being written");
  if (bytes > p->config.item_bytes[kind])
    return lev_fail(LEV_ERR_CAPACITY, "%s of layer %d has %zu bytes; the plan was made for %zu", kind_names[kind],
                    layer, bytes, p->config.item_bytes[kind]);
  if (layer < kp->hosted) {
    slot *s = slot_of(kp, layer);
    LEV_TRY(lev_event_record(s->written, compute));
    LEV_TRY(lev_stream_wait(p->copy_out, s->written));
    LEV_TRY(lev_copy(p->copy_out, kp->pinned + (size_t)layer * kp->stride, place_of(kp, layer), bytes, kp->out_tag));
    LEV_TRY(lev_event_record(s->out_done, p->copy_out));
    s->out_pending = true;
    ++p->counters.items_out;
    p->counters.bytes_out += bytes;
  }
  it->bytes = bytes;
  it->state = ITEM_WRITTEN;
  return LEV_OK;
}

/* Brings a written item back to the card if it is not there. */
static lev_status restore(sco_plan *p, kind_plan *kp, int layer, sco_kind kind, const char *call) {
  slot *s = slot_of(kp, layer);
  if (!s || in_slot(kp, s, layer)) return LEV_OK;
  if (s->owner < 0 || kp->items[s->owner].state != ITEM_RELEASED)
    return lev_fail(LEV_ERR_MISUSE, "%s: the slot of %s %d holds layer %d, which is %s: read and release it first",
                    call, kind_names[kind], layer, s->owner,
                    s->owner < 0 ? "absent" : item_words[kp->items[s->owner].state]);
  LEV_TRY(lev_stream_wait(p->restore, s->released));
  if (s->out_pending) LEV_TRY(lev_stream_wait(p->restore, s->out_done)); /* only after a forward that stopped early */
  s->out_pending = false;
  LEV_TRY(lev_copy(p->restore, place_of(kp, layer), kp->pinned + (size_t)layer * kp->stride, kp->items[layer].bytes,
                   kp->in_tag));
  LEV_TRY(lev_event_record(s->in_done, p->restore));
  take_slot(kp, s, layer);
  s->in_pending = true;
  ++p->counters.items_in;
  p->counters.bytes_in += kp->items[layer].bytes;
  return LEV_OK;
}

lev_status sco_prefetch(sco_plan *p, int layer, sco_kind kind, lev_stream *compute) {
  LEV_TRY(enter(p, layer, kind, compute, "sco_prefetch"));
  kind_plan *kp = &p->kind[kind];
  if (kp->items[layer].state != ITEM_WRITTEN) return wrong_state(kp, kind, layer, "sco_prefetch", "written");
  return restore(p, kp, layer, kind, "sco_prefetch");
}

lev_status sco_read(sco_plan *p, int layer, sco_kind kind, lev_stream *compute, void **ptr) {
  if (!ptr) return lev_fail(LEV_ERR_ARG, "sco_read: ptr is NULL");
  LEV_TRY(enter(p, layer, kind, compute, "sco_read"));
  kind_plan *kp = &p->kind[kind];
  item *it = &kp->items[layer];
  if (it->state != ITEM_WRITTEN && it->state != ITEM_READING)
    return wrong_state(kp, kind, layer, "sco_read", "written");
  if (it->state == ITEM_WRITTEN) {
    LEV_TRY(restore(p, kp, layer, kind, "sco_read"));
    slot *s = slot_of(kp, layer);
    if (s && s->in_pending) {
      LEV_TRY(lev_stream_wait(compute, s->in_done));
      s->in_pending = false;
    } else if (s) {
      ++p->counters.kept;
    }
    it->state = ITEM_READING;
  }
  *ptr = place_of(kp, layer);
  return LEV_OK;
}

lev_status sco_release(sco_plan *p, int layer, sco_kind kind, lev_stream *compute) {
  LEV_TRY(enter(p, layer, kind, compute, "sco_release"));
  kind_plan *kp = &p->kind[kind];
  if (kp->items[layer].state != ITEM_READING) return wrong_state(kp, kind, layer, "sco_release", "being read");
  slot *s = slot_of(kp, layer);
  if (s) LEV_TRY(lev_event_record(s->released, compute));
  kp->items[layer].state = ITEM_RELEASED;
  return LEV_OK;
}

lev_status sco_reset(sco_plan *p) {
  if (!p) return lev_fail(LEV_ERR_ARG, "sco_reset: plan is NULL");
  for (int k = 0; k < SCO_KINDS; ++k) {
    for (int l = 0; l < p->config.layers; ++l) p->kind[k].items[l] = (item){0};
    p->kind[k].slot[0].owner = p->kind[k].slot[1].owner = -1;
  }
  p->compute = NULL;
  return LEV_OK;
}
