#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# gpu.sh TREE OUT -- the plugin in a real vLLM 0.26 on one GPU, beside vLLM's own backends; all engines at once.
# TREE holds vLLM and what it needs, and the sievemla package built with CUDA. 3 GiB of device memory an engine.
tree=$(realpath "$1"); out=$(realpath -m "$2"); here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"; work=$(mktemp -d)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip OMP_NUM_THREADS=1
export SIEVEMLA_SELFTEST=skip  # `ours` alone runs it: here they all start before one of them has passed
tiny=$here/tiny.py

restated() {  # what vLLM tests, asked of ours
  (PYTHONPATH=$tree timeout "${SECONDS_EACH:-170}" python3 -m pytest -q -p no:cacheprovider --rootdir "$work" \
    "$here/../test_restated.py" > "$out/restated.log" 2>&1
  echo "restated: exit $? after $SECONDS s") &
}
[[ " ${ENGINES:-restated} " != *" restated "* ]] || restated  # the longest, and needs no model

made=()
PYTHONPATH=$tree python3 "$tiny" make "$work/plain" > "$out/make.log" 2>&1 & made+=($!)
PYTHONPATH=$tree python3 "$tiny" make "$work/shared" --shared --mtp >> "$out/make.log" 2>&1 & made+=($!)
# Every engine looks into its model's class in a process of its own, unless that is in the cache.
for class in GlmMoeDsaForCausalLM DeepSeekMTPModel; do
  PYTHONPATH=$tree VLLM_CACHE_ROOT=$work/cache python3 -c "from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models['$class'].inspect_model_cls()" > "$out/inspect-$class.log" 2>&1 & made+=($!)
done
wait "${made[@]}"
rm -f "$out"/inspect-*.log
[[ -f $work/plain/model.safetensors && -f $work/shared/model.safetensors ]] || { tail -5 "$out/make.log"; exit 1; }

engine() {  # NAME [ENV=VALUE...] -- MODEL ARGS...
  local name=$1 settings=() path=$tree
  shift
  while [[ $1 != -- ]]; do settings+=("$1"); shift; done
  shift
  local model=$1
  shift
  [[ $name != shadow* ]] || path=$tree:$here/shadow
  (env PYTHONPATH="$path" VLLM_CACHE_ROOT="$work/cache" "${settings[@]}" timeout "${SECONDS_EACH:-170}" \
    python3 "$tiny" run "$work/$model" "$out/$name.json" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $? after $SECONDS s") &
}

timer() {  # NAME BACKEND KV: waits for the engines to end, then takes its turn
  (PYTHONPATH=$tree VLLM_CACHE_ROOT="$work/cache" timeout $((${SECONDS_EACH:-170} + 25)) python3 "$here/step_time.py" \
    "$work/plain" "$2" "$3" --wait "$work/quiet-$1" > "$out/$1.log" 2>&1
  grep -h STEP "$out/$1.log" > "$out/$1.json"; echo "$1: exit $? after $SECONDS s") &
  timers+=("$1:$!")
}

timers=()
. "$here/engines.sh"
for job in $(jobs -p); do
  [[ " ${timers[*]} " == *":$job "* ]] || wait "$job"
done
for timed in "${timers[@]}"; do touch "$work/quiet-${timed%:*}"; wait "${timed#*:}"; done
last
wait
for log in "$out"/*.log; do
  name=$(basename "$log" .log)
  [[ $name != make ]] || continue
  echo "== $name"
  if [[ $name == restated ]]; then
    tail -25 "$log" | cut -c1-200
  elif [[ -s $out/$name.json ]]; then
    grep -hE "RESULT|SHADOW|TOPK|MEMORY|SLEEP|OFFLOAD|STEP|KERNEL|Using .*(backend|KV cache)|(report|selftest).py" \
      "$log" | cut -c1-300
  else
    grep -vE '^\s*$|\^\^\^|destroy_process_group' "$log" | tail -14 | cut -c1-260
  fi
done
"$here/compare.sh" "$out"
