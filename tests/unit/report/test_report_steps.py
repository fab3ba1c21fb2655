"""The report step by step: R3's verdict and coverage, and the time of the steps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from r3train.observe.metrics import MetricsWriter
from tests.unit.evidence_dirs import edit, write_run
from tests.unit.report_runs import page_of, Page, with_metrics

VERDICTS = ("passed", "no evidence", "failed")
STRIP = "R3 verdict by step"


def strip_of(page: Page) -> list[tuple[str, str]]:
    """The verdict and the words of every cell, in the order of the strip."""
    (cells,) = page.figures[STRIP]["data"]
    return [(VERDICTS[z], words) for z, words in zip(cells["z"][0], cells["text"][0])]


def counts_of(page: Page) -> list[str]:
    shown = re.search(r'<p class="counts">(.*?)</p>', page.text, re.S)[1]
    return re.findall(r">([^<]+)</span>", shown)


def write_metrics(run: Path, steps: range, **values: object) -> Path:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").unlink(missing_ok=True)
    with MetricsWriter(run, tensorboard=False) as metrics:
        for step in steps:
            metrics.write(step, {k.replace("__", "/"): v for k, v in values.items()})
    return run


def test_every_step_of_a_run_that_passed_has_a_cell(tmp_path):
    page = page_of(write_run(tmp_path / "run", range(5)))
    assert strip_of(page) == [("passed", f"step {n}: 1 passed") for n in range(5)]
    assert page.figures[STRIP]["layout"]["annotations"] == []
    assert "every expected router call was made at every step" in page.words
    # 100 of 104, see evidence_dirs
    assert "96.2% of a step's rows replayed as recorded" in page.words


def test_a_failed_step_is_named_in_the_strip_and_in_words(tmp_path):
    def wrong(r):
        return replace(r, fingerprint=1) if (r.step, r.rank) == (2, 1) else r

    page = page_of(write_run(tmp_path / "run", range(5), change=wrong))
    assert [verdict for verdict, _ in strip_of(page)] == ["passed", "passed", "failed"]
    assert counts_of(page) == ["2 steps passed", "1 step failed: step 2"]
    (mark,) = page.figures[STRIP]["layout"]["annotations"]
    assert (mark["x"], mark["text"]) == (2, "2")
    assert "step 2, old_log_prob/replay_forward, layer 1: fingerprint is 0x" in page.words


def test_steps_whose_calls_are_missing_fail_each_though_one_finding_names_them(tmp_path):
    run = write_run(tmp_path / "run", range(6))
    edit(run, 1, lambda records: [r for r in records if r["step"] not in (2, 4)])
    page = page_of(run)
    failed = [number for number, (verdict, _) in enumerate(strip_of(page)) if verdict == "failed"]
    assert failed == [2, 4]
    assert "router calls are not those expected at steps 2, 4 (step 2: 6 of 12)" in page.words


def test_a_step_without_evidence_is_none_that_passed(tmp_path):
    page = page_of(write_metrics(write_run(tmp_path / "run", range(2)), range(4), r3__passed=True))
    cells = [verdict for verdict, _ in strip_of(page)]
    assert cells == ["passed", "passed", "no evidence", "no evidence"]
    assert counts_of(page) == ["2 steps passed", "2 steps without evidence: steps 2..3"]


def test_a_step_that_the_run_called_failed_is_so_without_its_evidence_too(tmp_path):
    page = page_of(write_metrics(tmp_path / "run", range(2), r3__passed=False))
    assert counts_of(page) == ["0 steps passed", "2 steps failed: steps 0..1"]


def test_of_several_steps_in_one_cell_the_worst_counts(tmp_path):
    run = write_run(tmp_path / "run", range(250))
    edit(run, 0, lambda records: [r for r in records if r["step"] != 100])
    cells = strip_of(page_of(run))
    assert len(cells) == 84
    worst = [cell for cell in cells if cell[0] != "passed"]
    assert worst == [("failed", "steps 99..101: 2 passed, 1 failed")]


def test_a_run_without_the_check_has_no_strip(tmp_path):
    figures = page_of(with_metrics(tmp_path / "run")).figures
    assert STRIP not in figures and "R3 coverage" not in figures


def test_coverage_is_drawn_over_the_steps(tmp_path):
    def fewer(r):
        return replace(r, rows_replayed=50, rows_filled=54) if r.step == 1 else r

    lines = page_of(write_run(tmp_path / "run", range(3), change=fewer)).lines("R3 coverage")
    assert lines["run"][-1] == (1, pytest.approx(50 / 104))
    assert lines["run, calls"] == [(0, 1.0), (1, 1.0)]


def test_the_largest_p999_of_the_optimizer_steps_is_not_called_one_of_all_tokens(tmp_path):
    words = page_of(write_metrics(tmp_path / "run", range(2), train__log_prob_gap_p999=0.2)).words
    assert "of a step's optimizer steps the largest p99.9" in words
    assert "p99.9 of the gap (largest of a step's optimizer steps), mean over steps" in words


TIMES = {
    "perf__step_s": 10.0,
    "perf__rollout_wait_s": 3.0,
    "perf__route_exchange_s": 1.0,
    "perf__train_s": 5.0,
    "perf__log_prob_s": 2.0,
    "perf__publish_s": 1.5,
}


def test_the_time_is_split_and_nothing_is_counted_twice(tmp_path):
    (bar,) = page_of(write_metrics(tmp_path / "run", range(2), **TIMES)).bars()
    assert bar == {
        "waiting for rollout": "4 s",
        "route exchange": "2 s",
        "log-probs": "4 s",
        "training": "6 s",
        "weight sync": "3 s",
        "other": "1 s",
    }


def test_rollout_is_a_bar_of_its_own_beside_the_training(tmp_path):
    more = {"perf__rollout_s": 7.5, "perf__rollout_idle_share": 0.25, "perf__train_wait_share": 0.3}
    page = page_of(write_metrics(tmp_path / "run", range(2), **TIMES, **more))
    assert page.bars()[1] == {"rollout": "15 s", "idle": "5 s"}
    lines = page.lines("Waiting")
    assert lines == {"run": [(0, 0.3), (1, 0.3)], "run, dashed": [(0, 0.25), (1, 0.25)]}


@pytest.mark.parametrize("seconds", [-0.5, float("inf"), float("nan")])
def test_seconds_of_rollout_that_are_none_give_no_bar(tmp_path, seconds):
    run = write_metrics(tmp_path / "run", range(2), **TIMES, perf__rollout_s=seconds)
    assert len(page_of(run).bars()) == 1
