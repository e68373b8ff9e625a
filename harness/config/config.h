/* SPDX-License-Identifier: Apache-2.0 */
/* Settings of a run: defaults, then the TOML file, then the command line. The table in options.h is the only list. */
#ifndef LEV_CONFIG_CONFIG_H
#define LEV_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/dtype.h"
#include "common/status.h"
#include "harness/config/options.h"

#define LEV_TEXT_MAX 512             /* bytes of a TEXT value, end included */
#define LEV_SIZE_AUTO (SIZE_MAX - 1) /* "auto" of a SIZE */

/* Choice values, in the order of their lists in options.h; DTYPE's are those of lev_dtype. */
typedef enum lev_balance { LEV_BALANCE_SWITCH, LEV_BALANCE_NONE, LEV_BALANCE_AUX_FREE } lev_balance;
typedef enum lev_grad_choice { LEV_GRAD_AUTO, LEV_GRAD_F32, LEV_GRAD_BF16, LEV_GRAD_F64 } lev_grad_choice;
typedef enum lev_optimizer { LEV_OPTIMIZER_ADAMW, LEV_OPTIMIZER_MUON, LEV_OPTIMIZER_NONE } lev_optimizer;
typedef enum lev_decay { LEV_DECAY_COSINE, LEV_DECAY_LINEAR, LEV_DECAY_NONE } lev_decay;
typedef enum lev_schedule { LEV_SCHEDULE_PLAIN, LEV_SCHEDULE_BOUNDED } lev_schedule;
typedef enum lev_device_choice { LEV_DEVICE_AUTO, LEV_DEVICE_CPU, LEV_DEVICE_CUDA } lev_device_choice;

#define LEV_FIELD_INT(key) int64_t key
#define LEV_FIELD_SIZE(key) size_t key
#define LEV_FIELD_REAL(key) double key
#define LEV_FIELD_BOOL(key) bool key
#define LEV_FIELD_TEXT(key) char key[LEV_TEXT_MAX]
#define LEV_FIELD_DTYPE(key) int key
#define LEV_FIELD_QK_NORM(key) int key
#define LEV_FIELD_ROPE(key) int key
#define LEV_FIELD_SCORE(key) int key
#define LEV_FIELD_BALANCE(key) int key
#define LEV_FIELD_GRAD_DTYPE(key) int key
#define LEV_FIELD_OPTIMIZER(key) int key
#define LEV_FIELD_DECAY(key) int key
#define LEV_FIELD_SCHEDULE(key) int key
#define LEV_FIELD_BRANCH(key) int key
#define LEV_FIELD_PLACEMENT(key) int key
#define LEV_FIELD_DEVICE(key) int key
#define LEV_FIELD_ATTENTION(key) int key /* attn_route */
#define LEV_FIELD(section, key, type, def, min, max, help) LEV_FIELD_##type(key);

/* config.section.key for every line of the table. */
typedef struct lev_config {
#define LEV_SECTION_FIELD(section)                                                                                     \
  struct {                                                                                                             \
    LEV_OPTIONS_##section(LEV_FIELD)                                                                                   \
  } section;
  LEV_SECTIONS(LEV_SECTION_FIELD)
#undef LEV_SECTION_FIELD
} lev_config;

void lev_config_defaults(lev_config *config);

/* Reads a TOML file over what `config` holds. Errors: LEV_ERR_IO; LEV_ERR_CONFIG naming file:line, what was found, what
 * would do, and for an unknown key what stands for it (foreign.h) or the nearest. */
LEV_MUST_CHECK lev_status lev_config_read(lev_config *config, const char *path);
/* The same from a text; `name` stands for the file in errors. */
LEV_MUST_CHECK lev_status lev_config_parse(lev_config *config, const char *text, const char *name);
/* One setting from its words, e.g. "train.steps", "20". `origin` opens the error text ("--train.steps"). */
LEV_MUST_CHECK lev_status lev_config_set(lev_config *config, const char *name, const char *value, const char *origin);
/* Takes every --section.key=value, --section.key value and --no-section.key out of argv; what is left stays in order
 * and *argc is the new count. */
LEV_MUST_CHECK lev_status lev_config_arguments(lev_config *config, int *argc, char **argv);
/* LEV_ERR_ARG for a word that lev_config_arguments left and nobody takes; names the settings that "--key" may mean. */
LEV_MUST_CHECK lev_status lev_config_unexpected(const char *word);
/* Constraints between settings. Errors: LEV_ERR_CONFIG. */
LEV_MUST_CHECK lev_status lev_config_validate(const lev_config *config);

/* All settings as TOML that reads back to the same values. */
void lev_config_print(const lev_config *config, FILE *out);
/* One line per setting: name, choices or type, default, help. */
void lev_config_help(FILE *out);

#endif
