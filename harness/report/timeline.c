/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/report/timeline.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hostmem.h"

enum { PATH_BYTES = 1024, MOST_TAGS = 4096 };

/* Doubles an array that is full. */
static lev_status reserve(void **array, int64_t used, size_t element) {
  if (used >= 64 && (used & (used - 1)) != 0) return LEV_OK; /* room up to the next power of two */
  if (used > 0 && used < 64) return LEV_OK;
  size_t room = used == 0 ? 64 : 2 * (size_t)used;
  void *grown = lev_realloc(LEV_HEAP_REPORT, *array, room * element);
  if (!grown) return LEV_ERR_NOMEM;
  *array = grown;
  return LEV_OK;
}

/* A long name is cut, but never inside a UTF-8 character. */
static void copy_name(char *out, const char *text) {
  size_t length = strnlen(text, LEV_TIMELINE_NAME - 1);
  while (text[length] != '\0' && length > 0 && ((unsigned char)text[length] & 0xC0) == 0x80) --length;
  memcpy(out, text, length);
  out[length] = '\0';
}

/* ---- memory.json ---- */

static size_t byte_member(const json_t *object, const char *key) {
  const json_t *value = json_object_get(object, key);
  return json_is_integer(value) && json_integer_value(value) > 0 ? (size_t)json_integer_value(value) : 0;
}

/* The entry of `rank`, or of the rank with the largest device plan; NULL if there is none. */
static json_t *entry_of(const json_t *root, int rank) {
  json_t *list = json_object_get(root, "per_rank"), *best = NULL;
  size_t most = 0;
  for (size_t i = 0; i < json_array_size(list); ++i) {
    json_t *entry = json_array_get(list, i);
    if (rank >= 0 && json_integer_value(json_object_get(entry, "rank")) == rank) return entry;
    size_t planned = byte_member(json_object_get(entry, "device"), "planned_bytes");
    if (!best || planned > most) best = entry, most = planned;
  }
  return rank < 0 ? best : NULL;
}

/* NULL without an error when there is no such file. */
static lev_status load_memory(const char *folder, json_t **root) {
  char path[PATH_BYTES];
  json_error_t error;
  snprintf(path, sizeof path, "%.1000s/memory.json", folder);
  *root = NULL;
  FILE *file = fopen(path, "r");
  if (!file) return LEV_OK;
  *root = json_loadf(file, JSON_REJECT_DUPLICATES, &error);
  fclose(file);
  if (!*root) return lev_fail(LEV_ERR_FORMAT, "%s:%d: %.160s", path, error.line, error.text);
  return LEV_OK;
}

static void add_plan(lev_timeline *t, const json_t *entry) {
  if (!entry) return;
  const json_t *trace = json_object_get(entry, "trace");
  t->has_plan = true;
  t->recorded = (int64_t)byte_member(trace, "events"), t->dropped = (int64_t)byte_member(trace, "dropped_events");
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    const json_t *cls = json_object_get(entry, lev_mem_name((lev_mem)c)), *tags = json_object_get(cls, "tags");
    t->classes[c].planned = byte_member(cls, "planned_bytes");
    t->classes[c].reported = byte_member(cls, "peak_bytes");
    if (json_object_get(cls, "peak_bytes")) t->has_reported = true;
    for (int i = 0; i < t->n_tags; ++i) {
      if (t->tags[i].cls != (lev_mem)c) continue;
      const json_t *tag = json_object_get(tags, t->tags[i].name);
      t->tags[i].planned = byte_member(tag, "planned_bytes");
      t->tags[i].reported = byte_member(tag, "peak_bytes");
    }
  }
}

/* ---- trace ---- */

static lev_status tag_of(lev_timeline *t, lev_mem cls, const char *name, uint16_t *index) {
  char kept[LEV_TIMELINE_NAME];
  copy_name(kept, name);
  for (int i = 0; i < t->n_tags; ++i) {
    if (t->tags[i].cls != cls || strcmp(t->tags[i].name, kept) != 0) continue;
    *index = (uint16_t)i;
    return LEV_OK;
  }
  if (t->n_tags == MOST_TAGS) return lev_fail(LEV_ERR_FORMAT, "more than %d tags", MOST_TAGS);
  void *tags = t->tags;
  LEV_TRY(reserve(&tags, t->n_tags, sizeof *t->tags));
  t->tags = tags;
  t->tags[t->n_tags] = (lev_timeline_tag){.cls = cls};
  copy_name(t->tags[t->n_tags].name, name);
  *index = (uint16_t)t->n_tags++;
  return LEV_OK;
}

static lev_status add_phase(lev_timeline *t, const char *name, int64_t index, int64_t time_ns) {
  void *phases = t->phases;
  LEV_TRY(reserve(&phases, t->n_phases, sizeof *t->phases));
  t->phases = phases;
  lev_timeline_phase *p = &t->phases[t->n_phases++];
  *p = (lev_timeline_phase){.index = index, .first = t->n_changes, .time_ns = time_ns};
  copy_name(p->name, name);
  return LEV_OK;
}

static lev_status add_change(lev_timeline *t, const json_t *event, const char *name, bool is_free) {
  const char *word = json_string_value(json_object_get(event, "class"));
  int cls = 0;
  while (cls < LEV_MEM_CLASSES && (!word || strcmp(word, lev_mem_name((lev_mem)cls)) != 0)) ++cls;
  if (cls == LEV_MEM_CLASSES) return lev_fail(LEV_ERR_FORMAT, "unknown memory class \"%.32s\"", word ? word : "");
  uint16_t tag;
  LEV_TRY(tag_of(t, (lev_mem)cls, name, &tag));
  void *changes = t->changes;
  LEV_TRY(reserve(&changes, t->n_changes, sizeof *t->changes));
  t->changes = changes;
  t->changes[t->n_changes++] =
      (lev_timeline_change){.time_ns = (int64_t)json_integer_value(json_object_get(event, "t")),
                            .bytes = byte_member(event, "bytes"),
                            .phase = (uint32_t)(t->n_phases - 1),
                            .tag = tag,
                            .is_free = is_free};
  return LEV_OK;
}

static lev_status add_event(lev_timeline *t, const json_t *event) {
  const char *kind = json_string_value(json_object_get(event, "ev"));
  const char *name = json_string_value(json_object_get(event, "name"));
  const json_t *bytes = json_object_get(event, "bytes");
  if (!kind || !name || !json_is_integer(bytes))
    return lev_fail(LEV_ERR_FORMAT, "an event needs \"ev\", \"name\" and \"bytes\"");
  lev_timeline_phase *now = &t->phases[t->n_phases - 1];
  if (strcmp(kind, "alloc") == 0) return add_change(t, event, name, false);
  if (strcmp(kind, "free") == 0) return add_change(t, event, name, true);
  if (strcmp(kind, "copy") == 0)
    now->copies++, now->copied += byte_member(event, "bytes");
  else if (strcmp(kind, "coll") == 0)
    now->collectives++, now->sent += byte_member(event, "bytes");
  else if (strcmp(kind, "phase") == 0) /* an index of -1 comes as 2^64 - 1 */
    return add_phase(t, name, json_integer_value(bytes) < 0 ? -1 : (int64_t)json_integer_value(bytes),
                     (int64_t)json_integer_value(json_object_get(event, "t")));
  return LEV_OK; /* binds, and kinds of later versions */
}

/* The writer prints counts as unsigned: -1 is 18446744073709551615, which no JSON integer here holds. Such a number
 * becomes -1 in place. */
static void fold_minus_one(char *line) {
  static const char most[] = "18446744073709551615";
  char *at = strstr(line, most);
  if (!at) return;
  memset(at, ' ', sizeof most - 1);
  memcpy(at, "-1", 2);
}

static lev_status read_lines(lev_timeline *t, FILE *file, const char *path) {
  char *line = NULL;
  size_t room = 0;
  lev_status st = LEV_OK;
  ssize_t length;
  for (int64_t number = 1; st == LEV_OK && (length = getline(&line, &room, file)) > 0; ++number) {
    if (line[length - 1] != '\n') { /* a line that was never finished */
      t->cut = true;
      break;
    }
    ++t->events;
    json_error_t error;
    fold_minus_one(line);
    json_t *event = json_loads(line, 0, &error);
    if (!event) {
      st = lev_fail(LEV_ERR_FORMAT, "%s:%lld: %.160s", path, (long long)number, error.text);
    } else if ((st = add_event(t, event)) == LEV_ERR_FORMAT) {
      char detail[256];
      const char *found = strstr(lev_detail(), ": ");
      snprintf(detail, sizeof detail, "%.200s", found ? found + 2 : lev_detail());
      st = lev_fail(LEV_ERR_FORMAT, "%s:%lld: %s", path, (long long)number, detail);
    }
    json_decref(event);
  }
  free(line);
  return st;
}

/* ---- peaks ---- */

void lev_timeline_apply(const lev_timeline *t, int64_t i, size_t *live) {
  const lev_timeline_change *c = &t->changes[i];
  if (!c->is_free)
    live[c->tag] += c->bytes;
  else
    live[c->tag] -= c->bytes < live[c->tag] ? c->bytes : live[c->tag];
}

typedef struct replay {
  size_t sums[LEV_MEM_CLASSES];
  int64_t phase;
} replay;

static void note_phase(lev_timeline *t, replay *r, int64_t change) {
  lev_timeline_phase *p = &t->phases[r->phase];
  for (int c = 0; c < LEV_MEM_CLASSES; ++c)
    if (r->sums[c] > p->peak[c]) p->peak[c] = r->sums[c], p->peak_change[c] = change;
}

/* Enters all phases that begin before change i: each starts with what is live. */
static void enter_phases(lev_timeline *t, replay *r, int64_t i) {
  while (r->phase + 1 < t->n_phases && t->phases[r->phase + 1].first <= i) {
    lev_timeline_phase *p = &t->phases[++r->phase];
    for (int c = 0; c < LEV_MEM_CLASSES; ++c) p->peak[c] = r->sums[c], p->peak_change[c] = i - 1;
  }
}

static void note_class(lev_timeline *t, const replay *r, const size_t *live, int64_t i) {
  size_t total = 0;
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    total += r->sums[c];
    if (r->sums[c] <= t->classes[c].peak) continue;
    t->classes[c].peak = r->sums[c], t->classes[c].peak_change = i;
    for (int k = 0; k < t->n_tags; ++k)
      if (t->tags[k].cls == (lev_mem)c) t->tags[k].at_peak = live[k];
  }
  if (total > t->total_peak) t->total_peak = total, t->total_peak_change = i;
}

static lev_status find_peaks(lev_timeline *t) {
  size_t *live = lev_calloc(LEV_HEAP_REPORT, (size_t)t->n_tags, sizeof *live);
  if (!live) return LEV_ERR_NOMEM;
  replay r = {.phase = 0};
  t->total_peak_change = -1;
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) t->classes[c].peak_change = t->phases[0].peak_change[c] = -1;
  for (int64_t i = 0; i < t->n_changes; ++i) {
    const lev_timeline_change *c = &t->changes[i];
    size_t before = live[c->tag];
    lev_mem cls = t->tags[c->tag].cls;
    enter_phases(t, &r, i);
    if (c->is_free && c->bytes > before) ++t->unmatched;
    lev_timeline_apply(t, i, live);
    r.sums[cls] = r.sums[cls] - before + live[c->tag];
    note_phase(t, &r, i);
    note_class(t, &r, live, i);
    if (live[c->tag] > t->tags[c->tag].peak) t->tags[c->tag].peak = live[c->tag];
    for (int k = 0; k < t->n_tags; ++k) t->tags[k].steady += (double)live[k];
  }
  enter_phases(t, &r, t->n_changes);
  for (int k = 0; k < t->n_tags; ++k)
    if (t->tags[k].peak > 0) t->tags[k].steady /= (double)t->tags[k].peak * (double)t->n_changes;
  lev_free(live);
  return LEV_OK;
}

/* ---- public ---- */

static lev_status read_trace(lev_timeline *t, const char *folder) {
  char path[PATH_BYTES];
  snprintf(path, sizeof path, "%.960s/trace.rank%d.jsonl", folder, t->rank);
  FILE *file = fopen(path, "r");
  if (!file)
    return lev_fail(LEV_ERR_IO, "cannot read %s: %s (a run writes it at its end, where run.trace_steps > 0)", path,
                    strerror(errno));
  lev_status st = add_phase(t, "set-up", -1, 0);
  if (st == LEV_OK) st = read_lines(t, file, path);
  fclose(file);
  if (st == LEV_OK && t->n_changes == 0) st = lev_fail(LEV_ERR_FORMAT, "%s holds no memory event", path);
  return st;
}

lev_status lev_timeline_read(const char *folder, int rank, lev_timeline **out) {
  json_t *memory = NULL;
  *out = NULL;
  lev_timeline *t = lev_calloc(LEV_HEAP_REPORT, 1, sizeof *t);
  if (!t) return LEV_ERR_NOMEM;
  lev_status st = load_memory(folder, &memory);
  if (st == LEV_OK) {
    const json_t *entry = entry_of(memory, rank);
    t->rank = rank >= 0 ? rank : (int)json_integer_value(json_object_get(entry, "rank"));
    t->ranks = (int)json_integer_value(json_object_get(memory, "ranks"));
    st = read_trace(t, folder);
    if (st == LEV_OK) add_plan(t, entry);
  }
  json_decref(memory);
  if (st == LEV_OK) st = find_peaks(t);
  if (st != LEV_OK) {
    lev_timeline_destroy(t);
    return st;
  }
  *out = t;
  return LEV_OK;
}

lev_status lev_timeline_whole(const lev_timeline *t) {
  if (t->cut || t->events < t->recorded) {
    char of[32] = "";
    if (t->recorded > 0) snprintf(of, sizeof of, " of %lld", (long long)t->recorded);
    return lev_fail(LEV_ERR_FORMAT, "trace.rank%d.jsonl ends early: %lld%s events are there%s", t->rank,
                    (long long)t->events, of, t->cut ? ", the last line is unfinished" : "");
  }
  if (t->dropped > 0)
    return lev_fail(LEV_ERR_CAPACITY,
                    "the run stopped recording rank %d after %lld events, %lld more are missing; fewer steps with "
                    "--run.trace_steps fit",
                    t->rank, (long long)t->events, (long long)t->dropped);
  return LEV_OK;
}

void lev_timeline_destroy(lev_timeline *timeline) {
  if (!timeline) return;
  lev_free(timeline->tags);
  lev_free(timeline->phases);
  lev_free(timeline->changes);
  lev_free(timeline);
}

char *lev_timeline_phase_text(const lev_timeline_phase *phase, char *text) {
  if (phase->index < 0)
    snprintf(text, LEV_TIMELINE_NAME + 24, "%s", phase->name);
  else
    snprintf(text, LEV_TIMELINE_NAME + 24, "%s %lld", phase->name, (long long)phase->index);
  return text;
}

const lev_timeline_phase *lev_timeline_peak_phase(const lev_timeline *timeline, lev_mem cls) {
  int64_t i = timeline->classes[cls].peak_change;
  return &timeline->phases[i < 0 ? 0 : timeline->changes[i].phase];
}
