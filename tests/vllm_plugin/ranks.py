# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""What an engine of several ranks runs otherwise in these tests, named by SIEVEMLA_TEST_CHANGE; engine.py imports it.
Its workers are forked, and so have the change and need not import vLLM again.

context     decode context parallel on the CPU: vLLM has the two kernels of it in Triton alone, for GPUs
other-rule  rank 1 of tensor parallel leaves out the last position that every other rank selects
nothing
"""
from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch
from vllm.v1.executor import multiproc_executor


def slot_mapping(
    tokens: int, most: int, starts: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, stride: int,
    slots: torch.Tensor, page_size: int, ranks: int, rank: int, run: int, pad: int, block: int,
) -> None:
    """ComputeSlotMappingKernel; `run` is the interleave size."""
    slots.fill_(pad)
    count = int(starts[-1])
    p = positions[:count]
    request = torch.searchsorted(starts[1:].long(), torch.arange(count), right=True)
    local = p // (run * ranks) * run + p % run
    found = table[request, local // page_size].long() * page_size + local % page_size
    slots[:count] = torch.where(p // run % ranks == rank, found, pad)


def correct_attn_out(
    out: torch.Tensor, lses: torch.Tensor, rank: int, context: Any, is_lse_base_on_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    assert is_lse_base_on_e
    lse = lses.logsumexp(0)
    weight = (lses[rank] - lse).exp().nan_to_num(0)[..., None]
    return torch.where(weight > 0, out * weight, 0), lse


def context_parallel() -> None:
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._compute_slot_mapping_kernel_impl = slot_mapping  # before vLLM's platform takes it
    from vllm.v1.attention.ops import dcp

    dcp.correct_attn_out = correct_attn_out


def other_rule() -> None:
    import sievemla

    select = sievemla.select

    def changed(*args: Any, positions: torch.Tensor, **named: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        select(*args, positions=positions, **named)
        if get_tp_group().rank_in_group == 1:
            last = positions.amax(1, keepdim=True)
            positions.masked_fill_(positions == last, -1)

    sievemla.select = changed


CHANGES = {"context": context_parallel, "other-rule": other_rule, "nothing": lambda: None}
CHANGES[os.environ["SIEVEMLA_TEST_CHANGE"]]()
multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
