# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The test that runs before the first model on a GPU: it passes on the CPU's kernels, and sees what is wrong."""
from __future__ import annotations

import pytest
import torch

import sievemla
from sievemla.vllm import selftest

HOST = torch.device("cpu")
SHAPE = selftest.Shape(16, 32, 256, 512, 64, "fp8_ds_mla", "fp8")


def found(shape: selftest.Shape = SHAPE) -> list[str]:
    return selftest.failures(shape, sievemla.Backend("cpu", threads=2), HOST)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        selftest.Shape(64, 32, 2048, 512, 64, "bf16", "fp8"),
        selftest.Shape(8, 64, 2048, 512, 64, "fp8_ds_mla", "fp8"),
        selftest.Shape(16, 32, 2051, 512, 0, "fp8_nope", "fp8"),
        selftest.Shape(2, 16, 48, 512, 64, "f32", "f32"),
        selftest.Shape(2, 16, 48, 512, 0, "bf16", "bf16"),
    ],
)
def test_right_kernels_pass(shape):
    assert found(shape) == []


def on_the_cpu(monkeypatch, name, change):
    """Lets `change` spoil the arguments of a stage, of the backend under test alone."""
    right = getattr(sievemla, name)

    def wrong(*args, backend, **named):
        if backend.name == "cpu":
            args, named = change(args, named)
        right(*args, backend=backend, **named)

    monkeypatch.setattr(sievemla, name, wrong, raising=False)


def test_a_wrong_rope_style_of_keys_is_seen(monkeypatch):
    def half_split(args, named):
        rope = named["rope"]
        return args, {**named, "rope": sievemla.Rope("half_split", rope.positions, rope.cos_sin)}

    on_the_cpu(monkeypatch, "write_index_keys", half_split)
    assert any("scores" in said for said in found())


def test_a_selection_that_misses_a_key_is_seen(monkeypatch):
    def blind(args, named):
        q, weights, keys, lengths = args
        return (q, weights, keys, lengths - 1), named

    on_the_cpu(monkeypatch, "select", blind)
    assert any("top-k" in said for said in found())


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_wrong_scale_of_attention_is_seen(monkeypatch, factor):
    on_the_cpu(monkeypatch, "attention", lambda args, named: ((args[0] * factor, *args[1:]), named))
    assert any("attention" in said for said in found())
