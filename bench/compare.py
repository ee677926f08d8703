#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Compares a file of `sievemla bench` with one of the peers, or with another of ours, and checks targets.json.

    python3 compare.py OURS.json [OTHER.json] [--targets FILE] [--allow-missing] [--any-device]
                              [--markdown]

Speedup = the other's time / ours, of medians; that of the least times stands beside it. Both files must come from one
run on one machine. Targets are judged without OTHER, or where that is the peers' file. Exit 0: every target met; 1: one
missed, or not measured (unless --allow-missing); 2: wrong use.
"""

import argparse
import fnmatch
import json
import math
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


def stage_of(case):
    """`attend.decode`, `topk`, `cpu.step`: what the means are taken over."""
    parts = case.split(".")
    lead = 1 if parts[0] == "cpu" else 0
    return ".".join(parts[:lead + (1 if parts[lead] in ("topk", "chain", "step") else 2)])


def pairs(ours, others):
    """(case, our fastest row, the other's fastest) of the cases that both files have."""
    cases = dict.fromkeys(row["case"] for row in ours)
    both = [(case, fastest(ours, {"case": case}), fastest(others, {"case": case})) for case in cases]
    return [(case, mine, other) for case, mine, other in both if other]


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def print_pairs(rows):
    stages = {}
    print(f"{'case':54s} {'ours us':>10s} {'other us':>10s} {'speedup':>8s}  other")
    for case, mine, other in rows:
        stages.setdefault(stage_of(case), []).append(other["us"] / mine["us"])
        print(f"{case:54s} {mine['us']:10.2f} {other['us']:10.2f} {other['us'] / mine['us']:8.2f}  {name(other)}")
    for stage, speedups in stages.items():
        print(f"{stage}: geometric mean {geometric_mean(speedups):.2f} of {len(speedups)}, worst {min(speedups):.2f}")
    print()


def print_markdown(rows):
    """The table of docs/measurements.md."""
    print("| case | measured us | fastest peer us | x |\n|---|---|---|---|")
    for case, mine, other in rows:
        print(f"| {case} | {mine['us']:.4g} | {other['us']:.4g} {other.get('peer', '')} "
              f"| {other['us'] / mine['us']:.2f} |")


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
    options.add_argument("other", nargs="?")
    options.add_argument("--targets", default=HERE / "targets.json")
    options.add_argument("--allow-missing", action="store_true", help="a target without a number does not fail")
    options.add_argument("--markdown", action="store_true", help="print the pairs as a table for the docs, no targets")
    options.add_argument("--any-device", action="store_true", help="compare although the devices differ")
    args = options.parse_args()
    try:
        ours = read(args.ours)
        other = read(args.other) if args.other else {"kind": "peers", "cases": []}
        for device in ("gpu", "cpu"):
            if args.other and ours.get(device) != other.get(device) and not args.any_device:
                raise BadInput(f"{device} differs: ours {ours.get(device)!r}, other {other.get(device)!r}")
        targets = json.loads(pathlib.Path(args.targets).read_text())["targets"]
        kinds = {row["case"].startswith("cpu.") for row in ours["cases"]}
        rows = [(target["case"], target.get("tier", ""), wanted(target), *judge(target, ours["cases"], other["cases"]))
                for target in targets
                if other["kind"] == "peers" and target["case"].startswith("cpu.") in kinds]
    except (BadInput, OSError, ValueError, KeyError) as why:
        print(f"compare.py: {why}", file=sys.stderr)
        return 2
    if args.markdown:
        print_markdown(pairs(ours["cases"], other["cases"]))
        return 0
    if args.other:
        print_pairs(pairs(ours["cases"], other["cases"]))
    states = {True: "met", False: "MISSED", None: "-"}
    print(f"{'case':52s} {'tier':10s} {'wanted':20s} {'measured':32s} {'':6s} over")
    for case, tier, want, got, good, other in rows:
        print(f"{case:52s} {tier:10s} {want:20s} {got:32s} {states[good]:6s} {other}")
    count = {state: sum(row[4] is state for row in rows) for state in states}
    print(f"{count[True]} met, {count[False]} missed, {count[None]} not measured")
    return 1 if count[False] or (count[None] and not args.allow_missing) else 0


if __name__ == "__main__":
    sys.exit(main())
