# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The environment variables of the plugin. None of them loads a library or code."""

from __future__ import annotations

import os

MODES = ("auto", "force", "off")
INDEX_FORMATS = ("fp8", "bf16", "f32")


def _one_of(name: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(name) or values[0]
    if value not in values:
        raise ValueError(f"{name} is one of {', '.join(values)}: got {value!r}")
    return value


def mode() -> str:
    """SIEVEMLA_VLLM: auto serves sparse MLA where vLLM has no backend for it, and where CUSTOM is asked for. force
    takes precedence over vLLM's own backends and over the version table. off leaves vLLM as it is."""
    return _one_of("SIEVEMLA_VLLM", MODES)


def index_format() -> str:
    """SIEVEMLA_INDEX_FORMAT: how indexer keys are cached. bf16 and f32 are unquantised, and for the CPU alone."""
    return _one_of("SIEVEMLA_INDEX_FORMAT", INDEX_FORMATS)
