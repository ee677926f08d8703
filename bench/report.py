#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Writes one self-contained HTML page about a bench run: no network, no script, light and dark.

    python3 bench/report.py OURS.json [PEERS.json] [--verify VERIFY.json] [--out report.html] [--title TEXT]

Speedups over the fastest peer, a roofline per stage, the table of all cases, and errors over their bounds. VERIFY.json
is what `sievemla verify --json` printed. Roofs are those of ceilings.json for the device, on a CPU the run's own peaks.
"""

import argparse
import html
import json
import math
import pathlib
import sys

from compare import BadInput, fastest, geometric_mean, name, pairs, read, stage_of

HERE = pathlib.Path(__file__).resolve().parent

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1a1a19; --soft: #5f5e58; --line: #dddcd5; --grid: #ecebe6;
  --ours: #1f6fd1; --peer: #d3611f; --roof: #8a897f; --good: #157f3b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #161615; --ink: #edece7; --soft: #a3a29a; --line: #3a3935; --grid: #292825;
    --ours: #6aa9f4; --peer: #f0915a; --roof: #85847a; --good: #63c584; --bad: #f2867e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
p, dl { color: var(--soft); margin: .25rem 0; max-width: 62rem; }
.facts { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; color: var(--soft); font-size: .9rem; }
.facts b { color: var(--ink); font-weight: 600; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(21rem, 1fr)); gap: 1.25rem; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .25rem; }
figcaption small { color: var(--soft); font-weight: 400; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { font: 11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--soft); }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.roof { stroke: var(--roof); fill: none; stroke-width: 1.5; }
.ours { fill: var(--ours); stroke: var(--page); } .peer { fill: none; stroke: var(--peer); stroke-width: 1.75; }
.bars { fill: var(--ours); } .one { stroke: var(--ink); stroke-dasharray: 3 3; }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; font-size: .85rem; color: var(--soft);
  margin: .25rem 0 .75rem; }
.key i { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .4rem;
  vertical-align: -1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 34rem; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; border-bottom-color: var(--line); }
th:first-child, td:first-child, .left { text-align: left; } td.left { white-space: normal; min-width: 12rem; }
td:first-child { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .8rem; }
tr.stage td { font-weight: 600; font-family: inherit; font-size: .9rem; padding-top: 1.1rem; color: var(--ink); }
.good { color: var(--good); } .bad { color: var(--bad); }
"""


def text(value, digits=3):
    """A number as people read it: three significant digits, no exponent where none is needed."""
    if value is None:
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{max(digits - 1 - math.floor(math.log10(abs(value))), 0) if value else 0}f}"
    return f"{value:.{digits - 1}e}"


def facts(pairs_of):
    shown = [f"<span>{html.escape(what)} <b>{html.escape(str(value))}</b></span>" for what, value in pairs_of if value]
    return f'<div class="facts">{"".join(shown)}</div>'


# ---- drawing --------------------------------------------------------------------------------------------------------

class LogAxis:
    """A decade axis from `low` to `high` onto pixels."""

    def __init__(self, values, begin, end):
        self.low = math.floor(math.log10(min(values)) - 0.05)
        self.high = max(math.ceil(math.log10(max(values)) + 0.05), self.low + 1)
        self.begin, self.end = begin, end

    def __call__(self, value):
        return self.begin + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.begin)

    def decades(self):
        return [10.0 ** e for e in range(self.low, self.high + 1)]


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 235, 46, 352, 10, 195


def frame(x, y, x_name, y_name):
    parts = []
    for value in x.decades():
        at = x(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{BOTTOM}"/>'
                     f'<text x="{at:.1f}" y="{BOTTOM + 15}" text-anchor="middle">{value:g}</text>')
    for value in y.decades():
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                     f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{x_name}</text>'
                 f'<text x="4" y="{(TOP + BOTTOM) / 2}" text-anchor="middle" '
                 f'transform="rotate(-90 4 {(TOP + BOTTOM) / 2})">{y_name}</text>')
    return parts


def mark(kind, x, y, title):
    shape = (f'<circle class="ours" cx="{x:.1f}" cy="{y:.1f}" r="4.5">' if kind == "ours" else
             f'<circle class="peer" cx="{x:.1f}" cy="{y:.1f}" r="4.5">')
    return f"{shape}<title>{html.escape(title)}</title></circle>"


def svg(parts, label):
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'


def roofline(stage, rows, roofs):
    """rows: (case, ours, peer or None), with flops and bytes. Both axes in decades."""
    work = {case: (mine["tflops"] * mine["us"] * 1e6, mine["tbps"] * mine["us"] * 1e6) for case, mine, _ in rows}
    intensity = {case: flops / size for case, (flops, size) in work.items()}
    speeds = [work[case][0] / row["us"] / 1e6 for case, mine, peer in rows for row in (mine, peer) if row]
    x = LogAxis(list(intensity.values()), LEFT, RIGHT)
    tops = list(roofs["tflops"].values())
    y = LogAxis([*speeds, *tops], BOTTOM, TOP)
    parts = frame(x, y, "flop per byte that has to be streamed", "TFLOP/s")
    left, right = 10.0 ** x.low, 10.0 ** x.high
    for label, bandwidth in roofs["tbps"].items():
        top = max(tops, default=10.0 ** y.high)
        knee = min(top / bandwidth, right)
        start = max(left, 10.0 ** y.low / bandwidth)
        if start < knee:
            parts.append(f'<line class="roof" x1="{x(start):.1f}" y1="{y(start * bandwidth):.1f}" x2="{x(knee):.1f}" '
                         f'y2="{y(knee * bandwidth):.1f}"><title>{html.escape(label)}: {bandwidth} TB/s</title></line>')
    for label, speed in roofs["tflops"].items():
        start = min((speed / bandwidth for bandwidth in roofs["tbps"].values()), default=left)
        if start < right:
            parts.append(f'<line class="roof" x1="{x(max(start, left)):.1f}" x2="{RIGHT}" y1="{y(speed):.1f}" '
                         f'y2="{y(speed):.1f}"><title>{html.escape(label)}: {speed} TFLOP/s</title></line>'
                         f'<text x="{RIGHT}" y="{y(speed) - 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
    for case, mine, peer in rows:
        for kind, row in (("peer", peer), ("ours", mine)):
            if row:
                speed = work[case][0] / row["us"] / 1e6
                who = "ours" if kind == "ours" else name(row)
                parts.append(mark(kind, x(intensity[case]), y(speed),
                                  f"{case}\n{who}: {text(row['us'])} us, {text(speed)} TFLOP/s"))
    return f"<figure><figcaption>{stage}</figcaption>{svg(parts, stage + ': roofline')}</figure>"


def bandwidth(stage, rows, roofs):
    """Stages without arithmetic: TB/s over the bytes of a call."""
    size = {case: mine["tbps"] * mine["us"] * 1e6 for case, mine, _ in rows}
    speeds = [size[case] / row["us"] / 1e6 for case, mine, peer in rows for row in (mine, peer) if row]
    x = LogAxis([value / 1e6 for value in size.values()], LEFT, RIGHT)
    y = LogAxis([*speeds, *roofs["tbps"].values()], BOTTOM, TOP)
    parts = frame(x, y, "MB that have to be streamed", "TB/s")
    for label, speed in roofs["tbps"].items():
        parts.append(f'<line class="roof" x1="{LEFT}" x2="{RIGHT}" y1="{y(speed):.1f}" y2="{y(speed):.1f}"/>'
                     f'<text x="{RIGHT}" y="{y(speed) - 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
    for case, mine, peer in rows:
        for kind, row in (("peer", peer), ("ours", mine)):
            if row:
                speed = size[case] / row["us"] / 1e6
                who = "ours" if kind == "ours" else name(row)
                parts.append(mark(kind, x(size[case] / 1e6), y(speed),
                                  f"{case}\n{who}: {text(row['us'])} us, {text(speed)} TB/s"))
    return f"<figure><figcaption>{stage}</figcaption>{svg(parts, stage + ': bandwidth')}</figure>"


def histogram(stage, shares):
    """How far results are from the judge, over what is allowed: bars of a third of a decade; 0 stands at the left."""
    low, steps = -4.0, 3
    bins = [0] * int((1 - low) * steps + 1)  # first bin: exact or below 1e-4 of the bound
    for share in shares:
        at = 0 if share <= 10 ** low else 1 + int((math.log10(share) - low) * steps)
        bins[min(at, len(bins) - 1)] += 1
    most, wide = max(bins), (RIGHT - LEFT) / len(bins)
    parts = []
    for i, count in enumerate(bins):
        tall = count / most * (BOTTOM - TOP - 16)
        begin, end = (10 ** (low + (i + step) / steps) for step in (-1, 0))
        where = "exact, or below 1e-4" if i == 0 else f"{begin:.2g} to {end:.2g}"
        parts.append(f'<rect class="bars" x="{LEFT + i * wide + 1:.1f}" y="{BOTTOM - tall:.1f}" width="{wide - 2:.1f}" '
                     f'height="{tall:.1f}"><title>{where} of the bound: {count}</title></rect>')
        if count:
            parts.append(f'<text x="{LEFT + (i + .5) * wide:.1f}" y="{BOTTOM - tall - 4:.1f}" '
                         f'text-anchor="middle">{count}</text>')
    for exponent in range(int(low), 1):
        at = LEFT + (1 + (exponent - low) * steps) * wide
        parts.append(f'<text x="{at:.1f}" y="{BOTTOM + 15}" text-anchor="middle">{10.0 ** exponent:g}</text>')
        if exponent == 0:
            parts.append(f'<line class="one" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{BOTTOM}"/>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
                 f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">error / bound</text>')
    caption = f"<figcaption>{stage} <small>{len(shares)} results</small></figcaption>"
    return f"<figure>{caption}{svg(parts, stage + ': errors')}</figure>"


# ---- the page -------------------------------------------------------------------------------------------------------

def roofs_of(report, rows):
    device = report.get("gpu") or report.get("cpu")
    known = json.loads((HERE / "ceilings.json").read_text())["devices"].get(device)
    if known:
        return known
    peaks = {f"{row['peak']}, {row['threads']} threads": row["peak_gflops"] / 1e3
             for _, row, _ in rows if "peak" in row}
    return {"source": "the run's own peaks", "tbps": {}, "tflops": peaks}


def summary(both):
    stages = {}
    for case, mine, peer in both:
        stages.setdefault(stage_of(case), []).append(peer["us"] / mine["us"])
    rows = []
    for stage, speedups in stages.items():
        mean = geometric_mean(speedups)
        mood = "good" if mean >= 1 else "bad"
        rows.append(f'<tr><td>{stage}</td><td>{len(speedups)}</td><td class="{mood}">{mean:.2f} ×</td>'
                    f"<td>{min(speedups):.2f} ×</td><td>{max(speedups):.2f} ×</td></tr>")
    return ('<div class="scroll"><table><tr><th>stage</th><th>cases</th><th>geometric mean</th><th>worst</th>'
            f"<th>best</th></tr>{''.join(rows)}</table></div>")


def table(rows):
    lines, last = [], None
    for case, mine, peer in rows:
        if stage_of(case) != last:
            last = stage_of(case)
            lines.append(f'<tr class="stage"><td colspan="8">{last}</td></tr>')
        speedup = peer["us"] / mine["us"] if peer else None
        mood = "" if speedup is None else "good" if speedup >= 1 else "bad"
        lines.append(
            f"<tr><td>{case}</td><td>{text(mine['us'])}</td>"
            f"<td>{text(mine.get('us_p10'))} – {text(mine.get('us_p90'))}</td>"
            f'<td>{text(peer["us"]) if peer else "–"}</td><td class="{mood}">{f"{speedup:.2f} ×" if peer else "–"}</td>'
            f"<td>{text(mine.get('tflops'))}</td><td>{text(mine.get('tbps'))}</td>"
            f'<td class="left">{html.escape(name(peer)) if peer else ""}</td></tr>')
    return ('<div class="scroll"><table><tr><th>case</th><th>µs</th><th>10 – 90 %</th><th>peer µs</th><th>speedup</th>'
            f'<th>TFLOP/s</th><th>TB/s</th><th class="left">fastest peer</th></tr>{"".join(lines)}</table></div>')


def error_shares(verify, ours):
    """{stage: [error / bound]} of verify's results, else of the bench's."""
    shares = {}
    if verify:
        for kernel in verify["kernels"]:
            finite = [share if isinstance(share, (int, float)) else 10 for share in kernel["shares"]]  # "inf"
            shares.setdefault(kernel["stage"], []).extend(finite)
    else:
        for row in ours["cases"]:
            if row.get("bound"):
                shares.setdefault(stage_of(row["case"]), []).append(row["error"] / row["bound"])
    return {stage: values for stage, values in shares.items() if values}


def page(title, ours, peers, verify):
    both = pairs(ours["cases"], peers["cases"])
    of_peer = {case: peer for case, _, peer in both}
    cases = dict.fromkeys(row["case"] for row in ours["cases"])
    rows = [(case, fastest(ours["cases"], {"case": case}), of_peer.get(case)) for case in cases]
    roofs = roofs_of(ours, rows)
    stages = {}
    for row in rows:
        stages.setdefault(stage_of(row[0]), []).append(row)
    mhz = [row["sm_mhz"] for row in ours["cases"] if "sm_mhz" in row]
    about = [("device", ours.get("gpu") or ours.get("cpu")), ("version", ours.get("version")),
             ("commit", ours.get("commit")), ("kernels", ours.get("image")), ("CUDA", ours.get("cuda")),
             ("driver for CUDA", ours.get("driver")), ("SM clock", f"{min(mhz)} – {max(mhz)} MHz" if mhz else ""),
             ("load", text(ours["load"]) if "load" in ours else "")]
    key = '<div class="key"><span><i style="background:var(--ours)"></i>ours</span>'
    if both:
        key += '<span><i style="border:2px solid var(--peer)"></i>the fastest peer</span>'
    source = f"{roofs['basis']}: {roofs['source']}" if "basis" in roofs else roofs["source"]
    key += (f"<span>lines: {html.escape(source)}. Bytes count at every read, so what L2 serves again (prefill, .warm, "
            ".graph) may stand above a line of memory. Hover for the case.</span></div>")
    body = [f"<h1>{html.escape(title)}</h1>", facts(about)]
    if both:
        body += ["<h2>Speedup over the fastest peer</h2>", summary(both)]
    body += ["<h2>Rooflines</h2>", key, '<div class="panels">']
    for stage, members in stages.items():
        draw = roofline if all(mine.get("tflops") for _, mine, _ in members) else bandwidth
        body.append(draw(stage, members, roofs))
    body += ["</div>", "<h2>All cases</h2>", table([row for members in stages.values() for row in members])]
    shares = error_shares(verify, ours)
    if shares:
        body += ["<h2>Errors</h2>", "<p>Each result beside its judge: the reference, in double precision, or for large "
                 "cases on a GPU the CPU kernels, which are held against the reference. Right of the dashed line a "
                 "result is wrong.</p>", '<div class="panels">']
        body += [*(histogram(stage, values) for stage, values in shares.items()), "</div>"]
    head = ('<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(title)}</title><style>{STYLE}</style>")
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("ours")
    options.add_argument("peers", nargs="?")
    options.add_argument("--verify", help="what `sievemla verify --json` printed")
    options.add_argument("--out", default="report.html")
    options.add_argument("--title")
    args = options.parse_args()
    try:
        ours = read(args.ours)
        peers = read(args.peers) if args.peers else {"cases": []}
        verify = json.loads(pathlib.Path(args.verify).read_text()) if args.verify else None
        title = args.title or f"SieveMLA on {ours.get('gpu') or ours.get('cpu')}"
        pathlib.Path(args.out).write_text(page(title, ours, peers, verify))
    except (BadInput, OSError, ValueError, KeyError) as why:
        print(f"report.py: {type(why).__name__} {why}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
