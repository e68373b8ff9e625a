/* SPDX-License-Identifier: Apache-2.0 */
/* sco alone: a chain of eight layers, h[l+1] = tanh(a[l] h[l]), whose layer inputs are kept for backward. Room for
 * three of them on the host leaves five on the card instead of eight. Memory comes in plain blocks, without arenas. */
#include "sco/sco.h"

#include <math.h>
#include <stdio.h>

#include "example.h"

enum { LAYERS = 8, N = 1024 };
#define ITEM (N * sizeof(double))

typedef struct chain {
  double in[N], a[LAYERS];
  double out[N], dh[N], da[LAYERS]; /* results: output, gradient of sum(out) by `in` and by each a */
} chain;

/* The program's own kernels: they run on a stream, in order with sco's copies. */
typedef struct layer_args {
  const double *h;
  double *next, *dh, *da, a;
} layer_args;

static void forward(const void *args) {
  const layer_args *k = args;
  for (int i = 0; i < N; ++i) k->next[i] = tanh(k->a * k->h[i]);
}

static void backward(const void *args) { /* dh: gradient by the layer's output in, by its input out */
  const layer_args *k = args;
  for (int i = 0; i < N; ++i) {
    double t = tanh(k->a * k->h[i]), dz = k->dh[i] * (1 - t * t);
    *k->da += dz * k->h[i];
    k->dh[i] = dz * k->a;
  }
}

static const lev_kernel forward_kernel = {.name = "example.forward", .cpu = forward};
static const lev_kernel backward_kernel = {.name = "example.backward", .cpu = backward};

/* A plain block is the caller's: so the caller tells the ledger what is in it. */
typedef struct posting {
  lev_ledger *ledger;
  lev_status status;
} posting;

static void post(void *ctx, const lev_region *region) {
  posting *p = ctx;
  ex_print_region(NULL, region);
  if (p->status == LEV_OK) p->status = lev_ledger_add(p->ledger, region->cls, region->tag, region->bytes);
}

static lev_status take_memory(ex_rank *r, sco_plan *plan, size_t planned[LEV_MEM_CLASSES]) {
  lev_blocks blocks = {0};
  posting p = {r->ledger, LEV_OK};
  sco_plan_bytes(plan, SCO_PERSISTENT, planned);
  printf("planned: %d of %d layer inputs go to the host\n", sco_hosted(plan, SCO_BOUNDARY), LAYERS);
  sco_plan_regions(plan, SCO_PERSISTENT, post, &p);
  LEV_TRY(p.status);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    if (planned[c] == 0) continue;
    LEV_TRY(lev_device_alloc(r->device, (lev_mem)c, planned[c], &blocks.base[c]));
    blocks.bytes[c] = planned[c];
  }
  return sco_plan_bind(plan, SCO_PERSISTENT, &blocks);
}

static lev_status train(ex_rank *r, chain *m, sco_plan *plan) {
  size_t planned[LEV_MEM_CLASSES];
  LEV_TRY(take_memory(r, plan, planned));
  void *out, *dh, *da, *h, *next;
  LEV_TRY(ex_array(r, NULL, ITEM, &out));
  LEV_TRY(ex_array(r, NULL, ITEM, &dh));
  LEV_TRY(ex_array(r, NULL, sizeof m->da, &da));
  lev_device_seal(r->device); /* from now on, an allocation is an error */

  LEV_TRY(sco_write_begin(plan, 0, SCO_BOUNDARY, r->stream, &h));
  LEV_TRY(lev_copy(r->stream, h, m->in, ITEM, "example.in"));
  LEV_TRY(sco_write_end(plan, 0, SCO_BOUNDARY, ITEM, r->stream));
  for (int l = 0; l < LAYERS; ++l, h = next) { /* each layer writes the next one's input where sco wants it */
    bool last = l == LAYERS - 1;
    next = out;
    if (!last) LEV_TRY(sco_write_begin(plan, l + 1, SCO_BOUNDARY, r->stream, &next));
    layer_args k = {.h = h, .next = next, .a = m->a[l]};
    LEV_TRY(LEV_LAUNCH(r->stream, &forward_kernel, k));
    if (!last) LEV_TRY(sco_write_end(plan, l + 1, SCO_BOUNDARY, ITEM, r->stream));
  }
  for (int i = 0; i < N; ++i) m->dh[i] = 1;
  LEV_TRY(lev_copy(r->stream, dh, m->dh, ITEM, "example.in"));
  for (int l = LAYERS - 1; l >= 0; --l) { /* the restore of layer l - 1 runs while l computes */
    LEV_TRY(sco_read(plan, l, SCO_BOUNDARY, r->stream, &h));
    if (l > 0) LEV_TRY(sco_prefetch(plan, l - 1, SCO_BOUNDARY, r->stream));
    layer_args k = {.h = h, .dh = dh, .da = (double *)da + l, .a = m->a[l]};
    LEV_TRY(LEV_LAUNCH(r->stream, &backward_kernel, k));
    LEV_TRY(sco_release(plan, l, SCO_BOUNDARY, r->stream));
  }
  LEV_TRY(sco_reset(plan)); /* ready for the next micro-batch */

  LEV_TRY(lev_copy(r->stream, m->out, out, ITEM, "example.out"));
  LEV_TRY(lev_copy(r->stream, m->dh, dh, ITEM, "example.out"));
  LEV_TRY(lev_copy(r->stream, m->da, da, sizeof m->da, "example.out"));
  LEV_TRY(lev_stream_sync(r->stream));
  sco_counters n = sco_count(plan);
  printf("copied out %lld inputs, restored %lld, %lld were still in their slots\n", (long long)n.items_out,
         (long long)n.items_in, (long long)n.kept);
  return ex_as_planned(r, planned);
}

static lev_status body(ex_rank *r, void *ctx) {
  sco_config config = sco_config_default();
  config.layers = LAYERS, config.item_bytes[SCO_BOUNDARY] = ITEM;
  config.host_budget = 3 * ITEM;

  sco_plan *plan;
  config.device_budget = 4 * ITEM; /* too small: the error says what is needed, and what more host memory would do */
  LEV_TRY(ex_refused(r, config.device_budget, sco_plan_create(r->device, &config, &plan)));

  config.device_budget = 5 * ITEM;
  LEV_TRY(sco_plan_create(r->device, &config, &plan));
  lev_status status = train(r, ctx, plan);
  sco_plan_destroy(plan);
  return status;
}

int main(void) {
  static chain m;
  static double h[LAYERS + 1][N], dh[N], da[LAYERS]; /* the same with every input kept in an array of its own */
  ex_random(m.in, N, 1, 1), ex_random(m.a, LAYERS, 1, 2);
  if (!ex_run(1, body, &m)) return 1;
  for (int i = 0; i < N; ++i) {
    h[0][i] = m.in[i], dh[i] = 1;
    for (int l = 0; l < LAYERS; ++l) h[l + 1][i] = tanh(m.a[l] * h[l][i]);
    for (int l = LAYERS - 1; l >= 0; --l) {
      double dz = dh[i] * (1 - h[l + 1][i] * h[l + 1][i]);
      da[l] += dz * h[l][i], dh[i] = dz * m.a[l];
    }
  }
  bool ok = ex_close("out", m.out, h[LAYERS], N, 1e-14);
  ok &= ex_close("dh", m.dh, dh, N, 1e-14);
  return ex_close("da", m.da, da, LAYERS, 1e-13) && ok ? 0 : 1;
}
