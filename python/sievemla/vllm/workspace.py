# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The memory behind the stages, one per device: claimed while layers are built, so that vLLM's profile run sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import sievemla

from . import settings


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


class Workspace:
    """What calls of one device share. Calls follow one another on one stream."""

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
        self.side = torch.cuda.Stream(device) if not self.host and settings.overlap() else None
        self.running: tuple[torch.cuda.Event, ...] | None = None

    def claim(self, bounds: Bounds) -> None:
        """Makes room for steps within the bounds; only grows."""
        rows = bounds.tokens * bounds.topk
        if rows > self.slots.numel():
            self.slots = torch.empty(rows, dtype=torch.int32, device=self.device)
        needed = max(
            sievemla.select_workspace_bytes(
                self.backend, rows=bounds.tokens, heads=bounds.index_heads, width=bounds.context, k=bounds.topk
            ),
            sievemla.attention_workspace_bytes(
                self.backend, tokens=bounds.tokens, heads=bounds.heads, lanes=bounds.topk, latent=bounds.latent,
                rope=bounds.rope,
            ),
        )
        if not self.host and (self.scratch is None or needed > self.scratch.numel()):
            self.scratch = torch.empty(needed, dtype=torch.uint8, device=self.device)
            sievemla.workspace_init(self.scratch, backend=self.backend)

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        return self.slots[: positions.numel()].view(positions.shape)

    @contextmanager
    def beside(self, write_keys: Callable[[], None], held: tuple[torch.Tensor, ...]) -> Iterator[Callable[[], None]]:
        if self.side is None:
            write_keys()
            yield lambda: None
            return
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        write_keys()
        written, done = torch.cuda.Event(), torch.cuda.Event()
        written.record(main)
        with torch.cuda.stream(self.side):
            yield lambda: self.side.wait_event(written)
            done.record(self.side)
        self.running = (done, held)

    def join(self) -> None:
        if self.running is not None:
            torch.cuda.current_stream().wait_event(self.running[0])
            self.running = None

    def bytes(self) -> int:
        scratch = 0 if self.scratch is None else self.scratch.numel()
        return int(4 * self.slots.numel() + scratch)


_of_device: dict[torch.device, Workspace] = {}


def workspace_of(device: torch.device) -> Workspace:
    if device not in _of_device:
        _of_device[device] = Workspace(device)
    return _of_device[device]
