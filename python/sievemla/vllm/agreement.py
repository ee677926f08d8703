# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Tensor-parallel ranks must select the same rows, so they must run the same kernels on the same row types."""

from __future__ import annotations

import hashlib
from typing import Any

import sievemla

from . import settings

_agreed = False


def facts(*more: Any) -> dict[str, str]:
    """What has to be the same on every rank."""
    kernels = [(k.stage, k.name) for k in sievemla.kernels() if k.runs_here]
    return {
        "version": f"{sievemla.version()} {sievemla.commit()}",
        "kernels": hashlib.sha256(repr(kernels).encode()).hexdigest()[:12],
        "indexer": settings.indexer(),
        "row types": repr(more),
    }


def disagreement(everyone: list[dict[str, str]]) -> str | None:
    """The first thing in which ranks differ, or None."""
    for name in everyone[0]:
        values: dict[str, list[int]] = {}
        for rank, said in enumerate(everyone):
            values.setdefault(said.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            parts = "; ".join(f"{value} on {', '.join(map(str, ranks))}" for value, ranks in values.items())
            return f"sievemla: tensor-parallel ranks differ in {name}: {parts}"
    return None


def check_once(mine: dict[str, str]) -> None:
    """Collective over the tensor-parallel group; raises RuntimeError on every rank if two of them differ."""
    global _agreed
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if _agreed or group.world_size == 1:
        return
    import torch.distributed

    everyone: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everyone, mine, group=group.cpu_group)
    said = disagreement(everyone)
    if said:
        raise RuntimeError(said)
    _agreed = True
