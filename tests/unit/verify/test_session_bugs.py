"""The session bugs of ``r3train verify --mutations``: custody or a claim says each, and the report names it."""

from __future__ import annotations

import re

import pytest

from r3train.cpu.device import prepare_device

prepare_device()
from r3train.verify import session_bugs, verify_report  # noqa: E402
from r3train.verify.mutations import planted_by  # noqa: E402
from r3train.verify.session_bugs import finding, SESSIONS, verify_sessions  # noqa: E402
from r3train.verify.verifier import Verification  # noqa: E402

SAID = {
    "session_row_copied": "rows with different experts in .* rows, sample 64 .* is 7, expected 2",
    "fork_takes_the_whole_chain": "sample 65 has another beginning than the .* tokens of the answer",
    "fork_trains_again": "sample 65: tokens .* were sampled and delivered, .* have loss",
    "retried_answer_dropped": "sample 66 is not there, and 6 tokens were sampled for it",
}


def test_a_session_without_a_bug_passes():
    assert finding() == ("", "")


@pytest.mark.parametrize("bug", planted_by(SESSIONS), ids=lambda bug: bug.name)
def test_a_bug_of_a_session_is_caught_by_the_claim_that_it_names(bug):
    import re

    with bug.patch(None, None):
        claim, said = finding()
    assert claim == bug.fails and re.search(SAID[bug.name], said), said
    assert finding() == ("", ""), "it is gone when its context ends"


def test_the_report_names_what_caught_each_and_one_that_survives_fails_the_run(monkeypatch):
    result = Verification("float32", "cpu", mutations=verify_sessions())
    assert result.ok
    rows = verify_report.mutation_rows(result)
    assert rows[0] == ["null_session", "session", "passed", "nothing", "", ""]
    assert ["session_row_copied", "session", "caught", "recheck", "exact", "recheck"] in rows
    assert len(rows) == 1 + len(SAID)
    monkeypatch.setattr(session_bugs, "finding", lambda: ("", ""))
    result = Verification("float32", "cpu", mutations=verify_sessions())
    assert not result.ok and "planted bugs: 0 caught, 4 not" in verify_report.verdict(result)
