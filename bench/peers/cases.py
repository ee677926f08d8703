# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The cases of the peer benchmark: what a key means and how much work it stands for.

A key is stable: SieveMLA's own bench emits the same one for the same work, so two files can be compared.

    attend.decode.<kv>.h<heads>.b<requests>.topk<k>[.graph]   one query token a request, k random cache slots each
    attend.prefill.<kv>.h<heads>.s<tokens>.kv<keys>.topk<k>   s query tokens over one cache of kv rows
    attend.dense.<kv>.h<heads>.b<requests>.ctx<keys>          one query token a request, all keys, pages of 64 rows
    index.prefill.fp8.h<heads>.s<tokens>.kv<keys>             indexer scores of s tokens, causal, contiguous keys
    index.decode.fp8.h<heads>.b<requests>.ctx<keys>           indexer scores of one token a request, pages of 64 keys
    index.decode.fp8.h<heads>.mixed | .even                   64 requests: one with 131,072 keys, 63 with 2,048 | evenly
    topk.f32.rows<rows>.len<scores>.k<k>[.graph]              exact top-k of each row
    select.prefill.fp8.h<heads>.s<tokens>.kv<keys>.k<k>       index.prefill and the positions of its top-k, in chunks
    chain.fp8.h<heads>.b<requests>.ctx<keys>.k<k>[.graph]     index.decode and the positions of its top-k
    step.fp8.h<heads>.H<H>.b<requests>.ctx<keys>.k<k>[.graph] chain to slots, then attend.decode of H heads, fp8_ds_mla

CPU keys put `cpu.` in front and `.t<threads>` behind. `.graph` is the time inside a CUDA graph.
"""

import subprocess
import sys
from dataclasses import dataclass

TOPK = 2048
SPAN = 32768  # cache rows a request owns in attend.decode; its slots are drawn from them
ROW_BYTES = {"fp8_ds_mla": 656, "bf16": 1152, "f16": 1152}
QK_DIM, V_DIM = 576, 512
INDEX_DIM, INDEX_KEY_BYTES = 128, 132


@dataclass(frozen=True)
class Case:
    key: str
    flops: float  # useful multiply-adds x 2; padding a peer has to add is not counted
    bytes: float  # what the stage has to stream, see README.md
    shape: dict

    @property
    def stage(self):
        return stage_of(self.key)

    def tflops(self, us):
        return self.flops / us / 1e6 if self.flops else None

    def tbps(self, us):
        return self.bytes / us / 1e6


def stage_of(key):
    """`attend.decode`, `index.prefill` and so on; `topk`, `chain`, `step`; with `cpu.` in front on a CPU."""
    parts = key.split(".")
    lead = parts[:1] if parts[0] == "cpu" else []
    parts = parts[len(lead):]
    return ".".join(lead + parts[:1 if parts[0] in ("topk", "chain", "step") else 2])


def decode(kv, heads, batch, graph=False):
    pairs = batch * TOPK
    return Case(f"attend.decode.{kv}.h{heads}.b{batch}.topk{TOPK}" + (".graph" if graph else ""),
                2.0 * heads * pairs * (QK_DIM + V_DIM), pairs * ROW_BYTES[kv],
                dict(kv=kv, heads=heads, batch=batch, graph=graph))


def prefill(kv, heads, tokens, keys):
    pairs = tokens * TOPK
    return Case(f"attend.prefill.{kv}.h{heads}.s{tokens}.kv{keys}.topk{TOPK}",
                2.0 * heads * pairs * (QK_DIM + V_DIM), pairs * ROW_BYTES[kv],
                dict(kv=kv, heads=heads, tokens=tokens, keys=keys))


def dense(kv, heads, batch, ctx):
    pairs = batch * ctx
    return Case(f"attend.dense.{kv}.h{heads}.b{batch}.ctx{ctx}", 2.0 * heads * pairs * (QK_DIM + V_DIM),
                pairs * ROW_BYTES[kv], dict(kv=kv, heads=heads, batch=batch, ctx=ctx))


def causal_pairs(tokens, keys):
    """Token i of the last `tokens` sees keys - tokens + i + 1 keys."""
    return tokens * (keys - tokens) + tokens * (tokens + 1) // 2


def index_prefill(heads, tokens, keys):
    pairs = causal_pairs(tokens, keys)
    return Case(f"index.prefill.fp8.h{heads}.s{tokens}.kv{keys}", 2.0 * heads * INDEX_DIM * pairs, 4.0 * pairs,
                dict(heads=heads, tokens=tokens, keys=keys))


def select_prefill(heads, tokens, keys):
    pairs = causal_pairs(tokens, keys)
    return Case(f"select.prefill.fp8.h{heads}.s{tokens}.kv{keys}.k{TOPK}", 2.0 * heads * INDEX_DIM * pairs, 4.0 * pairs,
                dict(heads=heads, tokens=tokens, keys=keys))


def index_decode(heads, batch, ctx):
    return index_lengths(heads, (ctx,) * batch, f"b{batch}.ctx{ctx}")


def index_lengths(heads, lengths, name):
    pairs = sum(lengths)
    return Case(f"index.decode.fp8.h{heads}.{name}", 2.0 * heads * INDEX_DIM * pairs, float(INDEX_KEY_BYTES) * pairs,
                dict(heads=heads, batch=len(lengths), ctx=max(lengths), lengths=lengths))


def chain(heads, batch, ctx, graph=False):
    scores = index_decode(heads, batch, ctx)
    return Case(f"chain.fp8.h{heads}.b{batch}.ctx{ctx}.k{TOPK}" + (".graph" if graph else ""), scores.flops,
                scores.bytes, dict(scores.shape, graph=graph))


def step(heads, attend_heads, batch, ctx, graph=False):
    scores, attend = index_decode(heads, batch, ctx), decode("fp8_ds_mla", attend_heads, batch)
    return Case(f"step.fp8.h{heads}.H{attend_heads}.b{batch}.ctx{ctx}.k{TOPK}" + (".graph" if graph else ""),
                scores.flops + attend.flops, scores.bytes + attend.bytes,
                dict(scores.shape, attend_heads=attend_heads, graph=graph))


def topk(rows, length, graph=False):
    return Case(f"topk.f32.rows{rows}.len{length}.k{TOPK}" + (".graph" if graph else ""), 0.0, 4.0 * rows * length,
                dict(rows=rows, len=length, graph=graph))


def cpu(case, threads):
    return Case(f"cpu.{case.key}.t{threads}", case.flops, case.bytes, dict(case.shape, threads=threads))


def gpu_cases():
    k = 1024
    cases = [decode("fp8_ds_mla", h, b) for h in (64, 128) for b in (1, 4, 16, 64, 128, 256)]
    cases += [decode("fp8_ds_mla", h, b) for h in (8, 16, 32) for b in (1, 16, 64, 128, 256)]  # tensor-parallel slices
    cases += [decode("fp8_ds_mla", h, 1, graph=True) for h in (16, 64, 128)]
    cases += [decode("bf16", h, b) for h in (64, 128) for b in (1, 4, 16, 64, 128)]
    cases += [decode("bf16", 64, 1, graph=True)]
    cases += [prefill("bf16", h, 4 * k, n * k) for h in (64, 128) for n in (8, 32, 128)]
    cases += [dense("bf16", 64, 64, 8 * k), dense("bf16", 64, 1, 128 * k)]
    cases += [index_prefill(h, s * k, n * k) for h in (32, 64) for s, n in ((2, 32), (4, 32), (2, 128))]
    cases += [index_decode(h, b, n * k) for h in (32, 64) for b in (1, 16, 64, 128) for n in (8, 64, 128)
              if b * n <= 8192]
    mixed = (128 * k,) + (2 * k,) * 63
    cases += [index_lengths(32, mixed, "mixed"), index_lengths(32, (sum(mixed) // 64,) * 64, "even")]
    cases += [topk(r, n * k) for r, n in ((1, 8), (1, 64), (1, 128), (1, 1024), (16, 64), (64, 8), (64, 64), (128, 128),
                                          (256, 128), (4096, 8), (4096, 32))]
    cases += [topk(1, n * k, graph=True) for n in (64, 128)]
    cases += [select_prefill(32, 4 * k, 128 * k)]
    cases += [chain(32, 1, 128 * k, graph=True), chain(32, 64, 64 * k)]
    cases += [step(32, 64, 1, 128 * k, graph=True), step(32, 64, 64, 64 * k)]
    return cases


def cpu_cases():
    one = [decode("bf16", 64, 1), decode("f16", 64, 1), index_decode(32, 1, 32768), index_decode(64, 1, 32768)]
    return [cpu(case, threads) for case in one for threads in (1, 2)]


def main():
    """Lists the cases; `--same-as PROGRAM` compares their keys with those of `sievemla bench` on a GPU."""
    if sys.argv[1:2] == ["--same-as"]:
        ours = subprocess.run([sys.argv[2], "bench", "--list", "--backend", "cuda"], capture_output=True, text=True)
        keys = {key for key in ours.stdout.split()  # that peers are timed for
                if not (key.startswith("kv.layer.") or key.endswith(".warm"))}
        differ = keys ^ {case.key for case in gpu_cases()}
        print("differ:" if differ else "the same keys", *sorted(differ))
        return 1 if differ else 0
    for case in gpu_cases() + cpu_cases():
        print(f"{case.key:56s} {case.flops / 1e9:10.2f} GFLOP {case.bytes / 1e6:10.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
