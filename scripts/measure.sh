#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# measure.sh [GROUP ...]: every published figure again, on this machine's GPU: runs `levee bench` and the PyTorch peers of each group
# and appends the records to harness/bench/results/. Groups: kernels gemm grouped attn attn1m modules olmoe olmoe128k olmoe512k
# olmoe1m olmoe1m2 (default: all whose name has no length). Needs a build with CUDA, and PyTorch for the peers; LEVEE names
# the command (build/levee). The long ones take 4, 10 and 5 minutes and 60, 120 and 200 GiB of host memory, olmoe1m2 two GPUs.
#
# A group that fails is said at the end; the others still run. Tables: python3 harness/bench/table.py [AREA ...]
set -u
cd "$(dirname "$0")/.."
levee=${LEVEE:-build/levee}
results=harness/bench/results
python=${PYTHON:-python3}
failed=

# The cuDNN that PyTorch brings, so that both sides use the same one. For our command only: PyTorch finds its own.
cudnn=$($python -c "import importlib.util as u; print(list(u.find_spec('nvidia.cudnn').submodule_search_locations)[0] + '/lib')" 2>/dev/null || true)
ours() {
  LD_LIBRARY_PATH=${cudnn:+$cudnn:}${LD_LIBRARY_PATH:-} "$levee" bench "$@" --backend cuda && return
  failed="$failed bench:$1"
  return 1
}
peer() { env -u LD_LIBRARY_PATH "$python" "harness/bench/peers/$@" || failed="$failed $1"; }

# CASE...: these cases on both sides, never one side against an older record of the other.
attention() { ours "$@" --results $results/attn.jsonl && peer attention.py "$@"; }

group() {
  case $1 in
  kernels) ours kernels --results $results/kernels.jsonl ;;
  gemm) ours gemm --results $results/gemm.jsonl && peer gemm.py ;;
  grouped) ours grouped --results $results/grouped.jsonl && peer grouped_mm.py ;;
  attn) attention attn.fwdbwd.32768 attn.fwdbwd.32768.h8 attn.fwdbwd.32768.gqa attn.fwdbwd.131072 attn.fwdbwd.131072.h8 attn.fwdbwd.131072.gqa ;;
  attn1m) attention attn.fwdbwd.1048576 attn.fwdbwd.1048576.gqa attn.fwdbwd.1048576.h16 ;;
  modules) ours modules --results $results/modules.jsonl && peer linear_xent.py ;;
  olmoe) peer olmoe.py --levee "$levee" && peer olmoe.py --levee "$levee" --optimizer adamw ;;
  olmoe128k) peer olmoe.py --levee "$levee" --context 131072 --skip-torch ;;
  olmoe512k) peer olmoe.py --levee "$levee" --context 524288 ;;
  olmoe1m) peer olmoe.py --levee "$levee" --context 1048576 ;;
  olmoe1m2) peer olmoe.py --levee "$levee" --context 1048576 --gpus 2 --optimizer adamw ;;
  esac
}

stop() { echo "measure.sh: $1" >&2; exit 2; }
known=" kernels gemm grouped attn attn1m modules olmoe olmoe128k olmoe512k olmoe1m olmoe1m2 "
[ $# -gt 0 ] || set -- kernels gemm grouped attn modules olmoe
for g in "$@"; do
  case $known in *" $g "*) ;; *) stop "no group $g; there are$known" ;; esac
done
[ -x "$levee" ] || stop "no command $levee; make builds it, LEVEE=path names another"
"$levee" bench gemm.square --backend cuda --seconds 0.01 >/dev/null || stop "$levee cannot use a GPU here"
[ "$*" = kernels ] || $python -c "import torch" 2>/dev/null || stop "$python has no PyTorch for the peers; PYTHON=path names another"
mkdir -p $results
for g in "$@"; do
  echo "== $g ($(date +%T))"
  group "$g"
done
[ -z "$failed" ] || { echo "measure.sh: failed:$failed" >&2; exit 1; }
