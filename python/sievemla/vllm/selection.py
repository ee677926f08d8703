# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""When vLLM takes our backend on CUDA: where it has none itself, or always under SIEVEMLA_VLLM=force."""

from __future__ import annotations

from typing import Any

from . import BACKEND, contract, settings
from .log import logger


def our_reasons(platform: Any, config: Any) -> list[str]:
    """Why our backend does not serve this layer; empty if it does."""
    from .backend import SieveMlaBackend

    reasons: list[str] = SieveMlaBackend.validate_configuration(
        device_capability=platform.get_device_capability(), **config._asdict()
    )
    return reasons


def choose(original: Any, platform: Any, named: Any, config: Any, rest: dict[str, Any]) -> str:
    """What get_attn_backend_cls answers. `original` is vLLM's own, bound to the platform."""
    if named is not None or not config.use_sparse:
        return str(original(named, config, **rest))
    if settings.mode() == "force":
        reasons = our_reasons(platform, config)
        if not reasons:
            return _ours("SIEVEMLA_VLLM=force")
        logger.warning("SIEVEMLA_VLLM=force, but: %s", "; ".join(reasons))
        return str(original(named, config, **rest))
    try:
        return str(original(named, config, **rest))
    except ValueError as refusal:
        reasons = our_reasons(platform, config)
        if reasons:
            raise ValueError(f"{refusal} And sievemla: {'; '.join(reasons)}") from None
        return _ours("vLLM has no sparse MLA backend for this device and model")


def _ours(why: str) -> str:
    logger.info("attention backend sievemla: %s", why)
    return BACKEND


def install() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    if contract.without_deep_gemm():
        contract.register_indexer()
    contract.register_layer()
    platform = type(current_platform)

    def replacement(original: Any) -> Any:
        def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, **rest: Any) -> str:
            return choose(original.__get__(None, cls), cls, selected_backend, attn_selector_config, rest)

        bound: Any = classmethod
        return bound(get_attn_backend_cls)

    contract.replace(platform, "get_attn_backend_cls", "CudaPlatform.get_attn_backend_cls", replacement)
