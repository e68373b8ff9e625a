#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Models that transformers saved: loaded, compared in loss and gradient norm, and exported again. LEVEE names the command
# (build/levee), PYTHON an interpreter that has torch and transformers. Skips where these are missing.
set -u
here=$(cd "$(dirname "$0")" && pwd)
levee=${LEVEE:-$here/../../build/levee}
python=${PYTHON:-python3}
if ! "$python" -c 'import torch, transformers, safetensors' 2>/dev/null; then
  echo "- hf_models"
  echo "  skipped: the Python packages torch, transformers and safetensors are not installed"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
"$python" "$here/hf_models.py" "$levee" "$work"
