"""Lines that stand where no run writes them, and steps that were trained twice."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from r3train.audit.audit_run import audit_run
from r3train.proof.writer import rank_file, RECHECK_FILE, STEPS_FILE
from tests.unit.evidence_dirs import comparison, edit, write_run

SECOND = "2026-01-02"


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def wrong_at(step: int):
    """A trainer that gives one rank's calls of a step another expert."""

    def change(r):
        return replace(r, fingerprint=r.fingerprint ^ 8) if (r.step, r.rank) == (step, 1) else r

    return change


def test_a_second_verdict_by_the_same_start_is_refused_and_one_of_a_later_start_is_not(tmp_path):
    run = write_run(tmp_path / "run")
    path = run / "evidence" / STEPS_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[0]]) + "\n")
    (found,) = audit_run(run).findings
    assert found.what == f"{STEPS_FILE} line 4: a second verdict of step 0 by the same start"
    assert found.claim == "covered"
    path.write_text("\n".join(lines) + "\n")
    assert audit_run(write_run(run, range(2, 4), attempt=SECOND)).verdict == "passed"


def test_a_record_behind_those_of_a_later_step_is_refused_and_not_counted(tmp_path):
    run = write_run(tmp_path / "run")
    path = rank_file(run, 1)
    before = len(path.read_text().splitlines())
    edit(run, 1, lambda rs: [*rs, rs[0]])
    (found,) = audit_run(run).findings
    assert found.what == (
        f"{path.name} line {before + 1}: a record of step 0, expected one of a later step"
    )
    edit(run, 1, lambda rs: [*rs[1:-1], rs[0]])  # moved: it is missing at its step
    whats = [f.what for f in audit_run(run).findings]
    assert len(whats) == 2 and "router calls" in whats and any("line" in what for what in whats)


def test_a_record_of_another_rank_is_refused_and_not_counted(tmp_path):
    run = write_run(tmp_path / "run")
    records = audit_run(run).numbers["records"]
    foreign = json.loads(rank_file(run, 1).read_text().splitlines()[-1])
    edit(run, 0, lambda rs: [*rs, foreign])
    audit = audit_run(run)
    (found,) = audit.findings
    assert found.what.endswith("rank is 1, expected 0, whose file this is")
    assert audit.numbers["records"] == records


@pytest.mark.parametrize("accept", [False, True])
def test_a_step_that_failed_once_is_marked_whatever_became_of_it_later(tmp_path, accept):
    run = write_run(tmp_path / "run", change=wrong_at(1))  # the run ends there
    write_run(run, range(1, 3), attempt=SECOND)
    audit = audit_run(run, keep_steps=True, accept_superseded=accept)
    assert audit.verdict == ("passed" if accept else "failed")
    assert [(s.rollout_id, s.passed) for s in audit.steps] == [(0, True), (1, False), (2, True)]
    assert audit.numbers["superseded_failures"] == [1] and audit.numbers["starts"] == 2
    accepted = [note for note in audit.notes if note.startswith("accepted")]
    assert len(accepted) == accept and all(", and 5 more" in note for note in accepted)


@pytest.mark.parametrize("accept", [False, True])
def test_records_that_fail_under_a_verdict_that_passed_count_unless_they_are_accepted(
    tmp_path, accept
):
    run = write_run(tmp_path / "run", range(2))
    write_run(run, range(1, 3), attempt=SECOND)

    def damage(rs):
        hit = [r for r in rs if r["step"] == 1 and r["attempt"] != SECOND][:1]
        return [{**r, "rows_native": 1, "rows_padding": 5} if r in hit else r for r in rs]

    edit(run, 1, damage)
    audit = audit_run(run, keep_steps=True, accept_superseded=accept)
    assert [s.passed for s in audit.steps] == [True, accept, True]
    assert audit.num_findings == (not accept)
    accepted = [note for note in audit.notes if note.startswith("accepted")]
    assert len(accepted) == accept and not any("more" in note for note in accepted)


def test_comparisons_of_a_step_that_was_not_finished_are_no_fault_and_damaged_ones_are(tmp_path):
    run = write_run(tmp_path / "run", rechecked=lambda step: [comparison(step)])
    path = run / "evidence" / RECHECK_FILE
    last = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        file.write(json.dumps(last | {"step": 3}) + "\n")
    audit = audit_run(run)
    assert audit.verdict == "passed" and audit.numbers["rechecked"]["parts"] == 3
    with path.open("a") as file:
        file.write('{"step": 4}\n')
    (found,) = audit_run(run).findings
    assert found.what.startswith(f"{RECHECK_FILE} line 5: ")


def test_more_comparisons_than_the_verdict_says_fail(tmp_path):
    run = write_run(tmp_path / "run", rechecked=lambda step: [comparison(step)])
    path = run / "evidence" / RECHECK_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines]) + "\n")
    (found,) = audit_run(run).findings
    assert (found.step, found.got, found.expected) == (0, "2", "1")
    assert found.claim == "recheck"


def test_a_rank_that_the_run_did_not_have_is_named(tmp_path):
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in rank_file(run, 1).read_text().splitlines()]
    lines = [json.dumps({**r, "rank": 2}) + "\n" for r in records if r["step"] == 1]
    rank_file(run, 2).write_text("".join(lines))
    found = audit_run(run).findings
    assert {f.step for f in found} == {1}
    (strange,) = [f for f in found if "world_size" in f.what]
    assert (strange.ranks, strange.got) == ((2,), "2")


def stale(r):
    """More rows of other weights mismatch than the threshold's share, and none of the actor's own."""
    return replace(r, rows_equal=60, rows_overlap=30, rows_mismatch=10)


@pytest.mark.parametrize("said", [True, False], ids=["taken out", "put in"])
def test_a_warning_of_staleness_that_the_records_do_not_have_is_of_the_agreement(tmp_path, said):
    run = write_run(tmp_path / "run", versions=True, change=stale if said else None)
    assert audit_run(run).verdict == "passed"
    path = run / "evidence" / STEPS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (lines[1]["stale_warning"] is not None) == said
    lines[1]["stale_warning"] = None if said else "R3 staleness: 5 of 6 rows"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = audit_run(run).findings
    assert found.step == 1 and found.claim == "agreement" and "stale_warning" in found.what
    # it was by the run's own threshold, which another one replaces
    assert audit_run(run, threshold=0.02).verdict == "passed"


def test_a_run_that_judged_a_sample_untrue_failed_whatever_its_file_says_now(tmp_path):
    run = write_run(tmp_path / "run", rechecked=lambda step: [comparison(step)])
    path = run / "evidence" / STEPS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    failure = {"replay_pass": "rechecked", "stage": "whole", "layer_number": 2}
    failure |= {"what": "rows with different experts in 100 rows", "got": 90, "expected": 2}
    lines[1] |= {"passed": False}
    lines[1]["sampling"] |= {"verdict": "failed", "failures": [failure]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    audit = audit_run(run)
    found = [f for f in audit.findings if f.claim == "recheck"]
    assert len(found) == 1 and found[0].step == 1
    assert found[0].what.startswith("the run itself judged it failed (rechecked/whole layer 2")


def test_comparisons_count_of_the_time_that_counts_alone(tmp_path):
    def rechecked(step):
        return [comparison(step)]

    run = write_run(tmp_path / "run", rechecked=rechecked)
    write_run(run, range(1, 4), attempt=SECOND, rechecked=rechecked)
    audit = audit_run(run)
    assert audit.verdict == "passed"
    assert audit.numbers["rechecked"]["parts"] == 4  # of steps 0 to 3


def test_what_was_computed_again_is_added_up_over_steps(tmp_path):
    def rechecked(step):
        rows = {1: 1, 2: 2, 3: 0}
        again = comparison(step, rows_differ=rows, log_probs_differ=1)
        return [again, replace(again, part="last")]

    run = write_run(tmp_path / "run", rechecked=rechecked)
    path = run / "evidence" / STEPS_FILE
    path.write_text(path.read_text().replace('"missed": 0', '"missed": 3'))
    audit = audit_run(run)
    assert audit.verdict == "passed", audit.findings
    assert audit.numbers["rechecked"] == {
        "samples": 3,
        "parts": 6,
        "missed": 9,
        "rows": 6 * 300,
        "rows_differ": 6 * 3,
        "log_probs": 6 * 60,
        "log_probs_differ": 6,
    }


@pytest.mark.parametrize("rechecked", [False, True])
def test_a_verdict_that_failed_for_no_reason_fails(tmp_path, rechecked):
    compared = {"rechecked": lambda step: [comparison(step)]} if rechecked else {}
    run = write_run(tmp_path / "run", **compared)
    path = run / "evidence" / STEPS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["passed"] = False
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = audit_run(run).findings
    assert found.what == "the run itself judged it failed (no reason recorded)"
    failure = {"replay_pass": "train", "stage": "replay_forward", "layer_number": 2}
    failure |= {"what": "num_calls", "got": 1, "expected": 2}
    lines[1]["failures"] = [failure] * 5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = audit_run(run).findings
    each = "train/replay_forward layer 2: num_calls is 1, expected 2"
    assert found.what == f"the run itself judged it failed ({'; '.join([each] * 3)})"
    assert found.claim == "covered"  # of the quantity


def test_the_threshold_that_is_reported_is_the_highest_of_the_steps(tmp_path):
    run = write_run(tmp_path / "run")
    path = run / "evidence" / STEPS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["mismatch_threshold"] = 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert audit_run(run).numbers["mismatch_threshold"] == 0.5
    assert audit_run(run, threshold=0.25).numbers["mismatch_threshold"] == 0.25
