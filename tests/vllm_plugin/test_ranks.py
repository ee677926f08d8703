# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Two ranks over gloo, tensor parallel and decode context parallel, against one: as test_engine.py, BOUND is there."""
from __future__ import annotations

import json
import re

import pytest
import torch

import sievemla
from sievemla.vllm import agreement, settings
from sievemla.vllm.metadata import part_of

from .conftest import EXACT, Engines, prompts
from .test_engine import same

TOKENS = 6
TWO = {"SIEVEMLA_VLLM_RANKS": "check", "OMP_NUM_THREADS": "1", "VLLM_CPU_CI_ENV": "1"}


def job(engines: Engines, name: str, topk: int | None, **more: object) -> tuple[dict, list[dict]]:
    llm = {"model": engines.model(name), "enable_prefix_caching": False, **more}
    if topk:
        llm["hf_overrides"] = {"index_topk": topk}
    return llm, [{"prompts": prompts(name), "tokens": TOKENS}]


def run(
    engines: Engines, title: str, change: str, name: str, topk: int | None, **more: object
) -> tuple[int, str, dict]:
    """Two ranks, with a change of ranks.py: exit status, log, result."""
    llm, runs = job(engines, name, topk, tensor_parallel_size=2, **more)
    done = engines.run(title, llm, runs, False, {**EXACT, **TWO, "SIEVEMLA_TEST_CHANGE": change})
    return done.status, done.log, json.loads(done.out.read_text()) if done.status == 0 else {}


@pytest.fixture(scope="session")
def alone(fresh, unselective):
    """What one rank generates, by model and index_topk (None: the checkpoint's)."""
    def of(name: str, topk: int | None) -> list[dict]:
        made = (unselective if topk else fresh)[name]["runs"][0]
        return [{**one, "tokens": one["tokens"][:TOKENS], "logprobs": one["logprobs"][:TOKENS]} for one in made]

    return of


def selections(log: str) -> dict[str, list[str]]:
    """By process, what each logged of its selections, in order."""
    by_process: dict[str, list[str]] = {}
    for process, said in re.findall(r"\((Worker[^)]*?) pid=\d+\).*(selection of .*)$", log, re.M):
        by_process.setdefault(process, []).append(said)
    return by_process


def same_on_both(log: str) -> None:
    by_rank = selections(log)
    assert len(by_rank) == 2 and len({tuple(said) for said in by_rank.values()}) == 1
    assert len(next(iter(by_rank.values()))) >= TOKENS


# index_topk of the checkpoints is 40 to 48: prompts lie on both sides of it. 512: nothing is left out.
@pytest.mark.parametrize("topk", [None, 512])
@pytest.mark.parametrize("name", ["glm5-tiny", "dsv32-tiny"])
def test_two_tensor_parallel_ranks_equal_one(engines, alone, name, topk):
    status, log, result = run(engines, f"tp-{name}-{topk}", "nothing", name, topk)
    assert status == 0, log[-6000:]
    same(result["runs"][0], alone(name, topk))
    same_on_both(log)


def test_a_rank_with_another_topk_rule_ends_the_engine(engines):
    status, log, _ = run(engines, "other-rule", "other-rule", "glm5-tiny", None)
    assert status != 0
    assert re.search(r"tensor-parallel ranks differ in selection of \S+: \w{16} on 0; \w{16} on 1", log), log[-6000:]


@pytest.mark.parametrize(
    ("name", "interleave", "topk"), [("glm5-tiny", 1, None), ("glm5-tiny", 64, 512), ("dsv32-tiny", 64, None)]
)
def test_two_context_parallel_ranks_equal_one(engines, alone, name, interleave, topk):
    """vLLM on the CPU refuses (below); with those two kernels of it in torch, its engine runs ours."""
    status, log, result = run(
        engines, f"dcp-{name}-{interleave}-{topk}", "context", name, topk, decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=interleave, dcp_comm_backend="ag_rs",
    )
    assert status == 0, log[-6000:]
    same(result["runs"][0], alone(name, topk))
    same_on_both(log)


def test_vllm_refuses_context_parallel_on_the_cpu(engines):
    status, log, _ = run(engines, "dcp-refused", "nothing", "glm5-tiny", None, decode_context_parallel_size=2)
    assert status != 0 and "Context Parallelism is not supported on CPU" in log, log[-6000:]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("interleave", [1, 16, 64])
def test_a_rank_counts_its_part(ranks, interleave):
    lengths = torch.arange(700, dtype=torch.int32)
    holder = torch.arange(700) // interleave % ranks
    for rank in range(ranks):
        expected = [int((holder[:n] == rank).sum()) for n in lengths]
        assert part_of(lengths, sievemla.Shard(rank, ranks, interleave)).tolist() == expected


def test_the_check_of_selections_is_asked_for(monkeypatch):
    def collective(mine):
        raise AssertionError("a collective without being asked")

    monkeypatch.setattr(agreement, "_of_every_rank", collective)
    agreement.check_selection("layer", torch.zeros((2, 4), dtype=torch.int32))
    monkeypatch.setenv("SIEVEMLA_VLLM_RANKS", "yes")
    with pytest.raises(ValueError, match="SIEVEMLA_VLLM_RANKS is one of trust, check: got 'yes'"):
        settings.ranks()


def test_the_class_says_what_context_parallel_asks_for():
    from sievemla.vllm.attention import SieveMlaImpl
    from sievemla.vllm.backend import SieveMlaBackend

    assert SieveMlaBackend.supports_dcp()
    assert SieveMlaImpl.can_return_lse_for_decode and SieveMlaImpl.lse_base_on_e
    assert SieveMlaImpl.supports_mtp_with_cp_non_trivial_interleave_size
