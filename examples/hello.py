# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# examples/hello.py -- write three rows into a paged cache, attend to two of them: hello_attention.cc in Python.
import numpy as np

import sievemla

# A cache of 8 slots, and new tokens for three of them: token t is the constant t + 1.
cache = sievemla.KvCache(np.zeros((2, 4, 576), np.float32), "f32")
latent = np.repeat(np.float32([[1], [2], [3]]), 512, axis=1)
sievemla.write_latent(latent, np.int32([5, 0, 2]), cache, rope=np.zeros((3, 64), np.float32))

# One query, all zeros: both selected rows score 0, so the result is their mean. -1 selects nothing.
q, slots = np.zeros((1, 8, 576), np.float32), np.int32([[5, 2, -1]])
out, lse = np.empty((1, 8, 512), np.float32), np.empty((1, 8), np.float32)
sievemla.attention(q, cache, out, scale=1 / 16, slots=slots, lse=lse)

print(f"sievemla {sievemla.version()}: out[0] = {out[0, 0, 0]:.3f} (the mean of 1 and 3), lse[0] = {lse[0, 0]:.3f}")
assert (out == 2).all()
