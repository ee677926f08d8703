# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The worst of each figure over all calls, printed when the process ends."""
import atexit

_worst: dict[str, float] = {}
_calls: dict[str, int] = {}


def worst(name: str, value: float) -> None:
    value = float(value)
    _worst[name] = max(_worst.get(name, value), value if value == value else float("inf"))
    _calls[name] = _calls.get(name, 0) + 1


@atexit.register
def _say() -> None:
    for name in sorted(_worst):
        print(f"SHADOW {name}: worst {_worst[name]:.6g} of {_calls[name]} calls", flush=True)
