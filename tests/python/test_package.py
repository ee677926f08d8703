# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The package as it is installed: one version, the program, start without PyTorch or a library that loads."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sievemla

ROOT = Path(__file__).parents[2]
PACKAGE = Path(sievemla.__file__).parent


def python(*args, **options):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120, cwd="/", **options)


def test_one_version():
    (declared,) = re.findall(r"project\(sievemla VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert sievemla.__version__ == sievemla.version() == importlib.metadata.version("sievemla") == declared


def test_the_program_is_in_the_package():
    info = python("-m", "sievemla", "info")
    assert info.returncode == 0 and sievemla.version() in info.stdout
    # pip shows nothing of a build: what was built, and how to get the other, is said here.
    assert ("a CPU build" in info.stdout and "SIEVEMLA_CUDA=ON" in info.stdout) != sievemla.built_with_cuda()
    assert python("-m", "sievemla", "info", "--no-such-option").returncode == 2
    script = Path(sys.executable).parent / "sievemla"
    assert subprocess.run([script, "info"], capture_output=True, text=True).stdout == info.stdout


def test_the_program_loads_neither_torch_nor_the_library():
    code = "import sys; sys.argv = ['sievemla']; import sievemla; print({'torch', 'tvm_ffi'} & set(sys.modules))"
    assert python("-c", code).stdout.strip() == "set()"


def test_the_import_outlives_a_library_that_does_not_load(tmp_path):
    copy = tmp_path / "sievemla"
    copy.mkdir()
    for source in PACKAGE.glob("*.py"):
        (copy / source.name).write_bytes(source.read_bytes())
    (copy / "_sievemla.so").write_text("no library")
    code = "import sievemla\ntry: sievemla.attention\nexcept Exception as e: print(type(e).__name__, e)"
    result = python("-c", code, env={"PYTHONPATH": str(tmp_path)})
    assert "_sievemla.so" in result.stdout, result.stderr


def test_it_is_typed():
    assert (PACKAGE / "py.typed").exists()
    pytest.importorskip("mypy", reason="mypy is not installed")
    result = python("-m", "mypy", "--strict", "--ignore-missing-imports", "--cache-dir=/dev/null", "-p", "sievemla")
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_public_name_says_what_it_is():
    for name in sievemla.__all__:
        value = getattr(sievemla, name)
        assert isinstance(value, int) or value.__doc__ or name in {"kernels", "geometries", "version"} or (
            name.endswith("_workspace_bytes")
        )
    assert set(sievemla.__all__) <= set(dir(sievemla))
    with pytest.raises(AttributeError, match="no attribute 'attentoin'"):
        sievemla.attentoin  # noqa: B018


def test_only_the_stable_interface_of_tvm_ffi_is_used():
    nm = subprocess.run(["nm", "-D", PACKAGE / "_sievemla.so"], capture_output=True, text=True)
    if nm.returncode:
        pytest.skip("nm is not installed")
    symbols = [line.split()[-2:] for line in nm.stdout.splitlines()]
    assert {name for kind, name in symbols if kind == "U" and "tvm" in name.lower()} <= {
        "TVMFFIBacktrace",
        "TVMFFIEnvGetStream",
        "TVMFFIErrorSetRaised",
        "TVMFFIGetTypeInfo",
    }
    assert not [name for kind, name in symbols if kind in "TDBR" and not name.startswith("__tvm_ffi_")]


def test_tables():
    formats = {f.name: f for f in sievemla.kv_formats()}
    assert formats["fp8_ds_mla"].row_bytes() == 656 and formats["fp8_nope"].row_bytes(512, 0) == 528
    assert {k.stage for k in sievemla.kernels()} == {"write", "indexer", "topk", "attention", "combine"}
    assert any(k.backend == "reference" and k.runs_here for k in sievemla.kernels())
    assert sievemla.built_with_cuda() or not [k for k in sievemla.kernels() if k.backend == "cuda"]
    glm = next(g for g in sievemla.geometries() if g.name == "glm-5")
    assert (glm.latent, glm.rope, glm.index_topk, glm.index_rope) == (512, 64, 2048, "interleaved")


def test_without_a_backend_the_device_decides():
    rows = np.ones((1, 16, 576), np.float32)
    out, again = np.empty((2, 1, 1, 512), np.float32)
    args = dict(scale=1.0, slots=np.array([[0, 3]], np.int32))
    q = np.zeros((1, 1, 576), np.float32)
    sievemla.attention(q, sievemla.KvCache(rows, "f32"), out, **args)
    sievemla.attention(q, sievemla.KvCache(rows, "f32"), again, backend=sievemla.Backend("cpu"), **args)
    assert (out == again).all() and (out == 1).all()


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    rows = np.full((1, 16, 576), 2.5, ml_dtypes.bfloat16)
    rows.flags.writeable = False
    out = np.zeros((1, 1, 512), ml_dtypes.bfloat16)
    q = np.zeros((1, 1, 576), ml_dtypes.bfloat16)
    sievemla.attention(q, sievemla.KvCache(rows, "bf16"), out, scale=1.0, slots=np.array([[0, 3]], np.int32))
    assert (out == 2.5).all()
