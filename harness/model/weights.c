/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/model/weights.h"

#include "common/hostmem.h"

enum { CLASS_DENSE, CLASS_EXPERTS, CLASS_VOCAB, CLASS_NORM, CLASSES };
enum { SLOTS = 2 };

/* A place for one gathered unit. */
typedef struct slot {
  void *data;
  int unit;           /* gathered here, -1 = none */
  lev_event *arrived; /* gather finished */
  lev_event *free;    /* last reader finished */
} slot;

typedef struct unit_class {
  int slots;        /* gathered copies live at once; 0 = used in place */
  int64_t elements; /* of the largest unit */
  bool direct;      /* gradients are summed in the shard */
  bool overwritten; /* or written there in one piece */
  lev_comm *gather, *reduce;
  slot slot[SLOTS];
  void *live;           /* A [elements], live gradient */
  lev_event *live_free; /* earlier reduce finished reading `live` */
} unit_class;

struct lev_weights {
  lev_device *device;
  const lev_params *params;
  lev_dtype grad_dtype, arith;
  bool single_products;
  lev_stream *gather, *reduce;
  lev_event *changed, *ready, *reduced; /* shards changed; live gradient complete; all reduces so far */
  unit_class classes[CLASSES];
  void *shard, *grads;
};

static int class_of(const lev_unit *unit) {
  switch (unit->kind) {
  case LEV_UNIT_DENSE:
    return CLASS_DENSE;
  case LEV_UNIT_EXPERTS:
    return CLASS_EXPERTS;
  case LEV_UNIT_NORM:
    return CLASS_NORM;
  default:
    return CLASS_VOCAB;
  }
}

static lev_status create_class(lev_weights *w, int index, const lev_weight_comms *comms) {
  unit_class *c = &w->classes[index];
  lev_comm *const *pair = index == CLASS_EXPERTS ? comms->experts : index == CLASS_VOCAB ? comms->vocab : comms->dense;
  int replicas = 1;
  for (int u = 0; u < w->params->n_units; ++u) {
    const lev_unit *unit = &w->params->units[u];
    if (class_of(unit) != index) continue;
    c->elements = lev_max_i64(c->elements, unit->elements);
    replicas = unit->replicas;
  }
  c->gather = pair[0], c->reduce = pair[1];
  bool layered = index == CLASS_DENSE || index == CLASS_EXPERTS;
  c->slots = replicas == 1 ? 0 : layered ? SLOTS : 1;
  c->direct = replicas == 1 && w->grad_dtype == w->arith;
  c->overwritten =
      replicas == 1 && w->grad_dtype == w->params->model.dtype && index == CLASS_EXPERTS && w->single_products;
  for (int s = 0; s < c->slots; ++s) {
    c->slot[s].unit = -1;
    LEV_TRY(lev_event_create(w->device, &c->slot[s].arrived));
    LEV_TRY(lev_event_create(w->device, &c->slot[s].free));
  }
  return lev_event_create(w->device, &c->live_free);
}

lev_status lev_weights_create(lev_device *device, const lev_params *params, const lev_weight_comms *comms,
                              lev_dtype grad_dtype, bool single_products, lev_weights **out) {
  *out = NULL;
  lev_weights *w = lev_calloc(LEV_HEAP_MODEL, 1, sizeof *w);
  if (!w) return LEV_ERR_NOMEM;
  lev_status st;
  w->device = device, w->params = params, w->single_products = single_products;
  w->grad_dtype = grad_dtype, w->arith = lev_dtype_arith(params->model.dtype);
  LEV_TRY_GOTO(st, lev_stream_create(device, "gather", &w->gather), fail);
  LEV_TRY_GOTO(st, lev_stream_create(device, "reduce", &w->reduce), fail);
  LEV_TRY_GOTO(st, lev_event_create(device, &w->changed), fail);
  LEV_TRY_GOTO(st, lev_event_create(device, &w->ready), fail);
  LEV_TRY_GOTO(st, lev_event_create(device, &w->reduced), fail);
  for (int c = 0; c < CLASSES; ++c) LEV_TRY_GOTO(st, create_class(w, c, comms), fail);
  *out = w;
  return LEV_OK;
fail:
  lev_weights_destroy(w);
  return st;
}

void lev_weights_destroy(lev_weights *w) {
  if (!w) return;
  lev_stream_destroy(w->gather); /* waits for what still runs; events belong to the device */
  lev_stream_destroy(w->reduce);
  lev_free(w);
}

void lev_weights_walk(void *weights, lev_walker *walker) {
  lev_weights *w = weights;
  lev_dtype t = w->params->model.dtype;
  w->shard = lev_walk(walker, LEV_MEM_DEVICE, "weights.shard", t, 1, w->params->shard_elements);
  w->grads = lev_walk(walker, LEV_MEM_DEVICE, "grads.shard", w->grad_dtype, 1, w->params->shard_elements);
  for (int i = 0; i < CLASSES; ++i) {
    unit_class *c = &w->classes[i];
    for (int s = 0; s < c->slots; ++s)
      c->slot[s].data = lev_walk(walker, LEV_MEM_DEVICE, "weights.gathered", t, 1, c->elements);
    if (!c->direct && !c->overwritten)
      c->live = lev_walk(walker, LEV_MEM_DEVICE, "grads.live", w->arith, 1, c->elements);
  }
}

lev_status lev_weights_bind(lev_weights *w, const lev_blocks *blocks) {
  lev_walker count = {0};
  lev_weights_walk(w, &count);
  LEV_TRY(lev_blocks_check(&count, blocks, "weights"));
  lev_walker bind = {0};
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) bind.base[c] = blocks->base[c];
  lev_weights_walk(w, &bind);
  return LEV_OK;
}

void *lev_weights_shard(const lev_weights *w) {
  return w->shard;
}
void *lev_weights_grads(const lev_weights *w) {
  return w->grads;
}

/* Address of a unit's part of a flat shard of scalars of `type`. */
static void *in_shard(const lev_unit *unit, void *shard, lev_dtype type) {
  return (unsigned char *)shard + (size_t)unit->shard_offset * lev_dtype_bytes(type);
}

static slot *find(unit_class *c, int unit) {
  for (int s = 0; s < c->slots; ++s)
    if (c->slot[s].unit == unit) return &c->slot[s];
  return NULL;
}

lev_status lev_weights_prefetch(lev_weights *w, int index) {
  const lev_unit *unit = &w->params->units[index];
  unit_class *c = &w->classes[class_of(unit)];
  if (c->slots == 0 || find(c, index)) return LEV_OK;
  /* layers alternate between the slots, so a prefetched neighbour never evicts the layer in use */
  slot *s = &c->slot[unit->layer >= 0 ? unit->layer % c->slots : 0];
  s->unit = index;
  LEV_TRY(lev_stream_wait(w->gather, s->free));
  LEV_TRY(lev_stream_wait(w->gather, w->changed));
  LEV_TRY(lev_comm_all_gather(c->gather, w->gather, in_shard(unit, w->shard, w->params->model.dtype), s->data,
                              unit->counts, w->params->model.dtype));
  return lev_event_record(s->arrived, w->gather);
}

lev_status lev_weights_get(lev_weights *w, int index, lev_stream *compute, const void **out) {
  const lev_unit *unit = &w->params->units[index];
  unit_class *c = &w->classes[class_of(unit)];
  if (c->slots == 0) {
    *out = in_shard(unit, w->shard, w->params->model.dtype);
    return LEV_OK;
  }
  LEV_TRY(lev_weights_prefetch(w, index));
  slot *s = find(c, index);
  *out = s->data;
  return lev_stream_wait(compute, s->arrived);
}

lev_status lev_weights_release(lev_weights *w, int index, lev_stream *compute) {
  slot *s = find(&w->classes[class_of(&w->params->units[index])], index);
  return s ? lev_event_record(s->free, compute) : LEV_OK;
}

lev_status lev_weights_updated(lev_weights *w, lev_stream *compute) {
  for (int c = 0; c < CLASSES; ++c)
    for (int s = 0; s < w->classes[c].slots; ++s) w->classes[c].slot[s].unit = -1;
  return lev_event_record(w->changed, compute);
}

lev_status lev_grads_begin(lev_weights *w, int index, lev_stream *compute, bool first, void **out) {
  const lev_unit *unit = &w->params->units[index];
  unit_class *c = &w->classes[class_of(unit)];
  size_t bytes = lev_bytes(1, unit->elements, lev_dtype_bytes(w->arith));
  if (c->overwritten) {
    *out = in_shard(unit, w->grads, w->grad_dtype);
    return LEV_OK;
  }
  *out = c->direct ? in_shard(unit, w->grads, w->arith) : c->live;
  if (c->direct && !first) return LEV_OK;
  if (!c->direct) LEV_TRY(lev_stream_wait(compute, c->live_free));
  return lev_fill(compute, *out, 0, bytes, "grads.zero");
}

bool lev_grads_overwritten(const lev_weights *w, int index) {
  return w->classes[class_of(&w->params->units[index])].overwritten;
}

lev_status lev_grads_end(lev_weights *w, int index, lev_stream *compute, bool first) {
  const lev_unit *unit = &w->params->units[index];
  unit_class *c = &w->classes[class_of(unit)];
  if (c->direct || c->overwritten) return LEV_OK;
  LEV_TRY(lev_event_record(w->ready, compute));
  LEV_TRY(lev_stream_wait(w->reduce, w->ready));
  LEV_TRY(lev_comm_reduce_scatter(c->reduce, w->reduce, c->live, w->arith, in_shard(unit, w->grads, w->grad_dtype),
                                  w->grad_dtype, unit->counts, !first));
  LEV_TRY(lev_event_record(c->live_free, w->reduce));
  return lev_event_record(w->reduced, w->reduce);
}

lev_status lev_grads_join(lev_weights *w, lev_stream *compute) {
  return lev_stream_wait(compute, w->reduced);
}
