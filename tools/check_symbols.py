#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tools/check_symbols.py NM SOURCES OBJECTS -- objects compiled for one instruction set define nothing weak: no inline
# function, no template that a file compiled otherwise may define too. Lists are joined by '|'. Exit 1 if any does.
import subprocess
import sys

# Of what nm prints: weak, and unique across the program (a static of an inline function).
SHARED = set("WVwvu")


def shared_symbols(nm_output):
    """Definitions that the linker would merge with another file's; undefined weak references have no address."""
    found = []
    for line in nm_output.splitlines():
        fields = line.split(maxsplit=2)
        if len(fields) == 3 and fields[1] in SHARED:
            found.append(fields[2])
    return found


def main():
    nm, sources, objects = sys.argv[1], sys.argv[2].split("|"), sys.argv[3].split("|")
    breaches = 0
    for source in sources:
        (path,) = [o for o in objects if f"/{source}." in o]
        output = subprocess.run([nm, "-C", path], check=True, capture_output=True, text=True).stdout
        assert " T " in output or " R " in output or " D " in output, f"{path}: no symbol of its own"
        for symbol in shared_symbols(output):
            print(f"{source}: defines {symbol}, which other files may define too")
            breaches += 1
    assert shared_symbols("0000000000000000 W std::vector<int>::push_back(int&&)")  # it does find some
    assert not shared_symbols("                 w __gmon_start__")
    print(f"check_symbols: {len(sources)} objects")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
