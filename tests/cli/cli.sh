#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The command as scripts use it: exit codes, short errors, files of a run, plan = run, resume after kill -9.
# LEVEE = path of the binary. Closes on "N passed, N failed, N skipped".
. "$(dirname "$0")/../check.sh"

json() { python3 -c "import json,sys; $1" "$@"; }

cat > "$work/tiny.toml" <<TOML
[model]
name = "tiny"
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
steps = 12
context = 128
eval_interval = 5
[optimizer]
name = "muon"
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[parallel]
ranks = 2
[run]
device = "cpu"
[memory]
sco_keep_attention = true
[checkpoint]
interval = 2
TOML
i=0
while [ $i -lt 400 ]; do
  echo "line $i of a small text, whose words repeat and repeat: levee, budget, $((i * 7919 % 1000))"
  i=$((i + 1))
done > "$work/text.txt"

check "tokenize bytes" "$levee" tokenize "$work/text.txt" --output "$work/t" --holdout 0.1
check "usage error" expect_exit 1 "$levee" frobnicate
check "bench: unknown case" expect_exit 1 "$levee" bench gemm.nope
check "bench: the error lists the cases" grep -q 'gemm.square' "$work/err"
check "bench: every case is right on the CPU" expect_exit 0 "$levee" bench --backend cpu --seconds 0.02
check "bench: a case, recorded" expect_exit 0 "$levee" bench gemm.square --backend cpu --seconds 0.1 --results "$work/bench.jsonl"
check "bench: the record names case, revision and device" json "r=json.loads(open('$work/bench.jsonl').read()); assert r['case']=='gemm.square' and r['command']=='levee bench gemm.square --backend cpu --seconds 0.1' and r['revision'] and r['device'] and r['value']>0"
bench_after_torn_line() {
  printf '{"case":"gemm.sq' > "$work/torn.jsonl"
  for i in 1 2; do
    "$levee" bench gemm.square --backend cpu --seconds 0.01 --results "$work/torn.jsonl" || return 1
  done
  [ "$(wc -l < "$work/torn.jsonl")" = 3 ] && tail -n 2 "$work/torn.jsonl" |
    json "assert [json.loads(l)['case'] for l in sys.stdin] == ['gemm.square'] * 2"
}
check "bench: records after a torn line are whole" bench_after_torn_line
check "help" "$levee" --help
check "help of plan" expect_exit 0 "$levee" plan --help
check "help of train" expect_exit 0 "$levee" train --help
check "help after the rest" expect_exit 0 "$levee" train no-such.toml --run.seed=1 --help
check "every setting has help" "$levee" --help-all
check "missing file" expect_exit 8 "$levee" train "$work/none.toml"
check "unknown key names the nearest" sh -c "'$levee' plan '$work/tiny.toml' --train.stps=3 2>&1 | grep -q 'train.steps'"
check "unknown key exit code" expect_exit 2 "$levee" plan "$work/tiny.toml" --train.stps=3
check "a setting without its section" expect_exit 1 "$levee" train "$work/tiny.toml" --context 64
check "... is said to have one" grep -q -- '--train.context' "$work/err"
check "value out of range" expect_exit 2 "$levee" plan "$work/tiny.toml" --memory.sco_fraction=1.5
check "groups must divide" expect_exit 2 "$levee" plan "$work/tiny.toml" --parallel.context=3
check "plan without limits" expect_exit 0 "$levee" plan "$work/tiny.toml" --json
check "plan over a limit" expect_exit 3 "$levee" plan "$work/tiny.toml" --memory.device_memory=64KiB
check "plan over a limit, JSON" sh -c "'$levee' plan '$work/tiny.toml' --memory.device_memory=64KiB --json > '$work/p.json'; [ \$? = 3 ] && python3 -m json.tool '$work/p.json' > /dev/null"
no_ceilings() { expect_exit 8 "$levee" plan "$work/tiny.toml" --ceilings "$work/none.toml" && ! [ -s "$work/out" ]; }
check "missing ceilings are said before the plan" no_ceilings
no_rates() {
  sed 's/^copy_tb *=.*/copy_tb = 1e-320/' harness/configs/ceilings-h200.toml > "$work/ceilings.toml"
  expect_exit 2 "$levee" plan "$work/tiny.toml" --ceilings "$work/ceilings.toml" --json
}
check "ceilings that make no time" no_rates
check "tokenize: no output prefix" expect_exit 1 "$levee" tokenize "$work/text.txt" --output ""
check "tokenize: an option without its value" sh -c "'$levee' tokenize '$work/text.txt' --output 2>&1 | grep -q 'output needs a value'"
check "tokenize: no whole number" expect_exit 1 "$levee" tokenize "$work/text.txt" --output "$work/n" --train-bpe 300.5
# missing_input CODE TEXT OPTIONS...: what a run lacks is said at once, not after pages of its plan.
missing_input() {
  code=$1 text=$2
  shift 2
  expect_exit "$code" "$levee" train "$work/tiny.toml" --run.folder="$work/x" "$@" && grep -q "$text" "$work/err" &&
    ! [ -s "$work/out" ] && ! [ -e "$work/x" ]
}
bench_unwritable() {
  expect_exit 8 "$levee" bench gemm.square --backend cpu --results "$work/none/b.jsonl" && ! [ -s "$work/out" ]
}
check "bench: results that cannot be written are said before measuring" bench_unwritable
check "tokenize makes the folder of its output" "$levee" tokenize "$work/text.txt" --output "$work/new/folder/t"
tokenize_unwritable() {
  expect_exit 8 "$levee" tokenize "$work/none.txt" --output "$work/text.txt/t" && grep -q "text.txt.*Not a directory" "$work/err"
}
check "tokenize: a folder that cannot be made is said first" tokenize_unwritable
check "missing tokens" missing_input 8 "cannot open $work/nothing.idx" --data.train="$work/nothing"
check "missing held-out tokens" missing_input 8 "cannot open $work/nothing.idx" --data.valid="$work/nothing"
other_tokenizer() {
  "$levee" tokenize "$work/text.txt" --output "$work/bpe" --train-bpe 257 --holdout 0.1 &&
    missing_input 2 "not made with the same tokenizer" --data.valid="$work/bpe.valid"
}
check "held-out tokens of another tokenizer" other_tokenizer
check "too few tokens" missing_input 2 "training at context" --train.context=100000
check "no tokens named, no plan" missing_input 2 "data.train is empty" --data.train=

run() { "$levee" train "$work/tiny.toml" --run.folder="$1" --checkpoint.resume=true; }
train_logged() { run "$work/a" > "$work/train.log"; }
check "train" train_logged
check "the type of weights is in the first line" sh -c "head -1 '$work/train.log' | grep -q ' active; f32, context 128, 2 ranks on cpu'"
check "metrics lines" python3 - "$work/a" <<'PY'
import json, sys
rows = [json.loads(l) for l in open(sys.argv[1] + '/metrics.jsonl')]
steps = [r for r in rows if 'loss' in r]
vals = [r for r in rows if 'val_loss' in r]
assert [r['step'] for r in steps] == list(range(1, 13)), steps
assert all(k in r for r in steps for k in ('grad_norm', 'tokens_per_second', 'step_seconds', 'max_vio', 'chunks'))
assert [r['step'] for r in vals] == [5, 10, 12] and not any('loss' in r for r in vals)
assert steps[-1]['loss'] < steps[0]['loss']
PY
check "loss and gradients only, with a timeline of a step" sh -c "'$levee' train '$work/tiny.toml' --run.folder='$work/p' \
  --optimizer.name=none --train.steps=3 --lr_scheduler.warmup_steps=1 --run.peak_tflops=1 --profile > '$work/p.out' &&
  grep -q 'while computing' '$work/p.out' && grep -q ' mfu 0' '$work/p.out' && test ! -e '$work/p/checkpoints' && python3 - '$work' <<'PY'
import json, sys
rows = [json.loads(l) for l in open(sys.argv[1] + '/p/metrics.jsonl')]
steps = [r for r in rows if 'loss' in r]
assert len(steps) == 3 and all(0 < r['mfu'] < 1 for r in steps), steps
assert all(abs(r['mfu'] - r['tflops']) <= 1e-5 * r['tflops'] for r in steps), steps  # two ranks, one CPU of 1 TFLOP/s
tags = json.load(open(sys.argv[1] + '/p/memory.json'))['per_rank'][0]
assert not any(t.startswith(('oadamw.', 'muon.')) for c in ('device', 'pinned', 'host') for t in tags[c]['tags'])
for rank in range(2):
    p = json.load(open(sys.argv[1] + '/p/profile.rank%d.json' % rank))
    assert 0 <= p['levee']['overlap'] <= 1 and p['levee']['host_bytes'] > 0 and p['levee']['dropped'] == 0
    phases = [e['name'] for e in p['traceEvents'] if e['ph'] == 'X' and e['tid'] == 0]
    assert {'forward.attention 1', 'loss', 'backward.experts 0', 'grad_norm'} <= set(phases), phases
PY"
check "an update on host threads is no kernel in the timeline" sh -c "'$levee' train '$work/tiny.toml' --run.folder='$work/ph' \
  --optimizer.name=adamw --train.steps=2 --lr_scheduler.warmup_steps=1 --memory.oadamw_placement=cpu --profile > /dev/null && python3 - '$work' <<'PY'
import json, sys
kinds = {o['name']: o['kind'] for o in json.load(open(sys.argv[1] + '/ph/profile.rank0.json'))['levee']['operations']}
assert kinds['oadamw.host_update'] == 'host' and kinds['model.rmsnorm'] == 'kernel', kinds
PY"
check "memory.json: planned = measured, and the plan says the same" sh -c "'$levee' plan '$work/tiny.toml' --json --all-ranks > '$work/plan.json' && python3 - '$work' <<'PY'
import json, sys
run = json.load(open(sys.argv[1] + '/a/memory.json'))
plan = json.load(open(sys.argv[1] + '/plan.json'))
assert run['ranks'] == plan['ranks'] == 2 and len(run['per_rank']) == len(plan['per_rank']) == 2
for r, p in zip(run['per_rank'], plan['per_rank']):
    for cls in ('device', 'pinned', 'host'):
        assert r[cls]['planned_bytes'] == r[cls]['peak_bytes'] == p[cls]['planned_bytes'] > 0, cls
        assert 'peak_bytes' not in p[cls]
        assert set(r[cls]['tags']) == set(p[cls]['tags'])
        for t, v in r[cls]['tags'].items():
            assert v['planned_bytes'] == v['peak_bytes'] == p[cls]['tags'][t]['planned_bytes'], t
assert run['heap']['peak_bytes'] < run['heap']['cap_bytes']
PY"

# idle FOLDER PAIRS OPTIONS...: ranks that have no sequence in any step, and two no expert; PAIRS of 18 are as planned.
idle() {
  folder=$work/$1 pairs=$2
  shift 2
  "$levee" train "$work/tiny.toml" --run.folder="$folder" --parallel.ranks=6 --parallel.context=2 --model.num_experts=3 \
    --train.steps=2 "$@" || return 1
  grep -q "planned = measured on $pairs of 18" "$work/log"
  json "
n = 0
for r in json.load(open('$folder/memory.json'))['per_rank']:
    for c in ('device', 'pinned', 'host'):
        n += all(x['planned_bytes'] == x['peak_bytes'] for x in (r[c], *r[c]['tags'].values()))
assert n == $pairs, n"
}
check "ranks without work: planned = measured" idle idle 18 --data.valid=
check "ranks that work in validation alone: planned = measured" idle idle3 18
check "tokenize less than a sequence to validate on" "$levee" tokenize "$work/text.txt" --output "$work/s" --holdout 0.005
check "validation on fewer sequences than groups: planned = measured" idle idle1 18 --data.valid="$work/s.valid"
# A run that goes on for a step comes to no validation, although its settings have one: said, with the ranks.
without_validation() {
  idle idle5 18 --train.steps=5 || return 1
  idle idle5 14 --train.steps=6 --no-train.eval_at_end || return 1
  grep -q '^rank 4, device: .* 4 tags not as planned: ' "$work/log" && grep -q '^no validation this time' "$work/log"
}
check "ranks below their plan are named" without_validation
# Streams that the caller closed: what would have been printed gets into no file of the run.
closed_streams() {
  "$levee" train "$work/tiny.toml" --run.folder="$work/closed" --train.steps=2 <&- >&- 2>&-
  [ $? = 8 ] || return 1
  json "[json.loads(l) for l in open('$work/closed/metrics.jsonl')]; json.load(open('$work/closed/memory.json'))"
}
check "closed standard streams" closed_streams
# Files limited to 2 KiB: an error that names one, not a death by signal; the earlier trace is not lost to half a one.
file_limit() {
  mkdir "$work/limit" && echo earlier > "$work/limit/trace.rank0.jsonl"
  (ulimit -f 4 && "$levee" train "$work/tiny.toml" --run.folder="$work/limit" --train.steps=2 > /dev/null 2> "$work/log")
  [ $? = 8 ] && grep -q "cannot write $work/limit/trace.rank.\.jsonl: File too large" "$work/log" &&
    [ "$(cat "$work/limit/trace.rank0.jsonl")" = earlier ] && ! ls "$work/limit" | grep tmp
}
check "a limit on file sizes" file_limit
# Folders that stand where reports would be written.
no_memory_report() { # said at once, and no reason to stop the metrics
  mkdir -p "$work/report/memory.json"
  expect_exit 8 "$levee" train "$work/tiny.toml" --run.folder="$work/report" --checkpoint.enable=false &&
    [ "$(grep -c '^warning: .*cannot write .*memory.json' "$work/err")" = 1 ] &&
    grep -q "memory.json could not be written" "$work/err" && [ "$(wc -l < "$work/report/metrics.jsonl")" = 15 ]
}
check "without memory.json there are metrics" no_memory_report
no_metrics() {
  mkdir -p "$work/unwritten/metrics.jsonl"
  expect_exit 8 "$levee" train "$work/tiny.toml" --run.folder="$work/unwritten" &&
    grep -q "rank 0: input/output error: .*cannot open $work/unwritten/metrics.jsonl" "$work/err" &&
    ! grep -q "rank.*rank" "$work/err"
}
check "metrics that cannot be opened are an error of one rank" no_metrics

# Resume: killed at some moment of the run, then the same command again.
same_run() {
  python3 - "$work/a" "$1" <<'PY'
import json, sys
def steps(folder):
    out = {}
    for line in open(folder + '/metrics.jsonl'):
        try: r = json.loads(line)
        except ValueError: continue   # the line being written at the kill
        key = ('val', r['step']) if 'val_loss' in r else r['step']
        out[key] = {k: v for k, v in r.items() if k not in ('tokens_per_second', 'step_seconds', 'tflops', 'val_seconds')}
    return out
a, b = steps(sys.argv[1]), steps(sys.argv[2])
assert a == b, [(k, a.get(k), b.get(k)) for k in a if a.get(k) != b.get(k)][:2]
PY
  for f in "$work/a/checkpoints/step-00000012/"*.safetensors; do
    cmp "$f" "$1/checkpoints/step-00000012/$(basename "$f")" || return 1
  done
}
killed_and_resumed() {
  : > "$work/log1" # the loop below must not see an earlier log
  "$levee" train "$work/tiny.toml" --run.folder="$1" > "$work/log1" 2>&1 &
  pid=$!
  tries=0
  while ! grep -q "^step $2/" "$work/log1" 2>/dev/null && [ $tries -lt 600 ]; do
    sleep 0.05
    tries=$((tries + 1))
  done
  kill -9 $pid 2>/dev/null
  wait $pid 2>/dev/null
  run "$1" && same_run "$1"
}
check "resume after kill -9 at step 1 = uninterrupted" killed_and_resumed "$work/k1" 1
check "resume after kill -9 at step 5 = uninterrupted" killed_and_resumed "$work/k5" 5
check "resume after kill -9 at step 9 = uninterrupted" killed_and_resumed "$work/k9" 9
# started LOG STEP: waits until that step is in the log of the run in the background.
started() {
  tries=0
  while ! grep -q "^step $2/" "$1" 2>/dev/null && [ $tries -lt 600 ]; do
    sleep 0.05
    tries=$((tries + 1))
  done
}
# stopped_and_resumed FOLDER SIGNAL
stopped_and_resumed() {
  : > "$work/log1" # the loop below must not see an earlier log
  "$levee" train "$work/tiny.toml" --run.folder="$1" --checkpoint.interval=0 > "$work/log1" 2>&1 &
  pid=$!
  started "$work/log1" 3
  kill -"$2" $pid
  wait $pid || return 1
  ls "$1/checkpoints" | grep -q step- || return 1
  tail -n 1 "$work/log1" | grep -Eq '^stopped at step ([3-9]|1[01]) of 12, checkpoint saved' || return 1
  grep -q '^stopping after this step' "$work/log1" || return 1
  run "$1" && same_run "$1"
}
check "SIGTERM saves, and the run goes on from there" stopped_and_resumed "$work/term" TERM
check "SIGHUP likewise" stopped_and_resumed "$work/hup" HUP
nohup_goes_on() {
  : > "$work/log1"
  (trap '' HUP && exec "$levee" train "$work/tiny.toml" --run.folder="$work/nohup" > "$work/log1" 2>&1) &
  pid=$!
  started "$work/log1" 3
  kill -HUP $pid
  wait $pid && grep -q "^step 12/" "$work/log1" && ! grep -q "^stopping" "$work/log1"
}
check "SIGHUP stays ignored under nohup" nohup_goes_on
# A step that takes minutes: the first signal is heard at once, the second within the second counts as the same.
second_interrupt() {
  : > "$work/log1"
  "$levee" train "$work/tiny.toml" --run.folder="$work/long" --train.global_batch=40000 --train.steps=1 \
    --lr_scheduler.warmup_steps=0 --data.valid= > "$work/log1" 2>&1 &
  pid=$!
  tries=0
  while ! grep -q "active;" "$work/log1" && [ $tries -lt 600 ]; do
    sleep 0.05
    tries=$((tries + 1))
  done
  sleep 0.5
  kill -INT $pid
  sleep 0.2
  kill -INT $pid
  sleep 0.5
  grep -q '^stopping after this step' "$work/log1" && kill -TERM $pid || return 1
  sleep 0.6
  kill -INT $pid
  wait $pid
  [ $? = 130 ] && [ "$(grep -c '^stopping' "$work/log1")" = 1 ] && ! grep -q '^step' "$work/log1"
}
check "a second Ctrl-C ends at once" second_interrupt
# The reader of the output leaves, as tee does at the Ctrl-C that is meant for the run.
lost_reader() {
  "$levee" train "$work/tiny.toml" --run.folder="$work/pipe" 2> "$work/err" | head -n 1
  [ -s "$work/pipe/checkpoints/step-00000012/manifest.json" ] && grep -q "cannot write the output" "$work/err"
}
check "a run whose output nobody reads any more trains to its end" lost_reader

# Without an optimizer there is nothing to save.
stopped_unsaved() {
  : > "$work/log1" # the loop below must not see an earlier log
  "$levee" train "$work/tiny.toml" --run.folder="$work/nosave" --optimizer.name=none --train.steps=100000 > "$work/log1" 2>&1 &
  pid=$!
  tries=0
  while ! grep -q "^step 3/" "$work/log1" 2>/dev/null && [ $tries -lt 600 ]; do
    sleep 0.05
    tries=$((tries + 1))
  done
  kill -TERM $pid
  wait $pid && tail -n 1 "$work/log1" | grep -Eq '^stopped at step [0-9]+ of 100000, no checkpoint saved'
}
check "a stopped run without checkpoints says so" stopped_unsaved
check "a run to its end was not stopped" sh -c "! grep -q '^stopped' '$work/train.log'"
# A model that goes wrong after step 4: its checkpoints from before stay, although saves are due at each step.
kept() { # the steps of a folder's checkpoints
  ls "$1/checkpoints" | sed 's/step-0*//' | tr '\n' ' '
}
diverged() {
  tame() { "$levee" train "$work/tiny.toml" --optimizer.name=adamw --train.max_norm=0 --lr_scheduler.decay=none \
    --run.folder="$@" > "$work/log1" 2> "$work/err"; }
  tame "$work/wild" --train.steps=4 && cp -r "$work/wild" "$work/chance" || return 1
  tame "$work/wild" --optimizer.lr=1e6 --checkpoint.interval=1
  [ $? = 15 ] || return 1
  first=$(sed -n 's/^step \([0-9]*\).* SKIPPED .*/\1/p' "$work/log1" | head -n 1)
  [ "$first" -ge 6 ] && [ "$first" -lt 12 ] && [ "$(kept "$work/wild")" = "$((first - 2)) $((first - 1)) " ] &&
    [ "$(grep -c '^warning: step .* was skipped' "$work/err")" = 1 ] && grep -q "^warning: step $first was skipped" "$work/err" &&
    [ "$(grep -c '^warning: no checkpoint of step .*skipped' "$work/err")" = $((13 - first)) ] &&
    grep -q "grad_norm nan SKIPPED" "$work/log1" && ! grep -q -e -nan "$work/log1" &&
    grep -q "\"step\": $first, .*\"grad_norm\": null" "$work/wild/metrics.jsonl" || return 1
  # a single skipped step may be chance: at the end the state before it is not thrown away
  tame "$work/chance" --optimizer.lr=1e6 --checkpoint.interval=0 --train.steps="$first"
  [ $? = 15 ] && [ "$(kept "$work/chance")" = "4 $first " ]
}
check "a model that has gone wrong replaces no checkpoint, exit code 15" diverged

# A validation that a stop cut off is made up for; the run ends with the metrics of the uninterrupted one.
stopped_in_validation() {
  "$levee" train "$work/tiny.toml" --run.folder="$1" --data.valid="$work/t.train" > "$work/log1" 2>&1 || return 1
  : > "$work/log1" # the loop below must not see an earlier log
  "$levee" train "$work/tiny.toml" --run.folder="$2" --data.valid="$work/t.train" > "$work/log1" 2>&1 &
  pid=$!
  tries=0
  while ! grep -q "^step 4/" "$work/log1" 2>/dev/null && [ $tries -lt 600 ]; do
    sleep 0.02
    tries=$((tries + 1))
  done
  kill -TERM $pid
  wait $pid || return 1
  "$levee" train "$work/tiny.toml" --run.folder="$2" --data.valid="$work/t.train" || return 1
  for f in "$1" "$2"; do
    grep -o '"step": [0-9]*, "[a-z_]*loss": [0-9.e+-]*' "$f/metrics.jsonl" | sort -u > "$f/losses"
  done
  [ "$(grep -c val_loss "$2/losses")" = 3 ] && cmp "$1/losses" "$2/losses"
}
check "SIGTERM around a validation loses no line" stopped_in_validation "$work/v" "$work/vterm"
# The last line of a validation goes missing, as after a kill between the save and the validation.
lost_validation() {
  cp -r "$work/a" "$work/lost"
  grep -v '"step": 12, "val_loss"' "$work/a/metrics.jsonl" > "$work/lost/metrics.jsonl"
  run "$work/lost" && cmp "$work/a/memory.json" "$work/lost/memory.json" && same_run "$work/lost"
}
check "a validation that is missing at the resumed step is made up for" lost_validation
finished_again() {
  cp -r "$work/a" "$work/again"
  run "$work/again" > "$work/log1" && grep -q "nothing left to do: 12 of 12" "$work/log1" || return 1
  for f in memory.json metrics.jsonl trace.rank0.jsonl trace.rank1.jsonl; do
    cmp "$work/a/$f" "$work/again/$f" || return 1
  done
}
check "a finished run again changes no report" finished_again

# A trace that is not whole is shown as far as it goes, and said to be cut.
cut_trace() {
  cp -r "$work/a" "$work/cut"
  "$levee" trace "$work/cut" > "$work/log1" 2> "$work/err" && ! [ -s "$work/err" ] || return 1
  python3 -c "import json; r = json.load(open('$work/cut/memory.json'))['per_rank']; assert all(x['trace']['events'] == len(open('$work/cut/trace.rank%d.jsonl' % x['rank']).readlines()) and x['trace']['dropped_events'] == 0 for x in r)" || return 1
  sed '$d' "$work/a/trace.rank1.jsonl" > "$work/cut/trace.rank1.jsonl"
  expect_exit 9 "$levee" trace "$work/cut" && grep -q "rank1.*ends early" "$work/err" && grep -q "^page:" "$work/out"
}
check "a trace that ends early is said to" cut_trace

trace_of_rank() {
  cp -r "$work/a" "$work/ranks"
  "$levee" trace "$work/ranks" && sum=$(cksum < "$work/ranks/trace.html") && "$levee" trace "$work/ranks" --rank 1 || return 1
  grep -q "^page: $work/ranks/trace.rank1.html" "$work/log" && [ "$(cksum < "$work/ranks/trace.html")" = "$sum" ] &&
    [ -s "$work/ranks/trace.rank1.html" ]
}
check "the page of one rank leaves the others' alone" trace_of_rank

# Limits, folders and outputs that do not do.
# refused_folder FOLDER GONE: a run in FOLDER that is refused leaves no GONE.
refused_folder() {
  expect_exit 3 "$levee" train "$work/tiny.toml" --run.folder="$1" --memory.device_memory=64KiB && ! [ -e "$2" ] &&
    [ -d "$(dirname "$2")" ]
}
check "train over a limit leaves no folder that it made" refused_folder "$work/new-runs//l/" "$work/new-runs"
mkdir "$work/old-runs" "$work/old-runs/l"
check "... and those that were there" refused_folder "$work/old-runs/l/m" "$work/old-runs/l/m"
check "... empty or not" sh -c "! '$levee' train '$work/tiny.toml' --run.folder='$work/old-runs/l' --memory.device_memory=64KiB && [ -d '$work/old-runs/l' ]"
check "train over a limit" expect_exit 3 "$levee" train "$work/tiny.toml" --run.folder="$work/l" --memory.device_memory=64KiB
check "train over a host limit" expect_exit 3 "$levee" train "$work/tiny.toml" --run.folder="$work/l" --memory.host_memory=64KiB
check "no steps" expect_exit 0 "$levee" train "$work/tiny.toml" --run.folder="$work/none" --train.steps=0 --lr_scheduler.warmup_steps=0
check "no steps: the plan in memory.json" python3 -c "import json; r = json.load(open('$work/none/memory.json'))['per_rank']; assert len(r) == 2 and all(x['device']['planned_bytes'] > 0 and 'peak_bytes' not in x['device'] for x in r)"
check "a heap over its cap is said" sh -c "'$levee' train '$work/tiny.toml' --run.folder='$work/heap' --train.steps=2 --memory.heap_cap=1KiB 2>&1 | grep -q 'passed memory.heap_cap'"
# over_reserve WORDS...: a limit that the reserve takes: what is missing is the whole plan and the rest of the reserve.
over_reserve() {
  expect_exit 3 "$levee" plan "$work/tiny.toml" --memory.device_memory=512MiB "$@" &&
    grep -q '^does not fit: 5[1-9][0-9]\.[0-9]* MiB over memory.device_memory = 512.0 MiB with a reserve of 1.000 GiB$' \
      "$work/out" && expect_exit 3 "$levee" plan "$work/tiny.toml" --memory.device_memory=512MiB "$@" --json && json "
p = json.load(open('$work/out'))
planned, limits = p['per_rank'][0]['device']['planned_bytes'], p['limits']
assert limits == {'device_memory_bytes': 1 << 29, 'reserve_bytes': 1 << 30, 'host_excess_bytes': 0,
                  'device_excess_bytes': (1 << 29) + planned}, limits"
}
check "a reserve over the limit" over_reserve --memory.context_reserve=1GiB
check "... of a GPU, when none is given" over_reserve --run.device=cuda
check "empty settings" expect_exit 2 "$levee" plan /dev/null
check "run folder is no folder" expect_exit 8 "$levee" train "$work/tiny.toml" --run.folder=/dev/full
check "output on a full disk" expect_exit 8 sh -c "'$levee' plan '$work/tiny.toml' --json > /dev/full"
check "settings on a full disk" expect_exit 8 sh -c "'$levee' plan '$work/tiny.toml' --print-config > /dev/full"
long=$work/$(printf 'd%.0s' $(seq 150))/$(printf 'e%.0s' $(seq 150))
long_folder() {
  "$levee" train "$work/tiny.toml" --run.folder="$long" --train.steps=2 && ls "$long/checkpoints/step-00000002/manifest.json"
}
check "checkpoints of a long run folder are in it" long_folder
check "folders that are too long" expect_exit 2 "$levee" train "$work/tiny.toml" --run.folder="$long" --checkpoint.folder="$(printf 'f%.0s' $(seq 505))"
two_at_once() {
  : > "$work/log1" # the loop below must not see an earlier log
  "$levee" train "$work/tiny.toml" --run.folder="$work/two" --train.steps=100000 > "$work/log1" 2>&1 &
  pid=$!
  tries=0
  while ! grep -q "^step 1/" "$work/log1" 2>/dev/null && [ $tries -lt 600 ]; do
    sleep 0.05
    tries=$((tries + 1))
  done
  expect_exit 2 "$levee" train "$work/tiny.toml" --run.folder="$work/two"
  code=$?
  kill -9 $pid
  wait $pid 2>/dev/null
  return $code
}
check "two runs in one folder" two_at_once
unreadable() {
  mkdir -p "$work/unsaved" && : > "$work/unsaved/checkpoints"
  expect_exit 8 "$levee" train "$work/tiny.toml" --run.folder="$work/unsaved" --train.steps=2
}
check "checkpoints that cannot be read are no fresh start" unreadable
last_save_fails() { # where it would be written is a file
  mkdir -p "$work/last/checkpoints/" && : > "$work/last/checkpoints/step-00000002.tmp"
  "$levee" train "$work/tiny.toml" --run.folder="$work/last" --train.steps=2 --checkpoint.interval=0 2> "$work/err"
  [ $? = 8 ] && [ "$(wc -l < "$work/err")" -le 4 ] && [ -s "$work/last/memory.json" ]
}
check "without its last checkpoint a run is no success" last_save_fails
damaged() {
  cp -r "$work/a" "$work/damaged"
  for f in "$work"/damaged/checkpoints/step-*/shard-00002.safetensors; do echo x > "$f"; done
  "$levee" train "$work/tiny.toml" --run.folder="$work/damaged" 2> "$work/err"
  [ $? = 9 ] && [ "$(wc -l < "$work/err")" -le 4 ] # a warning for each of the two checkpoints, then the error
}
check "no whole checkpoint: one warning for each" damaged
check "another model in the same folder is refused" expect_exit 2 "$levee" train "$work/tiny.toml" --run.folder="$work/a" --model.hidden_size=64
weights_out_and_in() {
  expect_exit 0 "$levee" export "$work/a/checkpoints" "$work/exported" && grep -q "tensors.*bf16" "$work/out" &&
    expect_exit 1 "$levee" export "$work/a/checkpoints" "$work/exported" && grep -q "exists" "$work/err" &&
    expect_exit 2 "$levee" export "$work" "$work/exported2" && grep -q "no checkpoint" "$work/err" &&
    expect_exit 0 "$levee" train "$work/tiny.toml" --run.folder="$work/w" --train.steps=1 --lr_scheduler.warmup_steps=0 \
      --train.context=24 --parallel.ranks=1 --checkpoint.initial_load_path="$work/exported" &&
    grep -q "weights from $work/exported" "$work/out" &&
    expect_exit 9 "$levee" train "$work/tiny.toml" --run.folder="$work/w2" --model.num_hidden_layers=1 \
      --checkpoint.initial_load_path="$work/exported" && grep -q "has no place in this model" "$work/err" &&
    expect_exit 2 "$levee" train "$work/tiny.toml" --run.folder="$work/w3" --optimizer.name=none \
      --checkpoint.initial_load_path="$work/exported"
}
check "weights out, and into a run of another context and layout" weights_out_and_in
refused_start_moves_nothing() {
  cp -r "$work/w" "$work/w4" &&
    expect_exit 8 "$levee" train "$work/tiny.toml" --run.folder="$work/w4" --checkpoint.resume=false \
      --checkpoint.initial_load_path="$work/nowhere" && [ -d "$work/w4/checkpoints" ] && ! [ -e "$work/w4/checkpoints.1" ] &&
    expect_exit 0 "$levee" train "$work/tiny.toml" --run.folder="$work/w4" --checkpoint.resume=false --train.steps=1 \
      --lr_scheduler.warmup_steps=0 --checkpoint.initial_load_path="$(ls -d "$work"/w4/checkpoints/step-*)" &&
    [ -d "$work/w4/checkpoints.1" ]
}
check "starting over from weights that are not there moves nothing; from the run's own they are read first" refused_start_moves_nothing
over_and_over() { # the metrics of a run outlive a plan, a profile and a start over in its folder
  "$levee" train "$work/tiny.toml" --run.folder="$work/a" --checkpoint.enable=false --train.steps=0 --lr_scheduler.warmup_steps=0 || return 1
  cp "$work/a/metrics.jsonl" "$work/first.jsonl" && [ -s "$work/first.jsonl" ] && ! [ -e "$work/a/metrics.jsonl.1" ] || return 1
  "$levee" train "$work/tiny.toml" --run.folder="$work/a" --optimizer.name=none --train.steps=2 > "$work/log1" &&
    grep -q "^earlier metrics are now in $work/a/metrics.jsonl.1" "$work/log1" && cp "$work/a/metrics.jsonl" "$work/second.jsonl" || return 1
  "$levee" train "$work/tiny.toml" --run.folder="$work/a" --model.hidden_size=64 --checkpoint.resume=false --train.steps=2 &&
    cmp "$work/a/metrics.jsonl.1" "$work/first.jsonl" && cmp "$work/a/metrics.jsonl.2" "$work/second.jsonl" &&
    [ "$(wc -l < "$work/a/metrics.jsonl")" = 3 ]
}
check "start over" over_and_over
check "settings print and read back" sh -c "'$levee' plan '$work/tiny.toml' --print-config > '$work/full.toml' && '$levee' plan '$work/full.toml' --print-config | cmp - '$work/full.toml'"

finish
