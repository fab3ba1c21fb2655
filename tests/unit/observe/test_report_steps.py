"""What a report shows step by step: R3's verdict and coverage, and where the time went."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest

from r3train.observe.metrics import MetricsWriter
from tests.unit.evidence_dirs import edit, write_run
from tests.unit.report_runs import Page, report, with_metrics


def page_of(*runs: Path) -> str:
    assert report(*runs).exit_code == 0
    text = (runs[0] / "report.html").read_text()
    assert not Page(text).open
    return text


def strip_of(page: str) -> list[tuple[str, str]]:
    """The verdict and the words of every cell, in the order of the strip."""
    svg = re.search(r'<svg[^>]*aria-label="R3 verdict by step">.*?</svg>', page, re.S)[0]
    return re.findall(r'class="cell ([a-z-]+)".*?<title>(.*?)</title>', svg)


def counts_of(page: str) -> list[str]:
    shown = re.search(r'<p class="counts">(.*?)</p>', page, re.S)[1]
    return re.findall(r">([^<]+)</span>", shown)


def write_metrics(run: Path, steps: range, **values: object) -> Path:
    (run / "metrics.jsonl").unlink(missing_ok=True)
    with MetricsWriter(run, tensorboard=False) as metrics:
        for step in steps:
            metrics.write(step, {k.replace("__", "/"): v for k, v in values.items()})
    return run


def test_every_step_of_a_run_that_passed_has_a_cell(tmp_path):
    page = page_of(write_run(tmp_path / "run", range(5)))
    assert strip_of(page) == [("passed", f"step {n}: 1 passed") for n in range(5)]
    assert "every expected router call was made at every step" in page
    assert (
        "96.2% of a step&#39;s rows replayed as recorded" in page
    )  # 100 of 104, see evidence_dirs


def test_a_failed_step_is_named_in_the_strip_and_in_words(tmp_path):
    def wrong(r):
        return replace(r, fingerprint=1) if (r.step, r.rank) == (2, 1) else r

    page = page_of(write_run(tmp_path / "run", range(5), change=wrong))
    assert [verdict for verdict, _ in strip_of(page)] == ["passed", "passed", "failed"]
    assert counts_of(page) == ["2 steps passed", "1 step failed: step 2"]
    assert re.search(r'<text class="mark"[^>]*>2</text>', page)
    assert "step 2, rank 1, old_log_prob/replay_forward, layer 1: route fingerprint" in page


def test_steps_whose_calls_are_missing_fail_each_though_one_finding_names_them(tmp_path):
    run = write_run(tmp_path / "run", range(6))
    edit(run, 1, lambda records: [r for r in records if r["step"] not in (2, 4)])
    page = page_of(run)
    assert [v for v, _ in strip_of(page)] == ["passed", "passed", "failed"] + [
        *("passed", "failed", "passed")
    ]
    assert "router calls are not those expected at steps 2, 4 (step 2: 6 of 12)" in page


def test_a_step_without_evidence_is_none_that_passed(tmp_path):
    run = write_metrics(write_run(tmp_path / "run", range(2)), range(4), r3__passed=True)
    page = page_of(run)
    cells = [verdict for verdict, _ in strip_of(page)]
    assert cells == ["passed", "passed", "no-evidence", "no-evidence"]
    assert counts_of(page) == ["2 steps passed", "2 steps without evidence: steps 2..3"]


def test_a_step_that_the_run_called_failed_is_so_without_its_evidence_too(tmp_path):
    (tmp_path / "run").mkdir()
    page = page_of(write_metrics(tmp_path / "run", range(2), r3__passed=False))
    assert counts_of(page) == ["0 steps passed", "2 steps failed: steps 0..1"]


def test_of_several_steps_in_one_cell_the_worst_counts(tmp_path):
    run = write_run(tmp_path / "run", range(250))
    edit(run, 0, lambda records: [r for r in records if r["step"] != 100])
    cells = strip_of(page_of(run))
    assert len(cells) == 84
    assert [c for c in cells if c[0] != "passed"] == [
        ("failed", "steps 99..101: 2 passed, 1 failed")
    ]


def test_a_run_without_the_check_has_no_strip(tmp_path):
    page = page_of(with_metrics(tmp_path / "run"))
    assert "R3 verdict by step" not in page and "R3 coverage" not in page


def test_coverage_is_drawn_over_the_steps(tmp_path):
    def fewer(r):
        return replace(r, rows_replayed=50, rows_filled=54) if r.step == 1 else r

    page = page_of(write_run(tmp_path / "run", range(3), change=fewer))
    chart = re.search(r'aria-label="R3 coverage">.*?</svg>', page, re.S)[0]
    assert "<title>run: last 0.4808</title>" in chart  # 50 of 104
    assert "<title>run, calls: last 1</title>" in chart


def test_the_largest_p999_of_the_optimizer_steps_is_not_called_one_of_all_tokens(tmp_path):
    (tmp_path / "run").mkdir()
    run = write_metrics(tmp_path / "run", range(2), train__log_prob_gap_p999=0.2)
    page = html.unescape(page_of(run))
    assert "of a step's optimizer steps the largest p99.9" in page
    assert "p99.9 of the gap (largest of a step's optimizer steps), mean over steps" in page


TIMES = {
    "perf__step_s": 10.0,
    "perf__rollout_wait_s": 3.0,
    "perf__route_exchange_s": 1.0,
    "perf__train_s": 5.0,
    "perf__log_prob_s": 2.0,
    "perf__publish_s": 1.5,
}


def bars_of(page: str) -> list[dict[str, str]]:
    svgs = re.findall(r'<svg class="bar".*?</svg>', page, re.S)
    return [dict(re.findall(r"<title>([a-z -]+): ([\d.]+ s), \d+%</title>", s)) for s in svgs]


def test_the_time_is_split_and_nothing_is_counted_twice(tmp_path):
    (tmp_path / "run").mkdir()
    (bar,) = bars_of(page_of(write_metrics(tmp_path / "run", range(2), **TIMES)))
    assert bar == {
        "waiting for rollout": "4 s",
        "route exchange": "2 s",
        "log-probs": "4 s",
        "training": "6 s",
        "weight sync": "3 s",
        "other": "1 s",
    }


def test_rollout_is_a_bar_of_its_own_beside_the_training(tmp_path):
    (tmp_path / "run").mkdir()
    more = {"perf__rollout_s": 7.5, "perf__rollout_idle_share": 0.25, "perf__train_wait_share": 0.3}
    page = page_of(write_metrics(tmp_path / "run", range(2), **TIMES, **more))
    assert bars_of(page)[1] == {"rollout": "15 s", "idle": "5 s"}
    chart = re.search(r'aria-label="Waiting">.*?</svg>', page, re.S)[0]
    assert "last 0.3</title>" in chart and "dashed: last 0.25</title>" in chart


@pytest.mark.parametrize("seconds", [-0.5, float("inf"), float("nan")])
def test_seconds_of_rollout_that_are_none_give_no_bar(tmp_path, seconds):
    (tmp_path / "run").mkdir()
    run = write_metrics(tmp_path / "run", range(2), **TIMES, perf__rollout_s=seconds)
    assert len(bars_of(page_of(run))) == 1


def test_a_part_of_the_time_has_one_colour_in_every_run(tmp_path):
    """Also where a part that comes before it is missing."""
    for name in "ab":
        (tmp_path / name).mkdir()
    times = {**TIMES, "perf__rollout_wait_s": 0.0, "perf__route_exchange_s": 0.0}
    a = write_metrics(tmp_path / "a", range(2), **TIMES)
    b = write_metrics(tmp_path / "b", range(2), **times)
    page = page_of(a, b)
    for svg in re.findall(r'<svg class="bar".*?</svg>', page, re.S):
        assert re.search(r'<rect class="part-training"[^>]*><title>training:', svg)
