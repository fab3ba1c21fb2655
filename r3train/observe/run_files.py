"""The files of a run that a report reads; what is damaged in them is left out and named in a notice.

A notice names file, line and key, what was got and what was expected.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

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
    path, damaged = run_dir / METRICS_FILE, []
    steps: dict[int, dict[str, Any]] = {}
    try:
        for place, record in _objects(path, notices, damaged):
            step = record.get("step")
            if type(step) is not int or not 0 <= step <= MAX_STEP:
                expected = f"expected an integer from 0 to {MAX_STEP}"
                damaged.append(f"{place}: step is {step!r:.60}, {expected}")
                continue
            layers = {key for key in record if of_layers and key.startswith(of_layers)}
            for key in sorted(keys & record.keys() | layers):
                try:
                    record[key] = _number(record[key])
                except (TypeError, KeyError, OverflowError):
                    got = f"{record.pop(key)!r:.60}"
                    damaged.append(f"{place}: {key} is {got}, expected a number")
            steps[step] = record
    except FileNotFoundError:
        raise ValueError(f"{run_dir}: no {METRICS_FILE}: is it a run directory?") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if damaged and not steps:
        raise ValueError(f"{run_dir}: not one step in {damaged[0]}")
    notices += _first(path, damaged)
    return [steps[step] for step in sorted(steps)]


def read_samples(run_dir: Path, notices: list[str]) -> Iterator[Sample]:
    """The samples in the order of the file; none where there is no file."""
    path, damaged = run_dir / SAMPLES_FILE, []
    try:
        for place, record in _objects(path, notices, damaged):
            try:
                yield Sample.model_validate(record)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                key, got = first["loc"][0], f"{record.get(first['loc'][0])!r:.60}"
                damaged.append(f"{place}: {key} is {got}: {first['msg']}")
    except FileNotFoundError:
        return
    except OSError as error:
        notices.append(f"{path.name}: cannot be read: {error.strerror}")
    notices += _first(path, damaged)


def read_evaluations(run_dir: Path, notices: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The numbers of each evaluation set, by name: ``step`` (the version) and those of its keys.

    Of two lines for one version (a resumed run) the later counts; {} where there is no file.
    """
    path, damaged = run_dir / EVAL_METRICS_FILE, []
    sets: dict[str, dict[int, dict[str, Any]]] = {}
    try:
        for place, record in _objects(path, notices, damaged):
            step, name = record.get("step"), record.get("name")
            if type(step) is not int or not 0 <= step <= MAX_STEP or not isinstance(name, str):
                damaged.append(f"{place}: expected a step and a name, got {str(record):.60}")
                continue
            numbers, start = {}, f"eval/{name}/"
            for key in sorted(k for k in record if k.startswith(start)):
                try:
                    numbers[key.removeprefix(start)] = _number(record[key])
                except (TypeError, KeyError, OverflowError):
                    damaged.append(f"{place}: {key} is {record[key]!r:.60}, expected a number")
            sets.setdefault(name, {})[step] = {"step": step, **numbers}
    except FileNotFoundError:
        return {}
    except OSError as error:
        notices.append(f"{EVAL_METRICS_FILE}: cannot be read: {error.strerror}")
    notices += _first(path, damaged)
    return {name: [of[step] for step in sorted(of)] for name, of in sorted(sets.items())}


def read_uses_r3(run_dir: Path, notices: list[str]) -> bool | None:
    """The run's setting of routing replay; None where it is not known."""
    try:
        config = tomllib.loads((run_dir / CONFIG_FILE).read_bytes().decode())
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
    except (ValueError, RecursionError) as error:
        notices.append(f"{CONFIG_FILE}: {error}")
    return None


def _objects(
    path: Path, notices: list[str], damaged: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place in words.

    The reader is the one that fits the writers: it takes NaN, and half a character in a text.
    Raises OSError where the file is missing or cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path.name} line {number}"
            if not line.endswith(b"\n"):
                notices.append(f"{path.name} ends within a line: its writer was stopped")
                return
            try:
                value = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                damaged.append(f"{place}: not JSON: {error}")
                continue
            if isinstance(value, dict):
                yield place, value
            else:
                damaged.append(f"{place}: got a {type(value).__name__}, expected an object")


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return NOT_FINITE[value]
    return None if value is None else float(value)


def _first(path: Path, damaged: list[str]) -> list[str]:
    """The first notices of a file, and how many more there are."""
    more = len(damaged) - _MAX_NOTICES
    return damaged[:_MAX_NOTICES] + [f"{path.name}: {more} more"] * (more > 0)
