"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow.

Packages are imported when a tracker is used; W&B and MLflow are extras.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from r3train.config.files import read_regular
from r3train.config.run import RunConfig
from r3train.config.tracker_settings import TrackersSection
from r3train.observe.prometheus import PrometheusSink

logger = logging.getLogger(__name__)

TENSORBOARD_DIR = "tensorboard"
# name -> the tracker's own id of the run, for a later part of it
RUN_IDS_FILE = "trackers.json"
_STARTED = "started"  # tells a step from itself in the start before, which a resume trains again
_MAX_IDS_BYTES = 1 << 16
_MLFLOW_BATCH, _MLFLOW_PARAM_LEN = 100, 500
_MLFLOW_NOTES = "mlflow.note.content"  # what its pages show as the description
_COLUMNS = ("kind", "prompt_id", "prompt", "label", "text", "reward")


class TensorBoardSink:
    """TensorBoard files in a directory; raises ImportError where tensorboard is missing."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(log_dir=str(directory))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write scalars."""
        for key, value in numbers.items():
            self._board.add_scalar(key, value, global_step=step)
        self._board.flush()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write a table as text."""
        rows = "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in _rows(samples))
        head = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}\n"
        self._board.add_text("samples", head + rows, global_step=step)

    def close(self, failed: bool) -> None:
        """Close the files."""
        self._board.close()


class WandbSink:
    """A W&B run, a new one or with ``run_id`` the one that it names."""

    def __init__(self, config: RunConfig, run_dir: Path, run_id: str | None) -> None:
        import wandb

        trackers = config.trackers
        self._wandb = wandb
        self._run = wandb.init(
            project=trackers.wandb_project,
            group=trackers.wandb_group,
            entity=trackers.wandb_team,
            mode=trackers.wandb_mode,
            name=config.run.run_name,
            tags=trackers.tracker_tags,
            notes=trackers.tracker_notes,
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
            id=run_id,
            resume="allow",
            # the terminal and the logs are ours
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run_id, self._started = self._run.id, time.time()
        # a resumed run writes steps again that W&B's own counter would refuse
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers."""
        self._run.log({"step": step, _STARTED: self._started, **numbers})

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log a table."""
        rows = [list(row) for row in _rows(samples)]
        table = self._wandb.Table(columns=list(_COLUMNS), data=rows)
        self._run.log({"step": step, "samples": table})

    def close(self, failed: bool) -> None:
        """Send what is left; a run that failed is shown as one."""
        self._run.finish(exit_code=int(failed))


class MlflowSink:
    """An MLflow run, a new one or with ``run_id`` the one that it names."""

    def __init__(self, config: RunConfig, run_dir: Path, run_id: str | None) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        trackers, self._metric = config.trackers, Metric
        self._client = MlflowClient(trackers.mlflow_tracking_uri)
        if run_id is None:
            name = trackers.mlflow_experiment_name
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            tags = dict.fromkeys(trackers.tracker_tags, "")
            if trackers.tracker_notes is not None:
                tags[_MLFLOW_NOTES] = trackers.tracker_notes
            name = config.run.run_name
            run_id = self._client.create_run(experiment, tags=tags, run_name=name).info.run_id
            params = [
                Param(key, value[:_MLFLOW_PARAM_LEN]) for key, value in _flat(config) if value
            ]
            for start in range(0, len(params), _MLFLOW_BATCH):
                batch = params[start : start + _MLFLOW_BATCH]
                self._client.log_batch(run_id, params=batch)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id, self._started = run_id, time.time()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log finite numbers."""
        now = int(time.time() * 1000)
        metrics = [
            self._metric(key, value, now, step)
            for key, value in {_STARTED: self._started, **numbers}.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _MLFLOW_BATCH])

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log a table as a JSON artifact."""
        table = {"columns": _COLUMNS, "data": list(_rows(samples))}
        self._client.log_dict(self.run_id, table, f"samples/{step:06d}.json")

    def close(self, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


# Takes the numbers of a run, which may not be finite, and a few samples of a step; ``step`` is a rollout, or
# for eval/ keys a weight version.
Sink = TensorBoardSink | WandbSink | MlflowSink | PrometheusSink
_OPTIONAL = {"wandb": WandbSink, "mlflow": MlflowSink}


def check_trackers(config: RunConfig) -> None:
    """Raise ValueError for a tracker whose package is not installed."""
    for name in _tracker_names(config):
        if find_spec(name) is None:
            raise ValueError(
                f"--use-{name}: {name} is not installed: pip install"
                f" {'mlflow-skinny' if name == 'mlflow' else name}"
            )


def tracker_lacks(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield why a tracker would not start, and a remedy: a key is lacking, or its server does not answer in time."""
    for name, (reach, remedy) in _REACHED.items():
        if getattr(config.trackers, f"use_{name}") and find_spec(name) is not None:
            try:
                reach(config.trackers)
            except Exception as error:  # of the tracker's package
                yield f"--use-{name}: {' '.join(str(error).split())}", remedy


def _reach_wandb(trackers: TrackersSection) -> None:
    import wandb

    mode = trackers.wandb_mode or wandb.setup().settings.mode
    if mode == "online" and not wandb.login(prompt=False, verify=True):
        raise ValueError("there is no API key")


# its own are minutes
_MLFLOW_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def _reach_mlflow(trackers: TrackersSection) -> None:
    uri = trackers.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri.startswith("http"):
        from mlflow.tracking import MlflowClient

        ours = {name: v for name, v in _MLFLOW_LIMITS.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            MlflowClient(uri).search_experiments(max_results=1)
        finally:  # the run itself is patient
            for name in ours:
                del os.environ[name]


_REACHED = {
    "wandb": (_reach_wandb, "wandb login, or --wandb-mode offline"),
    "mlflow": (_reach_mlflow, "start its server, or fix --mlflow-tracking-uri"),
}


def open_sinks(config: RunConfig, run_dir: Path, resumed_from: Path | None) -> list[Sink]:
    """Open the trackers of a run; those of a resumed run go on with its runs.

    Their ids are kept in ``trackers.json``, in the run directory and in that of the checkpoints.
    ``resumed_from``: the checkpoint of the resume.  Raises ValueError naming the tracker that does not
    start.
    """
    ids = _run_ids(resumed_from, run_dir) if resumed_from is not None else {}
    sinks: list[Sink] = []
    for name in _tracker_names(config):
        try:
            sink = _OPTIONAL[name](config, run_dir, ids.get(name))
        except Exception as error:  # of the tracker's package: no key, no network
            for opened in sinks:
                opened.close(failed=True)
            raise ValueError(
                f"--use-{name}: cannot start: {type(error).__name__}: {error}"
            ) from error
        ids[name] = sink.run_id
        sinks.append(sink)
    if sinks:
        for directory in filter(None, (run_dir, config.checkpoint.save)):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / RUN_IDS_FILE).write_text(json.dumps(ids), encoding="utf-8")
    return sinks


def _tracker_names(config: RunConfig) -> list[str]:
    return [name for name in _OPTIONAL if getattr(config.trackers, f"use_{name}")]


def _run_ids(checkpoint: Path, run_dir: Path) -> dict[str, str]:
    """The ids of the run that wrote a checkpoint (SAVE/iter_NNNNNNN); empty if it had none."""
    for directory in (checkpoint.parent, checkpoint, run_dir):
        path = directory / RUN_IDS_FILE
        try:
            found = json.loads(read_regular(path, _MAX_IDS_BYTES).decode())
            return {name: str(found[name]) for name in _OPTIONAL if name in found}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s: cannot be read, trackers begin a new run: %s", path, error)
            return {}
    return {}


def _rows(samples: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for sample in samples:
        if talks := sample.get("conversations"):  # whole, in the place of the last answer
            sample = {**sample, "text": "\n\n".join(map("\n".join, talks))}
        values = (sample.get(column) for column in _COLUMNS)
        yield tuple(
            value if isinstance(value, (str, int, float)) else json.dumps(value, default=str)
            for value in values
        )


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _flat(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Each setting as (section.name, value as text)."""
    for section, table in config.model_dump(mode="json", exclude_none=True).items():
        for name, value in table.items():
            yield f"{section}.{name}", value if isinstance(value, str) else json.dumps(value)
