# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The layer around attention: the indexer goes first, and nothing else is changed."""
from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sievemla.vllm.layer import IndexerFirst
from sievemla.vllm.workspace import Workspace

HEADS, NOPE, ROPE, LOW, LATENT, HIDDEN, ROWS = 2, 6, 4, 8, 16, 12, 3


class Step(torch.nn.Module):
    """Notes that it was called, and with what."""

    def __init__(self, name: str, calls: dict, function) -> None:
        super().__init__()
        self.name, self.calls, self.function = name, calls, function

    def forward(self, *args, **named):
        self.calls[self.name] = args
        return self.function(*args, **named)


def projection(inner: int, outer: int):
    weight = torch.randn(inner, outer)
    return lambda x: (x @ weight, None)


def turned(positions, q, k):
    return q * positions[:, None, None], k * positions[:, None, None]


@pytest.fixture
def layer():
    made, calls = object.__new__(IndexerFirst), {}
    torch.nn.Module.__init__(made)
    made.calls = calls
    made.q_lora_rank, made.kv_lora_rank, made.num_heads, made.v_head_dim = LOW, LATENT, HEADS, LATENT
    made.qk_nope_head_dim, made.qk_rope_head_dim, made.qk_head_dim = NOPE, ROPE, NOPE + ROPE
    made.indexer_first, made.indexer_rope_emb = True, "rope"
    steps = {
        "fused_qkv_a_proj": projection(HIDDEN, LOW + LATENT + ROPE), "q_a_layernorm": lambda x: 2 * x,
        "indexer": lambda *args: None, "q_b_proj": projection(LOW, HEADS * (NOPE + ROPE)),
        "kv_a_layernorm": lambda x: 3 * x, "rotary_emb": turned,
        "mla_attn": lambda q, latent, rope, output_shape: torch.ones(output_shape),
        "o_proj": projection(HEADS * LATENT, 5),
    }
    for name, function in steps.items():
        setattr(made, name, Step(name, calls, function))
    return made


def test_the_indexer_goes_before_the_projection_of_queries(layer):
    hidden, positions = torch.randn(ROWS, HIDDEN), torch.arange(1.0, ROWS + 1)
    assert layer(positions, hidden).shape == (ROWS, 5)
    order = list(layer.calls)
    assert order.index("q_a_layernorm") < order.index("indexer") < order.index("q_b_proj") < order.index("mla_attn")
    down = layer.fused_qkv_a_proj.function(hidden)[0]
    low, latent, rope = 2 * down[:, :LOW], 3 * down[:, LOW : LOW + LATENT], down[:, LOW + LATENT :]
    assert layer.calls["indexer"][0] is hidden and layer.calls["indexer"][2:] == (positions, "rope")
    assert torch.equal(layer.calls["indexer"][1], low)
    q = layer.q_b_proj.function(low)[0].view(ROWS, HEADS, NOPE + ROPE)
    q[..., NOPE:], rope = turned(positions, q[..., NOPE:], rope[:, None])
    for got, want in zip(layer.calls["mla_attn"], (q, latent, rope), strict=True):
        assert torch.equal(got, want)


class Stream:
    """Notes what it waits for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.fixture
def captured(monkeypatch):
    """The workspace of a step that is captured, and the stream of it."""
    work, main = object.__new__(Workspace), Stream()
    work.side, work._beside = Stream(), None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return work, main


def test_streams_are_joined_once(captured):
    work, main = captured
    with work.beside("read"):
        pass
    assert work.side.waited == [main] and main.waited == []
    work.join()
    work.join()
    assert main.waited == [work.side]


def test_streams_are_joined_where_the_indexer_raises(captured):
    work, main = captured
    with pytest.raises(RuntimeError, match="of the indexer"), work.beside("read"):
        raise RuntimeError("of the indexer")
    assert main.waited == [work.side] and work._beside is None


def test_streams_are_joined_where_the_layer_raises(layer, captured):
    work, main = captured

    def index(*args):
        with work.beside(*args):
            pass

    def broken(*args):
        raise RuntimeError("no memory")

    layer.indexer.function, layer.q_b_proj.function = index, broken
    layer.indexer.sievemla = SimpleNamespace(layer=SimpleNamespace(workspace=work))
    with pytest.raises(RuntimeError, match="no memory"):
        layer(torch.arange(1.0, ROWS + 1), torch.randn(ROWS, HIDDEN))
    assert main.waited == [work.side] and work._beside is None


def test_a_layer_without_our_indexer_is_vllms(layer, monkeypatch):
    base = IndexerFirst.__mro__[1]
    monkeypatch.setattr(base, "forward", lambda self, *args: args)
    layer.indexer_first = False
    assert layer(1, 2) == (1, 2, None)
