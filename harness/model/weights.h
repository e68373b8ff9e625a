/* SPDX-License-Identifier: Apache-2.0 */
/* Weights and gradients of one rank: the flat shard it stores, the gathered units it computes with, and the live
 * gradients on their way back to the shards.
 *
 * A unit stored by this rank alone is used in place. Any other is all-gathered into a slot; dense layers and replicated
 * experts have two slots, so the next layer travels while this one computes (ZeRO-3, two layers live). Gradients of a
 * unit are summed in the arithmetic type A while its layer is live, then reduce-scattered into the shard's gradient
 * (grad_dtype). Where this rank alone stores the unit and grad_dtype is A, they are summed in the shard directly; where
 * it alone stores the experts and each expert's gradient is a single product, the product itself writes the shard. */
#ifndef LEV_MODEL_WEIGHTS_H
#define LEV_MODEL_WEIGHTS_H

#include "common/comm.h"
#include "common/walker.h"
#include "harness/model/params.h"

/* Communicators over the replicas of each unit class; [0] gathers, [1] reduces. Owned by the caller. */
typedef struct lev_weight_comms {
  lev_comm *dense[2], *experts[2], *vocab[2];
} lev_weight_comms;

typedef struct lev_weights lev_weights;

/* single_products: the gradients of experts are written in one piece, once per step, by whoever computes them. */
LEV_MUST_CHECK lev_status lev_weights_create(lev_device *device, const lev_params *params,
                                             const lev_weight_comms *comms, lev_dtype grad_dtype, bool single_products,
                                             lev_weights **out);
void lev_weights_destroy(lev_weights *weights);
/* Persistent regions: weights.shard, weights.gathered, grads.shard, grads.live. A lev_walk_fn. */
void lev_weights_walk(void *weights, lev_walker *walker);
LEV_MUST_CHECK lev_status lev_weights_bind(lev_weights *weights, const lev_blocks *blocks);

/* The flat shards: T [shard_elements] and grad_dtype [shard_elements]. */
void *lev_weights_shard(const lev_weights *weights);
void *lev_weights_grads(const lev_weights *weights);

/* Starts gathering a unit ahead of its use (no-op when used in place or already under way). */
LEV_MUST_CHECK lev_status lev_weights_prefetch(lev_weights *weights, int unit);
/* The whole unit, T [elements]; `compute` is made to wait for it. Valid until lev_weights_release. */
LEV_MUST_CHECK lev_status lev_weights_get(lev_weights *weights, int unit, lev_stream *compute, const void **out);
LEV_MUST_CHECK lev_status lev_weights_release(lev_weights *weights, int unit, lev_stream *compute);
/* Forgets gathered copies: call after the shards changed. `compute` is the stream that changed them. */
LEV_MUST_CHECK lev_status lev_weights_updated(lev_weights *weights, lev_stream *compute);

/* Zeroed live gradient of a unit, A [elements], for kernels of `compute` to add to; where lev_grads_overwritten, the
 * gradient in the shard instead, T [elements], not zeroed, for them to write. `first`: first micro-batch of the step.
 */
LEV_MUST_CHECK lev_status lev_grads_begin(lev_weights *weights, int unit, lev_stream *compute, bool first, void **out);
/* Whether the gradient of this unit is written once, as T, and not added up in A. */
bool lev_grads_overwritten(const lev_weights *weights, int unit);
/* All additions are enqueued on `compute`: sends the sum home on the reduce stream. */
LEV_MUST_CHECK lev_status lev_grads_end(lev_weights *weights, int unit, lev_stream *compute, bool first);
/* Makes `compute` wait for everything sent home. */
LEV_MUST_CHECK lev_status lev_grads_join(lev_weights *weights, lev_stream *compute);

#endif
