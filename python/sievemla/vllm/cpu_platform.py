# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""vLLM's CPU platform, with sparse MLA. Everything else is its own."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

from . import BACKEND, selection
from .log import logger
from .serves import PAGE

_ROPE = "rotary_embedding"


class SieveMlaCpuPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, *rest: Any, **named: Any) -> str:
        if not attn_selector_config.use_sparse:
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, *rest, **named))
        reasons = selection.our_reasons(cls, attn_selector_config)
        if reasons:
            raise ValueError(f"No sparse MLA on this CPU. {'; '.join(reasons)}")
        return BACKEND

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens
        block_size = cache.block_size if cache.user_specified_block_size else PAGE
        super().check_and_update_config(vllm_config)
        model = vllm_config.model_config
        if model is None or not hasattr(model.hf_text_config, "index_topk"):
            return
        # vLLM turns these off for its own dense MLA on CPUs, and forces that kernel's block size.
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = asked
        cache.block_size = block_size
        custom_ops = vllm_config.compilation_config.custom_ops
        if f"+{_ROPE}" not in custom_ops and f"-{_ROPE}" not in custom_ops:
            custom_ops.append(f"-{_ROPE}")
            logger.warning(
                "vLLM's CPU operator %s is switched off: it rotates MLA's queries wrongly (custom_ops +%s keeps it)",
                _ROPE, _ROPE,
            )
