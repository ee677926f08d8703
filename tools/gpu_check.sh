#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tools/gpu_check.sh BIN GOLDEN [--sanitize] -- what takes an NVIDIA GPU: the device tests of BIN and the program's own
# checks on the files of GOLDEN (tests/golden), with every config that loads here, and through the driver's compiler;
# with --sanitize small ones once more under each tool of compute-sanitizer. A line each; logs in gpu_check/. Exit 1 if
# anything failed. JOBS processes at a time, 1 if not said; LIMIT seconds each.
set -uo pipefail
bin=$(realpath "$1") golden=$(realpath "$2") sanitize=${3:-}
logs=$PWD/gpu_check limit=${LIMIT:-600}
rm -rf "$logs" && mkdir -p "$logs"

run() {  # CONFIG NAME COMMAND...: in the background, `wait` comes from the caller
  local config=$1 name=$2
  shift 2
  while (($(jobs -rp | wc -l) >= ${JOBS:-1})); do wait -n; done
  (
    start=$SECONDS log="$logs/$config.${name//[^A-Za-z0-9_.-]/_}.log"
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    status=$?
    tests=$(sed -nE 's/^\[  PASSED  \] ([0-9]+ tests?)\./\1/p; s/^\[  SKIPPED \] ([0-9]+) test.*/, \1 skipped/p' \
      "$log" | tr -d '\n')
    [[ $status == 0 ]] && result=passed || { result="FAILED ($status)"; touch "$logs/failed"; }
    printf '%-14s %-58s %s%s in %d s\n' "$config" "$name" "$result" "${tests:+, $tests}" $((SECONDS - start))
  ) &
}

suites() {  # CONFIG ENV...: every device test; one that must be its process's first has a process of its own
  local config=$1 program first
  shift
  for program in "$bin"/*_cuda_test; do
    for first in $("$program" --gtest_list_tests | awk '/^[^ ]/ {suite = $1} /FirstLaunchEver/ {print suite $1}'); do
      run "$config" "$first" env "$@" "$program" --gtest_filter="$first"
    done
    run "$config" "$(basename "$program")" env "$@" "$program" --gtest_filter='-*FirstLaunchEver*'
  done
}

checks() {  # CONFIG ENV...: the program's own
  local config=$1 trace model kv ranks
  shift
  run "$config" "verify" env "$@" "$bin/sievemla" verify --backend cuda
  for trace in trace-glm5 trace-indexer; do
    run "$config" "replay $trace" env "$@" "$bin/sievemla" replay "$golden/$trace/trace.safetensors" --backend cuda
  done
  for model in "$golden"/*/config.json; do
    model=$(dirname "$model")
    for kv in bf16 fp8_ds_mla; do
      for ranks in 1 4; do
        run "$config" "run --check $(basename "$model") $kv, $ranks ranks" env "$@" "$bin/sievemla" run "$model" \
          --check "$model/golden.safetensors" --backend cuda --kv-format $kv --norm-eps hf --ranks $ranks
      done
    done
  done
}

configs() { for c in sm80 sm86 sm89 sm90 sm120; do loads SIEVEMLA_CUDA_CONFIG=$c && echo $c; done; }
loads() { env "$@" "$bin/sievemla" info --json | grep -q '"config": "sm'; }

"$bin/sievemla" info | grep -E '^(sievemla|cuda)'
for config in $(configs); do
  suites "$config" SIEVEMLA_CUDA_CONFIG="$config"
  checks "$config" SIEVEMLA_CUDA_CONFIG="$config"
done
for pair in sm86:compute_80 sm89:compute_89; do
  jit=(SIEVEMLA_CUDA_CONFIG=${pair%:*} CUDA_FORCE_PTX_JIT=1 CUDA_CACHE_PATH="$logs/jit")
  loads "${jit[@]}" || continue
  suites "${pair#*:}" "${jit[@]}"
  checks "${pair#*:}" "${jit[@]}"
done
wait

if [[ $sanitize == --sanitize ]]; then
  small='*Case01*:*Case02*:*Case14*:*Case19*:*Case23Lse*:*HolesAndLengths:*SharedSlotLists:*.Tickets:*NanStaysPut'
  small+=':*BytesOf*:*TheReferencesBytes:*SlotsOfEveryShard:*OneRowTogether:*ExpandPools:*FirstLaunchEver*'
  small+=':*ALayerIsItsStages*'
  # Named barriers of some warps while others wait at the CTA's, and mbarriers: racecheck sees hazards across them
  # (docs/kernels/attention-cuda.md).
  loops=':*EveryTileUncut:*FewHeadsInParts:*UnitsBesideAWaveOfClusters'
  for config in $(configs); do
    for tool in memcheck racecheck synccheck initcheck; do
      filter=$small$loops more=()
      [[ $tool == racecheck ]] && filter=$small
      [[ $tool == synccheck ]] && more=(--num-cuda-barriers 65536)  # fewer stop launches of sm_90
      for program in "$bin"/*_cuda_test; do
        run "$config" "$tool $(basename "$program")" env SIEVEMLA_CUDA_CONFIG="$config" compute-sanitizer \
          --tool "$tool" "${more[@]}" --error-exitcode 9 "$program" --gtest_filter="$filter"
      done
    done
  done
  wait
fi
[[ ! -e $logs/failed ]] && echo "all passed" || { echo "something FAILED: see $logs"; exit 1; }
