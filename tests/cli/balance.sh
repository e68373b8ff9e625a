#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The demo on text with Zipf's frequencies: the Switch loss and the aux-loss-free bias both bring max_vio in
# metrics.jsonl down; without either nearly all tokens end up with the same experts.
# LEVEE = path of the binary. Closes on "N passed, N failed, N skipped".
. "$(dirname "$0")/../check.sh"

awk 'function uniform() { x = x * 16807 % 2147483647; return x / 2147483647 }
BEGIN {
  x = 7
  for (i = 0; i < 2000; ++i)
    for (k = 0; k < 1 + i % 3; ++k)
      word[i] = word[i] substr("bcdfghlmnprstvw", 1 + int(15 * uniform()), 1) substr("aeiou", 1 + int(5 * uniform()), 1)
  for (i = 1; i <= 40000; ++i) printf "%s%s", word[int(exp(uniform() * log(2000))) - 1], i % 12 ? " " : "\n"
}' > "$work/text.txt"
if ! "$levee" tokenize "$work/text.txt" --train-bpe 1024 --holdout 0.05 --output "$work/t" > "$work/log" 2>&1; then
  cat "$work/log"
  echo "0 passed, 1 failed, 0 skipped"
  exit 1
fi

# train BALANCE: max_vio of the last ten steps goes to $work/BALANCE.
train() {
  "$levee" train harness/configs/demo.toml --data.train="$work/t.train" --data.valid= --run.folder="$work/run.$1" \
    --model.balance="$1" --model.scoring_func=sigmoid --model.bias_update_rate=0.005 --train.context=512 --train.steps=80 \
    --parallel.ranks=2 --checkpoint.enable=false --run.trace_steps=0 --run.compute_immediate=true > "$work/train.log" 2>&1 ||
    { tail -5 "$work/train.log"; return 1; }
  sed -n 's/.*"max_vio": \([0-9.e+-]*\).*/\1/p' "$work/run.$1/metrics.jsonl" | tail -10 |
    awk '{ s += $1 } END { if (NR != 10) exit 1; print s / NR }' > "$work/$1"
}
# lower A B: the mean of A is below 0.8 of that of B.
lower() {
  awk -v a="$(cat "$work/$1")" -v b="$(cat "$work/$2")" -v x="$1" -v y="$2" \
    'BEGIN { printf "  max_vio %s with %s, %s with %s\n", a, x, b, y; exit !(a > 0 && a < 0.8 * b) }'
}
check "demo without balancing" train none
check "demo with the Switch loss" train switch
check "demo with the selection bias" train aux_free
check "the loss brings max_vio down" lower switch none
check "the bias brings max_vio down" lower aux_free none

finish
