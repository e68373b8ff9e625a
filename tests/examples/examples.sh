#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Each module alone in another program: the examples run; they build and run in an empty folder from an installed tree,
# with nothing but what pkg-config says; what `make install` wrote, `make uninstall` removes.
# EXAMPLES = folder of the built examples. Closes on "N passed, N failed, N skipped".
. "$(dirname "$0")/../check.sh"
root=$(cd "$(dirname "$0")/../.." && pwd)
examples=${EXAMPLES:-$root/build/release/examples}
cc=${CC:-cc}
modules="pipelined_llep ring_dtp sco offload_adamw muon"

# The program succeeds, and its output shows a refused budget, the plan, a peak equal to it and a comparison.
runs() {
  timeout 120 "$1" >"$work/out" || { cat "$work/out"; return 1; }
  cat "$work/out"
  grep -Eq '^with [0-9]+ bytes: memory budget too small: .* [0-9]+' "$work/out" &&
    grep -q '^planned' "$work/out" && grep -Eq '^  (device|pinned) +[a-z_.]+ ' "$work/out" &&
    grep -q 'relative error' "$work/out" && ! grep -q WRONG "$work/out" &&
    awk '/: planned .* ledger peak/ {seen = 1; if ($3 != $7) bad = 1} END {exit !seen || bad}' "$work/out"
}

install_tree() {
  make -C "$root" install PREFIX=/opt/levee DESTDIR="$work/root"
}
only_public_headers() {
  find "$work/root" -name '*_ops.h' -o -name '*_impl.h' -o -name '*_plan.h' | grep . && return 1
  for m in $modules; do
    [ "$(find "$tree/include/levee/$m" -type f)" = "$tree/include/levee/$m/$m.h" ] || return 1
  done
}
pc() {
  PKG_CONFIG_PATH=$tree/lib/pkgconfig pkg-config "$@"
}

# In a folder that holds the example's source alone.
builds_installed() {
  mkdir "$work/$1" && cd "$work/$1" && cp "$root/examples/$1.c" "$root"/examples/example.[ch] . || return 1
  # shellcheck disable=SC2046
  "$cc" -o "$1" "$1.c" example.c $(pc --cflags --libs "levee_$1") && runs "./$1"
}
links_own_module_only() {
  [ "$(pc --libs-only-l "levee_$1" | tr ' ' '\n' | grep levee | sort | tr '\n' ' ')" = "$(
    printf '%s\n' -llevee_common "-llevee_$1" | sort | tr '\n' ' ')" ]
}
# The naive lines of an example have teeth: with a limit of zero, rounding alone is too much.
fails_when_wrong() {
  cd "$work/ring_dtp" && sed 's/1e-11/0/' ring_dtp.c >strict.c || return 1
  # shellcheck disable=SC2046
  "$cc" -o strict strict.c example.c $(pc --cflags --libs levee_ring_dtp) || return 1
  ./strict
  [ $? = 1 ]
}
uninstall_tree() {
  make -C "$root" uninstall PREFIX=/opt/levee DESTDIR="$work/root" || return 1
  ! find "$work/root" -type f | grep .
}

for m in $modules; do check "example_$m" runs "$examples/$m"; done
tree=$work/root/opt/levee
check install install_tree
check installed_command "$tree/bin/levee" --version
check installed_headers_are_public only_public_headers
# A tree that was moved still finds itself.
mv "$tree" "$work/root/moved" && tree=$work/root/moved
for m in $modules; do
  check "installed_${m}" builds_installed "$m"
  check "links_${m}_only" links_own_module_only "$m"
done
check example_fails_when_wrong fails_when_wrong
mv "$tree" "$work/root/opt/levee"
check uninstall uninstall_tree

finish
