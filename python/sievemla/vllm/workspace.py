# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The memory behind the stages, one per device: claimed while layers are built, so that vLLM's profile run sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import sievemla


@dataclass(frozen=True)
class Bounds:
    """The largest step."""

    tokens: int
    context: int
    topk: int
    heads: int
    index_heads: int
    latent: int
    rope: int
    ranks: int = 1  # of decode context parallel
    unpacked: int = 0  # rows of a packed cache that are copied into bf16 at a time


class Workspace:
    """What calls of one device share. Calls follow one another: on one stream, or joined."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = device.type == "cpu"
        if self.host:
            self.backend = sievemla.Backend("cpu", threads=torch.get_num_threads())
        else:
            self.backend = sievemla.Backend(f"cuda:{device.index or 0}")
            self.backend.prepare()  # loads every kernel: nothing is loaded later, in a graph capture say
        self.scratch: torch.Tensor | None = None  # None on the host: the library keeps its own
        self.slots = torch.empty(0, dtype=torch.int32, device=device)  # [tokens * topk]
        self.counts = torch.empty(0, dtype=torch.int32, device=device)  # [tokens], slots of each row
        self.unpacked = torch.empty(0, dtype=torch.bfloat16, device=device)  # [rows, latent + rope]
        self.side = None if self.host else torch.cuda.Stream(device)
        self._beside: Any = None  # what work on the side stream reads, which may not be freed before join()

    def claim(self, bounds: Bounds) -> None:
        """Makes room for steps within the bounds; only grows."""
        rows = bounds.tokens * bounds.topk
        if rows > self.slots.numel():
            self.slots = torch.empty(rows, dtype=torch.int32, device=self.device)
        if bounds.tokens > self.counts.numel():
            self.counts = torch.empty(bounds.tokens, dtype=torch.int32, device=self.device)
        if bounds.unpacked > len(self.unpacked):
            width = bounds.latent + bounds.rope
            self.unpacked = torch.empty((bounds.unpacked, width), dtype=torch.bfloat16, device=self.device)
        needed = max(
            sievemla.select_workspace_bytes(
                self.backend, rows=bounds.tokens, heads=bounds.index_heads, width=bounds.context, k=bounds.topk
            ),
            sievemla.attention_workspace_bytes(
                self.backend, tokens=bounds.tokens, heads=bounds.heads, lanes=bounds.topk, latent=bounds.latent,
                rope=bounds.rope,
            ),
            sievemla.merge_topk_workspace_bytes(
                self.backend, ranks=bounds.ranks, rows=bounds.tokens, n=bounds.topk, k=bounds.topk
            ) if bounds.ranks > 1 else 0,
        )
        if not self.host and (self.scratch is None or needed > self.scratch.numel()):
            self.scratch = torch.empty(needed, dtype=torch.uint8, device=self.device)
            sievemla.workspace_init(self.scratch, backend=self.backend)

    @contextmanager
    def beside(self, *read: Any) -> Iterator[None]:
        """In a captured step, what is inside runs on a second stream, from what is enqueued so far until join()."""
        if self.side is None or not torch.cuda.is_current_stream_capturing():
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        self._beside = read
        try:
            with torch.cuda.stream(self.side):
                yield
        except BaseException:
            self.join()  # a capture that ends with streams apart has an error of its own, which would hide this one
            raise

    def join(self) -> None:
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self.side)
            self._beside = None

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        return self.slots[: positions.numel()].view(positions.shape)

    def bytes(self) -> int:
        scratch = 0 if self.scratch is None else self.scratch.numel()
        return int(4 * (self.slots.numel() + self.counts.numel()) + 2 * self.unpacked.numel() + scratch)


@dataclass
class Layer:
    """What a layer's indexer and attention share."""

    workspace: Workspace
    shard: sievemla.Shard
    heads: int
    latent: int
    # Block table, rows and page size of the slots that the indexer has just left in the workspace, for attention next.
    selected: tuple[int, int, int] | None = None

    def beside(self, *read: Any) -> AbstractContextManager[None]:
        """Workspace.beside, but for ranks that gather: NCCL's calls stay in the order of one stream."""
        return nullcontext() if self.shard.ranks > 1 else self.workspace.beside(*read)


_of_device: dict[torch.device, Workspace] = {}


def workspace_of(device: torch.device) -> Workspace:
    if device not in _of_device:
        _of_device[device] = Workspace(device)
    return _of_device[device]
