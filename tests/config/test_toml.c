/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "harness/config/toml.h"
#include "tests/t.h"

/* Everything a parse hands on, as one text: "name=value" or "name='value'" for strings, with the line. */
typedef struct heard {
  char text[4096];
} heard;

static lev_status hear(void *ctx, const char *name, const char *value, bool is_string, int line) {
  heard *h = ctx;
  size_t used = strlen(h->text);
  const char *quote = is_string ? "'" : "";
  snprintf(h->text + used, sizeof h->text - used, "%d:%s=%s%s%s;", line, name, quote, value, quote);
  return LEV_OK;
}

static void accepts(const char *toml, const char *want, int line) {
  heard h = {{0}};
  bool ok = t_check(lev_toml_parse(toml, "f", hear, &h) == LEV_OK, __FILE__, line, "refused: %s", lev_detail());
  if (ok) t_check(strcmp(h.text, want) == 0, __FILE__, line, "heard \"%s\", expected \"%s\"", h.text, want);
}
#define ACCEPTS(toml, want) accepts((toml), (want), __LINE__)

/* Refused with the given line in the text. */
static void refuses(const char *toml, const char *where, const char *what, int line) {
  heard h = {{0}};
  lev_status st = lev_toml_parse(toml, "f", hear, &h);
  t_check(st == LEV_ERR_CONFIG, __FILE__, line, "status %s (%s)", lev_status_text(st), h.text);
  t_check(strstr(lev_detail(), where) && strstr(lev_detail(), what), __FILE__, line,
          "detail \"%s\" lacks \"%s\", \"%s\"", lev_detail(), where, what);
}
#define REFUSES(toml, where, what) refuses((toml), (where), (what), __LINE__)

T_TEST(toml_tables_and_dotted_keys) {
  ACCEPTS("", "");
  ACCEPTS("\n\n# only a comment", "");
  ACCEPTS("a = 1\n", "1:a=1;");
  ACCEPTS("a = 1", "1:a=1;");
  ACCEPTS("[t]\na = 1\nb.c = 2\n[u.v]\nd = 3\n", "2:t.a=1;3:t.b.c=2;5:u.v.d=3;");
  ACCEPTS(" [ t ] # x\r\n\ta=true\t# y\r\n", "2:t.a=true;");
  ACCEPTS("\"quoted key\" = 1\n'x'.y = 2\n", "1:quoted key=1;2:x.y=2;");
  ACCEPTS("a . b = 1\n", "1:a.b=1;");
  ACCEPTS("\xef\xbb\xbf[t]\na = 1\n", "2:t.a=1;"); /* a byte order mark */
}

T_TEST(toml_values) {
  ACCEPTS("a = 1_000_000\nb = -7\nc = +8\n", "1:a=1000000;2:b=-7;3:c=+8;");
  ACCEPTS("a = 1.5e-3\nb = 6_0.2_5\n", "1:a=1.5e-3;2:b=60.25;");
  ACCEPTS("a = true\nb = false\n", "1:a=true;2:b=false;");
  ACCEPTS("a = 64GiB\n", "1:a=64GiB;"); /* an extension: sizes without quotes */
}

T_TEST(toml_strings) {
  ACCEPTS("a = \"\"\nb = ''\n", "1:a='';2:b='';");
  ACCEPTS("a = \"x # y\" # z\n", "1:a='x # y';");
  ACCEPTS("a = \"q\\\" b\\\\ n\\n t\\t r\\r b\\b f\\f\"\n", "1:a='q\" b\\ n\n t\t r\r b\b f\f';");
  ACCEPTS("a = 'C:\\dir\\n'\n", "1:a='C:\\dir\\n';");
  ACCEPTS("a = \"\\u00e9\\u20AC\\U0001F600\"\n", "1:a='\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80';");
  ACCEPTS("a = \"\xc3\xa9\"\n", "1:a='\xc3\xa9';");
}

T_TEST(toml_refuses_with_the_line) {
  REFUSES("a = 1\nb\n", "f:2:", "=");
  REFUSES("a = 1\n\n= 2\n", "f:3:", "key");
  REFUSES("a =\n", "f:1:", "value");
  REFUSES("steps =\nnext = 1\n", "f:1:", "a value after steps =, found \"\"");
  REFUSES("steps = # 1\r\nnext = 1\n", "f:1:", "found \"# 1\"");
  REFUSES("= 2\nnext = 1\n", "f:1:", "found \"= 2\"");
  REFUSES("a = 1 2\nnext = 1\n", "f:1:", "unexpected \"2\"");
  REFUSES("a = \"open\nb = 2\n", "f:1:", "string");
  REFUSES("a = 'open", "f:1:", "string");
  REFUSES("a = \"\\q\"\n", "f:1:", "escape");
  REFUSES("a = \"\\uD800\"\n", "f:1:", "escape");
  REFUSES("a = \"\\u12\"\n", "f:1:", "escape");
  REFUSES("a = \"\\u0000\"\n", "f:1:", "escape");
  REFUSES("a = \"\x01\"\n", "f:1:", "control");
  REFUSES("a = 1 2\n", "f:1:", "end of the line");
  REFUSES("a = 1 b = 2\n", "f:1:", "end of the line");
  REFUSES("[t\n", "f:1:", "]");
  REFUSES("[t] x\n", "f:1:", "end of the line");
  REFUSES("[]\n", "f:1:", "key");
  REFUSES("a = 1\n\xef\xbb\xbf\n", "f:2:", "key");
  REFUSES("a..b = 1\n", "f:1:", "key");
  REFUSES("a = 1\rb = 2\n", "f:1:", "end of the line");
  REFUSES("x = 1\n\na = [1, 2]\n", "f:3:", "array");
  REFUSES("a = {b = 1}\n", "f:1:", "inline table");
  REFUSES("[[t]]\n", "f:1:", "array of tables");
}

T_TEST(toml_refuses_misplaced_underscores) {
  REFUSES("a = _1\n", "f:1:", "underscore");
  REFUSES("a = 1_\n", "f:1:", "underscore");
  REFUSES("a = 1__0\n", "f:1:", "underscore");
}

T_TEST(toml_refuses_duplicates) {
  REFUSES("a = 1\na = 2\n", "f:2:", "twice");
  REFUSES("[t]\na = 1\n[u]\nb = 1\n[v]\nt = 1\n[w]\na = 1\n\n[t.x]\ny = 1\n[q]\nz = 1\nz = 2\n", "f:14:", "q.z");
  REFUSES("t.a = 1\n[t]\na = 2\n", "f:3:", "t.a");
  REFUSES("[t]\na = 1\n[t]\nb = 1\n", "f:3:", "twice");
}

static lev_status refuse_second(void *ctx, const char *name, const char *value, bool is_string, int line) {
  (void)name, (void)value, (void)is_string, (void)line;
  return ++*(int *)ctx == 2 ? lev_fail(LEV_ERR_CAPACITY, "enough") : LEV_OK;
}

T_TEST(toml_ends_with_the_status_of_the_callback) {
  int calls = 0;
  T_EXPECT_STATUS(lev_toml_parse("a = 1\nb = 2\nc = 3\n", "f", refuse_second, &calls), LEV_ERR_CAPACITY);
  T_EXPECT_EQ_I64(calls, 2);
}

T_TEST(toml_long_names_and_values) {
  static char text[16384];
  heard h = {{0}};
  memset(text, 'a', 300);
  strcpy(text + 300, " = 1\n");
  T_EXPECT_STATUS(lev_toml_parse(text, "f", hear, &h), LEV_ERR_CONFIG);
  T_EXPECT(strstr(lev_detail(), "f:1:") != NULL);
  strcpy(text, "a = \"");
  memset(text + 5, 'x', 8000);
  strcpy(text + 8005, "\"\n");
  T_EXPECT_STATUS(lev_toml_parse(text, "f", hear, &h), LEV_ERR_CONFIG);
  T_EXPECT(strstr(lev_detail(), "f:1:") != NULL);
}

/* Random bytes and random edits of a good text: any status, no crash (sanitizer builds look closer). */
T_TEST(toml_survives_random_texts) {
  static const char good[] =
      "# c\n[model]\nname = \"x\\n\\u00e9\"\nrope_theta = 1_0e4\n[a.\"b c\"]\nd.e = 'f'\ng = true\r\n";
  static const char bytes[] = "\"'\\[]{}=.#_ \t\r\n-+eEu0189aZ\x7f\xff";
  uint64_t state = t_seed() * 2654435761u + 1;
  for (int round = 0; round < 20000; ++round) {
    char text[sizeof good];
    heard h = {{0}};
    memcpy(text, good, sizeof good);
    for (int edit = 0; edit < 1 + round % 7; ++edit) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      text[(state >> 33) % (sizeof good - 1)] = bytes[(state >> 20) % (sizeof bytes - 1)];
    }
    lev_status st = lev_toml_parse(text, "f", hear, &h);
    if (!T_EXPECT(st == LEV_OK || st == LEV_ERR_CONFIG)) return;
    if (st != LEV_OK && !T_EXPECT(strstr(lev_detail(), "f:") != NULL)) return;
  }
}
