#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Times other projects' sparse MLA kernels on this GPU, case by case (cases.py), and writes the numbers as JSON.

    python3 gpu_peers.py --peers DIR --json PEERS.json [--only PATTERN ...] [--runs N]

DIR is what fetch_gpu_peers.sh filled. Every peer's result is checked against a plain torch computation before it is
timed; a wrong or missing peer is reported, never timed. Exit 0: each case has a number; 1: some have none; 2: wrong
use.
"""

import argparse
import ctypes
import fnmatch
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import statistics
import sys
import time
import types
import zipfile

import cases as work

SCALE = work.QK_DIM ** -0.5
FLUSH_BYTES = 256 << 20
WARM_S = 0.3
GRAPH_CALLS = 20
PAGE = 64
LOGITS_MIB = (512, 64)  # what the scores of one chunk of a prefill may take; vLLM's default first


# ---------------------------------------------------------------------------------------------------- timing

class Timer:
    """GPU times of a call, with the L2 cache flushed before each run and the host kept ahead of the GPU."""

    def __init__(self, runs):
        self.runs = max(runs, 50)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, fn):
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            fn()
        host_s = (time.perf_counter() - start) / 5 + 50e-6
        torch.cuda.synchronize()
        self._warm(fn, (time.perf_counter() - start) / 5)
        times, chunk = [], 25
        while len(times) < self.runs:
            # A spin long enough for the host to enqueue the whole chunk: no run waits for a launch.
            torch.cuda._sleep(int(min(host_s * chunk * 1.5, 0.1) * 2e9))
            times += self._chunk(fn, chunk)
        return times

    def _warm(self, fn, seconds):
        """Runs a heavy call long enough for the clock to settle where the power limit holds it."""
        if seconds > 200e-6:
            for _ in range(int(WARM_S / seconds)):
                fn()
            torch.cuda.synchronize()

    def _chunk(self, fn, count):
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for before, after in events:
            self.flush.zero_()
            before.record()
            fn()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in events]

    def graph(self, fn):
        """GPU times of one of GRAPH_CALLS back-to-back calls in a CUDA graph; the cache stays warm."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                fn()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(self.runs):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            graph.replay()
            after.record()
            torch.cuda.synchronize()
            times.append(before.elapsed_time(after) * 1e3 / GRAPH_CALLS)
        return times


# ---------------------------------------------------------------------------------------------------- inputs

def pack_fp8_ds_mla(rows):
    """[n, 576] float -> [n, 656] bytes: 512 e4m3, one f32 scale per 128 of them, 64 bf16."""
    n = rows.shape[0]
    latent = rows[:, :512].float().view(n, 4, 128)
    scale = (latent.abs().amax(-1) / 448.0).clamp_min(1e-8)
    out = torch.empty(n, 656, dtype=torch.uint8, device=rows.device)
    out[:, :512] = (latent / scale[..., None]).to(torch.float8_e4m3fn).view(n, 512).view(torch.uint8)
    out[:, 512:528] = scale.view(torch.uint8)
    out[:, 528:] = rows[:, 512:].bfloat16().contiguous().view(torch.uint8)
    return out


def unpack_fp8_ds_mla(packed):
    n = packed.shape[0]
    latent = packed[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(n, 4, 128)
    scale = packed[:, 512:528].contiguous().view(torch.float32)
    rope = packed[:, 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(latent * scale[..., None]).view(n, 512), rope], dim=1)


class PagedIndex:
    """The indexer's inputs of one token a request: fp8 keys in shuffled pages, request i has lengths[i] of them."""

    def __init__(self, heads, lengths):
        pages_of = [math.ceil(length / PAGE) for length in lengths]
        batch, pages = len(lengths), sum(pages_of)
        self.lengths, self.ctx = lengths, max(lengths)
        self.cache = torch.empty(pages, PAGE * 132, dtype=torch.uint8, device="cuda")
        for part in self.cache.split(16384):
            keys = torch.randn(part.shape[0], PAGE * 128, device="cuda").to(torch.float8_e4m3fn)
            part[:, :PAGE * 128] = keys.view(torch.uint8)
            part[:, PAGE * 128:] = (torch.rand(part.shape[0], PAGE, device="cuda") + 0.5).view(torch.uint8)
        self.table = torch.zeros(batch, max(pages_of), dtype=torch.int32, device="cuda")
        for row, mine in zip(self.table, torch.randperm(pages, device="cuda").int().split(pages_of)):
            row[:len(mine)] = mine
        self.length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, 1, heads, 128, device="cuda").to(torch.float8_e4m3fn)
        self.weights = torch.randn(batch, heads, device="cuda")

    def scores(self, request):
        count = self.lengths[request]
        pages = self.cache[self.table[request, :math.ceil(count / PAGE)].long()]
        keys = pages[:, :PAGE * 128].contiguous().view(torch.float8_e4m3fn).view(-1, 128)[:count]
        scales = pages[:, PAGE * 128:].contiguous().view(torch.float32).view(-1)[:count]
        return index_scores(self.q[request, 0], keys, scales, self.weights[request])

    def error(self, got):
        """Relative error of the scores of the first and the last request."""
        return max(error(got[request, :self.lengths[request]], self.scores(request)) for request in (0, -1))

    def positions(self, request, slots):
        """Where the slots stand in the request; a slot of another request gives a negative number."""
        pages = torch.full((len(self.cache),), -self.ctx, dtype=torch.int64, device="cuda")
        pages[self.table[request].long()] = torch.arange(self.table.shape[1], device="cuda")
        return pages[slots.long() // PAGE] * PAGE + slots % PAGE


class Inputs:
    """The tensors that several cases share, made on first use."""

    def __init__(self, batches, rows):
        self.batches = batches  # the most requests of any attend.decode case
        self.rows = max(batches * work.SPAN, rows)

    @functools.cached_property
    def decode_fp8(self):
        cache = torch.empty(self.rows, 656, dtype=torch.uint8, device="cuda")
        for part in cache.split(8 * work.SPAN):
            part.copy_(pack_fp8_ds_mla(torch.randn(part.shape[0], 576, device="cuda") / 3))
        return cache

    @functools.cached_property
    def decode_bf16(self):
        rows = self.decode_fp8[:min(self.batches, 128) * work.SPAN]
        return torch.cat([unpack_fp8_ds_mla(part).bfloat16() for part in rows.split(8 * work.SPAN)])

    @functools.cached_property
    def decode_slots(self):
        return torch.stack([torch.randperm(work.SPAN, device="cuda")[:work.TOPK] + request * work.SPAN
                            for request in range(self.batches)]).int()

    @functools.lru_cache(maxsize=1)
    def prefill(self, tokens, keys):
        rows = (torch.randn(keys, 1, 576, device="cuda") / 3).bfloat16()
        slots = torch.stack([torch.randperm(keys, device="cuda")[:work.TOPK] for _ in range(tokens)]).int()
        return rows, slots

    @functools.lru_cache(maxsize=1)
    def dense(self, batch, ctx):
        rows = torch.empty(batch * ctx, 576, dtype=torch.bfloat16, device="cuda")
        for part in rows.split(8 * work.SPAN):
            part.copy_(torch.randn(part.shape, device="cuda") / 3)
        return rows, torch.randperm(batch * ctx // PAGE, device="cuda").int().view(batch, -1)

    @functools.lru_cache(maxsize=1)
    def paged_index(self, heads, lengths):
        return PagedIndex(heads, lengths)

    @functools.lru_cache(maxsize=1)
    def scores(self, rows, length):
        return torch.randn(rows, length, device="cuda")


def attend(q, rows):
    """q [heads, 576], rows [n, 576] -> [heads, 512], in float."""
    return ((q.float() @ rows.float().T) * SCALE).softmax(-1) @ rows.float()[:, :512]


def rows_of_pages(rows, pages):
    return rows.view(-1, PAGE, rows.shape[-1])[pages.long()].view(-1, rows.shape[-1])


def index_scores(q, keys, scales, weights):
    """q [heads, 128], keys [n, 128], scales [n], weights [heads] -> [n], in float."""
    return scales * (weights @ (q.float() @ keys.float().T).relu())


def error(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


# ---------------------------------------------------------------------------------------------------- peers
#
# A peer yields (variant, call, check) for a case it can do. `check()` returns the relative error of the last call.

class FlashMLA:
    package, tolerance = "sgl-flash-mla", 0.02

    def __init__(self, peers):
        self.lib = importlib.import_module("flash_mla")
        if not self.lib._loader.has_legacy():
            raise ImportError(f"kernels for this GPU did not load: {self.lib._loader._LEGACY_UNAVAILABLE}")

    def variants(self, case, inputs):
        if case.stage == "attend.decode" and case.shape["kv"] == "fp8_ds_mla":
            yield self.decode(case.shape, inputs)
        if case.stage == "attend.prefill":
            yield self.prefill(case.shape, inputs)
        if case.stage == "attend.dense":
            yield self.dense(case.shape, inputs)

    def dense(self, shape, inputs):
        heads, batch, ctx = shape["heads"], shape["batch"], shape["ctx"]
        rows, table = inputs.dense(batch, ctx)
        q = (torch.randn(batch, 1, heads, 576, device="cuda") / 3).bfloat16()
        length = torch.full((batch,), ctx, dtype=torch.int32, device="cuda")
        schedule, _ = self.lib.get_mla_metadata()
        out = {}

        def call():
            out["o"], _ = self.lib.flash_mla_with_kvcache(q, rows.view(-1, PAGE, 1, 576), table, length, 512, schedule,
                                                          softmax_scale=SCALE, causal=True, is_fp8_kvcache=False,
                                                          use_legacy=True)

        return "dense decode", call, lambda: error(out["o"][-1, 0], attend(q[-1, 0], rows_of_pages(rows, table[-1])))

    def decode(self, shape, inputs):
        heads, batch = shape["heads"], shape["batch"]
        padded = 64 if heads <= 64 else 128
        q = torch.zeros(batch, 1, padded, 576, device="cuda", dtype=torch.bfloat16)
        q[:, :, :heads] = torch.randn(batch, 1, heads, 576, device="cuda") / 3
        sparse = self.sparse(q, inputs.decode_fp8[:batch * work.SPAN], inputs.decode_slots[:batch])
        out = {}

        def call():
            out["o"] = sparse()

        def check():
            rows = unpack_fp8_ds_mla(inputs.decode_fp8[inputs.decode_slots[batch - 1].long()])
            return error(out["o"][-1, 0, :heads], attend(q[-1, 0, :heads], rows))

        return "sparse decode" + (f", heads padded to {padded}" if padded != heads else ""), call, check

    def sparse(self, q, rows, slots):
        """A function that attends to the fp8 rows of the slots: [requests, 1, heads, 512]."""
        cache = rows.view(-1, PAGE, 1, 656).view(torch.float8_e4m3fn)
        indices = slots.view(q.shape[0], 1, -1)
        schedule, _ = self.lib.get_mla_metadata()
        return lambda: self.lib.flash_mla_with_kvcache(q, cache, None, None, 512, schedule, softmax_scale=SCALE,
                                                       indices=indices, is_fp8_kvcache=True, use_legacy=True)[0]

    def prefill(self, shape, inputs):
        rows, slots = inputs.prefill(shape["tokens"], shape["keys"])
        q = (torch.randn(shape["tokens"], shape["heads"], 576, device="cuda") / 3).bfloat16()
        out = {}

        def call():
            out["o"] = self.lib.flash_mla_sparse_fwd(q, rows, slots[:, None], SCALE, use_legacy=True)[0]

        return "sparse prefill", call, lambda: error(out["o"][-1], attend(q[-1], rows[slots[-1].long(), 0]))


class TritonDecode:
    """vLLM's dense Triton MLA decode kernel; attend.decode drives it by the slots as a block table of page size 1."""

    package, tolerance = "vllm", 0.02

    def __init__(self, peers):
        import triton
        import triton.language as tl
        no = staticmethod(lambda: False)
        platform = type("Platform", (), dict(is_rocm=no, is_xpu=no, is_cpu=no, is_cuda=staticmethod(lambda: True)))
        stubs = {"vllm": types.ModuleType("vllm"), "vllm.platforms": types.ModuleType("vllm.platforms"),
                 "vllm.triton_utils": types.ModuleType("vllm.triton_utils")}
        stubs["vllm.platforms"].current_platform = platform
        stubs["vllm.triton_utils"].tl, stubs["vllm.triton_utils"].triton = tl, triton
        saved = {name: sys.modules.get(name) for name in stubs}
        sys.modules.update(stubs)
        try:
            spec = importlib.util.spec_from_file_location("triton_decode_attention",
                                                          peers / "triton_decode_attention.py")
            self.lib = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = self.lib
            spec.loader.exec_module(self.lib)
        finally:
            for name, module in saved.items():
                sys.modules.pop(name) if module is None else sys.modules.update({name: module})

    def variants(self, case, inputs):
        if case.stage not in ("attend.decode", "attend.dense") or case.shape["kv"] != "bf16":
            return
        heads, batch = case.shape["heads"], case.shape["batch"]
        tiles = batch * math.ceil(heads / 16)
        if case.stage == "attend.dense":
            for splits in (1, 2, 4, 8, 16, 32, 64, 128):
                if 64 <= tiles * splits <= 1024:
                    yield self.dense(heads, batch, case.shape["ctx"], splits, inputs)
            return
        for splits in (1, 2, 4, 8, 16, 32):
            if splits in (1, 32) or 64 <= tiles * splits <= 2048:
                yield self.decode(heads, batch, splits, inputs)

    def decode(self, heads, batch, splits, inputs):
        slots = inputs.decode_slots[:batch]
        return self.by_table(heads, inputs.decode_bf16, slots, 1, splits, work.TOPK,
                             lambda: inputs.decode_bf16[slots[-1].long()])

    def dense(self, heads, batch, ctx, splits, inputs):
        rows, table = inputs.dense(batch, ctx)
        return self.by_table(heads, rows, table, PAGE, splits, ctx, lambda: rows_of_pages(rows, table[-1]))

    def by_table(self, heads, rows, table, page, splits, count, last_rows):
        """Each request attends `count` rows, by a block table; last_rows() are those of the last one."""
        batch = table.shape[0]
        cache = rows.view(-1, page, 1, 576)
        q = (torch.randn(batch, heads, 576, device="cuda") / 3).bfloat16()
        out = torch.empty(batch, heads, 512, device="cuda", dtype=torch.bfloat16)
        lse = torch.empty(batch, heads, device="cuda", dtype=torch.bfloat16)
        partial = torch.empty(batch, heads, splits, 513, device="cuda")
        length = torch.full((batch,), count, dtype=torch.int32, device="cuda")
        one = torch.ones((), device="cuda")

        def call():
            self.lib.decode_attention_fwd(q, cache, cache[..., :512], out, lse, table, length, partial, splits, SCALE,
                                          page, k_scale=one, v_scale=one, is_mla=True)

        return (f"Triton decode, page size {page}, {splits} splits", call,
                lambda: error(out[-1], attend(q[-1], last_rows())))


class DeepGEMM:
    package, tolerance = "sgl-deep-gemm", 0.001

    def __init__(self, peers):
        self.lib = importlib.import_module("deep_gemm")

    def variants(self, case, inputs):
        if case.stage == "index.prefill":
            score, scored = self.prefill(**case.shape)
            yield self.checked("mqa logits", lambda: score(slice(None)), scored)
        if case.stage == "index.decode":
            index = inputs.paged_index(case.shape["heads"], case.shape["lengths"])
            yield self.checked("paged mqa logits", self.decode(index), index.error)

    def checked(self, variant, score, scored):
        out = {}

        def call():
            out["s"] = score()

        return variant, call, lambda: scored(out["s"])

    def prefill(self, heads, tokens, keys):
        """(score, error): scores of a slice of the tokens over all keys, and the error of one row of them."""
        q = torch.randn(tokens, heads, 128, device="cuda").to(torch.float8_e4m3fn)
        k = torch.randn(keys, 128, device="cuda").to(torch.float8_e4m3fn)
        scales, weights = torch.rand(keys, device="cuda") + 0.5, torch.randn(tokens, heads, device="cuda")
        first = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        end = torch.arange(keys - tokens + 1, keys + 1, dtype=torch.int32, device="cuda")

        def score(part):
            return self.lib.fp8_fp4_mqa_logits((q[part], None), (k, scales), weights[part], first[part], end[part],
                                               clean_logits=False)

        def scored(got, start=0):
            row = start + got.shape[0] // 2
            seen = int(end[row])
            return error(got[row - start, :seen], index_scores(q[row], k[:seen], scales[:seen], weights[row]))

        return score, scored

    def decode(self, index):
        """A function that scores one token a request."""
        batch, length = len(index.lengths), index.length[:, None]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = self.lib.get_paged_mqa_logits_metadata(length, PAGE, sms)
        cache = index.cache.view(-1, PAGE, 1, 132)

        def score():
            return self.lib.fp8_fp4_paged_mqa_logits((index.q, None), cache, index.weights, length, index.table,
                                                     schedule, index.ctx)

        return score


def topk_error(scores, ids, lengths=None):
    """0 when the first and the last row hold the k highest of their scores, each once; else 1."""
    for row in (0, -1):
        seen = scores[row] if lengths is None else scores[row, :int(lengths[row])]
        picked = ids[row].long()
        if picked.unique().numel() != ids.shape[1] or picked.min() < 0 or picked.max() >= len(seen):
            return 1.0
        if not torch.equal(seen[picked].sort().values, seen.topk(ids.shape[1]).values.sort().values):
            return 1.0
    return 0.0


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def good(status):
    if status:
        raise RuntimeError(f"CUDA error {status}")


def cluster_plan(rows, length):
    """(CTAs a row, scores a CTA keeps in shared memory, scratch), as FlashInfer's topk.py picks them."""
    count = 8 if rows <= 32 else 4 if rows < 128 else 2 if rows < 256 else 1
    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin // 2
    cached = (shared - (work.TOPK + 5 + 3 * 256 + 8) * 4 - 1024) // 16
    return count, cached, torch.empty(rows * 4 * length, dtype=torch.int32, device="cuda")


class FlashInferTopK:
    """All the top-k kernels of FlashInfer that run on this GPU: which one it picks depends on the call."""

    package, tolerance = "flashinfer-python", 0.0

    def __init__(self, peers):
        self.radix = ctypes.CDLL(str(peers / "libtopk_radix_peer.so"))
        self.cub = ctypes.CDLL(str(peers / "libtopk_cub_peer.so"))
        self.row_state = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")

    def variants(self, case, inputs):
        if case.stage != "topk":
            return
        rows, length = case.shape["rows"], case.shape["len"]
        scores = inputs.scores(rows, length)
        ids = torch.full((rows, work.TOPK), -1, dtype=torch.int32, device="cuda")
        values = torch.empty(rows, work.TOPK, device="cuda")
        size, i32 = ctypes.c_int64, ctypes.c_int32

        def radix(graph_safe):
            good(self.radix.peer_topk_radix(pointer(scores), pointer(ids), pointer(values), i32(rows), i32(length),
                                            i32(work.TOPK), pointer(self.row_state), i32(graph_safe), stream()))

        def clusters():
            good(self.radix.peer_topk_clusters(pointer(scores), pointer(ids), pointer(values), i32(rows), i32(length),
                                               i32(work.TOPK), pointer(overflow), i32(cached), i32(count), stream()))

        def cub(workspace, lowest_id):
            need = ctypes.c_size_t(workspace.numel() if workspace is not None else 0)
            good(self.cub.peer_topk_cub(pointer(scores), pointer(ids), pointer(values), size(rows), size(length),
                                        size(work.TOPK), pointer(workspace), ctypes.byref(need), i32(lowest_id),
                                        stream()))
            return need.value

        def check():
            wrong = topk_error(scores, ids)
            ids.fill_(-1)
            return wrong

        yield "radix, by its own heuristic", lambda: radix(False), check
        yield "radix, graph safe", lambda: radix(True), check
        for lowest_id in (False, True):
            try:
                space = torch.empty(cub(None, lowest_id) + 1, dtype=torch.uint8, device="cuda")
            except RuntimeError as why:
                print(f"  CUB cannot do {case.key} with lowest_id={lowest_id}: {why}")
                continue
            yield "CUB batched" + (", ties to the lowest id" if lowest_id else ""), \
                functools.partial(cub, space, lowest_id), check
        if length >= 8192 and rows * length <= 1 << 25:  # its scratch is 16 bytes a score
            count, cached, overflow = cluster_plan(rows, length)
            yield f"{count} CTA clusters", clusters, check

    def of_rows(self, rows, pitch, pages=None):
        """(name, select) of each kernel that can be captured; select(scores, lengths, ids) fills ids from rows of their
        own lengths, `pitch` apart: with positions or, where `pages` is a block table, with slots."""
        size, i32, k = ctypes.c_int64, ctypes.c_int32, work.TOPK
        zeros = torch.zeros(rows, dtype=torch.int32, device="cuda")
        entries = size(pages.shape[1] if pages is not None else 0)

        def radix(scores, lengths, ids):
            good(self.radix.peer_topk_radix_rows(pointer(scores), pointer(ids), pointer(lengths), pointer(zeros),
                                                 pointer(pages), entries, i32(len(ids)), i32(pitch), i32(k),
                                                 pointer(self.row_state), stream()))

        def cub(scores, lengths, ids, workspace):
            need = ctypes.c_size_t(workspace.numel() if workspace is not None else 0)
            good(self.cub.peer_topk_cub_rows(pointer(scores), pointer(ids), pointer(lengths), pointer(pages), entries,
                                             size(rows if ids is None else len(ids)), size(pitch), size(k),
                                             pointer(workspace), ctypes.byref(need), stream()))
            return need.value

        def clusters(scores, lengths, ids):
            good(self.radix.peer_topk_clusters_rows(pointer(scores), pointer(ids), pointer(lengths), pointer(zeros),
                                                    pointer(slot_of), size(entries.value * PAGE), i32(len(ids)),
                                                    i32(pitch), i32(k), pointer(overflow), i32(cached), i32(count),
                                                    stream()))

        yield "radix, by its own heuristic", radix
        yield "CUB batched", functools.partial(cub, workspace=torch.empty(cub(None, None, None, None) + 1,
                                                                          dtype=torch.uint8, device="cuda"))
        slot_of = None  # this kernel's block table has a page a row
        if pages is not None:
            slot_of = (pages[..., None] * PAGE + torch.arange(PAGE, device="cuda")).int().view(rows, -1)
        count, cached, overflow = cluster_plan(rows, pitch)
        yield f"{count} CTA clusters", clusters


class Select:
    """DeepGEMM's scores, then each top-k kernel of FlashInfer, as an engine calls them: lengths are on the device."""

    package, tolerance = "sgl-deep-gemm + flashinfer-python", 0.001

    def __init__(self, peers):
        self.scorer, self.topk = DeepGEMM(peers), FlashInferTopK(peers)

    def variants(self, case, inputs):
        if case.stage == "chain":
            yield from self.chain(inputs.paged_index(case.shape["heads"], case.shape["lengths"]))
        if case.stage == "select.prefill":
            yield from self.prefill(**case.shape)

    def chain(self, index):
        score = self.scorer.decode(index)
        ids = torch.full((len(index.lengths), work.TOPK), -1, dtype=torch.int32, device="cuda")
        out = {}
        for name, select in self.topk.of_rows(len(ids), score().stride(0)):
            def call(select=select):
                out["s"] = score()
                select(out["s"], index.length, ids)

            def check():
                wrong = max(index.error(out["s"]), topk_error(out["s"], ids, index.lengths))
                ids.fill_(-1)
                return wrong

            yield f"paged mqa logits, {name}", call, check

    def prefill(self, heads, tokens, keys):
        score, scored = self.scorer.prefill(heads, tokens, keys)
        length = torch.arange(keys - tokens + 1, keys + 1, dtype=torch.int32, device="cuda")
        ids = torch.full((tokens, work.TOPK), -1, dtype=torch.int32, device="cuda")
        for mib in LOGITS_MIB:
            rows = min(tokens, max(1, (mib << 20) // (4 * keys)))  # vLLM's rule
            chunks = [slice(first, min(first + rows, tokens)) for first in range(0, tokens, rows)]
            for name, select in self.topk.of_rows(rows, score(chunks[0]).stride(0)):
                def call(select=select, chunks=chunks):
                    for part in chunks:
                        select(score(part), length[part], ids[part])

                def check(chunks=chunks):
                    wrong = 0.0
                    for part in (chunks[0], chunks[-1]):
                        scores = score(part)
                        wrong = max(wrong, scored(scores, part.start), topk_error(scores, ids[part], length[part]))
                    ids.fill_(-1)
                    return wrong

                yield f"{mib} MiB of logits, {name}", call, check


class Step:
    """Select for one token a request, its slots by FlashInfer's own block table lookup, then FlashMLA."""

    package, tolerance = "sgl-deep-gemm + flashinfer-python + sgl-flash-mla", 0.02

    def __init__(self, peers):
        self.scorer, self.topk, self.attention = DeepGEMM(peers), FlashInferTopK(peers), FlashMLA(peers)

    def variants(self, case, inputs):
        if case.stage != "step":
            return
        index = inputs.paged_index(case.shape["heads"], case.shape["lengths"])
        score, batch = self.scorer.decode(index), len(index.lengths)
        rows = inputs.decode_fp8[:len(index.cache) * PAGE]
        slots = torch.full((batch, work.TOPK), -1, dtype=torch.int32, device="cuda")
        q = (torch.randn(batch, 1, case.shape["attend_heads"], 576, device="cuda") / 3).bfloat16()
        sparse = self.attention.sparse(q, rows, slots)
        out = {}
        for name, select in self.topk.of_rows(batch, score().stride(0), index.table):
            def call(select=select):
                out["s"] = score()
                select(out["s"], index.length, slots)
                out["o"] = sparse()

            def check():
                ends = (0, batch - 1)
                positions = torch.stack([index.positions(request, slots[request]) for request in ends])
                picked = topk_error(out["s"][list(ends)], positions, [index.lengths[request] for request in ends])
                wrong = error(out["o"][-1, 0], attend(q[-1, 0], unpack_fp8_ds_mla(rows[slots[-1].long()])))
                slots.fill_(-1)
                return wrong if picked == 0 and index.error(out["s"]) <= DeepGEMM.tolerance else 1.0

            yield f"paged mqa logits, {name}, sparse decode", call, check


class TorchTopK:
    package, tolerance = "torch", 0.0

    def __init__(self, peers):
        pass

    def variants(self, case, inputs):
        if case.stage != "topk":
            return
        scores = inputs.scores(case.shape["rows"], case.shape["len"])
        out = {}

        def call():
            out["ids"] = torch.topk(scores, work.TOPK, dim=-1, sorted=False).indices

        yield "topk", call, lambda: topk_error(scores, out["ids"])


PEERS = (FlashMLA, TritonDecode, DeepGEMM, FlashInferTopK, TorchTopK, Select, Step)


# ---------------------------------------------------------------------------------------------------- the run

def unpack_wheels(peers):
    """Makes the wheels importable without pip: they are zip files. Packages that are installed already win."""
    site = peers / "site"
    for wheel in sorted((peers / "wheels").glob("*.whl")):
        mark = site / (wheel.stem + ".unpacked")
        if not mark.exists():
            zipfile.ZipFile(wheel).extractall(site)
            mark.touch()
    sys.path.append(str(site))


def versions(peers):
    known = json.loads((peers / "versions.json").read_text()) if (peers / "versions.json").exists() else {}
    known["torch"] = torch.__version__
    for package in ("sgl-flash-mla", "sgl-deep-gemm"):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return known


def load(peers):
    loaded = []
    for peer in PEERS:
        try:
            loaded.append(peer(peers))
        except Exception as why:  # a peer that does not load must not stop the others
            print(f"{peer.package}: not available: {why}", file=sys.stderr)
    return loaded


def measure(case, peer, variant, call, check, timer):
    call()
    torch.cuda.synchronize()
    wrong = check()
    if not wrong <= peer.tolerance:
        raise RuntimeError(f"wrong result: relative error {wrong:.2g}")
    times = timer.graph(call) if case.shape.get("graph") else timer(call)
    if case.shape.get("graph") and not check() <= peer.tolerance:
        raise RuntimeError("wrong result of the captured call")
    us, tenths = statistics.median(times), statistics.quantiles(times, n=10)
    return dict(case=case.key, us=rounded(us), us_p10=rounded(tenths[0]), us_p90=rounded(tenths[-1]),
                tflops=rounded(case.tflops(us)), tbps=rounded(case.tbps(us)), variant=variant,
                error=float(f"{wrong:.2g}"), runs=len(times))


def rounded(value):
    return None if value is None else round(value, 3)


def show(row):
    tflops = f"{row['tflops']:8.1f} TFLOP/s" if row["tflops"] is not None else " " * 16
    print(f"{row['case']:52s} {row['us']:10.2f} us {tflops} {row['tbps']:7.3f} TB/s  {row['peer']} {row['version']}: "
          f"{row['variant']}", flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--peers", type=pathlib.Path, required=True, help="the folder filled by fetch_gpu_peers.sh")
    options.add_argument("--json", type=pathlib.Path, help="where the numbers go")
    options.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="keys to run, e.g. 'topk.*'")
    options.add_argument("--runs", type=int, default=50, help="timed runs a case, at least 50")
    args = options.parse_args()
    chosen = [c for c in work.gpu_cases() if any(fnmatch.fnmatch(c.key, p) for p in args.only)]
    if not chosen:
        options.error(f"no case matches {args.only}; `python3 cases.py` lists them")

    global torch
    try:
        import torch
    except ImportError as why:
        options.error(f"torch is needed: {why}")
    if not torch.cuda.is_available():
        options.error("torch sees no CUDA device")
    torch.manual_seed(0)
    unpack_wheels(args.peers.resolve())
    peers, version = load(args.peers.resolve()), versions(args.peers)
    timer = Timer(args.runs)
    inputs = Inputs(max([c.shape["batch"] for c in chosen if c.stage == "attend.decode"], default=1),
                    max([sum(c.shape["lengths"]) for c in chosen if c.stage == "step"], default=0))
    report = dict(schema=1, kind="peers", gpu=torch.cuda.get_device_name(), torch=torch.__version__,
                  cuda=torch.version.cuda, cases=[], failed=[])

    for case in chosen:
        best = {}
        for peer in peers:
            try:
                for variant, call, check in peer.variants(case, inputs):
                    try:
                        row = measure(case, peer, variant, call, check, timer)
                    except Exception as why:
                        report["failed"].append(dict(case=case.key, peer=peer.package, variant=variant,
                                                     why=str(why)[:300]))
                        print(f"{case.key}: {peer.package} ({variant}) FAILED: {str(why)[:300]}", flush=True)
                        continue
                    row.update(peer=peer.package,
                               version=" + ".join(version.get(part, "?") for part in peer.package.split(" + ")))
                    report["cases"].append(row)
                    if peer.package not in best or row["us"] < best[peer.package]["us"]:
                        best[peer.package] = row
            except Exception as why:
                report["failed"].append(dict(case=case.key, peer=peer.package, why=str(why)[:300]))
                print(f"{case.key}: {peer.package} FAILED: {str(why)[:300]}", flush=True)
        for row in best.values():
            show(row)
        if args.json:  # after each case, so that a run cut short still leaves its numbers
            args.json.write_text(json.dumps(report, indent=1))

    missing = sorted({c.key for c in chosen} - {row["case"] for row in report["cases"]})
    print(f"{len(chosen) - len(missing)} of {len(chosen)} cases measured, {len(report['failed'])} failures")
    for key in missing:
        print(f"  no number: {key}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
