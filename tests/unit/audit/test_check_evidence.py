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
from r3train.audit.audit_run import audit_run
from r3train.audit.evidence_schema import read_lines
from r3train.proof.writer import rank_file
from tests.unit.evidence_dirs import CURRENT_ROWS, edit, write_run


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
    passed = dict.fromkeys(("applied", "covered", "agreement"), "passed")
    assert audit.claims == passed | {"recheck": "no evidence"}
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
    claims = {"applied": "failed", "covered": "failed", "agreement": "no evidence"}
    assert audit["claims"] == claims | {"recheck": "no evidence"}
    assert {f["step"] for f in audit["findings"]} == {0}


def test_a_missing_call_and_a_call_too_many_are_failures(tmp_path):
    run = write_run(tmp_path / "a")
    edit(run, 0, lambda rs: [r for r in rs if not _is_the_one(r)])
    (only,) = verdict_of(run)["findings"]  # the rows that are missing with it are not told again
    place = (only["step"], only["ranks"], only["replay_pass"], only["layer_number"])
    assert only["what"] == "router calls" and place == (1, [0], "train", 2)
    run = write_run(tmp_path / "b")
    edit(run, 0, lambda rs: [c for r in rs for c in ([r, r] if _is_the_one(r) else [r])])
    assert any(f["what"] == "router calls" and f["got"] == "3" for f in verdict_of(run)["findings"])


def test_a_missing_rank_is_named(tmp_path):
    run = write_run(tmp_path / "run")
    rank_file(run, 1).unlink()
    first, *others = verdict_of(run)["findings"]
    assert first["what"] == "rank_00001.jsonl is missing" and first["ranks"] == [1]
    assert {(f["what"], tuple(f["ranks"])) for f in others} == {("router calls", (1,))}


def test_a_file_cut_in_half_fails_from_the_step_where_it_ends(tmp_path):
    run = write_run(tmp_path / "run", range(10))
    path = rank_file(run, 1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 40])
    findings = verdict_of(run)["findings"]
    assert {(f["what"], tuple(f["ranks"])) for f in findings} == {("router calls", (1,))}
    assert {f["step"] for f in findings} == {5, 6, 7, 8, 9}


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


@pytest.mark.parametrize("behind", ["metrics.jsonl", "steps.jsonl", "rank_00001.jsonl"])
def test_steps_that_end_while_the_evidence_is_read_are_no_fault(tmp_path, monkeypatch, behind):
    """The job writes on when the audit has come to the end of one of its files."""
    run = write_run(tmp_path / "run", range(6))
    files = [*(run / "evidence").glob("*.jsonl"), run / "metrics.jsonl"]
    whole = {path: path.read_text() for path in files}
    for path, text in whole.items():
        lines = text.splitlines(keepends=True)
        ended = sum(json.loads(line)["step"] < 3 for line in lines)
        path.write_text("".join(lines[:ended]) + "".join(lines[ended:])[:20])

    def read_while_it_grows(path, *args):
        torn = False
        try:
            for line in read_lines(path, *args):
                torn = line.torn
                yield line
        finally:
            if torn and path.name == behind:
                for each, text in whole.items():
                    each.write_text(text)

    monkeypatch.setattr("r3train.audit.audit_run.read_lines", read_while_it_grows)
    audit = audit_run(run)
    assert audit.verdict == "passed", audit.findings
    assert audit.numbers["steps"] == (6 if behind == "metrics.jsonl" else 3)
    noted = "steps 3..5 ended while the evidence was read" in str(audit.notes)
    assert noted == (behind != "metrics.jsonl")
    assert sum("rank_00001.jsonl ends within a line" in n for n in audit.notes) <= 1
    assert audit_run(run).numbers["steps"] == 6


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
    assert {" ".join(w.split()[:3]) for w in whats} >= {
        "rank_00000.jsonl line 1:",
        "rank_00000.jsonl line 2:",
        "rank_00000.jsonl line 21:",
    }


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
    assert "0 rows" not in result.output
    assert verdict_of(tmp_path)["numbers"] == {}


@pytest.mark.parametrize("loss", ["emptied", "removed"])
def test_why_there_is_no_evidence_is_true_of_a_run_that_was_judged(tmp_path, loss):
    run = write_run(tmp_path / "run")
    for path in list((run / "evidence").iterdir()):
        path.write_text("")
        if loss == "removed":
            path.unlink()
    result = check(run)
    text = " ".join(result.output.split())
    assert result.exit_code == 3 and "ended before" not in text
    assert "metrics.jsonl has steps 0..2 and evidence/ no verdict" in text


def test_a_run_without_one_recorded_row_is_no_evidence(tmp_path):
    run = write_run(tmp_path / "run", range(0))
    assert check(run).exit_code == 3  # empty rank files
    assert "no evidence" in check(run).output


def test_wrong_usage_has_a_code_of_its_own(tmp_path):
    assert check().exit_code == 2
    assert check(tmp_path / "nowhere").exit_code == 2


def test_markdown_for_a_pull_request_names_the_place(tmp_path):
    run = write_run(tmp_path / "run")
    edit(run, 1, lambda records: [_altered(r) if _is_the_one(r) else r for r in records])
    file = tmp_path / "summary.md"
    check(run, "--markdown", file)
    text = file.read_text()
    assert text.startswith("### R3 evidence: failed: 1 finding\n")
    assert "| step 1, rank 1, train/replay_forward, layer 2 | route fingerprint |" in text
    assert check(run, "--markdown", "-").output == text


def test_memory_does_not_grow_with_the_number_of_records(tmp_path, caplog, monkeypatch):
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
    assert peak(250) - peak(50) < 200 * 2000


def test_a_threshold_that_is_given_replaces_the_runs_own_and_its_verdict_by_it(tmp_path):
    def drifted(r):
        here = r.step == 1 and r.layer_number == 2
        return replace(r, rows_mismatch=5, rows_overlap=5) if here else r

    run = write_run(tmp_path / "run", change=drifted)  # fails its own 0.02 at step 1
    audit = verdict_of(run)
    assert audit["claims"]["applied"] == audit["claims"]["covered"] == "passed"
    assert audit["claims"]["agreement"] == "failed"
    result = check(run, "--r3-mismatch-threshold", "0.5", "--json")
    (loose,) = json.loads(result.output)["audits"]
    assert result.exit_code == 0, loose["findings"]
    assert any("steps 1 failed under the run's own threshold" in note for note in loose["notes"])
    assert check(run, "--r3-mismatch-threshold", "0.04").exit_code == 1
    assert check(run, "--r3-mismatch-threshold", "nan").exit_code == 2
    # what else the run found still counts
    steps = run / "evidence" / "steps.jsonl"
    place = {"replay_pass": "train", "stage": "replay_forward", "layer_number": 2}
    recorded = [{**place, "what": "fingerprint", "got": 1, "expected": 2}]
    steps.write_text(
        steps.read_text()
        .replace('"failures": []', f'"failures": {json.dumps(recorded)}')
        .replace('"passed": true', '"passed": false')
    )
    found = audit_run(run, threshold=0.5).findings
    assert {(f.claim, f.step) for f in found} == {("applied", 0), ("applied", 1)}


def test_a_threshold_error_that_the_records_do_not_show_is_of_the_agreement(tmp_path):
    run = write_run(tmp_path / "run")
    steps = run / "evidence" / "steps.jsonl"
    text = steps.read_text().replace('"passed": true', '"passed": false', 1)
    steps.write_text(text.replace('"threshold_error": null', '"threshold_error": "R3 tokens"', 1))
    (only,) = verdict_of(run)["findings"]
    assert only["claim"] == "agreement" and "judged it failed (R3 tokens)" in only["what"]


@pytest.mark.parametrize("wrong", [True, False], ids=["failed", "passed"])
def test_a_summary_that_cannot_be_written_is_neither_a_pass_nor_a_failure(tmp_path, wrong):
    run = write_run(tmp_path / "run")
    if wrong:
        rank_file(run, 1).unlink()
    file = tmp_path / "nowhere" / "r3.md"
    result = check(run, "--markdown", file)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert f"{file}: cannot write: No such file or directory" in result.output
    assert ("failed: 19 findings" if wrong else "passed: 3 steps") in result.output


def test_few_of_the_planned_steps_are_told_and_can_be_asked_for(tmp_path):
    run = write_run(tmp_path / "run")
    config = run / "config.toml"
    config.write_text(config.read_text() + "[rollout]\nnum_rollout = 500\n")
    result = check(run)
    assert result.exit_code == 0 and "3 of the 500 steps of the configuration" in result.output
    assert check(run, "--min-steps", "3").exit_code == 0
    result = check(run, "--min-steps", "4")
    assert result.exit_code == 1 and "is 3, expected 4 at least" in result.output
    config.write_text(config.read_text().replace("500", "3"))
    assert not audit_run(run).notes


@pytest.mark.parametrize("line", ["garbage", '{"step": "1"}', '{"step": -1}', '{"loss": 1}'])
def test_metrics_that_cannot_be_read_fail_with_their_line(tmp_path, line):
    run = write_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([lines[0], line + "\n", *lines[2:]]))
    (only,) = verdict_of(run)["findings"]
    assert only["what"].startswith("metrics.jsonl line 2: ") and only["claim"] == "covered"


def test_metrics_that_end_within_a_line_are_those_of_a_killed_run(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ti')
    audit = audit_run(run)
    assert audit.verdict == "passed"
    assert audit.notes == ["metrics.jsonl ends within a line: its writer was stopped"]


def test_the_threshold_is_judged_on_rows_of_the_actors_own_version(tmp_path):
    """As many mismatching rows pass with a note where older weights computed them."""

    def mismatching(own: int):
        def change(r):
            here = r.step == 1 and r.layer_number == 2 and r.replay_pass == "old_log_prob"
            if not here:
                return r
            equal = CURRENT_ROWS[r.replay_pass] - own
            return replace(
                r,
                rows_equal=90,
                rows_overlap=0,
                rows_mismatch=10,
                rows_current_equal=equal,
                rows_current_mismatch=own,
            )

        return change

    stale = write_run(tmp_path / "stale", change=mismatching(1), versions=True)  # of 50 own rows
    result = check(stale)
    assert result.exit_code == 0, result.output
    assert "steps 1 many rows of older weight versions" in " ".join(result.output.split())
    assert "of the actor's own weight version 0.222%, of others 3.778%" in result.output
    line = json.loads((stale / "evidence" / "steps.jsonl").read_text().splitlines()[1])
    assert line["passed"] and "R3 staleness: 18 of 100 rows at step 1" in line["stale_warning"]
    assert line["counts"]["rows_current"] == 2 * 3 * (50 + 30)
    shares = line["agreement"]
    assert shares["current_mismatch"] == 2 / 300 and shares["stale_mismatch"] == 22 / 300

    own = write_run(tmp_path / "own", change=mismatching(2), versions=True)
    (found,) = verdict_of(own)["findings"]
    assert (
        "R3 mismatch tokens (4) > threshold (2) at step 1"
        in (own / "evidence/steps.jsonl").read_text()
    )
    assert found["claim"] == "agreement" and found["step"] == 1 and found["layer_number"] == 2
    assert "actor's own weight version" in found["what"] and found["got"] == "4"
    assert check(own, "--r3-mismatch-threshold", "0.04").exit_code == 0


def test_rows_that_nobody_counted_as_the_actors_own_are_not_covered(tmp_path):
    """A threshold over rows that were not found proves nothing."""

    def unseen(r):
        return replace(r, rows_current=0, rows_current_equal=0, rows_current_mismatch=0)

    run = write_run(tmp_path / "run", change=unseen, versions=True)
    found = verdict_of(run)["findings"]
    assert {f["claim"] for f in found} == {"covered"}
    assert found[0]["what"] == "rows of the weight version that the actor holds"
    assert (found[0]["got"], found[0]["expected"]) == ("0", "100")
    run = write_run(
        tmp_path / "more", change=lambda r: replace(r, rows_current_equal=91), versions=True
    )
    assert any("than rows in total" in f["what"] for f in verdict_of(run)["findings"])
