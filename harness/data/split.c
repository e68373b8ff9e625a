/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/data/split.h"

#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "common/hostmem.h"

#define JIT_STACK ((size_t)4 << 20)
#define PATTERN_MAX 8192

const char lev_split_gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* Unicode White_Space: HT LF VT FF CR, NEL, and category Z. */
#define SPACE "\\t-\\r\\x{85}\\p{Z}"

struct lev_split {
  pcre2_general_context *memory;
  pcre2_code *code;
  pcre2_match_data *match;
  pcre2_match_context *context;
  pcre2_jit_stack *stack;
  bool jit;
};

/* ---- patterns ---- */

typedef struct rewriter {
  char out[PATTERN_MAX];
  size_t n;
} rewriter;

static lev_status put(rewriter *r, const char *text, size_t bytes) {
  if (bytes >= sizeof r->out - r->n)
    return lev_fail(LEV_ERR_UNSUPPORTED, "split pattern of more than %d bytes", PATTERN_MAX - 1);
  memcpy(r->out + r->n, text, bytes);
  r->n += bytes;
  return LEV_OK;
}

static lev_status refuse(const char *pattern, const char *what, size_t bytes) {
  return lev_fail(LEV_ERR_UNSUPPORTED, "split pattern %.400s uses %.*s, which is not supported", pattern, (int)bytes,
                  what);
}

/* Translates the escape at p (a backslash); *taken receives its length. */
static lev_status put_escape(rewriter *r, const char *pattern, const char *p, bool in_class, size_t *taken) {
  char c = p[1];
  bool word = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  *taken = 2;
  if (c == '\0') return refuse(pattern, "a backslash at its end", 22);
  if (c == 's') return in_class ? put(r, SPACE, sizeof SPACE - 1) : put(r, "[" SPACE "]", sizeof SPACE + 1);
  if (c == 'S' && !in_class) return put(r, "[^" SPACE "]", sizeof SPACE + 2);
  if (c == 'v') return put(r, "\\x0b", 4);
  if (c == 'u') {
    if (strspn(p + 2, "0123456789abcdefABCDEF") < 4) return refuse(pattern, p, 2);
    *taken = 6;
    LEV_TRY(put(r, "\\x{", 3));
    LEV_TRY(put(r, p + 2, 4));
    return put(r, "}", 1);
  }
  if (word && !strchr("pPdDrntfxAz", c)) return refuse(pattern, p, 2);
  const char *close = strchr("pPx", c) && p[2] == '{' ? strchr(p, '}') : NULL;
  if (close) *taken = (size_t)(close - p) + 1;
  return put(r, p, *taken);
}

static lev_status rewrite(rewriter *r, const char *pattern) {
  bool in_class = false;
  size_t taken, first = 0; /* first: where a literal ']' may stand */
  for (const char *p = pattern; *p; p += taken) {
    taken = 1;
    if (*p == '\\') {
      LEV_TRY(put_escape(r, pattern, p, in_class, &taken));
      continue;
    }
    size_t at = (size_t)(p - pattern);
    if (in_class && (*p == '[' || (p[0] == '&' && p[1] == '&'))) return refuse(pattern, p, 2);
    if (!in_class && p[0] == '}' && p[1] == '+') return refuse(pattern, p, 2);
    if (!in_class && *p == '[')
      in_class = true, first = at + (p[1] == '^' ? 2 : 1);
    else if (in_class && *p == ']' && at != first)
      in_class = false;
    LEV_TRY(put(r, p, taken));
  }
  r->out[r->n] = '\0';
  return LEV_OK;
}

/* ---- PCRE2 ---- */

static void *take_memory(size_t bytes, void *unused) {
  (void)unused;
  return lev_calloc(LEV_HEAP_DATA, bytes, 1);
}

static void give_memory(void *pointer, void *unused) {
  (void)unused;
  lev_free(pointer);
}

static lev_status compile(lev_split *s, const char *pattern) {
  rewriter r = {.n = 0};
  int error = 0;
  uint32_t empty = 0;
  PCRE2_SIZE at = 0;
  LEV_TRY(rewrite(&r, pattern));
  s->memory = pcre2_general_context_create(take_memory, give_memory, NULL);
  pcre2_compile_context *context = s->memory ? pcre2_compile_context_create(s->memory) : NULL;
  if (!context) return lev_fail(LEV_ERR_NOMEM, "no memory for a split pattern");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  s->code = pcre2_compile((PCRE2_SPTR)r.out, r.n, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &at, context);
  pcre2_compile_context_free(context);
  if (!s->code) {
    PCRE2_UCHAR text[160] = {0};
    pcre2_get_error_message(error, text, sizeof text);
    return lev_fail(LEV_ERR_UNSUPPORTED, "split pattern %.400s: %s at offset %zu", pattern, (const char *)text, at);
  }
  pcre2_pattern_info(s->code, PCRE2_INFO_MATCHEMPTY, &empty);
  if (empty) return lev_fail(LEV_ERR_UNSUPPORTED, "split pattern %.400s matches the empty string", pattern);
  s->jit = pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE) == 0;
  s->match = pcre2_match_data_create(1, s->memory);
  s->context = pcre2_match_context_create(s->memory);
  if (!s->match || !s->context) return lev_fail(LEV_ERR_NOMEM, "no memory for a split pattern");
  if (s->jit) {
    s->stack = pcre2_jit_stack_create(32 * 1024, JIT_STACK, s->memory);
    if (!s->stack) return lev_fail(LEV_ERR_NOMEM, "no memory for a split pattern");
    pcre2_jit_stack_assign(s->context, NULL, s->stack);
  }
  return LEV_OK;
}

lev_status lev_split_create(const char *pattern, lev_split **out) {
  *out = NULL;
  lev_split *s = lev_calloc(LEV_HEAP_DATA, 1, sizeof *s);
  if (!s) return LEV_ERR_NOMEM;
  lev_status st = compile(s, pattern);
  if (st == LEV_OK)
    *out = s;
  else
    lev_split_close(s);
  return st;
}

void lev_split_close(lev_split *s) {
  if (!s) return;
  if (s->stack) pcre2_jit_stack_free(s->stack);
  pcre2_match_context_free(s->context);
  pcre2_match_data_free(s->match);
  pcre2_code_free(s->code);
  pcre2_general_context_free(s->memory);
  lev_free(s);
}

lev_status lev_split_each(lev_split *s, const unsigned char *text, size_t bytes, lev_piece_fn fn, void *ctx) {
  const PCRE2_SIZE *span = pcre2_get_ovector_pointer(s->match);
  for (size_t at = 0; at < bytes;) {
    int rc = s->jit ? pcre2_jit_match(s->code, text, bytes, at, 0, s->match, s->context)
                    : pcre2_match(s->code, text, bytes, at, PCRE2_NO_UTF_CHECK, s->match, s->context);
    if (rc == PCRE2_ERROR_NOMATCH) return fn(ctx, text + at, bytes - at);
    if (rc < 0) {
      PCRE2_UCHAR message[160] = {0};
      pcre2_get_error_message(rc, message, sizeof message);
      return lev_fail(LEV_ERR_FORMAT, "the split pattern fails at byte %zu of the text: %s", at, (const char *)message);
    }
    size_t begin = span[0], end = span[1]; /* fn may match again */
    if (end <= begin || begin < at) return lev_fail(LEV_ERR_INTERNAL, "empty match at byte %zu", at);
    if (begin > at) LEV_TRY(fn(ctx, text + at, begin - at));
    LEV_TRY(fn(ctx, text + begin, end - begin));
    at = end;
  }
  return LEV_OK;
}
