/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors: what is written is read back; hostile files are refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/checkpoint/safetensors.h"
#include "tests/t.h"

static void write_raw(const char *path, const char *header, uint64_t claimed, size_t data) {
  FILE *f = fopen(path, "wb");
  T_REQUIRE(f != NULL);
  for (int i = 0; i < 8; ++i) fputc((int)(claimed >> (8 * i) & 255), f);
  fputs(header, f);
  for (size_t i = 0; i < data; ++i) fputc((int)i, f);
  fclose(f);
}

T_TEST(safetensors_round_trip) {
  char path[] = "/tmp/levee-st-XXXXXX";
  int fd = mkstemp(path);
  T_REQUIRE(fd >= 0);
  close(fd);
  float a[6] = {1, 2, 3, 4, 5, 6};
  double b[2] = {7, 8};
  lev_safetensor list[3] = {{.name = "b", .dtype = LEV_F32, .n_dims = 2, .dims = {2, 3}, .offset = {4, 0}},
                            {.name = "a", .dtype = LEV_F64, .n_dims = 1, .dims = {2}},
                            {.name = "empty", .dtype = LEV_BF16, .n_dims = 2, .dims = {0, 9}}};
  lev_file file;
  lev_safetensors in;
  T_REQUIRE_OK(lev_file_create(&file, path, NULL));
  T_EXPECT_OK(lev_safetensors_begin(&file, list, 3, true));
  T_EXPECT_OK(lev_file_write(&file, a, sizeof a));
  T_EXPECT_OK(lev_file_write(&file, b, sizeof b));
  T_REQUIRE_OK(lev_file_commit(&file, NULL));
  T_REQUIRE_OK(lev_safetensors_open(path, NULL, &in));
  T_EXPECT_EQ_I64(in.n_tensors, 3);
  const lev_safetensor *t = lev_safetensors_find(&in, "b");
  T_REQUIRE(t != NULL && t->n_dims == 2 && t->dims[1] == 3);
  T_EXPECT(memcmp(in.data + t->begin, a, sizeof a) == 0);
  t = lev_safetensors_find(&in, "a");
  T_REQUIRE(t != NULL);
  T_EXPECT(memcmp(in.data + t->begin, b, sizeof b) == 0);
  T_EXPECT(lev_safetensors_find(&in, "c") == NULL);
  lev_safetensors_close(&in);
  unlink(path);
}

T_TEST(safetensors_refuses_hostile_files) {
  const struct {
    const char *header;
    int64_t claimed; /* -1: the true length */
    size_t data;
  } bad[] = {
      {"{}", 1 << 20, 0},
      {"{}", INT64_MAX, 0},
      {"{\"a\":1}", -1, 0},
      {"[1]", -1, 0},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 4},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", -1, 4},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 3},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 5},
      {"{\"a\":{\"dtype\":\"F99\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", -1, 4},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775807,9223372036854775807],\"data_offsets\":[0,4]}}", -1, 4},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
       "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
       -1, 4},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
       "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
       -1, 8},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -1, 8}};
  char path[] = "/tmp/levee-st-XXXXXX";
  int fd = mkstemp(path);
  T_REQUIRE(fd >= 0);
  close(fd);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    lev_safetensors in;
    write_raw(path, bad[i].header, bad[i].claimed < 0 ? strlen(bad[i].header) : (uint64_t)bad[i].claimed, bad[i].data);
    lev_status st = lev_safetensors_open(path, NULL, &in);
    T_EXPECT_MSG(st == LEV_ERR_FORMAT, "case %zu accepted: %s", i, bad[i].header);
    if (st == LEV_OK) lev_safetensors_close(&in);
  }
  unlink(path);
}
