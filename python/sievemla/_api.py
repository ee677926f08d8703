# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The public C++ interface (include/sievemla/*.h) in Python. What the headers say about shapes holds here too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ._library import function, table


class Tensor(Protocol):
    """Anything that DLPack exports: rank 1 to 4, float32, bfloat16, uint8, int32 or int64, in host memory or on a CUDA
    device. uint16 and ml_dtypes.bfloat16 arrays are bf16; float8_e4m3fn tensors are u8 (raw e4m3)."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


KvFormatName = Literal["f32", "bf16", "fp8_ds_mla", "fp8_nope"]
IndexFormatName = Literal["f32", "bf16", "fp8"]
ScaleRule = Literal["arbitrary", "power_of_two", "engine"]
RopeStyle = Literal["half_split", "interleaved", "none"]

SCORE_BUDGET_BYTES = 64 << 20

_BY_DEVICE = -1  # bindings/tensors.h

# The places of the tensors that a function writes, in the order of bindings/module.cc.
_attention = function("attention", writes=(6, 13, 14))
_attention_workspace_bytes = function("attention_workspace_bytes")
_combine = function("combine", writes=(2, 4))
_write_latent = function("write_latent", writes=(2,))
_gather_latent = function("gather_latent", writes=(5,))
_write_index_keys = function("write_index_keys", writes=(4,))
_write_layer = function("write_layer", writes=(4, 17, 26))
_gather_index_keys = function("gather_index_keys", writes=(3, 4))
_index_queries = function("index_queries", writes=(4, 5, 15))
_index_scores = function("index_scores", writes=(3, 12))
_index_scores_workspace_bytes = function("index_scores_workspace_bytes")
_topk = function("topk", writes=(2, 3, 11))
_topk_workspace_bytes = function("topk_workspace_bytes")
_positions_to_slots = function("positions_to_slots", writes=(1,))
_expand_pools = function("expand_pools", writes=(2,))
_select = function("select", writes=(4, 5, 19, 24))
_select_workspace_bytes = function("select_workspace_bytes")
_topk_candidates = function("topk_candidates", writes=(2, 3))
_merge_topk = function("merge_topk", writes=(2, 3, 4, 12))
_merge_topk_workspace_bytes = function("merge_topk_workspace_bytes")
_shard_slots = function("shard_slots", writes=(1, 4))
_backend_open = function("backend_open")
_backend_name = function("backend_name")
_backend_threads = function("backend_threads")
_backend_prepare = function("backend_prepare")
_workspace_init = function("workspace_init", writes=(0,))
_built_with_cuda = function("built_with_cuda")
_version = function("version")
_commit = function("commit")
_kv_row_bytes = function("kv_row_bytes")


# ---- backends --------------------------------------------------------------------------------------------------------


class Backend:
    """Where the stages run. Every function takes one as `backend`; without it, the tensors' device decides: "cpu" for
    host memory, "cuda:<n>" for a device, opened and prepared at its first call.

    name: "reference" (double precision, host memory: the specification), "cpu", "cuda", "cuda:<n>", or "auto" (a CUDA
    device where one can be used, else the CPU; SIEVEMLA_BACKEND overrides). threads: workers on the CPU, 0 = automatic.

    Raises ValueError for another name, NotImplementedError for cuda in a build without it, RuntimeError where the
    device cannot be used.
    """

    __slots__ = ("_handle", "name", "threads")

    def __init__(self, name: str = "auto", threads: int = 0) -> None:
        self._handle: int = _backend_open(name, threads)
        self.name: str = _backend_name(self._handle)
        self.threads: int = _backend_threads(self._handle)

    def prepare(self) -> None:
        """Loads every kernel that this device can run, so that nothing is loaded later, in a graph capture say."""
        _backend_prepare(self._handle)

    def __repr__(self) -> str:
        return f"Backend({self.name!r}, threads={self.threads})"


def _handle(backend: Backend | None) -> int:
    return _BY_DEVICE if backend is None else backend._handle


def workspace_init(workspace: Tensor, *, backend: Backend | None = None) -> None:
    """Makes a fresh workspace, [bytes] uint8 aligned to 256, usable on the current stream. Once, before use."""
    _workspace_init(workspace, _handle(backend))


# ---- caches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KvFormat:
    """A row type of the latent cache."""

    name: str
    storage: str  # dtype of KvCache.pages: "f32", "bf16", or "u8" for packed rows
    latent: int  # required latent width, 0 = any
    rope: int  # required rope width, 0 = none, -1 = any
    scale_group: int  # latent elements that share one f32 scale, 0 = unscaled
    source: str

    def row_bytes(self, latent: int = 512, rope: int = 64) -> int:
        result: int = _kv_row_bytes(self.name, latent, rope)
        return result


def kv_formats() -> list[KvFormat]:
    """The row types that this build knows."""
    return [KvFormat(name, s, int(lat), int(r), int(g), source) for name, s, lat, r, g, source in table("kv_formats")]


@dataclass(frozen=True)
class KvCache:
    """A paged cache of latent rows. Slot s is row s % page_size of page s // page_size.

    pages: [pages, page_size, row], float32 or bfloat16 with row >= latent + rope, or uint8 with row >= the format's
    bytes. Any page and row stride.
    rope: 64, or 0 where a row holds the latent alone (always so for fp8_nope).
    """

    pages: Tensor
    format: KvFormatName = "bf16"
    latent: int = 512
    rope: int = 64


@dataclass(frozen=True)
class IndexCache:
    """A paged cache of indexer keys.

    pages: [pages, page_size, 128] float32 or bfloat16; fp8: [pages, page_size, 132] uint8, in each page first
    page_size * 128 bytes of e4m3, then page_size f32 scales.
    """

    pages: Tensor
    format: IndexFormatName = "fp8"


def write_latent(
    latent: Tensor,
    slots: Tensor,
    cache: KvCache,
    *,
    rope: Tensor | None = None,
    scale: ScaleRule = "arbitrary",
    backend: Backend | None = None,
) -> None:
    """Quantises new rows and scatters them into the cache.

    latent: [tokens, cache.latent] float32 or bfloat16. rope: [tokens, cache.rope], same dtype, rotated.
    slots: [tokens] int32 or int64, distinct; negative: skipped; past the cache: ValueError on the host, else skipped.
    scale: of fp8 rows, amax / 448 of each group of 128, or the power of two at or above that; engine is the first with
    vLLM's own rounding of the codes.
    """
    _write_latent(
        latent, slots, cache.pages, cache.format, cache.latent, cache.rope, rope, scale, _handle(backend)
    )


def gather_latent(cache: KvCache, slots: Tensor, out: Tensor, *, backend: Backend | None = None) -> None:
    """Reads rows back. slots: [n] int32 or int64; outside the cache: zeros. out: [n, latent + rope] float32 or bf16."""
    _gather_latent(cache.pages, cache.format, cache.latent, cache.rope, slots, out, _handle(backend))


# ---- stage 1: indexer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """How the first 64 of an indexer head are rotated. There is no default style: DeepSeek-V3.2 is half_split, GLM-5 to
    GLM-5.2 interleaved, GLM-5.3-Flash none.

    positions: [tokens] int32 or int64. cos_sin: [max_position, 64] float32 or bfloat16, 32 cosines then 32 sines.
    """

    style: RopeStyle
    positions: Tensor | None = None
    cos_sin: Tensor | None = None


def write_index_keys(
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    slots: Tensor,
    cache: IndexCache,
    *,
    rope: Rope,
    norm_eps: float = 1e-6,
    scale: ScaleRule = "power_of_two",
    round_bf16: bool = False,
    hadamard: bool = False,
    backend: Backend | None = None,
) -> None:
    """key = rope(LayerNorm(k)), quantised and scattered.

    k: [tokens, 128] float32 or bfloat16, the raw projection. norm_weight, norm_bias: [128]. slots: as write_latent.
    round_bf16: rounds to bfloat16 after the norm and each rotation, as engines do that run these one by one.
    hadamard: multiplies by the Hadamard matrix / sqrt(128) after the rope; keys and queries have it, or neither.
    """
    _write_index_keys(
        k, norm_weight, norm_bias, slots, cache.pages, cache.format, rope.style, rope.positions, rope.cos_sin,
        norm_eps, scale, round_bf16, hadamard, _handle(backend)
    )


@dataclass(frozen=True)
class IndexKeys:
    """The keys of a layer that has an indexer of its own, as write_index_keys takes them."""

    k: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    slots: Tensor
    cache: IndexCache
    rope: Rope
    norm_eps: float = 1e-6
    scale: ScaleRule = "power_of_two"
    round_bf16: bool = False
    hadamard: bool = False


def _parts_of_keys(keys: IndexKeys | None) -> tuple[Any, ...]:
    if keys is None:
        return None, None, None, None, None, "fp8", "none", None, None, 1e-6, "power_of_two", False, False
    return (
        keys.k, keys.norm_weight, keys.norm_bias, keys.slots, keys.cache.pages, keys.cache.format, keys.rope.style,
        keys.rope.positions, keys.rope.cos_sin, keys.norm_eps, keys.scale, keys.round_bf16, keys.hadamard
    )  # fmt: skip


def write_layer(
    latent: Tensor,
    latent_weight: Tensor,
    slots: Tensor,
    cache: KvCache,
    *,
    latent_eps: float,
    rope: Rope,
    rope_values: Tensor | None = None,
    scale: ScaleRule = "arbitrary",
    keys: IndexKeys | None = None,
    indices: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """All that a layer writes for new tokens, in one kernel on CUDA: RMSNorm(latent) and rope(rope_values) as
    write_latent writes them, `keys` as write_index_keys writes them, and -1 to all of `indices`.

    latent: [tokens, cache.latent] float32 or bfloat16, as projected. latent_weight: [cache.latent].
    rope_values: [tokens, 64], same dtype, not rotated; absent where cache.rope is 0. indices: [rows, k] int32.
    """
    _write_layer(
        latent, latent_weight, latent_eps, slots, cache.pages, cache.format, cache.latent, cache.rope, rope.style,
        rope_values, rope.positions, rope.cos_sin, scale, *_parts_of_keys(keys), indices, _handle(backend)
    )


def gather_index_keys(
    cache: IndexCache, slots: Tensor, keys: Tensor, *, scales: Tensor | None = None, backend: Backend | None = None
) -> None:
    """Reads keys back. keys: [n, 128] of the cache's dtype (fp8: uint8, raw e4m3). scales: [n] float32, fp8 only."""
    _gather_index_keys(cache.pages, cache.format, slots, keys, scales, _handle(backend))


def index_queries(
    q: Tensor,
    weights: Tensor,
    out_q: Tensor,
    out_weights: Tensor,
    *,
    weight_scale: float,
    rope: Rope,
    scale: ScaleRule = "power_of_two",
    round_bf16: bool = False,
    hadamard: bool = False,
    keys: IndexKeys | None = None,
    backend: Backend | None = None,
) -> None:
    """out_q = rope(q), out_weights = weights * weight_scale (times q's scale where out_q is uint8, e4m3).

    q: [tokens, heads, 128] and weights: [tokens, heads], float32 or bfloat16. out_q: float32, bfloat16 or uint8.
    out_weights: float32. weight_scale: heads**-0.5 * 128**-0.5. round_bf16: rounds to bfloat16 after each rotation.
    hadamard: as the keys. keys: written too, as write_index_keys writes them; by the same kernel on CUDA.
    """
    _index_queries(
        q, weights, weight_scale, rope.style, out_q, out_weights, rope.positions, rope.cos_sin, scale,
        round_bf16, hadamard, *_parts_of_keys(keys), _handle(backend)
    )


@dataclass(frozen=True)
class PagedKeys:
    """Keys of paged requests. block_table: [requests, max_pages] int32. row_request: [rows] int32; without it the rows
    are dealt evenly among the requests."""

    cache: IndexCache
    block_table: Tensor
    row_request: Tensor | None = None

    def _parts(self) -> tuple[Any, ...]:
        return self.cache.pages, self.cache.format, self.block_table, self.row_request, None, None, None


@dataclass(frozen=True)
class ContiguousKeys:
    """Keys side by side; row t sees keys start[t] to start[t] + length[t]. keys: [n, 128] float32, bfloat16 or uint8
    (e4m3, with scales [n] float32). starts: [rows] int32, 0 if not given."""

    keys: Tensor
    scales: Tensor | None = None
    starts: Tensor | None = None

    def _parts(self) -> tuple[Any, ...]:
        return None, "", None, None, self.keys, self.scales, self.starts


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: PagedKeys | ContiguousKeys,
    lengths: Tensor,
    logits: Tensor,
    *,
    fill: bool = True,
    workspace: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """logits[t, j] = k_scale[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])

    q: [rows, heads, 128] float32, bfloat16 or uint8 (e4m3, with fp8 keys). weights: [rows, heads] float32.
    lengths: [rows] int32, keys that the row sees. logits: [rows, width] float32; columns past the length become -inf
    if `fill`, else they are left alone.
    """
    _index_scores(q, weights, lengths, logits, *keys._parts(), fill, workspace, _handle(backend))


def index_scores_workspace_bytes(backend: Backend, *, rows: int, heads: int, width: int) -> int:
    result: int = _index_scores_workspace_bytes(rows, heads, width, backend._handle)
    return result


# ---- stage 2: top-k --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotMap:
    """position -> slot = block_table[request, position // page_size] * page_size + position % page_size.

    block_table: [requests, max_pages] int32. row_request: [rows] int32; without it the rows are dealt evenly.
    rank, ranks, interleave: which positions this decode-context-parallel rank holds (include/sievemla/topk.h).
    """

    block_table: Tensor
    page_size: int
    row_request: Tensor | None = None
    rank: int = 0
    ranks: int = 1
    interleave: int = 1

    def _parts(self) -> tuple[Any, ...]:
        return self.block_table, self.row_request, self.page_size, self.rank, self.ranks, self.interleave


_NO_MAP = (None, None, 0, 0, 1, 1)


@dataclass(frozen=True)
class Shard:
    """Which positions a decode-context-parallel rank holds: p is on rank p // interleave % ranks."""

    rank: int = 0
    ranks: int = 1
    interleave: int = 1

    def _parts(self) -> tuple[int, int, int]:
        return self.rank, self.ranks, self.interleave


def topk(
    scores: Tensor,
    lengths: Tensor,
    *,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    map: SlotMap | None = None,
    starts: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """The k best positions of each row, ascending, then -1: exact, ties to the lowest position, NaN below every number.

    scores: [rows, width] float32. lengths, starts: [rows] int32; row t sees columns start to start + length.
    positions: [rows, k] int32, relative to the start. slots: [rows, k] int32 or int64, with `map`. Either or both.
    """
    _topk(
        scores, lengths, positions, slots, starts, *(_NO_MAP if map is None else map._parts()), workspace,
        _handle(backend)
    )


def topk_workspace_bytes(backend: Backend, *, rows: int, width: int, k: int) -> int:
    result: int = _topk_workspace_bytes(rows, width, k, backend._handle)
    return result


def positions_to_slots(positions: Tensor, map: SlotMap, slots: Tensor, *, backend: Backend | None = None) -> None:
    """positions: [rows, k] int32 -> slots: [rows, k] int32 or int64, lane by lane; what has no slot becomes -1."""
    _positions_to_slots(
        positions, slots, map.block_table, map.page_size, map.row_request, map.rank, map.ranks, map.interleave,
        _handle(backend)
    )


def expand_pools(
    pools: Tensor, lengths: Tensor, positions: Tensor, *, kpool: int, backend: Backend | None = None
) -> None:
    """Pool p stands for positions p * kpool to p * kpool + kpool - 1 (GLM-5.3-Flash).

    pools: [rows, n] int32. lengths: [rows] int32, in tokens. positions: [rows, >= n * kpool + kpool - 1] int32.
    """
    _expand_pools(pools, lengths, positions, kpool, _handle(backend))


def select(
    q: Tensor,
    weights: Tensor,
    keys: PagedKeys | ContiguousKeys,
    lengths: Tensor,
    *,
    width: int,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    map: SlotMap | None = None,
    selected_scores: Tensor | None = None,
    shard: Shard | None = None,
    score_budget_bytes: int = SCORE_BUDGET_BYTES,
    workspace: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """index_scores and topk together, by chunks of rows, so that at most `score_budget_bytes` of scores exist.

    width: the longest length. The rest as in index_scores and topk. With selected_scores, [rows, k] float32, they and
    `positions` are what topk_candidates makes of the selection: what the rank `shard`, whose keys these are, sends.
    """
    _select(
        q, weights, lengths, width, positions, slots, *keys._parts(), *(_NO_MAP if map is None else map._parts()),
        selected_scores, *(shard or Shard())._parts(), score_budget_bytes, workspace, _handle(backend)
    )


def select_workspace_bytes(
    backend: Backend, *, rows: int, heads: int, width: int, k: int, score_budget_bytes: int = SCORE_BUDGET_BYTES
) -> int:
    result: int = _select_workspace_bytes(rows, heads, width, k, score_budget_bytes, backend._handle)
    return result


# ---- decode context parallel -----------------------------------------------------------------------------------------


def topk_candidates(
    scores: Tensor,
    local: Tensor,
    selected_scores: Tensor,
    positions: Tensor,
    *,
    shard: Shard,
    starts: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """What a rank sends of its selection: the scores, and the positions in the whole sequence.

    scores: [rows, width] float32 and starts: [rows] int32, as topk read them. local: [rows, k] int32, as topk wrote it.
    selected_scores: [rows, k] float32. positions: [rows, k] int32, may be `local` itself.
    """
    _topk_candidates(scores, local, selected_scores, positions, *shard._parts(), starts, _handle(backend))


def merge_topk(
    scores: Tensor,
    positions: Tensor,
    *,
    selected: Tensor | None = None,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    map: SlotMap | None = None,
    lengths: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """All ranks' candidates -> the selection among all positions, by topk's rules: that of a rank with everything.

    scores: [ranks, rows, n] float32. positions: [ranks, rows, n] int32, ascending, then -1. lengths: [ranks, rows]
    int32, candidates of each, n if not given. selected: [rows, k] int32, ascending, then -1. slots, counts: as
    shard_slots.
    """
    _merge_topk(
        scores, positions, selected, slots, counts, lengths, *(_NO_MAP if map is None else map._parts()), workspace,
        _handle(backend)
    )


def merge_topk_workspace_bytes(backend: Backend, *, ranks: int, rows: int, n: int, k: int) -> int:
    result: int = _merge_topk_workspace_bytes(ranks, rows, n, k, backend._handle)
    return result


def shard_slots(
    positions: Tensor,
    map: SlotMap,
    slots: Tensor,
    *,
    counts: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """positions_to_slots without gaps: the slots that are on this shard come first, then -1.

    positions: [rows, k] int32. slots: [rows, k] int32 or int64. counts: [rows] int32, slots of each row: attention's
    topk_length.
    """
    _shard_slots(
        positions, slots, map.block_table, map.page_size, counts, map.row_request, map.rank, map.ranks, map.interleave,
        _handle(backend)
    )


# ---- stage 3: attention ----------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    cache: KvCache,
    out: Tensor,
    *,
    scale: float,
    slots: Tensor | None = None,
    topk_length: Tensor | None = None,
    block_table: Tensor | None = None,
    lengths: Tensor | None = None,
    q_rope: Tensor | None = None,
    sink: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    round_weights: bool = False,
    batch_invariant: bool = False,
    check_indices: bool = False,
    backend: Backend | None = None,
) -> None:
    """Softmax over the selected cache rows (`slots`), or over all rows of each request (`block_table` and `lengths`).

    q: [tokens, heads, latent + rope] float32 or bfloat16 (bfloat16 on CUDA); or [tokens, heads, latent] with
    q_rope [tokens, heads, rope]. Any strides with a contiguous last dimension.
    slots: [tokens, topk], or [requests, q_len, topk], int32 or int64; a slot outside the cache is skipped.
    topk_length: [tokens] int32; lanes at or past it are never read.
    block_table: [requests, max_pages] int32. lengths: [requests] int32, in rows; a causal tail of tokens / requests.
    scale: multiplies q . row. sink: [heads] float32. out: [tokens, heads, latent] float32 or bfloat16; +0 where nothing
    is selected. lse: [tokens, heads] float32, natural logarithm, without the sink; -inf where nothing is selected.
    round_weights: tensor cores take the softmax's weights as bf16, as other engines' kernels do, and nothing is added.
    workspace: [bytes] uint8 as attention_workspace_bytes says; may be left out on the host.
    """
    _attention(
        q, cache.pages, cache.format, cache.latent, cache.rope, scale, out, slots, topk_length, block_table, lengths,
        q_rope, sink, lse, workspace, round_weights, batch_invariant, check_indices,
        -1 if backend is None else backend._handle
    )


def attention_workspace_bytes(
    backend: Backend, *, tokens: int, heads: int, lanes: int, latent: int = 512, rope: int = 64
) -> int:
    """Enough for every call within these bounds. lanes: the top-k width, or the longest request in rows."""
    result: int = _attention_workspace_bytes(tokens, heads, lanes, latent, rope, backend._handle)
    return result


# ---- stage 4: combine ------------------------------------------------------------------------------------------------


def combine(
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    *,
    sink: Tensor | None = None,
    lse: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Merges the results of ranks that each saw part of the rows.

    partial_out: [parts, tokens, heads, width] float32 or bfloat16. partial_lse: [parts, tokens, heads] float32, natural
    logarithm; -inf: the part saw nothing. out: [tokens, heads, width]. lse: [tokens, heads] float32.
    """
    _combine(partial_out, partial_lse, out, sink, lse, _handle(backend))


# ---- what this build holds -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel of this build, whether or not it can run on this machine."""

    stage: str
    name: str
    backend: str
    runs_here: bool
    needs: str


def kernels() -> list[Kernel]:
    return [Kernel(stage, name, b, runs == "1", needs) for stage, name, b, runs, needs in table("kernels")]


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model that the library knows (include/sievemla/geometry.h)."""

    name: str
    model_type: str
    layers: int
    full_layers: int
    heads: int
    latent: int
    rope: int
    nope: int
    v: int
    index_heads: int
    index_topk: int
    index_kpool: int
    index_rope: str


def geometries() -> list[Geometry]:
    rows = ([int(field) if field.isdigit() else field for field in row] for row in table("geometries"))
    return [Geometry(*row) for row in rows]  # type: ignore[arg-type]


def built_with_cuda() -> bool:
    """False: this is the CPU build, and Backend("cuda") raises NotImplementedError."""
    result: bool = _built_with_cuda()
    return result


def version() -> str:
    result: str = _version()
    return result


def commit() -> str:
    """The commit that the library was built from, "unknown" outside a git checkout."""
    result: str = _commit()
    return result
