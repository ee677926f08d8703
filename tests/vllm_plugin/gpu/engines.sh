# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# engines.sh -- which engines gpu.sh runs, and which of them it compares.
flashmla="--backend FLASHMLA_SPARSE --mqa"
engine flashmla -- plain $flashmla
sleep 1  # the others then find DeepGEMM's kernels begun
engine flashmla-again -- plain $flashmla
engine flashattn -- plain --backend FLASH_ATTN_MLA_SPARSE --mqa
engine flashmla8 -- plain $flashmla --kv fp8
engine ours -- plain --backend CUSTOM
engine ours8 -- plain --backend CUSTOM --kv fp8_ds_mla
engine ours8-by-fp8 -- plain --backend CUSTOM --kv fp8
engine ours-chunked -- plain --backend CUSTOM --batched 1024
engine ours-forced SIEVEMLA_VLLM=force -- plain
engine unforced -- plain
engine ours-decode-graphs -- plain --backend CUSTOM --graphs FULL_DECODE_ONLY
engine ours-graphs -- plain --backend CUSTOM --graphs FULL_AND_PIECEWISE
engine ours-v2 VLLM_USE_V2_MODEL_RUNNER=1 -- plain --backend CUSTOM
engine shadow SIEVEMLA_VLLM=off -- plain --backend CUSTOM --mqa
engine shadow8 SIEVEMLA_VLLM=off -- plain --backend CUSTOM --kv fp8 --mqa
engine flashmla-shared -- shared $flashmla --tokens 24
engine ours-shared -- shared --backend CUSTOM --tokens 24
engine ours-shared-draft1 -- shared --backend CUSTOM --tokens 24 --mtp 1
engine ours-shared-draft3 -- shared --backend CUSTOM --tokens 24 --mtp 3

PAIRS=("flashmla flashmla-again" "flashattn flashmla" "ours flashmla" "ours8 flashmla8" "ours8 ours8-by-fp8"
  "ours ours-chunked" "ours ours-forced" "ours ours-decode-graphs" "ours ours-graphs" "ours ours-v2"
  "unforced flashattn"
  "ours-shared flashmla-shared" "ours-shared ours-shared-draft1" "ours-shared ours-shared-draft3")
