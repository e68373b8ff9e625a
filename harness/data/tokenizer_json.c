/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/tokenizer_json.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common/hostmem.h"
#include "harness/data/io.h"

/* ---- small helpers ---- */

static const char *text_of(const json_t *object, const char *key) {
  const char *text = json_string_value(json_object_get(object, key));
  return text ? text : "";
}

static bool is_true(const json_t *object, const char *key, bool otherwise) {
  const json_t *value = json_object_get(object, key);
  return value && !json_is_null(value) ? json_is_true(value) : otherwise;
}

static bool is_none(const json_t *value) {
  return !value || json_is_null(value);
}

static bool is_type(const json_t *object, const char *type) {
  return strcmp(text_of(object, "type"), type) == 0;
}

static lev_status unsupported(const char *what, const json_t *object) {
  const char *type = text_of(object, "type");
  return lev_fail(LEV_ERR_UNSUPPORTED, "%s \"%.100s\" is not supported", what, *type ? type : "(without type)");
}

static void hash_of(const void *data, size_t size, char hex[33]) {
  XXH128_hash_t h = XXH3_128bits(data, size);
  snprintf(hex, 33, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
}

/* ---- reading: the model ---- */

static lev_status read_vocab(lev_tokenizer *t, json_t *vocab) {
  const char *key;
  json_t *value;
  lev_bytes_buffer bytes = {0};
  lev_status st = LEV_OK;
  if (!json_is_object(vocab)) return lev_fail(LEV_ERR_FORMAT, "the model has no \"vocab\" object");
  json_object_foreach(vocab, key, value) {
    bool spelled = false;
    if (!json_is_integer(value)) {
      st = lev_fail(LEV_ERR_FORMAT, "the id of token \"%.100s\" is not an integer", key);
      break;
    }
    bytes.size = 0;
    st = lev_bytes_unspell(key, strlen(key), &bytes, &spelled);
    if (st == LEV_OK) st = lev_bpe_set_token(t->bpe, json_integer_value(value), bytes.data, bytes.size, spelled);
    if (st != LEV_OK) break;
  }
  lev_bytes_free(&bytes);
  return st;
}

static lev_status find_spelled(const lev_tokenizer *t, const char *text, size_t size, lev_bytes_buffer *scratch,
                               int32_t *id) {
  bool spelled;
  scratch->size = 0;
  LEV_TRY(lev_bytes_unspell(text, size, scratch, &spelled));
  *id = spelled ? lev_bpe_find(t->bpe, scratch->data, scratch->size) : -1;
  if (*id < 0)
    return lev_fail(LEV_ERR_FORMAT, "\"%.*s\" of a merge is not in the vocabulary", (int)(size < 100 ? size : 100),
                    text);
  return LEV_OK;
}

/* "left right" or ["left", "right"]. */
static lev_status read_merge(lev_tokenizer *t, const json_t *merge, size_t rank, lev_bytes_buffer *scratch) {
  int32_t left, right;
  const char *a = NULL, *b = NULL;
  size_t size = 0;
  if (json_is_string(merge)) {
    a = json_string_value(merge);
    b = strchr(a, ' ');
    if (b) size = (size_t)(b++ - a);
  } else if (json_array_size(merge) == 2) {
    a = json_string_value(json_array_get(merge, 0));
    b = json_string_value(json_array_get(merge, 1));
    if (a) size = strlen(a);
  }
  if (!a || !b || size == 0 || *b == '\0' || (json_is_string(merge) && strchr(b, ' ')))
    return lev_fail(LEV_ERR_FORMAT, "merge %zu is neither \"left right\" nor [\"left\", \"right\"]", rank);
  LEV_TRY(find_spelled(t, a, size, scratch, &left));
  LEV_TRY(find_spelled(t, b, strlen(b), scratch, &right));
  return lev_bpe_add_merge(t->bpe, left, right);
}

static lev_status read_merges(lev_tokenizer *t, const json_t *merges) {
  size_t rank;
  json_t *merge;
  lev_bytes_buffer scratch = {0};
  lev_status st = LEV_OK;
  if (!json_is_array(merges)) return lev_fail(LEV_ERR_FORMAT, "the model has no \"merges\" array");
  json_array_foreach(merges, rank, merge) {
    st = read_merge(t, merge, rank, &scratch);
    if (st != LEV_OK) break;
  }
  lev_bytes_free(&scratch);
  return st;
}

static lev_status read_model(lev_tokenizer *t, const json_t *model) {
  if (!json_is_object(model)) return lev_fail(LEV_ERR_FORMAT, "there is no \"model\" object");
  if (json_object_get(model, "type") && !is_type(model, "BPE")) return unsupported("model", model);
  const json_t *dropout = json_object_get(model, "dropout");
  if (!is_none(dropout) && json_number_value(dropout) != 0)
    return lev_fail(LEV_ERR_UNSUPPORTED, "model with dropout %g is not supported", json_number_value(dropout));
  const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
  for (int i = 0; i < 2; ++i)
    if (*text_of(model, affixes[i]))
      return lev_fail(LEV_ERR_UNSUPPORTED, "model with %s \"%.100s\" is not supported", affixes[i],
                      text_of(model, affixes[i]));
  if (is_true(model, "byte_fallback", false))
    return lev_fail(LEV_ERR_UNSUPPORTED, "model with byte_fallback is not supported");
  LEV_TRY(read_vocab(t, json_object_get(model, "vocab")));
  LEV_TRY(read_merges(t, json_object_get(model, "merges")));
  lev_bpe_set_ignore_merges(t->bpe, is_true(model, "ignore_merges", false));
  return LEV_OK;
}

static lev_status read_added(lev_tokenizer *t, const json_t *added) {
  size_t i;
  json_t *a;
  json_array_foreach(added, i, a) {
    const json_t *content = json_object_get(a, "content"), *id = json_object_get(a, "id");
    if (!json_is_string(content) || !json_is_integer(id) || json_integer_value(id) < 0 ||
        json_integer_value(id) >= LEV_VOCAB_MAX)
      return lev_fail(LEV_ERR_FORMAT, "added token %zu has no content or no id in range", i);
    if (is_true(a, "single_word", false))
      return lev_fail(LEV_ERR_UNSUPPORTED, "added token \"%.100s\" with single_word is not supported",
                      json_string_value(content));
    bool special = is_true(a, "special", false);
    lev_added_token token = {.text = (char *)(uintptr_t)json_string_value(content), /* copied */
                             .size = json_string_length(content),
                             .id = (int32_t)json_integer_value(id),
                             .special = special,
                             .normalized = is_true(a, "normalized", !special),
                             .lstrip = is_true(a, "lstrip", false),
                             .rstrip = is_true(a, "rstrip", false)};
    if (strlen(token.text) != token.size) return lev_fail(LEV_ERR_UNSUPPORTED, "added token %zu holds a NUL", i);
    LEV_TRY(lev_tokenizer_add_token(t, token));
  }
  return LEV_OK;
}

/* ---- reading: the steps around the model ---- */

static lev_status read_normalizer(lev_tokenizer *t, const json_t *n) {
  size_t i;
  json_t *part;
  if (is_none(n)) return LEV_OK;
  if (is_type(n, "NFC")) {
    t->nfc = true;
    return LEV_OK;
  }
  if (!is_type(n, "Sequence")) return unsupported("normalizer", n);
  json_array_foreach(json_object_get(n, "normalizers"), i, part) {
    if (!is_type(part, "NFC")) return unsupported("normalizer", part);
    t->nfc = true;
  }
  return LEV_OK;
}

static lev_status read_split(lev_tokenizer *t, const json_t *p) {
  const json_t *pattern = json_object_get(p, "pattern"), *regex = json_object_get(pattern, "Regex");
  if (!json_is_string(regex) || strlen(json_string_value(regex)) != json_string_length(regex))
    return lev_fail(LEV_ERR_UNSUPPORTED, "pre-tokenizer Split without a Regex is not supported");
  if (strcmp(text_of(p, "behavior"), "Isolated") != 0 || is_true(p, "invert", false))
    return lev_fail(LEV_ERR_UNSUPPORTED, "pre-tokenizer Split with behavior %.100s%s is not supported",
                    text_of(p, "behavior"), is_true(p, "invert", false) ? ", inverted," : "");
  return lev_tokenizer_add_step(
      t, (lev_pre_step){.kind = LEV_PRE_SPLIT, .pattern = (char *)(uintptr_t)json_string_value(regex)}); /* copied */
}

static lev_status read_pre_step(lev_tokenizer *t, const json_t *p) {
  if (is_type(p, "ByteLevel"))
    return lev_tokenizer_add_step(t, (lev_pre_step){.kind = LEV_PRE_BYTE_LEVEL,
                                                    .use_regex = is_true(p, "use_regex", true),
                                                    .add_prefix_space = is_true(p, "add_prefix_space", true)});
  if (is_type(p, "Digits"))
    return lev_tokenizer_add_step(
        t, (lev_pre_step){.kind = LEV_PRE_DIGITS, .individual = is_true(p, "individual_digits", false)});
  return is_type(p, "Split") ? read_split(t, p) : unsupported("pre-tokenizer", p);
}

static lev_status read_pre_tokenizer(lev_tokenizer *t, const json_t *p) {
  size_t i;
  json_t *part;
  if (is_none(p)) return lev_fail(LEV_ERR_UNSUPPORTED, "a tokenizer without pre-tokenizer is not supported");
  if (!is_type(p, "Sequence")) return read_pre_step(t, p);
  json_array_foreach(json_object_get(p, "pretokenizers"), i, part) LEV_TRY(read_pre_step(t, part));
  return LEV_OK;
}

/* The ids that one special token of a template stands for. */
static lev_status read_template_token(const json_t *table, const char *name, lev_ids *out) {
  const json_t *ids = json_object_get(json_object_get(table, name), "ids");
  size_t i;
  json_t *id;
  if (!json_is_array(ids)) return lev_fail(LEV_ERR_FORMAT, "the template's special token \"%.100s\" has no ids", name);
  json_array_foreach(ids, i, id) {
    if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= LEV_VOCAB_MAX)
      return lev_fail(LEV_ERR_FORMAT, "the template's special token \"%.100s\" has an id out of range", name);
    LEV_TRY(lev_ids_append(out, (int32_t)json_integer_value(id)));
  }
  return LEV_OK;
}

static lev_status read_template(lev_tokenizer *t, const json_t *p) {
  size_t i;
  int sequences = 0;
  json_t *item;
  if (t->before.size || t->after.size)
    return lev_fail(LEV_ERR_UNSUPPORTED, "more than one TemplateProcessing is not supported");
  json_array_foreach(json_object_get(p, "single"), i, item) {
    const json_t *special = json_object_get(item, "SpecialToken");
    if (special)
      LEV_TRY(read_template_token(json_object_get(p, "special_tokens"), text_of(special, "id"),
                                  sequences ? &t->after : &t->before));
    else if (json_object_get(item, "Sequence") && sequences == 0)
      ++sequences;
    else
      return lev_fail(LEV_ERR_UNSUPPORTED, "part %zu of TemplateProcessing's \"single\" is not supported", i);
  }
  if (sequences != 1) return lev_fail(LEV_ERR_FORMAT, "TemplateProcessing's \"single\" does not hold the text");
  return LEV_OK;
}

static lev_status read_post_processor(lev_tokenizer *t, const json_t *p) {
  size_t i;
  json_t *part;
  if (is_none(p) || is_type(p, "ByteLevel")) return LEV_OK; /* ByteLevel changes offsets only */
  if (is_type(p, "TemplateProcessing")) return read_template(t, p);
  if (!is_type(p, "Sequence")) return unsupported("post-processor", p);
  json_array_foreach(json_object_get(p, "processors"), i, part) {
    if (is_type(part, "Sequence")) return unsupported("post-processor in a sequence:", part);
    LEV_TRY(read_post_processor(t, part));
  }
  return LEV_OK;
}

static lev_status read_all(lev_tokenizer *t, const json_t *root) {
  const json_t *decoder = json_object_get(root, "decoder");
  if (!json_is_object(root)) return lev_fail(LEV_ERR_FORMAT, "not a JSON object");
  if (!is_none(decoder) && !is_type(decoder, "ByteLevel")) return unsupported("decoder", decoder);
  LEV_TRY(read_normalizer(t, json_object_get(root, "normalizer")));
  LEV_TRY(read_pre_tokenizer(t, json_object_get(root, "pre_tokenizer")));
  LEV_TRY(read_post_processor(t, json_object_get(root, "post_processor")));
  LEV_TRY(read_model(t, json_object_get(root, "model")));
  LEV_TRY(read_added(t, json_object_get(root, "added_tokens")));
  return lev_tokenizer_prepare(t);
}

lev_status lev_tokenizer_parse(const char *json, size_t size, const char *name, lev_tokenizer **out) {
  json_error_t error;
  lev_tokenizer *t = NULL;
  *out = NULL;
  json_t *root = json_loadb(json, size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
  if (!root) return lev_fail(LEV_ERR_FORMAT, "%s:%d:%d: %s", name, error.line, error.column, error.text);
  lev_status st = lev_tokenizer_create(&t);
  if (st == LEV_OK) {
    st = read_all(t, root);
    if (st == LEV_ERR_FORMAT || st == LEV_ERR_UNSUPPORTED) { /* say which file */
      const char *sentence = strstr(lev_detail(), ": ");     /* behind the source line */
      st = lev_fail(st, "%s: %s", name, sentence ? sentence + 2 : lev_detail());
    }
  }
  json_decref(root);
  if (st == LEV_OK) {
    hash_of(json, size, t->hash);
    *out = t;
  } else {
    lev_tokenizer_close(t);
  }
  return st;
}

lev_status lev_tokenizer_read(const char *path, lev_tokenizer **out) {
  lev_map map;
  *out = NULL;
  LEV_TRY(lev_map_open(path, &map));
  lev_status st = lev_tokenizer_parse((const char *)map.data, map.bytes, path, out);
  lev_map_close(&map);
  return st;
}

/* ---- writing ---- */

/* The vocabulary's spelling of an id, as a JSON string; raw = as it is. NULL if the id is free or on failure. */
static json_t *spelled(const lev_tokenizer *t, int64_t id, bool raw, lev_bytes_buffer *scratch) {
  size_t size;
  const uint8_t *bytes = lev_bpe_token(t->bpe, id, &size);
  if (!bytes) return NULL;
  if (raw) return json_stringn((const char *)bytes, size);
  scratch->size = 0;
  if (lev_bytes_spell(bytes, size, scratch) != LEV_OK) return NULL;
  return json_stringn((const char *)scratch->data, scratch->size);
}

static json_t *vocab_json(const lev_tokenizer *t, lev_bytes_buffer *scratch) {
  json_t *vocab = json_object();
  bool ok = vocab != NULL;
  for (int64_t id = 0; ok && id < lev_bpe_ids(t->bpe); ++id) {
    size_t size;
    if (!lev_bpe_token(t->bpe, id, &size)) continue;
    json_t *name = spelled(t, id, !lev_bpe_findable(t->bpe, id), scratch);
    ok = name && json_object_set_new(vocab, json_string_value(name), json_integer(id)) == 0;
    json_decref(name);
  }
  if (ok) return vocab;
  json_decref(vocab);
  return NULL;
}

static json_t *merges_json(const lev_tokenizer *t, lev_bytes_buffer *scratch) {
  json_t *merges = json_array();
  bool ok = merges != NULL;
  for (int64_t rank = 0; ok && rank < lev_bpe_merges(t->bpe); ++rank) {
    int32_t left, right;
    lev_bpe_merge(t->bpe, rank, &left, &right);
    json_t *a = spelled(t, left, false, scratch), *b = spelled(t, right, false, scratch);
    ok =
        a && b && json_array_append_new(merges, json_sprintf("%s %s", json_string_value(a), json_string_value(b))) == 0;
    json_decref(a);
    json_decref(b);
  }
  if (ok) return merges;
  json_decref(merges);
  return NULL;
}

static json_t *added_json(const lev_tokenizer *t) {
  json_t *list = json_array();
  for (int64_t id = 0; id < lev_bpe_ids(t->bpe); ++id) /* in the order of their ids */
    for (int64_t i = 0; i < t->n_added; ++i) {
      const lev_added_token *a = &t->added[i];
      if (a->id != id) continue;
      json_array_append_new(list, json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", a->id, "content", a->text,
                                            "single_word", 0, "lstrip", a->lstrip, "rstrip", a->rstrip, "normalized",
                                            a->normalized, "special", a->special));
    }
  return list;
}

static json_t *byte_level_json(const lev_pre_step *step) {
  return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", step->add_prefix_space,
                   "trim_offsets", 1, "use_regex", step->use_regex);
}

static json_t *step_json(const lev_pre_step *step) {
  switch (step->kind) {
  case LEV_PRE_SPLIT:
    return json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex", step->pattern, "behavior",
                     "Isolated", "invert", 0);
  case LEV_PRE_DIGITS:
    return json_pack("{s:s, s:b}", "type", "Digits", "individual_digits", step->individual);
  default:
    return byte_level_json(step);
  }
}

static json_t *pre_tokenizer_json(const lev_tokenizer *t) {
  if (t->n_steps == 1) return step_json(&t->steps[0]);
  json_t *list = json_array();
  for (int i = 0; i < t->n_steps; ++i) json_array_append_new(list, step_json(&t->steps[i]));
  return json_pack("{s:s, s:o}", "type", "Sequence", "pretokenizers", list);
}

/* Appends the ids as special tokens of a template and enters them into its table. */
static bool template_tokens(const lev_tokenizer *t, const lev_ids *ids, json_t *single, json_t *table,
                            lev_bytes_buffer *scratch) {
  bool ok = true;
  for (size_t i = 0; ok && i < ids->size; ++i) {
    json_t *name = spelled(t, ids->data[i], true, scratch);
    ok = name != NULL;
    if (!ok) break;
    const char *text = json_string_value(name);
    ok = json_array_append_new(single, json_pack("{s:{s:s, s:i}}", "SpecialToken", "id", text, "type_id", 0)) == 0 &&
         json_object_set_new(table, text,
                             json_pack("{s:s, s:[i], s:[s]}", "id", text, "ids", ids->data[i], "tokens", text)) == 0;
    json_decref(name);
  }
  return ok;
}

static json_t *post_processor_json(const lev_tokenizer *t, lev_bytes_buffer *scratch) {
  if (t->before.size == 0 && t->after.size == 0) return byte_level_json(&t->steps[t->n_steps - 1]);
  json_t *single = json_array(), *table = json_object();
  bool ok = template_tokens(t, &t->before, single, table, scratch) &&
            json_array_append_new(single, json_pack("{s:{s:s, s:i}}", "Sequence", "id", "A", "type_id", 0)) == 0 &&
            template_tokens(t, &t->after, single, table, scratch);
  json_t *pair = json_deep_copy(single);
  ok = ok && json_array_append_new(pair, json_pack("{s:{s:s, s:i}}", "Sequence", "id", "B", "type_id", 1)) == 0;
  json_t *all = json_pack("{s:s, s:o, s:o, s:o}", "type", "TemplateProcessing", "single", single, "pair", pair,
                          "special_tokens", table);
  if (ok) return all;
  json_decref(all);
  return NULL;
}

static json_t *tokenizer_json(const lev_tokenizer *t, lev_bytes_buffer *scratch) {
  json_t *normalizer = t->nfc ? json_pack("{s:s}", "type", "NFC") : json_null();
  const lev_pre_step decoder = {.kind = LEV_PRE_BYTE_LEVEL, .use_regex = true, .add_prefix_space = true};
  json_t *model =
      json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "dropout", "unk_token",
                "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges",
                lev_bpe_ignore_merges(t->bpe), "vocab", vocab_json(t, scratch), "merges", merges_json(t, scratch));
  return json_pack("{s:s, s:n, s:n, s:o, s:o, s:o, s:o, s:o, s:o}", "version", "1.0", "truncation", "padding",
                   "added_tokens", added_json(t), "normalizer", normalizer, "pre_tokenizer", pre_tokenizer_json(t),
                   "post_processor", post_processor_json(t, scratch), "decoder", byte_level_json(&decoder), "model",
                   model);
}

lev_status lev_tokenizer_write(lev_tokenizer *t, const char *path) {
  lev_bytes_buffer scratch = {0};
  json_t *root = tokenizer_json(t, &scratch);
  char *text = root ? json_dumps(root, JSON_INDENT(1)) : NULL;
  json_decref(root);
  lev_bytes_free(&scratch);
  if (!text) return lev_fail(LEV_ERR_NOMEM, "no memory for the text of %s", path);
  lev_out out;
  size_t size = strlen(text);
  lev_status st = lev_out_open(&out, path);
  if (st == LEV_OK) {
    st = lev_out_write(&out, text, size);
    if (st == LEV_OK) st = lev_out_commit(&out);
    lev_out_discard(&out);
  }
  if (st == LEV_OK) hash_of(text, size, t->hash);
  free(text);
  return st;
}
