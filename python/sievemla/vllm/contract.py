# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""Every attribute of vLLM that the plugin replaces goes through this file; replaced() lists them.

    what                                                       when                    why
    CudaPlatform.get_attn_backend_cls                          register(), CUDA        selection without a flag
    CompilationConfig.splitting_ops (of the running config)    first DSA layer         our indexer runs between graphs
    mla_attention._canonicalize_sparse_mla_kv_cache_dtype      first DSA layer         fp8 is served as fp8_ds_mla
    op_registry_oot["SparseAttnIndexer"]                       register(), no DeepGEMM its constructor asks for DeepGEMM

The class of each Indexer and of its key cache is replaced on the instance (indexer.py), never in vLLM's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_replaced: dict[tuple[int, str], str] = {}


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """owner.name = make(what it was), once."""
    key = (id(owner), name)
    if key in _replaced:
        return
    original = owner.__dict__[name] if isinstance(owner, type) and name in vars(owner) else _inherited(owner, name)
    setattr(owner, name, make(original))
    _replaced[key] = f"{getattr(owner, '__qualname__', getattr(owner, '__name__', owner))}.{name}"


def _inherited(owner: Any, name: str) -> Any:
    if isinstance(owner, type):
        for base in owner.__mro__:
            if name in vars(base):
                return vars(base)[name]
    return getattr(owner, name)


def replaced() -> list[str]:
    return sorted(_replaced.values())


def canonical_kv_dtype() -> None:
    """An fp8 cache, asked for by a flag or by the checkpoint, is served as fp8_ds_mla, as FLASHMLA_SPARSE does."""
    from vllm.model_executor.layers.attention import mla_attention

    from .backend import SieveMlaBackend
    from .serves import canonical

    def make(original: Any) -> Any:
        def canonicalize(attn_backend: Any, kv_cache_dtype: str) -> Any:
            if issubclass(attn_backend, SieveMlaBackend):
                return canonical(kv_cache_dtype)
            return original(attn_backend, kv_cache_dtype)

        return canonicalize

    replace(mla_attention, "_canonicalize_sparse_mla_kv_cache_dtype", make)


def split_at(operator: str) -> None:
    """torch.compile's graphs and piecewise CUDA graphs end before `operator` and begin anew after it."""
    from vllm.config import get_current_vllm_config

    splits = get_current_vllm_config().compilation_config.splitting_ops
    if splits and operator not in splits:  # empty: this run does not split
        splits.append(operator)


def without_deep_gemm() -> bool:
    from vllm.utils.import_utils import has_deep_gemm

    return not has_deep_gemm()


def register_indexer() -> None:
    """SparseAttnIndexer without DeepGEMM: it is built, and refuses only if vLLM's own forward is called."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    if "SparseAttnIndexer" in op_registry_oot:
        return

    class DeferredIndexer(SparseAttnIndexer):
        def __init__(self, *args: Any, **named: Any) -> None:
            try:
                super().__init__(*args, **named)
            except RuntimeError as refusal:
                self.refusal = refusal

        def forward_cuda(self, *args: Any, **named: Any) -> Any:
            raise self.refusal

    SparseAttnIndexer.register_oot(DeferredIndexer, name="SparseAttnIndexer")
    _replaced[id(op_registry_oot), "SparseAttnIndexer"] = "op_registry_oot['SparseAttnIndexer']"
