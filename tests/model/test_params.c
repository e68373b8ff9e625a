/* SPDX-License-Identifier: Apache-2.0 */
/* Parameter tables: every element of the model is stored exactly once over all ranks, in blocks of rows. */
#include <stdlib.h>
#include <string.h>

#include "common/dims.h"
#include "harness/model/params.h"
#include "tests/t.h"

static const lev_model tiny = {.dtype = LEV_F64,
                               .vocab = 37,
                               .hidden = 12,
                               .layers = 3,
                               .heads = 4,
                               .kv_heads = 2,
                               .head_dim = 6,
                               .experts = 7,
                               .top_k = 2,
                               .inter = 5,
                               .qk_norm = LEV_QK_NORM_FULL,
                               .norm_eps = 1e-5,
                               .rope = {.theta = 1e4},
                               .init_std = 0.02,
                               .route = {.groups = 1, .top_groups = 1, .scale = 1}};

/* Number of the element in the whole model: tensor ids are dense, so (id, global element) identifies it. */
static void mark(const lev_params *p, unsigned char **seen, int64_t *elements) {
  for (int i = 0; i < p->n_pieces; ++i) {
    const lev_piece *piece = &p->pieces[i];
    const lev_tensor *t = &p->tensors[piece->tensor];
    int64_t full = t->full_rows * t->cols;
    if (!seen[t->id]) {
      seen[t->id] = calloc((size_t)full, 1);
      elements[t->id] = full;
    }
    int64_t first = (t->first_row + piece->row) * t->cols;
    for (int64_t e = 0; e < piece->rows * t->cols; ++e) {
      T_EXPECT_MSG(first + e < full, "%s: element %lld past its end", t->name, (long long)(first + e));
      if (first + e < full) seen[t->id][first + e]++;
    }
  }
}

static void check_layout(const lev_model *m, int w, int d, int ep, int p_vocab, bool whole) {
  unsigned char *seen[512] = {0};
  int64_t elements[512] = {0}, total = 0, stored = 0, sum = 0;
  for (int r = 0; r < w; ++r) {
    lev_layout layout = {w, r, d, ep, p_vocab, whole};
    lev_params *p;
    T_REQUIRE_OK(lev_params_create(m, &layout, &p));
    int64_t at = 0;
    for (int i = 0; i < p->n_pieces; ++i) { /* pieces tile the shard */
      T_EXPECT_EQ_I64(p->pieces[i].shard_offset, at);
      at += p->pieces[i].rows * p->tensors[p->pieces[i].tensor].cols;
      const lev_tensor *t = &p->tensors[p->pieces[i].tensor];
      bool matrix = t->kind == LEV_PARAM_DENSE || t->kind == LEV_PARAM_EXPERT;
      if (whole && matrix) T_EXPECT_EQ_I64(p->pieces[i].rows, t->rows);
    }
    T_EXPECT_EQ_I64(at, p->shard_elements);
    stored += p->shard_elements, total = p->total;
    mark(p, seen, elements);
    lev_params_destroy(p);
  }
  for (int id = 0; id < 512; ++id)
    for (int64_t e = 0; e < elements[id]; ++e, ++sum)
      if (!T_EXPECT_MSG(seen[id][e] == 1, "tensor %d element %lld stored %d times", id, (long long)e, seen[id][e]))
        break;
  T_EXPECT_EQ_I64(stored, total);
  T_EXPECT_EQ_I64(sum, total);
  for (int id = 0; id < 512; ++id) free(seen[id]);
}

enum { KINDS = 4 };
static lev_model model_kind(int kind) {
  lev_model m = tiny;
  m.tied = kind == 1 || kind == 3;
  if (kind >= 2) m.shared_inter = 10, m.dense_layers = kind - 1, m.dense_inter = 17;
  return m;
}

T_TEST(params_cover_the_model_once) {
  const int layouts[][4] = {{1, 1, 1, 1}, {2, 2, 2, 2}, {4, 4, 4, 4}, {4, 2, 2, 4}, {8, 4, 2, 4},
                            {6, 3, 2, 6}, {8, 2, 4, 8}, {5, 5, 5, 5}, {8, 1, 1, 1}, {7, 7, 7, 7}};
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts && !t_failed(); ++i)
    for (int whole = 0; whole < 2; ++whole)
      for (int kind = 0; kind < KINDS; ++kind) {
        lev_model m = model_kind(kind);
        check_layout(&m, layouts[i][0], layouts[i][1], layouts[i][2], layouts[i][3], whole);
      }
}

T_TEST(params_even_shards) {
  int64_t most = 0, least = INT64_MAX;
  for (int r = 0; r < 4; ++r) {
    lev_params *p;
    T_REQUIRE_OK(lev_params_create(&tiny, &(lev_layout){4, r, 4, 1, 4, false}, &p));
    most = lev_max_i64(most, p->shard_elements), least = lev_min_i64(least, p->shard_elements);
    lev_params_destroy(p);
  }
  T_EXPECT_MSG(most - least < 12 * 40, "shards of %lld to %lld elements", (long long)least, (long long)most);
}

T_TEST(params_init_does_not_depend_on_the_layout) {
  lev_params *one, *four;
  T_REQUIRE_OK(lev_params_create(&tiny, &(lev_layout){1, 0, 1, 1, 1, false}, &one));
  T_REQUIRE_OK(lev_params_create(&tiny, &(lev_layout){4, 3, 4, 4, 4, true}, &four));
  int found = 0;
  double sum = 0, square = 0;
  int64_t n = 0;
  for (int i = 0; i < four->n_tensors; ++i)
    for (int j = 0; j < one->n_tensors; ++j)
      if (strcmp(four->tensors[i].name, one->tensors[j].name) == 0) {
        T_EXPECT_EQ_I64(four->tensors[i].id, one->tensors[j].id);
        ++found;
      }
  T_EXPECT_EQ_I64(found, four->n_tensors);
  for (int64_t e = 0; e < 20000; ++e, ++n) {
    double x = lev_param_init(&tiny, &one->tensors[0], 1, e);
    T_EXPECT(x >= -0.06 && x <= 0.06);
    sum += x, square += x * x;
  }
  T_EXPECT(sum / (double)n < 1e-3 && sum / (double)n > -1e-3);
  T_EXPECT(square / (double)n > 0.9 * 4e-4 && square / (double)n < 1.05 * 4e-4);
  lev_params_destroy(one);
  lev_params_destroy(four);
}

T_TEST(params_refuse_bad_shapes) {
  lev_params *p;
  lev_layout layout = {4, 0, 4, 4, 4, false};
  lev_model m = tiny;
  m.kv_heads = 3;
  T_EXPECT_STATUS(lev_params_create(&m, &layout, &p), LEV_ERR_CONFIG);
  m = tiny, m.head_dim = 5;
  T_EXPECT_STATUS(lev_params_create(&m, &layout, &p), LEV_ERR_CONFIG);
  m = tiny, m.route.groups = 2; /* does not divide 7 experts */
  T_EXPECT_STATUS(lev_params_create(&m, &layout, &p), LEV_ERR_CONFIG);
  m = tiny, m.route.groups = 7; /* one group of one expert, two experts per token */
  T_EXPECT_STATUS(lev_params_create(&m, &layout, &p), LEV_ERR_CONFIG);
  m = tiny, m.route.scale = 0;
  T_EXPECT_STATUS(lev_params_create(&m, &layout, &p), LEV_ERR_CONFIG);
  m = tiny, m.rope.theta = 0;
  T_EXPECT_STATUS(lev_params_create(&m, &layout, &p), LEV_ERR_CONFIG);
  m = tiny, m.top_k = 8;
  T_EXPECT_STATUS(lev_params_create(&m, &layout, &p), LEV_ERR_CONFIG);
  m = tiny, m.vocab = INT64_MAX / 2;
  T_EXPECT_STATUS(lev_params_create(&m, &layout, &p), LEV_ERR_CONFIG);
  layout.context = 3;
  T_EXPECT_STATUS(lev_params_create(&tiny, &layout, &p), LEV_ERR_CONFIG);
}

T_TEST(params_tied_head_is_the_embedding) {
  lev_params *apart, *tied;
  lev_model m = model_kind(1);
  T_REQUIRE_OK(lev_params_create(&tiny, &(lev_layout){1, 0, 1, 1, 1, false}, &apart));
  T_REQUIRE_OK(lev_params_create(&m, &(lev_layout){1, 0, 1, 1, 1, false}, &tied));
  T_EXPECT_EQ_I64(lev_unit_head(tied), lev_unit_embed(tied));
  T_EXPECT_EQ_I64(apart->total - tied->total, tiny.vocab * tiny.hidden);
  T_EXPECT_EQ_I64(apart->active, tied->active);
  for (int i = 0; i < tied->n_tensors; ++i) T_EXPECT(strcmp(tied->tensors[i].name, "lm_head.weight") != 0);
  lev_params_destroy(apart);
  lev_params_destroy(tied);
}

T_TEST(params_sliding_window_layers) {
  lev_model m = tiny;
  T_EXPECT_EQ_I64(lev_layer_window(&m, 0), 0);
  m.window = 5;
  T_EXPECT_EQ_I64(lev_layer_window(&m, 0), 5);
  m.window_first = 2; /* Qwen: layers from max_window_layers on slide */
  T_EXPECT_EQ_I64(lev_layer_window(&m, 1), 0);
  T_EXPECT_EQ_I64(lev_layer_window(&m, 2), 5);
  m.window_first = 0, m.window_pattern = 6; /* Gemma: five sliding layers, one full */
  for (int l = 0; l < 12; ++l) T_EXPECT_EQ_I64(lev_layer_window(&m, l), l % 6 == 5 ? 0 : 5);
}

T_TEST(params_dense_layers_and_shared_experts) {
  lev_params *p;
  lev_model m = tiny;
  m.dense_layers = 1, m.dense_inter = 17, m.shared_inter = 10;
  T_REQUIRE_OK(lev_params_create(&m, &(lev_layout){1, 0, 1, 1, 1, false}, &p));
  T_EXPECT_EQ_I64(p->n_units, 1 + 1 + 2 * 2 + 2);
  T_EXPECT(p->units[lev_unit_dense(p, 0)].kind == LEV_UNIT_DENSE && p->units[lev_unit_dense(p, 0)].layer == 0);
  for (int l = 1; l < 3; ++l) {
    T_EXPECT(p->units[lev_unit_dense(p, l)].kind == LEV_UNIT_DENSE && p->units[lev_unit_dense(p, l)].layer == l);
    T_EXPECT(p->units[lev_unit_experts(p, l)].kind == LEV_UNIT_EXPERTS && p->units[lev_unit_experts(p, l)].layer == l);
  }
  const struct {
    const char *name;
    int64_t rows, cols;
  } want[] = {{"model.layers.0.mlp.gate_proj.weight", 17, 12},
              {"model.layers.0.mlp.down_proj.weight", 12, 17},
              {"model.layers.2.mlp.shared_experts.up_proj.weight", 10, 12},
              {"model.layers.2.mlp.shared_experts.down_proj.weight", 12, 10},
              {"model.layers.1.mlp.gate.weight", 7, 12}};
  for (size_t i = 0; i < sizeof want / sizeof *want; ++i) {
    int found = 0;
    for (int t = 0; t < p->n_tensors; ++t)
      found += strcmp(p->tensors[t].name, want[i].name) == 0 && p->tensors[t].rows == want[i].rows &&
               p->tensors[t].cols == want[i].cols;
    T_EXPECT_MSG(found == 1, "%s found %d times", want[i].name, found);
  }
  for (int t = 0; t < p->n_tensors; ++t) {
    T_EXPECT(!strstr(p->tensors[t].name, "layers.0.mlp.experts"));
    T_EXPECT(strcmp(p->tensors[t].name, "model.layers.0.mlp.gate.weight") != 0);
  }
  lev_params_destroy(p);
  m.dense_layers = 3; /* no layer with experts left */
  T_EXPECT_STATUS(lev_params_create(&m, &(lev_layout){1, 0, 1, 1, 1, false}, &p), LEV_ERR_CONFIG);
  m.dense_layers = 1, m.dense_inter = 0;
  T_EXPECT_STATUS(lev_params_create(&m, &(lev_layout){1, 0, 1, 1, 1, false}, &p), LEV_ERR_CONFIG);
}
