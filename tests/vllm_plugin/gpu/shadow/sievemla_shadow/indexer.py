# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Scores and top-k on vLLM's own quantised queries and keys; and our whole indexer from the raw projections.

vLLM's kernels run first and their result stays. "Exact" is a stable sort of the same scores, largest first.
"""
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2

import sievemla
from sievemla_shadow.tally import worst

PAGE, DIM = 64, 128


def install() -> None:
    if hasattr(SparseAttnIndexer, "shadowed"):
        return
    SparseAttnIndexer.shadowed = True
    theirs, whole = SparseAttnIndexer.forward_cuda, deepseek_v2.Indexer.forward

    def forward_cuda(self, hidden_states, q_quant, k, weights):
        result = theirs(self, hidden_states, q_quant, k, weights)
        step = step_of(self.k_cache)
        if step is not None:
            compare_selection(self, step, q_quant, weights)
        return result

    def forward(self, hidden_states, qr, positions, rotary_emb):
        result = whole(self, hidden_states, qr, positions, rotary_emb)
        step = step_of(self.k_cache)
        if step is not None:
            compare_whole(self, step, hidden_states, qr, positions, rotary_emb)
        return result

    SparseAttnIndexer.forward_cuda = SparseAttnIndexer.forward_native = forward_cuda
    deepseek_v2.Indexer.forward = forward


def step_of(k_cache):
    """The attention's record of this step, with the lengths that the indexer's has."""
    steps = get_forward_context().attn_metadata
    if not isinstance(steps, dict):
        return None
    step = steps[k_cache.prefix.rsplit(".indexer", 1)[0] + ".attn"]
    step.seq_lens = steps[k_cache.prefix].seq_lens
    return step


def lengths_of(step) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and visible positions of each row."""
    request = step.req_id_per_token[: step.num_actual_tokens].int()
    ends = step.query_start_loc[1:][request.long()]
    row = torch.arange(len(request), dtype=torch.int32, device=request.device)
    return request, (step.seq_lens[request.long()] - (ends - 1 - row)).int()


def scratch(backend, needed: int, device) -> torch.Tensor:
    tensor = torch.empty(needed, dtype=torch.uint8, device=device)
    sievemla.workspace_init(tensor, backend=backend)
    return tensor


def select(backend, q, weights, cache, step, k: int) -> torch.Tensor:
    request, length = lengths_of(step)
    rows, width = len(request), int(length.max())
    positions = torch.empty((rows, k), dtype=torch.int32, device=q.device)
    needed = sievemla.select_workspace_bytes(backend, rows=rows, heads=q.shape[1], width=width, k=k)
    sievemla.select(
        q, weights, sievemla.PagedKeys(cache, step.block_table, request), length, width=width, positions=positions,
        workspace=scratch(backend, needed, q.device), backend=backend,
    )
    return positions


def member(positions: torch.Tensor, width: int) -> torch.Tensor:
    table = torch.zeros((len(positions), width + 1), dtype=torch.bool, device=positions.device)
    table.scatter_(1, torch.where(positions < 0, width, positions).long(), True)
    return table[:, :width]


def shared(one: torch.Tensor, other: torch.Tensor, length: torch.Tensor, width: int) -> float:
    """Share of entries in common over the rows that see more than k; 1 if there is none."""
    full = length > one.shape[1]
    if not full.any():
        return 1.0
    both = member(one[full], width) & member(other[full], width)
    return float(both.sum() / (full.sum() * one.shape[1]))


def compare_selection(indexer, step, q_quant, weights) -> None:
    backend = sievemla.Backend(f"cuda:{q_quant.device.index or 0}")
    rows = step.num_actual_tokens
    request, length = lengths_of(step)
    width, k = int(length.max()), indexer.topk_tokens
    q, weights = q_quant[:rows].view(torch.uint8), weights[:rows].float().contiguous()
    cache = sievemla.IndexCache(indexer.k_cache.kv_cache, "fp8")
    logits = torch.empty((rows, -(-width // 4) * 4), dtype=torch.float32, device=q.device)
    needed = sievemla.index_scores_workspace_bytes(backend, rows=rows, heads=q.shape[1], width=logits.shape[1])
    sievemla.index_scores(
        q, weights, sievemla.PagedKeys(cache, step.block_table, request), length, logits,
        workspace=scratch(backend, needed, q.device), backend=backend,
    )
    logits = logits[:, :width]
    # Scores of a sample of rows in float32, by other means.
    for row in torch.linspace(0, rows - 1, 9).long().unique().tolist():
        n, pages = int(length[row]), step.block_table[int(request[row])].long()
        page = indexer.k_cache.kv_cache[pages[: -(-n // PAGE)]].reshape(-1, PAGE * (DIM + 4))
        keys = page[:, : PAGE * DIM].reshape(-1, DIM).contiguous().view(torch.float8_e4m3fn).double()[:n]
        scale = page[:, PAGE * DIM :].contiguous().view(torch.float32).reshape(-1).double()[:n]
        heads = q_quant[row].view(torch.float8_e4m3fn).double()
        want = ((heads @ keys.T).relu() * weights[row].double()[:, None]).sum(0) * scale
        got = logits[row, :n].double()
        worst("scores, calc_diff", 1 - 2 * (want * got).sum() / (want.square() + got.square()).sum())
    mine = select(backend, q, weights, cache, step, k)
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k].int()
    visible = torch.arange(order.shape[1], device=q.device)[None] < length[:, None].clamp(max=k)
    exact = torch.full_like(mine, -1)
    exact[:, : order.shape[1]] = torch.where(visible, order, -1)
    worst("top-k, rows whose set differs from the exact one of the same scores",
          (member(mine, width) != member(exact, width)).any(1).sum())
    theirs = indexer.topk_indices_buffer[:rows, :k]
    worst("top-k, share that differs from vLLM's on the same inputs", 1 - shared(mine, theirs, length, width))


def compare_whole(indexer, step, hidden_states, qr, positions, rotary_emb) -> None:
    backend = sievemla.Backend(f"cuda:{hidden_states.device.index or 0}")
    rows = step.num_actual_tokens
    q = indexer.wq_b(qr)[0].view(-1, indexer.n_head, DIM)[:rows]
    keys, weights = indexer.wk_weights_proj(hidden_states)[0][:rows].split([DIM, indexer.n_head], dim=-1)
    rope = sievemla.Rope("half_split" if rotary_emb.is_neox_style else "interleaved", positions[:rows],
                         rotary_emb.cos_sin_cache)
    theirs = indexer.k_cache.kv_cache
    copy = theirs.clone()  # our keys in the pages of theirs
    slots = step.slot_mapping[:rows]
    cache = sievemla.IndexCache(copy, "fp8")
    sievemla.write_index_keys(keys, indexer.k_norm.weight, indexer.k_norm.bias, slots, cache, rope=rope,
                              norm_eps=indexer.k_norm.eps, round_bf16=True, backend=backend)
    live = slots[slots >= 0].int()
    read = []
    for pages in (theirs, copy):
        codes = torch.empty((len(live), DIM), dtype=torch.uint8, device=live.device)
        scales = torch.empty(len(live), dtype=torch.float32, device=live.device)
        sievemla.gather_index_keys(sievemla.IndexCache(pages, "fp8"), live, codes, scales=scales, backend=backend)
        read.append((codes, scales))
    worst("index keys from the raw projection, share of codes that differ", (read[0][0] != read[1][0]).float().mean())
    worst("index keys from the raw projection, share of scales that differ", (read[0][1] != read[1][1]).float().mean())
    out_q = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    out_weights = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    sievemla.index_queries(q, weights, out_q, out_weights, weight_scale=indexer.n_head**-0.5 * DIM**-0.5, rope=rope,
                           round_bf16=True, backend=backend)
    _, length = lengths_of(step)
    mine = select(backend, out_q, out_weights, cache, step, indexer.topk_tokens)
    width, vllm = int(length.max()), indexer.topk_indices_buffer[:rows]
    worst("top-k of our whole indexer, share that differs from vLLM's", 1 - shared(mine, vllm, length, width))
    # The same quantised indexer with everything between two roundings in double.
    pages = theirs.clone()
    exact_keys(indexer, keys, rope, slots, pages)
    exact_q, exact_weights = exact_queries(indexer, q, weights, rope)
    exact = select(backend, exact_q, exact_weights, sievemla.IndexCache(pages, "fp8"), step, indexer.topk_tokens)
    codes = torch.empty_like(read[0][0])
    scales = torch.empty_like(read[0][1])
    sievemla.gather_index_keys(sievemla.IndexCache(pages, "fp8"), live, codes, scales=scales, backend=backend)
    worst("index keys in double, share of codes that differ from vLLM's", (codes != read[0][0]).float().mean())
    worst("index keys in double, share of codes that differ from ours", (codes != read[1][0]).float().mean())
    worst("top-k in double, share that differs from vLLM's", 1 - shared(exact, vllm, length, width))
    worst("top-k in double, share that differs from ours", 1 - shared(exact, mine, length, width))


def rotated(x: torch.Tensor, rope: sievemla.Rope) -> torch.Tensor:
    """x [tokens, ..., 128] double; the first 64 rotated."""
    angles = rope.cos_sin[rope.positions].double()
    angles = angles.view(len(x), *[1] * (x.dim() - 2), 64)
    cos, sin = angles[..., :32], angles[..., 32:]
    head = x[..., :64]
    a, b = (head[..., ::2], head[..., 1::2]) if rope.style == "interleaved" else head.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    head = torch.stack(turned, -1).flatten(-2) if rope.style == "interleaved" else torch.cat(turned, -1)
    return torch.cat([head, x[..., 64:]], -1)


def stored(x: torch.Tensor) -> torch.Tensor:
    """What vLLM's norm and rotation store of values that they have in float32."""
    return x.float().bfloat16().double()


def quantised(x: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and power-of-two scales of x [..., 128] double."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1).clamp(min=floor) / 448)))
    return (x / scale[..., None]).float().to(torch.float8_e4m3fn).view(torch.uint8), scale.float()


def exact_keys(indexer, keys: torch.Tensor, rope: sievemla.Rope, slots: torch.Tensor, pages: torch.Tensor) -> None:
    norm = indexer.k_norm
    normed = torch.nn.functional.layer_norm(keys.double(), (DIM,), norm.weight.double(), norm.bias.double(), norm.eps)
    codes, scales = quantised(stored(rotated(stored(normed), rope)), 1e-4)
    live = slots >= 0
    page, at = slots[live] // PAGE, slots[live] % PAGE
    flat = pages.view(len(pages), -1)
    flat[:, : PAGE * DIM].view(-1, PAGE, DIM)[page, at] = codes[live]
    flat[:, PAGE * DIM :].view(-1, PAGE, 4)[page, at] = scales[live].view(torch.uint8).view(-1, 4)


def exact_queries(indexer, q: torch.Tensor, weights: torch.Tensor, rope: sievemla.Rope):
    codes, scales = quantised(stored(rotated(q.double(), rope)), 1e-10)
    return codes, (weights.double() * scales.double() * indexer.n_head**-0.5 * DIM**-0.5).float()
