#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tests/cuda/wgmma.py -- tools/check_wgmma.py finds what it is for, and nothing in code that is right.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import check_wgmma

PRODUCT = "QGMMA.64x32x32.F32.E4M3.E4M3 R24, R40, gdesc[UR4], R24, gsb0"
SECOND = PRODUCT.replace("R40", "R44")
ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
LOAD = "LDS.128 R40, [R3]"  # A's registers


def found(*lines):
    sass = "Function : k\n" + "".join(f" /*{at * 16:04x}*/ {line} ;\n" for at, line in enumerate(lines))
    return [fault[2].split(" of ")[0] for fault in check_wgmma.faults(check_wgmma.instructions(sass)["k"])]


assert found(LOAD, PRODUCT, WAIT, LOAD, "FADD R1, R24, R25", "EXIT") == []
assert found(LOAD, PRODUCT, LOAD, WAIT, "EXIT") == ["writes A"]
assert found(PRODUCT, "@P0 SEL R43, R1, R2, P1", WAIT, "EXIT") == ["writes A"]
assert found(PRODUCT, "LDS R44, [R3]", "STS [R3], R40", WAIT, "EXIT") == []
assert found(PRODUCT, "STS [R3], R39", WAIT, "EXIT") == ["reads accumulators"]
assert found(PRODUCT, "IMAD.WIDE R38, R1, R2, R4", WAIT, "EXIT") == ["writes accumulators"]
assert found(PRODUCT, SECOND, ALL_BUT_ONE, LOAD, WAIT, "EXIT") == []
assert found(PRODUCT, SECOND, ALL_BUT_ONE, "MOV R45, R1", WAIT) == ["writes A"]
assert found(LOAD, PRODUCT, "@P0 BRA 0x0", WAIT, "EXIT") == ["writes A"]  # around the loop
assert found(PRODUCT, "BRA 0x30", LOAD, WAIT, "EXIT") == []  # what is jumped over
