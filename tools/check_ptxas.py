#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tools/check_ptxas.py -- keeps what ptxas says of the kernels while they are compiled, and judges it.
"""check_ptxas.py --record COMMAND... : runs a compilation; OBJECT.ptxas beside its object is what ptxas said.
check_ptxas.py OBJECT... : exit 1 if a kernel of theirs spills, has a stack frame or serialised products.

--self-test: that the rules catch what they are for.
"""
import re
import subprocess
import sys
from pathlib import Path

RULES = [  # what a kernel's report must not say
    (re.compile(r"\b[1-9]\d* bytes stack frame"), "a stack frame"),
    (re.compile(r"\b[1-9]\d* bytes spill"), "spilled registers"),
    (re.compile(r"serialized"), "serialised matrix products"),
]


def faults(report):
    """(kernels seen, [(architecture, kernel, fault, line)]) of the text that `nvcc -Xptxas -v` prints."""
    arch, kernel, kernels, found = "?", "?", 0, []
    for line in report.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernel, arch, kernels = entry[1], entry[2], kernels + 1
        fault = next((name for rule, name in RULES if rule.search(line)), None)
        if fault:
            found.append((arch, kernel, fault, line.strip()))
    return kernels, found


def record(command):
    done = subprocess.run([*command, "-Xptxas", "-v"], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    Path(command[command.index("-o") + 1] + ".ptxas").write_text(said, encoding="utf-8")
    about_kernels = re.compile(r"^ptxas info |^ +\d+ bytes stack frame")
    sys.stderr.writelines(line for line in said.splitlines(True) if done.returncode or not about_kernels.match(line))
    return done.returncode


def judge(objects):
    kernels, found = 0, []
    for name in objects:
        seen, faulty = faults(Path(name + ".ptxas").read_text(encoding="utf-8"))
        kernels += seen
        found += faulty
    for arch, kernel, name, line in found:
        print(f"{arch} {kernel}: {name}: {line}")
    print(f"{kernels} kernels, {len(found)} faults")
    return 1 if found or kernels == 0 else 0


def self_test():
    good = ("ptxas info : Compiling entry function 'k' for 'sm_80'\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            "ptxas info : Used 40 registers, used 0 barriers, 480 bytes smem, 400 bytes cmem[0]")
    assert faults(good) == (1, [])
    assert faults(good.replace("0 bytes stack", "16 bytes stack"))[1][0][:3] == ("sm_80", "k", "a stack frame")
    assert faults(good.replace("0 bytes spill loads", "10 bytes spill loads"))[1][0][2] == "spilled registers"
    assert faults(good + "\nwgmma.mma_async instructions are serialized")[1][0][2] == "serialised matrix products"
    return 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    return record(arguments[1:]) if arguments[:1] == ["--record"] else judge(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
