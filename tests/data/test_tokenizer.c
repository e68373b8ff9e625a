/* SPDX-License-Identifier: Apache-2.0 */
/* BPE: golden merges and ids (those of Hugging Face's tokenizers), any bytes come back, tokenizer.json in both
 * spellings, what is refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/rng.h"
#include "harness/data/bpe_train.h"
#include "harness/data/tokenizer_json.h"
#include "tests/data/folder.h"
#include "tests/t.h"

static const char corpus[] = "low low low low low lower lower newest newest newest newest newest newest widest widest "
                             "widest aaaa aaaaaaa\n";

static lev_status gather(void *ctx, const int32_t *ids, size_t n) {
  for (size_t i = 0; i < n; ++i) LEV_TRY(lev_ids_append(ctx, ids[i]));
  return LEV_OK;
}

static lev_status count(void *ctx, const unsigned char *piece, size_t size) {
  return lev_bpe_trainer_add(ctx, piece, size);
}

/* A GPT-2 style tokenizer learned from a text; NULL on failure. The caller closes it. */
static lev_tokenizer *learned(const char *text, int64_t limit) {
  lev_tokenizer *t = NULL;
  lev_bpe_trainer *trainer = NULL;
  lev_bpe *bpe = NULL;
  bool ok = T_EXPECT_OK(lev_tokenizer_create(&t)) && T_EXPECT_OK(lev_bpe_trainer_create(&trainer)) &&
            T_EXPECT_OK(lev_tokenizer_add_step(t, (lev_pre_step){.kind = LEV_PRE_BYTE_LEVEL, .use_regex = true})) &&
            T_EXPECT_OK(lev_tokenizer_pieces(t, text, strlen(text), count, trainer)) &&
            T_EXPECT_OK(lev_bpe_trainer_run(trainer, limit, &bpe));
  lev_bpe_trainer_close(trainer);
  if (ok) {
    lev_bpe_destroy(t->bpe);
    t->bpe = bpe;
    lev_added_token eod = {
        .text = (char[]){"<|endoftext|>"}, .size = 13, .id = (int32_t)lev_bpe_ids(bpe), .special = true};
    ok = T_EXPECT_OK(lev_tokenizer_add_token(t, eod)) && T_EXPECT_OK(lev_tokenizer_prepare(t));
  }
  if (ok) return t;
  lev_tokenizer_close(t);
  return NULL;
}

static void expect_ids(lev_tokenizer *t, const char *text, size_t size, const int32_t *want, size_t n) {
  lev_ids ids = {0};
  T_EXPECT_OK(lev_tokenizer_encode(t, text, size, true, gather, &ids));
  bool same = ids.size == n;
  for (size_t i = 0; same && i < n; ++i) same = ids.data[i] == want[i];
  T_EXPECT_MSG(same, "\"%.40s\" gives %zu ids, first %d, expected %zu, first %d", text, ids.size,
               ids.size ? (int)ids.data[0] : -1, n, n ? (int)want[0] : -1);
  lev_ids_free(&ids);
}

static void expect_back(lev_tokenizer *t, const void *text, size_t size) {
  lev_ids ids = {0};
  lev_bytes_buffer back = {0};
  T_EXPECT_OK(lev_tokenizer_encode(t, text, size, false, gather, &ids));
  T_EXPECT_OK(lev_tokenizer_decode(t, ids.data, ids.size, false, &back));
  T_EXPECT_MSG(back.size == size && (size == 0 || memcmp(back.data, text, size) == 0), "%zu bytes come back as %zu",
               size, back.size);
  lev_ids_free(&ids);
  lev_bytes_free(&back);
}

T_TEST(byte_alphabet) {
  bool seen[324] = {0};
  for (int b = 0; b < 256; ++b) {
    uint32_t c = lev_byte_char((uint8_t)b);
    T_REQUIRE(c < 324 && !seen[c]);
    seen[c] = true;
    T_EXPECT_EQ_I64(lev_char_byte(c), b);
  }
  T_EXPECT_EQ_I64(lev_byte_char(' '), 0x120);
  T_EXPECT_EQ_I64(lev_byte_char('\n'), 0x10A);
  T_EXPECT_EQ_I64(lev_byte_char(0xAD), 0x143);
  T_EXPECT_EQ_I64(lev_char_byte(0x144), -1);
  T_EXPECT_EQ_I64(lev_char_byte(' '), -1);
}

T_TEST(bpe_golden_merges_and_ids) {
  static const char *const merges[] = {"aa",   "es",   "est",     "lo",     "low",   "ew",      "new",
                                       " low", " new", " newest", "dest",   "idest", "widest",  " widest",
                                       "aaaa", "er",   " aaaa",   " lower", "aaa",   " aaaaaaa"};
  lev_tokenizer *t = learned(corpus, 300);
  T_REQUIRE(t != NULL);
  T_EXPECT_EQ_I64(lev_bpe_merges(t->bpe), 20);
  for (int i = 0; i < 20; ++i) {
    size_t size;
    const uint8_t *token = lev_bpe_token(t->bpe, 256 + i, &size);
    T_EXPECT_MSG(token && size == strlen(merges[i]) && memcmp(token, merges[i], size) == 0, "merge %d is not \"%s\"", i,
                 merges[i]);
  }
  const int32_t low[] = {260, 263, 258, 264, 271, 272, 64, 198}, odd[] = {127, 102, 157, 254, 236, 269},
                two[] = {83, 71, 68, 220, 273}, eod[] = {64, 276, 276, 65};
  expect_ids(t, "low lowest newer aaaaa\n", 23, low, 8);
  expect_ids(t, "\xC3\xA9\xE1\xA0\x8E widest", 12, odd, 6); /* U+180E is no white space */
  expect_ids(t, "the  lower", 10, two, 5);
  expect_ids(t, "a<|endoftext|><|endoftext|>b", 28, eod, 4);
  expect_ids(t, "", 0, NULL, 0);
  lev_tokenizer_close(t);
}

/* Merging in rank order, by a search over all pairs each time. */
static size_t naive_encode(const lev_bpe *b, const uint8_t *word, size_t n, int32_t *ids) {
  for (size_t i = 0; i < n; ++i) ids[i] = lev_bpe_find(b, word + i, 1);
  for (int64_t rank = 0; rank < lev_bpe_merges(b);) {
    int32_t left, right;
    size_t i = 0, size_l, size_r;
    uint8_t joined[512];
    lev_bpe_merge(b, rank, &left, &right);
    while (i + 1 < n && (ids[i] != left || ids[i + 1] != right)) ++i;
    if (i + 1 >= n) {
      ++rank;
      continue;
    }
    const uint8_t *l = lev_bpe_token(b, left, &size_l), *r = lev_bpe_token(b, right, &size_r);
    memcpy(joined, l, size_l);
    memcpy(joined + size_l, r, size_r);
    ids[i] = lev_bpe_find(b, joined, size_l + size_r);
    memmove(ids + i + 1, ids + i + 2, (n - i - 2) * sizeof *ids);
    --n;
    rank = 0; /* the new symbol may form a pair of lower rank */
  }
  return n;
}

T_TEST(bpe_equals_naive_merging) {
  lev_tokenizer *t = learned(corpus, 300);
  lev_bpe_coder *coder = NULL;
  T_REQUIRE(t != NULL && lev_bpe_coder_create(t->bpe, &coder) == LEV_OK);
  lev_rng_key key = {t_seed(), 0, 1};
  for (uint64_t trial = 0; trial < 600 && !t_failed(); ++trial) {
    uint8_t word[200];
    int32_t want[200];
    lev_ids got = {0};
    size_t n = 1 + lev_rng_u64(key, trial << 32) % (trial % 10 ? 24 : sizeof word);
    for (size_t i = 0; i < n; ++i) word[i] = (uint8_t) "aaaelowrnstdi "[lev_rng_u64(key, trial << 32 | (i + 1)) % 14];
    size_t expected = naive_encode(t->bpe, word, n, want);
    T_EXPECT_OK(lev_bpe_encode(coder, word, n, &got));
    T_EXPECT_OK(lev_bpe_encode(coder, word, n, &got)); /* the second time from the cache */
    T_EXPECT(got.size == 2 * expected && memcmp(got.data, want, expected * sizeof *want) == 0 &&
             memcmp(got.data + expected, want, expected * sizeof *want) == 0);
    lev_ids_free(&got);
  }
  lev_bpe_coder_destroy(coder);
  lev_tokenizer_close(t);
}

T_TEST(tokenizer_gives_any_bytes_back) {
  lev_tokenizer *t = learned(corpus, 300);
  T_REQUIRE(t != NULL);
  lev_rng_key key = {t_seed(), 0, 2};
  static uint8_t text[20000];
  for (uint64_t trial = 0; trial < 60; ++trial) {
    size_t n = trial < 40 ? (size_t)trial : (size_t)(lev_rng_u64(key, trial << 32) % sizeof text);
    for (size_t i = 0; i < n; ++i) {
      uint64_t r = lev_rng_u64(key, trial << 32 | (i + 1));
      text[i] = trial % 2 ? (uint8_t)r : (uint8_t) " \n\xE2\x80\xA8\xC3\xA9low<|\xF0\x9F"[r % 15];
    }
    expect_back(t, text, n);
  }
  memset(text, ' ', sizeof text);
  expect_back(t, text, sizeof text);
  memset(text, 'a', sizeof text);
  expect_back(t, text, sizeof text);
  memset(text, 0xFF, sizeof text);
  expect_back(t, text, sizeof text);
  lev_bytes_buffer back = {0};
  T_EXPECT_OK(lev_tokenizer_decode(t, (int32_t[]){64, 276, 65}, 3, true, &back));
  T_EXPECT(back.size == 2 && memcmp(back.data, "ab", 2) == 0);
  T_EXPECT_STATUS(lev_tokenizer_decode(t, &(int32_t){277}, 1, false, &back), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_tokenizer_decode(t, &(int32_t){-1}, 1, false, &back), LEV_ERR_ARG);
  lev_bytes_free(&back);
  lev_tokenizer_close(t);
}

T_TEST(tokenizer_json_round_trip) {
  folder f;
  T_REQUIRE(folder_make(&f));
  lev_tokenizer *t = learned(corpus, 300), *again = NULL;
  T_REQUIRE(t != NULL);
  t->nfc = true;
  T_EXPECT_OK(lev_ids_append(&t->before, 276));
  T_EXPECT_OK(lev_ids_append(&t->after, 276));
  T_EXPECT_OK(lev_tokenizer_write(t, folder_path(&f, "t.json")));
  T_EXPECT_OK(lev_tokenizer_read(folder_path(&f, "t.json"), &again));
  if (again) {
    T_EXPECT(strcmp(t->hash, again->hash) == 0 && strlen(t->hash) == 32);
    T_EXPECT_EQ_I64(lev_tokenizer_vocab(again), 277);
    T_EXPECT_EQ_I64(lev_tokenizer_added_id(again, "<|endoftext|>"), 276);
    const int32_t want[] = {276, 260, 127, 102, 276}; /* e and U+0301 compose */
    expect_ids(again, "lowe\xCC\x81", 6, want, 5);
    T_EXPECT_OK(lev_tokenizer_write(again, folder_path(&f, "u.json")));
    T_EXPECT(strcmp(t->hash, again->hash) == 0); /* the same bytes */
  }
  lev_tokenizer_close(again);
  lev_tokenizer_close(t);
  T_EXPECT_STATUS(lev_tokenizer_read(folder_path(&f, "none.json"), &again), LEV_ERR_IO);
  folder_remove(&f);
}

/* A tokenizer.json around the given parts, with all bytes, then "ab" (256) and "abc" (257). */
static lev_status parse_with(const char *steps, const char *model, const char *added, lev_tokenizer **out) {
  lev_bytes_buffer json = {0};
  char entry[64];
  lev_status st = LEV_OK;
  const char *const open[] = {
      "{", steps, ", \"added_tokens\": [", added, "], \"model\": {\"type\": \"BPE\", ", model, ", \"vocab\": {"};
  for (size_t i = 0; i < sizeof open / sizeof *open; ++i) st = lev_bytes_append(&json, open[i], strlen(open[i]));
  for (int b = 0; b < 256; ++b) {
    uint8_t spelled[4] = {0};
    size_t n = lev_utf8_encode(lev_byte_char((uint8_t)b), spelled);
    const char *escape = b == '"' || b == '\\' ? "\\" : "";
    snprintf(entry, sizeof entry, "\"%s%.*s\": %d, ", escape, (int)n, (const char *)spelled, b);
    if (st == LEV_OK) st = lev_bytes_append(&json, entry, strlen(entry));
  }
  const char tail[] = "\"ab\": 256, \"abc\": 257}}}";
  if (st == LEV_OK) st = lev_bytes_append(&json, tail, sizeof tail - 1);
  if (st == LEV_OK) st = lev_tokenizer_parse((const char *)json.data, json.size, "test.json", out);
  lev_bytes_free(&json);
  return st;
}

#define BYTE_LEVEL "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}"
#define BYTE_LAST "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": false}"
#define MERGES "\"merges\": [\"a b\", \"ab c\"]"

T_TEST(tokenizer_json_both_spellings) {
  static const char *const merges[] = {MERGES, "\"merges\": [[\"a\", \"b\"], [\"ab\", \"c\"]]"};
  for (int i = 0; i < 2; ++i) {
    lev_tokenizer *t;
    T_REQUIRE_OK(parse_with(BYTE_LEVEL, merges[i], "", &t));
    const int32_t want[] = {257, ' ', 256, 256};
    expect_ids(t, "abc abab", 8, want, 4);
    lev_tokenizer_close(t);
  }
}

T_TEST(tokenizer_json_forms) {
  static const struct {
    const char *steps, *model, *added, *text;
    int n;
    int32_t ids[8];
  } good[] = {
      {BYTE_LEVEL, "\"merges\": []", "", "abc", 3, {'a', 'b', 'c'}},
      {BYTE_LEVEL, "\"ignore_merges\": true, \"merges\": []", "", "abc", 1, {257}},
      {"\"pre_tokenizer\": {\"type\": \"ByteLevel\"}", MERGES, "", "ab", 2, {' ', 256}},
      {"\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": "
       "\"\\\\s|b\"}, \"behavior\": \"Isolated\", \"invert\": false}, " BYTE_LAST "]}",
       MERGES,
       "",
       "ab ac",
       5,
       {'a', 'b', ' ', 'a', 'c'}},
      {BYTE_LEVEL,
       MERGES,
       "{\"id\": 258, \"content\": \"<x>\", \"lstrip\": true, \"rstrip\": true, \"special\": true}",
       "ab  <x>\n\tab",
       3,
       {256, 258, 256}},
      {BYTE_LEVEL,
       MERGES,
       "{\"id\": 300, \"content\": \"<x>\"}, {\"id\": 258, \"content\": \"<x>ab\"}",
       "<x>ab<x>a",
       3,
       {258, 300, 'a'}},
      {BYTE_LEVEL ", \"post_processor\": {\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": "
                  "\"B\"}}, {\"Sequence\": {\"id\": \"A\"}}], \"special_tokens\": {\"B\": {\"ids\": [257, 256]}}}",
       MERGES,
       "",
       "ab",
       3,
       {257, 256, 256}},
      {BYTE_LEVEL ", \"normalizer\": {\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}]}",
       MERGES,
       "",
       "e\xCC\x81"
       "ab",
       3,
       {0xC3, 0xA9, 256}}};
  for (size_t i = 0; i < sizeof good / sizeof *good; ++i) {
    lev_tokenizer *t;
    if (!T_EXPECT_OK(parse_with(good[i].steps, good[i].model, good[i].added, &t))) continue;
    expect_ids(t, good[i].text, strlen(good[i].text), good[i].ids, (size_t)good[i].n);
    lev_tokenizer_close(t);
  }
}

T_TEST(tokenizer_json_refuses) {
  static const struct {
    const char *steps, *model, *added, *word;
    lev_status want;
  } bad[] = {{BYTE_LEVEL, "\"merges\": [\"ab\"]", "", "merge 0", LEV_ERR_FORMAT},
             {BYTE_LEVEL, "\"merges\": [\"a b c\"]", "", "merge 0", LEV_ERR_FORMAT},
             {BYTE_LEVEL, "\"merges\": [\"a b\", [\"a\"]]", "", "merge 1", LEV_ERR_FORMAT},
             {BYTE_LEVEL, "\"merges\": [\"a c\"]", "", "merge 0", LEV_ERR_FORMAT},
             {BYTE_LEVEL, "\"merges\": [\"a zz\"]", "", "zz", LEV_ERR_FORMAT},
             {BYTE_LEVEL, "\"merges\": 5", "", "merges", LEV_ERR_FORMAT},
             {BYTE_LEVEL, MERGES ", \"byte_fallback\": true", "", "byte_fallback", LEV_ERR_UNSUPPORTED},
             {BYTE_LEVEL, MERGES ", \"dropout\": 0.1", "", "dropout", LEV_ERR_UNSUPPORTED},
             {BYTE_LEVEL, MERGES ", \"end_of_word_suffix\": \"</w>\"", "", "</w>", LEV_ERR_UNSUPPORTED},
             {BYTE_LEVEL, MERGES, "{\"id\": 5, \"content\": \"<x>\"}", "<x>", LEV_ERR_FORMAT},
             {BYTE_LEVEL, MERGES, "{\"id\": -1, \"content\": \"<x>\"}", "added token 0", LEV_ERR_FORMAT},
             {BYTE_LEVEL, MERGES, "{\"id\": 99999999999, \"content\": \"<x>\"}", "added token 0", LEV_ERR_FORMAT},
             {BYTE_LEVEL, MERGES, "{\"id\": 258, \"content\": \"\"}", "empty", LEV_ERR_FORMAT},
             {BYTE_LEVEL, MERGES, "{\"id\": 258, \"content\": \"x\", \"single_word\": true}", "single_word",
              LEV_ERR_UNSUPPORTED},
             {"\"pre_tokenizer\": null", MERGES, "", "pre-tokenizer", LEV_ERR_UNSUPPORTED},
             {"\"pre_tokenizer\": {\"type\": \"Digits\"}", MERGES, "", "ByteLevel", LEV_ERR_UNSUPPORTED},
             {"\"pre_tokenizer\": {\"type\": \"Metaspace\"}", MERGES, "", "Metaspace", LEV_ERR_UNSUPPORTED},
             {BYTE_LEVEL ", \"normalizer\": {\"type\": \"NFKC\"}", MERGES, "", "NFKC", LEV_ERR_UNSUPPORTED},
             {BYTE_LEVEL ", \"decoder\": {\"type\": \"Fuse\"}", MERGES, "", "Fuse", LEV_ERR_UNSUPPORTED},
             {BYTE_LEVEL ", \"post_processor\": {\"type\": \"BertProcessing\"}", MERGES, "", "BertProcessing",
              LEV_ERR_UNSUPPORTED},
             {BYTE_LEVEL
              ", \"post_processor\": {\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": "
              "\"B\"}}]}",
              MERGES, "", "\"B\"", LEV_ERR_FORMAT}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    lev_tokenizer *t;
    T_EXPECT_STATUS(parse_with(bad[i].steps, bad[i].model, bad[i].added, &t), bad[i].want);
    T_EXPECT_MSG(strstr(lev_detail(), bad[i].word) && strstr(lev_detail(), "test.json"), "case %zu: %s", i,
                 lev_detail());
  }
  static const char *const broken[] = {"", "{", "[]", "5", "{\"a\": 1, \"a\": 2}", "{\"pre_tokenizer\": {}}"};
  for (size_t i = 0; i < sizeof broken / sizeof *broken; ++i) {
    lev_tokenizer *t;
    lev_status st = lev_tokenizer_parse(broken[i], strlen(broken[i]), "x", &t);
    T_EXPECT(st == LEV_ERR_FORMAT || st == LEV_ERR_UNSUPPORTED);
  }
}

static lev_status join_pieces(void *ctx, const unsigned char *piece, size_t size) {
  LEV_TRY(lev_bytes_append(ctx, "|", 1));
  return lev_bytes_append(ctx, piece, size);
}

T_TEST(split_patterns) {
  static const struct {
    const char *pattern, *text, *want;
  } good[] = {{lev_split_gpt2, "it's  a\n\n b12!?", "|it|'s| | a|\n\n| b|12|!?"},
              {"\\s", "a\xE1\xA0\x8E \xC2\x85z", "|a\xE1\xA0\x8E| |\xC2\x85|z"},
              {"[^\\s]+", "a\xE1\xA0\x8E b", "|a\xE1\xA0\x8E| |b"},
              {"\\S", "a b", "|a| |b"},
              {"\\u0061+", "baab", "|b|aa|b"},
              {"[]x]", "a]x", "|a|]|x"},
              {"\\v", "a\n\x0b", "|a\n|\x0b"},
              {"^b$", "a\nb\nc", "|a\n|b|\nc"},
              {"\\p{Lu}{2}|\\x{62}+", "aBCbb", "|a|BC|bb"}};
  static const char *const bad[] = {"\\w+",   "\\bx", "[\\S]", "a{1,2}+", "(a)\\1", "[a&&b]",
                                    "[a[b]]", "a*",   "(",     "\\h",     "x\\"};
  for (size_t i = 0; i < sizeof good / sizeof *good; ++i) {
    lev_split *s;
    lev_bytes_buffer got = {0};
    if (!T_EXPECT_OK(lev_split_create(good[i].pattern, &s))) continue;
    T_EXPECT_OK(lev_split_each(s, (const unsigned char *)good[i].text, strlen(good[i].text), join_pieces, &got));
    T_EXPECT_MSG(got.size == strlen(good[i].want) && memcmp(got.data, good[i].want, got.size) == 0, "%s: %.*s",
                 good[i].pattern, (int)got.size, (const char *)got.data);
    lev_bytes_free(&got);
    lev_split_close(s);
  }
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    lev_split *s;
    T_EXPECT_MSG(lev_split_create(bad[i], &s) == LEV_ERR_UNSUPPORTED && !s, "%s is not refused", bad[i]);
  }
}
