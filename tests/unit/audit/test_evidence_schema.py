"""A line that no run writes is refused with file, line and value, and so is another version's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from r3train.audit.evidence_schema import (
    EvidenceError,
    METRICS,
    read_lines,
    RECORDS,
    RECHECKS,
    STEPS,
)
from r3train.config import files
from r3train.proof.step_verdict import EVIDENCE_VERSION
from tests.unit.evidence_dirs import comparison, write_run

RANK, OF_STEPS, RECHECKED = (
    "evidence/rank_00001.jsonl",
    "evidence/steps.jsonl",
    "evidence/rechecked.jsonl",
)
DECODERS = {RANK: RECORDS, OF_STEPS: STEPS, RECHECKED: RECHECKS, "metrics.jsonl": METRICS}
GONE = object()


def of_stream(name: str, **change):
    """A change of what is expected of a stream."""

    def apply(line: dict) -> None:
        expected = line["streams"][name] | change
        line["streams"][name] = {k: v for k, v in expected.items() if v is not GONE}

    return apply


def with_stream(name: str, **change):
    """A second stream, of one layer."""

    def apply(line: dict) -> None:
        one, passes = {"1": 1}, line["passes"]
        line["streams"][name] = {
            "fingerprints": {"1": "0x1"},
            "rows_replayed": one,
            "rows_filled": one,
            "rows_without_choice": None,
            "rows_current": dict.fromkeys(passes, 0),
            "calls": {p: {"replay_forward": one, "replay_backward": {}} for p in passes},
        }
        of_stream(name, **change)(line)

    return apply


def layer_9(line: dict) -> None:
    line["streams"]["routes"]["calls"]["train"]["replay_backward"]["9"] = 1


def a_stage_less(line: dict) -> None:
    del line["streams"]["routes"]["calls"]["train"]["replay_backward"]


REFUSED = [
    (OF_STEPS, {"version": 1}, "steps.jsonl:2: evidence version 1, expected 5: judge it with the"),
    (
        OF_STEPS,
        {"version": EVIDENCE_VERSION + 1, "counts": GONE},
        f"evidence version {EVIDENCE_VERSION + 1}, expected",
    ),
    # the first lines of version 1 do not name it
    (OF_STEPS, {"version": GONE, "counts": GONE}, "evidence version 1, expected 5: judge it with"),
    (OF_STEPS, {"passes": 1e25}, "Expected `array`, got `float` - at `$.passes`"),
    (OF_STEPS, {"passes": []}, "Expected `array` of length >= 1"),
    (
        OF_STEPS,
        {"passes": ["train"]},
        "routes.calls is of ['old_log_prob', 'train'], expected ['tr",
    ),
    (OF_STEPS, {"topk": 9}, "topk is 9, expected at most 8, the experts"),
    (OF_STEPS, {"streams": {}}, "streams has no routes"),
    (
        OF_STEPS,
        of_stream("routes", rows_filled={"1": 4}),
        "routes.rows_filled is of [1], expected [",
    ),
    (OF_STEPS, of_stream("routes", rows_replayed={}), "routes.rows_replayed is of [], expected [1"),
    (OF_STEPS, of_stream("routes", rows_current={}), "routes.rows_current is of [], expected ['o"),
    (OF_STEPS, of_stream("routes", rows_current=GONE), "missing required field `rows_current`"),
    (OF_STEPS, of_stream("routes", fingerprints={"1000000000": "0x1"}), "Expected `int` <= 4096"),
    (OF_STEPS, of_stream("routes", calls={"train": {}}), "routes.calls is of ['train'], expected"),
    (OF_STEPS, layer_9, "routes.calls has layers [9] without fingerprint"),
    (OF_STEPS, a_stage_less, "routes.calls is of ['replay_forward'], expected ['replay_backward'"),
    (OF_STEPS, with_stream("other"), "Invalid enum value 'other'"),
    (OF_STEPS, with_stream("indexer"), "streams.indexer.rows_without_choice is missing"),
    (
        OF_STEPS,
        with_stream("sampling_mask", rows_current={}),
        "sampling_mask.rows_current is of []",
    ),
    (OF_STEPS, {"step": True}, "Expected `int`, got `bool` - at `$.step`"),
    (OF_STEPS, {"world_size": 10**30}, "at `$.world_size`, got 1000"),
    (OF_STEPS, {"mismatch_threshold": "0.1"}, "Expected `float`, got `str`"),
    (OF_STEPS, {"failures": [{}]}, "missing required field `replay_pass`"),
    (OF_STEPS, {"counts": None}, "Expected `object`, got `null` - at `$.counts`"),
    (OF_STEPS, {"counts": GONE}, "missing required field `counts`"),
    (RANK, {"rows_padding": 1e25}, "Expected `int`, got `float` - at `$.rows_padding`"),
    (RANK, {"rows_native": False}, "Expected `int`, got `bool` - at `$.rows_native`"),
    (RANK, {"map_sum": -1}, "Expected `int` >= 0 - at `$.map_sum`, got -1"),
    (RANK, {"rows_current": GONE}, "missing required field `rows_current`"),
    (RANK, {"replay_pass": "other"}, "Invalid enum value 'other'"),
    (RANK, {"layer_number": 0}, "Expected `int` >= 1 - at `$.layer_number`, got 0"),
    (RANK, {"stream": "other"}, "Invalid enum value 'other'"),
    (RANK, {"num_calls": 0}, "at `$.num_calls`, got 0"),
    (RANK, {"attempt": "x" * 101}, "at `$.attempt`, got 'xxx"),
    *(
        (RANK, {"fingerprint": value}, f"Expected 64 bits in hexadecimal (0x...), got {value!r}")
        for value in (7, None, "7", "-0x1", "0xg", "0X7", "0x" + 17 * "1")
    ),
    (RECHECKED, {"step": -1}, "at `$.step`, got -1"),
    (RECHECKED, {"decoded": GONE}, "missing required field `decoded`"),
    ("metrics.jsonl", {"step": "1"}, "Expected `int`, got `str` - at `$.step`"),
    ("metrics.jsonl", {"step": -1}, "at `$.step`, got -1"),
    *((file, text, "") for file in DECODERS for text in ("{", "[]", "null", "garbage", "")),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), rechecked=lambda step: [comparison(step)])


@pytest.mark.parametrize("file, change, message", REFUSED)
def test_a_line_that_no_run_writes_is_refused_with_its_file_and_number(
    run, tmp_path, file, change, message
):
    path, (first, second, *others) = tmp_path / Path(file).name, (run / file).read_text().split(
        "\n"
    )
    line = json.loads(second)
    if isinstance(change, dict):
        line = {k: v for k, v in {**line, **change}.items() if v is not GONE}
    elif callable(change):
        change(line)
    text = change if isinstance(change, str) else json.dumps(line)
    path.write_text("\n".join([first, text, *others]))
    with pytest.raises(EvidenceError) as refused:
        list(read_lines(path, DECODERS[file]))
    assert str(refused.value).startswith(f"{path.name}:2: ") and message in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: None,
        lambda line: line.update(topk=line["num_experts"]),
        with_stream("sampling_mask"),
        with_stream("indexer", rows_without_choice=1),
        of_stream("routes", rows_without_choice=None),
    ],
)
def test_a_verdict_as_runs_write_it_is_read(run, change):
    line = json.loads((run / OF_STEPS).read_text().splitlines()[0])
    change(line)
    assert STEPS.decode(json.dumps(line)).version == EVIDENCE_VERSION


def test_a_fingerprint_has_all_its_bits(run):
    line = json.loads((run / RANK).read_text().splitlines()[0]) | {"fingerprint": "0x" + 16 * "f"}
    assert RECORDS.decode(json.dumps(line)).fingerprint == (1 << 64) - 1


def test_a_last_line_that_a_writer_is_at_is_left_out_and_none_of_a_part(run, tmp_path):
    path = tmp_path / "rank_00001.jsonl"
    content = (run / RANK).read_bytes()
    path.write_bytes(content[:-9])
    assert len(list(read_lines(path, RECORDS))) == content.count(b"\n") - 1
    part = tmp_path / "rank_00001.00001.steps_0-2.jsonl.gz"
    part.write_bytes(gzip.compress(content[:-9]))
    with pytest.raises(EvidenceError, match=":18: the part ends within it"):
        list(read_lines(part, RECORDS))


def test_a_line_without_an_end_in_sight_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 5000)
    path = tmp_path / "metrics.jsonl"
    path.write_text("x" * 20_000 + "\n")
    with pytest.raises(EvidenceError, match="cannot be read: line 1 has more than 5000 bytes"):
        list(read_lines(path, METRICS))
