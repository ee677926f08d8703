# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The plugin in vLLM on the CPU, float32: against vLLM's dense MLA, `sievemla run` and transformers' goldens.

BOUND is on log-probabilities. Float32 rounding over two layers moves them by some 1e-5; a wrong eps, rope style,
selected row or cache slot by 1e-2 and more (what_mistakes_look_like in the goldens' meta.json).
"""
from __future__ import annotations

from importlib.metadata import version

import pytest

from .conftest import EXACT, TOKENS, golden, prompts, reference

BOUND = 1e-4
OURS = ["MLAAttention: SieveMlaBackend", "SieveMlaDeepseekV32IndexerCache: SieveMlaIndexBackend"]


def apart(one: dict, other: dict) -> float:
    assert one["tokens"] == other["tokens"]
    pairs = list(zip(one["logprobs"], other["logprobs"], strict=True))
    if one.get("prompt_logprobs") and other.get("prompt_logprobs"):
        pairs += list(zip(one["prompt_logprobs"], other["prompt_logprobs"], strict=True))
    return max(abs(a - b) for a, b in pairs)


def same(some: list[dict], others: list[dict]) -> None:
    worst = [apart(one, other) for one, other in zip(some, others, strict=True)]
    print("largest difference of a log-probability:", ", ".join(f"{d:.2g}" for d in worst))
    assert max(worst) < BOUND


@pytest.mark.parametrize("name", ["glm5-tiny", "dsv32-tiny", "glm52-tiny"])
def test_above_topk_equals_the_reference(fresh, name):
    assert fresh[name]["backends"] == OURS
    same(fresh[name]["runs"][0], [reference(name, prompt, TOKENS) for prompt in prompts(name)])


def test_above_topk_equals_transformers(fresh):
    """dsv32-tiny's config has the eps that transformers uses."""
    made = fresh["dsv32-tiny"]["runs"][0][0]
    expected = golden("dsv32-tiny")
    tokens = expected["generated_ids"].tolist()[:TOKENS]
    logprobs = expected["logits_generated"].double().log_softmax(-1)
    same([{**made, "prompt_logprobs": []}],
         [{"tokens": tokens, "logprobs": [logprobs[i, token].item() for i, token in enumerate(tokens)]}])


@pytest.mark.parametrize("name", ["glm5-tiny", "dsv32-tiny"])
def test_below_topk_equals_dense_mla_of_vllm(engines, unselective, name):
    """Every position is selected. vLLM's rotary operator for CPUs is wrong for MLA: off on both sides."""
    ours = unselective[name]
    dense = engines(
        f"{name}-dense-run",
        {"model": engines.dense(name), "attention_backend": "CPU_MLA", "block_size": 16,
         "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
        [{"prompts": prompts(name), "tokens": TOKENS}],
    )
    assert ours["backends"] == OURS
    assert not any("SieveMla" in backend for backend in dense["backends"])
    same(ours["runs"][0], dense["runs"][0])


def test_chunked_cached_and_alone_equal_whole_fresh_and_batched(engines, fresh):
    name = "glm5-tiny"
    asked = prompts(name)
    made = engines(
        "chunked",
        {"model": engines.model(name), "enable_prefix_caching": True, "enable_chunked_prefill": True,
         "max_num_batched_tokens": 32},
        [*({"prompts": [prompt], "tokens": TOKENS, "cached": True} for prompt in asked),  # alone, in chunks of 32
         {"prompts": asked, "tokens": TOKENS, "cached": True}],  # again: whole pages come from the cache
        **EXACT,
    )
    alone = [run[0] for run in made["runs"][: len(asked)]]
    again = made["runs"][-1]
    assert [one["cached"] for one in alone] == [0] * len(asked)
    assert [one["cached"] for one in again] == [(len(prompt) - 1) // 64 * 64 for prompt in asked]
    whole = [{**one, "prompt_logprobs": []} for one in fresh[name]["runs"][0]]
    same(alone, whole)
    same(again, whole)


def test_fp8_index_keys_equal_the_reference_with_fp8_index_keys(engines):
    """Scores of quantised keys lie close together; these prompts have no tie that float32 rounding decides."""
    name = "glm5-tiny"
    made = engines("fp8", {"model": engines.model(name), "enable_prefix_caching": False},
                   [{"prompts": prompts(name), "tokens": TOKENS}])
    assert "index keys fp8" in made["log"]
    same(made["runs"][0], [reference(name, prompt, TOKENS, "--index-format", "fp8") for prompt in prompts(name)])


@pytest.mark.parametrize("drafts", [1, 3])
def test_draft_tokens_change_nothing(engines, fresh, drafts):
    """Each step verifies rows of one request that see different lengths."""
    name = "glm5-tiny"
    made = engines(
        f"draft{drafts}",
        {"model": engines.with_draft_layer(name), "enable_prefix_caching": False,
         "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}},
        [{"prompts": prompts(name), "tokens": TOKENS, "cached": True}], **EXACT,
    )
    assert made["backends"] == OURS and "method='mtp'" in made["log"]
    same(made["runs"][0], [{**one, "prompt_logprobs": []} for one in fresh[name]["runs"][0]])


def test_compiled_and_in_processes_of_their_own(engines, fresh):
    """torch.compile takes the indexer as one operator; the engine and its worker are other processes than this."""
    name = "glm5-tiny"
    made = engines(
        "compiled", {"model": engines.model(name), "enable_prefix_caching": False, "enforce_eager": False},
        [{"prompts": prompts(name), "tokens": TOKENS}],
        alone=True, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_USE_BREAKABLE_CUDAGRAPH="0", VLLM_CPU_CI_ENV="1", **EXACT,
    )
    assert "CompilationMode.DYNAMO_TRACE_ONCE" in made["log"] and f"sievemla {version('sievemla')}" in made["log"]
    same(made["runs"][0], fresh[name]["runs"][0])


def test_the_log_says_what_runs(fresh):
    log = fresh["glm5-tiny"]["log"]
    for said in (f"sievemla {version('sievemla')}", "vLLM 0.32.0 (cpu)", "index keys f32", "indexer rope interleaved",
                 "rotary_embedding is switched off"):
        assert said in log
    assert "sievemla" not in fresh["dsv32-tiny"]["log"].partition("lacks indexer_rope_interleave")[1]
