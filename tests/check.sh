# SPDX-License-Identifier: Apache-2.0
# What shell tests share. A test sources it, calls check for each case, and closes with finish:
#
#     . "$(dirname "$0")/../check.sh"
#     check "the help is there" expect_exit 0 "$levee" --help
#     finish
#
# It sets $levee (LEVEE, or build/levee), and $work, a folder that is removed at the end.
set -u
levee=${LEVEE:-build/levee}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0 skipped=0

# check NAME COMMAND...: counts whether the command succeeds. Its output is in $work/log, and shown if it fails.
check() {
  name=$1
  shift
  echo "- $name"
  if "$@" > "$work/log" 2>&1; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "  FAILED: $*"
    sed 's/^/  | /' "$work/log" | tail -15
  fi
}

# skip NAME REASON: counts a case that this machine cannot run; tests/expected_skips.txt lists it.
skip() {
  echo "- $1"
  echo "  skipped: $2"
  skipped=$((skipped + 1))
}

# expect_exit CODE COMMAND...: that exit code, and at most 3 lines on stderr. Leaves $work/out and $work/err.
expect_exit() {
  want=$1
  shift
  "$@" > "$work/out" 2> "$work/err"
  got=$?
  cat "$work/err"
  [ "$got" = "$want" ] && [ "$(wc -l < "$work/err")" -le 3 ]
}

# The closing line; ends the test.
finish() {
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" = 0 ]
  exit
}
