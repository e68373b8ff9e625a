/* SPDX-License-Identifier: Apache-2.0 */
/* Token files and samples: what is written is read back, hostile files are refused, every epoch is a permutation, and
 * validation scores every token once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/data/loader.h"
#include "harness/data/megatron_index.h"
#include "tests/data/folder.h"
#include "tests/t.h"

/* Two documents, the ids 0, 1, 2, ... modulo vocab. */
static bool write_stream(const char *prefix, int64_t n, int64_t vocab) {
  lev_megatron_writer *w;
  if (!T_EXPECT_OK(lev_megatron_create(prefix, vocab, &w))) return false;
  bool ok = true;
  for (int64_t i = 0; ok && i < n; ++i) {
    int32_t id = (int32_t)(i % vocab);
    ok = T_EXPECT_OK(lev_megatron_append(w, &id, 1));
    if (i == n / 3) ok = ok && T_EXPECT_OK(lev_megatron_end_document(w));
  }
  ok = ok && T_EXPECT_EQ_I64(lev_megatron_written(w), n) && T_EXPECT_OK(lev_megatron_commit(w));
  lev_megatron_writer_close(w);
  return ok;
}

static void check_round_trip(const char *prefix, int64_t vocab, int dtype) {
  enum { N = 10000 };
  static int32_t ids[N];
  lev_megatron m;
  T_REQUIRE(write_stream(prefix, N, vocab));
  T_REQUIRE_OK(lev_megatron_open(prefix, &m));
  T_EXPECT_EQ_I64(m.tokens, N);
  T_EXPECT_EQ_I64(m.dtype, dtype);
  T_EXPECT_EQ_I64(m.sequences, 2);
  T_EXPECT_EQ_I64(m.documents, 3);
  T_EXPECT_EQ_I64(lev_megatron_length(&m, 0), N / 3 + 1);
  T_EXPECT_EQ_I64(lev_megatron_document(&m, 2), 2);
  T_EXPECT_OK(lev_megatron_read(&m, 0, N, vocab, ids));
  for (int64_t i = 0; i < N && !t_failed(); ++i) T_EXPECT_EQ_I64(ids[i], i % vocab);
  T_EXPECT_STATUS(lev_megatron_read(&m, 1, N, vocab, ids), LEV_ERR_ARG);
  T_EXPECT_STATUS(lev_megatron_read(&m, 0, N, vocab < N ? vocab - 1 : N - 1, ids), LEV_ERR_FORMAT);
  T_EXPECT(strstr(lev_detail(), ".bin") != NULL);
  lev_megatron_close(&m);
}

T_TEST(megatron_round_trip) {
  folder f;
  T_REQUIRE(folder_make(&f));
  check_round_trip(folder_path(&f, "narrow"), 65499, 8);
  check_round_trip(folder_path(&f, "wide"), 65500, 4);
  check_round_trip(folder_path(&f, "few"), 7, 8);
  folder_remove(&f);
}

T_TEST(megatron_exact_bytes) {
  /* As Megatron's builder writes three ids in documents [5], [6, 7]. */
  static const unsigned char idx[] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 8, 2, 0, 0,
                                      0,   0,   0,   0,   0,   3,   0,   0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0,
                                      0,   0,   0,   0,   0,   0,   0,   0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                      0,   0,   0,   1,   0,   0,   0,   0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0};
  static const unsigned char bin[] = {5, 0, 6, 0, 7, 0};
  const int32_t ids[] = {5, 6, 7};
  lev_megatron_writer *w;
  lev_map map;
  folder f;
  T_REQUIRE(folder_make(&f));
  T_REQUIRE_OK(lev_megatron_create(folder_path(&f, "x"), 100, &w));
  T_EXPECT_OK(lev_megatron_append(w, ids, 1));
  T_EXPECT_OK(lev_megatron_end_document(w));
  T_EXPECT_OK(lev_megatron_end_document(w)); /* an empty document leaves no trace */
  T_EXPECT_OK(lev_megatron_append(w, ids + 1, 2));
  T_EXPECT_STATUS(lev_megatron_append(w, &(int32_t){100}, 1), LEV_ERR_ARG);
  T_EXPECT_OK(lev_megatron_commit(w));
  lev_megatron_writer_close(w);
  T_REQUIRE_OK(lev_map_open(folder_path(&f, "x.idx"), &map));
  T_EXPECT(map.bytes == sizeof idx && memcmp(map.data, idx, sizeof idx) == 0);
  lev_map_close(&map);
  T_REQUIRE_OK(lev_map_open(folder_path(&f, "x.bin"), &map));
  T_EXPECT(map.bytes == sizeof bin && memcmp(map.data, bin, sizeof bin) == 0);
  lev_map_close(&map);
  folder_remove(&f);
}

/* One change of a good index: `at` < 0 cuts or (`value` > 0) lengthens the file. */
typedef struct sabotage {
  int at, bytes;
  int64_t value;
} sabotage;

T_TEST(megatron_refuses_hostile_files) {
  /* Two sequences (4 and 6 tokens of 2 bytes), three document entries: lengths at 34, pointers at 42, documents at 58.
   */
  static const sabotage bad[] = {{0, 1, 'X'},       {9, 8, 2},   {17, 1, 0},   {17, 1, 6},        {17, 1, 9},
                                 {17, 1, 4},        {18, 8, -1}, {18, 8, 1},   {18, 8, 1L << 60}, {26, 8, -1},
                                 {26, 8, 1L << 61}, {26, 8, 2},  {34, 4, -4},  {34, 4, 5},        {34, 4, 1 << 30},
                                 {38, 4, 5},        {42, 8, 2},  {42, 8, -2},  {50, 8, 1L << 62}, {50, 8, INT64_MIN},
                                 {58, 8, 1},        {66, 8, -1}, {66, 8, 3},   {74, 8, 1},        {74, 8, 1L << 40},
                                 {-1, 0, -1},       {-1, 0, 1},  {-1, 0, -60}, {-1, 0, -82}};
  folder f;
  lev_megatron m;
  unsigned char idx[83];
  T_REQUIRE(folder_make(&f));
  char *prefix = folder_path(&f, "x"), *path = folder_path(&f, "x.idx");
  T_REQUIRE(write_stream(prefix, 10, 50));
  FILE *in = fopen(path, "rb");
  T_REQUIRE(in != NULL);
  size_t got = fread(idx, 1, sizeof idx, in);
  fclose(in);
  T_REQUIRE(got == 82);
  const sabotage legal = {17, 1, 3}; /* i16 is as wide as u16 */
  for (size_t i = 0; i <= sizeof bad / sizeof *bad; ++i) {
    unsigned char changed[83];
    size_t size = 82;
    memcpy(changed, idx, 82), changed[82] = 0;
    const sabotage *s = i < sizeof bad / sizeof *bad ? &bad[i] : &legal;
    if (s->at < 0)
      size = (size_t)(82 + s->value);
    else
      for (int b = 0; b < s->bytes; ++b) changed[s->at + b] = (unsigned char)((uint64_t)s->value >> (8 * b));
    FILE *o = fopen(path, "wb");
    T_REQUIRE(o != NULL);
    fwrite(changed, 1, size, o);
    fclose(o);
    lev_status st = lev_megatron_open(prefix, &m);
    bool refused = st == LEV_ERR_FORMAT || st == LEV_ERR_UNSUPPORTED;
    T_EXPECT_MSG(refused == (i < sizeof bad / sizeof *bad), "change %zu gave status %d", i, (int)st);
    if (st == LEV_OK) lev_megatron_close(&m);
  }
  unlink(path);
  T_EXPECT_STATUS(lev_megatron_open(prefix, &m), LEV_ERR_IO);
  folder_remove(&f);
}

/* Every epoch holds every window once; epochs and seeds differ; the order is a function of the number alone. */
static void check_permutation(const char *prefix, int64_t n, int64_t context) {
  lev_loader_options o = {.prefix = prefix, .context = context, .vocab = 60000, .seed = 5};
  lev_loader *l = NULL, *other = NULL;
  int32_t tokens[64], labels[64], again[64];
  int64_t same = 0, fixed = 0;
  T_REQUIRE_OK(lev_loader_open(&o, &l));
  o.seed = 6;
  if (!T_EXPECT_OK(lev_loader_open(&o, &other))) other = NULL;
  int64_t samples = (n - 1) / context;
  T_EXPECT_EQ_I64(lev_loader_samples(l), samples);
  T_EXPECT_EQ_I64(lev_loader_bytes(l), 0);
  char *seen = calloc((size_t)samples, 1);
  for (int64_t i = 0; seen && other && i < 3 * samples && !t_failed(); ++i) {
    if (i % samples == 0) memset(seen, 0, (size_t)samples);
    if (!T_EXPECT_OK(lev_loader_fetch(l, i, tokens, labels))) break;
    int64_t window = tokens[0] / context;
    if (!T_EXPECT(tokens[0] % context == 0 && window < samples && !seen[window])) break;
    seen[window] = 1, fixed += window == i % samples;
    for (int64_t t = 0; t < context; ++t) T_EXPECT(tokens[t] == window * context + t && labels[t] == tokens[t] + 1);
    T_EXPECT_OK(lev_loader_fetch(other, i, again, labels));
    same += again[0] == tokens[0];
    T_EXPECT_OK(lev_loader_fetch(l, (i + samples) % (5 * samples), again, labels));
  }
  if (samples >= 100)
    T_EXPECT_MSG(same < samples / 8 && fixed < samples / 8, "%d alike, %d fixed", (int)same, (int)fixed);
  T_EXPECT_STATUS(lev_loader_fetch(l, -1, tokens, labels), LEV_ERR_ARG);
  free(seen);
  lev_loader_close(other);
  lev_loader_close(l);
}

T_TEST(loader_epochs_are_permutations) {
  static const int64_t sizes[][2] = {{9, 8}, {17, 8}, {25, 8}, {40, 8}, {4097, 4}, {9001, 3}, {1000, 1}};
  folder f;
  T_REQUIRE(folder_make(&f));
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
    T_REQUIRE(write_stream(folder_path(&f, "x"), sizes[i][0], 60000));
    check_permutation(folder_path(&f, "x"), sizes[i][0], sizes[i][1]);
  }
  folder_remove(&f);
}

T_TEST(loader_epochs_differ) {
  folder f;
  lev_loader *l;
  int32_t a[4], b[4], labels[4];
  int64_t same = 0;
  T_REQUIRE(folder_make(&f));
  T_REQUIRE(write_stream(folder_path(&f, "x"), 4001, 60000));
  T_REQUIRE_OK(lev_loader_open(
      &(lev_loader_options){.prefix = folder_path(&f, "x"), .context = 4, .vocab = 60000, .seed = 1}, &l));
  for (int64_t i = 0; i < 1000; ++i) {
    T_EXPECT_OK(lev_loader_fetch(l, i, a, labels));
    T_EXPECT_OK(lev_loader_fetch(l, 1000 + i, b, labels));
    same += a[0] == b[0];
  }
  T_EXPECT(same < 20);
  lev_loader_close(l);
  folder_remove(&f);
}

T_TEST(loader_validation_scores_every_token_once) {
  folder f;
  T_REQUIRE(folder_make(&f));
  char *prefix = folder_path(&f, "x");
  for (int64_t n = 2; n <= 26; ++n) {
    lev_loader *l;
    int32_t tokens[8], labels[8];
    int64_t next = 1;
    T_REQUIRE(write_stream(prefix, n, 60000));
    T_REQUIRE_OK(
        lev_loader_open(&(lev_loader_options){.prefix = prefix, .context = 8, .vocab = 60000, .validation = true}, &l));
    for (int64_t i = 0; i < lev_loader_samples(l); ++i) {
      memset(tokens, 0xFF, sizeof tokens), memset(labels, 0xFF, sizeof labels);
      T_EXPECT_OK(lev_loader_fetch(l, i, tokens, labels));
      for (int t = 0; t < 8; ++t) {
        if (next < n)
          T_EXPECT(labels[t] == next && tokens[t] == next - 1), ++next;
        else
          T_EXPECT(labels[t] == -100 && tokens[t] == 0);
      }
    }
    T_EXPECT_EQ_I64(next, n);
    T_EXPECT_STATUS(lev_loader_fetch(l, lev_loader_samples(l), tokens, labels), LEV_ERR_ARG);
    lev_loader_close(l);
  }
  folder_remove(&f);
}

T_TEST(loader_error_paths) {
  folder f;
  lev_loader *l;
  int32_t tokens[8], labels[8];
  T_REQUIRE(folder_make(&f));
  char *prefix = folder_path(&f, "x");
  lev_loader_options o = {.prefix = prefix, .context = 8, .vocab = 5};
  T_EXPECT_STATUS(lev_loader_open(&o, &l), LEV_ERR_IO);
  T_REQUIRE(write_stream(prefix, 8, 60000));
  T_EXPECT_STATUS(lev_loader_open(&o, &l), LEV_ERR_CONFIG);
  T_EXPECT_MSG(strstr(lev_detail(), "8 tokens") != NULL, "detail: %s", lev_detail());
  T_REQUIRE(write_stream(prefix, 9, 60000));
  T_REQUIRE_OK(lev_loader_open(&o, &l));
  T_EXPECT_STATUS(lev_loader_fetch(l, 0, tokens, labels), LEV_ERR_FORMAT);
  T_EXPECT_MSG(strstr(lev_detail(), "x.bin: token 5 is 5") != NULL, "detail: %s", lev_detail());
  lev_loader_close(l);
  lev_loader_close(NULL);
  static const struct {
    const char *json;
    lev_status want;
  } side[] = {{"{\"text_bytes\": 77, \"tokens\": 9, \"vocab_size\": 5}", LEV_OK},
              {"{\"text_bytes\": 77, \"tokens\": 9, \"vocab_size\": 6}", LEV_ERR_CONFIG},
              {"{\"text_bytes\": 77, \"tokens\": 8}", LEV_ERR_FORMAT},
              {"{\"text_bytes\": -1}", LEV_ERR_FORMAT},
              {"{", LEV_ERR_FORMAT}};
  for (size_t i = 0; i < sizeof side / sizeof *side; ++i) {
    T_REQUIRE(folder_write(&f, "x.json", side[i].json, strlen(side[i].json)));
    T_EXPECT_STATUS(lev_loader_open(&o, &l), side[i].want);
    if (side[i].want != LEV_OK || t_failed()) continue;
    T_EXPECT_EQ_I64(lev_loader_bytes(l), 77);
    lev_loader_close(l);
  }
  o.context = 0;
  T_EXPECT_STATUS(lev_loader_open(&o, &l), LEV_ERR_ARG);
  folder_remove(&f);
}

/* Documents of the lengths given (0 = a document without tokens is left out by the writer). */
static bool write_documents(const char *prefix, const int64_t *length, int n) {
  lev_megatron_writer *w;
  int32_t id = 5;
  if (!T_EXPECT_OK(lev_megatron_create(prefix, 100, &w))) return false;
  bool ok = true;
  for (int d = 0; d < n; ++d) {
    for (int64_t i = 0; i < length[d]; ++i) ok &= T_EXPECT_OK(lev_megatron_append(w, &id, 1));
    ok &= T_EXPECT_OK(lev_megatron_end_document(w));
  }
  ok = ok && T_EXPECT_OK(lev_megatron_commit(w));
  lev_megatron_writer_close(w);
  return ok;
}

T_TEST(loader_tokens_are_of_one_tokenizer) {
  static const struct {
    const char *a, *b;
    bool same;
  } cases[] = {{"\"12ab\"", "\"12ab\"", true}, {"null", "null", true},      {"\"12ab\"", "\"12ac\"", false},
               {"null", "\"12ab\"", false},    {"\"12ab\"", "null", false}, {NULL, "\"12ab\"", true}};
  folder f;
  T_REQUIRE(folder_make(&f));
  T_REQUIRE(write_stream(folder_path(&f, "a"), 40, 9) && write_stream(folder_path(&f, "b"), 40, 9));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    char json[96];
    lev_loader *a, *b;
    bool named = cases[i].a != NULL; /* a sidecar may be silent on it */
    snprintf(json, sizeof json, "{\"text_bytes\": 1%s%s}", named ? ", \"tokenizer_xxh3_128\": " : "",
             named ? cases[i].a : "");
    T_REQUIRE(folder_write(&f, "a.json", json, strlen(json)));
    snprintf(json, sizeof json, "{\"text_bytes\": 1, \"tokenizer_xxh3_128\": %s}", cases[i].b);
    T_REQUIRE(folder_write(&f, "b.json", json, strlen(json)));
    T_REQUIRE_OK(lev_loader_open(&(lev_loader_options){.prefix = folder_path(&f, "a"), .context = 8, .vocab = 9}, &a));
    T_REQUIRE_OK(lev_loader_open(&(lev_loader_options){.prefix = folder_path(&f, "b"), .context = 8, .vocab = 9}, &b));
    lev_status st = lev_loader_same_tokens(a, b);
    T_EXPECT_MSG(st == (cases[i].same ? LEV_OK : LEV_ERR_CONFIG), "case %zu: %s", i, lev_status_text(st));
    if (!cases[i].same) T_EXPECT(strstr(lev_detail(), "a.bin") && strstr(lev_detail(), "b.bin"));
    lev_loader_close(a), lev_loader_close(b);
  }
  folder_remove(&f);
}

T_TEST(loader_documents_begin_where_the_index_says) {
  enum { N = 9, S = 7 };
  const int64_t length[N] = {3, 4, 1, 1, 12, 0, 7, 2, 30};
  int64_t begin_of[64], tokens = 0; /* by token of the stream */
  folder f;
  T_REQUIRE(folder_make(&f));
  char *prefix = folder_path(&f, "x");
  T_REQUIRE(write_documents(prefix, length, N));
  for (int d = 0; d < N; ++d)
    for (int64_t i = 0, first = tokens; i < length[d]; ++i) begin_of[tokens++] = first;
  for (int validation = 0; validation < 2; ++validation) {
    lev_loader *l;
    int32_t ids[S], labels[S], begin[S + 1];
    lev_loader_options o = {.prefix = prefix, .context = S, .vocab = 100, .seed = 3, .validation = validation};
    T_REQUIRE_OK(lev_loader_open(&o, &l));
    bool seen[16] = {false};
    for (int64_t i = 0; i < lev_loader_samples(l); ++i) {
      T_EXPECT_OK(lev_loader_fetch(l, i, ids, labels));
      T_EXPECT_OK(lev_loader_documents(l, i, begin));
      int fits = 0; /* training shuffles windows: exactly one unseen window has these borders, or equal ones */
      for (int64_t w = 0; w < lev_loader_samples(l) && !fits; ++w) {
        bool same = !seen[w] && (!validation || w == i);
        for (int64_t p = 0; p <= S && same; ++p) {
          int64_t at = w * S + p < tokens ? w * S + p : tokens - 1;
          int64_t want = begin_of[at] > w * S ? begin_of[at] - w * S : 0;
          same = begin[p] == want;
        }
        if (same) fits = 1, seen[w] = true;
      }
      T_EXPECT_MSG(fits, "validation %d, sample %lld: borders of no window", validation, (long long)i);
    }
    T_EXPECT_STATUS(lev_loader_documents(l, -1, begin), LEV_ERR_ARG);
    lev_loader_close(l);
  }
  folder_remove(&f);
}
