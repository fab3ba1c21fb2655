"""Records without a verdict, verdicts that are gone, and steps before the first one."""

from __future__ import annotations

import json
import logging

import pytest

from r3train.audit.audit_run import audit_run
from r3train.proof.writer import rank_file, STEPS_FILE
from tests.unit.evidence_dirs import write_run

SECOND = "2026-01-02"


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def without_verdicts(run, *steps: int, attempt: str = "") -> None:
    """Take verdicts out of steps.jsonl; of one start alone if it is given."""
    path = run / "evidence" / STEPS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    left = [x for x in lines if x["step"] not in steps or attempt not in (x["attempt"], "")]
    assert len(left) < len(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in left))


def untrained(run, *steps: int) -> None:
    """Take steps out of metrics.jsonl, as a kill within them does."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{x}\n" for x in lines if json.loads(x)["step"] not in steps))


def test_a_start_that_was_killed_in_its_first_step_is_no_fault_whatever_an_earlier_one_judged(
    tmp_path,
):
    run = write_run(tmp_path / "run", range(5))
    write_run(run, range(2, 3), attempt=SECOND)
    without_verdicts(run, 2, attempt=SECOND)
    audit = audit_run(run)
    assert audit.verdict == "passed", audit.findings
    assert f"step 2 was not finished (start {SECOND}): it is not judged" in audit.notes


def test_of_two_steps_without_a_verdict_neither_is_the_one_that_a_kill_cut_short(tmp_path):
    run = write_run(tmp_path / "run", range(5))
    without_verdicts(run, 3, 4)
    untrained(run, 3, 4)
    (found,) = audit_run(run).findings
    assert (found.what, found.step) == (f"{STEPS_FILE} has no verdict for steps 3..4", 3)
    without_verdicts(run, 2)
    untrained(run, 2)
    # and one alone is it only behind all that its start judged
    run = write_run(tmp_path / "other", range(4))
    without_verdicts(run, 1)
    whats = [f.what for f in audit_run(run).findings]
    assert f"{STEPS_FILE} has no verdict for steps 1" in whats


@pytest.mark.parametrize("again", [range(3, 5), range(3, 4), range(3, 7)])
def test_lost_verdicts_of_steps_that_a_later_start_trained_are_a_note(tmp_path, again):
    run = write_run(tmp_path / "run", range(5))
    without_verdicts(run, 3, 4)
    write_run(run, again, attempt=SECOND)
    audit, text = audit_run(run), f"{STEPS_FILE} has no verdict for steps 3..4"
    if 4 in again:
        assert audit.verdict == "passed", audit.findings
        assert any(note.startswith(text) and "trained again" in note for note in audit.notes)
    else:
        assert text in [f.what for f in audit.findings]


def test_failures_that_metrics_alone_have_are_found_from_the_first_on(tmp_path):
    run = write_run(tmp_path / "run", range(4))
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:3]:
        line["r3/passed"] = False
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = audit_run(run).findings
    assert found.step == 1
    assert found.what == f"metrics.jsonl says that steps 1..2 failed, {STEPS_FILE} does not"


@pytest.mark.parametrize(
    "lost, text", [((1,), "1"), ((1, 2), "1..2"), ((1, 2, 3), "1..3")], ids=str
)
def test_a_gap_names_its_steps(tmp_path, lost, text):
    run = write_run(tmp_path / "run", range(5))
    for file in (rank_file(run, 0), rank_file(run, 1), run / "evidence" / STEPS_FILE):
        lines = file.read_text().splitlines()
        file.write_text("".join(f"{x}\n" for x in lines if json.loads(x)["step"] not in lost))
    (found,) = audit_run(run).findings
    assert found.what == f"no evidence of steps {text}, between others that have it"
    assert found.step == 1 and found.claim == "covered"


def test_every_step_before_the_first_verdict_is_missed_whatever_the_interval(tmp_path):
    run = write_run(tmp_path / "run", range(15), check_interval=4)
    for file in (rank_file(run, 0), rank_file(run, 1), run / "evidence" / STEPS_FILE):
        lines = file.read_text().splitlines()
        file.write_text("".join(f"{x}\n" for x in lines if json.loads(x)["step"] == 12))
    (found,) = audit_run(run).findings
    assert found.step == 0
    assert found.what == "steps 0..11 were trained (metrics.jsonl) and have no evidence"


def test_the_numbers_of_a_run_are_those_of_all_its_steps(tmp_path):
    run = write_run(tmp_path / "run", range(3), microbatches=2, versions=True)
    numbers = audit_run(run).numbers
    calls = 3 * 2 * 3 * 2  # steps x passes x layers x microbatches, of a rank
    assert numbers["calls_of_rank"] == {0: calls, 1: calls}
    assert numbers["num_calls"] == numbers["calls_expected"] == 2 * calls
    assert numbers["records"] == 2 * calls and numbers["calling_ranks"] == [0, 1]
    assert numbers["rows_replayed"] == 2 * calls * 100
    assert (numbers["first_step"], numbers["last_step"], numbers["starts"]) == (0, 2, 1)
    assert numbers["rows_stale_mismatch"] == 2 * calls
