#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""collect.py LOG [KEY=VALUE...] -- what gpu.sh printed, as docs/measurements/vllm-h200*.json. KEY=VALUE: of the run."""
import json
import re
import sys


def number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def main() -> None:
    text = open(sys.argv[1]).read()
    made = {"run": dict(pair.split("=", 1) for pair in sys.argv[2:]), "engines": {}, "pairs": [], "shadow": {},
            "agreements": [], "steps_us": {}, "restated": {}, "said": {}}
    for name, status, seconds in re.findall(r"^(\S+): exit (\d+) after (\d+) s$", text, re.M):
        made["engines"][name] = {"exit": int(status), "seconds": int(seconds)}
    for name, body in re.findall(r"^== (\S+)\n(.*?)(?=^== |^COMPARE |\Z)", text, re.M | re.S):
        engine = made["engines"].setdefault(name, {})
        if found := re.search(r"^RESULT \[(.*?)\] (\S+) ", body, re.M):
            engine |= {"backends": found[1].replace("'", ""), "kv": found[2]}
        for what, value, calls in re.findall(r"^SHADOW (.*): worst (\S+) of (\d+) calls$", body, re.M):
            made["shadow"].setdefault(name, {})[what] = {"worst": number(value), "calls": int(calls)}
        steps = r"^STEP .* batch (\d+): median (\S+) us, least (\S+), ninth of ten (\S+)$"
        for batch, *times in re.findall(steps, body, re.M):
            made["steps_us"].setdefault(name, {})[batch] = dict(zip(("median", "least", "p90"), map(number, times)))
        for said in re.findall(r"^(?:TOPK|MEMORY|SLEEP|OFFLOAD) .*$", body, re.M):
            made["said"].setdefault(name, []).append(said)
        for count, how in re.findall(r"(\d+) (passed|failed|skipped)", body if name == "restated" else ""):
            made["restated"][how] = int(count)
    names = r"^COMPARE (\S+)\.json (\S+)\.json (\d+)(?: (set \d+|all sets|up to index_topk|above index_topk))?"
    distances = r": prompt \|dlogp\| mean (\S+) p99 (\S+) max (\S+); equal tokens ([\d/]+)(?:, left at leads (.*))?$"
    of_sets = []  # 99th percentiles of the sets of a pair, up to the line of all sets; only the first set has its own
    for one, other, length, which, mean, p99, most, equal, leads in re.findall(names + distances, text, re.M):
        if which.startswith("set "):
            of_sets.append(number(p99))
            if which != "set 0":
                continue
        pair = {"pair": [one, other], "prompt": int(length), "equal_tokens": equal} | ({"of": which} if which else {})
        if leads:
            pair["left_at_leads"] = [number(lead) for lead in leads.split()]
        made["pairs"].append(pair if mean == "nan" else pair | {"mean": number(mean), "p99": number(p99),
                                                                "max": number(most)})
        if which == "all sets":
            made["pairs"][-1]["p99_of_sets"], of_sets = [min(of_sets), max(of_sets)], []
    agreed = r"^AGREE (\S+) (.*): (\d+) tokens: the others agree on (\d+) of (\d+), the first has (\d+) of them(.*)$"
    leaving = r"set (\d+) token (\d+) lead (\S+) apart (\S+) leads (\S+) to ([^\s;]+)"
    for one, others, length, *counts, left in re.findall(agreed, text, re.M):
        made["agreements"].append(
            {"one": one, "others": others.split(), "prompt": int(length)}
            | dict(zip(("others_agree", "tokens", "equal"), map(int, counts)))
            | {"left_at": [dict(zip(("set", "token", "lead", "apart", "least_lead", "most_lead"), map(number, at)))
                           for at in re.findall(leaving, left)]})
    text = json.dumps(made, indent=1)
    print(re.sub(r"\{\n\s+([^{}]*?)\n\s*\}", lambda at: "{" + re.sub(r"\n\s+", " ", at[1]) + "}", text))


if __name__ == "__main__":
    main()
