# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""What the log says about a start, once an engine, on rank 0."""

from __future__ import annotations

from typing import Any

import sievemla

from . import contract, settings, versions
from .log import logger
from .workspace import Workspace

_reported = False


def report(workspace: Workspace, kv_cache_dtype: str, config: Any) -> None:
    global _reported
    if _reported or config.parallel_config.rank:
        return
    _reported = True
    model = config.model_config.hf_text_config
    interleaved = getattr(model, "indexer_rope_interleave", None)
    index_keys = settings.index_format() if settings.indexer() == "sievemla" else "left to vLLM"
    said = "not in the model's config" if interleaved is None else "indexer_rope_interleave in the model's config"
    logger.info(
        "sievemla %s (%s) on vLLM %s (%s), backend %s: KV cache dtype %s, index keys %s, indexer rope %s (%s), "
        "workspace %.1f MiB",
        sievemla.version(), sievemla.commit()[:9], *versions.installed(), workspace.backend.name,
        kv_cache_dtype, index_keys, "interleaved" if interleaved else "half split", said,
        workspace.bytes() / 2**20,
    )
    here = workspace.backend.name.partition(":")[0]
    for kernel in sievemla.kernels():
        if kernel.backend == here and kernel.runs_here:
            logger.debug("kernel of stage %s: %s", kernel.stage, kernel.name)
    for name in contract.replaced():
        logger.debug("replaced in vLLM: %s", name)
    if interleaved is None and getattr(model, "model_type", "").startswith("glm"):
        logger.warning(
            "the config of this GLM model lacks indexer_rope_interleave, so vLLM rotates indexer heads half split: "
            "beyond %d tokens the selection is wrong. Set --hf-overrides '{\"indexer_rope_interleave\": true}'",
            getattr(model, "index_topk", 0),
        )
