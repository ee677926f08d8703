#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# gpu.sh TREE OUT -- the plugin in a real vLLM 0.26 on one GPU, beside vLLM's own backends; all engines at once.
# TREE holds vLLM and what it needs, and the sievemla package built with CUDA. 4 GiB of device memory an engine.
tree=$(realpath "$1"); out=$(realpath -m "$2"); here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"; work=$(mktemp -d)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip OMP_NUM_THREADS=1
tiny=$here/tiny.py
PYTHONPATH=$tree python3 "$tiny" make "$work/plain" > "$out/make.log" 2>&1 &
PYTHONPATH=$tree python3 "$tiny" make "$work/shared" --shared --mtp >> "$out/make.log" 2>&1 &
wait
[[ -f $work/plain/model.safetensors && -f $work/shared/model.safetensors ]] || { tail -5 "$out/make.log"; exit 1; }

engine() {  # NAME [ENV=VALUE...] -- MODEL ARGS...
  local name=$1 settings=() path=$tree
  shift
  while [[ $1 != -- ]]; do settings+=("$1"); shift; done
  shift
  local model=$1
  shift
  [[ $name != shadow* ]] || path=$tree:$here/shadow
  (env PYTHONPATH="$path" VLLM_CACHE_ROOT="$work/cache-$name" "${settings[@]}" timeout "${SECONDS_EACH:-170}" \
    python3 "$tiny" run "$work/$model" "$out/$name.json" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $? after $SECONDS s") &
}

[[ ! -f $here/engines.sh ]] || . "$here/engines.sh"
wait
for log in "$out"/*.log; do
  name=$(basename "$log" .log)
  [[ $name != make ]] || continue
  echo "== $name"
  if [[ -f $out/$name.json ]]; then
    grep -hE "RESULT|SHADOW|Using .*(backend|KV cache)|sievemla" "$log" | grep -v "Loading plugin" | cut -c1-330
  else
    grep -vE '^\s*$|\^\^\^' "$log" | tail -12 | cut -c1-260
  fi
done
compare() { [[ ! -f $out/$1.json || ! -f $out/$2.json ]] || python3 "$tiny" compare "$out/$1.json" "$out/$2.json"; }
for pair in "${PAIRS[@]}"; do compare ${pair}; done
