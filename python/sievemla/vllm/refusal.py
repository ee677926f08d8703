# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""What stands in vLLM's CUSTOM slot where this vLLM is not served: it says why, when somebody asks for it."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionBackend

from . import versions


class RefusingBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError(versions.problem())

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError(versions.problem())

    @staticmethod
    def get_kv_cache_shape(*args: Any, **named: Any) -> Any:
        raise NotImplementedError(versions.problem())

    @classmethod
    def validate_configuration(cls, *args: Any, **named: Any) -> list[str]:
        return [f"sievemla: {versions.problem()}"]
