"""The custody of agents' sessions from a run's files, by the plants that are judged live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.unit.chat.test_token_ledger import cut_session, PLANTED, session
from tests.unit.evidence_dirs import audit_of_one_start, edit, write_run

from r3train.algo.trajectories import without_truncated
from r3train.audit.audit_run import Audit, audit_run
from r3train.chat.token_ledger import session_ledgers
from r3train.proof.custody_verdict import CustodyRecord, judge_custody
from r3train.types import RolloutSample

CUSTODY = "evidence/custody.jsonl"


def records(step: int, samples: Sequence[RolloutSample], mask: bool = False) -> list[CustodyRecord]:
    ledgers = session_ledgers(samples, mask)
    return [CustodyRecord(c.session, c.calls, c.samples, step) for c in ledgers]


def two_sessions(step: int, plant=lambda samples: samples) -> list[CustodyRecord]:
    """A sound session, and another one."""
    [second] = records(step, plant(session()))
    return [*records(step, session()), replace(second, session=704)]


def said(audit: Audit) -> list[str]:
    return [f.what for f in audit.findings if f.claim == "custody"]


def test_sound_sessions_pass_and_are_counted(tmp_path):
    audit = audit_run(write_run(tmp_path / "run", custody=two_sessions))
    assert (audit.claims["custody"], audit.numbers["custody"]["sessions"]) == ("passed", 6)
    assert said(audit) == []


def test_a_run_without_agents_has_no_such_claim(tmp_path):
    assert "custody" not in audit_run(write_run(tmp_path / "run")).claims


def test_answers_that_were_cut_and_have_no_loss_pass_with_mask_truncated_alone(tmp_path):
    masked = without_truncated([cut_session()])[0]
    for mask in (True, False):
        run = write_run(tmp_path / str(mask), custody=lambda step: records(step, masked, mask))
        assert audit_run(run).claims["custody"] == ("passed" if mask else "failed")


@pytest.mark.parametrize("plant", [plant for plant, _ in PLANTED.values()], ids=PLANTED)
def test_what_is_found_live_is_found_in_the_files(plant, tmp_path):
    """Also where the verdict that the run itself wrote is that of sound sessions."""
    live = judge_custody(two_sessions(1, plant)).failures
    assert live

    def broken_at_1(step: int) -> list[CustodyRecord]:
        return two_sessions(step, plant) if step == 1 else two_sessions(step)

    run = write_run(tmp_path / "told", custody=broken_at_1)
    assert said(audit_of_one_start(run)) == live
    run = write_run(tmp_path / "hidden", custody=two_sessions)
    told = (tmp_path / "told" / CUSTODY).read_text().splitlines()
    sound = (run / CUSTODY).read_text().splitlines()
    (run / CUSTODY).write_text("\n".join(told + sound[4:]) + "\n")
    audit = audit_of_one_start(run)
    assert said(audit) == live and audit.claims["custody"] == "failed"


@pytest.mark.parametrize("place", range(6))
def test_a_session_that_is_not_in_the_files_is_missed(place, tmp_path):
    run = write_run(tmp_path / "run", custody=two_sessions)
    edit(run, CUSTODY, lambda lines: [x for n, x in enumerate(lines) if n != place])
    assert audit_run(run).claims["custody"] == "failed"


def test_records_of_earlier_versions_are_read(tmp_path):
    run = write_run(tmp_path / "run", custody=two_sessions)

    def earlier(lines: list[dict]) -> list[dict]:
        kept = lambda call: {k: v for k, v in call.items() if k != "masked"}  # noqa: E731
        return [{**line, "calls": list(map(kept, line["calls"]))} for line in lines]

    edit(run, CUSTODY, earlier)
    assert audit_run(run).claims["custody"] == "passed"
