#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# levee plan: every configuration in time and in little memory, plain schedules, caps picked to fit, time estimates.
# LEVEE = path of the binary. Closes on "N passed, N failed, N skipped".
. "$(dirname "$0")/../check.sh"
configs=harness/configs

# python CODE ARGUMENT...
python() {
  code=$1
  shift
  python3 -c "import json, subprocess, sys
levee, a = '$levee', sys.argv[1:]
def plan(*words):
    done = subprocess.run([levee, 'plan', *words, '--json'], capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)
def peaks(p, key='planned_bytes'): return [p['per_rank'][0][c][key] for c in ('device', 'pinned', 'host')]
$code" "$@"
}

# timed SECONDS MIB COMMAND...: a limit on time and address space.
timed() {
  seconds=$1 mib=$2
  shift 2
  (ulimit -v $((mib * 1024)) && exec timeout "$seconds" "$@")
}

for model in demo olmoe-1b-7b qwen3-30b-a3b paper-120b paper-241b paper-667b europa-952b; do
  check "$model within 10 s" timed 10 2048 sh -c "'$levee' plan $configs/$model.toml > '$work/$model.txt'"
  check "$model: the largest rank is named" grep -Eq '^rank [0-9]+ of [0-9]+ ' "$work/$model.txt"
  check "$model: the largest rank is the largest" python "
one, all = plan(a[0]), plan(a[0], '--all-ranks')['per_rank'] if a[1] != 'europa-952b' else []
assert not all or peaks(one)[0] == max(r['device']['planned_bytes'] for r in all), one['per_rank'][0]['rank']" $configs/$model.toml $model
  check "$model --auto within 60 s and 2 GiB" timed 60 2048 sh -c \
    "'$levee' plan $configs/$model.toml --auto --device-memory 139GiB --host-memory 128GiB --json > '$work/auto.json'"
  check "$model --auto: fits, and its words repeat it" python "
p = json.load(open(a[1]))
again = plan(a[0], '--memory.device_memory=139GiB', '--memory.host_memory=128GiB', *p['settings'])
assert peaks(p) == peaks(again) and p['limits']['device_excess_bytes'] == p['limits']['host_excess_bytes'] == 0
assert peaks(p)[0] <= 139 << 30 and peaks(p)[1] + peaks(p)[2] <= 128 << 30" $configs/$model.toml "$work/auto.json"
done
check "a million tokens on one card" expect_exit 0 "$levee" plan $configs/olmoe-1b-7b.toml --auto --context 1M --device-memory=139GiB --host-memory=120GiB
check "... printed as settings" grep -q '^  --memory.sco_host_budget=' "$work/out"
check "... with a longer context it does not fit" expect_exit 3 "$levee" plan $configs/olmoe-1b-7b.toml --auto --context 4M --device-memory=139GiB --host-memory=120GiB
check "... says which limit is why" grep -q '^no choice fits: memory.device_memory is too small' "$work/out"
check "... and says by how much" grep -q '^does not fit: .* over memory.device_memory' "$work/out"

printf 'plain schedules, balanced (balanced routing)\nplain schedules, 95/4 (95 %% of the tokens on the same 4 experts)\n' > "$work/labels"
check "--plain: both routings, labelled" sh -c "'$levee' plan $configs/demo.toml --plain | grep '^plain schedules' | cmp - '$work/labels'"
check "what all ranks take together" python "
p = plan(a[0], '--all-ranks')
assert p['all_ranks_bytes'] == {c: sum(r[c]['planned_bytes'] for r in p['per_rank']) for c in ('device', 'pinned', 'host')}
assert plan(a[0])['all_ranks_bytes'] == p['all_ranks_bytes'] and p['ranks'] == 8" $configs/qwen3-30b-a3b.toml
check "... is a line where there are several" sh -c "'$levee' plan $configs/qwen3-30b-a3b.toml --device-memory 90GiB | tail -2 > '$work/tail'"
check "... with limits that are of one" sh -c "head -1 '$work/tail' | grep -Eq '^all 8 ranks together: [0-9.]+ GiB of devices, [0-9.]+ GiB of pinned' && tail -1 '$work/tail' | grep -q '^each rank fits'"
check "... and none for one rank" sh -c "! '$levee' plan $configs/olmoe-1b-7b.toml | grep together"
check "--plain --json: the balanced one" python "
p, b = plan(a[0], '--plain'), plan(a[0])
assert p['routing'] == 'balanced' and peaks(p)[0] > 2 * peaks(b)[0] and len(p['per_rank']) == 1" $configs/demo.toml
check "--without each module, and what it adds" python "
bounded = plan(a[0])
for module in ('pipelined_llep', 'ring_dtp', 'sco', 'offload_adamw', 'muon'):
    p = plan(a[0], '--without', module)
    added = p['without']['added_bytes']
    assert p['without']['module'] == module and added['device'] > 0, p['without']
    assert [x + added[c] for x, c in zip(peaks(bounded), ('device', 'pinned', 'host'))] == peaks(p)" $configs/demo.toml
check "--without in the 667B model" python "
for module, gib in (('pipelined_llep', 10), ('ring_dtp', 20), ('sco', 30), ('offload_adamw', 80)):
    w = plan(a[0], '--without', module)['without']
    assert w['module_device_bytes_added'] > gib << 30 and w['added_bytes']['device'] > 0, w" $configs/paper-667b.toml
check "help" expect_exit 0 "$levee" plan --help
check "--without an unknown module" expect_exit 1 "$levee" plan $configs/demo.toml --without nothing
check "--plain with --auto" expect_exit 1 "$levee" plan $configs/demo.toml --plain --auto
check "--auto without a limit" expect_exit 2 "$levee" plan $configs/demo.toml --auto
check "a word too many" expect_exit 1 "$levee" plan $configs/demo.toml --frobnicate
check "a setting without its section" expect_exit 1 "$levee" plan $configs/demo.toml --ranks 2
check "... is said to have one" grep -q -- '--parallel.ranks' "$work/err"
check "the type of weights is in the first line" sh -c "'$levee' plan $configs/olmoe-1b-7b.toml | head -1 | grep -q ' active; bf16, context 32768, 1 rank on '"
check "a value that is missing" expect_exit 1 "$levee" plan $configs/demo.toml --without

check "--ceilings: what bounds the step" sh -c "'$levee' plan $configs/olmoe-1b-7b.toml --context 1M --ceilings $configs/ceilings-h200.toml | grep -Eq '^  step [0-9.]+ s, [0-9]+ tokens/s, bound by attention \(attention ceiling\)'"
check "--ceilings: the phases add up" python "
e = plan(a[0], '--ceilings', a[1])['estimate']
s = {p['name']: p['seconds'] for p in e['phases']}
compute = sum(s[k] for k in ('attention', 'projections', 'dense', 'experts', 'vocabulary', 'rows'))
beside = max(s[k] for k in ('offload.out', 'offload.in', 'collectives'))
update = max(s['optimizer.update'] + s['optimizer.muon'], s['optimizer.host'], s['optimizer.out'], s['optimizer.in'])
near = lambda x, y: abs(x - y) <= 1e-9 * y
assert near(e['compute_seconds'], compute) and near(e['forward_backward_seconds'], max(compute, beside))
assert near(e['optimizer_seconds'], update) and near(e['step_seconds'], max(compute, beside) + update)
assert near(e['tokens_per_second'], 4 * (1 << 20) / e['step_seconds']) and e['bound_by'] in s" $configs/paper-667b.toml $configs/ceilings-h200.toml
check "--ceilings of a file that is not there" expect_exit 8 "$levee" plan $configs/demo.toml --ceilings "$work/none.toml"
check "--ceilings: notes where a run is of other kinds" python "
p = plan(a[0], '--model.dtype=f32', '--run.device=cuda', '--parallel.ranks=16', '--ceilings', a[1])['estimate']['notes']
assert len(p) == 2 and 'f32' in p[0] and 'NVLink' in p[1], p
assert plan(a[0], '--run.device=cuda', '--ceilings', a[1])['estimate']['notes'] == []" $configs/olmoe-1b-7b.toml $configs/ceilings-h200.toml
check "... and in the text" sh -c "'$levee' plan $configs/demo.toml --run.device=cpu --ceilings $configs/ceilings-h200.toml | grep -c '^  note: ' | grep -qx 2"
printf '[ceilings]\nmatmul_tflops = 1\n' > "$work/few.toml"
check "--ceilings with keys missing" expect_exit 2 "$levee" plan $configs/demo.toml --ceilings="$work/few.toml"
# Giant settings: of micro-batches that are alike one is planned; layers are gone through, so there are only so many.
printf '[model]\nvocab_size = 300\nhidden_size = 64\nnum_hidden_layers = 2\nnum_attention_heads = 4\nnum_experts = 8\nnum_experts_per_tok = 2\nmoe_intermediate_size = 64\n' > "$work/small.toml"
sed 's/moe_intermediate_size/intermediate_size/' "$work/small.toml" > "$work/mixtral.toml"
check "an expert's width under Mixtral's name" expect_exit 2 "$levee" plan "$work/mixtral.toml"
check "... is said to be another's" grep -q "moe_intermediate_size = 0.*Mixtral's intermediate_size" "$work/err"
check "4,096 layers within 10 s" timed 10 2048 "$levee" plan "$work/small.toml" --model.num_hidden_layers=4096
check "more layers are refused" expect_exit 2 "$levee" plan "$work/small.toml" --model.num_hidden_layers=4097
check "16,777,216 sequences within 10 s" timed 10 2048 "$levee" plan "$work/small.toml" --train.global_batch=16M --ceilings $configs/ceilings-h200.toml
check "tags that may grow are listed" python "
p = plan(a[0])
tags = {t for c in ('device', 'pinned', 'host') for t in p['per_rank'][0][c]['tags']}
grow = set(p['grows_with_tokens'])
assert grow < tags and {'hidden.stream', 'sco.boundary', 'router.ids'} <= grow and not grow & {'rdtp.tile', 'llep.recv', 'oadamw.slots', 'weights.shard'}" $configs/paper-667b.toml

finish
