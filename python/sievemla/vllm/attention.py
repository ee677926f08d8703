# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""One layer's attention, and its writes into the latent cache. The caller absorbs W_UK and W_UV: only latents here."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import MLAAttentionImpl

import sievemla

from . import agreement, selftest, settings, shared_layers, unpacked, versions
from .indexer import adopt
from .metadata import StepMetadata, shard_of
from .report import report
from .serves import PAGE, pooled_keys
from .workspace import Bounds, Layer, workspace_of

_written: set[int] = set()  # the selections that a layer of this process writes


class SieveMlaImpl(MLAAttentionImpl[StepMetadata]):
    is_sparse = True
    supports_dense_mha_prefill = False  # every row goes through forward_mqa
    masked_mha_available = False
    supports_pcp = False
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True  # a row knows its own length
    can_return_lse_for_decode = True
    supports_quant_query_input = False
    lse_base_on_e = True
    index_group = None
    q_pad_num_heads = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *ignored: Any,
        kv_cache_dtype: str,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **named: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.latent = self.kv_lora_rank = kv_lora_rank
        self.rope = qk_rope_head_dim
        self.indexer = indexer
        self._topk = topk_indices_buffer
        config = get_current_vllm_config()
        if config.parallel_config.enable_dbo:
            raise ValueError("sievemla: dual-batch overlap shares one workspace between two batches: drop --enable-dbo")
        if pooled := pooled_keys(config.model_config.hf_text_config):
            raise ValueError(pooled)
        buffer = self.topk_indices()
        if indexer is not None:
            _written.add(buffer.data_ptr())
        elif buffer.data_ptr() not in _written:
            stages = config.parallel_config.pipeline_parallel_size
            raise ValueError(shared_layers.refusal(config.model_config.hf_text_config, stages))
        packed = kv_cache_dtype == "fp8_ds_mla" and qk_rope_head_dim > 0
        context = config.model_config.max_model_len
        self.capacity = unpacked.capacity_of(buffer.device, num_heads, context, PAGE) if packed else 0
        self.layer = Layer(workspace_of(buffer.device), shard_of(config.parallel_config), num_heads, kv_lora_rank)
        self.layer.workspace.claim(
            Bounds(
                tokens=config.scheduler_config.max_num_batched_tokens,
                context=context,
                topk=buffer.shape[1],
                heads=num_heads * self.layer.shard.ranks,  # vLLM gathers all ranks' queries
                index_heads=config.model_config.hf_text_config.index_n_heads,
                latent=kv_lora_rank,
                rope=qk_rope_head_dim,
                ranks=self.layer.shard.ranks,
                unpacked=self.capacity,
            )
        )
        self.scale_rule = versions.contract().latent_scale
        if indexer is not None:
            adopt(indexer, self.layer)
            shape = selftest.Shape(
                heads=num_heads,
                index_heads=indexer.n_head,
                topk=buffer.shape[1],
                latent=kv_lora_rank,
                rope=qk_rope_head_dim,
                kv_format=self.format(torch.uint8 if kv_cache_dtype == "fp8_ds_mla" else config.model_config.dtype),
                index_format=settings.index_format(),
            )
            agreement.check_once(agreement.facts(shape.kv_format, shape.index_format, self.scale_rule))
            selftest.run_once(shape, self.layer.workspace.backend, buffer.device)
            report(self.layer.workspace, kv_cache_dtype, config)

    def topk_indices(self) -> torch.Tensor:
        """[rows, topk] i32, positions in the request. Looked up at each call: a draft model's is exchanged later."""
        buffer = self._topk if self.indexer is None else self.indexer.topk_indices_buffer
        assert buffer is not None
        return buffer

    def format(self, storage: torch.dtype) -> Any:
        """The row type of a cache of this dtype."""
        packed = "fp8_ds_mla" if self.rope else "fp8_nope"
        return {torch.float32: "f32", torch.bfloat16: "bf16"}.get(storage, packed)

    def cache(self, pages: torch.Tensor) -> sievemla.KvCache:
        return sievemla.KvCache(pages, self.format(pages.dtype), self.latent, self.rope)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *ignored: Any,
        **named: Any,
    ) -> None:
        """kv_c_normed [tokens, latent], k_pe [tokens, 1, rope] rotated, slot_mapping [rows <= tokens]."""
        if kv_cache.numel() == 0:  # the profile run
            return
        slots = slot_mapping.flatten()
        rows = slots.shape[0]
        sievemla.write_latent(
            kv_c_normed[:rows],
            slots,
            self.cache(kv_cache),
            rope=k_pe.reshape(k_pe.shape[0], -1)[:rows] if self.rope else None,
            scale=self.scale_rule,
            backend=self.layer.workspace.backend,
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: StepMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q: (nope [rows, heads, latent], rope [rows, heads, rope]) or both in one -> out [rows, heads, latent].

        With decode context parallel: of the selected rows that are here, and their lse [rows, heads], natural.
        """
        nope, rope = q if isinstance(q, tuple) else (q, None)
        rows, heads = nope.shape[:2]
        positions = self.topk_indices()[:rows]
        work = self.layer.workspace
        work.join()
        slots = work.slots_of(positions)
        counts, lse = None, None
        request = attn_metadata.row_request[:rows]
        page_size = kv_c_and_k_pe_cache.shape[1]
        cache = self.cache(kv_c_and_k_pe_cache)
        out = torch.empty((rows, heads, self.latent), dtype=nope.dtype, device=nope.device)
        selected, self.layer.selected = self.layer.selected, None
        if self.layer.shard.ranks == 1:
            spans = attn_metadata.spans_over(page_size, self.capacity) if self.capacity else []
            if spans:
                self._attend_by_spans(spans, nope, rope, kv_c_and_k_pe_cache, out, attn_metadata, positions)
                return out, None
            if selected != (attn_metadata.block_table.data_ptr(), rows, page_size):
                slot_map = sievemla.SlotMap(attn_metadata.block_table, page_size, request)
                sievemla.positions_to_slots(positions, slot_map, slots, backend=work.backend)
        else:
            slot_map = sievemla.SlotMap(attn_metadata.block_table, page_size, request, **vars(self.layer.shard))
            counts = work.counts[:rows]
            sievemla.shard_slots(positions, slot_map, slots, counts=counts, backend=work.backend)
            lse = torch.empty((rows, heads), dtype=torch.float32, device=nope.device)
        self._attend(nope, rope, cache, slots, out, counts, lse)
        return out, lse

    def _attend(
        self,
        nope: torch.Tensor,
        rope: torch.Tensor | None,
        cache: sievemla.KvCache,
        slots: torch.Tensor,
        out: torch.Tensor,
        counts: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        sievemla.attention(
            nope,
            cache,
            out,
            scale=self.scale,
            slots=slots,
            topk_length=counts,
            q_rope=rope if self.rope else None,
            lse=lse,
            round_weights=True,  # as vLLM's own kernels have them
            workspace=self.layer.workspace.scratch,
            backend=self.layer.workspace.backend,
        )

    def _attend_by_spans(
        self,
        spans: list[unpacked.Span],
        nope: torch.Tensor,
        rope: torch.Tensor | None,
        pages: torch.Tensor,
        out: torch.Tensor,
        step: StepMetadata,
        positions: torch.Tensor,
    ) -> None:
        """As forward_mqa, where some rows read a copy of theirs."""
        work = self.layer.workspace
        for span in spans:
            rows, table, cache = span.rows, step.block_table, self.cache(pages)
            if span.copy is not None:
                copied = work.unpacked[: len(span.copy.slots)]
                sievemla.gather_latent(cache, span.copy.slots, copied, backend=work.backend)
                table, cache = span.copy.table, self.cache(copied.view(-1, pages.shape[1], copied.shape[1]))
            slots = work.slots_of(positions)[rows]
            slot_map = sievemla.SlotMap(table, pages.shape[1], step.row_request[rows])
            sievemla.positions_to_slots(positions[rows], slot_map, slots, backend=work.backend)
            self._attend(nope[rows], None if rope is None else rope[rows], cache, slots, out[rows])

    # Undeclared, but called or read on every sparse layer.

    def record_logical_topk_ready(self) -> None:
        pass

    def reserve_workspace(self, *ignored: Any, **named: Any) -> None:
        pass

    def masked_mha_workspace_fits(self, *ignored: Any, **named: Any) -> bool:
        return False
