/* SPDX-License-Identifier: Apache-2.0 */
/* Everything one rank owns: device, arenas, communicators, module plans, and the buffers of a training step.
 * The same object runs on every backend; on the dry one it is the memory plan.
 *
 * A step follows one token like this: batch.c (which tokens) -> step.c (order of a step) -> layer.c (one decoder layer,
 * forward and backward) -> the modules. */
#ifndef LEV_TRAIN_RANK_H
#define LEV_TRAIN_RANK_H

#include "common/arena.h"
#include "common/comm.h"
#include "common/device.h"
#include "common/dims.h"
#include "common/ledger.h"
#include "harness/config/config.h"
#include "harness/data/loader.h"
#include "harness/model/attention.h"
#include "harness/model/embed.h"
#include "harness/model/params.h"
#include "harness/model/weights.h"
#include "muon/muon.h"
#include "offload_adamw/offload_adamw.h"
#include "pipelined_llep/pipelined_llep.h"
#include "ring_dtp/ring_dtp.h"
#include "sco/sco.h"

/* Most ranks of a world. */
#define LEV_RANKS_MAX 4096

/* Where the run will take place, which is also what a dry run plans for. auto: cuda where lev_device_count finds a GPU.
 */
static inline lev_backend lev_run_backend(const lev_config *config) {
  if (config->run.device == LEV_DEVICE_AUTO)
    return lev_device_count(LEV_BACKEND_CUDA) > 0 ? LEV_BACKEND_CUDA : LEV_BACKEND_CPU;
  return config->run.device == LEV_DEVICE_CUDA ? LEV_BACKEND_CUDA : LEV_BACKEND_CPU;
}

/* What the driver's context, kernels, cuBLAS and cuDNN may take of a GPU beside the slabs, where memory.context_reserve
 * is auto. An H200 counted 0.54 GiB with one rank and cuDNN, 0.55 with four. */
#define LEV_CONTEXT_RESERVE ((size_t)1 << 30)
static inline size_t lev_context_reserve(const lev_config *config) {
  if (config->memory.context_reserve != LEV_SIZE_AUTO) return config->memory.context_reserve;
  return lev_run_backend(config) == LEV_BACKEND_CUDA ? LEV_CONTEXT_RESERVE : 0;
}

/* The same of a GPU that `ranks` ranks share: auto once, a number is each rank's part. */
static inline size_t lev_gpu_reserve(const lev_config *config, int ranks) {
  size_t reserve = lev_context_reserve(config);
  return config->memory.context_reserve == LEV_SIZE_AUTO ? reserve : lev_sat_mul(reserve, (size_t)ranks);
}

/* Most bytes of a rank's device slab: memory.device_memory, what the rank has of its GPU, less the reserve; 0 or
 * SIZE_MAX, as it was given, = no limit. A reserve that takes all of it leaves one byte, into which nothing fits. */
static inline size_t lev_device_limit(const lev_config *config) {
  size_t device = config->memory.device_memory, reserve = lev_context_reserve(config);
  if (device == 0 || device == SIZE_MAX) return device;
  return device > reserve ? device - reserve : 1;
}

/* Bytes of the three slabs of a rank, as a dry run found them. */
typedef struct lev_slabs {
  size_t bytes[LEV_MEM_CLASSES];
} lev_slabs;

typedef struct lev_rank_options {
  const lev_config *config;
  lev_device *device;
  lev_comm *world;
  lev_ledger *ledger;     /* outlives the rank */
  const lev_slabs *slabs; /* NULL on the dry backend: unlimited fake slabs */
} lev_rank_options;

/* Communicators of a rank; each is used from one stream only. */
typedef struct lev_groups {
  lev_comm *stats, *context, *experts, *vocab, *embed;
  lev_weight_comms weights;
} lev_groups;

/* What a forward pass does with the routes it chooses; the balance loss needs their counts over the whole batch. */
typedef enum lev_counting {
  LEV_COUNT_OFF,    /* nothing: evaluation, and whenever no balance loss is on or the counts are already known */
  LEV_COUNT_LOCAL,  /* adds them up on this rank: a pass of its own over all micro-batches, before the step's */
  LEV_COUNT_GLOBAL, /* adds them up and over ranks, layer by layer: one micro-batch is the whole batch */
} lev_counting;

/* One micro-batch as this rank sees it. */
typedef struct lev_batch {
  int64_t seq_len;      /* S, or 0 when this rank's context group has no sequence this time */
  int64_t tokens;       /* N of this rank */
  int64_t *rank_tokens; /* [W], N of every rank */
} lev_batch;

typedef struct lev_rank {
  const lev_config *config;
  lev_device *device;
  lev_ledger *ledger;
  lev_arena *arena[LEV_MEM_CLASSES];
  void *slab[LEV_MEM_CLASSES];
  lev_params *params;
  lev_comm *world;
  lev_groups groups;
  lev_stream *compute;
  lev_weights *weights;
  attn_plan *attention;
  embed_plan *embed;
  llep_plan *llep;
  rdtp_plan *rdtp;
  sco_plan *sco;
  oadamw_plan *adamw;
  muon_plan *muon;
  int64_t max_tokens; /* N cap of any rank */
  int micro_batches;  /* per step */
  lev_counting counting;
  lev_dtype grad_dtype; /* of stored gradients */

  /* device, persistent */
  void *hidden;                        /* T [N, H]: last layer's output, then the gradient that travels down */
  int32_t *ids;                        /* [M, N, k] chosen experts; M layers have some */
  int64_t *counts;                     /* [M, E] assignments over the batch, summed over ranks */
  int32_t *tokens, *labels, *position; /* [N] */
  void *route_bias;                    /* A [M, E] selection bias, the same on every rank; with model.route_bias */
  int64_t *doc_begin;                  /* [N] position at which each token's document begins; NULL unless packed */
  double *sums;                        /* f64 scalars of a step, see lev_rank_sums */
  double *norm_scratch;
  /* pinned and host */
  int32_t *batch_pinned; /* [3, N] staging of tokens, labels, positions */
  double *sums_pinned;
  void *route_bias_pinned;   /* A [M, E], for checkpoints */
  int64_t *doc_begin_pinned; /* attention reads it too */
  int32_t *sequence;         /* host [2, S]: tokens and labels of a whole sequence */
  int32_t *documents;        /* host [S + 1], see lev_loader_documents; NULL unless packed or masked */
  void *staging;             /* host, lev_rank_staging_bytes: initial values, checkpoint pieces */
  lev_batch batch;
} lev_rank;

/* Layout of `sums`: [0] sum of NLL, [1] valid tokens, [2] bad labels, [3] gradient norm squared, [4] non-finite
 * gradients, then per layer with experts: sum of squared log-sum-exp, sum of probabilities per expert, assignments per
 * expert. */
enum { LEV_SUM_NLL, LEV_SUM_VALID, LEV_SUM_BAD, LEV_SUM_NORM, LEV_SUM_NONFINITE, LEV_SUMS };
static inline int64_t lev_rank_sums(const lev_model *m) {
  return LEV_SUMS + lev_moe_layers(m) * (1 + 2 * m->experts);
}

/* Router sums of one layer. */
static inline double *lev_layer_sums(const lev_model *m, double *sums, int layer) {
  return sums + LEV_SUMS + lev_moe_index(m, layer) * (1 + 2 * m->experts);
}

/* Selection bias of one layer, A [E]; NULL without. */
const void *lev_rank_route_bias(const lev_rank *rank, int layer);
/* Bytes of all selection biases. */
size_t lev_rank_route_bias_bytes(const lev_model *m);

/* The model that a configuration describes. */
lev_model lev_model_of(const lev_config *config);
/* Its layout as one rank of a world sees it. */
lev_layout lev_layout_of(const lev_config *config, int ranks, int rank);
/* Whether tensors of a kind go to Muon, and its settings for a list of matrices (which stays the caller's). Errors:
 * LEV_ERR_CONFIG (unknown coefficients or scale). */
bool lev_uses_muon(const lev_config *config, lev_param_kind kind);
LEV_MUST_CHECK lev_status lev_muon_settings(const lev_config *config, lev_dtype grad_dtype, const muon_matrix *matrices,
                                            int n, muon_config *out);
/* Bytes of the staging buffer. */
size_t lev_rank_staging_bytes(void);

/* Builds everything: communicators, plans, arenas, bound buffers; seals the memory. Collective over the world.
 * Errors: those of the parts; on failure nothing is left behind. */
LEV_MUST_CHECK lev_status lev_rank_create(const lev_rank_options *options, lev_rank **out);
/* Waits for all work enqueued. After a failure abort the world first: collectives wait for their peers. NULL is fine.
 */
void lev_rank_destroy(lev_rank *rank);

/* Bytes of each class this rank used so far at most (persistent + highest work). */
lev_slabs lev_rank_slabs(const lev_rank *rank);

/* The rank enters a phase: for the ledger, the trace, the profile and NVTX. `name`: static text. */
void lev_rank_phase(lev_rank *rank, const char *name, int64_t index);

/* Opens a work scope on the device arena for the compute stream plus a module's own regions, and binds nothing. */
LEV_MUST_CHECK lev_status lev_rank_push(lev_rank *rank);
LEV_MUST_CHECK lev_status lev_rank_pop(lev_rank *rank);
/* Takes the regions of a module phase from the open scope. */
LEV_MUST_CHECK lev_status lev_rank_take(lev_rank *rank, lev_walk_fn walk, void *plan, lev_blocks *blocks);
/* rows x cols scalars from the open scope. */
LEV_MUST_CHECK lev_status lev_rank_work(lev_rank *rank, const char *tag, lev_dtype dtype, int64_t rows, int64_t cols,
                                        void **out);

/* ---- layer.c ---- */
/* Bytes of one kept attention output with its log-sum-exp. */
size_t lev_attention_item_bytes(const lev_model *m, int64_t tokens);
/* What attention is planned with, for at most `tokens` per rank. */
attn_config lev_attention_config(const lev_config *c, const lev_model *m, int64_t tokens);
/* Runs decoder layer `layer` on `in` (T [N, H], also where SCO keeps it) and leaves its output in `out`. */
LEV_MUST_CHECK lev_status lev_layer_forward(lev_rank *rank, int layer, const void *in, void *out);
/* rank->hidden holds d loss / d output of the layer; leaves d loss / d input there and adds the weight gradients. */
LEV_MUST_CHECK lev_status lev_layer_backward(lev_rank *rank, int layer, bool first);

/* ---- batch.c ---- */
/* Loads micro-batch `micro` of the global batch whose first sequence is `first_sample` (evaluation: of the held-out
 * text) to the device. */
LEV_MUST_CHECK lev_status lev_batch_load(lev_rank *rank, lev_loader *loader, int64_t first_sample, int64_t n_samples,
                                         int micro);
/* Valid labels of a global batch over all ranks, end-of-document masking applied. */
LEV_MUST_CHECK lev_status lev_batch_count_valid(lev_rank *rank, lev_loader *loader, int64_t first_sample,
                                                int64_t n_samples, int64_t *valid);

/* ---- step.c ---- */
typedef struct lev_step_result {
  double loss;      /* mean NLL per valid token, over all ranks, nats */
  double balance;   /* Switch balance loss, mean over layers with experts (1 = balanced) */
  double z_loss;    /* mean squared log-sum-exp of the router logits */
  double grad_norm; /* before clipping; NaN where a gradient is not finite */
  int64_t valid;    /* valid tokens */
  int64_t bad_labels;
  bool skipped;         /* non-finite gradients: nothing was changed */
  double max_vio;       /* largest expert load / mean - 1, over layers */
  double rows_max_mean; /* largest rows received by a rank / mean, over layers */
  int64_t chunks;       /* most chunks K of any layer */
} lev_step_result;

/* One optimizer step (1-based number) on sequences [first_sample, first_sample + global_batch). With optimizer.name =
 * "none" it ends with the gradients. */
LEV_MUST_CHECK lev_status lev_train_step(lev_rank *rank, lev_loader *loader, int64_t step, int64_t first_sample,
                                         double lr, lev_step_result *out);
/* The micro-batch that stands for all between the first and the last on the dry backend. */
#define LEV_MICRO_ALIKE 1
/* Forward and backward of the whole batch only: gradients end in lev_weights_grads. Parts of lev_train_step. */
LEV_MUST_CHECK lev_status lev_step_gradients(lev_rank *rank, lev_loader *loader, int64_t first_sample,
                                             lev_step_result *out);
/* Forward only over sequences [first, first + n): adds up NLL and valid tokens over all ranks. */
LEV_MUST_CHECK lev_status lev_evaluate(lev_rank *rank, lev_loader *loader, int64_t first, int64_t n, double *nll,
                                       int64_t *valid);

/* ---- init.c ---- */
/* Fills weights with first values (or leaves them to a checkpoint) and the optimizers' masters from them. */
LEV_MUST_CHECK lev_status lev_rank_init_weights(lev_rank *rank);

#endif
