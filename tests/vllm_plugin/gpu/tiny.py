#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""A small random GLM-5 on one GPU: makes it, runs it in vLLM, compares runs.

tiny.py make OUT [--shared] [--mtp]     3 layers without experts (no routing flips), weights normal with sigma 0.05;
                                        --shared: GLM-5.2's layers that share an indexer; --mtp: a draft layer
tiny.py run MODEL OUT.json [options]    prompts of 3000, 700 and 37 tokens, 8 greedy tokens each; --sets: so many times
tiny.py compare A.json B.json           how far their log-probabilities are apart, where their tokens part
tiny.py agree A.json B.json...          where B and all after it have one token: has A the same?
"""
import argparse
import atexit
import json
import os
import random
import sys

LENGTHS = (3000, 700, 37)

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "torch_dtype": "bfloat16",
    "vocab_size": 256, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 256,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 512, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "index_topk": 2048,
    "index_head_dim": 128, "index_n_heads": 32, "indexer_rope_interleave": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default",
    "rope_theta": 1e6}, "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "eos_token_id": 1,
}


def names_of_layer(config: dict, layer: int, indexer: bool) -> dict:
    """Hugging Face names and shapes of one dense decoder layer."""
    c = config
    hidden, heads, latent, q = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["q_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    index = c["index_n_heads"]
    names = {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (q, hidden), "self_attn.q_a_layernorm.weight": (q,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden), "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (nope + v), latent), "self_attn.o_proj.weight": (hidden, heads * v),
        "mlp.gate_proj.weight": (c["intermediate_size"], hidden),
        "mlp.up_proj.weight": (c["intermediate_size"], hidden),
        "mlp.down_proj.weight": (hidden, c["intermediate_size"]),
    }
    if indexer:
        names |= {
            "self_attn.indexer.wq_b.weight": (index * 128, q), "self_attn.indexer.wk.weight": (128, hidden),
            "self_attn.indexer.k_norm.weight": (128,), "self_attn.indexer.k_norm.bias": (128,),
            "self_attn.indexer.weights_proj.weight": (index, hidden),
        }
    return {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}


def make(a) -> None:
    import torch
    from safetensors.torch import save_file

    layers = 6 if a.shared else 3
    config = dict(CONFIG, num_hidden_layers=layers)
    if a.shared:  # full, full, full, shared, shared, shared
        config |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    config["first_k_dense_replace"] = layers + 1
    config["mlp_layer_types"] = ["dense"] * layers
    shapes = {"model.embed_tokens.weight": (256, 1024), "model.norm.weight": (1024,), "lm_head.weight": (256, 1024)}
    for layer in range(layers):
        shapes |= names_of_layer(config, layer, not (a.shared and layer >= 3))
    if a.mtp:
        config["num_nextn_predict_layers"] = 1
        at = f"model.layers.{layers}."
        shapes |= names_of_layer(config, layers, True)
        shapes |= {at + "enorm.weight": (1024,), at + "hnorm.weight": (1024,), at + "eh_proj.weight": (1024, 2048),
                   at + "shared_head.norm.weight": (1024,), at + "embed_tokens.weight": (256, 1024),
                   at + "shared_head.head.weight": (256, 1024)}
    made = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=torch.bfloat16)
        else:
            weights[name] = torch.empty(shape).normal_(0, 0.05, generator=made).bfloat16()
    os.makedirs(a.out, exist_ok=True)
    with open(os.path.join(a.out, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
    save_file(weights, os.path.join(a.out, "model.safetensors"), metadata={"format": "pt"})


def run(a) -> None:
    if a.no_deep_gemm:
        sys.modules["deep_gemm"] = sys.modules["vllm.third_party.deep_gemm"] = None
    import torch
    from vllm import LLM, SamplingParams

    if a.flashmla_route:
        take_route(a.flashmla_route)
    if a.topk_in_order:
        order_topk()
    if a.no_copies:
        from sievemla.vllm import unpacked

        unpacked.LEAST_HEADS = 1 << 30

    arguments = dict(
        model=a.model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, max_num_batched_tokens=a.batched,
        max_num_seqs=4, kv_cache_dtype=a.kv, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False, disable_log_stats=True, seed=0, enforce_eager=a.graphs == "eager",
    )
    if a.graphs not in ("eager", "default"):
        arguments["compilation_config"] = {"cudagraph_mode": a.graphs, "cudagraph_capture_sizes": [1, 2, 4]}
        if a.uncompiled:
            arguments["compilation_config"]["mode"] = 0
    if a.backend:
        arguments["attention_backend"] = a.backend
    if a.mtp:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": a.mtp,
                                           "attention_backend": a.backend}
    if a.sleep:
        arguments["enable_sleep_mode"] = True
    if a.weights_on_cpu:
        arguments["cpu_offload_gb"] = a.weights_on_cpu
    if a.offload:
        arguments |= {"kv_offloading_size": 1, "enable_prefix_caching": True}
    if a.mqa:
        arguments["attention_config"] = {"sparse_mla_force_mqa": True}
    llm = LLM(**arguments)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    served = [layer for layer in layers.values() if hasattr(layer, "get_attn_backend")]
    used = sorted({layer.get_attn_backend().__name__ for layer in served})
    prompts, *others = ([[source.randrange(2, 250) for _ in range(n)] for n in LENGTHS]
                        for source in map(random.Random, range(a.sets)))
    params = SamplingParams(max_tokens=a.tokens, temperature=0, detokenize=False, ignore_eos=True, logprobs=2,
                            prompt_logprobs=None if a.mtp or a.offload else 1)
    results, _ = generate(llm, prompts, params)
    results += [result for more in others for result in generate(llm, more, params)[0]]
    with open(a.out, "w") as file:
        json.dump({"backends": used, "results": results}, file)
    print("RESULT", used, llm.llm_engine.vllm_config.cache_config.cache_dtype,
          [r["tokens"] for r in results], f"{torch.cuda.max_memory_allocated() >> 20} MiB", flush=True)
    if a.steps:
        steady(llm, a.steps)
    if a.sleep:
        sleep_and_wake(llm, prompts, params, results)
    if a.offload:
        offload_and_reload(llm, prompts, params)


def take_route(route: str) -> None:
    """FLASHMLA_SPARSE serves an fp8_ds_mla cache by two kernels: the one for decoding, or the one for bf16 rows upon
    copies of prompts. It takes the first for all rows where a rank has few heads, else for requests of up to 256 new
    tokens at 64 heads (and decoding ones). Here all of a prompt's go one way, whatever their number."""
    from vllm.v1.attention.backends.mla import flashmla_sparse

    if route == "decode":
        flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL = 1 << 30
        return
    builder = flashmla_sparse.FlashMLASparseMetadataBuilder
    theirs = builder._init_reorder_batch_threshold
    builder._init_reorder_batch_threshold = lambda self, threshold, **named: theirs(self, 1, **named)


def order_topk() -> None:
    """vLLM's top-k writes its positions in any order, another one in each run, and of equal scores at its threshold
    takes any. Here attention gets them in ascending order, -1 behind them, and of equal scores the lowest: both as ours
    has them. Only how many rows the latter changes is counted; a row whose set is wrong otherwise stays, and is too."""
    import torch
    from vllm import _custom_ops as ops

    counts = dict.fromkeys(("rows", "other equals", "wrong"), 0)

    def order(logits, starts, ends, positions) -> None:
        found = in_order(logits, starts, ends, positions)
        for name, count in zip(counts, found):
            counts[name] += int(count)

    prefill, decode = ops.top_k_per_row_prefill, torch.ops._C.cooperative_topk

    def top_k_per_row_prefill(logits, starts, ends, positions, *rest) -> None:
        prefill(logits, starts, ends, positions, *rest)
        order(logits, starts, ends, positions)

    def cooperative_topk(logits, lengths, positions, *rest) -> None:
        decode(logits, lengths, positions, *rest)
        ends = lengths.flatten()
        order(logits, torch.zeros_like(ends), ends, positions)

    ops.top_k_per_row_prefill, torch.ops._C.cooperative_topk = top_k_per_row_prefill, cooperative_topk
    atexit.register(lambda: print(
        f"TOPK in order: {counts['rows']} rows that see more than it takes; of equal scores others than the lowest in "
        f"{counts['other equals']}; other scores than the largest in {counts['wrong']}", flush=True))


def in_order(logits, starts, ends, positions) -> tuple:
    """Positions [rows, k], from each row's start, in place. Returns the number of rows with more than k scores, and of
    those that had others of equal scores, or other scores than the largest."""
    import torch

    width, k = logits.shape[1], positions.shape[1]
    column = torch.arange(width, device=logits.device, dtype=torch.int32)
    starts, ends = starts.int()[:, None], ends.int()[:, None]
    seen = (column >= starts) & (column < ends)
    taken = torch.zeros((len(logits), width + 1), dtype=torch.bool, device=logits.device)
    taken.scatter_(1, torch.where(positions < 0, width, positions + starts).clamp(max=width).long(), True)
    taken = taken[:, :width]
    least = torch.where(taken, logits, float("inf")).amin(1, keepdim=True)
    above, level = seen & (logits > least), seen & (logits == least)
    room = taken.sum(1, keepdim=True) - above.sum(1, keepdim=True)
    lowest = above | (level & (level.cumsum(1) <= room))
    many = (ends - starts).clamp(min=0)[:, 0]
    right = ((taken & ~level) == above).all(1) & (taken.sum(1) == many.clamp(max=k))
    wanted = torch.where(right[:, None], lowest, taken)
    ordered = torch.where(wanted, column - starts, width).sort(1).values[:, :k]
    positions.fill_(-1)
    positions[:, : ordered.shape[1]] = torch.where(ordered < width, ordered, -1)
    return (many > k).sum(), (right & (lowest != taken).any(1)).sum(), (~right).sum()


def steady(llm, steps: int) -> None:
    """Device memory after so many mixed steps, against right after the first requests."""
    import torch
    from vllm import SamplingParams

    source = random.Random(1)
    before = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    for _ in range(-(-steps // 25)):
        prompts = [{"prompt_token_ids": [source.randrange(2, 250) for _ in range(source.choice((5, 70, 700, 3000)))]}
                   for _ in range(6)]  # more than run at once: prefills join decoding requests
        params = [SamplingParams(max_tokens=source.randrange(4, 25), temperature=0, detokenize=False, ignore_eos=True)
                  for _ in prompts]
        llm.generate(prompts, params, use_tqdm=False)
    after = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    print(f"MEMORY over about {steps} steps: reserved by torch {(after[1] - before[1]) >> 20:+d} MiB, free on the "
          f"device (shared with other processes) {(after[0] - before[0]) >> 20:+d} MiB")


def generate(llm, prompts: list, params) -> tuple[list, list[int]]:
    """The results, and how many tokens of each prompt were in a cache."""
    results = []
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    for output in outputs:
        made, seen = output.outputs[0], output.prompt_logprobs or []
        results.append({
            "prompt": [of[token].logprob for of, token in zip(seen[1:], output.prompt_token_ids[1:])],
            "tokens": list(made.token_ids),
            "logprobs": [of[token].logprob for of, token in zip(made.logprobs, made.token_ids)],
            "best": [best_of({token: one.logprob for token, one in of.items()}) for of in made.logprobs],
        })
    return results, [output.num_cached_tokens for output in outputs]


def best_of(logprobs: dict) -> list:
    """The two best tokens, each with its log-probability."""
    return sorted(logprobs.items(), key=lambda one: -one[1])[:2]


def lead_of(best: list) -> float:
    return best[0][1] - best[1][1]


def parting(one: list, other: list) -> int:
    """Where two lists of tokens part first; their length where they do not."""
    return next((i for i, (u, v) in enumerate(zip(one, other)) if u != v), len(one))


def again(llm, prompts: list, params, results: list) -> list:
    """How far the logprobs of the same requests are from those results'."""
    return [
        max(abs(u - v) for u, v in zip(made["logprobs"], was["logprobs"])) if made["tokens"] == was["tokens"]
        else "other tokens"
        for made, was in zip(generate(llm, prompts, params)[0], results)
    ]


def sleep_and_wake(llm, prompts: list, params, results: list) -> None:
    llm.sleep(level=1)
    llm.wake_up()
    print("SLEEP level 1, |dlogp| after waking:", again(llm, prompts, params, results), flush=True)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    print("SLEEP level 2, |dlogp| after waking:", again(llm, prompts, params, results), flush=True)


def offload_and_reload(llm, prompts: list, params) -> None:
    """Whole pages from the GPU's cache, then, after that is dropped, the same pages from the CPU's. One prompt at a
    time: what is computed together with it changes its bits."""
    def each() -> tuple[list, list[int]]:
        one = [generate(llm, [prompt], params) for prompt in prompts]
        return [results[0] for results, _ in one], [cached[0] for _, cached in one]

    here, cached = each()
    llm.reset_prefix_cache()
    back, reloaded = each()
    apart = [max(abs(u - v) for u, v in zip(x["logprobs"], y["logprobs"])) for x, y in zip(here, back)]
    print(f"OFFLOAD tokens cached {cached}, reloaded from the CPU {reloaded}, equal tokens "
          f"{[x['tokens'] == y['tokens'] for x, y in zip(here, back)]}, |dlogp| {apart}", flush=True)


def compare(a) -> None:
    first, second = (json.load(open(path)) for path in (a.first, a.second))
    names = f"COMPARE {os.path.basename(a.first)} {os.path.basename(a.second)}"
    pairs = list(zip(first["results"], second["results"]))
    for i, length in enumerate(LENGTHS):
        sets = pairs[i :: len(LENGTHS)]
        for number, pair in enumerate(sets):
            print_distance(f"{names} {length}" + f" set {number}" * (len(sets) > 1), [pair])
        if len(sets) > 1:
            print_distance(f"{names} {length} all sets", sets)
        if len(sets) > 1 and length > CONFIG["index_topk"]:  # behind it vLLM does not repeat itself
            for what, part in (("up to", slice(CONFIG["index_topk"])), ("above", slice(CONFIG["index_topk"], None))):
                cut = [tuple({**one, "prompt": one["prompt"][part]} for one in pair) for pair in sets]
                print_distance(f"{names} {length} {what} index_topk", cut)


def print_distance(what: str, pairs: list) -> None:
    apart = sorted(abs(u - v) for x, y in pairs for u, v in zip(x["prompt"], y["prompt"])) or [float("nan")]
    firsts = [parting(x["tokens"], y["tokens"]) for x, y in pairs]
    equal = sum(firsts)
    leads = [f"{max(lead_of(x['best'][i]), lead_of(y['best'][i])):.4f}"
             for i, (x, y) in zip(firsts, pairs) if i < len(x["tokens"])]
    print(f"{what}: prompt |dlogp| mean {sum(apart) / len(apart):.4f} p99 {apart[int(len(apart) * .99)]:.4f} max "
          f"{apart[-1]:.4f}; equal tokens {equal}/{sum(len(x['tokens']) for x, _ in pairs)}"
          + (f", left at leads {' '.join(leads)}" if leads else ""))


def agree(a) -> None:
    """Tokens up to where the others part: behind that they go on from other texts. Where the one parts from them first,
    the lead of the best token in the first of the others, and how far the others are apart there themselves: the
    largest difference of a log-probability of the two best tokens, and of that lead."""
    first, *others = ([dict(r) for r in json.load(open(path))["results"]] for path in (a.first, *a.others))
    names = " ".join(os.path.basename(path).removesuffix(".json") for path in (a.first, *a.others))
    for length_at, length in enumerate(LENGTHS):
        agreed = equal = total = 0
        left = []
        for number, at in enumerate(range(length_at, len(first), len(LENGTHS))):
            mine, theirs = first[at], [other[at] for other in others]
            together = min(parting(theirs[0]["tokens"], other["tokens"]) for other in theirs)
            until = min(together, parting(mine["tokens"], theirs[0]["tokens"]))
            agreed, equal, total = agreed + together, equal + until, total + len(mine["tokens"])
            if until < together:
                best = [dict(other["best"][until]) for other in theirs]
                apart = max(abs(u[token] - v[token]) for u in best for v in best for token in u.keys() & v.keys())
                leads = [lead_of(other["best"][until]) for other in theirs]
                left.append(f"set {number} token {until} lead {leads[0]:.4f} apart {apart:.4f} "
                            f"leads {min(leads):.4f} to {max(leads):.4f}")
        print(f"AGREE {names}: {length} tokens: the others agree on {agreed} of {total}, the first has {equal} of them"
              + "".join(f"; left at {one}" for one in left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("make")
    p.add_argument("out")
    p.add_argument("--shared", action="store_true")
    p.add_argument("--mtp", action="store_true")
    p.set_defaults(call=make)
    p = commands.add_parser("run")
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--backend")
    p.add_argument("--kv", default="auto")
    p.add_argument("--batched", type=int, default=4096)
    p.add_argument("--tokens", type=int, default=8)
    p.add_argument("--sets", type=int, default=1, help="of prompts, each other ones")
    p.add_argument("--graphs", default="eager", help="eager, default, or a cudagraph_mode")
    p.add_argument("--uncompiled", action="store_true", help="graphs without torch.compile")
    p.add_argument("--mtp", type=int, default=0)
    p.add_argument("--steps", type=int, default=0, help="so many mixed steps more: is device memory flat?")
    p.add_argument("--sleep", action="store_true", help="sleep, wake, and the same again")
    p.add_argument("--weights-on-cpu", type=float, default=0, help="GiB of them, read from there in each step")
    p.add_argument("--offload", action="store_true", help="cached on the CPU, dropped on the GPU, and the same again")
    p.add_argument("--no-deep-gemm", action="store_true", help="its imports fail")
    p.add_argument("--mqa", action="store_true", help="vLLM's own backends: no dense prefill of short prompts")
    p.add_argument("--flashmla-route", choices=("decode", "copies"), help="of FLASHMLA_SPARSE over fp8_ds_mla")
    p.add_argument("--topk-in-order", action="store_true", help="vLLM's own backends: positions ascending")
    p.add_argument("--no-copies", action="store_true", help="ours over fp8_ds_mla: prompts read the cache itself")
    p.set_defaults(call=run)
    p = commands.add_parser("compare")
    p.add_argument("first")
    p.add_argument("second")
    p.set_defaults(call=compare)
    p = commands.add_parser("agree")
    p.add_argument("first")
    p.add_argument("others", nargs="+")
    p.set_defaults(call=agree)
    a = parser.parse_args()
    a.call(a)


if __name__ == "__main__":
    main()
