# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""The backend as vLLM asks about it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend

from . import contract
from .serves import HEAD_SIZES, KV_CACHE_DTYPES, PAGE, canonical, refusals


def _library_problem() -> str | None:
    try:
        import sievemla

        sievemla.version()
    except Exception as failure:
        return f"the library does not load: {failure}"
    return None


def _device_problem(on_cuda: bool) -> str | None:
    import sievemla

    if on_cuda and not sievemla.built_with_cuda():
        return "this is the CPU build of the library; install the wheel with CUDA"
    return None


class SieveMlaBackend(AttentionBackend):
    supported_dtypes = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        from .attention import SieveMlaImpl

        return SieveMlaImpl

    @staticmethod
    def get_builder_cls() -> Any:
        from .metadata import StepBuilder

        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        *others: Any,
    ) -> str | None:
        from vllm.platforms import current_platform

        on_cuda = current_platform.is_cuda()
        problem = _library_problem() or _device_problem(on_cuda)
        said = [problem] if problem else []
        said += refusals(
            head_size=head_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=block_size, on_cuda=on_cuda
        )
        return f"sievemla: {'; '.join(said)}" if said else None

    @staticmethod
    def get_kv_cache_shape(  # vLLM 0.26 asks here; later ones take the shape from the spec
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, 656 if canonical(cache_dtype_str) == "fp8_ds_mla" else head_size


class SieveMlaIndexBackend(SieveMlaBackend):
    """Of the cache of indexer keys: the same builder, so one record serves the whole layer."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


# vLLM asks for this module when it builds its first sparse MLA layer, just before it settles that layer's cache dtype.
contract.canonical_kv_dtype(SieveMlaBackend)
