/* SPDX-License-Identifier: Apache-2.0 */
/* What model files from elsewhere call things: keys of Hugging Face's config.json that are no settings here, and words
 * that their values use. */
#ifndef LEV_CONFIG_FOREIGN_H
#define LEV_CONFIG_FOREIGN_H

/* What to do about a key ("model.torch_dtype", "torch_dtype"): the setting that stands for it, that it is not needed,
 * or that there is no such thing. NULL where it is not known. */
const char *lev_foreign_key(const char *name);
/* Our word for a value ("bfloat16": "bf16"); NULL where there is none. */
const char *lev_foreign_value(const char *value);

#endif
