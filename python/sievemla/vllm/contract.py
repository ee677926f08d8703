# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""What is replaced in vLLM: patches.json lists it with when and why, replaced() what this process has replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_replaced: dict[tuple[int, str], str] = {}  # by owner and name: what it is called in patches.json


def patches() -> list[dict[str, str]]:
    listed: list[dict[str, str]] = json.loads(Path(__file__).with_name("patches.json").read_text())
    return listed


def replace(owner: Any, name: str, listed: str, make: Callable[[Any], Any]) -> None:
    """owner.name = make(what it was), once. A class method is handed to `make` as it stands in its class."""
    key = (id(owner), name)
    if key in _replaced:
        return
    places = owner.__mro__ if isinstance(owner, type) else [owner]
    original = next(vars(place)[name] for place in places if name in vars(place))
    setattr(owner, name, make(original))
    _replaced[key] = listed


def replaced() -> list[str]:
    return sorted(_replaced.values())


def canonical_kv_dtype(backend: type) -> None:
    """An fp8 cache, asked for by a flag or by the checkpoint, is served as fp8_ds_mla, as FLASHMLA_SPARSE does."""
    from vllm.model_executor.layers.attention import mla_attention

    from .serves import canonical

    def make(original: Any) -> Any:
        def canonicalize(attn_backend: Any, kv_cache_dtype: str) -> Any:
            if issubclass(attn_backend, backend):
                return canonical(kv_cache_dtype)
            return original(attn_backend, kv_cache_dtype)

        return canonicalize

    name = "_canonicalize_sparse_mla_kv_cache_dtype"
    replace(mla_attention, name, f"mla_attention.{name}", make)


def split_at(operator: str) -> None:
    """torch.compile's graphs and piecewise CUDA graphs end before `operator` and begin anew after it."""
    from vllm.config import get_current_vllm_config

    splits = get_current_vllm_config().compilation_config.splitting_ops
    if splits and operator not in splits:  # empty: this run does not split
        splits.append(operator)


def without_deep_gemm() -> bool:
    from vllm.utils.import_utils import has_deep_gemm

    return not has_deep_gemm()


def _register_layer(base: Any, layer: type) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    name = base.__name__
    if name not in op_registry_oot:
        base.register_oot(layer, name=name)
        _replaced[id(op_registry_oot), name] = f"op_registry_oot['{name}']"


def register_layer() -> None:
    """The layer around attention that lets an adopted indexer go first."""
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    from .layer import IndexerFirst

    _register_layer(MultiHeadLatentAttentionWrapper, IndexerFirst)


def register_indexer() -> None:
    """SparseAttnIndexer without DeepGEMM: it is built, and refuses only if vLLM's own forward is called."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    class DeferredIndexer(SparseAttnIndexer):
        def __init__(self, *args: Any, **named: Any) -> None:
            try:
                super().__init__(*args, **named)
            except RuntimeError as refusal:
                self.refusal = refusal

        def forward_cuda(self, *args: Any, **named: Any) -> Any:
            raise self.refusal

    _register_layer(SparseAttnIndexer, DeferredIndexer)
