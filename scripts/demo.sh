#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# demo.sh LEVEE [OVERRIDE...]: raw text -> BPE -> tokens -> a trained model, all schedules on. TEXT=path takes any text; by default
# it is the King James Bible of Debian's package bible-kjv.
set -eu
levee=$1
shift
work=build/demo
mkdir -p "$work"
if [ -n "${TEXT:-}" ]; then
  text=$TEXT
  [ -r "$text" ] || { echo "demo: cannot read TEXT=$text" >&2; exit 1; }
else
  text=$work/kjv.txt
  if [ ! -s "$text" ]; then
    sh scripts/packages.sh bible-kjv
    bible -f Gen1:1-Rev22:21 > "$text.tmp"
    mv "$text.tmp" "$text"
  fi
fi
"$levee" tokenize "$text" --train-bpe 4096 --holdout 0.05 --output "$work/text"
[ "${1:-}" != text ] || exit 0
# What is refused must not cost the run before it.
"$levee" train harness/configs/demo.toml "$@" --print-config >/dev/null
if [ -d runs/demo ]; then
  rm -rf runs/demo.before
  mv runs/demo runs/demo.before
fi
exec "$levee" train harness/configs/demo.toml "$@"
