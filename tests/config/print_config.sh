#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# --print-config against an independent TOML parser: what is printed is TOML, reads back to itself, and holds what the
# file and the command line said. LEVEE = path of the binary. Closes on "N passed, N failed, N skipped".
. "$(dirname "$0")/../check.sh"
here=$(cd "$(dirname "$0")/../.." && pwd)

printed_values() {
  "$levee" plan "$here/harness/configs/demo.toml" --print-config --optimizer.lr=0.1 --model.name='q" \ b' \
    --memory.device_memory=1.5GiB --no-train.eval_at_end --debug.seed=9007199254740993 > "$work/a.toml" || return 1
  python3 - "$work/a.toml" "$here/harness/configs/demo.toml" <<'PY'
import sys, tomllib
got = tomllib.load(open(sys.argv[1], 'rb'))
file = tomllib.load(open(sys.argv[2], 'rb'))
assert got['optimizer']['lr'] == 0.1 and got['model']['name'] == 'q" \\ b'
assert got['memory']['device_memory'] == 3 << 29 and got['train']['eval_at_end'] is False
assert got['debug']['seed'] == 9007199254740993
assert got['run']['folder'] == 'runs/demo'
asked = {('optimizer', 'lr'), ('model', 'name'), ('memory', 'device_memory'), ('train', 'eval_at_end'), ('debug', 'seed')}
units = {'K': 10, 'M': 20, 'G': 30, 'KiB': 10, 'MiB': 20, 'GiB': 30}
def plain(v):
    for u, s in units.items():
        if isinstance(v, str) and v.endswith(u) and v[:-len(u)].isdigit(): return int(v[:-len(u)]) << s
    return v
for section, keys in file.items():
    for key, value in keys.items():
        if (section, key) not in asked:
            assert got[section][key] == plain(value), (section, key, got[section][key], value)
for section, keys in got.items():
    for key, value in keys.items():
        assert isinstance(value, (int, float, bool, str)), (section, key)
PY
}
round_trip() {
  "$levee" plan "$work/a.toml" --print-config > "$work/b.toml" && cmp "$work/a.toml" "$work/b.toml"
}
# One line on stderr would do; three are allowed. Nothing on stdout.
short_error() {
  printf '[train]\nsteps = 3\nstps = 4\n' > "$work/bad.toml"
  "$levee" plan "$work/bad.toml" > "$work/out" 2> "$work/err"
  [ $? = 2 ] && [ ! -s "$work/out" ] && [ "$(wc -l < "$work/err")" -le 3 ] && grep -q 'bad.toml:3.*train.steps' "$work/err"
}

check "printed settings are TOML and hold what was asked" printed_values
check "printed settings read back to themselves" round_trip
check "errors are short and name file, line and key" short_error

finish
