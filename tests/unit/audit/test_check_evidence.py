"""check-evidence: exit codes, and what it says for a person, a script and a pull request."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.audit import check_evidence
from r3train.audit.audit_run import audit_run
from r3train.proof.writer import rank_file
from tests.unit.evidence_dirs import edit, write_run

STEPS = "evidence/steps.jsonl"


def check(*args: object):
    return CliRunner().invoke(main, ["check-evidence", *map(str, args)])


def verdict_of(run_dir: Path) -> dict:
    result = check(run_dir, "--json")
    out = json.loads(result.output)
    codes = {"passed": 0, "failed": 1, "no evidence": 3}
    assert result.exit_code == codes[out["verdict"]]
    return out["audits"][0]


def altered(run: Path) -> Path:
    """One expert of one call of step 1."""

    def change(r: dict) -> dict:
        here = (r["step"], r["replay_pass"], r["layer_number"]) == (1, "train", 2)
        return {**r, "fingerprint": "0x1"} if here else r

    edit(run, 1, lambda records: list(map(change, records)))
    return run


def test_a_correct_run_passes_and_every_claim_says_on_what(tmp_path):
    result = check(write_run(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    for words in (
        "3,600 rows replayed, fingerprints re-added over 2 ranks",
        "36 of 36 calls; rows filled 144, padding 216, native 0, duplicate 0",
        "same experts in 90.00% of rows",
        "no sample was rechecked by its server",
        "passed: 3 steps, 36 router calls",
    ):
        assert words in result.output
    audit = verdict_of(tmp_path / "run")
    passed = dict.fromkeys(("applied", "covered", "agreement"), "passed")
    assert audit["claims"] == passed | {"recheck": "no evidence"} and not audit["notes"]
    assert audit["layer_agreement"] == {"1": 0.9, "2": 0.9, "3": 0.9}


def test_a_failure_names_its_place_and_quantity(tmp_path):
    run = altered(write_run(tmp_path / "run"))
    text = "failed step 1, train/replay_forward, layer 2: fingerprint is 0x"
    result = check(run)
    assert result.exit_code == 1 and text in result.output
    assert result.output.endswith("failed: 1 finding\n")


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


@pytest.mark.parametrize("named", [True, False])
def test_evidence_of_version_1_is_refused_by_name(tmp_path, named):
    """Its first files named no version; its records had no stream."""
    run = write_run(tmp_path / "run")

    def as_version_1(lines: list[dict]) -> list[dict]:
        lines = [
            {k: v for k, v in line.items() if k not in ("version", "streams")} for line in lines
        ]
        return [{"version": 1, **line} for line in lines] if named else lines

    edit(run, "evidence/steps.jsonl", as_version_1)
    text = "steps.jsonl:1: evidence version 1, expected 5: judge it with the release that wrote it"
    assert [finding["what"] for finding in verdict_of(run)["findings"]] == [text]
    assert check(run).exit_code == 1


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


def test_wrong_usage_has_a_code_of_its_own(tmp_path):
    assert check().exit_code == 2
    assert check(tmp_path / "nowhere").exit_code == 2


def test_markdown_for_a_pull_request_names_the_place(tmp_path):
    run = altered(write_run(tmp_path / "run"))
    file = tmp_path / "summary.md"
    check(run, "--markdown", file)
    text = file.read_text()
    assert text.startswith("### R3 evidence: failed: 1 finding\n")
    assert "| step 1, train/replay_forward, layer 2 | fingerprint | 0x" in text
    assert check(run, "--markdown", "-").output == text


def test_memory_does_not_grow_with_the_number_of_records(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)

    def peak(steps: int) -> int:
        run = write_run(tmp_path / str(steps), range(steps))
        tracemalloc.start()
        assert audit_run(run).numbers["num_calls"] == 12 * steps
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(5)  # imports
    # a step costs a few hundred bytes (index, metrics), its records of 7 KB cost nothing
    assert peak(250) - peak(50) < 200 * 2000


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


ODD = "a|b\x1b]0;title\x07\r\n\u202e<img>`"
PLACE = {
    "replay_pass": ODD,
    "stream": ODD,
    "stage": ODD,
    "layer_number": 2,
    "got": 1,
    "expected": 2,
}


@pytest.mark.parametrize(
    "file, changes",
    [
        ("evidence/rank_00001.jsonl", {"replay_pass": ODD}),
        (STEPS, {"passed": False, "failures": [{**PLACE, "what": ODD}], "threshold_error": ODD}),
    ],
)
def test_what_a_file_says_reaches_neither_terminal_nor_table_as_a_command(tmp_path, file, changes):
    run = write_run(tmp_path / "run\x1b[2J")
    edit(run, file, lambda lines: [{**line, **changes} for line in lines])
    for flags in ((), ("--markdown", "-")):
        result = check(run, *flags)
        assert result.exit_code == 1
        assert not any(c in result.output for c in "\x1b\x07\r\u202e"), repr(result.output)
        assert r"\x1b]0;title\x07" in result.output.replace("\\\\", "\\")
    rows = [line for line in result.output.splitlines() if line.startswith("| ")]
    assert len(rows) > 6 and any(r"a\|b" in row for row in rows)
    for row in rows:
        columns = row.replace(r"\|", "").count("|") - 1
        assert columns == (3 if rows.index(row) < 5 else 4), row
        assert "<img>" not in row.replace(r"\<", "")


def test_a_terminal_of_80_columns_breaks_facts_between_words(tmp_path, monkeypatch):
    audit = audit_run(write_run(tmp_path))
    whole = check_evidence.text_of(audit)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = check_evidence.text_of(audit).splitlines()
    assert max(len(click.unstyle(line)) for line in lines[1:]) <= 80
    assert len(lines) > len(whole.splitlines())
    assert " ".join(lines).split() == whole.split()
