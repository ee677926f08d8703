# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""vLLM's FLASHMLA_SPARSE with our kernels beside it, as CUSTOM. Each call gives both the same bytes, so what differs is
the kernels' own. SIEVEMLA_VLLM=off keeps the plugin itself out."""


def register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "sievemla_shadow.backend.ShadowBackend")
