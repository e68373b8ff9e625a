#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The section "Models" of harness/README.md names every setting of a model. LEVEE = path of the binary.
. "$(dirname "$0")/../check.sh"
here=$(cd "$(dirname "$0")/../.." && pwd)

all_named() {
  sed -n '/^## Models/,/^## /p' "$here/harness/README.md" > "$work/section"
  "$levee" --help-all | sed -n 's/^--model\.\([a-z0-9_]*\) .*/\1/p' > "$work/keys"
  [ "$(wc -l < "$work/keys")" -ge 30 ] || { echo "--help-all lists $(wc -l < "$work/keys") settings of a model"; return 1; }
  missing=
  while read -r key; do grep -Eq "\`(model\.)?$key\`" "$work/section" || missing="$missing $key"; done < "$work/keys"
  [ -z "$missing" ] || { echo "not named:$missing"; return 1; }
}

check "every setting of a model is in harness/README.md" all_named
finish
