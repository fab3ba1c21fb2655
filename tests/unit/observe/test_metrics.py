import json
import math

import numpy as np
import pytest
import torch

from r3train.observe.metrics import MetricsWriter, numbers, read_metrics, summarise


def test_a_step_is_one_line_that_is_there_at_once(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"rollout/reward_mean": 0.25, "r3/passed": True})
        assert len(writer.path.read_text().splitlines()) == 1
        writer.write(1, {"rollout/reward_mean": 0.5, "note": "warm", "train/kl": None})
    first, second = read_metrics(tmp_path)
    assert (first["step"], first["rollout/reward_mean"], first["r3/passed"]) == (0, 0.25, True)
    assert (second["step"], second["note"], second["train/kl"]) == (1, "warm", None)


def test_numpy_and_torch_scalars_are_written_as_numbers(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(
            np.int64(3),
            {
                "a": np.float32(0.5),
                "b": torch.tensor(7),
                "c": np.bool_(True),
                "d": torch.tensor(2.5),
            },
        )
    (record,) = read_metrics(tmp_path)
    assert {k: record[k] for k in "abcd"} == {"a": 0.5, "b": 7, "c": True, "d": 2.5}


def test_numbers_that_are_not_finite_stay_readable_by_any_json_parser(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(0, {"train/loss": math.nan, "hi": math.inf, "lo": torch.tensor(-math.inf)})

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(writer.path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["train/loss"])
    assert (record["hi"], record["lo"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, np.zeros(2), torch.zeros(2), object()])
def test_a_value_that_is_no_scalar_is_refused_by_name_and_leaves_no_half_line(tmp_path, value):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(ValueError, match="'train/bad'"):
            writer.write(0, {"fine": 1.0, "train/bad": value})
        assert writer.path.read_text() == ""


def test_the_writers_own_keys_cannot_be_overwritten(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(ValueError, match="'step'"):
            writer.write(0, {"step": 7})


@pytest.mark.parametrize("tail", [b'{"step": 1, "a', b'{"step": 1, "a": 2}', b'{"s": "\xc3'])
def test_a_truncated_last_line_is_left_out_and_cut_off_by_a_resumed_run(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1}\n' + tail)
    assert [r["step"] for r in read_metrics(path)] == [0]
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"a": 5})
    assert [(r["step"], r["a"]) for r in read_metrics(path)] == [(0, 1), (1, 5)]


@pytest.mark.parametrize("line", ["{oops", "[1, 2]", '{"a": 1}', "", "[" * 100_000, "9" * 5000])
def test_a_bad_line_in_the_middle_is_an_error_with_file_and_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + '\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_of_two_lines_for_one_step_the_later_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "a": 1}\n{"step": 1, "a": 2}\n{"step": 1, "a": 3}\n')
    assert [(r["step"], r["a"]) for r in read_metrics(path)] == [(0, 1), (1, 3)]


def test_tensorboard_holds_the_numbers_under_the_same_keys(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in range(3):
            writer.write(step, {"rollout/reward_mean": step / 2, "r3/passed": True, "note": "text"})
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"rollout/reward_mean", "r3/passed"}
    rewards = events.Scalars("rollout/reward_mean")
    assert [(e.step, e.value) for e in rewards] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_without_tensorboard_no_directory_appears(tmp_path):
    MetricsWriter(tmp_path, tensorboard=False).close()
    assert not (tmp_path / "tensorboard").exists()


def test_numbers_skips_steps_where_the_key_is_missing():
    records = [{"step": 0, "a": 1}, {"step": 1}, {"step": 2, "a": True}, {"step": 3, "a": None}]
    assert numbers(records, "a") == ([0, 2], [1.0, 1.0])


def test_the_summary_compares_the_first_tenth_with_the_last():
    records = [
        {"step": i, "rollout/reward_mean": i / 20, "rollout/tokens": 10, "r3/passed": True}
        for i in range(20)
    ]
    assert summarise(records) == {
        "steps": 20,
        "reward_first": pytest.approx(0.025),
        "reward_last": pytest.approx(0.925),
        "tokens": 200,
        "r3": "passed",
        "failed_steps": [],
    }


@pytest.mark.parametrize(
    "verdicts, expected, failed",
    [
        ([True, True], "passed", []),
        ([True, False], "failed", [1]),
        ([None, False], "failed", [1]),
        ([True, None], "incomplete", []),
        ([None, None], "no evidence", []),
        ([], "no evidence", []),
    ],
)
def test_the_r3_verdict_never_takes_silence_for_a_pass(verdicts, expected, failed):
    records = [
        {"step": i, **({} if verdict is None else {"r3/passed": verdict})}
        for i, verdict in enumerate(verdicts)
    ]
    summary = summarise(records)
    assert (summary["r3"], summary["failed_steps"]) == (expected, failed)
