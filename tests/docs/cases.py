#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""tests/cases.md: cases 1 to 26, each with a test, and every test named there stands in a source of tests/."""
import pathlib
import re

TESTS = pathlib.Path(__file__).resolve().parent.parent
rows = re.findall(r"^\| (\d+) \|(.*)$", (TESTS / "cases.md").read_text(encoding="utf-8"), re.M)
assert [int(number) for number, _ in rows] == list(range(1, 27)), "the numbers of the cases"
there = {f"{suite}.{name}" for file in TESTS.rglob("*_test.cc")
         for suite, name in re.findall(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", file.read_text(encoding="utf-8"), re.M)}
for number, text in rows:
    named = re.findall(r"`(\w+\.\w+)`", text)
    assert named, f"case {number} names no test"
    missing = set(named) - there
    assert not missing, f"case {number} names tests that are not there: {missing}"
print(f"{len(rows)} cases")
