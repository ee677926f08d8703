#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tools/check_text.py -- rules that every text file keeps. Prints each breach; exit 1 if any.
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CXX = {".h", ".cc", ".cu", ".cuh", ".in"}
HASH = {".py", ".sh", ".cmake", ".toml"}
BINARY = {".safetensors", ".png"}
MAX_COLUMNS = 120
WIDE = {Path("tests/golden/make_golden.py")}  # formulas side by side
LICENCE = ("SPDX-License-Identifier: Apache-2.0", "Copyright The SieveMLA authors")
ELSEWHERE = re.compile(r"(?<![\w.])/(work|root|home|tmp)/\w")  # paths of one machine


def comment_mark(path):
    """How a line comment starts in this kind of file; None if it has no licence lines."""
    if path.suffix in CXX:
        return "#" if path.name.endswith(".cmake.in") else "//"
    if path.suffix in HASH or path.name in {"CMakeLists.txt", "dev"} or path.parts[0] == ".ci":
        return "#"
    return None


def breaches(path, data):
    """[(line, what)] of one file; `path` is relative to the repository."""
    found = []
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return [(1, "is not UTF-8")]
    if "\r" in text:
        found.append((1, "has CR line ends"))
    if text and not text.endswith("\n"):
        found.append((text.count("\n") + 1, "does not end with a line break"))
    lines = text.splitlines()
    mark = comment_mark(path)
    if mark:
        head = lines[1:3] if lines and lines[0].startswith("#!") else lines[:2]
        if head != [f"{mark} {line}" for line in LICENCE]:
            found.append((1, f"must start with the two lines '{mark} {LICENCE[0]}' and '{mark} {LICENCE[1]}'"))
    if path.suffix in {".h", ".cuh"} and not path.name.endswith(".in"):
        if len(lines) < 3 or not lines[2].startswith(f"// {path} -- "):
            found.append((3, f"must say '// {path} -- <its role>'"))
        if "#pragma once" not in lines:
            found.append((1, "has no #pragma once"))
    for number, line in enumerate(lines, 1):
        if mark and len(line) > MAX_COLUMNS and path not in WIDE:
            found.append((number, f"is {len(line)} columns wide, at most {MAX_COLUMNS}"))
        if line != line.rstrip() and path.suffix != ".md":
            found.append((number, "ends with blanks"))
        if "\t" in line and path.name != ".gitmodules":
            found.append((number, "holds a tab"))
        if mark and path.name != Path(__file__).name:
            if re.search(r"\b(TODO|FIXME|XXX)\b", line):
                found.append((number, "holds a TODO; open an issue, or do it"))
            if ELSEWHERE.search(line):
                found.append((number, "names a path of one machine"))
    return found


def files():
    """What git tracks or would track; everything outside build folders where there is no git."""
    try:
        command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [Path(name) for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        paths = [path for path in paths if path.parts[0] not in {"build", ".venv", ".git"}]
    return sorted(path for path in paths if path.suffix not in BINARY and (ROOT / path).is_file())


def main():
    count, status = 0, 0
    for path in files():
        count += 1
        for line, what in breaches(path, (ROOT / path).read_bytes()):
            print(f"{path}:{line}: {what}")
            status = 1
    print(f"check_text: {count} files")
    return status


if __name__ == "__main__":
    sys.exit(main())
