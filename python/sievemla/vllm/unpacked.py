# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""Prompts over an fp8_ds_mla cache: their requests' rows are copied into bf16 first, as FLASHMLA_SPARSE does, so that
both round a row alike. Many rows of a prompt read each cached row, which is unpacked once that way: on an H200 with 64
heads and 2,048 new tokens of 32,768, 1.47 ms and 0.07 ms for the copy, instead of 1.74 ms. With 16 heads it would be
slower, 1.05 and 0.07 instead of 0.84."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_ROWS = 16  # of a request in a step; a decoding request, with its drafts, has fewer
LEAST_HEADS = 64
MOST_CONTEXT = 32  # times the rows: a copied row takes 2 ns, a row that reads the copy saves 130
MOST_ROWS = 65536  # of the copy


@dataclass
class Copy:
    slots: torch.Tensor  # [n] i32, where the cache has the rows of the copy
    table: torch.Tensor  # [requests of the step, max_pages] i32: where the copy has their pages


@dataclass
class Span:
    """Rows of a step that follow each other, and the copy that they read."""

    rows: slice
    requests: range
    pages: list[int]  # how many of each request are copied; empty: none, the rows read the cache
    copy: Copy | None = None


def capacity_of(device: torch.device, heads: int, context: int, page: int) -> int:
    """Rows that a copy may have: on sm_90, where FLASHMLA_SPARSE is the other backend. 0: nothing is copied."""
    if heads < LEAST_HEADS or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return min(-(-context // page) * page, MOST_ROWS)


def spans_of(starts: list[int], lengths: list[int], page: int, capacity: int) -> list[Span]:
    """starts [requests + 1], lengths [requests] with the new rows; capacity in rows. Every row is in one span."""
    spans: list[Span] = []
    for request, length in enumerate(lengths):
        first, last = starts[request : request + 2]
        pages = -(-length // page)
        new = last - first
        if new == 0:  # padding
            break
        copied = new >= LEAST_ROWS and length <= MOST_CONTEXT * new and pages * page <= capacity
        before = spans[-1] if spans else None
        if before and (copied == bool(before.pages)) and (sum(before.pages) + pages) * page * copied <= capacity:
            spans[-1] = Span(slice(before.rows.start, last), range(before.requests.start, request + 1), before.pages)
        else:
            spans.append(Span(slice(first, last), range(request, request + 1), []))
        if copied:
            spans[-1].pages.append(pages)
    return spans


def copy_of(span: Span, block_table: torch.Tensor, page: int) -> Copy:
    device = block_table.device
    counts = torch.tensor(span.pages, device=device)
    total = sum(span.pages)
    ends = counts.cumsum(0)
    owner = torch.repeat_interleave(counts, output_size=total)
    source = torch.arange(total, device=device) - (ends - counts)[owner]
    pages = block_table[owner + span.requests.start, source]
    slots = pages[:, None] * page + torch.arange(page, dtype=torch.int32, device=device)
    table = torch.zeros_like(block_table)
    here = (ends - counts)[:, None] + torch.arange(block_table.shape[1], device=device)
    table[span.requests.start : span.requests.stop] = here.clamp(max=total - 1)
    return Copy(slots.flatten(), table)
