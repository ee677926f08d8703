# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The functions of bindings/module.cc, loaded through tvm-ffi."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm_ffi

# tvm-ffi turns a kind of error that it does not know into RuntimeError.
for _error in (NotImplementedError, MemoryError):
    tvm_ffi.register_error(_error.__name__, _error)

_module = tvm_ffi.load_module(str(Path(__file__).parent / "_sievemla.so"))

# Types of ml_dtypes, which NumPy does not export through DLPack: the bytes go, and the library knows what they are.
_BYTES_OF = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}


def _exportable(array: Any, written: bool) -> Any:
    """What DLPack refused, in a form that it takes: bf16 as its bits; read-only memory, if it is an input."""
    if not hasattr(array, "__dlpack__"):
        return array
    name = getattr(getattr(array, "dtype", None), "name", "")
    if name in _BYTES_OF:
        array = array.view(_BYTES_OF[name])
    flags = getattr(array, "flags", None)
    if flags is None or getattr(flags, "writeable", True):
        return array
    if written:
        raise ValueError(f"an output must be writable: got a read-only array of shape {array.shape}")
    return tvm_ffi.from_dlpack(array.__dlpack__(max_version=(1, 0)))


def function(name: str, writes: tuple[int, ...] = ()) -> Callable[..., Any]:
    """The function `name`; `writes` are the places of the tensors that it writes."""
    call = _module.get_function(name)

    def checked(*args: Any) -> Any:
        try:
            return call(*args)
        except BufferError:
            pass
        except (OverflowError, TypeError) as refusal:  # which of the two: by the version of apache-tvm-ffi
            wide = [arg for arg in args if isinstance(arg, int) and not -(1 << 63) <= arg < 1 << 63]
            if not wide:
                raise
            raise ValueError(f"an integer must fit 64 bits: got {wide[0]} ({name})") from refusal
        try:
            return call(*(_exportable(arg, i in writes) for i, arg in enumerate(args)))
        except BufferError as refusal:
            raise ValueError(f"{name}: a tensor cannot be exported through DLPack: {refusal}") from refusal

    return checked


def table(name: str) -> list[list[str]]:
    """The rows of a table that the library gives as text."""
    text: str = _module.get_function(name)()
    return [line.split("\t") for line in text.splitlines()]
