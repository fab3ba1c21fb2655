"""check-evidence --logs: the two line shapes, wherever they stand in a text, only and next to a run."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import replace

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.audit.log_lines import audit_logs
from r3train.proof.writer import EvidenceWriter, evidence_lines, start_line
from tests.unit.evidence_dirs import (
    calls,
    log_flags,
    record,
    records_of,
    STAMP,
    write_log,
    write_run,
)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def check(*args: object):
    return CliRunner().invoke(main, ["check-evidence", *map(str, args)])


def test_log_files_alone_pass_and_say_what_they_cannot_show(tmp_path):
    log = write_log(tmp_path / "a.log", [*calls(0, 1), *calls(1, 1)])
    result = check("--logs", log)
    assert result.exit_code == 0, result.output
    audit = audit_logs([log])
    assert audit.claims["applied"] == "no evidence" and "fingerprints" in result.output
    assert audit.numbers["ranks"] == 2 and audit.numbers["checks"] == 2


def test_log_lines_fail_over_the_threshold_without_checks_and_over_an_assertion(tmp_path):
    good = calls(0, 1)
    log = write_log(tmp_path / "mismatch.log", [*good, *calls(1, 1, rows_mismatch=60)])
    (only,) = audit_logs([log]).findings
    assert only.ranks == (1,) and only.claim == "agreement" and only.got == "61 of 220"
    log = tmp_path / "short.log"
    log.write_text(2 * (evidence_lines(record(0, 0, "train", 2))[0] + "\n"))
    assert (
        "lack a wrapper or a check line"
        in audit_logs([write_log(log, good, mode="a")]).findings[0].what
    )
    for text, claim in [
        ("AssertionError: R3 mismatch tokens (5) > threshold (1.1)", "agreement"),
        ("AssertionError: R3 check failed at step 3:", "applied"),
    ]:
        log = write_log(tmp_path / "assert.log", good)
        with log.open("a") as file:
            file.write(text + "\n")
        (only,) = audit_logs([log]).findings
        assert only.claim == claim and check("--logs", log).exit_code == 1


def test_logs_without_a_line_are_no_evidence_even_beside_good_evidence(tmp_path):
    run = write_run(tmp_path / "run")
    log = write_log(tmp_path / "empty.log", [])
    assert check("--logs", log).exit_code == 3
    assert check(run, "--logs", log).exit_code == 3


@pytest.mark.parametrize("newline", [" ", "\r", "\r\n", "\n", ""])
def test_a_failure_is_found_whatever_became_of_the_line_ends(tmp_path, newline):
    bad = record(0, 1, "train", 1, num_rows=100, rows_mismatch=90, replay_idx_sum=300)
    few = dict(num_rows=10, rows_mismatch=0, replay_idx_sum=30)
    log = write_log(tmp_path / "a.log", [*calls(0, 7, **few), bad, *calls(1, 6, **few)])
    log.write_bytes(log.read_bytes().replace(b"\n", newline.encode()))
    audit = audit_logs([log], threshold=0.3)
    assert audit.numbers["num_calls"] == audit.numbers["checks"] == 14
    (only,) = audit.findings
    assert only.ranks == (1,) and only.got == "90 of 230"
    assert check("--logs", log).exit_code == 1


def test_lines_that_say_zero_rows_are_no_evidence(tmp_path):
    none = dict(num_rows=0, rows_mismatch=0, replay_idx_sum=0)
    log = write_log(tmp_path / "a.log", [*calls(0, 3, **none), *calls(1, 3, **none)])
    result = check("--logs", log)
    assert result.exit_code == 3 and "not one row" in result.output
    # and a rank without rows next to one that has them is not proved by the other
    log = write_log(tmp_path / "b.log", [*calls(0, 3), *calls(1, 3, **none)])
    found = audit_logs([log]).findings
    assert {f.ranks for f in found} == {(1,)} and found[0].got == "0"


@pytest.mark.parametrize("idx_sum", [0, 109, 110 * 13 + 1])
def test_served_experts_that_cannot_be_distinct_fail(tmp_path, idx_sum):
    """At most 7 + 6 a row of 8 experts; of a model that no run describes there is no most."""
    run = write_run(tmp_path / "run")
    flags = log_flags(tmp_path, range(2))
    assert check(run, *flags).exit_code == 0
    records = [r for step in range(3) for r in records_of(step, 1)]
    write_log(tmp_path / "rank_1.log", [replace(r, replay_idx_sum=idx_sum) for r in records])
    out = json.loads(check(run, *flags, "--json").output)
    assert any("replay_idx_sum" in f["what"] for f in out["audits"][1]["findings"])
    assert check(*flags).exit_code == (1 if idx_sum < 110 else 0)


def test_calls_of_another_topk_fail_alone_and_beside_the_run(tmp_path):
    log = write_log(tmp_path / "a.log", [*calls(0, 2), *calls(1, 2, topk=1)])
    (only,) = audit_logs([log]).findings
    assert only.what == "top-k of the calls" and only.got == "1, 2"
    run = write_run(tmp_path / "run")
    records = [
        replace(r, topk=3) for rank in range(2) for n in range(3) for r in records_of(n, rank)
    ]
    log = write_log(tmp_path / "b.log", records)
    assert check("--logs", log).exit_code == 0  # three, as far as lines alone can say
    out = json.loads(check(run, "--logs", log, "--json").output)
    (only,) = out["audits"][1]["findings"]
    assert only["got"] == "3" and only["expected"] == "2"


def test_a_log_of_one_rank_of_two_fails_beside_the_run(tmp_path):
    run = write_run(tmp_path / "run")
    assert check(run, *log_flags(tmp_path, range(2))).exit_code == 0
    result = check(run, *log_flags(tmp_path, range(1)), "--json")
    assert result.exit_code == 1
    (only,) = json.loads(result.output)["audits"][1]["findings"]
    assert only["ranks"] == [1] and "no R3 line in the log files" in only["what"]
    # alone nobody can know, and that is said
    alone = check(*log_flags(tmp_path, range(1)))
    assert alone.exit_code == 0 and "how many ranks" in " ".join(alone.output.split())


def test_a_log_that_lacks_calls_of_the_run_fails_beside_it(tmp_path):
    run = write_run(tmp_path / "run")
    flags = [*log_flags(tmp_path, [0]), *log_flags(tmp_path, [1], range(2))]
    (only,) = json.loads(check(run, *flags, "--json").output)["audits"][1]["findings"]
    assert (only["ranks"], only["got"], only["expected"]) == (
        [1],
        "12",
        "18, as in the run's evidence",
    )


@pytest.mark.parametrize("ranks", [(0, 1, 3), (2, 3)])
def test_ranks_below_others_without_a_line_are_no_evidence_alone(tmp_path, ranks):
    """A pipeline stage without experts has none, and neither has a log that is not there."""
    log = write_log(tmp_path / "a.log", [r for rank in ranks for r in calls(rank, 4)])
    result = check("--logs", log)
    text = " ".join(result.output.split())
    assert result.exit_code == 3 and "judge the logs next to RUN_DIR" in text
    assert ("rank 2" if 0 in ranks else "ranks 0..1") in text
    # a definite failure is one all the same
    write_log(log, calls(3, 1, rows_mismatch=100), mode="a")
    assert check("--logs", log).exit_code == 1


@pytest.mark.parametrize("rank, rows", [(3, 111), (1, 110)])
def test_ranks_with_unequal_calls_are_no_evidence_alone(tmp_path, rank, rows):
    """They may be of two pipeline stages, may have lost lines, or one died a step later."""
    counts = {0: 100, 1: 100, 2: 100, 3: 100, rank: 50}
    changes = {rank: {"num_rows": rows}}
    records = [r for n, count in counts.items() for r in calls(n, count, **changes.get(n, {}))]
    log = write_log(tmp_path / "a.log", records)
    result = check("--logs", log)
    text = " ".join(result.output.split())
    assert result.exit_code == 3 and "router calls differ between ranks" in text
    assert "judge the logs next to RUN_DIR" in text
    claims = audit_logs([log]).claims
    assert claims["covered"] == "no evidence" and claims["agreement"] == "passed"
    # equal numbers of calls in all, of which one rank recomputed
    some = [*calls(0, 4), *calls(1, 2), *calls(1, 2, stage="replay_backward")]
    assert audit_logs([write_log(tmp_path / "b.log", some)]).verdict == "no evidence"


def test_pipeline_stages_of_unequal_layers_are_judged_beside_the_run(tmp_path):
    """Rank 0 holds no layer with experts, rank 1 three of them."""
    run = write_run(tmp_path / "run", ranks=2, silent=(0,))
    flags = log_flags(tmp_path, [1])
    assert check(*flags).exit_code == 3
    assert check(run, *flags).exit_code == 0, check(run, *flags).output


def test_a_share_of_few_rows_is_judged_among_those_of_all_ranks(tmp_path):
    """As the run judges: 1 of 60 rows is more than a hundredth, 1 of 6060 is not."""
    few = calls(0, 1, num_rows=60, rows_mismatch=1)
    many = calls(1, 1, num_rows=6000, rows_mismatch=0, replay_idx_sum=6000)
    assert audit_logs([write_log(tmp_path / "a.log", [*few, *many])]).verdict == "passed"
    more = calls(1, 1, num_rows=6000, rows_mismatch=80, replay_idx_sum=6000)
    (only,) = audit_logs([write_log(tmp_path / "b.log", [*few, *more])]).findings
    assert only.got == "81 of 6060" and only.ranks == (0, 1)


WRAPPER, CHECKED = evidence_lines(record(0, 0, "train", 1))
START = f"{STAMP} rank 0 INFO x: {start_line(0)}\n"


@pytest.mark.parametrize(
    "tail, verdict",
    [
        (WRAPPER + "\n", "passed"),
        (WRAPPER + "\n" + CHECKED[:30], "passed"),
        (WRAPPER[:40], "passed"),
        (WRAPPER + "\n" + CHECKED[:30] + START + WRAPPER + "\n" + CHECKED, "passed"),
        (2 * (WRAPPER + "\n"), "failed"),
        (CHECKED + "\n", "failed"),
        (WRAPPER + "\n" + CHECKED[:30] + "\n" + WRAPPER + "\n" + CHECKED, "failed"),
        (WRAPPER + "\n" + CHECKED.replace("110", "111"), "failed"),
        (f"{WRAPPER}\n{CHECKED.replace('110', '1' * 5000)}\n{WRAPPER}\n{CHECKED}", "failed"),
    ],
)
def test_only_a_kill_explains_a_call_that_lacks_a_line(tmp_path, tail, verdict):
    log = write_log(tmp_path / "a.log", calls(0, 3))
    with log.open("a") as file:
        file.write(tail)
    audit = audit_logs([log])
    assert audit.verdict == verdict, audit.findings
    if verdict == "failed":
        (only,) = audit.findings
        assert (only.claim, only.ranks, only.got) == ("covered", (0,), "1")


@pytest.mark.parametrize("lost", range(1, 9))
def test_one_lost_line_among_others_fails(tmp_path, lost):
    log = write_log(tmp_path / "a.log", calls(0, 5))
    lines = [
        line
        for line in log.read_text().splitlines(keepends=True)
        if "R3 w" in line or "R3 c" in line
    ]
    log.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    assert audit_logs([log]).verdict == "failed"


def test_a_log_that_was_rotated_passes_with_both_of_its_parts(tmp_path):
    text = write_log(tmp_path / "whole.log", calls(0, 6)).read_text()
    old, new = tmp_path / "rank.log.1", tmp_path / "rank.log"
    for at in range(len(text) // 2, len(text) // 2 + 400, 23):
        old.write_text(text[:at])
        new.write_text(text[at:])
        assert audit_logs([old, new]).verdict == "passed", text[at - 40 : at]


@pytest.mark.parametrize("step, accepted", [(1, True), (2, False), (10, False)])
def test_an_accepted_failure_is_accepted_of_the_log_that_tells_of_it(tmp_path, step, accepted):
    def wrong(r):
        return replace(r, fingerprint=r.fingerprint ^ 8) if r.step == 1 and r.rank == 1 else r

    run = write_run(tmp_path / "run", change=wrong)
    write_run(run, attempt="2026-01-02")
    flags = log_flags(tmp_path, range(2))
    with flags[1].open("a") as file:
        file.write(f"AssertionError: R3 check failed at step {step}:\n")
    assert check(run, *flags).exit_code == 1
    result = check(run, *flags, "--accept-superseded-failures")
    assert result.exit_code == (0 if accepted else 1), result.output


def test_a_writer_logs_the_beginning_of_a_start(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    EvidenceWriter(tmp_path, 3).close()
    assert [r.getMessage() for r in caplog.records] == [start_line(3)]


def test_a_threshold_that_replaces_the_runs_own_replaces_what_its_log_says_of_it(tmp_path):
    log = write_log(tmp_path / "a.log", calls(0, 2, rows_mismatch=6))
    with log.open("a") as file:
        file.write("AssertionError: R3 mismatch tokens (6) > threshold (2) at step 1\n")
    assert check("--logs", log).exit_code == 1
    result = check("--logs", log, "--r3-mismatch-threshold", "0.5")
    assert result.exit_code == 0 and "R3 mismatch tokens (6)" in result.output
    with log.open("a") as file:
        file.write("AssertionError: R3 check failed at step 1:\n")
    assert check("--logs", log, "--r3-mismatch-threshold", "0.5").exit_code == 1


def test_mismatching_rows_of_lines_are_judged_by_the_evidence_that_tells_which_are_stale(tmp_path):
    def stale(r):
        return replace(r, rows_equal=60, rows_overlap=0, rows_mismatch=40)

    def log_of(run):
        for_rank = {r: [stale(c) for s in range(3) for c in records_of(s, r)] for r in range(2)}
        paths = [write_log(run.parent / f"{run.name}_{r}.log", of) for r, of in for_rank.items()]
        return [flag for path in paths for flag in ("--logs", path)]

    run = write_run(tmp_path / "run", change=stale, versions=True)
    beside = check(run, *log_of(run))
    assert beside.exit_code == 0, beside.output
    assert "the evidence tells which rows are stale" in " ".join(beside.output.split())
    alone = check(*log_of(run))
    assert alone.exit_code == 1 and "of whatever weight version" in alone.output
    assert "nor weight versions" in alone.output


@pytest.mark.parametrize("other", [{"stage": "replay_backward"}, {"num_rows": 120}, {"rank": 1}])
def test_a_check_line_of_another_call_closes_none(tmp_path, other):
    """The check line of one call and the wrapper line of the next are lost, between two that are whole."""
    first = record(0, 0, "train", 1)
    second = replace(first, **other)
    whole = [line for r in (first, second) for line in evidence_lines(r)]
    log = tmp_path / "a.log"
    torn = [*whole, evidence_lines(first)[0], evidence_lines(second)[1], *whole]
    log.write_text("".join(f"{line}\n" for line in torn))
    found = [f.claim for f in audit_logs([log]).findings if "lack a wrapper" in f.what]
    assert found and set(found) == {"covered"}
    log.write_text("".join(f"{line}\n" for line in [*whole, *whole, *whole]))
    assert not audit_logs([log]).findings


@pytest.mark.parametrize("lost", [0, 1])
def test_one_call_less_than_the_run_has_fails_beside_it(tmp_path, lost):
    run = write_run(tmp_path / "run")
    records = [r for step in range(3) for r in records_of(step, 1)]
    last = write_log(tmp_path / "rank_1.log", records[: len(records) - lost])
    flags = [*log_flags(tmp_path, [0]), "--logs", last]
    found = json.loads(check(run, *flags, "--json").output)["audits"][1]["findings"]
    assert [(f["ranks"], f["got"]) for f in found] == [([1], "17")] * lost


def test_a_call_cut_by_a_rotation_counts_with_all_calls_of_its_sum(tmp_path):
    whole = replace(record(0, 0, "train", 1), num_calls=5)
    (tmp_path / "new.log").write_text(evidence_lines(whole, is_sum=True)[1] + "\n")
    assert audit_logs([tmp_path / "new.log"]).numbers["num_calls"] == 5
    (tmp_path / "new.log").write_text(evidence_lines(record(0, 0, "train", 1))[1] + "\n")
    assert audit_logs([tmp_path / "new.log"]).numbers["num_calls"] == 1
    (tmp_path / "old.log").write_text(evidence_lines(whole, is_sum=True)[0] + "\n")
    numbers = audit_logs([tmp_path / "old.log", tmp_path / "new.log"]).numbers
    assert (numbers["num_calls"], numbers["checks"]) == (6, 1)


def test_the_first_twenty_errors_and_top_ks_are_kept(tmp_path):
    log = write_log(tmp_path / "a.log", [r for k in range(1, 31) for r in calls(0, 1, topk=k)])
    with log.open("a") as file:
        for step in range(30):
            file.write(f"AssertionError: R3 check failed at step {step}:\n")
    found = audit_logs([log]).findings
    said = [f.what for f in found if f.what.startswith("the log says")]
    assert len(said) == 20 and said[-1].endswith("step 19:")
    (topks,) = [f for f in found if f.what == "top-k of the calls"]
    assert topks.got == ", ".join(map(str, range(1, 21))) and topks.expected == "one number"


def test_bytes_that_are_no_text_hide_no_line_and_a_file_that_cannot_be_read_is_named(tmp_path):
    log = write_log(tmp_path / "a.log", calls(0, 2))
    log.write_bytes(b"\xff\xfe\x80 " + log.read_bytes().replace(b"R3 \n", b"R3 \xc3\n"))
    assert audit_logs([log]).numbers["checks"] == 2
    with pytest.raises(ValueError, match=f"{tmp_path}: cannot read: Is a directory"):
        audit_logs([tmp_path])
    damaged = tmp_path / "b.log.gz"
    damaged.write_bytes(gzip.compress(log.read_bytes())[:-20])
    with pytest.raises(ValueError, match=f"{damaged}: cannot read: Compressed file ended"):
        audit_logs([damaged])


def test_what_is_accepted_of_steps_that_were_trained_again_is_noted(tmp_path):
    log = write_log(tmp_path / "a.log", calls(0, 2, rows_mismatch=60))
    with log.open("a") as file:
        file.write("AssertionError: R3 check failed at step 1:\n")
    assert len(audit_logs([log]).findings) == 2
    audit = audit_logs([log], accepted_steps=[1])
    assert audit.verdict == "passed"
    accepted = [note for note in audit.notes if note.startswith("accepted, ")]
    assert len(accepted) == 2
    assert "of a step that was trained again: the log says" in accepted[0]
    assert "mismatching rows" in accepted[1]


def test_the_ranks_of_a_mismatch_are_those_above_the_share(tmp_path):
    """Exactly the share is not above it."""
    exact = calls(0, 1, num_rows=100, rows_mismatch=1, replay_idx_sum=300)
    more = calls(1, 1, num_rows=100, rows_mismatch=3, replay_idx_sum=300)
    (only,) = audit_logs([write_log(tmp_path / "a.log", [*exact, *more])]).findings
    assert only.ranks == (1,) and only.got == "4 of 200"
    assert audit_logs([write_log(tmp_path / "b.log", exact)]).verdict == "passed"


def test_calls_are_counted_beside_a_run_of_one_start_alone(tmp_path):
    """Of several starts the logs may be of one; a rank without any line is missed all the same."""
    run = write_run(tmp_path / "run", range(2))
    write_run(run, range(1, 3), attempt="2026-01-02")
    flags = [*log_flags(tmp_path, [0, 1], range(1))]
    assert check(run, *flags).exit_code == 0, check(run, *flags).output
    assert check(run, *flags[:2]).exit_code == 1


def test_without_a_check_line_there_is_no_evidence_and_no_claim(tmp_path):
    wrapper = tmp_path / "a.log"
    wrapper.write_text(evidence_lines(record(0, 0, "train", 1))[0] + "\n")
    audit = audit_logs([wrapper])
    assert (audit.verdict, audit.reason) == ("no evidence", "no R3 check line in the log files")
    assert set(audit.claims.values()) == {"no evidence"}
    none = audit_logs(
        [write_log(tmp_path / "b.log", calls(0, 1, num_rows=0, replay_idx_sum=0, rows_mismatch=0))]
    )
    assert none.reason == "1 R3 check lines in the log files, and not one row in them"
    assert set(none.claims.values()) == {"no evidence"}
    whole = audit_logs([write_log(tmp_path / "c.log", [*calls(0, 1), *calls(1, 1)])])
    assert whole.claims["covered"] == whole.claims["agreement"] == "passed"
    partial = audit_logs([write_log(tmp_path / "d.log", [*calls(0, 1), *calls(2, 1)])])
    assert (partial.claims["covered"], partial.claims["agreement"]) == ("no evidence", "passed")
