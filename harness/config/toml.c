/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/config/toml.h"

#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/hostmem.h"

enum { NAME_MAX_BYTES = 256, VALUE_MAX_BYTES = 4096 };

typedef struct parser {
  const char *at, *name;
  int line;
  char table[NAME_MAX_BYTES];
  char key[NAME_MAX_BYTES];
  char value[VALUE_MAX_BYTES];
  char **seen; /* full names so far */
  size_t n_seen;
} parser;

static void skip_blank(parser *p) {
  while (*p->at == ' ' || *p->at == '\t') ++p->at;
}

static bool is_bare(char c) {
  return isalnum((unsigned char)c) || c == '_' || c == '-';
}

/* What an error shows of the rest of the line. */
static int rest(const parser *p) {
  size_t n = strcspn(p->at, "\r\n");
  return n < 16 ? (int)n : 16;
}

/* End of a statement: blanks, a comment, then newline or the end. */
static lev_status end_line(parser *p) {
  skip_blank(p);
  if (*p->at == '#')
    while (*p->at && *p->at != '\n') ++p->at;
  if (*p->at == '\r' && p->at[1] == '\n') ++p->at;
  if (*p->at && *p->at != '\n')
    return lev_fail(LEV_ERR_CONFIG, "%s:%d: unexpected \"%.*s\" at the end of the line", p->name, p->line, rest(p),
                    p->at);
  if (*p->at == '\n') ++p->at, ++p->line;
  return LEV_OK;
}

static lev_status put(parser *p, char *out, size_t room, size_t *length, char c) {
  if (*length + 1 >= room) return lev_fail(LEV_ERR_CONFIG, "%s:%d: longer than %zu bytes", p->name, p->line, room - 1);
  out[(*length)++] = c;
  out[*length] = '\0';
  return LEV_OK;
}

/* A Unicode scalar value as UTF-8. */
static lev_status put_scalar(parser *p, char *out, size_t room, size_t *length, uint32_t u) {
  static const unsigned char lead[] = {0x00, 0xc0, 0xe0, 0xf0};
  int more = u < 0x80 ? 0 : u < 0x800 ? 1 : u < 0x10000 ? 2 : 3;
  LEV_TRY(put(p, out, room, length, (char)(lead[more] | (u >> (6 * more)))));
  for (; more > 0; --more) LEV_TRY(put(p, out, room, length, (char)(0x80 | ((u >> (6 * (more - 1))) & 0x3f))));
  return LEV_OK;
}

/* \b \t \n \f \r \" \\ \uXXXX \UXXXXXXXX; the cursor is behind the backslash. */
static lev_status escape(parser *p, char *out, size_t room, size_t *length) {
  const char *from = "btnfr\"\\", *to = "\b\t\n\f\r\"\\";
  char kind = *p->at;
  const char *found = kind ? strchr(from, kind) : NULL;
  if (found) {
    ++p->at;
    return put(p, out, room, length, to[found - from]);
  }
  int digits = kind == 'u' ? 4 : kind == 'U' ? 8 : 0, n = 0;
  uint32_t u = 0;
  for (; n < digits && isxdigit((unsigned char)p->at[1 + n]); ++n) {
    int c = tolower((unsigned char)p->at[1 + n]);
    u = u << 4 | (uint32_t)(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  if (digits == 0 || n < digits || u == 0 || u > 0x10ffff || (u >= 0xd800 && u < 0xe000))
    return lev_fail(LEV_ERR_CONFIG, "%s:%d: unknown escape \\%.*s in a string", p->name, p->line, 1 + n, p->at);
  p->at += 1 + digits;
  return put_scalar(p, out, room, length, u);
}

/* A "basic" or 'literal' string on one line, into out. */
static lev_status quoted(parser *p, char *out, size_t room) {
  char quote = *p->at++;
  size_t length = 0;
  out[0] = '\0';
  while (*p->at != quote) {
    if (*p->at == '\0' || *p->at == '\n')
      return lev_fail(LEV_ERR_CONFIG, "%s:%d: string without its end", p->name, p->line);
    char c = *p->at++;
    if (((unsigned char)c < 0x20 && c != '\t') || c == 0x7f)
      return lev_fail(LEV_ERR_CONFIG, "%s:%d: control character 0x%02x in a string", p->name, p->line, (unsigned)c);
    if (c == '\\' && quote == '"')
      LEV_TRY(escape(p, out, room, &length));
    else
      LEV_TRY(put(p, out, room, &length, c));
  }
  ++p->at;
  return LEV_OK;
}

/* A dotted key, into out. */
static lev_status dotted(parser *p, char *out) {
  size_t length = 0;
  out[0] = '\0';
  for (;;) {
    skip_blank(p);
    if (*p->at == '"' || *p->at == '\'') {
      LEV_TRY(quoted(p, p->value, sizeof p->value));
      for (const char *c = p->value; *c; ++c) LEV_TRY(put(p, out, NAME_MAX_BYTES, &length, *c));
    } else {
      if (!is_bare(*p->at))
        return lev_fail(LEV_ERR_CONFIG, "%s:%d: expected a key, found \"%.*s\"", p->name, p->line, rest(p), p->at);
      while (is_bare(*p->at)) LEV_TRY(put(p, out, NAME_MAX_BYTES, &length, *p->at++));
    }
    skip_blank(p);
    if (*p->at != '.') return LEV_OK;
    ++p->at;
    LEV_TRY(put(p, out, NAME_MAX_BYTES, &length, '.'));
  }
}

static lev_status bare_value(parser *p) {
  size_t length = 0;
  p->value[0] = '\0';
  if (*p->at == '[' || *p->at == '{')
    return lev_fail(LEV_ERR_CONFIG, "%s:%d: %.100s: no setting takes an array or an inline table", p->name, p->line,
                    p->key);
  const char *first = p->at;
  while (is_bare(*p->at) || *p->at == '+' || *p->at == '.') {
    if (*p->at == '_' && (p->at == first || !isalnum((unsigned char)p->at[-1]) || !isalnum((unsigned char)p->at[1])))
      return lev_fail(LEV_ERR_CONFIG, "%s:%d: an underscore must stand between digits", p->name, p->line);
    if (*p->at != '_') LEV_TRY(put(p, p->value, sizeof p->value, &length, *p->at));
    ++p->at;
  }
  if (length == 0)
    return lev_fail(LEV_ERR_CONFIG, "%s:%d: expected a value after %s =, found \"%.*s\"", p->name, p->line, p->key,
                    rest(p), p->at);
  return LEV_OK;
}

/* Keys by their full name, tables as "[name]". */
static lev_status remember(parser *p, const char *full) {
  for (size_t i = 0; i < p->n_seen; ++i)
    if (strcmp(p->seen[i], full) == 0)
      return lev_fail(LEV_ERR_CONFIG, "%s:%d: %s is set twice", p->name, p->line, full);
  char **grown = lev_realloc(LEV_HEAP_COMMON, p->seen, (p->n_seen + 1) * sizeof *grown);
  if (!grown) return LEV_ERR_NOMEM;
  p->seen = grown;
  grown[p->n_seen] = lev_strdup(LEV_HEAP_COMMON, full);
  if (!grown[p->n_seen]) return LEV_ERR_NOMEM;
  ++p->n_seen;
  return LEV_OK;
}

static lev_status pair(parser *p, lev_toml_fn fn, void *ctx) {
  char full[2 * NAME_MAX_BYTES + 2];
  LEV_TRY(dotted(p, p->key));
  if (*p->at != '=') return lev_fail(LEV_ERR_CONFIG, "%s:%d: expected = after %s", p->name, p->line, p->key);
  ++p->at;
  skip_blank(p);
  bool string = *p->at == '"' || *p->at == '\'';
  int line = p->line;
  LEV_TRY(string ? quoted(p, p->value, sizeof p->value) : bare_value(p));
  LEV_TRY(end_line(p));
  size_t table = strlen(p->table), key = strlen(p->key);
  memcpy(full, p->table, table);
  if (table > 0) full[table++] = '.';
  memcpy(full + table, p->key, key + 1);
  p->line = line;
  LEV_TRY(remember(p, full));
  p->line = line + 1;
  return fn(ctx, full, p->value, string, line);
}

static lev_status statements(parser *p, lev_toml_fn fn, void *ctx) {
  char header[NAME_MAX_BYTES + 4];
  while (skip_blank(p), *p->at) {
    if (*p->at == '\n' || *p->at == '#' || *p->at == '\r') {
      LEV_TRY(end_line(p));
    } else if (*p->at == '[') {
      ++p->at;
      if (*p->at == '[') return lev_fail(LEV_ERR_CONFIG, "%s:%d: no setting is an array of tables", p->name, p->line);
      LEV_TRY(dotted(p, p->table));
      if (*p->at != ']') return lev_fail(LEV_ERR_CONFIG, "%s:%d: expected ] after [%s", p->name, p->line, p->table);
      ++p->at;
      snprintf(header, sizeof header, "[%s]", p->table);
      LEV_TRY(remember(p, header));
      LEV_TRY(end_line(p));
    } else {
      LEV_TRY(pair(p, fn, ctx));
    }
  }
  return LEV_OK;
}

lev_status lev_toml_parse(const char *text, const char *name, lev_toml_fn fn, void *ctx) {
  parser *p = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *p);
  if (!p) return LEV_ERR_NOMEM;
  bool marked = strncmp(text, "\xef\xbb\xbf", 3) == 0; /* as some editors begin UTF-8 */
  p->at = text + (marked ? 3 : 0), p->name = name, p->line = 1;
  lev_status st = statements(p, fn, ctx);
  for (size_t i = 0; i < p->n_seen; ++i) lev_free(p->seen[i]);
  lev_free(p->seen);
  lev_free(p);
  return st;
}
