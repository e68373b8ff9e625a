#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# demo.sh LEVEE [OVERRIDE...]: raw text -> BPE -> tokens -> a trained model, all schedules on. TEXT=path takes any text; by default
# it is the King James Bible of Debian's package bible-kjv.
set -eu
[ $# -gt 0 ] || { echo "usage: sh scripts/demo.sh LEVEE [text | OVERRIDE...]" >&2; exit 1; }
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
# What is refused, by its settings, its text or its memory, must not cost the run before it; nor must what it left.
try() {
  "$levee" train harness/configs/demo.toml "$@" >"$work/tried" 2>"$work/refused" ||
    { code=$?; cat "$work/refused" >&2; exit $code; }
}
try "$@" --print-config
folder=$(sed -n '/^\[run\]$/,/^$/s/^folder = "\(.*\)"$/\1/p' "$work/tried")
try "$@" --train.steps=0 --lr_scheduler.warmup_steps=0 --checkpoint.enable=false --run.folder="$work/try"
rm -rf "$work/try"
if [ "$folder" = runs/demo ] && { [ -e runs/demo/checkpoints ] || [ -s runs/demo/metrics.jsonl ]; }; then
  rm -rf runs/demo.before
  mv runs/demo runs/demo.before
fi
exec "$levee" train harness/configs/demo.toml "$@"
