"""A directory of several starts: what a later one trained again is judged too."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from r3train.audit.audit_run import audit_run
from r3train.cli import main
from r3train.proof.writer import rank_file
from tests.unit.evidence_dirs import edit, with_choice, write_run

FIRST, SECOND = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
STEPS = "evidence/steps.jsonl"


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
    assert (audit.numbers["steps"], audit.numbers["num_calls"]) == (6, 6 * 12)
    assert any("steps 2..3 were trained again" in note for note in audit.notes)
    # and a failure of the later start is not hidden by the first
    run = write_run(tmp_path / "other", range(4))
    write_run(run, range(1, 5), attempt=SECOND, change=one_wrong(2))
    assert {(f.step, f.attempt) for f in audit_run(run).findings} == {(2, "")}


def test_a_failure_that_a_later_start_trained_over_fails_and_is_a_note_where_it_is_accepted(
    tmp_path,
):
    run = write_run(tmp_path / "run", change=one_wrong(1))  # ends there
    write_run(run, attempt=SECOND)
    (only,) = audit_run(run).findings
    place = f"start {FIRST}, step 1, train/replay_forward, layer 2"
    assert only.claim == "applied" and str(only).startswith(f"{place}: fingerprint is 0x")
    flags = ["--accept-superseded-failures", "--json"]
    result = CliRunner().invoke(main, ["check-evidence", str(run), *flags])
    (audit,) = json.loads(result.output)["audits"]
    assert result.exit_code == 0 and audit["numbers"]["num_calls"] == 36
    (note,) = [note for note in audit["notes"] if "accepted" in note]
    assert place in note
    # of the later start nothing is accepted
    run = write_run(tmp_path / "other")
    write_run(run, attempt=SECOND, change=one_wrong(1))
    assert audit_run(run, accept_superseded=True).verdict == "failed"


def test_a_failure_of_a_superseded_step_fails_without_the_records_that_led_to_it(tmp_path):
    run = write_run(tmp_path / "run", change=one_wrong(1))
    for rank in (0, 1):
        rank_file(run, rank).write_text("")
    write_run(run, attempt=SECOND)
    (only,) = audit_run(run).findings
    assert (only.step, only.attempt, only.claim) == (1, FIRST, "applied")
    assert "train/replay_forward layer 2: fingerprint" in only.got
    assert audit_run(run, accept_superseded=True).verdict == "passed"


@pytest.mark.parametrize(
    "damage, trained_again, verdict",
    [
        # a node that lost power
        (lambda run: edit(run, 1, lambda rs: rs[: len(rs) // 2 + 1]), range(4), "passed"),
        (lambda run: edit(run, STEPS, lambda lines: lines[:0]), range(5), "passed"),
        (lambda run: edit(run, STEPS, lambda lines: lines[:1]), range(1, 5), "passed"),
        # but not of steps that nobody trained again
        (lambda run: edit(run, 1, lambda rs: rs[: len(rs) // 2 + 1]), range(3, 5), "failed"),
        (lambda run: edit(run, STEPS, lambda lines: lines[:1]), range(1, 3), "failed"),
    ],
)
def test_what_a_crash_took_of_steps_that_were_trained_again_is_a_note(
    tmp_path, damage, trained_again, verdict
):
    run = write_run(tmp_path / "run", range(4))
    damage(run)
    write_run(run, trained_again, attempt=SECOND)
    audit = audit_run(run)
    assert audit.verdict == verdict, audit.findings
    if verdict == "passed":
        assert any("missing of the first time" in note for note in audit.notes)


def test_an_earlier_start_judges_nothing_of_a_later_one(tmp_path):
    run = write_run(tmp_path / "run", range(5))
    write_run(run, range(4), attempt=SECOND)
    edit(run, STEPS, lambda lines: lines[:6])
    assert any("no verdict for steps 1..3" in f.what for f in audit_run(run).findings)


def test_a_verdict_that_a_crash_took_is_no_note_where_the_metrics_say_that_it_failed(tmp_path):
    run = write_run(tmp_path / "run", range(4), change=one_wrong(2))
    edit(run, STEPS, lambda lines: lines[:1])
    write_run(run, range(5), attempt=SECOND)
    assert any("metrics.jsonl says that steps 2 failed" in f.what for f in audit_run(run).findings)


def test_a_start_that_was_killed_in_its_first_step_is_no_fault_whatever_an_earlier_one_judged(
    tmp_path,
):
    run = write_run(tmp_path / "run", range(5))
    write_run(run, range(2, 3), attempt=SECOND)
    edit(run, STEPS, lambda lines: [x for x in lines if x["attempt"] != SECOND])
    audit = audit_run(run)
    assert audit.verdict == "passed", audit.findings
    assert f"step 2 was not finished (start {SECOND}): it is not judged" in audit.notes


def test_the_agreement_is_that_of_the_time_that_counts(tmp_path):
    run = write_run(tmp_path / "run", change=lambda r: with_choice(r, 50, 1))
    write_run(run, attempt=SECOND)
    assert set(audit_run(run).layer_agreement.values()) == {0.9}
