"""check-evidence on a directory of several starts: what a later one trained again is judged too."""

from __future__ import annotations

import json
import logging
import tracemalloc
from dataclasses import replace

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.audit.audit_run import audit_run
from r3train.report.report_data import load_run
from r3train.proof.writer import rank_file
from tests.unit.evidence_dirs import edit, write_run

FIRST, SECOND = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
ACCEPT = "--accept-superseded-failures"


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def check(*args: object):
    return CliRunner().invoke(main, ["check-evidence", *map(str, args)])


def one_wrong(step: int):
    def change(r):
        here = (r.step, r.rank, r.replay_pass, r.layer_number) == (step, 1, "train", 2)
        return replace(r, fingerprint=r.fingerprint ^ 8) if here else r

    return change


def test_of_several_starts_the_latest_time_a_step_was_trained_counts(tmp_path):
    run = write_run(tmp_path / "run", range(4))
    with rank_file(run, 0).open("a") as file:
        file.write('{"attempt": "2026')  # its last words were cut
    write_run(run, range(2, 6), attempt=SECOND)
    audit = audit_run(run)
    assert audit.verdict == "passed", audit.findings
    assert audit.numbers["starts"] == 2 and audit.numbers["steps"] == 6
    assert audit.numbers["num_calls"] == 6 * 12
    assert any("steps 2..3 were trained again" in note for note in audit.notes)
    # and a failure of the later start is not hidden by the first
    run = write_run(tmp_path / "other", range(4))
    write_run(run, range(1, 5), attempt=SECOND, change=one_wrong(2))
    assert {(f.step, f.attempt) for f in audit_run(run).findings} == {(2, "")}


def test_a_failure_that_a_later_start_trained_over_fails_and_is_named(tmp_path):
    run = write_run(tmp_path / "run", change=one_wrong(1))  # ends there
    write_run(run, attempt=SECOND)
    (only,) = audit_run(run).findings
    assert (only.claim, only.attempt, only.step, only.ranks) == ("applied", FIRST, 1, (1,))
    assert (only.replay_pass, only.layer_number) == ("train", 2)
    result = check(run)
    assert result.exit_code == 1
    assert (
        f"start {FIRST}, step 1, rank 1, train/replay_forward, layer 2: route fingerprint"
        in " ".join(result.output.split())
    )


def test_a_superseded_failure_that_is_accepted_is_a_note_that_names_it(tmp_path):
    run = write_run(tmp_path / "run", change=one_wrong(1))
    write_run(run, attempt=SECOND)
    result = check(run, ACCEPT, "--json")
    (audit,) = json.loads(result.output)["audits"]
    assert result.exit_code == 0 and audit["numbers"]["num_calls"] == 36
    (note,) = [note for note in audit["notes"] if "accepted" in note]
    assert f"start {FIRST}, step 1, rank 1, train/replay_forward, layer 2" in note
    # of the later start nothing is accepted
    run = write_run(tmp_path / "other")
    write_run(run, attempt=SECOND, change=one_wrong(1))
    assert check(run, ACCEPT).exit_code == 1


def test_a_verdict_of_a_superseded_step_fails_without_the_records_that_led_to_it(tmp_path):
    run = write_run(tmp_path / "run", change=one_wrong(1))
    for rank in (0, 1):
        rank_file(run, rank).write_text("")
    write_run(run, attempt=SECOND)
    (only,) = audit_run(run).findings
    assert only.step == 1 and only.attempt == FIRST and only.claim == "applied"
    assert "the run itself judged it failed (train/replay_forward layer 2: fingerprint" in only.what
    assert audit_run(run, accept_superseded=True).verdict == "passed"


def test_records_that_a_crash_took_from_superseded_steps_that_passed_are_a_note(tmp_path):
    run = write_run(tmp_path / "run")
    edit(run, 1, lambda records: records[: len(records) // 2 + 1])  # a node that lost power
    write_run(run, attempt=SECOND)
    audit = audit_run(run)
    assert audit.verdict == "passed", audit.findings
    assert any("missing of the first time that steps 1..2" in note for note in audit.notes)


def keep_verdicts(run, count: int) -> None:
    """Steps.jsonl as a node that lost power leaves it."""
    path = run / "evidence" / "steps.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


@pytest.mark.parametrize("left", [0, 1])
def test_verdicts_that_a_crash_took_are_a_note_where_every_step_was_judged_later(tmp_path, left):
    run = write_run(tmp_path / "run", range(4))
    keep_verdicts(run, left)
    write_run(run, range(5), attempt=SECOND)
    audit = audit_run(run)
    assert audit.verdict == "passed", audit.findings
    (note,) = [note for note in audit.notes if "no verdict" in note]
    assert f"steps {left}..3" in note and FIRST in note and "trained again" in note


def test_verdicts_that_a_crash_took_fail_where_a_step_was_not_judged_later(tmp_path):
    run = write_run(tmp_path / "run", range(4))
    keep_verdicts(run, 1)
    write_run(run, range(1, 3), attempt=SECOND)
    assert any("no verdict for steps 1..3" in f.what for f in audit_run(run).findings)
    # an earlier start judges nothing of a later one
    run = write_run(tmp_path / "other", range(5))
    write_run(run, range(4), attempt=SECOND)
    keep_verdicts(run, 6)
    assert any("no verdict for steps 1..3" in f.what for f in audit_run(run).findings)


def test_a_verdict_that_a_crash_took_is_no_note_where_the_metrics_say_that_it_failed(tmp_path):
    run = write_run(tmp_path / "run", range(4), change=one_wrong(2))
    keep_verdicts(run, 1)
    write_run(run, range(5), attempt=SECOND)
    assert any("metrics.jsonl says that steps 2 failed" in f.what for f in audit_run(run).findings)


def test_ten_thousand_accepted_failures_take_no_memory(tmp_path, monkeypatch):

    def native(r):
        return replace(r, rows_native=1)

    def peak(starts: int) -> int:
        run = tmp_path / str(starts)
        for start in range(starts):
            write_run(run, range(1), attempt=f"2026-{start:05d}", change=native)
        write_run(run, range(1), attempt="2027")
        tracemalloc.start()
        audit = audit_run(run, accept_superseded=True)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # two findings a cell: the sum, and that the kinds of rows do not add up
        accepted = [note for note in audit.notes if note.startswith("accepted, ")]
        assert audit.verdict == "passed" and len(accepted) == starts
        assert all(note.endswith(", and 11 more") for note in accepted)
        return most

    peak(90)
    # an index entry a start, no finding
    assert peak(200) - peak(100) < 100 * 1000


def test_the_report_shows_the_time_that_counts(tmp_path):
    def worse(r):
        return replace(r, rows_equal=50, rows_overlap=49)

    run = write_run(tmp_path / "run", change=worse)
    write_run(run, attempt=SECOND)
    assert load_run(run, "run").heat.values == [[0.9] * 3] * 3
