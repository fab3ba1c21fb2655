"""check-evidence: the right verdict, and the right place, on whatever a run left behind."""

from __future__ import annotations

import json
import logging
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.evidence import audit_read
from r3train.evidence.audit import audit_run
from r3train.evidence.audit_logs import audit_logs
from r3train.evidence.writer import evidence_lines, rank_file
from tests.unit.evidence_dirs import edit, record, write_run


def check(*args: object):
    return CliRunner().invoke(main, ["check-evidence", *map(str, args)])


def verdict_of(run_dir: Path) -> dict:
    result = check(run_dir, "--json")
    out = json.loads(result.output)
    codes = {"passed": 0, "failed": 1, "no evidence": 3}
    assert result.exit_code == codes[out["verdict"]]
    return out["audits"][0]


def test_a_correct_run_passes_and_every_claim_says_on_what(tmp_path):
    result = check(write_run(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "passed: 3 steps, 36 router calls" in result.output
    audit = audit_run(tmp_path / "run")
    assert audit.claims == dict.fromkeys(("applied", "covered", "agreement"), "passed")
    assert audit.numbers["records"] == 36 and audit.numbers["world_size"] == 2
    assert audit.layer_agreement == {1: 0.9, 2: 0.9, 3: 0.9} and not audit.notes


@pytest.mark.parametrize("run_saw_it", [True, False], ids=["in the run", "in the file"])
def test_one_wrong_expert_fails_with_step_rank_pass_and_layer(tmp_path, run_saw_it):
    """In the run both passes replay the wrong expert; in the file only one record was altered."""

    def wrong(r):
        here = (r.step, r.rank, r.layer_number) == (1, 1, 2)
        return replace(r, fingerprint=r.fingerprint ^ 8) if here else r

    run = write_run(tmp_path / "run", change=wrong if run_saw_it else None)
    if not run_saw_it:
        edit(run, 1, lambda records: [_altered(r) if _is_the_one(r) else r for r in records])
    found = verdict_of(run)["findings"]
    assert {f["claim"] for f in found} == {"applied"}
    assert {(f["step"], tuple(f["ranks"]), f["layer_number"]) for f in found} == {(1, (1,), 2)}
    passes = {f["replay_pass"] for f in found}
    assert passes == ({"old_log_prob", "train"} if run_saw_it else {"train"})
    assert (
        "step 1, rank 1, train/replay_forward, layer 2: route fingerprint is" in check(run).output
    )


def _is_the_one(r: dict) -> bool:
    return (r["step"], r["replay_pass"], r["layer_number"]) == (1, "train", 2)


def _altered(r: dict) -> dict:
    return {**r, "fingerprint": hex(int(r["fingerprint"], 16) ^ 1)}


@pytest.mark.parametrize(
    "changes, claim, what",
    [
        ({"rows_native": 104, "rows_replayed": 0, "rows_filled": 0}, "covered", "chose itself"),
        ({"duplicate_rows": 2, "map_sum": 218}, "covered", "fewer experts than top-k"),
        ({"map_sum": 219}, "covered", "routing map"),
        ({"rows_recompute_differ": 1}, "applied", "recomputed rows"),
        ({"rows_mismatch": 30, "rows_equal": 61}, "agreement", "share no expert"),
        ({"rows_padding": 0}, "covered", "do not add up"),
        ({"rows_equal": 80}, "covered", "agree, overlap and mismatch"),
    ],
)
def test_each_counter_of_errors_fails_its_own_claim_on_its_rank(tmp_path, changes, claim, what):
    run = write_run(tmp_path / "run")
    edit(run, 1, lambda rs: [{**r, **changes} if _is_the_one(r) else r for r in rs])
    found = verdict_of(run)["findings"]
    (first, *_) = [f for f in found if what in f["what"]]
    assert first["claim"] == claim and first["step"] == 1 and first["layer_number"] == 2
    assert 1 in first["ranks"]


def test_a_run_that_was_never_replayed_fails_and_claims_no_agreement(tmp_path):
    zero = dict.fromkeys(("rows_replayed", "rows_filled", "rows_equal"), 0)

    def bypassed(r):
        return replace(r, **zero, rows_native=104, rows_overlap=0, rows_mismatch=0, fingerprint=7)

    audit = verdict_of(write_run(tmp_path / "run", change=bypassed))
    assert audit["claims"] == {"applied": "failed", "covered": "failed", "agreement": "no evidence"}
    assert {f["step"] for f in audit["findings"]} == {0}


def test_a_missing_call_and_a_call_too_many_are_failures(tmp_path):
    run = write_run(tmp_path / "a")
    edit(run, 0, lambda rs: [r for r in rs if not _is_the_one(r)])
    assert any(f["what"] == "router calls" for f in verdict_of(run)["findings"])
    run = write_run(tmp_path / "b")
    edit(run, 0, lambda rs: [c for r in rs for c in ([r, r] if _is_the_one(r) else [r])])
    assert any(f["what"] == "router calls" and f["got"] == "3" for f in verdict_of(run)["findings"])


def test_a_missing_rank_is_named(tmp_path):
    run = write_run(tmp_path / "run")
    rank_file(run, 1).unlink()
    (only,) = verdict_of(run)["findings"]
    assert only["what"] == "rank_00001.jsonl is missing" and only["ranks"] == [1]


def test_a_file_cut_in_half_fails_from_the_step_where_it_ends(tmp_path):
    run = write_run(tmp_path / "run", range(10))
    path = rank_file(run, 1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 40])
    findings = verdict_of(run)["findings"]
    silent = next(f for f in findings if "no record of steps" in f["what"])
    assert silent["ranks"] == [1] and silent["step"] == 5 and "it was cut" in silent["what"]
    assert silent["what"].startswith("no record of steps 5..9")


def test_a_steps_file_cut_in_half_fails(tmp_path):
    run = write_run(tmp_path / "run", range(10))
    path = run / "evidence" / "steps.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    audit = verdict_of(run)
    assert audit["verdict"] == "failed"
    assert any("no verdict for steps" in f["what"] for f in audit["findings"])


def test_a_run_killed_within_a_step_is_judged_by_its_finished_steps(tmp_path):
    run = write_run(tmp_path / "run", range(3))
    with rank_file(run, 0).open("a") as file:
        last = json.loads(rank_file(run, 0).read_text().splitlines()[-1])
        file.write(json.dumps({**last, "step": 3}) + "\n" + json.dumps({**last, "step": 3})[:50])
    audit = verdict_of(run)
    assert audit["verdict"] == "passed" and audit["numbers"]["steps"] == 3
    assert any("step 3 was not finished" in note for note in audit["notes"])
    assert any("ends within a line" in note for note in audit["notes"])


def test_of_several_starts_the_latest_time_a_step_was_trained_counts(tmp_path):
    def wrong(r):
        return replace(r, fingerprint=1) if r.step == 2 else r

    run = write_run(tmp_path / "run", range(4), change=wrong)  # ends over step 2
    with rank_file(run, 0).open("a") as file:
        file.write('{"attempt": "2026')  # and its last words were cut
    write_run(run, range(1, 5), attempt="2026-01-02T00:00:00Z")
    audit = verdict_of(run)
    assert audit["verdict"] == "passed", audit["findings"]
    assert audit["numbers"]["starts"] == 2 and audit["numbers"]["steps"] == 5
    assert any("steps 1..2 were trained again" in note for note in audit["notes"])
    # and the other way round: a failure of the later start is not hidden by the first
    run = write_run(tmp_path / "other", range(4))
    write_run(run, range(1, 5), attempt="2026-01-02T00:00:00Z", change=wrong)
    assert {f["step"] for f in verdict_of(run)["findings"]} >= {2}


def test_trained_steps_without_evidence_and_gaps_fail(tmp_path):
    run = write_run(tmp_path / "run", range(4))
    steps = run / "evidence" / "steps.jsonl"
    lines = steps.read_text().splitlines(keepends=True)
    steps.write_text("".join(lines[:1] + lines[2:]))
    for rank in (0, 1):
        edit(run, rank, lambda rs: [r for r in rs if r["step"] != 1])
    assert any("no evidence of steps 1" in f["what"] for f in verdict_of(run)["findings"])
    steps.write_text("".join(lines[:3]))
    for rank in (0, 1):
        edit(run, rank, lambda rs: [r for r in rs if r["step"] < 2])
    run = write_run(tmp_path / "b", range(4))
    steps = run / "evidence" / "steps.jsonl"
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:3]))
    for rank in (0, 1):
        edit(run, rank, lambda rs: [r for r in rs if r["step"] < 3])
    assert any("steps 3 were trained" in f["what"] for f in verdict_of(run)["findings"])


def test_a_verdict_of_the_run_that_the_records_do_not_show_still_fails(tmp_path):
    run = write_run(tmp_path / "run")
    steps = run / "evidence" / "steps.jsonl"
    steps.write_text(steps.read_text().replace('"passed": true', '"passed": false', 1))
    (only,) = verdict_of(run)["findings"]
    assert "the run itself judged it failed" in only["what"] and only["step"] == 0


def test_garbage_inside_a_file_fails(tmp_path):
    run = write_run(tmp_path / "run")
    path = rank_file(run, 0)
    path.write_text("garbage\n[1]\n" + path.read_text() + '{"step": 2}\n')
    whats = [f["what"] for f in verdict_of(run)["findings"]]
    assert sum("not a JSON object" in w for w in whats) == 2


@pytest.mark.parametrize(
    "config, reason",
    [
        (None, "is it a run directory"),
        ("[run]\n", "did not use R3"),
        ("[replay]\nuse_rollout_routing_replay = true\n", "check was off"),
        (
            "[replay]\nuse_rollout_routing_replay = true\nenable_r3_correctness_check = true\n",
            "ended before its first step",
        ),
    ],
)
def test_nothing_is_no_evidence_and_never_a_pass(tmp_path, config, reason):
    (tmp_path / "evidence").mkdir()
    if config is not None:
        (tmp_path / "config.toml").write_text(config)
    result = check(tmp_path)
    assert result.exit_code == 3 and reason in " ".join(result.output.split())


def test_a_run_without_one_recorded_row_is_no_evidence(tmp_path):
    run = write_run(tmp_path / "run", range(0))
    assert check(run).exit_code == 3  # empty rank files
    assert "no evidence" in check(run).output


def test_wrong_usage_has_a_code_of_its_own(tmp_path):
    assert check().exit_code == 2
    assert check(tmp_path / "nowhere").exit_code == 2
    assert check(tmp_path, "--logs", tmp_path / "nowhere.log").exit_code == 2


def test_markdown_for_a_pull_request_names_the_place(tmp_path):
    run = write_run(tmp_path / "run")
    edit(run, 1, lambda records: [_altered(r) if _is_the_one(r) else r for r in records])
    file = tmp_path / "summary.md"
    check(run, "--markdown", file)
    text = file.read_text()
    assert text.startswith("### R3 evidence: failed: 1 finding\n")
    assert "| step 1, rank 1, train/replay_forward, layer 2 | route fingerprint |" in text
    assert check(run, "--markdown", "-").output == text


def _log(path: Path, records) -> Path:
    with path.open("w") as file:
        for r in records:
            for line in evidence_lines(r):
                file.write(f"2026-01-01 00:00:00,000 rank {r.rank} INFO somewhere: {line}\n")
            file.write("something else R3 \n")
    return path


def test_log_files_alone_pass_and_say_what_they_cannot_show(tmp_path):
    log = _log(tmp_path / "a.log", [record(0, rank, "train", 1) for rank in (0, 1)])
    result = check("--logs", log)
    assert result.exit_code == 0, result.output
    audit = audit_logs([log])
    assert audit.claims["applied"] == "no evidence" and "fingerprints" in result.output
    assert audit.numbers["ranks"] == 2 and audit.numbers["checks"] == 2


def test_log_lines_fail_over_the_threshold_without_checks_and_over_an_assertion(tmp_path):
    good = [record(0, 0, "train", 1)]
    log = _log(tmp_path / "mismatch.log", [*good, record(0, 1, "train", 1, rows_mismatch=60)])
    (only,) = audit_logs([log]).findings
    assert only.ranks == (1,) and only.claim == "agreement" and only.got == "60 of 110"
    log = _log(tmp_path / "short.log", good)
    with log.open("a") as file:
        file.write(evidence_lines(record(0, 0, "train", 2))[0] + "\n")
    assert "R3 check lines" in audit_logs([log]).findings[0].what
    log = _log(tmp_path / "assert.log", good)
    with log.open("a") as file:
        file.write("AssertionError: R3 mismatch tokens (5) > threshold (1.1)\n")
    assert check("--logs", log).exit_code == 1


def test_one_bad_call_is_not_hidden_by_many_good_ones(tmp_path):
    calls = [record(s, 0, "train", 1) for s in range(200)]
    bad = record(200, 0, "train", 1, rows_mismatch=30)
    assert audit_logs([_log(tmp_path / "a.log", calls)], threshold=0.02).verdict == "passed"
    assert audit_logs([_log(tmp_path / "b.log", [*calls, bad])], threshold=0.02).num_findings == 1


def test_logs_without_a_line_are_no_evidence_even_beside_good_evidence(tmp_path):
    run = write_run(tmp_path / "run")
    log = _log(tmp_path / "empty.log", [])
    assert check("--logs", log).exit_code == 3
    assert check(run, "--logs", log).exit_code == 3


def test_memory_does_not_grow_with_the_number_of_records(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(audit_read, "_BUDGET", 100)  # a window of 8 steps
    caplog.set_level(logging.CRITICAL)

    def peak(steps: int) -> int:
        run = write_run(tmp_path / str(steps), range(steps))
        tracemalloc.start()
        assert audit_run(run).numbers["records"] == 12 * steps
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(5)  # imports
    # a step costs a few hundred bytes (index, metrics), its records of 7 KB cost nothing
    assert peak(400) - peak(100) < 300 * 2000
