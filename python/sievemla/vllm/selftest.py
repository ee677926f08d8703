# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Before the first model on a GPU: the kernels that it will use, on small random inputs, against double precision.

Takes about two seconds, once for a GPU model, driver, build and model shape: what passed is remembered below vLLM's
cache folder. SIEVEMLA_SELFTEST=skip leaves it out.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

import sievemla

from . import settings
from .log import logger
from .serves import PAGE

_DIM = 128  # width of an indexer head and key


@dataclass(frozen=True)
class Shape:
    """What decides which kernels run."""

    heads: int
    index_heads: int
    topk: int
    latent: int
    rope: int
    kv_format: str
    index_format: str


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    context: int
    topk: int


def cases(shape: Shape) -> list[Case]:
    narrow = min(shape.topk, 128)
    return [
        Case("decode, every lane", 2, shape.topk // 4 * 4 + 3 * PAGE, shape.topk),
        Case("prefill", 65, 300, narrow),
        Case("fewer keys than lanes", 3, narrow // 2, narrow),
    ]


@dataclass
class Results:
    scores: torch.Tensor  # [rows, context], of the reference's own keys and queries
    positions: torch.Tensor  # [rows, topk]
    out: torch.Tensor  # [rows, heads, latent]


def _empty_cache(kv_format: str, width: int, pages: int, device: torch.device) -> torch.Tensor:
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}.get(kv_format, torch.uint8)
    return torch.zeros((pages, PAGE, 656 if dtype == torch.uint8 else width), dtype=dtype, device=device)


def stages(
    shape: Shape, case: Case, backend: sievemla.Backend, device: torch.device, positions: torch.Tensor | None
) -> Results:
    """Every stage on seeded inputs. With `positions`, attention takes those instead of its own selection."""
    made = torch.Generator().manual_seed(case.rows)
    real = torch.float32 if shape.kv_format == "f32" else torch.bfloat16

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=made).to(real).to(device)

    rows, context, pages = case.rows, case.context, -(-case.context // PAGE) + 1
    order = torch.randperm(pages, generator=made)
    table = order[None].to(torch.int32).to(device)
    slots = (order[torch.arange(context) // PAGE] * PAGE + torch.arange(context) % PAGE).to(device)
    request = torch.zeros(rows, dtype=torch.int32, device=device)
    lengths = (context - rows + 1 + torch.arange(rows)).clamp(min=1).to(torch.int32).to(device)
    angles = torch.arange(context)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(real).to(device)
    everywhere = torch.arange(context, device=device)
    kv_format: Any = shape.kv_format
    index_format: Any = shape.index_format

    def scratch(needed: int) -> torch.Tensor | None:
        if device.type == "cpu":
            return None
        tensor = torch.empty(needed, dtype=torch.uint8, device=device)
        sievemla.workspace_init(tensor, backend=backend)
        return tensor

    # Cache writes.
    cache = sievemla.KvCache(_empty_cache(kv_format, shape.latent + shape.rope, pages, device), kv_format, shape.latent,
                             shape.rope)
    rotated = normal(context, shape.rope) if shape.rope else None
    sievemla.write_latent(normal(context, shape.latent), slots, cache, rope=rotated, backend=backend)
    width, index_dtype = {"fp8": (_DIM + 4, torch.uint8), "bf16": (_DIM, torch.bfloat16)}.get(
        index_format, (_DIM, torch.float32)
    )
    keys = sievemla.IndexCache(torch.zeros((pages, PAGE, width), dtype=index_dtype, device=device), index_format)
    sievemla.write_index_keys(
        normal(context, _DIM), normal(_DIM), normal(_DIM), slots, keys,
        rope=sievemla.Rope("interleaved", everywhere, cos_sin), backend=backend,
    )
    # Indexer.
    out_q = torch.empty((rows, shape.index_heads, _DIM), dtype=index_dtype, device=device)
    out_weights = torch.empty((rows, shape.index_heads), device=device)
    sievemla.index_queries(
        normal(rows, shape.index_heads, _DIM), normal(rows, shape.index_heads), out_q, out_weights,
        weight_scale=(shape.index_heads * _DIM) ** -0.5,
        rope=sievemla.Rope("half_split", lengths - 1, cos_sin), backend=backend,
    )
    paged = sievemla.PagedKeys(keys, table, request)
    scores = torch.empty((rows, context), device=device)
    sievemla.index_scores(
        out_q, out_weights, paged, lengths, scores, backend=backend,
        workspace=scratch(sievemla.index_scores_workspace_bytes(
            backend, rows=rows, heads=shape.index_heads, width=context)),
    )
    selected = torch.empty((rows, case.topk), dtype=torch.int32, device=device)
    sievemla.select(
        out_q, out_weights, paged, lengths, width=context, positions=selected, backend=backend,
        workspace=scratch(sievemla.select_workspace_bytes(
            backend, rows=rows, heads=shape.index_heads, width=context, k=case.topk)),
    )
    # Attention.
    taken = selected if positions is None else positions.to(device)
    lanes = torch.empty_like(taken)
    sievemla.positions_to_slots(taken, sievemla.SlotMap(table, PAGE, request), lanes, backend=backend)
    out = torch.empty((rows, shape.heads, shape.latent), device=device)
    sievemla.attention(
        normal(rows, shape.heads, shape.latent), cache, out, scale=(shape.latent + shape.rope) ** -0.5, slots=lanes,
        q_rope=normal(rows, shape.heads, shape.rope) if shape.rope else None, backend=backend,
        workspace=scratch(sievemla.attention_workspace_bytes(
            backend, tokens=rows, heads=shape.heads, lanes=case.topk, latent=shape.latent, rope=shape.rope)),
    )
    return Results(scores.cpu(), selected.cpu(), out.cpu())


def _best(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The scores at these positions, in order of size; -inf where there is none."""
    at = scores.gather(1, positions.clamp(min=0).long()).masked_fill(positions < 0, float("-inf"))
    return at.sort(dim=1, descending=True).values


def failures(shape: Shape, backend: sievemla.Backend, device: torch.device) -> list[str]:
    """What is wrong, one sentence for each; empty if nothing is."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # vLLM builds its layers with the model's dtype and the GPU as defaults
    try:
        with torch.device("cpu"):
            return [said for case in cases(shape) for said in _failures_of(shape, case, backend, device)]
    finally:
        torch.set_default_dtype(default)


def _failures_of(shape: Shape, case: Case, backend: sievemla.Backend, device: torch.device) -> Iterator[str]:
    ours = stages(shape, case, backend, device, None)
    right = stages(shape, case, sievemla.Backend("reference"), torch.device("cpu"), ours.positions)
    loudest = right.scores[right.scores.isfinite()].abs().max()
    # Index keys and queries round to e4m3 where the last bit of float32 decides: a few scores move by a step.
    apart = (ours.scores - right.scores)[right.scores.isfinite()].abs() / loudest
    if not apart.mean() < 1e-4:
        yield f"{case.name}: scores are {apart.mean():.2g} of the largest off, on average"
    taken, best = _best(ours.scores, ours.positions), ours.scores.sort(dim=1, descending=True).values
    if not torch.equal(taken[:, : best.shape[1]], best[:, : taken.shape[1]]):
        yield f"{case.name}: the selection is not the top-k of the scores"
    # docs/numerics.md, with the largest value for sum p |v|; a value of an fp8 row may round to the next code.
    bound = 8e-3 * right.out.abs() + 2e-3 * 5
    worst = ((ours.out - right.out).abs() / bound).max()
    if not worst <= 1:
        yield f"{case.name}: attention is {worst:.2g} times its bound off"


def _remembered(shape: Shape) -> Path:
    import vllm.envs as envs

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver = Path("/proc/driver/nvidia/version")
    facts = (
        properties.name, properties.major, properties.minor, driver.read_text() if driver.exists() else "",
        sievemla.version(), sievemla.commit(), astuple(shape),
    )
    name = "selftest-" + hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return Path(envs.VLLM_CACHE_ROOT) / "sievemla" / name


def run_once(shape: Shape, backend: sievemla.Backend, device: torch.device) -> None:
    """Raises RuntimeError where a kernel is wrong on this GPU."""
    if device.type == "cpu":
        return
    if settings.selftest() == "skip":
        logger.warning("SIEVEMLA_SELFTEST=skip: the kernels have not been tested on this GPU")
        return
    passed = _remembered(shape)
    if passed.exists():
        return
    start = time.monotonic()
    try:
        found = failures(shape, backend, device)
    except Exception:  # says nothing about a result; what cannot run stops at its first call
        logger.warning("the self-test of the kernels could not run on this GPU", exc_info=True)
        return
    if found:
        raise RuntimeError(
            f"sievemla: wrong results on this GPU, so nothing is served: {'; '.join(found)}. `sievemla verify` tests "
            "every kernel; SIEVEMLA_VLLM=off leaves the model to vLLM"
        )
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()
    seconds = time.monotonic() - start
    logger.info("self-test passed in %.1f s: every kernel that this model uses, against double", seconds)
