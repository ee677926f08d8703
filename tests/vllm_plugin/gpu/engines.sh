# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# engines.sh -- which engines gpu.sh runs, and which of them it compares.
flashmla="--backend FLASHMLA_SPARSE --mqa"
flashattn="--backend FLASH_ATTN_MLA_SPARSE --mqa"
ours="--backend CUSTOM"
decode="--graphs FULL_DECODE_ONLY --uncompiled"
full="--graphs FULL_AND_PIECEWISE"
sets="--sets 12"
ordered="--topk-in-order"

selected() { [[ -z ${ENGINES:-} || " $ENGINES " == *" $1 "* ]]; }
run() { ! selected "$1" || engine "$@"; }

run ours-shared-draft3 -- shared $ours --tokens 24 --mtp 3
run ours-shared-draft1 -- shared $ours --tokens 24 --mtp 1 $decode
run ours-graphs -- plain $ours $full
run off-graphs SIEVEMLA_VLLM=off -- plain $flashmla $full
run ours8-piecewise -- plain $ours --kv fp8 --graphs PIECEWISE
run flashmla -- plain $flashmla $sets
sleep 1  # the others then find DeepGEMM's kernels begun
run flashmla-again -- plain $flashmla $sets
run flashattn -- plain $flashattn $sets
run flashattn-again -- plain $flashattn $sets
run flashmla8 -- plain $flashmla --kv fp8 $sets
run flashmla8-again -- plain $flashmla --kv fp8 $sets
run flashmla8-decode -- plain $flashmla --kv fp8 $sets --flashmla-route decode
run flashmla8-copies -- plain $flashmla --kv fp8 $sets --flashmla-route copies
run flashmla8-chunked -- plain $flashmla --kv fp8 $sets --batched 1024
run flashmla-ordered -- plain $flashmla $sets $ordered
run flashmla-ordered-again -- plain $flashmla $sets $ordered
run flashattn-ordered -- plain $flashattn $sets $ordered
run flashmla8-copies-ordered -- plain $flashmla --kv fp8 $sets --flashmla-route copies $ordered
run flashmla8-copies-ordered-again -- plain $flashmla --kv fp8 $sets --flashmla-route copies $ordered
run flashmla8-decode-ordered -- plain $flashmla --kv fp8 $sets --flashmla-route decode $ordered
run ours SIEVEMLA_SELFTEST=once -- plain $ours $sets
run ours8 -- plain $ours --kv fp8 $sets
run ours8-direct -- plain $ours --kv fp8 $sets --no-copies
run ours8-chunked -- plain $ours --kv fp8 $sets --batched 1024
run shadow SIEVEMLA_VLLM=off -- plain $ours --mqa
run shadow8 SIEVEMLA_VLLM=off -- plain $ours --kv fp8 --mqa
run ours-forced-chunked SIEVEMLA_VLLM=force -- plain --batched 1024
run ours-decode-graphs -- plain $ours $decode --steps 200
run ours8-decode-graphs -- plain $ours --kv fp8 $decode
run ours-v2 VLLM_USE_V2_MODEL_RUNNER=1 -- plain $ours
run ours-shared -- shared $ours --tokens 24
run ours-sm80 SIEVEMLA_CUDA_CONFIG=sm80 -- plain $ours
run ours8-sm80 SIEVEMLA_CUDA_CONFIG=sm80 -- plain $ours --kv fp8 --no-copies
run ours-no-deep-gemm -- plain $ours --no-deep-gemm
run ours-weights-on-cpu -- plain $ours --weights-on-cpu 0.2
run ours-offload -- plain $ours $decode --offload
! selected step-ours || timer step-ours CUSTOM fp8_ds_mla
! selected step-flashmla || timer step-flashmla FLASHMLA_SPARSE fp8_ds_mla

last() {
  run ours-sleep -- plain $ours --sleep  # alone: vLLM takes for its own what others allocate meanwhile
  wait
  run graphs-on-again -- plain $ours $full  # on, off, on, with one cache folder
}

PAIRS=("flashmla flashmla-again" "flashattn flashattn-again" "flashattn flashmla" "ours flashmla"
  "flashattn flashmla-again" "flashattn-again flashmla" "flashattn-again flashmla-again" "ours flashmla-again"
  "ours flashattn" "ours flashattn-again" "flashmla8 flashmla8-again" "flashmla8-copies flashmla8"
  "flashmla8-decode flashmla8" "flashmla8-decode flashmla8-copies" "flashmla8-chunked flashmla8" "ours8 flashmla8"
  "ours8 flashmla8-again" "ours8 flashmla8-decode" "ours8 flashmla8-copies" "ours8-direct flashmla8"
  "ours8-direct flashmla8-decode" "flashmla flashmla-ordered" "flashmla-ordered flashmla-ordered-again"
  "flashattn-ordered flashmla-ordered" "ours flashmla-ordered" "ours flashattn-ordered"
  "flashmla8-copies-ordered flashmla8-copies-ordered-again" "flashmla8-decode-ordered flashmla8-copies-ordered"
  "ours8 flashmla8-copies-ordered" "ours8 flashmla8-decode-ordered" "ours8-chunked ours8"
  "ours8-chunked flashmla8-chunked" "ours ours-forced-chunked" "ours ours-decode-graphs"
  "ours ours-graphs" "ours ours-v2" "ours8 ours8-piecewise" "ours8 ours8-decode-graphs"
  "flashmla off-graphs" "ours-graphs graphs-on-again" "ours ours-sm80" "ours-sm80 flashmla"
  "ours8-direct ours8-sm80" "ours8-sm80 flashmla8" "ours ours-no-deep-gemm" "ours ours-sleep"
  "ours ours-weights-on-cpu" "ours-shared ours-shared-draft1" "ours-shared ours-shared-draft3")

# One engine, and others: does it have their token wherever they have one? Each of a pair in ours' place as well.
routes8="flashmla8 flashmla8-again flashmla8-decode flashmla8-copies"
AGREEMENTS=("ours flashmla flashmla-again flashattn flashattn-again" "flashattn flashmla flashmla-again ours"
  "flashmla flashattn flashattn-again ours" "ours8 $routes8" "flashmla8-decode flashmla8 flashmla8-again ours8"
  "flashmla8-copies flashmla8-decode ours8" "ours flashmla-ordered flashattn-ordered"
  "flashattn-ordered flashmla-ordered ours" "flashmla-ordered flashattn-ordered ours"
  "ours8 flashmla8-copies-ordered flashmla8-decode-ordered" "flashmla8-decode-ordered flashmla8-copies-ordered ours8"
  "flashmla8-copies-ordered flashmla8-decode-ordered ours8" "flashmla8-chunked flashmla8 flashmla8-again ours8"
  "ours-sm80 flashmla flashmla-again flashattn flashattn-again" "ours8-sm80 $routes8")
