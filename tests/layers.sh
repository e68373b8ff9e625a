#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Who may include whom, and every header compiles alone.
#
#   common/     includes common/ only
#   a module    includes common/ and itself
#   harness/    includes common/, harness/ and the modules' public headers (<module>/<module>.h);
#               harness/bench/ also their kernels (<module>/*_ops.h)
#   tests/      may include everything; nothing includes tests/ but tests/
#
# layers.sh [ROOT]: checks another tree (tests of this script). CC and CXX pick the compilers.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
root=${1:-$here}
modules="pipelined_llep ring_dtp sco offload_adamw muon"
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
cd "$root" || exit 2

sources() {
  find "$@" -type f \( -name '*.c' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort
}

# "file line included" of every quoted include, also those named through LEV_KERNELS.
includes() {
  sources "$1" | while read -r file; do
    sed -nE 's/^[[:space:]]*#[[:space:]]*(include|define[[:space:]]+LEV_KERNELS)[[:space:]]+"([^"]+)".*/\2/p' "$file" |
      while read -r name; do echo "$file $name"; done
  done
}

# allowed FOLDER NAME FILE: may FILE, in FOLDER, include NAME?
allowed() {
  case $2 in
  */*) ;;
  *) return 1 ;; # without its folder: not found from an installed tree
  esac
  top=${2%%/*}
  [ "$top" = "$1" ] && return 0
  [ "$top" = common ] && [ "$1" != common ] && return 0
  if [ "$1" = harness ]; then
    # Benchmarks time kernels alone.
    case $3 in harness/bench/*) for m in $modules; do [ "$2" = "$m/${2#*/}" ] && case $2 in *_ops.h) return 0 ;; esac; done ;; esac
    for m in $modules; do [ "$2" = "$m/$m.h" ] && return 0; done
  fi
  return 1
}

check_folder() {
  echo "- layers_$1"
  [ -d "$1" ] || { echo "  no folder $1"; failed=$((failed + 1)); return; }
  includes "$1" >"$work/list"
  bad=0
  while read -r file name; do
    allowed "$1" "$name" "$file" && continue
    case $name in *_impl.h|*_ops.h) note=" (private)" ;; *) note= ;; esac
    echo "  $file must not include \"$name\"$note"
    bad=1
  done <"$work/list"
  # Angle brackets are for the system and libraries.
  if sources "$1" | xargs -r grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*<(common|harness|tests|pipelined_llep|ring_dtp|sco|offload_adamw|muon)/'; then bad=1; fi
  if [ $bad = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

# compiles STANDARD COMPILER LANGUAGE FILE
compiles() {
  "$2" -std="$1" -D_DEFAULT_SOURCE -I. -DLEV_KERNELS='"/dev/null"' -Wall -Wextra -Werror -fsyntax-only -x "$3" "$4" >"$work/out" 2>&1
}

check_headers() {
  echo "- headers_alone_$1"
  bad=0
  for file in $(sources common $modules harness tests | grep '\.h$'); do
    case $1 in c++17*) case $file in tests/*) continue ;; esac; grep -q '<stdatomic.h>' "$file" && continue ;; esac
    # As the only include of a file, so that "#pragma once in main file" and the like do not matter.
    printf '#include "%s"\n' "$file" >"$work/alone.$3"
    if ! compiles "$1" "$2" "$([ "$3" = c ] && echo c || echo c++)" "$work/alone.$3"; then
      echo "  $file does not compile alone as $1:"
      sed 's/^/  | /' "$work/out" | head -n 8
      bad=1
    fi
  done
  if [ $bad = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

check_licence() {
  echo "- licence_lines"
  bad=0
  for file in $(sources common $modules harness tests examples; find tests scripts harness -name '*.sh' 2>/dev/null); do
    head -n 2 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || { echo "  $file has no SPDX line"; bad=1; }
  done
  if [ $bad = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

for folder in common $modules harness; do check_folder "$folder"; done
check_headers c11 "${CC:-gcc}" c
check_headers c++17 "${CXX:-g++}" cc
check_licence

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
