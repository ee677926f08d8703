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


def test_it_does_not_depend_on_defaults():
    """vLLM builds a model's layers with its device and the model's dtype as the defaults."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert found() == []
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """run_once as on a GPU, with the outcome given."""

    def run(outcome):
        monkeypatch.setattr(selftest, "failures", outcome)
        monkeypatch.setattr(selftest, "_remembered", lambda shape: tmp_path / "cache" / "passed")
        selftest.run_once(SHAPE, None, torch.device("cuda"))
        return (tmp_path / "cache" / "passed").exists()

    return run


def test_what_passed_is_not_run_again(on_a_gpu):
    assert on_a_gpu(lambda *args: [])
    assert on_a_gpu(lambda *args: pytest.fail("ran again"))


def test_a_wrong_result_stops_the_start_and_is_not_remembered(on_a_gpu):
    with pytest.raises(RuntimeError, match="prefill: scores are off.*SIEVEMLA_VLLM=off"):
        on_a_gpu(lambda *args: ["prefill: scores are off"])
    assert on_a_gpu(lambda *args: [])  # it had not been


def test_a_self_test_that_cannot_run_is_a_warning(on_a_gpu, caplog):
    assert not on_a_gpu(lambda *args: 1 / 0)
    assert "could not run" in caplog.text


def test_the_self_test_can_be_skipped(on_a_gpu, monkeypatch, caplog):
    monkeypatch.setenv("SIEVEMLA_SELFTEST", "skip")
    assert not on_a_gpu(lambda *args: pytest.fail("ran"))
    assert "SIEVEMLA_SELFTEST=skip" in caplog.text


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
