# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Wrong use: one sentence that names the value received and the flag to set; and nothing of vLLM touched when off."""
from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sievemla.vllm
from sievemla.vllm import agreement, contract, settings, shared_layers, versions
from sievemla.vllm.serves import canonical, pooled_keys, refusals

from .conftest import Engines

GOOD = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "on_cuda": True}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"head_size": 320}, ["320", "kv_lora_rank", "SIEVEMLA_VLLM=off"]),
        ({"dtype": torch.float16}, ["float16", "--dtype bfloat16"]),
        ({"dtype": torch.float32}, ["float32", "--dtype bfloat16"]),
        ({"dtype": torch.float16, "on_cuda": False}, ["float16", "--dtype float32"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["fp8_e5m2", "--kv-cache-dtype", "fp8_ds_mla"]),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, ["nvfp4_ds_mla", "--kv-cache-dtype"]),
        ({"block_size": 48}, ["48", "--block-size 64"]),
    ],
)
def test_one_sentence_names_the_value_and_the_flag(wrong, said):
    (sentence,) = refusals(**{**GOOD, **wrong})
    for part in said:
        assert part in sentence


@pytest.mark.parametrize(
    "right", [{}, {"head_size": 512}, {"block_size": 256}, {"block_size": None}, {"kv_cache_dtype": "fp8"},
              {"kv_cache_dtype": "fp8_ds_mla"}, {"dtype": torch.float32, "on_cuda": False}],
)
def test_what_is_served_is_not_refused(right):
    assert refusals(**{**GOOD, **right}) == []


def test_keys_of_several_tokens_are_refused():
    said = pooled_keys(SimpleNamespace(index_kpool=4))
    assert "4 tokens" in said and "index_kpool" in said and "SIEVEMLA_VLLM=off" in said
    for served in ({}, {"index_kpool": None}, {"index_kpool": 1}):
        assert pooled_keys(SimpleNamespace(**served)) is None


def test_fp8_is_served_as_fp8_ds_mla():
    assert [canonical(name) for name in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")] == ["auto"] + 3 * ["fp8_ds_mla"]


def test_an_unknown_vllm_is_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: ("0.99.0", "cuda"))
    assert "0.99.0 (cuda)" in versions.problem() and "0.26.0 (cuda)" in versions.problem()
    assert sievemla.vllm.platform() is None
    monkeypatch.setenv("SIEVEMLA_VLLM", "force")
    assert versions.problem() is None
    assert versions.contract().version == "0.26.0"


def test_a_vllm_whose_models_pass_us_by_is_refused_even_by_force(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: ("0.33.0", "cuda"))
    monkeypatch.setenv("SIEVEMLA_VLLM", "force")
    said = versions.problem()
    assert "0.33.0 (cuda)" in said and "past every interface" in said and "0.26.0 (cuda)" in said


@pytest.mark.parametrize("stages", range(1, 9))
def test_a_pipeline_stage_begins_with_a_layer_that_selects(stages):
    glm52 = SimpleNamespace(num_hidden_layers=78, index_topk_freq=4, index_skip_topk_offset=3)
    full = shared_layers.full_layers(glm52)
    assert full.count(True) == 21 and full[:6] == [True, True, True, False, False, False]
    layers = shared_layers.partition(full, stages)
    assert len(layers) == stages and sum(layers) == 78
    assert all(full[sum(layers[:i])] for i in range(stages))
    assert max(layers) - min(layers) <= 4
    assert f"VLLM_PP_LAYER_PARTITION={','.join(map(str, layers))}" in shared_layers.refusal(glm52, stages)


def test_no_partition_without_enough_layers_that_select():
    few = SimpleNamespace(num_hidden_layers=4, index_topk_pattern="FSSS")
    assert "use fewer stages" in shared_layers.refusal(few, 2)


def test_every_patch_is_listed_with_when_and_why():
    assert all(sorted(patch) == ["what", "when", "why"] and all(patch.values()) for patch in contract.patches())
    sources = "".join(path.read_text() for path in Path(sievemla.vllm.__file__).parent.glob("*.py"))
    assert sources.count("setattr(") == 1 and sources.count("contract.replace(") + sources.count("    replace(") == 2
    for what in ("CudaPlatform.get_attn_backend_cls", "mla_attention._canonicalize_sparse_mla_kv_cache_dtype"):
        assert any(patch["what"] == what for patch in contract.patches())


def test_ranks_that_differ_are_named():
    same = {"version": "0.1.0 abc", "kernels": "1"}
    assert agreement.disagreement([same, dict(same), dict(same)]) is None
    said = agreement.disagreement([same, dict(same), {**same, "kernels": "2"}])
    assert "kernels: 1 on 0, 1; 2 on 2" in said


def test_the_entry_points_stay_functions():
    """A module of the same name would take the place of one, once imported."""
    names = {path.stem for path in Path(sievemla.vllm.__file__).parent.glob("*.py")}
    assert names.isdisjoint({"register", "platform"})
    assert callable(sievemla.vllm.register) and callable(sievemla.vllm.platform)


def test_a_setting_that_does_not_exist_names_those_that_do(monkeypatch):
    monkeypatch.setenv("SIEVEMLA_VLLM", "on")
    with pytest.raises(ValueError, match="auto, force, off: got 'on'"):
        settings.mode()


def test_register_never_raises(monkeypatch, caplog):
    monkeypatch.setattr(versions, "installed", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR, "vllm.sievemla"):
        sievemla.vllm.register()
    assert "could not be registered" in caplog.text


def test_the_slot_of_an_unknown_vllm_says_why(monkeypatch):
    from sievemla.vllm.refusal import RefusingBackend

    monkeypatch.setattr(versions, "installed", lambda: ("0.99.0", "cuda"))
    (reason,) = RefusingBackend.validate_configuration(head_size=576)
    assert "0.99.0" in reason


def test_off_touches_nothing():
    """By identity, in a process of its own: what the plugin replaces is vLLM's own object."""
    check = (
        "import os; os.environ['SIEVEMLA_VLLM'] = 'off'\n"
        "import sievemla.vllm\n"
        "assert sievemla.vllm.platform() is None\n"
        "sievemla.vllm.register()\n"
        "from sievemla.vllm import contract\n"
        "from vllm.v1.attention.backends import registry\n"
        "from vllm.model_executor.layers.attention import mla_attention\n"
        "import sys\n"
        "assert contract.replaced() == []\n"
        "assert mla_attention._canonicalize_sparse_mla_kv_cache_dtype.__module__ == mla_attention.__name__\n"
        "assert 'sievemla.vllm.backend' not in sys.modules and 'sievemla._library' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=300)


def test_an_engine_that_cannot_be_served_says_so(engines: Engines):
    model = engines.model("glm5-tiny")
    said = engines.refused("wrong", {"model": model, "dtype": "float16", "block_size": 48})
    assert "float16 is not served: set --dtype bfloat16" in said
    assert "block size 48 is not a multiple of 64: set --block-size 64" in said
    said = engines.refused("off", {"model": model}, alone=True, SIEVEMLA_VLLM="off")
    assert "Sparse Attention is not supported on CPU" in said
