/* SPDX-License-Identifier: Apache-2.0 */
/* Selective checkpoint offload: bounds what the saved layer inputs (and, where asked, the saved attention outputs with
 * their log-sum-exp) hold on the device. Items are moved, never changed: what is read is bit for bit what was written.
 *
 * Which items leave the card is decided when the plan is made, per kind, in exact bytes. `hosted` items are those of
 * the first layers, as many as `fraction` and what is left of the pinned budget allow (boundaries first, then
 * attention), at most L - 2. If any item of a kind is hosted, the layers 0 .. hosted+1 of that kind share two device
 * slots (slot = layer mod 2): the hosted ones are copied out as soon as they are written, and the last two simply stay
 * in their slots, because backward needs them first. All later layers have a place of their own on the card. Device
 * bytes of a kind with item stride s (bytes rounded up to LEV_ALIGN):
 *
 *     hosted > 0:  s x (2 + L - hosted - 2) = s x (L - hosted)        hosted = 0:  s x L
 *
 * and pinned bytes s x hosted. So with room for all of them the card holds two items, whatever the depth.
 *
 * One micro-batch: write layers 0 .. L-1 in this order, then read and release L-1 .. 0, then sco_reset.
 *
 *     sco_write_begin(plan, l, SCO_BOUNDARY, stream, &h);      forward, layer l; kernels on `stream` write h
 *     sco_write_end(plan, l, SCO_BOUNDARY, bytes, stream);     the copy-out starts once `stream` gets here
 *     ...
 *     sco_read(plan, l, SCO_BOUNDARY, stream, &h);             backward, layer l: `stream` waits for the restore
 *     sco_prefetch(plan, l - 1, SCO_BOUNDARY, stream);         its restore runs while l computes
 *     ...                                                      kernels on `stream` read h
 *     sco_release(plan, l, SCO_BOUNDARY, stream);
 *
 * All calls between two resets name the same compute stream. Calls are made by the one host thread that drives the
 * device; none of them waits on the host or allocates. Source: Nguyen, Pandit, Zhao, Joty, arXiv:2609.14306,
 * section 3.3. */
#ifndef LEV_SCO_SCO_H
#define LEV_SCO_SCO_H

#include <stdbool.h>

#include "common/device.h"
#include "common/walker.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sco_kind {
  SCO_BOUNDARY,  /* layer input [N, H] */
  SCO_ATTENTION, /* attention output [N, A*d] and log-sum-exp [N, A], packed by the caller */
  SCO_KINDS
} sco_kind;

typedef enum sco_schedule {
  SCO_BOUNDED, /* two slots and a pinned budget */
  SCO_PLAIN    /* every item stays on the card; nothing is copied */
} sco_schedule;

typedef enum sco_phase { SCO_PERSISTENT, SCO_PHASES } sco_phase;

/* Start from sco_config_default(). */
typedef struct sco_config {
  size_t size;                  /* sizeof(sco_config) */
  int layers;                   /* L >= 1 */
  size_t item_bytes[SCO_KINDS]; /* cap in bytes of one layer's item; 0 = this kind is not kept */
  size_t host_budget;           /* pinned bytes; SIZE_MAX = unlimited, 0 = nothing is hosted */
  size_t device_budget;         /* device bytes; SIZE_MAX = unlimited. Only checked: it moves no item */
  double fraction;              /* upper bound, 0 .. 1, on the share of the L items of a kind that is hosted */
  sco_schedule schedule;
} sco_config;

/* Bounded, both budgets unlimited, fraction 1, no layers and no items yet. */
sco_config sco_config_default(void);
/* Same checks as sco_plan_create, without making anything. Errors: LEV_ERR_ARG, LEV_ERR_BUDGET. */
LEV_MUST_CHECK lev_status sco_supports(const sco_config *config);

typedef struct sco_plan sco_plan;

/* Decides what is hosted and creates the plan's copy-out and restore streams on `device`, which outlives the plan; the
 * config is copied. Errors: LEV_ERR_ARG (a field out of range), LEV_ERR_BUDGET (device_budget: says the device bytes
 * needed as configured, and with an unlimited pinned budget and fraction 1), LEV_ERR_NOMEM, LEV_ERR_DEVICE. */
LEV_MUST_CHECK lev_status sco_plan_create(lev_device *device, const sco_config *config, sco_plan **out);
/* Waits for the plan's own copies; never frees the bound blocks. NULL is fine. */
void sco_plan_destroy(sco_plan *plan);

/* Bytes of each memory class. SCO_PERSISTENT is the only phase: an item outlives the phases it is written in. */
void sco_plan_bytes(const sco_plan *plan, sco_phase phase, size_t bytes[LEV_MEM_CLASSES]);
/* The regions, in the order in which they lie in their class's block, each where it has bytes. Device: the slots of
 * boundaries (sco.boundary), the slots of attention outputs (sco.slots), the items that stay (sco.boundary,
 * sco.attention); pinned: sco.boundary, sco.attention. So sco.boundary is all L layer inputs, wherever they lie. */
void sco_plan_regions(const sco_plan *plan, sco_phase phase, lev_region_fn fn, void *ctx);
/* lev_walk_fn of SCO_PERSISTENT, for lev_blocks_take. It only describes: pointers are set by sco_plan_bind. */
void sco_walk(void *plan, lev_walker *walker);
/* Uses the caller's blocks, which must outlive the plan's last copy. Errors: LEV_ERR_CAPACITY (a block is too small),
 * LEV_ERR_ARG (alignment), LEV_ERR_MISUSE (bound before). */
LEV_MUST_CHECK lev_status sco_plan_bind(sco_plan *plan, sco_phase phase, const lev_blocks *blocks);

/* Number of items of a kind that are copied to the host. */
int sco_hosted(const sco_plan *plan, sco_kind kind);
/* The two copy streams (never NULL), e.g. to name them in a trace. */
void sco_streams(const sco_plan *plan, lev_stream **copy_out, lev_stream **restore);

/* Gives in *ptr the device address (item_bytes[kind] bytes, LEV_ALIGN aligned) that `compute` may write from now on;
 * `compute` is made to wait until the slot's earlier copy-out has finished. Errors of this and all calls below:
 * LEV_ERR_ARG (layer or kind out of range), LEV_ERR_MISUSE (plan not bound; kind not kept; another compute stream; the
 * item or its slot is not in the state that the call needs: the detail names layer, owner and state), LEV_ERR_DEVICE.
 */
LEV_MUST_CHECK lev_status sco_write_begin(sco_plan *plan, int layer, sco_kind kind, lev_stream *compute, void **ptr);
/* The item's first `bytes` bytes (0 is legal) are written once `compute` reaches this point. A hosted item is then
 * copied out on the copy-out stream. `compute` may go on reading a hosted item at *ptr until the second next
 * sco_write_begin of this kind (that one may take the same slot), any other item until its sco_release or sco_reset. It
 * must not write it again. Errors: LEV_ERR_CAPACITY (bytes above item_bytes). */
LEV_MUST_CHECK lev_status sco_write_end(sco_plan *plan, int layer, sco_kind kind, size_t bytes, lev_stream *compute);

/* Starts restoring the item into its slot, after the slot's last owner was released on `compute`. Nothing to do
 * (LEV_OK) where the item is on the card already: not hosted, still in its slot since forward, or prefetched before. */
LEV_MUST_CHECK lev_status sco_prefetch(sco_plan *plan, int layer, sco_kind kind, lev_stream *compute);
/* Gives in *ptr the item as it was written, at the address of its sco_write_begin; `compute` may read it until
 * sco_release. Starts the restore if sco_prefetch has not. May be called again before the release. */
LEV_MUST_CHECK lev_status sco_read(sco_plan *plan, int layer, sco_kind kind, lev_stream *compute, void **ptr);
/* Ends the read: once `compute` reaches this point, the slot may be restored into. An item is released once per
 * micro-batch. */
LEV_MUST_CHECK lev_status sco_release(sco_plan *plan, int layer, sco_kind kind, lev_stream *compute);

/* Forgets all items, whatever their state (also after an evaluation that only wrote), for the next micro-batch. Does
 * not wait: copies still in flight are waited for by the writes that reuse their slots. Another compute stream may
 * follow, if the caller orders it after the old one. */
LEV_MUST_CHECK lev_status sco_reset(sco_plan *plan);

/* Totals since the plan was created; they depend only on the calls made. */
typedef struct sco_counters {
  int64_t items_out, items_in; /* copies enqueued */
  uint64_t bytes_out, bytes_in;
  int64_t kept; /* reads of items that the plan sends through slots and that were still there from forward */
} sco_counters;
sco_counters sco_count(const sco_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
