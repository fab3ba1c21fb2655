"""A run's files as a report needs them: what is whole is returned, what is not is left out and named.

A notice names file, line and key, what was got and what was expected; the page shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from r3train.proof.audit_lines import BrokenLines, odd
from r3train.observe.metrics import METRICS_FILE, SAMPLES_FILE
from r3train.observe.report_metrics import DRAWN
from r3train.observe.run_files import (
    CONFIG_FILE,
    MAX_STEP,
    metrics_lines,
    read_config,
    read_objects,
)

_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no such numbers: the writer writes them as text
_EXPECTED = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "an integer",
    "string_type": "text",
}


class Sample(BaseModel):
    """One line of samples.jsonl, of which a report shows the text."""

    model_config = ConfigDict(strict=True, frozen=True)

    kind: Literal["worst", "slowest", "best"]
    step: int = Field(ge=0, le=MAX_STEP)
    reward: FiniteFloat
    response_len: int = Field(ge=0, le=MAX_STEP)
    text: str
    generation_s: FiniteFloat | None = None
    finish_reason: str = ""
    prompt: str = ""


def read_steps(run_dir: Path, notices: list[str]) -> list[dict[str, Any]]:
    """The metrics of every step, in order; of two lines for one step (a resumed run) the later.

    Values under the keys that are drawn are numbers or None; "nan", "inf" and "-inf" are floats.
    Raises ValueError where the file is missing, cannot be read, or has not one whole line of several.
    """
    broken = BrokenLines()
    steps: dict[int, dict[str, Any]] = {}
    try:
        for number, record in metrics_lines(run_dir, broken, notices):
            for error in _undrawable(record):
                broken.add(METRICS_FILE, number, error)
            steps[record["step"]] = record
    except FileNotFoundError:
        raise ValueError(f"{run_dir}: no {METRICS_FILE}: is it a run directory?") from None
    except OSError as error:
        path = run_dir / METRICS_FILE
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    found = _words(broken)
    if found and not steps:
        raise ValueError(f"{run_dir}: not one step in {found[0]}")
    notices += found
    return [steps[step] for step in sorted(steps)]


def _undrawable(record: dict[str, Any]) -> Iterator[ValueError]:
    """Make the drawn values numbers; what is none is taken out, and told."""
    for key in sorted(DRAWN & record.keys()):
        value = record[key]
        if isinstance(value, str) and value in _NOT_FINITE:
            record[key] = float(value)
        elif value is not None:
            try:
                record[key] = float(value) if isinstance(value, (int, float)) else None
            except OverflowError:  # an integer beyond the largest float
                record[key] = None
            if record[key] is None:
                yield odd(key, value, "a number")


def read_samples(run_dir: Path, notices: list[str]) -> Iterator[Sample]:
    """The samples in the order of the file; none where there is no file."""
    path, broken = run_dir / SAMPLES_FILE, BrokenLines()
    try:
        for number, record in read_objects(path, broken, notices):
            try:
                yield Sample.model_validate(record)
            except ValidationError as error:
                broken.add(path.name, number, _first(error))
    except FileNotFoundError:
        pass
    except OSError as error:
        notices.append(f"{path.name}: cannot be read: {error.strerror}")
    notices += _words(broken)


def read_uses_r3(run_dir: Path, notices: list[str]) -> bool | None:
    """Whether the run's configuration has R3 on; None where that is not known."""
    config = read_config(run_dir, notices)
    if not config:
        return None
    replay = config.get("replay", {})
    if not isinstance(replay, dict):
        notices.append(f"{CONFIG_FILE}: {odd('replay', replay, 'a table')}")
        return None
    value = replay.get("use_rollout_routing_replay", False)
    if not isinstance(value, bool):
        name = "replay.use_rollout_routing_replay"
        notices.append(f"{CONFIG_FILE}: {odd(name, value, 'true or false')}")
        return None
    return value


def _first(error: ValidationError) -> str:
    """The first thing that is wrong with a sample."""
    found = error.errors(include_url=False)[0]
    key = str(found["loc"][0])
    if found["type"] == "missing":
        return f"{key} is missing"
    words = _EXPECTED.get(found["type"]) or found.get("ctx", {}).get("expected") or found["msg"]
    return str(odd(key, found["input"], words))


def _words(broken: BrokenLines) -> list[str]:
    out = []
    for name, texts in broken.first.items():
        out += texts
        if more := broken.more(name):
            out.append(f"{name}: {more} more")
    return out
