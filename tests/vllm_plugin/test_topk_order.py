# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""What tiny.py --topk-in-order makes of the positions of vLLM's top-k."""
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import tiny  # noqa: E402

K = 8
STARTS, ENDS = torch.tensor([0, 0, 5, 5, 5]), torch.tensor([3, 20, 25, 13, 5])  # the last row sees nothing


def any_topk(logits, starts, ends, positions, *_) -> None:
    """In a random order, any of equal scores; what lies outside of a row's range is not written by anyone."""
    positions.fill_(-1)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        order = torch.randperm(end - start)
        best = order[logits[row, start:end][order].argsort(descending=True)][: positions.shape[1]]
        positions[row, : len(best)] = best[torch.randperm(len(best))].int()


def lowest_topk(logits, starts, ends, k: int) -> torch.Tensor:
    made = torch.full((len(logits), k), -1, dtype=torch.int32)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        best = logits[row, start:end].sort(descending=True, stable=True).indices[:k].sort().values
        made[row, : len(best)] = best.int()
    return made


@pytest.mark.parametrize("levels", [1, 3, 100000])
def test_ascending_and_lowest_of_equals(levels):
    torch.manual_seed(levels)
    for _ in range(20):
        logits = torch.randint(levels, (5, 25)).float()
        outside = (torch.arange(25) < STARTS[:, None]) | (torch.arange(25) >= ENDS[:, None])
        logits[outside] = torch.tensor([float("nan"), 1e30, -1e30])[torch.randint(3, (int(outside.sum()),))]
        buffer = torch.full((5, K + 2), 77, dtype=torch.int32)
        positions = buffer[:, :K]
        any_topk(logits, STARTS, ENDS, positions)
        before = positions.sort(1).values
        many, equals, wrong = tiny.in_order(logits, STARTS.int(), ENDS.int(), positions)
        want = lowest_topk(logits, STARTS, ENDS, K)
        assert torch.equal(positions, want) and (buffer[:, K:] == 77).all()
        assert (int(many), int(wrong)) == (2, 0)
        assert int(equals) == (before != want.sort(1).values).any(1).sum()


def test_a_wrong_set_stays_and_is_counted():
    logits = torch.arange(20.0)[None]
    positions = torch.tensor([[19, 18, 17, 16, 15, 14, 13, 3]], dtype=torch.int32)
    assert [int(n) for n in tiny.in_order(logits, torch.tensor([0]), torch.tensor([20]), positions)] == [1, 0, 1]
    assert positions.tolist() == [[3, 13, 14, 15, 16, 17, 18, 19]]


def test_both_operators_are_replaced(monkeypatch, capsys):
    import vllm

    def decode(logits, lengths, positions, *_) -> None:
        any_topk(logits, torch.zeros_like(lengths.flatten()), lengths.flatten(), positions)

    ops, said = types.SimpleNamespace(top_k_per_row_prefill=any_topk), []
    monkeypatch.setattr(vllm, "_custom_ops", ops, raising=False)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", ops)
    monkeypatch.setattr(torch.ops._C, "cooperative_topk", decode, raising=False)
    monkeypatch.setattr(tiny.atexit, "register", said.append)
    tiny.order_topk()
    logits, positions = torch.randint(4, (5, 25)).float(), torch.empty((5, K), dtype=torch.int32)
    ops.top_k_per_row_prefill(logits, STARTS, ENDS, positions, 5, 25, 1, K)
    assert torch.equal(positions, lowest_topk(logits, STARTS, ENDS, K))
    torch.ops._C.cooperative_topk(logits, ENDS[:, None].int(), positions, None, K, 25)
    assert torch.equal(positions, lowest_topk(logits, torch.zeros_like(ENDS), ENDS, K))
    said[0]()
    assert capsys.readouterr().out.startswith("TOPK in order: 5 rows ")
