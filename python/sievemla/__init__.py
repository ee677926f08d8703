# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Sparse MLA attention (DeepSeek Sparse Attention) on CUDA devices and CPUs.

    indexer -> topk -> attention -> combine

Tensors are any DLPack tensors: NumPy, PyTorch, CuPy, JAX. They are written in place; nothing is copied or kept. On CUDA
the calls go to the caller's current stream. Errors: ValueError (the call is wrong, nothing was written),
NotImplementedError (no kernel here serves it; the message says what each lacks), RuntimeError (the device refused).

Where PyTorch is installed, importing this package also registers ``torch.ops.sievemla.*`` (sievemla/torch_ops.py).
The library itself is loaded at the first use of a name, so that the import succeeds where the library cannot be loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._api import (
        SCORE_BUDGET_BYTES,
        Backend,
        ContiguousKeys,
        Geometry,
        IndexCache,
        IndexKeys,
        Kernel,
        KvCache,
        KvFormat,
        PagedKeys,
        Rope,
        Shard,
        SlotMap,
        attention,
        attention_workspace_bytes,
        built_with_cuda,
        combine,
        commit,
        expand_pools,
        gather_index_keys,
        gather_latent,
        geometries,
        index_queries,
        index_scores,
        index_scores_workspace_bytes,
        kernels,
        kv_formats,
        merge_topk,
        merge_topk_workspace_bytes,
        positions_to_slots,
        select,
        select_workspace_bytes,
        shard_slots,
        topk,
        topk_candidates,
        topk_workspace_bytes,
        version,
        workspace_init,
        write_index_keys,
        write_latent,
        write_layer,
    )

    __version__: str

__all__ = [
    "SCORE_BUDGET_BYTES",
    "Backend",
    "ContiguousKeys",
    "Geometry",
    "IndexCache",
    "IndexKeys",
    "Kernel",
    "KvCache",
    "KvFormat",
    "PagedKeys",
    "Rope",
    "Shard",
    "SlotMap",
    "attention",
    "attention_workspace_bytes",
    "built_with_cuda",
    "combine",
    "commit",
    "expand_pools",
    "gather_index_keys",
    "gather_latent",
    "geometries",
    "index_queries",
    "index_scores",
    "index_scores_workspace_bytes",
    "kernels",
    "kv_formats",
    "merge_topk",
    "merge_topk_workspace_bytes",
    "positions_to_slots",
    "select",
    "select_workspace_bytes",
    "shard_slots",
    "topk",
    "topk_candidates",
    "topk_workspace_bytes",
    "version",
    "workspace_init",
    "write_index_keys",
    "write_latent",
    "write_layer",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return __getattr__("version")()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("._api", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _runs_the_program() -> bool:
    """`sievemla ...` or `python -m sievemla ...`, which needs no tensors and shall not wait for PyTorch."""
    return os.path.basename(sys.argv[0] if sys.argv else "") == "sievemla" or sys.orig_argv[1:3] == ["-m", __name__]


if not _runs_the_program() and importlib.util.find_spec("torch"):
    try:
        importlib.import_module(".torch_ops", __name__)
    except (ImportError, OSError):  # an installed torch that does not load is not this package's to report
        pass
