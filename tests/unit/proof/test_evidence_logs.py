"""check-evidence --logs: the two line shapes, wherever they stand in a text, alone and beside a run."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.proof import audit_log_lines
from r3train.proof.audit_logs import audit_logs
from r3train.proof.writer import evidence_lines
from tests.unit.evidence_dirs import calls, log_flags, record, records_of, write_log, write_run


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
    log.write_text(evidence_lines(record(0, 0, "train", 2))[0] + "\n")
    assert "R3 check lines" in audit_logs([write_log(log, good, mode="a")]).findings[0].what
    for text, claim in [
        ("AssertionError: R3 mismatch tokens (5) > threshold (1.1)", "agreement"),
        ("AssertionError: R3 check failed at step 3:", "applied"),
    ]:
        log = write_log(tmp_path / "assert.log", good)
        with log.open("a") as file:
            file.write(text + "\n")
        (only,) = audit_logs([log]).findings
        assert only.claim == claim and check("--logs", log).exit_code == 1


def test_one_bad_call_is_not_hidden_by_many_good_ones(tmp_path):
    bad = record(200, 0, "train", 1, rows_mismatch=30)
    log = write_log(tmp_path / "a.log", calls(0, 200))
    assert audit_logs([log], threshold=0.02).verdict == "passed"
    log = write_log(tmp_path / "b.log", [*calls(0, 200), bad])
    assert audit_logs([log], threshold=0.02).num_findings == 1


def test_logs_without_a_line_are_no_evidence_even_beside_good_evidence(tmp_path):
    run = write_run(tmp_path / "run")
    log = write_log(tmp_path / "empty.log", [])
    assert check("--logs", log).exit_code == 3
    assert check(run, "--logs", log).exit_code == 3


@pytest.mark.parametrize("newline", [" ", "\r", "\r\n", "\n", ""])
@pytest.mark.parametrize("block", [1, 37, 1 << 20])
def test_a_failure_is_found_whatever_became_of_the_line_ends(tmp_path, monkeypatch, newline, block):
    monkeypatch.setattr(audit_log_lines, "_BLOCK", block)
    monkeypatch.setattr(audit_log_lines, "_LONGEST", 300)  # files of several rounds
    bad = record(0, 1, "train", 1, num_rows=100, rows_mismatch=90, replay_idx_sum=300)
    log = write_log(tmp_path / "a.log", [*calls(0, 7), bad, *calls(1, 6)])
    log.write_bytes(log.read_bytes().replace(b"\n", newline.encode()))
    audit = audit_logs([log], threshold=0.5)
    assert audit.numbers["num_calls"] == audit.numbers["checks"] == 14
    (only,) = audit.findings
    assert only.ranks == (1,) and only.got == "90 of 100"
    assert check("--logs", log).exit_code == 1


def test_lines_that_say_zero_rows_are_no_evidence(tmp_path):
    none = dict(num_rows=0, rows_mismatch=0, replay_idx_sum=0)
    log = write_log(tmp_path / "a.log", [*calls(0, 3, **none), *calls(1, 3, **none)])
    result = check("--logs", log)
    assert result.exit_code == 3 and "not one row" in result.output
    # and a rank without rows beside one that has them is not proved by the other
    log = write_log(tmp_path / "b.log", [*calls(0, 3), *calls(1, 3, **none)])
    found = audit_logs([log]).findings
    assert {f.ranks for f in found} == {(1,)} and found[0].got == "0"


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"replay_idx_sum": 0}, "replay_idx_sum of 2 calls"),
        ({"replay_idx_sum": 109}, "replay_idx_sum of 2 calls"),
        ({"topk": 1}, "topk of the calls"),
    ],
)
def test_served_experts_that_cannot_be_distinct_fail(tmp_path, changes, what):
    log = write_log(tmp_path / "a.log", [*calls(0, 2), *calls(1, 2, **changes)])
    assert what in audit_logs([log]).findings[0].what
    assert check("--logs", log).exit_code == 1


def test_what_one_log_cannot_know_of_the_model_it_is_told_by_the_run(tmp_path):
    run = write_run(tmp_path / "run")
    flags = log_flags(tmp_path, range(2))
    assert check(run, *flags).exit_code == 0
    for change, what in [
        ({"topk": 3}, "topk of some calls"),
        ({"replay_idx_sum": 110 * 13 + 1}, "replay_idx_sum of 18 calls"),  # 7 + 6 are the most
    ]:
        records = [replace(r, **change) for step in range(3) for r in records_of(step, 1)]
        write_log(tmp_path / "rank_1.log", records)
        out = json.loads(check(run, *flags, "--json").output)
        assert out["verdict"] == "failed"
        assert any(what in f["what"] for f in out["audits"][1]["findings"])


def test_a_log_of_one_rank_of_two_fails_beside_the_run(tmp_path):
    run = write_run(tmp_path / "run")
    assert check(run, *log_flags(tmp_path, range(2))).exit_code == 0
    result = check(run, *log_flags(tmp_path, range(1)), "--json")
    assert result.exit_code == 1
    (only,) = json.loads(result.output)["audits"][1]["findings"]
    assert only["ranks"] == [1] and "no R3 line in the log files" in only["what"]
    # alone nobody can know, and that is said
    alone = check(*log_flags(tmp_path, range(1)))
    assert alone.exit_code == 0 and "the lines are of rank 0" in " ".join(alone.output.split())


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
    assert result.exit_code == 3 and "judge it beside RUN_DIR" in text
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
    assert result.exit_code == 3 and f"50 on rank {rank}, 100 on rank 0" in text
    assert "judge it beside RUN_DIR" in text
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


def test_one_call_of_many_mismatches_is_left_to_the_evidence_where_there_is_some(tmp_path):
    """The run adds a layer up over ranks and microbatches, which lines do not tell apart."""
    run = write_run(tmp_path / "run")
    flags = log_flags(tmp_path, [0])
    records = [r for step in range(3) for r in records_of(step, 1)]
    log = write_log(tmp_path / "one.log", [replace(records[0], rows_mismatch=20), *records[1:]])
    (only,) = audit_logs([flags[1], log], threshold=0.02).findings
    assert only.got == "20 of 110" and "worst call" in only.what
    assert check(run, *flags, "--logs", log).exit_code == 0


def test_a_damaged_line_is_named_and_a_torn_end_is_a_note(tmp_path):
    log = write_log(tmp_path / "a.log", calls(0, 2))
    wrapper, checked = evidence_lines(record(0, 0, "train", 1))
    with log.open("a") as file:
        file.write(f"{wrapper}\n{checked.replace('110', '1' * 5000)}\n")
    result = check("--logs", log)
    assert result.exit_code == 1 and "a damaged line: R3 check (rank 0" in result.output
    # a terminal that broke long lines
    log = write_log(tmp_path / "b.log", calls(0, 2))
    log.write_text(log.read_text().replace("n_tokens", "n_\ntokens"))
    assert audit_logs([log]).num_findings == 4
    log = write_log(tmp_path / "c.log", calls(0, 2))
    with log.open("a") as file:
        file.write(wrapper[:40])
    audit = audit_logs([log])
    assert audit.verdict == "passed" and any("ends within a line" in n for n in audit.notes)


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
