#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Makes a header's plain comments Doxygen's: those above a declaration, those behind it, and how the latter go on."""
import re
import sys


def convert(lines):
    behind = None  # the column of a comment that stands behind code, while the next lines go on with it
    for number, line in enumerate(lines):
        column = line.find("//")
        before = line[:column] if column >= 0 else line
        if column < 0 or re.match(r"\s*// ----|// SPDX|// Copyright", line) or '"' in before:
            behind = None
            yield line
        elif number < 3 and line.startswith("// include/"):
            yield line.replace("//", "/// \\file\n///", 1)
            behind = -1  # the rest of the head
        elif before.strip():
            behind = column
            yield f"{before}///<{line[column + 2:]}"
        elif behind is not None and behind > 0 and column == behind:
            yield f"{before}///<{line[column + 2:]}"
        else:
            behind = -1 if behind == -1 else None
            yield f"{before}///{line[column + 2:]}"


sys.stdout.writelines(escaped for escaped in convert(open(sys.argv[1], encoding="utf-8").readlines()))
