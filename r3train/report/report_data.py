"""One run as a report shows it: its metrics, its evidence step by step, its notable samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from r3train.algo.gap_budget import PARTS
from r3train.config.files import read_toml
from r3train.config.sources import SET_NAME
from r3train.data.json_lines import read_lines
from r3train.observe.metrics import (
    eval_rows_path,
    numbers,
    read_evaluations,
    read_metrics,
    SAMPLES_FILE,
)
from r3train.observe.starts import read_starts, Start
from r3train.audit.audit_run import audit_run
from r3train.audit.findings import Audit, AuditedStep, ranges
from r3train.proof.verdicts import FAILED, NO_EVIDENCE, PASSED

STEP_S, ROLLOUT_S, R3_PASSED = "perf/step_s", "perf/rollout_s", "r3/passed"
REWARD, TOKENS = "rollout/reward_mean", "rollout/tokens"
_CONFIG_FILE = "config.toml"
DRIFT_OF_LAYER = "r3/drift_left_layer_"  # and the layer's number
# Parts of a step's wall time in the order of the loop: name, metric, the part that it lies within.
TIMES = (
    ("waiting for rollout", "perf/rollout_wait_s", None),
    ("route exchange", "perf/route_exchange_s", "waiting for rollout"),
    ("log-probs", "perf/log_prob_s", "training"),
    ("training", "perf/train_s", None),
    ("evaluation", "perf/eval_wait_s", None),
    ("weight sync", "perf/publish_s", None),
    ("saving", "perf/save_s", None),
)
MAX_COLUMNS = 120
# drift below this share of the rows is pale
_LEAST_SHADE = 0.01
# Within these bounds a scale, a sum and a mean of a run's numbers stay numbers.
_SMALLEST, _LARGEST = 1e-300, 1e300
_T = TypeVar("_T")


@dataclass(frozen=True)
class HeatMap:
    """A share of the rows, by layer and step: [layers][columns].

    columns: the first and the last step of each.  chance: the share that chance would give, where that
    is the least that is shown.  most: the share of the darkest colour.
    """

    layers: list[int]
    columns: list[tuple[int, int]]
    values: list[list[float | None]]
    chance: float | None = None
    most: float = 1.0


@dataclass(frozen=True)
class StepCheck:
    """The verdict of the evidence on one step, and its counts over all passes and layers."""

    step: int
    verdict: str  # one of an Audit's
    counts: dict[str, int] = field(default_factory=dict)  # AuditedStep.counts; {}: no evidence

    def rows_share(self) -> float | None:
        """The share of real rows that were replayed as recorded."""
        kinds = ("rows_replayed", "rows_filled", "rows_native")
        rows = sum(self.counts.get(kind, 0) for kind in kinds)
        return self.counts["rows_replayed"] / rows if rows else None

    def calls_share(self) -> float | None:
        """Router calls that were made, as a share of those expected."""
        expected = self.counts.get("num_calls_expected")
        return self.counts["num_calls"] / expected if expected else None


class Sample(msgspec.Struct, frozen=True):
    """One line of samples.jsonl, or an answer of an evaluation, as far as a report shows it."""

    kind: Literal["worst", "slowest", "best"]
    step: int  # of an answer the weight version
    reward: float
    response_len: int
    text: str
    generation_s: float | None = None
    finish_reason: str = ""
    prompt: str = ""
    label: Any = None  # any JSON value


@dataclass
class RunCurves:
    """One run's metrics by step, as lines of charts."""

    name: str
    records: list[dict[str, Any]]

    def series(self, key: str, *, positive: bool = False) -> list[tuple[int, float]]:
        """Steps and numbers of a metric that can be drawn; ``positive`` for a logarithmic axis."""
        return [(s, v) for s, v in zip(*numbers(self.records, key)) if _drawable(v, positive)]

    def left_out(self, key: str, *, positive: bool = False) -> str:
        """The numbers that ``series`` leaves out, in words: "nan at steps 2, 4"; "" for none."""
        steps: dict[str, list[int]] = {}
        for step, value in zip(*numbers(self.records, key)):
            if not _drawable(value, positive):
                steps.setdefault(f"{value:.3g}", []).append(step)
        words = [f"{v} at step{'s' * (len(of) > 1)} {ranges(of)}" for v, of in steps.items()]
        return "; ".join(words[:3]) + f"; and {len(words) - 3} more" * (len(words) > 3)


@dataclass
class RunReport(RunCurves):
    """One run's metrics, evidence and samples; parts that are missing are empty."""

    settings: dict[str, Any] | None  # by "section.name"; None: not known
    starts: list[Start]
    audit: Audit
    samples: list[Sample]
    evaluations: dict[str, list[dict[str, Any]]]  # numbers, by set
    answers: dict[str, list[Sample]]  # of the last evaluation, by set

    @property
    def uses_r3(self) -> bool | None:
        """The run's setting of routing replay; None where it is not known."""
        value = (self.settings or {}).get("replay.use_rollout_routing_replay")
        return value if isinstance(value, bool) else None

    @cached_property
    def heat(self) -> HeatMap | None:
        """The agreement of the rollouts' first forwards: rows in which the trainer's own choice is the replayed one.

        None without evidence.
        """
        steps = self.audit.steps
        layers = sorted({layer for step in steps for layer in step.layers})
        if not layers:
            return None
        # Chance of 1 or more leaves no scale up to all rows.
        chances = [step.agreement.get("chance_equal", -1.0) for step in steps]
        chance = next((share for share in reversed(chances) if 0 <= share < 1), None)
        columns = columns_of(sorted(steps, key=lambda step: step.rollout_id))
        values = [[_share(column, layer) for column in columns] for layer in layers]
        return HeatMap(
            layers, [(c[0].rollout_id, c[-1].rollout_id) for c in columns], values, chance
        )

    @cached_property
    def drift(self) -> HeatMap | None:
        """The drift that --log-route-drift wrote: rows whose live choice left the replayed experts.

        Means of a column's steps; None without it.
        """
        numbers = {key.removeprefix(DRIFT_OF_LAYER) for record in self.records for key in record}
        layers = sorted(int(n) for n in numbers if n.isdecimal())
        found = {layer: dict(self.series(f"{DRIFT_OF_LAYER}{layer}")) for layer in layers}
        columns = columns_of(sorted({step for of in found.values() for step in of}))
        if not columns:
            return None
        values = [[_mean_of(found[layer], column) for column in columns] for layer in layers]
        most = max(value for row in values for value in row if value is not None)
        spans = [(column[0], column[-1]) for column in columns]
        return HeatMap(layers, spans, values, most=max(most, _LEAST_SHADE))

    @cached_property
    def checks(self) -> list[StepCheck]:
        """A verdict for every step that was trained and is to be checked; [] where no check was on.

        A step that the run's metrics call failed has not passed, whatever is left of its records.
        """
        failed = {record["step"] for record in self.records if record.get(R3_PASSED) == 0}
        checks = {}
        for step in self.audit.steps:
            passed = step.passed and step.rollout_id not in failed
            verdict = PASSED if passed else FAILED
            checks[step.rollout_id] = StepCheck(step.rollout_id, verdict, step.counts)
        if checks or any(record.get(R3_PASSED) is not None for record in self.records):
            for step in (r["step"] for r in self.records if not r.get("r3/unchecked")):
                checks.setdefault(step, StepCheck(step, FAILED if step in failed else NO_EVIDENCE))
        return [checks[step] for step in sorted(checks)]

    def evaluated(self, name: str, key: str) -> list[tuple[int, float]]:
        """Weight versions and a number of an evaluation set; those that can be drawn."""
        lines = self.evaluations.get(name, [])
        return [(v, n) for v, n in zip(*numbers(lines, key)) if _drawable(n, positive=False)]

    def mean(self, key: str, *, last_tenth: bool = False) -> float | None:
        """The mean over the steps, or over the last tenth of them; None without a number."""
        values = [value for _, value in self.series(key)]
        if last_tenth:
            values = values[-max(1, len(values) // 10) :]
        return sum(values) / len(values) if values else None

    def total(self, key: str) -> float:
        """The sum over the steps; 0 without a number."""
        return sum(value for _, value in self.series(key))

    def until(self, key: str, scale: float = 1.0) -> list[tuple[int, float]]:
        """Each step with the sum of all up to it, times ``scale``; [] for a run without numbers."""
        values = dict(self.series(key))
        sums = accumulate(scale * values.get(record["step"], 0.0) for record in self.records)
        return list(zip((r["step"] for r in self.records), sums)) if any(values.values()) else []

    def times(self) -> dict[str, float]:
        """Seconds of the whole run by name, in the order of ``TIMES``, then the unnamed ones."""
        sums = {name: self.total(key) for name, key, _ in TIMES}
        for name, _, within in TIMES:
            if within:
                sums[within] = max(0.0, sums[within] - sums[name])
        total = self.total(STEP_S)
        sums["other"] = max(0.0, total - sum(sums.values()))
        return {name: value for name, value in sums.items() if value > 0}

    def rollout(self) -> dict[str, float]:
        """Seconds with a request in flight, and the rest of the steps; {} where not recorded.

        Rollout runs next to training, so it is no part of ``times``.
        """
        seconds = {step: value for step, value in self.series(ROLLOUT_S) if value >= 0}
        if not seconds:
            return {}
        busy = sum(seconds.values())
        total = sum(value for step, value in self.series(STEP_S) if step in seconds)
        return {"rollout": busy, "idle": max(0.0, total - busy)}


def budget_of(run: RunCurves, uses_r3: bool | None = None) -> dict[str, dict[int, float]]:
    """The k3 of each part of a run's log-prob gap, by step; of parts with a number.

    With R3, which takes it out of the gap, ``routing`` is left out.
    """
    if isinstance(run, RunReport):
        uses_r3 = run.uses_r3
    found = {part: dict(run.series(f"gap/{part}_k3")) for part in PARTS}
    return {
        part: of for part, of in found.items() if of and (part != "routing" or uses_r3 is False)
    }


def load_run(path: Path, name: str) -> RunReport:
    """Read a run directory.

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
    evaluations = _evaluations(path)
    return RunReport(
        name,
        records,
        settings=settings,
        starts=read_starts(path),
        audit=audit_run(path, keep_steps=True),
        samples=_to_report(_read_samples(path / SAMPLES_FILE)),
        evaluations=evaluations,
        answers={of: _answers(path, of, lines[-1]["step"]) for of, lines in evaluations.items()},
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


def _read_samples(
    path: Path, as_sample: Callable[[dict[str, Any]], Mapping[str, Any]] = dict
) -> list[Sample]:
    """The samples of a file's lines; ``as_sample`` gives a line the keys of a sample."""
    samples = []
    for number, record in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            samples.append(msgspec.convert(as_sample(record), Sample))
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return samples


def _answers(run_dir: Path, name: str, version: int) -> list[Sample]:
    """The lowest and the highest rewards of an evaluation of ``version``."""
    if not re.match(SET_NAME, name):  # of a stranger's file, it may lead out of the directory
        return []

    def as_sample(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "kind": "worst", "step": version, "text": row.get("answer")}

    lowest = _read_samples(eval_rows_path(run_dir, version, name), as_sample)
    return _to_report([*lowest, *(msgspec.structs.replace(s, kind="best") for s in lowest)])


def _evaluations(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The numbers of each evaluation set, by name: ``step`` (the version) and those of its keys."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for record in read_evaluations(run_dir):
        start = f"eval/{record['name']}/"
        of_set = {k.removeprefix(start): v for k, v in record.items() if k.startswith(start)}
        sets.setdefault(record["name"], []).append({"step": record["step"], **of_set})
    return dict(sorted(sets.items()))


def columns_of(steps: Sequence[_T]) -> list[Sequence[_T]]:
    """Steps in order as at most 120 columns, each of as many but the last."""
    width = max(1, -(-len(steps) // MAX_COLUMNS))
    return [steps[i : i + width] for i in range(0, len(steps), width)]


def _drawable(value: float, positive: bool) -> bool:
    size = value if positive else abs(value)
    return _SMALLEST <= size <= _LARGEST or (value == 0 and not positive)


def _mean_of(numbers: dict[int, float], steps: Sequence[int]) -> float | None:
    values = [numbers[step] for step in steps if step in numbers]
    return sum(values) / len(values) if values else None


def _share(steps: Sequence[AuditedStep], layer: int) -> float | None:
    counts = [step.layers.get(layer, (0, 0)) for step in steps]
    rows = sum(replayed for _, replayed in counts)
    return sum(equal for equal, _ in counts) / rows if rows else None


def _to_report(samples: Iterable[Sample]) -> list[Sample]:
    """The three worst, slowest and best of the run; of equals the latest."""

    def rank(s: Sample) -> tuple[float, int]:
        value = (s.generation_s or 0.0) if s.kind == "slowest" else s.reward
        return (-value if s.kind == "worst" else value), s.step

    most: dict[str, list[Sample]] = {"worst": [], "slowest": [], "best": []}
    for sample in samples:
        most[sample.kind] = sorted([*most[sample.kind], sample], key=rank, reverse=True)[:3]
    return [sample for kind in most.values() for sample in kind]
