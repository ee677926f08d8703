# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Tensor-parallel ranks must select the same rows, so they must run the same kernels on the same row types."""

from __future__ import annotations

import hashlib
from typing import Any

import sievemla

from . import settings
from .log import logger

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


def _of_every_rank(mine: dict[str, str]) -> list[dict[str, str]]:
    """Collective over the tensor-parallel group."""
    import torch.distributed
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    everyone: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everyone, mine, group=group.cpu_group)
    return everyone


def _ranks() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().world_size)


def check_once(mine: dict[str, str]) -> None:
    """Collective over the tensor-parallel group; raises RuntimeError on every rank if two of them differ."""
    global _agreed
    if _agreed or _ranks() == 1:
        return
    said = disagreement(_of_every_rank(mine))
    if said:
        raise RuntimeError(said)
    _agreed = True


def check_selection(layer: str, selected: Any) -> None:
    """SIEVEMLA_VLLM_RANKS=check: the same of `selected`, [rows, topk], of one layer and step."""
    if settings.ranks() != "check":
        return
    host = selected.cpu().contiguous()
    digest = hashlib.sha256(host.numpy().tobytes()).hexdigest()[:16]
    logger.info("selection of %s, %d rows: %s", layer, host.shape[0], digest)
    said = disagreement(_of_every_rank({f"selection of {layer}": digest}))
    if said:
        raise RuntimeError(said)
