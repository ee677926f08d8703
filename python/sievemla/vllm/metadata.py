# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""What the layers need to know about a step, made once a step.

Every token is served row by row, so a row knows its request and how many positions it sees; nothing depends on which
rows are prefill, decode or speculative. All values on the device live in buffers that stay where they are, and come
from tensors on the device: a captured graph may read them, and nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

import sievemla

from .unpacked import LEAST_ROWS, Span, copy_of, spans_of


def shard_of(parallel: Any) -> sievemla.Shard:
    """The positions that this process holds of every context."""
    from vllm.distributed.parallel_state import get_dcp_group

    if parallel.decode_context_parallel_size == 1:
        return sievemla.Shard()
    group = get_dcp_group()
    return sievemla.Shard(group.rank_in_group, group.world_size, parallel.cp_kv_cache_interleave_size)


@dataclass
class StepMetadata(AttentionMetadata):
    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # [requests + 1] i32
    seq_lens: torch.Tensor  # [requests] i32
    block_table: torch.Tensor  # [requests, max_pages] i32
    slot_mapping: torch.Tensor  # [tokens] i64, -1: not cached
    row_request: torch.Tensor  # [tokens] i32; rows of padding name no request
    row_length: torch.Tensor  # [tokens] i32: positions here that the row sees, itself included; 0 for padding
    longest: int  # no row_length is more
    topk_tokens: int
    # vLLM's word for rows that go through forward_mqa: here all of them.
    num_decodes: int
    num_decode_tokens: int
    starts: Any = None  # query_start_loc and seq_lens (or more) on the host, where vLLM has both
    lengths: Any = None
    spans: dict[tuple[int, int], list[Span]] = field(default_factory=dict)  # by (page, capacity)
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    prefill_max_seq_len: int = 0
    prefill: None = None
    decode: None = None

    def spans_over(self, page: int, capacity: int) -> list[Span]:
        """The step's rows by what they read: the cache, or a copy of `capacity` rows at most."""
        if captured(self.block_table):
            return []
        key = page, capacity
        if key not in self.spans:
            self.spans[key] = self._spans(page, capacity)
        return self.spans[key]

    def _spans(self, page: int, capacity: int) -> list[Span]:
        if self.max_query_len < LEAST_ROWS or self.lengths is None:
            return []
        starts, lengths = self.starts[: self.num_reqs + 1], self.lengths[: self.num_reqs]
        lengths = lengths.clamp(max=page * self.block_table.shape[1])  # vLLM's may be an upper bound
        spans = spans_of(starts.tolist(), lengths.tolist(), page, capacity)
        if spans:
            spans[-1].rows = slice(spans[-1].rows.start, self.num_actual_tokens)  # and padding
        for span in spans:
            if span.pages:
                span.copy = copy_of(span, self.block_table, page)
        return spans


def captured(tensor: torch.Tensor) -> bool:
    """Is what reads this captured into a CUDA graph? Its replays have other lengths, so all rows read the cache."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def rows_of(starts: torch.Tensor, lengths: torch.Tensor, request: torch.Tensor, seen: torch.Tensor) -> None:
    """Fills request and seen, [rows], from starts [requests + 1] and lengths [requests]."""
    ends = starts[1:]
    row = torch.arange(request.shape[0], dtype=torch.int32, device=request.device)
    torch.searchsorted(ends, row, right=True, out_int32=True, out=request)
    mine = request.clamp(max=ends.shape[0] - 1).long()
    torch.mul(lengths[mine] - ends[mine] + row + 1, row < ends[-1], out=seen)


def part_of(lengths: torch.Tensor, shard: sievemla.Shard) -> torch.Tensor:
    """How many of the first `lengths` positions are on this rank of decode context parallel."""
    turn = shard.ranks * shard.interleave
    rest = lengths % turn - shard.rank * shard.interleave
    return lengths // turn * shard.interleave + rest.clamp(0, shard.interleave)


class StepBuilder(AttentionMetadataBuilder[StepMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.shard = shard_of(vllm_config.parallel_config)
        self.topk = vllm_config.model_config.hf_text_config.index_topk
        self.row_request = torch.zeros(rows, dtype=torch.int32, device=device)
        self.row_length = torch.zeros(rows, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support if vllm_config.device_config.device_type == "cuda" else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        common = common_attn_metadata
        rows = common.num_actual_tokens
        request, length = self.row_request[:rows], self.row_length[:rows]
        rows_of(common.query_start_loc, common.seq_lens, request, length)
        longest = common.max_seq_len
        if self.shard.ranks > 1:
            length.copy_(part_of(length, self.shard))
            longest = -(-longest // (self.shard.ranks * self.shard.interleave)) * self.shard.interleave
        return StepMetadata(
            num_actual_tokens=rows,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            row_request=request,
            row_length=length,
            longest=longest,
            topk_tokens=self.topk,
            num_decodes=common.num_reqs,
            num_decode_tokens=rows,
            starts=common.query_start_loc_cpu,
            lengths=getattr(common, "seq_lens_cpu_upper_bound", None),
        )
