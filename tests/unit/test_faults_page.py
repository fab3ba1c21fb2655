"""The page of faults names a test for each, and the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_page_of_faults_names_is_there():
    rows = [
        line.split("|")[1:-1]
        for line in (ROOT / "docs/internals/faults.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ][1:]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    there = set(re.findall(r"def (test_\w+)\(", code))
    for row in rows:
        assert len(row) == 5 and all(cell.strip() for cell in row), row
        fault, *_, tests = row
        named = re.findall(r"`(test_\w+)`", tests)
        assert named and there.issuperset(named), (fault, set(named) - there)
    assert len(rows) > 20
