#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tools/check_ptxas.py -- compiles a CUDA source for one architecture and judges what ptxas says of its kernels.
"""check_ptxas.py NVCC SOURCE ARCH INCLUDE... : exit 1 if a kernel spills, has a stack frame or serialised products.

--self-test: that the rules catch what they are for.
"""
import re
import subprocess
import sys
import tempfile

RULES = [  # what a kernel's report must not say
    (re.compile(r"([1-9]\d*) bytes stack frame"), "a stack frame"),
    (re.compile(r"([1-9]\d*) bytes spill"), "spilled registers"),
    (re.compile(r"serialized"), "serialised matrix products"),
]


def faults(report):
    """(kernels seen, [(kernel, fault, line)]) of the text that `nvcc -Xptxas -v` prints."""
    kernel, kernels, found = "?", 0, []
    for line in report.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            kernel, kernels = entry[1], kernels + 1
        fault = next((name for rule, name in RULES if rule.search(line)), None)
        if fault:
            found.append((kernel, fault, line.strip()))
    return kernels, found


def self_test():
    good = ("ptxas info : Compiling entry function 'k' for 'sm_80'\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
    assert faults(good) == (1, [])
    assert faults(good.replace("0 bytes stack", "16 bytes stack"))[1][0][:2] == ("k", "a stack frame")
    assert faults(good.replace("0 bytes spill loads", "10 bytes spill loads"))[1][0][1] == "spilled registers"
    assert faults(good + "\nwgmma.mma_async instructions are serialized")[1][0][1] == "serialised matrix products"


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    nvcc, source, arch, *includes = arguments
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([nvcc, "-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-cubin",
                               f"-gencode=arch=compute_{arch},code=sm_{arch}", *(f"-I{i}" for i in includes), source,
                               "-o", folder + "/kernels.cubin"], capture_output=True, text=True, check=False)
    kernels, found = faults(done.stdout + done.stderr)
    if done.returncode != 0 or kernels == 0:
        sys.exit(f"check_ptxas: {source} for sm_{arch} did not compile to kernels\n{done.stderr[-2000:]}")
    for kernel, name, line in found:
        print(f"sm_{arch} {kernel}: {name}: {line}")
    print(f"sm_{arch}: {kernels} kernels, {len(found)} faults")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
