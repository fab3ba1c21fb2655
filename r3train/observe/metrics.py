"""The numbers of a run, one JSON object per step, for people, plots and scripts.

``metric_table`` has every key with its unit and meaning, as docs/reference/metrics.md shows them.  An evaluation is of a
weight version and not of a step, so it has a file of its own, ``eval/metrics.jsonl``, with one line for each set
and version (``step`` is the version).  Its rows are in ``eval/VERSION-NAME.jsonl``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from r3train.config.files import naming
from r3train.data.json_lines import append_lines, cut_truncated_line, read_lines
from r3train.observe.sinks import TENSORBOARD_DIR, Sink, TensorBoardSink

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVAL_DIR = "eval"
EVAL_METRICS_FILE = f"{EVAL_DIR}/{METRICS_FILE}"

# what a float holds
_MOST_STEP, _MOST_BITS = 1 << 40, 512
# JSON has no such numbers, and a reader that meets a bare NaN may refuse the whole file
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsWriter:
    """Append a run's metrics to ``run_dir/metrics.jsonl``, to TensorBoard files and other trackers.

    A line reaches the file in one write, so a crash leaves whole lines and at most one truncated
    last line; opening such a file again (a resumed run) cuts that line off first.  A tracker that
    fails is told of once and left out from then on: it does not end the run.
    Use as a context manager, or call ``close``.
    """

    def __init__(self, run_dir: str | Path, tensorboard: bool, sinks: Sequence[Sink] = ()) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        cut_truncated_line(self.path)
        self.path.open("ab").close()  # there from the first moment on, or refused in it
        self._sinks: list[Sink] = list(sinks)
        if tensorboard:
            try:
                self._sinks.append(TensorBoardSink(run_dir / TENSORBOARD_DIR))
            except ImportError as error:
                logger.warning("no TensorBoard files: %s (pip install tensorboard)", error)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step: ``{"step": step, "time": seconds since 1970, **metrics}``.

        Values may be numbers, booleans, strings, None, and numpy or torch scalars; a number that is
        not finite becomes the string "nan", "inf" or "-inf".  Trackers get the numbers only.
        Raises ValueError for any other value and for the keys "step" and "time", and OSError, which names
        the file, where the whole line cannot be written (a full disk): none of it is in the file then.
        """
        reserved = {"step", "time"} & metrics.keys()
        if reserved:
            raise ValueError(f"metrics hold the key {sorted(reserved)[0]!r}, which the writer sets")
        plain = {key: _plain(key, value) for key, value in metrics.items()}
        line = _line(step, plain)
        append_lines(self.path, [line])
        self._draw(int(step), plain)

    def write_evaluation(
        self,
        version: int,
        name: str,
        settings: str,
        rows: Iterable[Mapping[str, Any]],
        metrics: Mapping[str, Any],
    ) -> None:
        """Write the evaluation of one set: its rows in one step, and then its line of metrics.

        ``settings`` is a fingerprint of what was asked, kept for ``evaluated``.
        """
        path = eval_rows_path(self.path.parent, version, name)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
        os.replace(temporary, path)
        plain = {f"eval/{name}/{key}": _plain(key, value) for key, value in metrics.items()}
        line = _line(version, {"name": name, "settings": settings, **plain})
        append_lines(self.path.parent / EVAL_METRICS_FILE, [line])
        self._draw(int(version), plain)

    def evaluated(self, version: int, name: str, settings: str) -> bool:
        """True if this run directory holds the evaluation of a set by this version and settings."""
        if not eval_rows_path(self.path.parent, version, name).is_file():
            return False
        key = (version, name, settings)
        lines = read_evaluations(self.path.parent)
        return any((x["step"], x["name"], x.get("settings")) == key for x in lines)

    def _draw(self, step: int, plain: Mapping[str, Any]) -> None:
        found = {k: float(v) for k, v in plain.items() if isinstance(v, (bool, int, float))}
        self._each(lambda sink: sink.write(step, found))

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - of a tracker's package, or of its network
                name = type(sink).__name__.removesuffix("Sink")
                logger.warning("%s gets nothing more of this run: %s", name, error)
                self._sinks.remove(sink)

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append a few samples of a step, JSON-able facts and text, to ``run_dir/samples.jsonl``."""
        lines = [{"step": int(step), **sample} for sample in samples]
        append_lines(self.path.with_name(SAMPLES_FILE), lines)
        self._each(lambda sink: sink.write_samples(int(step), lines))

    def close(self, failed: bool = False) -> None:
        """Tell the trackers whether the run failed, and close them."""
        self._each(lambda sink: sink.close(failed))
        self._sinks.clear()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close(failed=kind is not None)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics file, or the one in a run directory, in order of step.

    A truncated last line is left out; of two lines for one step (a resumed run) the later counts.
    "nan", "inf" and "-inf" come back as floats.
    Raises ValueError, with file and line, for any other line that is not a JSON object with a step,
    and FileNotFoundError where there is no file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    steps = {}
    for number, record in enumerate(read_lines(path), start=1):
        record = _numbers_of(record, f"{path}:{number}")
        steps[record["step"]] = record
    return [steps[step] for step in sorted(steps)]


def eval_rows_path(run_dir: Path, version: int, name: str) -> Path:
    """The file of the rows of one evaluation."""
    return run_dir / EVAL_DIR / f"{version:07d}-{name}.jsonl"


def read_evaluations(run_dir: str | Path) -> list[dict[str, Any]]:
    """Read the lines of ``eval/metrics.jsonl`` in order of version and name; [] without the file.

    Of two lines for one set and version (a resumed run) the later counts.  Raises ValueError, with file
    and line, for a line without a version and a name.
    """
    path = Path(run_dir) / EVAL_METRICS_FILE
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for number, record in enumerate(read_lines(path) if path.is_file() else [], start=1):
        place, name = f"{path}:{number}", record.get("name")
        if not isinstance(name, str):
            raise ValueError(f"{place}: got {str(record)[:80]}, expected a name")
        record = _numbers_of(record, place) | {"name": name}
        found[record["step"], name] = record
    return [found[key] for key in sorted(found)]


def numbers(records: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """The steps at which ``key`` has a number, and the numbers; True is 1 and NaN is kept."""
    pairs = [(r["step"], float(r[key])) for r in records if isinstance(r.get(key), Real)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def summarise(records: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum a run up for its last words: steps, reward_first, reward_last, tokens, r3, failed_steps.

    reward_first and reward_last are means over the first and the last tenth of the steps (at least
    one); None without rewards.  r3 is "passed" when every step says so, "failed" when one says
    otherwise, "incomplete" when some steps are silent, and "no evidence" when all are.  Steps that
    --r3-check-interval leaves out are not asked.
    """
    _, rewards = numbers(records, "rollout/reward_mean")
    tenth = max(1, len(rewards) // 10)
    verdicts = [r.get("r3/passed") for r in records if not r.get("r3/unchecked")]
    failed = [r["step"] for r in records if r.get("r3/passed") not in (None, True, 1)]
    if failed:
        r3 = "failed"
    elif all(verdict is None for verdict in verdicts):
        r3 = "no evidence"
    else:
        r3 = "incomplete" if None in verdicts else "passed"
    return {
        "steps": len(records),
        "reward_first": sum(rewards[:tenth]) / tenth if rewards else None,
        "reward_last": sum(rewards[-tenth:]) / tenth if rewards else None,
        "tokens": int(sum(v for v in numbers(records, "rollout/tokens")[1] if math.isfinite(v))),
        "r3": r3,
        "failed_steps": failed,
    }


def nothing_learned(records: Sequence[Mapping[str, Any]]) -> str:
    """The reason, in words, where no reward of a run taught anything; "" where one did."""
    _, taught = numbers(records, "rollout/taught_samples")
    if not taught or any(taught):
        return ""
    return (
        "no answer had an advantage in any step: the rewards of each prompt's answers were equal"
        " (rollout/reward_min, rollout/reward_max); see what the reward says of samples.jsonl"
    )


def cut_answers(records: Sequence[Mapping[str, Any]]) -> str:
    """The shares of answers that were cut, in words, where they rose to most of them; "" elsewhere."""
    _, shares = numbers(records, "rollout/truncated_share")
    tenth = max(1, len(shares) // 10)
    first, last = (sum(part) / tenth for part in (shares[:tenth], shares[-tenth:]))
    if last < 0.5 or first > last / 2:
        return ""
    return f"{first:.0%} -> {last:.0%}  first tenth -> last tenth (--rollout-max-response-len)"


class RolloutsWithoutAdvantage:
    """Counts the rollouts in a row in which no sample had an advantage."""

    SAID_AFTER = (3, 10, 30)

    def __init__(self) -> None:
        self._count = 0

    def warning(self, metrics: Mapping[str, Any]) -> str:
        """Count a rollout by its metrics; returns a line for people after 3, 10 and 30 in a row, else ""."""
        self._count = self._count + 1 if metrics.get("rollout/taught_samples") == 0 else 0
        if self._count not in self.SAID_AFTER:
            return ""
        rewards = [metrics.get(f"rollout/reward_{kind}") for kind in ("min", "max")]
        return (
            f"warning: no sample of the last {self._count} rollouts had an advantage, so their rewards teach"
            " nothing: those of a prompt's answers are equal (in the last from"
            f" {rewards[0]} to {rewards[1]}); see what the reward says of samples.jsonl"
        )


def steps_s(records: Iterable[Mapping[str, Any]], since: float = 0.0) -> float:
    """Seconds of all steps that ended after ``since`` (seconds since 1970)."""
    return sum(numbers([r for r in records if r.get("time", 0) >= since], "perf/step_s")[1])


def summarise_evaluations(run_dir: str | Path) -> dict[str, str]:
    """The first and the last mean reward of each evaluation set, as words for a run's last lines."""
    lines_by_set: dict[str, list[dict[str, Any]]] = {}
    for line in read_evaluations(run_dir):
        lines_by_set.setdefault(line["name"], []).append(line)
    words = {}
    for name, lines in lines_by_set.items():
        shown = lines if len(lines) == 1 else (lines[0], lines[-1])
        texts = (f"{eval_words(line, name)} (version {line['step']})" for line in shown)
        words[f"evaluation of {name}"] = " -> ".join(texts)
    return words


def eval_words(metrics: Mapping[str, Any], name: str) -> str:
    """The mean reward of an evaluation with its standard error, as a person reads it."""
    mean = metrics[f"eval/{name}/mean"]
    error = metrics.get(f"eval/{name}/standard_error")
    return f"{mean:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _plain(key: str, value: Any) -> bool | int | float | str | None:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"metric {key!r} is a {type(value).__name__}, expected a scalar or a string")


def _line(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a metrics file; numbers that are not finite have their names in it."""
    line = {"step": int(step), "time": round(time.time(), 3), **values}
    names = {k: str(v) for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)}
    return line | names


def _numbers_of(record: dict[str, Any], place: str) -> dict[str, Any]:
    """A line's object with names of numbers as these numbers; raises ValueError for one without a step."""
    if type(step := record.get("step")) is not int or not 0 <= step < _MOST_STEP:
        expected = f"expected an integer from 0 to {_MOST_STEP}"
        raise ValueError(f"{place}: step is {step!r:.40}, {expected}")
    for key, value in record.items():
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ValueError(
                f"{place}: {key} is {value!r:.20}..., expected {_MOST_BITS} bits at most"
            )
    return {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in record.items()}
