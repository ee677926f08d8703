#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""What the plugin relies on in vLLM, as hashes of its source text, so that a changed body is seen as well; and which
module a model comes from.

contracts.py VLLM VERSION   writes the hashes of an unpacked vLLM (the folder that holds vllm/) into contracts.json
"""
from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from pathlib import Path

STORED = Path(__file__).with_name("contracts.json")

# Replaced, overridden, or called by us, or what calls us and decides what we must answer.
RELIED_ON = {
    "compilation/breakable_cudagraph.py": ["eager_break_during_capture"],
    "model_executor/custom_op.py": ["CustomOp.register_oot"],
    "model_executor/layers/attention/mla_attention.py": [
        "_canonicalize_sparse_mla_kv_cache_dtype", "MLAAttention.__init__", "MLAAttention.forward",
        "MLAAttention.forward_impl", "MLAAttention.get_kv_cache_spec", "unified_mla_kv_cache_update",
    ],
    "model_executor/layers/mla.py": [
        "MultiHeadLatentAttentionWrapper.__init__", "MultiHeadLatentAttentionWrapper.forward",
    ],
    "model_executor/layers/sparse_attn_indexer.py": ["SparseAttnIndexer.__init__"],
    "model_executor/models/deepseek_v2.py": ["DeepseekV32IndexerCache", "Indexer.__init__", "Indexer.forward"],
    "platforms/cpu.py": ["CpuPlatform.get_attn_backend_cls", "CpuPlatform.check_and_update_config"],
    "platforms/cuda.py": ["CudaPlatformBase.get_attn_backend_cls"],
    "plugins/__init__.py": ["load_general_plugins", "load_plugins_by_group"],
    "v1/attention/backend.py": [
        "AttentionBackend", "AttentionImplBase", "AttentionMetadataBuilder", "CommonAttentionMetadata",
        "MLAAttentionImpl",
    ],
    "v1/attention/backends/registry.py": ["register_backend"],
    "v1/attention/selector.py": ["AttentionSelectorConfig", "get_attn_backend"],
}


# The module that holds the model's layers: it decides what calls us.
MODELS = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM", "DeepSeekMTPModel", "DeepseekV32MTPModel")


def module_of(registry: str, model: str) -> str:
    found = re.search(rf'"{model}": \(\s*"([^"]+)"', registry)
    return found[1] if found else "absent"


def node_of(tree: ast.AST, name: str) -> ast.AST | None:
    for part in name.split("."):
        named = (ast.FunctionDef, ast.ClassDef)
        tree = next((n for n in ast.iter_child_nodes(tree) if isinstance(n, named) and n.name == part), None)
        if tree is None:
            return None
    return tree


def hashes(root: Path) -> dict[str, str]:
    """Of every name that is there; "absent" for the others."""
    found = {}
    for file, names in RELIED_ON.items():
        path = root / "vllm" / file
        text = path.read_text() if path.exists() else ""
        tree = ast.parse(text)
        for name in names:
            node = node_of(tree, name)
            source = ast.get_source_segment(text, node) if node else None
            found[f"{file}: {name}"] = hashlib.sha256(source.encode()).hexdigest()[:16] if source else "absent"
    registry = root / "vllm" / "model_executor" / "models" / "registry.py"
    text = registry.read_text() if registry.exists() else ""
    return found | {f"model {model}": module_of(text, model) for model in MODELS}


def stored() -> dict[str, dict[str, str]]:
    return json.loads(STORED.read_text()) if STORED.exists() else {}


if __name__ == "__main__":
    everything = stored() | {sys.argv[2]: hashes(Path(sys.argv[1]))}
    STORED.write_text(json.dumps(dict(sorted(everything.items())), indent=1) + "\n")
