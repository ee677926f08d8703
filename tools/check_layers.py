#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# tools/check_layers.py -- who may include whom, and what the library never does. Prints each breach; exit 1 if any.
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Room -> the rooms it may include, beside itself. A stage never includes another stage; they meet in api. The kernels
# of src/kv, which write and gather rows, are the room `write`: a stage like the others, on top of the row types.
STAGES = {stage: {"cpu", "cuda", "kv", "base", "include"} for stage in "write indexer topk attention combine".split()}
LAYERS = {
    "include": set(),
    "base": {"include"},
    "kv": {"base", "include"},
    "cpu": {"kv", "base", "include"},
    "cuda": {"kv", "base", "include"},
    **STAGES,
    "api": {*STAGES, "cpu", "cuda", "kv", "base", "include", "model", "version"},
    "model": {"kv", "cpu", "cuda", "base", "include"},
    "bindings": {"include"},
    "cli": {"model", "api", *STAGES, "cpu", "cuda", "kv", "base", "include", "version"},
}
LIBRARY = set(LAYERS) - {"bindings", "cli", "model"}  # plus src/model/geometries.*

# Headers of others, by room. Standard C++ headers (no dot, no slash) are free for all but NEVER_INCLUDED.
SYSTEM = {
    "cpu": r"omp\.h|pthread\.h|(x86|imm|amx)intrin\.h|cpuid\.h|arm_neon\.h|unistd\.h|sys/syscall\.h",
    "cuda": r"(cuda|cub|cooperative_groups|nv)[\w/.]*",
    "bindings": r"tvm/ffi/[\w/]+\.h",
    "model": r"nlohmann/json\.hpp|fcntl\.h|unistd\.h|sys/(mman|stat)\.h",
    "cli": r"CLI/\w+\.hpp|fmt/\w+\.h|nlohmann/json\.hpp|(unistd|fcntl|fnmatch|sched|cpuid|dlfcn|sys/\w+)\.h",
}
NEVER_INCLUDED = {"iostream", "ranges", "format", "print", "cassert", "ctime", "csignal"}
NEVER_CALLED = re.compile(
    r"(?<![\w.>])(?:std::|::)?"
    r"(abort|_?exit|_Exit|quick_exit|terminate|v?f?printf|f?puts|putchar|perror|assert|system)\s*\("
    r"|std::(cout|cerr|clog)\b")
MACRO = re.compile(r"^\s*#\s*define\b")

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)


def room_below_src(path):
    """Room of a file named as in an #include: "topk/registry.h"."""
    if path.parts[0] == "kv" and (path.parts[1] in {"cpu", "cuda"} or path.stem in {"registry", "reference"}):
        return "write"
    return path.parts[0] if len(path.parts) > 1 else path.stem


def room_of(path):
    """Room of a file below src, include or cli, as LAYERS names it."""
    return room_below_src(path.relative_to("src")) if path.parts[0] == "src" else path.parts[0]


def room_of_include(name):
    return "include" if name.startswith("sievemla/") else room_below_src(Path(name))


def code_of(text):
    """The text without comments and string contents, line breaks kept."""
    return COMMENT_OR_STRING.sub(lambda m: '""' if m[0][0] == '"' else "\n" * m[0].count("\n"), text)


def breaches(path, text):
    """Every rule that a file breaks: [(line, what)]. `path` is relative to the repository."""
    room = room_of(path)
    if room not in LAYERS:
        return [(1, f"'{room}' is not a room of tools/check_layers.py")]
    library = room in LIBRARY or path.stem == "geometries"
    system = SYSTEM.get("cuda" if "cuda" in path.parts else "cpu" if "cpu" in path.parts else room, r"(?!)")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (match := INCLUDE.match(line)):
            continue
        own, foreign = match.groups()
        if own:
            target = room_of_include(own)
            local = "/" not in own and (ROOT / path.parent / own).exists()
            if not local and target != room and target not in LAYERS[room]:
                found.append((number, f"{room} must not include {own}"))
            if library and target == "model" and "geometries" not in own:
                found.append((number, f"the library must not include {own}, of model only the table of geometries"))
        elif foreign in NEVER_INCLUDED and room != "cli":
            found.append((number, f"<{foreign}> has no place below cli"))
        elif ("." in foreign or "/" in foreign) and not re.fullmatch(system, foreign):
            found.append((number, f"{room} must not include <{foreign}>"))
        elif library and foreign.startswith("nlohmann"):
            found.append((number, f"the library must not include <{foreign}>"))
    for number, line in enumerate(code_of(text).splitlines(), 1):
        if MACRO.match(line):
            found.append((number, "a macro, where a constant or a function does"))
        if room != "cli" and (match := NEVER_CALLED.search(line)):
            found.append((number, f"the library never prints, aborts or exits: {match[0].strip()}"))
    return found


def sources():
    for top in ("include", "src", "bindings", "cli"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in {".h", ".cc", ".cu", ".cuh"}:
                yield path.relative_to(ROOT)


def self_test():
    """A checker that finds nothing proves nothing: each of these must be found, and the last group must not."""
    bad = [
        ("src/attention/a.cc", '#include "topk/topk.h"'),
        ("src/attention/cpu/a.cc", '#include "topk/topk.h"'),
        ("src/kv/a.h", '#include "cpu/threads.h"'),
        ("src/kv/a.h", '#include "kv/registry.h"'),
        ("src/topk/a.h", '#include "kv/registry.h"'),
        ("src/base/a.h", '#include "api/checks.h"'),
        ("src/api/a.cc", '#include "model/decoder.h"'),
        ("src/topk/a.cc", "#include <fmt/format.h>"),
        ("src/topk/a.cc", "#include <omp.h>"),
        ("src/topk/a.cc", "#include <iostream>"),
        ("src/model/a.cc", "  std::cerr << 1;"),
        ("src/model/a.cc", "  std::abort();"),
        ("src/model/a.cc", '  printf("%d", 1);'),
        ("src/cpu/a.cc", "#define X 1"),
        ("include/sievemla/a.h", '#include "base/view.h"'),
        ("bindings/a.cc", '#include "kv/formats.h"'),
        ("src/api/a.cc", "#include <tvm/ffi/tvm_ffi.h>"),
        ("src/nowhere/a.h", ""),
    ]
    good = [
        ("src/attention/a.cc", '#include "kv/formats.h"'),
        ("src/kv/cpu/a.cc", '#include "cpu/threads.h"'),
        ("src/attention/cuda/a.cu", "#include <cuda_bf16.h>"),
        ("src/api/a.cc", '#include "version.h"'),
        ("src/api/a.cc", '// abort() is never called\nauto text = "exit(1)"; x.exit(); on_exit();'),
        ("cli/a.cc", "#include <CLI/CLI.hpp>"),
    ]
    wrong = [case for case in bad if not breaches(Path(case[0]), case[1])]
    wrong += [case for case in good if breaches(Path(case[0]), case[1])]
    for case in wrong:
        print("check_layers: judged wrongly:", *case)
    return 1 if wrong else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    count, status = 0, 0
    for path in sources():
        count += 1
        for line, what in breaches(path, (ROOT / path).read_text()):
            print(f"{path}:{line}: {what}")
            status = 1
    print(f"check_layers: {count} files")
    return status


if __name__ == "__main__":
    sys.exit(main())
