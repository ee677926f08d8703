# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The installed vLLM is, word for word, the one that the plugin was written for, and the version table knows it."""
from __future__ import annotations

import importlib.util
from pathlib import Path

from sievemla.vllm import versions

from .contracts import hashes, stored


def test_every_version_that_was_read_has_its_hashes():
    assert {row.version for row in versions.TABLE} | {version for version, _ in versions.REFUSED} == set(stored())


def test_on_cuda_a_version_is_served_if_its_models_are_the_ones_that_call_us():
    """The generic model calls the indexer and the cache writer through the layer; vllm.models.deepseek_v32 does not."""
    served = [row.version for row in versions.TABLE if row.build == "cuda"]
    refused = [version for version, build in versions.REFUSED if build == "cuda"]
    for model in ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"):
        assert {stored()[version][f"model {model}"] for version in served} == {"deepseek_v2"}
        assert {stored()[version][f"model {model}"] for version in refused} == {"vllm.models.deepseek_v32"}


def test_what_we_rely_on_is_unchanged():
    root = Path(importlib.util.find_spec("vllm").origin).parent.parent
    version, _ = versions.installed()
    found, expected = hashes(root), stored()[version]
    assert all(value != "absent" for name, value in found.items() if not name.startswith("model "))
    changed = [name for name in expected if found.get(name) != expected[name]]
    assert not changed, f"read these in vLLM {version}, adapt the plugin, then run contracts.py: {changed}"


def test_a_changed_body_is_seen(tmp_path):
    file = tmp_path / "vllm" / "model_executor" / "layers" / "mla.py"
    file.parent.mkdir(parents=True)
    name = "model_executor/layers/mla.py: MultiHeadLatentAttentionWrapper.forward"
    seen = set()
    for body in ("return 1", "return 2"):
        file.write_text(f"class MultiHeadLatentAttentionWrapper:\n    def forward(self):\n        {body}\n")
        seen.add(hashes(tmp_path)[name])
    assert len(seen) == 2 and "absent" not in seen
