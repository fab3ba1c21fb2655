"""The table of the benchmarks from a recorded small run, and that every script says what it does."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.measure import in_turns, ratios, spread
from benchmarks.page import FIGURES, figure, number, table
from benchmarks.run_all import BENCHMARKS, QUICK, run_script

ROOT = Path(__file__).resolve().parents[3]
RECORDED = json.loads(Path(__file__).with_name("recorded_benchmarks.json").read_text())


def test_every_benchmark_has_its_figures_in_the_table():
    assert FIGURES.keys() == BENCHMARKS.keys() == QUICK.keys()
    rows = [line for line in table(RECORDED).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {4}
    assert not re.search(r"\bnan\b|\binf\b|None|[{}]|not measured", "".join(rows)), rows
    assert {row.split("|")[1].strip() for row in rows[2:]} == FIGURES.keys()
    assert figure(RECORDED["replay_overhead"]["check_over_native"]) in table(RECORDED)


def test_a_benchmark_that_fails_leaves_its_reason_and_no_result(tmp_path):
    found = run_script("trl_worker", ["--steps", "no number"], tmp_path)
    assert list(found) == ["error"] and "exit code 2" in found["error"], found


def test_a_benchmark_that_failed_or_never_ran_is_named_and_not_left_out():
    results = {name: r for name, r in RECORDED.items() if name != "weight_sync"}
    results["rollout_rate"] = {"error": "exit code 1: EngineDied"}
    rows = table(results).splitlines()
    assert any("weight_sync" in row and "not measured" in row for row in rows)
    assert any("rollout_rate" in row and "EngineDied" in row for row in rows)


def test_a_spread_is_of_neighbours():
    assert ratios([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == spread([2.0, 3.0, 4.0])
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "n": 3}
    with pytest.raises(ValueError, match="at least one"):
        spread([])
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


def test_another_arm_begins_each_round_and_the_warm_up_is_left_out():
    began = []
    arms = {name: lambda name=name: began.append(name) for name in "abc"}
    ticks = iter(range(100))
    seconds = in_turns(arms, 2, warm_up=2, clock=lambda: next(ticks))
    assert "".join(began) == "abc" + "bca" + "cab" + "abc"
    assert seconds == {"a": [1, 1], "b": [1, 1], "c": [1, 1]}


def test_numbers_keep_three_digits():
    assert [number(x) for x in (0, 1.5e-5, 0.01234, 9.876, 123456.7)] == [
        "0",
        "1.5e-05",
        "0.0123",
        "9.88",
        "123,457",
    ]


SCRIPTS = [
    path.stem
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_answers_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])  # some add the root to it
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert not end.value.code and "usage:" in capsys.readouterr().out.lower()


def test_scripts_are_found():
    assert {"run_all", "trl_worker", "replay_overhead"} <= set(SCRIPTS)
