"""The files of a run that a report reads; what is damaged in them is left out and named in a notice.

A notice names file, line and key, what was got and what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from r3train.config.files import bounded_lines, open_regular, read_toml
from r3train.observe.metrics import EVAL_METRICS_FILE, METRICS_FILE, NOT_FINITE, SAMPLES_FILE

CONFIG_FILE = "config.toml"
# Far below the integers that a float, which is what a chart holds, cannot tell apart.
MAX_STEP = 1 << 40
_MAX_NOTICES = 20  # of one file


class Sample(BaseModel):
    """One line of samples.jsonl, as far as a report shows it."""

    model_config = ConfigDict(strict=True, frozen=True)

    kind: Literal["worst", "slowest", "best"]
    step: int = Field(ge=0, le=MAX_STEP)
    reward: FiniteFloat
    response_len: int = Field(ge=0, le=MAX_STEP)
    text: str
    generation_s: FiniteFloat | None = None
    finish_reason: str = ""
    prompt: str = ""
    label: Any = None  # any JSON value


def read_steps(
    run_dir: Path, keys: Collection[str], notices: list[str], *, of_layers: str = ""
) -> list[dict[str, Any]]:
    """The metrics of every step, in order; of two lines for one step (a resumed run) the later.

    Values under ``keys`` are floats or None, and so are those of keys that begin with ``of_layers``.
    Raises ValueError where the file is missing, cannot be read, or has not one whole line of several.
    """
    damaged: list[str] = []
    steps: dict[int, dict[str, Any]] = {}
    for place, record in _objects(run_dir, METRICS_FILE, notices, damaged):
        step = record.get("step")
        if not _is_step(step):
            expected = f"expected an integer from 0 to {MAX_STEP}"
            damaged.append(f"{place}: step is {step!r:.60}, {expected}")
            continue
        layers = {key for key in record if of_layers and key.startswith(of_layers)}
        _make_numbers(record, keys & record.keys() | layers, place, damaged)
        steps[step] = record
    if damaged and not steps:
        raise ValueError(f"{run_dir}: not one step in {damaged[0]}")
    if not (run_dir / METRICS_FILE).exists():
        raise ValueError(f"{run_dir}: no {METRICS_FILE}: is it a run directory?")
    return [steps[step] for step in sorted(steps)]


def read_samples(run_dir: Path, notices: list[str]) -> Iterator[Sample]:
    """The samples in the order of the file; none where there is no file."""
    damaged: list[str] = []
    for place, record in _objects(run_dir, SAMPLES_FILE, notices, damaged):
        try:
            yield Sample.model_validate(record)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key, got = first["loc"][0], f"{record.get(first['loc'][0])!r:.60}"
            damaged.append(f"{place}: {key} is {got}: {first['msg']}")


def read_evaluations(run_dir: Path, notices: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The numbers of each evaluation set, by name: ``step`` (the version) and those of its keys.

    Of two lines for one version (a resumed run) the later counts; {} where there is no file.
    """
    damaged: list[str] = []
    sets: dict[str, dict[int, dict[str, Any]]] = {}
    for place, record in _objects(run_dir, EVAL_METRICS_FILE, notices, damaged):
        step, name = record.get("step"), record.get("name")
        if not _is_step(step) or not isinstance(name, str):
            damaged.append(f"{place}: expected a step and a name, got {str(record):.60}")
            continue
        start = f"eval/{name}/"
        _make_numbers(record, {k for k in record if k.startswith(start)}, place, damaged)
        numbers = {k.removeprefix(start): v for k, v in record.items() if k.startswith(start)}
        sets.setdefault(name, {})[step] = {"step": step, **numbers}
    return {name: [of[step] for step in sorted(of)] for name, of in sorted(sets.items())}


def read_uses_r3(run_dir: Path, notices: list[str]) -> bool | None:
    """The run's setting of routing replay; None where it is not known."""
    try:
        config = read_toml(run_dir / CONFIG_FILE)
        replay = config.get("replay", {})
        if not isinstance(replay, dict):
            raise ValueError(f"replay is {replay!r:.60}, expected a table")
        value = replay.get("use_rollout_routing_replay", False)
        if not isinstance(value, bool):
            key = "replay.use_rollout_routing_replay"
            raise ValueError(f"{key} is {value!r:.60}, expected true or false")
        return value
    except FileNotFoundError:
        pass
    except OSError as error:
        notices.append(f"{CONFIG_FILE}: cannot be read: {error.strerror}")
    except ValueError as error:
        notices.append(f"{CONFIG_FILE}: {error}")
    return None


def _objects(
    run_dir: Path, name: str, notices: list[str], damaged: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place in words; none where there is no file.

    The reader is the one that fits the writers: it takes NaN, and half a character in a text.  The first of
    ``damaged``, to which the caller adds, are notices at the end, with the number of the others.
    """
    try:
        with open_regular(run_dir / name) as file:
            for number, line in enumerate(bounded_lines(file, run_dir / name), start=1):
                place = f"{name} line {number}"
                if not line.endswith(b"\n"):
                    notices.append(f"{name} ends within a line: its writer was stopped")
                    break
                try:
                    value = json.loads(line.decode())
                except (ValueError, RecursionError) as error:
                    damaged.append(f"{place}: not JSON: {error}")
                    continue
                if isinstance(value, dict):
                    yield place, value
                else:
                    damaged.append(f"{place}: got a {type(value).__name__}, expected an object")
    except FileNotFoundError:
        return
    except OSError as error:
        damaged.append(f"{name}: cannot be read: {error.strerror}")
    notices += damaged[:_MAX_NOTICES]
    if (more := len(damaged) - _MAX_NOTICES) > 0:
        notices.append(f"{name}: {more} more")


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEP


def _make_numbers(
    record: dict[str, Any], keys: Collection[str], place: str, damaged: list[str]
) -> None:
    """Turn the values under ``keys`` into floats or None; what is no number is damage and goes."""
    for key in sorted(keys):
        value = record[key]
        try:
            if value is not None:
                record[key] = NOT_FINITE[value] if isinstance(value, str) else float(value)
        except (TypeError, KeyError, OverflowError):
            del record[key]
            damaged.append(f"{place}: {key} is {value!r:.60}, expected a number")
