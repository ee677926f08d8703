#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Runs the commands of the documentation, and looks for the files that it names.

    python3 tests/docs/commands.py --program build/cpu/bin/sievemla [--list]

A block fenced as `sh` is run line by line, in a folder that looks like the repository; one whose title says who
runs it, or why nobody here can ("needs a GPU"), is not: of its commands, as of those within sentences and tables, the
options of `sievemla` are checked. Where the title says .ci/run, each `./dev` command has to be a step there. A block
that holds a command and is not fenced as `sh` is a defect; so is a file of the repository, or a link, that leads
nowhere. Exit 1 if anything failed.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = [*(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "bench/README.md", "examples/README.md")),
         *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = r"(sievemla|\./dev|cmake|cpack|pip|python3|docker|vllm|build/\S+|bench/\S+)"
COMMAND = re.compile(rf"^\s*(\(cd \S+ && )?(\S+=\S+ )*{PROGRAMS}\s")
FENCE = re.compile(r"^```\s*(\w*)\s*(?:title=\"([^\"]*)\")?\s*$")
STEPS = set(re.findall(r"^step (\w+)", (ROOT / ".ci/run").read_text(), re.M))
SENTENCE = re.compile(r"`(sievemla [a-z][^`]*)`")
FOLDERS = "|".join(entry.name for entry in ROOT.iterdir() if entry.is_dir() and entry.name[0] != "." and
                   not entry.name.startswith("build"))
OURS = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w(?![\w<*])")  # files of the repository
LINK = re.compile(r"\]\(([^):#]+)")


def blocks(path):
    """(line, language, title, lines) of each fenced block."""
    inside = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.startswith("```"):
            if inside:
                inside[3].append(line)
        elif inside:
            yield inside
            inside = None
        else:
            language, title = (FENCE.match(line) or FENCE.match("```")).groups()
            inside = (number, language, title, [])


def options_of(program):
    """{command: its options} by --help."""
    def words(*arguments):
        return subprocess.run([program, *arguments, "--help"], capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^  (\w+) +[A-Z]", words().split("Subcommands:")[1].split("exit status")[0], re.M)
    return {command: set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", words(command))) for command in commands}


def wrong_words(text, known):
    """What a command that is not run says of `sievemla` and of files here that is not so."""
    words = text.split("#")[0].split()
    wrong = [name for name in OURS.findall(" ".join(words)) if not (ROOT / name).exists()]
    if words[0].endswith("sievemla") and len(words) > 1:
        command, *rest = words[1:]
        unknown = [w for w in rest if w.startswith("--") and w.split("=")[0] not in known.get(command, set())]
        wrong += unknown if command in known else [command]
    return wrong


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--program", required=True, type=pathlib.Path)
    options.add_argument("--list", action="store_true", help="print the commands, run none")
    args = options.parse_args()
    program = args.program.resolve()
    known = options_of(program)
    failures, ran, left = [], 0, []
    with tempfile.TemporaryDirectory() as folder:
        for entry in ROOT.iterdir():
            if not entry.name.startswith((".git", "build")):
                (pathlib.Path(folder) / entry.name).symlink_to(entry)
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        for page in PAGES:
            name = page.relative_to(ROOT)
            for number, language, title, lines in blocks(page):
                commands = [line for line in lines if COMMAND.match(line)]
                if commands and language != "sh":
                    failures.append(f"{name}:{number}: commands in a block that is not fenced as sh")
                if title and ".ci/run" in title:
                    failures += [f"{name}:{number}: {command}: no step of .ci/run" for command in commands
                                 if command.split()[1] not in STEPS]
                if language != "sh" or title:
                    left += [f"{name}: {command}  ({title})" for command in commands]
                    failures += [f"{name}:{number}: {command}: {wrong} is not there"
                                 for command in commands for wrong in wrong_words(command, known)]
                    continue
                for line in filter(str.strip, lines):
                    print(f"{name}: {line}", flush=True)
                    if args.list:
                        continue
                    got = subprocess.run(["bash", "-c", line], cwd=folder, env={**os.environ, "PATH": path},
                                         capture_output=True, text=True, stdin=subprocess.DEVNULL)
                    ran += 1
                    # Doctor's 1 is an answer: it does not run here.
                    if got.returncode not in ({0, 1} if line.startswith("sievemla doctor") else {0}):
                        failures.append(f"{name}:{number}: {line}: {got.returncode}: {got.stderr.strip()[-500:]}")
            text = page.read_text()
            named = [ROOT / file for code in re.findall(r"`([^`\n]+)`", text) for file in OURS.findall(code)]
            linked = [page.parent / to for to in LINK.findall(text)]
            failures += [f"{name}: {path} is not there" for path in named + linked
                         if not path.exists() and not list(path.parent.glob(path.name + ".*"))]
            for text in SENTENCE.findall(text):
                failures += [f"{name}: `{text}`: {wrong} is not there" for wrong in wrong_words(text, known)]
    print(*(f"not run: {command}" for command in left), sep="\n")
    print(*failures, sep="\n", file=sys.stderr)
    print(f"{ran} commands ran, {len(left)} left to others, {len(failures)} failed")
    return 1 if failures or (ran == 0 and not args.list) else 0


if __name__ == "__main__":
    sys.exit(main())
