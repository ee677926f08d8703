# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Each stage against NumPy float64. Tolerances: f32 paths 1e-4 (docs/numerics.md); quantised rows by their own
rounding, half a step of e4m3 (2^-4 of the value, 2^-10 of the scale below its normal range) and of bf16 (2^-9)."""

import numpy as np
import oracle
import pytest
from oracle import LATENT, ROPE

import sievemla

PAGES, PAGE_SIZE = 5, 16
SLOTS = PAGES * PAGE_SIZE
SCALE = 576**-0.5


def filled_cache(rng):
    """An f32 cache and its rows side by side."""
    rows = rng.standard_normal((SLOTS, LATENT + ROPE)).astype(np.float32)
    return sievemla.KvCache(rows.reshape(PAGES, PAGE_SIZE, -1), "f32"), rows


def near(got, want, bound=1e-4):
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * max(1.0, np.abs(want[np.isfinite(want)]).max(initial=0)))


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_attention_from_slots(backend, rng, index_type):
    cache, rows = filled_cache(rng)
    q = rng.standard_normal((3, 5, LATENT + ROPE)).astype(np.float32)
    slots = np.array([[3, -1, 70, 12], [SLOTS, 5, -1, 5], [-1, -1, -1, -1]], index_type)
    out, lse = np.full((3, 5, LATENT), np.nan, np.float32), np.full((3, 5), np.nan, np.float32)
    sievemla.attention(q, cache, out, scale=SCALE, slots=slots, lse=lse, backend=backend)
    want_out, want_lse = oracle.attend_all(q, rows, [[3, 70, 12], [5, 5], []], SCALE)
    near(out, want_out)
    near(lse, want_lse)
    assert (out[2] == 0).all() and np.isneginf(lse[2]).all()


def test_attention_reads_no_lane_past_topk_length(backend, rng):
    cache, rows = filled_cache(rng)
    q = rng.standard_normal((2, 1, LATENT + ROPE)).astype(np.float32)
    slots = np.array([[7, 8, 9], [1, 2, 3]], np.int32)
    out = np.empty((2, 1, LATENT), np.float32)
    sievemla.attention(q, cache, out, scale=SCALE, slots=slots, topk_length=np.array([1, 2], np.int32), backend=backend)
    near(out, oracle.attend_all(q, rows, [[7], [1, 2]], SCALE)[0])


def test_attention_from_a_block_table_has_a_causal_tail(backend, rng):
    cache, rows = filled_cache(rng)
    q_len, heads = 2, 4
    q = rng.standard_normal((2 * q_len, heads, LATENT + ROPE)).astype(np.float32)
    table, lengths = np.array([[4, 0, 2], [1, 3, -1]], np.int32), np.array([40, 17], np.int32)
    out, lse = np.empty((4, heads, LATENT), np.float32), np.empty((4, heads), np.float32)
    sievemla.attention(q, cache, out, scale=SCALE, block_table=table, lengths=lengths, lse=lse, backend=backend)
    lists = []
    for request in range(2):
        of_request = [p * PAGE_SIZE + i for p in table[request] for i in range(PAGE_SIZE)]
        lists += [of_request[: lengths[request] - q_len + 1 + i] for i in range(q_len)]
    want_out, want_lse = oracle.attend_all(q, rows, lists, SCALE)
    near(out, want_out)
    near(lse, want_lse)


def test_attention_sink_and_split_q(backend, rng):
    cache, rows = filled_cache(rng)
    q = rng.standard_normal((1, 3, LATENT + ROPE)).astype(np.float32)
    sink = np.array([0.5, -np.inf, 3], np.float32)
    out, lse = np.empty((1, 3, LATENT), np.float32), np.empty((1, 3), np.float32)
    slots = np.array([[1, 2, 3]], np.int32)
    sievemla.attention(
        np.ascontiguousarray(q[..., :LATENT]), cache, out, q_rope=np.ascontiguousarray(q[..., LATENT:]), scale=SCALE,
        slots=slots, sink=sink, lse=lse, backend=backend
    )
    want_out, want_lse = oracle.attend_all(q, rows, [[1, 2, 3]], SCALE, sink)
    near(out, want_out)
    near(lse, want_lse)  # the sink is not in it


def test_attention_of_strided_views(backend, rng):
    """A transposed q, pages of another layer in between, padded rows, one slot list for two tokens."""
    heads, tokens = 6, 2
    big = np.full((PAGES, 2, PAGE_SIZE, LATENT + ROPE + 8), np.nan, np.float32)
    big[:, 0, :, : LATENT + ROPE] = rng.standard_normal((PAGES, PAGE_SIZE, LATENT + ROPE))
    rows = big[:, 0, :, : LATENT + ROPE].reshape(SLOTS, -1)
    cache = sievemla.KvCache(big[:, 0], "f32")
    q = rng.standard_normal((heads, tokens, LATENT + ROPE)).astype(np.float32).transpose(1, 0, 2)
    slots = np.broadcast_to(np.array([9, 0, 44], np.int32), (1, tokens, 3))  # read-only, q_len stride 0
    wide = np.full((tokens, heads, LATENT + 1), 7, np.float32)
    sievemla.attention(q, cache, wide[..., :LATENT], scale=SCALE, slots=slots, backend=backend)
    near(wide[..., :LATENT], oracle.attend_all(q, rows, [[9, 0, 44]] * 2, SCALE)[0])
    assert (wide[..., LATENT] == 7).all()


def test_attention_with_a_workspace_of_the_caller(backend, rng):
    cache, rows = filled_cache(rng)
    q = rng.standard_normal((2, 8, LATENT + ROPE)).astype(np.float32)
    slots = np.array([[1, 2], [3, 4]], np.int32)
    size = sievemla.attention_workspace_bytes(backend, tokens=2, heads=8, lanes=2)
    memory = np.zeros(size + 256, np.uint8)
    start = -memory.ctypes.data % 256
    workspace = memory[start : start + size]
    sievemla.workspace_init(workspace, backend=backend)
    out = np.empty((2, 8, LATENT), np.float32)
    sievemla.attention(q, cache, out, scale=SCALE, slots=slots, workspace=workspace, backend=backend)
    near(out, oracle.attend_all(q, rows, [[1, 2], [3, 4]], SCALE)[0])
    if size:
        with pytest.raises(ValueError, match="the workspace must be large enough"):
            sievemla.attention(q, cache, out, scale=SCALE, slots=slots, workspace=workspace[:-1], backend=backend)


def test_topk_rules(backend):
    nan, inf = np.nan, np.inf
    rows = [[1, 5, 5, 5, 2], [nan, -inf, 3, nan, 0], [0.0, -0.0, 0.0, -1, 9], [4, 3, 2, 1, 0], [1, 1, 1, 1, 1]]
    lengths, k = [5, 5, 3, 0, -1], 3
    positions = np.full((5, k), 99, np.int32)
    sievemla.topk(np.array(rows, np.float32), np.array(lengths, np.int32), positions=positions, backend=backend)
    for row, length, got in zip(rows, lengths, positions):
        want = oracle.best(np.array(row[: max(length, 0)]), k)
        assert got.tolist() == want + [-1] * (k - len(want))


def test_topk_slots_starts_and_shards(backend, rng):
    scores = rng.standard_normal((4, 40)).astype(np.float32)
    starts, lengths = np.array([0, 3, 0, 5], np.int32), np.array([40, 20, 7, 35], np.int32)
    table = rng.permutation(20).astype(np.int32).reshape(2, 10)
    for shard in (dict(), dict(rank=1, ranks=2, interleave=4)):
        positions, slots = np.empty((4, 6), np.int32), np.empty((4, 6), np.int64)
        slot_map = sievemla.SlotMap(table, 4, **shard)
        sievemla.topk(scores, lengths, positions=positions, slots=slots, map=slot_map, starts=starts, backend=backend)
        again = np.empty((4, 6), np.int32)
        sievemla.positions_to_slots(positions, slot_map, again, backend=backend)
        rank, ranks, inter = (shard.get(n, d) for n, d in (("rank", 0), ("ranks", 1), ("interleave", 1)))
        for t in range(4):
            want = oracle.best(scores[t, starts[t] : starts[t] + lengths[t]], 6)
            assert positions[t].tolist() == want
            for lane, p in enumerate(want):
                local = p // (inter * ranks) * inter + p % inter
                mine = p // inter % ranks == rank
                assert slots[t, lane] == (table[t // 2, local // 4] * 4 + local % 4 if mine else -1)
        assert (again == slots).all()


@pytest.mark.parametrize("interleave", [1, 4])
def test_context_parallel_ranks_select_as_one(backend, rng, interleave):
    """Ties everywhere, rows shorter than the ranks; what ranks did not fill is the best of scores."""
    ranks, k, whole = 4, 6, 40
    scores = rng.integers(0, 3, (4, whole)).astype(np.float32)
    lengths = np.array([whole, 17, 2, 0], np.int32)
    table = np.zeros((4, 1), np.int32)
    sent = np.full((ranks, 2, 4, k), 7, np.int32)
    for rank in range(ranks):
        mine = np.arange(whole) // interleave % ranks == rank
        part = np.ascontiguousarray(scores[:, mine])
        seen = np.array([mine[:n].sum() for n in lengths], np.int32)
        local = np.empty((4, k), np.int32)
        sievemla.topk(part, seen, positions=local, backend=backend)
        selected_scores = sent[rank, 0].view(np.float32)
        shard = sievemla.Shard(rank, ranks, interleave)
        sievemla.topk_candidates(part, local, selected_scores, sent[rank, 1], shard=shard, backend=backend)
        selected_scores[sent[rank, 1] < 0] = np.inf
    for rank in range(ranks):
        selected, slots, counts = np.empty((4, k), np.int32), np.empty((4, k), np.int64), np.empty(4, np.int32)
        slot_map = sievemla.SlotMap(table, 64, rank=rank, ranks=ranks, interleave=interleave)
        sievemla.merge_topk(
            sent[:, 0].view(np.float32), sent[:, 1], selected=selected, slots=slots, counts=counts, map=slot_map,
            backend=backend
        )
        again, counted = np.empty((4, k), np.int32), np.empty(4, np.int32)
        sievemla.shard_slots(selected, slot_map, again, counts=counted, backend=backend)
        assert (again == slots).all() and (counted == counts).all()
        for t in range(4):
            want = oracle.best(scores[t, : lengths[t]], k)
            assert selected[t].tolist() == want + [-1] * (k - len(want))
            held = [p for p in want if p // interleave % ranks == rank]
            here = [p // (interleave * ranks) * interleave + p % interleave for p in held]
            assert slots[t].tolist() == here + [-1] * (k - len(here))
            assert counts[t] == len(here)
    size = sievemla.merge_topk_workspace_bytes(backend, ranks=ranks, rows=4, n=k, k=k)
    assert size > 0
    with pytest.raises(ValueError, match="the workspace must be large enough"):
        sievemla.merge_topk(
            sent[:, 0].view(np.float32), sent[:, 1], selected=selected, workspace=np.zeros(size - 1, np.uint8),
            backend=backend
        )


def test_expand_pools(backend):
    positions = np.empty((1, 16), np.int32)
    pools, lengths = np.array([[0, -1, 2]], np.int32), np.array([14], np.int32)
    sievemla.expand_pools(pools, lengths, positions, kpool=4, backend=backend)
    assert positions[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13] + [-1] * 6


def test_combine(backend, rng):
    out = rng.standard_normal((3, 2, 4, 32)).astype(np.float32)
    lse = rng.standard_normal((3, 2, 4)).astype(np.float32)
    lse[1, 0] = -np.inf
    out[1, 0] = np.nan  # must not be read
    lse[:, 1, 2] = -np.inf
    sink = rng.standard_normal(4).astype(np.float32)
    for given in (None, sink):
        got, got_lse = np.empty((2, 4, 32), np.float32), np.empty((2, 4), np.float32)
        sievemla.combine(out, lse, got, sink=given, lse=got_lse, backend=backend)
        want, want_lse = oracle.combine(out.astype(np.float64), lse.astype(np.float64), given)
        near(got, want)
        near(got_lse, want_lse)


def cache_of(kv_format, pages=PAGES):
    rope = 0 if kv_format.rope == 0 else ROPE
    storage = {"f32": np.float32, "bf16": np.uint16, "u8": np.uint8}[kv_format.storage]
    width = kv_format.row_bytes(LATENT, rope) // np.dtype(storage).itemsize
    return sievemla.KvCache(np.zeros((pages, PAGE_SIZE, width), storage), kv_format.name, LATENT, rope)


@pytest.mark.parametrize("kv_format", sievemla.kv_formats(), ids=lambda f: f.name)
@pytest.mark.parametrize("scale", ["arbitrary", "power_of_two"])
def test_latent_rows_round_trip(backend, rng, kv_format, scale):
    cache, tokens = cache_of(kv_format), 7
    latent = (rng.standard_normal((tokens, LATENT)) * 30).astype(np.float32)
    rope = rng.standard_normal((tokens, ROPE)).astype(np.float32) if cache.rope else None
    slots = np.array([5, 79, -1, 0, 33, 12, 64], np.int64)
    sievemla.write_latent(latent, slots, cache, rope=rope, scale=scale, backend=backend)
    out = np.full((tokens + 1, LATENT + cache.rope), np.nan, np.float32)
    sievemla.gather_latent(cache, np.append(slots, SLOTS), out, backend=backend)
    assert (out[2] == 0).all() and (out[-1] == 0).all()
    kept = [t for t in range(tokens) if slots[t] >= 0]
    wide = latent.reshape(tokens, -1, 128)
    step = np.abs(wide).max(axis=2, keepdims=True) / 448 * (2 if scale == "power_of_two" else 1)
    bound = {
        "f32": np.zeros_like(wide),
        "bf16": np.abs(wide) * 2**-8,
        "u8": np.maximum(np.abs(wide) * 2**-4, step * 2**-10) * 1.001,  # f32 rounding of the scale and the product
    }[kv_format.storage].reshape(tokens, LATENT)
    assert (np.abs(out[:tokens, :LATENT] - latent) <= bound)[kept].all()
    assert kv_format.storage == "f32" or (out[kept][:, :LATENT] != latent[kept]).any()
    if rope is not None:
        assert (np.abs(out[:tokens, LATENT:] - rope) <= np.abs(rope) * (0 if kv_format.storage == "f32" else 2**-8))[
            kept
        ].all()


def index_cache(name):
    storage, width = {"f32": (np.float32, 128), "bf16": (np.uint16, 128), "fp8": (np.uint8, 132)}[name]
    return sievemla.IndexCache(np.zeros((PAGES, PAGE_SIZE, width), storage), name)


def decode_e4m3(codes):
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return np.where(codes & 128, -magnitude, magnitude)


@pytest.mark.parametrize("name", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("style", ["half_split", "interleaved", "none"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_index_keys_round_trip(backend, rng, name, style, hadamard):
    cache, tokens = index_cache(name), 4
    k = rng.standard_normal((tokens, 128)).astype(np.float32) + 0.5
    weight, bias = rng.standard_normal((2, 128)).astype(np.float32)
    angles = rng.uniform(0, 6, (16, 32))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions, slots = np.array([3, 0, 15, 7], np.int32), np.array([20, 3, 79, 16], np.int32)
    rope = sievemla.Rope("none") if style == "none" else sievemla.Rope(style, positions, cos_sin)
    sievemla.write_index_keys(k, weight, bias, slots, cache, rope=rope, hadamard=hadamard, backend=backend)
    want = oracle.rotate(oracle.layer_norm(k, weight, bias, 1e-6), positions, cos_sin, style)
    if hadamard:
        want = want @ oracle.hadamard(128)
    keys, scales = np.empty((tokens, 128), cache.pages.dtype), np.empty(tokens, np.float32)
    sievemla.gather_index_keys(cache, slots, keys, scales=scales if name == "fp8" else None, backend=backend)
    if name == "fp8":
        assert (np.log2(scales) % 1 == 0).all()
        got = decode_e4m3(keys) * scales[:, None]
        bound = np.maximum(np.abs(want) * 2**-4, scales[:, None] * 2**-10) + 1e-5
    else:
        got = keys if name == "f32" else (keys.astype(np.uint32) << 16).view(np.float32)
        bound = np.abs(want) * (2**-8 if name == "bf16" else 0) + 1e-5
    assert (np.abs(got - want) <= bound).all()


def test_a_layers_writes_are_the_separate_steps(backend, rng):
    """On latents whose mean square is 1 and unturned ropes the steps before the writers change nothing."""
    tokens = 3
    latent = np.where(rng.uniform(size=(tokens, LATENT)) < 0.5, -1, 1).astype(np.float32)
    rope = rng.standard_normal((tokens, ROPE)).astype(np.float32)
    k, (weight, bias) = rng.standard_normal((tokens, 128)).astype(np.float32), np.float32([[1.0] * 128, [0.5] * 128])
    slots, indices = np.array([20, -1, 7], np.int64), np.zeros((tokens, 9), np.int32)
    pages = np.zeros((2, PAGES, PAGE_SIZE, LATENT + ROPE), np.float32)
    caches = [sievemla.KvCache(p, "f32", LATENT, ROPE) for p in pages]
    index_caches, none = [index_cache("fp8"), index_cache("fp8")], sievemla.Rope("none")
    keys = sievemla.IndexKeys(k, weight, bias, slots, index_caches[0], none, hadamard=True)
    sievemla.write_layer(
        latent, np.ones(LATENT, np.float32), slots, caches[0], latent_eps=1e-12, rope=none, rope_values=rope,
        keys=keys, indices=indices, backend=backend
    )  # fmt: skip
    sievemla.write_latent(latent, slots, caches[1], rope=rope, backend=backend)
    sievemla.write_index_keys(k, weight, bias, slots, index_caches[1], rope=none, hadamard=True, backend=backend)
    assert (pages[0] == pages[1]).all() and pages[0].any()
    assert (index_caches[0].pages == index_caches[1].pages).all() and index_caches[0].pages.any()
    assert (indices == -1).all()


def test_scores_and_select(backend, rng):
    """Paged and contiguous keys give the same scores, and select() what index_scores() and topk() give."""
    heads, rows, width = 4, 6, 48
    flat = rng.standard_normal((SLOTS, 128)).astype(np.float32)
    cache = sievemla.IndexCache(flat.reshape(PAGES, PAGE_SIZE, 128), "f32")
    raw_q = rng.standard_normal((rows, heads, 128)).astype(np.float32)
    raw_weights = rng.standard_normal((rows, heads)).astype(np.float32)
    q, weights = np.empty_like(raw_q), np.empty_like(raw_weights)
    sievemla.index_queries(
        raw_q, raw_weights, q, weights, weight_scale=0.25, rope=sievemla.Rope("none"), backend=backend
    )
    assert (q == raw_q).all()
    near(weights, raw_weights * 0.25)
    table, lengths = np.array([[2, 0, 4], [1, 3, 0]], np.int32), np.array([48, 33, 5, 0, 17, 48], np.int32)
    paged = sievemla.PagedKeys(cache, table)
    logits = np.full((rows, width), np.nan, np.float32)
    sievemla.index_scores(q, weights, paged, lengths, logits, backend=backend)
    for t in range(rows):
        keys = np.concatenate([flat[p * PAGE_SIZE : (p + 1) * PAGE_SIZE] for p in table[t // 3]])
        near(logits[t, : lengths[t]], oracle.scores(q[t], weights[t], keys[: lengths[t]]))
        assert np.isneginf(logits[t, lengths[t] :]).all()
        alone = np.empty((1, width), np.float32)
        side = sievemla.ContiguousKeys(keys)
        sievemla.index_scores(q[t : t + 1], weights[t : t + 1], side, lengths[t : t + 1], alone, backend=backend)
        near(np.nan_to_num(alone, neginf=0), np.nan_to_num(logits[t : t + 1], neginf=0))
    k, slot_map = 8, sievemla.SlotMap(table, PAGE_SIZE)
    want_p, want_s = np.empty((rows, k), np.int32), np.empty((rows, k), np.int32)
    sievemla.topk(logits, lengths, positions=want_p, slots=want_s, map=slot_map, backend=backend)
    for budget in (1, 64 << 20):
        got_p, got_s = np.empty((rows, k), np.int32), np.empty((rows, k), np.int32)
        sievemla.select(
            q, weights, paged, lengths, width=width, positions=got_p, slots=got_s, map=slot_map,
            score_budget_bytes=budget, backend=backend
        )
        assert (got_p == want_p).all() and (got_s == want_s).all()
    shard = sievemla.Shard(1, 2, 4)
    want_scores, got_scores = np.empty((rows, k), np.float32), np.empty((rows, k), np.float32)
    sievemla.topk_candidates(logits, want_p, want_scores, want_p, shard=shard, backend=backend)
    sievemla.select(
        q, weights, paged, lengths, width=width, positions=got_p, selected_scores=got_scores, shard=shard,
        score_budget_bytes=1, backend=backend
    )
    assert (got_p == want_p).all() and (got_scores == want_scores).all()
    assert got_p.max() > width  # positions of the whole sequence
