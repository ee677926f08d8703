# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""engine.py JOB.json OUT.json -- one vLLM engine, as a process of its own.

JOB: {"llm": {arguments of LLM}, "runs": [{"prompts": [[ids], ...], "tokens": n}, ...]}
OUT: {"backends": [...], "runs": [[{"tokens", "logprobs", "prompt_logprobs", "cached"}, ...], ...]}
"""
import json
import os
import sys


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    job_path, out_path = sys.argv[1:]
    with open(job_path) as file:
        job = json.load(file)
    from vllm import LLM, SamplingParams

    llm = LLM(
        skip_tokenizer_init=True, max_num_seqs=8, disable_log_stats=True, seed=0,
        **{"enforce_eager": True, **job["llm"]},
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    backends = sorted({type(layer).__name__ + ": " + layer.get_attn_backend().__name__
                       for layer in layers.values() if hasattr(layer, "get_attn_backend")})
    runs = []
    for run in job["runs"]:
        params = SamplingParams(
            max_tokens=run["tokens"], temperature=0, detokenize=False, ignore_eos=True, logprobs=1,
            prompt_logprobs=None if run.get("cached") else 1,  # prompt logprobs keep vLLM from using cached prefixes
        )
        runs.append([result_of(o) for o in llm.generate([{"prompt_token_ids": p} for p in run["prompts"]], params)])
    with open(out_path, "w") as file:
        json.dump({"backends": backends, "runs": runs}, file)


def result_of(output) -> dict:
    made = output.outputs[0]
    prompt = output.prompt_logprobs or []
    return {
        "tokens": list(made.token_ids),
        "logprobs": [of[token].logprob for of, token in zip(made.logprobs, made.token_ids)],
        "prompt_logprobs": [of[token].logprob for of, token in zip(prompt[1:], output.prompt_token_ids[1:])],
        "cached": output.num_cached_tokens,
    }


if __name__ == "__main__":  # vLLM may start further processes of this file
    main()
