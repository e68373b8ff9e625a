#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh TEST...: runs test programs and adds up their closing lines "N passed, N failed, N skipped".
#
# Also a failure: a crash or other bad exit, a deadline passed, no closing line, no test executed, a skip that is not
# listed in tests/expected_skips.txt, with T_BACKEND=cuda a program of which no test passed on a GPU. The sum
# stands alone on the last line; the exit status is 0 only without failures.
#
#   T_TIMEOUT=seconds       deadline of one program (900)
#   T_BACKEND=cuda          tests that run on any backend run on the GPU; there must be one
#   T_VERBOSE=1             shows the output of programs that pass, too
#   T_EXPECTED_SKIPS=file   another list: one test name per line, '#' starts a comment
set -u
here=$(cd "$(dirname "$0")" && pwd)
limit=${T_TIMEOUT:-900}
expected=${T_EXPECTED_SKIPS:-$here/expected_skips.txt}
log=$(mktemp) || exit 2
trap 'rm -f "$log"' EXIT
trap 'exit 130' INT TERM

total_passed=0 total_failed=0 total_skipped=0 total_cuda=0

# Names of the tests that skipped: the "- name" line before each "  skipped:" line.
skipped_names() {
  awk '/^- /{name=$2} /^  skipped:/{print name}' "$log"
}

is_expected() {
  [ -f "$expected" ] && sed 's/#.*//; s/[[:space:]]*$//; s/^[[:space:]]*//' "$expected" | grep -Fxq -- "$1"
}

# Sets `unexpected` to the number of skips that no list allows, and `reason` to their names.
count_unexpected() {
  unexpected=0 named=0 reason=
  for name in $(skipped_names); do
    named=$((named + 1))
    is_expected "$name" && continue
    unexpected=$((unexpected + 1)) reason="$reason $name"
  done
  if [ "$named" -lt "$skipped" ]; then
    unexpected=$((unexpected + skipped - named)) reason="$reason (unnamed)"
  fi
}

# Runs one program; sets passed, failed, skipped (failed includes what this script adds) and `why`.
run_one() {
  passed=0 failed=0 skipped=0 why=
  timeout -k 10 "$limit" "$1" >"$log" 2>&1 </dev/null
  status=$?
  closing=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -n 1)
  if [ -n "$closing" ]; then
    # shellcheck disable=SC2086
    set -- $closing
    passed=$1 failed=$3 skipped=$5
  fi
  cuda=$(sed -n 's/^\([0-9][0-9]*\) passed on cuda$/\1/p' "$log" | tail -n 1)
  if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    failed=$((failed + 1)) why="no end after $limit s"
  elif [ "$status" -gt 128 ]; then
    failed=$((failed + 1)) why="killed by signal $((status - 128))"
  elif [ -z "$closing" ]; then
    failed=$((failed + 1)) why="no closing line, exit status $status"
  elif [ "$status" -ne 0 ] && [ "$failed" -eq 0 ]; then
    failed=1 why="exit status $status although no test failed"
    [ $((passed + skipped)) -eq 0 ] && why="no test executed"
  elif [ $((passed + failed + skipped)) -eq 0 ]; then
    failed=1 why="no test executed"
  elif [ "$failed" -gt 0 ]; then
    why="$failed failed"
  elif [ "${T_BACKEND:-}" = cuda ] && [ "${cuda:-0}" -eq 0 ]; then
    failed=1 why="no test passed on cuda"
  fi
  count_unexpected
  if [ "$unexpected" -gt 0 ]; then
    failed=$((failed + unexpected)) why="${why:+$why; }skipped without being expected:$reason"
  fi
}

for program in "$@"; do
  case $program in */*) ;; *) program=./$program ;; esac
  start=$(date +%s)
  run_one "$program"
  seconds=$(($(date +%s) - start))
  if [ "$failed" -gt 0 ]; then
    echo "---- $program"
    tail -n 200 "$log"
    echo "---- FAILED $program: $why ($seconds s)"
  else
    [ -n "${T_VERBOSE:-}" ] && cat "$log"
    echo "ok $program: $passed passed, $skipped skipped ($seconds s)"
    awk '/^- /{name=$2} /^  skipped:/{print "   " name ":" $0}' "$log"
  fi
  total_passed=$((total_passed + passed))
  total_failed=$((total_failed + failed))
  total_skipped=$((total_skipped + skipped))
  total_cuda=$((total_cuda + ${cuda:-0}))
done

if [ $((total_passed + total_failed + total_skipped)) -eq 0 ]; then
  echo "no test executed"
  total_failed=1
fi
[ "${T_BACKEND:-}" = cuda ] && echo "$total_cuda passed on cuda"
echo "$total_passed passed, $total_failed failed, $total_skipped skipped"
[ "$total_failed" -eq 0 ]
