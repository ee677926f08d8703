# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Wrong calls are errors of the right type that say rule, value and place; none of them crashes or writes."""

import ctypes

import numpy as np
import pytest

import sievemla


def call(**changes):
    """A good attention call, but for what is changed."""
    args = dict(
        q=np.zeros((1, 2, 576), np.float32),
        cache=sievemla.KvCache(np.zeros((1, 16, 576), np.float32), "f32"),
        out=np.full((1, 2, 512), 7, np.float32),
        scale=0.1,
        slots=np.zeros((1, 3), np.int32),
    )
    args.update(changes)
    sievemla.attention(args.pop("q"), args.pop("cache"), args.pop("out"), **args)


def test_the_good_call():
    call()


WRONG = {
    "dtype": (dict(q=np.zeros((1, 2, 576))), ValueError, r"the dtype must be .*: got float64 \(attention: q\)"),
    "bool": (dict(slots=np.zeros((1, 3), bool)), ValueError, r"got bool8 \(attention: slots\)"),
    "index_dtype": (dict(slots=np.zeros((1, 3), np.float32)), ValueError, r"must be i32 or i64.*attention: "),
    "f16": (dict(q=np.zeros((1, 2, 576), np.float16)), NotImplementedError, "--dtype bfloat16"),
    "shape": (dict(out=np.zeros((2, 2, 512), np.float32)), ValueError, r"the shape must be \[1, 2, 512\].*out"),
    "rank_0": (dict(lse=np.zeros((), np.float32)), ValueError, r"1 to 4 dimensions: got 0 \(attention: lse\)"),
    "rank_5": (dict(sink=np.zeros((1,) * 5, np.float32)), ValueError, r"1 to 4 dimensions: got 5 \(attention: sink\)"),
    "negative_stride": (dict(q=np.zeros((1, 2, 576), np.float32)[..., ::-1]), ValueError, "must not be negative"),
    "overlapping_out": (
        dict(out=np.lib.stride_tricks.as_strided(np.zeros(512, np.float32), (1, 2, 512), (0, 0, 4))),
        ValueError,
        "must not overlap",
    ),
    "read_only_out": (
        dict(out=np.broadcast_to(np.float32(0), (1, 2, 512))),
        ValueError,
        "an output must be writable",
    ),
    "scale": (dict(scale=float("nan")), ValueError, "scale.*got nan"),
    "format": (dict(cache=sievemla.KvCache(np.zeros((1, 16, 576), np.float32), "fp4")), ValueError, "'?fp4'?"),
    "row_width": (dict(cache=sievemla.KvCache(np.zeros((1, 16, 500), np.float32), "f32")), ValueError, "hold a row"),
    "rows_twice": (dict(block_table=np.zeros((1, 1), np.int32)), ValueError, "exactly one of slots and block_table"),
    "no_rows": (dict(slots=None), ValueError, "exactly one of slots and block_table.*got neither"),
    "no_lengths": (dict(slots=None, block_table=np.zeros((1, 1), np.int32)), ValueError, "goes with lengths"),
    "bad_slot": (dict(slots=np.full((1, 3), 99, np.int32), check_indices=True), ValueError, "99"),
    "workspace": (dict(workspace=np.zeros((2, 2), np.uint8)), ValueError, "a workspace must be contiguous bytes"),
    "no_tensor": (dict(q="q"), TypeError, "argument #0"),
    "none": (dict(out=None), TypeError, "argument #6"),
    "latent_of_65_bits": (
        dict(cache=sievemla.KvCache(np.zeros((1, 16, 576), np.float32), "f32", latent=1 << 64)),
        ValueError,
        r"an integer must fit 64 bits: got 18446744073709551616 \(attention\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, kind, text = WRONG[name]
    with pytest.raises(kind, match=text) as raised:
        call(**changes)
    assert type(raised.value) is kind


def test_nothing_is_written_by_a_wrong_call():
    out = np.full((1, 2, 512), 7, np.float32)
    with pytest.raises(ValueError):
        call(out=out, lse=np.zeros((1, 3), np.float32))
    assert (out == 7).all()


def test_backends():
    with pytest.raises(ValueError, match="a backend is one of .*'gpu'"):
        sievemla.Backend("gpu")
    with pytest.raises(ValueError, match=r"threads must be 0 .*got -1"):
        sievemla.Backend("cpu", threads=-1)
    with pytest.raises(ValueError, match="32 bits"):
        sievemla.Backend("cpu", threads=1 << 40)
    assert sievemla.Backend("cpu", threads=3).threads == 3
    assert repr(sievemla.Backend("reference")) == "Backend('reference', threads=1)"
    if not sievemla.built_with_cuda():
        with pytest.raises(NotImplementedError, match="build with"):
            sievemla.Backend("cuda")


def test_a_handle_that_was_never_opened():
    forged = sievemla.Backend("cpu")
    for handle in (-2, 1 << 20):
        forged._handle = handle
        with pytest.raises(ValueError, match="a backend must have been opened"):
            call(backend=forged)


# ---- DLPack that is not what it says -------------------------------------------------------------------------------


class Exports:
    """An object whose __dlpack__ does what it is told."""

    def __init__(self, action):
        self.action = action

    def __dlpack__(self, **kwargs):
        return self.action()

    def __dlpack_device__(self):
        return (1, 0)


def raises(error):
    raise error


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


_keep = []  # what capsules point to


def capsule(shape=(1, 2, 576), strides=None, name=b"dltensor", **fields):
    memory = np.zeros(1 << 12, np.float32)
    dims = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*strides) if strides else None
    tensor = DLTensor(memory.ctypes.data, 1, 0, len(shape), 2, 32, 1, dims, steps, 0)
    for field, value in fields.items():
        setattr(tensor, field, value)
    managed = DLManagedTensor(tensor, None, Deleter(lambda _: None))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    _keep.append((memory, dims, steps, managed, name))
    return new(ctypes.addressof(managed), name, None)


def test_strides_may_be_absent_and_the_data_may_start_later():
    call(q=Exports(capsule))
    call(q=Exports(lambda: capsule(byte_offset=1024)))


BAD_DLPACK = {
    "an_int": lambda: 3,
    "none": lambda: None,
    "raises": lambda: raises(RuntimeError("no")),
    "refuses": lambda: raises(BufferError("no")),
    "other_capsule": lambda: capsule(name=b"something"),
    "used_capsule": lambda: capsule(name=b"used_dltensor"),
    "lanes": lambda: capsule(lanes=4),
    "complex": lambda: capsule(code=5, bits=64),
    "sub_byte": lambda: capsule(code=17, bits=4),
    "other_device": lambda: capsule(device_type=10),
    "cuda_device": lambda: capsule(device_type=2),
    "cuda_device_out_of_range": lambda: capsule(device_type=2, device_id=-5),
    "null": lambda: capsule(data=None),
    "misaligned": lambda: capsule(byte_offset=1),
    "negative_extent": lambda: capsule(shape=(-1, 2, 576), strides=(1152, 576, 1)),
    "huge": lambda: capsule(shape=(1 << 62, 2, 576), strides=(1 << 62, 576, 1)),
    "rank_0": lambda: capsule(shape=()),
    "rank_9": lambda: capsule(shape=(1,) * 9),
}


@pytest.mark.parametrize("name", BAD_DLPACK)
@pytest.mark.parametrize("place", ["q", "out", "slots", "sink"])
def test_bad_dlpack_is_an_error(name, place):
    with pytest.raises((ValueError, TypeError, BufferError, RuntimeError, NotImplementedError)):
        call(**{place: Exports(BAD_DLPACK[name])})
    call()  # and the next call is none the worse for it
