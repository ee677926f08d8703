# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""What is served. Whatever is not, is refused in one sentence: the value received, the rule, the flag to set."""

from __future__ import annotations

from typing import Any

import torch

PAGE = 64  # rows of a page: what vLLM's indexer caches have on CUDA

HEAD_SIZES = (576, 512)  # latent 512 with rope 64, and without

# --kv-cache-dtype -> the row type that serves it
KV_CACHE_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "fp8": "fp8_ds_mla",
    "fp8_e4m3": "fp8_ds_mla",
    "fp8_ds_mla": "fp8_ds_mla",
}


def canonical(kv_cache_dtype: str) -> str:
    return KV_CACHE_DTYPES.get(kv_cache_dtype, kv_cache_dtype)


def refusals(
    *, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, on_cuda: bool
) -> list[str]:
    """One sentence for each thing that is not served."""
    said = []
    if head_size not in HEAD_SIZES:
        said.append(
            f"head size {head_size} is not served, 576 (latent 512 + rope 64) and 512 (no rope) are: it comes from "
            "kv_lora_rank and qk_rope_head_dim in the model's config.json; SIEVEMLA_VLLM=off leaves the model to vLLM"
        )
    if dtype not in ((torch.bfloat16,) if on_cuda else (torch.bfloat16, torch.float32)):
        wanted = "bfloat16" if on_cuda else "bfloat16 or --dtype float32"
        said.append(f"model dtype {str(dtype).removeprefix('torch.')} is not served: set --dtype {wanted}")
    if kv_cache_dtype is not None and kv_cache_dtype not in KV_CACHE_DTYPES:
        said.append(
            f"KV cache dtype {kv_cache_dtype} is not served: set --kv-cache-dtype to one of "
            f"{', '.join(KV_CACHE_DTYPES)}"
        )
    if block_size is not None and block_size % PAGE:
        said.append(f"block size {block_size} is not a multiple of {PAGE}: set --block-size {PAGE}")
    return said


def pooled_keys(config: Any) -> str | None:
    """Why a model whose indexer keys stand for several tokens (GLM-5.3-Flash) is not served, or None."""
    pool = getattr(config, "index_kpool", None) or 1
    if pool == 1:
        return None
    return (
        f"sievemla: indexer keys of {pool} tokens each (index_kpool in the model's config.json) are not served, keys "
        "of one token are; SIEVEMLA_VLLM=off leaves the model to vLLM"
    )
