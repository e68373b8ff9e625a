/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "harness/report/trace_report.h"
#include "harness/report/trace_samples.h"

enum { TEXT = LEV_TIMELINE_NAME + 24 };

static void set_bytes(json_t *object, const char *key, size_t bytes) {
  json_object_set_new(object, key, json_integer((json_int_t)bytes));
}

static json_t *tag_json(const lev_timeline *t, const lev_timeline_tag *tag) {
  json_t *out = json_object();
  set_bytes(out, "peak_bytes", tag->peak);
  set_bytes(out, "at_peak_bytes", tag->at_peak);
  if (t->has_plan) set_bytes(out, "planned_bytes", tag->planned);
  return out;
}

static json_t *class_json(const lev_timeline *t, lev_mem cls) {
  const lev_timeline_class *c = &t->classes[cls];
  char phase[TEXT];
  json_t *out = json_object(), *tags = json_object();
  set_bytes(out, "peak_bytes", c->peak);
  if (t->has_plan) set_bytes(out, "planned_bytes", c->planned);
  if (t->has_reported) set_bytes(out, "reported_peak_bytes", c->reported);
  json_object_set_new(out, "peak_change", json_integer(c->peak_change));
  json_object_set_new(out, "peak_phase", json_string(lev_timeline_phase_text(lev_timeline_peak_phase(t, cls), phase)));
  for (int k = 0; k < t->n_tags; ++k)
    if (t->tags[k].cls == cls) json_object_set_new(tags, t->tags[k].name, tag_json(t, &t->tags[k]));
  json_object_set_new(out, "tags", tags);
  return out;
}

static json_t *total_json(const lev_timeline *t) {
  size_t planned = 0;
  json_t *out = json_object();
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) planned += t->classes[c].planned;
  set_bytes(out, "peak_bytes", t->total_peak);
  if (t->has_plan) set_bytes(out, "planned_bytes", planned);
  json_object_set_new(out, "peak_change", json_integer(t->total_peak_change));
  return out;
}

static json_t *phases_json(const lev_timeline *t) {
  char text[TEXT];
  json_t *out = json_array();
  for (int64_t i = 0; i < t->n_phases; ++i) {
    const lev_timeline_phase *p = &t->phases[i];
    json_t *one = json_object();
    json_object_set_new(one, "name", json_string(lev_timeline_phase_text(p, text)));
    json_object_set_new(one, "first_change", json_integer(p->first));
    json_object_set_new(one, "time_ns", json_integer(p->time_ns));
    set_bytes(one, "device_peak_bytes", p->peak[LEV_MEM_DEVICE]);
    set_bytes(one, "copied_bytes", p->copied);
    set_bytes(one, "sent_bytes", p->sent);
    json_array_append_new(out, one);
  }
  return out;
}

static json_t *samples_json(const lev_timeline *t, const lev_samples *s) {
  json_t *out = json_object(), *change = json_array(), *time = json_array(), *phase = json_array();
  for (int64_t i = 0; i < s->n; ++i) {
    const lev_timeline_change *c = &t->changes[s->change[i]];
    json_array_append_new(change, json_integer(s->change[i]));
    json_array_append_new(time, json_integer(c->time_ns));
    json_array_append_new(phase, json_integer(c->phase));
  }
  json_object_set_new(out, "change", change);
  json_object_set_new(out, "time_ns", time);
  json_object_set_new(out, "phase", phase);
  for (int c = 0; c < LEV_MEM_CLASSES; ++c) {
    json_t *tags = json_object();
    for (int k = 0; k < t->n_tags; ++k) {
      if (t->tags[k].cls != (lev_mem)c) continue;
      json_t *live = json_array();
      for (int64_t i = 0; i < s->n; ++i)
        json_array_append_new(live, json_integer((json_int_t)s->live[i * t->n_tags + k]));
      json_object_set_new(tags, t->tags[k].name, live);
    }
    json_object_set_new(out, lev_mem_name((lev_mem)c), tags);
  }
  return out;
}

json_t *lev_trace_json(const lev_timeline *t, int64_t buckets) {
  lev_samples samples;
  if (lev_samples_take(t, buckets, &samples) != LEV_OK) return NULL;
  json_t *root = json_object();
  json_object_set_new(root, "rank", json_integer(t->rank));
  if (t->ranks > 0) json_object_set_new(root, "ranks", json_integer(t->ranks));
  json_object_set_new(root, "changes", json_integer(t->n_changes));
  json_object_set_new(root, "events", json_integer(t->events));
  if (t->recorded > 0) json_object_set_new(root, "recorded_events", json_integer(t->recorded));
  json_object_set_new(root, "dropped_events", json_integer(t->dropped));
  json_object_set_new(root, "whole", json_boolean(lev_timeline_whole(t) == LEV_OK));
  json_object_set_new(root, "unmatched_frees", json_integer(t->unmatched));
  for (int c = 0; c < LEV_MEM_CLASSES; ++c)
    json_object_set_new(root, lev_mem_name((lev_mem)c), class_json(t, (lev_mem)c));
  json_object_set_new(root, "total", total_json(t));
  json_object_set_new(root, "phases", phases_json(t));
  json_object_set_new(root, "samples", samples_json(t, &samples));
  lev_samples_free(&samples);
  return root;
}
