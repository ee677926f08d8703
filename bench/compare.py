#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Compares a file of `sievemla bench` with one of the peers, and checks targets.json.

    python3 compare.py OURS.json [PEERS.json] [--targets FILE] [--allow-missing]

Speedup = the other's time / ours, of medians; that of the least times stands beside it. Both files must come from one
run on one machine. Exit 0: every target met; 1: one missed, or not measured (unless --allow-missing); 2: wrong use.
"""

import argparse
import fnmatch
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent


class BadInput(Exception):
    pass


def read(path):
    try:
        report = json.loads(pathlib.Path(path).read_text())
        for row in report["cases"]:
            if not (isinstance(row["case"], str) and 0 < row["us"] < float("inf")):
                raise BadInput(f"{path}: case {row['case']!r} has time {row['us']!r}")
    except OSError as why:
        raise BadInput(str(why)) from why
    except (KeyError, TypeError, ValueError) as why:
        raise BadInput(f"{path}: not a bench file: {type(why).__name__} {why}") from why
    return report


def fastest(rows, patterns):
    """The fastest row whose fields match all the patterns, or None."""
    rows = [row for row in rows
            if all(fnmatch.fnmatchcase(str(row.get(field, "")), pattern) for field, pattern in patterns.items())]
    return min(rows, key=lambda row: row["us"], default=None)


def least(row):
    return row.get("us_min", row["us"])


def name(row):
    return " ".join(str(row[field]) for field in ("peer", "version", "tier", "variant") if field in row)


def rate(row):
    """GFLOP/s of the fastest run."""
    return row["tflops"] * row["us"] / least(row) * 1e3


def judge(target, ours, peers):
    """(text of what was measured, whether it is good or None, the other side)"""
    mine = fastest(ours, {field: target[field] for field in ("case", "tier") if field in target})
    if mine is None:
        return "not measured", None, ""
    if "max_us" in target:
        return f"{mine['us']:.1f} us (least {least(mine):.1f})", mine["us"] <= target["max_us"], ""
    if "min_of_peak" in target:
        return (f"{mine['of_peak'] * 100:.0f} % of {mine['peak_gflops']:.0f} GFLOP/s",
                mine["of_peak"] >= target["min_of_peak"], mine["peak"])
    over = {"case": target["case"], **target["over"]}
    other = fastest(peers if "peer" in over else ours, over)
    if other is None:
        return "other side not measured", None, over.get("peer", over.get("tier", ""))
    if "min_rate" in target:
        share = rate(mine) / rate(other)
        return f"{share * 100:.0f} % of {rate(other):.0f} GFLOP/s", share >= target["min_rate"], over["case"]
    speedup = other["us"] / mine["us"]
    return f"{speedup:.2f} (least {least(other) / least(mine):.2f})", speedup >= target["min_speedup"], name(other)


def wanted(target):
    for field, text in (("max_us", "<= {} us"), ("min_of_peak", ">= {:.0%}"), ("min_rate", ">= {:.0%}"),
                        ("min_speedup", ">= {} x")):
        if field in target:
            return text.format(target[field]) + (f" (goal {target['goal']})" if "goal" in target else "")
    raise BadInput(f"a target wants nothing: {target}")


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("ours")
    options.add_argument("peers", nargs="?")
    options.add_argument("--targets", default=HERE / "targets.json")
    options.add_argument("--allow-missing", action="store_true", help="a target without a number does not fail")
    args = options.parse_args()
    try:
        ours = read(args.ours)
        peers = read(args.peers) if args.peers else {"cases": []}
        targets = json.loads(pathlib.Path(args.targets).read_text())["targets"]
        for device in ("gpu", "cpu"):
            if args.peers and ours.get(device) != peers.get(device):
                raise BadInput(f"{device} differs: ours {ours.get(device)!r}, peers {peers.get(device)!r}")
        rows = [(target["case"], target.get("tier", ""), wanted(target), *judge(target, ours["cases"], peers["cases"]))
                for target in targets]
    except (BadInput, OSError, ValueError, KeyError) as why:
        print(f"compare.py: {why}", file=sys.stderr)
        return 2
    states = {True: "met", False: "MISSED", None: "-"}
    print(f"{'case':52s} {'tier':10s} {'wanted':20s} {'measured':32s} {'':6s} over")
    for case, tier, want, got, good, other in rows:
        print(f"{case:52s} {tier:10s} {want:20s} {got:32s} {states[good]:6s} {other}")
    count = {state: sum(row[4] is state for row in rows) for state in states}
    print(f"{count[True]} met, {count[False]} missed, {count[None]} not measured")
    return 1 if count[False] or (count[None] and not args.allow_missing) else 0


if __name__ == "__main__":
    sys.exit(main())
