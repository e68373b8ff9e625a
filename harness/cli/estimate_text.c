/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/cli/estimate_text.h"

#include <jansson.h>

static const char *scaled(double amount, const char *unit, char *text, size_t size) {
  static const char *const prefix[] = {"", "k", "M", "G", "T", "P", "E"};
  int i = 0;
  while (amount >= 1000 && i < 6) amount /= 1000, ++i;
  snprintf(text, size, "%.3g %s%s", amount, prefix[i], unit);
  return text;
}

void lev_estimate_table(const lev_estimate *e, const char *ceilings, FILE *out) {
  char text[48];
  fprintf(out, "estimate of a step of rank %d, balanced routing, ceilings of %s\n", e->rank, ceilings);
  for (int i = 0; i < LEV_COSTS; ++i) {
    const lev_cost *c = &e->cost[i];
    if (c->amount > 0)
      fprintf(out, "  %-18s %14s %11.3f s %5.1f %%   %s\n", c->name, scaled(c->amount, c->unit, text, sizeof text),
              c->seconds, 100 * c->seconds / e->step, c->ceiling);
  }
  fprintf(out, "  forward and backward %.3f s (computing %.3f s, copies and collectives beside it), optimizer %.3f s\n",
          e->forward_backward, e->compute, e->optimizer);
  fprintf(out, "  step %.3f s, %.0f tokens/s, bound by %s (%s ceiling)\n", e->step, e->tokens_per_second,
          e->cost[e->bound].name, e->cost[e->bound].ceiling);
  for (int i = 0; i < e->n_notes; ++i) fprintf(out, "  note: %s\n", e->note[i]);
}

char *lev_estimate_json(const lev_estimate *e, const char *ceilings) {
  json_t *phases = json_array(), *path = json_string(ceilings), *notes = json_array();
  if (!path) path = json_null(); /* a name that is no UTF-8 */
  for (int i = 0; i < LEV_COSTS; ++i) {
    const lev_cost *c = &e->cost[i];
    json_array_append_new(phases, json_pack("{s:s, s:f, s:s, s:s, s:f}", "name", c->name, "amount", c->amount, "unit",
                                            c->unit, "ceiling", c->ceiling, "seconds", c->seconds));
  }
  for (int i = 0; i < e->n_notes; ++i) json_array_append_new(notes, json_string(e->note[i]));
  json_t *root =
      json_pack("{s:o, s:i, s:o, s:f, s:f, s:f, s:f, s:f, s:s, s:o}", "ceilings", path, "rank", e->rank, "phases",
                phases, "compute_seconds", e->compute, "forward_backward_seconds", e->forward_backward,
                "optimizer_seconds", e->optimizer, "step_seconds", e->step, "tokens_per_second", e->tokens_per_second,
                "bound_by", e->cost[e->bound].name, "notes", notes);
  char *text = root ? json_dumps(root, 0) : NULL;
  json_decref(root);
  return text;
}
