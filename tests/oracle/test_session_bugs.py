"""The bugs of agents' sessions: custody or a claim says each, and ``verify_planted`` ends where one is not said."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from r3train.cpu.device import prepare_device

prepare_device()
from r3train.verify.mutations import planted_by  # noqa: E402
from tests.oracle import session_bugs  # noqa: E402
from tests.oracle.session_bugs import FAILS, finding, SESSIONS, survivors  # noqa: E402

MESSAGES = {
    "session_row_copied": r"'prefilled rows', server=0, value=0\.1",
    "fork_takes_the_whole_chain": "sample 65 has another beginning than the .* tokens of the answer",
    "fork_trains_again": "sample 65: tokens .* were sampled and delivered, .* have loss",
    "retried_answer_dropped": "sample 66 is not there, and 6 tokens were sampled for it",
}


def test_a_session_without_a_bug_passes():
    assert finding() == ("", "")


@pytest.mark.parametrize("bug", planted_by(SESSIONS), ids=lambda bug: bug.name)
def test_a_bug_of_a_session_is_caught_by_the_claim_that_it_names(bug):
    with bug.patch(None, None):
        claim, words = finding()
    assert claim == FAILS[bug.name] and re.search(MESSAGES[bug.name], words), words
    assert finding() == ("", ""), "it is gone when its context ends"


def test_every_bug_is_caught_and_one_that_survives_ends_verify_with_its_name(monkeypatch):
    assert survivors() == [] and len(planted_by(SESSIONS)) == len(FAILS)
    monkeypatch.setattr(session_bugs, "finding", lambda: ("", ""))
    monkeypatch.setattr(sys, "argv", ["verify_planted", "--mutations"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tests.oracle.verify_planted", run_name="__main__")
    assert all(name in str(ended.value) for name in FAILS)
