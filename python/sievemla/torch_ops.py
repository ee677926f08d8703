# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# mypy: disable-error-code="no-untyped-call"
"""torch.ops.sievemla.*: the stages as PyTorch operators, which torch.compile and CUDA graphs take whole.

Each writes its outputs in place and returns nothing, so its fake implementation does nothing. Arguments are those of
the functions in the package, with the small structs taken apart; the device of the tensors decides the backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library, register_fake

# In the order of bindings/module.cc, less the backend's handle.
_SCHEMAS = (
    "attention(Tensor q, Tensor cache, str kv_format, int latent, int rope, float scale, Tensor(a!) out, "
    "Tensor? slots=None, Tensor? topk_length=None, Tensor? block_table=None, Tensor? lengths=None, "
    "Tensor? q_rope=None, Tensor? sink=None, Tensor(b!)? lse=None, Tensor(c!)? workspace=None, "
    "bool round_weights=False, bool batch_invariant=False, bool check_indices=False) -> ()",
    "combine(Tensor partial_out, Tensor partial_lse, Tensor(a!) out, Tensor? sink=None, Tensor(b!)? lse=None) -> ()",
    "write_latent(Tensor latent, Tensor slots, Tensor(a!) cache, str kv_format, int latent_width, int rope_width, "
    'Tensor? rope=None, str scale="arbitrary") -> ()',
    "gather_latent(Tensor cache, str kv_format, int latent, int rope, Tensor slots, Tensor(a!) out) -> ()",
    "write_index_keys(Tensor k, Tensor norm_weight, Tensor norm_bias, Tensor slots, Tensor(a!) cache, "
    "str index_format, str rope_style, Tensor? positions=None, Tensor? cos_sin=None, float norm_eps=1e-6, "
    'str scale="power_of_two", bool round_bf16=False, bool hadamard=False) -> ()',
    "write_layer(Tensor latent, Tensor latent_weight, float latent_eps, Tensor slots, Tensor(a!) cache, str kv_format, "
    "int latent_width, int rope_width, str rope_style, Tensor? rope=None, Tensor? positions=None, "
    'Tensor? cos_sin=None, str scale="arbitrary", Tensor? k=None, Tensor? norm_weight=None, '
    "Tensor? norm_bias=None, Tensor? key_slots=None, Tensor(b!)? key_cache=None, "
    'str index_format="fp8", str key_rope_style="none", Tensor? key_positions=None, '
    'Tensor? key_cos_sin=None, float norm_eps=1e-6, str key_scale="power_of_two", '
    "bool key_round_bf16=False, bool key_hadamard=False, Tensor(c!)? indices=None) -> ()",
    "gather_index_keys(Tensor cache, str index_format, Tensor slots, Tensor(a!) keys, "
    "Tensor(b!)? scales=None) -> ()",
    "index_queries(Tensor q, Tensor weights, float weight_scale, str rope_style, Tensor(a!) out_q, "
    "Tensor(b!) out_weights, Tensor? positions=None, Tensor? cos_sin=None, "
    'str scale="power_of_two", bool round_bf16=False, bool hadamard=False, Tensor? k=None, '
    "Tensor? norm_weight=None, Tensor? norm_bias=None, Tensor? key_slots=None, Tensor(c!)? key_cache=None, "
    'str index_format="fp8", str key_rope_style="none", Tensor? key_positions=None, '
    'Tensor? key_cos_sin=None, float norm_eps=1e-6, str key_scale="power_of_two", '
    "bool key_round_bf16=False, bool key_hadamard=False) -> ()",
    "index_scores(Tensor q, Tensor weights, Tensor lengths, Tensor(a!) logits, Tensor? cache=None, "
    'str index_format="fp8", Tensor? block_table=None, Tensor? row_request=None, Tensor? keys=None, '
    "Tensor? scales=None, Tensor? starts=None, bool fill=True, Tensor(b!)? workspace=None) -> ()",
    "topk(Tensor scores, Tensor lengths, Tensor(a!)? positions=None, Tensor(b!)? slots=None, Tensor? starts=None, "
    "Tensor? block_table=None, Tensor? row_request=None, int page_size=0, int rank=0, int ranks=1, "
    "int interleave=1, Tensor(c!)? workspace=None) -> ()",
    "positions_to_slots(Tensor positions, Tensor(a!) slots, Tensor block_table, int page_size, "
    "Tensor? row_request=None, int rank=0, int ranks=1, int interleave=1) -> ()",
    "expand_pools(Tensor pools, Tensor lengths, Tensor(a!) positions, int kpool) -> ()",
    "select(Tensor q, Tensor weights, Tensor lengths, int width, Tensor(a!)? positions=None, "
    'Tensor(b!)? slots=None, Tensor? cache=None, str index_format="fp8", Tensor? block_table=None, '
    "Tensor? row_request=None, Tensor? keys=None, Tensor? scales=None, Tensor? starts=None, "
    "Tensor? slot_block_table=None, Tensor? slot_row_request=None, int page_size=0, int rank=0, int ranks=1, "
    "int interleave=1, Tensor(d!)? selected_scores=None, int shard_rank=0, int shard_ranks=1, int shard_interleave=1, "
    f"int score_budget_bytes={64 << 20}, Tensor(c!)? workspace=None) -> ()",
    "topk_candidates(Tensor scores, Tensor local, Tensor(a!) selected_scores, Tensor(b!) positions, int rank, "
    "int ranks, int interleave, Tensor? starts=None) -> ()",
    "merge_topk(Tensor scores, Tensor positions, Tensor(a!)? selected=None, Tensor(b!)? slots=None, "
    "Tensor(c!)? counts=None, Tensor? lengths=None, Tensor? block_table=None, Tensor? row_request=None, "
    "int page_size=0, int rank=0, int ranks=1, int interleave=1, Tensor(d!)? workspace=None) -> ()",
    "shard_slots(Tensor positions, Tensor(a!) slots, Tensor block_table, int page_size, Tensor(b!)? counts=None, "
    "Tensor? row_request=None, int rank=0, int ranks=1, int interleave=1) -> ()",
)

_BY_DEVICE = -1  # bindings/tensors.h

_library = Library("sievemla", "DEF")


def _implementation(name: str, defaults: tuple[Any, ...]) -> Any:
    call: Any = None

    def run(*args: Any) -> None:
        nonlocal call
        if call is None:  # the library is loaded at the first call
            from . import _api

            call = getattr(_api, "_" + name)
        call(*args, *defaults[len(args) :], _BY_DEVICE)  # PyTorch leaves out what equals its default at the end

    return run


def _define(schema: str) -> None:
    name = schema.partition("(")[0]
    parsed = torch._C.parse_schema("sievemla::" + schema)
    defaults = tuple(argument.default_value for argument in parsed.arguments)
    # Strides are part of a call's meaning (views of caches), so a compiler must hand them over as they are.
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    _library.impl(name, _implementation(name, defaults), "CompositeExplicitAutograd")
    register_fake("sievemla::" + name, lambda *args, **named: None, lib=_library)


for _schema in _SCHEMAS:
    _define(_schema)
