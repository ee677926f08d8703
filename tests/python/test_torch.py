# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""PyTorch: tensors of the direct calls, and torch.ops.sievemla.* eagerly and under torch.compile."""

import numpy as np
import oracle
import pytest

import sievemla

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its tests are skipped")

LATENT, ROPE = 512, 64


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(80, LATENT + ROPE, generator=generator).to(dtype)
    q = torch.randn(3, 4, LATENT + ROPE, generator=generator).to(dtype)
    slots = torch.tensor([[3, -1, 70], [0, 5, 6], [-1, -1, -1]], dtype=torch.int32)
    want = oracle.attend_all(q.double().numpy(), rows.double().numpy(), [[3, 70], [0, 5, 6], []], 0.05)
    return q, rows.view(5, 16, -1), slots, [torch.from_numpy(part) for part in want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_direct(dtype):
    q, pages, slots, (want, want_lse) = problem(dtype)
    out, lse = torch.empty(3, 4, LATENT), torch.empty(3, 4)
    cache = sievemla.KvCache(pages, "f32" if dtype == torch.float32 else "bf16")
    sievemla.attention(q, cache, out, scale=0.05, slots=slots, lse=lse)
    # bf16 inputs are exact in f32; the AMX and BF16 tiers round the probabilities to bf16, 2^-9 of |v| <= 5.
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-4 if dtype == torch.float32 else 5 * 2**-8)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_operators(wrap):
    q, pages, slots, (want, want_lse) = problem()

    @wrap
    def layer(q, new, positions, pages, slots):
        torch.ops.sievemla.write_latent(new[:, :LATENT], positions, pages, "f32", LATENT, ROPE, new[:, LATENT:])
        out, lse = q.new_empty(3, 4, LATENT), q.new_empty(3, 4)
        torch.ops.sievemla.attention(q, pages, "f32", LATENT, ROPE, 0.05, out, slots=slots, lse=lse)
        return out * 1, lse

    new = pages.view(80, -1)[[3, 5]].clone()
    pages.view(80, -1)[[3, 5]] = float("nan")  # the call writes them again
    out, lse = layer(q, new, torch.tensor([3, 5]), pages, slots)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-4)


def test_topk_and_select_operators():
    scores = torch.tensor([[1.0, 9, 9, 0]])
    positions = torch.empty(1, 2, dtype=torch.int32)
    torch.ops.sievemla.topk(scores, torch.tensor([4], dtype=torch.int32), positions)
    assert positions.tolist() == [[1, 2]]
    q, weights = torch.ones(1, 2, 128), torch.ones(1, 2)
    keys = torch.arange(4.0)[:, None].expand(4, 128).contiguous()
    torch.ops.sievemla.select(q, weights, torch.tensor([4], dtype=torch.int32), 4, positions, keys=keys)
    assert positions.tolist() == [[2, 3]]


def test_operators_pass_the_errors_on():
    q, pages, slots, _ = problem()
    with pytest.raises(ValueError, match=r"\(attention: out\)"):
        torch.ops.sievemla.attention(q, pages, "f32", LATENT, ROPE, 0.05, torch.empty(1, 1, LATENT), slots=slots)
    with pytest.raises(NotImplementedError, match="--dtype bfloat16"):
        torch.ops.sievemla.attention(
            q.half(), pages, "f32", LATENT, ROPE, 0.05, torch.empty(3, 4, LATENT), slots=slots
        )


def test_the_schemas_say_what_is_written():
    q, pages, slots, _ = problem()
    out = torch.empty(3, 4, LATENT)
    args = (q, pages, "f32", LATENT, ROPE, 0.05, out, slots)
    from torch.library import opcheck

    opcheck(
        torch.ops.sievemla.attention.default, args, test_utils=("test_schema", "test_faketensor")
    )


def test_every_function_has_an_operator():
    from sievemla import torch_ops

    operators = {schema.partition("(")[0] for schema in torch_ops._SCHEMAS}
    stages = {
        n for n in sievemla.__all__ if n[0].islower() and callable(getattr(sievemla, n)) and "bytes" not in n
    } - {"built_with_cuda", "commit", "geometries", "kernels", "kv_formats", "version", "workspace_init"}
    assert operators == stages


def test_numpy_and_torch_agree():
    q, pages, slots, _ = problem()
    out, other = torch.empty(3, 4, LATENT), np.empty((3, 4, LATENT), np.float32)
    sievemla.attention(q, sievemla.KvCache(pages, "f32"), out, scale=0.05, slots=slots)
    sievemla.attention(
        q.numpy(), sievemla.KvCache(pages.numpy(), "f32"), other, scale=0.05, slots=slots.numpy()
    )
    assert (out.numpy() == other).all()
