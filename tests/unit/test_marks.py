"""Every test is run by one of make's targets, chosen by its marks."""

from __future__ import annotations

import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKS = ("e2e", "ranks", "gate", "slow", "ci", "long")


def pytests(target: str, *settings: str) -> list[tuple[str, list[str]]]:
    """(expression of marks, files and folders) of each pytest that a target of make starts."""
    command = ["make", "--dry-run", "--no-print-directory", target, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [x for x in done.stdout.replace("\\\n", " ").splitlines() if " -m pytest " in x]
    found = [re.search(r"--quiet -m (?:\"(.+?)\"|(\w+))", line) for line in lines]
    return [(m[1] or m[2], re.findall(r" (tests/[\w/.]+)", x)) for m, x in zip(found, lines)]


@pytest.fixture(scope="module")
def expressions() -> dict[str, str]:
    """Expression of marks by the name of what runs these tests."""
    (quick, gate), (rest,) = pytests("test"), pytests("test-all")
    (slow,), (long,) = pytests("test-slow"), pytests("test-long")
    names = ("quick", "gate", "rest", "slow", "long")
    return {name: each[0] for name, each in zip(names, (quick, gate, rest, slow, long))}


def test_a_test_is_run_by_one_of_the_targets(expressions):
    for chosen in product((False, True), repeat=len(MARKS)):
        marks = dict(zip(MARKS, chosen))
        if (
            marks["ci"]
            and not marks["slow"]
            or marks["gate"]
            and not (marks["e2e"] or marks["ranks"])
        ):
            continue  # refused below
        runs = [name for name, given in expressions.items() if eval(given, {}, marks)]
        both = marks["slow"] and marks["long"]
        assert runs == (["slow", "long"] if both else runs[:1]) and runs, marks


def test_ci_adds_its_own_tests_to_the_rest(expressions):
    [(given, _)] = pytests("test-all", "ALSO=or ci")
    assert given.split() == [*expressions["rest"].split(), "or", "ci"]


def marked(name: str) -> dict[str, str]:
    """Files with tests of a mark, and their text."""
    files = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    found = {p: text for p, text in files.items() if re.search(rf"\bmark\.{name}\b", text)}
    return {path.relative_to(ROOT).as_posix(): text for path, text in found.items()}


def test_the_targets_are_given_every_folder_with_their_tests():
    for target, names in {"test": ("gate",), "test-all": ("e2e", "ranks", "ci")}.items():
        given = pytests(target)[-1][1]
        files = {path for name in names for path in marked(name)}
        assert len(files) > 5
        assert not [path for path in files if not any(path.startswith(place) for place in given)]


def test_marks_go_together():
    whole = marked("e2e") | marked("ranks")
    assert marked("gate").keys() <= whole.keys()
    assert all("mark.slow" in text for text in marked("ci").values())
