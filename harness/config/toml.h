/* SPDX-License-Identifier: Apache-2.0 */
/* The part of TOML 1.0 that settings need: comments, [tables], dotted keys, basic and literal strings (with \u
 * escapes), integers with underscores, floats, booleans. Each value is handed on as text: the option table knows its
 * type. */
#ifndef LEV_CONFIG_TOML_H
#define LEV_CONFIG_TOML_H

#include <stdbool.h>

#include "common/status.h"

/* Called for each key: full dotted name, value text (strings unquoted, escapes resolved; numbers without underscores),
 * whether it was a string, and the line. A non-OK status ends the parse and is returned. */
typedef lev_status (*lev_toml_fn)(void *ctx, const char *name, const char *value, bool is_string, int line);

/* Errors: LEV_ERR_CONFIG with "name:line: ..."; duplicate keys too; LEV_ERR_NOMEM. */
LEV_MUST_CHECK lev_status lev_toml_parse(const char *text, const char *name, lev_toml_fn fn, void *ctx);

#endif
