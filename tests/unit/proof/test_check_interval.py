"""check-evidence on a run of --r3-check-interval: which steps must have a verdict, and which need none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from r3train.report.plot import r3_verdict
from r3train.report.report_data import load_run
from r3train.audit.audit_run import audit_run
from r3train.proof.writer import rank_file
from tests.unit.evidence_dirs import write_run

SECOND = "2026-01-02T00:00:00Z"


def without_step(run, step: int) -> None:
    """Take every trace of a step out of the evidence."""
    for file in (rank_file(run, 0), rank_file(run, 1), run / "evidence" / "steps.jsonl"):
        lines = [line for line in file.read_text().splitlines() if json.loads(line)["step"] != step]
        file.write_text("".join(line + "\n" for line in lines))


def test_steps_between_need_no_verdict_and_the_audit_counts_them(tmp_path):
    run = write_run(tmp_path / "run", range(15), check_interval=4)
    audit = audit_run(run, keep_steps=True)
    assert audit.verdict == "passed", audit.findings
    assert [step.rollout_id for step in audit.steps] == [0, 1, 2, 3, 4, 8, 12]
    (note,) = audit.notes
    assert note.startswith("of 15 steps 7 were checked, with all of their router calls")


@pytest.mark.parametrize("lost", [2, 4, 8, 12])
def test_a_step_that_was_to_be_checked_is_missed(lost, tmp_path):
    run = write_run(tmp_path / "run", range(15), check_interval=4)
    without_step(run, lost)
    (finding,) = audit_run(run).findings
    assert finding.claim == "covered" and finding.step == lost


def test_without_the_interval_in_its_verdicts_the_same_run_fails(tmp_path):
    run = write_run(tmp_path / "run", range(15), check_interval=4)
    steps = run / "evidence" / "steps.jsonl"
    steps.write_text(steps.read_text().replace('"check_interval": 4, ', ""))
    assert [f.step for f in audit_run(run).findings] == [5, 9, 13]


@pytest.mark.parametrize("first, second", [(2, 5), (5, 2)])
def test_a_start_with_another_interval_is_held_to_its_own(first, second, tmp_path):
    """Its first step has a verdict, which says where the other interval ends."""
    run = write_run(tmp_path / "run", range(12), check_interval=first)
    write_run(run, range(9, 20), check_interval=second, attempt=SECOND)
    assert audit_run(run).verdict == "passed"
    without_step(run, 10)
    assert [f.step for f in audit_run(run).findings] == [10]


def test_a_fault_in_a_step_that_is_checked_fails(tmp_path):
    def wrong(r):
        return replace(r, fingerprint=r.fingerprint ^ 8) if r.step == 8 and r.rank == 1 else r

    run = write_run(tmp_path / "run", range(15), check_interval=4, change=wrong)
    assert {f.step for f in audit_run(run).findings} == {8}


def test_plot_and_report_show_unchecked_steps_neither_as_passed_nor_as_failed(tmp_path):
    run = load_run(write_run(tmp_path / "run", range(15), check_interval=4), "run")
    assert r3_verdict(run.records)[0] == "passed at all 7 steps that were checked, of 15"
    assert list(run.verdicts()) == [0, 1, 2, 3, 4, 8, 12]


@pytest.mark.parametrize("least, verdict", [(7, "passed"), (8, "failed")])
def test_min_steps_counts_steps_with_evidence_and_none_that_the_interval_left_out(
    least, verdict, tmp_path
):
    run = write_run(tmp_path / "run", range(15), check_interval=4)
    audit = audit_run(run, min_steps=least)
    assert audit.verdict == verdict
    found = [(f.claim, f.got, f.expected) for f in audit.findings]
    assert found == [("covered", "7", "8 at least")] * (verdict == "failed")
