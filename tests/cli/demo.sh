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
case "$*" in
tokenize*) ;;
*--bad*) exit 2 ;;
*--print-config*) echo settings ;;
*) mkdir -p runs/demo && echo "$*" > runs/demo/args ;;
esac
SH
chmod +x stand_in

demo() { TEXT=text.txt sh "$script" "$work/stand_in" "$@"; }
refused() { if demo "$@"; then return 1; else [ $? -eq 2 ]; fi; }
holds() { grep -q -- "$2" "runs/$1/args"; }

check "a first run" demo --first
check "its settings arrive" holds demo --first
check "a refused setting is refused" refused --bad
check "the run before stands" holds demo --first
check "text makes token files alone" demo text
check "nothing moved" holds demo --first
check "a second run" demo --second
check "it is the run" holds demo --second
check "the run before is kept" holds demo.before --first
finish
