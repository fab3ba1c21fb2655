"""The claim served in a finished run: judged again from ``evidence/served.jsonl``, and never taken on trust."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from r3train.audit.audit_run import audit_run
from r3train.audit.findings import SERVED
from r3train.cli import main
from r3train.proof.weights_verdict import weights_records
from r3train.proof.writer import EvidenceWriter
from tests.unit.evidence_dirs import audit_of_one_start, canaries, write_run


def two(step: int) -> list:
    return [canaries(step), canaries(step, server=1)]


def failing_at(step: int, **changes):
    return lambda now: [canaries(now, **(changes if now == step else {}))]


def findings(run_dir) -> list[str]:
    return [str(f) for f in audit_of_one_start(run_dir).findings if f.claim == SERVED]


def changed_lines(path, change) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in map(change, lines) if line is not None]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def test_a_run_whose_canaries_passed_has_the_claim_and_its_numbers(tmp_path):
    run_dir = write_run(tmp_path / "run", served=two)
    audit = audit_run(run_dir)
    assert audit.claims[SERVED] == "passed" and audit.verdict == "passed"
    of = audit.numbers["served"]
    assert (of["updates"], of["readings"], of["inconclusive"]) == (3, 6, 0)
    out = CliRunner().invoke(main, ["check-evidence", str(run_dir)]).output
    assert "3 updates, 6 scores of all canaries, which use 100% of the (layer, expert) pairs" in out
    assert "78% of the vocabulary" in out and "bit by bit" in out


def test_a_run_without_canaries_has_no_such_claim(tmp_path):
    assert SERVED not in audit_run(write_run(tmp_path / "run")).claims


def test_a_failure_that_ended_the_run_before_its_step_is_found(tmp_path):
    run_dir = write_run(tmp_path / "run", served=failing_at(2, early_cached=128))
    audit = audit_run(run_dir)
    assert (audit.verdict, audit.claims[SERVED]) == ("failed", "failed")
    assert findings(run_dir) == [
        "step 2: EARLY: server 0, weight version 2: 128 tokens of a text were in its cache before it"
        " was asked for, computed by older weights"
    ]
    assert CliRunner().invoke(main, ["check-evidence", str(run_dir)]).exit_code == 1


def test_a_failure_before_the_first_step_is_found(tmp_path):
    run_dir = write_run(tmp_path / "run", served=failing_at(0, early_cached=128))
    audit = audit_run(run_dir)
    assert audit.verdict == "failed" and findings(run_dir)


def test_a_failure_that_the_run_says_it_did_not_have_is_found(tmp_path):
    run_dir = write_run(tmp_path / "run", served=two)

    def spoiled(line):
        return {**line, "rows_left": 500} if line["step"] == 1 and line["server"] else line

    changed_lines(run_dir / "evidence" / "served.jsonl", spoiled)
    sums, failed, *later = [text.split(":")[1].strip() for text in findings(run_dir)]
    assert sums.startswith("statistics of server 1") and failed == "ROUTER"


@pytest.mark.parametrize("which", ["all", "one"])
def test_readings_that_are_gone_are_a_contradiction(tmp_path, which):
    run_dir = write_run(tmp_path / "run", served=two)
    path = run_dir / "evidence" / "served.jsonl"
    if which == "all":
        path.unlink()
    else:
        changed_lines(path, lambda line: None if (line["step"], line["server"]) == (1, 1) else line)
    assert any("served of the run's own verdict" in text for text in findings(run_dir))


def test_a_verdict_that_is_gone_is_found(tmp_path):
    run_dir = write_run(tmp_path / "run", served=two)
    changed_lines(
        run_dir / "evidence" / "steps.jsonl",
        lambda line: {k: v for k, v in line.items() if k != "served" or line["step"] != 1},
    )
    (text,) = findings(run_dir)
    assert text.startswith("step 1: served of the run's own verdict")


def test_the_first_step_of_a_start_has_canaries_if_a_later_one_has(tmp_path):
    run_dir = write_run(tmp_path / "run", served=lambda step: two(step) if step != 1 else [])
    assert audit_run(run_dir).verdict == "passed", "an update that --r3-canary-share leaves out"
    run_dir = write_run(tmp_path / "gone", served=lambda step: two(step) if step else [])
    texts = findings(run_dir)
    assert texts and all("canaries is missing at the start's first step" in t for t in texts)


def test_steps_that_the_interval_leaves_out_are_judged_by_their_canaries_all_the_same(tmp_path):
    run_dir = write_run(tmp_path / "run", range(7), served=two, check_interval=3)
    audit = audit_run(run_dir)
    assert audit.verdict == "passed" and audit.numbers["served"]["readings"] == 14
    bad = write_run(
        tmp_path / "bad", range(7), served=failing_at(5, gap_mean=0.1), check_interval=3
    )
    assert len(findings(bad)) == 1 and "BOUND" in findings(bad)[0]


def test_a_failure_that_a_later_start_trained_again_names_the_start_and_can_be_accepted(tmp_path):
    run_dir = write_run(tmp_path / "run", served=failing_at(2, early_cached=128))
    write_run(run_dir, range(2, 4), served=two, attempt="2026-01-02T00:00:00Z")
    (finding,) = audit_run(run_dir).findings
    assert str(finding).startswith("start 2026-01-01T00:00:00Z, step 2: EARLY")
    audit = audit_run(run_dir, accept_superseded=True)
    assert audit.verdict == "passed" and any("EARLY" in note for note in audit.notes)


def test_a_failure_of_the_start_that_counts_is_never_accepted(tmp_path):
    """At an update between two verdicts; its own start, and no later one, trained the step before."""
    run_dir = write_run(
        tmp_path / "run", range(7), served=failing_at(5, early_cached=128), check_interval=3
    )
    audit = audit_run(run_dir, accept_superseded=True)
    assert audit.verdict == "failed" and "EARLY" in str(audit.findings[0])
    one_more = write_run(tmp_path / "again", range(3), served=two)
    write_run(one_more, range(2, 4), served=failing_at(2, early_cached=128), attempt="2026-01-02")
    assert audit_run(one_more, accept_superseded=True).verdict == "failed"


def test_a_damaged_line_is_a_finding(tmp_path):
    run_dir = write_run(tmp_path / "run", served=two)
    path = run_dir / "evidence" / "served.jsonl"
    path.write_text(path.read_text().replace('"early_cached": 0', '"early_cached": -1', 1))
    audit = audit_run(run_dir)
    assert audit.verdict == "failed" and "served.jsonl:1" in str(audit.findings[0])


def with_checksums(run_dir, *held: str):
    """A run whose two servers said these checksums after each update, one by one."""
    writer = EvidenceWriter(run_dir, 0, "2026-01-01T00:00:00Z")
    for version, checksum in enumerate(held):
        servers = {server: {"rank 0 a.weight": checksum} for server in (0, 1)}
        writer.write_weights(weights_records(version, (f"{version:016x}", 1), servers, ["tp1"] * 2))
    return run_dir


@pytest.mark.parametrize("served", [None, two])
def test_checksums_of_weights_are_of_the_claim_with_and_without_canaries(served, tmp_path):
    run_dir = with_checksums(write_run(tmp_path / "run", served=served), "a", "b", "c")
    audit = audit_run(run_dir)
    assert (audit.verdict, audit.claims[SERVED]) == ("passed", "passed")
    out = " ".join(CliRunner().invoke(main, ["check-evidence", str(run_dir)]).output.split())
    assert "checksums of all tensors after 3 updates" in out
    assert ("of all canaries" in out) == (served is not None)


@pytest.mark.parametrize("how", [[], ["--json"], ["--markdown", "{run_dir}/said.md"]])
def test_weights_that_stayed_are_found_without_canaries_too(how, tmp_path):
    run_dir = with_checksums(write_run(tmp_path / "run"), "a", "b", "b")
    how = [word.format(run_dir=run_dir) for word in how]
    result = CliRunner().invoke(main, ["check-evidence", str(run_dir), *how])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "SAME" in result.output
