#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Times every tier that this CPU runs, and the peers beside it: what `./dev bench cpu` does.

    python3 bench/cpu.py [--peers DIR] [--json FILE] [--rounds N] [--ms N] [--program FILE] [--tiers NAME...]

Peers and tiers take turns, round after round, so that what else the machine does meets all of them. A number is the
median of the rounds' medians, the least time that of all. The best tier (`sievemla info`) runs every case, the others
those of one request on one thread. DIR is what bench/peers/fetch_cpu_peers.sh made; the peers' numbers go to FILE with
.peers.json at its end. Exit status: compare.py's, with --allow-missing.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
OTHER_TIERS = ["cpu.attend.decode.*.b1.*.t1", "cpu.index.decode.*.t1", "cpu.topk.*.t1", "cpu.chain.*.t1",
               "cpu.step.*.b1.*.t1", "cpu.kv.*.t1"]


def run(command, **environment):
    """One bench program, whose --json file it returns. A peer without a number is no reason to stop."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "out.json"
        status = subprocess.run([*command, "--json", path], env={**os.environ, **environment},
                                stdout=subprocess.DEVNULL).returncode
        if not path.exists():
            sys.exit(f"bench/cpu.py: {command[0]} ended with {status} and wrote nothing")
        return json.loads(path.read_text())


def merged(reports):
    """One report of several rounds'. Peaks are what was reached at best in all of them."""
    rows, peaks = {}, {}
    for report in reports:
        for row in report["cases"]:
            rows.setdefault((row["case"], row.get("tier", row.get("peer")), row["variant"]), []).append(row)
            if "peak" in row:
                unit = row["peak"], row["threads"]
                peaks[unit] = max(peaks.get(unit, 0), row["peak_gflops"])
    report = {field: value for field, value in reports[0].items() if field not in ("cases", "failed", "tier")}
    report["load"] = max(r["load"] for r in reports)
    report["cases"], report["failed"] = [], [failure for r in reports for failure in r["failed"]]
    for rounds in rows.values():
        row = dict(rounds[0])
        work = row.get("tflops", 0) * row["us"]
        row["us"] = round(statistics.median(r["us"] for r in rounds), 2)
        row["us_min"] = min(r["us_min"] for r in rounds)
        row["us_p10"], row["us_p90"] = (statistics.median(r[field] for r in rounds) for field in ("us_p10", "us_p90"))
        row["runs"], row["rounds"] = sum(r["runs"] for r in rounds), len(rounds)
        if "tbps" in row:
            row["tbps"] = float(f"{row['tbps'] * rounds[0]['us'] / row['us']:.4g}")
        if work:
            row["tflops"] = float(f"{work / row['us']:.4g}")
        if "peak" in row:
            row["peak_gflops"] = peaks[row["peak"], row["threads"]]
            row["of_peak"] = float(f"{work / row['us_min'] * 1e3 / row['peak_gflops']:.3g}")
        report["cases"].append(row)
    return report


def peer_keys():
    targets = json.loads((HERE / "targets.json").read_text())["targets"]
    keys = [t["over"].get("case", t["case"]) for t in targets if "peer" in t.get("over", {})]
    return list(dict.fromkeys(key for key in keys if key.startswith("cpu.")))


def table(report):
    print(f"{'case':52s} {'tier':10s} {'median us':>10s} {'least us':>10s} {'GFLOP/s':>8s} {'of peak':>15s}  kernels")
    for row in report["cases"]:
        rate = row["tflops"] * row["us"] / row["us_min"] * 1e3 if "tflops" in row else 0
        peak = f"{row['of_peak']:5.0%} of {row['peak_gflops']:6.0f}" if "peak" in row else "-"
        print(f"{row['case']:52s} {row['tier']:10s} {row['us']:10.1f} {row['us_min']:10.1f} "
              f"{f'{rate:.1f}' if rate else '-':>8s} {peak:>15s}  {row['variant']}")


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--program", type=pathlib.Path, default=HERE.parent / "build/cpu/bin/sievemla")
    options.add_argument("--peers", type=pathlib.Path, help="the folder of bench/peers/fetch_cpu_peers.sh")
    options.add_argument("--json", type=pathlib.Path, default=HERE.parent / "build/cpu/bench.json")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--ms", type=int, default=300, help="a case and round may take so long")
    options.add_argument("--tiers", nargs="+", help="instead of all that this machine runs")
    args = options.parse_args()
    args.program = args.program.resolve()  # a path without a folder would be looked for elsewhere
    if args.rounds < 1:
        options.error("--rounds must be at least 1")
    if args.peers and not (args.peers / "cpu-venv/bin/python").exists():
        options.error(f"no cpu-venv in {args.peers}: bench/peers/fetch_cpu_peers.sh makes it")
    info = json.loads(subprocess.run([args.program, "info", "--json"], check=True, capture_output=True).stdout)
    tiers = args.tiers or info["cpu"]["tiers"]
    best = info["cpu"]["best_tier"] if info["cpu"]["best_tier"] in tiers else tiers[-1]
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"warning: the load average is {load:.1f}; other work on this machine spoils the numbers",
              file=sys.stderr)

    ours, peers = [], []
    for number in range(args.rounds):
        if args.peers:
            print(f"round {number + 1} of {args.rounds}: peers", file=sys.stderr)
            peers.append(run([args.peers / "cpu-venv/bin/python", HERE / "peers/cpu_peers.py", "--wheels",
                              args.peers / "cpu-wheels", "--runs", "15", *peer_keys()]))
        for tier in tiers:
            print(f"round {number + 1} of {args.rounds}: {tier}", file=sys.stderr)
            cases = [] if tier == best else OTHER_TIERS
            ours.append(run([args.program, "bench", "--ms", str(args.ms), *cases], SIEVEMLA_CPU_ISA=tier))

    files = [args.json]
    args.json.write_text(json.dumps(merged(ours), indent=1) + "\n")
    if peers:
        files.append(args.json.with_suffix(".peers.json"))
        files[1].write_text(json.dumps(merged(peers), indent=1) + "\n")
    table(merged(ours))
    print(f"\n{info['cpu']['name']}, {info['cpu']['cores']} cores; {', '.join(map(str, files))}\n")
    sys.stdout.flush()
    return subprocess.run([sys.executable, HERE / "compare.py", "--allow-missing", *files]).returncode


if __name__ == "__main__":
    sys.exit(main())
