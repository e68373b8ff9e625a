/* SPDX-License-Identifier: Apache-2.0 */
/* levee plan: every byte of a run, by rank, class and tag, from the dry backend; on request with caps picked to fit,
 * with plain schedules beside it, and with an estimate of the step's time. Exit code 0, or 3 when a given limit is
 * passed. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"
#include "harness/cli/estimate_text.h"
#include "harness/cli/settings.h"
#include "harness/cli/verbs.h"
#include "harness/cli/words.h"
#include "harness/report/memory_report.h"
#include "harness/train/auto.h"
#include "harness/train/routing.h"

static const char help[] =
    "levee plan CONFIG.toml [options] [--section.key=value ...]: every byte of a run of the configuration, by dry run\n"
    "  --device-memory, --host-memory, --context VALUE\n"
    "                    short for --memory.device_memory, --memory.host_memory, --train.context; past a limit\n"
    "                    (both are of one rank) the exit status is 3\n"
    "  --run.device=cuda for a machine with GPUs, wherever the plan is made; default: for this one\n"
    "  --auto            picks all caps so that everything fits the limits, and prints them as settings\n"
    "  --plain           with the unbounded schedule of every module, under balanced and under 95/4 routing\n"
    "  --without MODULE  with that of one module, and the bytes it adds\n"
    "  --ceilings FILE   also how long a step takes at the rates of a file, and what bounds it\n"
    "  --all-ranks       every rank; default: the largest\n"
    "  --json            for machines\n"
    "  --print-config    the settings in full; no plan\n";

typedef struct plan_options {
  bool json, all_ranks, plain, automatic;
  const char *without;  /* a module's name */
  const char *ceilings; /* path */
  lev_ceilings rates;   /* what stands there */
} plan_options;

static lev_status parse(lev_config *config, int argc, char **argv, plan_options *out) {
  const char *device = NULL, *host = NULL, *context = NULL;
  const lev_cli_option options[] = {{"--json", .flag = &out->json},        {"--all-ranks", .flag = &out->all_ranks},
                                    {"--plain", .flag = &out->plain},      {"--auto", .flag = &out->automatic},
                                    {"--without", .value = &out->without}, {"--ceilings", .value = &out->ceilings},
                                    {"--device-memory", .value = &device}, {"--host-memory", .value = &host},
                                    {"--context", .value = &context}};
  for (int i = 0; i < argc; ++i) {
    bool known;
    LEV_TRY(lev_cli_take(options, sizeof options / sizeof *options, argc, argv, &i, &known));
    if (!known) return lev_config_unexpected(argv[i]);
  }
  if (device) LEV_TRY(lev_config_set(config, "memory.device_memory", device, "--device-memory"));
  if (host) LEV_TRY(lev_config_set(config, "memory.host_memory", host, "--host-memory"));
  if (context) LEV_TRY(lev_config_set(config, "train.context", context, "--context"));
  if (out->plain && (out->automatic || out->without))
    return lev_fail(LEV_ERR_ARG, "--plain goes neither with --auto nor with --without");
  if (out->ceilings) LEV_TRY(lev_ceilings_read(out->ceilings, &out->rates));
  return lev_config_validate(config);
}

/* ---- one plan ---- */

#define NOTES 8

/* A world's plan as it is reported: with --all-ranks every rank, else the largest. */
typedef struct shown {
  lev_world_plan world;
  lev_memory_rank *rows;
  lev_memory_report report;
  lev_memory_note notes[NOTES];
  char *texts[NOTES]; /* of the notes, to be freed */
} shown;

static bool grows(const void *config, const char *tag) {
  return lev_tag_grows(config, tag);
}

static lev_status show_begin(const lev_config *config, bool all, shown *s) {
  *s = (shown){0};
  LEV_TRY(lev_plan_world(config, &s->world));
  const lev_rank_classes *k = &s->world.classes;
  int n = all ? k->ranks : 1;
  s->rows = lev_calloc(LEV_HEAP_REPORT, (size_t)n, sizeof *s->rows);
  if (!s->rows) return LEV_ERR_NOMEM;
  for (int r = 0; r < k->ranks && all; ++r)
    s->rows[r] = (lev_memory_rank){.rank = r, .planned = s->world.plan[k->of[r]].ledger};
  if (!all)
    s->rows[0] =
        (lev_memory_rank){.rank = k->first[s->world.largest], .planned = s->world.plan[s->world.largest].ledger};
  s->report = (lev_memory_report){.ranks = k->ranks,
                                  .rank = s->rows,
                                  .n = n,
                                  .device_memory = config->memory.device_memory,
                                  .device_reserve = lev_context_reserve(config),
                                  .host_memory = config->memory.host_memory,
                                  .heap_cap = config->memory.heap_cap,
                                  .grows = grows,
                                  .grows_ctx = config,
                                  .notes = s->notes};
  return LEV_OK;
}

static void show_end(shown *s) {
  for (int i = 0; i < s->report.n_notes; ++i) free(s->texts[i]);
  lev_free(s->rows);
  lev_world_plan_free(&s->world);
}

/* Adds a member to the JSON object; takes `json`. */
static lev_status note(shown *s, const char *key, char *json) {
  if (!json) return lev_fail(LEV_ERR_NOMEM, "no memory for the report");
  s->texts[s->report.n_notes] = json;
  s->notes[s->report.n_notes++] = (lev_memory_note){key, json};
  return LEV_OK;
}

/* Bytes over the limits, over all ranks. */
static size_t excess(const shown *s, size_t *device, size_t *host) {
  lev_memory_report all = s->report;
  lev_memory_rank rows[1];
  all.rank = rows, all.n = 1;
  size_t d, h;
  *device = *host = 0;
  for (int i = 0; i < s->world.classes.n; ++i) {
    rows[0] = (lev_memory_rank){.rank = s->world.classes.first[i], .planned = s->world.plan[i].ledger};
    lev_memory_excess(&all, &d, &h);
    *device = lev_max_size(*device, d), *host = lev_max_size(*host, h);
  }
  return lev_sat_add(*device, *host);
}

static void print_plan(const lev_config *config, const shown *s) {
  char text[160], a[24], b[24];
  size_t device, host;
  lev_print_model(config, &s->world.plan[s->world.largest]);
  lev_memory_table(&s->report, stdout);
  lev_print_together(s->world.plan, s->world.classes.of, s->report.ranks);
  excess(s, &device, &host);
  if (device) printf("does not fit: %s\n", lev_memory_over_device(&s->report, device, text));
  if (host)
    printf("does not fit: %s over memory.host_memory = %s\n", lev_bytes_text(host, a),
           lev_bytes_text(s->report.host_memory, b));
  if ((s->report.device_memory || s->report.host_memory) && !device && !host)
    puts(s->report.ranks > 1 ? "each rank fits the limits, which are of one rank" : "fits the limits");
}

static lev_status print_json(const shown *s) {
  char *text = lev_memory_json(&s->report);
  if (!text) return lev_fail(LEV_ERR_NOMEM, "no memory for the JSON text");
  puts(text);
  free(text);
  return LEV_OK;
}

/* Exit code by the limits. */
static int judge(const shown *s) {
  size_t device, host;
  return excess(s, &device, &host) ? lev_status_exit_code(LEV_ERR_BUDGET) : 0;
}

/* Text of at most 4,095 bytes on the C heap. */
static char *format(const char *form, ...) __attribute__((format(printf, 1, 2)));
static char *format(const char *form, ...) {
  char text[4096];
  va_list args;
  va_start(args, form);
  vsnprintf(text, sizeof text, form, args);
  va_end(args);
  return strdup(text);
}

/* ---- --ceilings ---- */

/* Estimates the step of the largest rank where ceilings were given: as text after the plan, or as a note. */
static lev_status estimate(const lev_config *config, const plan_options *o, shown *s) {
  lev_estimate e;
  if (!o->ceilings) return LEV_OK;
  LEV_TRY(lev_estimate_step(config, s->world.classes.first[s->world.largest], &o->rates, &e));
  if (o->json) return note(s, "estimate", lev_estimate_json(&e, o->ceilings));
  lev_estimate_table(&e, o->ceilings, stdout);
  return LEV_OK;
}

/* Bytes of all ranks together, as a note. */
static lev_status note_together(shown *s) {
  unsigned long long sum[LEV_MEM_CLASSES] = {0};
  for (int r = 0; r < s->report.ranks; ++r)
    for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls)
      sum[cls] += lev_ledger_peak(s->world.plan[s->world.classes.of[r]].ledger, (lev_mem)cls);
  return note(s, "all_ranks_bytes",
              format("{\"device\": %llu, \"pinned\": %llu, \"host\": %llu}", sum[LEV_MEM_DEVICE], sum[LEV_MEM_PINNED],
                     sum[LEV_MEM_HOST]));
}

/* The plan and, where asked for, the estimate. */
static lev_status print_all(const lev_config *config, const plan_options *o, shown *s) {
  if (o->json) {
    LEV_TRY(note_together(s));
    LEV_TRY(estimate(config, o, s));
    return print_json(s);
  }
  print_plan(config, s);
  return estimate(config, o, s);
}

/* ---- --plain ---- */

static lev_status show_plain(const lev_config *config, const plan_options *o, int *exit_code) {
  static lev_config plain;
  for (int i = 0; i < (o->json ? 1 : LEV_ROUTINGS); ++i) {
    shown s;
    plain = *config;
    LEV_TRY(lev_make_plain(&plain, NULL, &lev_routings[i]));
    lev_status st = show_begin(&plain, o->all_ranks, &s);
    if (st == LEV_OK && o->json) {
      st = note(&s, "routing", format("\"%s\"", lev_routings[i].name));
    } else if (st == LEV_OK) {
      printf("%splain schedules, %s (%s)\n", i ? "\n" : "", lev_routings[i].name, lev_routings[i].text);
    }
    if (st == LEV_OK) st = print_all(&plain, o, &s);
    if (st == LEV_OK && i == LEV_ROUTING_BALANCED) *exit_code = judge(&s);
    show_end(&s);
    LEV_TRY(st);
  }
  return LEV_OK;
}

/* ---- --without ---- */

typedef struct added {
  int64_t bytes[LEV_MEM_CLASSES], module; /* of the largest rank; device bytes of the module alone */
} added;

/* What the plain schedule of o->without adds under a routing. */
static lev_status measure_added(const lev_config *config, const char *module, const lev_routing *routing,
                                const shown *bounded, added *out) {
  static lev_config plain;
  shown s;
  plain = *config;
  LEV_TRY(lev_make_plain(&plain, module, routing));
  lev_status st = show_begin(&plain, false, &s);
  if (st == LEV_OK) {
    const lev_ledger *with = bounded->world.plan[bounded->world.largest].ledger;
    const lev_ledger *without = s.world.plan[s.world.largest].ledger;
    for (int cls = 0; cls < LEV_MEM_CLASSES; ++cls)
      out->bytes[cls] = (int64_t)lev_ledger_peak(without, (lev_mem)cls) - (int64_t)lev_ledger_peak(with, (lev_mem)cls);
    for (int m = 0; m < LEV_MODULES; ++m)
      if (strcmp(module, lev_module_name[m]) == 0)
        out->module = (int64_t)lev_ledger_module_peak(without, LEV_MEM_DEVICE, lev_module_prefix[m]) -
                      (int64_t)lev_ledger_module_peak(with, LEV_MEM_DEVICE, lev_module_prefix[m]);
  }
  show_end(&s);
  return st;
}

static char *signed_bytes(int64_t bytes, char *text) {
  char size[24];
  snprintf(text, 32, "%c%s", bytes < 0 ? '-' : '+', lev_bytes_text((size_t)(bytes < 0 ? -bytes : bytes), size));
  return text;
}

static void print_added(const char *module, const lev_routing *routing, bool routed, const added *a) {
  char d[32], p[32], h[32], m[32];
  printf("without %s%s%s: %s on the device, %s pinned, %s host; %s in the module's own device bytes\n", module,
         routed ? ", " : "", routed ? routing->name : "", signed_bytes(a->bytes[LEV_MEM_DEVICE], d),
         signed_bytes(a->bytes[LEV_MEM_PINNED], p), signed_bytes(a->bytes[LEV_MEM_HOST], h),
         signed_bytes(a->module, m));
}

static char *added_json(const char *module, const lev_routing *routing, const added *a) {
  return format("{\"module\": \"%s\", \"routing\": \"%s\", \"added_bytes\": {\"device\": %lld, \"pinned\": %lld, "
                "\"host\": %lld}, \"module_device_bytes_added\": %lld}",
                module, routing->name, (long long)a->bytes[LEV_MEM_DEVICE], (long long)a->bytes[LEV_MEM_PINNED],
                (long long)a->bytes[LEV_MEM_HOST], (long long)a->module);
}

/* The plan with the module plain (under balanced routing), and what that adds to the plan as configured. */
static lev_status show_without(const lev_config *config, const plan_options *o, shown *bounded, int *exit_code) {
  static lev_config plain;
  added a[LEV_ROUTINGS] = {{{0}, 0}};
  shown s;
  bool routed = strcmp(o->without, lev_module_name[0]) == 0;
  plain = *config;
  LEV_TRY(lev_make_plain(&plain, o->without, &lev_routings[LEV_ROUTING_BALANCED]));
  for (int i = 0; i < (routed ? LEV_ROUTINGS : 1); ++i)
    LEV_TRY(measure_added(config, o->without, &lev_routings[i], bounded, &a[i]));
  lev_status st = show_begin(&plain, o->all_ranks, &s);
  if (st == LEV_OK && o->json) {
    st = note(&s, "without", added_json(o->without, &lev_routings[LEV_ROUTING_BALANCED], &a[0]));
  }
  if (st == LEV_OK) st = print_all(&plain, o, &s);
  for (int i = 0; i < (routed ? LEV_ROUTINGS : 1) && st == LEV_OK && !o->json; ++i)
    print_added(o->without, &lev_routings[i], routed, &a[i]);
  if (st == LEV_OK) *exit_code = judge(&s);
  show_end(&s);
  return st;
}

/* ---- --auto ---- */

static lev_status note_auto(shown *s, const lev_auto_result *result) {
  char text[LEV_AUTO_WORDS * (LEV_AUTO_WORD + 4) + 8] = "[";
  for (int i = 0; i < result->n_words; ++i)
    snprintf(text + strlen(text), sizeof text - strlen(text), "%s\"%s\"", i ? ", " : "", result->word[i].text);
  snprintf(text + strlen(text), sizeof text - strlen(text), "]");
  return note(s, "settings", strdup(text));
}

static void print_auto(const lev_auto_result *result) {
  const char *why = result->host_binds        ? "memory.host_memory, to which more layer inputs would go, is too small"
                    : result->host_excess > 0 ? "memory.device_memory and memory.host_memory are too small"
                                              : "memory.device_memory is too small";
  if (result->fits)
    puts(result->n_words > 0 ? "chosen settings:" : "chosen settings: as given");
  else
    printf("no choice fits: %s; more parallel.ranks or a shorter train.context take less. The least caps:\n", why);
  for (int i = 0; i < result->n_words; ++i) printf("  %s\n", result->word[i].text);
}

/* ---- the verb ---- */

static lev_status show(lev_config *config, const plan_options *o, int *exit_code) {
  lev_auto_result chosen = {0};
  shown s = {0};
  if (o->plain) return show_plain(config, o, exit_code);
  if (o->automatic) LEV_TRY(lev_auto_plan(config, o->ceilings ? &o->rates : NULL, &chosen));
  lev_status st = show_begin(config, o->all_ranks, &s);
  if (st == LEV_OK && o->automatic) st = note_auto(&s, &chosen);
  if (st == LEV_OK && o->automatic && !o->json) print_auto(&chosen);
  if (st == LEV_OK && o->without) {
    st = show_without(config, o, &s, exit_code);
  } else if (st == LEV_OK) {
    *exit_code = judge(&s);
    st = print_all(config, o, &s);
  }
  show_end(&s);
  return st;
}

int lev_verb_plan(int argc, char **argv) {
  static lev_config config;
  plan_options options = {0};
  int exit_code = 0;
  if (argc > 0 && strcmp(argv[0], "--help") == 0) {
    fputs(help, stdout);
    return 0;
  }
  lev_status st = lev_settings(&config, &argc, argv);
  if (st == LEV_OK) st = parse(&config, argc, argv, &options);
  if (st == LEV_OK) st = show(&config, &options, &exit_code);
  return st == LEV_OK ? exit_code : lev_verb_failed("plan", st);
}
