# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Layers that share an earlier layer's selection (GLM-5.2), and pipeline stages.

The selection is not handed from one pipeline stage to the next, so a stage must not begin with a layer that shares.
"""

from __future__ import annotations

from typing import Any


def full_layers(config: Any) -> list[bool]:
    """Which layers select for themselves, as vLLM reads a model's config."""
    layers = range(config.num_hidden_layers)
    pattern = getattr(config, "index_topk_pattern", None)
    if pattern is not None:
        return [i >= len(pattern) or pattern[i] != "S" for i in layers]
    frequency = getattr(config, "index_topk_freq", 1)
    offset = getattr(config, "index_skip_topk_offset", 2)
    return [max(i - offset + 1, 0) % frequency == 0 for i in layers]


def partition(full: list[bool], stages: int) -> list[int]:
    """Layers of each stage, near to even, every stage beginning with a layer that selects; [] if there is no such."""
    starts = [0]
    for stage in range(1, stages):
        even = round(stage * len(full) / stages)
        candidates = [i for i in range(starts[-1] + 1, len(full)) if full[i]]
        if not candidates:
            return []
        starts.append(min(candidates, key=lambda i: abs(i - even)))
    return [end - start for start, end in zip(starts, [*starts[1:], len(full)])]


def refusal(config: Any, stages: int) -> str:
    layers = partition(full_layers(config), stages)
    remedy = f"set VLLM_PP_LAYER_PARTITION={','.join(map(str, layers))}" if layers else "use fewer stages"
    return (
        "sievemla: this pipeline stage begins with a layer that shares an earlier layer's selection, which stays on "
        f"the stage before: {remedy}"
    )
