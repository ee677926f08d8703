# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""`sievemla ...` and `python -m sievemla ...`: hands over to the program that came with the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    program = str(Path(__file__).parent / "bin" / "sievemla")
    os.execv(program, ["sievemla", *sys.argv[1:]])


if __name__ == "__main__":
    main()
