#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""The pages that bench/report.py writes of the measurements in docs/: whole, of valid XML inside, and on their own; the
one that lies there is the one that it writes."""
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FILES = ROOT / "docs/measurements"
VERIFY = FILES / "verify-h200.json"
PAIRS = [("attention-h200-warp-groups.json", "peers-h200.json"), ("h200.json", "peers-h200.json"),
         ("cpu-xeon-2-cores.json", "cpu-xeon-2-cores.peers.json"), ("cpu-xeon-2-cores.json", None)]


def report(*arguments):
    return subprocess.run([sys.executable, ROOT / "bench/report.py", *arguments], capture_output=True, text=True)


with tempfile.TemporaryDirectory() as folder:
    page = pathlib.Path(folder) / "page.html"
    for ours, peers in PAIRS:
        verify = ["--verify", VERIFY] if ours == "h200.json" else []
        result = report(FILES / ours, *([FILES / peers] if peers else []), *verify, "--out", page)
        assert result.returncode == 0, result.stderr
        text = page.read_text()
        assert not re.search(r"(src|href)=|url\(|@import|<script", text), "the page loads something"
        drawings = re.findall(r"<svg.*?</svg>", text, re.S)
        assert len(drawings) >= 3, f"{ours}: {len(drawings)} drawings"
        for drawing in drawings:
            tree = xml.fromstring(drawing)
            for mark in tree.iter("circle"):  # inside the frame
                assert 0 < float(mark.get("cx")) < 360 and 0 < float(mark.get("cy")) < 235, xml.tostring(mark)
        assert ("fastest peer" in text) and (("×" in text) == bool(peers))
        if verify:
            assert text == (FILES / "h200.html").read_text(), "docs/measurements/h200.html is of other numbers or code"
    ours = FILES / "h200.json"
    same = subprocess.run([sys.executable, ROOT / "bench/compare.py", ours, ours], capture_output=True, text=True)
    assert same.returncode == 0 and "geometric mean 1.00" in same.stdout, same.stdout + same.stderr
    page.write_text("{}")
    assert report(page).returncode == 2
print(len(PAIRS), "pages")
