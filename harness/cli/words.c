/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/cli/words.h"

#include <string.h>

lev_status lev_cli_take(const lev_cli_option *options, int n, int argc, char **argv, int *i, bool *known) {
  const char *word = argv[*i];
  *known = false;
  for (const lev_cli_option *o = options; o < options + n && !*known; ++o) {
    size_t length = strlen(o->name);
    if (strncmp(word, o->name, length) != 0 || (word[length] != '\0' && (o->flag || word[length] != '='))) continue;
    *known = true;
    if (o->flag)
      *o->flag = true;
    else if (word[length] == '=')
      *o->value = word + length + 1;
    else if (*i + 1 < argc)
      *o->value = argv[++*i];
    else
      return lev_fail(LEV_ERR_ARG, "%s needs a value", o->name);
  }
  return LEV_OK;
}
