# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The vLLM plugin: sparse MLA attention and its indexer through this library. vLLM finds it by two entry points.

    versions    which vLLM this is written for, and what differs between them
    settings    the environment variables
    selection   when vLLM takes our backend            cpu_platform  the same on CPU builds
    serves      what we serve, and why not             backend     the backend as vLLM asks about it
    metadata    what a step needs, once a step         report      what the log says
    attention   the layer's attention and cache write  indexer     scores, top-k, index keys
    layer       the order of a layer's work            unpacked    bf16 copies of a prompt's rows
    workspace   the device memory behind both          contract    every attribute of vLLM that we replace
    selftest    the kernels against double, once       agreement   ranks run the same
    shared_layers  pipeline stages and shared selections

vLLM calls register() in every process, also for models that have nothing to do with us, and does not guard the call:
it never raises, and imports no more than it has to.
"""

from __future__ import annotations

BACKEND = "sievemla.vllm.backend.SieveMlaBackend"
REFUSING_BACKEND = "sievemla.vllm.refusal.RefusingBackend"


def register() -> None:
    """vllm.general_plugins: registers the backend as CUSTOM, and the rule that selects it."""
    from . import settings, versions
    from .log import logger

    try:
        if settings.mode() == "off":
            return
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        problem = versions.problem()
        register_backend(AttentionBackendEnum.CUSTOM, REFUSING_BACKEND if problem else BACKEND)
        if problem:
            logger.warning("not active: %s", problem)
            return
        from . import selection

        selection.install()
    except Exception:
        logger.exception("not active: the plugin could not be registered")


def platform() -> str | None:
    """vllm.platform_plugins: a platform on CPU builds of vLLM, nothing elsewhere."""
    from . import settings, versions

    if settings.mode() == "off" or versions.build() != "cpu" or versions.problem():
        return None
    return "sievemla.vllm.cpu_platform.SieveMlaCpuPlatform"
