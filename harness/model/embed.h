/* SPDX-License-Identifier: Apache-2.0 */
/* Vocabulary-sharded embedding: ids go out, rows come back, no rank ever holds more than its V/P rows of the table.
 *
 * Tokens are taken in rounds of at most `tile_tokens` per rank. In a round every rank learns the ids of all ranks, puts
 * the rows it owns into a [P * tile_tokens, H] buffer, zeros elsewhere, and a reduce-scatter hands each rank its rows:
 * exact, since exactly one summand is not zero. The gradient goes the other way: rows of all ranks are gathered, and
 * each owner adds those of its ids, by round, source rank and token, without atomics. Nothing waits on the host and
 * every buffer is a fixed size, whatever the ids are. */
#ifndef LEV_HARNESS_MODEL_EMBED_H
#define LEV_HARNESS_MODEL_EMBED_H

#include <stddef.h>
#include <stdint.h>

#include "common/comm.h"
#include "common/device.h"
#include "common/status.h"
#include "common/walker.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct embed_config {
  size_t size;         /* sizeof(embed_config), set by embed_config_init */
  int64_t max_tokens;  /* cap on N of any rank of the group; the same value on all ranks */
  int64_t hidden;      /* H */
  int64_t vocab;       /* V, at most 2^31 - 1 */
  lev_dtype dtype;     /* T of table and rows: f64, f32 or bf16 */
  int64_t tile_tokens; /* tokens per rank and round; 0 = 256 */
} embed_config;

/* Defaults: everything zero but `size` and dtype f32. */
void embed_config_init(embed_config *config);

typedef struct embed_plan embed_plan;

/* `device` and `comm` (the vocabulary group, P ranks) are borrowed until embed_destroy. Creates a communication stream
 * and events, no data-plane memory; every rank passes the same configuration. Errors: LEV_ERR_CONFIG, LEV_ERR_ARG,
 * LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status embed_plan_create(lev_device *device, lev_comm *comm, const embed_config *config,
                                            embed_plan **out);
/* Never frees caller memory; the streams it was used on must be idle. NULL is fine. */
void embed_destroy(embed_plan *plan);

/* PERSISTENT is empty. STEP serves forward and backward: embed.ids 2 x [P * tile_tokens] i32 and embed.rows 2 x [P *
 * tile_tokens, H] T, device, independent of N and V; nothing where P = 1. */
typedef enum embed_phase { EMBED_PERSISTENT, EMBED_STEP, EMBED_PHASES } embed_phase;
void embed_plan_bytes(const embed_plan *plan, embed_phase phase, size_t bytes[LEV_MEM_CLASSES]);
void embed_plan_regions(const embed_plan *plan, embed_phase phase, lev_region_fn list, void *ctx);
void embed_walk_persistent(void *plan, lev_walker *walker);
void embed_walk_step(void *plan, lev_walker *walker);
/* Errors: LEV_ERR_CAPACITY (asked and given), LEV_ERR_ARG. */
LEV_MUST_CHECK lev_status embed_plan_bind(embed_plan *plan, embed_phase phase, const lev_blocks *blocks);

/* Device pointers unless noted; none may overlap another. */
typedef struct embed_forward_args {
  int64_t tokens;             /* N of this rank */
  const int64_t *rank_tokens; /* host [P], read during the call; NULL = all have `tokens` */
  const int32_t *ids;         /* [N]; an id outside [0,V) gives a zero row */
  const void *w;              /* [Vr,H] T: rows [lev_part_begin(V,P,r), lev_part_begin(V,P,r+1)) of the table */
  void *out;                  /* [N,H] T, overwritten */
} embed_forward_args;

typedef struct embed_backward_args {
  int64_t tokens;
  const int64_t *rank_tokens;
  const int32_t *ids; /* [N]; an id outside [0,V) is skipped */
  const void *dout;   /* [N,H] T */
  void *dw;           /* [Vr,H] A (lev_dtype_arith), += */
} embed_backward_args;

/* Enqueued on `stream` and on the plan's communication stream, which is joined back before the call returns.
 * Collective, same sizes on all ranks; allocates nothing, never waits on the host. Errors, before any collective:
 * LEV_ERR_MISUSE (not bound), LEV_ERR_CAPACITY (tokens above max_tokens), LEV_ERR_ARG; afterwards those of lev_comm and
 * lev_device. */
LEV_MUST_CHECK lev_status embed_forward(embed_plan *plan, const embed_forward_args *args, lev_stream *stream);
LEV_MUST_CHECK lev_status embed_backward(embed_plan *plan, const embed_backward_args *args, lev_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
