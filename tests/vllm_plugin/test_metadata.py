# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Rows of a step: each knows its request and how many positions it sees, whatever mixture and padding vLLM sends."""
from __future__ import annotations

import pytest
import torch

from sievemla.vllm import metadata
from sievemla.vllm.metadata import StepMetadata, rows_of
from sievemla.vllm.unpacked import LEAST_ROWS, copy_of, spans_of

# New tokens of each request, and its length with them; requests of padding have neither.
STEPS = {
    "decode": ([1, 1, 1], [5, 900, 64]),
    "whole prompts": ([9, 300, 37], [9, 300, 37]),
    "a chunk beside decodes": ([1, 128, 1], [33, 640, 2]),
    "speculative rows": ([4, 4, 4], [20, 4, 2051]),
    "uneven speculative rows": ([1, 4, 2], [20, 7, 65]),
    "padded requests of a graph": ([1, 1, 0, 0], [7, 8, 0, 0]),
    "nothing": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", STEPS)
def test_rows_of_a_step(name, padding):
    new, lengths = STEPS[name]
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    rows = int(starts[-1]) + padding
    request, seen = (torch.full((rows,), -7, dtype=torch.int32) for _ in range(2))
    rows_of(starts, torch.tensor(lengths, dtype=torch.int32), request, seen)
    expected = [(r, lengths[r] - count + i + 1) for r, count in enumerate(new) for i in range(count)]
    assert list(zip(request.tolist(), seen.tolist()))[: len(expected)] == expected
    assert seen[len(expected) :].tolist() == [0] * padding
    assert all(r >= len(new) for r in request[len(expected) :].tolist())  # no request: no slot


@pytest.mark.parametrize("capacity", [0, 128, 700, 4096])
@pytest.mark.parametrize("name", STEPS)
def test_copies_of_prompts_hold_what_their_rows_see(name, capacity):
    page, (new, lengths) = 64, STEPS[name]
    starts = torch.tensor([0, *new]).cumsum(0).tolist()
    table = torch.randperm(40 * len(new)).to(torch.int32).view(len(new), 40)
    spans = spans_of(starts, lengths, page, capacity)
    assert [row for span in spans for row in range(span.rows.start, span.rows.stop)] == list(range(starts[-1]))
    for span in spans:
        assert sum(span.pages) * page <= capacity
        assert not span.pages or min(new[r] for r in span.requests) >= LEAST_ROWS
        if not span.pages:
            continue
        copy = copy_of(span, table, page)
        for r in span.requests:
            position = torch.arange(lengths[r])
            copied = copy.table[r, position // page] * page + position % page
            assert torch.equal(copy.slots[copied], table[r, position // page] * page + position % page)
    if capacity == 4096:
        assert any(span.pages for span in spans) == (max(new) >= LEAST_ROWS)


def step_of(new: list[int], lengths: list[int], pages: int) -> StepMetadata:
    starts, lengths = torch.tensor([0, *new]).cumsum(0), torch.tensor(lengths)
    none = torch.empty(0)
    return StepMetadata(
        num_actual_tokens=int(starts[-1]), num_reqs=len(new), max_query_len=max(new), max_seq_len=int(lengths.max()),
        query_start_loc=starts, seq_lens=lengths, block_table=torch.arange(len(new) * pages).view(-1, pages).int(),
        slot_mapping=none, row_request=none, row_length=none, longest=int(lengths.max()), topk_tokens=8,
        num_decodes=len(new), num_decode_tokens=int(starts[-1]), starts=starts, lengths=lengths,
    )


def test_a_captured_step_copies_nothing(monkeypatch):
    """Many drafts a request are as many rows as a prompt's, but a graph's replays have other lengths."""
    many = LEAST_ROWS + 1
    step = step_of([many, many], [100, 300], pages=5)
    assert any(span.pages for span in step.spans_over(64, 4096))
    monkeypatch.setattr(metadata, "captured", lambda tensor: True)
    assert step.spans_over(64, 4096) == []


def test_lengths_beyond_the_block_table_copy_its_pages():
    step = step_of([200], [200 + 8], pages=3)
    assert step.spans_over(64, 4096)[0].copy.slots.tolist() == list(range(192))


def test_a_step_of_padding_has_no_spans():
    step = step_of([0, 0], [0, 0], pages=3)
    step.max_query_len = LEAST_ROWS
    assert step.spans_over(64, 4096) == []


def test_caches_of_other_pages_have_copies_of_their_own():
    """One step over two caches: 300 rows are five pages of 64 and three of 128, and too many for a small copy."""
    step = step_of([40], [300], pages=6)
    asked = {(64, 4096): [5], (128, 4096): [3], (64, 128): []}
    spans = {key: step.spans_over(*key) for key in asked}
    for (page, capacity), pages in asked.items():
        (span,) = spans[page, capacity]
        assert span.pages == pages and span.rows == slice(0, 40)
        if pages:
            assert span.copy.slots.tolist() == list(range(pages[0] * page))
        assert step.spans_over(page, capacity) is spans[page, capacity]  # made once a step
