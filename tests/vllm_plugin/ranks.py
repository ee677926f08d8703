# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""ranks.py CHANGE JOB.json OUT.json -- engine.py, changed for a test; worker processes are forked and inherit it.

context     decode context parallel on the CPU: vLLM has the two kernels of it in Triton alone, for GPUs
other-rule  rank 1 of tensor parallel leaves out the last position that every other rank selects
nothing
"""
from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def slot_mapping(
    tokens: int, most: int, starts: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, stride: int,
    slots: torch.Tensor, KV_CACHE_BLOCK_SIZE: int, TOTAL_CP_WORLD_SIZE: int, TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int, **named: Any,
) -> None:
    run, ranks = CP_KV_CACHE_INTERLEAVE_SIZE, TOTAL_CP_WORLD_SIZE
    slots.fill_(-1)
    count = int(starts[-1])
    p = positions[:count]
    request = torch.searchsorted(starts[1:].long(), torch.arange(count), right=True)
    local = p // (run * ranks) * run + p % run
    page, offset = local // KV_CACHE_BLOCK_SIZE, local % KV_CACHE_BLOCK_SIZE
    found = table[request, page].long() * KV_CACHE_BLOCK_SIZE + offset
    slots[:count] = torch.where(p // run % ranks == TOTAL_CP_RANK, found, -1)


def correct_attn_out(
    out: torch.Tensor, lses: torch.Tensor, rank: int, context: Any, is_lse_base_on_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    assert is_lse_base_on_e
    lse = lses.logsumexp(0)
    weight = (lses[rank] - lse).exp().nan_to_num(0)[..., None]
    return torch.where(weight > 0, out * weight, 0), lse


def context_parallel() -> None:
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._compute_slot_mapping_kernel_impl = slot_mapping
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

if __name__ == "__main__":
    CHANGES[sys.argv.pop(1)]()
    runpy.run_path(str(Path(__file__).with_name("engine.py")), run_name="__main__")
