# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="misc"
"""vLLM's layer around MLA attention, in another order: the indexer goes first, so that in a captured step it runs
beside what does not need it (queries' projection, norm, rope, W_UK, the write into the latent cache)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper


class IndexerFirst(MultiHeadLatentAttentionWrapper):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        adopted = hasattr(self.indexer, "sievemla")
        self.indexer_first = adopted and self.q_lora_rank is not None and not self.skip_topk

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: Any = None) -> Any:
        if not self.indexer_first or llama_4_scaling is not None:
            return super().forward(positions, hidden_states, llama_4_scaling)
        if torch.compiler.is_compiling():
            return self._forward(positions, hidden_states)
        try:
            return self._forward(positions, hidden_states)
        except BaseException:
            self.indexer.sievemla.layer.workspace.join()  # where it raised before attention did so
            raise

    def _forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> Any:
        down = self.fused_qkv_a_proj(hidden_states)[0]
        low, latent, key_rope = down.split([self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        low = self.q_a_layernorm(low)
        self.indexer(hidden_states, low, positions, self.indexer_rope_emb)
        q = self.q_b_proj(low)[0].view(-1, self.num_heads, self.qk_head_dim)
        latent = self.kv_a_layernorm(latent)
        key_rope = key_rope.unsqueeze(1)
        if self.rotary_emb is not None:
            q_rope = q[..., self.qk_nope_head_dim :]
            q[..., self.qk_nope_head_dim :], key_rope = self.rotary_emb(positions, q_rope, key_rope)
        shape = hidden_states.shape[0], self.num_heads * self.v_head_dim
        out = self.mla_attn(q, latent, key_rope, output_shape=shape)
        return self.o_proj(out)[0]
