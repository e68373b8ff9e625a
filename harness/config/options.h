/* SPDX-License-Identifier: Apache-2.0 */
/* Every setting, once: this table makes lev_config, the parser of files and command lines, --help-all and
 * --print-config.
 *
 *   OPTION(section, key, type, default, minimum, maximum, help)
 *
 * Types: INT (int64_t; 4K, 1M suffixes are powers of 1024), SIZE (bytes as size_t; 64GiB, 512MiB, "unlimited", and
 * "auto" where that is the default), REAL (double), BOOL, TEXT (string), or the name of a CHOICE list below (int).
 * Minimum and maximum are for INT and REAL. */
#ifndef LEV_CONFIG_OPTIONS_H
#define LEV_CONFIG_OPTIONS_H

/* Choice lists: values in the order of their enum in config.h. */
#define LEV_CHOICES(X)                                                                                                 \
  X(DTYPE, "f64|f32|bf16")                                                                                             \
  X(QK_NORM, "none|full|head")                                                                                         \
  X(ROPE, "none|linear|yarn")                                                                                          \
  X(SCORE, "softmax|sigmoid")                                                                                          \
  X(BALANCE, "switch|none|aux_free")                                                                                   \
  X(GRAD_DTYPE, "auto|f32|bf16|f64")                                                                                   \
  X(OPTIMIZER, "adamw|muon|none")                                                                                      \
  X(DECAY, "cosine|linear|none")                                                                                       \
  X(SCHEDULE, "plain|bounded")                                                                                         \
  X(BRANCH, "auto|weights|activations")                                                                                \
  X(PLACEMENT, "gpu|cpu|split")                                                                                        \
  X(DEVICE, "auto|cpu|cuda")                                                                                           \
  X(ATTENTION, "auto|cudnn|tiled")

#define LEV_SECTIONS(X)                                                                                                \
  X(model) X(data) X(train) X(optimizer) X(lr_scheduler) X(parallel) X(schedule) X(memory) X(checkpoint) X(run) X(debug)

#define LEV_OPTIONS_model(O)                                                                                           \
  O(model, name, TEXT, "", 0, 0, "shown in reports")                                                                   \
  O(model, dtype, DTYPE, 1, 0, 0, "storage of weights and hidden states; sums are f64 for f64, else f32")              \
  O(model, vocab_size, INT, 0, 0, 2147483647, "vocabulary rows V")                                                     \
  O(model, hidden_size, INT, 0, 0, 1 << 20, "H")                                                                       \
  O(model, num_hidden_layers, INT, 0, 0, 4096, "L; a plan goes through every one")                                     \
  O(model, num_attention_heads, INT, 0, 0, 65536, "query heads A")                                                     \
  O(model, num_key_value_heads, INT, 0, 0, 65536, "key/value heads G; 0 = as many as query heads")                     \
  O(model, head_dim, INT, 0, 0, 1024, "head size d; 0 = hidden_size / num_attention_heads")                            \
  O(model, num_experts, INT, 0, 0, 4096, "routed experts E")                                                           \
  O(model, num_experts_per_tok, INT, 0, 0, 4096, "experts per token k")                                                \
  O(model, moe_intermediate_size, INT, 0, 0, 1 << 20, "expert width I")                                                \
  O(model, n_shared_experts, INT, 0, 0, 4096, "experts that every token passes, as one of n times the width")          \
  O(model, first_k_dense_replace, INT, 0, 0, 100000, "first layers with a dense feed-forward part instead of experts") \
  O(model, intermediate_size, INT, 0, 0, 1 << 20, "width of those dense layers")                                       \
  O(model, norm_topk_prob, BOOL, 0, 0, 0, "divide the chosen probabilities by their sum (Qwen3; OLMoE does not)")      \
  O(model, scoring_func, SCORE, 0, 0, 0, "router scores of the logits (DeepSeek-V3: sigmoid)")                         \
  O(model, n_group, INT, 1, 1, 4096, "groups of experts; 1 = none")                                                    \
  O(model, topk_group, INT, 1, 1, 4096, "groups that a token may use, those whose two best experts score highest")     \
  O(model, routed_scaling_factor, REAL, 1, 0, 1e6, "factor on the routed experts' weights")                            \
  O(model, qk_norm, QK_NORM, 0, 0, 0,                                                                                  \
    "RMS norm of q and k: over the whole projection (OLMoE: full) or per head (Qwen3: head)")                          \
  O(model, rms_norm_eps, REAL, 1e-5, 0, 1, "epsilon of all RMS norms")                                                 \
  O(model, clip_qkv, REAL, 0, 0, 1e30, "q, k and v clamped to this size after the norms; 0 = off")                     \
  O(model, rope_theta, REAL, 10000, 1, 1e12, "base of the rotary embedding, above 1")                                  \
  O(model, rope_scaling, ROPE, 0, 0, 0, "of the rotary frequencies, for contexts longer than trained before")          \
  O(model, rope_factor, REAL, 1, 1, 1e9, "linear, yarn: how many times longer")                                        \
  O(model, rope_original_max_position, INT, 0, 0, 1LL << 40, "yarn: the context trained before")                       \
  O(model, rope_beta_fast, REAL, 32, 0, 1e9, "yarn: pairs with more turns over that context keep their frequency")     \
  O(model, rope_beta_slow, REAL, 1, 0, 1e9, "yarn: pairs with fewer turns are slowed by the whole factor")             \
  O(model, rope_attention_factor, REAL, 0, 0, 1e9, "yarn: on cosine and sine; 0 = 0.1 ln(rope_factor) + 1")            \
  O(model, sliding_window, INT, 0, 0, 1LL << 40,                                                                       \
    "keys that a query of a sliding-window layer sees; 0 = no such layers")                                            \
  O(model, max_window_layers, INT, 0, 0, 100000, "first layers that see everything (Qwen)")                            \
  O(model, sliding_window_pattern, INT, 0, 0, 100000, "every n-th layer sees everything (Gemma); 0 = none")            \
  O(model, tie_word_embeddings, BOOL, 0, 0, 0, "the embedding table is the output head too")                           \
  O(model, initializer_range, REAL, 0.02, 0, 10, "standard deviation of first weights (truncated at 3 sigma)")         \
  O(model, balance, BALANCE, 0, 0, 0, "of experts: a loss, none, or a bias on the selection updated after each step")  \
  O(model, router_aux_loss_coef, REAL, 0.01, 0, 1e6, "weight of the Switch balance loss")                              \
  O(model, bias_update_rate, REAL, 0.001, 0, 1e6, "aux_free: step of the selection bias")                              \
  O(model, router_z_loss_coef, REAL, 0.001, 0, 1e6, "weight of the mean squared log-sum-exp of router scores")

#define LEV_OPTIONS_data(O)                                                                                            \
  O(data, train, TEXT, "", 0, 0, "prefix of PREFIX.idx and PREFIX.bin (levee tokenize writes them)")                   \
  O(data, valid, TEXT, "", 0, 0, "prefix of the held-out tokens; empty = no validation")                               \
  O(data, packed, BOOL, 0, 0, 0, "attention stops at document borders, and positions start again there")               \
  O(data, mask_eod, BOOL, 0, 0, 0, "no loss on the first token of a document that follows another one")

#define LEV_OPTIONS_train(O)                                                                                           \
  O(train, steps, INT, 100, 0, 1000000000, "optimizer steps")                                                          \
  O(train, context, INT, 4096, 1, 1 << 30, "sequence length S in tokens")                                              \
  O(train, global_batch, INT, 1, 1, 1 << 24, "sequences per step over all ranks, whatever their number")               \
  O(train, grad_dtype, GRAD_DTYPE, 0, 0, 0, "stored gradients; auto: the model's type for one micro-batch, else f32")  \
  O(train, max_norm, REAL, 1.0, 0, 1e30, "global gradient norm above which gradients are scaled down; 0 = off")        \
  O(train, eval_interval, INT, 0, 0, 1000000000, "steps between validations; 0 = none")                                \
  O(train, eval_at_end, BOOL, 1, 0, 0, "validate after the last step")

#define LEV_OPTIONS_optimizer(O)                                                                                       \
  O(optimizer, name, OPTIMIZER, 0, 0, 0,                                                                               \
    "muon: Muon for projections and experts, AdamW for embedding, head, norms, router; none: loss and gradients "      \
    "only, no checkpoints")                                                                                            \
  O(optimizer, lr, REAL, 4e-4, 0, 1e6, "peak learning rate")                                                           \
  O(optimizer, beta1, REAL, 0.9, 0, 0.999999, "AdamW first moment")                                                    \
  O(optimizer, beta2, REAL, 0.95, 0, 0.9999999, "AdamW second moment")                                                 \
  O(optimizer, eps, REAL, 1e-8, 0, 1, "AdamW epsilon")                                                                 \
  O(optimizer, weight_decay, REAL, 0.1, 0, 1e6, "decoupled decay, times lr")                                           \
  O(optimizer, decay_norms, BOOL, 0, 0, 0, "decay norm weights too")                                                   \
  O(optimizer, muon_momentum, REAL, 0.95, 0, 0.999999, "Muon momentum")                                                \
  O(optimizer, muon_nesterov, BOOL, 1, 0, 0, "Nesterov form")                                                          \
  O(optimizer, muon_coefficients, TEXT, "simple", 0, 0,                                                                \
    "simple, quintic, polar_express, polar_express_8, deepseek_v4, cubic")                                             \
  O(optimizer, muon_scale, TEXT, "moonlight", 0, 0, "moonlight, original, spectral, none")                             \
  O(optimizer, adamw_lr_scale, REAL, 1, 0, 1e6, "factor on lr for the tensors that stay with AdamW under muon")

#define LEV_OPTIONS_lr_scheduler(O)                                                                                    \
  O(lr_scheduler, warmup_steps, INT, 0, 0, 1000000000, "linear warm-up")                                               \
  O(lr_scheduler, decay, DECAY, 0, 0, 0, "after the warm-up")                                                          \
  O(lr_scheduler, min_lr_factor, REAL, 0.1, 0, 1, "learning rate at the last step / peak")

#define LEV_OPTIONS_parallel(O)                                                                                        \
  O(parallel, ranks, INT, 1, 1, 4096, "ranks W")                                                                       \
  O(parallel, context, INT, 0, 0, 4096, "context group size D, divides ranks; 0 = all")                                \
  O(parallel, experts, INT, 0, 0, 4096, "expert group size Ep, divides ranks; 0 = all")                                \
  O(parallel, vocab, INT, 0, 0, 4096, "vocabulary group size P, divides ranks; 0 = all")

#define LEV_OPTIONS_schedule(O)                                                                                        \
  O(schedule, pipelined_llep, SCHEDULE, 1, 0, 0, "expert dispatch")                                                    \
  O(schedule, ring_dtp, SCHEDULE, 1, 0, 0, "vocabulary projection")                                                    \
  O(schedule, sco, SCHEDULE, 1, 0, 0, "layer inputs kept for backward")                                                \
  O(schedule, offload_adamw, SCHEDULE, 1, 0, 0, "AdamW state")                                                         \
  O(schedule, muon, SCHEDULE, 1, 0, 0, "Muon state")

#define LEV_OPTIONS_memory(O)                                                                                          \
  O(memory, device_memory, SIZE, 0, 0, 0, "limit per rank on the device; 0 = none")                                    \
  O(memory, host_memory, SIZE, 0, 0, 0, "limit per rank on pinned and named host memory; 0 = none")                    \
  O(memory, context_reserve, SIZE, LEV_SIZE_AUTO, 0, 0,                                                                \
    "kept free inside device_memory for the driver's context, kernels, cuBLAS and cuDNN: a rank's part of them; "      \
    "auto: 1 GiB on a GPU, else 0")                                                                                    \
  O(memory, heap_cap, SIZE, 268435456, 0, 0, "most the control-plane heap is meant to hold; passing it is a warning")  \
  O(memory, llep_chunk_rows, INT, 0, 0, 1LL << 40, "rows a rank sends or receives in one chunk at most; 0 = chosen")   \
  O(memory, llep_tile_rows, INT, 0, 0, 1LL << 40,                                                                      \
    "rows of experts computed at a time; 0 = 1024, on a GPU 8192; plain: all")                                         \
  O(memory, llep_plain_rows, INT, 0, 0, 2147483647, "plain schedule: rows a rank can receive; 0 = the worst case")     \
  O(memory, llep_foreign_slots, INT, 0, -1, 4096, "lent experts a rank holds at once; 0 = half its own, -1 = none")    \
  O(memory, llep_alpha, REAL, 1.0, 1, 1e6, "load above which a rank counts as overloaded, in means")                   \
  O(memory, llep_min_rows, INT, 1024, 0, INT32_MAX, "fewest rows worth lending an expert for")                         \
  O(memory, llep_gate, REAL, 1.3, 1, 1e6, "max / mean load under which nothing is lent")                               \
  O(memory, rdtp_tile_rows, INT, 0, 0, 1LL << 40, "tokens of one logits tile; 0 = chosen")                             \
  O(memory, rdtp_tile_cols, INT, 0, 0, 1LL << 40, "vocabulary rows of one logits tile; 0 = chosen")                    \
  O(memory, rdtp_one_pass, BOOL, 0, 0, 0,                                                                              \
    "keep the logits of rdtp_tile_rows tokens of every rank until their gradient is taken: 3 products instead of 4")   \
  O(memory, rdtp_branch, BRANCH, 0, 0, 0, "what moves around the ring")                                                \
  O(memory, sco_host_budget, SIZE, SIZE_MAX, 0, 0, "pinned bytes for kept layer inputs and attention outputs")         \
  O(memory, sco_fraction, REAL, 1, 0, 1, "largest share of them that leaves the device")                               \
  O(memory, sco_keep_attention, BOOL, 0, 0, 0, "keep attention outputs too, so that backward does not recompute them") \
  O(memory, oadamw_bucket, INT, 0, 0, 1LL << 40, "elements of one optimizer bucket; 0 = chosen")                       \
  O(memory, oadamw_slots, INT, 2, 1, 8, "buckets in flight")                                                           \
  O(memory, oadamw_placement, PLACEMENT, 0, 0, 0, "where the update runs")                                             \
  O(memory, oadamw_cpu_share, REAL, 0.5, 0, 1, "split: share updated on the host")                                     \
  O(memory, oadamw_workers, INT, 0, 0, 64,                                                                             \
    "cpu, split: host threads of an update; 0 = on a GPU the cores shared out to the ranks, at most 16, else 1")       \
  O(memory, muon_bucket_bytes, SIZE, 0, 0, 0, "device bytes of one Muon step; 0 = the least that works")               \
  O(memory, muon_slots, INT, 2, 1, 8, "Muon buckets in flight")                                                        \
  O(memory, attention_block_q, INT, 0, 0, 1 << 20, "query tokens of one block; 0 = chosen")                            \
  O(memory, attention_block_k, INT, 0, 0, 1 << 20, "keys of one block; 0 = chosen")                                    \
  O(memory, attention_workspace, SIZE, 0, 0, 0, "most scratch of attention through cuDNN; 0 = 256 MiB or one head's")  \
  O(memory, ffn_tile_rows, INT, 0, 0, 1LL << 40, "tokens of one tile of dense layers and shared experts; 0 = 1024")    \
  O(memory, embed_tile_tokens, INT, 0, 0, 1 << 30, "tokens per rank and exchange of embedding rows; 0 = 256")

#define LEV_OPTIONS_checkpoint(O)                                                                                      \
  O(checkpoint, enable, BOOL, 1, 0, 0, "save checkpoints")                                                             \
  O(checkpoint, folder, TEXT, "checkpoints", 0, 0, "inside run.folder")                                                \
  O(checkpoint, interval, INT, 0, 0, 1000000000, "steps between saves; 0 = at the end only")                           \
  O(checkpoint, keep_latest_k, INT, 2, 2, 1000000, "newest checkpoints kept")                                          \
  O(checkpoint, resume, BOOL, 1, 0, 0, "go on from the newest whole checkpoint; false = start over")                   \
  O(checkpoint, initial_load_path, TEXT, "", 0, 0,                                                                     \
    "weights of a run that has no checkpoint yet: a folder or file of safetensors with Hugging Face's names, or the "  \
    "step-N folder of another run, of any layout, context and optimizer")

#define LEV_OPTIONS_run(O)                                                                                             \
  O(run, folder, TEXT, "", 0, 0, "receives metrics.jsonl, memory.json, traces; empty = runs/<name of the file>")       \
  O(run, device, DEVICE, 0, 0, 0,                                                                                      \
    "auto: cuda where there is a GPU it can use, else cpu; cuda: ranks share the GPUs in turn")                        \
  O(run, check_host_memory, BOOL, 1, 0, 0,                                                                             \
    "cuda: refuse pinned memory beyond what the machine has free; false where it grows on demand")                     \
  O(run, peak_tflops, REAL, 0, 0, 1e9,                                                                                 \
    "of one GPU, or the CPU (H200, bf16: 989); reports then say the share of it that was used (MFU); 0 = not said")    \
  O(run, attention, ATTENTION, 0, 0, 0,                                                                                \
    "on a GPU; auto: cuDNN where it is there and can, else our own (tiled) kernels")                                   \
  O(run, log_freq, INT, 1, 1, 1000000, "steps between console lines")                                                  \
  O(run, trace_steps, INT, 2, 0, 1000, "first steps whose events are recorded; 0 = none")                              \
  O(run, profile, BOOL, 0, 0, 0,                                                                                       \
    "--profile: the second step (the only one, if there is one) as a timeline, run.folder/profile.rankN.json")         \
  O(run, compute_immediate, BOOL, 0, 0, 0, "cpu: run operations inline, without stream workers (debugging)")

#define LEV_OPTIONS_debug(O)                                                                                           \
  O(debug, seed, INT, 1, 0, 9223372036854775807LL, "of weights and sample order")                                      \
  O(debug, uniform_routing, BOOL, 0, 0, 0,                                                                             \
    "token t of a rank picks experts (t k + j) mod E whatever the scores, so that losses depend on the ranks")         \
  O(debug, jitter_seed, INT, 0, 0, 9223372036854775807LL, "cpu: random delays before operations (race tests)")         \
  O(debug, poison, BOOL, 0, 0, 0, "fill all planned memory with NaN bytes before it is used")

/* All options, section by section. */
#define LEV_OPTIONS(O)                                                                                                 \
  LEV_OPTIONS_model(O) LEV_OPTIONS_data(O) LEV_OPTIONS_train(O) LEV_OPTIONS_optimizer(O) LEV_OPTIONS_lr_scheduler(O)   \
      LEV_OPTIONS_parallel(O) LEV_OPTIONS_schedule(O) LEV_OPTIONS_memory(O) LEV_OPTIONS_checkpoint(O)                  \
          LEV_OPTIONS_run(O) LEV_OPTIONS_debug(O)

#endif
