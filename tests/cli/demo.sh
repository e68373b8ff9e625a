#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# scripts/demo.sh with a stand-in for the command: what is refused costs no earlier run, and the run before is kept.
# Closes on "N passed, N failed, N skipped".
. "$(dirname "$0")/../check.sh"
script=$(cd "$(dirname "$0")/../.." && pwd)/scripts/demo.sh
cd "$work" || exit 2
echo "some text" > text.txt
cat > stand_in <<'SH'
#!/bin/sh
folder=runs/demo
for word; do
  case $word in --run.folder=*) folder=${word#*=} ;; esac
done
case "$*" in
tokenize*) ;;
*--bad*) echo "bad setting" >&2; exit 2 ;;
*--print-config*) printf '[model]\nname = "x"\n\n[run]\nfolder = "%s"\nseed = 1\n\n' "$folder" ;;
*--large*) mkdir -p "$folder" && : > "$folder/metrics.jsonl"; echo "too large" >&2; exit 3 ;; # in a try as in a run
*) mkdir -p "$folder" && echo "$*" > "$folder/args" && echo step > "$folder/metrics.jsonl" ;;
esac
SH
chmod +x stand_in

demo() { TEXT=text.txt sh "$script" "$work/stand_in" "$@"; }
refused() { # CODE TEXT OPTION
  if demo "$3" 2>err; then return 1; else [ $? -eq "$1" ]; fi && [ "$(cat err)" = "$2" ]
}
usage() { if sh "$script" 2>err; then return 1; else grep -q '^usage: ' err; fi; }
holds() { grep -q -- "$2" "runs/$1/args"; }

check "a first run" demo --first
check "its settings arrive" holds demo --first
check "a refused setting is refused" refused 2 "bad setting" --bad
check "the run before stands" holds demo --first
check "what memory does not hold is refused" refused 3 "too large" --large
check "the run before stands" holds demo --first
check "a run in another folder" demo --run.folder=elsewhere
check "moves nothing" holds demo --first
check "text makes token files alone" demo text
check "nothing moved" holds demo --first
check "a second run" demo --second
check "it is the run" holds demo --second
check "the run before is kept" holds demo.before --first
check "refused again" refused 3 "too large" --large
check "and again" refused 3 "too large" --large
check "both runs stand" eval 'holds demo --second && holds demo.before --first'
rm -r runs/demo && mkdir runs/demo && : > runs/demo/metrics.jsonl
check "a run after one that left nothing" demo --third
check "does not lose the one before" eval 'holds demo --third && holds demo.before --first'
check "no arguments: what it takes" usage
finish
