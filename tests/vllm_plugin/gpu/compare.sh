#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# compare.sh OUT -- the results that gpu.sh left in OUT, by the pairs and groups of engines.sh; takes no GPU.
out=$1 tiny=$(dirname "$0")/tiny.py
ENGINES=none
. "$(dirname "$0")/engines.sh"
of_results() {  # COMMAND NAME...: where all of them have one
  local command=$1 name files=()
  shift
  for name; do
    [[ -s $out/$name.json ]] || return 0
    files+=("$out/$name.json")
  done
  python3 "$tiny" "$command" "${files[@]}"
}
for pair in "${PAIRS[@]}"; do of_results compare $pair; done
for group in "${AGREEMENTS[@]}"; do of_results agree $group; done
