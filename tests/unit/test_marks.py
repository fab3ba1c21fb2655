"""Tests of servers, ranks and whole jobs lie in the folders that make test gives to pytest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_make_test_collects_every_folder_with_marked_tests():
    asked = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # without arguments make runs two pytests; the second, of whole jobs, names its files and folders
    given = re.findall(r"tests/[\w/.]+", asked.replace("\\\n", " "))
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path != Path(__file__) and re.search(r"\bmark\.(e2e|ranks|ci)\b", path.read_text())
    ]
    assert len(marked) > 20
    assert not [path for path in marked if not any(path.startswith(g) for g in given)]
