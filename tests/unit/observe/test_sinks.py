"""Trackers: the real packages, offline or with a local store; one that fails does not end a run."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from r3train.config import RunConfig
from r3train.loop.step_metrics import samples_to_report
from r3train.observe.metrics import MetricsWriter, read_metrics
from r3train.observe.sinks import check_trackers, open_sinks
from r3train.types import TrainSample
from tests.unit.rewards.test_scoring import sample

SAMPLE = {
    "kind": "best",
    "prompt_id": "p:1",
    "prompt": "2 + 2",
    "label": ["4"],
    "text": "it | is\n4",
    "reward": 1.0,
}
_BLOCK = 32768
ROWS = [["best", "p:1", "2 + 2", '["4"]', "it | is\n4", 1.0]]
COLUMNS = ["kind", "prompt_id", "prompt", "label", "text", "reward"]


def config(tmp_path, **trackers) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"hf_checkpoint": "m"},
            "data": {"prompt_data": "p.jsonl", "rm_type": "math"},
            "rollout": {
                "num_rollout": 4,
                "rollout_batch_size": 1,
                "rollout_max_response_len": 8,
            },
            "checkpoint": {"save": str(tmp_path / "save")},
            "run": {"run_name": "here", "tensorboard": False},
            "trackers": trackers,
        }
    )


def write_run(settings, run_dir, steps, resumed_from=None) -> None:
    """One part of a run, with the metrics of each step, one evaluation and one sample."""
    sinks = open_sinks(settings, run_dir, resumed_from)
    with MetricsWriter(run_dir, tensorboard=False, sinks=sinks) as writer:
        for step in steps:
            writer.write(
                step, {"rollout/reward_mean": step / 8, "train/loss": math.nan, "r3/ok": "x"}
            )
            writer.write_samples(step, [SAMPLE])
        writer.write_evaluation(steps[-1] + 1, "held_out", "f", [], {"mean": 0.5})


@pytest.fixture
def wandb(monkeypatch):
    found = pytest.importorskip("wandb", reason="not run: wandb is not installed")
    monkeypatch.setenv("WANDB_DIR", "")
    return found


def offline_runs(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))


def records(path: Path) -> list:
    """All records of an offline run's file: a head of 7 bytes, then LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    content, place, parts, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if _BLOCK - place % _BLOCK < 7:  # no head of a record fits: the block ends in zeros
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def history(found: list) -> list[dict]:
    rows = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def test_wandb_offline_holds_numbers_samples_and_settings_and_goes_on_after_a_resume(
    wandb, tmp_path
):
    settings = config(
        tmp_path,
        use_wandb=True,
        wandb_mode="offline",
        wandb_project="proj",
        wandb_group="g",
        wandb_team="t",
        tracker_tags=["small", "first"],
        tracker_notes="a try",
    )
    write_run(settings, tmp_path / "first", [0, 1])
    # another run directory, from a checkpoint before the last step
    write_run(settings, tmp_path / "second", [1, 2], tmp_path / "save/iter_0000001")
    write_run(settings, tmp_path / "third", [0])  # a fresh start next to it
    (first,), (second,), (third,) = (
        offline_runs(tmp_path / name) for name in ("first", "second", "third")
    )
    assert first.name == second.name != third.name, "the resumed run has the same id"
    found = records(first)
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.entity, run.display_name) == ("proj", "g", "t", "here")
    assert (sorted(run.tags), run.notes) == (["first", "small"], "a try")
    kept = {item.key: item.value_json for item in run.config.update}
    assert json.loads(kept["data"])["rm_type"] == "math"
    rows = history(found)
    means = [(r["step"], r["rollout/reward_mean"]) for r in rows if "rollout/reward_mean" in r]
    assert means == [(0, 0.0), (1, 0.125)]
    assert [(r["step"], r["eval/held_out/mean"]) for r in rows if "eval/held_out/mean" in r] == [
        (2, 0.5)
    ]
    tables = list(first.parent.glob("files/media/table/*.table.json"))
    assert len(tables) == 2
    assert json.loads(tables[0].read_text()) == {"columns": COLUMNS, "data": ROWS} | {
        key: value
        for key, value in json.loads(tables[0].read_text()).items()
        if key not in ("columns", "data")
    }
    again = history(records(second))
    started = [r["started"] for r in (*rows, *again) if r["step"] == 1 and "started" in r]
    assert len(started) == 2 and started[0] < started[1], "step 1 stands twice"
    assert [r["step"] for r in again if "rollout/reward_mean" in r] == [1, 2]


def test_mlflow_holds_numbers_samples_and_settings_and_goes_on_after_a_resume(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database
    from mlflow import tracking

    store = (tmp_path / "store").as_uri()
    settings = config(
        tmp_path,
        use_mlflow=True,
        mlflow_tracking_uri=store,
        mlflow_experiment_name="exp",
        tracker_tags=["small", "first"],
        tracker_notes="a try",
    )
    write_run(settings, tmp_path / "first", [0, 1])
    write_run(settings, tmp_path / "second", [1, 2], tmp_path / "save/iter_0000001")
    client = tracking.MlflowClient(store)
    experiment = client.get_experiment_by_name("exp").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.run_name == "here" and run.info.status == "FINISHED"
    assert run.data.params["data.rm_type"] == "math"
    tags = {"small": "", "first": "", "mlflow.note.content": "a try"}
    assert tags.items() <= run.data.tags.items()
    points = client.get_metric_history(run.info.run_id, "rollout/reward_mean")
    assert sorted({(point.step, point.value) for point in points}) == [
        (0, 0.0),
        (1, 0.125),
        (2, 0.25),
    ]
    started = client.get_metric_history(run.info.run_id, "started")
    assert len({point.value for point in started if point.step == 1}) == 2, "step 1 stands twice"
    assert client.get_metric_history(run.info.run_id, "train/loss") == []  # NaN alone
    assert client.get_metric_history(run.info.run_id, "eval/held_out/mean")[0].value == 0.5
    path = client.download_artifacts(run.info.run_id, "samples/000001.json", str(tmp_path))
    assert json.loads(Path(path).read_text()) == {"columns": COLUMNS, "data": ROWS}
    write_run(settings, tmp_path / "third", [0])
    assert len(client.search_runs([experiment])) == 2, "a fresh start is a new run"
    with pytest.raises(RuntimeError):
        with MetricsWriter(
            tmp_path / "fourth", False, open_sinks(settings, tmp_path / "fourth", None)
        ):
            raise RuntimeError("a crash")
    assert sorted(run.info.status for run in client.search_runs([experiment])) == [
        "FAILED",
        "FINISHED",
        "FINISHED",
    ]


def test_tensorboard_shows_the_samples(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write_samples(3, [SAMPLE])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3 and "| 2 + 2 |" in text and r"it \| is<br>4" in text


class Broken:
    """A tracker whose network went away."""

    def __init__(self):
        self.calls = 0

    def write(self, step, numbers):
        self.calls += 1
        raise ConnectionError("gone")

    write_samples = close = write


def test_a_tracker_that_fails_is_told_of_once_and_does_not_end_the_run(tmp_path, monkeypatch):
    broken, told = Broken(), []
    monkeypatch.setattr(
        "r3train.observe.metrics.logger.warning", lambda text, *values: told.append(text % values)
    )
    with MetricsWriter(tmp_path, tensorboard=False, sinks=[broken]) as writer:
        writer.write(0, {"a": 1.0})
        writer.write(1, {"a": 2.0})
    assert [record["a"] for record in read_metrics(tmp_path)] == [1.0, 2.0]
    assert broken.calls == 1
    assert told == ["Broken gets nothing more of this run: gone"]


@pytest.mark.parametrize("crash", [None, RuntimeError("a crash")])
def test_a_tracker_is_told_whether_the_run_failed(crash, tmp_path):
    closed = []

    class Told(Broken):
        def close(self, failed):
            closed.append(failed)

    with contextlib.suppress(RuntimeError):
        with MetricsWriter(tmp_path, tensorboard=False, sinks=[Told()]):
            if crash is not None:
                raise crash
    assert closed == [crash is not None]


def test_a_tracker_that_cannot_start_or_is_not_installed_is_named(tmp_path, monkeypatch):
    settings = config(tmp_path, use_wandb=True)
    monkeypatch.setattr("r3train.observe.sinks.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--use-wandb: wandb is not installed: pip install wandb"):
        check_trackers(settings)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match="--use-wandb: cannot start: "):
        open_sinks(settings, tmp_path, None)


def test_a_sample_holds_label_and_metadata_however_large_or_odd():
    label, metadata = {"inputs": ["x" * 10_000]}, {"day": Path("a")}
    made = sample("text", label=label, metadata=metadata)
    rows = samples_to_report([TrainSample(made, 1.0, np.zeros(6, np.float32))])
    assert rows[0]["metadata"] == {"day": "a"} and len(rows[0]["label"]) < 2100
    json.dumps(rows)


def of_session(session: int, *conversation: str):
    made = replace(sample("the last answer"), trajectory_id=session, conversation=conversation)
    return TrainSample(made, float(session), np.zeros(6, np.float32))


def test_the_samples_of_an_agent_show_all_conversations_of_their_session():
    first = [of_session(0, "user: add", "assistant: calls add {}", "tool: 3", "assistant: three")]
    second = [of_session(1, f"user: {number}", "assistant: four") for number in range(6)]
    worst, _, best = samples_to_report([second[0], first[0], *second[1:]])
    assert worst["conversations"] == [first[0].sample.conversation] and worst["left_out"] == 0
    shown = [conversation[0] for conversation in best["conversations"]]
    assert shown == ["user: 2", "user: 3", "user: 4", "user: 5"] and best["left_out"] == 2
    assert "conversations" not in samples_to_report([of_session(0)])[0]


def test_a_tracker_shows_the_conversations_in_the_place_of_the_last_answer(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = samples_to_report([of_session(1, "user: add", "tool: 3"), of_session(1, "user: or")])
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write_samples(3, rows)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "user: add<br>tool: 3<br><br>user: or" in text and "the last answer" not in text
