# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""One layer's indexer: norm, rope, quantise and insert the new keys; rope and quantise the queries; scores; top-k.

vLLM builds its Indexer as ever (so weights load as ever), and adopt() gives that object another class: its forward runs
the two projections and then one operator of ours. No DeepGEMM, no Triton, no kernel of vLLM's is left in it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.distributed.parallel_state import get_dcp_group
from vllm.forward_context import get_forward_context

import sievemla

from . import agreement, contract, settings
from .metadata import StepMetadata
from .workspace import Layer

DIM = 128  # width of an indexer head and key
OPERATOR = "sievemla_vllm::index"
EXCHANGE_BYTES = 64 << 20  # of all ranks' candidates at a time

_DTYPES = {"fp8": torch.uint8, "bf16": torch.bfloat16, "f32": torch.float32}


class AdoptedIndexer:
    """Comes before vLLM's Indexer in the class of an adopted object."""

    sievemla: Selection

    def forward(self, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> Any:
        me: Any = self
        q, _ = me.wq_b(qr)
        keys_and_weights, _ = me.wk_weights_proj(hidden_states)
        torch.ops.sievemla_vllm.index(
            q.view(-1, me.n_head, DIM),
            keys_and_weights,
            positions,
            rotary_emb.cos_sin_cache,
            me.topk_indices_buffer,
            rotary_emb.is_neox_style,
            me.k_cache.prefix,
        )
        return me.topk_indices_buffer


class AdoptedKeyCache:
    """Comes before vLLM's DeepseekV32IndexerCache in the class of an adopted object."""

    def get_attn_backend(self) -> Any:
        from .backend import SieveMlaIndexBackend

        return SieveMlaIndexBackend


def _reclass(instance: Any, first: type) -> None:
    theirs = type(instance)
    instance.__class__ = type(f"SieveMla{theirs.__name__}", (first, theirs), {})


def adopt(indexer: Any, layer: Layer) -> None:
    if isinstance(indexer, AdoptedIndexer) or settings.indexer() == "vllm":
        return
    name = settings.index_format()
    if name != "fp8" and layer.workspace.backend.name.startswith("cuda"):
        raise ValueError(f"SIEVEMLA_INDEX_FORMAT={name} is for the CPU: on CUDA indexer keys are fp8")
    cache = indexer.k_cache
    cache.head_dim = DIM + 4 if name == "fp8" else DIM
    cache.dtype = _DTYPES[name]
    _reclass(cache, AdoptedKeyCache)
    _reclass(indexer, AdoptedIndexer)
    cache.sievemla = indexer.sievemla = Selection(indexer, layer, name)
    if layer.workspace.scratch is not None:  # vLLM saves a model's buffers when it goes to sleep
        indexer.register_buffer("sievemla_workspace", layer.workspace.scratch, persistent=False)
    contract.split_at(OPERATOR)


class Selection:
    """The stages of one indexer."""

    def __init__(self, indexer: Any, layer: Layer, index_format: str) -> None:
        self.norm = indexer.k_norm
        self.cache = indexer.k_cache
        self.heads = indexer.n_head
        self.weight_scale = self.heads**-0.5 * DIM**-0.5
        self.format: Any = index_format
        self.layer = layer

    def run(self, step: StepMetadata | None, q: torch.Tensor, *others: Any) -> None:
        if step is None:
            self._profile(q)
            return
        with self.layer.beside(q, *others):
            self._run(step, q, *others)

    def _run(
        self,
        step: StepMetadata,
        q: torch.Tensor,
        keys_and_weights: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        topk: torch.Tensor,
        half_split: bool,
    ) -> None:
        rows = step.num_actual_tokens
        work = self.layer.workspace
        keys, weights = keys_and_weights[:rows].split([DIM, self.heads], dim=-1)
        rope = sievemla.Rope("half_split" if half_split else "interleaved", positions[:rows], cos_sin)
        cache = sievemla.IndexCache(self.cache.kv_cache, self.format)
        rounded = q.dtype == torch.bfloat16  # vLLM's norm and rotation store what they give
        new_keys = sievemla.IndexKeys(
            keys, self.norm.weight, self.norm.bias, step.slot_mapping[:rows], cache, rope, self.norm.eps,
            round_bf16=rounded,
        )
        out_q = torch.empty((rows, self.heads, DIM), dtype=_DTYPES[self.format], device=q.device)
        out_weights = torch.empty((rows, self.heads), dtype=torch.float32, device=q.device)
        sievemla.index_queries(
            q[:rows], weights, out_q, out_weights, weight_scale=self.weight_scale, rope=rope, round_bf16=rounded,
            keys=new_keys, backend=work.backend,
        )
        self._select(step, out_q, out_weights, cache, topk[:rows])
        agreement.check_selection(self.cache.prefix, topk[:rows])

    def _select(
        self, step: StepMetadata, q: torch.Tensor, weights: torch.Tensor, cache: sievemla.IndexCache,
        selected: torch.Tensor,
    ) -> None:
        """Fills selected, [rows, k]."""
        work, shard = self.layer.workspace, self.layer.shard
        rows, k = selected.shape

        def select(first: int, last: int, positions: torch.Tensor, **sent: Any) -> None:
            sievemla.select(
                q[first:last],
                weights[first:last],
                sievemla.PagedKeys(cache, step.block_table, step.row_request[first:last]),
                step.row_length[first:last],
                width=step.longest,
                positions=positions,
                workspace=work.scratch,
                backend=work.backend,
                **sent,
            )

        if shard.ranks == 1:  # the latent cache has the same block table, and mostly the same pages
            page_size = self.cache.kv_cache.shape[1]
            slot_map = sievemla.SlotMap(step.block_table, page_size, step.row_request)
            select(0, rows, selected, slots=work.slots_of(selected), map=slot_map)
            self.layer.selected = step.block_table.data_ptr(), rows, page_size
            return
        most = max(1, EXCHANGE_BYTES // (8 * k * shard.ranks))
        for first in range(0, rows, most):
            last = min(first + most, rows)
            mine = torch.empty((1, 2, last - first, k), dtype=torch.int32, device=q.device)  # bits of scores, positions
            select(first, last, mine[0, 1], selected_scores=mine[0, 0].view(torch.float32), shard=shard)
            everyone = get_dcp_group().all_gather(mine, dim=0)
            sievemla.merge_topk(
                everyone[:, 0].view(torch.float32),
                everyone[:, 1],
                selected=selected[first:last],
                workspace=work.scratch,
                backend=work.backend,
            )

    def _profile(self, q: torch.Tensor) -> None:
        """What a step of this size takes at its peak here and in attention, where vLLM's profile run takes less."""
        rows = q.shape[0]
        torch.empty((rows, self.layer.heads, 2 * self.layer.latent), dtype=q.dtype, device=q.device)


def _index(*given: Any) -> None:
    *inputs, layer = given
    context = get_forward_context()
    steps = context.attn_metadata
    if isinstance(steps, list):  # speculative decoding: the first is the model's own
        steps = steps[0]
    step = steps[layer] if isinstance(steps, dict) else None
    context.no_compile_layers[layer].sievemla.run(step, *inputs)


_library = torch.library.Library(OPERATOR.partition("::")[0], "DEF")
_library.define(
    "index(Tensor q, Tensor keys_and_weights, Tensor positions, Tensor cos_sin, Tensor(a!) topk, bool half_split, "
    "str layer) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("index", eager_break_during_capture(_index), "CompositeExplicitAutograd")
torch.library.register_fake(OPERATOR, lambda *args: None, lib=_library)
