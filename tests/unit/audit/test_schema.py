"""Lines that contradict themselves are refused with their file and line."""

from __future__ import annotations

import json

import pytest

from r3train.audit.audit_run import audit_run
from r3train.audit.evidence_schema import RECORDS, STEPS
from r3train.proof.writer import rank_file, STEPS_FILE
from tests.unit.evidence_dirs import write_run

FAILURE = {
    "replay_pass": "train",
    "stage": "replay_forward",
    "layer_number": 1,
    "what": "num_calls",
    "got": 0,
    "expected": 1,
}


def put(*path, value):
    """A change of a line: ``value`` at the place named from its outside in; ... takes it away."""

    def change(line: dict) -> None:
        for key in path[:-1]:
            line = line[key]
        if value is ...:
            del line[path[-1]]
        else:
            line[path[-1]] = value

    return change


def kept(current):
    def change(line: dict) -> None:
        for of in line["expected_calls"].values():
            of["sampling_mask"] = {"3": 1}
        line["expected_masks_current"] = current

    return change


def kept_once(line: dict) -> None:
    line["expected_calls"]["train"]["sampling_mask"] = {"3": 1}


def more_layers(line: dict) -> None:
    line["expected_calls"]["train"]["replay_backward"]["9"] = 1


def older(line: dict) -> None:
    """All that earlier programs did not write is missing at once."""
    for name in ("expected_rows_current", "keep_score_ratio", "rows_never_computed"):
        del line[name]
    for name in [n for n in line["counts"] if n.startswith(("rows_current", "dropped"))]:
        del line["counts"][name]
    del line["counts"]["slots_dropped"], line["counts"]["rows_dropped"]


def many_experts(line: dict) -> None:
    line["topk"] = line["num_experts"]


STEP_LINES = {
    "as it was": (lambda line: None, ""),
    "of an earlier program": (older, ""),
    "top-k of all experts": (many_experts, ""),
    "more top-k than experts": (put("topk", value=9), "topk is 9, expected at most 8"),
    "a layer too few": (
        put("expected_rows_filled", "1", value=...),
        "expected_rows_filled has not the layers",
    ),
    "a pass too few": (put("passes", value=["train"]), "expected_calls has not the passes"),
    "current rows of a pass too few": (
        put("expected_rows_current", "train", value=...),
        "expected_rows_current has not the passes",
    ),
    "sampling masks of a pass too few": (
        kept({"train": 1}),
        "expected_masks_current has not the passes",
    ),
    "sampling masks": (kept({"train": 1, "old_log_prob": 0}), ""),
    "sampling masks that nobody counted": (kept(None), "expected_masks_current is missing"),
    "sampling masks of one pass that nobody counted": (
        kept_once,
        "expected_masks_current is missing",
    ),
    "no ratio": (put("keep_score_ratio", value=...), "give all of them or none"),
    "no current rows": (put("expected_rows_current", value=...), "give all of them or none"),
    "a count too few": (put("counts", "dropped_off", value=...), "give all of them or none"),
    "a stage too few": (
        put("expected_calls", "train", "replay_backward", value=...),
        "has not both stages",
    ),
    "calls of a layer without fingerprint": (more_layers, "or layers without fingerprint"),
    "passed next to a failure": (put("failures", value=[FAILURE]), "passed is true next to"),
    "passed next to a threshold's error": (put("threshold_error", value="x"), "passed is true"),
    "passed next to an untrue sample": (
        put(
            "sampling", value={"verdict": "failed", "parts": 1, "missed": 0, "failures": [FAILURE]}
        ),
        "passed is true next to failures",
    ),
    "passed next to a true sample": (
        put("sampling", value={"verdict": "passed", "parts": 1, "missed": 0, "failures": []}),
        "",
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), range(2), versions=True)


@pytest.mark.parametrize("name", STEP_LINES)
def test_a_verdict_that_contradicts_itself_is_refused(name, run):
    change, error = STEP_LINES[name]
    line = json.loads((run / "evidence" / STEPS_FILE).read_text().splitlines()[0])
    line.setdefault("expected_masks_current", None)
    change(line)
    if not error:
        assert STEPS.decode(json.dumps(line)).step == 0
        return
    with pytest.raises(ValueError, match=error):
        STEPS.decode(json.dumps(line))


@pytest.mark.parametrize(
    "name", ["rows_current", "rows_current_equal", "slots_dropped", "rows_dropped", "dropped_off"]
)
def test_a_record_tells_versions_or_does_not(name, run):
    record = json.loads(rank_file(run, 0).read_text().splitlines()[0])
    assert RECORDS.decode(json.dumps(record)).rows_current is not None
    with pytest.raises(ValueError, match="rows_current, .*: give all of them or none"):
        RECORDS.decode(json.dumps({k: v for k, v in record.items() if k != name}))
    later = ("rows_current", "rows_dropped", "slots_dropped", "dropped_off")
    old = {k: v for k, v in record.items() if not k.startswith(later)}
    assert RECORDS.decode(json.dumps(old)).rows_current is None


@pytest.mark.parametrize("value", [7, None, "7", "0x", "0xg", "0X7", "0x" + 17 * "1"])
def test_a_fingerprint_is_64_bits_in_hexadecimal(value, run):
    record = json.loads(rank_file(run, 0).read_text().splitlines()[0])
    with pytest.raises(ValueError, match="Expected 64 bits in hexadecimal"):
        RECORDS.decode(json.dumps(record | {"fingerprint": value}))
    most = RECORDS.decode(json.dumps(record | {"fingerprint": "0x" + 16 * "f"}))
    assert most.fingerprint == (1 << 64) - 1


def test_blank_lines_are_left_out_and_the_error_names_the_line_and_the_value(tmp_path):
    run = write_run(tmp_path, range(2), versions=True)
    path = rank_file(run, 1)
    lines = path.read_text().splitlines()
    path.write_text("\n \n" + "\n\n".join(lines) + "\n\t\n")
    assert audit_run(run).verdict == "passed"
    lines[2] = lines[2].replace('"rows_filled": 4', '"rows_filled": -4')
    path.write_text("\n" + "\n".join(lines) + "\n")
    found = [f.what for f in audit_run(run).findings if f.what.startswith(path.name)]
    assert len(found) == 1
    assert found[0].startswith("rank_00001.jsonl line 4: ") and found[0].endswith(", got -4")
