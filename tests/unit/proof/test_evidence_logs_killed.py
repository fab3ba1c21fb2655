"""check-evidence --logs of runs that were killed, started again in one directory, or rotated."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.proof.audit_logs import audit_logs
from r3train.proof.writer import EvidenceWriter, evidence_lines, start_line
from tests.unit.evidence_dirs import calls, log_flags, record, records_of, STAMP, write_log
from tests.unit.evidence_dirs import write_run

SECOND = "2026-01-02T00:00:00Z"
ACCEPT = "--accept-superseded-failures"
WRAPPER, CHECKED = evidence_lines(record(0, 0, "train", 1))
PREFIX = f"{STAMP} rank 0 INFO r3train.proof.writer: "
NEXT_START = f"{STAMP} rank 0 WARNING py.warnings: Apex is not installed\n"
TORN = "ends within a line"


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def check(*args: object):
    return CliRunner().invoke(main, ["check-evidence", *map(str, args)])


def append(path: Path, text: str) -> Path:
    with path.open("a") as file:
        file.write(text)
    return path


def logs_audit(*args: object) -> dict:
    """What check-evidence says of the log files, beside a run where one is given."""
    return json.loads(check(*args, "--json").output)["audits"][-1]


def test_a_log_that_ends_between_the_two_lines_of_a_call_is_that_of_a_kill(tmp_path):
    log = append(write_log(tmp_path / "a.log", calls(0, 3)), f"{PREFIX}{WRAPPER}\n")
    audit = audit_logs([log])
    assert audit.verdict == "passed", audit.findings
    assert any("one of its two lines" in n and "rank 0" in n for n in audit.notes)
    # a call that lacks its check anywhere else is none of a kill
    append(log, f"{PREFIX}{WRAPPER}\n")
    (only,) = audit_logs([log]).findings
    assert (only.what, only.got, only.expected) == ("R3 check lines", "3", "5 (R3 wrapper lines)")


@pytest.mark.parametrize("at", range(20, len(CHECKED) - 8, 7))
def test_a_log_that_ends_within_a_check_line_is_that_of_a_kill(tmp_path, at):
    log = write_log(tmp_path / "a.log", calls(0, 3))
    append(log, f"{PREFIX}{WRAPPER}\n{PREFIX}{CHECKED[:at]}")
    audit = audit_logs([log])
    assert audit.verdict == "passed", audit.findings
    assert any(TORN in n for n in audit.notes)


def test_a_log_that_was_rotated_anywhere_passes_with_both_of_its_parts(tmp_path):
    run = write_run(tmp_path / "run", ranks=1)
    whole = write_log(tmp_path / "whole.log", [r for n in range(3) for r in records_of(n, 0)])
    text = whole.read_text()
    old, new = tmp_path / "rank.log.1", tmp_path / "rank.log"
    middle = text.index(PREFIX, len(text) // 2)
    for at in range(middle, middle + 2 * len(PREFIX + CHECKED), 5):
        old.write_text(text[:at])
        new.write_text(text[at:])
        result = check(run, "--logs", new, "--logs", old)
        assert result.exit_code == 0, (text[at - 40 : at], result.output)
        assert audit_logs([old, new]).verdict == "passed"


@pytest.mark.parametrize("torn", [WRAPPER[:40], f"{WRAPPER}\n{PREFIX}{CHECKED[:50]}"])
def test_a_record_that_a_kill_tore_before_a_resume_is_a_note(tmp_path, torn):
    log = append(write_log(tmp_path / "a.log", calls(0, 2)), f"{PREFIX}{torn}{NEXT_START}")
    audit = audit_logs([write_log(log, calls(0, 2), mode="a")])
    assert audit.verdict == "passed", audit.findings
    assert any(TORN in n and "R3 " in n for n in audit.notes)
    # torn where no start ends: the record behind it is of the same start
    log = append(write_log(tmp_path / "b.log", calls(0, 2)), f"{PREFIX}{torn}")
    audit = audit_logs([write_log(log, calls(0, 2), mode="a")])
    assert any("a damaged line: R3 " in f.what for f in audit.findings)
    log = append(log, NEXT_START)
    assert any("a damaged line: R3 " in f.what for f in audit_logs([log]).findings)
    log.write_bytes(log.read_bytes().replace(b"\n", b" "))  # the start is behind that record
    assert any("a damaged line: R3 " in f.what for f in audit_logs([log]).findings)
    log = append(write_log(tmp_path / "c.log", calls(0, 2)), f"{PREFIX}{torn}\n{NEXT_START}")
    assert audit_logs([log]).verdict == "failed"


def test_ten_thousand_torn_records_are_few_notes(tmp_path):
    log = write_log(tmp_path / "a.log", calls(0, 2))
    append(log, f"{PREFIX}{WRAPPER[:40]}{NEXT_START}" * 10_000)
    audit = audit_logs([log])
    assert len(audit.notes) < 30 and any("9980 more" in n for n in audit.notes)


def test_a_call_that_a_kill_cut_short_is_known_from_the_start_that_follows(tmp_path):
    run = write_run(tmp_path / "run", ranks=1)
    write_run(run, range(2, 5), ranks=1, attempt=SECOND)

    def log_with(between: str, *, lost: bool = False) -> Path:
        log = write_log(tmp_path / "a.log", [r for n in range(3) for r in records_of(n, 0)])
        append(log, f"{PREFIX}{WRAPPER}\n{between}")
        write_log(log, [r for n in range(2, 5) for r in records_of(n, 0)], mode="a")
        if lost:  # one that no kill explains
            text = log.read_text().splitlines(keepends=True)
            del text[1]
            log.write_text("".join(text))
        return log

    start = f"{NEXT_START}{PREFIX}{start_line(0)}\n"
    for beside in ([], [run]):
        log = log_with(start)
        result = check(*beside, "--logs", log)
        assert result.exit_code == 0, result.output
        assert any("one of its two lines" in n for n in logs_audit(*beside, "--logs", log)["notes"])
        for log in (
            log_with(start, lost=True),
            log_with(NEXT_START),
            log_with(f"{NEXT_START}{PREFIX}{start_line(1)}\n"),
        ):
            assert logs_audit(*beside, "--logs", log)["findings"][0]["what"] == "R3 check lines"


def test_a_writer_logs_where_a_start_begins(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    EvidenceWriter(tmp_path, 3).close()
    assert [r.getMessage() for r in caplog.records] == [start_line(3)]


def test_logs_of_a_later_start_of_fewer_ranks_are_judged_by_its_ranks(tmp_path):
    run = write_run(tmp_path / "run", ranks=4)
    write_run(run, range(3, 6), ranks=2, attempt=SECOND)
    flags = log_flags(tmp_path, range(2), range(3, 6))
    result = check(run, *flags)
    assert result.exit_code == 0, result.output
    (only,) = logs_audit(run, *flags[:2])["findings"]
    assert only["ranks"] == [1] and "no R3 line in the log files" in only["what"]


def superseded_failure(tmp_path, change) -> tuple[Path, list]:
    """A run of which step 1 failed and was trained again, and the appended logs of both starts."""
    run = write_run(tmp_path / "run", change=change)
    records = [[change(r) for n in range(2) for r in records_of(n, rank)] for rank in (0, 1)]
    logs = [write_log(tmp_path / f"rank_{n}.log", records[n]) for n in (0, 1)]
    (step,) = [
        line
        for line in map(json.loads, (run / "evidence" / "steps.jsonl").open())
        if not line["passed"]
    ]
    error = step["threshold_error"] or f"R3 check failed at step {step['step']}:\n  train/..."
    append(logs[0], f"{STAMP} rank 0 CRITICAL x: the run failed\nAssertionError: {error}\n")
    write_run(run, attempt=SECOND)
    for rank, log in enumerate(logs):
        write_log(log, [r for n in range(3) for r in records_of(n, rank)], mode="a")
    return run, [arg for log in logs for arg in ("--logs", log)]


def wrong_expert(r):
    return replace(r, fingerprint=r.fingerprint ^ 8) if r.step == 1 and r.rank == 1 else r


def drifted(r):
    return replace(r, rows_mismatch=60, rows_equal=31) if r.step == 1 else r


@pytest.mark.parametrize("change", [wrong_expert, drifted])
def test_an_accepted_failure_is_accepted_of_the_log_that_tells_of_it(tmp_path, change):
    run, flags = superseded_failure(tmp_path, change)
    assert logs_audit(run, *flags)["verdict"] == "failed"
    result = check(run, *flags, ACCEPT)
    assert result.exit_code == 0, result.output
    audit = logs_audit(run, *flags, ACCEPT)
    assert any("accepted" in note and "R3 " in note for note in audit["notes"])


@pytest.mark.parametrize("text", ["at step 2:", "at step 1, of another text", "at step 10:"])
def test_of_a_step_that_was_not_trained_again_nothing_is_accepted(tmp_path, text):
    run, flags = superseded_failure(tmp_path, wrong_expert)
    append(flags[1], f"AssertionError: R3 check failed {text}\n")
    accepted = text.startswith("at step 1,")
    assert check(run, *flags, ACCEPT).exit_code == (0 if accepted else 1)


def test_a_failure_of_the_time_that_counts_is_not_accepted_of_the_log(tmp_path):
    run, flags = superseded_failure(tmp_path, wrong_expert)
    write_run(run, range(1, 3), attempt="2026-01-03T00:00:00Z", change=wrong_expert)
    assert any(
        "R3 check failed at step 1" in f["what"]
        for f in logs_audit(run, *flags, ACCEPT)["findings"]
    )
