# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Attention, and the writer of latent rows, on the inputs of every call of vLLM's."""
import torch
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl

import sievemla
from sievemla_shadow import indexer
from sievemla_shadow.tally import worst


PARTS = {
    "bf16": {"bytes": slice(None)},
    "fp8_ds_mla": {"codes": slice(0, 512), "scale bytes": slice(512, 528), "rope bytes": slice(528, 656)},
}


class ShadowBackend(FlashMLASparseBackend):
    @staticmethod
    def get_impl_cls():
        return ShadowImpl


def rows_at(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The bytes of these rows, [n, row bytes]."""
    return cache[slots // cache.shape[1], slots % cache.shape[1]].contiguous().view(torch.uint8)


class ShadowImpl(FlashMLASparseImpl):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        indexer.install()
        device = self.topk_indices_buffer.device
        self.ours = sievemla.Backend(f"cuda:{device.index or 0}")
        self.ours.prepare()

    def format(self) -> str:
        return "fp8_ds_mla" if self.kv_cache_dtype == "fp8_ds_mla" else "bf16"

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, *rest, **named):
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *rest, **named)
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        keep = (slots >= 0).nonzero().flatten()
        if not len(keep):
            return
        mine = torch.zeros((-(-len(slots) // 64), 64, kv_cache.shape[-1]), dtype=kv_cache.dtype, device=slots.device)
        theirs = rows_at(kv_cache, slots[keep])
        for rule in ("engine", "arbitrary"):
            sievemla.write_latent(
                kv_c_normed[: len(slots)], torch.arange(len(slots), device=slots.device),
                sievemla.KvCache(mine, self.format()), rope=k_pe.reshape(len(k_pe), -1)[: len(slots)], scale=rule,
                backend=self.ours,
            )
            ours = rows_at(mine, keep)
            for part, cut in PARTS[self.format()].items():
                differ = (ours[:, cut] != theirs[:, cut]).float().mean()
                worst(f"latent rows {self.format()}, share of {part} that differ with scale rule {rule}", differ)
            if self.format() == "fp8_ds_mla":
                scales = [rows[:, PARTS["fp8_ds_mla"]["scale bytes"]].contiguous().view(torch.int32)
                          for rows in (ours, theirs)]
                worst(f"latent rows, scales with rule {rule}, units in the last place",
                      (scales[0] - scales[1]).abs().max())

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        nope, rope = (part.clone() for part in q)
        out, lse = super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        rows, heads = nope.shape[:2]
        positions = self.topk_indices_buffer[:rows]
        slots = torch.empty_like(positions)
        sievemla.positions_to_slots(
            positions,
            sievemla.SlotMap(attn_metadata.block_table, 64, attn_metadata.req_id_per_token[:rows].int()),
            slots, backend=self.ours,
        )
        # In float32: one step of bf16 at the maximum is 0.4 to 0.8 % of it, and theirs has been rounded already.
        mine = torch.empty((rows, heads, 512), dtype=torch.float32, device=nope.device)
        theirs = out[:, :heads].float()
        kind = "decode" if rows <= 4 else "prefill"
        for rounded in (True, False):
            sievemla.attention(
                nope, sievemla.KvCache(kv_c_and_k_pe_cache, self.format()), mine, scale=self.scale, slots=slots,
                q_rope=rope, workspace=self.scratch(rows, heads, positions.shape[1]), round_weights=rounded,
                backend=self.ours,
            )
            said = f"attention {self.format()} {kind}, weights {'rounded' if rounded else 'exact'}"
            worst(f"{said}, |difference| / max |FLASHMLA_SPARSE|", (mine - theirs).abs().max() / theirs.abs().max())
            worst(f"{said}, rms of the difference / rms", (mine - theirs).norm() / theirs.norm())
        return out, lse

    def scratch(self, rows, heads, lanes):
        needed = sievemla.attention_workspace_bytes(self.ours, tokens=rows, heads=heads, lanes=lanes)
        scratch = torch.empty(needed, dtype=torch.uint8, device=self.topk_indices_buffer.device)
        sievemla.workspace_init(scratch, backend=self.ours)
        return scratch
