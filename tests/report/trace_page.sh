#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# levee trace on a real run: table, page and memory.json tell the same bytes, also as a browser shows them.
# LEVEE = path of the binary. Closes on "N passed, N failed, N skipped".
. "$(dirname "$0")/../check.sh"

cat > "$work/tiny.toml" <<TOML
[model]
vocab_size = 257
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 32
[data]
train = "$work/t.train"
valid = "$work/t.valid"
[train]
steps = 2
context = 128
eval_interval = 1
[optimizer]
name = "muon"
[parallel]
ranks = 2
[checkpoint]
enable = false
[run]
folder = "$work/run"
TOML
i=0
while [ $i -lt 200 ]; do
  echo "line $i of a small text, whose words repeat and repeat: levee, budget, $((i * 7919 % 1000))"
  i=$((i + 1))
done > "$work/text.txt"

# "rank class peak" of every rank and class, from memory.json.
awk_memory='
  /"rank": / { rank = $2 + 0 }
  /"(device|pinned|host)": \{/ { gsub(/[":{]/, "", $1); class = $1; wanted = 1 }
  /"peak_bytes": / && wanted { print rank, class, $2 + 0; wanted = 0 }'
# The same from lines "<details ... data-rank="R" ... data-moments="device=N pinned=N host=N">".
awk_moments='
  { match($0, /data-rank="[0-9]+/); rank = substr($0, RSTART + 11, RLENGTH - 11)
    if (!match($0, /data-moments="[^"]*/)) next
    n = split(substr($0, RSTART + 14, RLENGTH - 14), pair, " ")
    for (i = 1; i <= n; ++i) { split(pair[i], part, "="); print rank, part[1], part[2] } }'
# ... and from the cards of the page as it was written.
awk_cards='
  /<details class="rank"/ { match($0, /data-rank="[0-9]+/); rank = substr($0, RSTART + 11, RLENGTH - 11) }
  match($0, /data-peak="[a-z]+" data-bytes="[0-9]+/) {
    split(substr($0, RSTART, RLENGTH), part, "\""); if (part[2] != "total") print rank, part[2], part[4] }'

# extract PROGRAM FILE OUTPUT: sorted lines; fails when there are none.
extract() {
  awk "$1" "$2" | sort > "$3" && [ -s "$3" ]
}
train() {
  "$levee" tokenize "$work/text.txt" --output "$work/t" --holdout 0.2 && "$levee" train "$work/tiny.toml"
}
same_as_memory() {
  extract "$1" "$2" "$3" && diff "$work/memory" "$3"
}
table_shows_peaks() {
  peak=$(awk '$1 == 0 && $2 == "device" { print $3 }' "$work/memory")
  "$levee" trace "$work/run" --rank 0 > "$work/table" && cat "$work/table" &&
    grep -q "$peak bytes in .*, equal" "$work/table" && grep -q '^backward ' "$work/table" &&
    grep -q "^page: $work/run/trace.rank0.html" "$work/table"
}

check "train" train
check "memory.json has two ranks" sh -c "awk '$awk_memory' '$work/run/memory.json' | sort > '$work/memory' && [ \$(wc -l < '$work/memory') = 6 ]"
check "table" table_shows_peaks
check "page" "$levee" trace "$work/run"
check "cards of the page = memory.json" same_as_memory "$awk_cards" "$work/run/trace.html" "$work/cards"
check "only the page is left" sh -c "! ls '$work/run' | grep -q tmp"
check "no such run" expect_exit 8 "$levee" trace "$work/none"
check "no folder given" expect_exit 1 "$levee" trace
check "rank without a trace" expect_exit 8 "$levee" trace "$work/run" --rank 5
check "rank that is no number" expect_exit 1 "$levee" trace "$work/run" --rank x
mkdir "$work/bad" && echo '{"t":1,"ev":' > "$work/bad/trace.rank0.jsonl"
check "damaged trace" expect_exit 9 "$levee" trace "$work/bad"
check "page that cannot be written" expect_exit 8 "$levee" trace "$work/run" --output "$work/none/page.html"

# In a browser: the page's script adds up every moment it was given and notes the highest sum of each class.
browser=
for b in chromium chromium-browser google-chrome; do
  command -v "$b" > /dev/null 2>&1 && browser=$b && break
done
browse() {
  timeout -k 5 120 "$browser" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
    --user-data-dir="$work/profile" --window-size=1400,1600 "$@" 2> "$work/browser.log"
}
# dom PAGE OUTPUT: the sections as the browser has them after the script ran.
dom() {
  browse --dump-dom "file://$1" > "$work/dom.html" && grep -o '<details class="rank"[^>]*>' "$work/dom.html" > "$2"
}
moments() {
  dom "$work/run/trace.html" "$work/sections" && same_as_memory "$awk_moments" "$work/sections" "$work/moments"
}
# One moment made larger in the page's numbers must show, else the comparison above says nothing.
wrong_moment_shows() {
  sed 's/"weights\.shard":\[[0-9]*,/"weights.shard":[99999999999,/' "$work/run/trace.html" > "$work/wrong.html"
  ! cmp -s "$work/run/trace.html" "$work/wrong.html" && dom "$work/wrong.html" "$work/sections" &&
    extract "$awk_moments" "$work/sections" "$work/moments" && ! diff "$work/memory" "$work/moments"
}
picture() {
  browse --screenshot="$work/page.png" "file://$work/run/trace.html" && [ "$(wc -c < "$work/page.png")" -gt 20000 ]
}
if [ -n "$browser" ]; then
  check "moments in the browser = memory.json" moments
  check "a wrong moment shows" wrong_moment_shows
  check "the browser draws it" picture
else
  skip trace_page_in_a_browser "chromium is not installed"
fi

finish
