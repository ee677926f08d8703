#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# bench/gpu.sh PROGRAM FOLDER [PEERS.json] -- all cases of this machine's GPU, its self-test, and the page about both:
# FOLDER/ours.json, verify.json, report.html. About two minutes on an H200. Exit 1 if a result was wrong.
set -uo pipefail
program=$(realpath "$1") folder=$(mkdir -p "$2" && realpath "$2") status=0
peers=()
[[ -z ${3:-} ]] || peers=("$(realpath "$3")")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
"$program" bench --backend cuda --json "$folder/ours.json" || status=1
"$program" verify --backend cuda --json >"$folder/verify.json" || status=1
python3 report.py "$folder/ours.json" "${peers[@]}" --verify "$folder/verify.json" \
  --out "$folder/report.html" || status=1
python3 compare.py "$folder/ours.json" "${peers[@]}" --allow-missing || true  # a missed target is no wrong result
exit "$status"
