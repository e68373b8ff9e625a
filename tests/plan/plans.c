/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plan/plans.h"

#include <stdio.h>

#include "tests/t.h"

static const char *const small =
    "[model]\nname = 'small'\ndtype = 'bf16'\nvocab_size = 101\nhidden_size = 40\nnum_hidden_layers = 4\n"
    "num_attention_heads = 6\nnum_key_value_heads = 2\nhead_dim = 8\nnum_experts = 26\nnum_experts_per_tok = 3\n"
    "moe_intermediate_size = 24\nqk_norm = 'full'\n"
    "[memory]\nllep_chunk_rows = 300\nllep_min_rows = 2\nrdtp_tile_rows = 7\nrdtp_tile_cols = 32\n"
    "embed_tile_tokens = 5\noadamw_bucket = 640\n";

static const char *const variants[PLAN_VARIANTS] = {
    "",
    "[model]\ntie_word_embeddings = true\nqk_norm = 'none'\n[memory]\noadamw_bucket = 0\nmuon_bucket_bytes = 70000\n",
    "[model]\nn_shared_experts = 1\nfirst_k_dense_replace = 1\nintermediate_size = 56\n[memory]\nffn_tile_rows = 9\n",
    "[model]\ndtype = 'f32'\nbalance = 'aux_free'\nscoring_func = 'sigmoid'\n"
    "[memory]\nsco_host_budget = 30000\nsco_keep_attention = true\nmuon_slots = 3\nmuon_bucket_bytes = 90000\n",
    "[schedule]\nsco = 'plain'\noffload_adamw = 'plain'\nmuon = 'plain'\npipelined_llep = 'plain'\nring_dtp = "
    "'plain'\n"};

void plan_small(lev_config *config, int variant) {
  lev_config_defaults(config);
  T_EXPECT_OK(lev_config_parse(config, small, "small"));
  config->memory.context_reserve = 0; /* limits follow what is planned, whatever the machine has */
  T_EXPECT_OK(lev_config_parse(config, variants[variant], "variant"));
}

void plan_read(lev_config *config, const char *name) {
  char path[256];
  snprintf(path, sizeof path, "harness/configs/%s.toml", name);
  lev_config_defaults(config);
  T_EXPECT_OK(lev_config_read(config, path));
  config->memory.context_reserve = 0;
}

void plan_set(lev_config *config, const char *name, const char *value) {
  T_EXPECT_OK(lev_config_set(config, name, value, name));
}
