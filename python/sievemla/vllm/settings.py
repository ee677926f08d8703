# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The environment variables of the plugin. None of them loads a library or code."""

from __future__ import annotations

import os

MODES = ("auto", "force", "off")
INDEXERS = ("sievemla", "vllm")
SELFTESTS = ("once", "skip")
INDEX_FORMATS = ("fp8", "bf16", "f32")
RANKS = ("trust", "check")


def _one_of(name: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(name) or values[0]
    if value not in values:
        raise ValueError(f"{name} is one of {', '.join(values)}: got {value!r}")
    return value


def mode() -> str:
    """SIEVEMLA_VLLM: auto serves sparse MLA where vLLM has no backend for it, and where CUSTOM is asked for. force
    takes precedence over vLLM's own backends and over the version table. off leaves vLLM as it is."""
    return _one_of("SIEVEMLA_VLLM", MODES)


def indexer() -> str:
    """SIEVEMLA_VLLM_INDEXER: vllm keeps vLLM's own indexer beside our attention, on devices that it has kernels for."""
    return _one_of("SIEVEMLA_VLLM_INDEXER", INDEXERS)


def selftest() -> str:
    """SIEVEMLA_SELFTEST: skip serves without the test of the kernels before the first model on a GPU."""
    return _one_of("SIEVEMLA_SELFTEST", SELFTESTS)


def index_format() -> str:
    """SIEVEMLA_INDEX_FORMAT: how indexer keys are cached. bf16 and f32 are unquantised, and for the CPU alone."""
    return _one_of("SIEVEMLA_INDEX_FORMAT", INDEX_FORMATS)


def ranks() -> str:
    """SIEVEMLA_VLLM_RANKS: check compares every selection between the tensor-parallel ranks, by a hash that each logs,
    and ends the engine where two differ. It waits for the device at every layer, so it goes with --enforce-eager."""
    return _one_of("SIEVEMLA_VLLM_RANKS", RANKS)
