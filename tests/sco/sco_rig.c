/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sco/sco_rig.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/rng.h"
#include "tests/backend.h"

typedef struct item_args {
  rig *r;
  unsigned char *at;
  size_t bytes;
  int delay_us, mb, layer, kind;
} item_args;

/* On a GPU items are written and read by copies on the compute stream, from and to pinned memory that stays until the
 * stream has come to its end. */
struct rig_staged {
  struct rig_staged *next;
  item_args item; /* at = the pinned copy */
  bool check;
};

static void nap(int us) {
  if (us > 0) nanosleep(&(struct timespec){.tv_nsec = us * 1000L}, NULL);
}

/* Word i of the item; items are written and read by whole words, the last one cut. (Word accesses also leave
 * ThreadSanitizer, which remembers four accesses a word, with a history that reaches back to the other stream's.) */
static uint64_t word_of(const item_args *a, size_t i) {
  lev_rng_key key = {.seed = 77, .step = (uint32_t)a->mb, .tensor = (uint32_t)(a->layer * SCO_KINDS + a->kind)};
  return lev_rng_u64(key, i);
}

static void write_item(const void *args) {
  const item_args *a = args;
  nap(a->delay_us);
  for (size_t i = 0; i < a->bytes; i += 8) {
    uint64_t word = word_of(a, i / 8);
    if (a->bytes - i >= 8)
      *(uint64_t *)(void *)(a->at + i) = word;
    else
      memcpy(a->at + i, &word, a->bytes - i);
  }
}

static void check_item(const void *args) {
  const item_args *a = args;
  nap(a->delay_us);
  for (size_t i = 0; i < a->bytes; i += 8) {
    uint64_t want = word_of(a, i / 8), got = 0;
    if (a->bytes - i >= 8)
      got = *(const uint64_t *)(const void *)(a->at + i);
    else
      memcpy(&got, a->at + i, a->bytes - i);
    for (size_t b = 0; b < 8 && i + b < a->bytes; ++b) a->r->wrong += (got >> 8 * b & 0xff) != (want >> 8 * b & 0xff);
    a->r->digest = (a->r->digest ^ got) * 0x9E3779B97F4A7C15u;
  }
}

static void sleep_only(const void *args) {
  nap(((const item_args *)args)->delay_us);
}

static const lev_kernel write_kernel = {.name = "test.write", .cpu = write_item};
static const lev_kernel check_kernel = {.name = "test.check", .cpu = check_item};
static const lev_kernel sleep_kernel = {.name = "test.sleep", .cpu = sleep_only};

static lev_status stage(rig *r, item_args item, bool check) {
  struct rig_staged *s = malloc(sizeof *s), **end = &r->staged;
  void *device = item.at;
  item.at = t_alloc(item.bytes), item.delay_us = 0;
  *s = (struct rig_staged){NULL, item, check};
  while (*end) end = &(*end)->next;
  *end = s;
  if (check) return lev_copy(r->compute, item.at, device, item.bytes, "test.check");
  write_item(&item);
  return lev_copy(r->compute, device, item.at, item.bytes, "test.write");
}

/* After a wait for the compute stream: what came back is checked. */
static void end_staged(rig *r) {
  while (r->staged) {
    struct rig_staged *s = r->staged;
    if (s->check) check_item(&s->item);
    r->staged = s->next;
    t_free(s->item.at);
    free(s);
  }
}

bool rig_open(rig *r, lev_backend backend, const sco_config *config, uint64_t jitter) {
  r->config = *config;
  bool ok = T_EXPECT_OK(lev_trace_create(4096, &r->trace)) && T_EXPECT_OK(lev_ledger_create(r->trace, &r->ledger));
  lev_device_config dc = {.backend = backend, .jitter_seed = jitter, .trace = r->trace, .fault = &r->fault};
  ok = ok && T_EXPECT_OK(lev_device_open(&dc, &r->device)) &&
       T_EXPECT_OK(lev_stream_create(r->device, "compute", &r->compute)) &&
       T_EXPECT_OK(sco_plan_create(r->device, config, &r->plan));
  if (!ok) return false;
  size_t bytes[LEV_MEM_CLASSES];
  sco_plan_bytes(r->plan, SCO_PERSISTENT, bytes);
  for (int c = 0; c < LEV_MEM_CLASSES && ok; ++c) {
    ok = T_EXPECT_OK(lev_device_alloc(r->device, (lev_mem)c, bytes[c], &r->slab[c]));
    ok = ok && T_EXPECT_OK(lev_arena_create(r->device, r->ledger, (lev_mem)c, r->slab[c], bytes[c], &r->arena[c]));
    if (ok && backend == LEV_BACKEND_CPU) memset(r->slab[c], 0xFF, bytes[c]);
    if (ok && backend == LEV_BACKEND_CUDA) ok = T_EXPECT_OK(lev_fill(r->compute, r->slab[c], 0xFF, bytes[c], "poison"));
  }
  lev_blocks blocks;
  ok = ok && T_EXPECT_OK(lev_stream_sync(r->compute));
  return ok && T_EXPECT_OK(lev_blocks_take(r->arena, false, sco_walk, r->plan, &blocks)) &&
         T_EXPECT_OK(sco_plan_bind(r->plan, SCO_PERSISTENT, &blocks));
}

void rig_close(rig *r) {
  sco_plan_destroy(r->plan);
  if (r->compute) lev_stream_destroy(r->compute); /* waits: kernels write into the rig */
  end_staged(r);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) lev_arena_destroy(r->arena[c]);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c)
    if (r->slab[c]) lev_device_free(r->device, r->slab[c]);
  lev_device_close(r->device);
  lev_ledger_destroy(r->ledger);
  lev_trace_destroy(r->trace);
}

size_t rig_item_bytes(const rig *r, int mb, int layer, int kind) {
  size_t cap = r->config.item_bytes[kind];
  if (r->full) return cap;
  if ((mb + layer) % 5 == 4) return 0;
  return cap - (size_t)(layer + mb) % (cap / 2 + 1);
}

lev_status rig_delay(rig *r, lev_stream *stream, int us) {
  item_args a = {.r = r, .delay_us = us};
  bool cuda = lev_device_backend(r->device) == LEV_BACKEND_CUDA;
  return us > 0 && !cuda ? LEV_LAUNCH(stream, &sleep_kernel, a) : LEV_OK;
}

static lev_status item_op(rig *r, const lev_kernel *kernel, void *at, int mb, int layer, int kind) {
  item_args a = {.r = r,
                 .at = at,
                 .bytes = rig_item_bytes(r, mb, layer, kind),
                 .delay_us = r->slow_compute,
                 .mb = mb,
                 .layer = layer,
                 .kind = kind};
  if (lev_device_backend(r->device) == LEV_BACKEND_CUDA) return stage(r, a, kernel == &check_kernel);
  return LEV_LAUNCH(r->compute, kernel, a);
}

lev_status rig_forward(rig *r, int mb, int layers) {
  lev_stream *out, *in;
  sco_streams(r->plan, &out, &in);
  void *at[SCO_KINDS] = {NULL}, *before[SCO_KINDS] = {NULL};
  for (int l = 0; l < layers; ++l) {
    for (int k = 0; k < SCO_KINDS; ++k) {
      if (r->config.item_bytes[k] == 0) continue;
      LEV_TRY(sco_write_begin(r->plan, l, (sco_kind)k, r->compute, &at[k]));
      LEV_TRY(item_op(r, &write_kernel, at[k], mb, l, k));
      LEV_TRY(rig_delay(r, out, r->slow_out));
      LEV_TRY(sco_write_end(r->plan, l, (sco_kind)k, rig_item_bytes(r, mb, l, k), r->compute));
      if (before[k]) LEV_TRY(item_op(r, &check_kernel, before[k], mb, l - 1, k));
      before[k] = at[k];
    }
  }
  return LEV_OK;
}

lev_status rig_backward(rig *r, int mb, int layers, int from, bool prefetch) {
  lev_stream *out, *in;
  sco_streams(r->plan, &out, &in);
  for (int l = layers - 1; l >= from; --l) {
    void *at[SCO_KINDS] = {NULL};
    for (int k = 0; k < SCO_KINDS; ++k) {
      if (r->config.item_bytes[k] == 0) continue;
      LEV_TRY(rig_delay(r, in, r->slow_in));
      LEV_TRY(sco_read(r->plan, l, (sco_kind)k, r->compute, &at[k]));
      LEV_TRY(rig_delay(r, in, r->slow_in));
      if (prefetch && l > 0) LEV_TRY(sco_prefetch(r->plan, l - 1, (sco_kind)k, r->compute));
    }
    for (int k = SCO_KINDS - 1; k >= 0; --k) {
      if (!at[k]) continue;
      LEV_TRY(item_op(r, &check_kernel, at[k], mb, l, k));
      LEV_TRY(sco_release(r->plan, l, (sco_kind)k, r->compute));
    }
  }
  return LEV_OK;
}

lev_status rig_sync(rig *r) {
  lev_stream *out, *in;
  sco_streams(r->plan, &out, &in);
  LEV_TRY(lev_stream_sync(out));
  LEV_TRY(lev_stream_sync(in));
  LEV_TRY(lev_stream_sync(r->compute));
  end_staged(r);
  return LEV_OK;
}

lev_status rig_run(rig *r, int n, bool prefetch) {
  for (int mb = 0; mb < n; ++mb) {
    LEV_TRY(rig_forward(r, mb, r->config.layers));
    LEV_TRY(rig_backward(r, mb, r->config.layers, 0, prefetch));
    LEV_TRY(sco_reset(r->plan));
  }
  return rig_sync(r);
}
