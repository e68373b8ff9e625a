/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/config/config.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/config/foreign.h"
#include "harness/config/toml.h"

#define FILE_MAX_BYTES ((size_t)1 << 20)

typedef enum kind { KIND_INT, KIND_SIZE, KIND_REAL, KIND_BOOL, KIND_TEXT, KIND_CHOICE } kind;

typedef struct option {
  const char *name; /* "section.key" */
  kind kind;
  size_t offset;       /* in lev_config */
  const char *choices; /* "a|b|c" */
  int64_t integer, low, high;
  size_t size;
  double real, low_real, high_real;
  const char *text;
  const char *help;
} option;

/* One constant per choice list. */
#define CHOICE_TEXT(name, list) static const char choices_##name[] = list;
LEV_CHOICES(CHOICE_TEXT)

#define ROW_INT(d, lo, hi) .kind = KIND_INT, .integer = (d), .low = (lo), .high = (hi)
#define ROW_SIZE(d, lo, hi) .kind = KIND_SIZE, .size = (d)
#define ROW_REAL(d, lo, hi) .kind = KIND_REAL, .real = (d), .low_real = (lo), .high_real = (hi)
#define ROW_BOOL(d, lo, hi) .kind = KIND_BOOL, .integer = (d)
#define ROW_TEXT(d, lo, hi) .kind = KIND_TEXT, .text = (d)
#define ROW_CHOICE(d, list) .kind = KIND_CHOICE, .integer = (d), .choices = choices_##list
#define ROW_DTYPE(d, lo, hi) ROW_CHOICE(d, DTYPE)
#define ROW_QK_NORM(d, lo, hi) ROW_CHOICE(d, QK_NORM)
#define ROW_ROPE(d, lo, hi) ROW_CHOICE(d, ROPE)
#define ROW_SCORE(d, lo, hi) ROW_CHOICE(d, SCORE)
#define ROW_BALANCE(d, lo, hi) ROW_CHOICE(d, BALANCE)
#define ROW_GRAD_DTYPE(d, lo, hi) ROW_CHOICE(d, GRAD_DTYPE)
#define ROW_OPTIMIZER(d, lo, hi) ROW_CHOICE(d, OPTIMIZER)
#define ROW_DECAY(d, lo, hi) ROW_CHOICE(d, DECAY)
#define ROW_SCHEDULE(d, lo, hi) ROW_CHOICE(d, SCHEDULE)
#define ROW_BRANCH(d, lo, hi) ROW_CHOICE(d, BRANCH)
#define ROW_PLACEMENT(d, lo, hi) ROW_CHOICE(d, PLACEMENT)
#define ROW_DEVICE(d, lo, hi) ROW_CHOICE(d, DEVICE)
#define ROW_ATTENTION(d, lo, hi) ROW_CHOICE(d, ATTENTION)
#define ROW(section, key, type, d, lo, hi, words)                                                                      \
  {.name = #section "." #key, .offset = offsetof(lev_config, section.key), .help = (words), ROW_##type(d, lo, hi)},

static const option options[] = {LEV_OPTIONS(ROW)};
enum { N_OPTIONS = sizeof options / sizeof *options };

static void *field(lev_config *config, const option *o) {
  return (unsigned char *)config + o->offset;
}
static const void *field_of(const lev_config *config, const option *o) {
  return (const unsigned char *)config + o->offset;
}

void lev_config_defaults(lev_config *config) {
  memset(config, 0, sizeof *config);
  for (int i = 0; i < N_OPTIONS; ++i) {
    const option *o = &options[i];
    switch (o->kind) {
    case KIND_INT:
      *(int64_t *)field(config, o) = o->integer;
      break;
    case KIND_SIZE:
      *(size_t *)field(config, o) = o->size;
      break;
    case KIND_REAL:
      *(double *)field(config, o) = o->real;
      break;
    case KIND_BOOL:
      *(bool *)field(config, o) = o->integer != 0;
      break;
    case KIND_CHOICE:
      *(int *)field(config, o) = (int)o->integer;
      break;
    case KIND_TEXT:
      snprintf(field(config, o), LEV_TEXT_MAX, "%s", o->text);
      break;
    }
  }
}

/* ---- names ---- */

/* Edit distance of short names (Levenshtein). */
static int distance(const char *a, const char *b) {
  enum { MOST = 128 };
  int row[MOST + 1], n = (int)strlen(b);
  if (strlen(a) > MOST || n > MOST) return MOST;
  for (int j = 0; j <= n; ++j) row[j] = j;
  for (int i = 1; a[i - 1]; ++i) {
    int diagonal = row[0];
    row[0] = i;
    for (int j = 1; j <= n; ++j) {
      int above = row[j], best = diagonal + (a[i - 1] != b[j - 1]);
      if (above + 1 < best) best = above + 1;
      if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
      diagonal = above, row[j] = best;
    }
  }
  return row[n];
}

static const option *find(const char *name) {
  for (int i = 0; i < N_OPTIONS; ++i)
    if (strcmp(options[i].name, name) == 0) return &options[i];
  return NULL;
}

/* What follows the last dot of a name. */
static const char *key_of(const char *name) {
  const char *dot = strrchr(name, '.');
  return dot ? dot + 1 : name;
}

/* Names what stands for the key, or the nearest setting where it is near: the same key in another section, or one that
 * differs in two letters or a third of them. */
static lev_status unknown(const char *name, const char *origin) {
  const char *nearest = "", *key = key_of(name), *advice = lev_foreign_key(name);
  enum { SAME_KEY = 1000 };
  int best = SAME_KEY, near = (int)strlen(key) / 3 > 2 ? (int)strlen(key) / 3 : 2;
  if (advice) return lev_fail(LEV_ERR_CONFIG, "%s: unknown setting %.100s; %s", origin, name, advice);
  for (int i = 0; i < N_OPTIONS; ++i) {
    int d = distance(name, options[i].name);
    if (strcmp(key_of(options[i].name), key) == 0) d -= SAME_KEY; /* the right key in another section */
    if (d < best) best = d, nearest = options[i].name;
  }
  if (best > near)
    return lev_fail(LEV_ERR_CONFIG, "%s: unknown setting %.100s; levee --help-all lists those there are", origin, name);
  return lev_fail(LEV_ERR_CONFIG, "%s: unknown setting %.100s; the nearest is %s", origin, name, nearest);
}

lev_status lev_config_unexpected(const char *word) {
  char key[64] = "", settings[256] = "";
  size_t length = strcspn(word, "="), at = 0;
  if (strncmp(word, "--", 2) == 0 && length - 2 < sizeof key)
    snprintf(key, sizeof key, "%.*s", (int)length - 2, word + 2);
  for (char *c = key; *c; ++c) *c = *c == '-' ? '_' : *c;
  for (int i = 0; i < N_OPTIONS && at < sizeof settings; ++i)
    if (strcmp(key_of(options[i].name), key) == 0)
      at += (size_t)snprintf(settings + at, sizeof settings - at, "%s--%s", at ? " or " : "; the setting is ",
                             options[i].name);
  return lev_fail(LEV_ERR_ARG, "unexpected argument \"%.100s\"%s", word, settings);
}

/* ---- values ---- */

/* Decimal digits only: strtod alone would also take "0x1p3", " 1", "inf". */
static bool starts_decimal(const char *text) {
  const char *at = text + (*text == '+' || *text == '-');
  bool digit = (*at >= '0' && *at <= '9') || (*at == '.' && at[1] >= '0' && at[1] <= '9');
  return digit && !(at[0] == '0' && (at[1] == 'x' || at[1] == 'X'));
}

/* Number with an optional suffix from `units` (name, factor); false if malformed or past int64. */
static bool scaled(const char *text, int64_t *out) {
  static const struct {
    const char *suffix;
    int shift;
  } units[] = {{"", 0},     {"K", 10},   {"M", 20},   {"G", 30},   {"T", 40},
               {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}, {"B", 0}};
  char *end;
  errno = 0;
  double fraction = strtod(text, &end);
  if (!starts_decimal(text) || end == text || errno != 0 || !isfinite(fraction)) return false;
  char *integer_end;
  long long whole = strtoll(text, &integer_end, 10);
  bool is_whole = integer_end == end && errno == 0;
  for (size_t i = 0; i < sizeof units / sizeof *units; ++i) {
    if (strcmp(end, units[i].suffix) != 0) continue;
    if (is_whole) return !__builtin_mul_overflow((int64_t)whole, (int64_t)1 << units[i].shift, out);
    double value = fraction * (double)((int64_t)1 << units[i].shift); /* 1.5GiB */
    if (value != floor(value) || fabs(value) > 9e18) return false;
    *out = (int64_t)value;
    return true;
  }
  return false;
}

static lev_status set_int(lev_config *config, const option *o, const char *value, const char *origin) {
  int64_t n;
  if (!scaled(value, &n))
    return lev_fail(LEV_ERR_CONFIG, "%s: %s = \"%.60s\" is no whole number (4096, 4K, 1M)", origin, o->name, value);
  if (n < o->low || n > o->high)
    return lev_fail(LEV_ERR_CONFIG, "%s: %s = %lld is outside %lld .. %lld", origin, o->name, (long long)n,
                    (long long)o->low, (long long)o->high);
  *(int64_t *)field(config, o) = n;
  return LEV_OK;
}

static lev_status set_size(lev_config *config, const option *o, const char *value, const char *origin) {
  int64_t n;
  if (strcmp(value, "unlimited") == 0) {
    *(size_t *)field(config, o) = SIZE_MAX;
    return LEV_OK;
  }
  if (o->size == LEV_SIZE_AUTO && strcmp(value, "auto") == 0) {
    *(size_t *)field(config, o) = LEV_SIZE_AUTO;
    return LEV_OK;
  }
  if (!scaled(value, &n) || n < 0)
    return lev_fail(LEV_ERR_CONFIG, "%s: %s = \"%.60s\" is no size (512MiB, 1.5GiB, 1048576, unlimited%s)", origin,
                    o->name, value, o->size == LEV_SIZE_AUTO ? ", auto" : "");
  *(size_t *)field(config, o) = (size_t)n;
  return LEV_OK;
}

/* The shortest text that reads back to the same number. */
static const char *real_text(double value, char text[40]) {
  for (int digits = 6; digits <= 17; ++digits) {
    snprintf(text, 40, "%.*g", digits, value);
    if (strtod(text, NULL) == value) break;
  }
  return text;
}

static lev_status set_real(lev_config *config, const option *o, const char *value, const char *origin) {
  char *end, text[40], low[40], high[40];
  double x = strtod(value, &end);
  if (!starts_decimal(value) || end == value || *end != '\0' || !isfinite(x))
    return lev_fail(LEV_ERR_CONFIG, "%s: %s = \"%.60s\" is no number", origin, o->name, value);
  if (x < o->low_real || x > o->high_real)
    return lev_fail(LEV_ERR_CONFIG, "%s: %s = %s is outside %s .. %s", origin, o->name, real_text(x, text),
                    real_text(o->low_real, low), real_text(o->high_real, high));
  *(double *)field(config, o) = x;
  return LEV_OK;
}

static lev_status set_bool(lev_config *config, const option *o, const char *value, const char *origin) {
  bool yes = strcmp(value, "true") == 0;
  if (!yes && strcmp(value, "false") != 0)
    return lev_fail(LEV_ERR_CONFIG, "%s: %s = \"%.60s\" must be true or false", origin, o->name, value);
  *(bool *)field(config, o) = yes;
  return LEV_OK;
}

static lev_status set_choice(lev_config *config, const option *o, const char *value, const char *origin) {
  int index = 0;
  for (const char *at = o->choices;; ++index) {
    size_t length = strcspn(at, "|");
    if (strlen(value) == length && memcmp(at, value, length) == 0) {
      *(int *)field(config, o) = index;
      return LEV_OK;
    }
    if (at[length] == '\0') break;
    at += length + 1;
  }
  const char *ours = lev_foreign_value(value);
  bool same = ours && strstr(o->choices, ours);
  return lev_fail(LEV_ERR_CONFIG, "%s: %s = \"%.60s\" must be one of %s%s%s", origin, o->name, value, o->choices,
                  same ? "; it is called " : "", same ? ours : "");
}

static lev_status set_text(lev_config *config, const option *o, const char *value, const char *origin) {
  if (strlen(value) >= LEV_TEXT_MAX)
    return lev_fail(LEV_ERR_CONFIG, "%s: %s has %zu bytes, at most %d fit", origin, o->name, strlen(value),
                    LEV_TEXT_MAX - 1);
  memcpy(field(config, o), value, strlen(value) + 1);
  return LEV_OK;
}

static lev_status set(lev_config *config, const option *o, const char *value, const char *origin) {
  switch (o->kind) {
  case KIND_INT:
    return set_int(config, o, value, origin);
  case KIND_SIZE:
    return set_size(config, o, value, origin);
  case KIND_REAL:
    return set_real(config, o, value, origin);
  case KIND_BOOL:
    return set_bool(config, o, value, origin);
  case KIND_CHOICE:
    return set_choice(config, o, value, origin);
  default:
    return set_text(config, o, value, origin);
  }
}

lev_status lev_config_set(lev_config *config, const char *name, const char *value, const char *origin) {
  const option *o = find(name);
  return o ? set(config, o, value, origin) : unknown(name, origin);
}

/* ---- files ---- */

typedef struct file_ctx {
  lev_config *config;
  const char *name;
} file_ctx;

static lev_status from_file(void *ctx, const char *name, const char *value, bool is_string, int line) {
  file_ctx *f = ctx;
  char origin[LEV_TEXT_MAX + 32];
  snprintf(origin, sizeof origin, "%.500s:%d", f->name, line);
  const option *o = find(name);
  if (!o) return unknown(name, origin);
  if (o->kind == KIND_TEXT && !is_string)
    return lev_fail(LEV_ERR_CONFIG, "%s: %s takes a string in quotes", origin, name);
  if (is_string && (o->kind == KIND_BOOL || o->kind == KIND_REAL))
    return lev_fail(LEV_ERR_CONFIG, "%s: %s takes no string", origin, name);
  return set(f->config, o, value, origin);
}

lev_status lev_config_parse(lev_config *config, const char *text, const char *name) {
  file_ctx ctx = {config, name};
  return lev_toml_parse(text, name, from_file, &ctx);
}

lev_status lev_config_read(lev_config *config, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return lev_fail(LEV_ERR_IO, "cannot read %s: %s", path, strerror(errno));
  char *text = lev_calloc(LEV_HEAP_COMMON, FILE_MAX_BYTES + 2, 1);
  size_t n = text ? fread(text, 1, FILE_MAX_BYTES + 1, file) : 0;
  bool failed = ferror(file) != 0;
  fclose(file);
  lev_status st = LEV_OK;
  if (!text)
    st = LEV_ERR_NOMEM;
  else if (failed)
    st = lev_fail(LEV_ERR_IO, "cannot read %s", path);
  else if (n > FILE_MAX_BYTES || strlen(text) != n)
    st = lev_fail(LEV_ERR_CONFIG, "%s is no settings file (too long, or holds zero bytes)", path);
  if (st == LEV_OK) st = lev_config_parse(config, text, path);
  if (st == LEV_OK && config->run.folder[0] == '\0') { /* runs/<file name without .toml> */
    const char *base = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    int length = (int)strlen(base);
    if (length > 5 && strcmp(base + length - 5, ".toml") == 0) length -= 5;
    snprintf(config->run.folder, LEV_TEXT_MAX, "runs/%.*s", length > 255 ? 255 : length, base);
  }
  lev_free(text);
  return st;
}

/* ---- command line ---- */

lev_status lev_config_arguments(lev_config *config, int *argc, char **argv) {
  int kept = 0;
  for (int i = 0; i < *argc; ++i) {
    char name[LEV_TEXT_MAX];
    const char *arg = argv[i], *equals = strchr(arg, '=');
    bool no = strncmp(arg, "--no-", 5) == 0 && strchr(arg, '.') && !equals;
    size_t length = equals ? (size_t)(equals - arg) : strlen(arg);
    if (strncmp(arg, "--", 2) != 0 || !memchr(arg, '.', length) || length >= sizeof name) {
      argv[kept++] = argv[i];
      continue;
    }
    memcpy(name, arg + (no ? 5 : 2), length - (no ? 5 : 2));
    name[length - (no ? 5 : 2)] = '\0';
    const option *o = find(name);
    if (!o) return unknown(name, "command line");
    if (no && o->kind != KIND_BOOL) return lev_fail(LEV_ERR_CONFIG, "%s: only true/false settings can be negated", arg);
    const char *value = no ? "false" : equals ? equals + 1 : NULL;
    bool next = i + 1 < *argc && strncmp(argv[i + 1], "--", 2) != 0;
    if (!value && o->kind == KIND_BOOL &&
        !(next && (strcmp(argv[i + 1], "true") == 0 || strcmp(argv[i + 1], "false") == 0)))
      value = "true";
    if (!value && !next) return lev_fail(LEV_ERR_CONFIG, "%s needs a value", arg);
    if (!value) value = argv[++i];
    LEV_TRY(set(config, o, value, "command line"));
  }
  *argc = kept;
  return LEV_OK;
}

/* ---- checks ---- */

#define FOLDER_MAX 800 /* bytes of the checkpoints' folder, so that the paths below it fit their buffers */

/* Names between single slashes. */
static bool is_plain_path(const char *path) {
  for (const char *at = path;; ++at) {
    size_t n = strcspn(at, "/");
    if (n == 0 || (n == 1 && at[0] == '.') || (n == 2 && at[0] == '.' && at[1] == '.')) return false;
    at += n;
    if (*at == '\0') return true;
  }
}

lev_status lev_config_validate(const lev_config *c) {
  if (c->train.grad_dtype == LEV_GRAD_F64 && c->model.dtype != LEV_F64)
    return lev_fail(LEV_ERR_CONFIG, "train.grad_dtype = f64 needs model.dtype = f64");
  if (c->model.dtype == LEV_F64 && (c->train.grad_dtype == LEV_GRAD_F32 || c->train.grad_dtype == LEV_GRAD_BF16))
    return lev_fail(LEV_ERR_CONFIG, "model.dtype = f64 keeps f64 gradients; set train.grad_dtype = auto");
  if (c->model.dtype == LEV_F32 && c->train.grad_dtype == LEV_GRAD_BF16)
    return lev_fail(LEV_ERR_CONFIG, "train.grad_dtype = bf16 needs model.dtype = bf16");
  if (c->checkpoint.initial_load_path[0] != '\0' && c->optimizer.name == LEV_OPTIMIZER_NONE)
    return lev_fail(
        LEV_ERR_CONFIG,
        "checkpoint.initial_load_path loads into the optimizer's masters, which optimizer.name = none lacks");
  if (c->lr_scheduler.warmup_steps > c->train.steps)
    return lev_fail(LEV_ERR_CONFIG, "lr_scheduler.warmup_steps = %lld exceeds train.steps = %lld",
                    (long long)c->lr_scheduler.warmup_steps, (long long)c->train.steps);
  if (c->run.folder[0] == '\0' || c->checkpoint.folder[0] == '\0')
    return lev_fail(LEV_ERR_CONFIG, "%s is empty; it must name a folder",
                    c->run.folder[0] == '\0' ? "run.folder" : "checkpoint.folder");
  if (!is_plain_path(c->checkpoint.folder))
    return lev_fail(
        LEV_ERR_CONFIG,
        "checkpoint.folder = \"%s\" must be a folder inside run.folder, whose lock guards it: no leading or "
        "trailing /, no . or .. in it",
        c->checkpoint.folder);
  size_t folder = strlen(c->run.folder) + strlen(c->checkpoint.folder);
  if (folder > FOLDER_MAX)
    return lev_fail(LEV_ERR_CONFIG, "run.folder and checkpoint.folder have %zu bytes together, at most %d fit", folder,
                    FOLDER_MAX);
  const struct {
    const char *name;
    int64_t value;
  } groups[] = {{"parallel.context", c->parallel.context},
                {"parallel.experts", c->parallel.experts},
                {"parallel.vocab", c->parallel.vocab}};
  for (int i = 0; i < 3; ++i)
    if (groups[i].value > 0 && c->parallel.ranks % groups[i].value != 0)
      return lev_fail(LEV_ERR_CONFIG, "%s = %lld must divide parallel.ranks = %lld", groups[i].name,
                      (long long)groups[i].value, (long long)c->parallel.ranks);
  return LEV_OK;
}

/* ---- showing ---- */

static const char *choice_text(const option *o, int index, int *length) {
  const char *at = o->choices;
  for (; index > 0; --index) at += strcspn(at, "|") + 1;
  *length = (int)strcspn(at, "|");
  return at;
}

static void print_real(double value, FILE *out) {
  char text[40];
  real_text(value, text);
  fprintf(out, "%s%s", text, strpbrk(text, ".e") ? "" : ".0");
}

/* A basic string of TOML. */
static void print_text(const char *text, FILE *out) {
  fputc('"', out);
  for (; *text; ++text) {
    unsigned char c = (unsigned char)*text;
    if (c == '"' || c == '\\')
      fprintf(out, "\\%c", c);
    else if (c < 0x20 || c == 0x7f)
      fprintf(out, "\\u%04x", c);
    else
      fputc(c, out);
  }
  fputc('"', out);
}

static void print_value(const lev_config *config, const option *o, FILE *out) {
  const void *p = field_of(config, o);
  int length;
  switch (o->kind) {
  case KIND_INT:
    fprintf(out, "%lld", (long long)*(const int64_t *)p);
    break;
  case KIND_SIZE:
    if (*(const size_t *)p == SIZE_MAX || *(const size_t *)p == LEV_SIZE_AUTO)
      fputs(*(const size_t *)p == SIZE_MAX ? "\"unlimited\"" : "\"auto\"", out);
    else
      fprintf(out, "%zu", *(const size_t *)p);
    break;
  case KIND_REAL:
    print_real(*(const double *)p, out);
    break;
  case KIND_BOOL:
    fputs(*(const bool *)p ? "true" : "false", out);
    break;
  case KIND_CHOICE: {
    const char *text = choice_text(o, *(const int *)p, &length);
    fprintf(out, "\"%.*s\"", length, text);
    break;
  }
  default:
    print_text(p, out);
  }
}

void lev_config_print(const lev_config *config, FILE *out) {
  char section[64] = "";
  for (int i = 0; i < N_OPTIONS; ++i) {
    const char *dot = strchr(options[i].name, '.');
    size_t length = (size_t)(dot - options[i].name);
    if (strncmp(section, options[i].name, length) != 0 || section[length] != '\0') {
      snprintf(section, sizeof section, "%.*s", (int)length, options[i].name);
      fprintf(out, "%s[%s]\n", i ? "\n" : "", section);
    }
    fprintf(out, "%s = ", dot + 1);
    print_value(config, &options[i], out);
    fputc('\n', out);
  }
}

void lev_config_help(FILE *out) {
  static const char *const kinds[] = {"int", "size", "real", "true|false", "text", ""};
  char low[40], high[40];
  lev_config *defaults = lev_calloc(LEV_HEAP_COMMON, 1, sizeof *defaults);
  if (!defaults) return;
  lev_config_defaults(defaults);
  for (int i = 0; i < N_OPTIONS; ++i) {
    const option *o = &options[i];
    fprintf(out, "--%-32s %-24s ", o->name, o->kind == KIND_CHOICE ? o->choices : kinds[o->kind]);
    print_value(defaults, o, out);
    fprintf(out, "\n      %s", o->help);
    if (o->kind == KIND_INT) fprintf(out, " [%lld .. %lld]", (long long)o->low, (long long)o->high);
    if (o->kind == KIND_REAL) fprintf(out, " [%s .. %s]", real_text(o->low_real, low), real_text(o->high_real, high));
    fputc('\n', out);
  }
  lev_free(defaults);
}
