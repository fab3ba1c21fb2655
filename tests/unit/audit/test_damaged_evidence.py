"""Evidence that was damaged gets a verdict with file and line: no traceback, no pass, no memory."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.audit import evidence_schema
from r3train.audit.audit_run import Audit, audit_run
from r3train.proof.writer import EvidenceWriter, rank_file
from tests.unit.evidence_dirs import edit, write_run


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def check(*args: object):
    return CliRunner().invoke(main, ["check-evidence", *map(str, args)])


def edit_steps(run: Path, change) -> None:
    path = run / "evidence" / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


def failed(run: Path) -> list[str]:
    """Findings of a run that must fail, asked for as a table and as JSON."""
    table = check(run)
    assert table.exit_code == 1 and "Traceback" not in table.output, table.output
    result = check(run, "--json")
    out = json.loads(result.output)
    assert result.exit_code == 1 and out["verdict"] == "failed"
    return [f["what"] for f in out["audits"][0]["findings"]]


STEP_DAMAGES = [
    ({"passes": 1e25}, "Expected `array`, got `float` - at `$.passes`"),
    ({"passes": []}, "Expected `array` of length >= 1"),
    ({"topk": 9}, "topk is 9, expected at most 8"),
    ({"expected_rows_filled": {"1": 4}}, "has not the layers"),
    ({"expected_fingerprints": {"1000000000": "0x1"}}, "Expected `int` <= 4096"),
    ({"expected_calls": {"train": {}}}, "has not the passes"),
    ({"step": True}, "Expected `int`, got `bool` - at `$.step`"),
    ({"world_size": 10**30}, "at `$.world_size`, got 1000"),
    ({"mismatch_threshold": "0.1"}, "Expected `float`, got `str`"),
    ({"failures": [{}]}, "missing required field `replay_pass`"),
    ({"threshold_error": "x"}, "passed is true next to failures"),
    ({"counts": None}, "Expected `object`, got `null` - at `$.counts`"),
]
RECORD_DAMAGES = [
    ({"rows_padding": 1e25}, "Expected `int`, got `float` - at `$.rows_padding`"),
    ({"rows_native": False}, "Expected `int`, got `bool` - at `$.rows_native`"),
    ({"map_sum": -1}, "Expected `int` >= 0 - at `$.map_sum`, got -1"),
    ({"fingerprint": "-0x1"}, "Expected 64 bits in hexadecimal (0x...), got '-0x1'"),
    ({"replay_pass": "other"}, "Invalid enum value 'other'"),
    ({"rank": 0}, "rank is 0, expected 1, whose file this is"),
    ({"layer_number": 0}, "Expected `int` >= 1 - at `$.layer_number`, got 0"),
    ({"attempt": "x" * 101}, "at `$.attempt`, got 'xxx"),
]


@pytest.mark.parametrize(
    "name, changes, message",
    [("steps.jsonl", *damage) for damage in STEP_DAMAGES]
    + [("rank_00001.jsonl", *damage) for damage in RECORD_DAMAGES],
)
def test_a_damaged_line_is_named_with_file_line_got_and_expected(tmp_path, name, changes, message):
    run = write_run(tmp_path / "run")
    path = run / "evidence" / name
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = json.dumps({**json.loads(lines[1]), **changes}) + "\n"
    path.write_text("".join(lines))
    (found,) = [what for what in failed(run) if what.startswith(f"{name} line 2: ")]
    assert message in found


@pytest.mark.parametrize("name", ["steps.jsonl", "rank_00001.jsonl"])
def test_a_whole_line_that_is_refused_is_not_excused_as_torn(tmp_path, name):
    """No kill leaves a whole JSON object, with or without the end of its line."""
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    path = run / "evidence" / name
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, json.dumps({**json.loads(last), "step": "2"})]))
    assert any(f"{name} line {len(lines) + 1}: Expected `int`" in what for what in failed(run))
    path.write_text("".join([*lines, last[: len(last) // 2]]))
    assert check(run).exit_code == (0 if name == "steps.jsonl" else 1)


def test_a_step_number_out_of_the_way_is_a_gap_and_takes_no_memory(tmp_path):
    run = write_run(tmp_path / "run")
    edit_steps(run, lambda line: {**line, "step": 1 << 39} if line["step"] == 2 else line)
    assert any(f"no evidence of steps 2..{(1 << 39) - 1}" in what for what in failed(run))


def test_what_is_no_file_and_a_settings_file_of_another_shape_are_told(tmp_path):
    run = write_run(tmp_path / "run")
    rank_file(run, 0).unlink()
    rank_file(run, 0).mkdir()
    assert any("rank_00000.jsonl line 1: cannot be read" in what for what in failed(run))
    run = write_run(tmp_path / "settings")
    (run / "config.toml").write_text("replay = 3\n")
    assert check(run).exit_code == 0  # what was checked is in the evidence itself
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text("replay = 3\n")
    assert check(tmp_path / "empty").exit_code == 3


def test_a_line_without_an_end_in_sight_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_schema, "_MAX_LINE", 5000)
    run = write_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    metrics.write_text("x" * 20_000 + "\n" + metrics.read_text())
    assert failed(run) == ["metrics.jsonl line 1: longer than 5000 bytes"]


@pytest.mark.parametrize(
    "keys",
    [
        ("expected_rows_replayed", "expected_rows_filled"),
        ("expected_calls",),
        ("counts",),
    ],
)
def test_steps_without_what_they_must_be_judged_by_never_pass(tmp_path, keys):
    """Counts that are compared with themselves prove no coverage."""
    run = write_run(tmp_path / "run")
    edit_steps(run, lambda line: {k: v for k, v in line.items() if k not in keys})
    whats = failed(run)
    for number in (1, 2, 3):
        assert any(f"steps.jsonl line {number}" in w and f"field `{keys[0]}`" in w for w in whats)


@pytest.mark.parametrize("name", ["rows_equal", "control_layer_minus"])
def test_records_that_are_not_what_the_run_counted_then_fail(tmp_path, name):
    run = write_run(tmp_path / "run")
    more = {name: 50, **({"rows_overlap": 49} if name == "rows_equal" else {})}
    edit(run, 1, lambda rs: [{**r, **more} if i == 0 else r for i, r in enumerate(rs)])
    assert any(f"{name} of the step's records" in what for what in failed(run))


def test_five_million_lines_of_garbage_would_take_no_memory(tmp_path):
    run = write_run(tmp_path / "run")

    def peak(lines: int) -> tuple[int, Audit]:
        with rank_file(run, 1).open("a") as file:
            file.write('{"step": 1}\ngarbage\n' * (lines // 2))
        tracemalloc.start()
        audit = audit_run(run)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert audit.verdict == "failed" and audit.num_findings >= lines
        return most, audit

    first, _ = peak(1000)
    most, audit = peak(6000)
    # a text of each would take 1 MB
    assert most < first + 200_000
    assert (len(audit.findings), audit.num_findings) == (1000, 7000)
    assert audit.findings[0].what.startswith("rank_00001.jsonl line 19: ")


def test_steps_and_places_that_nobody_knows_take_no_memory(tmp_path):
    run = write_run(tmp_path / "run")
    odd = json.loads(rank_file(run, 0).read_text().splitlines()[-1])

    def peak(count: int) -> int:
        with rank_file(run, 0).open("a") as file:
            for i in range(count):
                file.write(json.dumps({**odd, "step": 3 + i, "attempt": f"{i}"}) + "\n")
                file.write(json.dumps({**odd, "replay_pass": f"pass {i}"}) + "\n")
        tracemalloc.start()
        assert audit_run(run).verdict == "failed"
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    first = peak(1500)
    assert peak(3500) < first + 200_000


def test_a_writer_that_goes_on_reads_the_end_of_its_file_alone(tmp_path):
    path = rank_file(tmp_path, 0)
    path.parent.mkdir()
    with path.open("w") as file:
        file.write(f'{{"text": "{"x" * 990}"}}\n' * 20_000 + '{"step": 1')
    whole = path.read_bytes().rfind(b"\n") + 1
    tracemalloc.start()
    EvidenceWriter(tmp_path, 0).close()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size == whole
    assert most < 1_000_000  # of 20 MB


def test_a_rank_without_experts_is_not_blamed_for_another_that_was_cut(tmp_path):
    """Rank 2 holds no layer with experts: its file is empty from the start."""
    run = write_run(tmp_path / "run", range(10))
    edit_steps(run, lambda line: {**line, "world_size": 3})
    rank_file(run, 2).touch()
    assert audit_run(run).verdict == "passed"
    edit(run, 1, lambda rs: [r for r in rs if r["step"] < 5])
    found = audit_run(run).findings
    assert {(f.ranks, f.step) for f in found} == {((1,), step) for step in range(5, 10)}
    # where nobody else can have made the missing calls, the empty file is named
    run = write_run(tmp_path / "emptied")
    rank_file(run, 1).write_text("")
    assert {(f.ranks, f.step) for f in audit_run(run).findings} == {((1,), n) for n in range(3)}


@pytest.mark.parametrize(
    "changes, what, got",
    [
        ({"replay_idx_sum": 0}, "sum of the expert ids", "110"),
        ({"replay_idx_sum": 109}, "sum of the expert ids", "1"),
        ({"replay_idx_sum": 1431}, "sum of the expert ids", "1"),
        ({"topk": 1, "map_sum": 110}, "top-k of a call", "1"),
        ({"topk": 3, "map_sum": 330}, "top-k of a call", "1"),
    ],
)
def test_values_of_a_call_that_two_distinct_experts_a_row_cannot_have_fail(
    tmp_path, changes, what, got
):
    run = write_run(tmp_path / "run")
    edit(run, 1, lambda rs: [{**r, **changes} for r in rs])
    failed(run)
    audit = audit_run(run)
    (first, *_) = [f for f in audit.findings if what in f.what]
    assert (first.step, first.ranks, first.layer_number) == (0, (1,), 1)
    assert (first.got, first.expected) == (got, "0") and first.claim == "covered"


def test_a_rank_that_holds_padding_alone_passes(tmp_path):
    """As a data-parallel rank without a sample: padding takes distinct experts like any row."""
    alone = dict.fromkeys(("rows_replayed", "rows_filled", "rows_equal", "rows_overlap"), 0)
    run = write_run(tmp_path / "run", range(1), ranks=1)
    edit_steps(run, lambda line: {**line, "world_size": 2, "expected_calls": _doubled(line)})
    records = [json.loads(line) for line in rank_file(run, 0).read_text().splitlines()]
    none = {**alone, "rows_mismatch": 0, "rows_padding": 110, "fingerprint": "0x0", "rank": 1}
    none |= {name: 0 for name in records[0] if name.startswith("control_")}
    edit_steps(run, lambda line: {**line, "counts": _with_rank_of_padding(line["counts"])})
    rank_file(run, 1).write_text("".join(json.dumps({**r, **none}) + "\n" for r in records))
    assert audit_run(run).verdict == "passed", audit_run(run).findings


def _doubled(line: dict) -> dict:
    return {
        p: {s: {n: 2 * c for n, c in of.items()} for s, of in stages.items()}
        for p, stages in line["expected_calls"].items()
    }


def _with_rank_of_padding(counts: dict) -> dict:
    calls = {name: 2 * counts[name] for name in ("num_calls", "num_calls_expected")}
    return {**counts, **calls, "rows_padding": counts["rows_padding"] + 6 * 110}


def test_what_a_damaged_record_says_reaches_neither_terminal_nor_table_as_a_command(tmp_path):
    odd = "a|b\x1b]0;title\x07\r\n\u202e<img>`"
    run = write_run(tmp_path / "run\x1b[2J")
    edit(run, 1, lambda rs: [{**r, "replay_pass": odd} if i == 7 else r for i, r in enumerate(rs)])
    edit_steps(
        run,
        lambda line: {
            **line,
            "passed": False,
            "failures": [{"replay_pass": odd, "stage": odd, "layer_number": odd, "what": odd}],
            "threshold_error": odd,
            "attempt": odd if line["step"] == 2 else line["attempt"],
        },
    )
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
