# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The stages in NumPy float64, from their formulas alone."""

import numpy as np

LATENT, ROPE = 512, 64


def attend(q, rows, scale, sink=None):
    """One token: q [heads, width], rows [n, width] -> out [heads, LATENT], lse [heads]."""
    heads = q.shape[0]
    if len(rows) == 0:
        return np.zeros((heads, LATENT)), np.full(heads, -np.inf)
    scores = scale * q.astype(np.float64) @ rows.astype(np.float64).T
    peak = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - peak)
    total = p.sum(axis=1, keepdims=True)
    lse = (peak + np.log(total))[:, 0]
    if sink is not None:
        total = total + np.exp(sink[:, None] - peak)
    return p / total @ rows[:, :LATENT].astype(np.float64), lse


def attend_all(q, flat, lists, scale, sink=None):
    """flat [slots, width]; lists: the slots of each token."""
    pairs = [attend(q[t], flat[list(slots)], scale, sink) for t, slots in enumerate(lists)]
    return np.stack([out for out, _ in pairs]), np.stack([lse for _, lse in pairs])


def best(scores, k):
    """Positions of the k best, ascending: larger first, ties to the lowest position, NaN equal to -inf."""
    keys = np.where(np.isnan(scores), -np.inf, scores)
    order = sorted(range(len(keys)), key=lambda i: (-keys[i], i))
    return sorted(order[:k])


def combine(partial_out, partial_lse, sink=None):
    peak = partial_lse.max(axis=0)
    peak = np.where(np.isinf(peak), 0, peak)
    weights = np.exp(partial_lse - peak)
    total = weights.sum(axis=0)
    denominator = total + (0 if sink is None else np.exp(sink - peak))
    parts = np.where(weights[..., None] > 0, partial_out, 0) * weights[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total[..., None] > 0, parts.sum(axis=0) / denominator[..., None], 0)
        lse = np.where(total > 0, peak + np.log(total), -np.inf)
    return out, lse


def layer_norm(x, weight, bias, eps):
    x = x.astype(np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) * weight + bias


def rotate(x, positions, cos_sin, style):
    """The first 64 of the last dimension."""
    if style == "none":
        return x
    cos, sin = cos_sin[positions, :32].astype(np.float64), cos_sin[positions, 32:].astype(np.float64)
    while cos.ndim < x.ndim:
        cos, sin = cos[:, None], sin[:, None]
    low, high = (slice(0, 32), slice(32, 64)) if style == "half_split" else (slice(0, 64, 2), slice(1, 64, 2))
    a, b, y = x[..., low].astype(np.float64), x[..., high].astype(np.float64), x.astype(np.float64)
    y[..., low], y[..., high] = a * cos - b * sin, b * cos + a * sin
    return y


def hadamard(n):
    """Sylvester's matrix, orthogonal: [n, n], n a power of two."""
    return np.ones((1, 1)) if n == 1 else np.kron([[1, 1], [1, -1]], hadamard(n // 2)) / np.sqrt(2)


def scores(q, weights, keys):
    """[heads, 128], [heads], [n, 128] -> [n]"""
    return weights.astype(np.float64) @ np.maximum(q.astype(np.float64) @ keys.astype(np.float64).T, 0)
