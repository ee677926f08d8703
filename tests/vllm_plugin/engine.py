# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""engine.py JOB.json OUT.json -- one vLLM engine, as a process of its own.
engine.py --fork               -- one for each line of the input, {"job", "out", "log", "env"}, in a child that need not
                                  import vLLM again; answers with the child's exit status

JOB: {"llm": {arguments of LLM}, "runs": [{"prompts": [[ids], ...], "tokens": n}, ...]}
OUT: {"backends": [...], "runs": [[{"tokens", "logprobs", "prompt_logprobs", "cached"}, ...], ...]}
"""
import json
import os
import signal
import sys
import traceback


SECONDS = 600  # after which an engine is killed


def serve() -> None:
    import vllm  # noqa: F401

    from vllm import LLM  # noqa: F401 -- all of it, but no thread and no memory yet

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            serve_one(asked)
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        answers.flush()


def serve_one(asked: dict) -> None:
    status = 1
    try:
        signal.alarm(SECONDS)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(asked["env"])
        if "SIEVEMLA_TEST_CHANGE" in os.environ:
            import ranks  # noqa: F401
        run(asked["job"], asked["out"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(job_path: str, out_path: str) -> None:
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
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if sys.argv[1:] == ["--fork"]:
        serve()
    else:
        run(*sys.argv[1:])
