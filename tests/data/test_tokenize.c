/* SPDX-License-Identifier: Apache-2.0 */
/* Text files to token files: both inputs, the cut, sidecars, what is refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/data/loader.h"
#include "harness/data/megatron_index.h"
#include "harness/data/tokenize.h"
#include "harness/data/tokenizer_json.h"
#include "tests/data/folder.h"
#include "tests/t.h"

/* All ids of PREFIX as text: byte tokens, or through a tokenizer. */
static void expect_text(const char *prefix, lev_tokenizer *t, const char *want, size_t size) {
  lev_megatron m;
  lev_bytes_buffer got = {0};
  T_REQUIRE_OK(lev_megatron_open(prefix, &m));
  int32_t *ids = calloc((size_t)m.tokens + 1, sizeof *ids);
  if (ids && T_EXPECT_OK(lev_megatron_read(&m, 0, m.tokens, 1 << 20, ids))) {
    for (int64_t i = 0; i < m.tokens; ++i)
      if (t)
        T_EXPECT_OK(lev_tokenizer_decode(t, ids + i, 1, false, &got));
      else
        T_EXPECT_OK(lev_bytes_append(&got, ids[i] == 256 ? "$" : (char[]){(char)ids[i], 0}, 1));
    T_EXPECT_MSG(got.size == size && memcmp(got.data, want, size) == 0, "%s holds %zu bytes: %.*s", prefix, got.size,
                 got.size < 80 ? (int)got.size : 80, (const char *)got.data);
  }
  free(ids);
  lev_bytes_free(&got);
  lev_megatron_close(&m);
}

T_TEST(tokenize_bytes) {
  static const char text[] = "first line\nsecond \xFF\0line\nthird\nlast one\n";
  const size_t n = sizeof text - 1;
  folder f;
  lev_tokenize_report r;
  T_REQUIRE(folder_make(&f));
  T_REQUIRE(folder_write(&f, "t.txt", text, n));
  char *out = folder_path(&f, "o"), *in = folder_path(&f, "t.txt");
  T_REQUIRE_OK(lev_tokenize(&(lev_tokenize_options){.input = in, .output = out}, &r));
  T_EXPECT(r.vocab == 256 && r.train_tokens == (int64_t)n && r.train_bytes == (int64_t)n && r.valid_tokens == 0);
  expect_text(folder_path(&f, "o.train"), NULL, text, n);
  static const struct {
    double holdout;
    size_t cut;
  } cuts[] = {{0.1, 31}, {0.25, 31}, {0.3, 31}, {0.5, 25}, {0.9, 11}, {0.99, 11}};
  for (size_t i = 0; i < sizeof cuts / sizeof *cuts; ++i) {
    T_EXPECT_OK(lev_tokenize(
        &(lev_tokenize_options){.input = in, .output = out, .holdout = cuts[i].holdout, .append_eod = true}, &r));
    T_EXPECT_MSG(r.train_bytes == (int64_t)cuts[i].cut && r.valid_bytes == (int64_t)(n - cuts[i].cut),
                 "%g holds out %d bytes", cuts[i].holdout, (int)r.valid_bytes);
    T_EXPECT(r.vocab == 257 && r.train_tokens == r.train_bytes + 1 && r.valid_tokens == r.valid_bytes + 1);
  }
  expect_text(folder_path(&f, "o.train"), NULL, "first line\n$", 12);
  lev_loader *l;
  T_REQUIRE_OK(lev_loader_open(
      &(lev_loader_options){.prefix = folder_path(&f, "o.valid"), .context = 8, .vocab = 257, .validation = true}, &l));
  T_EXPECT_EQ_I64(lev_loader_bytes(l), n - 11 - 1); /* the first byte is no label */
  lev_loader_close(l);
  T_EXPECT_STATUS(
      lev_loader_open(&(lev_loader_options){.prefix = folder_path(&f, "o.valid"), .context = 8, .vocab = 256}, &l),
      LEV_ERR_CONFIG);
  /* Nothing held out: what was held out before is text to train on now. */
  T_REQUIRE_OK(lev_tokenize(&(lev_tokenize_options){.input = in, .output = out}, &r));
  static const char *const gone[] = {"o.valid.bin", "o.valid.idx", "o.valid.json"};
  for (int i = 0; i < 3; ++i) T_EXPECT_MSG(access(folder_path(&f, gone[i]), F_OK) != 0, "%s is left", gone[i]);
  T_EXPECT(access(folder_path(&f, "o.train.idx"), F_OK) == 0);
  folder_remove(&f);
}

T_TEST(tokenize_jsonl) {
  static const char text[] = "{\"text\": \"one\\n\\u00e9\"}\n\n{\"id\": 3, \"text\": \"two\\u0000x\"}\r\n{\"text\": "
                             "\"\"}\n  \n{\"text\": \"three\"}";
  folder f;
  lev_tokenize_report r;
  lev_megatron m;
  T_REQUIRE(folder_make(&f));
  T_REQUIRE(folder_write(&f, "t.jsonl", text, sizeof text - 1));
  char *out = folder_path(&f, "o"), *in = folder_path(&f, "t.jsonl");
  T_REQUIRE_OK(lev_tokenize(&(lev_tokenize_options){.input = in, .output = out, .append_eod = true}, &r));
  expect_text(folder_path(&f, "o.train"), NULL, "one\n\xC3\xA9$two\0x$$three$", 20);
  T_EXPECT_EQ_I64(r.train_bytes, 16);
  T_REQUIRE_OK(lev_megatron_open(folder_path(&f, "o.train"), &m));
  T_EXPECT(m.sequences == 4 && m.documents == 5);
  lev_megatron_close(&m);
  T_REQUIRE_OK(lev_tokenize(&(lev_tokenize_options){.input = in, .output = out, .holdout = 0.2}, &r));
  expect_text(folder_path(&f, "o.valid"), NULL, "three", 5);
  T_EXPECT_EQ_I64(r.train_tokens, 11);
  static const struct {
    const char *line, *word;
  } bad[] = {{"{\"text\": \"a\"}\n{\"text\": ", ":2:"},
             {"{\"text\": 5}\n", ":1:"},
             {"\n\n[1]\n", ":3:"},
             {"{}", ":1:"},
             {"{\"text\": \"\xFF\"}\n", ":1:"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    T_REQUIRE(folder_write(&f, "b.txt", bad[i].line, strlen(bad[i].line)));
    T_EXPECT_STATUS(
        lev_tokenize(&(lev_tokenize_options){.input = folder_path(&f, "b.txt"), .output = out, .jsonl = true}, &r),
        LEV_ERR_FORMAT);
    T_EXPECT_MSG(strstr(lev_detail(), bad[i].word) != NULL, "%s", lev_detail());
  }
  expect_text(folder_path(&f, "o.valid"), NULL, "three", 5); /* a failure leaves the old files */
  folder_remove(&f);
}

T_TEST(tokenize_learns_from_the_training_part) {
  folder f;
  lev_tokenize_report r;
  lev_tokenizer *t;
  static char text[6001];
  T_REQUIRE(folder_make(&f));
  for (int i = 0; i < 500; ++i) memcpy(text + 12 * i, i < 400 ? "abcd ef ghi\n" : "zyzyzy xwxw\n", 12);
  T_REQUIRE(folder_write(&f, "t.txt", text, 6000));
  lev_tokenize_options o = {
      .input = folder_path(&f, "t.txt"), .output = folder_path(&f, "o"), .train_bpe = 300, .holdout = 0.2};
  T_REQUIRE_OK(lev_tokenize(&o, &r));
  T_REQUIRE_OK(lev_tokenizer_read(folder_path(&f, "o.tokenizer.json"), &t));
  T_EXPECT_EQ_I64(r.train_bytes, 4800);
  T_EXPECT(r.vocab <= 300 && r.vocab == lev_tokenizer_vocab(t) &&
           lev_tokenizer_added_id(t, "<|endoftext|>") == r.vocab - 1);
  T_EXPECT(r.train_tokens < 1700);
  T_EXPECT(r.valid_tokens == 1200); /* nothing of it was learned */
  T_EXPECT_EQ_I64(lev_bpe_find(t->bpe, (const uint8_t *)"zy", 2), -1);
  expect_text(folder_path(&f, "o.train"), t, text, 4800);
  expect_text(folder_path(&f, "o.valid"), t, text + 4800, 1200);
  /* Applied again it gives the same files, with one more token each. */
  char *model = folder_path(&f, "o.tokenizer.json");
  lev_tokenize_report again;
  o = (lev_tokenize_options){
      .input = o.input, .output = folder_path(&f, "p"), .tokenizer = model, .holdout = 0.2, .append_eod = true};
  T_EXPECT_OK(lev_tokenize(&o, &again));
  T_EXPECT(again.train_tokens == r.train_tokens + 1 && again.vocab == r.vocab);
  o.eod_token = "<none>";
  T_EXPECT_STATUS(lev_tokenize(&o, &again), LEV_ERR_CONFIG);
  lev_tokenizer_close(t);
  folder_remove(&f);
}

T_TEST(tokenize_refuses) {
  folder f;
  lev_tokenize_report r;
  T_REQUIRE(folder_make(&f));
  T_REQUIRE(folder_write(&f, "empty.txt", "", 0) && folder_write(&f, "line.txt", "one line", 8));
  char *empty = folder_path(&f, "empty.txt"), *line = folder_path(&f, "line.txt"), *out = folder_path(&f, "o");
  const struct {
    lev_tokenize_options o;
    lev_status want;
  } bad[] = {{{.output = out}, LEV_ERR_CONFIG},
             {{.input = line}, LEV_ERR_CONFIG},
             {{.input = empty, .output = out}, LEV_ERR_CONFIG},
             {{.input = empty, .output = out, .holdout = 0.5}, LEV_ERR_CONFIG},
             {{.input = line, .output = out, .holdout = 0.5}, LEV_ERR_CONFIG},
             {{.input = line, .output = out, .holdout = 1}, LEV_ERR_CONFIG},
             {{.input = line, .output = out, .holdout = -0.5}, LEV_ERR_CONFIG},
             {{.input = line, .output = out, .train_bpe = 256}, LEV_ERR_CONFIG},
             {{.input = line, .output = out, .train_bpe = 300, .tokenizer = line}, LEV_ERR_CONFIG},
             {{.input = line, .output = out, .tokenizer = line}, LEV_ERR_FORMAT},
             {{.input = line, .output = out, .tokenizer = "/nonexistent"}, LEV_ERR_IO},
             {{.input = "/nonexistent", .output = out}, LEV_ERR_IO},
             {{.input = f.root, .output = out}, LEV_ERR_IO},
             {{.input = line, .output = "/nonexistent/o"}, LEV_ERR_IO}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i)
    T_EXPECT_MSG(lev_tokenize(&bad[i].o, &r) == bad[i].want, "case %zu: %s", i, lev_detail());
  /* Learning from a text without pairs leaves the bytes and the end of document. */
  T_EXPECT_OK(lev_tokenize(&(lev_tokenize_options){.input = line, .output = out, .train_bpe = 4096}, &r));
  T_EXPECT(r.vocab > 257 && r.vocab < 280 && r.train_tokens == 2);
  folder_remove(&f);
}
