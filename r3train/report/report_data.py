"""One run as a report shows it: its metrics, its evidence step by step, its notable samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from r3train.algo.gap_budget import PARTS
from r3train.config.files import read_toml
from r3train.data.json_lines import read_lines
from r3train.observe.metrics import numbers, read_evaluations, read_metrics, SAMPLES_FILE
from r3train.observe.starts import read_starts, Start
from r3train.audit.audit_run import audit_run
from r3train.audit.findings import Audit, ranges
from r3train.proof.verdicts import FAILED, NO_EVIDENCE

_CONFIG_FILE = "config.toml"
# Within these bounds a scale, a sum and a mean of a run's numbers stay numbers.
_SMALLEST, _LARGEST = 1e-100, 1e100


class Sample(msgspec.Struct, frozen=True):
    """One line of samples.jsonl, as far as a report shows it."""

    kind: Literal["worst", "slowest", "best"]
    step: int
    reward: float
    response_len: int
    text: str
    generation_s: float | None = None
    finish_reason: str = ""
    prompt: str = ""
    label: Any = None  # any JSON value
    conversations: list[list[str]] = []  # of an agent's session
    left_out: int = 0  # those before


@dataclass
class RunCurves:
    """One run's metrics by step, and its evaluations by weight version."""

    name: str
    records: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    settings: dict[str, Any] | None  # by "section.name"; None: not known

    @property
    def uses_r3(self) -> bool | None:
        """The run's setting of routing replay; None where it is not known."""
        value = (self.settings or {}).get("replay.use_rollout_routing_replay")
        return value if isinstance(value, bool) else None

    def series(self, key: str, positive: bool = False) -> tuple[list[tuple[int, float]], str]:
        """Steps and numbers of a metric that can be drawn, and the others in words: "nan at steps 2, 4".

        positive: for a logarithmic axis.
        """
        points, left_out = [], {}
        for step, value in zip(*numbers(self._lines(key), key)):
            size = value if positive else abs(value)
            if _SMALLEST <= size <= _LARGEST or (value == 0 and not positive):
                points.append((step, value))
            else:
                left_out.setdefault(f"{value:.3g}", []).append(step)
        words = [f"{v} at {step_words(steps)}" for v, steps in left_out.items()]
        return points, "; ".join(words[:3]) + f"; and {len(words) - 3} more" * (len(words) > 3)

    def numbers(self, key: str) -> list[float]:
        """All numbers of a metric, NaN among them."""
        return numbers(self._lines(key), key)[1]

    def mean(self, key: str, last_tenth: bool = False) -> float | None:
        """The mean over the steps, or over the last tenth of them; None without a number."""
        values = [value for _, value in self.series(key)[0]]
        if last_tenth:
            values = values[-max(1, len(values) // 10) :]
        return sum(values) / len(values) if values else None

    def total(self, key: str) -> float:
        """The sum over the steps; 0 without a number."""
        return sum(value for _, value in self.series(key)[0])

    def _lines(self, key: str) -> list[dict[str, Any]]:
        return self.evaluations if key.startswith("eval/") else self.records


@dataclass
class RunReport(RunCurves):
    """One run's metrics, evidence and samples; parts that are missing are empty."""

    starts: list[Start]
    audit: Audit
    samples: list[Sample]

    def verdicts(self) -> dict[int, str]:
        """The verdict of the evidence by step that was trained and is to be checked; {} where no check was on.

        A step that the run's metrics call failed has not passed, whatever is left of its records.
        """
        failed = {record["step"] for record in self.records if record.get("r3/passed") == 0}
        found = {}
        for step in self.audit.steps:
            found[step.rollout_id] = FAILED if step.rollout_id in failed else step.verdict
        if found or any(record.get("r3/passed") is not None for record in self.records):
            for step in (r["step"] for r in self.records if not r.get("r3/unchecked")):
                found.setdefault(step, FAILED if step in failed else NO_EVIDENCE)
        return dict(sorted(found.items()))


def step_words(steps: Iterable[int]) -> str:
    """Steps for a reader: "step 3", "steps 3..7, 9"."""
    steps = list(steps)
    return f"step{'s' * (len(steps) != 1)} {ranges(steps)}"


def budget_of(run: RunCurves) -> dict[str, dict[int, float]]:
    """The k3 of each part of a run's log-prob gap, by step; of parts with a number.

    With R3, which takes it out of the gap, ``routing`` is left out.
    """
    found = {part: dict(run.series(f"gap/{part}_k3")[0]) for part in PARTS}
    if run.uses_r3 is not False:
        del found["routing"]
    return {part: points for part, points in found.items() if points}


def load_curves(path: Path, name: str) -> RunCurves:
    """Read the metrics and settings of a run directory.

    Raises ValueError, with file and line, for what cannot be read but a last line that a writer is at.
    """
    try:
        records = read_metrics(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no metrics.jsonl: is it a run directory?") from None
    try:
        settings = read_settings(path)
    except FileNotFoundError:
        settings = None
    return RunCurves(name, records, read_evaluations(path), settings)


def load_run(path: Path, name: str) -> RunReport:
    """Read a run directory; raises ValueError as ``load_curves`` does."""
    return RunReport(
        **vars(load_curves(path, name)),
        starts=read_starts(path),
        audit=audit_run(path, keep_steps=True),
        samples=_notable(_read_samples(path / SAMPLES_FILE)),
    )


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The settings of a run, by "section.name"; raises FileNotFoundError without config.toml, and ValueError."""
    path = run_dir / _CONFIG_FILE
    try:
        return flat(read_toml(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def flat(table: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """The values of nested tables, by their names with dots between."""
    out: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            out |= flat(value, f"{start}{name}.")
        else:
            out[f"{start}{name}"] = value
    return out


def _read_samples(path: Path) -> list[Sample]:
    samples = []
    for number, record in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            samples.append(msgspec.convert(record, Sample))
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return samples


def _notable(samples: Iterable[Sample]) -> list[Sample]:
    """The three worst, slowest and best of the run; of equals the latest."""

    def rank(s: Sample) -> tuple[float, int]:
        value = (s.generation_s or 0.0) if s.kind == "slowest" else s.reward
        return (-value if s.kind == "worst" else value), s.step

    most: dict[str, list[Sample]] = {"worst": [], "slowest": [], "best": []}
    for sample in samples:
        most[sample.kind] = sorted([*most[sample.kind], sample], key=rank, reverse=True)[:3]
    return [sample for kind in most.values() for sample in kind]
