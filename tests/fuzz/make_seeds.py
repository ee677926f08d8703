#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tests/fuzz/make_seeds.py -- seeds for the fuzzers: the goldens' files with their tensors cut down to a few rows, so that
# a seed has hundreds of bytes instead of megabytes and keeps every name, dtype and rank.
#
#   make_seeds.py tests/golden OUT        writes OUT/safetensors, OUT/config, OUT/trace
import json
import struct
import sys
from pathlib import Path

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8, "U8": 1}
KEEP = 24  # tensors of a seed


def cut(path, extent, keep=KEEP):
    """The file with the first `keep` tensors, each extent at most extent(name, axis, value)."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + length])
    out = {"__metadata__": header.pop("__metadata__", {})}
    data = b""
    for name, entry in list(header.items())[:keep]:
        shape = [min(n, extent(name, axis, n)) for axis, n in enumerate(entry["shape"])]
        size = SIZES[entry["dtype"]]
        for n in shape:
            size *= n
        begin = 8 + length + entry["data_offsets"][0]
        out[name] = {"dtype": entry["dtype"], "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += raw[begin:begin + size]
    text = json.dumps(out).encode()
    return struct.pack("<Q", len(text)) + text + data


def main(golden, out):
    for name in ("safetensors", "config", "trace"):
        (out / name).mkdir(parents=True, exist_ok=True)
    for path in sorted(golden.glob("*/*.safetensors")):
        seed = cut(path, lambda name, axis, n: 2)
        (out / "safetensors" / f"{path.parent.name}-{path.stem}").write_bytes(seed)
    for path in sorted(golden.glob("*/config.json")):
        (out / "config" / path.parent.name).write_text(path.read_text())
    for path in sorted(golden.glob("trace-*/trace.safetensors")):
        # Whole rows of queries, keys and caches, but two of them: their width is part of the format.
        def rows(name, axis, n):
            return n if axis == 2 or (axis == 1 and name.startswith(("kv_", "k_pages"))) else 2
        (out / "trace" / path.parent.name).write_bytes(cut(path, rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
