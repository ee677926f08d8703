#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""step_time.py MODEL BACKEND KV [--wait FILE] -- one decode step of one attention layer in vLLM, at 32K context.

The layer is vLLM's own module: projections, rope, indexer (scores over 32K keys, top-k), cache writes, attention,
output projection. Its forward, called inside a decode step of the engine, is captured into a CUDA graph and replayed;
L2 is flushed before each replay. Caches hold random rows, block tables random pages. --wait: until FILE is there, so
that others have left the GPU.
"""
import argparse
import os
import statistics
import time

CONTEXT, BATCHES, REPLAYS, PAGE = 32768, (1, 16, 64), 40, 64


def fill(cache) -> None:
    """Random rows of the type that the cache has; a piece of it, again and again."""
    import torch

    piece = torch.zeros((min(256, len(cache)), *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
    if cache.dtype == torch.bfloat16:
        piece.normal_()
    else:
        codes = torch.randint(0, 112, piece.shape, dtype=torch.uint8, device=cache.device)
        piece.copy_(codes + 128 * torch.randint_like(codes, 0, 2))  # e4m3 below 2^7 of both signs
        if cache.shape[-1] == 656:
            scale = torch.full((*piece.shape[:2], 4), 0.01, device=cache.device)
            rope = torch.randn((*piece.shape[:2], 64), device=cache.device).bfloat16()
            piece[..., 512:528] = scale.view(torch.uint8)
            piece[..., 528:] = rope.view(torch.uint8)
        else:  # pages of indexer keys: the codes of 64 tokens, then their scales
            scale = torch.full((len(piece), PAGE), 0.01, device=cache.device)
            piece.view(len(piece), -1)[:, PAGE * 128 :] = scale.view(torch.uint8)
    for at in range(0, len(cache), len(piece)):
        cache[at : at + len(piece)] = piece[: len(cache) - at]


def print_kernels(graph, flush) -> None:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flush.zero_()
        graph.replay()
        torch.cuda.synchronize()
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        print(f"KERNEL {event.time_range.start:.1f} {event.time_range.elapsed_us():.1f} us {event.name[:90]}")


def replay_times(call) -> list[float]:
    """Microseconds of each replay of a graph of `call`, L2 flushed before it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    print_kernels(graph, flush)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("backend")
    parser.add_argument("kv")
    parser.add_argument("--wait")
    a = parser.parse_args()
    import torch
    from vllm import LLM
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    llm = LLM(
        model=a.model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=CONTEXT, max_num_batched_tokens=2048,
        max_num_seqs=max(BATCHES), kv_cache_dtype=a.kv, gpu_memory_utilization=0.1, kv_cache_memory_bytes=9 << 30,
        enable_prefix_caching=False, disable_log_stats=True, enforce_eager=True, attention_backend=a.backend,
        hf_overrides={"max_position_embeddings": CONTEXT},
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        fill(layer.kv_cache)
    while a.wait and not os.path.exists(a.wait):
        time.sleep(0.1)
    worker = llm.llm_engine.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    modules = worker.model_runner.model.modules()
    layer_class = type(next(module for module in modules if isinstance(module, MultiHeadLatentAttentionWrapper)))
    theirs = layer_class.forward
    measured = {}

    def forward(self, positions, hidden_states, *rest):
        rows = len(hidden_states)
        if ".1." in self.prefix and rows in BATCHES and rows not in measured:
            measured[rows] = replay_times(lambda: theirs(self, positions, hidden_states, *rest))
        return theirs(self, positions, hidden_states, *rest)

    def step(worker, rows: int) -> None:
        runner = worker.model_runner
        pages = CONTEXT // PAGE
        for table in runner.input_batch.block_table.block_tables:
            order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(rows)) + 1
            table.block_table.np[:rows, :pages] = order.view(rows, pages).numpy()
        runner._dummy_run(rows, uniform_decode=True, force_attention=True, profile_seq_lens=CONTEXT)

    layer_class.forward = forward
    for rows in BATCHES:
        with torch.inference_mode():
            step(worker, rows)
        times = sorted(measured[rows])
        print(f"STEP {a.backend} {a.kv} batch {rows}: median {statistics.median(times):.1f} us, least {times[0]:.1f}, "
              f"ninth of ten {times[int(len(times) * .9)]:.1f}", flush=True)


if __name__ == "__main__":
    main()
