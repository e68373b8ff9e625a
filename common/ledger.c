/* SPDX-License-Identifier: Apache-2.0 */
#include "common/ledger.h"

#include <string.h>

#include "common/dims.h"
#include "common/hostmem.h"

#define MAX_TAGS 256
#define TEXT_BYTES 64

typedef struct account {
  lev_mem cls;
  int module; /* index of its module */
  char tag[TEXT_BYTES];
  size_t live, peak, at_peak;
} account;

typedef struct module_account {
  lev_mem cls;
  char prefix[TEXT_BYTES]; /* tag up to its first dot */
  size_t live, peak;
} module_account;

typedef struct class_account {
  size_t live, peak;
  char peak_phase[TEXT_BYTES];
} class_account;

struct lev_ledger {
  lev_trace *trace;
  class_account classes[LEV_MEM_CLASSES];
  char phase[TEXT_BYTES];
  int n_tags, n_modules;
  account tags[MAX_TAGS];
  module_account modules[MAX_TAGS];
};

const char *lev_mem_name(lev_mem cls) {
  static const char *const names[LEV_MEM_CLASSES] = {"device", "pinned", "host"};
  return (unsigned)cls < LEV_MEM_CLASSES ? names[cls] : "?";
}

lev_status lev_ledger_create(lev_trace *trace, lev_ledger **out) {
  *out = lev_calloc(LEV_HEAP_COMMON, 1, sizeof **out);
  if (!*out) return LEV_ERR_NOMEM;
  (*out)->trace = trace;
  return LEV_OK;
}

void lev_ledger_destroy(lev_ledger *ledger) {
  lev_free(ledger);
}

static account *find(const lev_ledger *ledger, lev_mem cls, const char *tag) {
  for (int i = 0; i < ledger->n_tags; ++i) {
    const account *a = &ledger->tags[i];
    if (a->cls == cls && strcmp(a->tag, tag) == 0) return (account *)a;
  }
  return NULL;
}

static int find_module(const lev_ledger *ledger, lev_mem cls, const char *tag) {
  size_t length = strcspn(tag, ".");
  for (int i = 0; i < ledger->n_modules; ++i) {
    const module_account *m = &ledger->modules[i];
    if (m->cls == cls && strlen(m->prefix) == length && strncmp(m->prefix, tag, length) == 0) return i;
  }
  return -1;
}

static lev_status open_account(lev_ledger *ledger, lev_mem cls, const char *tag, account **out) {
  if ((unsigned)cls >= LEV_MEM_CLASSES || !tag || !*tag || strlen(tag) >= TEXT_BYTES)
    return lev_fail(LEV_ERR_ARG, "class %d, tag \"%.80s\": tags have 1 to %d bytes", (int)cls, tag ? tag : "",
                    TEXT_BYTES - 1);
  account *a = find(ledger, cls, tag);
  if (!a) {
    if (ledger->n_tags == MAX_TAGS)
      return lev_fail(LEV_ERR_CAPACITY, "tag \"%s\" would be number %d, room for %d", tag, MAX_TAGS + 1, MAX_TAGS);
    int module = find_module(ledger, cls, tag);
    if (module < 0) {
      module = ledger->n_modules++;
      ledger->modules[module].cls = cls;
      memcpy(ledger->modules[module].prefix, tag, strcspn(tag, "."));
    }
    a = &ledger->tags[ledger->n_tags++];
    a->cls = cls, a->module = module;
    memcpy(a->tag, tag, strlen(tag) + 1);
  }
  *out = a;
  return LEV_OK;
}

static void keep_peak(lev_ledger *ledger, lev_mem cls) {
  class_account *c = &ledger->classes[cls];
  c->peak = c->live;
  memcpy(c->peak_phase, ledger->phase, TEXT_BYTES);
  for (int i = 0; i < ledger->n_tags; ++i)
    if (ledger->tags[i].cls == cls) ledger->tags[i].at_peak = ledger->tags[i].live;
}

lev_status lev_ledger_add(lev_ledger *ledger, lev_mem cls, const char *tag, size_t bytes) {
  account *a = NULL;
  LEV_TRY(open_account(ledger, cls, tag, &a));
  class_account *c = &ledger->classes[cls];
  module_account *m = &ledger->modules[a->module];
  if (bytes > SIZE_MAX - c->live)
    return lev_fail(LEV_ERR_CAPACITY, "%s: %zu bytes on top of %zu overflow", tag, bytes, c->live);
  a->live += bytes, m->live += bytes, c->live += bytes;
  a->peak = lev_max_size(a->peak, a->live);
  m->peak = lev_max_size(m->peak, m->live);
  if (c->live > c->peak) keep_peak(ledger, cls);
  lev_trace_add(ledger->trace, LEV_EV_ALLOC, (int)cls, a->tag, bytes);
  return LEV_OK;
}

lev_status lev_ledger_sub(lev_ledger *ledger, lev_mem cls, const char *tag, size_t bytes) {
  account *a = (unsigned)cls < LEV_MEM_CLASSES && tag ? find(ledger, cls, tag) : NULL;
  size_t live = a ? a->live : 0;
  if (!a || bytes > live)
    return lev_fail(LEV_ERR_INTERNAL, "%s %s: %zu bytes leave, %zu are live", lev_mem_name(cls), tag ? tag : "(none)",
                    bytes, live);
  a->live -= bytes;
  ledger->modules[a->module].live -= bytes;
  ledger->classes[cls].live -= bytes;
  lev_trace_add(ledger->trace, LEV_EV_FREE, (int)cls, a->tag, bytes);
  return LEV_OK;
}

void lev_ledger_phase(lev_ledger *ledger, const char *phase, int64_t index) {
  size_t length = strnlen(phase, TEXT_BYTES - 1);
  memcpy(ledger->phase, phase, length);
  memset(ledger->phase + length, 0, TEXT_BYTES - length);
  lev_trace_add(ledger->trace, LEV_EV_PHASE, 0, phase, (uint64_t)index);
}

size_t lev_ledger_live(const lev_ledger *ledger, lev_mem cls) {
  return ledger->classes[cls].live;
}
size_t lev_ledger_peak(const lev_ledger *ledger, lev_mem cls) {
  return ledger->classes[cls].peak;
}
const char *lev_ledger_peak_phase(const lev_ledger *ledger, lev_mem cls) {
  return ledger->classes[cls].peak_phase;
}
int lev_ledger_count(const lev_ledger *ledger) {
  return ledger->n_tags;
}

lev_ledger_row lev_ledger_at(const lev_ledger *ledger, int i) {
  const account *a = &ledger->tags[i];
  return (lev_ledger_row){a->cls, a->tag, a->live, a->peak, a->at_peak};
}

size_t lev_ledger_tag_peak(const lev_ledger *ledger, lev_mem cls, const char *tag) {
  const account *a = find(ledger, cls, tag);
  return a ? a->peak : 0;
}

size_t lev_ledger_module_peak(const lev_ledger *ledger, lev_mem cls, const char *prefix) {
  int i = find_module(ledger, cls, prefix);
  return i < 0 ? 0 : ledger->modules[i].peak;
}

lev_trace *lev_ledger_trace(const lev_ledger *ledger) {
  return ledger ? ledger->trace : NULL;
}
