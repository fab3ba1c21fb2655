"""``r3train explain RUN``: a screen that says which part of the gap dominates, since when, and what acts on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.algo.gap_budget import PARTS
from r3train.cli import main
from r3train.config.help_text import find_setting
from r3train.observe.metrics import MetricsWriter
from r3train.report.explain_run import ABOUT, since_when


def run_of(run_dir: Path, steps: list[dict[str, float]], r3: bool = True) -> Path:
    """A run whose steps have these k3."""
    with MetricsWriter(run_dir, tensorboard=False) as metrics:
        for step, parts in enumerate(steps):
            gap = {f"gap/{part}_k3": value for part, value in parts.items()}
            metrics.write(step, {"train/log_prob_gap_mean": 0.01, **gap})
    value = str(r3).lower()
    (run_dir / "config.toml").write_text(f"[replay]\nuse_rollout_routing_replay = {value}\n")
    return run_dir


def explain(*args: object) -> str:
    result = CliRunner().invoke(main, ["explain", *map(str, args)])
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines()), result.output
    assert len(result.output.splitlines()) <= 24
    return result.output


def test_the_part_that_dominates_is_named_with_the_step_since_when_and_its_settings(tmp_path):
    sound = {"server": 1e-5, "staleness": 2e-6, "rest": 3e-6}
    stale = {**sound, "staleness": 9e-4}
    shown = explain(run_of(tmp_path / "run", [sound] * 20 + [stale] * 20))
    assert "log-prob gap of steps 36 to 39: mean 0.01 nats, k3 0.000913" in shown
    assert re.search(r"^staleness +0\.0009 +99% #{20} ", shown, re.M)
    assert re.search(r"^server +1e-05 +1%", shown, re.M)
    assert re.search(r"^kernels +- +not measured", shown, re.M)
    assert "staleness dominates, since step 20. What acts on it:" in shown
    assert "--max-weight-staleness" in shown


@pytest.mark.parametrize("cause", PARTS)
def test_every_cause_is_found(tmp_path, cause):
    parts = {**dict.fromkeys(PARTS, 1e-6), cause: 1e-3}
    shown = explain(run_of(tmp_path / "run", [parts] * 3, r3=cause != "routing"))
    assert f"{cause} dominates, from the first step on" in shown
    flags = re.findall(r"--[\w-]+", ABOUT[cause][1])
    assert flags and all(flag in shown for flag in flags)
    for flag in flags:
        find_setting(flag)


def test_routing_is_no_part_of_a_gap_from_which_r3_has_taken_it(tmp_path):
    parts = {"routing": 1e-2, "server": 1e-5, "rest": 0.0}
    shown = explain(run_of(tmp_path / "run", [parts]))
    assert "server dominates" in shown and not re.search("^routing", shown, re.M)


def test_a_single_step_of_another_part_does_not_restart_the_count():
    few = {
        "server": dict.fromkeys(range(30), 1.0),
        "rest": {**dict.fromkeys(range(30), 0.1), 20: 3},
    }
    assert since_when(few, range(30), "server") == 0
    late = {"server": dict.fromkeys(range(30), 1.0), "rest": {i: 9.0 * (i < 10) for i in range(30)}}
    assert since_when(late, range(30), "server") == 14  # the first mean of 5 without the others


def test_a_gap_of_nothing_and_parts_below_0_are_no_division(tmp_path):
    shown = explain(run_of(tmp_path / "run", [{"server": 0.0, "staleness": 0.0, "rest": -1e-9}]))
    assert "The servers' log-probs are the actor's." in shown


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda path: path.mkdir(), "no metrics.jsonl: is it a run directory?"),
        (lambda path: run_of(path, [{}]), "no step has a budget"),
    ],
)
def test_a_directory_without_a_budget_is_said_in_one_line(tmp_path, prepare, message):
    prepare(tmp_path / "run")
    result = CliRunner().invoke(main, ["explain", str(tmp_path / "run")])
    assert result.exit_code == 2 and message in result.output
    assert "Traceback" not in result.output


def test_the_name_of_a_setting_is_a_setting_next_to_a_directory_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr").mkdir()
    assert "optimizer" in explain("lr") or "flag" in explain("lr")
    run_of(tmp_path / "demo", [{"rest": 1e-3}])
    assert "rest dominates" in explain("demo")
