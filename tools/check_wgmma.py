#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tools/check_wgmma.py -- finds in sm_90a machine code what touches the registers of a wgmma that still runs.
"""check_wgmma.py CUOBJDUMP OBJECT... : exit 1 if a kernel of theirs touches registers of a product in flight.
check_wgmma.py --sass FILE... : the same of text that `cuobjdump -sass` printed.

wgmma runs on while its threads do. Until they wait for it, its accumulators must not be read or written, and registers
that hold its A must not be written: it reads them late. ptxas orders accumulators itself, but takes A's registers for
free once the instruction is issued, unless the source uses them behind the wait (cuda::hold). The ids or sums that
come of it are wrong so rarely that tests pass.

Machine code: HGMMA, QGMMA, IGMMA start a product; gsb0 as their last operand ends a group; WARPGROUP.DEPBAR.LE gsb0, N
waits until N groups are left. Every path through a kernel is walked with the set of products in flight, around loops
too, until nothing new is met. Products may share an accumulator: they run in order.

Not seen: operands in shared memory overwritten early; what a callee does (the walk goes on behind the call, as if the
callee touched nothing); jumps through a register. A branch is taken to go both ways whatever else was decided before,
so a path that never runs may be reported: a wait, or a hold, on that path too settles it.
"""
import re
import subprocess
import sys
from pathlib import Path

READS_ALL = {"BAR", "BRX", "FCHK", "JMX", "NANOSLEEP", "RET", "WARPSYNC"}  # the first register is no result
MOST_GROUPS = 8  # further ones are taken for the eighth: a loop that never waits ends too


def instructions(sass):
    """{kernel: [(address, predicated, opcode, operands)]} of the kernels that have products."""
    kernels, code = {}, []
    for line in sass.splitlines():
        if kernel := re.search(r"Function : (\S+)", line):
            code = kernels.setdefault(kernel[1], [])
        elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?(\S+) ?(.*?) *;", line):
            operands = [operand.strip() for operand in found[4].split(",") if operand.strip()]
            code.append((int(found[1], 16), bool(found[2]), found[3], operands))
    return {name: code for name, code in kernels.items() if any("GMMA." in line[2] for line in code)}


def block(operand, width):
    """The registers of an operand that begins one; RZ and all else: none."""
    register = re.match(r"[-!~|]*R(\d+)", operand)
    return frozenset(range(int(register[1]), int(register[1]) + width)) if register else frozenset()


def product(opcode, operands):
    """(accumulators, registers of A)"""
    columns = int(re.search(r"64x(\d+)x", opcode)[1])
    half = ".F16" in opcode.split("x")[-1][:6]  # two accumulators a register
    return block(operands[0], columns // (4 if half else 2)), block(operands[1], 4)


def uses(opcode, operands):
    """(written, read): registers of an instruction that is no product. Sources count by their first register: vectors
    are aligned, as accumulators are."""
    parts = opcode.split(".")
    read = frozenset(int(n) for operand in operands for n in re.findall(r"\bR(\d+)", operand))
    rest = operands[1:] if operands and re.fullmatch(r"!?P[0-6T]", operands[0]) else operands
    if parts[0] in READS_ALL or not rest or not re.fullmatch(r"R\d+", rest[0]):
        return frozenset(), read
    width = 1
    if "128" in parts or (parts[0] == "LDSM" and parts[-1] == "4"):
        width = 4
    elif ({"64", "WIDE"} & set(parts) or parts[0] in ("DADD", "DFMA", "DMUL") or opcode.startswith("F2F.F64") or
          opcode.startswith("I2F.F64") or (parts[0] == "LDSM" and parts[-1] == "2") or
          (parts[0] == "CS2R" and "32" not in parts)):
        width = 2
    sources = [operand for operand in operands if operand is not rest[0]]
    return block(rest[0], width), frozenset(int(n) for operand in sources for n in re.findall(r"\bR(\d+)", operand))


def followers(code, at, index):
    """Where a kernel's `at`-th instruction may go on, as indices."""
    _, predicated, opcode, operands = code[at]
    name = opcode.split(".")[0]
    ways = set()
    if name == "BRA" or opcode.startswith("WARPSYNC.COLLECTIVE"):
        target = re.search(r"0x([0-9a-f]+)", operands[-1])
        ways |= {index[int(target[1], 16)]} if target else set()
    ends = name in ("EXIT", "RET", "BRX", "JMX") or (name == "BRA" and len(operands) == 1)
    if (predicated or not ends) and at + 1 < len(code):
        ways.add(at + 1)
    return ways


def faults(code):
    """[(address, instruction, what is wrong)] of a kernel. In flight: groups, the oldest first, the last one open; each
    a pair of register sets, accumulators and A."""
    none = (frozenset(), frozenset())
    index = {line[0]: at for at, line in enumerate(code)}
    found, met, todo = set(), set(), [(0, (none,))]
    while todo:
        at, flight = todo.pop()
        if (at, flight) in met:
            continue
        met.add((at, flight))
        address, _, opcode, operands = code[at]
        accumulators = frozenset().union(*(group[0] for group in flight))
        held = frozenset().union(*(group[1] for group in flight))
        if re.match(r"[A-Z]GMMA\.", opcode):
            written, read = product(opcode, operands)
            wrong = [(read & accumulators, "reads accumulators"), (written & held, "writes A")]
            *closed, (sums, factors) = flight
            flight = (*closed, (sums | written, factors | read))
            if operands[-1] == "gsb0":
                flight = (*flight, none)
                if len(flight) > MOST_GROUPS:
                    first, second, *later = flight
                    flight = ((first[0] | second[0], first[1] | second[1]), *later)
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            left, wrong = int(operands[-1], 16), []
            flight = flight[max(0, len(flight) - 1 - left):]
        else:
            written, read = uses(opcode, operands)
            wrong = [(written & held, "writes A"), (written & accumulators, "writes accumulators"),
                     (read & accumulators, "reads accumulators")]
        for registers, what in wrong:
            if registers:
                names = " ".join(f"R{n}" for n in sorted(registers))
                found.add((address, f"{opcode} {', '.join(operands)}", f"{what} of a product in flight: {names}"))
        todo += [(way, flight) for way in followers(code, at, index)]
    return sorted(found)


def judge(texts):
    kernels = faulty = 0
    for text in texts:
        for kernel, code in instructions(text).items():
            kernels += 1
            found = faults(code)
            faulty += bool(found)
            for address, instruction, what in found:
                print(f"{kernel} {address:#06x} {instruction}: {what}")
    print(f"{kernels} kernels with wgmma, {faulty} with faults")
    return 1 if faulty or kernels == 0 else 0


def main(arguments):
    if arguments[:1] == ["--sass"]:
        return judge(Path(name).read_text(encoding="utf-8") for name in arguments[1:])
    program, *objects = arguments
    return judge(subprocess.run([program, "-sass", name], capture_output=True, text=True, check=True).stdout
                 for name in objects)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
