# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# examples/trace.py -- records one attention call as a trace, with what should come out: `sievemla replay FILE` then
# runs it on every backend. What an engine would do with a call whose result looks wrong.
import json
import pathlib
import struct
import sys

import numpy as np


def write_safetensors(path, tensors, metadata):
    names = {np.dtype(np.float32): "F32", np.dtype(np.int64): "I64"}
    header, data = {"__metadata__": metadata}, b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += np.ascontiguousarray(array).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


random = np.random.default_rng(1)
tokens, heads, rows, topk, latent, rope = 2, 8, 100, 16, 512, 64
q = random.standard_normal((tokens, heads, latent + rope)).astype(np.float32)
cache = random.standard_normal((rows, latent + rope)).astype(np.float32) / 4
slots = np.stack([random.permutation(rows)[:topk] for _ in range(tokens)])
slots[0, 3] = -1  # selects nothing
scale = np.float32(1 / 16)

out, lse = np.zeros((tokens, heads, latent), np.float32), np.zeros((tokens, heads), np.float32)
for t in range(tokens):
    chosen = cache[slots[t][slots[t] >= 0]].astype(np.float64)
    scores = q[t].astype(np.float64) @ chosen.T * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    lse[t] = scores.max(axis=1) + np.log(weights.sum(axis=1))
    out[t] = weights / weights.sum(axis=1, keepdims=True) @ chosen[:, :latent]

path = sys.argv[1] if len(sys.argv) > 1 else "trace.safetensors"
call = {"q": q, "indices": slots.astype(np.int64), "softmax_scale": scale.reshape(1), "kv_f32": cache}
write_safetensors(path, {**call, "out_f32": out, "lse_f32": lse},
                  {"kind": "sparse_mla_trace", "latent": str(latent), "rope": str(rope)})
print(path)
