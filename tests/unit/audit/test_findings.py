"""Names of a finding's place, and what an audit says as JSON."""

from __future__ import annotations

import pytest

from r3train.audit.findings import Audit, CLAIMS, Finding, ranges


@pytest.mark.parametrize(
    "place, where",
    [
        ({}, "the run"),
        ({"step": 0}, "step 0"),
        ({"step": 3, "attempt": "2026"}, "start 2026, step 3"),
        (
            {"step": 1, "replay_pass": "train", "stage": "replay_forward", "layer_number": 2},
            "step 1, train/replay_forward, layer 2",
        ),
        ({"step": 1, "replay_pass": "rechecked", "stage": "last"}, "step 1, rechecked/last"),
    ],
)
def test_a_place_is_named_from_its_outside_in(place, where):
    assert Finding("covered", "w", **place).where() == where
    assert str(Finding("covered", "w", **place)) == f"{where}: w"


def test_a_finding_says_what_it_got_if_it_got_anything():
    assert str(Finding("covered", "calls", got="0", expected="1")) == (
        "the run: calls is 0, expected 1"
    )


@pytest.mark.parametrize(
    "numbers, text",
    [
        ([], ""),
        ([3], "3"),
        ([4, 3], "3..4"),
        ([9, 3, 4, 5], "3..5, 9"),
        ([0, 2, 4, 6, 8, 10], "0, 2, 4, 6, 8, 10"),
        ([0, 2, 4, 6, 8, 10, 12], "0, 2, 4, 6, 8, 10, ..."),
    ],
)
def test_numbers_are_shown_as_ranges(numbers, text):
    assert ranges(numbers) == text


def test_the_first_thousand_findings_are_kept_and_all_are_counted():
    audit = Audit("run")
    for step in range(1002):
        audit.find(Finding("covered", "w", step=step))
    audit.conclude("", shown=CLAIMS)
    assert len(audit.findings) == 1000 and audit.num_findings == 1002
    assert audit.verdict == "failed" and audit.claims["covered"] == "failed"
    assert audit.claims["applied"] == "passed"
    out = audit.to_json()
    assert "steps" not in out and out["findings"][1]["where"] == "step 1"


def test_the_lack_of_evidence_is_no_pass_and_a_failure_is_one_all_the_same():
    audit = Audit("run")
    audit.conclude("nothing there", shown=())
    assert (audit.verdict, audit.reason) == ("no evidence", "nothing there")
    assert set(audit.claims.values()) == {"no evidence"}
    failed = Audit("run")
    failed.find(Finding("agreement", "w"))
    failed.conclude("nothing there", shown=())
    assert (failed.verdict, failed.reason) == ("failed", "")
    passed = Audit("run")
    passed.conclude("", shown=("applied",))
    assert passed.verdict == "passed" and passed.claims["covered"] == "no evidence"
