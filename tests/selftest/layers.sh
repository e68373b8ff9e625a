#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks tests/layers.sh: each forbidden include, planted in a small tree, must be reported.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
spdx='/* SPDX-License-Identifier: Apache-2.0 */'

# A clean tree of one header per folder.
plant() {
  rm -rf "$work/tree"
  for folder in common pipelined_llep ring_dtp sco offload_adamw muon harness/train harness/bench tests/common; do
    mkdir -p "$work/tree/$folder"
    printf '%s\n' "$spdx" >"$work/tree/$folder/${folder##*/}.h"
  done
  printf '%s\n#include "common/common.h"\n#include "sco/sco.h"\n' "$spdx" >"$work/tree/harness/train/a.c"
  printf '%s\n' "$spdx" >"$work/tree/sco/sco_ops.h"
}

# expect NAME TEXT: layers.sh fails on the tree and says TEXT; no TEXT: it passes.
expect() {
  echo "- $1"
  "$root/tests/layers.sh" "$work/tree" >"$work/out" 2>&1
  status=$?
  if [ -z "$2" ]; then
    [ $status -eq 0 ]
  else
    [ $status -ne 0 ] && grep -Fq -- "$2" "$work/out"
  fi
  if [ $? -eq 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "  exit status $status, wanted \"$2\" in:"
    sed 's/^/  | /' "$work/out"
  fi
}

# try NAME FILE LINE TEXT
try() {
  plant
  printf '%s\n%s\n' "$spdx" "$3" >"$work/tree/$2"
  expect "$1" "$4"
}

plant
expect layers_clean_tree ""
try layers_common_includes_module common/x.c '#include "sco/sco.h"' 'common/x.c must not include "sco/sco.h"'
try layers_module_includes_module muon/x.inc '  #  include "offload_adamw/offload_adamw.h"' 'muon/x.inc must not include'
try layers_module_includes_harness ring_dtp/x.cu '#include "harness/train/train.h"' 'ring_dtp/x.cu must not include'
try layers_module_includes_tests sco/x.c '#include "tests/t.h"' 'sco/x.c must not include "tests/t.h"'
try layers_harness_includes_private harness/train/x.c '#include "sco/sco_ops.h"' 'must not include "sco/sco_ops.h" (private)'
try layers_bench_includes_kernels harness/bench/x.c '#include "sco/sco_ops.h"' ''
try layers_bench_includes_private harness/bench/x.c '#include "sco/sco_impl.h"' 'must not include "sco/sco_impl.h" (private)'
try layers_kernel_template muon/x.c '#define LEV_KERNELS "sco/sco_cpu.inc"' 'must not include "sco/sco_cpu.inc"'
try layers_without_folder sco/x.c '#include "sco.h"' 'must not include "sco.h"'
try layers_angle_brackets sco/x.c '#include <muon/muon.h>' 'sco/x.c:2:'
try layers_header_not_alone sco/x.h 'static inline size_t f(void) { return 0; }' 'sco/x.h does not compile alone as c11'
try layers_header_not_cxx sco/x.h 'static inline int *f(void *new) { return (int *)new; }' 'sco/x.h does not compile alone as c++17'
plant
printf 'int x;\n' >"$work/tree/muon/x.c"
expect layers_licence 'muon/x.c has no SPDX line'

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
