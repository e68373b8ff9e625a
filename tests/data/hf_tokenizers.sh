#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The same ids as Hugging Face's `tokenizers` (Python package): our tokenizer.json there, theirs here.
# LEVEE names the command (build/levee). Skips where the package or the text is missing.
set -u
here=$(cd "$(dirname "$0")" && pwd)
levee=${LEVEE:-$here/../../build/levee}
if ! python3 -c 'import tokenizers' 2>/dev/null; then
  echo "- hf_tokenizers"
  echo "  skipped: the Python package tokenizers is not installed"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
if command -v bible >/dev/null 2>&1; then bible -f Gen1:1-Rev22:21 >"$work/text.txt"; fi
TOKENIZERS_PARALLELISM=false RAYON_NUM_THREADS=1 python3 "$here/hf_tokenizers.py" "$levee" "$work"
