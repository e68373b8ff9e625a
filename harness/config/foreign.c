/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/config/foreign.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* Keys, separated by blanks, and what is said of each of them. */
static const struct {
  const char *keys, *advice;
} table[] = {
    {"torch_dtype", "model.dtype stands for it (bfloat16 is bf16, float32 is f32)"},
    {"num_local_experts n_routed_experts moe_num_experts", "model.num_experts stands for it"},
    {"shared_expert_intermediate_size moe_shared_expert_intermediate_size",
     "shared experts are model.n_shared_experts times model.moe_intermediate_size wide, and have no gate"},
    {"decoder_sparse_step moe_layer_freq",
     "all layers from model.first_k_dense_replace on have experts; leave it out where it is 1"},
    {"aux_loss_alpha", "model.router_aux_loss_coef stands for it"},
    {"topk_method", "model.balance = \"aux_free\" with model.n_group and model.topk_group stands for noaux_tc"},
    {"norm_eps layer_norm_eps layernorm_epsilon", "model.rms_norm_eps stands for it"},
    {"use_qk_norm", "model.qk_norm stands for it: none, full (OLMoE) or head (Qwen3)"},
    {"use_sliding_window", "model.sliding_window = 0 stands for false; leave it out"},
    {"max_position_embeddings n_positions max_sequence_length seq_length",
     "train.context is the sequence length, and nothing limits it; leave it out"},
    {"hidden_act hidden_activation", "not needed: all are SwiGLU (silu), no other activation is supported"},
    {"attention_bias qkv_bias mlp_bias use_bias add_qkv_bias",
     "biases are not supported; leave it out where it is false"},
    {"attention_dropout hidden_dropout embd_pdrop resid_pdrop router_jitter_noise",
     "dropout and router noise are not supported; leave it out where it is 0"},
    {"q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
     "multi-head latent attention is not supported"},
    {"partial_rotary_factor rotary_pct rotary_dim", "partial rotary embedding is not supported"},
    {"num_nextn_predict_layers", "multi-token prediction is not supported; leave it out to train without"},
    {"model_type transformers_version use_cache bos_token_id eos_token_id pad_token_id output_router_logits "
     "pretraining_tp ep_size seq_aux",
     "not needed; leave it out"},
};

/* In Hugging Face's files the one is a table, and so is what newer ones have in its place. */
static const char rope_tables[] = "no setting is a table: model.rope_scaling = \"linear\" or \"yarn\" with "
                                  "model.rope_factor, model.rope_original_max_position and others stands for it";

static bool lists(const char *words, const char *word) {
  size_t n = strlen(word);
  for (const char *at = words; (at = strstr(at, word)); at += n)
    if ((at == words || at[-1] == ' ') && (at[n] == ' ' || at[n] == '\0')) return n > 0;
  return false;
}

const char *lev_foreign_key(const char *name) {
  const char *dot = strrchr(name, '.'), *key = dot ? dot + 1 : name;
  if (strstr(name, "rope_scaling.") || strstr(name, "rope_parameters.")) return rope_tables;
  for (size_t i = 0; i < sizeof table / sizeof *table; ++i)
    if (lists(table[i].keys, key)) return table[i].advice;
  return NULL;
}

const char *lev_foreign_value(const char *value) {
  static const struct {
    const char *theirs, *ours;
  } words[] = {{"bfloat16", "bf16"}, {"float32", "f32"}, {"float", "f32"}, {"float64", "f64"}, {"double", "f64"}};
  for (size_t i = 0; i < sizeof words / sizeof *words; ++i)
    if (strcmp(value, words[i].theirs) == 0) return words[i].ours;
  return NULL;
}
