#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sanitize.sh FOLDER [TOOL ...]: small cases of the test programs in FOLDER, on the GPU under compute-sanitizer (default:
# memcheck racecheck initcheck synccheck). The last line is "N runs clean, N with errors"; a run whose tests fail, or of
# which none ran on the GPU, is one with errors.
#
#   T_SANITIZER=command   the sanitizer (compute-sanitizer)
#   T_TIMEOUT=seconds     deadline of one run (600)
set -u
[ $# -gt 0 ] || { echo "usage: sanitize.sh FOLDER [TOOL ...]" >&2; exit 2; }
folder=$1
shift
[ $# -gt 0 ] || set -- memcheck racecheck initcheck synccheck
PATH=$PATH:/usr/local/cuda/bin
sanitizer=${T_SANITIZER:-compute-sanitizer}
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 || { echo "sanitize.sh: no GPU here" >&2; exit 2; }
command -v "$sanitizer" >/dev/null || { echo "sanitize.sh: no $sanitizer here; it comes with the CUDA toolkit" >&2; exit 2; }
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

run() { # AREA TOOL CASE...
  area=$1 tool=$2 log=$work/$1.$2.log
  shift 2
  begin=$(date +%s)
  T_BACKEND=cuda timeout "${T_TIMEOUT:-600}" "$sanitizer" --tool "$tool" --error-exitcode 9 "$folder/test_$area" "$@" >"$log" 2>&1
  code=$? seconds=$(($(date +%s) - begin))
  if [ $code -eq 0 ] && grep -q '^[1-9][0-9]* passed on cuda' "$log" && grep -Eq 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)' "$log"; then
    echo "clean $area $tool: $(sed -n 's/ passed on cuda.*//p' "$log") cases, $seconds s"
  else
    echo "ERRORS $area $tool: exit code $code, $seconds s"
    grep -E 'FAILED|skipped|=========|ERROR' "$log" | head -40
  fi >"$work/$area.$tool.result"
}

# Not in the table: initcheck of whole steps, since boundaries are copied to the host whole, with the rows that a shorter
# sequence leaves unwritten; racecheck of cases that take many minutes under it.
cat >"$work/table" <<'END'
common memcheck,racecheck,initcheck,synccheck runtime_gemm_grouped_tiles runtime_gemm_grouped_scalars runtime_comm_ring_and_broadcast runtime_comm_exchange runtime_stream_order
llep memcheck,initcheck,synccheck llep_layer_2_ranks llep_layer_few_tokens llep_layer_overwrites_gradients llep_tables_of_kernels_equal_the_plain_functions
llep racecheck llep_layer_few_tokens
model memcheck,racecheck,initcheck,synccheck attention_window_and_documents attention_nan_propagates embed_dtypes rmsnorm_shapes qk_matches swiglu_matches router_matches init_of_norms
optim memcheck,racecheck,initcheck,synccheck oadamw_clipped_step oadamw_norm_has_one_fixed_tree muon_rank_one_gradient
rdtp memcheck,initcheck,synccheck rdtp_tiny rdtp_labels rdtp_bf16
rdtp racecheck rdtp_tiny rdtp_labels
sco memcheck,racecheck,initcheck,synccheck sco_bounded_equals_plain
train memcheck,synccheck step_without_optimizer step_with_gradients_written_at_once
END

row() { # AREA TOOLS "CASE..." TOOL...: those of the row's tools that are named last
  area=$1 tools=$2 cases=$3
  shift 3
  # shellcheck disable=SC2086 # the cases are words
  for tool in "$@"; do case ,$tools, in *,$tool,*) run "$area" "$tool" $cases ;; esac; done
}

# Rows run beside each other, but one by one under initcheck, which loses track on a busy GPU (initcheck_threads.cu).
beside="" alone=""
for tool in "$@"; do [ "$tool" = initcheck ] && alone=initcheck || beside="$beside $tool"; done
# shellcheck disable=SC2086 # the tools are words
while read -r area tools cases; do row "$area" "$tools" "$cases" $beside </dev/null & done <"$work/table"
wait
[ -z "$alone" ] || while read -r area tools cases; do row "$area" "$tools" "$cases" initcheck </dev/null; done <"$work/table"
cat "$work"/*.result
clean=$(cat "$work"/*.result | grep -c '^clean')
bad=$(cat "$work"/*.result | grep -c '^ERRORS')
echo "$clean runs clean, $bad with errors"
[ "$bad" -eq 0 ] && [ "$clean" -gt 0 ]
